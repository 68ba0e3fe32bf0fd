"""The host's part of a line of devices.jsonl: the machine and the processes of a run.

Rates and fractions are differences since the previous sample, of counters that `machine` and `cgroup` read. A value
that the machine does not provide (macOS has no /proc, old kernels no pressure) is None. To be cheap, files of threads
are read less often the more threads there are, and values that change slowly or cost more in every tenth sample.
"""

import contextlib
import itertools
import math
import os
import re
import time
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

import psutil

from stoker_watch.hardware.cgroup import Cgroup, usable_cores
from stoker_watch.recording.telemetry import machine
from stoker_watch.recording.telemetry.machine import ForeignProcess, TimeoutWorker, read, read_or_none
from stoker_watch.runs.schemas import DeviceSample, GpuSample

FREE_BYTES_TIMEOUT_S = 0.2
"""Timeout of the query for free bytes: a folder on NFS whose server is gone never answers."""

SLOW_SAMPLE_EVERY = 10
"""Samples between two readings of the slow values."""

THREADS_PER_SAMPLE = 64
"""Average number of threads whose files are read in a sample: some 15 µs each, so a millisecond."""
MIN_ACTIVE_FRACTION = 0.005
"""Fraction of a core from which a thread is active: of 64 threads on two cores each gets 0.03, one that polls 0.001."""

MIN_COMPUTING_FRACTION = 0.1
"""Fraction of a core from which the cores that a thread is bound to count: a launcher that polls takes less."""
MIN_OTHER_CORES = 0.25
"""Cores in use by others from which they are named: less hardly slows a run down (heuristic)."""
MIN_PROCESS_CORES = 0.05
"""A process that uses less is not named."""
MAX_NAMES = 3
OTHERS_INTERVAL_S = 5.0
"""Time between two readings of all processes: some 40 µs each."""

REPLACED_AT = "STOKER_REPLACED_AT"
"""Environment variable: the Unix time at which `stoker train` replaced this process by itself."""

PRESSURE = {"psi_cpu": "cpu", "psi_memory": "memory", "psi_io": "io"}
"""Field of a sample → name of the kernel's pressure file."""
RATES = ("process_cpu", "net_received_bytes_s", *PRESSURE)
"""Fields that are the increase of a counter per second; of other counters, the increase is recorded."""


class ProcessTreeSampler:
    """Samples the tree of `pid` from /proc: psutil takes four times as long. pids: processes, as of the last walk."""

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self.pids = [pid]
        self._pid = pid
        self._proc = proc
        self._sample_count = 0
        self._next_walk = 0
        self._previous: tuple[float, dict[str, tuple[int, int]]] | None = None
        self._threads: dict[str, Any] = {}
        """Fields of `DeviceSample` that the last walk found."""
        self._own_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0

    def sample(self, now_s: float) -> tuple[float | None, dict[str, Any]]:
        """(CPU-seconds so far, including children that ended and were waited for; None: not known, fields of
        `DeviceSample`). now_s: from a monotonic clock."""
        if not os.path.exists(f"{self._proc}/{self._pid}/stat"):
            return None, {} if os.path.exists(f"{self._proc}/stat") else {"rss_bytes": _rss_bytes(self._pid)}
        if self._sample_count >= self._next_walk:
            self._walk(now_s)
        self._sample_count += 1
        ticks = pages = most_pages = 0
        for pid in self.pids:
            if (text := read_or_none(f"{self._proc}/{pid}/stat")) is not None:  # None: it ended
                fields = text.rpartition(b")")[2].split()  # a name may contain blanks and brackets
                ticks += sum(map(int, fields[11:15]))
                pages += int(fields[21])
                most_pages = max(most_pages, int(fields[21]))
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        memory = {"rss_bytes": pages * page_bytes, "largest_rss_bytes": most_pages * page_bytes}
        return ticks / os.sysconf("SC_CLK_TCK"), memory | self._threads

    def _walk(self, now_s: float) -> None:
        """Lists the processes again, and how long each thread ran or waited for a CPU."""
        times_ns: dict[str, tuple[int, int]] = {}  # ran; ran or waited
        self.pids = machine.list_process_tree(self._pid, self._proc)
        for pid in self.pids:
            with contextlib.suppress(OSError):  # it ended meanwhile
                for thread in os.listdir(f"{self._proc}/{pid}/task"):
                    if (times := read_or_none(f"{self._proc}/{pid}/task/{thread}/schedstat")) is not None:
                        ran_ns, waited_ns, *_ = map(int, times.split())
                        times_ns[f"{pid}/{thread}"] = ran_ns, ran_ns + waited_ns
        previous = self._previous
        # all 0: this kernel does not count these times (documentation: scheduler/sched-stats)
        self._previous = (now_s, times_ns) if any(busy for _, busy in times_ns.values()) else None
        self._threads = {}
        if previous is not None and self._previous is not None and now_s > previous[0]:
            wall_ns = 1e9 * (now_s - previous[0])
            before = {thread: previous[1].get(thread, (0, 0)) for thread in times_ns}
            increase_ns = sum(max(0, busy - before[thread][1]) for thread, (_, busy) in times_ns.items())
            fractions = {thread: (ran - before[thread][0]) / wall_ns for thread, (ran, _) in times_ns.items()}
            computing = [thread for thread, fraction in fractions.items() if fraction >= MIN_COMPUTING_FRACTION]
            self._threads = {
                "threads_running": min(float(len(times_ns)), increase_ns / wall_ns),
                "threads_active": sum(fraction >= MIN_ACTIVE_FRACTION for fraction in fractions.values()),
                **self._count_bound_cores(computing),
            }
        self._next_walk = self._sample_count + math.ceil(max(1, len(times_ns)) / THREADS_PER_SAMPLE)

    def _count_bound_cores(self, computing: list[str]) -> dict[str, int]:
        """Fields of `DeviceSample`. The threads might use what the job's first process or its watcher may."""
        with contextlib.suppress(OSError):  # one of them ended
            files = (f"{self._proc}/{thread.replace('/', '/task/')}/status" for thread in computing)
            bound = {core for file in files for core in _allowed_cores(file)}
            unbound = max(self._own_cores, len(_allowed_cores(f"{self._proc}/{self._pid}/status")))
            if bound and len(bound) < unbound:
                return {"bound_cores": len(bound), "unbound_cores": unbound}
        return {}


