"""How a place is called in findings."""

import functools
from collections.abc import Mapping

from stoker_watch.diagnosis.places.sampled import PlaceTotal
from stoker_watch.diagnosis.run_data import RunRecords
from stoker_watch.knowledge import read_toml
from stoker_watch.runs.schemas import Place

ROLE_NAMES = {"training": "the training thread", "thread": "another thread", "worker": "each loader worker"}
MAX_EVENT = 0.5
"""Fraction of the lines of stacks.jsonl up to which what was seen in a row was a single event."""
MAX_ONCE_S = 15.0
"""Time of a window up to which what was seen in one only was done once."""


@functools.cache
def _loader_rows() -> dict[str, dict[str, str]]:
    rows: dict[str, dict[str, str]] = read_toml("apis.toml")["loader"]
    return rows


def loader_thread_row(run: RunRecords) -> Mapping[str, str]:
    """Row of apis.toml for the thread of a loader that runs the job's code; empty: none does."""
    return _loader_rows().get(run.loader_thread, {})


def name_role(run: RunRecords, role: str) -> str:
    """Who does what has this role: `the one thread of the generator`."""
    return (loader_thread_row(run) if role == "worker" else {}).get("runs", ROLE_NAMES[role])


def is_callees(place: PlaceTotal | Place) -> bool:
    """Whether it is all that a line calls, without a function and a call."""
    return not place.function and not place.call


def describe_place(place: PlaceTotal) -> str:
    """`copy.deepcopy, called at train.py:53`; of a package also the method, as it may have many with such a call."""
    if is_callees(place):
        return f"what {place.line} calls"
    if not place.call:
        return f"{place.function} at {place.line}"
    method = f" ({place.function})" if "." in place.function else ""  # of an installed package
    return f"{place.call}, called at {place.line}{method}"


def name_cost(place: PlaceTotal, whole: PlaceTotal | None) -> str:
    """`15 s in iou at targets.py:18, of 23 s in what train.py:68 calls`."""
    text = f"{place.seconds:,.0f} s in {describe_place(place)}"
    if whole is None or describe_place(whole) == describe_place(place):
        return text
    return f"{text}, of {whole.seconds:,.0f} s in {describe_place(whole)}"


def is_single_event(place: PlaceTotal) -> bool:
    """Whether it was seen in at most two lines of stacks.jsonl in a row: what happens once, as the end of the loaders
    of a job, is a large part of a short run only."""
    return place.bursts == 1 and place.windows <= 2 and place.window_fraction < MAX_EVENT


def frequency(run: RunRecords, place: PlaceTotal) -> str:
    """How often it was called, as far as lines and steps show it; else empty."""
    windows = place.windows / place.window_fraction if place.window_fraction else 0.0
    events = run.learning.num_evaluations + run.num_checkpoints
    window_s = run.place_totals.get((place.role, place.rank), 0.0) / max(1.0, windows)
    if place.windows == 1 and windows >= 3 and window_s <= MAX_ONCE_S:
        return "once"
    if place.role == "training" and place.windows >= 3 and place.window_fraction >= 0.9:
        return "throughout" if run.steady.steps >= windows and events < windows / 2 else ""
    if 2 <= place.bursts == run.learning.num_evaluations:
        return "once per epoch"
    return ""
