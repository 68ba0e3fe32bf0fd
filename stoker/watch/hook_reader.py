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

from stoker.watch.hook_state import HookState, cpu_by_phase, phase_seconds, read_hook_state
from stoker.watch.tensorflow_trace import input_wait_s

HOOK_DIR = Path(__file__).parent / "hook"
STATE_DIR_PREFIX = "stoker-watch-"
MIN_STALE_AGE_S = 60.0
"""A folder younger than this may not be locked yet."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankWindow:
    """Of one rank in one window. phases: device-seconds, they add up to the window's length × devices. cpu: processor
    seconds of the training thread. step: optimizer steps since the job's begin."""

    rank: int
    devices: int
    phases: dict[str, float]
    thread_cpu_s: dict[str, float]
    step: int
    steps: int
    num_images: int
    lr: float | None


class RankTimeBreakdown:
    """Of one rank: its processes, one after the other, and what of their time has been put into windows.

    What the sums say later may correct what they said (work that turns out to be evaluation): a window then takes more
    of one phase and less of another, none less than nothing, and the sum over the windows is right.
    """

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._ended_phases: dict[str, float] = {}
        self._ended_cpu: dict[str, float] = {}
        self._ended_counts = {"steps": 0.0, "num_images": 0.0}
        self._current: HookState | None = None
        self._ended_names: set[str] = set()
        self._offset: dict[str, float] = {}
        self._offset_cpu: dict[str, float] = {}
        self._reported_phases: dict[str, float] = {}
        self._reported_cpu: dict[str, float] = {}
        self._reported_counts = {"steps": 0, "num_images": 0}
        self._window_start_s = self._last_alive_s = start_s
        self._trained_until_s = 0.0

    @property
    def steps(self) -> int:
        return self._total("steps")

    def has_new_steps(self) -> bool:
        return self.steps > self._reported_counts["steps"]

    def update(self, living: list[HookState], ended: list[HookState], now_s: float) -> None:
        """cells: living processes of the rank; gone: those that have ended. The one that trains is followed, the first
        of several, to its end: what it was in then, it was in until it was last seen alive."""
        current_name = None if self._current is None else self._current.name
        for state in ended:
            if state.name == current_name or (
                current_name is None and state.values["steps"] and state.name not in self._ended_names
            ):
                self._end(state, now_s=self._last_alive_s if state.name == current_name else None)
        current = next((state for state in living if state.name == current_name), None)
        after_s = self._trained_until_s
        living = [state for state in living if state.values["steps"] or state.values["begin"] >= after_s]  # no helpers
        best = min(living, key=lambda state: (state.values["steps"] <= 0, state.values["begin"]), default=None)
        if best is not None and (current is None or (not current.values["steps"] and best.values["steps"])):
            if current is not None:
                self._end(current, now_s=self._window_start_s)
            start_s = best.values["begin"]
            is_late = start_s < self._window_start_s
            self._offset, self._offset_cpu = (phase_seconds(best, None), cpu_by_phase(best)) if is_late else ({}, {})
            current = best
        self._current = current
        if current is not None:
            self._last_alive_s = now_s

    def _end(self, state: HookState, now_s: float | None = None) -> None:
        self._ended_phases = _add(self._ended_phases, self._observed_phases(state, now_s))
        self._ended_cpu = _add(self._ended_cpu, _subtract(cpu_by_phase(state), self._offset_cpu))
        self._ended_counts = {name: count + state.values[name] for name, count in self._ended_counts.items()}
        if state.values["steps"]:
            self._trained_until_s = state.values["last_update"]
        self._current, self._offset, self._offset_cpu = None, {}, {}
        self._ended_names.add(state.name)

    def _observed_phases(self, state: HookState, now_s: float | None) -> dict[str, float]:
        """The cell's time under our eyes."""
        return _subtract(phase_seconds(state, now_s), self._offset)

    def _total(self, name: str) -> int:
        return round(self._ended_counts[name] + (self._current.values[name] if self._current is not None else 0.0))

    def next_window(self, now_s: float, wall_s: float, *, rank: int, devices: int) -> RankWindow:
        """The window since the last cut."""
        targets = (
            self._ended_phases
            if self._current is None
            else _add(self._ended_phases, self._observed_phases(self._current, now_s))
        )
        missing_s = (now_s - self._start_s) - sum(targets.values())
        if missing_s > 0:  # no process of this rank ran: it is only just starting, or has ended
            fill = {"unattributed" if self.steps else "startup": missing_s}
            self._ended_phases, targets = _add(self._ended_phases, fill), _add(targets, fill)
        due = {name: max(0.0, seconds) for name, seconds in _subtract(targets, self._reported_phases).items()}
        due_s = sum(due.values())
        phases = {name: seconds * wall_s / due_s for name, seconds in due.items() if seconds > 0}
        if not phases and wall_s > 0:
            phases = {"unattributed": wall_s}
        self._reported_phases = _add(self._reported_phases, phases)
        cpu = self._next_cpu()
        previous = self._reported_counts
        self._reported_counts = {name: self._total(name) for name in previous}
        self._window_start_s = now_s
        lr = self._current.values["lr"] if self._current is not None else -1.0
        return RankWindow(
            rank=rank, devices=devices, phases={name: seconds * devices for name, seconds in phases.items()},
            thread_cpu_s=cpu, step=self.steps, steps=max(0, self._reported_counts["steps"] - previous["steps"]),
            num_images=max(0, self._reported_counts["num_images"] - previous["num_images"]), lr=lr if lr >= 0 else None,
        )  # fmt: skip

    def _next_cpu(self) -> dict[str, float]:
        """As the phases: less than is due where some was given to a phase that it turned out not to belong to."""
        targets = self._ended_cpu
        if self._current is not None:
            targets = _add(targets, _subtract(cpu_by_phase(self._current), self._offset_cpu))
        due = {name: max(0.0, seconds) for name, seconds in _subtract(targets, self._reported_cpu).items()}
        new_s, due_s = sum(targets.values()) - sum(self._reported_cpu.values()), sum(due.values())
        if new_s <= 0 or due_s <= 0:
            return {}
        cpu = {name: seconds * new_s / due_s for name, seconds in due.items() if seconds > 0}
        self._reported_cpu = _add(self._reported_cpu, cpu)
        return cpu


