"""`convert`: writes an index as a folder in another format. The folder is complete or absent.

Everything is written into `<out>.partial`, which is renamed to `out` at the end. One that a killed conversion left has
a marker file and is deleted by the next. Images are copied byte for byte, without decoding: damaged pixels under a
valid header are not noticed here, but by `stoker data check`. Not here: the formats (`formats/`), shards
(`packing.py`). Formats that stoker does not read are converted by Datumaro: `convert_via_datumaro`.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from stoker.data.formats.finder import FORMATS
from stoker.data.formats.folders import IMAGE_SUFFIXES, SUFFIXES
from stoker.data.formats.tables import AnnotatedImage, Target, UnsupportedImage, apply_orientation
from stoker.data.images import source as image_source
from stoker.data.images.decode import INVERSE_ORIENTATION
from stoker.data.images.headers import Header, parse_header
from stoker.data.index import Index, open_index
from stoker_watch.errors import DataError, UsageError, make_error, writing
from stoker_watch.storage.local_files import fsync_folder

TargetFormat = Literal["coco", "voc", "yolo", "tfrecord"]
TARGET_FORMATS: tuple[TargetFormat, ...] = get_args(TargetFormat)
PARTIAL_MARKER = ".unfinished-stoker-conversion"
_UNUSABLE_CHARS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufffe\uffff\\\\/]")
"""Characters in file names that lists, XML or paths cannot contain."""


@dataclass(frozen=True, kw_only=True)
class ConversionResult:
    folder: Path
    num_images: dict[str, int]
    """Per split."""
    num_boxes: int
    skipped: tuple[tuple[Path, str], ...]
    """Images that could not be read or that the format cannot store, with the reason."""
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
    """Writes a data set in another format.

    out: a folder that is empty or absent; shards: TFRecord files per split; hardlink: image files become hard links,
    which take no disk space; progress: called with the numbers of images done and in total.

    Raises UsageError for an impossible `out` or option, DataError if the format cannot store the classes or no image
    can be read, StorageError if the folder cannot be written.
    """
    if shards < 1 or (shards > 1 and to != "tfrecord"):
        raise make_error(UsageError, "wrong-number-of-shards", choices=["1 or more, with --to tfrecord"], shards=shards)
    if hardlink and image_source.path_to_uri(index.root) is not None:
        raise UsageError("--hardlink needs local images.", location=index.source, fix="leave it out to copy the images")
    fix = "free disk space, or name a writable folder; --hardlink needs no space for images"
    with _new_folder(out) as partial, writing("The new data set cannot be written.", partial, fix=fix):
        return _write(index, partial, out, to, shards, hardlink, progress)


DATUMARO = "datumaro>=1.10,<2"
"""The versions whose API `datumaro_to_coco.py` uses."""


def convert_via_datumaro(source: Path, out: Path, format: str | None) -> list[str]:
    """Writes a data set that Datumaro reads as COCO; returns lines about what it has read, and what is in `out`.

    format: its name in Datumaro; None: Datumaro detects it. Raises UsageError for an impossible `out` or without uv,
    DataError if Datumaro cannot read the data set, or reads no boxes.
    """
    uv = shutil.which("uv") or shutil.which("uv", path=os.path.dirname(sys.executable))
    if uv is None:
        raise make_error(UsageError, "no-uv", str(source), requirement=DATUMARO)
    if not source.exists():
        raise make_error(DataError, "source-not-found", source.absolute(), value=str(source))
    with _new_folder(out) as partial:
        script = Path(__file__).with_name("datumaro_to_coco.py")
        command = [uv, "tool", "run", "--from", DATUMARO, "python", "-I", str(script), str(source), str(partial)]
        done = subprocess.run([*command, format or ""], capture_output=True, text=True, check=False)
        if done.returncode:
            cause = (done.stderr.strip() or "it printed nothing").splitlines()[-1]
            raise make_error(DataError, "datumaro-failed", str(source), cause=cause)
        result = json.loads(done.stdout.splitlines()[-1])
        read, left_out = result["read"], result["left_out"]
        if not read.get("boxes"):
            raise make_error(DataError, "datumaro-without-boxes", str(source), images=read.get("images", 0))
    index = open_index(out)
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in read.items() if kind not in ("images", "boxes"))
    lines = [f"read by Datumaro as {result['format']}: images {read['images']:,}, boxes {read['boxes']:,} ({kinds})"]
    lines += [f"left out: {count:,} × {kind}" for kind, count in left_out.items()]
    lines += [f"{problem.count:,} × {problem.title}, e.g. {problem.examples[0]}" for problem in index.problems]
    return [*lines, f"written as COCO and read by stoker: images {len(index):,}, boxes {len(index.boxes):,}: {out}"]


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Gives a new folder next to `out` to write into, in place of an old one, and renames it at the end: to the folder
    that a link is to, else to `out`."""
    out = out.resolve()
    if os.path.ismount(out):
        fix = f"name a folder in it: {out / 'NAME'}"
        raise UsageError(
            "The output folder is where a volume is mounted, and cannot be replaced.", location=out, fix=fix
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise make_error(UsageError, "output-exists", out.absolute(), out=str(out))
    partial = out.with_name(f"{out.name}.partial")
    if partial.exists() and not (partial / PARTIAL_MARKER).is_file():
        raise make_error(UsageError, "partial-folder-in-the-way", partial.absolute(), partial=str(partial))
    with writing("The folder cannot be created.", partial, fix="name a writable folder"):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / PARTIAL_MARKER).touch()
    try:
        yield partial
        with writing("The new data set cannot be written.", partial, fix="free disk space, or name a writable folder"):
            (partial / PARTIAL_MARKER).unlink()
            partial.rename(out)
            fsync_folder(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(
    index: Index,
    partial: Path,
    out: Path,
    to: TargetFormat,
    shards: int,
    hardlink: bool,
    progress: Callable[[int, int], None],
) -> ConversionResult:
    max_images = {split: len(index.image_indices(split)) for split in index.splits}
    make_writer = FORMATS[to].write
    assert make_writer is not None
    writer = make_writer(Target(partial, index.class_names, index.category_ids, max_images, shards))
    used_names: set[tuple[str, str]] = set()
    written: Counter[str] = Counter()
    skipped: list[tuple[Path, str]] = []
    num_rotated = num_boxes = num_done = 0
    for split in index.splits:
        image_indices = index.image_indices(split)
        has_unique_ids = len(np.unique(index.image_id[image_indices])) == len(image_indices)
        for position, image_index in enumerate(image_indices.tolist()):
            path = index.path(image_index)
            try:
                data, header = read_image(index, image_index, path)
                own = np.arange(index.offsets[image_index], index.offsets[image_index + 1])
                if not writer.supports_crowd and (num_crowd := int(index.crowd[own].sum())):
                    writer.notes["crowd boxes are left out: the format has none"] += num_crowd
                    own = own[~index.crowd[own]]
                boxes, size = _orient_boxes(index, image_index, index.boxes[own], header, writer.box_orientation)
                image = AnnotatedImage(
                    split=split,
                    name=_unique_name(
                        path.name, header.image_format, "" if writer.single_image_dir else split, used_names
                    ),
                    data=data,
                    image_format=header.image_format,
                    image_id=int(index.image_id[image_index]) if has_unique_ids else position,
                    size=size,
                    boxes=boxes,
                    labels=index.labels[own],
                    crowd=index.crowd[own],
                    area=index.area[own],
                )
                writer.add(image)
            except UnsupportedImage as error:
                skipped.append((path, str(error)))
            else:
                if writer.image_dir is not None:
                    target = writer.folder / writer.image_dir.format(split=split) / image.name
                    is_linked = hardlink and index.byte_range(image_index) is None
                    _write_image(target, image, path if is_linked else None)
                written[split] += 1
                num_boxes += len(image.boxes)
                num_rotated += header.orientation != 1
            num_done += 1
            progress(num_done, len(index))
    if not written:
        skipped_path, reason = skipped[0]
        raise make_error(DataError, "nothing-converted", skipped_path, cause=reason)
    writer.written_splits = list(written)
    writer.finish()
    notes = [f"{count:,} {description}" for description, count in writer.notes.items()]
    if num_rotated:
        rotated = f"{num_rotated:,} images are rotated by EXIF"
        notes.append(f"{rotated}: their boxes refer to the {writer.box_orientation} images")
    return ConversionResult(
        folder=out, num_images=dict(written), num_boxes=num_boxes, skipped=tuple(skipped), notes=tuple(notes)
    )


def _orient_boxes(
    index: Index, image_index: int, boxes: NDArray[np.float32], header: Header, box_orientation: str
) -> tuple[NDArray[np.float32], tuple[int, int]]:
    """The boxes of an image in the orientation of the format's readers, and the image size in this orientation."""
    height, width = index.original_size[image_index].tolist()
    oriented = header.as_annotated((height, width))
    if box_orientation == "upright" and oriented.orientation != header.orientation:
        return apply_orientation(boxes, header.stored_size, header.orientation), header.size
    if box_orientation == "stored" and oriented.orientation != 1:
        return apply_orientation(boxes, header.size, INVERSE_ORIENTATION[header.orientation]), header.stored_size
    return boxes, oriented.size


def _unique_name(name: str, image_format: str, folder: str, used: set[tuple[str, str]]) -> str:
    """Returns the source's name if possible; if it has no image suffix, that of its format is appended. Its stem is
    unique in its folder, in any case. used: (folder, stem), grows."""
    name = _UNUSABLE_CHARS.sub("_", name).strip().lstrip(".") or "image"
    stem, suffix = os.path.splitext(name)
    if suffix.lower() not in (*IMAGE_SUFFIXES, SUFFIXES[image_format][0]):
        stem, suffix = name, SUFFIXES[image_format][0]
    candidate, number = stem, 1
    while (folder, candidate.casefold()) in used:
        number += 1
        candidate = f"{stem}-{number}"
    used.add((folder, candidate.casefold()))
    return candidate + suffix


def _write_image(target: Path, image: AnnotatedImage, source: Path | None) -> None:
    """Writes the image file: a hard link to `source` if given, else the bytes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source is None:
        target.write_bytes(image.data)
        return
    try:
        target.hardlink_to(source.resolve())
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise make_error(UsageError, "hardlink-across-file-systems", target, source=source) from error


def read_image(index: Index, image_index: int, path: Path) -> tuple[bytes, Header]:
    """Returns the encoded image and its header. Raises UnsupportedImage for an image that training would skip."""
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
        raise UnsupportedImage(f"the annotations give {width} × {height} pixels, the image has {size[1]} × {size[0]}")
    return data, header
