"""`stoker watch --pid N`: records a running job without changing it. Linux only.

The job is observed from outside: driver, /proc, its cgroup, its stacks, and its output only if that is a readable file.
Ctrl-C ends the watching, never the job. `recorder.py` writes the records; `watch.py` is for a job that stoker starts.
"""

import contextlib
import dataclasses
import fcntl
import math
import os
import select
import shutil
import signal
import stat
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

import psutil

from stoker.diagnosis.termination import boot_id
from stoker.errors import UsageError
from stoker.hardware.cgroup import Cgroup, usable_cores
from stoker.monitor.monitor import monitoring
from stoker.monitor.options import MonitoringOptions
from stoker.printable import print_text
from stoker.profiling.telemetry.environment import describe_job
from stoker.runs.records import OUTPUT
from stoker.secrets import mask_argv
from stoker.watch import processes, stacks
from stoker.watch.output_relay import RotatingLog
from stoker.watch.processes import PROC, Process
from stoker.watch.recorder import HOOK_SOURCE, STACKS_SOURCE, Recorder, job_name, open_run_folder

CONTEXT_BYTES = 65536
"""Earlier output of the job that is kept for the postmortem; it does not count as progress."""
EXIT_CODE_TIMEOUT_S = 2.0
"""How long the parent of an ended job may take to reap it; after that the kernel reports the exit code here."""
MAX_CANDIDATES = 5
"""Processes that are suggested if there is none with the given PID."""

_OWN_PROGRAMS = ("stoker", "output_relay")
"""Programs that are not jobs."""

_GET_INFO = 0xC040FF0B
"""PIDFD_GET_INFO = _IOWR(0xFF, 11, struct pidfd_info), 64 bytes (linux/pidfd.h, kernel 6.15 and later)."""
_PIDFD_INFO_EXIT, _EXIT_STATUS_OFFSET = 1 << 3, 60
"""PIDFD_INFO_EXIT, and the offset of the exit status in the structure."""


@dataclasses.dataclass(frozen=True)
class AttachedProcess:
    """A process to be watched. pidfd: keeps referring to this process when its PID is reused."""

    process: Process
    pidfd: int
    command: list[str]
    cwd: str

    @property
    def pid(self) -> int:
        return self.process.pid


def attach(pid: int, run: str | None = None, monitor: MonitoringOptions = MonitoringOptions()) -> int:  # noqa: B008
    """Watches a process until it ends or a stop signal arrives. Returns its exit code as in a shell, 0 if that is not
    known or the job is still running.

    run: run folder; default runs/watch-NAME-N. monitor: alerts and metrics. Raises UsageError if there is no such
    process or it may not be watched; ConfigError if `monitor` is not valid; StorageError if the run folder cannot be
    used.
    """
    if not sys.platform.startswith("linux"):
        raise UsageError("`stoker watch` runs on Linux only.", cause="it needs pidfds and /proc")
    job = _open_process(pid)
    try:
        with _open_output(job) as (files, status):
            return _watch_process(job, files, status, run, monitor)
    finally:
        os.close(job.pidfd)


def _watch_process(
    job: AttachedProcess, files: list[BinaryIO], status: str, run: str | None, monitor: MonitoringOptions
) -> int:
    coverage = {
        "driver and kernel": "recorded",
        "output": status,
        STACKS_SOURCE: stacks.RECORDED,
        HOOK_SOURCE: "not recorded: the job was already running; time that its output does not explain is unattributed",
    }
    process_identity = {"pid": job.pid, "start_ticks": job.process.start_ticks, "boot": boot_id()}
    with open_run_folder(
        run, job.command, coverage=coverage, environment=_describe_environment(job), job=process_identity
    ) as (folder, _):
        output = FileOutput(files, RotatingLog(str(folder.path / OUTPUT)))
        recorder = Recorder(folder, job.command, coverage=coverage, output=output)
        status = (
            f"recording {job.pid} ({job_name(job.command)}) into {folder.path}; Ctrl-C ends the recording, not the job"
        )
        print_text(f"stoker watch: {status}", file=sys.stderr, flush=True)
        with monitoring(folder, monitor, stop=lambda: signal.pidfd_send_signal(job.pidfd, signal.SIGTERM)):
            with _stop_signal_fd() as stop_fd, recorder.following(job.pid):
                ready, _, _ = select.select([job.pidfd, stop_fd], [], [])
                ended = job.pidfd in ready
                code = read_exit_code(job) if ended else None
            if not ended:
                recorder.write_detached()
                print_text(f"stoker watch: the job is still running; `stoker why {folder.path}`", file=sys.stderr)
                return 0
            recorder.write_end(code)
    exit_text = "its exit code is not known" if code is None else f"exit code {code if code >= 0 else 128 - code}"
    print_text(f"stoker watch: the job ended, {exit_text}; `stoker why {folder.path}`", file=sys.stderr)
    return 0 if code is None else code if code >= 0 else 128 - code


