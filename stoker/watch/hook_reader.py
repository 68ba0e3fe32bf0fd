"""What a watched job's own processes say: cells of the hook in, phases of each rank out (tier 2).

The hook (`hook/`) is in the job and keeps a cell of sums for each process that may train; they are read
(`hook_state.py`) at any time, also of a process that was killed. Phases of a window are what the sums have grown by.
Pure but for
`Inside.look` and `hooked`; what goes into steps.jsonl is `recorder.py`'s.

The cells lie in a folder of their own in memory (/dev/shm) or in the temporary folder, not in the run's: they are
mapped, and a page that a network storage cannot give back would kill the job.
"""

import contextlib
import dataclasses
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from stoker.watch.hook_state import Cell, cpu_of, phases_of, read_cell
from stoker.watch.tensorflow_trace import waited_s

HOOK = Path(__file__).parent / "hook"
PREFIX = "stoker-watch-"
FRESH_S = 60.0
"""A folder younger than this may not be locked yet."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """Of one rank in one window. phases: device-seconds, they add up to the window's length × devices. cpu: processor
    seconds of the training thread. step: optimizer steps since the job's begin."""

    rank: int
    devices: int
    phases: dict[str, float]
    cpu: dict[str, float]
    step: int
    steps: int
    pictures: int
    rate: float | None


