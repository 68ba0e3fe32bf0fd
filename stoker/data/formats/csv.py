"""CSV tables with a row per box: reads a data set of them into columns.

Boxes are in pixels or in shares of the image's width and height, decided for each table as a whole. A row without
box and class is an image without objects. A row that cannot be read is left out and named; the image stays, if
others name it. Which column is what: `csv_table.py`.
"""

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stoker.data.formats.csv_table import CsvLayout, detect_csv_layout, iter_rows
from stoker.data.formats.image_sizes import read_sizes
from stoker.data.formats.tables import (
    IMAGE_SUFFIXES,
    SPLIT_BY_NAME,
    SPLITS,
    UNASSIGNED,
    AnnotationTable,
    DatasetLayout,
    FolderTable,
    SplitFiles,
    split_from_name,
)
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError

MAX_NORMALIZED = 1.05
"""The largest coordinate of a box that is in shares of the image; a box in pixels is hardly ever this small."""


class _Box(NamedTuple):
    image_index: int
    xyxy: tuple[float, float, float, float]
    """x1, y1, x2, y2, as the table has them."""
    class_name: str
    line: int


@dataclass
class _Images:
    """The images of all tables so far, in order of appearance."""

    index_by_key: dict[tuple[int, Path, str], int] = field(default_factory=dict)
    """Split, folder, file name → row."""
    sizes: list[tuple[int, int]] = field(default_factory=list)
    """Height, width as the tables say them; 0 where they do not."""

    def add(self, split: int, folder: Path, name: str, size: tuple[int, int]) -> int:
        image_index = self.index_by_key.setdefault((split, folder, name), len(self.index_by_key))
        if image_index == len(self.sizes):
            self.sizes.append(size)
        return image_index


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all tables of a data set. Raises DataError when one cannot be understood."""
    notes = list(layout.notes)
    images = _Images()
    locators: dict[tuple[Path, ...], _ImageLocator] = {}
    items: list[_Box] = []
    normalized: list[bool] = []
    for part in layout.parts:
        locator = locators.setdefault(part.image_dirs, _ImageLocator(layout.root, part))
        boxes, is_normalized = _read_table(part, locator, images, notes, problems)
        items += boxes
        normalized += [is_normalized] * len(boxes)
    if not images.index_by_key:
        path, fix = layout.parts[0].annotations, "export the annotations again"
        raise DataError("The tables list no images.", location=path, fix=fix)
    keys = list(images.index_by_key)
    size = np.array(images.sizes, np.int32).reshape(-1, 2)
    needs_scaling = np.array(normalized, np.bool_)
    image_indices = np.array([item.image_index for item in items], np.int64)
    without_size = np.flatnonzero((size == 0).any(1) | np.isin(np.arange(len(size)), image_indices[needs_scaling]))
    size[without_size], failures = read_sizes(
        [keys[image_index][1] / keys[image_index][2] for image_index in without_size.tolist()]
    )
    unreadable = {int(without_size[number]): reason for number, reason in failures.items()}
    xyxy = np.array([item.xyxy for item in items], np.float64).reshape(-1, 4)
    xyxy[needs_scaling] *= size[image_indices[needs_scaling]][:, [1, 0, 1, 0]]
    unscalable = needs_scaling & np.isin(image_indices, list(unreadable))
    for image_index, count in Counter(image_indices[unscalable].tolist()).items():
        problems.add("box-of-unreadable-image", f"{keys[image_index][2]}: {unreadable[image_index]}", count)
    kept = np.flatnonzero(~unscalable)
    kept = kept[np.argsort(image_indices[kept], kind="stable")]
    items = [items[number] for number in kept.tolist()]
    class_names = _sort_class_names({item.class_name for item in items})
    label_by_name = {name: number for number, name in enumerate(class_names)}
    folders = FolderTable(layout.root)
    for locator in locators.values():
        notes += locator.notes()
    return AnnotationTable(
        class_names=class_names,
        category_ids=list(range(len(class_names))),
        folder_index=np.array([folders.add(str(path)) for _, path, _ in keys], np.int32),
        folders=folders.paths(),
        file_names=[name for _, _, name in keys],
        split=np.array([split for split, _, _ in keys], np.int8),
        original_size=size,
        image_id=np.arange(len(keys), dtype=np.int64),
        image_index=image_indices[kept],
        boxes=xyxy[kept],
        labels=np.array([label_by_name[item.class_name] for item in items], np.int32),
        crowd=np.zeros(len(items), np.bool_),
        area=np.full(len(items), np.nan),
        box_id=np.array([item.line for item in items], np.int64),
        box_id_kind="line",
        sizes_from_headers=len(without_size) > 0,
        notes=notes,
    )


def _read_table(
    part: SplitFiles, locator: "_ImageLocator", images: _Images, notes: list[str], problems: ProblemCollector
) -> tuple[list[_Box], bool]:
    """The boxes of a table, and whether they are in shares of the image."""
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
        notes.append(f"{table.name} has no column of classes: all boxes are of one class, 'object'")
    boxes = []
    for line, values in iter_rows(table, layout):
        location, quoted = f"{table.name}:{line}", repr(layout.delimiter.join(values)[:80])
        if (
            len(values) <= max(layout.file_column, *layout.box_columns, layout.label_column or 0)
            or not values[layout.file_column]
        ):
            reason = (
                "too few columns" if layout.file_column < len(values) and values[layout.file_column] else "no image"
            )
            problems.add("malformed-row", f"{location}: {quoted}, {reason}")
            continue
        folder, name = locator.locate(values[layout.file_column])
        split = _choose_split(values, layout, part.split, locator.split_from_folder(folder))
        image_index = images.add(split, folder, name, _parse_size(values, layout))
        texts = [values[column] for column in layout.box_columns]
        label = "object" if layout.label_column is None else values[layout.label_column]
        if not any(texts):
            if label and layout.label_column is not None:
                problems.add("no-box", f"{location}: {quoted}")
        elif (xyxy := _parse_xyxy(texts, layout)) is None:
            problems.add("malformed-row", f"{location}: {quoted}, the box is not four numbers")
        elif not label:
            problems.add("no-class", f"{location}: {quoted}")
        else:
            boxes.append(_Box(image_index, xyxy, label, line))
    return _detect_units(table, boxes, notes, problems)


def _choose_split(values: list[str], layout: CsvLayout, table_split: str | None, folder_split: str | None) -> int:
    """The split of a row: that of its column, else of its table's name, else of its image's folder."""
    word = (
        values[layout.split_column].lower()
        if layout.split_column is not None and layout.split_column < len(values)
        else ""
    )
    split = split_from_name(word) or table_split or (folder_split if layout.split_column is None else None)
    return UNASSIGNED if split is None else SPLITS.index(split)


def _parse_xyxy(texts: list[str], layout: CsvLayout) -> tuple[float, float, float, float] | None:
    """x1, y1, x2, y2; None where the texts are not four numbers."""
    if len(texts) == 1:
        texts = texts[0].strip("[](){} ").replace(",", " ").split()
    elif layout.delimiter != ",":
        texts = [text.replace(",", ".") for text in texts]  # decimal commas, as Excel writes in much of the world
    try:
        a, b, c, d = (float(text) for text in texts)
    except ValueError:
        return None
    if layout.box_format == "corners":
        return a, b, c, d
    return (
        (a, b, a + c, b + d)
        if layout.box_format == "corner and sides"
        else (a - c / 2, b - d / 2, a + c / 2, b + d / 2)
    )


def _parse_size(values: list[str], layout: CsvLayout) -> tuple[int, int]:
    """Height and width; 0 where the row does not say a size that makes sense."""
    if layout.size_columns is None or max(layout.size_columns) >= len(values):
        return 0, 0
    try:
        height, width = (float(values[column]) for column in layout.size_columns)
    except ValueError:
        return 0, 0
    return (int(height), int(width)) if 1 <= height < 2**31 and 1 <= width < 2**31 else (0, 0)


def _detect_units(
    table: Path, boxes: list[_Box], notes: list[str], problems: ProblemCollector
) -> tuple[list[_Box], bool]:
    """The boxes of a table that fit its unit, and whether that is shares of the image: what most boxes fit."""
    xyxy = np.array([box.xyxy for box in boxes], np.float64).reshape(-1, 4)
    max_coordinate = np.abs(xyxy).max(1, initial=0)  # NaN where one is
    finite, is_small = np.isfinite(max_coordinate), max_coordinate <= MAX_NORMALIZED
    if not 2 * np.count_nonzero(is_small) > len(boxes):
        return boxes, False
    notes.append(f"{table.name}: boxes are within 0 … 1, shares of the image's width and height")
    is_large = finite & ~is_small
    for box_index in np.flatnonzero(is_large).tolist():
        quoted = ", ".join(f"{value:g}" for value in boxes[box_index].xyxy)
        problems.add("not-normalized", f"{table.name}:{boxes[box_index].line}: [{quoted}]")
    return [boxes[box_index] for box_index in np.flatnonzero(~is_large).tolist()], True


def _sort_class_names(names: set[str]) -> list[str]:
    """By name; numbers in their own order."""
    if all(name.isascii() and name.isdigit() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


class _ImageLocator:
    """The images of some folders, listed once, to find those that a table names."""

    def __init__(self, root: Path, part: SplitFiles) -> None:
        self._root = root
        self._base_dirs = tuple(dict.fromkeys((part.annotations.parent, root, *part.image_dirs)))
        self._listings: dict[Path, set[str]] = {}
        self._located: dict[str, tuple[Path, str]] = {}
        self._num_dirs_ignored = self._num_ambiguous = 0
        self._default_dir = part.image_dirs[0]
        self._dir_by_name: dict[str, Path] = {}
        self._name_by_key: dict[str, str] = {}
        """Name in folded case, with and without its ending → name."""
        self._corrected: dict[str, str] = {}
        self._duplicates: set[str] = set()
        for folder in part.image_dirs:
            for name in sorted(self._list_dir(folder)):
                if self._dir_by_name.setdefault(name, folder) != folder and part.split is None:
                    self._duplicates.add(name)
                if name.lower().endswith(IMAGE_SUFFIXES):
                    for key in (name.casefold(), os.path.splitext(name)[0].casefold()):
                        self._name_by_key.setdefault(key, name)

    def _list_dir(self, folder: Path) -> set[str]:
        if folder not in self._listings:
            self._listings[folder] = set(os.listdir(folder)) if folder.is_dir() else set()
        return self._listings[folder]

    def locate(self, text: str) -> tuple[Path, str]:
        """Folder and name of the image that a table names; the likeliest place where it is not there."""
        if text not in self._located:
            self._located[text] = self._search(text.replace("\\", "/"))
        return self._located[text]

    def _search(self, text: str) -> tuple[Path, str]:
        head, _, name = text.rpartition("/")
        if head and "://" not in text:
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
        return (
            Path(os.path.normpath(self._base_dirs[0] / head)) if head and "://" not in text else self._default_dir
        ), name

    def split_from_folder(self, folder: Path) -> str | None:
        """The split that a folder below the root is named after."""
        inside = folder.relative_to(self._root).parts if folder.is_relative_to(self._root) else ()
        return next((split for part in inside if (split := SPLIT_BY_NAME.get(part.lower()))), None)

    def notes(self) -> list[str]:
        notes = []
        if self._num_dirs_ignored:
            notes.append(
                f"the folders in the names of {self._num_dirs_ignored:,} images are ignored: they are not there"
            )
        if self._corrected:
            written_name, name = next(iter(self._corrected.items()))
            notes.append(
                f"{len(self._corrected):,} images have other names than the tables say, e.g. {written_name}: {name}"
            )
        if self._num_ambiguous:
            notes.append(f"{self._num_ambiguous:,} names are those of images in several folders: the first is used")
        return notes
