"""Attributes the time that training waits for a batch to stages, from what the samples did at each instant.

Each sample records its own transitions, a few per image, which live as long as its place in a batch buffer. They are
evaluated only when the caller had to wait. What the stages mean for a run: docs/run-folder.md. Transitions are recorded
by `samples.py`, `worker_pool.py` and `prefetch.py`; `loader.py` evaluates them.
"""

import time
from collections import Counter
from collections.abc import Iterable
from operator import itemgetter

from stoker.runs.records import INPUT_STAGES

FETCH, DECODE, COPY, QUEUE = INPUT_STAGES
IN_FLIGHT, READ, DECODING, QUEUED, DONE = "flight", "read", "decoding", "queued", "done"
"""States of a sample: its bytes are requested; a worker reads them; a worker decodes them; it waits for a worker; it is
in its place of the batch."""

Transitions = list[tuple[float, str]]
"""(seconds of `time.perf_counter`, state from then on), ascending. Before the first a sample is QUEUED."""
Intervals = list[tuple[float, str]]
"""(end in seconds of `time.perf_counter`, stage): each begins where the one before it ends."""

_OTHER_FETCH, _OTHER_DECODE = "other fetch", "other decode"
_AWAITED_STAGES = {IN_FLIGHT: FETCH, READ: FETCH, DECODING: DECODE, QUEUED: QUEUE}
_OTHER_STAGES = {READ: _OTHER_FETCH, DECODING: _OTHER_DECODE}  # requests in flight of other samples block no worker


def split_wait(
    start_s: float, end_s: float, awaited: Iterable[Transitions], others: Iterable[Transitions]
) -> Intervals:
    """The wait from start_s to end_s as intervals of stages, ascending; the last ends at end_s.

    awaited: transitions of the samples of the awaited batch; others: of all other samples in progress, used only where
    needed. At each instant the first rule that applies decides:

    1. samples of the batch are in progress   -> their stage, FETCH or DECODE; half each where both occur
    2. some of them wait for a worker         -> what the workers do, in the same way
    3. nothing is left to do for them         -> QUEUE: they are complete and only have to be handed out
    """
    counts: Counter[str | None] = Counter()
    changes = _stage_changes(awaited, _AWAITED_STAGES, start_s, end_s, counts)
    if counts[QUEUE] or any(after == QUEUE for _, _, after in changes):
        changes += _stage_changes(others, _OTHER_STAGES, start_s, end_s, counts)
    intervals: Intervals = []
    for time_s, before, after in [*sorted(changes, key=itemgetter(0)), (end_s, None, None)]:
        if time_s > start_s:
            stages = [stage for stage in (FETCH, DECODE) if counts[stage]]
            if not stages and counts[QUEUE]:
                stages = [stage for stage, n in ((FETCH, counts[_OTHER_FETCH]), (DECODE, counts[_OTHER_DECODE])) if n]
            stages = stages or [QUEUE]
            for stage in stages:
                start_s = time_s if stage == stages[-1] else (start_s + time_s) / 2
                if intervals and intervals[-1][1] == stage:
                    intervals.pop()
                intervals.append((start_s, stage))
        counts[before] -= 1
        counts[after] += 1
    return intervals or [(end_s, QUEUE)]


def _stage_changes(
    samples: Iterable[Transitions],
    stage_by_state: dict[str, str],
    start_s: float,
    end_s: float,
    counts: "Counter[str | None]",
) -> list[tuple[float, str | None, str | None]]:
    """(time, stage before, stage after) of the changes from start_s to end_s. Adds the samples to `counts` by their
    stage at start_s."""
    changes: list[tuple[float, str | None, str | None]] = []
    for transitions in samples:
        initial = current = stage_by_state.get(QUEUED)
        for time_s, state in list(transitions):  # a copy, as a worker may append to it
            stage = stage_by_state.get(state)
            if time_s <= start_s:
                initial = stage
            elif time_s < end_s and stage != current:
                changes.append((time_s, current, stage))
            current = stage
        counts[initial] += 1
    return changes


class WaitBreakdown:
    """What the calls of `Loader.__next__` spend their time on: intervals of the newest call, and sums over all."""

    def __init__(self) -> None:
        self.last: Intervals = []
        self.total_s = dict.fromkeys(INPUT_STAGES, 0.0)
        self._last_end_s = 0.0

    def start(self) -> None:
        self.last, self._last_end_s = [], time.perf_counter()

    def attribute_elapsed(self, stage: str) -> None:
        """Attributes the time since the last interval to `stage`."""
        self.add([(time.perf_counter(), stage)])

    def add(self, intervals: Intervals) -> None:
        for end_s, stage in intervals:
            self.total_s[stage] += end_s - self._last_end_s
            self._last_end_s = end_s
        self.last += intervals
