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

from stoker.profiling.telemetry.procfs import number_of, read, read_or_none

THREADS_A_SAMPLE = 64
"""Threads whose files are read in a sample, on average: some 15 µs each, so a millisecond."""

SELDOM = 10
"""Samples between two counts of open files: listing the folder costs by the file on kernels before 6.2."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree:
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
    handles: int | None = None
    handles_limit: int | None = None
    """Of the process that has most files open."""


class Processes:
    """Reads the tree below `pid` again and again."""

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self.pid = pid
        self._proc = str(proc)
        self._members: list[int] = []
        self._number = 0
        self._walk_at = 0
        self._busy: tuple[float, dict[str, int]] | None = None
        self._running: float | None = None
        self._handles: tuple[int | None, int | None] = (None, None)

    def sample(self, now_s: float) -> Tree:
        """now_s: of a monotonic clock."""
        if not os.path.exists(f"{self._proc}/{self.pid}/stat"):
            return Tree(rss_bytes=tree_rss_by_psutil(self.pid) if not os.path.exists(f"{self._proc}/stat") else None)
        if self._number >= self._walk_at:
            self._walk(now_s)
        if self._number % SELDOM == 0:
            self._handles = self._fullest()
        self._number += 1
        ticks = pages = threads = 0
        for member in self._members:
            if (stat := self._stat(member)) is not None:
                ticks, pages, threads = ticks + sum(stat[11:15]), pages + stat[21], threads + stat[17]
        read_bytes, written_bytes = self._storage()
        return Tree(
            cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
            rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
            threads=threads,
            threads_running=self._running,
            read_bytes=read_bytes,
            written_bytes=written_bytes,
            handles=self._handles[0],
            handles_limit=self._handles[1],
        )

    def _walk(self, now_s: float) -> None:
        """Finds the processes anew, and how long each thread ran or waited for a processor meanwhile.

        A new child is so seen at once where there are few threads, and within a minute where there are thousands.
        """
        busy_ns: dict[str, int] = {}
        members = [self.pid]
        for member in members:  # grows while it is walked
            folder = f"{self._proc}/{member}/task"
            with contextlib.suppress(OSError):  # it ended meanwhile
                for thread in os.listdir(folder):
                    with contextlib.suppress(OSError):  # the thread ended
                        members += map(int, read(f"{folder}/{thread}/children").split())
                    if (times := read_or_none(f"{folder}/{thread}/schedstat")) is not None:
                        ran_ns, waited_ns, *_ = map(int, times.split())
                        busy_ns[f"{member}/{thread}"] = ran_ns + waited_ns
        before = self._busy
        # all 0: this kernel does not keep these times (documentation: scheduler/sched-stats)
        self._busy = (now_s, busy_ns) if any(busy_ns.values()) else None
        if before is None or self._busy is None or now_s <= before[0]:
            self._running = None
        else:
            grown_ns = sum(max(0, ns - before[1].get(thread, 0)) for thread, ns in busy_ns.items())
            self._running = min(float(len(busy_ns)), grown_ns / 1e9 / (now_s - before[0]))
        self._members = members
        self._walk_at = self._number + math.ceil(max(1, len(busy_ns)) / THREADS_A_SAMPLE)

    def _stat(self, member: int) -> list[int] | None:
        """The fields of /proc/PID/stat from the third on (proc_pid_stat(5)), the state as 0; None: it ended."""
        text = read_or_none(f"{self._proc}/{member}/stat")
        if text is None:
            return None
        return [0, *map(int, text.rpartition(b")")[2].split()[1:])]  # a name may hold blanks and brackets

    def _storage(self) -> tuple[int | None, int | None]:
        """(read, written) bytes; the kernel adds those of a child to its parent's when that has waited for it."""
        read_bytes = written_bytes = None
        for member in self._members:
            text = read_or_none(f"{self._proc}/{member}/io")  # refused where the process is another user's
            if text is not None:
                read_bytes = (read_bytes or 0) + number_of(text, b"read_bytes:")
                dropped = number_of(text, b"cancelled_write_bytes:")
                written_bytes = (written_bytes or 0) + number_of(text, b"\nwrite_bytes:") - dropped
        return read_bytes, written_bytes

    def _fullest(self) -> tuple[int | None, int | None]:
        most, whose = None, self.pid
        for member in self._members:
            with contextlib.suppress(OSError):  # it ended, or is another user's
                folder = f"{self._proc}/{member}/fd"
                count = os.stat(folder).st_size or len(os.listdir(folder))  # kernels from 6.2 on say it as the size
                if most is None or count > most:
                    most, whose = count, member
        if most is None:
            return None, None
        found = re.search(
            rb"^Max open files\s+(\d+)", read_or_none(f"{self._proc}/{whose}/limits") or b"", re.MULTILINE
        )
        return most, int(found[1]) if found else None


def tree(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """A process and all below it, from the kernel's own lists: looking at all processes takes tens of milliseconds on a
    big machine."""
    members = [pid]
    for member in members:  # grows while it is walked
        with contextlib.suppress(OSError):  # it ended meanwhile
            for thread in os.listdir(f"{proc}/{member}/task"):
                with contextlib.suppress(OSError):  # the thread ended
                    members += map(int, read(f"{proc}/{member}/task/{thread}/children").split())
    return members


def tree_rss_by_psutil(pid: int) -> int | None:
    total = None
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        total = process.memory_info().rss
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                total += child.memory_info().rss
    return total
