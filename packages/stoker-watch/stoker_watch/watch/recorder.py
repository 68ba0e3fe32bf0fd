"""Writes the run folder of a watched job from the driver, the kernel and the job's output (data source 0).

A thread follows output.log, which the output relay writes, so that nothing here can delay the job. Its processes are
read from /proc, only files that any user who may see the job can read. Neighbors: starting the job, or attaching to it
(`watch.py`), stacks (`stacks.py`), parsing lines and windows (`output.py`), the hook (`hook_reader.py`).
"""

import contextlib
import itertools
import json
import os
import re
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from stoker_watch import regular_files
from stoker_watch.errors import writing
from stoker_watch.hardware.cgroup import Cgroup
from stoker_watch.knowledge import read_toml
from stoker_watch.recording import stacks
from stoker_watch.recording.telemetry.environment import describe_job
from stoker_watch.recording.telemetry.machine import list_process_tree, read_kernel_lines
from stoker_watch.recording.telemetry.sampler import TelemetrySampler
from stoker_watch.runs.records import ENVIRONMENT, OUTPUT, RANKS, STEPS, RunFolder, make_run, recording
from stoker_watch.secrets import mask_argv, mask_secrets
from stoker_watch.watch.hook_reader import HookReader
from stoker_watch.watch.output import LineSplitter, ProgressParser, ProgressWindows

RUNS_DIR = Path("runs")

STACKS_SOURCE, HOOK_SOURCE = "stacks of the job", "inside the job"

DEFAULT_COVERAGE = {
    "driver, kernel and output": "recorded",
    STACKS_SOURCE: stacks.RECORDED,
    HOOK_SOURCE: "not recorded: no process of the job has trained so far",
}
"""Data source of a watched job → status, in the first event of the run. A change is another event, with all of them."""

POLL_INTERVAL_S, MIN_WINDOW_S, MAX_IDLE_WINDOW_S = 0.5, 1.0, 10.0
"""Interval of polling the output; minimum length of a window, and of one without progress."""
MAX_READ_S, MAX_LAST_READ_S = 1.0, 5.0
"""How long output is read before the next window; after the job's end the rest is read for so long."""
PROCESS_POLL_S = 2.0
"""Interval of polling its processes and their open files."""
CHECKSUM_BYTES = 4096
"""A checksum of the first bytes of output.log identifies the file in which an attempt began, after a rename."""
MAX_KERNEL_LINES, MAX_PIDS, MAX_WARNING = 50, 256, 300
"""Maximum lines of the kernel log and PIDs in the last event; characters of a warning that is quoted."""
EMPTY_INPUT_WARNING_S = 30.0
"""After this time without output, a job that reads an empty file gets a warning."""

MAX_OPEN_FILES, MAX_PROCESSES, MAX_EMPTY_FILES, MAX_CGROUPS, MAX_JOB_PIDS = 512, 512, 16, 32, 65536
"""Bounds of the cost: open files of a process, processes of a job, empty files, cgroups, and PIDs that are kept."""
_NOT_INPUT = re.compile(r"^/(proc|sys|dev|run)/|\.(lock|pid|py|pyc)$|/\.")

OutputSource = Callable[[], Iterator[bytes]]
"""Returns the job's output since the last call."""


@contextlib.contextmanager
def open_run_folder(
    run: str | None,
    command: list[str],
    *,
    coverage: Mapping[str, str] = DEFAULT_COVERAGE,
    environment: Mapping[str, Any] | None = None,
    **data: Any,
) -> Iterator[tuple[RunFolder, int]]:
    """(the run folder, ready to write; the descriptor that holds its lock). run: None: runs/watch-NAME-N.

    environment: of the job; default: of a job that this process starts. data: for the event that begins the attempt.
    Raises UsageError if the folder belongs to a training or a live job; StorageError if it cannot be written.
    """
    command_text = " ".join(mask_argv(command))
    fix = "give another folder: --run-dir DIR"
    if run is None:
        with writing("The run folder cannot be created.", RUNS_DIR, fix=fix):
            path = make_run(RUNS_DIR, f"watch-{job_name(command)}")
    else:
        path = Path(run).expanduser()
    described = describe_job(command) if environment is None else dict(environment)
    with writing("The job's output cannot be recorded there.", path / OUTPUT, fix=fix):
        data = {"coverage": dict(coverage), **_output_position(path / OUTPUT), **data}
    with recording(path, described, command_text, fix=fix, **data) as opened:
        yield opened


