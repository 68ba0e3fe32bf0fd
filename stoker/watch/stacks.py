"""Samples the Python stacks of a watched job into stacks.jsonl (data source 1), and classifies them.

py-spy reads the stacks from outside, without stopping the job, also if the job is stopped. A sample takes some 20 ms of
a CPU, none of the job's; samples are so rare that this stays below MAX_CPU_FRACTION of a core. `classify` is a pure
function over py-spy's frames: `knowledge/frames.toml` has functions of frameworks by file and name; other frames are
the job's own code. If stacks cannot be read, the reason is reported once.
"""

import collections
import contextlib
import dataclasses
import linecache
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import psutil

from stoker.knowledge import read_toml
from stoker.profiling.telemetry.machine import list_process_tree
from stoker.runs.records import RANKS, STACKS, RunFolder
from stoker.runs.schemas import StackWindow

WINDOW_S = 10.0
"""Time of a line."""
SAMPLE_INTERVAL_S, STARTUP_SAMPLE_INTERVAL_S = 2.0, 0.8
"""Time between samples of a process: normally, and in the first STARTUP_S (there are few samples)."""
STARTUP_S = 120.0
STARTUP_CPU_S = 0.3
"""CPU-seconds for samples besides MAX_CPU_FRACTION: some twenty in the first seconds of a job."""
MAX_CPU_FRACTION = 0.01
"""Fraction of a core that sampling may take since its start: with more processes, or slower samples, the intervals are
longer. Half of the 2 % of a job that watching may cost (benchmarks/diagnosis/watch_overhead.py)."""
MAX_PROCESSES = 8
"""The busiest Python processes are sampled. Of a loader worker or a launcher one sample is enough."""
HELPER_RECHECK_POLLS = 12
"""Polls after which these are sampled again."""
MAX_FRAMES = 5
MAX_TREE = 512
"""Processes of a job that are looked at."""
PROCESS_POLL_S = 0.5
"""Time between polls for the first Python process of a job; then once in a window."""
MAX_FAILURES = 5
"""Failed samples of a process in a row, after which it is skipped until the next poll."""
DUMP_TIMEOUT_S = 10.0

PERMISSION_HINT = (
    "it needs the user of the job and kernel.yama.ptrace_scope 0, or root; in a container CAP_SYS_PTRACE: "
    "docker run --cap-add SYS_PTRACE"
)
RECORDED = "sampled by py-spy, from outside the job"

_PYTHON = re.compile(r"(^|/)(python|pypy)[\d.]*\w?$")
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables with the rank of a process: of torchrun, then of MPI and Slurm."""

KINDS = (
    "input_wait", "decode", "compute", "sync", "comm", "checkpoint", "compile", "gc", "python", "other", "idle",
)  # fmt: skip
"""Kinds of work of the main thread; docs/run-folder.md describes them."""

HELPER = "helper"
"""A process that does not train: a loader worker, a launcher. Not one of KINDS: such stacks do not count."""


class Frame(msgspec.Struct, frozen=True, rename={"function": "name", "file": "filename"}):
    """A frame in the JSON of py-spy; a stack has the innermost frame first. function: may include its class."""

    function: str
    file: str
    line: int


class FrameRule(NamedTuple):
    """A row of frames.toml, which explains the fields."""

    kind: str
    file: re.Pattern[str]
    function: re.Pattern[str]
    covers_callees: bool


def _rule(kind: str, file: str, function: str = ".+", covers_callees: bool = False) -> FrameRule:
    return FrameRule(kind, re.compile(f"(^|/)(?:{file})"), re.compile(f"(?:{function})$"), covers_callees)


_TABLE = read_toml("frames.toml")
WORKER_RULES, FRAME_RULES = ([_rule(**row) for row in _TABLE[name]] for name in ("worker", "frame"))
_LINE_PATTERNS = [(row["kind"], re.compile(row["pattern"])) for row in _TABLE["line"]]

_NOT_JOB_CODE = re.compile(r"/(site|dist)-packages/|/lib/python\d|^<|/torchinductor_|/profiling/hook/")


def is_python(pid: int) -> bool:
    """By the name of the program, else by whether Python's library is loaded."""
    try:
        if _PYTHON.search(os.readlink(f"/proc/{pid}/exe")):
            return True
        return re.search(r"/libpython\d", Path(f"/proc/{pid}/maps").read_text(errors="replace")) is not None
    except OSError:  # it ended, or may not be read
        return False


