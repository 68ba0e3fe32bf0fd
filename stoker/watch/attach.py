"""`stoker watch --pid N`: records a job that runs already, and leaves it alone. Linux only.

The job is looked at from outside: driver, /proc, its cgroup, its stacks, and its output only where that goes into a
file that we may read. Ctrl-C ends the watching, never the job. `recorder.py` writes what is seen; a job that is started
to be watched is `watch.py`'s.
"""

import contextlib
import dataclasses
import fcntl
import os
import pwd
import select
import shutil
import signal
import stat
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

from stoker.diagnosis.alive import boot_id
from stoker.errors import UsageError
from stoker.hardware.cgroup import Cgroup
from stoker.monitor.monitor import monitoring
from stoker.monitor.options import Monitoring
from stoker.profiling.telemetry.environment import describe_job, masked_words
from stoker.runs.records import OUTPUT
from stoker.watch import processes, stacks
from stoker.watch.output_relay import Log
from stoker.watch.processes import PROC, Process
from stoker.watch.recorder import INSIDE_TIER, STACKS_TIER, Recorder, job_name, open_run_folder

CONTEXT_BYTES = 65536
"""Of what the job had written before, which is kept for the post-mortem; nothing is counted in it."""
REAPED_S = 2.0
"""Time that the parent of a job which ended gets to ask for its exit code; the kernel tells it to us after that."""
CHOICES = 5
"""Processes that are offered where there is none of the given number."""

_OURS = ("stoker", "keeper")
"""Programs that are no jobs."""

_GET_INFO = 0xC040FF0B
"""PIDFD_GET_INFO = _IOWR(0xFF, 11, struct pidfd_info), 64 bytes (linux/pidfd.h, kernel 6.15 and later)."""
_EXIT, _EXIT_AT = 1 << 3, 60
"""PIDFD_INFO_EXIT, and where the exit status then stands in the structure."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A process to be watched. handle: its pidfd, which stays that of this process when its number is given again."""

    process: Process
    handle: int
    command: list[str]
    folder: str

    @property
    def pid(self) -> int:
        return self.process.pid


def attach(pid: int, run: str | None = None, monitor: Monitoring = Monitoring()) -> int:  # noqa: B008
    """Watches a process until it ends or a signal asks us to stop; its exit code as a shell says it, 0 where that is
    not known and where the job lives on.

    run: folder of the run; default runs/watch-NAME-N. monitor: who is told of what meanwhile. Raises UsageError when
    there is no such process or it may not be watched; ConfigError where what is asked for cannot be had; StorageError
    when the run's folder cannot be used.
    """
    if not sys.platform.startswith("linux"):
        raise UsageError("`stoker watch` runs on Linux only.", cause="it needs pidfds and /proc")
    job = _open(pid)
    try:
        with _output_of(job) as (files, said):
            return _watch(job, files, said, run, monitor)
    finally:
        os.close(job.handle)


def _watch(job: Job, files: list[BinaryIO], said: str, run: str | None, monitor: Monitoring) -> int:
    tiers = {
        "driver and kernel": "recorded",
        "output": said,
        STACKS_TIER: stacks.RECORDED,
        INSIDE_TIER: "not recorded: the job ran already; what no line of its output says is unattributed",
    }
    identity = {"pid": job.pid, "began": job.process.began, "boot": boot_id()}
    with open_run_folder(run, job.command, tiers=tiers, environment=_environment(job), job=identity) as (folder, _):
        output = FileOutput(files, Log(str(folder.path / OUTPUT)))
        recorder = Recorder(folder, job.command, tiers=tiers, output=output)
        said = f"records {job.pid} ({job_name(job.command)}) into {folder.path}; Ctrl-C ends that, not the job"
        print(f"stoker watch: {said}", file=sys.stderr, flush=True)
        with monitoring(folder, monitor, stop=lambda: signal.pidfd_send_signal(job.handle, signal.SIGTERM)):
            with _asked_to_stop() as asked, recorder.following(job.pid):
                ready, _, _ = select.select([job.handle, asked], [], [])
                ended = job.handle in ready
                code = exit_code(job) if ended else None
            if not ended:
                recorder.detached()
                print(f"stoker watch: the job lives on; `stoker why {folder.path}`", file=sys.stderr)
                return 0
            recorder.ended(code)
    how = "its exit code is not known" if code is None else f"exit code {code if code >= 0 else 128 - code}"
    print(f"stoker watch: the job ended, {how}; `stoker why {folder.path}`", file=sys.stderr)
    return 0 if code is None else code if code >= 0 else 128 - code


