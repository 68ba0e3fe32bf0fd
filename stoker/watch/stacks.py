"""Tier 1 of a watched job: where its threads are, by samples of their Python stacks, into stacks.jsonl.

py-spy reads the stacks from outside, without stopping the job, and also of one that is stopped. A sample costs some
20 ms of a processor, none of the job's; samples are taken so seldom that this stays below COST_MOST of a core. What a
stack means is `frames.py`. What cannot be read is said once, with the reason.
"""

import collections
import dataclasses
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from stoker.profiling.telemetry.sampler import Witness
from stoker.runs.records import RANKS, STACKS, RunFolder
from stoker.runs.schemas import StackWindow
from stoker.watch import processes
from stoker.watch.frames import HELPER, Frame, classify, innermost_own

WINDOW_S = 10.0
"""Time that a line covers."""
EVERY_S, IDLE_EVERY_S, YOUNG_EVERY_S = 2.0, 1.0, 0.8
"""From sample to sample of a process; the shorter ones while the GPUs idle, when there is something to explain, and in
the first YOUNG_S, when few samples would be all that is known. Samples are taken of busy times too: a share is of all
the time."""
YOUNG_S = 120.0
IDLE_BELOW = 0.5
"""Utilisation of the GPUs, by the driver, below which they count as idle."""
COST_MOST = 0.025
"""Share of a core that sampling may take: with more processes, or slower samples, each is sampled more seldom."""
PROCESSES_MOST = 8
"""Python processes that are sampled, the busiest ones. Of a loader's worker or a launcher one sample is enough."""
HELPERS_AGAIN = 12
"""Looks after which these are asked once more."""
FRAMES_MOST = 5
LOOK_S = 0.5
"""Time between looks for the first Python process of a job; then once in a window."""
FAILURES_MOST = 5
"""Failed samples of a process in a row after which it is left alone until the next look."""
DUMP_TIMEOUT_S = 10.0

RECORDED = "sampled by py-spy, from outside the job"


def program() -> str | None:
    """py-spy's, beside this Python or on the path; None: it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


class NotReadable(Exception):
    """py-spy gave no stack. The text is its reason; `forbidden`: it never will."""

    def __init__(self, reason: str, *, forbidden: bool = False) -> None:
        super().__init__(reason)
        self.forbidden = forbidden


class _Told(msgspec.Struct):
    """A frame in py-spy's JSON."""

    name: str
    filename: str
    line: int


class _Thread(msgspec.Struct):
    """A thread in it."""

    pid: int
    active: bool
    frames: list[_Told]
    os_thread_id: int | None = None
    thread_name: str | None = None


_DECODER = msgspec.json.Decoder(list[_Thread])


def dump(pid: int, spy: str) -> list[_Thread]:
    """The stacks of a process now. Raises NotReadable."""
    command = [spy, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    variables = {"PATH": os.environ.get("PATH", ""), "LANG": "C", "RUST_BACKTRACE": "0"}
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=DUMP_TIMEOUT_S, env=variables, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotReadable(f"py-spy: {error}") from error
    try:  # its exit code may be gone: whoever watches the job waits for all children
        return _DECODER.decode(done.stdout)
    except msgspec.DecodeError as error:
        reason = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        forbidden = "ermission" in reason or "not permitted" in reason
        if forbidden:
            reason = f"reading another process is not permitted here ({_why_forbidden(pid)})"
        raise NotReadable(reason or "py-spy said nothing", forbidden=forbidden) from error


def _why_forbidden(pid: int) -> str:
    """What the kernel's rule is (ptrace(2), access mode checking)."""
    try:
        owner = (processes.PROC / str(pid)).stat().st_uid
    except OSError:  # it ended
        return "the process is gone"
    if owner != os.geteuid() != 0:
        return "the process belongs to another user"
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if scope.exists() and scope.read_text().strip() != "0":
        return f"kernel.yama.ptrace_scope is {scope.read_text().strip()}; 0, root or CAP_SYS_PTRACE would do"
    return "a container needs CAP_SYS_PTRACE for that: docker run --cap-add SYS_PTRACE"


@dataclasses.dataclass
class _Window:
    """Samples of one process since the line before. `trains`: it was seen doing something else than helping."""

    pid: int
    rank: int
    folder: str
    since_s: float
    trains: bool = False
    failures: int = 0
    samples: int = 0
    active: int = 0
    main: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    frames: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, threads: list[_Thread]) -> bool:
        """Whether it may train: False of a helper."""
        main = next((t for t in threads if t.os_thread_id == self.pid or t.thread_name == "MainThread"), None)
        if main is None:
            return True  # it begins or ends
        stack = [Frame(frame.name, self._absolute(frame.filename), frame.line) for frame in main.frames]
        kind = classify(stack, active=main.active)
        if kind == HELPER and not self.trains:
            return False
        self.trains = True
        self.samples += 1
        self.active += sum(thread.active for thread in threads)
        self.main["idle" if kind == HELPER else kind] += 1
        if (own := innermost_own(stack, self.folder)) is not None:
            self.frames[own] += 1
        return True

    def line(self, now_s: float, attempt: int) -> StackWindow:
        """Of the samples; it begins the next window."""
        window = StackWindow(
            t=now_s, attempt=attempt, pid=self.pid, wall_s=max(0.0, now_s - self.since_s), samples=self.samples,
            main={kind: count / self.samples for kind, count in self.main.most_common()},
            frames={name: count / self.samples for name, count in self.frames.most_common(FRAMES_MOST)},
            active_threads=self.active / self.samples,
        )  # fmt: skip
        self.since_s, self.samples, self.active = now_s, 0, 0
        self.main.clear()
        self.frames.clear()
        return window

    def _absolute(self, file: str) -> str:
        """Older Pythons keep the name as it was given."""
        return file if file.startswith(("/", "<")) or not self.folder else os.path.join(self.folder, file)