def _allowed_cores(status: str) -> list[int]:
    """The cores that a thread may run on, of its `status` file; empty: it does not say. Raises OSError."""
    line = re.search(rb"^Cpus_allowed_list:\s*(\S+)", read(status), re.MULTILINE)
    ranges = [part.split("-") for part in line[1].decode().split(",")] if line is not None else []
    return [core for ends in ranges for core in range(int(ends[0]), int(ends[-1]) + 1)]


def _rss_bytes(pid: int) -> int | None:
    """Resident memory of a process without its children, where there is no /proc."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).memory_info().rss
    return None


def max_open_fds(pids: Sequence[int]) -> tuple[int | None, int | None]:
    """(open files, its limit) of the process that has the most open files."""
    counts: list[tuple[int, int | None]] = []
    for pid in pids:
        with contextlib.suppress(psutil.Error, AttributeError):  # it ended, or is another user's; not Linux
            process = psutil.Process(pid)
            limit = process.rlimit(psutil.RLIMIT_NOFILE)[0]
            counts.append((process.num_fds(), limit if limit > 0 else None))
    return max(counts, key=lambda count: count[0], default=(None, None))


class OtherProcesses:
    """Names the busiest processes of the machine outside the run. All processes are read, so this is done only while
    others use the cores. A container sees only its own processes."""

    def __init__(self) -> None:
        self._cores: dict[str, float] = {}
        self._read_s = -math.inf

    def sample(self, now_s: float, other_cores: float, run_pids: Set[int]) -> dict[str, float]:
        """Command name → cores in use, the busiest first, at most MAX_NAMES.

        now_s: from a monotonic clock; other_cores: mean number of cores that processes outside the run used since the
        last sample. Empty if they use few, and until all processes were read twice.
        """
        if other_cores < MIN_OTHER_CORES:
            self._cores = {}
        elif now_s - self._read_s >= OTHERS_INTERVAL_S:
            self._read_s = now_s
            cores: dict[str, float] = {}
            for process in psutil.process_iter(["cpu_percent"]):  # since the last time, as psutil keeps the processes
                used = (process.info["cpu_percent"] or 0.0) / 100
                if used >= MIN_PROCESS_CORES and process.pid not in run_pids:
                    with contextlib.suppress(psutil.Error):  # it ended meanwhile
                        name = _command_name(ForeignProcess(process.pid))
                        cores[name] = cores.get(name, 0.0) + used
            self._cores = dict(sorted(cores.items(), key=lambda item: -item[1])[:MAX_NAMES])
        return self._cores


def _command_name(process: psutil.Process) -> str:
    """The name of the program; for an interpreter, its script or module too: `python train.py`."""
    name = process.name()
    for argument, following in itertools.pairwise([*process.cmdline()[1:], ""]):
        if argument == "-m" or argument.endswith((".py", ".sh", ".pl", ".R")):
            return f"{name} {following if argument == '-m' else os.path.basename(argument)}"
        if not argument.startswith("-"):
            break
    return name


class HostSampler:
    """Samples the host. The first sample covers the time since the creation of this object.

    pid: root of the process tree whose CPU time, memory, threads and files are read, with its cgroup, network and
    /dev/shm; default: this process. run_dir: where free bytes are queried; now: a monotonic clock in seconds.
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
        self._other_processes = OtherProcesses()
        self._shm = "/dev/shm" if pid is None else f"{proc}/{pid}/root/dev/shm"
        self._free_bytes = TimeoutWorker(lambda: None if run_dir is None else machine.free_bytes(run_dir), name="disk")
        self._sample_count = 0
        self._slow_values: dict[str, Any] = {}
        self._time_s, self._counters, _ = self._read_counters()
        psutil.cpu_percent(percpu=True)  # the next call returns the utilization since this one

    def sample(self, *, attempt: int = 0, gpus: Sequence[GpuSample] = ()) -> DeviceSample:
        """A line of devices.jsonl. Errors of the machine never raise."""
        unix_time = time.time()
        before_s, before = self._time_s, self._counters
        now_s, counters, tree = self._read_counters()
        self._time_s, self._counters = now_s, counters
        values: dict[str, Any] = {}
        for name, now in counters.items():
            was, values[name] = before[name], None
            if was is not None and now is not None and (name not in RATES or now_s > before_s):
                increase = max(type(now)(0), now - was)
                rate = increase / (now_s - before_s) if name in RATES else increase
                values[name] = min(1.0, rate) if name in PRESSURE else rate
        if self._sample_count % SLOW_SAMPLE_EVERY == 0:
            self._slow_values = self._read_slow_values()
        self._sample_count += 1
        utilization = [percent / 100 for percent in psutil.cpu_percent(percpu=True)]
        process_cpu = values["process_cpu"]
        other_cores = 0.0 if process_cpu is None else sum(utilization) - process_cpu
        run_pids = {*self._processes.pids, os.getpid()}
        shm = machine.disk_usage(self._shm)
        return DeviceSample(
            t=unix_time,
            attempt=attempt,
            gpus=list(gpus),
            cpu_core_utilization=utilization,
            busiest_processes=self._other_processes.sample(now_s, other_cores, run_pids),
            shm_used_bytes=None if shm is None else shm[0],
            shm_total_bytes=None if shm is None else shm[1],
            **self._slow_values,
            **values,
            **tree,
            **self._read_memory(),
        )

    def close(self) -> None:
        """Ends the thread that queries the folder, unless it hangs."""
        self._free_bytes.stop()

    def _read_slow_values(self) -> dict[str, Any]:
        open_fds, max_fds = max_open_fds(self._processes.pids)
        cores = None
        with contextlib.suppress(ProcessLookupError):  # the job ended
            cores = usable_cores(self._root_pid, self._cgroup)
        return {
            "cpu_limit_cores": cores,
            "disk_free_bytes": self._free_bytes.call(FREE_BYTES_TIMEOUT_S),
            "open_fds": open_fds,
            "max_fds": max_fds,
        }

    def _read_counters(self) -> tuple[float, dict[str, float | None], dict[str, Any]]:
        """The time, counters in seconds and bytes by the field of the sample, and fields of the processes."""
        time_s = self._now()
        cpu_s, tree = self._processes.sample(time_s)
        counters = {
            "process_cpu": time.process_time() if cpu_s is None and self._pid is None else cpu_s,
            "net_received_bytes_s": machine.network_received_bytes(f"{self._proc}/{self._root_pid}"),
            **{name: machine.pressure_s(self._proc / "pressure" / file) for name, file in PRESSURE.items()},
            "throttled_s": self._cgroup.throttled_s(),
            "oom_kills": self._cgroup.oom_kills(),
        }
        return time_s, counters, tree

    def _read_memory(self) -> dict[str, Any]:
        """Memory of the cgroup if its limit is lower, else of the machine. Page cache does not count as used."""
        memory, meminfo = psutil.virtual_memory(), machine.read_meminfo(self._proc)
        limit, used = memory.total, memory.total - memory.available
        swap = meminfo["SwapTotal"] - meminfo["SwapFree"] if "SwapTotal" in meminfo else None
        group = self._cgroup.memory_state()
        if group is not None and group.limit < limit:
            limit, used, swap = group.limit, group.used, group.swap
        return {"memory_limit_bytes": limit, "memory_used_bytes": used, "swap_used_bytes": swap}


def process_start_s() -> float:
    """The time of `time.perf_counter` at which this process started, or was replaced; never in the future."""
    age_s = time.time() - max(psutil.Process().create_time(), float(os.environ.get(REPLACED_AT, 0)))
    return time.perf_counter() - max(0.0, age_s)
