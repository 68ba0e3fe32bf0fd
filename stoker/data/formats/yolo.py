"""YOLO's text files: reads a data set of one label file per picture into columns.

A row is `class x y width height` in shares of the upright picture, x and y its centre. Rows of a segmentation data set
(`class x1 y1 x2 y2 x3 y3 …`) and of oriented boxes become the box around their points; a sixth number is the confidence
of a prediction, and is not used. A row that cannot be read is left out and named; the rest of its file, and its
picture, stay. The sizes come from the pictures' headers (`image_sizes.py`).
Format: https://docs.ultralytics.com/datasets/detect/.
"""

import math
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stoker.data.formats.image_sizes import in_threads, read_sizes
from stoker.data.formats.names import resolve
from stoker.data.formats.tables import SPLITS, UNDECIDED, Columns, Folders, Found
from stoker.data.formats.yolo_files import (
    bases_of,
    is_label_file,
    is_picture,
    label_files,
    listed_pictures,
    match_labels,
)
from stoker.data.formats.yolo_yaml import NAMES_FILES, YAML_ENDINGS, read_definition, read_names
from stoker.data.validation.problems import Problems
from stoker.errors import DataError

OVERSHOOT = 0.1
"""How far beyond 0 … 1 the centre and the sides of a box may be. Rounding and tools that draw over the edge reach a few
percent; what was written in pixels by mistake is above 1.1, but for boxes in the first pixel."""
MOST_CLASSES = 10_000
"""Where nothing says how many classes there are, a larger number is a defect of the row."""


class _Row(NamedTuple):
    picture: int
    label: int
    box: tuple[float, float, float, float]
    """x1, y1, x2, y2 in shares of the picture."""
    line: int


@dataclass
class _Rules:
    """What the data set as a whole says about its rows."""

    names: tuple[str, ...] | None
    keypoint_numbers: int
    notes: list[str]
    read_as: Counter[str] = field(default_factory=Counter)
    """How many rows were something else than a box."""


class _Picture(NamedTuple):
    folder: Path
    name: str
    split: int
    label: Path | None


def read(found: Found, problems: Problems) -> Columns:
    """Reads all label files and the headers of all pictures. Raises DataError when the classes cannot be known."""
    rules = _rules(found)
    pictures = _pictures(found, problems)
    texts = in_threads(lambda picture: b"" if picture.label is None else picture.label.read_bytes(), pictures)
    rows = [
        row
        for number, (picture, text) in enumerate(zip(pictures, texts, strict=True))
        if picture.label is not None
        for row in _rows(number, text, _short(picture.label, found.root), rules, problems)
    ]
    size, unreadable = read_sizes([picture.folder / picture.name for picture in pictures])
    for number, count in Counter(row.picture for row in rows if row.picture in unreadable).items():
        picture = pictures[number]
        why = f"{_short(picture.folder / picture.name, found.root)}: {unreadable[number]}"
        problems.add("unplaced-box", why, count)
    rows = [row for row in rows if row.picture not in unreadable]
    picture_of = np.array([row.picture for row in rows], np.int64)
    shares = np.array([row.box for row in rows], np.float64).reshape(-1, 4)
    names = rules.names
    if names is None:
        names = tuple(f"class {number}" for number in range(max((row.label for row in rows), default=-1) + 1))
        rules.notes.append("nothing names the classes: called class 0, class 1, …; a data.yaml with `names` would")
    folders = Folders(found.root)
    folder = [folders.number(str(picture.folder)) for picture in pictures]
    return Columns(
        class_names=list(names),
        category_ids=list(range(len(names))),
        folders=folders.texts(),
        folder=np.array(folder, np.int32),
        names=[picture.name for picture in pictures],
        split=np.array([picture.split for picture in pictures], np.int8),
        size=size,
        image_id=np.arange(len(pictures), dtype=np.int64),
        row=picture_of,
        boxes=shares * size[picture_of][:, [1, 0, 1, 0]],
        labels=np.array([row.label for row in rows], np.int32),
        crowd=np.zeros(len(rows), np.bool_),
        area=np.full(len(rows), np.nan),
        box_id=np.array([row.line for row in rows], np.int64),
        box_word="line",
        measured=True,
        notes=[*found.notes, *rules.notes, *(f"{count:,} {what}" for what, count in rules.read_as.items())],
    )


def _rules(found: Found) -> _Rules:
    """The classes, and what rows hold, from the files that describe the set."""
    names, count, keypoint_numbers, notes = None, None, 0, []
    lists = list(found.descriptions)
    if lists and lists[0].suffix.lower() in (*YAML_ENDINGS, ".data"):
        definition = read_definition(lists.pop(0))
        names, count, keypoint_numbers = definition.names, definition.count, definition.keypoint_numbers
    if names is None and lists:
        names = read_names(lists[0])
        for other in lists[1:]:
            if read_names(other) != names:
                raise DataError(
                    "Two lists of class names disagree.",
                    place=f"{lists[0]} and {other}",
                    cause=f"{', '.join(names[:10])}; {', '.join(read_names(other)[:10])}",
                    fix="delete the wrong one, or write a data.yaml with `names`",
                )
        notes.append(f"classes: {_short(lists[0], found.root)}")
    if names is None and count:
        names = tuple(f"class {number}" for number in range(count))
        notes.append(f"the {count} classes have no names: called class 0, class 1, …")
    elif names is not None and count is not None and count != len(names):
        notes.append(f"nc says {count} classes, names has {len(names)}: names is believed")
    return _Rules(names, keypoint_numbers, notes)