def is_alive(process: psutil.Process) -> bool:
    """Whether it has not ended; a zombie has ended."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def cpu_seconds(process: psutil.Process) -> float | None:
    """Of the process so far: all its threads, without its children; None: it ended."""
    try:
        return sum(process.cpu_times()[:2])
    except psutil.Error:
        return None


def find_py_spy() -> str | None:
    """The path of py-spy, next to this Python or on PATH; None: not installed."""
    sibling = Path(sys.executable).with_name("py-spy")
    return str(sibling) if sibling.exists() else shutil.which("py-spy")


class NotReadable(Exception):
    """py-spy returned no stack. The text is the reason; `forbidden`: it never will."""

    def __init__(self, reason: str, *, forbidden: bool = False) -> None:
        super().__init__(reason)
        self.forbidden = forbidden


class _PySpyThread(msgspec.Struct):
    """A thread in the JSON of py-spy."""

    pid: int
    active: bool
    frames: list[Frame]
    os_thread_id: int | None = None
    thread_name: str | None = None


_DECODER = msgspec.json.Decoder(list[_PySpyThread])


def dump_stacks(pid: int, py_spy: str) -> list[_PySpyThread]:
    """The current stacks of a process. Raises NotReadable."""
    command = [py_spy, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    env = {"PATH": os.environ.get("PATH", ""), "LANG": "C", "RUST_BACKTRACE": "0"}
    try:
        result = subprocess.run(
            command, capture_output=True, timeout=DUMP_TIMEOUT_S, env=env, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotReadable(f"py-spy: {error}") from error
    try:  # not its exit code: the watcher may have reaped it
        return _DECODER.decode(result.stdout)
    except msgspec.DecodeError as error:
        reason = result.stderr.decode(errors="replace").strip().partition("\n")[0]
        forbidden = "ermission" in reason or "not permitted" in reason
        if forbidden:
            reason = f"reading another process is not permitted here ({PERMISSION_HINT})"
        raise NotReadable(reason or "py-spy printed nothing", forbidden=forbidden) from error


@dataclasses.dataclass
class _StackSamples:
    """Samples of one process since the last line. start_cpu_s: its CPU-seconds at start_s; is_training: a sample was
    not of a helper process or an import."""

    pid: int
    rank: int
    cwd: str
    start_s: float
    start_cpu_s: float = 0.0
    is_training: bool = False
    failures: int = 0
    main_thread: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    frames: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, threads: list[_PySpyThread]) -> bool:
        """Adds a sample; False if the process is a helper."""
        main_thread = next((t for t in threads if t.os_thread_id == self.pid or t.thread_name == "MainThread"), None)
        if main_thread is None:
            return True  # it is starting or ending
        stack = [
            Frame(f.function, f.file if f.file.startswith("<") else os.path.join(self.cwd, f.file), f.line)
            for f in main_thread.frames  # older Pythons keep relative file names
        ]
        kind = classify(stack, active=main_thread.active)
        if kind == HELPER and not self.is_training:
            return False
        self.is_training |= kind not in ("other", "idle")  # a launcher imports the framework, too
        self.main_thread["idle" if kind == HELPER else kind] += 1
        if (job_frame := innermost_job_frame(stack, self.cwd)) is not None:
            self.frames[job_frame] += 1
        return True

    def make_window(self, now_s: float, attempt: int, cpu_s: float | None) -> StackWindow | None:
        """The window of the samples, None without samples; starts the next one. cpu_s: of the process so far; None: it
        ended."""
        wall_s, samples = max(0.0, now_s - self.start_s), self.main_thread.total()
        window = None
        if samples:
            window = StackWindow(
                t=now_s, attempt=attempt, pid=self.pid, wall_s=wall_s, samples=samples,
                main_thread={kind: count / samples for kind, count in self.main_thread.most_common()},
                frames={name: count / samples for name, count in self.frames.most_common(MAX_FRAMES)},
                process_cpu=(cpu_s - self.start_cpu_s) / wall_s if cpu_s is not None and wall_s > 0 else None,
            )  # fmt: skip
        self.start_s, self.start_cpu_s = now_s, cpu_s or 0.0
        self.main_thread.clear()
        self.frames.clear()
        return window


class StackSampler:
    """Samples a job's Python processes inside a `with` block, in a thread.

    pid: the root of the job; on_unavailable: called once, with the reason, if stacks are not recorded; training_ranks:
    PID → rank of the live processes that train, as far as the hook knows them; then only these are sampled, and not a
    launcher that waits for them.
    """

    def __init__(
        self,
        folder: RunFolder,
        pid: int,
        *,
        on_unavailable: Callable[[str], None],
        training_ranks: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        self._folder = folder
        self._pid = pid
        self._on_unavailable = on_unavailable
        self._training_ranks = training_ranks
        self._windows: dict[psutil.Process, _StackSamples] = {}
        self._cpu_s: dict[psutil.Process, float] = {}
        self._is_python: dict[psutil.Process, bool] = {}
        self._helpers: set[psutil.Process] = set()
        self._num_polls = 0
        self._any_sampled = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._thread_main, name="stacks", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5.0)  # a thread that hangs is abandoned

    def _thread_main(self) -> None:
        try:
            self._sample_until_stopped()
        except Exception as error:  # noqa: BLE001 (the job goes on, and an event says so)
            self._on_unavailable(f"not recorded from here on: {type(error).__name__}: {error}")

    def _sample_until_stopped(self) -> None:
        py_spy = find_py_spy()
        if py_spy is None:
            self._on_unavailable("not recorded: py-spy is not installed")
            return
        next_poll_s, cost_s, spent_s, last_failure = 0.0, 0.0, 0.0, "no Python process of the job was seen"
        queue: collections.deque[psutil.Process] = collections.deque()
        wait_s, start_s = 0.0, time.monotonic()
        while not self._stop.wait(wait_s):
            now_s = time.monotonic()
            if now_s >= next_poll_s:
                queue = collections.deque(self._busiest_processes())
                next_poll_s = now_s + (WINDOW_S if queue else PROCESS_POLL_S)
            self._write_windows(time.time(), min_s=WINDOW_S)
            if not queue:
                wait_s = PROCESS_POLL_S
                continue
            queue.rotate(-1)
            process = queue[-1]
            window = self._windows[process]
            cpu_before_s = _children_cpu_s()
            try:
                if not window.add(dump_stacks(window.pid, py_spy)):
                    self._helpers.add(queue.pop())
                    del self._windows[process]
                    next_poll_s = next_poll_s if queue else now_s + PROCESS_POLL_S  # only helpers were sampled
                window.failures = 0
                self._any_sampled = True
            except NotReadable as error:
                window.failures += 1
                last_failure = str(error)
                if error.forbidden:
                    self._on_unavailable(f"not recorded: {error}")
                    return
                if window.failures >= MAX_FAILURES or not is_alive(queue[-1]):
                    queue.pop()
            sample_cpu_s = _children_cpu_s() - cpu_before_s
            spent_s += sample_cpu_s
            cost_s = max(cost_s * 0.9, sample_cpu_s)  # decreases slowly after a costly sample
            interval_s = STARTUP_SAMPLE_INTERVAL_S if now_s - start_s < STARTUP_S else SAMPLE_INTERVAL_S
            wait_s = max(interval_s / max(1, len(queue)), _affordable_after_s(spent_s + cost_s, now_s - start_s))
        self._write_windows(time.time(), min_s=0.0)
        if not self._any_sampled:
            self._on_unavailable(f"not recorded: {last_failure}")

    def _busiest_processes(self) -> list[psutil.Process]:
        """The busiest Python processes since the last poll. Windows of ended processes are kept until they are
        written."""
        self._num_polls += 1
        if self._num_polls % HELPER_RECHECK_POLLS == 0:  # a launcher may train now
            self._helpers.clear()
        cpu_s: dict[psutil.Process, float] = {}
        for pid in list_process_tree(self._pid, limit=MAX_TREE):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                process = psutil.Process(pid)
                # a process without CPU time may have called exec since
                if process not in self._is_python or not self._cpu_s.get(process):
                    self._is_python[process] = is_python(pid)
                if self._is_python[process] and is_alive(process):
                    cpu_s[process] = cpu_seconds(process) or 0.0
        trainers = self._training_ranks()
        candidates = [process for process in cpu_s if process.pid in trainers]
        if not candidates:  # not known yet, or never: no hook
            candidates = [process for process in cpu_s if process not in self._helpers]
        busiest = sorted(candidates, key=lambda process: self._cpu_s.get(process, 0.0) - cpu_s[process])[:MAX_PROCESSES]
        self._cpu_s = cpu_s
        self._is_python = {process: is_python for process, is_python in self._is_python.items() if process in cpu_s}
        for process in busiest:
            if process not in self._windows:
                self._windows[process] = _new_samples(process, cpu_s[process])
            samples = self._windows[process]
            samples.rank = trainers.get(process.pid, samples.rank)  # children of `mp.spawn` have no RANK
        return busiest

    def _write_windows(self, now_s: float, *, min_s: float) -> None:
        """Writes the windows that are long enough."""
        for process, samples in list(self._windows.items()):
            if now_s - samples.start_s < min_s:
                continue
            is_running = is_alive(process)
            window = samples.make_window(now_s, self._folder.attempt, cpu_seconds(process) if is_running else None)
            if window is not None:
                name = STACKS if samples.rank == 0 else f"{RANKS}/{samples.rank:04d}/{STACKS}"
                (self._folder.path / name).parent.mkdir(parents=True, exist_ok=True)
                self._folder.append(name, window)
            elif not is_running:
                del self._windows[process]


def _new_samples(process: psutil.Process, cpu_s: float) -> _StackSamples:
    env: dict[str, str] = {}
    cwd = ""
    with contextlib.suppress(psutil.Error):  # it ended, or may not be read
        env, cwd = process.environ(), process.cwd()
    rank = next((int(env[name]) for name in _RANK_VARIABLES if env.get(name, "").isdecimal()), 0)
    return _StackSamples(process.pid, rank, cwd, time.time(), cpu_s)


def _affordable_after_s(cost_s: float, elapsed_s: float) -> float:
    """Seconds until the samples so far and the next one, of cost_s CPU-seconds in total, are within the budget; at most
    a minute, because one costly sample must not end the sampling."""
    return min(60.0, (cost_s - STARTUP_CPU_S) / MAX_CPU_FRACTION - elapsed_s)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def is_job_code(frame: Frame) -> bool:
    """Whether the frame is in a file of the job: not installed, not of Python itself, not generated."""
    return bool(frame.file) and _NOT_JOB_CODE.search(frame.file) is None


def classify(stack: Sequence[Frame], *, active: bool) -> str:
    """The kind of work of a thread: one of KINDS or HELPER. stack: innermost frame first; active: it is runnable."""
    if any(_matches(rule, frame) for rule in WORKER_RULES for frame in stack):
        return HELPER
    if _is_importing(stack):
        return "other"
    rules = [_find_rule(frame) for frame in stack]
    kinds = [rule.kind for rule in rules if rule is not None]
    covering_kind = next((rule.kind for rule in reversed(rules) if rule is not None and rule.covers_callees), None)
    if (
        covering_kind == "input_wait"
        and kinds
        and (kinds[0] == "decode" or _kind_from_source_line(stack[0]) == "decode")
    ):
        return "decode"  # a loader without workers: the training thread decodes
    if covering_kind is not None:
        return covering_kind
    if stack and (line_kind := _kind_from_source_line(stack[0])) is not None:
        return line_kind
    if kinds:
        return kinds[0]
    if not active:
        return "idle"
    return "python" if any(is_job_code(frame) for frame in stack) else "other"


def innermost_job_frame(stack: Sequence[Frame], cwd: str = "") -> str | None:
    """`function (file:line)` of the innermost frame in a file of the job, relative to its working directory `cwd`."""
    for frame in stack:
        if is_job_code(frame):
            name = frame.function.rpartition("<locals>.")[2]
            file = frame.file
            if cwd and file.startswith(cwd.rstrip("/") + "/"):
                file = file[len(cwd.rstrip("/")) + 1 :]
            elif file.count("/") > 2:
                file = "/".join(file.split("/")[-3:])
            return f"{name} ({file}:{frame.line})"
    return None


def _is_importing(stack: Sequence[Frame]) -> bool:
    """Whether an installed module is being imported."""
    for frame in stack:
        if is_job_code(frame):
            return False
        if _base_name(frame.function) == "_find_and_load":
            return True
    return False


def _find_rule(frame: Frame) -> FrameRule | None:
    if frame.function == "<module>" and "importlib" not in frame.file:  # code of an import is not training
        return None
    return next((rule for rule in FRAME_RULES if _matches(rule, frame)), None)


def _matches(rule: FrameRule, frame: Frame) -> bool:
    return rule.file.search(frame.file) is not None and rule.function.match(_base_name(frame.function)) is not None


def _base_name(function: str) -> str:
    """The function's name without its class and enclosing functions."""
    return function.rpartition(".")[2]


def _kind_from_source_line(frame: Frame) -> str | None:
    """The kind by the text of the source line, if the frame is in a file of the job."""
    if not is_job_code(frame) or not frame.file.startswith("/") or not frame.file.isprintable():
        return None
    text = linecache.getline(frame.file, frame.line)
    return next((kind for kind, pattern in _LINE_PATTERNS if pattern.search(text)), None)
