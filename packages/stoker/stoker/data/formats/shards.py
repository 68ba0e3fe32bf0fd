"""Shards, files with many images: reads ranges of them, and makes a table of their samples.

A shard is a file on the disk, or an object of a bucket, of which the mirror has only a stub. Annotations lie between
the images; a shard in a bucket is read in blocks around what is needed, and images between are skipped. Not here: how
an image is annotated in a shard (`objects.py`), finding the samples (`webdataset.py`, `parquet.py`).
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from stoker.data.formats import folders
from stoker.data.formats.images import Box, ImageFile, Item, Result, TableBuilder, map_in_threads
from stoker.data.formats.objects import LAYOUTS, NAME_OF_FILE_KEYS, UnknownLayout, corners_note, read_boxes
from stoker.data.formats.tables import AnnotationTable, DatasetLayout, SplitFiles, usable_size
from stoker.data.images import source
from stoker.data.images.headers import ReadAt, parse_header_within
from stoker.data.validation.problems import ProblemCollector
from stoker_watch import regular_files
from stoker_watch.errors import DataError, make_error

BLOCK_BYTES = 1 << 18
"""Bytes of a request to a bucket. It has the annotations of one to ten images of usual size; at 30 ms a request, larger
blocks do not shorten the scan of a shard by more than a few percent, and smaller ones lengthen it."""
REMOTE_SHARDS = 32
"""Shards of a bucket that are read at the same time."""


def find_shards(
    folder: Path, dir_names: Sequence[str], list_shards: Callable[[Path], Sequence[Path]]
) -> tuple[list[SplitFiles], list[str]]:
    """Returns the shards in a folder (`find_files`), and notes."""
    parts = folders.find_files(folder, dir_names, list_shards)
    split_dirs = {path for _, path in folders.iter_split_dirs(folder)} if parts else set()
    is_per_split = any(split_dirs & {part.annotations.parent, part.annotations.parent.parent} for part in parts)
    return parts, folders.check_unannotated_splits(folder, parts) if is_per_split else []


def recognize_shards(
    path: Path, format: str, title: str, *, dir_names: Sequence[str], suffix: str, has_samples: Callable[[Path], bool]
) -> DatasetLayout | None:
    """The data set of a shard, or of the shards in a folder (`find_shards`); None if the first has no samples."""

    def list_shards(folder: Path) -> list[Path]:
        files = folders.list_files(folder, suffix)
        return files if files and has_samples(files[0]) else []

    if path.is_dir():
        parts, notes = find_shards(path, dir_names, list_shards)
    else:
        parts, notes = [folders.file_part(path)] if has_samples(path) else [], []
    return layout_of_shards(format, title, path if path.is_dir() else path.parent, parts, notes) if parts else None


def layout_of_shards(
    format: str, title: str, root: Path, parts: Sequence[SplitFiles], notes: Sequence[str]
) -> DatasetLayout:
    shards = f"{len(parts):,} shards" if len(parts) != 1 else "one shard"
    description, own = f"{title} in {shards}", folders.sort_parts(parts)
    return DatasetLayout(format=format, description=description, root=root, parts=own, notes=tuple(notes))


@contextlib.contextmanager
def open_shard(path: Path) -> Iterator[tuple[ReadAt, int]]:
    """(read, number of bytes) of a shard; `read(offset, count)` is shorter at its end. Raises OSError, StorageError."""
    remote = source.find_remote(path)
    if remote is not None:
        yield _read_in_blocks(remote, path.stat().st_size), path.stat().st_size
        return
    fd = regular_files.open_fd(path)
    try:
        yield lambda offset, count: os.pread(fd, count, offset), os.fstat(fd).st_size
    finally:
        os.close(fd)


def map_shards(function: Callable[[Item], Result], shards: Sequence[Item], *, path: Path) -> list[Result]:
    """The results of reading each shard, in order; those of a bucket (`path` tells) are read at the same time."""
    if source.path_to_uri(path) is None:
        return [function(shard) for shard in shards]
    if len(shards) > 1:
        source.print_status(f"Reading the annotations in {len(shards):,} shards of {source.display_path(path)}")
    return map_in_threads(function, shards, workers=REMOTE_SHARDS, chunk_size=1)


def _read_in_blocks(remote: source.RemoteObject, total_bytes: int) -> ReadAt:
    start, block = 0, b""

    def read(offset: int, count: int) -> bytes:
        nonlocal start, block
        count = min(count, total_bytes - offset)
        if count <= 0:
            return b""
        if not start <= offset <= start + len(block) - count:
            block = source.read_object(remote, offset, min(max(count, BLOCK_BYTES), total_bytes - offset))
            start = offset
        return block[offset - start : offset - start + count]

    return read


MAX_ANNOTATION_BYTES = 1 << 26
"""The largest annotations of one image that are read."""


@dataclass
class ShardSamples:
    path: Path
    split: int
    images: list[ImageFile] = field(default_factory=list)
    byte_ranges: list[tuple[int, int]] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    """Image indices count from the first of the shard."""
    extents: list[int] = field(default_factory=list)
    """Indices of the boxes that were given by width and height."""
    bad_boxes: list[int] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    """(kind, example)."""
    unknown_layout: str | None = None
    """The reason of the first sample whose annotations have a layout that is not known."""

    def add(self, name: str, read: ReadAt, start: int, length: int, annotations: Any) -> None:
        """Adds a sample with decoded annotations. What is wrong with it becomes a problem."""
        place = f"{self.path.name}: {name}"
        try:
            size = parse_header_within(read, start, length, f"{self.path}/{name}").size
            found = read_boxes(annotations)
        except DataError as error:
            self.problems.append(("record-without-image", f"{place}: {error.cause or error.what}"))
            return
        except UnknownLayout as error:
            self.unknown_layout = self.unknown_layout or f"{place}: {error}"
            self.problems.append(("unreadable-annotations", f"{place}: {error}"))
            return
        fields = annotations if isinstance(annotations, Mapping) else {}
        given = usable_size(fields.get("height"), fields.get("width"))
        written = next((fields[key] for key in NAME_OF_FILE_KEYS if isinstance(fields.get(key), str)), "")
        label = folders.base_name(written) or name.rpartition("/")[2]
        image_index, (height, width) = len(self.images), size if 0 in given else given
        self.images.append(ImageFile(self.path, label, self.split, (height, width)))
        self.byte_ranges.append((start, length))
        for box in found:
            if box.xyxy is None or box.label is None:
                kind = "malformed-box" if box.xyxy is None else "no-class"
                self.problems.append((kind, f"{place}, object {box.number}: {box.text}"))
                self.bad_boxes.append(image_index)
                continue
            x1, y1, x2, y2 = box.xyxy
            xyxy = (x1 * width, y1 * height, x2 * width, y2 * height) if box.is_normalized else box.xyxy
            self.extents += [len(self.boxes)] if box.is_extent else []
            self.boxes.append(Box(image_index, box.label, xyxy, box.number, is_crowd=box.is_crowd))


def make_table(
    layout: DatasetLayout,
    shards: Sequence[ShardSamples],
    problems: ProblemCollector,
    *,
    format_name: str,
    class_names: Sequence[str] | None = None,
) -> AnnotationTable:
    """Makes one table of all shards. class_names: all classes in order, where the data set lists them. Raises DataError
    if no sample is usable."""
    builder, extents = TableBuilder(layout, problems, box_id_kind="object"), list[int]()
    images, boxes = builder.images, builder.boxes
    for shard in shards:
        first = len(images)
        extents += [len(boxes) + k for k in shard.extents]
        images += shard.images
        boxes += [box._replace(image_index=first + box.image_index) for box in shard.boxes]
        builder.bad_boxes += [first + image_index for image_index in shard.bad_boxes]
        for kind, example in shard.problems:
            problems.add(kind, example)
    if not images:
        if reasons := [shard.unknown_layout for shard in shards if shard.unknown_layout is not None]:
            place, cause = builder.location(), reasons[0]
            raise make_error(DataError, "samples-unknown", place, choices=LAYOUTS, cause=cause, name=format_name)
        cause = problems.describe() or "they are empty"
        raise make_error(DataError, "no-usable-sample", builder.location(), cause=cause, name=format_name)
    sizes = np.array([images[boxes[k].image_index].size for k in extents], np.float64)
    if (note := corners_note(sizes, np.array([boxes[k].xyxy for k in extents], np.float64))) is not None:
        builder.notes.append(note)
        for k in extents:
            x1, y1, x2, y2 = boxes[k].xyxy
            boxes[k] = boxes[k]._replace(xyxy=(x1, y1, x2 - x1, y2 - y1))
    byte_ranges = np.array([byte_range for shard in shards for byte_range in shard.byte_ranges], np.int64)
    return replace(builder.build(class_names or None, read_headers=False), byte_range=byte_ranges.reshape(-1, 2))
