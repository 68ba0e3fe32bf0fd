"""Processes from /proc: counters of a run's tree, and the names of others that keep the cores busy.

The cost is bounded: files of threads are read less often the more threads there are, and open files are counted in
every tenth sample; in between the last value is repeated. Counters of the machine: `machine`; rates: `host`. Without
/proc (macOS) only the memory is known, from psutil.
"""

import contextlib
import dataclasses
import itertools
import math
import os
import re
from pathlib import Path
from typing import NamedTuple

import psutil

from stoker.profiling.telemetry.machine import parse_number, read, read_or_none

THREADS_PER_SAMPLE = 64
"""Average number of threads whose files are read in a sample: some 15 µs each, so a millisecond."""

SLOW_SAMPLE_EVERY = 10
"""Samples between two counts of open files: on kernels before 6.2 the cost grows with their number."""

MIN_OTHER_CORES = 0.25
"""Cores in use by others from which they are named: less hardly slows a run down (heuristic)."""
MIN_PROCESS_CORES = 0.05
"""A process that uses less is not named."""
MAX_NAMES = 3
PROCESSES_PER_SAMPLE = 250
"""Average number of processes that are read in a sample: 10 to 15 µs each, so some 3 ms."""
MAX_BASELINE_AGE_S = 10.0
"""CPU times that are older say little about the present: they are read again first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessTreeSample:
    """A process tree at one moment. None: not available."""

    cpu_s: float | None = None
    """CPU-seconds so far, including children that ended and were waited for."""
    rss_bytes: int | None = None
    """Shared memory counts in each process."""
    threads: int | None = None
    threads_running: float | None = None
    """Mean number that ran or waited for a CPU, between the last two times that all threads were read."""
    read_bytes: int | None = None
    written_bytes: int | None = None
    """From and to storage so far, including children that ended and were waited for."""
    open_fds: int | None = None
    max_fds: int | None = None
    """Of the process that has the most open files."""


class ProcessTreeSampler:
    """Samples the tree of `pid` repeatedly."""

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self.pid = pid
        self._proc = str(proc)
        self._pids: list[int] = []
        self._sample_count = 0
        self._next_walk = 0
        self._previous_busy: tuple[float, dict[str, int]] | None = None
        self._threads_running: float | None = None
        self._open_fds: tuple[int | None, int | None] = (None, None)

    def sample(self, now_s: float) -> ProcessTreeSample:
        """now_s: from a monotonic clock."""
        if not os.path.exists(f"{self._proc}/{self.pid}/stat"):
            return ProcessTreeSample(
                rss_bytes=tree_rss_by_psutil(self.pid) if not os.path.exists(f"{self._proc}/stat") else None
            )
        if self._sample_count >= self._next_walk:
            self._walk(now_s)
        if self._sample_count % SLOW_SAMPLE_EVERY == 0:
            self._open_fds = self._max_open_fds()
        self._sample_count += 1
        ticks = pages = threads = 0
        for pid in self._pids:
            if (stat := self._stat(pid)) is not None:
                ticks, pages, threads = ticks + sum(stat[11:15]), pages + stat[21], threads + stat[17]
        read_bytes, written_bytes = self._storage_bytes()
        return ProcessTreeSample(
            cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
            rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
            threads=threads,
            threads_running=self._threads_running,
            read_bytes=read_bytes,
            written_bytes=written_bytes,
            open_fds=self._open_fds[0],
            max_fds=self._open_fds[1],
        )

    def _walk(self, now_s: float) -> None:
        """Lists the processes again, and how long each thread ran or waited for a CPU.

        So a new child is found at once if there are few threads, and within a minute if there are thousands.
        """
        busy_ns: dict[str, int] = {}
        pids = [self.pid]
        for pid in pids:  # grows during the loop
            task_dir = f"{self._proc}/{pid}/task"
            with contextlib.suppress(OSError):  # it ended meanwhile
                for thread in os.listdir(task_dir):
                    with contextlib.suppress(OSError):  # the thread ended
                        pids += map(int, read(f"{task_dir}/{thread}/children").split())
                    if (times := read_or_none(f"{task_dir}/{thread}/schedstat")) is not None:
                        ran_ns, waited_ns, *_ = map(int, times.split())
                        busy_ns[f"{pid}/{thread}"] = ran_ns + waited_ns
        previous = self._previous_busy
        # all 0: this kernel does not count these times (documentation: scheduler/sched-stats)
        self._previous_busy = (now_s, busy_ns) if any(busy_ns.values()) else None
        if previous is None or self._previous_busy is None or now_s <= previous[0]:
            self._threads_running = None
        else:
            increase_ns = sum(max(0, ns - previous[1].get(thread, 0)) for thread, ns in busy_ns.items())
            self._threads_running = min(float(len(busy_ns)), increase_ns / 1e9 / (now_s - previous[0]))
        self._pids = pids
        self._next_walk = self._sample_count + math.ceil(max(1, len(busy_ns)) / THREADS_PER_SAMPLE)

    def _stat(self, pid: int) -> list[int] | None:
        """Fields of /proc/PID/stat from the third on (proc_pid_stat(5)), the state as 0; None: it ended."""
        text = read_or_none(f"{self._proc}/{pid}/stat")
        if text is None:
            return None
        return [0, *map(int, text.rpartition(b")")[2].split()[1:])]  # a name may contain blanks and brackets

    def _storage_bytes(self) -> tuple[int | None, int | None]:
        """(read, written) bytes; the kernel adds a child's bytes to its parent when that has waited for it."""
        read_bytes = written_bytes = None
        for pid in self._pids:
            text = read_or_none(f"{self._proc}/{pid}/io")  # refused for a process of another user
            if text is not None:
                read_bytes = (read_bytes or 0) + parse_number(text, b"read_bytes:")
                dropped = parse_number(text, b"cancelled_write_bytes:")
                written_bytes = (written_bytes or 0) + parse_number(text, b"\nwrite_bytes:") - dropped
        return read_bytes, written_bytes

    def _max_open_fds(self) -> tuple[int | None, int | None]:
        open_fds, max_pid = None, self.pid
        for pid in self._pids:
            with contextlib.suppress(OSError):  # it ended, or belongs to another user
                fd_dir = f"{self._proc}/{pid}/fd"
                count = os.stat(fd_dir).st_size or len(os.listdir(fd_dir))  # since Linux 6.2 the size is the number
                if open_fds is None or count > open_fds:
                    open_fds, max_pid = count, pid
        if open_fds is None:
            return None, None
        match = re.search(
            rb"^Max open files\s+(\d+)", read_or_none(f"{self._proc}/{max_pid}/limits") or b"", re.MULTILINE
        )
        return open_fds, int(match[1]) if match else None


