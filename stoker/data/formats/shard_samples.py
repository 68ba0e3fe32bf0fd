"""From samples of shards, each an image with its annotations, to an `AnnotationTable`: what WebDataset and MDS share.

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


@dataclass
class ShardSamples:
    """What was read from one shard."""

    path: Path
    split: int
    images: list[ImageFile] = field(default_factory=list)
    byte_ranges: list[tuple[int, int]] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    """Image indices count from the first of the shard."""
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
            self.boxes.append(Box(image_index, box.label, xyxy, box.number, is_crowd=box.is_crowd))


def make_table(
    layout: DatasetLayout, shards: Sequence[ShardSamples], problems: ProblemCollector, *, format_name: str
) -> AnnotationTable:
    """One table of all shards. Raises DataError if no sample is usable."""
    images: list[ImageFile] = []
    boxes: list[Box] = []
    bad_boxes: list[int] = []
    for shard in shards:
        first = len(images)
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
    table = build_table(
        layout, images, boxes, sort_class_names, problems, box_id_kind="object", notes=list(layout.notes),
        bad_boxes=bad_boxes, read_headers=False,
    )  # fmt: skip
    byte_ranges = np.array([byte_range for shard in shards for byte_range in shard.byte_ranges], np.int64)
    return replace(table, byte_range=byte_ranges.reshape(-1, 2))
