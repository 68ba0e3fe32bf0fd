"""Turns the state files of a watched job's processes into phases of each rank (data source 2).

`hook/stoker_hook/clock.py` runs inside the job and keeps a state file of sums for each process that may train. The
phases of a window are the increase of the sums. State files are in memory (/dev/shm) or in the temporary folder, not in
the run folder: they are mapped, and a page that network storage cannot return would kill the job.
"""

import contextlib
import dataclasses
import itertools
import os
import statistics
import struct
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from stoker_watch import regular_files
from stoker_watch.recording import hook
from stoker_watch.recording.calls import GrowingHolder, describe_growth
from stoker_watch.recording.hook.stoker_hook.clock import HEADER_BYTES, SLOTS, STATE_BYTES
from stoker_watch.recording.telemetry.machine import read_life
from stoker_watch.runs.schemas import Mistake, StepWindow
from stoker_watch.storage.local_files import temporary_folder
from stoker_watch.watch.tensorflow_trace import input_wait_s

HOOK_DIR = Path(hook.__file__).parent
STATE_DIR_PREFIX = "stoker-watch-"
MAX_TRACE_BYTES, MAX_ERROR_BYTES = 1 << 24, 1 << 16
"""Read of a trace of TensorFlow's profiler, which has some MB and takes 30 times as much memory, and of other files
that the hook leaves."""
MAX_STATES, MAX_RANKS, MAX_REPORTS, MAX_KINDS, MAX_FAILURES = 10_000, 256, 256, 64, 20
"""Processes of a job, its ranks on this machine, files with the same ending, kinds of mistakes, and failures that a
process reports: the job may leave any number of files."""
MAX_EXIT_S = 60.0
"""Time before the end of a job in which a process ended that explains it: launchers wait for the other ranks."""
MIN_IDLE_S, MAX_IDLE_CORES = 5.0, 0.15
"""A process is idle if it used fewer cores for this time, with its main thread asleep and its clock in one slot. The
time is longer than a wait for a lock or a device in a healthy step (heuristic)."""

_MAX_RANK, _MAX_VALUE = 1 << 20, 1e15

SLOT_PHASES = {
    "startup": "startup", "input_wait": "input_wait", "maybe_wait": "input_wait", "compute": "compute",
    "maybe_work": "compute", "work": "unattributed", "after_step": "unattributed", "host": "host", "comm": "comm",
    "checkpoint": "checkpoint", "eval": "eval", "compile": "compile",
}  # fmt: skip
"""Slot of the hook's clock → phase. `maybe_`: not known yet whether for training. `after_step`: the next batch moves it
to `host`; after the last step the job ends. `_sum_slots_by_phase` splits `graph`."""

WORKING_SLOTS = ("compute", "maybe_work", "graph")
"""Slots in which the process should compute: time in which it does nothing is `unattributed`."""

_COUNTS = (
    "steps", "num_images", "recompiles", "recompiled_s", "worker_starts", "worker_start_s", "steps_without_gradients",
)  # fmt: skip

