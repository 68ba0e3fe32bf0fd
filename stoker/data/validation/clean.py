"""From what a source says to what may be trained on: drops boxes that cannot be used and makes the splits.

Nothing is dropped or divided silently: every kind of bad box is counted with examples, every choice becomes a note;
what is odd about classes and splits is said, too. Not here: reading (`formats/`), writing the index (`index_cache.py`).
"""

import unicodedata
from dataclasses import replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from stoker.data.formats.tables import SPLITS, UNDECIDED, Columns
from stoker.data.validation.problems import Problems
from stoker.errors import DataError, UsageError, nearest

TRAIN, VAL, TEST = range(3)
BAD_BOXES = ("not-a-number", "negative-size", "zero-size", "outside", "not-in-pixels", "duplicate-box")
"""Kinds of boxes that are left out, in the order in which they are looked for."""
NOTED_BOXES = ("reaches-outside", "tiny-box")
"""Kinds of boxes that stay, in the same way."""
SLACK = 1.0
"""Pixels that a box may reach outside unsaid: rounding, and the 1-based corners of the original Pascal VOC."""
LEAST_SIDE = 32
"""Pixels from which on a picture is taken to be too large for all of a box to lie in its first pixel."""


def keep_classes(columns: Columns, classes: tuple[str, ...]) -> Columns:
    """The data set with these classes only, in this order: boxes of others are left out, their pictures stay. Empty:
    all. Raises UsageError for a class that the data set does not have, or that is named twice."""
    if not classes:
        return columns
    for number, name in enumerate(classes):
        if name not in columns.class_names:
            near = nearest(name, columns.class_names)
            raise UsageError(
                f"--classes {name}: the data set has no such class" + (f"; did you mean {near!r}?" if near else "."),
                choices=columns.class_names[:100],
                fix="names are compared letter by letter, also their case; one with spaces needs quotes",
            )
        if name in classes[:number]:
            raise UsageError(f"--classes {name}: it is named twice.", fix="name every class once")
    new = np.array([classes.index(name) if name in classes else -1 for name in columns.class_names], np.int32)
    labels = new[columns.labels]
    keep = labels >= 0
    kept = np.bincount(columns.row[keep], minlength=len(columns.names)) > 0
    had = np.bincount(columns.row, minlength=len(columns.names)) > 0
    note = (
        f"only the classes {', '.join(classes)}: {np.count_nonzero(keep):,} of {keep.size:,} boxes;"
        f" {np.count_nonzero(had & ~kept):,} pictures that have only others are background"
    )
    return replace(
        columns,
        class_names=list(classes),
        category_ids=[columns.category_ids[columns.class_names.index(name)] for name in classes],
        row=columns.row[keep],
        boxes=columns.boxes[keep],
        labels=labels[keep],
        crowd=columns.crowd[keep],
        area=columns.area[keep],
        box_id=columns.box_id[keep],
        notes=[*columns.notes, note],
    )


def drop_degenerate(columns: Columns, problems: Problems) -> Columns:
    """Leaves out the boxes that have no area, in float32, none inside the picture, coordinates of 0 … 1 where pixels
    are meant, or a twin: the same corners and class in the same picture. Others stay as drawn, also those that reach
    over the edge. Fills in the area, width × height, where the source has none."""
    with np.errstate(over="ignore", invalid="ignore"):
        corners = columns.boxes.astype(np.float32)
        x1, y1, x2, y2 = corners.T
        height, width = columns.size[columns.row].T
        outside = (x2 <= 0) | (y2 <= 0) | ((x1 >= width) & (width > 0)) | ((y1 >= height) & (height > 0))
        large = (np.maximum(height, width) >= LEAST_SIDE) | (height == 0)
        tests = (
            ~(np.isfinite(x1) & np.isfinite(y1) & np.isfinite(x2) & np.isfinite(y2)),
            (x2 < x1) | (y2 < y1),
            (x2 == x1) | (y2 == y1),
            outside,
            large & (x1 >= 0) & (y1 >= 0) & (x2 <= 1) & (y2 <= 1),
            _copies(columns, corners),
        )
        beyond = (x1 < -SLACK) | (y1 < -SLACK)
        beyond |= ((x2 > width + SLACK) & (width > 0)) | ((y2 > height + SLACK) & (height > 0))
        tiny = (x2 - x1 < 1) | (y2 - y1 < 1)
    _report(columns, np.select(tests, range(len(tests)), default=-1), BAD_BOXES, problems)
    keep = ~np.logical_or.reduce(tests)
    for kind, test in zip(NOTED_BOXES, (beyond, tiny), strict=True):
        _report(columns, np.where(keep & test, 0, -1), (kind,), problems)
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


def _report(columns: Columns, kind: NDArray[np.int64], names: tuple[str, ...], problems: Problems) -> None:
    """Counts the boxes [K] of each kind, -1 for none, and describes as many as are kept as examples."""
    for number, name in enumerate(names):
        boxes = np.flatnonzero(kind == number).tolist()
        described = min(len(boxes), max(1, problems.room(name)))
        for box in boxes[: described - 1]:
            problems.add(name, _describe(columns, box))
        if boxes:
            problems.add(name, _describe(columns, boxes[described - 1]), len(boxes) - described + 1)


