"""The records of a watched job: an ordinary run folder, from what driver, kernel and the job's output say (tier 0).

A thread follows output.log, which the keeper writes, so that nothing here can hold up the job. Not here: starting the
job and its end (`watch.py`), a job that runs already (`attach.py`), its stacks (`stacks.py`), its processes
(`processes.py`), what lines mean (`output.py`), what they add up to (`progress_windows.py`).
"""

import contextlib
import json
import os
import re
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from stoker.errors import writing
from stoker.profiling.telemetry.environment import describe_job, mask_argv
from stoker.profiling.telemetry.kernel_log import read_kernel_lines
from stoker.profiling.telemetry.sampler import TelemetrySampler
from stoker.runs.records import (
    ENVIRONMENT,
    OUTPUT,
    RANKS,
    STEPS,
    RunFolder,
    make_run,
    recording,
)
from stoker.runs.schemas import StepWindow
from stoker.watch import stacks
from stoker.watch.hook_reader import HookReader, RankWindow
from stoker.watch.output import LineSplitter, ProgressParser
from stoker.watch.processes import JobProcesses
from stoker.watch.progress_windows import ProgressWindows

RUNS_DIR = Path("runs")

STACKS_SOURCE, HOOK_SOURCE = "stacks of the job", "inside the job"

DEFAULT_COVERAGE = {
    "driver, kernel and output": "recorded",
    STACKS_SOURCE: stacks.RECORDED,
    HOOK_SOURCE: "not recorded: no process of the job has trained so far",
}
"""What is known of a watched job, by how it was learned; an event of the run has it. What turns out not to be recorded
is said by another event, with all of them."""

POLL_INTERVAL_S, MIN_WINDOW_S, MAX_IDLE_WINDOW_S = 0.25, 1.0, 10.0
"""How often the output is looked at; the least length of a window, and of one in which the job said nothing."""
PROCESS_POLL_S = 2.0
"""How often its processes and their open files are looked at."""
CHECKSUM_BYTES = 4096
"""Of output.log, whose checksum tells at which file an attempt began when it has got another name meanwhile."""
MAX_KERNEL_LINES, MAX_PIDS = 50, 256
"""Lines of the kernel's log and numbers of processes that the event of the end has at most."""
EMPTY_INPUT_WARNING_S = 30.0
"""Time without a step or a line after which a job that reads an empty file is said to spin."""


@contextlib.contextmanager
def open_run_folder(
    run: str | None,
    command: list[str],
    *,
    coverage: Mapping[str, str] = DEFAULT_COVERAGE,
    environment: Mapping[str, Any] | None = None,
    **data: Any,
) -> Iterator[tuple[RunFolder, int]]:
    """(the run's folder, ready to write; the descriptor that holds its lock). run: None: runs/watch-NAME-N.

    environment: of the job; default: of one that is started from here. data: more for the event that begins the
    attempt. Raises UsageError when the folder is that of a training or of a living job; StorageError when it cannot be
    written.
    """
    path = _make_run_dir(command) if run is None else Path(run).expanduser()
    command_text = " ".join(mask_argv(command))
    fix = "name another folder: --run-dir DIR"
    described = describe_job(command) if environment is None else dict(environment)
    output_position = _output_position(path / OUTPUT)
    with recording(
        path, described, command_text, fix=fix, coverage=dict(coverage), **output_position, **data
    ) as opened:
        yield opened


def _output_position(log: Path) -> dict[str, int]:
    """Where this attempt's part of output.log begins, and by which beginning that file is known."""
    size = log.stat().st_size if log.exists() else 0
    if not size:
        return {"output_offset": 0}
    with log.open("rb") as file:
        return {"output_offset": size, "output_head": zlib.crc32(file.read(min(size, CHECKSUM_BYTES)))}


def _make_run_dir(command: list[str]) -> Path:
    """runs/watch-NAME-N, which is made."""
    with writing("The run's folder cannot be made.", RUNS_DIR, fix="name another folder: --run-dir DIR"):
        return make_run(RUNS_DIR, f"watch-{job_name(command)}")


def job_name(command: list[str]) -> str:
    """A short name: of the Python script or module, else of the program."""
    args = command[1:]
    for i, arg in enumerate(args):
        if arg == "-m" and i + 1 < len(args):
            return _name(args[i + 1])
        if arg.endswith(".py"):
            return _name(Path(arg).stem)
    return _name(Path(command[0]).name)


def _name(text: str) -> str:
    return re.sub(r"[^\w.]+", "_", text).strip("._") or "job"


