"""How many threads and how deep a ring: decided once a second from what the loader measures, each change with a reason.

`Tuner` is a pure function of what it has seen; `Gauge` makes what it sees out of two looks at a loader's `Stats`.
Nothing that a run sees depends on either number. A change needs several seconds that ask for it, and one that is taken
back makes the next in that direction twice as slow, so the numbers settle.
"""

import dataclasses
import time

from stoker.data.loading.stages import Stats
from stoker.hardware.cgroup import host_cores, host_memory

LOOK_S = 1.0
"""Seconds of training between two looks."""
WAITS_FROM, IDLE_BELOW = 0.05, 0.15
"""Training waits at least this share of the time (TensorFlow Profiler's "moderately input-bound") while the threads
rest at most this share of theirs: more threads. Half as many again rest up to 43 %, which is no reason to shrink."""
IDLE_FROM, REST = 0.5, 0.3
"""Threads that rest more than this while training never waits are let go, until the rest would rest this share."""
BURSTY_FROM = 0.3
"""Training waits though the threads rest at least this share: what comes is uneven, and a deeper ring evens it out."""
HELPS = 1.03
"""More threads have to load this many times as much, or they are let go again."""
GROW_AFTER, SHRINK_AFTER, RETRY_AFTER = 2, 10, 60
"""Looks in a row that ask for more or fewer; looks until growth that did not help is tried again."""
BUSY_CORES = 0.95
"""Share of the cores from which on no thread can add anything."""
MOST_THREADS, THREADS_A_CORE = 32, 4
"""Threads that wait for a disk need no core; more than this a core only take turns (and the interpreter's lock)."""
MOST_DEPTH = 16
RING_SHARE, LITTLE, ENOUGH = 0.25, 0.1, 0.2
"""Of the host memory: what the ring may take of the free part; free share from which on it shrinks, and may grow."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What the machine has."""

    cores: int
    decoders: int
    """Threads that may decode at a time: the cores, or fewer where training needs them too."""
    is_cpu: bool
    """Training computes on the same cores. Else the ring is page-locked memory: torch keeps what is given up, so that
    a shallower one would help nobody."""
    slot_bytes: int
    """Host memory of a batch."""


def first_threads(cores: int, *, is_cpu: bool) -> int:
    """With how many threads a loader begins that tunes itself; as many may decode at a time."""
    return max(1, min(2 if is_cpu else MOST_THREADS, cores))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """A second or more of training. Shares are 0 … 1."""

    waits: float
    """Of the time, training waited."""
    flights: float
    """Of that, for requests in flight, which neither threads nor a deeper ring make faster."""
    idle: float
    """Of the threads' time, they had nothing to do."""
    reads: float
    """Of the rest, they read; else they decoded."""
    cpu: float
    """Of the cores' time, this process used."""
    per_s: float
    """Pictures decoded per second."""
    handed_per_s: float
    """Pictures that training took per second."""
    memory_bytes: int
    """Of the host, or its cgroup."""
    free_bytes: int