def read_exit_code(job: AttachedProcess) -> int | None:
    """The exit code of an ended job, as in `subprocess`; None if it is not known. The kernel reports it since 6.15, and
    before that until the parent reaps the process."""
    deadline_s = time.monotonic() + EXIT_CODE_TIMEOUT_S
    code: int | None = None
    while True:
        process_status = processes.read_status(job.pid)
        if (
            process_status is not None
            and process_status.start_ticks == job.process.start_ticks
            and process_status.state in "ZX"
        ):
            code = os.waitstatus_to_exitcode(process_status.exit_status)
        info = bytearray(64)
        struct.pack_into("<Q", info, 0, _PIDFD_INFO_EXIT)
        with contextlib.suppress(OSError):  # an older kernel, or not reaped yet
            fcntl.ioctl(job.pidfd, _GET_INFO, info)
            if struct.unpack_from("<Q", info)[0] & _PIDFD_INFO_EXIT:
                return os.waitstatus_to_exitcode(struct.unpack_from("<i", info, _EXIT_STATUS_OFFSET)[0])
        if code is not None or time.monotonic() > deadline_s:
            return code
        time.sleep(0.02)


@contextlib.contextmanager
def _stop_signal_fd() -> Iterator[int]:
    """A descriptor that becomes readable when a stop signal arrives."""
    stop_fd, wakeup_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    previous_fd = signal.set_wakeup_fd(wakeup_fd)
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {signum: signal.signal(signum, lambda *_: None) for signum in signals}
    try:
        yield stop_fd
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(previous_fd)
        os.close(stop_fd)
        os.close(wakeup_fd)


def _open_process(pid: int) -> AttachedProcess:
    """The process, if it may be watched. Raises UsageError."""
    process_status = processes.read_status(pid) if pid > 0 else None
    try:
        pidfd = os.pidfd_open(pid) if process_status is not None else -1
    except OSError:  # the ID of a thread, or it has just ended
        pidfd = -1
    if process_status is None or pidfd < 0:
        leader = _thread_group_leader(pid)
        cause = f"it is a thread of process {leader}" if leader not in (None, pid) else None
        raise UsageError(f"There is no process {pid}.", cause=cause, choices=_candidates(), fix="stoker watch --pid N")
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, pidfd)
        try:
            _check_watchable(pid, process_status)
            cwd = os.readlink(PROC / str(pid) / "cwd")
        except (FileNotFoundError, ProcessLookupError) as error:
            raise UsageError(f"Process {pid} has just ended.") from error
        except OSError as error:
            raise UsageError(
                f"Process {pid} may not be read.", location=error.filename, cause=error.strerror,
                fix="run stoker as its user or as root; in a container, inside the same one, with CAP_SYS_PTRACE",
            ) from error  # fmt: skip
        stack.pop_all()
    command = processes.read_command(pid) or [f"pid-{pid}"]
    return AttachedProcess(Process(pid, process_status.start_ticks), pidfd, command, cwd)


def _check_watchable(pid: int, process_status: processes.Status) -> None:
    if process_status.state in "ZX":
        raise UsageError(f"Process {pid} has already ended.", cause="its parent has not reaped it yet")
    if pid in processes.list_ancestors(os.getpid()):
        description = "stoker itself" if pid == os.getpid() else "an ancestor of stoker"
        raise UsageError(f"Process {pid} is {description}.", choices=_candidates(), fix="give the PID of the job")
    owner = (PROC / str(pid)).stat().st_uid
    if owner != os.geteuid() != 0:
        cause, fix = "only that user and root may read it", "run stoker as that user or as root"
        raise UsageError(f"Process {pid} belongs to user {owner}.", cause=cause, fix=fix)
    if not processes.read_command(pid) and process_status.parent_pid in (0, 2):
        raise UsageError(f"Process {pid} is a kernel thread.", choices=_candidates())


