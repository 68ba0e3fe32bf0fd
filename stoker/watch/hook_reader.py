"""Turns the state files of a watched job's processes into phases of each rank (data source 2).

The hook (`hook/`) runs inside the job and keeps a state file of sums for each process that may train. It can be read at
any time (`hook_state.py`), also after the process was killed. The phases of a window are the increase of the sums. Only
`HookReader.poll` and `hook_state_dir` do I/O; `recorder.py` writes steps.jsonl.

State files are in a folder in memory (/dev/shm) or in the temporary folder, not in the run folder: they are mapped, and
a page that network storage cannot return would kill the job.
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

from stoker.watch.hook_state import WORKING_SLOTS, HookState, cpu_by_phase, phase_seconds, read_hook_state
from stoker.watch.processes import read_status
from stoker.watch.tensorflow_trace import input_wait_s

HOOK_DIR = Path(__file__).parent / "hook"
STATE_DIR_PREFIX = "stoker-watch-"
MIN_STALE_AGE_S = 60.0
"""A younger folder may not be locked yet."""
MIN_IDLE_S, MAX_IDLE_CORES = 5.0, 0.15
"""A process is idle if it used fewer cores for this time, with its main thread asleep and its clock in one slot. The
cores are those of a hang (`diagnosis/causes/hung.py`); the time is longer than a wait for a lock or a device in a
healthy step (heuristic)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankWindow:
    """One rank in one window. phases: device-seconds, they add up to the window's length × devices. thread_cpu_s:
    CPU-seconds of the training thread. step: optimizer steps since the start of the job."""

    rank: int
    devices: int
    phases: dict[str, float]
    thread_cpu_s: dict[str, float]
    step: int
    steps: int
    num_images: int
    lr: float | None
    process_cpu_s: float | None
    """CPU-seconds of the process, all its threads."""
    recompiles: int | None = None
    """As in `StepWindow`."""


class RankTimeBreakdown:
    """The processes of one rank, one after the other, and how much of their time is in windows already.

    Later sums may correct earlier ones (work that turns out to be evaluation): then a window has more of one phase and
    less of another, never less than zero, and the sum over the windows is correct.
    """

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._ended_phases: dict[str, float] = {}
        self._ended_cpu: dict[str, float] = {}
        self._ended_counts = {"steps": 0.0, "num_images": 0.0, "recompiles": 0.0}
        self._current: HookState | None = None
        self._ended_names: set[str] = set()
        self._offset: dict[str, float] = {}
        self._offset_cpu: dict[str, float] = {}
        self._reported_phases: dict[str, float] = {}
        self._reported_cpu: dict[str, float] = {}
        self._ended_process_cpu_s = self._offset_process_cpu_s = self._reported_process_cpu_s = 0.0
        self._reported_counts = {"steps": 0, "num_images": 0, "recompiles": 0}
        self._counts_recompiles = False
        self._window_start_s = self._last_alive_s = start_s
        self._trained_until_s = 0.0

    @property
    def steps(self) -> int:
        return self._total("steps")

    def has_new_steps(self) -> bool:
        return self.steps > self._reported_counts["steps"]

    def update(self, living: list[HookState], ended: list[HookState], now_s: float) -> None:
        """living, ended: processes of the rank. The training process is followed until it ends, the first one of
        several. Its last phase lasts until it was last seen alive."""
        current_name = None if self._current is None else self._current.name
        for state in ended:
            if state.name == current_name or (
                current_name is None and state.values["steps"] and state.name not in self._ended_names
            ):
                self._end(state, now_s=self._last_alive_s if state.name == current_name else None)
        current = next((state for state in living if state.name == current_name), None)
        after_s = self._trained_until_s
        living = [
            state for state in living if state.values["steps"] or state.values["begin"] >= after_s
        ]  # no helper processes
        best = min(living, key=lambda state: (state.values["steps"] <= 0, state.values["begin"]), default=None)
        if best is not None and (current is None or (not current.values["steps"] and best.values["steps"])):
            if current is not None:
                self._end(current, now_s=self._window_start_s)
            start_s = best.values["begin"]
            is_late = start_s < self._window_start_s
            self._offset, self._offset_cpu = (phase_seconds(best, None), cpu_by_phase(best)) if is_late else ({}, {})
            self._offset_process_cpu_s = (best.process_cpu_s or 0.0) if is_late else 0.0
            current = best
        self._current = current
        self._counts_recompiles |= any(state.values["recompiles"] >= 0 for state in (*living, *ended))
        if current is not None:
            self._last_alive_s = now_s

    def _end(self, state: HookState, now_s: float | None = None) -> None:
        self._ended_phases = _add(self._ended_phases, self._observed_phases(state, now_s))
        self._ended_cpu = _add(self._ended_cpu, _subtract(cpu_by_phase(state), self._offset_cpu))
        self._ended_process_cpu_s += (state.process_cpu_s or 0.0) - self._offset_process_cpu_s
        self._ended_counts = {name: count + max(0.0, state.values[name]) for name, count in self._ended_counts.items()}
        if state.values["steps"]:
            self._trained_until_s = state.values["last_update"]
        self._current, self._offset, self._offset_cpu, self._offset_process_cpu_s = None, {}, {}, 0.0
        self._ended_names.add(state.name)

    def _observed_phases(self, state: HookState, now_s: float | None) -> dict[str, float]:
        """The process's time since it was followed."""
        return _subtract(phase_seconds(state, now_s), self._offset)

    def _total(self, name: str) -> int:
        current = 0.0 if self._current is None else max(0.0, self._current.values[name])
        return round(self._ended_counts[name] + current)

    def next_window(self, now_s: float, wall_s: float, *, rank: int, devices: int) -> RankWindow:
        """The window since the last one."""
        targets = (
            self._ended_phases
            if self._current is None
            else _add(self._ended_phases, self._observed_phases(self._current, now_s))
        )
        missing_s = (now_s - self._start_s) - sum(targets.values())
        if missing_s > 0:  # no process of this rank was running: it is starting, or has ended
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
            process_cpu_s=self._next_process_cpu_s(),
            recompiles=max(0, self._reported_counts["recompiles"] - previous["recompiles"])
            if self._counts_recompiles else None,
        )  # fmt: skip

    def _next_process_cpu_s(self) -> float | None:
        """None if no process was seen alive so far."""
        total_s = self._ended_process_cpu_s
        if self._current is not None:
            total_s += (self._current.process_cpu_s or 0.0) - self._offset_process_cpu_s
        due_s, self._reported_process_cpu_s = max(0.0, total_s - self._reported_process_cpu_s), total_s
        return due_s if total_s else None

    def _next_cpu(self) -> dict[str, float]:
        """As for phases: less than is due if earlier time was assigned to a phase that turned out to be wrong."""
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