HOST_ONLY_PHASES = ("startup", "eval", "checkpoint", "compile")
"""Phases that the host measures also if the device has events, since these are only around steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HookState:
    """A process of the job at the time of the read. values: seconds and counts by slot of the hook's clock."""

    name: str
    pid: int
    frameworks: tuple[str, ...]
    slots: tuple[str, ...]
    values: Mapping[str, float]
    recompiled: str = ""
    """The function that was compiled most often, if one was compiled again."""
    recompiled_why: str = ""
    """In the framework's words; empty: not known."""
    cpu: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """CPU-seconds of the training thread by slot, until the last update."""
    input_fraction: float | None = None
    """The fraction of `graph` that waits for input."""
    idle: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of WORKING_SLOTS in which the process did nothing, as the watcher saw it."""
    process_cpu_s: float | None = None
    """CPU-seconds of the process so far: all its threads, without its children."""

    @property
    def current_slot(self) -> str:
        return self.slots[int(self.values["current_slot"])]

    @property
    def rank(self) -> int:
        """Within this machine; 0 if there is only one, as far as known."""
        return max(0, round(self.values["rank"]))


class _Header(msgspec.Struct):
    pid: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
    frameworks: tuple[str, ...]
    slots: tuple[str, ...]
    recompiled: str = ""
    recompiled_why: str = ""


def read_hook_state(path: Path) -> HookState | None:
    """None while the file is being created, and for one that the hook has not written."""
    try:
        with regular_files.open_file(path, flags=regular_files.NO_LINKS) as file:
            data = file.read(STATE_BYTES)
        header = msgspec.json.decode(data[:HEADER_BYTES], type=_Header)
        slots = header.slots
        time_slots = slots[slots.index("startup") :]
        numbers = struct.unpack_from(f"{len(slots) + len(time_slots)}d", data, HEADER_BYTES)
        values = dict(zip(slots, numbers[: len(slots)], strict=True))
        cpu = dict(zip(time_slots, numbers[len(slots) :], strict=True))
    except (ValueError, struct.error, OSError, msgspec.MsgspecError):
        return None
    if not (values.keys() >= set(SLOTS) and all(abs(number) < _MAX_VALUE for number in numbers)):
        return None
    if not (0 <= values["current_slot"] < len(slots) and values["rank"] < _MAX_RANK):
        return None
    return HookState(name=path.name, values=values, cpu=cpu, **msgspec.structs.asdict(header))


def phase_seconds(state: HookState, now_s: float | None) -> dict[str, float]:
    """Seconds of each phase since the clock started. now_s: CLOCK_MONOTONIC of a live process, whose current slot goes
    on since the last update: the phases add up to now_s − begin. None: until the last update."""
    values = state.values
    seconds = {slot: values[slot] for slot in (*SLOT_PHASES, "graph")}
    if now_s is not None and state.current_slot in seconds:
        seconds[state.current_slot] += max(0.0, now_s - values["last_update"])
    idle_s = {slot: min(state.idle.get(slot, 0.0), seconds[slot]) for slot in WORKING_SLOTS}
    unseen_s = sum(idle_s.values()) + seconds["after_step"]
    for slot in WORKING_SLOTS:
        seconds[slot] -= idle_s[slot]
        seconds["work"] += idle_s[slot]
    phases = _sum_slots_by_phase(state, seconds)
    return _device_phase_seconds(phases, values, unseen_s) if values["device"] else phases


def cpu_by_phase(state: HookState) -> dict[str, float]:
    """CPU-seconds of the training thread by phase, since the clock started and until its last update: those of a
    current wait are added at its end. If a device computes, the thread issues steps: `host`."""
    if not state.cpu or (state.values["compile"] and not state.values["steps"]):  # JAX: updated by compilations only
        return {}
    phases = _sum_slots_by_phase(state, dict(state.cpu))
    if state.values["device"] and phases:
        phases["host"] += phases.pop("compute")
    return phases


def _sum_slots_by_phase(state: HookState, seconds: dict[str, float]) -> dict[str, float]:
    """Seconds of the training thread by phase, from seconds by slot; removes `graph` from them."""
    graph_s, fraction = seconds.pop("graph"), state.input_fraction
    if fraction is None:
        seconds["work"] += graph_s
    else:
        seconds["input_wait"] += graph_s * fraction
        seconds["compute"] += graph_s * (1 - fraction)
    phases: dict[str, float] = {}
    for slot, phase in SLOT_PHASES.items():
        phases[phase] = phases.get(phase, 0.0) + seconds[slot]
    if state.values["compile"] and not state.values["steps"]:  # JAX, whose steps no hook sees
        phases["unattributed"] += phases["startup"]
        phases["startup"] = 0.0
    return phases


def _device_phase_seconds(host: Mapping[str, float], values: Mapping[str, float], unseen_s: float) -> dict[str, float]:
    """Phases of a device that worked on steps for busy_s by its own clock, comm_s of it waiting for communication.

    When the device is idle, it waits for the host's waits, up to their length: a wait that is shorter than the device's
    queue costs nothing. The rest is `host`, or `sync` if the host waits for the device in each step, except for
    `unseen_s` in which the host did nothing or had done its last step.
    """
    phases = {name: host[name] for name in HOST_ONLY_PHASES}
    loop_s = sum(host.values()) - sum(phases.values())
    busy_s = min(values["busy"], loop_s)
    comm_s = min(values["device_comm"], busy_s)
    idle_s = loop_s - busy_s
    waits = {name: host[name] for name in ("input_wait", "comm")}
    waited_s = sum(waits.values())
    fraction = min(1.0, idle_s / waited_s) if waited_s > 0 else 0.0
    phases |= {name: seconds * fraction for name, seconds in waits.items()}
    phases["comm"] += comm_s
    phases["compute"] = busy_s - comm_s
    rest_s = max(0.0, idle_s - waited_s)
    phases["unattributed"] = min(unseen_s, rest_s)
    phases["sync" if values["syncs"] >= values["steps"] > 0 else "host"] = rest_s - phases["unattributed"]
    return phases


Report = TypeVar("Report")
Sum = tuple[str, str]
"""("phase", name) in seconds, ("cpu", name of a phase) in CPU-seconds of the training thread, or ("count", name)."""
PROCESS_CPU: Sum = ("process", "cpu_s")
"""CPU-seconds of the process."""


class RankTimeBreakdown:
    """The processes of one rank, one after the other, and how much of their time is in windows already.

    Later sums may correct earlier ones (work that turns out to be evaluation): then a window has more of one phase and
    less of another, never less than zero, and the sum over the windows is correct.
    """

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._current: HookState | None = None
        self._offset: dict[Sum, float] = {}
        """Sums of the current process at the beginning of the window in which it was first seen."""
        self._ended, self._reported = Counter[Sum](), Counter[Sum]()
        self._ended_names: set[str] = set()
        self._counts_recompiles = False
        self._window_start_s = self._last_alive_s = start_s
        self._trained_until_s = 0.0

    @property
    def steps(self) -> int:
        current = 0.0 if self._current is None else self._current.values["steps"]
        return round(self._ended["count", "steps"] + current)

    def has_new_steps(self) -> bool:
        return self.steps > self._reported["count", "steps"]

    def update(self, living: list[HookState], ended: list[HookState], now_s: float) -> None:
        """living, ended: processes of the rank. The first one that trains is followed until it was last seen alive."""
        current_name = None if self._current is None else self._current.name
        for state in ended:
            if state.name == current_name or (
                current_name is None and state.values["steps"] and state.name not in self._ended_names
            ):
                self._end(state, now_s=self._last_alive_s if state.name == current_name else None)
        current = next((state for state in living if state.name == current_name), None)
        after_s = self._trained_until_s  # no helper processes
        living = [state for state in living if state.values["steps"] or state.values["begin"] >= after_s]
        best = min(living, key=lambda state: (state.values["steps"] <= 0, state.values["begin"]), default=None)
        if best is not None and (current is None or (not current.values["steps"] and best.values["steps"])):
            if current is not None:
                self._end(current, now_s=self._window_start_s)
            self._offset = {}
            if best.values["begin"] < self._window_start_s:
                self._offset = {key: value for key, value in _sums(best, None).items() if key[0] != "count"}
            current = best
        self._current = current
        self._counts_recompiles |= any(state.values["recompiles"] >= 0 for state in (*living, *ended))
        if current is not None:
            self._last_alive_s = now_s

    def _end(self, state: HookState, now_s: float | None = None) -> None:
        self._ended.update(_sums(state, now_s))
        self._ended.subtract(self._offset)
        if state.values["steps"]:
            self._trained_until_s = state.values["last_update"]
        self._current, self._offset = None, {}
        self._ended_names.add(state.name)

    def next_window(self, now_s: float, wall_s: float, *, devices: int) -> StepWindow:
        """The window since the last one, without its time and the values that the output has."""
        due = Counter(self._ended)
        if self._current is not None:
            due.update(_sums(self._current, now_s))
            due.subtract(self._offset)
        missing_s = (now_s - self._start_s) - sum(_of_kind(due, "phase").values())
        if missing_s > 0:  # no process of this rank was running: it is starting, or has ended
            fill = {("phase", "unattributed" if self.steps else "startup"): missing_s}
            self._ended.update(fill)
            due.update(fill)
        knows_cpu = due[PROCESS_CPU] > 0
        due.subtract(self._reported)
        phases = _scale(_of_kind(due, "phase"), wall_s)
        if not phases and wall_s > 0:
            phases = {"unattributed": wall_s}
        cpu = _scale(_of_kind(due, "cpu"), sum(_of_kind(due, "cpu").values()))
        counts = {name: max(0.0, count) for name, count in _of_kind(due, "count").items()}
        self._reported.update({("phase", name): seconds for name, seconds in phases.items()})
        self._reported.update({("cpu", name): seconds for name, seconds in cpu.items()})
        self._reported.update({key: value for key, value in due.items() if key[0] in ("count", PROCESS_CPU[0])})
        self._window_start_s = now_s
        lr = self._current.values["lr"] if self._current is not None else -1.0
        return StepWindow(
            t=0.0,
            attempt=0,
            step=self.steps,
            window_steps=round(counts.get("steps", 0)),
            num_images=round(counts.get("num_images", 0)),
            wall_s=wall_s,
            devices=devices,
            phases={name: seconds * devices for name, seconds in phases.items()},
            lr=lr if lr >= 0 else None,
            thread_cpu_s=cpu,
            process_cpu_s=max(0.0, due[PROCESS_CPU]) if knows_cpu else None,
            recompiles=round(counts.get("recompiles", 0)) if self._counts_recompiles else None,
            recompiled_s=counts.get("recompiled_s", 0.0),
            worker_starts=round(counts.get("worker_starts", 0)),
            steps_without_gradients=round(counts.get("steps_without_gradients", 0)),
            worker_start_s=counts.get("worker_start_s", 0.0),
        )


def _sums(state: HookState, now_s: float | None) -> dict[Sum, float]:
    """All sums of a process. now_s: as in `phase_seconds`."""
    return {
        **{("phase", name): seconds for name, seconds in phase_seconds(state, now_s).items()},
        **{("cpu", name): seconds for name, seconds in cpu_by_phase(state).items()},
        **{("count", name): max(0.0, state.values[name]) for name in _COUNTS},
        PROCESS_CPU: state.process_cpu_s or 0.0,
    }


def _of_kind(sums: Mapping[Sum, float], kind: str) -> dict[str, float]:
    return {name: value for (its_kind, name), value in sums.items() if its_kind == kind}


def _scale(due: Mapping[str, float], total: float) -> dict[str, float]:
    """The positive values, scaled so that they add up to the total: less than is due of some if earlier time was
    assigned to a phase that turned out to be wrong."""
    due = {name: value for name, value in due.items() if value > 0}
    factor = max(0.0, total) / sum(due.values()) if due else 0.0
    return {name: value * factor for name, value in due.items()} if factor else {}


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
    """All processes of a job. directory: of their state files; None: there is no hook. devices: GPUs, at least 1."""

    def __init__(self, directory: Path | None, *, devices: int, now_s: float) -> None:
        self._directory = Path(os.devnull)
        self.is_on = directory is not None
        if directory is not None:  # this folder, also where the job has put a link to another one in its place
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            self._directory = Path(f"/proc/self/fd/{fd}")
            weakref.finalize(self, os.close, fd)
        self._devices = devices
        self._ranks: dict[int, RankTimeBreakdown] = {}
        self._states: dict[str, HookState] = {}
        self._gone: set[str] = set()
        """States of processes that have ended. They do not change, also if another process has the PID later."""
        self._input_fractions: dict[int, list[float]] = {}
        self._idle_times: dict[str, IdleTime] = {}
        self._unread_traces = ""
        self._window_start_s = now_s
        self.training_ranks: Mapping[int, int] = {}
        """PID → rank of the live processes that have done a step. May be read in any thread."""

    def poll(self) -> None:
        living: dict[int, list[HookState]] = {}
        ended: dict[int, list[HookState]] = {}
        now_s = time.monotonic()
        self._read_traces()
        begins_s: dict[int, float] = {}
        for path in sorted(self._list(".state")):
            is_new = path.name not in self._states
            if path.name in self._gone or (is_new and len(self._states) >= MAX_STATES):
                continue
            if (state := read_hook_state(path)) is not None:
                self._update(state, now_s)
                begins_s[state.pid] = max(begins_s.get(state.pid, 0.0), state.values["begin"])
        for state in self._states.values():
            if state.values["begin"] < begins_s.get(state.pid, 0.0):  # it has replaced itself by another program (exec)
                self._gone.add(state.name)
            (ended if state.name in self._gone else living).setdefault(state.rank, []).append(state)
        self.training_ranks = {
            state.pid: rank for rank, states in living.items() for state in states if state.values["steps"]
        }
        for rank in sorted((living.keys() | ended.keys()) - self._ranks.keys())[: MAX_RANKS - len(self._ranks)]:
            self._ranks[rank] = RankTimeBreakdown(self._window_start_s)
        for rank, breakdown in self._ranks.items():
            breakdown.update(living.get(rank, []), ended.get(rank, []), now_s)

    def _update(self, state: HookState, now_s: float) -> None:
        """Keeps a state, with what the watcher itself sees of its process."""
        fractions = self._input_fractions.get(state.pid, [])
        # in the first trace, steps take batches that were prefetched while the graph was built
        fraction = statistics.fmean(fractions[1:] or fractions) if fractions else None
        life, cpu_s = read_life(state.pid), None
        idle_time = self._idle_times.setdefault(state.name, IdleTime())
        if life is not None:
            cpu_s = life.cpu_s
            idle_time.update(state, cpu_s, now_s, is_asleep=life.is_asleep)
        elif state.name in self._states:
            cpu_s = self._states[state.name].process_cpu_s
        idle_s = dict(idle_time.seconds)
        self._states[state.name] = dataclasses.replace(state, process_cpu_s=cpu_s, idle=idle_s, input_fraction=fraction)
        if life is None or state.values["ended"]:
            self._gone.add(state.name)

    def _read_traces(self) -> None:
        """Traces of TensorFlow's profiler: a text line with the seconds of the traced steps, then the trace."""
        for path in self._list(".trace")[:1]:
            with contextlib.suppress(ValueError, OSError):  # an unreadable trace does not change the fraction
                try:
                    header, _, trace = self._read(path, MAX_TRACE_BYTES).partition(b"\n")
                finally:
                    path.unlink()
                try:
                    fraction = input_wait_s(trace) / max(float(header), 1e-9)
                except ImportError as error:
                    unread = "traces of TensorFlow are not read, and waits for input not known"
                    self._unread_traces = f"; {unread}: {error} (pip install protobuf, where stoker is installed)"
                    continue
                self._input_fractions.setdefault(int(path.stem.split("-")[0]), []).append(min(1.0, fraction))

    def has_new_steps(self) -> bool:
        return any(breakdown.has_new_steps() for breakdown in self._ranks.values())

    def has_trained(self) -> bool:
        return any(breakdown.steps for breakdown in self._ranks.values())

    def _failures(self, path: Path) -> list[str]:
        try:
            return self._read(path, MAX_ERROR_BYTES).decode(errors="replace").splitlines()[:MAX_FAILURES]
        except OSError as error:
            return [f"{path.name} cannot be read: {error.strerror}"]

    def num_loader_workers(self) -> int | None:
        """Number of loader processes of a training process; None if not known."""
        counts = (state.values["workers"] for state in self._states.values() if state.values["steps"])
        return next((round(workers) for workers in counts if workers >= 0), None)

    def recompiled_function(self) -> tuple[str, str]:
        """(the function that was compiled again most often, why); empty: none, or not known."""
        found = ((state.recompiled, state.recompiled_why) for state in self._states.values() if state.recompiled)
        return next(found, ("", ""))

    def growing(self) -> list[dict[str, Any]]:
        """What holds the memory that grows, of the process that reported last (`stoker_hook/growth.py`)."""
        return describe_growth(next(reversed(list(self._reports(".growth", GrowingHolder))), []))

    def mistakes(self) -> list[dict[str, Any]]:
        """What the hook has reported (`stoker_hook/mistakes.py`), each kind once: `kind`, `place` and values."""
        found: dict[str, dict[str, Any]] = {}
        for report in self._reports(".mistakes", Mistake):
            for mistake in report:
                if isinstance(kind := mistake.get("kind"), str) and (kind in found or len(found) < MAX_KINDS):
                    found.setdefault(kind, mistake)
        return list(found.values())

    def handled_error(self, exit_code: int) -> list[str]:
        """The traceback of the error that a process handled only to end (`stoker_hook/exits.py`), of the first one that
        did so shortly before the job ended, with its exit code or under a launcher, which has 1; empty: none."""
        for path in self._oldest_first(".exit"):
            with contextlib.suppress(OSError, ValueError):  # it vanished, or the hook has not written it
                status, *lines = self._read(path, MAX_ERROR_BYTES).decode(errors="replace").splitlines()
                if time.time() - path.stat().st_mtime < MAX_EXIT_S and exit_code in (1, int(status) & 0xFF):
                    return lines
        return []

    def _list(self, ending: str) -> list[Path]:
        """Files of the hook with this ending, by the cheapest call: it is made several times a second."""
        try:
            return [self._directory / name for name in os.listdir(self._directory) if name.endswith(ending)]
        except OSError:  # there is no hook, or the folder is gone
            return []

    def _reports(self, ending: str, kind: type[Report]) -> Iterator[list[Report]]:
        """Reads files that are whole lists; those that are not what the hook writes are left out."""
        for path in self._oldest_first(ending):
            with contextlib.suppress(OSError, ValueError, RecursionError, msgspec.MsgspecError):
                yield msgspec.json.decode(self._read(path, MAX_ERROR_BYTES), type=list[kind])  # type: ignore[valid-type]

    def _oldest_first(self, ending: str) -> list[Path]:
        """The newest MAX_REPORTS. Files that vanish meanwhile are first."""

        def written_s(path: Path) -> float:
            with contextlib.suppress(OSError):
                return path.lstat().st_mtime
            return 0.0

        return sorted(self._list(ending), key=written_s)[-MAX_REPORTS:]

    @staticmethod
    def _read(path: Path, max_bytes: int) -> bytes:
        return regular_files.read_bytes(path, max_bytes=max_bytes, flags=regular_files.NO_LINKS)

    def next_windows(self, now_s: float, wall_s: float) -> dict[int, StepWindow]:
        """The window since the last one, for each rank that trains, the lowest first; before the first step, for the
        lowest rank with all devices. Empty if the job has no state file. now_s: CLOCK_MONOTONIC."""
        training = sorted(rank for rank, breakdown in self._ranks.items() if breakdown.steps)
        devices = max(1, self._devices // max(1, len(training)))
        windows = {
            rank: breakdown.next_window(now_s, wall_s, devices=devices) for rank, breakdown in self._ranks.items()
        }
        self._window_start_s = now_s
        for window in windows.values():
            window.ranks = max(1, len(training))
        return {rank: windows[rank] for rank in training or sorted(windows)[:1]}

    def status(self) -> str:
        """The status of this data source as text; begins with `not` if nothing was recorded."""
        trainers = [state for state in self._states.values() if state.values["steps"]]
        names = {name for state in trainers or self._states.values() for name in state.frameworks}
        frameworks = ", ".join(sorted(names))
        paths = itertools.islice(self._directory.glob("errors-*"), MAX_REPORTS)
        failures = "; ".join(sorted({line for path in paths for line in self._failures(path)}))
        failed = (f"; errors: {failures}" if failures else "") + self._unread_traces
        if trainers:
            loader_note = "" if all(state.values["batches"] for state in trainers) else ", without a known data loader"
            processes = "a process" if len(trainers) == 1 else f"{len(trainers)} processes"
            return f"recorded: {frameworks} in {processes}{loader_note}{failed}"
        if any(state.values["compile"] for state in self._states.values()):
            return f"recorded: compilations of {frameworks}; its steps are those of the output{failed}"
        if frameworks:
            return f"not recorded: {frameworks} was loaded, but no optimizer has stepped{failed}"
        if (self._directory / "loaded").exists():
            return f"not recorded: no process of the job has loaded torch or Keras{failed}"
        reasons = "it is not Python, runs with -I or -E, or sets another PYTHONPATH"
        return f"not recorded: no Python process of the job has loaded the hook ({reasons}){failed}"


@contextlib.contextmanager
def hook_state_dir(enabled: bool) -> Iterator[Path | None]:
    """A new folder for the state files of a job, removed at the end; None if not enabled, or if there is no space."""
    with contextlib.ExitStack() as stack:
        directory: Path | None = None
        if enabled:
            with contextlib.suppress(OSError):
                parent = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
                directory = stack.enter_context(temporary_folder(STATE_DIR_PREFIX, parent))
        yield directory


def add_hook_env(env: Mapping[str, str], directory: Path) -> dict[str, str]:
    path = env.get("PYTHONPATH")
    return {
        **env,
        "PYTHONPATH": f"{HOOK_DIR}{os.pathsep}{path}" if path else str(HOOK_DIR),
        "STOKER_HOOK": str(directory),
    }
