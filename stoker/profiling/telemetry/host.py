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
from stoker.profiling.telemetry.processes import SLOW_SAMPLE_EVERY, ProcessTreeSample, ProcessTreeSampler
from stoker.profiling.telemetry.timeouts import TimeoutWorker

FREE_BYTES_TIMEOUT_S = 0.2
"""How long a run's folder is waited for to say its free bytes: one on NFS whose server is gone never does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostSample:
    """The host's part of a `schemas.DeviceSample`, by the same names. Shares are of the time since the last sample."""

    cpu_core_utilization: list[float]
    process_cpu: float | None
    rss_bytes: int | None
    memory_used_bytes: int | None
    memory_limit_bytes: int | None
    psi_cpu: float | None
    psi_memory: float | None
    psi_io: float | None
    throttled_s: float | None
    cpu_limit_cores: float | None
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
    open_fds: int | None
    max_fds: int | None
    oom_kills: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CumulativeCounters:
    """Everything that only grows, at one moment: seconds and bytes; `cores`: (busy, all) ticks of each core."""

    time_s: float
    core_ticks: list[tuple[float, float]]
    process_cpu_s: float | None
    psi_s: dict[str, float | None]
    throttled_s: float | None
    tree: ProcessTreeSample
    disk_bytes: tuple[int, int] | None
    network_bytes: tuple[int, int] | None
    oom_kills: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Memory:
    """Of the cgroup where its limit is the tighter one, else of the machine; page cache is not used."""

    limit_bytes: int
    used_bytes: int
    page_cache_bytes: int | None
    swap_used_bytes: int | None


