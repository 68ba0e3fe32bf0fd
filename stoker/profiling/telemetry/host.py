"""The host's part of a line of devices.jsonl: the machine and the processes of a run.

Rates and fractions are differences since the previous sample, of counters that `machine`, `processes` and `cgroup`
read. A value that the machine does not provide (macOS has no /proc, old kernels no pressure) is None. No torch, and
cheap: it runs once a second next to the training (`sampler`), at a cost that does not grow with the run's threads;
values that change slowly or cost more are read in every tenth sample and repeated in between.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from stoker.hardware.cgroup import Cgroup, usable_cores
from stoker.profiling.telemetry import machine
from stoker.profiling.telemetry.processes import (
    SLOW_SAMPLE_EVERY,
    OtherProcesses,
    ProcessTreeSample,
    ProcessTreeSampler,
)
from stoker.profiling.telemetry.timeouts import TimeoutWorker
from stoker.runs.schemas import DeviceSample, GpuSample

FREE_BYTES_TIMEOUT_S = 0.2
"""Timeout of the query for free bytes: a folder on NFS whose server is gone never answers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CumulativeCounters:
    """Counters at one moment, in seconds and bytes. cores: (busy, total) of each core."""

    time_s: float
    cores_s: list[tuple[float, float]]
    process_cpu_s: float | None
    psi_s: dict[str, float | None]
    throttled_s: float | None
    tree: ProcessTreeSample
    disk_bytes: tuple[int, int] | None
    network_bytes: tuple[int, int] | None
    oom_kills: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Memory:
    """Of the cgroup if its limit is lower, else of the machine. Page cache does not count as used."""

    limit_bytes: int
    used_bytes: int
    page_cache_bytes: int | None
    swap_used_bytes: int | None


class HostSampler:
    """Samples the host. The first sample covers the time since the creation of this object.

    pid: root of the process tree whose CPU time, memory, threads and files are read, with its cgroup, network and
    /dev/shm; default: this process. run_dir: where free bytes are queried; proc: folder of the kernel's process files;
    now: a monotonic clock in seconds.
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
        self._other_processes = OtherProcesses({self._root_pid, os.getpid()}, proc)
        self._shm = "/dev/shm" if pid is None else f"{proc}/{pid}/root/dev/shm"
        self._free_bytes_worker = (
            None if run_dir is None else TimeoutWorker(lambda: lambda: machine.free_bytes(run_dir), name="free bytes")
        )
        self._sample_count = 0
        self._cpu_limit_cores: float | None = None
        self._free_bytes: int | None = None
        self._previous = self._read_counters()

    def sample(self, *, attempt: int = 0, gpus: Sequence[GpuSample] = ()) -> DeviceSample:
        """A line of devices.jsonl. Errors of the machine never raise."""
        unix_time = time.time()
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
        utilization = _core_utilization(before.cores_s, after.cores_s)
        process_cpu = _per_second(before.process_cpu_s, after.process_cpu_s, duration_s)
        other_cores = 0.0 if process_cpu is None else sum(utilization) - process_cpu
        return DeviceSample(
            t=unix_time,
            attempt=attempt,
            gpus=list(gpus),
            cpu_core_utilization=utilization,
            process_cpu=process_cpu,
            busiest_processes=self._other_processes.sample(after.time_s, other_cores),
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
        """Ends the thread that queries the folder, unless it hangs."""
        if self._free_bytes_worker is not None:
            self._free_bytes_worker.stop()

    def _read_counters(self) -> _CumulativeCounters:
        time_s = self._now()
        tree = self._processes.sample(time_s)
        return _CumulativeCounters(
            time_s=time_s,
            cores_s=machine.core_times(),
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
    """Busy fraction of each core; empty if no time passed or the number of cores changed."""
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
    """The time of `time.perf_counter` at which this process started; never in the future."""
    age_s = time.time() - psutil.Process().create_time()
    return time.perf_counter() - max(0.0, age_s)