def exit_code(job: Job) -> int | None:
    """Of a job that has ended, as `subprocess` has it; None where nobody tells us. The kernel does since 6.15, and
    before that while the parent has not asked for it."""
    until_s = time.monotonic() + REAPED_S
    told: int | None = None
    while True:
        seen = processes.status(job.pid)
        if seen is not None and seen.began == job.process.began and seen.state in "ZX":
            told = os.waitstatus_to_exitcode(seen.exit_status)
        info = bytearray(64)
        struct.pack_into("<Q", info, 0, _EXIT)
        with contextlib.suppress(OSError):  # an older kernel, or its parent has not asked yet
            fcntl.ioctl(job.handle, _GET_INFO, info)
            if struct.unpack_from("<Q", info)[0] & _EXIT:
                return os.waitstatus_to_exitcode(struct.unpack_from("<i", info, _EXIT_AT)[0])
        if told is not None or time.monotonic() > until_s:
            return told
        time.sleep(0.02)


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[int]:
    """A descriptor that can be read from when a signal asks us to stop."""
    asked, tells = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(tells)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(asked)
        os.close(tells)


def _open(pid: int) -> Job:
    """The process, if it may be watched. Raises UsageError."""
    seen = processes.status(pid) if pid > 0 else None
    try:
        handle = os.pidfd_open(pid) if seen is not None else -1
    except OSError:  # a thread's number, or it ended just now
        handle = -1
    if seen is None or handle < 0:
        leader = _leader(pid)
        cause = f"it is a thread of process {leader}" if leader not in (None, pid) else None
        raise UsageError(f"There is no process {pid}.", cause=cause, choices=_candidates(), fix="stoker watch --pid N")
    try:
        _may_be_watched(pid, seen)
        folder = os.readlink(PROC / str(pid) / "cwd")
    except PermissionError as error:
        os.close(handle)
        raise UsageError(
            f"Process {pid} may not be looked at.", place=error.filename, cause=error.strerror,
            fix="run stoker as root, or with CAP_SYS_PTRACE; in a container, inside the same one",
        ) from error  # fmt: skip
    except OSError as error:
        os.close(handle)
        raise UsageError(f"Process {pid} ended just now.") from error
    except UsageError:
        os.close(handle)
        raise
    return Job(Process(pid, seen.began), handle, processes.command(pid) or [f"pid-{pid}"], folder)


def _may_be_watched(pid: int, seen: processes.Status) -> None:
    if seen.state in "ZX":
        raise UsageError(f"Process {pid} has ended already.", cause="only its parent has not asked for its exit code")
    if pid in processes.ancestors(os.getpid()):
        what = "stoker itself" if pid == os.getpid() else "one that stoker was started from"
        raise UsageError(f"Process {pid} is {what}.", choices=_candidates(), fix="name the job's process")
    owner = (PROC / str(pid)).stat().st_uid
    if owner != os.geteuid() != 0:
        fix = f"run stoker as {_user(owner)} or as root"
        raise UsageError(
            f"Process {pid} belongs to {_user(owner)}.", cause="the kernel shows it to nobody else", fix=fix
        )
    if not processes.command(pid) and seen.parent in (0, 2):
        raise UsageError(f"Process {pid} is a part of the kernel.", choices=_candidates())


