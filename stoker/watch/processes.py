"""The processes of a watched job, from /proc: who they are, which are Python, how busy they are, what they read.

Only looks, and only at what the kernel shows anybody who may see the job. Whether a number still means the same process
is told by when that one began, since the kernel gives numbers again. Memory and processor time as records are
`profiling/telemetry/host.py`'s.
"""

import contextlib
import dataclasses
import os
import re
import stat
from pathlib import Path

from stoker.hardware.cgroup import Cgroup

PROC = Path("/proc")

FILES_MOST, TREE_MOST, EMPTY_MOST, CGROUPS_MOST, PIDS_MOST = 512, 512, 16, 32, 65536
"""Open files of a process, processes of a job, empty files, cgroups, and process numbers that are looked at or kept:
bounds of the cost."""

_PYTHON = re.compile(r"(^|/)(python|pypy)[\d.]*\w?$")
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables that say which rank a process is: torchrun's, then those of MPI and Slurm."""
_NO_INPUT = re.compile(r"^/(proc|sys|dev|run)/|\.(lock|pid|py|pyc)$|/\.")


@dataclasses.dataclass(frozen=True)
class Process:
    """began: clock ticks from boot to its start; the pair is never given twice."""

    pid: int
    began: int

    def lives(self) -> bool:
        """Whether it has not ended: a process that waits to be asked for its exit code has."""
        found = status(self.pid)
        return found is not None and found.began == self.began and found.state not in "ZX"


@dataclasses.dataclass(frozen=True)
class Status:
    """Of /proc/PID/stat (proc(5)): fields 3, 4, 14 + 15, 22 and 52."""

    state: str
    parent: int
    ticks: int
    began: int
    exit_status: int
    """As `os.waitstatus_to_exitcode` takes it; 0 also where the kernel does not tell us."""


def status(pid: int) -> Status | None:
    """None: there is no such process."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:  # it ended
        return None
    words = text.rpartition(")")[2].split()  # a name may hold blanks and brackets
    return Status(words[0], int(words[1]), int(words[11]) + int(words[12]), int(words[19]), int(words[49]))


def process(pid: int) -> Process | None:
    found = status(pid)
    return None if found is None else Process(pid, found.began)


def tree(pid: int) -> list[int]:
    """A process and those below it, at most TREE_MOST, itself first."""
    found = [pid]
    for member in found:  # grows while it is walked
        with contextlib.suppress(OSError):  # it ended meanwhile
            for thread in (PROC / str(member) / "task").iterdir():
                with contextlib.suppress(OSError):
                    found += map(int, (thread / "children").read_text().split())
        if len(found) >= TREE_MOST:
            return found[:TREE_MOST]
    return found


def ancestors(pid: int) -> list[int]:
    """The process and those above it."""
    found = [pid]
    while (seen := status(found[-1])) is not None and seen.parent > 0:
        found.append(seen.parent)
    return found


def is_python(pid: int) -> bool:
    """By the program's name, else by whether Python's library is loaded into it."""
    try:
        if _PYTHON.search(os.readlink(PROC / str(pid) / "exe")):
            return True
        return re.search(r"/libpython\d", (PROC / str(pid) / "maps").read_text(errors="replace")) is not None
    except OSError:  # it ended, or may not be looked at
        return False


def variables(pid: int) -> dict[str, str]:
    """Its environment as it began; empty where it may not be read."""
    try:
        data = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (word.decode(errors="replace").partition("=") for word in data.split(b"\0"))
    return {name: value for name, sign, value in pairs if sign}


def rank(pid: int) -> int:
    """Its rank in the job by its environment, 0 where that does not say."""
    told = variables(pid)
    return next((int(told[name]) for name in _RANKS if told.get(name, "").isdecimal()), 0)


def command(pid: int) -> list[str]:
    """Its command line; empty for a part of the kernel and for what may not be read."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    return [word.decode(errors="replace") for word in words[:-1]]


