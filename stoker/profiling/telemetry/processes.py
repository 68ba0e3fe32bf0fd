"""A process and all below it, as the kernel counts them: time, memory, threads, storage, open files.

Read from /proc at a bounded price: what costs a system call for each thread is done less often the more threads there
are, what costs one for each open file every tenth time; in between the last value stands. The numbers of the machine
around: `machine`; what becomes of both: `host`. Without /proc (macOS) only the memory is known, by psutil.
"""

import contextlib
import dataclasses
import math
import os
import re
from pathlib import Path

import psutil

from stoker.profiling.telemetry.procfs import parse_number, read, read_or_none

THREADS_PER_SAMPLE = 64
"""Threads whose files are read in a sample, on average: some 15 µs each, so a millisecond."""

SLOW_SAMPLE_EVERY = 10
"""Samples between two counts of open files: listing the folder costs by the file on kernels before 6.2."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessTreeSample:
    """A process and all below it at one moment. None: the kernel does not say."""

    cpu_s: float | None = None
    """Processor seconds so far, of those that ended and were waited for too."""
    rss_bytes: int | None = None
    """What they share counts for each."""
    threads: int | None = None
    threads_running: float | None = None
    """Mean number that ran or waited for a processor, between the last two times that all threads were read."""
    read_bytes: int | None = None
    written_bytes: int | None = None
    """From and to storage so far, of those that ended and were waited for too."""
    open_fds: int | None = None
    max_fds: int | None = None
    """Of the process that has most files open."""


class ProcessTreeSampler:
    """Reads the tree below `pid` again and again."""

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
        """now_s: of a monotonic clock."""
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
        """Finds the processes anew, and how long each thread ran or waited for a processor meanwhile.

        A new child is so seen at once where there are few threads, and within a minute where there are thousands.
        """
        busy_ns: dict[str, int] = {}
        pids = [self.pid]
        for pid in pids:  # grows while it is walked
            task_dir = f"{self._proc}/{pid}/task"
            with contextlib.suppress(OSError):  # it ended meanwhile
                for thread in os.listdir(task_dir):
                    with contextlib.suppress(OSError):  # the thread ended
                        pids += map(int, read(f"{task_dir}/{thread}/children").split())
                    if (times := read_or_none(f"{task_dir}/{thread}/schedstat")) is not None:
                        ran_ns, waited_ns, *_ = map(int, times.split())
                        busy_ns[f"{pid}/{thread}"] = ran_ns + waited_ns
        previous = self._previous_busy
        # all 0: this kernel does not keep these times (documentation: scheduler/sched-stats)
        self._previous_busy = (now_s, busy_ns) if any(busy_ns.values()) else None
        if previous is None or self._previous_busy is None or now_s <= previous[0]:
            self._threads_running = None
        else:
            increase_ns = sum(max(0, ns - previous[1].get(thread, 0)) for thread, ns in busy_ns.items())
            self._threads_running = min(float(len(busy_ns)), increase_ns / 1e9 / (now_s - previous[0]))
        self._pids = pids
        self._next_walk = self._sample_count + math.ceil(max(1, len(busy_ns)) / THREADS_PER_SAMPLE)

    def _stat(self, pid: int) -> list[int] | None:
        """The fields of /proc/PID/stat from the third on (proc_pid_stat(5)), the state as 0; None: it ended."""
        text = read_or_none(f"{self._proc}/{pid}/stat")
        if text is None:
            return None
        return [0, *map(int, text.rpartition(b")")[2].split()[1:])]  # a name may hold blanks and brackets

    def _storage_bytes(self) -> tuple[int | None, int | None]:
        """(read, written) bytes; the kernel adds those of a child to its parent's when that has waited for it."""
        read_bytes = written_bytes = None
        for pid in self._pids:
            text = read_or_none(f"{self._proc}/{pid}/io")  # refused where the process is another user's
            if text is not None:
                read_bytes = (read_bytes or 0) + parse_number(text, b"read_bytes:")
                dropped = parse_number(text, b"cancelled_write_bytes:")
                written_bytes = (written_bytes or 0) + parse_number(text, b"\nwrite_bytes:") - dropped
        return read_bytes, written_bytes

    def _max_open_fds(self) -> tuple[int | None, int | None]:
        open_fds, max_pid = None, self.pid
        for pid in self._pids:
            with contextlib.suppress(OSError):  # it ended, or is another user's
                fd_dir = f"{self._proc}/{pid}/fd"
                count = os.stat(fd_dir).st_size or len(os.listdir(fd_dir))  # kernels from 6.2 on say it as the size
                if open_fds is None or count > open_fds:
                    open_fds, max_pid = count, pid
        if open_fds is None:
            return None, None
        match = re.search(
            rb"^Max open files\s+(\d+)", read_or_none(f"{self._proc}/{max_pid}/limits") or b"", re.MULTILINE
        )
        return open_fds, int(match[1]) if match else None


def list_process_tree(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """A process and all below it, from the kernel's own lists: looking at all processes takes tens of milliseconds on a
    big machine."""
    pids = [pid]
    for member in pids:  # grows while it is walked
        with contextlib.suppress(OSError):  # it ended meanwhile
            for thread in os.listdir(f"{proc}/{member}/task"):
                with contextlib.suppress(OSError):  # the thread ended
                    pids += map(int, read(f"{proc}/{member}/task/{thread}/children").split())
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
