"""How long the device stood still inside steps: an estimate from profiler windows, shown below `compute`, added to
nothing.

Events around a step say when its work began and ended, not whether the device worked all of that time. A profiler
window (traces.jsonl) does, for a few steps, and slows the host meanwhile. So this is a sample, and rather too large
than too small. Where there is none, nothing is said."""

from pathlib import Path

import msgspec

from stoker.runs.records import RANKS, STEPS, TRACES, read_lines
from stoker.runs.schemas import StepWindow, TraceWindow
from stoker.runs.totals import Totals

STEP_PHASES = ("compute", "input_wait", "h2d", "host", "sync", "comm", "straggler")
"""Phases that the time of traced steps can be in; the others are between steps."""


class DeviceIdleEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The estimate. device_s: of `compute`; share: of all device time; of_compute: of `compute`; windows, steps: of the
    sample; worked: share of the traced time in which the device ran a kernel or a copy, collectives not counted."""

    device_s: float
    fraction: float
    compute_fraction: float
    busy_fraction: float
    windows: int
    steps: int


def estimate_idle(run: Path, totals: Totals) -> DeviceIdleEstimate | None:
    """None without a trace, or where nothing was computed.

    A traced step also waits for input and the like, which the ledger has charged already. So what the trace says is
    compared with the share of `compute` in those lines of steps.jsonl that the traces fall into.
    """
    compute_s = totals.phases.get("compute", 0.0)
    wall_s, busy_s, window_compute_s, window_step_s = 0.0, 0.0, 0.0, 0.0
    windows, steps = 0, 0
    for folder in (run, *sorted((run / RANKS).glob("*"))):
        spans = []
        for trace in read_lines(folder, TRACES, TraceWindow):
            if trace.wall_s > 0:
                spans.append((trace.t - trace.wall_s, trace.t))
                wall_s += trace.wall_s
                busy_s += max(0.0, min(trace.busy_s, trace.wall_s) - trace.comm_s)
                windows, steps = windows + 1, steps + trace.window_steps
        for window in _overlapping_windows(folder, sorted(spans)):
            window_compute_s += window.phases.get("compute", 0.0)
            window_step_s += sum(window.phases.get(phase, 0.0) for phase in STEP_PHASES)
    if window_compute_s <= 0:  # a run that was killed before the line of its trace
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
    )


def _overlapping_windows(folder: Path, spans: list[tuple[float, float]]) -> list[StepWindow]:
    """The lines of steps.jsonl that any of the spans falls into; both ascend in time."""
    overlapping = []
    k = 0
    for window in read_lines(folder, STEPS, StepWindow) if spans else ():
        while k < len(spans) and spans[k][1] <= window.t - window.wall_s:
            k += 1
        if k < len(spans) and spans[k][0] < window.t:
            overlapping.append(window)
    return overlapping