class OutputSource(Protocol):
    """Where the job's output comes from."""

    def read(self) -> Iterator[bytes]:
        """What came since the last time."""
        ...


class Recorder:
    """Writes what is seen of a job into its run's folder.

    output: of the job; default: what the keeper writes into output.log. cells: the folder of the hook's (`inside.py`);
    None: the job has no hook.
    """

    def __init__(
        self,
        folder: RunFolder,
        command: list[str],
        *,
        coverage: Mapping[str, str] = DEFAULT_COVERAGE,
        output: OutputSource | None = None,
        hook_dir: Path | None = None,
    ) -> None:
        self._folder = folder
        self._name = job_name(command)
        self._stop = threading.Event()
        self._coverage = dict(coverage)
        self._coverage_lock = threading.Lock()
        self._start_s = time.monotonic()
        self._processes: JobProcesses | None = None
        self._hook_dir = hook_dir
        log = folder.path / OUTPUT
        self._output = output or LogTail(log, log.stat().st_size if log.exists() else 0)  # an attempt before wrote that

    @contextlib.contextmanager
    def following(self, job: int) -> Iterator[None]:
        """Inside, the job is looked at: its output four times a second, driver and kernel once, its processes and
        stacks every few seconds."""
        thread = threading.Thread(target=self._thread_main, name="recorder", daemon=True)
        self._processes = JobProcesses(job)
        telemetry = TelemetrySampler(self._folder, pid=job)
        with (
            telemetry,
            stacks.StackSampler(self._folder, job, telemetry=telemetry, on_unavailable=self._report_no_stacks),
        ):
            thread.start()
            try:
                yield
            finally:
                self._stop.set()
                thread.join(5.0)  # one that hangs in a storage that went away is left behind

    def set_coverage(self, source: str, status: str) -> None:
        """What is known now of a way to learn about the job. From any thread."""
        with self._coverage_lock:
            if self._coverage.get(source) != status:
                self._coverage[source] = status
                self._folder.event("info", f"{source}: {status}", coverage=dict(self._coverage))

    def write_end(self, code: int | None) -> None:
        """code: as of `subprocess`, the negative number of a signal; None: the kernel did not tell."""
        data = self._termination_context()
        if code is None:
            self._folder.event("finished", f"{self._name} ended; its exit code is not known", exit_code=None, **data)
            return
        data["exit_code"] = code if code >= 0 else 128 - code
        if code < 0:
            data["signal"] = -code
        outcome = f"ended with exit code {code}" if code >= 0 else f"ended by signal {-code}"
        self._folder.event("finished" if code == 0 else "failed", f"{self._name} {outcome}", **data)

    def write_detached(self) -> None:
        """The job lives on, and is looked at no more."""
        self._folder.event("info", f"{self._name} is watched no more; it lives on")

    def write_start_failure(self, error: OSError, exit_code: int) -> None:
        self._folder.event("failed", f"{self._name} did not start: {error.strerror}", exit_code=exit_code)

    def _report_no_stacks(self, reason: str) -> None:
        self.set_coverage(STACKS_SOURCE, reason)

    def _termination_context(self) -> dict[str, Any]:
        """What was seen of its processes and what the kernel said meanwhile; what nobody told is absent."""
        if self._processes is None:
            return {}
        data: dict[str, Any] = {}
        if (kills := self._processes.oom_kills()) is not None:
            data["oom_kills"] = kills
        lines = read_kernel_lines(self._start_s)
        if lines:
            data["kernel"] = [f"[{line.monotonic_s:.6f}] {line.text}" for line in lines[-MAX_KERNEL_LINES:]]
            named_pids = {int(number) for line in data["kernel"] for number in re.findall(r"\d{1,9}", line)}
            data["pids"] = sorted(self._processes.pids & named_pids)[:MAX_PIDS]
        if empty := self._processes.empty_inputs():
            data["empty_inputs"] = empty
        return data

    def _thread_main(self) -> None:
        try:
            self._record_until_stopped()
        except Exception as error:  # noqa: BLE001 (the job goes on, and the run says that its steps are not recorded)
            self._folder.event("warning", f"steps.jsonl ends here: {type(error).__name__}: {error}")

    def _record_until_stopped(self) -> None:
        environment = json.loads((self._folder.path / ENVIRONMENT).read_bytes())
        devices = max(1, len(environment["gpu"]["gpus"]))
        windows = ProgressWindows(attempt=self._folder.attempt, devices=devices, start_s=time.time())
        hook_reader = (
            HookReader(self._hook_dir, devices=devices, now_s=time.monotonic()) if self._hook_dir is not None else None
        )
        lines, parser, non_finite_reported, empty_input_reported, workers_reported = (
            LineSplitter(),
            ProgressParser(),
            False,
            False,
            False,
        )
        next_process_poll_s = last_output_s = time.monotonic()
        while True:
            stopping = self._stop.wait(POLL_INTERVAL_S)
            for data in self._output.read():
                last_output_s = time.monotonic()
                _feed_lines(windows, parser, lines.feed(data))
            if stopping:
                _feed_lines(windows, parser, lines.feed(b"", final=True))
            if windows.non_finite_loss is not None and not non_finite_reported:
                non_finite_reported = True
                text = f"the job says that {windows.non_finite_loss}"
                self._folder.event("warning", text, step=windows.step, not_finite=windows.non_finite_loss)
            if self._processes is not None and time.monotonic() >= next_process_poll_s and not stopping:
                self._processes.poll()
                next_process_poll_s = time.monotonic() + PROCESS_POLL_S
                empty = self._processes.empty_inputs()
                if empty and not empty_input_reported and time.monotonic() - last_output_s > EMPTY_INPUT_WARNING_S:
                    empty_input_reported = True
                    text = f"the job has said nothing for {EMPTY_INPUT_WARNING_S:.0f} s and reads {empty[0]}, a file of zero bytes"
                    self._folder.event("warning", text, empty_inputs=empty)
            if hook_reader is not None:
                hook_reader.poll()
            now_s = time.time()
            window_s = now_s - windows.start_s
            has_news = windows.has_new_progress() or (hook_reader is not None and hook_reader.has_new_steps())
            if stopping or (window_s >= MIN_WINDOW_S and has_news) or window_s >= MAX_IDLE_WINDOW_S:
                self._write_windows(windows, now_s, hook_reader)
            if hook_reader is not None and (stopping or hook_reader.has_trained()):
                self.set_coverage(HOOK_SOURCE, hook_reader.status())
                if not workers_reported and (workers := hook_reader.num_loader_workers()) is not None:
                    workers_reported = True
                    text = f"the job's loader has {workers} worker processes"
                    self._folder.event("info", text, workers=workers)
            if stopping:
                return

    def _write_windows(self, windows: ProgressWindows, now_s: float, hook_reader: HookReader | None) -> None:
        """A window: rank 0's, and beside it those of the job's other processes."""
        rank_windows = (
            [] if hook_reader is None else hook_reader.next_windows(time.monotonic(), now_s - windows.start_s)
        )
        window = windows.window(now_s, rank_windows[0] if rank_windows else None)
        self._folder.append(STEPS, window)
        for rank_window in rank_windows[1:]:
            name = f"{RANKS}/{rank_window.rank:04d}"
            (self._folder.path / name).mkdir(parents=True, exist_ok=True)
            self._folder.append(f"{name}/{STEPS}", _make_step_window(rank_window, window))