@dataclasses.dataclass
class IdleTime:
    """Seconds by slot in which a process did nothing although its clock is in a slot of work: it hangs, or waits for
    something outside. since: (time in seconds, CPU-seconds) at which it was last seen to do something."""

    last_update_s: float = -1.0
    since: tuple[float, float] = (0.0, 0.0)
    counted_s: float = 0.0
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    def update(self, state: HookState, cpu_s: float, now_s: float, *, is_asleep: bool) -> None:
        """cpu_s: of the process so far. now_s: CLOCK_MONOTONIC. is_asleep: its main thread is not runnable."""
        idle_s = now_s - self.since[0]
        is_idle = is_asleep and state.values["last_update"] == self.last_update_s
        if not is_idle or cpu_s - self.since[1] > MAX_IDLE_CORES * idle_s:
            self.last_update_s, self.since, self.counted_s = state.values["last_update"], (now_s, cpu_s), 0.0
        elif idle_s >= MIN_IDLE_S and state.current_slot in WORKING_SLOTS:
            slot = state.current_slot
            self.seconds[slot] = self.seconds.get(slot, 0.0) + idle_s - self.counted_s
            self.counted_s = idle_s


class HookReader:
    """All processes of a job. directory: of their state files. devices: GPUs that the job may use, at least 1."""

    def __init__(self, directory: Path, *, devices: int, now_s: float) -> None:
        self._directory = directory
        self._devices = devices
        self._ranks: dict[int, RankTimeBreakdown] = {}
        self._states: dict[str, HookState] = {}
        self._input_fractions: dict[int, list[float]] = {}
        self._idle_times: dict[str, IdleTime] = {}
        self._window_start_s = now_s
        self.training_pids: frozenset[int] = frozenset()
        """Live processes that have done a step. May be read in any thread."""

    def poll(self) -> None:
        """Reads the state files."""
        living: dict[int, list[HookState]] = {}
        ended: dict[int, list[HookState]] = {}
        now_s = time.monotonic()
        self._read_traces()
        for path in sorted(self._directory.glob("*.state")):
            state = read_hook_state(path)
            if state is None:
                continue
            if fractions := self._input_fractions.get(state.pid):
                # In the first trace, steps take batches that were prefetched while the graph was built.
                typical = fractions[1:] or fractions
                state = dataclasses.replace(state, input_fraction=sum(typical) / len(typical))
            status = read_status(state.pid)
            is_alive = status is not None and status.state not in "ZX"
            idle_time = self._idle_times.setdefault(state.name, IdleTime())
            previous = self._states.get(state.name)
            cpu_s = None if previous is None else previous.process_cpu_s
            if status is not None and is_alive:
                cpu_s = status.cpu_ticks / os.sysconf("SC_CLK_TCK")
                idle_time.update(state, cpu_s, now_s, is_asleep=status.state == "S")
            state = dataclasses.replace(state, process_cpu_s=cpu_s, idle=dict(idle_time.seconds))
            self._states[state.name] = state
            if is_alive and not state.values["ended"]:
                living.setdefault(state.rank, []).append(state)
            else:
                ended.setdefault(state.rank, []).append(state)
        self.training_pids = frozenset(
            state.pid for states in living.values() for state in states if state.values["steps"]
        )
        for rank in (living.keys() | ended.keys()) - self._ranks.keys():
            self._ranks[rank] = RankTimeBreakdown(self._window_start_s)
        for rank, breakdown in self._ranks.items():
            breakdown.update(living.get(rank, []), ended.get(rank, []), now_s)

    def _read_traces(self) -> None:
        """Traces of TensorFlow's profiler: a text line with the seconds of the traced steps, then the trace."""
        for path in self._directory.glob("*.trace"):
            header, _, trace = path.read_bytes().partition(b"\n")
            path.unlink()
            with contextlib.suppress(ValueError):  # an unreadable trace does not change the fraction
                fraction = input_wait_s(trace) / max(float(header), 1e-9)
                self._input_fractions.setdefault(int(path.stem.split("-")[0]), []).append(min(1.0, fraction))

    def has_new_steps(self) -> bool:
        """Whether there was a step since the last window."""
        return any(breakdown.has_new_steps() for breakdown in self._ranks.values())

    def has_trained(self) -> bool:
        """Whether a process of the job has done a step."""
        return any(breakdown.steps for breakdown in self._ranks.values())

    def num_loader_workers(self) -> int | None:
        """Number of loader processes of a training process; None if not known."""
        counts = (state.values["workers"] for state in self._states.values() if state.values["steps"])
        return next((round(workers) for workers in counts if workers >= 0), None)

    def next_windows(self, now_s: float, wall_s: float) -> list[RankWindow]:
        """The window since the last one, for each rank that trains, the lowest first; before the first step, for the
        lowest rank with all devices. Empty if the job has no state file. now_s: CLOCK_MONOTONIC; wall_s: length of the
        window."""
        training = [rank for rank, breakdown in self._ranks.items() if breakdown.steps]
        devices = max(1, self._devices // max(1, len(training)))
        windows = {
            rank: breakdown.next_window(now_s, wall_s, rank=rank, devices=devices)
            for rank, breakdown in self._ranks.items()
        }
        self._window_start_s = now_s
        return [windows[rank] for rank in sorted(training or list(windows)[:1])]

    def status(self) -> str:
        """The status of this data source as text; begins with `not` if nothing was recorded."""
        trainers = [state for state in self._states.values() if state.values["steps"]]
        frameworks = ", ".join(
            sorted({name for state in trainers or self._states.values() for name in state.frameworks})
        )
        failures = "; ".join(sorted({line for path in self._directory.glob("errors-*") for line in _lines(path)}))
        failed = f"; errors: {failures}" if failures else ""
        if trainers:
            loader_note = "" if all(state.values["batches"] for state in trainers) else ", without a known data loader"
            processes = "a process" if len(trainers) == 1 else f"{len(trainers)} processes"
            return f"recorded: {frameworks} in {processes}{loader_note}{failed}"
        if self._states:
            return f"not recorded: {frameworks} was loaded, but no optimizer has stepped{failed}"
        if (self._directory / "loaded").exists():
            return f"not recorded: no process of the job has loaded torch or Keras{failed}"
        return (
            "not recorded: no Python process of the job has loaded the hook (it is not Python, runs with -I or -E, or "
            f"sets another PYTHONPATH){failed}"
        )


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()


@contextlib.contextmanager
def hook_state_dir(enabled: bool) -> Iterator[Path | None]:
    """A new folder for the state files of a job, removed at the end; None if not enabled, or if there is no space."""
    if not enabled:
        yield None
        return
    shm = Path("/dev/shm")
    parent = shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())
    for stale_dir in parent.glob(f"{STATE_DIR_PREFIX}*"):  # of watchers that were killed: their locks are gone
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
        shutil.rmtree(directory, ignore_errors=True)  # a process that outlives the job may still write there
        os.close(fd)


@contextlib.contextmanager
def _exclusive_lock(directory: Path) -> Iterator[None]:
    """Raises OSError if a live watcher holds it."""
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def add_hook_env(env: Mapping[str, str], directory: Path) -> dict[str, str]:
    """The job's environment variables, with the hook."""
    path = env.get("PYTHONPATH")
    return {
        **env,
        "PYTHONPATH": f"{HOOK_DIR}{os.pathsep}{path}" if path else str(HOOK_DIR),
        "STOKER_HOOK": str(directory),
    }
