"""Attributes the time that training waits for a batch to stages, from what the workers did meanwhile.

What the stages mean for a run: docs/run-folder.md. `loader.py` measures the waits, `stats.py` counts the work.
"""

import time

from stoker.data.loading.stats import Counters
from stoker.runs.records import INPUT_STAGES

FETCH, DECODE, COPY, QUEUE = INPUT_STAGES

Intervals = list[tuple[float, str]]
"""(end in seconds of `time.perf_counter`, stage): each begins where the one before it ends."""


def split_wait(
    start_s: float, end_s: float, before: Counters, after: Counters, *, workers: int, is_remote: bool
) -> Intervals:
    """The wait from start_s to end_s as intervals of stages: FETCH and DECODE in the proportion in which the workers
    read and decoded; QUEUE if they did neither.

    before, after: the work of all workers up to start_s and end_s. is_remote: the workers get images whose bytes have
    arrived, so the time in which they have nothing to do is a wait for bytes.
    """
    read_s = max(0.0, after.read_s - before.read_s)
    decode_s = max(0.0, after.decode_s - before.decode_s)
    fetch_s = max(read_s, (end_s - start_s) * workers - decode_s) if is_remote else read_s
    if fetch_s + decode_s <= 0:
        return [(end_s, QUEUE)]
    return [(start_s + (end_s - start_s) * fetch_s / (fetch_s + decode_s), FETCH), (end_s, DECODE)]


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