def _make_step_window(rank_window: RankWindow, rank0_window: StepWindow) -> StepWindow:
    """Of another rank, in the same time as rank 0's."""
    return StepWindow(
        t=rank0_window.t, attempt=rank0_window.attempt, step=rank_window.step, window_steps=rank_window.steps, num_images=rank_window.num_images, wall_s=rank0_window.wall_s,
        devices=rank_window.devices, phases=rank_window.phases, lr=rank_window.lr, thread_cpu_s=rank_window.thread_cpu_s,
    )  # fmt: skip


def _feed_lines(windows: ProgressWindows, parser: ProgressParser, lines: list[str]) -> None:
    for line in lines:
        if (progress := parser.read(line)) is not None:
            windows.add(progress)


class LogTail:
    """Reads on in a log that grows, and that is begun anew under the same name when it is long."""

    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        self._start = start
        self._file: BinaryIO | None = None

    def read(self) -> Iterator[bytes]:
        """What came since the last time."""
        while True:
            if self._file is None:
                if not self._path.exists():
                    return
                self._file = self._path.open("rb")
                self._file.seek(self._start)
                self._start = 0
            rotated = self._is_rotated(self._file)  # asked first: then all that came before is in the old one
            while data := self._file.read(65536):
                yield data
            if not rotated:
                return
            self._file.close()
            self._file = None

    def _is_rotated(self, file: BinaryIO) -> bool:
        try:
            return not os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:  # between two files
            return True
