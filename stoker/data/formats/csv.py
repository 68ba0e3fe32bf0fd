"""CSV tables with a row per box: reads a data set of them into columns.

Boxes are in pixels or in shares of the picture's width and height, decided for each table as a whole. A row without
box and class is a picture without objects. A row that cannot be read is left out and named; the picture stays, if
others name it. Which column is what: `csv_table.py`.
"""

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stoker.data.formats.csv_table import Layout, layout_of, rows_of
from stoker.data.formats.image_sizes import read_sizes
from stoker.data.formats.tables import (
    PICTURE_ENDINGS,
    SPLIT_WORDS,
    SPLITS,
    UNDECIDED,
    Columns,
    Folders,
    Found,
    Part,
    split_in_name,
)
from stoker.data.validation.problems import Problems
from stoker.errors import DataError

IN_SHARES = 1.05
"""The largest coordinate of a box that is in shares of the picture; a box in pixels is hardly ever this small."""


class _Box(NamedTuple):
    picture: int
    corners: tuple[float, float, float, float]
    """x1, y1, x2, y2, as the table has them."""
    name: str
    line: int


@dataclass
class _Pictures:
    """The pictures of all tables so far, in order of appearance."""

    rows: dict[tuple[int, Path, str], int] = field(default_factory=dict)
    """Split, folder, file name → row."""
    size: list[tuple[int, int]] = field(default_factory=list)
    """Height, width as the tables say them; 0 where they do not."""

    def row(self, split: int, folder: Path, name: str, size: tuple[int, int]) -> int:
        row = self.rows.setdefault((split, folder, name), len(self.rows))
        if row == len(self.size):
            self.size.append(size)
        return row


def read(found: Found, problems: Problems) -> Columns:
    """Reads all tables of a data set. Raises DataError when one cannot be understood."""
    notes = list(found.notes)
    pictures = _Pictures()
    shelves: dict[tuple[Path, ...], _Shelf] = {}
    items: list[_Box] = []
    shares: list[bool] = []
    for part in found.parts:
        shelf = shelves.setdefault(part.pictures, _Shelf(found.root, part))
        boxes, in_shares = _read_table(part, shelf, pictures, notes, problems)
        items += boxes
        shares += [in_shares] * len(boxes)
    if not pictures.rows:
        place, fix = found.parts[0].annotations, "export the annotations again"
        raise DataError("The tables list no pictures.", place=place, fix=fix)
    keys = list(pictures.rows)
    size = np.array(pictures.size, np.int32).reshape(-1, 2)
    scaled = np.array(shares, np.bool_)
    picture = np.array([item.picture for item in items], np.int64)
    unsized = np.flatnonzero((size == 0).any(1) | np.isin(np.arange(len(size)), picture[scaled]))
    size[unsized], failed = read_sizes([keys[row][1] / keys[row][2] for row in unsized.tolist()])
    unreadable = {int(unsized[number]): why for number, why in failed.items()}
    corners = np.array([item.corners for item in items], np.float64).reshape(-1, 4)
    corners[scaled] *= size[picture[scaled]][:, [1, 0, 1, 0]]
    unplaced = scaled & np.isin(picture, list(unreadable))
    for row, count in Counter(picture[unplaced].tolist()).items():
        problems.add("unplaced-box", f"{keys[row][2]}: {unreadable[row]}", count)
    kept = np.flatnonzero(~unplaced)
    kept = kept[np.argsort(picture[kept], kind="stable")]
    items = [items[number] for number in kept.tolist()]
    class_names = _sorted({item.name for item in items})
    label = {name: number for number, name in enumerate(class_names)}
    folders = Folders(found.root)
    for shelf in shelves.values():
        notes += shelf.notes()
    return Columns(
        class_names=class_names,
        category_ids=list(range(len(class_names))),
        folder=np.array([folders.number(str(place)) for _, place, _ in keys], np.int32),
        folders=folders.texts(),
        names=[name for _, _, name in keys],
        split=np.array([split for split, _, _ in keys], np.int8),
        size=size,
        image_id=np.arange(len(keys), dtype=np.int64),
        row=picture[kept],
        boxes=corners[kept],
        labels=np.array([label[item.name] for item in items], np.int32),
        crowd=np.zeros(len(items), np.bool_),
        area=np.full(len(items), np.nan),
        box_id=np.array([item.line for item in items], np.int64),
        box_word="line",
        measured=len(unsized) > 0,
        notes=notes,
    )


