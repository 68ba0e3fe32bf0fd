"""`stoker watch -- CMD…`: starts the job, forwards signals, waits, and ends as the job ended. `stoker watch --pid N`:
records a running job.

A job that is started keeps its session, process group, terminal, stdin, directory and environment, except for two
variables that make its Python processes load the hook (`hook/`). Its stdout and stderr are pipes, or ptys if they were
terminals. `output_relay.py` reads them, and `recorder.py` reads output.log. If the recording fails, the job goes on.

A running job is not changed: it is observed from outside, and its output only if that is a readable file. Ctrl-C ends
the watching, never the job. Linux only: it needs /proc, pidfds, and the sender of a signal.
"""

import contextlib
import dataclasses
import errno
import fcntl
import math
import os
import resource
import select
import shutil
import signal
import stat
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from stoker_watch.diagnosis.termination import boot_id
from stoker_watch.errors import StorageError, UsageError, make_error
from stoker_watch.hardware.cgroup import Cgroup, usable_cores, users_environment
from stoker_watch.monitor.monitor import monitoring
from stoker_watch.monitor.options import MonitoringOptions
from stoker_watch.printable import print_text
from stoker_watch.recording import stacks
from stoker_watch.recording.telemetry.environment import describe_job
from stoker_watch.recording.telemetry.machine import ForeignProcess, read, read_life
from stoker_watch.runs.records import OUTPUT
from stoker_watch.secrets import mask_argv
from stoker_watch.watch import output_relay
from stoker_watch.watch.hook_reader import add_hook_env, hook_state_dir
from stoker_watch.watch.output_relay import RotatingLog
from stoker_watch.watch.recorder import (
    DEFAULT_COVERAGE,
    HOOK_SOURCE,
    STACKS_SOURCE,
    JobRecorder,
    job_name,
    open_run_folder,
)

FORWARDED_SIGNALS = frozenset(output_relay.IGNORED_SIGNALS) - {signal.SIGPIPE}
"""Signals that control a job."""

PYTHON_IGNORED_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ)
"""Python ignores these; a job that a shell starts does not."""

DRAIN_S = 1.0
"""If the log has not grown for this time after the job's end, a process that outlives the job holds its output."""

CONTEXT_BYTES = 65536
"""Earlier output of the job that is kept for the postmortem; it does not count as progress."""
EXIT_CODE_TIMEOUT_S = 2.0
"""How long the parent of an ended job may take to reap it; after that the kernel reports the exit code here."""

_GET_INFO = 0xC040FF0B
"""PIDFD_GET_INFO = _IOWR(0xFF, 11, struct pidfd_info), 64 bytes (linux/pidfd.h, kernel 6.15 and later)."""
_PIDFD_INFO_EXIT, _EXIT_STATUS_OFFSET = 1 << 3, 60
"""PIDFD_INFO_EXIT, and the offset of the exit status in the structure."""


