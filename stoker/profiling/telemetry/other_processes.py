"""Which processes outside a run keep the cores busy: their names, for the diagnosis of contention.

All processes of the machine are read, so this is done only while others use the cores, and less often the more
processes there are. A container sees only its own processes. The processes of the run: `processes`; rates: `host`.
"""

import contextlib
import itertools
import math
import os
from pathlib import Path
from typing import NamedTuple

from stoker.profiling.telemetry.procfs import read_or_none

MIN_OTHER_CORES = 0.25
"""Cores in use by others from which they are named: less hardly slows a run down (heuristic)."""
MIN_PROCESS_CORES = 0.05
"""A process that uses less is not named."""
MAX_NAMES = 3
PROCESSES_PER_SAMPLE = 250
"""Average number of processes that are read in a sample: 10 to 15 µs each, so some 3 ms."""
MAX_BASELINE_AGE_S = 10.0
"""CPU times that are older say little about the present: they are read again first."""


class _CpuTime(NamedTuple):
    """Of a process. ticks: so far, including children that ended and were waited for."""

    ticks: int
    parent: int
    start_ticks: int
    name: str


class OtherProcesses:
    """Names the busiest processes that are not in the trees of `run_pids`, from repeated readings of /proc.

    Without /proc (macOS) it names none.
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
