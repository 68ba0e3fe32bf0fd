"""How many threads and how deep a ring: decided once a second from what the loader measures, each change with a reason.

`Tuner` is a pure function of what it has seen; `Gauge` makes what it sees out of two looks at a loader's `Stats`.
Nothing that a run sees depends on either number. A change needs several seconds that ask for it, and one that is taken
back makes the next in that direction twice as slow, so the numbers settle.
"""

import dataclasses
import time

from stoker.data.loading.stages import LoaderStats
from stoker.hardware.cgroup import host_cores, host_memory

POLL_INTERVAL_S = 1.0
"""Seconds of training between two looks."""
INPUT_BOUND_FRACTION, GROW_IDLE_FRACTION = 0.05, 0.15
"""Training waits at least this share of the time (TensorFlow Profiler's "moderately input-bound") while the threads
rest at most this share of theirs: more threads. Half as many again rest up to 43 %, which is no reason to shrink."""
SHRINK_IDLE_FRACTION, TARGET_IDLE_FRACTION = 0.5, 0.3
"""Threads that rest more than this while training never waits are let go, until the rest would rest this share."""
BURSTY_IDLE_FRACTION = 0.3
"""Training waits though the threads rest at least this share: what comes is uneven, and a deeper ring evens it out."""
MIN_SPEEDUP = 1.03
"""More threads have to load this many times as much, or they are let go again."""
GROW_AFTER, SHRINK_AFTER, RETRY_AFTER = 2, 10, 60
"""Looks in a row that ask for more or fewer; looks until growth that did not help is tried again."""
CPU_SATURATED_FRACTION = 0.95
"""Share of the cores from which on no thread can add anything."""
MAX_WORKERS, WORKERS_PER_CORE = 32, 4
"""Threads that wait for a disk need no core; more than this a core only take turns (and the interpreter's lock)."""
MAX_PREFETCH_DEPTH = 16
BUFFER_MEMORY_FRACTION, LOW_MEMORY_FRACTION, AMPLE_MEMORY_FRACTION = 0.25, 0.1, 0.2
"""Of the host memory: what the ring may take of the free part; free share from which on it shrinks, and may grow."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineLimits:
    """What the machine has."""

    cores: int
    decode_workers: int
    """Threads that may decode at a time: the cores, or fewer where training needs them too."""
    is_cpu: bool
    """Training computes on the same cores. Else the ring is page-locked memory: torch keeps what is given up, so that
    a shallower one would help nobody."""
    buffer_bytes: int
    """Host memory of a batch."""


def default_num_workers(cores: int, *, is_cpu: bool) -> int:
    """With how many threads a loader begins that tunes itself; as many may decode at a time."""
    return max(1, min(2 if is_cpu else MAX_WORKERS, cores))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderRates:
    """A second or more of training. Shares are 0 … 1."""

    wait_fraction: float
    """Of the time, training waited."""
    in_flight_fraction: float
    """Of that, for requests in flight, which neither threads nor a deeper ring make faster."""
    idle_fraction: float
    """Of the threads' time, they had nothing to do."""
    read_fraction: float
    """Of the rest, they read; else they decoded."""
    cpu_utilization: float
    """Of the cores' time, this process used."""
    decoded_per_s: float
    """Pictures decoded per second."""
    consumed_per_s: float
    """Pictures that training took per second."""
    memory_bytes: int
    """Of the host, or its cgroup."""
    free_bytes: int


