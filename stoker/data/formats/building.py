"""Builds an `AnnotationTable` from images and boxes, one by one: for formats without image ids, crowd boxes and areas.

Normalized boxes are scaled to pixels; image sizes that the annotations do not give are read from the image headers.
Used by all formats except COCO and TFRecord, which build arrays directly, for speed.
"""

import math
import mmap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from stoker import regular_files
from stoker.data.formats.images import read_sizes
from stoker.data.formats.tables import AnnotationTable, DatasetLayout, FolderTable, display_path
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError

XYXY = tuple[float, float, float, float]
Content = TypeVar("Content")


class ImageFile(NamedTuple):
    """An image of the data set."""

    folder: Path
    name: str
    split: int
    """Index into SPLITS, or UNASSIGNED."""
    size: tuple[int, int] = (0, 0)
    """Height and width in pixels; 0: not given."""


class Box(NamedTuple):
    """An annotated box."""

    image_index: int
    label: int | str
    """Index of the class, or its name."""
    xyxy: XYXY
    """In pixels, or normalized by width and height of the upright image."""
    box_id: int
    """Number of the box in its source, for messages: a line, or the number of the object."""
    is_normalized: bool = False
    is_crowd: bool = False


class TableBuilder:
    """Collects the images and boxes of a data set, and the problems and notes about them."""

    def __init__(self, layout: DatasetLayout, problems: ProblemCollector, *, box_id_kind: str) -> None:
        """box_id_kind: what the number of a box is, for messages: "line", "object"."""
        self.layout, self.problems, self._box_id_kind = layout, problems, box_id_kind
        self.notes = list(layout.notes)
        self.counts: Counter[str] = Counter()
        """Description → count: become notes, "3 × point, which has no box and is not read"."""
        self.images: list[ImageFile] = []
        self.boxes: list[Box] = []
        """In any order."""
        self.bad_boxes: list[int] = []
        """The image of each box that was left out: an image that loses all of its boxes is not background."""

    def add_image(self, image: ImageFile) -> int:
        """The index of the image."""
        self.images.append(image)
        return len(self.images) - 1

    def add_box(self, label: int | str, xyxy: XYXY, box_id: int, *, is_normalized: bool = False) -> None:
        """A box of the image that was added last."""
        self.boxes.append(Box(len(self.images) - 1, label, xyxy, box_id, is_normalized))

    def drop_box(self, kind: str, example: str) -> None:
        """A box of the image that was added last and cannot be used."""
        self.problems.add(kind, example)
        self.bad_boxes.append(len(self.images) - 1)

    def location(self) -> Path:
        """What an error about the whole data set names."""
        return self.layout.root if len(self.layout.parts) > 1 else self.layout.parts[0].annotations

    def build(self, class_names: Sequence[str] | None = None, *, read_headers: bool = True) -> AnnotationTable:
        """The table of the images, in their order, and their boxes.

        class_names: default, those of the boxes that are kept (`name_classes`); boxes of other classes are dropped and
        reported. read_headers: read absent sizes from the image headers; needed if boxes are normalized. A normalized
        box whose image cannot be read is dropped and reported.
        """
        images, boxes, root = self.images, self.boxes, self.layout.root
        size = np.array([image.size for image in images], np.int32).reshape(-1, 2)
        is_normalized = np.array([box.is_normalized for box in boxes], np.bool_)
        image_index = np.array([box.image_index for box in boxes], np.int64)
        xyxy = np.array([box.xyxy for box in boxes], np.float64).reshape(-1, 4)
        keep = np.ones(len(boxes), np.bool_)
        unmeasured = np.zeros(0, np.int64)
        if read_headers:
            # sizes in the annotations may be wrong, so normalized boxes always use the header
            has_normalized = np.isin(np.arange(len(images)), image_index[is_normalized])
            unmeasured = np.flatnonzero((size == 0).any(1) | has_normalized)
            size[unmeasured], failures = read_sizes([images[i].folder / images[i].name for i in unmeasured.tolist()])
            reasons = {int(unmeasured[number]): reason for number, reason in failures.items()}
            xyxy[is_normalized] *= size[image_index[is_normalized]][:, [1, 0, 1, 0]]
            keep = ~(is_normalized & np.isin(image_index, list(reasons)))
            for i, count in Counter(image_index[~keep].tolist()).items():
                path = display_path(images[i].folder / images[i].name, root)
                self.problems.add("box-of-unreadable-image", f"{path}: {reasons[i]}", count)
        if class_names is not None:
            listed = set(class_names)
            for i, box in enumerate(boxes):
                if isinstance(box.label, str) and box.label not in listed:
                    image = images[box.image_index]
                    path = display_path(image.folder / image.name, root)
                    self.problems.add("unknown-class", f"{path}: {box.label!r}")
                    self.bad_boxes.append(box.image_index)
                    keep[i] = False
        order = np.flatnonzero(keep)
        order = order[np.argsort(image_index[order], kind="stable")]
        boxes = [boxes[i] for i in order.tolist()]
        class_names = name_classes(boxes) if class_names is None else class_names
        label_by_name = {name: label for label, name in enumerate(class_names)}
        labels = [box.label if isinstance(box.label, int) else label_by_name[box.label] for box in boxes]
        folders = FolderTable(root)
        folder_index = [folders.add(str(image.folder)) for image in images]
        return AnnotationTable(
            class_names=list(class_names),
            category_ids=list(range(len(class_names))),
            folders=folders.paths(),
            folder_index=np.array(folder_index, np.int32),
            file_names=[image.name for image in images],
            split=np.array([image.split for image in images], np.int8),
            original_size=size,
            image_id=np.arange(len(images), dtype=np.int64),
            image_index=image_index[order],
            boxes=xyxy[order],
            labels=np.array(labels, np.int32),
            crowd=np.array([box.is_crowd for box in boxes], np.bool_),
            area=np.full(len(boxes), np.nan),
            box_id=np.array([box.box_id for box in boxes], np.int64),
            box_id_kind=self._box_id_kind,
            sizes_from_headers=len(unmeasured) > 0,
            num_bad_boxes=np.bincount(np.array(self.bad_boxes, np.int64), minlength=len(images)),
            notes=[*self.notes, *(f"{count:,} × {description}" for description, count in self.counts.items() if count)],
        )

    def drop_ambiguous_images(self, locations: Sequence[str]) -> None:
        """Drops an identical second entry of an image in a split. If its entries differ, all are dropped: which one is
        right is not known. Raises DataError if no image is left. locations: file, and number in it, of each image."""
        boxes_of: dict[int, list[Box]] = {}
        for box in self.boxes:
            boxes_of.setdefault(box.image_index, []).append(box)
        entries: dict[tuple[int, Path, str], list[int]] = {}
        for index, image in enumerate(self.images):
            entries.setdefault((image.split, image.folder, image.name), []).append(index)
        kept: dict[int, int] = {}
        for first, *others in entries.values():
            content, *copies = [[box[1:3] for box in boxes_of.get(index, ())] for index in (first, *others)]
            name = self.images[first].name
            if any(copy != content for copy in copies):
                listed = ", ".join(locations[index] for index in (first, *others))
                self.problems.add("listed-twice", f"{name}: {listed}")
                continue
            kept[first] = len(kept)
            for other in others:
                self.problems.add("copied-entry", f"{locations[other]}: {name}, as {locations[first]}")
        if not kept:
            raise no_image_error(self.layout, self.problems, "No image has annotations that can be read.")
        self.images = [self.images[index] for index in kept]
        self.boxes = [box._replace(image_index=kept[index]) for index in kept for box in boxes_of.get(index, ())]
        self.bad_boxes = [kept[index] for index in self.bad_boxes if index in kept]


