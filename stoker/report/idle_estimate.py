"""Estimates how long the device was idle inside steps, from profiler windows. Shown below `compute`, not added to any
sum.

CUDA events around a step give the start and end of its work, not whether the device was busy in between. A profiler
window (traces.jsonl) does, for a few steps, and slows down the host meanwhile. So this is a sample, and biased upwards.
Without a profiler window there is no estimate."""

import statistics

import msgspec

from stoker.diagnosis.reader import Observer
from stoker.runs.schemas import StepWindow, TraceWindow
from stoker.runs.totals import Totals

STEP_PHASES = ("compute", "input_wait", "h2d", "host", "sync", "comm", "straggler")
"""Phases inside steps; the others are between steps."""


class DeviceIdleEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The estimate. device_s: idle time inside `compute`; fraction: of all device time; compute_fraction: of `compute`;
    windows, steps: size of the sample; busy_fraction: of the traced time, with kernels or copies, without
    collectives; slowdown: mean duration of a traced step over that of others, None if no window says so."""

    device_s: float
    fraction: float
    compute_fraction: float
    busy_fraction: float
    windows: int
    steps: int
    slowdown: float | None = None


class IdleEstimator(Observer):
    """Adds up profiler windows, and the windows of steps that overlap them.

    A traced step also contains waits for input and others, which the ledger attributes to other phases. So the busy
    fraction is compared with the fraction of `compute` in the lines of steps.jsonl that overlap with the traces.
    """

    def __init__(self) -> None:
        self._wall_s, self._busy_s, self._window_compute_s, self._window_step_s = 0.0, 0.0, 0.0, 0.0
        self._windows, self._steps = 0, 0
        self._slowdowns: list[float] = []
        self._spans: dict[int, list[tuple[float, float]]] = {}
        """Rank → (start, end) of its traces that end after the newest window of steps."""

    def trace(self, rank: int, trace: TraceWindow) -> None:
        if trace.wall_s <= 0:
            return
        self._spans.setdefault(rank, []).append((trace.t - trace.wall_s, trace.t))
        self._wall_s += trace.wall_s
        self._busy_s += max(0.0, min(trace.busy_s, trace.wall_s) - trace.comm_s)
        self._windows, self._steps = self._windows + 1, self._steps + trace.window_steps
        self._slowdowns += [] if trace.slowdown is None else [trace.slowdown]

    def window(self, rank: int, window: StepWindow) -> None:
        spans = self._spans.get(rank)
        if spans and any(start_t < window.t and end_t > window.t - window.wall_s for start_t, end_t in spans):
            self._window_compute_s += window.phases.get("compute", 0.0)
            self._window_step_s += sum(window.phases.get(phase, 0.0) for phase in STEP_PHASES)
        if spans:
            self._spans[rank] = [span for span in spans if span[1] > window.t]

    def estimate(self, totals: Totals) -> DeviceIdleEstimate | None:
        """The estimate; None without a trace or without `compute`."""
        compute_s = totals.phases.get("compute", 0.0)
        window_compute_s, window_step_s = self._window_compute_s, self._window_step_s
        if window_compute_s <= 0:  # the run was killed before it wrote the overlapping line
            window_compute_s, window_step_s = compute_s, sum(totals.phases.get(phase, 0.0) for phase in STEP_PHASES)
        if not self._windows or compute_s <= 0 or window_compute_s <= 0:
            return None
        busy_fraction = self._busy_s / self._wall_s
        idle_fraction = min(1.0, max(0.0, 1.0 - busy_fraction * window_step_s / window_compute_s))
        return DeviceIdleEstimate(
            device_s=idle_fraction * compute_s,
            fraction=idle_fraction * compute_s / totals.device_s,
            compute_fraction=idle_fraction,
            busy_fraction=busy_fraction,
            windows=self._windows,
            steps=self._steps,
            slowdown=statistics.mean(self._slowdowns) if self._slowdowns else None,
        )
