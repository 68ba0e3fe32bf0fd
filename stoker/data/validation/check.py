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

from stoker.data.formats.image_sizes import REMOTE_IO_WORKERS
from stoker.data.images import source as places
from stoker.data.index import Index, missing_images, open_index, suggest_location, unlisted_images
from stoker.data.validation.check_images import Progress, check_image_files
from stoker.data.validation.problems import (
    DEFAULT_MAX_BAD_FRACTION,
    PROBLEM_KINDS,
    Problem,
    ProblemCollector,
    max_bad_images,
)
from stoker.errors import DataError
from stoker.hardware.cgroup import host_cores

UNLIMITED = 2**62
REQUIRED_SPLITS = ("train", "val")
"""Splits that training uses."""


class CheckItem(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of one kind."""

    kind: str
    """An id of `problems.KINDS`."""
    title: str
    unit: str
    """What is counted: box, picture, class, file, split."""
    action: str
    """What training does: "fixed" (used, set right), "skipped" (left out), "kept" (used as it is), "refused"."""
    effect: str
    """The same in words."""
    fix: str
    """How to mend it."""
    count: int
    locations: tuple[str, ...]
    """All of them: file and line, or file and id, and what is there."""


class SplitCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Pictures and boxes of a split that were read, and those of them that can be used."""

    num_images: int
    num_usable_images: int
    num_boxes: int
    num_usable_boxes: int


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `stoker data check --json` prints. Order of `items`: that of the table of kinds."""

    data: str
    """As it was named."""
    root: str | None = None
    """Folder that places are relative to; None where nothing could be read."""
    format: str | None = None
    classes: tuple[str, ...] = ()
    splits: dict[str, SplitCounts] = {}
    num_images: int = 0
    """Pictures in all splits, with those that were left out for their annotations."""
    num_usable_images: int = 0
    num_boxes: int = 0
    """Boxes in all splits, with those that were left out."""
    num_usable_boxes: int = 0
    decoded: bool = False
    """Whether the pictures were looked at; else only whether they exist."""
    max_bad_fraction: float = DEFAULT_MAX_BAD_FRACTION
    """Share of the pictures that may be unusable."""
    items: tuple[CheckItem, ...] = ()
    refusals: tuple[str, ...] = ()
    """Why training would refuse this data set; empty: it would not."""
    notes: tuple[str, ...] = ()
    """What was chosen."""


def check_dataset(
    data: str | Path,
    *,
    format: str | None = None,
    classes: Sequence[str] = (),
    decode_images: bool = True,
    workers: int | None = None,
    max_bad_fraction: float = DEFAULT_MAX_BAD_FRACTION,
    progress: Progress = lambda _done, _all: None,
) -> CheckReport:
    """Checks a data set: a folder, a file, or "demo".

    format, classes: see `open_index`. pictures: False only looks whether they exist. threads: default, the cores.
    max_bad: as in training. progress: called in this thread with the pictures done and their number.

    A data set that cannot be read is a report, too. Raises UsageError for a format or class that does not exist.
    """
    problems = ProblemCollector(max_examples=UNLIMITED)
    try:
        index = open_index(data, format=format, classes=tuple(classes), problems=problems)
    except DataError as error:
        problems.add("unreadable-set", str(error))
        return CheckReport(
            data=str(data),
            items=_make_items(problems.summarize(), {}),
            refusals=(error.what,),
            max_bad_fraction=max_bad_fraction,
        )
    num_dropped_images = sum(problem.count for problem in problems.summarize() if problem.drops_images)
    if decode_images:
        usable = check_image_files(index, problems, workers=workers or _num_workers(index), progress=progress)
    else:
        usable = np.ones(len(index), np.bool_)
        for image_index in missing_images(index):
            usable[image_index] = False
            problems.add("missing-image", os.path.relpath(index.path(image_index), index.root))
    for path in unlisted_images(index):
        problems.add("unlabeled-image", os.path.relpath(path, index.root))
    found_problems = [
        replace(entry, examples=_display_examples(entry.examples, index)) for entry in problems.summarize()
    ]
    first_missing = next((index.root / p.examples[0] for p in found_problems if p.kind == "missing-image"), None)
    splits = {split: _count_split(index, index.image_indices(split), usable) for split in index.splits}
    num_dropped_boxes = sum(
        p.count
        for p in found_problems
        if PROBLEM_KINDS[p.kind].unit == "box" and PROBLEM_KINDS[p.kind].action == "skipped"
    )
    return CheckReport(
        data=str(data),
        root=index.source,
        format=index.format,
        classes=index.class_names,
        splits=splits,
        num_images=len(index) + num_dropped_images,
        num_usable_images=int(usable.sum()),
        num_boxes=len(index.boxes) + num_dropped_boxes,
        num_usable_boxes=sum(split.num_usable_boxes for split in splits.values()),
        decoded=decode_images,
        max_bad_fraction=max_bad_fraction,
        items=_make_items(
            found_problems, {"missing-image": suggest_location(index.root, first_missing)} if first_missing else {}
        ),
        refusals=tuple(_refusal_reasons(found_problems, splits, num_dropped_images, len(index), max_bad_fraction)),
        notes=index.notes,
    )


def _display_examples(examples: Sequence[str], index: Index) -> tuple[str, ...]:
    return tuple(places.paths_to_uris(text, index.root) for text in examples)


def _num_workers(index: Index) -> int:
    """The cores; of pictures in a bucket, which are mostly waited for, many more."""
    return max(host_cores(), REMOTE_IO_WORKERS) if places.path_to_uri(index.root) else host_cores()


def _make_items(found_problems: Sequence[Problem], fixes: dict[str, str]) -> tuple[CheckItem, ...]:
    """fixes: kind → what mends it in this data set, where more is known than the table says."""

    def make_item(problem: Problem) -> CheckItem:
        fields = PROBLEM_KINDS[problem.kind]._asdict() | ({"fix": fixes[problem.kind]} if problem.kind in fixes else {})
        return CheckItem(kind=problem.kind, count=problem.count, locations=problem.examples, **fields)

    return tuple(map(make_item, found_problems))


def _count_split(index: Index, image_indices: NDArray[np.int64], usable: NDArray[np.bool_]) -> SplitCounts:
    boxes = index.offsets[image_indices + 1] - index.offsets[image_indices]
    return SplitCounts(
        num_images=len(image_indices),
        num_usable_images=int(usable[image_indices].sum()),
        num_boxes=int(boxes.sum()),
        num_usable_boxes=int(boxes[usable[image_indices]].sum()),
    )


def _refusal_reasons(
    found_problems: Sequence[Problem],
    splits: dict[str, SplitCounts],
    num_dropped_images: int,
    num_images: int,
    max_bad_fraction: float,
) -> list[str]:
    """Why training would stop, at its start or later: the rules of `require_pictures` and of the loader."""
    reasons = [
        f"{PROBLEM_KINDS[p.kind].title}: {', '.join(p.examples)}"
        for p in found_problems
        if PROBLEM_KINDS[p.kind].action == "refused"
    ]
    if num_dropped_images > max_bad_images(max_bad_fraction, num_images + num_dropped_images):
        reasons.append(
            f"{num_dropped_images:,} of {num_images + num_dropped_images:,} pictures are left out for their annotations, {_limit_text(max_bad_fraction)}"
        )
    for name in REQUIRED_SPLITS:
        if name in splits:
            num_bad = splits[name].num_images - splits[name].num_usable_images
            if num_bad == splits[name].num_images or num_bad > max_bad_images(
                max_bad_fraction, splits[name].num_images
            ):
                subject = f"{num_bad:,} of the {splits[name].num_images:,} pictures of the {name} split"
                reasons.append(f"{subject} cannot be used, {_limit_text(max_bad_fraction)}")
    return reasons


def _limit_text(max_bad_fraction: float) -> str:
    return f"more than --max-bad-fraction {max_bad_fraction:g} allows"