def _read_table(
    part: Part, shelf: "_Shelf", pictures: _Pictures, notes: list[str], problems: Problems
) -> tuple[list[_Box], bool]:
    """The boxes of a table, and whether they are in shares of the picture."""
    table = part.annotations
    layout = layout_of(table)
    if layout is None:
        raise DataError("The file is not a table of boxes any more.", place=table, fix="restore it, and try again")
    if layout.unsure:
        raise DataError(
            "It is unclear which column is the class.",
            place=table,
            cause="no column is called class, label, name, category …",
            choices=layout.unsure,
            fix="call that column class",
        )
    notes += [f"{table.name}: {note}" for note in layout.notes]
    if layout.label is None:
        notes.append(f"{table.name} has no column of classes: all boxes are of one class, 'object'")
    boxes = []
    for line, values in rows_of(table, layout):
        place, shown = f"{table.name}:{line}", repr(layout.delimiter.join(values)[:80])
        if len(values) <= max(layout.file, *layout.box, layout.label or 0) or not values[layout.file]:
            why = "too few columns" if layout.file < len(values) and values[layout.file] else "no picture"
            problems.add("malformed-row", f"{place}: {shown}, {why}")
            continue
        folder, name = shelf.of(values[layout.file])
        split = _split(values, layout, part.split, shelf.split_of(folder))
        picture = pictures.row(split, folder, name, _size(values, layout))
        texts = [values[number] for number in layout.box]
        label = "object" if layout.label is None else values[layout.label]
        if not any(texts):
            if label and layout.label is not None:
                problems.add("no-box", f"{place}: {shown}")
        elif (corners := _corners(texts, layout)) is None:
            problems.add("malformed-row", f"{place}: {shown}, the box is not four numbers")
        elif not label:
            problems.add("no-class", f"{place}: {shown}")
        else:
            boxes.append(_Box(picture, corners, label, line))
    return _decide_unit(table, boxes, notes, problems)


def _split(values: list[str], layout: Layout, of_table: str | None, of_folder: str | None) -> int:
    """The split of a row: that of its column, else of its table's name, else of its picture's folder."""
    word = values[layout.split].lower() if layout.split is not None and layout.split < len(values) else ""
    named = split_in_name(word) or of_table or (of_folder if layout.split is None else None)
    return UNDECIDED if named is None else SPLITS.index(named)


def _corners(texts: list[str], layout: Layout) -> tuple[float, float, float, float] | None:
    """x1, y1, x2, y2; None where the texts are not four numbers."""
    if len(texts) == 1:
        texts = texts[0].strip("[](){} ").replace(",", " ").split()
    elif layout.delimiter != ",":
        texts = [text.replace(",", ".") for text in texts]  # decimal commas, as Excel writes in much of the world
    try:
        a, b, c, d = (float(text) for text in texts)
    except ValueError:
        return None
    if layout.kind == "corners":
        return a, b, c, d
    return (a, b, a + c, b + d) if layout.kind == "corner and sides" else (a - c / 2, b - d / 2, a + c / 2, b + d / 2)


def _size(values: list[str], layout: Layout) -> tuple[int, int]:
    """Height and width; 0 where the row does not say a size that makes sense."""
    if layout.size is None or max(layout.size) >= len(values):
        return 0, 0
    try:
        height, width = (float(values[number]) for number in layout.size)
    except ValueError:
        return 0, 0
    return (int(height), int(width)) if 1 <= height < 2**31 and 1 <= width < 2**31 else (0, 0)


