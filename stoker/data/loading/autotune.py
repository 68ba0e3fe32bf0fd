"""The number of workers and the prefetch depth: decided once a second from the loader's measurements, with a reason.

`LoaderAutotuner` is a pure function of the rates it gets; `LoaderRateMeter` derives rates from two snapshots of
`LoaderStats`. Nothing that a run sees depends on either number. A change needs several polls in a row that ask for it,
and growth that does not help is undone. Idle workers cost nothing and stay.
"""

import dataclasses
import time

from stoker.data.loading.spec import LoaderSpec
from stoker.data.loading.stats import LoaderStats
from stoker.hardware.cgroup import host_cores, host_memory

POLL_INTERVAL_S = 1.0
"""Seconds of training between two polls."""
INPUT_BOUND_FRACTION, GROW_IDLE_FRACTION = 0.05, 0.15
"""More workers are started where training waits at least this fraction of the time (TensorFlow Profiler's "moderately
input-bound") while the workers are idle at most this fraction of theirs."""
BURSTY_IDLE_FRACTION = 0.3
"""If training waits though the workers are idle at least this fraction, loading times vary, and more prefetched batches
even them out."""
MIN_SPEEDUP = 1.03
"""More workers have to load this many times as much, or they are stopped again."""
GROW_AFTER, RETRY_AFTER = 2, 60
"""Polls in a row that ask for more workers or buffers; polls until growth that did not help is tried again."""
CPU_SATURATED_FRACTION = 0.95
"""CPU utilization from which on no worker can add anything."""
MAX_WORKERS, WORKERS_PER_CORE = 32, 4
"""Workers that wait for a disk need no core; more than this per core only take turns (and the interpreter's lock)."""
MAX_PREFETCH_DEPTH = 16
BUFFER_MEMORY_FRACTION, AMPLE_MEMORY_FRACTION = 0.25, 0.2
"""Of the host memory: what new buffers may take of the free part; the free fraction below which none are added."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineLimits:
    """What the machine has."""

    cores: int
    decode_workers: int
    """Workers that may decode at a time: the cores, or fewer where training needs them too."""
    is_cpu: bool
    """Training runs on the same cores."""
    buffer_bytes: int
    """Host memory of a batch."""


def default_num_workers(cores: int, *, is_cpu: bool) -> int:
    """The initial number of workers of an autotuned loader; as many may decode at a time."""
    return max(1, min(2 if is_cpu else MAX_WORKERS, cores))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderRates:
    """A second or more of training. Fractions are 0 … 1."""

    wait_fraction: float
    """Of the time, training waited."""
    in_flight_fraction: float
    """Of that, for requests in flight, which neither workers nor buffers make faster."""
    idle_fraction: float
    """Of the workers' time, they had nothing to do."""
    read_fraction: float
    """Of the rest, they read; else they decoded."""
    cpu_utilization: float
    """Of the cores' time, this process and its worker processes used."""
    decoded_per_s: float
    """Images decoded per second."""
    memory_bytes: int
    """Of the host, or its cgroup."""
    free_bytes: int


