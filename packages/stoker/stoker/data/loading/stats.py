"""What a loader has done, where the time went that training waited, and the number of workers that follows from it.

Each worker counts in a `Counters` of its own, so that none waits for another; `Loader.stats` adds them up. What the
stages of a wait mean for a run: docs/run-folder.md. Once a second, `LoaderRateMeter` derives rates from two snapshots,
and `LoaderAutotuner`, a pure function of these, decides the number of workers. Nothing that a run sees depends on it.
"""

import dataclasses
import time
from collections.abc import Iterable

from stoker_watch.runs.records import INPUT_STAGES

FETCH, DECODE, COPY, QUEUE = INPUT_STAGES
READ, DECODING = "read", "decoding"
"""What a worker is doing."""

POLL_INTERVAL_S = 1.0
"""Seconds of training between two polls."""
INPUT_BOUND_FRACTION, GROW_IDLE_FRACTION = 0.05, 0.15
"""More workers are started where training waits at least this fraction of the time (TensorFlow Profiler's "moderately
input-bound") while the workers are idle at most this fraction of theirs."""
MIN_SPEEDUP = 1.03
"""More workers have to load this many times as much, or they are stopped again."""
GROW_AFTER, RETRY_AFTER = 2, 60
"""Polls in a row that ask for more workers; polls until growth that did not help is tried again."""
MAX_WORKERS, WORKERS_PER_CORE = 32, 4
"""Workers that wait for a disk need no core; more than this per core only take turns (and the interpreter's lock)."""


@dataclasses.dataclass
class Counters:
    """What one worker has done and is doing. Written by that worker alone."""

    num_images: int = 0
    read_s: float = 0.0
    """Reading files. Requests in flight block no worker and do not count."""
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
        """Begins READ or DECODING. Returns the time."""
        start_s = time.perf_counter()
        self.current_stage = stage, start_s
        return start_s

    def add(self, other: "Counters") -> None:
        for name in COUNTER_FIELDS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


COUNTER_FIELDS = tuple(field.name for field in dataclasses.fields(Counters) if field.name != "current_stage")


def sum_counters(per_worker: Iterable[Counters]) -> Counters:
    """Returns the sum, including stages that have not ended."""
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
class LoaderStats:
    """What a loader has done since it was made, and what it is doing."""

    total: Counters
    loading: int
    """Samples of batch buffers that are not loaded yet."""
    ready: int
    """Samples that wait for the caller, including those of an incomplete batch."""
    workers: int
    prefetch_depth: int
    wait_s: float
    """The caller waiting in `__next__`: training is faster than the loader."""
    requested: int = 0
    """Samples beyond the batch buffers whose bytes a bucket was asked for."""
    fetched: int = 0
    """Samples whose request to a bucket has ended, since the loader's position was last set."""
    processes_cpu_s: float = 0.0
    """CPU-seconds of the worker processes since they were started."""


Intervals = list[tuple[float, str]]
"""(end in seconds of `time.perf_counter`, stage): each begins where the one before it ends."""


def split_wait(
    start_s: float, end_s: float, before: Counters, after: Counters, *, workers: int, is_remote: bool
) -> Intervals:
    """Returns the wait from start_s to end_s as intervals of stages: FETCH and DECODE in the proportion in which the
    workers read and decoded; QUEUE if they did neither.

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


def default_num_workers(cores: int, *, is_cpu: bool) -> int:
    """Returns how many workers an autotuned loader has first, and that may decode at a time. is_cpu: training needs the
    cores."""
    return max(1, min(2 if is_cpu else MAX_WORKERS, cores))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderRates:
    """A second or more of training. Fractions are 0 … 1."""

    wait_fraction: float
    """Of the time, training waited."""
    idle_fraction: float
    """Of the workers' time, they had nothing to do."""
    read_fraction: float
    """Of the rest, they read; else they decoded."""
    decoded_per_s: float


class LoaderAutotuner:
    """Decides `workers`. A change needs several polls in a row that ask for it, and growth that does not help is
    undone. Idle workers cost nothing and stay."""

    def __init__(self, *, cores: int, is_cpu: bool, workers: int, is_tuned: bool = True) -> None:
        """is_cpu: training runs on the same cores. is_tuned: false where the user gave the number."""
        self.workers = workers
        self._cores, self._is_cpu, self._is_tuned = cores, is_cpu, is_tuned
        self._starved_polls = 0
        self._before_growth: tuple[int, float] | None = None
        """Workers and images per second before the newest growth, until it is known whether it helped."""
        self._growth_cooldown = 0
        """Polls for which growth is not tried again."""

    def update(self, rates: LoaderRates) -> str | None:
        """Takes one poll into account. Returns a sentence for a change."""
        self._growth_cooldown = max(0, self._growth_cooldown - 1)
        is_starved = rates.wait_fraction >= INPUT_BOUND_FRACTION and rates.idle_fraction <= GROW_IDLE_FRACTION
        if not is_starved or not self._is_tuned:
            self._starved_polls, self._before_growth = 0, None
            return None
        self._starved_polls += 1
        if self._starved_polls < GROW_AFTER:
            return None
        self._starved_polls = 0
        return self._add_workers(rates)

    def _add_workers(self, rates: LoaderRates) -> str | None:
        before = self.workers
        if self._before_growth is not None and rates.decoded_per_s < MIN_SPEEDUP * self._before_growth[1]:
            self.workers, self._before_growth = self._before_growth[0], None
            self._growth_cooldown = RETRY_AFTER
            return f"{before} → {self.workers} workers: more of them did not load more"
        max_workers = min(MAX_WORKERS, WORKERS_PER_CORE * self._cores)
        if rates.read_fraction < 1:  # so many that no more of them decode at a time than may
            may_decode = default_num_workers(self._cores, is_cpu=self._is_cpu)
            max_workers = min(max_workers, int(may_decode / (1 - rates.read_fraction)))
        if self._growth_cooldown or max_workers <= before:
            return None
        self.workers = min(max_workers, before + max(1, before // 2))
        self._before_growth = before, rates.decoded_per_s
        return (
            f"{before} → {self.workers} workers: training waits {100 * rates.wait_fraction:.0f} % of the time, workers"
            f" read {100 * rates.read_fraction:.0f} % of theirs"
        )


class LoaderRateMeter:
    """Measures the rates from one poll to the next."""

    def __init__(self, stats: LoaderStats) -> None:
        self._last_stats = stats
        self.last_poll_s = time.perf_counter()

    def poll(self, stats: LoaderStats) -> LoaderRates:
        now_s, last = time.perf_counter(), self._last_stats
        duration_s = max(1e-9, now_s - self.last_poll_s)
        read_s = max(0.0, stats.total.read_s - last.total.read_s)
        busy_s = read_s + max(0.0, stats.total.decode_s - last.total.decode_s)
        rates = LoaderRates(
            wait_fraction=min(1.0, (stats.wait_s - last.wait_s) / duration_s),
            idle_fraction=min(1.0, max(0.0, 1 - busy_s / (duration_s * max(1, stats.workers)))),
            read_fraction=read_s / busy_s if busy_s > 0 else 0.0,
            decoded_per_s=(stats.total.num_images - last.total.num_images) / duration_s,
        )
        self._last_stats, self.last_poll_s = stats, now_s
        return rates
