"""Samples the stacks of a training of stoker's own into stacks.jsonl: of the training thread, and of one loader thread,
of this process or of a worker process, in turn. Each rank samples itself.

What a stack means is the same as of a watched job (`stoker_watch/recording/frames.py`): kinds, places, windows. A stack
can only be read when the interpreter's lock is free; a sample counts for all the times at which it was not. The rate
follows the CPU time of the sampler's own thread, with all that it writes.
"""

import collections
import contextlib
import os
import threading
import time
from pathlib import Path

from stoker.data.loading.processes import WorkerProcesses
from stoker.data.loading.thread_stacks import Stack, next_loader_thread, read_stacks
from stoker_watch.recording import frames
from stoker_watch.recording.frames import PACKAGE_ROOT, Frame, Samples, make_window
from stoker_watch.recording.stacks import FIRST_WINDOW_S, WINDOW_S, affordable_rate
from stoker_watch.runs.records import STACKS, RunFolder

STOP_TIMEOUT_S = 5.0
MAX_RATE_HZ = 10.0
"""Samples a second at most; each one takes the interpreter's lock from the training thread."""

_PACKAGES = {
    f"{Path(__file__).parents[1]}/": PACKAGE_ROOT,
    f"{Path(frames.__file__).parents[1]}/": "/site-packages/stoker_watch/",
}
"""Folder: what stacks call it, wherever it is installed."""


class OwnStacks:
    """Samples from `start` to `stop`. The thread that makes it is the training thread. folder: where windows are
    written; None: not yet, and the time until then is a part of the first one. processes: of the loader, if any."""

    def __init__(self) -> None:
        self.folder: RunFolder | None = None
        self.processes: WorkerProcesses | None = None
        self.rate_hz = MAX_RATE_HZ
        self._training_thread = threading.get_ident()
        self._counts: dict[str, collections.Counter[Stack]] = {}
        self._turn = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._thread_main, name="stacks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Writes the last window. May be called twice. A thread that hangs is abandoned."""
        self._stop.set()
        self._thread.join(STOP_TIMEOUT_S)

    def _thread_main(self) -> None:
        try:
            self._sample_until_stopped()
        except Exception as error:  # noqa: BLE001 (training goes on without samples, and an event says so)
            if self.folder is not None:
                self.folder.event("warning", f"stacks.jsonl ends here: {type(error).__name__}: {error}")

    def _sample_until_stopped(self) -> None:
        start_s = sampled_s = time.monotonic()
        start_cpu_s, window_s, is_last = 0.0, FIRST_WINDOW_S, False
        while not is_last:
            is_last = self._stop.wait(1 / self.rate_hz)
            now_s = time.monotonic()
            if not is_last:  # the training thread waits for this one
                self._sample(max(1, round((now_s - sampled_s) * self.rate_hz)))
            sampled_s = now_s
            if self.folder is None or not (is_last or now_s - start_s >= window_s):
                continue
            self._write(self.folder, now_s - start_s)
            cpu_s = time.thread_time()
            self._follow_cost((cpu_s - start_cpu_s) / (now_s - start_s))
            start_s, start_cpu_s, window_s = now_s, cpu_s, WINDOW_S

    def _sample(self, count: int) -> None:
        """count: sampling times that this one stands for."""
        self._turn += 1
        training, *loading = read_stacks([self._training_thread, *next_loader_thread(self._turn)])
        if self.processes is not None:
            loading += self.processes.read_stacks(self._turn)
        for role, stack in (("training", training), *(("worker", stack) for stack in loading)):
            if stack:
                self._counts.setdefault(role, collections.Counter())[stack] += count

    def _write(self, folder: RunFolder, wall_s: float) -> None:
        counts, self._counts = self._counts, {}
        cwd = ""
        with contextlib.suppress(OSError):  # the working directory was removed
            cwd = os.getcwd()
        for role, stacks in counts.items():
            samples: Samples = [(_as_frames(stack), count) for stack, count in stacks.items()]
            window = make_window(
                samples, role=role, cwd=cwd, t=time.time(), attempt=folder.attempt, pid=os.getpid(), wall_s=wall_s
            )
            if window is not None:
                folder.append(STACKS, window)

    def _follow_cost(self, cpu_fraction: float) -> None:
        """The highest rate at which the newest window would have cost no more than it may; a window costs more at the
        start, when files and functions are new."""
        self.rate_hz = affordable_rate(cpu_fraction / self.rate_hz, MAX_RATE_HZ)


def _as_frames(stack: Stack) -> list[Frame]:
    """The frames from the first one of the trainer on, whose files get the same names wherever it is installed."""
    named = [Frame(function, _name(file), line) for function, file, line in stack]
    own = [number for number, frame in enumerate(named) if frame.file.startswith(PACKAGE_ROOT)]
    return named[: own[-1] + 1] if own else named


def _name(file: str) -> str:
    return next((name + file[len(folder) :] for folder, name in _PACKAGES.items() if file.startswith(folder)), file)
