"""Computes what the device did in a few steps from a profiler's events: pure functions on intervals, without a
profiler.

`trace.py` records the events. All times are seconds of the profiler's clock, which may differ from the host's.
"""

import bisect
import itertools
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from stoker.runs.schemas import Gap, KernelTime, TraceWindow

MAX_ENTRIES = 10
"""Maximum number of kernels and of gaps in a window."""

MAX_NAME_LENGTH = 160
"""Of a kernel's name; names of templates may have kilobytes."""

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


def summarize_window(
    events: Iterable[TraceEvent], *, issue_start_s: float, unix_time_zero: float, attempt: int, step: int, steps: int
) -> TraceWindow | None:
    """The line of traces.jsonl; None if the device did nothing.

    issue_start_s: when the host began to issue the first of the `steps`. Work that was issued before is not counted;
    the window begins when the device has finished that work, and ends with the last counted work. So each step includes
    the gap before it. unix_time_zero: Unix time of second 0."""
    host_events: list[TraceEvent] = []
    device_events: list[TraceEvent] = []
    for event in events:
        (device_events if event.kind in ("kernel", "copy") else host_events).append(event)
    issued_s = {event.correlation: event.start_s for event in host_events if event.kind == "call"}
    counted = [m for m in device_events if issued_s.get(m.correlation, m.start_s) >= issue_start_s]
    earlier_ends = [m.end_s for m in device_events if issued_s.get(m.correlation, m.start_s) < issue_start_s]
    if not counted:
        return None
    start_s, end_s = max(earlier_ends, default=issue_start_s), max(event.end_s for event in counted)
    if end_s <= start_s:
        return None
    kernels = [event for event in counted if event.kind == "kernel"]
    copies = [event for event in counted if event.kind == "copy"]
    names = {event.name for event in kernels}
    collective_names = {name for name in names if _COLLECTIVE.search(name)}
    tensor_core_names = {name for name in names if _TENSOR_CORES.search(name.lower())}
    compute_kernels = [event for event in kernels if event.name not in collective_names]
    busy_intervals = _union(counted, start_s, end_s)
    busy_s = _total_length(busy_intervals)
    kernel_s = sum(kernel.duration_s for kernel in kernels)
    return TraceWindow(
        t=unix_time_zero + end_s,
        attempt=attempt,
        step=step,
        window_steps=steps,
        wall_s=end_s - start_s,
        busy_s=busy_s,
        comm_s=max(0.0, busy_s - _total_length(_union([*compute_kernels, *copies], start_s, end_s)))
        if collective_names
        else 0.0,
        copy_s=max(0.0, busy_s - _total_length(_union(kernels, start_s, end_s))) if copies else 0.0,
        launches=len(kernels),
        kernel_median_s=statistics.median(kernel.duration_s for kernel in kernels) if kernels else None,
        kernels=_top_kernels(kernels),
        gaps=_longest_gaps(busy_intervals, start_s, end_s, host_events),
        tensor_core_fraction=sum(kernel.duration_s for kernel in kernels if kernel.name in tensor_core_names) / kernel_s
        if kernel_s > 0
        else None,
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


def _top_kernels(kernels: Iterable[TraceEvent]) -> list[KernelTime]:
    durations: dict[str, list[float]] = {}
    for kernel in kernels:
        durations.setdefault(kernel.name, []).append(kernel.duration_s)
    top_names = sorted(durations, key=lambda name: -sum(durations[name]))[:MAX_ENTRIES]
    return [
        KernelTime(name=_truncate(name), count=len(durations[name]), total_s=sum(durations[name])) for name in top_names
    ]


def _truncate(name: str) -> str:
    return name if len(name) <= MAX_NAME_LENGTH else name[: MAX_NAME_LENGTH - 1] + "…"


def _longest_gaps(
    busy_intervals: Sequence[Interval], start_s: float, end_s: float, host_events: list[TraceEvent]
) -> list[Gap]:
    edges = [start_s, *(edge for interval in busy_intervals for edge in interval), end_s]
    between = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start]
    longest = sorted(between, key=lambda gap: gap[0] - gap[1])[:MAX_ENTRIES]
    host_events.sort(key=lambda event: event.start_s)
    starts = [event.start_s for event in host_events]

    def make_gap(start: float, end: float) -> Gap:
        overlapping = [event for event in host_events[: bisect.bisect(starts, end)] if event.end_s > start]
        return Gap(duration_s=end - start, host_op=_dominant_host_op(overlapping, start, end))

    return [make_gap(start, end) for start, end in longest]


def _dominant_host_op(events: Sequence[TraceEvent], start_s: float, end_s: float) -> str:
    """The name of the host event that covers most of [start_s, end_s]; at each instant the event that began last
    counts. Empty if most of the time no event was active. events: in ascending order of their start."""
    edges = {start_s, end_s}
    for event in events:
        edges.update(edge for edge in (event.start_s, event.end_s) if start_s < edge < end_s)
    durations: dict[str, float] = {}
    ordered = sorted(edges)
    for start, end in itertools.pairwise(ordered):
        name = next((m.name for m in reversed(events) if m.start_s <= start and m.end_s >= end), "")
        durations[name] = durations.get(name, 0.0) + end - start
    return _truncate(max(durations, key=lambda name: durations[name]))
