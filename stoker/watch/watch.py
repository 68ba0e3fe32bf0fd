"""`stoker watch -- CMD…`: starts the job, passes signals on, waits, and ends as the job ended.

The job keeps session, process group, terminal, stdin, directory and environment, but for two variables by which its
Python processes load the hook (`hook/`, `inside.py`); its stdout and stderr are a pipe of ours, or a terminal of ours
where they were a terminal. `output_relay.py` empties that, `recorder.py` reads what it writes into output.log.
Whatever fails in the recording, the job goes on. Linux only: it needs to know who sent a signal.
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
from stoker.monitor.monitor import monitoring
from stoker.monitor.options import Monitoring
from stoker.runs.records import OUTPUT
from stoker.watch import output_relay
from stoker.watch.hook_reader import cells_folder, hooked
from stoker.watch.recorder import INSIDE_TIER, TIERS, Recorder, open_run_folder

FORWARDED = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
"""Those that a job is asked things by."""

PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
"""Python ignores these in itself; a job that a shell starts does not."""

DRAIN_S = 1.0
"""When the log has not grown for so long after the job's end, a process that the job left behind holds its output."""


def watch(
    command: list[str],
    run: str | None = None,
    *,
    hook: bool = True,
    monitor: Monitoring = Monitoring(),  # noqa: B008
) -> int:
    """Runs a job to its end and returns its exit code; where a signal ended it, ends this process by the same one.

    run: folder of the run; default runs/watch-NAME-N. hook: whether its Python processes are timed from the inside.
    monitor: who is told of what meanwhile. A program that does not start is 127 (not found) or 126, as in a shell.
    Raises UsageError, ConfigError, StorageError when the run's folder or what is asked for cannot be had: the job is
    not started then.
    """
    if not sys.platform.startswith("linux"):
        raise UsageError("`stoker watch` runs on Linux only.", cause="it needs to know who sent a signal")
    if not command:
        raise UsageError("Which job should be watched?", fix="stoker watch -- python train.py")
    monitor.check()
    tiers = TIERS if hook else {**TIERS, INSIDE_TIER: "not recorded: --no-hook"}
    with (
        open_run_folder(run, command, tiers=tiers) as (folder, lock),
        cells_folder(hook) as cells,
        contextlib.ExitStack() as stack,
    ):
        started: list[int] = []
        recorder = Recorder(folder, command, tiers=tiers, cells=cells)
        environment = dict(os.environ) if cells is None else hooked(os.environ, cells)
        if hook and cells is None:
            recorder.tier(INSIDE_TIER, "not recorded: there is no room for a few kilobytes in /dev/shm or /tmp")
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it was ignored, nobody could be waited for
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED | {signal.SIGCHLD})
        streams = _streams()
        written, done = os.pipe()
        log = folder.path / OUTPUT
        try:
            for source, _, targets in streams:
                _start_keeper(source, targets[0], log, lock, done)
            os.close(done)
            if any(not os.read(written, 1) for _ in streams):
                raise StorageError(
                    "The process that carries the job's output did not start.", place=output_relay.__file__
                )
            # after the mask: its threads are not to take signals that are for the job
            stack.enter_context(monitoring(folder, monitor, stop=lambda: _ask_to_end(started)))
            try:
                job = _start_job(command, streams, mask, environment)
                started.append(job)
            except OSError as error:
                code = 127 if error.errno == errno.ENOENT else 126
                recorder.failed_to_start(error, code)
                print(f"stoker watch: {command[0]}: {error.strerror}", file=sys.stderr)
                return code
        finally:
            for source, slave, _ in streams:
                os.close(source)
                os.close(slave)
        with recorder.following(job):
            status = _wait(job)
            started.clear()
            _drain(written, log)
        code = os.waitstatus_to_exitcode(status)
        recorder.ended(code)
        stack.close()
        if os.isatty(2):  # elsewhere nothing is added to what the job says
            print(f"stoker watch: {'done' if code == 0 else _how(code)}; `stoker why {folder.path}`", file=sys.stderr)
    if code < 0:
        _end_by(-code)
    return code


