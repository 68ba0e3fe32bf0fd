"""Samples the Python stacks of a watched or measured job into stacks.jsonl (data source 1), and classifies them.

`py-spy record` reads the stacks from outside, without stopping the job, also if the job is stopped: one process of it
for each training process, and one for a loader worker in turn. A window of 100 samples takes some 40 ms of a CPU, none
of the job's; there are so many samples that this stays below MAX_CPU_FRACTION of a core. `classify` is a pure function
over py-spy's frames: `knowledge/frames.toml` has functions of frameworks by file and name; other frames are the job's
own code, and `find_place` says in which of its lines the thread was. `calls.py` reads what such a line calls. If stacks
cannot be read, the reason is reported once.
"""

import collections
import contextlib
import ctypes
import functools
import linecache
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil

from stoker.knowledge import read_toml
from stoker.profiling.calls import find_call
from stoker.profiling.telemetry.machine import list_process_tree
from stoker.runs.records import RANKS, STACKS, RunFolder
from stoker.runs.schemas import Place, StackWindow

WINDOW_S, FIRST_WINDOW_S = 10.0, 2.0
"""Time of a line; the first one of a process is short, because only its stacks tell whether it trains."""
RATES_HZ = (10, 4, 2, 1)
"""Samples a second of a training of stoker's own: the first that costs less than it may."""
WINDOWS = ((10, 1), (4, 1), (4, 2), (2, 2), (1, 2))
"""(samples a second, times WINDOW_S): the next is used if windows cost more than they may. A start of py-spy costs as
much as 70 samples, so a longer window saves more than a lower rate."""
MAX_CPU_FRACTION = 0.01
"""Fraction of a core that sampling may take: py-spy and the thread that reads what it writes. Half of the 2 % of a job
that watching may cost (benchmarks/diagnosis/watch_overhead.py)."""
COST_S = 0.05
"""CPU-seconds of a window of WINDOW_S at 10 Hz, as of a loop in PyTorch, until it is known. Windows of imports, whose
stacks are deep and new, say nothing of it."""
OWN_CPU_FRACTION, PRIOR_S = 0.003, 60.0
"""What that thread takes, and the time for which it counts as measured: the first windows cost more, because functions
and files are new in them, and would lower the rate of a job of a minute to its end."""
REPAY_S = 30.0
"""Time over which CPU time that was taken beyond that is saved again."""
MAX_WINDOW_S = 60.0
"""Windows are at most so long, also where even the lowest rate costs too much."""
MAX_PROCESSES = 8
"""The busiest Python processes are sampled, besides one loader worker."""
HELPER_RECHECK_S = 120.0
"""Time after which a process that waited for others is sampled again: it may train now."""
MAX_FRAMES = 5
MAX_PLACES = 40
"""Places of a line; the rest is one sum."""
MAX_TREE = 512
"""Processes of a job that are looked at."""
PROCESS_POLL_S, TICK_S = 2.0, 0.2
"""Time between polls of the processes, a tenth of that until one was sampled; between looks at windows."""
MAX_FAILURES = 5
"""Windows of a process without a sample in a row, after which it is skipped."""
STOP_TIMEOUT_S = 2.0
"""For py-spy to write what it has, once the job or the watcher ends."""

PERMISSION_HINT = (
    "it needs the user of the job and kernel.yama.ptrace_scope 0, or root; in a container CAP_SYS_PTRACE: "
    "docker run --cap-add SYS_PTRACE"
)
RECORDED = "sampled by py-spy, from outside the job"

