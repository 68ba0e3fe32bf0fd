"""What the machine says about itself and about a run's processes, as the host's part of a line of devices.jsonl.

Rates and shares are differences since the reading before, of counters that `machine`, `processes` and `cgroup` read.
What a machine does not say (macOS has no /proc, old kernels no pressure) is None. No torch, and cheap: it runs beside
training once a second (`witness`), at a price that does not grow with the threads of the run; what changes slowly or
costs more is read every tenth time, and stands in between.
"""

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from stoker.hardware.cgroup import Cgroup, usable_cores
from stoker.profiling.telemetry import machine
from stoker.profiling.telemetry.processes import SELDOM, Processes, Tree
from stoker.profiling.telemetry.timeouts import Beside

FOLDER_WITHIN_S = 0.2
"""How long a run's folder is waited for to say its free bytes: one on NFS whose server is gone never does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostSample:
    """The host's part of a `schemas.DeviceSample`, by the same names. Shares are of the time since the last sample."""

    cpu: list[float]
    process_cpu: float | None
    rss_bytes: int | None
    memory_used_bytes: int | None
    memory_limit_bytes: int | None
    psi_cpu: float | None
    psi_memory: float | None
    psi_io: float | None
    throttled_s: float | None
    cores: float | None
    threads: int | None
    threads_running: float | None
    page_cache_bytes: int | None
    swap_used_bytes: int | None
    read_bytes_s: float | None
    written_bytes_s: float | None
    disk_read_bytes_s: float | None
    disk_written_bytes_s: float | None
    disk_free_bytes: int | None
    net_received_bytes_s: float | None
    net_sent_bytes_s: float | None
    shm_used_bytes: int | None
    shm_total_bytes: int | None
    handles: int | None
    handles_limit: int | None
    oom_kills: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Counters:
    """Everything that only grows, at one moment: seconds and bytes; `cores`: (busy, all) ticks of each core."""

    at_s: float
    cores: list[tuple[float, float]]
    process_s: float | None
    psi_s: dict[str, float | None]
    throttled_s: float | None
    tree: Tree
    disk: tuple[int, int] | None
    network: tuple[int, int] | None
    oom_kills: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Memory:
    """Of the cgroup where its limit is the tighter one, else of the machine; page cache is not used."""

    limit: int
    used: int
    page_cache: int | None
    swap_used: int | None


