"""Where a job is stuck in which nothing computes, by its newest stacks."""

import re
from typing import NamedTuple

import msgspec

from stoker_watch.diagnosis.places.describe import is_callees
from stoker_watch.diagnosis.places.grouping import CALLS
from stoker_watch.diagnosis.run_data import RunRecords
from stoker_watch.runs.schemas import LOOP_IN_STEP, WITHOUT_GRADIENTS, Place

_IN_STEP = frozenset({"comm", "compute", "sync", LOOP_IN_STEP, WITHOUT_GRADIENTS})
MAIN_FRACTION = 0.8
"""Fraction of a process' samples in one place from which it is stuck there, or of its time from which it waits."""
COMMON_FRACTION = 0.98
"""Fraction of the samples of a process that is stuck, in what a line calls, from which it is stuck there."""
LAUNCHES = re.compile(r"spawn|start_processes|elastic|^subprocess\.|\.join$|\.communicate$")
"""Calls in which a launcher waits for the processes that it has started."""


class BlockedProcess(NamedTuple):
    who: str
    place: Place
    pid: int


def stuck_places(run: RunRecords) -> tuple[list[BlockedProcess], list[BlockedProcess]]:
    """(who is in a call of its own, who only waits for others: in a collective, also one inside of the backward pass,
    or for its loader) in a job in which nothing computes, by the newest stacks."""
    stuck: list[BlockedProcess] = []
    waiting: list[BlockedProcess] = []
    for (rank, pid), window in sorted(run.newest_stacks.items()):
        place = _common_place(window.places)
        has_loader = any(other.role == "worker" for (of, _), other in run.newest_stacks.items() if of == rank)
        if not place.line or LAUNCHES.search(place.call):
            continue  # a worker without a task, or a launcher
        who = f"rank {rank}" if run.num_ranks > 1 else "the training thread"
        if window.role == "worker":
            text = f"a loader worker{f' of {who}' if run.num_ranks > 1 else ''} (process {pid})"
            stuck.append(BlockedProcess(text, place, pid))
        elif place.kind in _IN_STEP or (place.kind == "input_wait" and has_loader):
            waiting.append(BlockedProcess(who, place, pid))
        elif (rank, pid) in run.newest_threads and CALLS["awaits"].search(place.call):
            waiting.append(BlockedProcess(who, place, pid))
            own = [one for one in run.newest_threads[rank, pid].places if one.line]
            stuck.append(BlockedProcess(f"a thread{f' of {who}' * (run.num_ranks > 1)}", _common_place(own), pid))
        else:
            stuck.append(BlockedProcess(who, place, pid))
    return stuck, waiting


def describe_stuck(who: str, place: Place) -> str:
    """`rank 1 is stuck in conn.recv at train.py:12`."""
    if place.call.startswith("with "):
        return f"{who} waits for the lock of `{place.call}` at {place.line}"
    if is_callees(place):
        return f"{who} is stuck in what {place.line} calls"
    return f"{who} is stuck in {place.call or place.function} at {place.line}"


def _common_place(places: list[Place]) -> Place:
    """The largest, if it has most of the samples, else the innermost line that all have in common, without a function
    and a call; else the largest."""
    largest = max(places, key=lambda place: place.samples, default=Place(kind="other", samples=0))
    num_samples = sum(place.samples for place in places)
    if largest.samples >= MAIN_FRACTION * num_samples or not largest.line:
        return largest
    lines = [[place.line, *place.callers.split(" < ")] for place in places]
    for line in filter(None, lines[places.index(largest)]):
        inside = [place for place, chain in zip(places, lines, strict=True) if line in chain]
        if sum(place.samples for place in inside) >= COMMON_FRACTION * num_samples:
            return msgspec.structs.replace(largest, line=line, function="", call="")
    return largest