def _copies(columns: Columns, corners: NDArray[np.float32]) -> NDArray[np.bool_]:
    """[K], whether an equal box, of the same picture and class, comes before this one.

    Hashes find the few that may be; COCO's 860,001 boxes take 0.1 s, a sort by all six columns ten times that.
    """
    words = (corners + np.float32(0)).view(np.uint32).astype(np.uint64)  # adding makes -0 a 0
    factors = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5], np.uint64)
    mixed = (words * factors).sum(1) + columns.labels.astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93)
    mixed = mixed * np.uint64(2) + columns.crowd + columns.row.astype(np.uint64) * np.uint64(0xA0761D6478BD642F)
    order = np.argsort(mixed, kind="stable")
    same = mixed[order][1:] == mixed[order][:-1]
    copy = np.zeros(len(corners), np.bool_)
    seen: set[tuple[object, ...]] = set()
    for box in np.unique(np.concatenate([order[1:][same], order[:-1][same]])).tolist():
        key = (
            int(columns.row[box]), int(columns.labels[box]), bool(columns.crowd[box]), *columns.boxes[box].tolist()
        )  # fmt: skip
        copy[box] = key in seen
        seen.add(key)
    return copy


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
        boxed = np.bincount(columns.row[~columns.crowd], minlength=len(split))[rows] > 0
        held = _held_back([columns.names[row] for row in rows], val_fraction, boxed)
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


def _held_back(names: list[str], fraction: float, boxed: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[N], which file names are held back; at least one and not all, of the pictures with boxes where there are two of
    those, since a split without boxes is of no use, else of all."""
    value = np.array([_uniform(name) for name in names])
    held = value < fraction
    some = np.flatnonzero(boxed) if np.count_nonzero(boxed) > 1 else np.arange(held.size)
    if some.size > 1:
        held[some[value[some].argmin()]] = True
        held[some[value[some].argmax()]] = False
    if np.count_nonzero(boxed) == 1:
        held &= ~boxed
    return held


def _uniform(name: str) -> float:
    """A number in [0, 1) that depends on the text alone; composed and decomposed Unicode (macOS) are one text."""
    text = unicodedata.normalize("NFC", name).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") / 2**64


def check(columns: Columns, problems: Problems) -> None:
    """Finds what is odd about classes and splits; crowd boxes do not count, since they are neither learned from nor
    to be found. Raises DataError when nothing can be learned from the training split."""
    labels, split_of_box = columns.labels[~columns.crowd], columns.split[columns.row[~columns.crowd]]
    if (columns.split == TRAIN).any() and not (split_of_box == TRAIN).any():
        raise DataError(
            "The training split has no boxes.",
            place=columns.picture(int(np.flatnonzero(columns.split == TRAIN)[0])) + " and all others",
            cause="; ".join(f"{p.count} × {p.title} ({p.examples[0]})" for p in problems.found()) or None,
            fix="check that these are annotations for detection, with boxes",
        )
    for number, name in enumerate(SPLITS):
        pictures = int((columns.split == number).sum())
        if number != TEST and not (split_of_box == number).any():
            problems.add("empty-split", f"{name}: {f'{_pictures(pictures)}, no box' if pictures else 'no picture'}")
        elif pictures and not (split_of_box == number).any():
            problems.add("split-without-boxes", f"{name}: {_pictures(pictures)}")
    _check_classes(columns.class_names, labels, split_of_box, problems)
    _check_splits(columns, problems)


def _pictures(count: int) -> str:
    return "1 picture" if count == 1 else f"{count:,} pictures"


def _check_splits(columns: Columns, problems: Problems) -> None:
    """Finds pictures that are in more than one split."""
    keys = list(zip(columns.folder.tolist(), columns.names, strict=True))
    if len(set(keys)) == len(keys):
        return
    rows: dict[tuple[int, str], list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    for same in rows.values():
        if len(same) > 1:
            names = [SPLITS[columns.split[row]] for row in same]
            problems.add("in-two-splits", f"{columns.picture(same[0])}: {', '.join(names)}")


def _check_classes(
    class_names: list[str], labels: NDArray[np.int32], split_of_box: NDArray[np.int8], problems: Problems
) -> None:
    """labels, split_of_box [K]: of the boxes that count."""
    alike: dict[str, list[str]] = {}
    for name in class_names:
        alike.setdefault(" ".join(name.split()).casefold(), []).append(name)
    for names in alike.values():
        if len(names) > 1 or names[0] != names[0].strip():
            problems.add("similar-class-names", ", ".join(map(repr, names)))
    count = len(class_names)
    per_split = np.stack(
        [np.bincount(labels[split_of_box == number], minlength=count) for number in range(len(SPLITS))]
    )
    used = per_split.sum(0) > 0
    for label in np.flatnonzero(~used).tolist():
        problems.add("unused-class", class_names[label])
    for number in np.flatnonzero(per_split.sum(1)).tolist():
        for label in np.flatnonzero(used & (per_split[number] == 0)).tolist():
            problems.add("class-not-in-split", f"{class_names[label]}: not in {SPLITS[number]}")