class Tuner:
    """Decides `threads` and `depth`. tunes_threads, tunes_depth: whether it may; the person may have said a number."""

    def __init__(
        self, limits: Limits, *, threads: int, depth: int, tunes_threads: bool = True, tunes_depth: bool = True
    ) -> None:
        self.threads, self.depth = threads, depth
        self._limits, self._tunes_threads, self._tunes_depth = limits, tunes_threads, tunes_depth
        self._hungry = self._lazy = self._bursty = self._tight = 0
        self._shrink_after, self._retry_after = SHRINK_AFTER, RETRY_AFTER
        self._shrank = False
        self._tried: tuple[int, float] | None = None
        """Threads and pictures per second before the newest growth, until it is known whether it helped."""
        self._held = 0
        """Looks for which growth is not tried again."""
        self._depth_waits: float | None = None
        """How much training waited before the newest growth of the ring."""
        self._said_full = False

    def see(self, seen: Seen) -> list[str]:
        """Takes one look into account. Returns a sentence for each change, and for a limit that is reached, once."""
        said: list[str] = []
        waiting = seen.waits >= WAITS_FROM
        self._held = max(0, self._held - 1)
        self._hungry = self._hungry + 1 if waiting and seen.idle <= IDLE_BELOW else 0
        self._lazy = self._lazy + 1 if seen.waits < WAITS_FROM / 5 and seen.idle >= IDLE_FROM else 0
        self._bursty = self._bursty + 1 if waiting and seen.idle >= BURSTY_FROM and seen.flights < 0.5 else 0
        self._tight = self._tight + 1 if seen.free_bytes < LITTLE * seen.memory_bytes else 0
        if not self._hungry:
            self._tried = None
        if self._hungry >= GROW_AFTER:
            self._hungry = 0
            said += self._more_threads(seen)
        elif self._lazy >= self._shrink_after:
            self._lazy = 0
            said += self._fewer_threads(seen)
        if self._tight >= GROW_AFTER:
            self._tight = 0
            said += self._shallower(seen)
        elif self._bursty >= GROW_AFTER:
            self._bursty = 0
            said += self._deeper(seen)
        return said

    def _more_threads(self, seen: Seen) -> list[str]:
        why = f"training waits {100 * seen.waits:.0f} % of the time, threads read {100 * seen.reads:.0f} % of theirs"
        if seen.cpu >= BUSY_CORES:
            return self._full(seen)
        if not self._tunes_threads:
            return []
        if self._tried is not None and seen.per_s < HELPS * self._tried[1]:
            before, self.threads, self._tried = self.threads, self._tried[0], None
            self._held, self._retry_after = self._retry_after, 2 * self._retry_after
            return [f"{before} → {self.threads} threads: more of them did not load more"]
        limits = self._limits
        most = max(1, min(MOST_THREADS, THREADS_A_CORE * limits.cores))
        if seen.reads < 1:  # as many that at most `decoders` of them decode at a time
            most = min(most, int(limits.decoders / (1 - seen.reads)))
        if self._held or most <= self.threads:
            return []
        before = self.threads
        self.threads = min(most, before + max(1, before // 2))
        self._tried = before, seen.per_s
        if self._shrank:
            self._shrank, self._shrink_after = False, 2 * self._shrink_after
        return [f"{before} → {self.threads} threads: {why}"]

    def _full(self, seen: Seen) -> list[str]:
        cores = self._limits.cores
        if self._said_full or self._limits.is_cpu:
            return []
        self._said_full = True
        doing = "decode" if seen.reads < 0.5 else "are busy"
        return [
            f"all {cores} cores {doing}, and training waits {100 * seen.waits:.0f} % of the time; more cores per GPU, "
            "a cache or smaller pictures would help"
        ]

    def _fewer_threads(self, seen: Seen) -> list[str]:
        before = self.threads
        enough = max(1, -int(-before * (1 - seen.idle) // (1 - REST)))
        if not self._tunes_threads or enough >= before:
            return []
        self.threads, self._shrank = enough, True
        return [f"{before} → {enough} threads: they rest {100 * seen.idle:.0f} % of the time"]

    def _deeper(self, seen: Seen) -> list[str]:
        before, limits = self.depth, self._limits
        helped = self._depth_waits is None or seen.waits < 0.9 * self._depth_waits
        if not self._tunes_depth or not helped or seen.free_bytes < ENOUGH * seen.memory_bytes:
            return []
        room = int(RING_SHARE * seen.free_bytes // limits.slot_bytes)
        self.depth = min(MOST_DEPTH, before + min(room, max(1, before // 2)))
        if self.depth == before:
            return []
        self._depth_waits = seen.waits
        return [
            f"{before} → {self.depth} batches ahead: training waits {100 * seen.waits:.0f} % of the time though "
            f"threads rest {100 * seen.idle:.0f} % of theirs"
        ]

    def _shallower(self, seen: Seen) -> list[str]:
        if not self._tunes_depth or self.depth == 1 or not self._limits.is_cpu:
            return []
        self.depth -= 1
        self._depth_waits = 0.0  # and it does not grow again
        free = seen.free_bytes / 2**20
        return [f"{self.depth + 1} → {self.depth} batches ahead: {free:,.0f} MiB of host memory are free"]


def tuner_for(threads: int, begin: int, depth: int, slot_bytes: int, *, is_cpu: bool, tunes_depth: bool) -> Tuner:
    """A tuner for this machine. threads: 0 leaves their number to it, from `begin` on where that is more than usual;
    is_cpu: training computes on the same cores."""
    cores = host_cores()
    first = first_threads(cores, is_cpu=is_cpu)
    limits = Limits(cores=cores, decoders=first, is_cpu=is_cpu, slot_bytes=slot_bytes)
    now = threads or max(first, begin)
    return Tuner(limits, threads=now, depth=depth, tunes_threads=threads == 0, tunes_depth=tunes_depth)


class Gauge:
    """Measures from one look to the next."""

    def __init__(self, stats: Stats) -> None:
        self._cores = host_cores()
        self._last = stats
        self.looked_s, self._cpu_s = time.perf_counter(), time.process_time()

    def look(self, stats: Stats) -> Seen:
        """What was done since the last look."""
        now_s, cpu_s = time.perf_counter(), time.process_time()
        took_s, last = max(1e-9, now_s - self.looked_s), self._last
        wait_s = stats.wait_s - last.wait_s
        read_s = max(0.0, stats.read_s - last.read_s)
        device_s = stats.device_s - last.device_s  # of a thread that is none of those that are counted
        busy_s = read_s + max(0.0, stats.decode.seconds - last.decode.seconds - device_s)
        fetch_s = stats.waits.get("fetch", 0.0) - last.waits.get("fetch", 0.0)
        in_flight_s = (stats.fetch.seconds - last.fetch.seconds) - (stats.read_s - last.read_s)
        limit, used = host_memory()
        seen = Seen(
            waits=min(1.0, wait_s / took_s),
            flights=min(1.0, fetch_s / wait_s) if wait_s > 0 and in_flight_s > read_s else 0.0,
            idle=min(1.0, max(0.0, 1 - busy_s / (took_s * max(1, stats.threads)))),
            reads=read_s / busy_s if busy_s > 0 else 0.0,
            cpu=min(1.0, (cpu_s - self._cpu_s) / (took_s * self._cores)),
            per_s=(stats.decode.pictures - last.decode.pictures) / took_s,
            handed_per_s=(stats.copy.pictures - last.copy.pictures) / took_s,
            memory_bytes=limit,
            free_bytes=max(0, limit - used),
        )
        self._last, self.looked_s, self._cpu_s = stats, now_s, cpu_s
        return seen
