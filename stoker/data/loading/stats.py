"""What a loader has done and is doing, by stage: fetch, decode, copy. Read by people, benchmarks and `autotune.py`.

Each worker counts in a `Counters` of its own, so that none waits for another; `Loader.stats` adds them up.
"""

import dataclasses
import time
from collections.abc import Iterable

READ, DECODING = "read", "decoding"
"""What a worker is doing."""


@dataclasses.dataclass
class Counters:
    """What one worker has done and is doing. Written by that worker alone."""

    num_images: int = 0
    num_reads: int = 0
    """Files read by the worker; without objects of a bucket that were prefetched."""
    read_bytes: int = 0
    read_s: float = 0.0
    """Reading files: a part of `LoaderStats.fetch.seconds`. The rest are requests in flight, which block no worker."""
    cache_hits: int = 0
    """Reads that the cache of decoded images served."""
    cache_hit_bytes: int = 0
    """Pixels read from there."""
    cache_misses: int = 0
    """Images decoded for the cache."""
    decode_s: float = 0.0
    """Decoding, resizing and transforming boxes."""
    device_decode_s: float = 0.0
    """The part of it that the thread of the device decoder spent."""
    idle_s: float = 0.0
    """Waiting for a free batch buffer or for bytes: the loader is faster than training."""
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
    """Images that were fetched since the loader was made. The first is written by the caller, the rest by the fetcher's
    thread."""

    requested: int = 0
    completed: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """Summed over the fetches, which run in parallel."""


@dataclasses.dataclass
class StageStats:
    """A stage since the loader was made."""

    seconds: float
    """Summed over its samples, which run in parallel."""
    num_images: int
    bytes: int
    """Of encoded images that were fetched, of pixels that were decoded or copied."""


@dataclasses.dataclass
class LoaderStats:
    """What a loader has done since it was made, and what it is doing."""

    fetch: StageStats
    decode: StageStats
    """Decoding, resizing and transforming boxes."""
    copy: StageStats
    """To the device; `seconds` are those of issuing the copies and of waiting for them."""
    total: Counters
    """The sum over the workers."""
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
