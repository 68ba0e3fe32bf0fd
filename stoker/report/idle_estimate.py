"""Estimates how long the device was idle inside steps, from profiler windows. Shown below `compute`, not added to any
sum.

CUDA events around a step give the start and end of its work, not whether the device was busy in between. A profiler
window (traces.jsonl) does, for a few steps, and slows down the host meanwhile. So this is a sample, and biased upwards.
Without a profiler window there is no estimate."""

import statistics
from pathlib import Path

import msgspec

from stoker.runs.records import RANKS, STEPS, TRACES, read_lines
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


def estimate_idle(run: Path, totals: Totals) -> DeviceIdleEstimate | None:
    """The estimate; None without a trace or without `compute`.

    A traced step also contains waits for input and others, which the ledger attributes to other phases. So the busy
    fraction is compared with the fraction of `compute` in the lines of steps.jsonl that overlap with the traces.
    """
    compute_s = totals.phases.get("compute", 0.0)
    wall_s, busy_s, window_compute_s, window_step_s = 0.0, 0.0, 0.0, 0.0
    windows, steps = 0, 0
    slowdowns: list[float] = []
    for folder in (run, *sorted((run / RANKS).glob("*"))):
        spans = []
        for trace in read_lines(folder, TRACES, TraceWindow):
            if trace.wall_s > 0:
                spans.append((trace.t - trace.wall_s, trace.t))
                wall_s += trace.wall_s
                busy_s += max(0.0, min(trace.busy_s, trace.wall_s) - trace.comm_s)
                windows, steps = windows + 1, steps + trace.window_steps
                slowdowns += [] if trace.slowdown is None else [trace.slowdown]
        for window in _overlapping_windows(folder, sorted(spans)):
            window_compute_s += window.phases.get("compute", 0.0)
            window_step_s += sum(window.phases.get(phase, 0.0) for phase in STEP_PHASES)
    if window_compute_s <= 0:  # the run was killed before it wrote the overlapping line
        window_compute_s, window_step_s = compute_s, sum(totals.phases.get(phase, 0.0) for phase in STEP_PHASES)
    if not windows or compute_s <= 0 or window_compute_s <= 0:
        return None
    busy_fraction = busy_s / wall_s
    idle_fraction = min(1.0, max(0.0, 1.0 - busy_fraction * window_step_s / window_compute_s))
    return DeviceIdleEstimate(
        device_s=idle_fraction * compute_s,
        fraction=idle_fraction * compute_s / totals.device_s,
        compute_fraction=idle_fraction,
        busy_fraction=busy_fraction,
        windows=windows,
        steps=steps,
        slowdown=statistics.mean(slowdowns) if slowdowns else None,
    )


def _overlapping_windows(folder: Path, spans: list[tuple[float, float]]) -> list[StepWindow]:
    """Lines of steps.jsonl that overlap with any of the spans; both are in order of time."""
    overlapping = []
    k = 0
    for window in read_lines(folder, STEPS, StepWindow) if spans else ():
        while k < len(spans) and spans[k][1] <= window.t - window.wall_s:
            k += 1
        if k < len(spans) and spans[k][0] < window.t:
            overlapping.append(window)
    return overlapping