class Tree:
    """What is remembered of a job's processes: their numbers, how often the kernel killed in their cgroups for memory,
    and the input files of zero bytes that they read.

    pid: the root. `look` is called every few seconds and costs a few milliseconds. A file counts that is open for
    reading only, twice, or that the command line names; a reader that spins opens it again and again.
    """

    def __init__(self, pid: int) -> None:
        self.pids: set[int] = {pid}
        self._pid = pid
        self._empty: dict[str, int] = {}
        self._named = [path for path in _named_files(pid) if _is_empty(path)]
        self._cgroups: dict[str, _Kills] = {}

    def look(self) -> None:
        for pid in tree(self._pid):
            if len(self.pids) < PIDS_MOST:
                self.pids.add(pid)
            self._join(pid)
            for path in _empty_inputs(pid):
                if path in self._empty or len(self._empty) < EMPTY_MOST:
                    self._empty[path] = self._empty.get(path, 0) + 1
        for kills in self._cgroups.values():
            kills.count()

    def oom_kills(self) -> int | None:
        """Kills for memory since the cgroups were first seen with processes of the job: the most of any one, since
        version 2 counts those below too. None: nobody counts."""
        for kills in self._cgroups.values():
            kills.count()
        return max((kills.since for kills in self._cgroups.values() if kills.since is not None), default=None)

    def empty_inputs(self) -> list[str]:
        """Those that are empty still, by name."""
        twice = {path for path, count in self._empty.items() if count > 1}
        return sorted(path for path in twice | set(self._named) if _is_empty(path))

    def _join(self, pid: int) -> None:
        """Begins to count in the process's cgroup: a job may enter one of its own when it has started."""
        try:
            text = (PROC / str(pid) / "cgroup").read_text()
        except OSError:  # it ended
            return
        if text not in self._cgroups and len(self._cgroups) < CGROUPS_MOST:
            cgroup = Cgroup.of(pid)
            self._cgroups[text] = _Kills(cgroup, cgroup.oom_kills())


@dataclasses.dataclass
class _Kills:
    """The kernel's kills in a cgroup; the newest number stays when the cgroup is removed with the job."""

    cgroup: Cgroup
    before: int | None
    since: int | None = 0

    def count(self) -> None:
        if self.before is None:
            self.since = None
        elif (now := self.cgroup.oom_kills()) is not None:
            self.since = max(0, now - self.before)


def _named_files(pid: int) -> list[str]:
    """Files that words of the command line name, also behind `--option=`."""
    try:
        folder = os.readlink(PROC / str(pid) / "cwd")
    except OSError:  # it ended, or may not be looked at
        return []
    words = [word.rpartition("=")[2] for word in command(pid)[1:]]
    paths = [os.path.join(folder, word) for word in words if word]
    return [path for path in paths if not _NO_INPUT.search(path)]


def _empty_inputs(pid: int) -> list[str]:
    """Files of zero bytes that a process has open for reading only."""
    found = []
    with contextlib.suppress(OSError):  # it ended meanwhile, or may not be looked at
        for number in os.listdir(PROC / str(pid) / "fd")[:FILES_MOST]:
            with contextlib.suppress(OSError):
                place = PROC / str(pid) / "fd" / number
                seen = place.stat()
                if seen.st_size or not stat.S_ISREG(seen.st_mode) or not seen.st_nlink:
                    continue
                path = os.readlink(place)
                flags = re.search(r"^flags:\s*(\d+)", (PROC / str(pid) / "fdinfo" / number).read_text(), re.MULTILINE)
                if flags and int(flags[1], 8) & os.O_ACCMODE == os.O_RDONLY and not _NO_INPUT.search(path):
                    found.append(path)
    return found


def _is_empty(path: str) -> bool:
    try:
        seen = os.stat(path)
    except OSError:  # removed, or of another mount namespace
        return False
    return stat.S_ISREG(seen.st_mode) and seen.st_size == 0
