"""Shards, files with many images: reads ranges of them, and makes a table of their samples.

A shard is a file on the disk, or an object of a bucket, of which the mirror has only a stub. Annotations lie between
the images; a shard in a bucket is read in blocks around what is needed, and images between are skipped. How an image is
annotated in a shard has no standard, so what public data sets and their converters write is understood: `LAYOUTS`, with
sources in docs/data.md. Not here: finding the samples (`webdataset.py`, `mds.py`, `parquet.py`).
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stoker import regular_files
from stoker.data.formats.folders import (
    check_unannotated_splits,
    file_part,
    find_files,
    iter_split_dirs,
    list_files,
    sort_parts,
)
from stoker.data.formats.images import Box, ImageFile, Item, Result, TableBuilder, map_in_threads, usable_size
from stoker.data.formats.tables import AnnotationTable, DatasetLayout, SplitFiles
from stoker.data.images import source
from stoker.data.images.headers import ReadAt, parse_header_within
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError

BLOCK_BYTES = 1 << 18
"""Bytes of a request to a bucket. It has the annotations of one to ten images of usual size; at 30 ms a request, larger
blocks do not shorten the scan of a shard by more than a few percent, and smaller ones lengthen it."""
REMOTE_SHARDS = 32
"""Shards of a bucket that are read at the same time."""


def find_shards(
    folder: Path, dir_names: Sequence[str], list_shards: Callable[[Path], Sequence[Path]]
) -> tuple[list[SplitFiles], list[str]]:
    """The shards in a folder (`find_files`), and notes."""
    parts = find_files(folder, dir_names, list_shards)
    split_dirs = {path for _, path in iter_split_dirs(folder)} if parts else set()
    is_per_split = any(split_dirs & {part.annotations.parent, part.annotations.parent.parent} for part in parts)
    return parts, check_unannotated_splits(folder, parts) if is_per_split else []


def recognize_shards(
    path: Path, format: str, title: str, *, dir_names: Sequence[str], suffix: str, has_samples: Callable[[Path], bool]
) -> DatasetLayout | None:
    """The data set of a shard, or of the shards in a folder (`find_shards`); None if the first has no samples."""

    def list_shards(folder: Path) -> list[Path]:
        files = list_files(folder, suffix)
        return files if files and has_samples(files[0]) else []

    if path.is_dir():
        parts, notes = find_shards(path, dir_names, list_shards)
    else:
        parts, notes = [file_part(path)] if has_samples(path) else [], []
    return layout_of_shards(format, title, path if path.is_dir() else path.parent, parts, notes) if parts else None


def layout_of_shards(
    format: str, title: str, root: Path, parts: Sequence[SplitFiles], notes: Sequence[str]
) -> DatasetLayout:
    shards = f"{len(parts):,} shards" if len(parts) != 1 else "one shard"
    description = f"{title} in {shards}"
    return DatasetLayout(format=format, description=description, root=root, parts=sort_parts(parts), notes=tuple(notes))


@contextlib.contextmanager
def open_shard(path: Path) -> Iterator[tuple[ReadAt, int]]:
    """(read, number of bytes) of a shard; `read(offset, count)` returns fewer bytes at its end. Raises OSError,
    StorageError."""
    remote = source.find_remote(path)
    if remote is not None:
        yield _RemoteReader(remote, path.stat().st_size).read, path.stat().st_size
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


class _RemoteReader:
    def __init__(self, remote: source.RemoteObject, total_bytes: int) -> None:
        self._remote, self._total_bytes = remote, total_bytes
        self._start, self._block = 0, b""

    def read(self, offset: int, count: int) -> bytes:
        count = min(count, self._total_bytes - offset)
        if count <= 0:
            return b""
        position = offset - self._start
        if not (position >= 0 and position + count <= len(self._block)):
            length = min(max(count, BLOCK_BYTES), self._total_bytes - offset)
            self._start, self._block, position = offset, source.read_object(self._remote, offset, length), 0
        return self._block[position : position + count]


MAX_ANNOTATION_BYTES = 1 << 26
"""The largest annotations of one image that are read."""

MIN_FRACTION_OUTSIDE, MIN_FRACTION_CORNERS = 0.05, 0.99
"""Boxes are taken for corners if more than the first fraction of them would otherwise reach out of their images, and
more than the second are valid corners: as x, y, width and height, boxes near the right and lower edges are not."""


@dataclass
class ShardSamples:
    """What was read from one shard."""

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
    unknown_layouts: list[str] = field(default_factory=list)
    """Reasons of the first few samples whose annotations have a layout that is not known."""
    num_unknown: int = 0

    def add(self, name: str, read: ReadAt, start: int, length: int, annotations: Any) -> None:
        """A sample with decoded annotations. What is wrong with it becomes a problem."""
        place = f"{self.path.name}: {name}"
        try:
            size = parse_header_within(read, start, length, f"{self.path}/{name}").size
            found = read_boxes(annotations)
        except DataError as error:
            self.problems.append(("record-without-image", f"{place}: {error.cause or error.what}"))
            return
        except UnknownLayout as error:
            self.num_unknown += 1
            self.unknown_layouts += [f"{place}: {error}"] if len(self.unknown_layouts) < 3 else []
            self.problems.append(("unreadable-annotations", f"{place}: {error}"))
            return
        given = _annotated_size(annotations)
        label = _annotated_name(annotations) or name.rpartition("/")[2]
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
    """One table of all shards. class_names: all classes in order, where the data set lists them. Raises DataError if no
    sample is usable."""
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
    if not images and (reasons := [reason for shard in shards for reason in shard.unknown_layouts]):
        raise DataError(
            f"The {format_name} samples have annotations in a layout that is not known.",
            location=builder.location(),
            cause=reasons[0],
            choices=LAYOUTS,
            fix="write one of them, or convert the data set to COCO",
        )
    if not images:
        raise DataError(
            f"No sample of the {format_name} shards can be used.",
            location=builder.location(),
            cause=problems.describe() or "they are empty",
            fix="copy or write the shards again; a sample is an image with its boxes",
        )
    if fraction := _fraction_outside(images, boxes, extents):
        builder.notes.append(
            f"bbox are corners (x1, y1, x2, y2): read as x, y, width and height, {100 * fraction:.0f} % would reach out"
            " of their images"
        )
        for k in extents:
            x1, y1, x2, y2 = boxes[k].xyxy
            boxes[k] = boxes[k]._replace(xyxy=(x1, y1, x2 - x1, y2 - y1))
    byte_ranges = np.array([byte_range for shard in shards for byte_range in shard.byte_ranges], np.int64)
    return replace(builder.build(class_names or None, read_headers=False), byte_range=byte_ranges.reshape(-1, 2))


def _fraction_outside(images: Sequence[ImageFile], boxes: Sequence[Box], extents: Sequence[int]) -> float:
    """Of data sets whose "bbox" are corners, contrary to COCO: the fraction of boxes that would reach out of their
    images as x, y, width and height; else 0."""
    if not extents:
        return 0.0
    size = np.array([images[boxes[k].image_index].size for k in extents], np.float64)
    x1, y1, x2, y2 = np.array([boxes[k].xyxy for k in extents], np.float64).T
    height, width = size[:, 0] + 1, size[:, 1] + 1
    reaches_out = (x2 > width) | (y2 > height)
    right, bottom = x2 - x1, y2 - y1
    are_corners = (right > x1) & (bottom > y1) & (right <= width) & (bottom <= height)
    fraction = float(reaches_out.mean())
    return fraction if fraction > MIN_FRACTION_OUTSIDE and are_corners.mean() > MIN_FRACTION_CORNERS else 0.0


LAYOUTS = (
    'a list of COCO annotations: [{"bbox": [x, y, width, height], "category_id": 3}, …]',
    '{"annotations": [the same]}, also as "objects" or "instances"',
    '{"objects": {"bbox": [[x, y, width, height], …], "category": [3, …]}}',
    '{"bboxes": [[x, y, width, height], …], "labels": [3, …]}',
    '{"boxes": [[x1, y1, x2, y2], …], "labels": [3, …]}',
    'rows of Open Images: [{"LabelName": "/m/01g317", "XMin": 0.1, "XMax": 0.4, "YMin": 0.2, "YMax": 0.9}, …]',
)
LIST_KEYS = ("annotations", "objects", "instances")
CORNERS_KEYS = ("boxes", "box")
"""Corners in pixels: x1, y1, x2, y2, as in torchvision."""
EXTENT_KEYS = ("bboxes", "bbox")
"""x, y, width and height in pixels, as in COCO and in the data sets of the Hugging Face hub."""
NAME_KEYS = ("category_name", "category", "class_name", "class", "label", "LabelName", "name")
ID_KEYS = ("category_id", "class_id", "label_id")
CLASS_LIST_KEYS = ("labels", "categories", "category_ids", "classes", "class_ids", *NAME_KEYS, *ID_KEYS)
NAME_OF_FILE_KEYS = ("file_name", "filename")
OPEN_IMAGES_KEYS, VOC_KEYS = ("XMin", "YMin", "XMax", "YMax"), ("xmin", "ymin", "xmax", "ymax")
XYXY_ABS, XYWH_ABS = 0, 1
"""`bbox_mode` of detectron2 (structures/boxes.py)."""


class UnknownLayout(Exception):
    """The annotations have none of LAYOUTS; the message says what they have."""


class ObjectBox(NamedTuple):
    number: int
    """Of the object in the sample, from 1."""
    label: str | None
    """Name or number of the class; None: there is none."""
    xyxy: tuple[float, float, float, float] | None
    """None: it cannot be read."""
    is_normalized: bool
    is_extent: bool
    """It was given under one of EXTENT_KEYS, by its width and height."""
    is_crowd: bool
    text: str
    """The start of its annotation, for messages."""


def read_boxes(content: Any) -> list[ObjectBox]:
    """The boxes of a sample, from decoded JSON. Raises UnknownLayout."""
    if isinstance(content, Mapping):
        for key in LIST_KEYS:
            value = content.get(key)
            if isinstance(value, list | Mapping):
                return read_boxes(value)
        content = _rows_of_columns(content)
    if not isinstance(content, list) or not all(isinstance(item, Mapping) for item in content):
        raise UnknownLayout("it is not an object or a list of objects")
    return [_read_object(item, number) for number, item in enumerate(content, start=1)]


def _annotated_size(content: Any) -> tuple[int, int]:
    """Height and width that the annotations of a sample give; 0 where they do not."""
    return usable_size(content.get("height"), content.get("width")) if isinstance(content, Mapping) else (0, 0)


def _annotated_name(content: Any) -> str:
    """The name of the image file, without folders, that the annotations of a sample give; empty where they do not."""
    values = [content.get(key) for key in NAME_OF_FILE_KEYS] if isinstance(content, Mapping) else []
    text = next((value for value in values if isinstance(value, str)), "")
    name = text.replace("\\", "/").rpartition("/")[2].replace("\0", "")
    return "" if name in (".", "..") else name


def _rows_of_columns(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """An object for each entry of equally long lists."""
    box_key = next((key for key in (*CORNERS_KEYS, *EXTENT_KEYS) if _is_list(content.get(key))), None)
    class_key = next((key for key in CLASS_LIST_KEYS if _is_list(content.get(key))), None)
    if box_key is None or class_key is None:
        raise UnknownLayout(f"it has the keys {_list_keys(content)}: no list of boxes with a list of classes")
    boxes, labels = content[box_key], content[class_key]
    if len(boxes) != len(labels):
        raise UnknownLayout(f"{box_key} has {len(boxes):,} entries, {class_key} has {len(labels):,}")
    crowd = content.get("iscrowd", content.get("is_crowd"))
    if not isinstance(crowd, list) or len(crowd) != len(boxes):
        crowd = [False] * len(boxes)
    rows = zip(boxes, labels, crowd, strict=True)
    return [{box_key: box, "label": label, "iscrowd": is_crowd} for box, label, is_crowd in rows]


def _read_object(item: Mapping[str, Any], number: int) -> ObjectBox:
    label = next((text for key in (*NAME_KEYS, *ID_KEYS) if (text := _class_text(item.get(key))) is not None), None)
    is_crowd = bool(item.get("iscrowd")) or str(item.get("IsGroupOf")) == "1"
    corner_keys = next((keys for keys in (OPEN_IMAGES_KEYS, VOC_KEYS) if all(key in item for key in keys)), None)
    box_key = next((key for key in (*EXTENT_KEYS, *CORNERS_KEYS) if key in item), None)
    is_normalized = corner_keys == OPEN_IMAGES_KEYS
    is_extent = has_extent = False
    if corner_keys is not None and (is_normalized or box_key is None):
        values: Any = [item[key] for key in corner_keys]
    elif box_key is None:
        raise UnknownLayout(f"its objects have the keys {_list_keys(item)}: no box")
    else:
        values, mode = item[box_key], item.get("bbox_mode", XYWH_ABS)
        if box_key in EXTENT_KEYS and mode not in (XYXY_ABS, XYWH_ABS):
            raise UnknownLayout(f"bbox_mode is {mode!r}; 0 (corners) and 1 (x, y, width, height) are read")
        has_extent = box_key in EXTENT_KEYS and mode == XYWH_ABS
        is_extent = has_extent and "bbox_mode" not in item
    xyxy = _to_corners(values, is_extent=has_extent)
    return ObjectBox(number, label, xyxy, is_normalized, is_extent, is_crowd, str(item)[:60])


def _to_corners(values: Any, *, is_extent: bool) -> tuple[float, float, float, float] | None:
    if not _is_list(values) or len(values) != 4:
        return None
    try:
        a, b, c, d = (float(value) for value in values)
    except (TypeError, ValueError):
        return None
    return (a, b, a + c, b + d) if is_extent else (a, b, c, d)


def _class_text(value: Any) -> str | None:
    if isinstance(value, bool) or value is None or value == "":
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, str | int) else None


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _list_keys(item: Mapping[str, Any]) -> str:
    keys = [repr(str(key)[:40]) for key in item]
    return ", ".join(keys[:10]) + (", …" if len(keys) > 10 else "") if keys else "none"
