"""Profiler windows: every few minutes a few steps under torch's profiler (CUPTI), as a line of traces.jsonl.

They say what the ledger's marks cannot: how busy the device is *inside* a step, with which kernels, and what the host
was doing when it had nothing. What is made of the records is arithmetic (`kernels.py`); a thread does it, in small
pieces, since a thread that computes in Python holds up the one that trains.

A window costs: starting and stopping the profiler, for which training stands still (`idle`, by intent), steps that are
slower under it, and the thread's processor time. All of this is measured, and the next window waits until the sum is at
most BUDGET of the time since the start. The first one is taken as soon as training is steady, so a run of a few minutes
may pay more. One step more is recorded than is counted: a window begins where the device ends that one.

A CPU is not traced: all its work is the host's. Asked for, its operators are written as a Chrome trace (`ask`).
Another profiler of the device (Nsight Systems) keeps its place: there is only one. What cannot be recorded is said as
a warning, once, and training goes on.
"""

import contextlib
import gzip
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch.autograd.profiler import profile

from stoker.hardware.device import Device, nvtx_is_on
from stoker.profiling.kernels import Kind, Moment, window
from stoker.runs.records import TRACE_FILES, TRACES, RunFolder
from stoker.storage.local_files import write_whole

STEPS = 4
FIRST_STEP = 50
"""Steps of this process before the first window: what happens once is over."""

FIRST_S, EVERY_S = 60.0, 300.0
BUDGET = 0.003
"""Of the time since the start, what all windows together may cost."""

KEPT = 8
"""Chrome traces, the newest; about a megabyte each."""

NO_WINDOWS = "no more profiler windows"

_PIECE, _PAUSE_S = 500, 0.004
"""Records that the thread takes at once, half a millisecond of Python, and its pause after them."""

_CALLS = ("cuda", "cu", "hip")
"""How the names of a driver's or runtime's calls begin; operators have `::`, or are words of Python."""


class Say(Protocol):
    def __call__(self, kind: str, text: str, /, **data: Any) -> None: ...


class Accounting(Protocol):
    """`ledger.Ledger`."""

    def phase(self, name: str, /) -> contextlib.AbstractContextManager[None]: ...