def no_image_error(
    layout: DatasetLayout, problems: ProblemCollector, what: str, *, fix: str = "export the annotations again"
) -> DataError:
    return DataError(
        what,
        location=layout.parts[0].annotations,
        cause="; ".join(f"{p.count} × {p.title}: {p.examples[0]}" for p in problems.summarize(1)) or None,
        fix=fix,
    )


def name_classes(boxes: Sequence[Box]) -> list[str]:
    """The classes of the boxes by name; if all names are numbers, by number; class 0, class 1, … for boxes that have
    the index of their class."""
    if boxes and isinstance(boxes[0].label, int):
        return [f"class {number}" for number in range(max(int(box.label) for box in boxes) + 1)]
    names = {str(box.label) for box in boxes}
    if all(name.isascii() and name.isdigit() for name in names):
        return sorted(names, key=lambda name: (len(name.lstrip("0")), name.lstrip("0"), name))
    return sorted(names)


def bound_points(points: Sequence[Sequence[float]]) -> XYXY:
    """The box around points (x, y)."""
    xs, ys = [point[0] for point in points], [point[1] for point in points]
    return min(xs), min(ys), max(xs), max(ys)


def bound_rotated(center: tuple[float, float], size: tuple[float, float], degrees: float) -> XYXY:
    """The box around a rectangle of width and height `size` that is rotated about its center."""
    cos, sin = abs(math.cos(math.radians(degrees))), abs(math.sin(math.radians(degrees)))
    half_width, half_height = (size[0] * cos + size[1] * sin) / 2, (size[0] * sin + size[1] * cos) / 2
    x, y = center
    return x - half_width, y - half_height, x + half_width, y + half_height


def usable_size(height: object, width: object) -> tuple[int, int]:
    """Height and width that annotations give; 0, unknown, if they are not both valid numbers."""
    try:
        sides = [float(side) for side in (height, width) if isinstance(side, int | float | str)]
    except ValueError:
        return 0, 0
    is_valid = len(sides) == 2 and all(1 <= side < 2**31 for side in sides)
    return (int(sides[0]), int(sides[1])) if is_valid else (0, 0)


def read_json(path: Path, type: type[Content], *, what: str, fix: str = "export it again") -> Content:
    """The content of a JSON file, numbers also if they are text. Raises OSError, and DataError for a file that is not
    JSON or has another content. what: says so in the error: "The file is not an export of Label Studio."."""
    data = regular_files.read_bytes(path).removeprefix(b"\xef\xbb\xbf")
    try:
        return msgspec.json.decode(data, type=type, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(what, location=path, cause=str(error), fix=fix) from error


def invalid_json_error(path: Path, data: bytes | mmap.mmap, error: Exception) -> DataError:
    """The error for a file that is not JSON, with the line."""
    text = str(error)
    digits = text.rpartition("byte ")[2].rstrip(")")
    offset = int(digits) if digits.isdigit() else len(data)
    line = data[:offset].count(b"\n") + 1
    return DataError(
        "The annotation file is not valid JSON.",
        location=f"{path}:{line}",
        cause=f"{text} in a file of {len(data)} bytes",
        fix="export or copy it again; a truncated file ends in the middle of an entry",
    )
