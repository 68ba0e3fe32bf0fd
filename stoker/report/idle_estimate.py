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

IN_STEPS = ("compute", "input_wait", "h2d", "host", "sync", "comm", "straggler")
"""Phases that the time of traced steps can be in; the others are between steps."""


class Stillness(msgspec.Struct, frozen=True, kw_only=True):
    """The estimate. device_s: of `compute`; share: of all device time; of_compute: of `compute`; windows, steps: of the
    sample; worked: share of the traced time in which the device ran a kernel or a copy, collectives not counted."""

    device_s: float
    share: float
    of_compute: float
    worked: float
    windows: int
    steps: int


def estimate(run: Path, totals: Totals) -> Stillness | None:
    """None without a trace, or where nothing was computed.

    A traced step also waits for input and the like, which the ledger has charged already. So what the trace says is
    compared with the share of `compute` in those lines of steps.jsonl that the traces fall into.
    """
    compute_s = totals.phases.get("compute", 0.0)
    wall_s, worked_s, computed_s, in_steps_s = 0.0, 0.0, 0.0, 0.0
    windows, steps = 0, 0
    for folder in (run, *sorted((run / RANKS).glob("*"))):
        spans = []
        for trace in read_lines(folder, TRACES, TraceWindow):
            if trace.wall_s > 0:
                spans.append((trace.t - trace.wall_s, trace.t))
                wall_s += trace.wall_s
                worked_s += max(0.0, min(trace.busy_s, trace.wall_s) - trace.comm_s)
                windows, steps = windows + 1, steps + trace.steps
        for window in _overlapping(folder, sorted(spans)):
            computed_s += window.phases.get("compute", 0.0)
            in_steps_s += sum(window.phases.get(phase, 0.0) for phase in IN_STEPS)
    if computed_s <= 0:  # a run that was killed before the line of its trace
        computed_s, in_steps_s = compute_s, sum(totals.phases.get(phase, 0.0) for phase in IN_STEPS)
    if not windows or compute_s <= 0 or computed_s <= 0:
        return None
    worked = worked_s / wall_s
    still = min(1.0, max(0.0, 1.0 - worked * in_steps_s / computed_s))
    return Stillness(
        device_s=still * compute_s,
        share=still * compute_s / totals.device_s,
        of_compute=still,
        worked=worked,
        windows=windows,
        steps=steps,
    )


def _overlapping(folder: Path, spans: list[tuple[float, float]]) -> list[StepWindow]:
    """The lines of steps.jsonl that any of the spans falls into; both ascend in time."""
    found = []
    at = 0
    for window in read_lines(folder, STEPS, StepWindow) if spans else ():
        while at < len(spans) and spans[at][1] <= window.t - window.wall_s:
            at += 1
        if at < len(spans) and spans[at][0] < window.t:
            found.append(window)
    return found