_PR_SET_PTRACER = 0x59616D61
"""linux/prctl.h."""
_PYTHON = re.compile(r"(^|/)(python|pypy)[\d.]*\w?$")
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables with the rank of a process: of torchrun, then of MPI and Slurm."""

KINDS = (
    "input_wait", "decode", "compute", "sync", "comm", "checkpoint", "compile", "gc", "python", "other", "idle",
)  # fmt: skip
"""Kinds of work of the main thread; docs/run-folder.md describes them."""

HELPER = "helper"
"""A process that does not train: a loader worker, a launcher. Not one of KINDS."""


class Frame(NamedTuple):
    """A frame of py-spy; a stack has the innermost frame first. function: may include its class."""

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
WORKER_RULES, FRAME_RULES, IDLE_RULES, PART_RULES = (
    [_rule(**row) for row in _TABLE[name]] for name in ("worker", "frame", "idle", "part")
)
_LINE_PATTERNS = [(row["kind"], re.compile(row["pattern"])) for row in _TABLE["line"]]

PACKAGE_ROOT = "/site-packages/stoker/"
"""How the files of a training of stoker's own begin (`training/own_stacks.py`)."""

_LOADER_FILE = re.compile(r"/torch/utils/data/")
_CONSOLE_SCRIPT = re.compile(r"/bin/[^/.]+$")
_RECORDER_FILE = re.compile(r"/stoker/profiling/")
_PACKAGE = re.compile(r"/(?:site|dist)-packages/(\w+)")
_NOT_JOB_CODE = re.compile(r"/(site|dist)-packages/|/lib/python\d|^<|/torchinductor_|/stoker/profiling/")


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


def allow_reading(pid: int) -> None:
    """Lets a process and its descendants read the memory of this one, where Yama permits that to ancestors only."""
    with contextlib.suppress(OSError):  # a kernel without Yama, which allows it anyway
        if Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip() == "1":
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


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


Stack = list[Frame]
Samples = list[tuple[Stack, int]]
"""Stacks of a main thread, each with its number of samples."""

_RAW_LINE = re.compile(r"thread \((\w+)\)(?:: ([^;]*))?;(.*) (\d+)")
_RAW_FRAME = re.compile(r"(.*?) \((.*?)(?::(\d+))?\)")


def parse_samples(text: str, pid: int, cwd: str = "") -> tuple[Samples, dict[int, Samples]]:
    """(the stacks of the main thread, kernel's ID → those of each other thread) in py-spy's raw format: a line is
    `thread (ID): NAME;FRAME;FRAME 7`, the outermost frame first. cwd: older Pythons keep relative file names."""
    main: Samples = []
    others: dict[int, Samples] = {}
    for line in text.splitlines():
        match = _RAW_LINE.fullmatch(line)
        if match is None:
            continue
        is_main = match[1] == str(pid) or match[2] == "MainThread"
        if not is_main and not match[1].isdecimal():  # not the kernel's ID
            continue
        frames = [found for frame in match[3].split(";") if (found := _RAW_FRAME.fullmatch(frame)) is not None]
        stack = [
            Frame(found[1], found[2] if found[2].startswith("<") else os.path.join(cwd, found[2]), int(found[3] or 0))
            for found in reversed(frames)
        ]
        (main if is_main else others.setdefault(int(match[1]), [])).append((stack, int(match[4])))
    return main, others


def working_threads(others: Mapping[int, Samples], total: int, find_runnable: Callable[[int], float | None]) -> Samples:
    """The samples in which threads besides the main one worked in the job's own code, filled up to `total`, those of
    the main thread. find_runnable: fraction of the time in which a thread could run, None if it ended; where that is
    much less, it waits in a function that no rule knows."""
    found: Samples = []
    for thread, samples in others.items():
        own = [(stack, count) for stack, count in samples
               if any(map(is_job_code, stack)) and classify(stack, active=True) != "idle"]  # fmt: skip
        if own and (find_runnable(thread) or 0.0) * total >= sum(count for _, count in own) / 2:
            found += own
    if found and (rest := total - sum(count for _, count in found)) > 0:
        found.append(([], rest))
    return found