def _output_position(log: Path) -> dict[str, int]:
    """Where this attempt begins in output.log, and the checksum that identifies that file."""
    if not os.path.lexists(log):
        return {"output_offset": 0}
    with regular_files.open_file(log, flags=regular_files.NO_LINKS) as file:
        size = os.fstat(file.fileno()).st_size
        head = {"output_head": zlib.crc32(file.read(min(size, CHECKSUM_BYTES)))} if size else {}
        return {"output_offset": size, **head}


SHELLS = ("sh", "bash", "dash", "zsh", "ksh")


def job_name(command: list[str]) -> str:
    """A short name: the Python script or module, that of a shell, else the program."""
    name = Path(command[0]).name
    if name in SHELLS and len(command) > 1 and not command[1].startswith("-"):
        name = Path(command[1]).stem
    for arg, following in itertools.pairwise([*command[1:], ""]):
        if (arg == "-m" and following) or arg.endswith(".py"):
            name = following if arg == "-m" else Path(arg).stem
            break
    return re.sub(r"[^\w.]+", "_", name).strip("._") or "job"


class JobRecorder:
    """Records a job in its run folder.

    output: of the job; default: output.log, which the relay writes. hook_dir: of the hook's state files; None: no hook.
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
        self._start_s = self._next_process_poll_s = self._last_output_s = time.monotonic()
        self._lines, self._parser = LineSplitter(), ProgressParser()
        self._processes: JobProcesses | None = None
        self._devices = max(1, len(json.loads((folder.path / ENVIRONMENT).read_bytes())["gpu"]["gpus"]))
        self._hook_reader = HookReader(hook_dir, devices=self._devices, now_s=self._start_s)
        self._windows = ProgressWindows(attempt=folder.attempt, devices=self._devices, start_s=time.time())
        self._events_written: set[str] = set()
        self._holders: list[dict[str, Any]] = []
        self._mistakes: list[dict[str, Any]] = []
        self._printed: list[dict[str, Any]] = []
        """Mistakes of which a framework has warned."""
        self._warnings = {row["printed"]: kind for kind, row in read_toml("mistakes.toml").items() if "printed" in row}
        """Part of a line → kind of mistake, of those that were not printed yet."""
        log = folder.path / OUTPUT
        start = log.stat().st_size if log.exists() else 0  # earlier attempts wrote that
        self._read_output = output or LogTail(log, start).read

    @contextlib.contextmanager
    def following(self, job: int) -> Iterator[None]:
        thread = threading.Thread(target=self._thread_main, name="recorder", daemon=True)
        self._processes = JobProcesses(job)
        sampler = stacks.StackSampler(
            self._folder,
            job,
            on_status=lambda reason: self.set_coverage(STACKS_SOURCE, reason),
            training_ranks=lambda: self._hook_reader.training_ranks,
        )
        with TelemetrySampler(self._folder, pid=job), sampler:
            thread.start()
            try:
                yield
            finally:
                self._stop.set()
                thread.join(2 * MAX_LAST_READ_S)  # a thread that hangs in a storage is abandoned

    def set_coverage(self, source: str, status: str) -> None:
        """Sets the status of a data source. From any thread."""
        with self._coverage_lock:
            if self._coverage.get(source) != status:
                self._coverage[source] = status
                self._folder.event("info", f"{source}: {status}", coverage=dict(self._coverage))

    def write_end(self, code: int | None) -> None:
        """code: as in `subprocess`, negative for a signal; None: not known."""
        data = self._termination_context()
        if code and (handled := self._hook_reader.handled_error(code)):
            data["handled_error"] = [mask_secrets(line) for line in handled]
        if code is None:
            self._folder.event("finished", f"{self._name} ended; its exit code is not known", exit_code=None, **data)
            return
        data["exit_code"] = code if code >= 0 else 128 - code
        if code < 0:
            data["signal"] = -code
        outcome = f"ended with exit code {code}" if code >= 0 else f"ended by signal {-code}"
        self._folder.event("finished" if code == 0 else "failed", f"{self._name} {outcome}", **data)

    def write_detached(self) -> None:
        """The job is still running; the recording ends."""
        self._folder.event("info", f"{self._name} is no longer watched; it is still running", detached=True)

    def write_start_failure(self, error: OSError, exit_code: int) -> None:
        self._folder.event("failed", f"{self._name} did not start: {error.strerror}", exit_code=exit_code)

    def _termination_context(self) -> dict[str, Any]:
        """Facts of its processes and lines of the kernel log; what is not available is absent."""
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
        except Exception as error:  # noqa: BLE001 (the job goes on, and an event says that its steps are not recorded)
            reason = f"{type(error).__name__}: {error}"
            self._folder.event("warning", f"steps.jsonl ends here: {reason}", recording_ended=reason)

    def _record_until_stopped(self) -> None:
        is_behind = stopping = False
        while not stopping:
            stopping = self._stop.wait(0.0 if is_behind else POLL_INTERVAL_S)
            is_behind = self._follow_output(MAX_LAST_READ_S if stopping else MAX_READ_S)
            if stopping:
                self._read_lines(self._lines.feed(b"", final=True))
                if is_behind:
                    text = "the end of the job's output was not read: steps in it are not recorded"
                    self._folder.event("warning", text)
            if (loss := self._windows.non_finite_loss) is not None:
                self._write_once("warning", f"the job printed that {loss}", not_finite=loss)
            if not stopping:
                self._poll_processes()
            self._hook_reader.poll()
            window_s = time.time() - self._windows.start_s
            has_news = self._windows.has_new_progress() or self._hook_reader.has_new_steps()
            if stopping or (window_s >= MIN_WINDOW_S and has_news) or window_s >= MAX_IDLE_WINDOW_S:
                self._write_windows(time.time())
                self._write_findings()
            if self._hook_reader.is_on and (stopping or self._hook_reader.has_trained()):
                self._write_hook_status(stopping=stopping)

    def _follow_output(self, max_s: float) -> bool:
        """Reads the output since the last call, for max_s at most; whether there is more."""
        deadline_s = time.monotonic() + max_s
        for data in self._read_output():
            self._last_output_s = time.monotonic()
            self._read_lines(self._lines.feed(data))
            if time.monotonic() > deadline_s:
                return True
        return False

    def _poll_processes(self) -> None:
        if self._processes is None or time.monotonic() < self._next_process_poll_s:
            return
        self._processes.poll()
        self._next_process_poll_s = time.monotonic() + PROCESS_POLL_S
        empty = self._processes.empty_inputs()
        if empty and time.monotonic() - self._last_output_s > EMPTY_INPUT_WARNING_S:
            text = f"no output for {EMPTY_INPUT_WARNING_S:.0f} s; the job reads {empty[0]}, which is empty"
            self._write_once("warning", text, empty_inputs=empty)

    def _write_findings(self) -> None:
        """Writes what holds growing memory, and the mistakes that were seen, if they changed."""
        if (holders := self._hook_reader.growing()) and holders != self._holders:
            self._holders = holders
            self._folder.event("info", holders[0]["text"], facts={"growth": holders})
        if (mistakes := self._hook_reader.mistakes() + self._printed) != self._mistakes:
            self._mistakes = mistakes
            kinds = ", ".join(str(one["kind"]) for one in mistakes)
            text = f"seen in the training loop: {kinds or 'no mistake any more'}"
            self._folder.event("info", text, facts={"mistakes": mistakes})

    def _write_hook_status(self, *, stopping: bool) -> None:
        self.set_coverage(HOOK_SOURCE, self._hook_reader.status())
        if (workers := self._hook_reader.num_loader_workers()) is not None:
            self._write_once("info", f"the job's loader has {workers} worker processes", workers=workers)
        function, why = self._hook_reader.recompiled_function() if stopping else ("", "")
        if function:
            facts = {"recompiled": function, "recompiled_why": why}
            self._folder.event("info", f"{function} was compiled again and again", facts=facts)

    def _read_lines(self, lines: list[str]) -> None:
        """Adds up their progress, and notes each mistake of which a framework warns in one of them, once."""
        for line in lines:
            if (progress := self._parser.read(line)) is not None:
                self._windows.add(progress)
            for part in [part for part in self._warnings if part in line]:
                shown = line.strip()[:MAX_WARNING]
                self._printed.append({"kind": self._warnings.pop(part), "place": "", "line": shown})

    def _write_once(self, kind: str, text: str, **data: Any) -> None:
        """Writes an event with one fact, unless there was one with this fact."""
        (name,) = data
        if name not in self._events_written:
            self._events_written.add(name)
            step = self._windows.step if name == "not_finite" else None
            self._folder.event(kind, text, step=step, **data)

    def _write_windows(self, now_s: float) -> None:
        """Writes the window of rank 0, and those of the other ranks in the same time."""
        by_rank = self._hook_reader.next_windows(time.monotonic(), now_s - self._windows.start_s)
        first = next(iter(by_rank), 0)
        window = self._windows.window(now_s, by_rank.pop(first, None))
        self._folder.append(STEPS, window)
        for rank, other in by_rank.items():
            other.t, other.attempt, other.wall_s = window.t, window.attempt, window.wall_s
            name = f"{RANKS}/{rank:04d}"
            (self._folder.path / name).mkdir(parents=True, exist_ok=True)
            self._folder.append(f"{name}/{STEPS}", other)


class LogTail:
    """Follows a log that grows and is rotated (a new file with the same name)."""

    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        self._start = start
        self._file: BinaryIO | None = None

    def read(self) -> Iterator[bytes]:
        """The data since the last call."""
        while True:
            if self._file is None:
                if not os.path.lexists(self._path):
                    return
                self._file = regular_files.open_file(self._path, flags=regular_files.NO_LINKS)
                self._file.seek(self._start)
                self._start = 0
            rotated = self._is_rotated(self._file)  # checked first: then all earlier data is in the old file
            while data := self._file.read(65536):
                yield data
            if not rotated:
                return
            self._file.close()
            self._file = None

    def _is_rotated(self, file: BinaryIO) -> bool:
        try:
            return not os.path.samestat(os.fstat(file.fileno()), self._path.lstat())
        except FileNotFoundError:  # between two files
            return True


class JobProcesses:
    """State of a job's processes: their PIDs, out-of-memory kills in their cgroups, and empty files that they read.

    pid: the root. `poll` costs a few milliseconds. An empty file counts if it was open for reading only in two polls.
    """

    def __init__(self, pid: int) -> None:
        self.pids: set[int] = {pid}
        self._pid = pid
        self._empty_counts: dict[str, int] = {}
        self._cgroups: dict[str, Cgroup] = {}
        self._oom_kills: dict[str, tuple[int, int]] = {}
        """The first and the newest count of each cgroup that has one."""
        self._track_cgroup(pid)

    def poll(self) -> None:
        for pid in list_process_tree(self._pid, limit=MAX_PROCESSES):
            if len(self.pids) < MAX_JOB_PIDS:
                self.pids.add(pid)
            self._track_cgroup(pid)
            for path in _empty_inputs(pid):
                if path in self._empty_counts or len(self._empty_counts) < MAX_EMPTY_FILES:
                    self._empty_counts[path] = self._empty_counts.get(path, 0) + 1
        self.oom_kills()

    def oom_kills(self) -> int | None:
        """Out-of-memory kills since the cgroups were first seen with processes of the job, also if they were removed
        with it; the maximum over them, because a cgroup includes its descendants. None: not available."""
        for name, (first, newest) in self._oom_kills.items():
            count = self._cgroups[name].oom_kills()
            self._oom_kills[name] = first, newest if count is None else count
        return max((newest - first for first, newest in self._oom_kills.values()), default=None)

    def _track_cgroup(self, pid: int) -> None:
        """A job may enter a cgroup after its start (`systemd-run --scope`)."""
        with contextlib.suppress(OSError):  # it ended meanwhile
            name = Path(f"/proc/{pid}/cgroup").read_text()
            if name not in self._cgroups and len(self._cgroups) < MAX_CGROUPS:
                cgroup = self._cgroups[name] = Cgroup.for_pid(pid)
                if (count := cgroup.oom_kills()) is not None:
                    self._oom_kills[name] = count, count

    def empty_inputs(self) -> list[str]:
        """The empty input files that are still empty, sorted."""
        return sorted(path for path, count in self._empty_counts.items() if count > 1 and _is_empty(path))


def _empty_inputs(pid: int) -> list[str]:
    """Files of zero bytes that a process has open for reading only."""
    paths = []
    with contextlib.suppress(OSError):  # it ended meanwhile, or may not be read
        for fd in os.listdir(f"/proc/{pid}/fd")[:MAX_OPEN_FILES]:
            with contextlib.suppress(OSError):
                fd_path = Path(f"/proc/{pid}/fd/{fd}")
                path, is_written = os.readlink(fd_path), fd_path.lstat().st_mode & stat.S_IWUSR
                if not is_written and not _NOT_INPUT.search(path) and _is_empty(fd_path):
                    paths.append(path)
    return paths


def _is_empty(path: str | Path) -> bool:
    try:
        file_status = os.stat(path)
    except OSError:  # removed, or in another mount namespace
        return False
    return stat.S_ISREG(file_status.st_mode) and file_status.st_size == 0 and file_status.st_nlink > 0