def _thread_group_leader(pid: int) -> int | None:
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("Tgid:")), None)


def _candidates() -> list[str]:
    """Python processes of this user, the busiest first: `PID (script)`."""
    ancestors, candidates = processes.list_ancestors(os.getpid()), []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it ended, or may not be read
            if process.pid not in ancestors and process.uids().effective == os.geteuid():
                name = job_name(process.cmdline() or ["?"])
                if processes.is_python(process.pid) and name not in _OWN_PROGRAMS:
                    candidates.append((sum(process.cpu_times()[:2]), f"{process.pid} ({name})"))
    return [text for _, text in sorted(candidates, reverse=True)[:MAX_CANDIDATES]]


def _describe_environment(job: AttachedProcess) -> dict[str, Any]:
    """environment.json of a running job: its variables and limits, not those of stoker."""
    env = processes.read_environ(job.pid)
    program = os.path.join(job.cwd, job.command[0])
    if "/" not in job.command[0]:
        program = shutil.which(job.command[0], path=env.get("PATH")) or job.command[0]
    described = describe_job([program], env)
    cgroup = Cgroup.for_pid(job.pid)
    memory = cgroup.memory_state()
    limits = [described["memory_limit_bytes"], *([memory.limit] if memory else [])]
    return described | {
        "argv": mask_argv(job.command),
        "cwd": job.cwd,
        "cpu_quota": cgroup.cpu_limit_cores(),
        "cores": max(1, math.ceil(usable_cores(job.pid, cgroup))),
        "memory_limit_bytes": min(limits),
    }


@contextlib.contextmanager
def _open_output(job: AttachedProcess) -> Iterator[tuple[list[BinaryIO], str]]:
    """The files of its stdout and stderr, and the status of this data source."""
    files: list[BinaryIO] = []
    reasons, names = [], []
    with contextlib.ExitStack() as stack:
        for fd, name in ((1, "stdout"), (2, "stderr")):
            fd_path = PROC / str(job.pid) / "fd" / str(fd)
            try:
                file_status = fd_path.stat()
                if not stat.S_ISREG(file_status.st_mode):
                    reasons.append(f"its {name} is {_describe_file_type(file_status.st_mode, os.readlink(fd_path))}")
                    continue
                if any(os.path.samestat(file_status, os.fstat(file.fileno())) for file in files):
                    continue
                names.append(os.readlink(fd_path))
                files.append(stack.enter_context(fd_path.open("rb")))
            except OSError as error:
                reasons.append(f"its {name} cannot be read: {error.strerror}")
        if files:
            status = f"recorded from now on, from {' and '.join(names)}"
            yield files, "; ".join([status, *(f"not recorded: {reason}" for reason in reasons)])
        else:
            yield files, f"not recorded: {'; '.join(reasons)}; steps and error messages are not known"


def _describe_file_type(mode: int, name: str) -> str:
    if stat.S_ISFIFO(mode):
        return "a pipe, which only its reader can read"
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "a terminal, which cannot be read" if name.startswith(("/dev/pts/", "/dev/tty")) else name


class FileOutput:
    """A job's output from the files that it writes, copied into the run's output.log.

    Files are read from their current end on; the CONTEXT_BYTES before it are only copied into the log.
    """

    def __init__(self, files: list[BinaryIO], log: RotatingLog) -> None:
        self.skipped_bytes = 0
        self._files = files
        self._log = log
        for file in files:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - CONTEXT_BYTES))
            context = file.read(min(size, CONTEXT_BYTES))
            if size > CONTEXT_BYTES:
                context = context.partition(b"\n")[2]
            if context:
                self._log.write(context)

    def unread_bytes(self) -> int:
        return sum(max(0, os.fstat(file.fileno()).st_size - file.tell()) for file in self._files)

    def read(self) -> Iterator[bytes]:
        """The data since the last call."""
        for file in self._files:
            if os.fstat(file.fileno()).st_size < file.tell():
                file.seek(0)  # the file was truncated
            while data := file.read(CONTEXT_BYTES):
                self._log.write(data)
                yield data