class _Process:
    """A Python process of the job. role: of `StackWindow`, HELPER, or empty: not known yet."""

    def __init__(self, process: psutil.Process) -> None:
        self.process = process
        self.pid = process.pid
        self.role = ""
        self.cpu_s = 0.0
        self.recent_cpu_s = 0.0
        """Since the poll before the newest one."""
        self.failures = 0
        self.is_new = True
        """It has no window yet."""
        self.trains = False
        """The hook has counted a step of it."""
        self.sampled_s = 0.0
        """Monotonic time at which its newest window began."""
        env: dict[str, str] = {}
        self.cwd, self.parent = "", 0
        with contextlib.suppress(psutil.Error):  # it ended, or may not be read
            env, self.cwd, self.parent = process.environ(), process.cwd(), process.ppid()
        self.rank = next((int(env[name]) for name in _RANK_VARIABLES if env.get(name, "").isdecimal()), 0)


class _Recording:
    """A window that py-spy records: a process of its own, which writes into memory when it ends. Raises OSError."""

    def __init__(self, target: _Process, py_spy: str, rate_hz: int) -> None:
        self.target, self.rate_hz, self.trains = target, rate_hz, target.trains
        self.start_s, self.start_t = time.monotonic(), time.time()
        self._start_cpu_s, self._start_runnable_s = cpu_seconds(target.process), _runnable_seconds(target.pid)
        self._end_runnable_s = self._start_runnable_s
        self._start_threads_s = {thread: _runnable_seconds(target.pid, thread) for thread in _list_threads(target.pid)}
        self.cpu_s: float | None = None
        """CPU-seconds that py-spy took, once it has ended."""
        self.is_ending = False
        with contextlib.ExitStack() as stack:
            self._output, self._errors = (os.memfd_create(name) for name in ("stacks", "errors"))
            for fd in (self._output, self._errors):
                stack.callback(os.close, fd)
            command = [
                py_spy, "record", "--pid", str(target.pid), "--rate", str(rate_hz), "--nonblocking",
                "--duration", str(int(2 * MAX_WINDOW_S)), "--idle", "--threads", "--format", "raw", "--full-filenames",
                "--output", f"/proc/{os.getpid()}/fd/{self._output}",
            ]  # fmt: skip
            env = {"PATH": os.environ.get("PATH", ""), "LANG": "C", "RUST_BACKTRACE": "0"}
            actions = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1)]
            # the watcher's own threads block signals: py-spy must get the one that ends the window
            self.pid = os.posix_spawn(
                py_spy, command, env,
                file_actions=[*actions, (os.POSIX_SPAWN_DUP2, self._errors, 2)], setpgroup=0, setsigmask=[],
            )  # fmt: skip
            stack.pop_all()

    def age_s(self) -> float:
        return time.monotonic() - self.start_s

    def end(self, signal_number: int = signal.SIGINT) -> None:
        """Lets it write what it has, and end."""
        self.is_ending = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal_number)

    def has_ended(self) -> bool:
        if self.cpu_s is not None:
            return True
        self._end_runnable_s = _runnable_seconds(self.target.pid) or self._end_runnable_s
        try:
            pid, _, usage = os.wait4(self.pid, os.WNOHANG)
        except ChildProcessError:  # the measured job has waited for all its children
            self.cpu_s = 0.0
            return True
        if pid:
            self.cpu_s = usage.ru_utime + usage.ru_stime
        return pid != 0

    def read(self) -> tuple[Samples, dict[int, Samples], str]:
        """(the samples, those of other threads, or the reason why there are none), once it has ended."""
        texts = []
        for fd in (self._output, self._errors):
            with os.fdopen(fd, "rb") as file:
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        samples, others = parse_samples(texts[0], self.target.pid, self.target.cwd)
        lines = [line for line in texts[1].splitlines() if line.strip() and not line.startswith("py-spy>")]
        return samples, others, "" if samples else next(iter(lines), "py-spy saw no main thread")

    def cpu_fractions(self, end_s: float) -> tuple[float | None, float | None]:
        """Cores that the process used, and the fraction of the time in which its main thread ran or waited for a core;
        None: it ended, or it is not known. end_s: monotonic time."""
        wall_s, cpu_s = end_s - self.start_s, cpu_seconds(self.target.process)
        process_cpu, runnable = None, None
        if wall_s > 0 and cpu_s is not None and self._start_cpu_s is not None and is_alive(self.target.process):
            process_cpu = max(0.0, cpu_s - self._start_cpu_s) / wall_s
        if wall_s > 0 and self._start_runnable_s is not None and self._end_runnable_s is not None:
            runnable = (self._end_runnable_s - self._start_runnable_s) / wall_s
        return process_cpu, runnable

    def thread_runnable(self, thread: int) -> float | None:
        """The fraction of the window in which a thread ran or waited for a core; None: it ended."""
        seconds, wall_s = _runnable_seconds(self.target.pid, thread), max(1e-3, time.monotonic() - self.start_s)
        return None if seconds is None else (seconds - (self._start_threads_s.get(thread) or 0.0)) / wall_s