def list_process_tree(pid: int, proc: Path = Path("/proc"), *, limit: int | None = None) -> list[int]:
    """A process and all its descendants, at most `limit`, the process first. From the kernel's lists of children:
    reading all processes takes tens of milliseconds on a large machine."""
    pids = [pid]
    for member in pids:  # grows during the loop
        with contextlib.suppress(OSError):  # it ended meanwhile
            for thread in os.listdir(f"{proc}/{member}/task"):
                with contextlib.suppress(OSError):  # the thread ended
                    pids += map(int, read(f"{proc}/{member}/task/{thread}/children").split())
        if limit is not None and len(pids) >= limit:
            return pids[:limit]
    return pids


def tree_rss_by_psutil(pid: int) -> int | None:
    total = None
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        total = process.memory_info().rss
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                total += child.memory_info().rss
    return total


class _CpuTime(NamedTuple):
    """Of a process. ticks: so far, including children that ended and were waited for."""

    ticks: int
    parent: int
    start_ticks: int
    name: str


class OtherProcesses:
    """Names the busiest processes that are not in the trees of `run_pids`, from repeated readings of /proc.

    All processes of the machine are read, so this is done only while others use the cores, and less often the more
    processes there are. A container sees only its own processes. Without /proc (macOS) none is named.
    """

    def __init__(self, run_pids: set[int], proc: Path = Path("/proc")) -> None:
        self._run_pids = run_pids
        self._proc = str(proc)
        self._cores: dict[str, float] = {}
        self._samples_left = 0
        self._before_s: float = -math.inf
        self._before: dict[int, _CpuTime] = {}

    def sample(self, now_s: float, other_cores: float) -> dict[str, float]:
        """Command name → cores in use, the busiest first, at most MAX_NAMES.

        now_s: from a monotonic clock; other_cores: mean number of cores that processes outside the run used since the
        last sample. Empty if they use few, and until two readings have been made.
        """
        self._samples_left -= 1
        if other_cores < MIN_OTHER_CORES:
            self._cores = {}
        elif self._samples_left <= 0:
            before_s, before = self._before_s, self._before
            self._before_s, self._before = now_s, self._read_cpu_times()
            self._samples_left = math.ceil(len(self._before) / PROCESSES_PER_SAMPLE)
            is_recent = 0 < now_s - before_s <= MAX_BASELINE_AGE_S
            self._cores = self._busiest(before, now_s - before_s) if is_recent else {}
        return self._cores

    def _busiest(self, before: dict[int, _CpuTime], duration_s: float) -> dict[str, float]:
        ticks = {
            pid: now.ticks - (before[pid].ticks if pid in before and before[pid].start_ticks == now.start_ticks else 0)
            for pid, now in self._before.items()
        }
        for pid, ended in before.items():  # what it used before is now in the children of an ancestor
            parent = ended.parent
            while parent not in ticks and parent in before:
                parent = before[parent].parent
            if pid not in self._before and parent in ticks:
                ticks[parent] -= ended.ticks
        cores: dict[str, float] = {}
        for pid, increase in ticks.items():
            used = increase / os.sysconf("SC_CLK_TCK") / duration_s
            if used >= MIN_PROCESS_CORES and not self._is_of_the_run(pid):
                name = self._command_name(pid)
                cores[name] = cores.get(name, 0.0) + used
        return dict(sorted(cores.items(), key=lambda item: -item[1])[:MAX_NAMES])

    def _is_of_the_run(self, pid: int) -> bool:
        while pid not in self._run_pids:
            if pid not in self._before:
                return False
            pid = self._before[pid].parent
        return True

    def _command_name(self, pid: int) -> str:
        """The kernel's name of the program; for an interpreter, its script or module too: `python train.py`."""
        name = self._before[pid].name
        arguments = (read_or_none(f"{self._proc}/{pid}/cmdline") or b"").decode(errors="replace").split("\0")[1:]
        for argument, following in itertools.pairwise([*arguments, ""]):
            if argument == "-m" or argument.endswith((".py", ".sh", ".pl", ".R")):
                return f"{name} {following if argument == '-m' else os.path.basename(argument)}"
            if not argument.startswith("-"):
                break
        return name

    def _read_cpu_times(self) -> dict[int, _CpuTime]:
        times: dict[int, _CpuTime] = {}
        with contextlib.suppress(FileNotFoundError):  # no /proc
            for entry in os.listdir(self._proc):
                if entry.isdecimal() and (text := read_or_none(f"{self._proc}/{entry}/stat")) is not None:
                    head, _, tail = text.rpartition(b")")  # a name may contain blanks and brackets
                    fields = tail.split(None, 20)
                    times[int(entry)] = _CpuTime(
                        ticks=sum(map(int, fields[11:15])),
                        parent=int(fields[1]),
                        start_ticks=int(fields[19]),
                        name=head.partition(b"(")[2].decode(errors="replace"),
                    )
        return times
