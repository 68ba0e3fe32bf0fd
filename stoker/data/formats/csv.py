"""CSV tables with one row per box: reads a data set of them.

Boxes are in pixels or normalized by image width and height; this is decided per table. A row without box and class is
an image without objects. A row that cannot be read is dropped and reported; its image stays if another row names it.
The meaning of the columns: `csv_table.py`.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stoker.data.formats.csv_table import CsvLayout, detect_csv_layout, iter_rows
from stoker.data.formats.table_builder import Box, ImageFile, build_table
from stoker.data.formats.tables import (
    SPLIT_BY_NAME,
    SPLITS,
    UNASSIGNED,
    AnnotationTable,
    DatasetLayout,
    SplitFiles,
    is_image_name,
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
    locators: dict[tuple[Path, ...], _ImageLocator] = {}
    boxes: list[Box] = []
    for part in layout.parts:
        locator = locators.setdefault(part.image_dirs, _ImageLocator(layout.root, part))
        boxes += _read_table(part, locator, images, notes, problems)
    if not images.files:
        path, fix = layout.parts[0].annotations, "export the annotations again"
        raise DataError("The tables list no images.", location=path, fix=fix)
    for locator in locators.values():
        notes += locator.notes()
    return build_table(layout, images.files, boxes, _sort_class_names, problems, box_id_kind="line", notes=notes)


def _read_table(
    part: SplitFiles, locator: "_ImageLocator", images: _Images, notes: list[str], problems: ProblemCollector
) -> list[Box]:
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
        if len(values) < num_columns or not file_name:
            problems.add("malformed-row", f"{location}: {quoted}, {'too few columns' if file_name else 'no image'}")
            continue
        folder, name = locator.locate(file_name)
        split = _choose_split(values, layout, part.split, locator.split_from_folder(folder))
        image_index = images.add(ImageFile(folder, name, split, _parse_size(values, layout)))
        texts = [values[column] for column in layout.box_columns]
        label = NO_CLASS_COLUMN if layout.label_column is None else values[layout.label_column]
        if not any(texts):
            if label and layout.label_column is not None:
                problems.add("no-box", f"{location}: {quoted}")
        elif (xyxy := _parse_xyxy(texts, layout)) is None:
            problems.add("malformed-row", f"{location}: {quoted}, the box is not four numbers")
        elif not label:
            problems.add("no-class", f"{location}: {quoted}")
        else:
            boxes.append(Box(image_index, label, xyxy, line))
    return _detect_units(table, boxes, notes, problems)


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


def _sort_class_names(boxes: Sequence[Box]) -> list[str]:
    """The classes of the boxes by name; if all are numbers, by number."""
    names = {str(box.label) for box in boxes}
    if all(name.isascii() and name.isdigit() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


class _ImageLocator:
    """Finds the images that a table names. Lists each folder once."""

    def __init__(self, root: Path, part: SplitFiles) -> None:
        self._root = root
        self._base_dirs = tuple(dict.fromkeys((part.annotations.parent, root, *part.image_dirs)))
        self._listings: dict[Path, set[str]] = {}
        self._located: dict[str, tuple[Path, str]] = {}
        self._num_dirs_ignored = self._num_ambiguous = 0
        self._default_dir = part.image_dirs[0]
        self._dir_by_name: dict[str, Path] = {}
        self._name_by_key: dict[str, str] = {}
        """Case-folded name, with and without its suffix → name."""
        self._corrected: dict[str, str] = {}
        self._duplicates: set[str] = set()
        for folder in part.image_dirs:
            for name in sorted(self._list_dir(folder)):
                if self._dir_by_name.setdefault(name, folder) != folder and part.split is None:
                    self._duplicates.add(name)
                if is_image_name(name):
                    for key in (name.casefold(), os.path.splitext(name)[0].casefold()):
                        self._name_by_key.setdefault(key, name)

    def _list_dir(self, folder: Path) -> set[str]:
        if folder not in self._listings:
            self._listings[folder] = set(os.listdir(folder)) if folder.is_dir() else set()
        return self._listings[folder]

    def locate(self, text: str) -> tuple[Path, str]:
        """Folder and name of the image that a table names; the most likely folder if it is absent."""
        if text not in self._located:
            self._located[text] = self._search(text.replace("\\", "/"))
        return self._located[text]

    def _search(self, text: str) -> tuple[Path, str]:
        head, _, name = text.rpartition("/")
        is_local = bool(head) and "://" not in text
        if is_local:
            for base in self._base_dirs:
                folder = Path(os.path.normpath(base / head))
                if name in self._list_dir(folder):
                    return folder, name
        if name not in self._dir_by_name and (corrected := self._name_by_key.get(name.casefold())) is not None:
            self._corrected.setdefault(name, corrected)
            name = corrected
        if name in self._dir_by_name:
            self._num_dirs_ignored += bool(head)
            self._num_ambiguous += name in self._duplicates
            return self._dir_by_name[name], name
        return Path(os.path.normpath(self._base_dirs[0] / head)) if is_local else self._default_dir, name

    def split_from_folder(self, folder: Path) -> str | None:
        """The split in the path of a folder below the root."""
        inside = folder.relative_to(self._root).parts if folder.is_relative_to(self._root) else ()
        return next((split for part in inside if (split := SPLIT_BY_NAME.get(part.lower()))), None)

    def notes(self) -> list[str]:
        notes = []
        if self._num_dirs_ignored:
            count = self._num_dirs_ignored
            notes.append(f"the folders in {count:,} image names are ignored, because they do not exist")
        if self._corrected:
            written_name, name = next(iter(self._corrected.items()))
            count = len(self._corrected)
            notes.append(f"{count:,} images have other names than in the tables, e.g. {name} for {written_name}")
        if self._num_ambiguous:
            notes.append(f"{self._num_ambiguous:,} image names exist in several folders: the first is used")
        return notes