def _ask_to_end(started: list[int]) -> None:
    """As `kill` does; nothing where the job has not started or has ended."""
    for job in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(job, signal.SIGTERM)


Stream = tuple[int, int, list[int]]
"""The end that is read, the one that the job has, and which of 1 and 2 these are for."""


def _streams() -> list[Stream]:
    """What the job's stdout and stderr become: one for both where they are the same, so that the order stays. Where
    they are closed they stay so."""
    made: list[tuple[os.stat_result, Stream]] = []
    for target in (1, 2):
        try:
            status = os.fstat(target)
        except OSError:
            continue
        same = next((stream for other, stream in made if os.path.samestat(status, other)), None)
        if same is not None:
            same[2].append(target)
            continue
        if os.isatty(target):
            source, slave = os.openpty()
            changed = termios.tcgetattr(slave)
            changed[1] &= ~termios.OPOST  # the real terminal does that
            termios.tcsetattr(slave, termios.TCSANOW, changed)
            output_relay.same_size(source, target)
        else:
            source, slave = os.pipe()
        made.append((status, (_above_three(source), _above_three(slave), [target])))
    return [stream for _, stream in made]


def _above_three(handle: int) -> int:
    """The descriptor, out of the way of 0 to 4, which children get."""
    if handle > 4:
        return handle
    moved = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, 5)
    os.close(handle)
    return moved


def _start_keeper(source: int, target: int, log: Path, lock: int, done: int) -> None:
    """Its own interpreter, by vfork: threads and the size of this process do not matter to it."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    kept = [_copy_high(handle) for handle in (source, target, nowhere, lock, done)]
    actions = [(os.POSIX_SPAWN_DUP2, handle, place) for place, handle in enumerate(kept)]
    blocked = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}  # until it ignores them by itself
    words = [sys.executable, "-I", "-S", output_relay.__file__, str(log.absolute())]
    try:
        os.posix_spawn(sys.executable, words, os.environ, file_actions=actions, setsigmask=blocked)
    finally:
        for handle in (*kept, nowhere):
            os.close(handle)


def _copy_high(handle: int) -> int:
    """A copy above all numbers that a child is given, so that no copy overwrites another's source."""
    return fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, 10)


def _start_job(
    command: list[str], streams: list[Stream], mask: set[int | signal.Signals], environment: dict[str, str]
) -> int:
    actions = [(os.POSIX_SPAWN_DUP2, slave, target) for _, slave, targets in streams for target in targets]
    return os.posix_spawnp(
        command[0], command, environment, file_actions=actions, setsigmask=mask, setsigdef=PYTHON_IGNORES
    )


def _wait(job: int) -> int:
    """The job's wait status. Signals on the way are passed on, except those of the kernel: what the terminal sends
    (Ctrl-C, hang-up) the job has got itself, being in the same process group."""
    while True:
        came = signal.sigwaitinfo(FORWARDED | {signal.SIGCHLD})
        if came.si_signo == signal.SIGCHLD:
            pid, status = os.waitpid(job, os.WNOHANG)  # whoever started another child waits for it
            if pid == job:
                return status
        elif came.si_code <= 0:  # SI_USER, SI_QUEUE, SI_TKILL: a process sent it
            with contextlib.suppress(ProcessLookupError):
                os.kill(job, came.si_signo)


def _drain(written: int, log: Path) -> None:
    """Waits until the keepers have written all, but not for processes that the job left behind, and not for a slow
    reader: the keepers serve these alone."""
    size = _size(log)
    while not select.select([written], [], [], DRAIN_S)[0]:
        before, size = size, _size(log)
        if size == before:
            return


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _how(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"


def _end_by(number: int) -> None:
    """Ends this process by the signal that ended the job, without a core of our own."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(number, signal.SIG_DFL) if number not in (signal.SIGKILL, signal.SIGSTOP) else None
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.Signals(number)})
    os.kill(os.getpid(), number)