def _decide_unit(table: Path, boxes: list[_Box], notes: list[str], problems: Problems) -> tuple[list[_Box], bool]:
    """The boxes of a table that fit its unit, and whether that is shares of the picture: what most boxes fit."""
    corners = np.array([box.corners for box in boxes], np.float64).reshape(-1, 4)
    largest = np.abs(corners).max(1, initial=0)  # NaN where one is
    finite, small = np.isfinite(largest), largest <= IN_SHARES
    if not 2 * np.count_nonzero(small) > len(boxes):
        return boxes, False
    notes.append(f"{table.name}: boxes are within 0 … 1, shares of the picture's width and height")
    large = finite & ~small
    for number in np.flatnonzero(large).tolist():
        shown = ", ".join(f"{value:g}" for value in boxes[number].corners)
        problems.add("not-normalised", f"{table.name}:{boxes[number].line}: [{shown}]")
    return [boxes[number] for number in np.flatnonzero(~large).tolist()], True


def _sorted(names: set[str]) -> list[str]:
    """By name; numbers in their own order."""
    if all(name.isascii() and name.isdigit() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


class _Shelf:
    """The pictures of some folders, listed once, to find those that a table names."""

    def __init__(self, root: Path, part: Part) -> None:
        self._root = root
        self._bases = tuple(dict.fromkeys((part.annotations.parent, root, *part.pictures)))
        self._listed: dict[Path, set[str]] = {}
        self._of: dict[str, tuple[Path, str]] = {}
        self._ignored = self._ambiguous = 0
        self._likeliest = part.pictures[0]
        self._by_name: dict[str, Path] = {}
        self._like: dict[str, str] = {}
        """Name in folded case, with and without its ending → name."""
        self._respelled: dict[str, str] = {}
        self._twice: set[str] = set()
        for folder in part.pictures:
            for name in sorted(self._list(folder)):
                if self._by_name.setdefault(name, folder) != folder and part.split is None:
                    self._twice.add(name)
                if name.lower().endswith(PICTURE_ENDINGS):
                    for key in (name.casefold(), os.path.splitext(name)[0].casefold()):
                        self._like.setdefault(key, name)

    def _list(self, folder: Path) -> set[str]:
        if folder not in self._listed:
            self._listed[folder] = set(os.listdir(folder)) if folder.is_dir() else set()
        return self._listed[folder]

    def of(self, text: str) -> tuple[Path, str]:
        """Folder and name of the picture that a table names; the likeliest place where it is not there."""
        if text not in self._of:
            self._of[text] = self._look(text.replace("\\", "/"))
        return self._of[text]

    def _look(self, text: str) -> tuple[Path, str]:
        head, _, name = text.rpartition("/")
        if head and "://" not in text:
            for base in self._bases:
                folder = Path(os.path.normpath(base / head))
                if name in self._list(folder):
                    return folder, name
        if name not in self._by_name and (like := self._like.get(name.casefold())) is not None:
            self._respelled.setdefault(name, like)
            name = like
        if name in self._by_name:
            self._ignored += bool(head)
            self._ambiguous += name in self._twice
            return self._by_name[name], name
        return (Path(os.path.normpath(self._bases[0] / head)) if head and "://" not in text else self._likeliest), name

    def split_of(self, folder: Path) -> str | None:
        """The split that a folder below the root is named after."""
        inside = folder.relative_to(self._root).parts if folder.is_relative_to(self._root) else ()
        return next((word for part in inside if (word := SPLIT_WORDS.get(part.lower()))), None)

    def notes(self) -> list[str]:
        notes = []
        if self._ignored:
            notes.append(f"the folders in the names of {self._ignored:,} pictures are ignored: they are not there")
        if self._respelled:
            said, name = next(iter(self._respelled.items()))
            notes.append(f"{len(self._respelled):,} pictures have other names than the tables say, e.g. {said}: {name}")
        if self._ambiguous:
            notes.append(f"{self._ambiguous:,} names are those of pictures in several folders: the first is used")
        return notes
