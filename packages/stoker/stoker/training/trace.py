"""Profiler windows: every few minutes a few steps run under torch's profiler (CUPTI), as a line of traces.jsonl.

They show what the events of the ledger cannot: how busy the device is *inside* a step, with which kernels, and what the
host did while the device was idle. A thread turns the recorded events into the line (`summarize_window`), in small
pieces, because a thread that runs Python delays the training thread.

A window costs time: starting and stopping the profiler, during which training waits (phase `idle`); steps that are
slower under it; the CPU time of the thread. The next window waits until the measured sum is at most BUDGET_FRACTION of
the time since the start; a run of a few minutes may pay more for its first one. One step more is recorded than is
counted: the window begins where the device finishes that step.

A CPU is traced on request only (`Tracer.request`), as a Chrome trace of its operators. If another profiler of the
device runs (Nsight Systems), no windows are taken: CUPTI allows only one. If the profiler fails, training goes on.
"""

import dataclasses
import gzip
import re
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from torch.autograd.profiler import profile

from stoker.hardware.device import Device, nvtx_enabled
from stoker.training.state import EventLogger
from stoker_watch.recording.ledger import Ledger
from stoker_watch.runs.records import TRACE_FILES, TRACES, RunFolder
from stoker_watch.runs.schemas import Gap, TraceWindow
from stoker_watch.storage.local_files import write_atomic

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


MAX_GAPS = 10

_TENSOR_CORES = re.compile(
    r"(?<![0-9])(884|1688|8816|16816|16832)|[hi]mma|gmma|tensorop|nvjet|fmha|flash_(fwd|bwd)"
    r"|xmma\w*(bf16|f16|tf32|i8)|tensor\d+x\d+"
)
"""Instruction shapes (m16n8k16: 16816) and instruction names in the kernel names of cuBLAS, cuDNN and CUTLASS; cuBLAS
on Hopper (nvjet); fused attention. A heuristic by names, as in other profilers."""

_COLLECTIVE = re.compile(r"nccl|rccl", re.IGNORECASE)

Interval = tuple[float, float]
Kind = Literal["op", "call", "kernel", "copy"]


class TraceEvent(NamedTuple):
    """An event of the profiler.

    kind: `kernel` and `copy` are on the device; `call` is a call of the CUDA runtime or driver, `op` an operator, both
    on the host. correlation: the same number for a call and the device work that it launches.
    """

    kind: Kind
    name: str
    start_s: float
    duration_s: float
    correlation: int = 0

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


@dataclasses.dataclass
class _ProfilerWindow:
    """A window while it is recorded and written."""

    profiler: profile
    start_s: float
    chrome: bool
    steps: int = 0
    start_ns: int = 0
    slowdown: float | None = None
    """Duration of its steps over that of the steps before it; None until it ends, or if there were none."""


