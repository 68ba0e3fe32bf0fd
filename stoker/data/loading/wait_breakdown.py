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
FLIGHT, READ, DECODING, QUEUED, DONE = "flight", "read", "decoding", "queued", "done"
"""What a sample does: its bytes are asked for and come by themselves; a thread reads them; a thread decodes them; it
waits for a thread; it is in its place of the batch."""

Marks = list[tuple[float, str]]
"""(seconds of `time.perf_counter`, what the sample does from there on), ascending. Before the first it is QUEUED."""
Intervals = list[tuple[float, str]]
"""(end in seconds of `time.perf_counter`, stage): each begins where the one before it ends."""

_OWN = {FLIGHT: FETCH, READ: FETCH, DECODING: DECODE, QUEUED: QUEUE}
_OTHERS = {READ: FETCH, DECODING: DECODE}  # a flight of others holds up no thread


def split(start_s: float, end_s: float, awaited: Iterable[Marks], others: Iterable[Marks]) -> Intervals:
    """The wait from start_s to end_s as intervals of stages, ascending; the last ends at end_s.

    awaited: marks of the samples of the batch that is waited for; others: of all other samples under way, looked at
    only where it is needed. In each instant the first rule that holds decides:

    1. samples of the batch are worked on     -> their stage, FETCH or DECODE; half each where both are among them
    2. some of them wait for a thread         -> what the threads do, in the same way
    3. nothing is left to do for them         -> QUEUE: they are there, and only have to be handed over
    """
    found: Intervals = []
    begin_s = start_s
    for until_s, stages in _course(awaited, start_s, end_s, _OWN):
        if stages != {QUEUE}:
            _add(found, begin_s, until_s, stages)
        else:
            since_s = begin_s
            for other_s, busy in _course(others, begin_s, until_s, _OTHERS):
                _add(found, since_s, other_s, busy)
                since_s = other_s
        begin_s = until_s
    return found


def _add(found: Intervals, begin_s: float, end_s: float, stages: set[str]) -> None:
    busy = sorted(stages - {QUEUE}, reverse=True) or [QUEUE]
    for n, stage in enumerate(busy, start=1):
        until_s = end_s if n == len(busy) else begin_s + (end_s - begin_s) * n / len(busy)
        if found and found[-1][1] == stage:
            found[-1] = (until_s, stage)
        else:
            found.append((until_s, stage))


def _course(
    samples: Iterable[Marks], start_s: float, end_s: float, stage_of: dict[str, str]
) -> Iterator[tuple[float, set[str]]]:
    """(end of a stretch, the stages that samples are in through it), from start_s to end_s."""
    counts: Counter[str] = Counter()
    changes: list[tuple[float, str | None, str | None]] = []
    for marks in samples:
        at_first = doing = stage_of.get(QUEUED)
        for at_s, state in list(marks):  # a copy, as its thread may add to it
            stage = stage_of.get(state)
            if at_s <= start_s:
                at_first = stage
            elif at_s < end_s:
                changes.append((at_s, doing, stage))
            doing = stage
        if at_first is not None:
            counts[at_first] += 1
    for at_s, before, after in sorted(changes, key=lambda change: change[0]):
        if at_s > start_s:
            yield at_s, {stage for stage, count in counts.items() if count}
        start_s = at_s
        if before is not None:
            counts[before] -= 1
        if after is not None:
            counts[after] += 1
    yield end_s, {stage for stage, count in counts.items() if count}


class Waits:
    """What the calls of `Loader.__next__` spend their time on: the newest one's intervals, and the sums of all."""

    def __init__(self) -> None:
        self.last: Intervals = []
        self.total_s = dict.fromkeys(INPUT_STAGES, 0.0)
        self._now_s = 0.0

    def begin(self) -> None:
        self.last, self._now_s = [], time.perf_counter()

    def until(self, stage: str) -> None:
        """All since the last interval was `stage`."""
        self.add([(time.perf_counter(), stage)])

    def add(self, intervals: Intervals) -> None:
        for end_s, stage in intervals:
            self.total_s[stage] += end_s - self._now_s
            self._now_s = end_s
        self.last += intervals
