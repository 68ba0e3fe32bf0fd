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
from typing import Any

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


PRESSURE = {"psi_cpu": "cpu", "psi_memory": "memory", "psi_io": "io"}
"""Field of a sample → name of the kernel's pressure file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Counters:
    """Counters at one moment, in seconds and bytes. per_second, increases: by the field of the sample that has their
    rate, or their increase. cores_s: (busy, total) of each core."""

    time_s: float
    cores_s: list[tuple[float, float]]
    per_second: dict[str, float | None]
    increases: dict[str, float | None]
    tree: ProcessTreeSample


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
        rates: dict[str, Any] = {
            name: _per_second(before.per_second[name], value, duration_s) for name, value in after.per_second.items()
        }
        for name in PRESSURE:
            rates[name] = None if rates[name] is None else min(1.0, rates[name])
        increases: dict[str, Any] = {
            name: _increase(before.increases[name], value) for name, value in after.increases.items()
        }
        if self._sample_count % SLOW_SAMPLE_EVERY == 0:
            self._cpu_limit_cores = self._usable_cores()
            self._free_bytes = (
                None if self._free_bytes_worker is None else self._free_bytes_worker.call(FREE_BYTES_TIMEOUT_S)
            )
        self._sample_count += 1
        utilization = _core_utilization(before.cores_s, after.cores_s)
        process_cpu = rates["process_cpu"]
        other_cores = 0.0 if process_cpu is None else sum(utilization) - process_cpu
        shm, tree = machine.disk_usage(self._shm), after.tree
        return DeviceSample(
            t=unix_time,
            attempt=attempt,
            gpus=list(gpus),
            cpu_core_utilization=utilization,
            busiest_processes=self._other_processes.sample(after.time_s, other_cores),
            rss_bytes=tree.rss_bytes,
            cpu_limit_cores=self._cpu_limit_cores,
            threads=tree.threads,
            threads_running=tree.threads_running,
            disk_free_bytes=self._free_bytes,
            shm_used_bytes=None if shm is None else shm[0],
            shm_total_bytes=None if shm is None else shm[1],
            open_fds=tree.open_fds,
            max_fds=tree.max_fds,
            **rates,
            **increases,
            **self._read_memory(),
        )

    def close(self) -> None:
        """Ends the thread that queries the folder, unless it hangs."""
        if self._free_bytes_worker is not None:
            self._free_bytes_worker.stop()

    def _read_counters(self) -> _Counters:
        time_s = self._now()
        tree = self._processes.sample(time_s)
        disk_read, disk_written = machine.disk_bytes(self._proc) or (None, None)
        received, sent = machine.network_bytes(f"{self._proc}/{self._root_pid}") or (None, None)
        own_cpu_s = time.process_time() if tree.cpu_s is None and self._pid is None else tree.cpu_s
        return _Counters(
            time_s=time_s,
            cores_s=machine.core_times(),
            per_second={
                "process_cpu": own_cpu_s,
                "read_bytes_s": tree.read_bytes,
                "written_bytes_s": tree.written_bytes,
                "disk_read_bytes_s": disk_read,
                "disk_written_bytes_s": disk_written,
                "net_received_bytes_s": received,
                "net_sent_bytes_s": sent,
                **{name: machine.pressure_s(self._proc / "pressure" / file) for name, file in PRESSURE.items()},
            },
            increases={"throttled_s": self._cgroup.throttled_s(), "oom_kills": self._cgroup.oom_kills()},
            tree=tree,
        )

    def _read_memory(self) -> dict[str, Any]:
        """Of the cgroup if its limit is lower, else of the machine. Page cache does not count as used."""
        meminfo = machine.read_meminfo(self._proc)
        if not meminfo:
            virtual = psutil.virtual_memory()
            total, free = virtual.total, virtual.available
            cache = swap = None
        else:
            total, free = meminfo["MemTotal"], meminfo.get("MemAvailable", meminfo["MemFree"])
            cache = meminfo.get("Cached", 0) + meminfo.get("Buffers", 0) - meminfo.get("Shmem", 0)
            swap = meminfo.get("SwapTotal", 0) - meminfo.get("SwapFree", 0)
        used, group = total - free, self._cgroup.memory_state()
        if group is not None and group.limit < total:
            total, used, cache, swap = group.limit, group.used, group.page_cache, group.swap
        return {
            "memory_limit_bytes": total,
            "memory_used_bytes": used,
            "page_cache_bytes": cache,
            "swap_used_bytes": swap,
        }

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
    """Integers stay integers."""
    return None if before is None or after is None else max(type(after)(0), after - before)


def _per_second(before: float | None, after: float | None, duration_s: float) -> float | None:
    increase = _increase(before, after)
    return None if increase is None or duration_s <= 0 else increase / duration_s


def process_start_s() -> float:
    """The time of `time.perf_counter` at which this process started; never in the future."""
    age_s = time.time() - psutil.Process().create_time()
    return time.perf_counter() - max(0.0, age_s)
