"""`stoker data check`: everything that is wrong with a data set, what training does about it, and how it is mended.

`check` reads the annotations anew, as training does, then every picture (`check_images.py`), and returns a `Report`,
which `--json` prints as it is. It writes nothing but the index, into the cache. No torch. The kinds are those of
`problems.py`; how the report looks on a terminal is `stoker/report/data_check.py`.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from stoker.data.formats.image_sizes import REMOTE_THREADS
from stoker.data.images import source as places
from stoker.data.index import Index, missing_pictures, open_index, unnamed_pictures, where_instead
from stoker.data.validation.check_images import Progress, check_pictures
from stoker.data.validation.problems import KINDS, MAX_BAD, Problem, Problems, tolerated
from stoker.errors import DataError
from stoker.hardware.cgroup import host_cores

ALL = 2**62
NEEDED = ("train", "val")
"""Splits that training uses."""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of one kind."""

    kind: str
    """An id of `problems.KINDS`."""
    title: str
    unit: str
    """What is counted: box, picture, class, file, split."""
    action: str
    """What training does: "fixed" (used, set right), "skipped" (left out), "kept" (used as it is), "refused"."""
    does: str
    """The same in words."""
    fix: str
    """How to mend it."""
    count: int
    places: tuple[str, ...]
    """All of them: file and line, or file and id, and what is there."""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Pictures and boxes of a split that were read, and those of them that can be used."""

    pictures: int
    usable_pictures: int
    boxes: int
    usable_boxes: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `stoker data check --json` prints. Order of `items`: that of the table of kinds."""

    data: str
    """As it was named."""
    root: str | None = None
    """Folder that places are relative to; None where nothing could be read."""
    format: str | None = None
    classes: tuple[str, ...] = ()
    splits: dict[str, Split] = {}
    pictures: int = 0
    """Pictures in all splits, with those that were left out for their annotations."""
    usable_pictures: int = 0
    boxes: int = 0
    """Boxes in all splits, with those that were left out."""
    usable_boxes: int = 0
    decoded: bool = False
    """Whether the pictures were looked at; else only whether they exist."""
    max_bad: float = MAX_BAD
    """Share of the pictures that may be unusable."""
    items: tuple[Item, ...] = ()
    refusals: tuple[str, ...] = ()
    """Why training would refuse this data set; empty: it would not."""
    notes: tuple[str, ...] = ()
    """What was chosen."""


def check(
    data: str | Path,
    *,
    format: str | None = None,
    classes: Sequence[str] = (),
    pictures: bool = True,
    threads: int | None = None,
    max_bad: float = MAX_BAD,
    progress: Progress = lambda _done, _all: None,
) -> Report:
    """Checks a data set: a folder, a file, or "demo".

    format, classes: see `open_index`. pictures: False only looks whether they exist. threads: default, the cores.
    max_bad: as in training. progress: called in this thread with the pictures done and their number.

    A data set that cannot be read is a report, too. Raises UsageError for a format or class that does not exist.
    """
    problems = Problems(limit=ALL)
    try:
        index = open_index(data, format=format, classes=tuple(classes), problems=problems)
    except DataError as error:
        problems.add("unreadable-set", str(error))
        return Report(data=str(data), items=_items(problems.found(), {}), refusals=(error.what,), max_bad=max_bad)
    lost = sum(problem.count for problem in problems.found() if problem.loses_pictures)
    if pictures:
        usable = check_pictures(index, problems, threads=threads or _threads(index), progress=progress)
    else:
        usable = np.ones(len(index), np.bool_)
        for row in missing_pictures(index):
            usable[row] = False
            problems.add("missing-picture", os.path.relpath(index.path(row), index.root))
    for path in unnamed_pictures(index):
        problems.add("unlabelled-picture", os.path.relpath(path, index.root))
    found = [replace(one, examples=_shown(one.examples, index)) for one in problems.found()]
    absent = next((index.root / p.examples[0] for p in found if p.kind == "missing-picture"), None)
    splits = {split: _count(index, index.rows(split), usable) for split in index.splits}
    left_out = sum(p.count for p in found if KINDS[p.kind].unit == "box" and KINDS[p.kind].action == "skipped")
    return Report(
        data=str(data),
        root=index.source,
        format=index.format,
        classes=index.class_names,
        splits=splits,
        pictures=len(index) + lost,
        usable_pictures=int(usable.sum()),
        boxes=len(index.boxes) + left_out,
        usable_boxes=sum(split.usable_boxes for split in splits.values()),
        decoded=pictures,
        max_bad=max_bad,
        items=_items(found, {"missing-picture": where_instead(index.root, absent)} if absent else {}),
        refusals=tuple(_refusals(found, splits, lost, len(index), max_bad)),
        notes=index.notes,
    )


def _shown(examples: Sequence[str], index: Index) -> tuple[str, ...]:
    return tuple(places.in_words(text, index.root) for text in examples)


def _threads(index: Index) -> int:
    """The cores; of pictures in a bucket, which are mostly waited for, many more."""
    return max(host_cores(), REMOTE_THREADS) if places.address_of(index.root) else host_cores()


def _items(found: Sequence[Problem], fixes: dict[str, str]) -> tuple[Item, ...]:
    """fixes: kind → what mends it in this data set, where more is known than the table says."""

    def item(problem: Problem) -> Item:
        words = KINDS[problem.kind]._asdict() | ({"fix": fixes[problem.kind]} if problem.kind in fixes else {})
        return Item(kind=problem.kind, count=problem.count, places=problem.examples, **words)

    return tuple(map(item, found))


def _count(index: Index, rows: NDArray[np.int64], usable: NDArray[np.bool_]) -> Split:
    boxes = index.offsets[rows + 1] - index.offsets[rows]
    return Split(
        pictures=len(rows),
        usable_pictures=int(usable[rows].sum()),
        boxes=int(boxes.sum()),
        usable_boxes=int(boxes[usable[rows]].sum()),
    )


def _refusals(
    found: Sequence[Problem], splits: dict[str, Split], lost: int, pictures: int, max_bad: float
) -> list[str]:
    """Why training would stop, at its start or later: the rules of `require_pictures` and of the loader."""
    reasons = [f"{KINDS[p.kind].title}: {', '.join(p.examples)}" for p in found if KINDS[p.kind].action == "refused"]
    if lost > tolerated(max_bad, pictures + lost):
        reasons.append(
            f"{lost:,} of {pictures + lost:,} pictures are left out for their annotations, {_limit(max_bad)}"
        )
    for name in NEEDED:
        if name in splits:
            bad = splits[name].pictures - splits[name].usable_pictures
            if bad == splits[name].pictures or bad > tolerated(max_bad, splits[name].pictures):
                of = f"{bad:,} of the {splits[name].pictures:,} pictures of the {name} split"
                reasons.append(f"{of} cannot be used, {_limit(max_bad)}")
    return reasons


def _limit(max_bad: float) -> str:
    return f"more than --max-bad {max_bad:g} allows"
