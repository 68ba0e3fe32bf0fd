"""`convert`: from an index to a folder in another format, complete or not there at all.

Everything is written into `<out>.partial`, which takes the name `out` at the end; one that a kill left behind carries a
mark and makes way for the next attempt. Images are copied byte for byte, neither decoded nor encoded anew: one whose
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
from stoker.data.convert.item import AnnotatedImage, DatasetWriter, UnsupportedImage, apply_orientation
from stoker.data.convert.tfrecord import TfRecordWriter
from stoker.data.convert.voc import VocWriter
from stoker.data.convert.yolo import YoloWriter
from stoker.data.formats.tables import IMAGE_SUFFIXES
from stoker.data.images import source as places
from stoker.data.images.headers import Header, parse_header
from stoker.data.index import Index
from stoker.errors import DataError, StorageError, UsageError
from stoker.storage.local_files import fsync_folder

TargetFormat = Literal["coco", "voc", "yolo", "tfrecord"]
TARGET_FORMATS: tuple[TargetFormat, ...] = get_args(TargetFormat)
PARTIAL_MARKER = ".unfinished-stoker-conversion"
SUFFIX_BY_FORMAT = {
    "jpeg": ".jpg", "png": ".png", "webp": ".webp", "bmp": ".bmp", "tiff": ".tif", "gif": ".gif", "pnm": ".ppm",
    "jpeg 2000": ".jp2",
}  # fmt: skip
"""Of `headers.KINDS`: what a file gets whose own name has no ending by which readers know an image."""
INVERSE_ORIENTATION = {6: 8, 8: 6}
"""Of EXIF's orientations, those that another one undoes; the others undo themselves."""
_UNUSABLE_CHARS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufffe\uffff\\\\/]")
"""Characters that lists, XML or a path cannot hold in a file name."""


@dataclass(frozen=True, kw_only=True)
class ConversionResult:
    """What was written."""

    folder: Path
    num_images: dict[str, int]
    """By split."""
    num_boxes: int
    skipped: tuple[tuple[Path, str], ...]
    """Images that could not be read or that the format cannot hold, and why."""
    notes: tuple[str, ...]


