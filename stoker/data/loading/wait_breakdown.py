"""Where a wait for a batch went: from what its samples did meanwhile, instant by instant.

Each sample keeps its own marks, a few a picture, which live as long as its place in the ring; they are looked at only
when the caller had to wait. What the stages mean for a run: docs/run-folder.md. Who marks: `samples.py`,
`worker_pool.py`,
`prefetch.py`; who asks: `loader.py`.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator

from stoker.runs.records import INPUT_STAGES

FETCH, DECODE, COPY, QUEUE = INPUT_STAGES
IN_FLIGHT, READ, DECODING, QUEUED, DONE = "flight", "read", "decoding", "queued", "done"
"""What a sample does: its bytes are asked for and come by themselves; a thread reads them; a thread decodes them; it
waits for a thread; it is in its place of the batch."""

Transitions = list[tuple[float, str]]
"""(seconds of `time.perf_counter`, what the sample does from there on), ascending. Before the first it is QUEUED."""
Intervals = list[tuple[float, str]]
"""(end in seconds of `time.perf_counter`, stage): each begins where the one before it ends."""

_AWAITED_STAGES = {IN_FLIGHT: FETCH, READ: FETCH, DECODING: DECODE, QUEUED: QUEUE}
_OTHER_STAGES = {READ: FETCH, DECODING: DECODE}  # a flight of others holds up no thread


def split_wait(
    start_s: float, end_s: float, awaited: Iterable[Transitions], others: Iterable[Transitions]
) -> Intervals:
    """The wait from start_s to end_s as intervals of stages, ascending; the last ends at end_s.

    awaited: marks of the samples of the batch that is waited for; others: of all other samples under way, looked at
    only where it is needed. In each instant the first rule that holds decides:

    1. samples of the batch are worked on     -> their stage, FETCH or DECODE; half each where both are among them
    2. some of them wait for a thread         -> what the threads do, in the same way
    3. nothing is left to do for them         -> QUEUE: they are there, and only have to be handed over
    """
    intervals: Intervals = []
    segment_start_s = start_s
    for segment_end_s, stages in _stage_segments(awaited, start_s, end_s, _AWAITED_STAGES):
        if stages != {QUEUE}:
            _append_interval(intervals, segment_start_s, segment_end_s, stages)
        else:
            piece_start_s = segment_start_s
            for piece_end_s, other_stages in _stage_segments(others, segment_start_s, segment_end_s, _OTHER_STAGES):
                _append_interval(intervals, piece_start_s, piece_end_s, other_stages)
                piece_start_s = piece_end_s
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
    """(end of a stretch, the stages that samples are in through it), from start_s to end_s."""
    counts: Counter[str] = Counter()
    changes: list[tuple[float, str | None, str | None]] = []
    for transitions in samples:
        initial_stage = current_stage = stage_by_state.get(QUEUED)
        for time_s, state in list(transitions):  # a copy, as its thread may add to it
            stage = stage_by_state.get(state)
            if time_s <= start_s:
                initial_stage = stage
            elif time_s < end_s:
                changes.append((time_s, current_stage, stage))
            current_stage = stage
        if initial_stage is not None:
            counts[initial_stage] += 1
    for time_s, before, after in sorted(changes, key=lambda change: change[0]):
        if time_s > start_s:
            yield time_s, {stage for stage, count in counts.items() if count}
        start_s = time_s
        if before is not None:
            counts[before] -= 1
        if after is not None:
            counts[after] += 1
    yield end_s, {stage for stage, count in counts.items() if count}


class WaitBreakdown:
    """What the calls of `Loader.__next__` spend their time on: the newest one's intervals, and the sums of all."""

    def __init__(self) -> None:
        self.last: Intervals = []
        self.total_s = dict.fromkeys(INPUT_STAGES, 0.0)
        self._last_end_s = 0.0

    def start(self) -> None:
        self.last, self._last_end_s = [], time.perf_counter()

    def attribute_elapsed(self, stage: str) -> None:
        """All since the last interval was `stage`."""
        self.add([(time.perf_counter(), stage)])

    def add(self, intervals: Intervals) -> None:
        for end_s, stage in intervals:
            self.total_s[stage] += end_s - self._last_end_s
            self._last_end_s = end_s
        self.last += intervals
