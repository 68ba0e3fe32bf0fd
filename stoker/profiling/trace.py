"""Profiler windows: every few minutes a few steps run under torch's profiler (CUPTI), as a line of traces.jsonl.

They show what the events of the ledger cannot: how busy the device is *inside* a step, with which kernels, and what the
host did while the device was idle. A thread turns the recorded events into the line (`kernels.py`), in small pieces,
because a thread that runs Python delays the training thread.

A window costs time: starting and stopping the profiler, during which training waits (phase `idle`); steps that are
slower under it; the CPU time of the thread. All of this is measured, and the next window waits until the sum is at most
BUDGET_FRACTION of the time since the start. The first one is taken as soon as training is steady, so a run of a few
minutes may pay more. One step more is recorded than is counted: the window begins where the device finishes that step.

A CPU is not traced, since all its work is on the host. On request (`Tracer.request`) its operators are written as a
Chrome trace. If another profiler of the device runs (Nsight Systems), no windows are taken: CUPTI allows only one. A
failure of the profiler is reported as a warning, once, and training goes on.
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

from stoker.hardware.device import Device, nvtx_enabled
from stoker.profiling.kernels import Kind, TraceEvent, summarize_window
from stoker.runs.records import TRACE_FILES, TRACES, RunFolder
from stoker.storage.local_files import write_atomic

WINDOW_STEPS = 4
FIRST_STEP = 50
"""Steps of this process before the first window: one-time work is over by then."""

FIRST_S, EVERY_S = 60.0, 300.0
BUDGET_FRACTION = 0.003
"""Fraction of the time since the start that all windows together may cost."""

MAX_CHROME_TRACES = 8
"""The newest Chrome traces are kept; about a megabyte each."""

NO_WINDOWS = "no more profiler windows"

_CHUNK_EVENTS, _PAUSE_S = 500, 0.004
"""Events that the thread reads at once (half a millisecond of Python), and its pause after them."""

_RUNTIME_CALL_PREFIXES = ("cuda", "cu", "hip")
"""Prefixes of calls of the driver and the runtime. Operators contain `::`, or are names of Python functions."""


class EventLogger(Protocol):
    def __call__(self, kind: str, text: str, /, **data: Any) -> None: ...


class SupportsPhase(Protocol):
    """`ledger.Ledger`."""

    def phase(self, name: str, /) -> contextlib.AbstractContextManager[None]: ...


class Tracer:
    """Takes profiler windows of one rank. The training thread calls `after_step` after each step.

    chrome: also keep the windows as Chrome traces, and take them on a CPU; folder: of this rank.
    """

    def __init__(
        self, device: Device, folder: RunFolder, ledger: SupportsPhase, log_event: EventLogger, *, chrome: bool = False,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._device, self._folder, self._ledger, self._log_event, self._now = device, folder, ledger, log_event, now
        self._chrome = chrome
        self._enabled = (chrome or not device.is_cpu) and not nvtx_enabled(device)
        self._requested = False
        self._started_s = self._last_end_s = now()
        self._next_window_s = self._started_s + (0.0 if chrome else FIRST_S)
        self._cost_s = 0.0
        self._num_windows = 0
        self._steps = 0
        self._step_ends_s: deque[float] = deque(maxlen=WINDOW_STEPS + 2)
        """Ends of the newest steps outside windows."""
        self._active: _Window | None = None
        self._written: _Window | None = None
        self._writer: threading.Thread | None = None
        """Writes `_written`."""

    @property
    def cost_s(self) -> float:
        """Seconds of training that the windows have cost so far; without those of a thread that still runs."""
        return self._cost_s + (0.0 if self._written is None else self._written.cost_s)

    def request(self) -> None:
        """Takes a window at the next step and keeps it as a Chrome trace."""
        self._requested = True

    def after_step(self, step: int) -> None:
        """step: optimizer steps done. Starts a window that is due; ends one that has all its steps."""
        self._steps += 1
        now_s = self._now()
        if self._active is None:
            self._step_ends_s.append(now_s)
            if self._is_due():
                self._start_window()
            return
        self._active.steps += 1
        if self._active.steps == 1:
            self._active.start_ns = time.time_ns()
        elif self._active.steps > WINDOW_STEPS:
            self._end_window(step)

    def abandon(self) -> None:
        """For other work than steps: discards an open window; another one is taken later."""
        if self._active is not None:
            active, self._active = self._active, None
            self._requested = active.chrome and not self._chrome
            self._stop_profiler(active)
            self._schedule_next()

    def close(self) -> None:
        """Discards an open window and waits for the thread, so that a complete window is not lost."""
        self.abandon()
        if self._writer is not None:
            self._writer.join()

    def _is_due(self) -> bool:
        if not self._requested and (not self._enabled or self._steps < FIRST_STEP or self._now() < self._next_window_s):
            return False
        if self._writer is None or self._written is None:
            return True
        if self._writer.is_alive():
            return False
        self._cost_s += self._written.cost_s
        self._enabled &= not self._written.failed
        self._writer = self._written = None
        self._schedule_next()
        return self._requested or (self._enabled and self._now() >= self._next_window_s)

    def _start_window(self) -> None:
        start_s, chrome = self._now(), self._requested or self._chrome
        self._requested = False
        kind = None if self._device.is_cpu else self._device.kind
        try:
            with self._ledger.phase("idle"):
                profiler = profile(use_device=kind, acc_events=False)
                profiler.__enter__()  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001  # a driver or profiler may raise anything: training goes on
            self._disable(f"the profiler did not start: {error}")
            return
        now_s = self._now()
        self._cost_s += now_s - start_s
        self._active = _Window(profiler, now_s, chrome, self._folder, self._log_event)

    def _end_window(self, step: int) -> None:
        assert self._active is not None
        active, self._active = self._active, None
        if len(self._step_ends_s) > 1:
            mean_step_s = (self._step_ends_s[-1] - self._step_ends_s[0]) / (len(self._step_ends_s) - 1)
            window_s = self._now() - active.start_s
            self._cost_s += max(0.0, window_s - mean_step_s * active.steps)
            active.slowdown = window_s / (mean_step_s * active.steps) if mean_step_s > 0 else None
        self._step_ends_s.clear()
        if self._stop_profiler(active):
            self._written = active
            self._writer = active.start_writing(step, has_device_trace=not self._device.is_cpu)
        self._schedule_next()

    def _stop_profiler(self, active: "_Window") -> bool:
        """Ends the recording. It waits for the device, which has at most the work of one step left."""
        start_s = self._now()
        try:
            with self._ledger.phase("idle"):
                assert active.profiler is not None
                active.profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001  # as above
            self._disable(f"the profiler did not stop: {error}")
            return False
        finally:
            self._last_end_s = self._now()
            self._cost_s += self._last_end_s - start_s
            self._num_windows += 1
        return True

    def _schedule_next(self) -> None:
        """The next window is so late that it is within the budget too, if it costs as much as the others."""
        projected_cost_s = self._cost_s * (1 + 1 / max(1, self._num_windows))
        self._next_window_s = max(self._last_end_s + EVERY_S, self._started_s + projected_cost_s / BUDGET_FRACTION)

    def _disable(self, text: str) -> None:
        self._enabled = False
        self._log_event("warning", f"{NO_WINDOWS}: {text}")


class _Window:
    """A window while it is recorded, and the thread that writes its line, and its Chrome trace if requested. cost_s:
    CPU-seconds that this took; failed: it could not be written, so further windows are pointless."""

    def __init__(self, profiler: profile, start_s: float, chrome: bool, folder: RunFolder, log: EventLogger) -> None:
        self.profiler: profile | None = profiler
        self.start_s = start_s
        self.chrome = chrome
        self.steps = 0
        self.start_ns = 0
        self.slowdown: float | None = None
        """Duration of its steps over that of the steps before it; None until it ends, or if there were none."""
        self.cost_s = 0.0
        self.failed = False
        self._folder, self._log_event = folder, log

    def start_writing(self, step: int, *, has_device_trace: bool) -> threading.Thread:
        """step: the last one."""
        thread = threading.Thread(target=self._write, args=(step, has_device_trace), name="stoker-trace", daemon=True)
        thread.start()
        return thread

    def _write(self, step: int, has_device_trace: bool) -> None:
        try:
            if has_device_trace:
                self._append_trace_window(step)
            if self.chrome:
                self._write_chrome(step)
        except Exception as error:  # noqa: BLE001  # a sample is lost, not the run
            self._fail(f"a window could not be written: {type(error).__name__}: {error}")
        finally:
            self.profiler = None  # the recorded events may have a hundred megabytes
            self.cost_s = time.thread_time()

    def _append_trace_window(self, step: int) -> None:
        assert self.profiler is not None
        trace_window = summarize_window(
            read_events(self.profiler, self.start_ns),
            issue_start_s=0.0,
            unix_time_zero=self.start_ns / 1e9,
            attempt=self._folder.attempt,
            step=step,
            steps=self.steps - 1,
        )
        if trace_window is None:
            self._fail("the profiler saw no work of the device (CUPTI is missing or not permitted?)")
        else:
            trace_window.slowdown = self.slowdown
            self._folder.append(TRACES, trace_window)

    def _fail(self, text: str) -> None:
        self.failed = True
        self._log_event("warning", f"{NO_WINDOWS}: {text}")

    def _write_chrome(self, step: int) -> None:
        assert self.profiler is not None
        trace_dir = self._folder.path / TRACE_FILES
        trace_dir.mkdir(exist_ok=True)
        path = trace_dir / f"attempt-{self._folder.attempt}-step-{step:08d}.json.gz"
        raw_path = trace_dir / f".{path.stem}"
        try:
            self.profiler.export_chrome_trace(str(raw_path))  # type: ignore[no-untyped-call]
            write_atomic(path, gzip.compress(raw_path.read_bytes(), 6))
        finally:
            raw_path.unlink(missing_ok=True)
        _keep_newest(trace_dir)
        first = step - self.steps + 1
        self._log_event("info", f"{TRACE_FILES}/{path.name}: steps {first:,} to {step:,}, for ui.perfetto.dev")


def _keep_newest(trace_dir: Path) -> None:
    paths = sorted(trace_dir.glob("*.json.gz"), key=lambda path: path.stat().st_mtime)
    for path in paths[:-MAX_CHROME_TRACES]:
        path.unlink(missing_ok=True)


def read_events(profiler: profile, base_ns: int) -> list[TraceEvent]:
    """The events of a profiler for `kernels.summarize_window`, in seconds since base_ns (Unix time). Reads in
    pieces."""
    trace_events: list[TraceEvent] = []
    results = profiler.kineto_results
    if results is None:
        return trace_events
    events = results.events()
    for start in range(0, len(events), _CHUNK_EVENTS):
        for event in events[start : start + _CHUNK_EVENTS]:
            name = event.name()
            kind: Kind
            if event.device_type().name == "CPU":
                kind = "call" if name.startswith(_RUNTIME_CALL_PREFIXES) and "::" not in name else "op"
            elif event.is_user_annotation():  # a range that the host named; it is no work of the device
                continue
            else:
                kind = "copy" if name.startswith("Memcpy") else "kernel"
            start_s, duration_s = (event.start_ns() - base_ns) / 1e9, event.duration_ns() / 1e9
            trace_events.append(TraceEvent(kind, name, start_s, duration_s, event.correlation_id()))
        time.sleep(_PAUSE_S)
    return trace_events
