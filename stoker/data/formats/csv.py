"""CSV tables with one row per box: reads a data set of them.

Boxes are in pixels or normalized by image width and height; this is decided per table. A row without box and class is
an image without objects. A row that cannot be read is dropped and reported; its image stays if another row names it.
The meaning of the columns: `csv_table.py`.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stoker.data.formats.csv_table import CsvLayout, detect_csv_layout, iter_rows
from stoker.data.formats.image_locator import ImageLocator, is_usable_name
from stoker.data.formats.table_builder import Box, ImageFile, build_table, sort_class_names
from stoker.data.formats.tables import (
    SPLITS,
    UNASSIGNED,
    AnnotationTable,
    DatasetLayout,
    SplitFiles,
    split_from_name,
)
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError

MAX_NORMALIZED = 1.05
"""The largest coordinate of a normalized box. A box in pixels is almost never this small."""
NO_CLASS_COLUMN = "object"
"""The class of all boxes of a table without classes."""


@dataclass
class _Images:
    """The images of all tables read so far, in order of appearance."""

    index_by_key: dict[tuple[int, Path, str], int] = field(default_factory=dict)
    """Split, folder, file name → image index."""
    files: list[ImageFile] = field(default_factory=list)

    def add(self, image: ImageFile) -> int:
        image_index = self.index_by_key.setdefault((image.split, image.folder, image.name), len(self.files))
        if image_index == len(self.files):
            self.files.append(image)
        return image_index


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all tables of a data set. Raises DataError for one whose columns are unclear."""
    notes = list(layout.notes)
    images = _Images()
    locators: dict[tuple[Path, ...], ImageLocator] = {}
    boxes: list[Box] = []
    bad_boxes: list[int] = []
    for part in layout.parts:
        locator = locators.setdefault(part.image_dirs, ImageLocator(layout.root, part))
        found = _read_table(part, locator, images, notes, problems, bad_boxes)
        usable = _detect_units(part.annotations, found, notes, problems)
        kept_lines = {box.box_id for box in usable}
        bad_boxes += [box.image_index for box in found if box.box_id not in kept_lines]
        boxes += usable
    if not images.files:
        path, fix = layout.parts[0].annotations, "export the annotations again"
        raise DataError("The tables list no images.", location=path, fix=fix)
    for locator in locators.values():
        notes += locator.notes()
    return build_table(
        layout, images.files, boxes, sort_class_names, problems, box_id_kind="line", notes=notes, bad_boxes=bad_boxes
    )


def _read_table(
    part: SplitFiles, locator: ImageLocator, images: _Images, notes: list[str], problems: ProblemCollector,
    bad_boxes: list[int],
) -> list[Box]:  # fmt: skip
    """The boxes of a table in its own units. Appends to bad_boxes the image of each row whose box cannot be read."""
    table = part.annotations
    layout = detect_csv_layout(table)
    if layout is None:
        raise DataError("The file is not a table of boxes any more.", location=table, fix="restore it, and try again")
    if layout.class_candidates:
        raise DataError(
            "It is unclear which column is the class.",
            location=table,
            cause="no column is called class, label, name, category …",
            choices=layout.class_candidates,
            fix="call that column class",
        )
    notes += [f"{table.name}: {note}" for note in layout.notes]
    if layout.label_column is None:
        notes.append(f"{table.name} has no class column: the class of all boxes is {NO_CLASS_COLUMN!r}")
    boxes = []
    num_columns = max(layout.file_column, *layout.box_columns, layout.label_column or 0) + 1
    for line, values in iter_rows(table, layout):
        location, quoted = f"{table.name}:{line}", repr(layout.delimiter.join(values)[:80])
        file_name = values[layout.file_column] if layout.file_column < len(values) else ""
        if len(values) < num_columns or not is_usable_name(file_name):
            reason = "too few columns" if is_usable_name(file_name) else "no image"
            problems.add("malformed-row", f"{location}: {quoted}, {reason}")
            continue
        folder, name = locator.locate(file_name)
        split = _choose_split(values, layout, part.split, locator.split_from_folder(folder))
        image_index = images.add(ImageFile(folder, name, split, _parse_size(values, layout)))
        texts = [values[column] for column in layout.box_columns]
        label = NO_CLASS_COLUMN if layout.label_column is None else values[layout.label_column]
        if not any(texts):
            if label and layout.label_column is not None:
                problems.add("no-box", f"{location}: {quoted}")
                bad_boxes.append(image_index)
        elif (xyxy := _parse_xyxy(texts, layout)) is None:
            problems.add("malformed-row", f"{location}: {quoted}, the box is not four numbers")
            bad_boxes.append(image_index)
        elif not label:
            problems.add("no-class", f"{location}: {quoted}")
            bad_boxes.append(image_index)
        else:
            boxes.append(Box(image_index, label, xyxy, line))
    return boxes


def _choose_split(values: list[str], layout: CsvLayout, table_split: str | None, folder_split: str | None) -> int:
    """The split of a row: from its column, else from the table's name, else from the image's folder."""
    word = ""
    if layout.split_column is not None and layout.split_column < len(values):
        word = values[layout.split_column].lower()
    split = split_from_name(word) or table_split or (folder_split if layout.split_column is None else None)
    return UNASSIGNED if split is None else SPLITS.index(split)


def _parse_xyxy(texts: list[str], layout: CsvLayout) -> tuple[float, float, float, float] | None:
    """x1, y1, x2, y2; None if the texts are not four numbers."""
    if len(texts) == 1:
        texts = texts[0].strip("[](){} ").replace(",", " ").split()
    elif layout.delimiter != ",":
        texts = [text.replace(",", ".") for text in texts]  # decimal commas, as Excel writes in many countries
    try:
        a, b, c, d = (float(text) for text in texts)
    except ValueError:
        return None
    if layout.box_format == "xyxy":
        return a, b, c, d
    if layout.box_format == "xywh":
        return a, b, a + c, b + d
    return a - c / 2, b - d / 2, a + c / 2, b + d / 2


def _parse_size(values: list[str], layout: CsvLayout) -> tuple[int, int]:
    """Height and width; 0 if the row has no valid size."""
    if layout.size_columns is None or max(layout.size_columns) >= len(values):
        return 0, 0
    try:
        height, width = (float(values[column]) for column in layout.size_columns)
    except ValueError:
        return 0, 0
    return (int(height), int(width)) if 1 <= height < 2**31 and 1 <= width < 2**31 else (0, 0)


def _detect_units(table: Path, boxes: list[Box], notes: list[str], problems: ProblemCollector) -> list[Box]:
    """The boxes of a table, marked as normalized if most are within 0 … 1; the others are then dropped."""
    xyxy = np.array([box.xyxy for box in boxes], np.float64).reshape(-1, 4)
    max_coordinate = np.abs(xyxy).max(1, initial=0)  # NaN if one coordinate is
    is_small = max_coordinate <= MAX_NORMALIZED
    if not 2 * np.count_nonzero(is_small) > len(boxes):
        return boxes
    notes.append(f"{table.name}: boxes are within 0 … 1, normalized by image width and height")
    normalized = []
    for box, is_large in zip(boxes, (np.isfinite(max_coordinate) & ~is_small).tolist(), strict=True):
        if is_large:
            quoted = ", ".join(f"{value:g}" for value in box.xyxy)
            problems.add("not-normalized", f"{table.name}:{box.box_id}: [{quoted}]")
        else:
            normalized.append(box._replace(is_normalized=True))
    return normalized
