"""Builds an `AnnotationTable` from lists of images and boxes: for formats without image ids, crowd boxes and areas.

Normalized boxes are scaled to pixels; image sizes that the annotations do not give are read from the image headers.
Used by all formats except COCO and TFRecord. Not here: COCO and TFRecord, which build arrays directly, for speed.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stoker.data.formats.image_sizes import read_sizes
from stoker.data.formats.tables import AnnotationTable, DatasetLayout, FolderTable, display_path
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError

XYXY = tuple[float, float, float, float]


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


class Entry(NamedTuple):
    """An image with its boxes, in formats that list them together."""

    image: ImageFile
    boxes: tuple[Box, ...]
    """Without their image index."""
    location: str
    """File, and number in it, for messages."""
    num_bad_boxes: int = 0
    """Boxes that the reader left out."""


def build_table(
    layout: DatasetLayout,
    images: Sequence[ImageFile],
    boxes: Sequence[Box],
    choose_class_names: Callable[[Sequence[Box]], Sequence[str]],
    problems: ProblemCollector,
    *,
    box_id_kind: str,
    notes: list[str],
    bad_boxes: Iterable[int] = (),
    read_headers: bool = True,
) -> AnnotationTable:
    """The table of the images, in this order, and the boxes, in any order.

    choose_class_names: the class names in order, from the boxes that are kept. read_headers: read absent sizes from the
    image headers; needed if boxes are normalized. bad_boxes: the image of each box that the reader left
    out. A normalized box whose image cannot be read is dropped and reported.
    """
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
            path = display_path(images[i].folder / images[i].name, layout.root)
            problems.add("box-of-unreadable-image", f"{path}: {reasons[i]}", count)
    order = np.flatnonzero(keep)
    order = order[np.argsort(image_index[order], kind="stable")]
    boxes = [boxes[i] for i in order.tolist()]
    class_names = choose_class_names(boxes)
    label_by_name = {name: label for label, name in enumerate(class_names)}
    labels = [box.label if isinstance(box.label, int) else label_by_name[box.label] for box in boxes]
    folders = FolderTable(layout.root)
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
        box_id_kind=box_id_kind,
        sizes_from_headers=len(unmeasured) > 0,
        num_bad_boxes=np.bincount(np.array(list(bad_boxes), np.int64), minlength=len(images)),
        notes=notes,
    )


def sort_class_names(boxes: Sequence[Box]) -> list[str]:
    """The classes of the boxes by name; if all are numbers, by number."""
    names = {str(box.label) for box in boxes}
    if all(name.isascii() and name.isdigit() for name in names):
        return sorted(names, key=lambda name: (len(name.lstrip("0")), name.lstrip("0"), name))
    return sorted(names)


def build_from_entries(
    layout: DatasetLayout,
    entries: Sequence[Entry],
    problems: ProblemCollector,
    *,
    box_id_kind: str,
    notes: list[str],
) -> AnnotationTable:
    """The table of the entries, one per image; the classes are those of the boxes. Raises DataError if none is left.

    An identical second entry of an image in a split is dropped. If its entries differ, all are: which one is right is
    not known.
    """
    entries_by_image: dict[tuple[int, Path, str], list[Entry]] = {}
    for entry in entries:
        entries_by_image.setdefault((entry.image.split, entry.image.folder, entry.image.name), []).append(entry)
    kept = []
    for first, *others in entries_by_image.values():
        if any([box[1:3] for box in other.boxes] != [box[1:3] for box in first.boxes] for other in others):
            listed = ", ".join(entry.location for entry in (first, *others))
            problems.add("listed-twice", f"{first.image.name}: {listed}")
            continue
        kept.append(first)
        for other in others:
            problems.add("copied-entry", f"{other.location}: {first.image.name}, as {first.location}")
    if not kept:
        raise DataError(
            "No image has annotations that can be read.",
            location=layout.parts[0].annotations,
            cause="; ".join(f"{p.count} × {p.title}: {p.examples[0]}" for p in problems.summarize(1)) or None,
            fix="export the annotations again",
        )
    boxes = [box._replace(image_index=index) for index, entry in enumerate(kept) for box in entry.boxes]
    images = [entry.image for entry in kept]
    bad_boxes = [index for index, entry in enumerate(kept) for _ in range(entry.num_bad_boxes)]
    return build_table(
        layout, images, boxes, sort_class_names, problems, box_id_kind=box_id_kind, notes=notes, bad_boxes=bad_boxes
    )


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
