"""The processes of a watched job, from /proc: identity, Python or not, CPU time, rank, input files.

Read-only, and only files that any user who may see the job can read. A process is identified by its PID and start time,
because the kernel reuses PIDs. Memory and CPU time for the records: `profiling/telemetry/host.py`.
"""

import contextlib
import dataclasses
import os
import re
import stat
from pathlib import Path

import psutil

from stoker.hardware.cgroup import Cgroup
from stoker.profiling.telemetry.machine import list_process_tree

PROC = Path("/proc")

MAX_OPEN_FILES, MAX_PROCESSES, MAX_EMPTY_FILES, MAX_CGROUPS, MAX_PIDS = 512, 512, 16, 32, 65536
"""Bounds of the cost: open files of a process, processes of a job, empty files, cgroups, and PIDs that are kept."""

_PYTHON = re.compile(r"(^|/)(python|pypy)[\d.]*\w?$")
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables with the rank of a process: of torchrun, then of MPI and Slurm."""
_NOT_INPUT = re.compile(r"^/(proc|sys|dev|run)/|\.(lock|pid|py|pyc)$|/\.")


@dataclasses.dataclass(frozen=True)
class Process:
    """start_ticks: clock ticks from boot to the start of the process; the pair is unique."""

    pid: int
    start_ticks: int

    def is_alive(self) -> bool:
        """Whether it has not ended; a zombie has ended."""
        current = read_status(self.pid)
        return current is not None and current.start_ticks == self.start_ticks and current.state not in "ZX"


@dataclasses.dataclass(frozen=True)
class Status:
    """Fields 3, 4, 14 + 15, 22 and 52 of /proc/PID/stat (proc(5))."""

    state: str
    parent_pid: int
    cpu_ticks: int
    start_ticks: int
    exit_status: int
    """For `os.waitstatus_to_exitcode`; also 0 if the kernel does not permit reading it."""


def read_status(pid: int) -> Status | None:
    """None: there is no such process."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:  # it ended
        return None
    fields = text.rpartition(")")[2].split()  # a name may contain blanks and brackets
    return Status(fields[0], int(fields[1]), int(fields[11]) + int(fields[12]), int(fields[19]), int(fields[49]))


def list_ancestors(pid: int) -> list[int]:
    """The process and its ancestors."""
    try:
        return [pid, *(parent.pid for parent in psutil.Process(pid).parents())]
    except psutil.Error:  # it ended
        return [pid]


def is_python(pid: int) -> bool:
    """By the name of the program, else by whether Python's library is loaded."""
    try:
        if _PYTHON.search(os.readlink(PROC / str(pid) / "exe")):
            return True
        return re.search(r"/libpython\d", (PROC / str(pid) / "maps").read_text(errors="replace")) is not None
    except OSError:  # it ended, or may not be read
        return False


def read_environ(pid: int) -> dict[str, str]:
    """Its initial environment; empty if it may not be read."""
    try:
        return psutil.Process(pid).environ()
    except psutil.Error:
        return {}


def read_rank(pid: int) -> int:
    """Its rank in the job, from its environment; 0 if that has none."""
    env = read_environ(pid)
    return next((int(env[name]) for name in _RANK_VARIABLES if env.get(name, "").isdecimal()), 0)


def read_command(pid: int) -> list[str]:
    """Its command line; empty for a kernel thread, or if it may not be read."""
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []


def read_cwd(pid: int) -> str:
    """Its working directory; empty if it may not be read."""
    try:
        return psutil.Process(pid).cwd()
    except psutil.Error:
        return ""


class JobProcesses:
    """State of a job's processes: their PIDs, out-of-memory kills in their cgroups, and empty input files that they
    read.

    pid: the root. `poll` is called every few seconds and costs a few milliseconds. An empty file counts if it was open
    for reading only in two polls, or if the command line names it; a reader that spins opens it repeatedly.
    """

    def __init__(self, pid: int) -> None:
        self.pids: set[int] = {pid}
        self._pid = pid
        self._empty_counts: dict[str, int] = {}
        self._named_empty_files = [path for path in _command_line_files(pid) if _is_empty(path)]
        self._cgroups: dict[str, _OomKillCounter] = {}

    def poll(self) -> None:
        for pid in list_process_tree(self._pid, limit=MAX_PROCESSES):
            if len(self.pids) < MAX_PIDS:
                self.pids.add(pid)
            self._track_cgroup(pid)
            for path in _empty_inputs(pid):
                if path in self._empty_counts or len(self._empty_counts) < MAX_EMPTY_FILES:
                    self._empty_counts[path] = self._empty_counts.get(path, 0) + 1
        for counter in self._cgroups.values():
            counter.update()

    def oom_kills(self) -> int | None:
        """Out-of-memory kills since the cgroups were first seen with processes of the job: the maximum over the
        cgroups, because version 2 includes descendants. None: not available."""
        for counter in self._cgroups.values():
            counter.update()
        return max(
            (counter.increase for counter in self._cgroups.values() if counter.increase is not None), default=None
        )

    def empty_inputs(self) -> list[str]:
        """The empty input files that are still empty, sorted."""
        repeated = {path for path, count in self._empty_counts.items() if count > 1}
        return sorted(path for path in repeated | set(self._named_empty_files) if _is_empty(path))

    def _track_cgroup(self, pid: int) -> None:
        """Starts counting in the process's cgroup: a job may enter a cgroup after its start."""
        try:
            text = (PROC / str(pid) / "cgroup").read_text()
        except OSError:  # it ended
            return
        if text not in self._cgroups and len(self._cgroups) < MAX_CGROUPS:
            cgroup = Cgroup.for_pid(pid)
            self._cgroups[text] = _OomKillCounter(cgroup, cgroup.oom_kills())


@dataclasses.dataclass
class _OomKillCounter:
    """Kills in a cgroup; the last value is kept when the cgroup is removed with the job."""

    cgroup: Cgroup
    baseline: int | None
    increase: int | None = 0

    def update(self) -> None:
        if self.baseline is None:
            self.increase = None
        elif (now := self.cgroup.oom_kills()) is not None:
            self.increase = max(0, now - self.baseline)


def _command_line_files(pid: int) -> list[str]:
    """Files that are arguments of the command line, also after `--option=`."""
    args = [arg.rpartition("=")[2] for arg in read_command(pid)[1:]]
    paths = [os.path.join(read_cwd(pid), arg) for arg in args if arg]
    return [path for path in paths if not _NOT_INPUT.search(path)]


def _empty_inputs(pid: int) -> list[str]:
    """Files of zero bytes that a process has open for reading only."""
    paths = []
    with contextlib.suppress(OSError):  # it ended meanwhile, or may not be read
        for fd in os.listdir(PROC / str(pid) / "fd")[:MAX_OPEN_FILES]:
            with contextlib.suppress(OSError):
                fd_path = PROC / str(pid) / "fd" / fd
                file_status = fd_path.stat()
                if file_status.st_size or not stat.S_ISREG(file_status.st_mode) or not file_status.st_nlink:
                    continue
                path = os.readlink(fd_path)
                flags = re.search(r"^flags:\s*(\d+)", (PROC / str(pid) / "fdinfo" / fd).read_text(), re.MULTILINE)
                if flags and int(flags[1], 8) & os.O_ACCMODE == os.O_RDONLY and not _NOT_INPUT.search(path):
                    paths.append(path)
    return paths


def _is_empty(path: str) -> bool:
    try:
        file_status = os.stat(path)
    except OSError:  # removed, or in another mount namespace
        return False
    return stat.S_ISREG(file_status.st_mode) and file_status.st_size == 0