def watch(
    command: list[str],
    run: str | None = None,
    *,
    hook: bool = True,
    monitor: MonitoringOptions = MonitoringOptions(),  # noqa: B008
) -> int:
    """Runs a job to its end and returns its exit code; if a signal ended it, ends this process by the same signal.

    run: run folder; default runs/watch-NAME-N. hook: whether its Python processes load the hook. monitor: alerts and
    metrics. The exit code of a program that does not start is 127 (not found) or 126, as in a shell. Raises UsageError,
    ConfigError, StorageError if the arguments or the run folder cannot be used: then the job is not started.
    """
    _check_platform()
    if not command:
        raise UsageError("Which job should be watched?", fix="stoker watch -- python train.py")
    if command[0].startswith("-"):
        raise UsageError(f"`stoker watch` has no {command[0]}.", fix="`stoker watch --help` lists the flags")
    monitor.validate()
    coverage = DEFAULT_COVERAGE if hook else {**DEFAULT_COVERAGE, HOOK_SOURCE: "not recorded: --no-hook"}
    with (
        open_run_folder(run, command, coverage=coverage) as (folder, lock),
        hook_state_dir(hook) as hook_dir,
        contextlib.ExitStack() as stack,
    ):
        job_pids: list[int] = []
        recorder = JobRecorder(folder, command, coverage=coverage, hook_dir=hook_dir)
        environment = users_environment() if hook_dir is None else add_hook_env(users_environment(), hook_dir)
        if hook and hook_dir is None:
            recorder.set_coverage(HOOK_SOURCE, "not recorded: no space for a few kilobytes in /dev/shm or /tmp")
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, waitpid does not work
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS | {signal.SIGCHLD})
        streams = _streams()
        done_fd, done_write_fd = os.pipe()
        log = folder.path / OUTPUT
        try:
            for source, _, targets in streams:
                _start_relay(source, targets[0], log, lock, done_write_fd)
            os.close(done_write_fd)
            if any(not os.read(done_fd, 1) for _ in streams):
                raise StorageError("The relay of the job's output did not start.", location=output_relay.__file__)
            # after the mask: its threads must not take signals that are for the job
            _say(f"recording into {folder.path}")
            stack.enter_context(monitoring(folder, monitor, stop=lambda: _terminate_job(job_pids), say=_say))
            try:
                job_pid = _start_job(command, streams, mask, environment)
                job_pids.append(job_pid)
            except OSError as error:
                code = 127 if error.errno == errno.ENOENT else 126
                recorder.write_start_failure(error, code)
                _say(f"{command[0]}: {error.strerror}")
                return code
        finally:
            for source, slave, _ in streams:
                os.close(source)
                os.close(slave)
        with recorder.following(job_pid):
            status = _wait_for_job(job_pid)
            job_pids.clear()
            _drain_output(done_fd, log)
        code = os.waitstatus_to_exitcode(status)
        recorder.write_end(code)
        stack.close()
        ending = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}" if code else "done"
        _say(f"{ending}; `stoker why {folder.path}`")
    if code < 0:
        _kill_self(-code)
    return code


def _say(text: str) -> None:
    """A line of stoker on stderr, which the job's own output may share."""
    with contextlib.suppress(OSError):  # a closed or full stderr is no reason to disturb the job
        print_text(f"stoker watch: {text}", file=sys.stderr, flush=True)


def _check_platform() -> None:
    if not sys.platform.startswith("linux"):
        raise UsageError("`stoker watch` runs on Linux only.", cause="it needs /proc and pidfds")


def _terminate_job(job_pids: list[int]) -> None:
    """Sends SIGTERM; does nothing if the job has not started or has ended."""
    for job_pid in job_pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(job_pid, signal.SIGTERM)


Stream = tuple[int, int, list[int]]
"""The descriptor to read, the job's descriptor, and which of 1 and 2 they replace."""


def _streams() -> list[Stream]:
    """The job's stdout and stderr: one stream for both if they are the same, to keep the order."""
    streams: list[tuple[os.stat_result, Stream]] = []
    for target in (1, 2):
        try:
            status = os.fstat(target)
        except OSError:
            continue
        existing = next((stream for other, stream in streams if os.path.samestat(status, other)), None)
        if existing is not None:
            existing[2].append(target)
            continue
        if os.isatty(target):
            source, slave = os.openpty()
            attributes = termios.tcgetattr(slave)
            attributes[1] &= ~termios.OPOST  # done by the real terminal
            termios.tcsetattr(slave, termios.TCSANOW, attributes)
            output_relay.sync_terminal_size(source, target)
        else:
            source, slave = os.pipe()
        streams.append((status, (source, slave, [target])))
    return [stream for _, stream in streams]


def _start_relay(source: int, target: int, log: Path, lock: int, done_write_fd: int) -> None:
    """In a new interpreter, by vfork: independent of the threads and the size of this process. It holds the lock, too;
    signals are blocked, as here, until it ignores them."""
    # copies, as these may be 0 to 2 (stdin was closed at the start), where the relay gets other files
    passed = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (lock, done_write_fd)]
    argv = [sys.executable, "-I", "-S", output_relay.__file__, str(log.absolute()), str(passed[1])]
    try:
        relay = subprocess.Popen(argv, stdin=source, stdout=target, stderr=subprocess.DEVNULL, pass_fds=passed)
    finally:
        for fd in passed:
            os.close(fd)
    relay.returncode = 0  # it may outlive the watcher, and nothing waits for it: no ResourceWarning


