"""Samples the Python stacks of a watched or measured job into stacks.jsonl (data source 1).

`py-spy record` reads the stacks from outside, without stopping the job, also if the job is stopped: one process of it
for each training process, and one for a loader worker in turn. A window of 100 samples takes some 40 ms of a CPU, none
of the job's; there are so many samples that this stays below MAX_CPU_FRACTION of a core. What they say is in
`frames.py`. If stacks cannot be read, the reason is reported once.
"""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import psutil

from stoker.profiling.frames import HELPER, Frame, Samples, add_failed, find_role, make_window, weigh, working_threads
from stoker.profiling.telemetry.machine import list_process_tree
from stoker.runs.records import RANKS, STACKS, RunFolder

WINDOW_S, FIRST_WINDOW_S = 10.0, 2.0
"""Time of a line; the first one of a process is short, because only its stacks tell whether it trains."""
RATES_HZ = (10, 4, 2, 1)
"""Samples a second of a training of stoker's own: the first that costs less than it may."""
WINDOWS = ((10, 1), (4, 1), (4, 2), (2, 2), (1, 2))
"""(samples a second, times WINDOW_S): the next is used if windows cost more than they may. A start of py-spy costs as
much as 70 samples, so a longer window saves more than a lower rate."""
IMPORT_RATE_HZ = 2
"""Samples a second of a process that has shown nothing but imports: each costs 2 ms of CPU time, one of a loop 0.3 ms
(measured with TensorFlow)."""
MAX_CPU_FRACTION = 0.01
"""Fraction of a core that sampling may take: py-spy and the thread that reads what it writes. Half of the 2 % of a job
that watching may cost (benchmarks/diagnosis/watch_overhead.py)."""
COST_S = 0.05
"""CPU-seconds of a window of WINDOW_S at 10 Hz, as of a loop in PyTorch, until it is known. Windows of imports, whose
stacks are deep and new, say nothing of it."""
OWN_CPU_FRACTION, PRIOR_S = 0.003, 60.0
"""What that thread takes, and the time for which it counts as measured: the first windows cost more, because functions
and files are new in them, and would lower the rate of a job of a minute to its end."""
REPAY_S = 120.0
"""Time over which CPU time that was taken beyond that is saved again. Importing TensorFlow costs 0.3 s of it: with 30 s
to save it, the first 40 s of the training had one sample a second (measured)."""
MAX_WINDOW_S = 60.0
"""Windows are at most so long, also where even the lowest rate costs too much."""
MAX_PROCESSES = 8
"""The busiest Python processes are sampled, besides one loader worker."""
HELPER_RECHECK_S = 120.0
"""Time after which a process that waited for others is sampled again: it may train now."""
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


_RAW_LINE = re.compile(r"thread \((\w+)\)(?:: ([^;]*))?;(.*) (\d+)")
_RAW_FRAME = re.compile(r"(.*?) \((.*?)(?::(\d+))?\)")
_FAILED = re.compile(r"py-spy> .* Samples: \d+ Errors: (\d+)")


def find_failed(text: str) -> int | None:
    """The number of failed samples in what py-spy says at its end; None: it does not say it."""
    found = _FAILED.search(text)
    return int(found[1]) if found else None


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


Clock = Callable[[int], Mapping[str, float]]
"""PID → seconds of parts of its work so far, by the clock in that process (`HookReader.clock`)."""


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

    def __init__(self, target: _Process, py_spy: str, rate_hz: int, clock: Clock) -> None:
        self.target, self.rate_hz, self.trains, self._clock = target, rate_hz, target.trains, clock
        self.start_s, self.start_t = time.monotonic(), time.time()
        self._start_clock, self._end_s = clock(target.pid), self.start_s
        self._end_clock: Mapping[str, float] = {}
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
            # it prints to its standard output how many samples failed
            outputs = [(os.POSIX_SPAWN_DUP2, self._errors, fd) for fd in (1, 2)]
            # the watcher's own threads block signals: py-spy must get the one that ends the window
            self.pid = os.posix_spawn(
                py_spy, command, env,
                file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0), *outputs], setpgroup=0, setsigmask=[],
            )  # fmt: skip
            stack.pop_all()

    def age_s(self) -> float:
        return time.monotonic() - self.start_s

    def end(self, signal_number: int = signal.SIGINT) -> None:
        """Lets it write what it has, and end."""
        if not self.is_ending:
            self.is_ending, self._end_s, self._end_clock = True, time.monotonic(), self._clock(self.target.pid)
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
        samples = add_failed(samples, find_failed(texts[1]) or 0)
        clocked_s = {name: self._end_clock[name] - start for name, start in self._start_clock.items()
                     if name in self._end_clock}  # fmt: skip
        samples = weigh(samples, clocked_s, max(1e-3, self._end_s - self.start_s))
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


class StackSampler:
    """Samples a job's Python processes inside a `with` block, in a thread.

    pid: the root of the job; on_unavailable: called once, with the reason, if stacks are not recorded; training_ranks:
    PID → rank of the live processes that train, as far as the hook knows them; then only these and their loader workers
    are sampled, and not a launcher that waits for them; clock: weighs their samples. own_rank: `pid` is this process,
    the only one of this rank that trains: other ranks sample themselves.
    """

    def __init__(
        self,
        folder: RunFolder,
        pid: int,
        *,
        on_unavailable: Callable[[str], None],
        training_ranks: Callable[[], Mapping[int, int]] = dict,
        clock: Clock = lambda _: {},
        own_rank: int | None = None,
    ) -> None:
        self._folder = folder
        self._pid = pid
        self._on_unavailable = on_unavailable
        self._training_ranks, self._clock = training_ranks, clock
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
                # a process of which stacks told nothing so far imports modules: that says little, and costs much
                rate = rate_hz if target.role or target.is_new else min(rate_hz, IMPORT_RATE_HZ)
                self._recordings.append(_Recording(target, py_spy, rate, self._clock))
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
            windows += [
                make_window(found, role=name, runnable=can_run, **fields) for name, (found, can_run) in working.items()
            ]
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
        training = [target for target in found
                    if target.pid in known_ranks or (not is_known and target.role in ("training", ""))]  # fmt: skip
        training.sort(key=lambda target: -target.recent_cpu_s)
        workers = [target for target in found if target.role == "worker"]
        current = [item.target for item in self._recordings if not item.is_ending and item.target in workers]
        turn = current or sorted(workers, key=lambda target: target.sampled_s)
        return training[:MAX_PROCESSES] + turn[:1]