class Account:
    """Of one rank: its processes, one after the other, and what of their time has been put into windows.

    What the sums say later may correct what they said (work that turns out to be evaluation): a window then takes more
    of one phase and less of another, none less than nothing, and the sum over the windows is right.
    """

    def __init__(self, begin_s: float) -> None:
        self._begin_s = begin_s
        self._past: dict[str, float] = {}
        self._past_cpu: dict[str, float] = {}
        self._counted = {"steps": 0.0, "pictures": 0.0}
        self._cell: Cell | None = None
        self._done: set[str] = set()
        self._offset: dict[str, float] = {}
        self._offset_cpu: dict[str, float] = {}
        self._given: dict[str, float] = {}
        self._given_cpu: dict[str, float] = {}
        self._given_counts = {"steps": 0, "pictures": 0}
        self._cut_s = self._lived_s = begin_s
        self._trained_until_s = 0.0

    @property
    def steps(self) -> int:
        return self._total("steps")

    def has_news(self) -> bool:
        return self.steps > self._given_counts["steps"]

    def follow(self, cells: list[Cell], gone: list[Cell], now_s: float) -> None:
        """cells: living processes of the rank; gone: those that have ended. The one that trains is followed, the first
        of several, to its end: what it was in then, it was in until it was last seen alive."""
        mine = None if self._cell is None else self._cell.name
        for cell in gone:
            if cell.name == mine or (mine is None and cell.values["steps"] and cell.name not in self._done):
                self._end(cell, now_s=self._lived_s if cell.name == mine else None)
        current = next((cell for cell in cells if cell.name == mine), None)
        after_s = self._trained_until_s
        cells = [cell for cell in cells if cell.values["steps"] or cell.values["begin"] >= after_s]  # no helpers
        best = min(cells, key=lambda cell: (cell.values["steps"] <= 0, cell.values["begin"]), default=None)
        if best is not None and (current is None or (not current.values["steps"] and best.values["steps"])):
            if current is not None:
                self._end(current, now_s=self._cut_s)
            begin_s = best.values["begin"]
            is_late = begin_s < self._cut_s
            self._offset, self._offset_cpu = (phases_of(best, None), cpu_of(best)) if is_late else ({}, {})
            current = best
        self._cell = current
        if current is not None:
            self._lived_s = now_s

    def _end(self, cell: Cell, now_s: float | None = None) -> None:
        self._past = _sum(self._past, self._own(cell, now_s))
        self._past_cpu = _sum(self._past_cpu, _less(cpu_of(cell), self._offset_cpu))
        self._counted = {name: count + cell.values[name] for name, count in self._counted.items()}
        if cell.values["steps"]:
            self._trained_until_s = cell.values["mark"]
        self._cell, self._offset, self._offset_cpu = None, {}, {}
        self._done.add(cell.name)

    def _own(self, cell: Cell, now_s: float | None) -> dict[str, float]:
        """The cell's time under our eyes."""
        return _less(phases_of(cell, now_s), self._offset)

    def _total(self, name: str) -> int:
        return round(self._counted[name] + (self._cell.values[name] if self._cell is not None else 0.0))

    def cut(self, now_s: float, wall_s: float, *, rank: int, devices: int) -> Seen:
        """The window since the last cut."""
        targets = self._past if self._cell is None else _sum(self._past, self._own(self._cell, now_s))
        missing_s = (now_s - self._begin_s) - sum(targets.values())
        if missing_s > 0:  # no process of this rank ran: it is only just starting, or has ended
            fill = {"unattributed" if self.steps else "startup": missing_s}
            self._past, targets = _sum(self._past, fill), _sum(targets, fill)
        due = {name: max(0.0, seconds) for name, seconds in _less(targets, self._given).items()}
        due_s = sum(due.values())
        phases = {name: seconds * wall_s / due_s for name, seconds in due.items() if seconds > 0}
        if not phases and wall_s > 0:
            phases = {"unattributed": wall_s}
        self._given = _sum(self._given, phases)
        cpu = self._cut_cpu()
        before = self._given_counts
        self._given_counts = {name: self._total(name) for name in before}
        self._cut_s = now_s
        rate = self._cell.values["rate"] if self._cell is not None else -1.0
        return Seen(
            rank=rank, devices=devices, phases={name: seconds * devices for name, seconds in phases.items()},
            cpu=cpu, step=self.steps, steps=max(0, self._given_counts["steps"] - before["steps"]),
            pictures=max(0, self._given_counts["pictures"] - before["pictures"]), rate=rate if rate >= 0 else None,
        )  # fmt: skip

    def _cut_cpu(self) -> dict[str, float]:
        """As the phases: less than is due where some was given to a phase that it turned out not to belong to."""
        targets = self._past_cpu
        if self._cell is not None:
            targets = _sum(targets, _less(cpu_of(self._cell), self._offset_cpu))
        due = {name: max(0.0, seconds) for name, seconds in _less(targets, self._given_cpu).items()}
        new_s, due_s = sum(targets.values()) - sum(self._given_cpu.values()), sum(due.values())
        if new_s <= 0 or due_s <= 0:
            return {}
        cpu = {name: seconds * new_s / due_s for name, seconds in due.items() if seconds > 0}
        self._given_cpu = _sum(self._given_cpu, cpu)
        return cpu