def _start_job(
    command: list[str], streams: list[Stream], mask: set[int | signal.Signals], environment: dict[str, str]
) -> int:
    actions = [(os.POSIX_SPAWN_DUP2, slave, target) for _, slave, targets in streams for target in targets]
    return os.posix_spawnp(
        command[0], command, environment, file_actions=actions, setsigmask=mask, setsigdef=PYTHON_IGNORED_SIGNALS
    )


def _wait_for_job(job_pid: int) -> int:
    """The job's wait status. Forwards signals, except those from the kernel: signals of the terminal (Ctrl-C, hang-up)
    reach the job directly, since it is in the same process group."""
    while True:
        siginfo = signal.sigwaitinfo(FORWARDED_SIGNALS | {signal.SIGCHLD})
        if siginfo.si_signo == signal.SIGCHLD:
            pid, status = os.waitpid(job_pid, os.WNOHANG)  # other children are waited for elsewhere
            if pid == job_pid:
                return status
        elif siginfo.si_code <= 0:  # SI_USER, SI_QUEUE, SI_TKILL: sent by a process
            with contextlib.suppress(ProcessLookupError):
                os.kill(job_pid, siginfo.si_signo)


def _drain_output(done_fd: int, log: Path) -> None:
    """Waits until the relays have written everything, but not for processes that outlive the job or a slow reader."""
    size = _file_size(log)
    while not _wait_readable(done_fd, timeout_s=DRAIN_S):
        previous_size, size = size, _file_size(log)
        if size == previous_size:
            return


def _wait_readable(*fds: int, timeout_s: float | None = None) -> list[int]:
    """The descriptors that can be read; empty after the time. Unlike `select`, it takes those above 1,023."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(None if timeout_s is None else 1000 * timeout_s)]


def _file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _kill_self(signum: int) -> None:
    """Ends this process by the signal that ended the job, without a core dump."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(signum, signal.SIG_DFL) if signum not in (signal.SIGKILL, signal.SIGSTOP) else None
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.Signals(signum)})
    os.kill(os.getpid(), signum)


@dataclasses.dataclass(frozen=True)
class AttachedProcess:
    """A process to be watched. pidfd: keeps referring to this process when its PID is reused."""

    pid: int
    pidfd: int
    command: list[str]
    cwd: str
    start_ticks: int


def attach(pid: int, run: str | None = None, monitor: MonitoringOptions = MonitoringOptions()) -> int:  # noqa: B008
    """Watches a process until it ends or a stop signal arrives. Returns its exit code as in a shell, 0 if that is not
    known or the job is still running.

    run: run folder; default runs/watch-NAME-N. monitor: alerts and metrics. Raises UsageError if there is no such
    process or it may not be watched, ConfigError, StorageError if `monitor` or the run folder cannot be used.
    """
    _check_platform()
    job = _open_process(pid)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, job.pidfd)
        files, status = stack.enter_context(_open_output(job))
        coverage = {
            "driver and kernel": "recorded",
            "output": status,
            STACKS_SOURCE: stacks.RECORDED,
            HOOK_SOURCE: "not recorded: the job was already running; time that its output does not explain is "
            "unattributed",
        }
        identity = {"pid": pid, "start_ticks": job.start_ticks, "boot": boot_id()}
        folder, _ = stack.enter_context(
            open_run_folder(run, job.command, coverage=coverage, environment=_describe_environment(job), job=identity)
        )
        output = copy_output(files, RotatingLog(str(folder.path / OUTPUT)))
        recorder = JobRecorder(folder, job.command, coverage=coverage, output=output)
        text = f"recording {pid} ({job_name(job.command)}) into {folder.path}; Ctrl-C ends the recording, not the job"
        _say(text)
        with monitoring(folder, monitor, stop=lambda: signal.pidfd_send_signal(job.pidfd, signal.SIGTERM), say=_say):
            with _stop_signal_fd() as stop_fd, recorder.following(pid):
                ended = job.pidfd in _wait_readable(job.pidfd, stop_fd)
                code = read_exit_code(job) if ended else None
            if ended:
                recorder.write_end(code)
            else:
                recorder.write_detached()
    shell_code = 0 if code is None else code if code >= 0 else 128 - code
    text = f"the job ended, {'its exit code is not known' if code is None else f'exit code {shell_code}'}"
    text = text if ended else "the job is still running"
    _say(f"{text}; `stoker why {folder.path}`")
    return shell_code