def _list_threads(pid: int) -> list[int]:
    """The kernel's IDs of the threads of a process; empty: it ended."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []


def _runnable_seconds(pid: int, thread: int | None = None) -> float | None:
    """Seconds in which a thread (None: the main one) ran or waited for a core; None: it ended, or the kernel does not
    count them."""
    try:
        running_ns, waiting_ns, _ = Path(f"/proc/{pid}/task/{thread or pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return (int(running_ns) + int(waiting_ns)) / 1e9


def find_role(samples: Samples) -> str:
    """The role of a process by its stacks: "training", "worker", HELPER; empty: they tell nothing, as an import."""
    counts: collections.Counter[str] = collections.Counter()
    for stack, count in samples:
        rule = _find_worker_rule(stack)
        kind = rule.kind if rule is not None else classify(stack, active=False)
        if rule is not None or kind == HELPER:
            counts["worker" if kind == "worker" else HELPER] += count
        elif kind not in ("other", "idle"):  # a launcher imports the framework, too
            counts["training"] += count
    if counts["training"]:  # also one that was a fork a moment ago, or starts processes
        return "training" if counts["training"] >= counts["worker"] else "worker"
    return next((role for role in ("worker", HELPER) if counts[role]), "")


def make_window(
    samples: Samples, *, role: str, cwd: str = "", runnable: float | None = None, **fields: Any
) -> StackWindow | None:
    """The line of some samples; None without any. runnable: fraction of the time in which the thread could run;
    fields: further ones of `StackWindow`."""
    places: collections.Counter[tuple[str, str, str, str, str, str]] = collections.Counter()
    frames: collections.Counter[str] = collections.Counter()
    total = sum(count for _, count in samples)
    if not total:
        return None
    kinds: list[tuple[Stack, int, str]] = []
    for stack, count in samples:
        inner = _inside_worker(stack) if role == "worker" else stack
        kind = classify(inner, active=False)
        kinds.append((inner, count, "idle" if kind == HELPER else kind))
    # Of frames that no rule knows, py-spy does not say whether they wait: the CPU time that is left for them does.
    unknown = sum(count for stack, count, kind in kinds if kind == "idle" and not _is_waiting(stack))
    busy = sum(count for _, count, kind in kinds if kind in ("compute", "decode", "compile"))
    active = runnable is None or runnable * total - busy >= unknown / 2
    for stack, count, kind in kinds:
        resolved = classify(stack, active=active and not _is_waiting(stack)) if kind == "idle" else kind
        resolved = "idle" if resolved == HELPER else resolved
        part = find_part(stack)
        is_users = not part or any(is_job_code(frame) for frame in stack)
        line, function, call, leaf = find_place(stack, cwd if is_users else PACKAGE_ROOT)
        if not is_users:
            line, function = "", f"{function} ({line})"
            resolved = "python" if resolved == "other" and not _is_importing(stack) else resolved
        places[(line, function, call, leaf, resolved, part)] += count
        if (job_frame := innermost_job_frame(stack, cwd)) is not None:
            frames[job_frame] += count
    listed = [
        Place(line=line, function=function, call=call, leaf=leaf, kind=kind, part=part, samples=count)
        for (line, function, call, leaf, kind, part), count in places.most_common(MAX_PLACES)
    ]
    if rest := total - sum(place.samples for place in listed):
        listed.append(Place(kind="other", samples=rest))
    main_thread: collections.Counter[str] = collections.Counter()
    for (*_, kind, _), count in places.items():
        main_thread[kind] += count
    return StackWindow(
        samples=total,
        main_thread={kind: count / total for kind, count in main_thread.most_common()},
        frames={name: count / total for name, count in frames.most_common(MAX_FRAMES)},
        role=role,
        places=listed,
        **fields,
    )


class StackSampler:
    """Samples a job's Python processes inside a `with` block, in a thread.

    pid: the root of the job; on_unavailable: called once, with the reason, if stacks are not recorded; training_ranks:
    PID → rank of the live processes that train, as far as the hook knows them; then only these and their loader workers
    are sampled, and not a launcher that waits for them. own_rank: `pid` is this process, the only one of this rank that
    trains: other ranks sample themselves.
    """

    def __init__(
        self,
        folder: RunFolder,
        pid: int,
        *,
        on_unavailable: Callable[[str], None],
        training_ranks: Callable[[], Mapping[int, int]] = dict,
        own_rank: int | None = None,
    ) -> None:
        self._folder = folder
        self._pid = pid
        self._on_unavailable = on_unavailable
        self._training_ranks = training_ranks
        self._own_rank = own_rank
        self._processes: dict[psutil.Process, _Process] = {}
        self._not_python: set[psutil.Process] = set()
        self._recordings: list[_Recording] = []
        self._cost_s = COST_S
        """CPU-seconds of a window of WINDOW_S at 10 Hz."""
        self._own_fraction = OWN_CPU_FRACTION
        """Fraction of a core that this thread takes."""
        self._py_spy_s = self._overspent_s = 0.0
        """CPU-seconds of py-spy so far, and those of it and this thread beyond MAX_CPU_FRACTION."""
        self._last_failure = "no Python process of the job was seen"
        self._any_sampled = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._thread_main, name="stacks", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(2 * STOP_TIMEOUT_S + 1.0)  # a thread that hangs is abandoned

    def _thread_main(self) -> None:
        try:
            self._sample_until_stopped()
        except PermissionError as error:
            self._on_unavailable(f"not recorded: {error}")
        except Exception as error:  # noqa: BLE001 (the job goes on, and an event says so)
            self._on_unavailable(f"not recorded from here on: {type(error).__name__}: {error}")
        finally:
            for recording in self._recordings:
                recording.end(signal.SIGKILL)

    def _sample_until_stopped(self) -> None:
        py_spy = find_py_spy()
        if py_spy is None:
            self._on_unavailable("not recorded: py-spy is not installed")
            return
        next_poll_s, start_s, targets = 0.0, time.monotonic(), list[_Process]()
        while not self._stop.wait(TICK_S):
            self._read_ended()
            now_s = time.monotonic()
            if now_s >= next_poll_s:
                targets = self._find_targets(now_s)
                next_poll_s = now_s + (PROCESS_POLL_S if self._any_sampled else PROCESS_POLL_S / 10)
                own_s, elapsed_s = time.thread_time(), now_s - start_s
                self._own_fraction = (PRIOR_S * OWN_CPU_FRACTION + own_s) / (PRIOR_S + elapsed_s)
                self._overspent_s = max(0.0, own_s + self._py_spy_s - MAX_CPU_FRACTION * elapsed_s)
            rate_hz, window_s = self._window(max(1, len(targets)))
            for recording in self._recordings:
                age_s, target = recording.age_s(), recording.target
                starts = not target.trains and target.pid in self._training_ranks()
                if starts:  # what it does from now on is a window of its own, and costs less than imports
                    target.trains, self._cost_s = True, COST_S
                if not recording.is_ending and (starts or age_s >= (FIRST_WINDOW_S if target.is_new else window_s)):
                    recording.end()
                elif age_s > 2 * MAX_WINDOW_S:
                    recording.end(signal.SIGKILL)
            recorded = {recording.target for recording in self._recordings if not recording.is_ending}
            has_worker = any(target.role == "worker" for target in recorded)
            for target in targets:
                if target in recorded or (target.role == "worker" and has_worker):
                    continue
                has_worker |= target.role == "worker"
                target.sampled_s = now_s
                self._recordings.append(_Recording(target, py_spy, rate_hz))
        for recording in self._recordings:
            recording.end()
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while self._recordings and time.monotonic() < deadline_s:
            self._read_ended()
            time.sleep(0.01)
        if not self._any_sampled and self._own_rank is None:  # a measured loop may be shorter than a window
            self._on_unavailable(f"not recorded: {self._last_failure}")

    def _read_ended(self) -> None:
        """Writes the windows that py-spy has finished; raises PermissionError if it may not read the job."""
        for recording in [item for item in self._recordings if item.has_ended()]:
            self._recordings.remove(recording)
            target = recording.target
            self._py_spy_s += recording.cpu_s or 0.0
            if recording.trains == target.trains and not target.is_new:
                self._add_cost(recording)
            samples, others, reason = recording.read()
            if not samples:
                if ("ermission" in reason or "not permitted" in reason) and not self._any_sampled:
                    raise PermissionError(f"reading another process is not permitted here ({PERMISSION_HINT})")
                self._last_failure = reason
                target.failures += 1
                continue
            target.failures = 0
            self._any_sampled = True
            target.is_new = False
            role = find_role(samples)
            if role and target.role != "training":
                target.role = role
            if target.role != HELPER:
                self._write(recording, samples, others)

    def _write(self, recording: _Recording, samples: Samples, others: Mapping[int, Samples]) -> None:
        target, now_s = recording.target, time.monotonic()
        process_cpu, runnable = recording.cpu_fractions(now_s)
        fields: dict[str, Any] = {
            "cwd": target.cwd, "t": time.time(), "attempt": self._folder.attempt, "pid": target.pid,
            "wall_s": now_s - recording.start_s,
        }  # fmt: skip
        role = target.role or "training"
        windows = [make_window(samples, role=role, runnable=runnable, process_cpu=process_cpu, **fields)]
        if role == "training":
            working = working_threads(others, sum(count for _, count in samples), recording.thread_runnable)
            windows.append(make_window(working, role="thread", **fields))
        for window in filter(None, windows):
            name = STACKS if target.rank == 0 else f"{RANKS}/{target.rank:04d}/{STACKS}"
            (self._folder.path / name).parent.mkdir(parents=True, exist_ok=True)
            self._folder.append(name, window)

    def _add_cost(self, recording: _Recording) -> None:
        """A window costs 0.4 of what one at 10 Hz does, and the rest by its samples (measured)."""
        samples = recording.rate_hz * recording.age_s() / (RATES_HZ[0] * WINDOW_S)
        if recording.cpu_s is not None:
            self._cost_s = 0.7 * self._cost_s + 0.3 * recording.cpu_s / (0.4 + 0.6 * samples)

    def _window(self, num_targets: int) -> tuple[int, float]:
        """(samples a second, seconds) of the next windows: as many and as short as the budget allows."""
        budget = max(MAX_CPU_FRACTION / 10, MAX_CPU_FRACTION - self._own_fraction - self._overspent_s / REPAY_S)
        for rate_hz, times in WINDOWS:
            window_cost_s = num_targets * self._cost_s * (0.4 + 0.6 * times * rate_hz / RATES_HZ[0])
            if window_cost_s <= budget * times * WINDOW_S:
                return rate_hz, times * WINDOW_S
        return rate_hz, max(times * WINDOW_S, min(MAX_WINDOW_S, window_cost_s / budget))

    def _find_targets(self, now_s: float) -> list[_Process]:
        """The processes to sample: those that train or may train, the busiest first, and the loader worker whose turn
        it is."""
        alive: dict[psutil.Process, _Process] = {}
        for pid in list_process_tree(self._pid, limit=MAX_TREE):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                process = psutil.Process(pid)
                known = self._processes.get(process)
                cpu_s = cpu_seconds(process) or 0.0
                # a process without CPU time may have called exec since
                if known is None and not (process in self._not_python and cpu_s > 0) and is_python(pid):
                    known = _Process(process)
                if known is None:
                    self._not_python.add(process)
                elif is_alive(process):
                    known.recent_cpu_s, known.cpu_s = cpu_s - known.cpu_s, cpu_s
                    alive[process] = known
        self._processes = alive
        self._not_python = {process for process in self._not_python if process.is_running()}
        found = [target for target in alive.values() if target.failures < MAX_FAILURES]
        known_ranks = self._training_ranks()
        if self._own_rank is not None:
            found = [target for target in found if target.pid == self._pid or target.rank == self._own_rank]
            known_ranks = {self._pid: self._own_rank}
        training_pids = {target.pid for target in found if target.pid in known_ranks or target.role == "training"}
        for target in found:
            if target.pid in known_ranks:
                target.rank = known_ranks[target.pid]  # children of `mp.spawn` have no RANK
                target.role = "training"
            elif target.role == "" and target.parent in training_pids:
                target.role = "worker"  # until a stack says more
            elif target.role == HELPER and now_s - target.sampled_s > HELPER_RECHECK_S:
                target.role = ""
        is_known = any(target.pid in known_ranks for target in found)
        training = [target for target in found if target.role == "training" or (target.role == "" and not is_known)]
        training.sort(key=lambda target: -target.recent_cpu_s)
        workers = [target for target in found if target.role == "worker"]
        current = [item.target for item in self._recordings if not item.is_ending and item.target in workers]
        turn = current or sorted(workers, key=lambda target: target.sampled_s)
        return training[:MAX_PROCESSES] + turn[:1]


def _find_worker_rule(stack: Sequence[Frame]) -> FrameRule | None:
    return next((rule for frame in stack if (rule := _find_rules(frame.function, frame.file).worker) is not None), None)


def _inside_worker(stack: Sequence[Frame]) -> Stack:
    """What a loader worker does: the frames inside of its loop, without those of the parent from which it was forked
    and of the loader itself."""
    inner: Stack = []
    for frame in stack:
        if _find_rules(frame.function, frame.file).worker is not None:
            break
        inner.append(frame)
    while inner and _LOADER_FILE.search(inner[-1].file):
        inner.pop()
    return inner


def find_place(stack: Sequence[Frame], cwd: str = "") -> tuple[str, str, str, str]:
    """(line, function, call, leaf) of a stack, as in `Place`. A program that is installed as a whole has the frames of
    its own package as its own code."""
    stack = [frame for frame in stack if not _RECORDER_FILE.search(frame.file)]
    is_own = [is_job_code(frame) and not _CONSOLE_SCRIPT.search(frame.file) for frame in stack]
    if True not in is_own:
        packages = [found[1] if (found := _PACKAGE.search(frame.file)) else "" for frame in stack]
        package = next((name for name in reversed(packages) if name), None)
        is_own = [name == package for name in packages]
    if True not in is_own:
        return "", "", "", _describe_leaf(stack[0]) if stack else ""
    index = is_own.index(True)
    own = stack[index]
    callee = stack[index - 1] if index else None
    name = find_call(own.file, own.line, _base_name(own.function), _base_name(callee.function) if callee else "")
    if callee is not None and not name:
        name = _module_path(callee)
    # imports have thousands of innermost frames
    leaf = _describe_leaf(stack[0]) if index > 1 and not name.startswith("import ") else ""
    outer = (_base_name(frame.function) for frame in stack[index:] if frame.file == own.file)
    function = next((text for text in outer if not text.endswith(("comp>", "genexpr>", "lambda>"))), "")
    return f"{_relative_file(own.file, cwd)}:{own.line}", function or _base_name(own.function), name, leaf


def find_part(stack: Sequence[Frame]) -> str:
    """The part of stoker that a stack of its own training is in, by its outermost frame in a row of frames.toml; empty:
    a stack of another program."""
    if not stack or not stack[-1].file.startswith(PACKAGE_ROOT):
        return ""
    rules = (_find_rules(frame.function, frame.file).part for frame in reversed(stack))
    return next((rule.kind for rule in rules if rule is not None), "training loop")


def _describe_leaf(frame: Frame) -> str:
    return f"{_base_name(frame.function)} ({'/'.join(frame.file.split('/')[-2:])})"


def _module_path(frame: Frame) -> str:
    """How the function of an installed module is imported."""
    module = re.sub(
        r".*/(?:site|dist)-packages/|.*/lib/python[\d.]+t?/|^<frozen |>$|(/__init__)?\.pyc?$", "", frame.file
    )
    return f"{module.replace('/', '.')}.{_base_name(frame.function)}"


def is_job_code(frame: Frame) -> bool:
    """Whether the frame is in a file of the job: not installed, not of Python itself, not generated."""
    return bool(frame.file) and _NOT_JOB_CODE.search(frame.file) is None


def classify(stack: Sequence[Frame], *, active: bool) -> str:
    """The kind of work of a thread: one of KINDS or HELPER. stack: innermost frame first; active: it is runnable."""
    if _find_worker_rule(stack) is not None:
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
    if not active or _is_waiting(stack):
        return "idle"
    return "python" if any(is_job_code(frame) for frame in stack) else "other"


def innermost_job_frame(stack: Sequence[Frame], cwd: str = "") -> str | None:
    """`function (file:line)` of the innermost frame in a file of the job, relative to its working directory `cwd`."""
    for frame in stack:
        if is_job_code(frame):
            name = frame.function.rpartition("<locals>.")[2]
            return f"{name} ({_relative_file(frame.file, cwd)}:{frame.line})"
    return None


def _relative_file(file: str, cwd: str) -> str:
    """Relative to the working directory, or its last parts."""
    if cwd and file.startswith(cwd.rstrip("/") + "/"):
        return file[len(cwd.rstrip("/")) + 1 :]
    return "/".join(file.split("/")[-3:]) if file.count("/") > 2 else file


def _is_waiting(stack: Sequence[Frame]) -> bool:
    """Whether the innermost function is known to wait without a core."""
    if not stack:
        return False
    return _find_rules(*stack[0][:2]).idle is not None or _kind_from_source_line(stack[0]) == "idle"


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
    return _find_rules(frame.function, frame.file).frame


class _Rules(NamedTuple):
    """The first row of each table of frames.toml that matches a frame."""

    worker: FrameRule | None
    frame: FrameRule | None
    idle: FrameRule | None
    part: FrameRule | None


@functools.lru_cache(maxsize=8192)
def _find_rules(function: str, file: str) -> _Rules:
    name = _base_name(function)
    return _Rules(
        *(
            next((rule for rule in rules if rule.file.search(file) and rule.function.match(name)), None)
            for rules in (WORKER_RULES, FRAME_RULES, IDLE_RULES, PART_RULES)
        )
    )


def _base_name(function: str) -> str:
    """The function's name without its class and enclosing functions."""
    return function.rpartition(".")[2]


def _kind_from_source_line(frame: Frame) -> str | None:
    """The kind by the text of the source line, if the frame is in a file of the job."""
    if not is_job_code(frame) or not frame.file.startswith("/") or not frame.file.isprintable():
        return None
    text = linecache.getline(frame.file, frame.line)
    return next((kind for kind, pattern in _LINE_PATTERNS if pattern.search(text)), None)