def _subtract(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {name: seconds - b.get(name, 0.0) for name, seconds in a.items()}


def _add(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {name: a.get(name, 0.0) + b.get(name, 0.0) for name in (*a, *(name for name in b if name not in a))}


class HookReader:
    """All processes of a job. folder: of their cells. devices: GPUs that the job may use, at least 1."""

    def __init__(self, directory: Path, *, devices: int, now_s: float) -> None:
        self._directory = directory
        self._devices = devices
        self._ranks: dict[int, RankTimeBreakdown] = {}
        self._states: dict[str, HookState] = {}
        self._input_fractions: dict[int, list[float]] = {}
        self._window_start_s = now_s

    def poll(self) -> None:
        """Reads the cells."""
        living: dict[int, list[HookState]] = {}
        ended: dict[int, list[HookState]] = {}
        now_s = time.monotonic()
        self._read_traces()
        for path in sorted(self._directory.glob("*.state")):
            state = read_hook_state(path)
            if state is None:
                continue
            if fractions := self._input_fractions.get(
                state.pid
            ):  # taken at even distances: their mean is that of the time
                state = dataclasses.replace(state, input_fraction=sum(fractions) / len(fractions))
            self._states[state.name] = state
            if _is_alive(state.pid) and not state.values["ended"]:
                living.setdefault(state.rank, []).append(state)
            else:
                ended.setdefault(state.rank, []).append(state)
        for rank in (living.keys() | ended.keys()) - self._ranks.keys():
            self._ranks[rank] = RankTimeBreakdown(self._window_start_s)
        for rank, breakdown in self._ranks.items():
            breakdown.update(living.get(rank, []), ended.get(rank, []), now_s)

    def _read_traces(self) -> None:
        """What TensorFlow's profiler recorded in some steps: their seconds in a line of text, then the trace."""
        for path in self._directory.glob("*.trace"):
            header, _, trace = path.read_bytes().partition(b"\n")
            path.unlink()
            with contextlib.suppress(ValueError):  # a trace that cannot be read: the share stays what it was
                fraction = input_wait_s(trace) / max(float(header), 1e-9)
                self._input_fractions.setdefault(int(path.stem.split("-")[0]), []).append(min(1.0, fraction))

    def has_new_steps(self) -> bool:
        """Whether a step was done since the last window."""
        return any(breakdown.has_new_steps() for breakdown in self._ranks.values())

    def has_trained(self) -> bool:
        """Whether a process of the job has done a step."""
        return any(breakdown.steps for breakdown in self._ranks.values())

    def num_loader_workers(self) -> int | None:
        """How many processes load the data of a process that trains; None where no loader said."""
        counts = (state.values["workers"] for state in self._states.values() if state.values["steps"])
        return next((round(workers) for workers in counts if workers >= 0), None)

    def next_windows(self, now_s: float, wall_s: float) -> list[RankWindow]:
        """The window since the last one, of each rank that trains, the lowest first; until one trains of the lowest,
        for all devices. Empty: no process of the job has a cell. now_s: CLOCK_MONOTONIC; wall_s: the window's
        length."""
        training = [rank for rank, breakdown in self._ranks.items() if breakdown.steps]
        devices = max(1, self._devices // max(1, len(training)))
        windows = {
            rank: breakdown.next_window(now_s, wall_s, rank=rank, devices=devices)
            for rank, breakdown in self._ranks.items()
        }
        self._window_start_s = now_s
        return [windows[rank] for rank in sorted(training or list(windows)[:1])]

    def status(self) -> str:
        """What was recorded, in words; it begins with `not` where nothing was."""
        trainers = [state for state in self._states.values() if state.values["steps"]]
        frameworks = ", ".join(
            sorted({name for state in trainers or self._states.values() for name in state.frameworks})
        )
        failures = "; ".join(sorted({line for path in self._directory.glob("errors-*") for line in _lines(path)}))
        failed = f"; it failed at {failures}" if failures else ""
        if trainers:
            loader_note = (
                "" if all(state.values["batches"] for state in trainers) else ", without a loader that it knows"
            )
            processes = "a process" if len(trainers) == 1 else f"{len(trainers)} processes"
            return f"recorded: {frameworks} in {processes}{loader_note}{failed}"
        if self._states:
            return f"not recorded: {frameworks} was loaded, and no optimizer has stepped{failed}"
        if (self._directory / "loaded").exists():
            return f"not recorded: no process of the job has loaded torch or Keras{failed}"
        return (
            "not recorded: no Python of the job has taken the hook (it is not Python, runs with -I or -E, or has "
            f"another PYTHONPATH){failed}"
        )


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@contextlib.contextmanager
def hook_state_dir(enabled: bool) -> Iterator[Path | None]:
    """A new folder for the cells of a job, removed behind it; None where none is wanted, or no room for one."""
    if not enabled:
        yield None
        return
    shm = Path("/dev/shm")
    parent = shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())
    for stale_dir in parent.glob(f"{STATE_DIR_PREFIX}*"):  # by watchers that were killed: the lock went with them
        with contextlib.suppress(OSError), _exclusive_lock(stale_dir):
            if stale_dir.stat().st_mtime < time.time() - MIN_STALE_AGE_S:
                shutil.rmtree(stale_dir, ignore_errors=True)
    try:
        directory = Path(tempfile.mkdtemp(prefix=STATE_DIR_PREFIX, dir=parent))
        fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # a process that the job left behind may still write there
        os.close(fd)


@contextlib.contextmanager
def _exclusive_lock(directory: Path) -> Iterator[None]:
    """Raises OSError where a living watcher has it."""
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def add_hook_env(env: Mapping[str, str], directory: Path) -> dict[str, str]:
    """The job's variables, with the hook."""
    path = env.get("PYTHONPATH")
    return {
        **env,
        "PYTHONPATH": f"{HOOK_DIR}{os.pathsep}{path}" if path else str(HOOK_DIR),
        "STOKER_HOOK": str(directory),
    }