def read_exit_code(job: AttachedProcess) -> int | None:
    """The exit code of an ended job, as in `subprocess`; None if it is not known. The kernel reports it since 6.15, and
    before that until the parent reaps the process."""
    deadline_s = time.monotonic() + EXIT_CODE_TIMEOUT_S
    code: int | None = None
    while True:
        with contextlib.suppress(OSError):  # it was reaped
            fields = read(f"/proc/{job.pid}/stat").decode(errors="replace").rpartition(")")[2].split()  # proc(5)
            if int(fields[19]) == job.start_ticks and fields[0] in "ZX":
                code = os.waitstatus_to_exitcode(int(fields[49]))
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
    try:
        pidfd = os.pidfd_open(pid)
    except (OSError, OverflowError) as error:  # the ID of a thread, or there is none
        raise make_error(UsageError, "no-process", pid=pid) from error
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, pidfd)
        try:
            process, life = ForeignProcess(pid), read_life(pid)
            if life is None:
                raise UsageError(f"Process {pid} has already ended.", cause="its parent has not reaped it yet")
            if pid in {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}:
                description = "stoker itself" if pid == os.getpid() else "an ancestor of stoker"
                raise UsageError(f"Process {pid} is {description}.", fix="give the PID of the job")
            if (owner := process.uids().effective) != os.geteuid() != 0:
                raise make_error(UsageError, "process-of-another-user", pid=pid, owner=owner)
            job = AttachedProcess(pid, pidfd, process.cmdline() or [f"pid-{pid}"], process.cwd(), life.start_ticks)
        except (FileNotFoundError, psutil.NoSuchProcess) as error:
            raise UsageError(f"Process {pid} has just ended.") from error
        except (OSError, psutil.AccessDenied) as error:
            raise make_error(UsageError, "process-not-readable", pid=pid) from error
        stack.pop_all()
    return job


def _describe_environment(job: AttachedProcess) -> dict[str, Any]:
    """environment.json of a running job: its variables and limits, not those of stoker."""
    env: dict[str, str] = {}
    with contextlib.suppress(psutil.Error):  # it may not be read
        env = ForeignProcess(job.pid).environ()
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
            fd_path = Path(f"/proc/{job.pid}/fd/{fd}")
            try:
                file_status = fd_path.stat()
                if not stat.S_ISREG(file_status.st_mode):
                    reasons.append(f"its {name} is not a file but {os.readlink(fd_path)}")
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


def copy_output(files: list[BinaryIO], log: RotatingLog) -> Callable[[], Iterator[bytes]]:
    """A job's output from the files that it writes, copied into the run's output.log: a function of the data since its
    last call. Files are read from their current end on; the CONTEXT_BYTES before it are only copied into the log."""
    for file in files:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - CONTEXT_BYTES))
        context = file.read(min(size, CONTEXT_BYTES))
        if context := context.partition(b"\n")[2] if size > CONTEXT_BYTES else context:
            log.write(context)

    def read() -> Iterator[bytes]:
        for file in files:
            if os.fstat(file.fileno()).st_size < file.tell():
                file.seek(0)  # the file was truncated
            while data := file.read(CONTEXT_BYTES):
                log.write(data)
                yield data

    return read