def _pictures(found: Found, problems: Problems) -> list[_Picture]:
    """All pictures with their label files, in the order of the parts; by name where no list orders them."""
    lists: dict[Path, dict[Path, list[str]]] = {}
    labels: dict[Path, list[str]] = {}
    used: set[Path] = set()
    pictures = []
    for part in found.parts:
        if part.listing is not None and part.listing not in lists:
            lists[part.listing] = listed_pictures(part.listing, _bases(found))
        folder = part.pictures[0]
        names = _names_in(folder) if part.listing is None else _mended(lists[part.listing][folder], folder, problems)
        if part.annotations not in labels:
            labels[part.annotations] = label_files(part.annotations)
        own = match_labels(names, labels[part.annotations])
        split = UNDECIDED if part.split is None else SPLITS.index(part.split)
        for name in names:
            label = part.annotations / own[name] if name in own else None
            if label is None:
                problems.add("no-label-file", _short(folder / name, found.root))
            pictures.append(_Picture(folder, name, split, label))
        shared = {label for label, count in Counter(own.values()).items() if count > 1}
        for name in names if shared else ():
            if own.get(name) in shared and part.annotations / own[name] not in used:
                label_place = _short(part.annotations / own[name], found.root)
                problems.add("shared-label-file", f"{_short(folder / name, found.root)}: {label_place}")
        used.update(part.annotations / label_name for label_name in own.values())
    _name_strays(found, labels, used, problems)
    return pictures


def _bases(found: Found) -> tuple[Path, ...]:
    described = [path for path in found.descriptions[:1] if path.suffix.lower() in (*YAML_ENDINGS, ".data")]
    return bases_of(read_definition(described[0]))[0] if described else ()


def _names_in(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if is_picture(entry.name))


def _mended(names: list[str], folder: Path, problems: Problems) -> list[str]:
    """The names of a list, as the files are called: their headers are read before `names.mend` could set them right."""
    files = resolve(folder, names)
    for said, file in files.items():
        problems.add("wrong-case-name", f"{said!r}: the file is {str(folder / file)!r}")
    return [files.get(name, name) for name in names]


def _name_strays(found: Found, labels: dict[Path, list[str]], used: set[Path], problems: Problems) -> None:
    """Reports label files without a picture, where the pictures are all those of a folder and not those of a list."""
    listed = {part.annotations for part in found.parts if part.listing is not None}
    for folder, names in labels.items():
        for file in [] if folder in listed else [folder / name for name in names if name not in NAMES_FILES]:
            if file not in used and is_label_file(file):
                problems.add("label-without-picture", _short(file, found.root))


def _rows(number: int, text: bytes, place: str, rules: _Rules, problems: Problems) -> list[_Row]:
    """The rows of a label file that can be used; the others are reported with their line."""
    rows = []
    for line, content in enumerate(text.removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
        fields = content.split()
        if not fields:
            continue
        try:
            label, *values = [float(value) for value in fields]
        except ValueError:
            problems.add("malformed-row", f"{place}:{line}: {_shown(content)}, not all of it numbers")
            continue
        if not (label.is_integer() and label >= 0):
            problems.add("malformed-row", f"{place}:{line}: {_shown(content)}, class {label:g}")
            continue
        box = _box(values, rules)
        if box is None:
            problems.add("malformed-row", f"{place}:{line}: {_shown(content)}, {len(values)} numbers after the class")
            continue
        if label >= (MOST_CLASSES if rules.names is None else len(rules.names)):
            known = "" if rules.names is None else f", the classes are 0 … {len(rules.names) - 1}"
            problems.add("unknown-class", f"{place}:{line}: class {label:g}{known}")
            continue
        if not _in_shares(*box):
            problems.add("not-normalised", f"{place}:{line}: {_shown(content)}")
            continue
        rows.append(_Row(number, int(label), box, line))
    return rows


def _box(values: list[float], rules: _Rules) -> tuple[float, float, float, float] | None:
    """x1, y1, x2, y2 of the numbers after the class; None where their count fits no kind of row."""
    count = len(values)
    if rules.keypoint_numbers and count == 4 + rules.keypoint_numbers:
        rules.read_as["rows have keypoints: their boxes are read"] += 1
    elif count == 5:
        rules.read_as["rows have a sixth number, a confidence: it is not used"] += 1
    elif count >= 6 and count % 2 == 0:
        rules.read_as["rows are polygons: the boxes around them are used"] += 1
        return min(values[::2]), min(values[1::2]), max(values[::2]), max(values[1::2])
    elif count != 4:
        return None
    x, y, width, height = values[:4]
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _in_shares(x1: float, y1: float, x2: float, y2: float) -> bool:
    """Whether centre and sides of a box can be shares of a picture; NaN and infinity are for `clean.py` to report."""
    if not all(map(math.isfinite, (x1, y1, x2, y2))):
        return True
    x, y = (x1 + x2) / 2, (y1 + y2) / 2
    return min(x, y) >= -OVERSHOOT and max(x, y, x2 - x1, y2 - y1) <= 1 + OVERSHOOT


def _shown(content: bytes) -> str:
    return repr(content[:60].decode(errors="replace"))


def _short(path: Path, root: Path) -> str:
    """A path as messages show it: relative to the root where it is inside."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
