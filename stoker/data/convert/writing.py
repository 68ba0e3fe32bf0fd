"""`convert`: from an index to a folder in another format, complete or not there at all.

Everything is written into `<out>.partial`, which takes the name `out` at the end; one that a kill left behind carries a
mark and makes way for the next attempt. Pictures are copied byte for byte, neither decoded nor encoded anew: one whose
header is sound is taken, also where its pixels are damaged, which `stoker data check` finds. Not here: what a format
looks like (the writers beside this file).
"""

import errno
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict, get_args

import numpy as np
from numpy.typing import NDArray

from stoker.data.convert.coco import CocoWriter
from stoker.data.convert.item import CannotHold, Item, Writer, turned
from stoker.data.convert.tfrecord import TfRecordWriter
from stoker.data.convert.voc import VocWriter
from stoker.data.convert.yolo import YoloWriter
from stoker.data.formats.tables import PICTURE_ENDINGS
from stoker.data.images import source as places
from stoker.data.images.headers import Header, header_of
from stoker.data.index import Index
from stoker.errors import DataError, StorageError, UsageError
from stoker.storage.local_files import sync_folder

Target = Literal["coco", "voc", "yolo", "tfrecord"]
TARGETS: tuple[Target, ...] = get_args(Target)
MARK = ".unfinished-stoker-conversion"
ENDING = {
    "jpeg": ".jpg", "png": ".png", "webp": ".webp", "bmp": ".bmp", "tiff": ".tif", "gif": ".gif", "pnm": ".ppm",
    "jpeg 2000": ".jp2",
}  # fmt: skip
"""Of `headers.KINDS`: what a file gets whose own name has no ending by which readers know a picture."""
INVERSE = {6: 8, 8: 6}
"""Of EXIF's orientations, those that another one undoes; the others undo themselves."""
_UNUSABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufffe\uffff\\\\/]")
"""Characters that lists, XML or a path cannot hold in a file name."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What was written."""

    folder: Path
    pictures: dict[str, int]
    """By split."""
    boxes: int
    left_out: tuple[tuple[Path, str], ...]
    """Pictures that could not be read or that the format cannot hold, and why."""
    notes: tuple[str, ...]