def convert(
    index: Index,
    out: Path,
    to: TargetFormat,
    *,
    shards: int = 1,
    hardlink: bool = False,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> ConversionResult:
    """Writes a data set anew.

    out: a folder that is empty or not there; shards: TFRecord files per split; link: images that are files become
    hard links, so that they take no room; progress: called with the images done and all of them.

    Raises UsageError where `out` or a choice cannot be, DataError where the format cannot hold the classes or no
    image can be read, StorageError where the folder cannot be written.
    """
    if shards < 1 or (shards > 1 and to != "tfrecord"):
        raise UsageError(
            f"--shards is {shards}.",
            cause="only TFRecords are cut into files",
            choices=["1 or more, with --to tfrecord"],
        )
    if hardlink and places.path_to_uri(index.root) is not None:
        raise UsageError("--hardlink is of local images.", location=index.source, fix="leave it out to copy the images")
    partial = _create_partial_dir(out)
    try:
        result = _write(index, partial, out, to, shards, hardlink, progress)
        (partial / PARTIAL_MARKER).unlink()
        partial.rename(out)
        fsync_folder(out.parent)
    except OSError as error:
        raise StorageError(
            "The new data set cannot be written.",
            location=error.filename or partial,
            cause=error.strerror or str(error),
            fix="make room, or name a folder that can be written; --hardlink takes no room for images",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return result


def _create_partial_dir(out: Path) -> Path:
    """The folder to write into, made anew."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(
            f"{str(out)!r} is there already.", location=out.absolute(), fix="name a folder that is not there"
        )
    partial = out.with_name(f"{out.name}.partial")
    if partial.exists() and not (partial / PARTIAL_MARKER).is_file():
        raise UsageError(
            f"{str(partial)!r} is in the way.",
            location=partial.absolute(),
            cause="the data set is written there first, and this was not left by a conversion",
            fix="move it away, or name another folder",
        )
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / PARTIAL_MARKER).touch()
    except OSError as error:
        fix = "name a place that can be written"
        raise StorageError("The folder cannot be made.", location=partial, cause=error.strerror, fix=fix) from error
    return partial


def _write(
    index: Index,
    partial: Path,
    out: Path,
    to: TargetFormat,
    shards: int,
    hardlink: bool,
    progress: Callable[[int, int], None],
) -> ConversionResult:
    writer = _make_writer(to, index, partial, shards)
    unique_names = _UniqueNames()
    written: Counter[str] = Counter()
    skipped: list[tuple[Path, str]] = []
    num_rotated = num_boxes = num_done = 0
    for split in index.splits:
        image_indices = index.image_indices(split)
        has_unique_ids = len(np.unique(index.image_id[image_indices])) == len(image_indices)
        for position, image_index in enumerate(image_indices.tolist()):
            path = index.path(image_index)
            try:
                data, header = _read_image(index, image_index, path)
                name_scope = "" if writer.single_image_dir else split
                image = AnnotatedImage(
                    split=split,
                    name=unique_names.make_unique(path.name, header.image_format, name_scope),
                    data=data,
                    image_format=header.image_format,
                    image_id=int(index.image_id[image_index]) if has_unique_ids else position,
                    **_orient_boxes(index, image_index, header, writer.box_orientation),
                )
                writer.add(image)
            except UnsupportedImage as error:
                skipped.append((path, str(error)))
            else:
                _write_image(
                    writer.image_path(image),
                    image,
                    path if hardlink and index.byte_range(image_index) is None else None,
                )
                written[split] += 1
                num_boxes += len(image.boxes) if writer.supports_crowd else int((~image.crowd).sum())
                num_rotated += header.orientation != 1
            num_done += 1
            progress(num_done, len(index))
    if not written:
        skipped_path, reason = skipped[0]
        raise DataError(
            "No image could be converted.", location=skipped_path, cause=reason, fix="see `stoker data check`"
        )
    writer.written_splits = list(written)
    writer.finish()
    notes = [f"{count:,} {description}" for description, count in writer.notes.items()]
    if num_rotated:
        orientation_notes = {
            "said": "as the source has them",
            "upright": "to the upright images",
            "stored": "to the pixels as stored",
        }
        notes.append(
            f"{num_rotated:,} images are turned by EXIF: their boxes refer {orientation_notes[writer.box_orientation]}"
        )
    return ConversionResult(
        folder=out, num_images=dict(written), num_boxes=num_boxes, skipped=tuple(skipped), notes=tuple(notes)
    )


def _make_writer(to: TargetFormat, index: Index, folder: Path, shards: int) -> DatasetWriter:
    max_images = {split: len(index.image_indices(split)) for split in index.splits}
    match to:
        case "coco":
            return CocoWriter(folder, index.class_names, max_images, index.category_ids)
        case "voc":
            return VocWriter(folder, index.class_names, max_images)
        case "yolo":
            return YoloWriter(folder, index.class_names, max_images)
        case "tfrecord":
            return TfRecordWriter(folder, index.class_names, max_images, shards)


def _read_image(index: Index, image_index: int, path: Path) -> tuple[bytes, Header]:
    """The encoded image and its header. Raises CannotHold where training would leave it out, too."""
    try:
        data = index.read(image_index)
        header = parse_header(data, path)
    except OSError as error:
        raise UnsupportedImage(error.strerror or str(error)) from error
    except DataError as error:
        raise UnsupportedImage(error.cause or error.what) from error
    height, width = index.original_size[image_index].tolist()
    size = header.as_annotated((height, width)).size
    if 0 not in (height, width) and (height, width) != size:
        raise UnsupportedImage(f"the annotations say {width} × {height} pixels, the image has {size[1]} × {size[0]}")
    return data, header


class _BoxFields(TypedDict):
    size: tuple[int, int]
    boxes: NDArray[np.float32]
    labels: NDArray[np.int32]
    crowd: NDArray[np.bool_]
    area: NDArray[np.float64]


def _orient_boxes(index: Index, image_index: int, header: Header, box_orientation: str) -> _BoxFields:
    """What the index has of an image, turned where the format's readers turn it otherwise than the source does."""
    box_slice = slice(int(index.offsets[image_index]), int(index.offsets[image_index + 1]))
    height, width = index.original_size[image_index].tolist()
    oriented = header.as_annotated((height, width))
    boxes = index.boxes[box_slice]
    if box_orientation == "upright" and oriented.orientation != header.orientation:
        boxes, size = apply_orientation(boxes, header.stored_size, header.orientation), header.size
    elif box_orientation == "stored" and oriented.orientation != 1:
        boxes, size = (
            apply_orientation(boxes, header.size, INVERSE_ORIENTATION.get(header.orientation, header.orientation)),
            header.stored_size,
        )
    else:
        size = oriented.size
    return {
        "size": size,
        "boxes": boxes,
        "labels": index.labels[box_slice],
        "crowd": index.crowd[box_slice],
        "area": index.area[box_slice],
    }


class _UniqueNames:
    """Gives images file names whose stems differ, whatever their case, from all others of their folder."""

    def __init__(self) -> None:
        self._used: set[tuple[str, str]] = set()

    def make_unique(self, name: str, image_format: str, folder: str) -> str:
        """The source's name where it can be; an ending that no image has gets that of its format behind it."""
        name = _UNUSABLE_CHARS.sub("_", name).strip().lstrip(".") or "image"
        stem, suffix = os.path.splitext(name)
        if suffix.lower() not in (*IMAGE_SUFFIXES, SUFFIX_BY_FORMAT[image_format]):
            stem, suffix = name, SUFFIX_BY_FORMAT[image_format]
        candidate, number = stem, 1
        while (folder, candidate.casefold()) in self._used:
            number += 1
            candidate = f"{stem}-{number}"
        self._used.add((folder, candidate.casefold()))
        return candidate + suffix


def _write_image(target: Path | None, image: AnnotatedImage, source: Path | None) -> None:
    """Puts an image where the writer wants it: a link to `source` where there is one, else its bytes."""
    if target is None:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source is None:
        target.write_bytes(image.data)
        return
    try:
        target.hardlink_to(source.resolve())
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise UsageError(
            "--hardlink needs the images and the new folder on one file system.",
            location=target,
            cause=f"{source} is on another",
            fix="leave --hardlink out to copy the images",
        ) from error
