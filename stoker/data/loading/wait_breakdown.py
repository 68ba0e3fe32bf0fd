"""Attributes the time that training waits for a batch to stages, from what the samples did at each instant.

Each sample records its own transitions, a few per image, which live as long as its place in a batch buffer. They are
evaluated only when the caller had to wait. What the stages mean for a run: docs/run-folder.md. Transitions are recorded
by `samples.py`, `worker_pool.py` and `prefetch.py`; `loader.py` evaluates them.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
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

_AWAITED_STAGES = {IN_FLIGHT: FETCH, READ: FETCH, DECODING: DECODE, QUEUED: QUEUE}
_OTHER_STAGES = {READ: FETCH, DECODING: DECODE}  # requests in flight of other samples block no worker


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
    intervals: Intervals = []
    segment_start_s = start_s
    other_segments: list[tuple[float, set[str]]] | None = None
    first = 0
    for segment_end_s, stages in _stage_segments(awaited, start_s, end_s, _AWAITED_STAGES):
        if stages != {QUEUE}:
            _append_interval(intervals, segment_start_s, segment_end_s, stages)
        else:
            if other_segments is None:
                other_segments = list(_stage_segments(others, start_s, end_s, _OTHER_STAGES))
            piece_start_s = segment_start_s
            while other_segments[first][0] <= segment_start_s < end_s:
                first += 1
            while True:
                other_end_s, other_stages = other_segments[first]
                piece_end_s = min(other_end_s, segment_end_s)
                _append_interval(intervals, piece_start_s, piece_end_s, other_stages)
                piece_start_s = piece_end_s
                if other_end_s >= segment_end_s:
                    break
                first += 1
        segment_start_s = segment_end_s
    return intervals


def _append_interval(intervals: Intervals, start_s: float, end_s: float, stages: set[str]) -> None:
    active_stages = sorted(stages - {QUEUE}, reverse=True) or [QUEUE]
    for n, stage in enumerate(active_stages, start=1):
        piece_end_s = end_s if n == len(active_stages) else start_s + (end_s - start_s) * n / len(active_stages)
        if intervals and intervals[-1][1] == stage:
            intervals[-1] = (piece_end_s, stage)
        else:
            intervals.append((piece_end_s, stage))


def _stage_segments(
    samples: Iterable[Transitions], start_s: float, end_s: float, stage_by_state: dict[str, str]
) -> Iterator[tuple[float, set[str]]]:
    """(end of a segment, the stages that samples are in during it), from start_s to end_s."""
    counts: Counter[str] = Counter()
    changes: list[tuple[float, str | None, str | None]] = []
    queued_stage = stage_by_state.get(QUEUED)
    for transitions in samples:
        if not transitions and queued_stage is None:
            continue
        initial_stage = current_stage = queued_stage
        for time_s, state in list(transitions):  # a copy, as a worker may append to it
            stage = stage_by_state.get(state)
            if time_s <= start_s:
                initial_stage = stage
            elif time_s < end_s:
                changes.append((time_s, current_stage, stage))
            current_stage = stage
        if initial_stage is not None:
            counts[initial_stage] += 1
    changes.sort(key=itemgetter(0))
    stages = {stage for stage, count in counts.items() if count}
    for time_s, before, after in changes:
        if time_s > start_s:
            yield time_s, stages
        start_s = time_s
        if before == after:
            continue
        if before is not None:
            counts[before] -= 1
        if after is not None:
            counts[after] += 1
        stages = {stage for stage, count in counts.items() if count}
    yield end_s, stages


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