class HostSampler:
    """Reads the host. The first sample covers the time since this was made.

    pid: whose processor time, memory, threads and files: of this process, or of another one and all below it, seen with
    that one's cgroup, network and /dev/shm; folder: where free bytes are asked for; proc: where the kernel's process
    files are; now: a monotonic clock in seconds.
    """

    def __init__(
        self,
        *,
        pid: int | None = None,
        run_dir: Path | None = None,
        proc: Path = Path("/proc"),
        cgroup: Cgroup | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pid = pid
        self._root_pid = pid or os.getpid()
        self._proc = proc
        self._cgroup = cgroup or (Cgroup() if pid is None else Cgroup.for_pid(pid))
        self._now = now
        self._processes = ProcessTreeSampler(self._root_pid, proc)
        self._shm = "/dev/shm" if pid is None else f"{proc}/{pid}/root/dev/shm"
        self._free_bytes_worker = (
            None if run_dir is None else TimeoutWorker(lambda: lambda: machine.free_bytes(run_dir), name="free bytes")
        )
        self._sample_count = 0
        self._cpu_limit_cores: float | None = None
        self._free_bytes: int | None = None
        self._previous = self._read_counters()

    def sample(self) -> HostSample:
        """Raises nothing that a machine could cause."""
        before, after = self._previous, self._read_counters()
        self._previous = after
        duration_s = after.time_s - before.time_s
        pressure = {
            resource: _fraction_of_time(before.psi_s[resource], after.psi_s[resource], duration_s)
            for resource in after.psi_s
        }
        if self._sample_count % SLOW_SAMPLE_EVERY == 0:
            self._cpu_limit_cores = self._usable_cores()
            self._free_bytes = (
                None if self._free_bytes_worker is None else self._free_bytes_worker.call(FREE_BYTES_TIMEOUT_S)
            )
        self._sample_count += 1
        memory, shm, tree = self._read_memory(), machine.disk_usage(self._shm), after.tree
        disk_read, disk_written = _per_second_pair(before.disk_bytes, after.disk_bytes, duration_s)
        received, sent = _per_second_pair(before.network_bytes, after.network_bytes, duration_s)
        oom_kills = _increase(before.oom_kills, after.oom_kills)
        return HostSample(
            cpu_core_utilization=_core_utilization(before.core_ticks, after.core_ticks),
            process_cpu=_per_second(before.process_cpu_s, after.process_cpu_s, duration_s),
            rss_bytes=tree.rss_bytes,
            memory_used_bytes=memory.used_bytes,
            memory_limit_bytes=memory.limit_bytes,
            psi_cpu=pressure["cpu"],
            psi_memory=pressure["memory"],
            psi_io=pressure["io"],
            throttled_s=_increase(before.throttled_s, after.throttled_s),
            cpu_limit_cores=self._cpu_limit_cores,
            threads=tree.threads,
            threads_running=tree.threads_running,
            page_cache_bytes=memory.page_cache_bytes,
            swap_used_bytes=memory.swap_used_bytes,
            read_bytes_s=_per_second(before.tree.read_bytes, tree.read_bytes, duration_s),
            written_bytes_s=_per_second(before.tree.written_bytes, tree.written_bytes, duration_s),
            disk_read_bytes_s=disk_read,
            disk_written_bytes_s=disk_written,
            disk_free_bytes=self._free_bytes,
            net_received_bytes_s=received,
            net_sent_bytes_s=sent,
            shm_used_bytes=None if shm is None else shm[0],
            shm_total_bytes=None if shm is None else shm[1],
            open_fds=tree.open_fds,
            max_fds=tree.max_fds,
            oom_kills=None if oom_kills is None else int(oom_kills),
        )

    def close(self) -> None:
        """Ends the thread that asks the folder, if it does not hang in it."""
        if self._free_bytes_worker is not None:
            self._free_bytes_worker.stop()

    def _read_counters(self) -> _CumulativeCounters:
        time_s = self._now()
        tree = self._processes.sample(time_s)
        return _CumulativeCounters(
            time_s=time_s,
            core_ticks=machine.core_ticks(self._proc),
            process_cpu_s=time.process_time() if tree.cpu_s is None and self._pid is None else tree.cpu_s,
            psi_s={
                resource: machine.pressure_s(self._proc / "pressure" / resource) for resource in ("cpu", "memory", "io")
            },
            throttled_s=self._cgroup.throttled_s(),
            tree=tree,
            disk_bytes=machine.disk_bytes(self._proc),
            network_bytes=machine.network_bytes(f"{self._proc}/{self._root_pid}"),
            oom_kills=self._cgroup.oom_kills(),
        )

    def _read_memory(self) -> _Memory:
        meminfo = machine.read_meminfo(self._proc)
        if not meminfo:
            virtual = psutil.virtual_memory()
            total, free = virtual.total, virtual.available
            cache = swap = None
        else:
            total, free = meminfo["MemTotal"], meminfo.get("MemAvailable", meminfo["MemFree"])
            cache = meminfo.get("Cached", 0) + meminfo.get("Buffers", 0) - meminfo.get("Shmem", 0)
            swap = meminfo.get("SwapTotal", 0) - meminfo.get("SwapFree", 0)
        cgroup_memory = self._cgroup.memory_state()
        if cgroup_memory is not None and cgroup_memory.limit < total:
            return _Memory(
                limit_bytes=cgroup_memory.limit,
                used_bytes=cgroup_memory.used,
                page_cache_bytes=cgroup_memory.page_cache,
                swap_used_bytes=cgroup_memory.swap,
            )
        return _Memory(limit_bytes=total, used_bytes=total - free, page_cache_bytes=cache, swap_used_bytes=swap)

    def _usable_cores(self) -> float | None:
        try:
            return usable_cores(self._root_pid, self._cgroup)
        except ProcessLookupError:  # the job ended
            return None


def _core_utilization(before: list[tuple[float, float]], after: list[tuple[float, float]]) -> list[float]:
    """Busy share of each core; empty when no time passed or a core came or went."""
    pairs = list(zip(before, after, strict=False))
    if len(before) != len(after) or any(new[1] <= old[1] for old, new in pairs):
        return []
    return [min(1.0, max(0.0, (new[0] - old[0]) / (new[1] - old[1]))) for old, new in pairs]


def _increase(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else max(0.0, after - before)


def _per_second(before: float | None, after: float | None, duration_s: float) -> float | None:
    increase = _increase(before, after)
    return None if increase is None or duration_s <= 0 else increase / duration_s


def _per_second_pair(
    before: tuple[int, int] | None, after: tuple[int, int] | None, duration_s: float
) -> tuple[float | None, float | None]:
    if before is None or after is None:
        return None, None
    return _per_second(before[0], after[0], duration_s), _per_second(before[1], after[1], duration_s)


def _fraction_of_time(before: float | None, after: float | None, duration_s: float) -> float | None:
    fraction = _per_second(before, after, duration_s)
    return None if fraction is None else min(1.0, fraction)


def process_start_s() -> float:
    """The moment of `time.perf_counter` at which this process began; not after now, whatever the clocks say."""
    age_s = time.time() - psutil.Process().create_time()
    return time.perf_counter() - max(0.0, age_s)