def _leader(pid: int) -> int | None:
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("Tgid:")), None)


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # of a container, or of a directory that does not answer
        return f"user {number}"


def _candidates() -> list[str]:
    """Python processes of ours, the busiest first: `number (script)`."""
    above, found = set(processes.ancestors(os.getpid())), []
    for entry in PROC.iterdir():
        if not entry.name.isdecimal() or int(entry.name) in above:
            continue
        with contextlib.suppress(OSError):  # it ended
            pid = int(entry.name)
            seen = processes.status(pid)
            if seen is not None and entry.stat().st_uid == os.geteuid() and processes.is_python(pid):
                name = job_name(processes.command(pid) or ["?"])
                if name not in _OURS:
                    found.append((seen.ticks, f"{pid} ({name})"))
    return [text for _, text in sorted(found, reverse=True)[:CHOICES]]


def _environment(job: Job) -> dict[str, Any]:
    """environment.json of a job that runs already: its variables and limits, not ours."""
    told = processes.variables(job.pid)
    program = os.path.join(job.folder, job.command[0])
    if "/" not in job.command[0]:
        program = shutil.which(job.command[0], path=told.get("PATH")) or job.command[0]
    described = describe_job([program], told)
    cgroup = Cgroup.of(job.pid)
    memory = cgroup.memory()
    limits = [described["memory_limit_bytes"], *([memory[0]] if memory else [])]
    cores = len(os.sched_getaffinity(job.pid))
    quota = cgroup.cores()
    return described | {
        "argv": masked_words(job.command),
        "cwd": job.folder,
        "cpu_quota": quota,
        "cores": cores if quota is None else max(1, min(cores, int(-(-quota // 1)))),
        "memory_limit_bytes": min(limits),
    }


@contextlib.contextmanager
def _output_of(job: Job) -> Iterator[tuple[list[BinaryIO], str]]:
    """The files that its stdout and stderr are, and what can be said of its output."""
    files: list[BinaryIO] = []
    reasons, names = [], []
    with contextlib.ExitStack() as stack:
        for number, name in ((1, "stdout"), (2, "stderr")):
            place = PROC / str(job.pid) / "fd" / str(number)
            try:
                seen = place.stat()
                if not stat.S_ISREG(seen.st_mode):
                    reasons.append(f"its {name} is {_kind(seen.st_mode, os.readlink(place))}")
                    continue
                if any(os.path.samestat(seen, os.fstat(file.fileno())) for file in files):
                    continue
                names.append(os.readlink(place))
                files.append(stack.enter_context(place.open("rb")))
            except OSError as error:
                reasons.append(f"its {name} cannot be read: {error.strerror}")
        if files:
            said = f"recorded from now on, out of {' and '.join(names)}"
            yield files, "; ".join([said, *(f"not recorded: {reason}" for reason in reasons)])
        else:
            yield files, f"not recorded: {'; '.join(reasons)}; steps and last words are not known"


def _kind(mode: int, name: str) -> str:
    if stat.S_ISFIFO(mode):
        return "a pipe, whose reader alone can read it"
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "a terminal, which keeps nothing" if name.startswith(("/dev/pts/", "/dev/tty")) else name


class FileOutput:
    """A job's output out of the files into which it writes, copied into the run's output.log.

    They are read from their present end on; CONTEXT_BYTES before that go into the log alone.
    """

    def __init__(self, files: list[BinaryIO], log: Log) -> None:
        self._files = files
        self._log = log
        for file in files:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - CONTEXT_BYTES))
            before = file.read(min(size, CONTEXT_BYTES))
            if size > CONTEXT_BYTES:
                before = before.partition(b"\n")[2]
            if before:
                self._log.write(before)

    def read(self) -> Iterator[bytes]:
        """What came since the last time."""
        for file in self._files:
            if os.fstat(file.fileno()).st_size < file.tell():
                file.seek(0)  # somebody emptied it
            while data := file.read(CONTEXT_BYTES):
                self._log.write(data)
                yield data