class LoaderAutotuner:
    """Decides `workers` and `prefetch_depth`. tunes_workers, tunes_depth: false where the user gave a number."""

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
        self._starved_polls = self._bursty_polls = 0
        self._before_growth: tuple[int, float] | None = None
        """Workers and images per second before the newest growth, until it is known whether it helped."""
        self._growth_cooldown = 0
        """Polls for which growth is not tried again."""
        self._wait_before_deepening: float | None = None
        """Fraction that training waited before the prefetch depth last grew."""
        self._reported_saturation = False

    def update(self, rates: LoaderRates) -> list[str]:
        """Takes one poll into account. Returns a sentence for each change, and once for a limit that is reached."""
        waiting, idle = rates.wait_fraction >= INPUT_BOUND_FRACTION, rates.idle_fraction
        is_starved = waiting and idle <= GROW_IDLE_FRACTION
        is_bursty = waiting and idle >= BURSTY_IDLE_FRACTION and rates.in_flight_fraction < 0.5
        self._growth_cooldown = max(0, self._growth_cooldown - 1)
        self._starved_polls = self._starved_polls + 1 if is_starved else 0
        self._bursty_polls = self._bursty_polls + 1 if is_bursty else 0
        messages: list[str] = []
        if not is_starved:
            self._before_growth = None
        if self._starved_polls >= GROW_AFTER:
            self._starved_polls = 0
            messages += self._add_workers(rates)
        if self._bursty_polls >= GROW_AFTER:
            self._bursty_polls = 0
            messages += self._increase_depth(rates)
        return messages

    def limit_depth(self, depth: int) -> bool:
        """At most so many batches ahead from now on; whether that changes something."""
        if not self._tunes_depth or self.prefetch_depth <= depth:
            return False
        self.prefetch_depth, self._tunes_depth = depth, False
        return True

    def _add_workers(self, rates: LoaderRates) -> list[str]:
        if rates.cpu_utilization >= CPU_SATURATED_FRACTION:
            return self._report_saturation(rates)
        if not self._tunes_workers:
            return []
        before = self.workers
        if self._before_growth is not None and rates.decoded_per_s < MIN_SPEEDUP * self._before_growth[1]:
            self.workers, self._before_growth = self._before_growth[0], None
            self._growth_cooldown = RETRY_AFTER
            return [f"{before} → {self.workers} workers: more of them did not load more"]
        limits = self._limits
        max_workers = max(1, min(MAX_WORKERS, WORKERS_PER_CORE * limits.cores))
        if rates.read_fraction < 1:  # so many that at most `decode_workers` of them decode at a time
            max_workers = min(max_workers, int(limits.decode_workers / (1 - rates.read_fraction)))
        if self._growth_cooldown or max_workers <= before:
            return []
        self.workers = min(max_workers, before + max(1, before // 2))
        self._before_growth = before, rates.decoded_per_s
        return [
            f"{before} → {self.workers} workers: training waits {_percent(rates.wait_fraction)} of the time, "
            f"workers read {_percent(rates.read_fraction)} of theirs"
        ]

    def _report_saturation(self, rates: LoaderRates) -> list[str]:
        if self._reported_saturation or self._limits.is_cpu:
            return []
        self._reported_saturation = True
        activity = "decode" if rates.read_fraction < 0.5 else "are busy"
        return [
            f"all {self._limits.cores} cores {activity}, and training waits {_percent(rates.wait_fraction)} of the "
            "time; more cores per GPU, a cache or smaller images would help"
        ]

    def _increase_depth(self, rates: LoaderRates) -> list[str]:
        before = self.prefetch_depth
        helped = self._wait_before_deepening is None or rates.wait_fraction < 0.9 * self._wait_before_deepening
        if not self._tunes_depth or not helped or rates.free_bytes < AMPLE_MEMORY_FRACTION * rates.memory_bytes:
            return []
        max_added = int(BUFFER_MEMORY_FRACTION * rates.free_bytes // self._limits.buffer_bytes)
        self.prefetch_depth = min(MAX_PREFETCH_DEPTH, before + min(max_added, max(1, before // 2)))
        if self.prefetch_depth == before:
            return []
        self._wait_before_deepening = rates.wait_fraction
        return [
            f"{before} → {self.prefetch_depth} batches ahead: training waits {_percent(rates.wait_fraction)} of the "
            f"time though workers are idle {_percent(rates.idle_fraction)} of theirs"
        ]


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def make_autotuner(spec: LoaderSpec, *, prefetch_depth: int, buffer_bytes: int, num_processes: int) -> LoaderAutotuner:
    """An autotuner for a loader on this machine. buffer_bytes: of a batch. num_processes: worker processes, or 0."""
    cores, is_cpu = host_cores(), spec.device.is_cpu
    default_workers = default_num_workers(cores, is_cpu=is_cpu)
    workers = max(default_workers, spec.initial_workers) if spec.workers == "auto" else spec.workers
    return LoaderAutotuner(
        MachineLimits(cores=cores, decode_workers=default_workers, is_cpu=is_cpu, buffer_bytes=buffer_bytes),
        workers=max(1, num_processes, workers),
        prefetch_depth=prefetch_depth,
        tunes_workers=spec.workers == "auto",
        tunes_depth=spec.prefetch_depth is None and not num_processes,  # shared memory has a fixed size
    )


class LoaderRateMeter:
    """Measures the rates from one poll to the next."""

    def __init__(self, stats: LoaderStats) -> None:
        self._cores = host_cores()
        self._last_stats = stats
        self.last_poll_s, self._cpu_s = time.perf_counter(), time.process_time() + stats.processes_cpu_s

    def poll(self, stats: LoaderStats) -> LoaderRates:
        """The rates since the last poll."""
        now_s, cpu_s = time.perf_counter(), time.process_time() + stats.processes_cpu_s
        duration_s, last = max(1e-9, now_s - self.last_poll_s), self._last_stats
        wait_s = stats.wait_s - last.wait_s
        read_s = max(0.0, stats.total.read_s - last.total.read_s)
        busy_s = read_s + max(0.0, stats.total.decode_s - last.total.decode_s)
        fetch_s = stats.wait_s_by_stage.get("fetch", 0.0) - last.wait_s_by_stage.get("fetch", 0.0)
        in_flight_s = stats.prefetched.seconds - last.prefetched.seconds
        limit, used = host_memory()
        rates = LoaderRates(
            wait_fraction=min(1.0, wait_s / duration_s),
            in_flight_fraction=min(1.0, fetch_s / wait_s) if wait_s > 0 and in_flight_s > read_s else 0.0,
            idle_fraction=min(1.0, max(0.0, 1 - busy_s / (duration_s * max(1, stats.workers)))),
            read_fraction=read_s / busy_s if busy_s > 0 else 0.0,
            cpu_utilization=min(1.0, (cpu_s - self._cpu_s) / (duration_s * self._cores)),
            decoded_per_s=(stats.total.num_images - last.total.num_images) / duration_s,
            memory_bytes=limit,
            free_bytes=max(0, limit - used),
        )
        self._last_stats, self.last_poll_s, self._cpu_s = stats, now_s, cpu_s
        return rates