class Stacks:
    """Samples a job's Python processes inside a `with` block, in a thread.

    pid: the root of the job; tell: called once, with the reason, when this tier is not recorded; witness: says whether
    the GPUs idle.
    """

    def __init__(self, folder: RunFolder, pid: int, *, witness: Witness, tell: Callable[[str], None]) -> None:
        self._folder = folder
        self._pid = pid
        self._witness = witness
        self._tell = tell
        self._windows: dict[processes.Process, _Window] = {}
        self._ticks: dict[processes.Process, int] = {}
        self._is_python: dict[processes.Process, bool] = {}
        self._helpers: set[processes.Process] = set()
        self._looks = 0
        self._seen = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stacks", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(5.0)  # one that hangs is left behind

    def _watch(self) -> None:
        try:
            self._sample_until_stopped()
        except Exception as error:  # noqa: BLE001 (the job goes on, and the run says so)
            self._tell(f"not recorded from here on: {type(error).__name__}: {error}")

    def _sample_until_stopped(self) -> None:
        spy = program()
        if spy is None:
            self._tell("not recorded: py-spy is not installed")
            return
        look_s, cost_s, last_failure = 0.0, 0.0, "no Python process of the job was seen"
        turn: collections.deque[processes.Process] = collections.deque()
        wait_s, began_s = 0.0, time.monotonic()
        while not self._stop.wait(wait_s):
            now_s = time.monotonic()
            if now_s >= look_s:
                turn = collections.deque(self._choose())
                look_s = now_s + (WINDOW_S if turn else LOOK_S)
            self._write(time.time(), least_s=WINDOW_S)
            if not turn:
                wait_s = LOOK_S
                continue
            turn.rotate(-1)
            window = self._windows[turn[-1]]
            spent_s = _children_cpu_s()
            try:
                if not window.add(dump(window.pid, spy)):
                    self._helpers.add(turn.pop())
                    look_s = look_s if turn else now_s + LOOK_S  # all places were taken by helpers
                window.failures = 0
                self._seen = True
            except NotReadable as error:
                window.failures += 1
                last_failure = str(error)
                if error.forbidden:
                    self._tell(f"not recorded: {error}")
                    return
                if window.failures >= FAILURES_MOST or not turn[-1].lives():
                    turn.pop()
            cost_s = max(cost_s * 0.9, _children_cpu_s() - spent_s)  # falls slowly after one that was dear
            every_s = IDLE_EVERY_S if self._is_idle() else EVERY_S
            every_s = min(every_s, YOUNG_EVERY_S) if now_s - began_s < YOUNG_S else every_s
            wait_s = max(every_s / max(1, len(turn)), min(cost_s, 1.0) / COST_MOST)
        self._write(time.time(), least_s=0.0)
        if not self._seen:
            self._tell(f"not recorded: {last_failure}")

    def _choose(self) -> list[processes.Process]:
        """The busiest Python processes since the last look. Windows of those that are gone stay, to be written."""
        self._looks += 1
        if self._looks % HELPERS_AGAIN == 0:  # a launcher may have begun to train
            self._helpers.clear()
        spent: dict[processes.Process, int] = {}
        for pid in processes.tree(self._pid):
            seen = processes.status(pid)
            if seen is None or seen.state in "ZX":
                continue
            one = processes.Process(pid, seen.began)
            if one not in self._is_python or not self._ticks.get(one):  # it may have become another program since
                self._is_python[one] = processes.is_python(pid)
            if self._is_python[one]:
                spent[one] = seen.ticks
        known = [one for one in spent if one not in self._helpers]
        busy = sorted(known, key=lambda one: self._ticks.get(one, 0) - spent[one])[:PROCESSES_MOST]
        self._ticks = spent
        self._is_python = {one: told for one, told in self._is_python.items() if one in spent}
        for one in busy:
            if one not in self._windows:
                self._windows[one] = _Window(one.pid, processes.rank(one.pid), _folder_of(one.pid), time.time())
        return busy

    def _write(self, now_s: float, *, least_s: float) -> None:
        """Lines of the windows that are long enough."""
        for one, window in list(self._windows.items()):
            if now_s - window.since_s < least_s:
                continue
            if window.samples:
                name = STACKS if window.rank == 0 else f"{RANKS}/{window.rank:04d}/{STACKS}"
                (self._folder.path / name).parent.mkdir(parents=True, exist_ok=True)
                self._folder.append(name, window.line(now_s, self._folder.attempt))
            elif not one.lives():
                del self._windows[one]
            else:
                window.since_s = now_s

    def _is_idle(self) -> bool:
        """Whether the driver says that the GPUs have little to do; without a GPU nobody says so."""
        sample = self._witness.last
        used = [gpu.utilisation for gpu in sample.gpus if gpu.utilisation is not None] if sample is not None else []
        return bool(used) and sum(used) / len(used) < IDLE_BELOW


def _folder_of(pid: int) -> str:
    try:
        return os.readlink(processes.PROC / str(pid) / "cwd")
    except OSError:  # it ended, or may not be looked at
        return ""


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
