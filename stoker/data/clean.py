"""From what a source says to what may be trained on: drops boxes that cannot be used and makes the splits.

Nothing is dropped or divided silently: every kind of bad box is counted with examples, every choice becomes a note. Not
here: reading (`formats/`), writing the index (`cache.py`).
"""

import unicodedata
from collections import Counter
from dataclasses import replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from stoker.data.formats.columns import SPLITS, UNDECIDED, Columns
from stoker.data.problems import Problems
from stoker.errors import DataError

TRAIN, VAL, TEST = range(3)
KINDS = ("not-a-number", "negative-size", "zero-size", "outside")


def drop_degenerate(columns: Columns, problems: Problems) -> Columns:
    """Leaves out the boxes that have no area, in float32, or none inside the picture; others stay as drawn, also those
    that reach over the edge. Fills in the area, width × height, where the source has none."""
    with np.errstate(over="ignore", invalid="ignore"):
        x1, y1, x2, y2 = columns.boxes.astype(np.float32).T
        height, width = columns.size[columns.row].T
        tests = (
            ~(np.isfinite(x1) & np.isfinite(y1) & np.isfinite(x2) & np.isfinite(y2)),
            (x2 < x1) | (y2 < y1),
            (x2 == x1) | (y2 == y1),
            (x2 <= 0) | (y2 <= 0) | ((x1 >= width) & (width > 0)) | ((y1 >= height) & (height > 0)),
        )
    kind = np.select(tests, range(len(tests)), default=-1)
    for number, name in enumerate(KINDS):
        for box in np.flatnonzero(kind == number).tolist():
            problems.add(name, _describe(columns, box))
    keep = kind < 0
    boxes = columns.boxes[keep]
    area = columns.area[keep]
    own = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    return replace(
        columns,
        row=columns.row[keep],
        boxes=boxes,
        labels=columns.labels[keep],
        crowd=columns.crowd[keep],
        area=np.where(np.isfinite(area) & (area >= 0), area, own),
        box_id=columns.box_id[keep],
    )


def _describe(columns: Columns, box: int) -> str:
    corners = ", ".join(f"{value:g}" for value in columns.boxes[box])
    return f"{columns.picture(columns.row[box])}, {columns.box_word} {columns.box_id[box]}: [{corners}]"


def divide(columns: Columns, val_fraction: float, *, asked: bool) -> Columns:
    """Gives every picture a split. Those of the source stay; where it has no validation split, part of the rest becomes
    it, decided by a hash of each file's name, so that a picture stays where it is when others are added.

    asked: the fraction was set by the user, who is to be told when the source's own split makes it moot.
    """
    notes = list(columns.notes)
    split = columns.split.copy()
    has = set(split.tolist())
    if UNDECIDED in has or (TRAIN in has and VAL not in has):
        rows = np.flatnonzero((split == UNDECIDED) | (split == TRAIN))
        held = _held_back([columns.names[row] for row in rows], val_fraction)
        split[rows] = np.where(held, VAL, TRAIN)
        if held.any():
            whose = "no splits" if UNDECIDED in has else "no validation split"
            notes.append(
                f"{whose}: {val_fraction:.3g} of the pictures, {held.sum()} of {held.size}, held back"
                " as validation by a hash of the file name"
            )
        else:
            notes.append("no validation split, and a single picture cannot be divided")
    elif TRAIN not in has:
        notes.append(f"no training split: the data set has only {' and '.join(SPLITS[k] for k in sorted(has))}")
    elif asked:
        notes.append(f"val_fraction {val_fraction:.3g} is not used: the data set has its own validation split")
    return replace(columns, split=split, notes=notes)


def _held_back(names: list[str], fraction: float) -> NDArray[np.bool_]:
    """[N], which file names are held back; at least one and not all, where there are two."""
    value = np.array([_uniform(name) for name in names])
    held = value < fraction
    if held.size > 1:
        held[value.argmin()] = True
        held[value.argmax()] = False
    return held


def _uniform(name: str) -> float:
    """A number in [0, 1) that depends on the text alone; composed and decomposed Unicode (macOS) are one text."""
    text = unicodedata.normalize("NFC", name).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") / 2**64


def check(columns: Columns, problems: Problems) -> Columns:
    """Adds notes on what is odd but allowed. Raises DataError when nothing can be learned from the training split."""
    notes = list(columns.notes)
    split_of_box = columns.split[columns.row]
    for number, name in enumerate(SPLITS):
        if not (columns.split == number).any():
            continue
        if not (split_of_box == number).any():
            if number == TRAIN:
                raise DataError(
                    "The training split has no boxes.",
                    place=columns.picture(int(np.flatnonzero(columns.split == TRAIN)[0])) + " and all others",
                    cause="; ".join(f"{p.count} boxes left out: {p.title}" for p in problems.found()) or None,
                    fix="check that these are annotations for detection, with boxes",
                )
            notes.append(f"the {name} split has no boxes: it has no AP")
    counts = np.bincount(columns.labels[split_of_box == TRAIN], minlength=len(columns.class_names))
    absent = [name for name, count in zip(columns.class_names, counts, strict=True) if not count]
    if absent and (columns.split == TRAIN).any():
        more = f" and {len(absent) - 10} more" if len(absent) > 10 else ""
        notes.append(f"no boxes in the training split: {', '.join(absent[:10])}{more}")
    twice = [
        key for key, count in Counter(zip(columns.folder.tolist(), columns.names, strict=True)).items() if count > 1
    ]
    if twice:
        notes.append(f"{len(twice)} pictures are in more than one split, e.g. {twice[0][1]}: scores will flatter")
    return replace(columns, notes=notes)
