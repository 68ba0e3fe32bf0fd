"""Samples the Python stacks of a watched job into stacks.jsonl (data source 1).

py-spy reads the stacks from outside, without stopping the job, also if the job is stopped. A sample takes some 20 ms of
a CPU, none of the job's; samples are so rare that this stays below MAX_CPU_FRACTION of a core. `frames.py` classifies a
stack. If stacks cannot be read, the reason is reported once.
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
from collections.abc import Callable, Set
from pathlib import Path
from typing import Self

import msgspec

from stoker.profiling.telemetry.machine import list_process_tree
from stoker.runs.records import RANKS, STACKS, RunFolder
from stoker.runs.schemas import StackWindow
from stoker.watch import processes
from stoker.watch.frames import HELPER, Frame, classify, innermost_job_frame

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


def find_py_spy() -> str | None:
    """The path of py-spy, next to this Python or on PATH; None: not installed."""
    sibling = Path(sys.executable).with_name("py-spy")
    return str(sibling) if sibling.exists() else shutil.which("py-spy")


class NotReadable(Exception):
    """py-spy returned no stack. The text is the reason; `forbidden`: it never will."""

    def __init__(self, reason: str, *, forbidden: bool = False) -> None:
        super().__init__(reason)
        self.forbidden = forbidden


class _PySpyFrame(msgspec.Struct):
    """A frame in the JSON of py-spy."""

    name: str
    filename: str
    line: int


class _PySpyThread(msgspec.Struct):
    """A thread in the JSON of py-spy."""

    pid: int
    active: bool
    frames: list[_PySpyFrame]
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
    """Samples of one process since the last line. is_training: a sample was not of a helper process or
    an import."""

    pid: int
    rank: int
    cwd: str
    start_s: float
    start_ticks: int = 0
    """CPU ticks of the process at start_s."""
    is_training: bool = False
    failures: int = 0
    samples: int = 0
    active: int = 0
    main_thread: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    frames: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, threads: list[_PySpyThread]) -> bool:
        """Adds a sample; False if the process is a helper."""
        main_thread = next((t for t in threads if t.os_thread_id == self.pid or t.thread_name == "MainThread"), None)
        if main_thread is None:
            return True  # it is starting or ending
        stack = [Frame(frame.name, self._absolute_path(frame.filename), frame.line) for frame in main_thread.frames]
        kind = classify(stack, active=main_thread.active)
        if kind == HELPER and not self.is_training:
            return False
        self.is_training |= kind not in ("other", "idle")  # a launcher imports the framework, too
        self.samples += 1
        self.active += sum(thread.active for thread in threads)
        self.main_thread["idle" if kind == HELPER else kind] += 1
        if (job_frame := innermost_job_frame(stack, self.cwd)) is not None:
            self.frames[job_frame] += 1
        return True

    def make_window(self, now_s: float, attempt: int, cpu_ticks: int | None) -> StackWindow:
        """The window of the samples; starts the next one. cpu_ticks: of the process so far; None: it ended."""
        wall_s = max(0.0, now_s - self.start_s)
        window = StackWindow(
            t=now_s, attempt=attempt, pid=self.pid, wall_s=wall_s, samples=self.samples,
            main_thread={kind: count / self.samples for kind, count in self.main_thread.most_common()},
            frames={name: count / self.samples for name, count in self.frames.most_common(MAX_FRAMES)},
            active_threads=self.active / self.samples,
            process_cpu=(cpu_ticks - self.start_ticks) / os.sysconf("SC_CLK_TCK") / wall_s
            if cpu_ticks is not None and wall_s > 0 else None,
        )  # fmt: skip
        self.start_s, self.samples, self.active, self.start_ticks = now_s, 0, 0, cpu_ticks or 0
        self.main_thread.clear()
        self.frames.clear()
        return window

    def _absolute_path(self, file: str) -> str:
        """Older Pythons keep relative file names."""
        return file if file.startswith(("/", "<")) or not self.cwd else os.path.join(self.cwd, file)


class StackSampler:
    """Samples a job's Python processes inside a `with` block, in a thread.

    pid: the root of the job; on_unavailable: called once, with the reason, if stacks are not recorded; training_pids:
    the live processes that train, as far as the hook knows them; then only these are sampled, and not a launcher that
    waits for them.
    """

    def __init__(
        self,
        folder: RunFolder,
        pid: int,
        *,
        on_unavailable: Callable[[str], None],
        training_pids: Callable[[], Set[int]] = frozenset,
    ) -> None:
        self._folder = folder
        self._pid = pid
        self._on_unavailable = on_unavailable
        self._training_pids = training_pids
        self._windows: dict[processes.Process, _StackSamples] = {}
        self._cpu_ticks: dict[processes.Process, int] = {}
        self._is_python: dict[processes.Process, bool] = {}
        self._helpers: set[processes.Process] = set()
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
        queue: collections.deque[processes.Process] = collections.deque()
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
                if window.failures >= MAX_FAILURES or not queue[-1].is_alive():
                    queue.pop()
            sample_cpu_s = _children_cpu_s() - cpu_before_s
            spent_s += sample_cpu_s
            cost_s = max(cost_s * 0.9, sample_cpu_s)  # decreases slowly after a costly sample
            interval_s = STARTUP_SAMPLE_INTERVAL_S if now_s - start_s < STARTUP_S else SAMPLE_INTERVAL_S
            wait_s = max(interval_s / max(1, len(queue)), _affordable_after_s(spent_s + cost_s, now_s - start_s))
        self._write_windows(time.time(), min_s=0.0)
        if not self._any_sampled:
            self._on_unavailable(f"not recorded: {last_failure}")

    def _busiest_processes(self) -> list[processes.Process]:
        """The busiest Python processes since the last poll. Windows of ended processes are kept until they are
        written."""
        self._num_polls += 1
        if self._num_polls % HELPER_RECHECK_POLLS == 0:  # a launcher may train now
            self._helpers.clear()
        cpu_ticks: dict[processes.Process, int] = {}
        for pid in list_process_tree(self._pid, limit=processes.MAX_PROCESSES):
            status = processes.read_status(pid)
            if status is None or status.state in "ZX":
                continue
            process = processes.Process(pid, status.start_ticks)
            # a process without CPU time may have called exec since
            if process not in self._is_python or not self._cpu_ticks.get(process):
                self._is_python[process] = processes.is_python(pid)
            if self._is_python[process]:
                cpu_ticks[process] = status.cpu_ticks
        trainers = self._training_pids()
        candidates = [process for process in cpu_ticks if process.pid in trainers]
        if not candidates:  # not known yet, or never: no hook
            candidates = [process for process in cpu_ticks if process not in self._helpers]
        busiest = sorted(candidates, key=lambda process: self._cpu_ticks.get(process, 0) - cpu_ticks[process])[
            :MAX_PROCESSES
        ]
        self._cpu_ticks = cpu_ticks
        self._is_python = {process: is_python for process, is_python in self._is_python.items() if process in cpu_ticks}
        for process in busiest:
            if process not in self._windows:
                self._windows[process] = _StackSamples(
                    process.pid, processes.read_rank(process.pid), processes.read_cwd(process.pid), time.time(),
                    cpu_ticks[process],
                )  # fmt: skip
        return busiest

    def _write_windows(self, now_s: float, *, min_s: float) -> None:
        """Writes the windows that are long enough."""
        for process, window in list(self._windows.items()):
            if now_s - window.start_s < min_s:
                continue
            if window.samples:
                name = STACKS if window.rank == 0 else f"{RANKS}/{window.rank:04d}/{STACKS}"
                (self._folder.path / name).parent.mkdir(parents=True, exist_ok=True)
                status = processes.read_status(process.pid)
                is_alive = status is not None and status.start_ticks == process.start_ticks
                cpu_ticks = status.cpu_ticks if status is not None and is_alive else None
                self._folder.append(name, window.make_window(now_s, self._folder.attempt, cpu_ticks))
            elif not process.is_alive():
                del self._windows[process]
            else:
                status = processes.read_status(process.pid)
                window.start_s, window.start_ticks = now_s, 0 if status is None else status.cpu_ticks


def _affordable_after_s(cost_s: float, elapsed_s: float) -> float:
    """Seconds until the samples so far and the next one, of cost_s CPU-seconds in total, are within the budget; at most
    a minute, because one costly sample must not end the sampling."""
    return min(60.0, (cost_s - STARTUP_CPU_S) / MAX_CPU_FRACTION - elapsed_s)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