class Tracer:
    """Takes profiler windows of one rank. The training thread calls `after_step` after each step.

    chrome: also keep the windows as Chrome traces, and take them on a CPU; folder: of this rank.
    """

    def __init__(
        self, device: Device, folder: RunFolder, ledger: Ledger, log_event: EventLogger, *, chrome: bool = False,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._device, self._folder, self._ledger, self._log_event, self._now = device, folder, ledger, log_event, now
        self._chrome = chrome
        self._enabled = (chrome or not device.is_cpu) and not nvtx_enabled(device)
        self._requested = False
        self._started_s = self._last_end_s = now()
        self._window_cost_s = self._writing_cost_s = 0.0
        self._num_windows = 0
        self._steps = 0
        self._step_ends_s: deque[float] = deque(maxlen=WINDOW_STEPS + 2)
        """Ends of the newest steps outside windows."""
        self._active: _ProfilerWindow | None = None
        self._writer: threading.Thread | None = None

    @property
    def cost_s(self) -> float:
        """Seconds of training that the windows have cost so far; without those of a thread that still runs."""
        return self._window_cost_s + self._writing_cost_s

    def request(self) -> None:
        """Takes a window at the next step and keeps it as a Chrome trace."""
        self._requested = True

    def after_step(self, step: int) -> None:
        """Starts a window that is due; ends one that has all its steps. step: optimizer steps done."""
        self._steps += 1
        now_s = self._now()
        if self._active is None:
            self._step_ends_s.append(now_s)
            if self._is_due(now_s):
                self._start_window()
            return
        self._active.steps += 1
        if self._active.steps == 1:
            self._active.start_ns = time.time_ns()
        elif self._active.steps > WINDOW_STEPS:
            self._end_window(self._active, step)

    def abandon(self) -> None:
        """Discards an open window, as other work than steps follows; another one is taken later."""
        if self._active is not None:
            self._requested = self._active.chrome and not self._chrome
            self._stop_profiler(self._active)

    def close(self) -> None:
        """Discards an open window and waits for the thread, so that a complete window is not lost."""
        self.abandon()
        if self._writer is not None:
            self._writer.join()

    def _is_due(self, now_s: float) -> bool:
        """A window that was not requested is within the budget, too, if it costs as much as the others."""
        if self._writer is not None and self._writer.is_alive():
            return False
        if self._requested or not self._enabled or self._steps < FIRST_STEP:
            return self._requested
        if not self._num_windows:
            return now_s - self._started_s >= (0.0 if self._chrome else FIRST_S)
        projected_cost_s = self.cost_s * (1 + 1 / self._num_windows)
        is_affordable = projected_cost_s <= BUDGET_FRACTION * (now_s - self._started_s)
        return is_affordable and now_s - self._last_end_s >= EVERY_S

    def _start_window(self) -> None:
        start_s, chrome = self._now(), self._requested or self._chrome
        self._requested = False
        kind = None if self._device.is_cpu else self._device.kind
        try:
            with self._ledger.phase("idle"):
                profiler = make_profiler(kind)
                profiler.__enter__()  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001  # a driver or profiler may raise anything: training goes on
            self._disable(f"the profiler did not start: {error}")
            return
        now_s = self._now()
        self._window_cost_s += now_s - start_s
        self._active = _ProfilerWindow(profiler, now_s, chrome)

    def _end_window(self, window: _ProfilerWindow, step: int) -> None:
        if len(self._step_ends_s) > 1:
            mean_step_s = (self._step_ends_s[-1] - self._step_ends_s[0]) / (len(self._step_ends_s) - 1)
            window_s = self._now() - window.start_s
            self._window_cost_s += max(0.0, window_s - mean_step_s * window.steps)
            window.slowdown = window_s / (mean_step_s * window.steps) if mean_step_s > 0 else None
        self._step_ends_s.clear()
        if self._stop_profiler(window):
            self._writer = threading.Thread(target=self._write, args=(window, step), name="stoker-trace", daemon=True)
            self._writer.start()

    def _stop_profiler(self, window: _ProfilerWindow) -> bool:
        """Ends the recording. It waits for the device, which has at most the work of one step left."""
        self._active = None
        start_s = self._now()
        try:
            with self._ledger.phase("idle"):
                window.profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001  # as above
            self._disable(f"the profiler did not stop: {error}")
            return False
        finally:
            self._last_end_s = self._now()
            self._window_cost_s += self._last_end_s - start_s
            self._num_windows += 1
        return True

    def _disable(self, text: str, **data: bool) -> None:
        self._enabled = False
        self._log_event("warning", f"{NO_WINDOWS}: {text}", **data)

    def _write(self, window: _ProfilerWindow, step: int) -> None:
        """The main function of the thread. step: the last one of the window."""
        try:
            if not self._device.is_cpu:
                self._append_trace_window(window, step)
            if window.chrome:
                self._write_chrome(window, step)
        except Exception as error:  # noqa: BLE001  # a sample is lost, not the run
            failed = {"storage": True} if isinstance(error, OSError) else {}
            self._disable(f"a window could not be written: {type(error).__name__}: {error}", **failed)
        finally:
            self._writing_cost_s += time.thread_time()

    def _append_trace_window(self, window: _ProfilerWindow, step: int) -> None:
        trace_window = summarize_window(
            read_events(window.profiler, window.start_ns),
            unix_time_zero=window.start_ns / 1e9,
            attempt=self._folder.attempt,
            step=step,
            steps=window.steps - 1,
        )
        if trace_window is None:
            self._disable("the profiler saw no work of the device (CUPTI is missing or not permitted?)")
        else:
            trace_window.slowdown = window.slowdown
            self._folder.append(TRACES, trace_window)

    def _write_chrome(self, window: _ProfilerWindow, step: int) -> None:
        trace_dir = self._folder.path / TRACE_FILES
        trace_dir.mkdir(exist_ok=True)
        path = trace_dir / f"attempt-{self._folder.attempt}-step-{step:08d}.json.gz"
        raw_path = trace_dir / f".{path.stem}"
        try:
            window.profiler.export_chrome_trace(str(raw_path))  # type: ignore[no-untyped-call]
            write_atomic(path, gzip.compress(raw_path.read_bytes(), 6))
        finally:
            raw_path.unlink(missing_ok=True)
        for old in sorted(trace_dir.glob("*.json.gz"), key=lambda file: file.stat().st_mtime)[:-MAX_CHROME_TRACES]:
            old.unlink(missing_ok=True)
        first = step - window.steps + 1
        self._log_event("info", f"{TRACE_FILES}/{path.name}: steps {first:,} to {step:,}, for ui.perfetto.dev")


def make_profiler(kind: str | None) -> profile:
    """torch's profiler of the host and, by CUPTI, of a device of this kind; without kineto it would pair CUDA events
    around operators instead, and see no kernel."""
    return profile(use_device=kind, use_kineto=True, acc_events=False)


def read_events(profiler: profile, base_ns: int) -> list[TraceEvent]:
    """The events of a profiler, in seconds since base_ns (Unix time). Reads in pieces."""
    trace_events: list[TraceEvent] = []
    events = [] if profiler.kineto_results is None else profiler.kineto_results.events()
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


def summarize_window(
    events: Iterable[TraceEvent], *, unix_time_zero: float, attempt: int, step: int, steps: int
) -> TraceWindow | None:
    """The line of traces.jsonl; None if the device did nothing. A pure function.

    At second 0, which is `unix_time_zero`, the host began to issue the first of the `steps`. Work that was issued
    before is not counted; the window begins when the device has finished that work, and ends with the last counted
    work. So each step includes the gap before it."""
    host_events: list[TraceEvent] = []
    device_events: list[TraceEvent] = []
    for event in events:
        (device_events if event.kind in ("kernel", "copy") else host_events).append(event)
    issued_s = {event.correlation: event.start_s for event in host_events if event.kind == "call"}
    counted = [event for event in device_events if issued_s.get(event.correlation, event.start_s) >= 0]
    start_s = max((e.end_s for e in device_events if issued_s.get(e.correlation, e.start_s) < 0), default=0.0)
    end_s = max((event.end_s for event in counted), default=start_s)
    if end_s <= start_s:
        return None
    kernels = [event for event in counted if event.kind == "kernel"]
    seconds_by_name: defaultdict[str, float] = defaultdict(float)
    for kernel in kernels:
        seconds_by_name[kernel.name] += kernel.duration_s
    kernel_s = sum(seconds_by_name.values())
    tensor_core_s = sum(seconds for name, seconds in seconds_by_name.items() if _TENSOR_CORES.search(name.lower()))
    collectives = {name for name in seconds_by_name if _COLLECTIVE.search(name)}
    busy = _union(counted, start_s, end_s)
    busy_s = _total_length(busy)
    not_collective = [event for event in counted if event.name not in collectives]
    return TraceWindow(
        t=unix_time_zero + end_s,
        attempt=attempt,
        step=step,
        window_steps=steps,
        wall_s=end_s - start_s,
        busy_s=busy_s,
        comm_s=busy_s - _total_length(_union(not_collective, start_s, end_s)),
        copy_s=busy_s - _total_length(_union(kernels, start_s, end_s)),
        launches=len(kernels),
        kernel_median_s=statistics.median(kernel.duration_s for kernel in kernels) if kernels else None,
        gaps=_longest_gaps(busy, start_s, end_s, host_events),
        tensor_core_fraction=tensor_core_s / kernel_s if kernel_s > 0 else None,
    )


def _union(events: Iterable[TraceEvent], start_s: float, end_s: float) -> list[Interval]:
    """The union of the events within [start_s, end_s]: ascending, disjoint intervals."""
    merged: list[Interval] = []
    for start, end in sorted((max(m.start_s, start_s), min(m.end_s, end_s)) for m in events):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _total_length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _longest_gaps(
    busy: Sequence[Interval], start_s: float, end_s: float, host_events: Sequence[TraceEvent]
) -> list[Gap]:
    """The longest gaps, with the innermost event of the host in the middle of each."""
    edges = [start_s, *(edge for interval in busy for edge in interval), end_s]
    intervals = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start]
    gaps: list[Gap] = []
    for start, end in sorted(intervals, key=lambda interval: interval[0] - interval[1])[:MAX_GAPS]:
        active = [event for event in host_events if event.start_s <= (start + end) / 2 < event.end_s]
        innermost = max(active, key=lambda event: event.start_s, default=None)
        gaps.append(Gap(duration_s=end - start, host_op="" if innermost is None else innermost.name))
    return gaps
