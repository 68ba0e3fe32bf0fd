"""From samples of shards, each an image with its annotations, to an `AnnotationTable`: for all formats of shards.

Not here: finding the samples in a file (`webdataset.py`, `mds.py`), the layouts of annotations
(`sample_annotations.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from stoker.data.formats.sample_annotations import LAYOUTS, UnknownLayout, annotated_size, file_name, read_boxes
from stoker.data.formats.table_builder import Box, ImageFile, build_table, sort_class_names
from stoker.data.formats.tables import AnnotationTable, DatasetLayout
from stoker.data.images.headers import ReadAt, parse_header_within
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError

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
        given = annotated_size(annotations)
        label = file_name(annotations) or name.rpartition("/")[2]
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
    class_names: Sequence[str] = (),
) -> AnnotationTable:
    """One table of all shards. class_names: all classes in order, where the data set lists them. Raises DataError if no
    sample is usable."""
    images: list[ImageFile] = []
    boxes: list[Box] = []
    bad_boxes: list[int] = []
    extents: list[int] = []
    for shard in shards:
        first = len(images)
        extents += [len(boxes) + k for k in shard.extents]
        images += shard.images
        boxes += [box._replace(image_index=first + box.image_index) for box in shard.boxes]
        bad_boxes += [first + image_index for image_index in shard.bad_boxes]
        for kind, example in shard.problems:
            problems.add(kind, example)
    location = layout.root if len(layout.parts) > 1 else layout.parts[0].annotations
    if not images and (reasons := [reason for shard in shards for reason in shard.unknown_layouts]):
        raise DataError(
            f"The {format_name} samples have annotations in a layout that is not known.",
            location=location,
            cause=reasons[0],
            choices=LAYOUTS,
            fix="write one of them, or convert the data set to COCO",
        )
    if not images:
        raise DataError(
            f"No sample of the {format_name} shards can be used.",
            location=location,
            cause="; ".join(f"{p.title}: {p.examples[0]}" for p in problems.summarize()) or "they are empty",
            fix="copy or write the shards again; a sample is an image with its boxes",
        )
    notes = list(layout.notes)
    if fraction := _fraction_outside(images, boxes, extents):
        notes.append(
            f"bbox are corners (x1, y1, x2, y2): read as x, y, width and height, {100 * fraction:.0f} % would reach out"
            " of their images"
        )
        for k in extents:
            x1, y1, x2, y2 = boxes[k].xyxy
            boxes[k] = boxes[k]._replace(xyxy=(x1, y1, x2 - x1, y2 - y1))
    table = build_table(
        layout, images, boxes, lambda own: class_names or sort_class_names(own), problems, box_id_kind="object",
        notes=notes, bad_boxes=bad_boxes, read_headers=False,
    )  # fmt: skip
    byte_ranges = np.array([byte_range for shard in shards for byte_range in shard.byte_ranges], np.int64)
    return replace(table, byte_range=byte_ranges.reshape(-1, 2))


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
