"""Samples the stacks of this process from a child: a thread would see only where the interpreter's lock is free.

`record` is for a loop inside of `measure`, whose stacks are recorded as those of a watched job. `TrainingStacks` is for
the trainer: its frames get the same names wherever it is installed, loader threads are told by their function, and the
child hands its lines back, as only rank 0 may have the run folder. How stacks are read: `stacks.py`.

The child is in a session of its own and ignores signals for the job. It ends when it is asked to, and when the process
that it samples has gone.
"""

import collections
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec

from stoker_watch.recording import frames
from stoker_watch.recording.frames import PACKAGE_ROOT, Samples, Stack, make_window
from stoker_watch.recording.stacks import SampledProcess, SampleWindow, StackSampler
from stoker_watch.recording.telemetry.machine import allow_reading
from stoker_watch.runs.records import STACKS, RunFolder, is_still_open
from stoker_watch.runs.schemas import StackWindow

STOP_TIMEOUT_S = 6.0
MAX_PENDING = 1000
"""Lines of a training that wait for its run folder."""
LOADER_FUNCTION = "WorkerPool._run_worker"
"""The trainer's outermost frame in a thread that loads images."""
_REQUESTS, MAX_REQUEST_BYTES = ("start", "steps", "workers"), 4096
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_CODE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from stoker_watch.recording import own_stacks
getattr(own_stacks, sys.argv[2])(*sys.argv[3:])
"""


class SamplingProcess:
    """A child that samples this process. function: of this module, which it runs with the PID of this process and
    `arguments`; stdout: as of `subprocess.Popen`. Raises OSError."""

    def __init__(self, function: str, *arguments: object, stdout: int = subprocess.DEVNULL) -> None:
        if not sys.executable:
            raise OSError("this Python was started inside of another program")
        pipe, self._fd = os.pipe()
        self._status = os.fstat(self._fd)
        os.set_blocking(self._fd, False)  # a stopped process reads nothing
        try:
            # without `site`, whose startup files are for the job: a hook, a coverage tool
            self.process = subprocess.Popen(
                [sys.executable, "-S", "-E", "-c", _CODE, json.dumps([*map(str, sys.path)]),
                 function, str(os.getpid()), *map(str, arguments)],
                stdin=pipe, stdout=stdout, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except BaseException:
            os.close(self._fd)
            raise
        finally:
            os.close(pipe)
        allow_reading(self.process.pid)
        self.send("start")

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, request: str) -> None:
        if is_still_open(self._fd, self._status):
            with contextlib.suppress(OSError):  # it has ended, or does not read
                os.write(self._fd, f"{request}\n".encode())

    def stop(self, folder: RunFolder | None) -> None:
        """Lets it write its last lines; a process that hangs is killed. folder: for an event, if it has ended."""
        if (code := self.process.poll()) is not None and folder is not None:
            folder.event("info", f"stacks: the process that samples them ended with exit code {code}")
        self.send("stop")  # closing alone is not seen while a forked worker has the other end, too
        if is_still_open(self._fd, self._status):
            os.close(self._fd)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        allow_reading(0)


class TrainingStacks:
    """Samples a training of stoker's own until `stop`: the thread that makes this, which trains, and one process after
    the other in which images are loaded. package: the folder of the trainer, for the names of its frames."""

    def __init__(self, package: Path) -> None:
        self._folder: RunFolder | None = None
        self._pending: collections.deque[StackWindow | str] = collections.deque(maxlen=MAX_PENDING)
        """Windows, and why there are none."""
        self._lock = threading.Lock()
        self._child: SamplingProcess | None = None
        self._reader: threading.Thread | None = None
        try:
            trains = threading.get_native_id()
            self._child = SamplingProcess("record_training", trains, package, stdout=subprocess.PIPE)
        except OSError as error:  # training goes on, and an event says so
            self._pending.append(f"not recorded: {error}")
            return
        lines = self._child.process.stdout
        self._reader = threading.Thread(target=self._read_lines, args=(lines,), name="stacks", daemon=True)
        try:
            self._reader.start()
        except RuntimeError:  # no more threads
            self._child.stop(None)
            raise

    @property
    def pid(self) -> int:
        """The process that reads stacks; 0: none."""
        return 0 if self._child is None else self._child.pid

    def write_to(self, folder: RunFolder) -> None:
        """Writes what was sampled so far and what follows."""
        with self._lock:
            self._folder = folder
            self._write_pending()

    def note_workers(self, pids: list[int]) -> None:
        """The processes that load images."""
        if self._child is not None:
            self._child.send(f"workers {' '.join(map(str, pids))}")

    def stop(self) -> None:
        """Writes the last windows. May be called twice."""
        child, self._child = self._child, None
        if child is not None and self._reader is not None:
            child.stop(self._folder)
            self._reader.join(STOP_TIMEOUT_S)

    def _read_lines(self, lines: IO[bytes]) -> None:
        try:
            with lines:
                for line in lines:
                    with self._lock:
                        self._pending.append(msgspec.json.decode(line, type=StackWindow | str))
                        self._write_pending()
        except Exception as error:  # noqa: BLE001 (training goes on without samples, and an event says so)
            if self._folder is not None:
                self._folder.event("warning", f"stacks.jsonl ends here: {type(error).__name__}: {error}")

    def _write_pending(self) -> None:
        while self._folder is not None and self._pending:
            sent = self._pending.popleft()
            if isinstance(sent, str):
                self._folder.event("info", f"stacks: {sent}")
            else:
                sent.attempt = self._folder.attempt
                self._folder.append(STACKS, sent)


def record(pid: str, rank: str, path: str, attempt: str) -> None:
    """In the child: samples a measured loop."""
    folder, training = RunFolder(Path(path), int(attempt)), dict[int, int]()
    sampler = StackSampler(
        folder, int(pid), own_rank=int(rank),
        on_status=lambda reason: folder.event("info", f"stacks: {reason}"),
        training_ranks=lambda: training,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for request in _requests(int(pid)):
            if request == ["start"]:
                stack.enter_context(sampler)
            else:
                training[int(pid)] = int(rank)
    folder.close()


def record_training(pid: str, thread: str, package: str) -> None:
    """In the child: samples a training of stoker's own."""
    sampler = TrainingSampler(int(pid), int(thread), package)
    with contextlib.ExitStack() as stack:
        for request, *numbers in _requests(int(pid)):
            if request == "start":
                stack.enter_context(sampler)
            else:
                sampler.workers = {*map(int, numbers)}