def convert(
    index: Index,
    out: Path,
    to: Target,
    *,
    shards: int = 1,
    link: bool = False,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Converted:
    """Writes a data set anew.

    out: a folder that is empty or not there; shards: TFRecord files per split; link: pictures that are files become
    hard links, so that they take no room; progress: called with the pictures done and all of them.

    Raises UsageError where `out` or a choice cannot be, DataError where the format cannot hold the classes or no
    picture can be read, StorageError where the folder cannot be written.
    """
    if shards < 1 or (shards > 1 and to != "tfrecord"):
        raise UsageError(
            f"--shards is {shards}.",
            cause="only TFRecords are cut into files",
            choices=["1 or more, with --to tfrecord"],
        )
    if link and places.address_of(index.root) is not None:
        raise UsageError("--link is of local pictures.", place=index.source, fix="leave it out to copy the pictures")
    partial = _claim(out)
    try:
        converted = _write(index, partial, out, to, shards, link, progress)
        (partial / MARK).unlink()
        partial.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        raise StorageError(
            "The new data set cannot be written.",
            place=error.filename or partial,
            cause=error.strerror or str(error),
            fix="make room, or name a folder that can be written; --link takes no room for pictures",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return converted


def _claim(out: Path) -> Path:
    """The folder to write into, made anew."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{str(out)!r} is there already.", place=out.absolute(), fix="name a folder that is not there")
    partial = out.with_name(f"{out.name}.partial")
    if partial.exists() and not (partial / MARK).is_file():
        raise UsageError(
            f"{str(partial)!r} is in the way.",
            place=partial.absolute(),
            cause="the data set is written there first, and this was not left by a conversion",
            fix="move it away, or name another folder",
        )
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / MARK).touch()
    except OSError as error:
        fix = "name a place that can be written"
        raise StorageError("The folder cannot be made.", place=partial, cause=error.strerror, fix=fix) from error
    return partial


def _write(
    index: Index, partial: Path, out: Path, to: Target, shards: int, link: bool, progress: Callable[[int, int], None]
) -> Converted:
    writer = _writer(to, index, partial, shards)
    names = _Names()
    written: Counter[str] = Counter()
    left_out: list[tuple[Path, str]] = []
    turned_pictures = boxes = done = 0
    for split in index.splits:
        rows = index.rows(split)
        own_ids = len(np.unique(index.image_id[rows])) == len(rows)
        for number, row in enumerate(rows.tolist()):
            path = index.path(row)
            try:
                data, header = _read(index, row, path)
                shelf = "" if writer.one_folder else split
                item = Item(
                    split=split,
                    name=names.of(path.name, header.kind, shelf),
                    data=data,
                    kind=header.kind,
                    image_id=int(index.image_id[row]) if own_ids else number,
                    **_boxes(index, row, header, writer.frame),
                )
                writer.add(item)
            except CannotHold as error:
                left_out.append((path, str(error)))
            else:
                _place(writer.picture_path(item), item, path if link and index.span(row) is None else None)
                written[split] += 1
                boxes += len(item.boxes) if writer.has_crowd else int((~item.crowd).sum())
                turned_pictures += header.orientation != 1
            done += 1
            progress(done, len(index))
    if not written:
        place, why = left_out[0]
        raise DataError("No picture could be converted.", place=place, cause=why, fix="see `stoker data check`")
    writer.written_splits = list(written)
    writer.finish()
    notes = [f"{count:,} {what}" for what, count in writer.notes.items()]
    if turned_pictures:
        frames = {
            "said": "as the source has them",
            "upright": "to the upright pictures",
            "stored": "to the pixels as stored",
        }
        notes.append(f"{turned_pictures:,} pictures are turned by EXIF: their boxes refer {frames[writer.frame]}")
    return Converted(folder=out, pictures=dict(written), boxes=boxes, left_out=tuple(left_out), notes=tuple(notes))


def _writer(to: Target, index: Index, folder: Path, shards: int) -> Writer:
    counts = {split: len(index.rows(split)) for split in index.splits}
    match to:
        case "coco":
            return CocoWriter(folder, index.class_names, counts, index.category_ids)
        case "voc":
            return VocWriter(folder, index.class_names, counts)
        case "yolo":
            return YoloWriter(folder, index.class_names, counts)
        case "tfrecord":
            return TfRecordWriter(folder, index.class_names, counts, shards)


def _read(index: Index, row: int, path: Path) -> tuple[bytes, Header]:
    """The encoded picture and its header. Raises CannotHold where training would leave it out, too."""
    try:
        data = index.read(row)
        header = header_of(data, path)
    except OSError as error:
        raise CannotHold(error.strerror or str(error)) from error
    except DataError as error:
        raise CannotHold(error.cause or error.what) from error
    height, width = index.size[row].tolist()
    size = header.shown_for((height, width)).size
    if 0 not in (height, width) and (height, width) != size:
        raise CannotHold(f"the annotations say {width} × {height} pixels, the picture has {size[1]} × {size[0]}")
    return data, header


class _Boxes(TypedDict):
    size: tuple[int, int]
    boxes: NDArray[np.float32]
    labels: NDArray[np.int32]
    crowd: NDArray[np.bool_]
    area: NDArray[np.float64]


def _boxes(index: Index, row: int, header: Header, frame: str) -> _Boxes:
    """What the index has of a picture, turned where the format's readers turn it otherwise than the source does."""
    own = slice(int(index.offsets[row]), int(index.offsets[row + 1]))
    height, width = index.size[row].tolist()
    shown = header.shown_for((height, width))
    boxes = index.boxes[own]
    if frame == "upright" and shown.orientation != header.orientation:
        boxes, size = turned(boxes, header.stored, header.orientation), header.size
    elif frame == "stored" and shown.orientation != 1:
        boxes, size = turned(boxes, header.size, INVERSE.get(header.orientation, header.orientation)), header.stored
    else:
        size = shown.size
    return {
        "size": size,
        "boxes": boxes,
        "labels": index.labels[own],
        "crowd": index.crowd[own],
        "area": index.area[own],
    }


class _Names:
    """Gives pictures file names whose stems differ, whatever their case, from all others of their folder."""

    def __init__(self) -> None:
        self._taken: set[tuple[str, str]] = set()

    def of(self, name: str, kind: str, folder: str) -> str:
        """The source's name where it can be; an ending that no picture has gets that of its format behind it."""
        name = _UNUSABLE.sub("_", name).strip().lstrip(".") or "picture"
        stem, ending = os.path.splitext(name)
        if ending.lower() not in (*PICTURE_ENDINGS, ENDING[kind]):
            stem, ending = name, ENDING[kind]
        free, number = stem, 1
        while (folder, free.casefold()) in self._taken:
            number += 1
            free = f"{stem}-{number}"
        self._taken.add((folder, free.casefold()))
        return free + ending


def _place(target: Path | None, item: Item, source: Path | None) -> None:
    """Puts a picture where the writer wants it: a link to `source` where there is one, else its bytes."""
    if target is None:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source is None:
        target.write_bytes(item.data)
        return
    try:
        target.hardlink_to(source.resolve())
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise UsageError(
            "--link needs the pictures and the new folder on one file system.",
            place=target,
            cause=f"{source} is on another",
            fix="leave --link out to copy the pictures",
        ) from error
