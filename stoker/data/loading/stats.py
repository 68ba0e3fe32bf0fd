"""What a loader has done and is doing: the work of its workers, and where the time went that training waited.

Each worker counts in a `Counters` of its own, so that none waits for another; `Loader.stats` adds them up. What the
stages of a wait mean for a run: docs/run-folder.md.
"""

import dataclasses
import time
from collections.abc import Iterable

from stoker.runs.records import INPUT_STAGES

FETCH, DECODE, COPY, QUEUE = INPUT_STAGES
READ, DECODING = "read", "decoding"
"""What a worker is doing."""


@dataclasses.dataclass
class Counters:
    """What one worker has done and is doing. Written by that worker alone."""

    num_images: int = 0
    read_s: float = 0.0
    """Reading files. Requests in flight, which block no worker, are in `PrefetchCounters.seconds`."""
    cache_hits: int = 0
    """Reads that the cache of decoded images served."""
    cache_misses: int = 0
    """Images decoded for the cache."""
    decode_s: float = 0.0
    """Decoding, resizing and transforming boxes."""
    device_decode_s: float = 0.0
    """The thread of the device decoder: besides what the workers spend."""
    current_stage: tuple[str, float] | None = None
    """READ or DECODING, and since when."""

    def begin(self, stage: str) -> float:
        """The worker begins READ or DECODING. Returns the time."""
        start_s = time.perf_counter()
        self.current_stage = stage, start_s
        return start_s

    def add(self, other: "Counters") -> None:
        for name in COUNTER_FIELDS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


COUNTER_FIELDS = tuple(field.name for field in dataclasses.fields(Counters) if field.name != "current_stage")


def sum_counters(per_worker: Iterable[Counters]) -> Counters:
    """The sum, including stages that have not ended."""
    total, now_s = Counters(), time.perf_counter()
    for counters in per_worker:
        total.add(counters)
        if (current := counters.current_stage) is not None:
            stage, start_s = current
            if stage == READ:
                total.read_s += now_s - start_s
            else:
                total.decode_s += now_s - start_s
    return total


@dataclasses.dataclass
class PrefetchCounters:
    """Images that were fetched since the loader was made. Written by the fetcher's thread."""

    completed: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """Summed over the fetches, which run in parallel."""


@dataclasses.dataclass
class LoaderStats:
    """What a loader has done since it was made, and what it is doing."""

    total: Counters
    """The sum over the workers."""
    prefetched: PrefetchCounters
    loading: int
    """Samples of batch buffers that are not loaded yet."""
    ready: int
    """Samples that wait for the caller, including those of an incomplete batch."""
    workers: int
    prefetch_depth: int
    """Batches that may be decoded ahead."""
    wait_s: float
    """The caller waiting in `__next__`: training is faster than the loader."""
    wait_s_by_stage: dict[str, float]
    """The same by stage, as in `Loader.last_wait`."""
    processes_cpu_s: float = 0.0
    """CPU-seconds of the worker processes since they were started."""


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
    decode_s = max(0.0, after.decode_s - before.decode_s) + after.device_decode_s - before.device_decode_s
    fetch_s = max(read_s, (end_s - start_s) * workers - decode_s) if is_remote else read_s
    if fetch_s + decode_s <= 0:
        return [(end_s, QUEUE)]
    fetched_s = start_s + (end_s - start_s) * fetch_s / (fetch_s + decode_s)
    return [(min(end_s, fetched_s), FETCH), (end_s, DECODE)]


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