def _less(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {name: seconds - b.get(name, 0.0) for name, seconds in a.items()}


def _sum(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {name: a.get(name, 0.0) + b.get(name, 0.0) for name in (*a, *(name for name in b if name not in a))}


class Inside:
    """All processes of a job. folder: of their cells. devices: GPUs that the job may use, at least 1."""

    def __init__(self, folder: Path, *, devices: int, now_s: float) -> None:
        self._folder = folder
        self._devices = devices
        self._accounts: dict[int, Account] = {}
        self._cells: dict[str, Cell] = {}
        self._traces: dict[int, list[float]] = {}
        self._cut_s = now_s

    def look(self) -> None:
        """Reads the cells."""
        living: dict[int, list[Cell]] = {}
        gone: dict[int, list[Cell]] = {}
        now_s = time.monotonic()
        self._read_traces()
        for path in sorted(self._folder.glob("*.cell")):
            cell = read_cell(path)
            if cell is None:
                continue
            if shares := self._traces.get(cell.pid):  # taken at even distances: their mean is that of the time
                cell = dataclasses.replace(cell, input_share=sum(shares) / len(shares))
            self._cells[cell.name] = cell
            if _lives(cell.pid) and not cell.values["ended"]:
                living.setdefault(cell.rank, []).append(cell)
            else:
                gone.setdefault(cell.rank, []).append(cell)
        for rank in (living.keys() | gone.keys()) - self._accounts.keys():
            self._accounts[rank] = Account(self._cut_s)
        for rank, account in self._accounts.items():
            account.follow(living.get(rank, []), gone.get(rank, []), now_s)

    def _read_traces(self) -> None:
        """What TensorFlow's profiler recorded in some steps: their seconds in a line of text, then the trace."""
        for path in self._folder.glob("*.trace"):
            head, _, trace = path.read_bytes().partition(b"\n")
            path.unlink()
            with contextlib.suppress(ValueError):  # a trace that cannot be read: the share stays what it was
                share = waited_s(trace) / max(float(head), 1e-9)
                self._traces.setdefault(int(path.stem.split("-")[0]), []).append(min(1.0, share))

    def has_news(self) -> bool:
        """Whether a step was done since the last window."""
        return any(account.has_news() for account in self._accounts.values())

    def trains(self) -> bool:
        """Whether a process of the job has done a step."""
        return any(account.steps for account in self._accounts.values())

    def workers(self) -> int | None:
        """How many processes load the data of a process that trains; None where no loader said."""
        found = (cell.values["workers"] for cell in self._cells.values() if cell.values["steps"])
        return next((round(workers) for workers in found if workers >= 0), None)

    def cut(self, now_s: float, wall_s: float) -> list[Seen]:
        """The window since the last one, of each rank that trains, the lowest first; until one trains of the lowest,
        for all devices. Empty: no process of the job has a cell. now_s: CLOCK_MONOTONIC; wall_s: the window's
        length."""
        training = [rank for rank, account in self._accounts.items() if account.steps]
        devices = max(1, self._devices // max(1, len(training)))
        found = {
            rank: account.cut(now_s, wall_s, rank=rank, devices=devices) for rank, account in self._accounts.items()
        }
        self._cut_s = now_s
        return [found[rank] for rank in sorted(training or list(found)[:1])]

    def said(self) -> str:
        """What was recorded, in words; it begins with `not` where nothing was."""
        trainers = [cell for cell in self._cells.values() if cell.values["steps"]]
        frameworks = ", ".join(sorted({name for cell in trainers or self._cells.values() for name in cell.frameworks}))
        failures = "; ".join(sorted({line for path in self._folder.glob("said-*") for line in _lines(path)}))
        failed = f"; it failed at {failures}" if failures else ""
        if trainers:
            loaders = "" if all(cell.values["batches"] for cell in trainers) else ", without a loader that it knows"
            many = "a process" if len(trainers) == 1 else f"{len(trainers)} processes"
            return f"recorded: {frameworks} in {many}{loaders}{failed}"
        if self._cells:
            return f"not recorded: {frameworks} was loaded, and no optimizer has stepped{failed}"
        if (self._folder / "seen").exists():
            return f"not recorded: no process of the job has loaded torch or Keras{failed}"
        return (
            "not recorded: no Python of the job has taken the hook (it is not Python, runs with -I or -E, or has "
            f"another PYTHONPATH){failed}"
        )


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@contextlib.contextmanager
def cells_folder(wanted: bool) -> Iterator[Path | None]:
    """A new folder for the cells of a job, removed behind it; None where none is wanted, or no room for one."""
    if not wanted:
        yield None
        return
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    for left in parent.glob(f"{PREFIX}*"):  # by watchers that were killed: the lock went with them
        with contextlib.suppress(OSError), _locked(left):
            if left.stat().st_mtime < time.time() - FRESH_S:
                shutil.rmtree(left, ignore_errors=True)
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        held = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a process that the job left behind may still write there
        os.close(held)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Raises OSError where a living watcher has it."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def hooked(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The job's variables, with the hook."""
    path = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": f"{HOOK}{os.pathsep}{path}" if path else str(HOOK), "STOKER_HOOK": str(folder)}