class Host:
    """Reads the host. The first sample covers the time since this was made.

    pid: whose processor time, memory, threads and files: of this process, or of another one and all below it, seen with
    that one's cgroup, network and /dev/shm; folder: where free bytes are asked for; proc: where the kernel's process
    files are; now: a monotonic clock in seconds.
    """

    def __init__(
        self,
        *,
        pid: int | None = None,
        folder: Path | None = None,
        proc: Path = Path("/proc"),
        cgroup: Cgroup | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pid = pid
        self._root = pid or os.getpid()
        self._proc = proc
        self._cgroup = cgroup or (Cgroup() if pid is None else Cgroup.of(pid))
        self._now = now
        self._processes = Processes(self._root, proc)
        self._shm = "/dev/shm" if pid is None else f"{proc}/{pid}/root/dev/shm"
        self._room = None if folder is None else Beside(lambda: lambda: machine.free_bytes(folder), name="free bytes")
        self._number = 0
        self._cores: float | None = None
        self._free_bytes: int | None = None
        self._before = self._counters()

    def sample(self) -> HostSample:
        """Raises nothing that a machine could cause."""
        before, after = self._before, self._counters()
        self._before = after
        took_s = after.at_s - before.at_s
        pressure = {what: _share(before.psi_s[what], after.psi_s[what], took_s) for what in after.psi_s}
        if self._number % SELDOM == 0:
            self._cores = self._usable_cores()
            self._free_bytes = None if self._room is None else self._room.ask(FOLDER_WITHIN_S)
        self._number += 1
        memory, shm, tree = self._memory(), machine.room(self._shm), after.tree
        disk_read, disk_written = _rates(before.disk, after.disk, took_s)
        received, sent = _rates(before.network, after.network, took_s)
        kills = _grown(before.oom_kills, after.oom_kills)
        return HostSample(
            cpu=_busy(before.cores, after.cores),
            process_cpu=_rate(before.process_s, after.process_s, took_s),
            rss_bytes=tree.rss_bytes,
            memory_used_bytes=memory.used,
            memory_limit_bytes=memory.limit,
            psi_cpu=pressure["cpu"],
            psi_memory=pressure["memory"],
            psi_io=pressure["io"],
            throttled_s=_grown(before.throttled_s, after.throttled_s),
            cores=self._cores,
            threads=tree.threads,
            threads_running=tree.threads_running,
            page_cache_bytes=memory.page_cache,
            swap_used_bytes=memory.swap_used,
            read_bytes_s=_rate(before.tree.read_bytes, tree.read_bytes, took_s),
            written_bytes_s=_rate(before.tree.written_bytes, tree.written_bytes, took_s),
            disk_read_bytes_s=disk_read,
            disk_written_bytes_s=disk_written,
            disk_free_bytes=self._free_bytes,
            net_received_bytes_s=received,
            net_sent_bytes_s=sent,
            shm_used_bytes=None if shm is None else shm[0],
            shm_total_bytes=None if shm is None else shm[1],
            handles=tree.handles,
            handles_limit=tree.handles_limit,
            oom_kills=None if kills is None else int(kills),
        )

    def close(self) -> None:
        """Ends the thread that asks the folder, if it does not hang in it."""
        if self._room is not None:
            self._room.end()

    def _counters(self) -> _Counters:
        at_s = self._now()
        tree = self._processes.sample(at_s)
        return _Counters(
            at_s=at_s,
            cores=machine.core_ticks(self._proc),
            process_s=time.process_time() if tree.cpu_s is None and self._pid is None else tree.cpu_s,
            psi_s={what: machine.pressure_s(self._proc / "pressure" / what) for what in ("cpu", "memory", "io")},
            throttled_s=self._cgroup.throttled_s(),
            tree=tree,
            disk=machine.disk_bytes(self._proc),
            network=machine.network_bytes(f"{self._proc}/{self._root}"),
            oom_kills=self._cgroup.oom_kills(),
        )

    def _memory(self) -> _Memory:
        told = machine.memory(self._proc)
        if not told:
            everything = psutil.virtual_memory()
            total, free = everything.total, everything.available
            cache = swap = None
        else:
            total, free = told["MemTotal"], told.get("MemAvailable", told["MemFree"])
            cache = told.get("Cached", 0) + told.get("Buffers", 0) - told.get("Shmem", 0)
            swap = told.get("SwapTotal", 0) - told.get("SwapFree", 0)
        inside = self._cgroup.memory_state()
        if inside is not None and inside.limit < total:
            return _Memory(limit=inside.limit, used=inside.used, page_cache=inside.page_cache, swap_used=inside.swap)
        return _Memory(limit=total, used=total - free, page_cache=cache, swap_used=swap)

    def _usable_cores(self) -> float | None:
        try:
            return usable_cores(self._root, self._cgroup)
        except ProcessLookupError:  # the job ended
            return None


def _busy(before: list[tuple[float, float]], after: list[tuple[float, float]]) -> list[float]:
    """Busy share of each core; empty when no time passed or a core came or went."""
    pairs = list(zip(before, after, strict=False))
    if len(before) != len(after) or any(new[1] <= old[1] for old, new in pairs):
        return []
    return [min(1.0, max(0.0, (new[0] - old[0]) / (new[1] - old[1]))) for old, new in pairs]


def _grown(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else max(0.0, after - before)


def _rate(before: float | None, after: float | None, took_s: float) -> float | None:
    grown = _grown(before, after)
    return None if grown is None or took_s <= 0 else grown / took_s


def _rates(
    before: tuple[int, int] | None, after: tuple[int, int] | None, took_s: float
) -> tuple[float | None, float | None]:
    if before is None or after is None:
        return None, None
    return _rate(before[0], after[0], took_s), _rate(before[1], after[1], took_s)


def _share(before: float | None, after: float | None, took_s: float) -> float | None:
    rate = _rate(before, after, took_s)
    return None if rate is None else min(1.0, rate)


def process_started_s() -> float:
    """The moment of `time.perf_counter` at which this process began; not after now, whatever the clocks say."""
    age_s = time.time() - psutil.Process().create_time()
    return time.perf_counter() - max(0.0, age_s)