class Tracer:
    """Takes profiler windows of one rank. `between_steps` is to be called after each step, by the thread that trains.

    chrome: keep the windows as Chrome traces too, and take them on a CPU; folder: of this rank.
    """

    def __init__(
        self, device: Device, folder: RunFolder, ledger: Accounting, say: Say, *, chrome: bool = False,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._device, self._folder, self._ledger, self._say, self._now = device, folder, ledger, say, now
        self._chrome = chrome
        self._wanted = (chrome or not device.is_cpu) and not nvtx_is_on(device)
        self._asked = False
        self._started_s = self._ended_s = now()
        self._due_s = self._started_s + (0.0 if chrome else FIRST_S)
        self._cost_s = 0.0
        self._taken = 0
        self._steps = 0
        self._ends: deque[float] = deque(maxlen=STEPS + 2)
        """Ends of the newest steps outside windows."""
        self._open: _Open | None = None
        self._digesting: _Digesting | None = None

    @property
    def cost_s(self) -> float:
        """What the windows so far have cost, in seconds of training; of the thread, as far as it has ended."""
        digesting = self._digesting
        return self._cost_s + (0.0 if digesting is None or digesting.is_alive() else digesting.cost_s)

    def ask(self) -> None:
        """Takes a window at the next step, and keeps it as a Chrome trace."""
        self._asked = True

    def between_steps(self, step: int) -> None:
        """step: optimizer steps done. Starts a window that is due; ends one that has its steps."""
        self._steps += 1
        now_s = self._now()
        if self._open is None:
            self._ends.append(now_s)
            if self._is_due():
                self._begin()
            return
        self._open.steps += 1
        if self._open.steps == 1:
            self._open.counts_from_ns = time.time_ns()
        elif self._open.steps > STEPS:
            self._end(step)

    def abandon(self) -> None:
        """What comes now is no step: a window that is open is given up, and taken later."""
        if self._open is not None:
            opened, self._open = self._open, None
            self._asked = opened.chrome and not self._chrome
            self._stop(opened)
            self._plan()

    def close(self) -> None:
        """Gives up an open window, and waits for the thread: a window that is whole shall not be lost."""
        self.abandon()
        if self._digesting is not None:
            self._digesting.join()

    def _is_due(self) -> bool:
        if not self._asked and (not self._wanted or self._steps < FIRST_STEP or self._now() < self._due_s):
            return False
        if self._digesting is None:
            return True
        if self._digesting.is_alive():
            return False
        self._cost_s += self._digesting.cost_s
        self._wanted &= not self._digesting.failed
        self._digesting = None
        self._plan()
        return self._asked or (self._wanted and self._now() >= self._due_s)

    def _begin(self) -> None:
        began_s, chrome = self._now(), self._asked or self._chrome
        self._asked = False
        kind = None if self._device.is_cpu else self._device.kind
        try:
            with self._ledger.phase("idle"):
                profiler = profile(use_device=kind, acc_events=False)
                profiler.__enter__()  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001  # whatever a driver or a profiler says: training goes on
            self._give_up(f"the profiler did not start: {error}")
            return
        now_s = self._now()
        self._cost_s += now_s - began_s
        self._open = _Open(profiler, now_s, chrome)

    def _end(self, step: int) -> None:
        assert self._open is not None
        opened, self._open = self._open, None
        if len(self._ends) > 1:
            usual_s = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
            self._cost_s += max(0.0, self._now() - opened.opened_s - usual_s * opened.steps)
        self._ends.clear()
        if self._stop(opened):
            self._digesting = _Digesting(opened, self._folder, step, traced=not self._device.is_cpu, say=self._say)
            self._digesting.start()
        self._plan()

    def _stop(self, opened: "_Open") -> bool:
        """Ends the recording; it waits for the device, which has the work of a step left at most."""
        began_s = self._now()
        try:
            with self._ledger.phase("idle"):
                opened.profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001  # as above
            self._give_up(f"the profiler did not stop: {error}")
            return False
        finally:
            self._ended_s = self._now()
            self._cost_s += self._ended_s - began_s
            self._taken += 1
        return True

    def _plan(self) -> None:
        """The next window comes so late that it too will be within the budget, if it costs what the others did."""
        then_s = self._cost_s * (1 + 1 / max(1, self._taken))
        self._due_s = max(self._ended_s + EVERY_S, self._started_s + then_s / BUDGET)

    def _give_up(self, text: str) -> None:
        self._wanted = False
        self._say("warning", f"{NO_WINDOWS}: {text}")


class _Open:
    """A window that is being recorded."""

    def __init__(self, profiler: profile, opened_s: float, chrome: bool) -> None:
        self.profiler = profiler
        self.opened_s = opened_s
        self.chrome = chrome
        self.steps = 0
        self.counts_from_ns = 0


class _Digesting(threading.Thread):
    """Makes a window's line, and its Chrome trace where asked for. cost_s: processor seconds that it took; failed: it
    could not, and the next one could not either."""

    def __init__(self, opened: _Open, folder: RunFolder, step: int, *, traced: bool, say: Say) -> None:
        super().__init__(name="stoker-trace", daemon=True)
        self._opened, self._folder, self._step, self._traced, self._say = opened, folder, step, traced, say
        self.cost_s = 0.0
        self.failed = False

    def run(self) -> None:
        try:
            if self._traced:
                self._line()
            if self._opened.chrome:
                self._write_chrome()
        except Exception as error:  # noqa: BLE001  # a sample is lost, not the run
            self._fail(f"a window could not be kept: {type(error).__name__}: {error}")
        finally:
            del self._opened  # what was recorded may be a hundred megabytes
            self.cost_s = time.thread_time()

    def _line(self) -> None:
        opened = self._opened
        base_ns = opened.counts_from_ns
        recorded = moments(opened.profiler, base_ns)
        line = window(recorded, since_s=0.0, began_t=base_ns / 1e9, attempt=self._folder.attempt, step=self._step,
                      steps=opened.steps - 1)  # fmt: skip
        if line is None:
            self._fail("the profiler saw no work of the device (CUPTI is missing or not permitted?)")
        else:
            self._folder.append(TRACES, line)

    def _fail(self, text: str) -> None:
        self.failed = True
        self._say("warning", f"{NO_WINDOWS}: {text}")

    def _write_chrome(self) -> None:
        place = self._folder.path / TRACE_FILES
        place.mkdir(exist_ok=True)
        path = place / f"attempt-{self._folder.attempt}-step-{self._step:08d}.json.gz"
        raw = place / f".{path.stem}"
        try:
            self._opened.profiler.export_chrome_trace(str(raw))  # type: ignore[no-untyped-call]
            write_whole(path, gzip.compress(raw.read_bytes(), 6))
        finally:
            raw.unlink(missing_ok=True)
        _keep_newest(place)
        first = self._step - self._opened.steps + 1
        self._say("note", f"{TRACE_FILES}/{path.name}: steps {first:,} to {self._step:,}, for ui.perfetto.dev")


def _keep_newest(place: Path) -> None:
    written = sorted(place.glob("*.json.gz"), key=lambda path: path.stat().st_mtime)
    for path in written[:-KEPT]:
        path.unlink(missing_ok=True)


def moments(profiler: profile, base_ns: int) -> list[Moment]:
    """What a profiler recorded, as `kernels.window` wants it, in seconds since base_ns (Unix time). In pieces."""
    found: list[Moment] = []
    results = profiler.kineto_results
    if results is None:
        return found
    events = results.events()
    for start in range(0, len(events), _PIECE):
        for event in events[start : start + _PIECE]:
            name = event.name()
            kind: Kind
            if event.device_type().name == "CPU":
                kind = "call" if name.startswith(_CALLS) and "::" not in name else "op"
            elif event.is_user_annotation():  # a name that the host gave, on the device's line too: no work
                continue
            else:
                kind = "copy" if name.startswith("Memcpy") else "kernel"
            at_s, took_s = (event.start_ns() - base_ns) / 1e9, event.duration_ns() / 1e9
            found.append(Moment(kind, name, at_s, took_s, event.correlation_id()))
        time.sleep(_PAUSE_S)
    return found