class LoaderAutotuner:
    """Decides `threads` and `depth`. tunes_threads, tunes_depth: whether it may; the person may have said a number."""

    def __init__(
        self,
        limits: MachineLimits,
        *,
        workers: int,
        prefetch_depth: int,
        tunes_workers: bool = True,
        tunes_depth: bool = True,
    ) -> None:
        self.workers, self.prefetch_depth = workers, prefetch_depth
        self._limits, self._tunes_workers, self._tunes_depth = limits, tunes_workers, tunes_depth
        self._starved_polls = self._idle_polls = self._bursty_polls = self._low_memory_polls = 0
        self._shrink_after, self._retry_after = SHRINK_AFTER, RETRY_AFTER
        self._shrank = False
        self._before_growth: tuple[int, float] | None = None
        """Threads and pictures per second before the newest growth, until it is known whether it helped."""
        self._growth_cooldown = 0
        """Looks for which growth is not tried again."""
        self._wait_before_deepening: float | None = None
        """How much training waited before the newest growth of the ring."""
        self._reported_saturation = False

    def update(self, rates: LoaderRates) -> list[str]:
        """Takes one look into account. Returns a sentence for each change, and for a limit that is reached, once."""
        messages: list[str] = []
        waiting = rates.wait_fraction >= INPUT_BOUND_FRACTION
        self._growth_cooldown = max(0, self._growth_cooldown - 1)
        self._starved_polls = self._starved_polls + 1 if waiting and rates.idle_fraction <= GROW_IDLE_FRACTION else 0
        self._idle_polls = (
            self._idle_polls + 1
            if rates.wait_fraction < INPUT_BOUND_FRACTION / 5 and rates.idle_fraction >= SHRINK_IDLE_FRACTION
            else 0
        )
        self._bursty_polls = (
            self._bursty_polls + 1
            if waiting and rates.idle_fraction >= BURSTY_IDLE_FRACTION and rates.in_flight_fraction < 0.5
            else 0
        )
        self._low_memory_polls = (
            self._low_memory_polls + 1 if rates.free_bytes < LOW_MEMORY_FRACTION * rates.memory_bytes else 0
        )
        if not self._starved_polls:
            self._before_growth = None
        if self._starved_polls >= GROW_AFTER:
            self._starved_polls = 0
            messages += self._add_workers(rates)
        elif self._idle_polls >= self._shrink_after:
            self._idle_polls = 0
            messages += self._remove_workers(rates)
        if self._low_memory_polls >= GROW_AFTER:
            self._low_memory_polls = 0
            messages += self._decrease_depth(rates)
        elif self._bursty_polls >= GROW_AFTER:
            self._bursty_polls = 0
            messages += self._increase_depth(rates)
        return messages

    def _add_workers(self, rates: LoaderRates) -> list[str]:
        reason = f"training waits {100 * rates.wait_fraction:.0f} % of the time, threads read {100 * rates.read_fraction:.0f} % of theirs"
        if rates.cpu_utilization >= CPU_SATURATED_FRACTION:
            return self._report_saturation(rates)
        if not self._tunes_workers:
            return []
        if self._before_growth is not None and rates.decoded_per_s < MIN_SPEEDUP * self._before_growth[1]:
            before, self.workers, self._before_growth = self.workers, self._before_growth[0], None
            self._growth_cooldown, self._retry_after = self._retry_after, 2 * self._retry_after
            return [f"{before} → {self.workers} threads: more of them did not load more"]
        limits = self._limits
        max_workers = max(1, min(MAX_WORKERS, WORKERS_PER_CORE * limits.cores))
        if rates.read_fraction < 1:  # as many that at most `decoders` of them decode at a time
            max_workers = min(max_workers, int(limits.decode_workers / (1 - rates.read_fraction)))
        if self._growth_cooldown or max_workers <= self.workers:
            return []
        before = self.workers
        self.workers = min(max_workers, before + max(1, before // 2))
        self._before_growth = before, rates.decoded_per_s
        if self._shrank:
            self._shrank, self._shrink_after = False, 2 * self._shrink_after
        return [f"{before} → {self.workers} threads: {reason}"]

    def _report_saturation(self, rates: LoaderRates) -> list[str]:
        cores = self._limits.cores
        if self._reported_saturation or self._limits.is_cpu:
            return []
        self._reported_saturation = True
        activity = "decode" if rates.read_fraction < 0.5 else "are busy"
        return [
            f"all {cores} cores {activity}, and training waits {100 * rates.wait_fraction:.0f} % of the time; more cores per GPU, "
            "a cache or smaller pictures would help"
        ]

    def _remove_workers(self, rates: LoaderRates) -> list[str]:
        before = self.workers
        needed = max(1, -int(-before * (1 - rates.idle_fraction) // (1 - TARGET_IDLE_FRACTION)))
        if not self._tunes_workers or needed >= before:
            return []
        self.workers, self._shrank = needed, True
        return [f"{before} → {needed} threads: they rest {100 * rates.idle_fraction:.0f} % of the time"]

    def _increase_depth(self, rates: LoaderRates) -> list[str]:
        before, limits = self.prefetch_depth, self._limits
        helped = self._wait_before_deepening is None or rates.wait_fraction < 0.9 * self._wait_before_deepening
        if not self._tunes_depth or not helped or rates.free_bytes < AMPLE_MEMORY_FRACTION * rates.memory_bytes:
            return []
        max_added = int(BUFFER_MEMORY_FRACTION * rates.free_bytes // limits.buffer_bytes)
        self.prefetch_depth = min(MAX_PREFETCH_DEPTH, before + min(max_added, max(1, before // 2)))
        if self.prefetch_depth == before:
            return []
        self._wait_before_deepening = rates.wait_fraction
        return [
            f"{before} → {self.prefetch_depth} batches ahead: training waits {100 * rates.wait_fraction:.0f} % of the time though "
            f"threads rest {100 * rates.idle_fraction:.0f} % of theirs"
        ]

    def _decrease_depth(self, rates: LoaderRates) -> list[str]:
        if not self._tunes_depth or self.prefetch_depth == 1 or not self._limits.is_cpu:
            return []
        self.prefetch_depth -= 1
        self._wait_before_deepening = 0.0  # and it does not grow again
        free_mib = rates.free_bytes / 2**20
        return [
            f"{self.prefetch_depth + 1} → {self.prefetch_depth} batches ahead: {free_mib:,.0f} MiB of host memory are free"
        ]


def make_autotuner(
    workers: int, initial_workers: int, prefetch_depth: int, buffer_bytes: int, *, is_cpu: bool, tunes_depth: bool
) -> LoaderAutotuner:
    """A tuner for this machine. threads: 0 leaves their number to it, from `begin` on where that is more than usual;
    is_cpu: training computes on the same cores."""
    cores = host_cores()
    default_workers = default_num_workers(cores, is_cpu=is_cpu)
    limits = MachineLimits(cores=cores, decode_workers=default_workers, is_cpu=is_cpu, buffer_bytes=buffer_bytes)
    start_workers = workers or max(default_workers, initial_workers)
    return LoaderAutotuner(
        limits,
        workers=start_workers,
        prefetch_depth=prefetch_depth,
        tunes_workers=workers == 0,
        tunes_depth=tunes_depth,
    )


class LoaderRateMeter:
    """Measures from one look to the next."""

    def __init__(self, stats: LoaderStats) -> None:
        self._cores = host_cores()
        self._last_stats = stats
        self.last_poll_s, self._cpu_s = time.perf_counter(), time.process_time()

    def poll(self, stats: LoaderStats) -> LoaderRates:
        """What was done since the last look."""
        now_s, cpu_s = time.perf_counter(), time.process_time()
        duration_s, last = max(1e-9, now_s - self.last_poll_s), self._last_stats
        wait_s = stats.wait_s - last.wait_s
        read_s = max(0.0, stats.read_s - last.read_s)
        device_s = stats.device_decode_s - last.device_decode_s  # of a thread that is none of those that are counted
        busy_s = read_s + max(0.0, stats.decode.seconds - last.decode.seconds - device_s)
        fetch_s = stats.wait_s_by_stage.get("fetch", 0.0) - last.wait_s_by_stage.get("fetch", 0.0)
        in_flight_s = (stats.fetch.seconds - last.fetch.seconds) - (stats.read_s - last.read_s)
        limit, used = host_memory()
        rates = LoaderRates(
            wait_fraction=min(1.0, wait_s / duration_s),
            in_flight_fraction=min(1.0, fetch_s / wait_s) if wait_s > 0 and in_flight_s > read_s else 0.0,
            idle_fraction=min(1.0, max(0.0, 1 - busy_s / (duration_s * max(1, stats.workers)))),
            read_fraction=read_s / busy_s if busy_s > 0 else 0.0,
            cpu_utilization=min(1.0, (cpu_s - self._cpu_s) / (duration_s * self._cores)),
            decoded_per_s=(stats.decode.num_images - last.decode.num_images) / duration_s,
            consumed_per_s=(stats.copy.num_images - last.copy.num_images) / duration_s,
            memory_bytes=limit,
            free_bytes=max(0, limit - used),
        )
        self._last_stats, self.last_poll_s, self._cpu_s = stats, now_s, cpu_s
        return rates