def _requests(pid: int) -> Iterator[list[str]]:
    """What the sampled process asks for, as words, until it asks for anything else, or ends."""
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    data = b""
    while os.getppid() == pid:
        if not select.select([0], [], [], 1.0)[0]:
            continue
        if not (received := os.read(0, 65536)):
            return
        *lines, data = (data + received).split(b"\n")
        for line in lines:
            request = line.decode(errors="replace").split()
            if not request or request[0] not in _REQUESTS:
                return
            yield request
        if len(data) > MAX_REQUEST_BYTES or not data.isascii():  # the program has written into this pipe
            return


class TrainingSampler(StackSampler):
    """Samples a training of stoker's own, and writes lines to stdout. thread: kernel ID of the one that trains."""

    def __init__(self, pid: int, thread: int, package: str) -> None:
        super().__init__(RunFolder(Path(), 0), pid, own_rank=0, on_status=_send, training_ranks=lambda: {pid: 0})
        self.workers: set[int] = set()
        """Processes that load images."""
        self._training_thread = thread
        self._packages = {
            f"{package}/": PACKAGE_ROOT,
            f"{Path(frames.__file__).parents[1]}/": "/site-packages/stoker_watch/",
        }

    def _is_own(self, target: SampledProcess) -> bool:
        return target.pid == self._pid or target.pid in self.workers

    def _find_trainer(self, *_: object) -> int | None:
        """It is known."""
        return None

    def _make_lines(
        self, target: SampledProcess, window: SampleWindow, samples: Samples, others: Mapping[int, Samples]
    ) -> list[StackWindow | None]:
        """A line of the training thread, and one of the threads that load images. They have the PID of the training,
        whatever process the threads are in."""
        roles: dict[str, Samples] = {"training": [], "worker": []}
        for thread, found in {target.pid: samples, **others}.items():
            own = [(self._own_frames(stack), count) for stack, count in found]
            if thread == self._training_thread:
                roles["training"] += own
            else:
                roles["worker"] += [
                    (stack, count) for stack, count in own if stack and stack[-1].function == LOADER_FUNCTION
                ]
        return [
            make_window(own, role=role, cwd=target.cwd, t=time.time(), attempt=0, pid=self._pid, wall_s=window.age_s())
            for role, own in roles.items()
        ]

    def _write(self, target: SampledProcess, line: StackWindow) -> None:  # noqa: ARG002
        _send(line)

    def _own_frames(self, stack: Stack) -> Stack:
        """The frames from the first one of the trainer on."""
        named = [frame._replace(file=self._name(frame.file)) for frame in stack]
        own = [number for number, frame in enumerate(named) if frame.file.startswith(PACKAGE_ROOT)]
        return named[: own[-1] + 1] if own else named

    def _name(self, file: str) -> str:
        """What stacks call a file of one of the two packages, wherever it is installed."""
        packages = self._packages.items()
        return next((name + file[len(folder) :] for folder, name in packages if file.startswith(folder)), file)


def _send(sent: StackWindow | str) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(sent) + b"\n")
    sys.stdout.buffer.flush()
