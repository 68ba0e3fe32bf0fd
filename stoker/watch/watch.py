"""`stoker watch -- CMD…`: starts the job, forwards signals, waits, and ends as the job ended.

The job keeps its session, process group, terminal, stdin, directory and environment, except for two variables that make
its Python processes load the hook (`hook/`). Its stdout and stderr are pipes, or ptys if they were terminals.
`output_relay.py` reads them, and `recorder.py` reads output.log. If the recording fails, the job goes on. Linux only:
it must know which process sent a signal. A job that is already running: `attach.py`.
"""

import contextlib
import errno
import fcntl
import os
import resource
import select
import signal
import sys
import termios
from pathlib import Path

from stoker.errors import StorageError, UsageError
from stoker.hardware.cgroup import users_environment
from stoker.monitor.monitor import monitoring
from stoker.monitor.options import MonitoringOptions
from stoker.printable import print_text
from stoker.runs.records import OUTPUT
from stoker.watch import output_relay
from stoker.watch.hook_reader import add_hook_env, hook_state_dir
from stoker.watch.recorder import DEFAULT_COVERAGE, HOOK_SOURCE, Recorder, open_run_folder

FORWARDED_SIGNALS = frozenset(
    {signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
)
"""Signals that control a job."""

PYTHON_IGNORED_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ)
"""Python ignores these; a job that a shell starts does not."""

DRAIN_S = 1.0
"""If the log has not grown for this time after the job's end, a process that outlives the job holds its output."""


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
    if not sys.platform.startswith("linux"):
        raise UsageError("`stoker watch` runs on Linux only.", cause="it must know which process sent a signal")
    if not command:
        raise UsageError("Which job should be watched?", fix="stoker watch -- python train.py")
    monitor.validate()
    coverage = DEFAULT_COVERAGE if hook else {**DEFAULT_COVERAGE, HOOK_SOURCE: "not recorded: --no-hook"}
    with (
        open_run_folder(run, command, coverage=coverage) as (folder, lock),
        hook_state_dir(hook) as hook_dir,
        contextlib.ExitStack() as stack,
    ):
        job_pids: list[int] = []
        recorder = Recorder(folder, command, coverage=coverage, hook_dir=hook_dir)
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
            stack.enter_context(monitoring(folder, monitor, stop=lambda: _terminate_job(job_pids)))
            try:
                job_pid = _start_job(command, streams, mask, environment)
                job_pids.append(job_pid)
            except OSError as error:
                code = 127 if error.errno == errno.ENOENT else 126
                recorder.write_start_failure(error, code)
                print_text(f"stoker watch: {command[0]}: {error.strerror}", file=sys.stderr)
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
        if os.isatty(2):  # otherwise the output is only the job's
            print_text(
                f"stoker watch: {'done' if code == 0 else _describe_exit(code)}; `stoker why {folder.path}`",
                file=sys.stderr,
            )
    if code < 0:
        _kill_self(-code)
    return code


def _terminate_job(job_pids: list[int]) -> None:
    """Sends SIGTERM; does nothing if the job has not started or has ended."""
    for job_pid in job_pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(job_pid, signal.SIGTERM)


Stream = tuple[int, int, list[int]]
"""The descriptor to read, the job's descriptor, and which of 1 and 2 they replace."""


def _streams() -> list[Stream]:
    """The job's stdout and stderr: one stream for both if they are the same, to keep the order. Closed ones stay
    closed."""
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
        streams.append((status, (_move_above_reserved_fds(source), _move_above_reserved_fds(slave), [target])))
    return [stream for _, stream in streams]


def _move_above_reserved_fds(fd: int) -> int:
    """Moves the descriptor above 0 to 4, which children get."""
    if fd > 4:
        return fd
    new_fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 5)
    os.close(fd)
    return new_fd


def _start_relay(source: int, target: int, log: Path, lock: int, done_write_fd: int) -> None:
    """In a new interpreter, by vfork: independent of the threads and the size of this process."""
    devnull = os.open(os.devnull, os.O_RDWR)
    child_fds = [_copy_high(fd) for fd in (source, target, devnull, lock, done_write_fd)]
    actions = [(os.POSIX_SPAWN_DUP2, fd, child_fd) for child_fd, fd in enumerate(child_fds)]
    blocked = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}  # until it ignores them
    argv = [sys.executable, "-I", "-S", output_relay.__file__, str(log.absolute())]
    try:
        os.posix_spawn(sys.executable, argv, os.environ, file_actions=actions, setsigmask=blocked)
    finally:
        for fd in (*child_fds, devnull):
            os.close(fd)


def _copy_high(fd: int) -> int:
    """A copy above all descriptors of the child, so that no dup2 overwrites the source of another."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)


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
    """Waits until the relays have written everything, but not for processes that outlive the job, and not for a slow
    reader: the relays continue to serve these."""
    size = _file_size(log)
    while not select.select([done_fd], [], [], DRAIN_S)[0]:
        previous_size, size = size, _file_size(log)
        if size == previous_size:
            return


def _file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _describe_exit(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"


def _kill_self(signum: int) -> None:
    """Ends this process by the signal that ended the job, without a core dump."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(signum, signal.SIG_DFL) if signum not in (signal.SIGKILL, signal.SIGSTOP) else None
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.Signals(signum)})
    os.kill(os.getpid(), signum)
