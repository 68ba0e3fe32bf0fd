"""What the device did in a few steps, from what a profiler recorded: pure arithmetic on intervals, no profiler.

Who records them is `trace.py`. Times are seconds of one clock, which is the profiler's and need not be ours.
"""

import bisect
import itertools
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from stoker.runs.schemas import Gap, KernelShare, TraceWindow

MOST = 10
"""Kernels and gaps that a window names."""

NAME_LENGTH = 160
"""Of a kernel; templates make names of kilobytes, whose ends say nothing."""

_TENSOR_CORES = re.compile(
    r"(?<![0-9])(884|1688|8816|16816|16832)|[hi]mma|gmma|tensorop|nvjet|fmha|flash_(fwd|bwd)"
    r"|xmma\w*(bf16|f16|tf32|i8)|tensor\d+x\d+"
)
"""The shapes of their instructions (m16n8k16: 16816) and the names of the instructions, as cuBLAS, cuDNN and CUTLASS
write them into their kernels' names; cuBLAS's on Hopper (nvjet); attention in one kernel. A guess by names, as all
profilers make it."""

_COLLECTIVE = re.compile(r"nccl|rccl", re.IGNORECASE)

Interval = tuple[float, float]


Kind = Literal["op", "call", "kernel", "copy"]


class Moment(NamedTuple):
    """Something that took from start_s on took_s.

    kind: `kernel` and `copy` are the device's; `call` is one of the driver's runtime, `op` an operator, both on the
    host. correlation: the same for a call and what it has the device do.
    """

    kind: Kind
    name: str
    start_s: float
    took_s: float
    correlation: int = 0

    @property
    def end_s(self) -> float:
        return self.start_s + self.took_s


def window(
    moments: Iterable[Moment], *, since_s: float, began_t: float, attempt: int, step: int, steps: int
) -> TraceWindow | None:
    """The line of traces.jsonl; None where the device did nothing.

    since_s: when the host began to issue the first of the `steps`. What was issued before is not counted; the window
    begins when the device has done it, and ends with the last work. So each step has the gap before it. began_t: Unix
    time of second 0.
    """
    host: list[Moment] = []
    device: list[Moment] = []
    for moment in moments:
        (device if moment.kind in ("kernel", "copy") else host).append(moment)
    issued_s = {moment.correlation: moment.start_s for moment in host if moment.kind == "call"}
    counted = [m for m in device if issued_s.get(m.correlation, m.start_s) >= since_s]
    earlier = [m.end_s for m in device if issued_s.get(m.correlation, m.start_s) < since_s]
    if not counted:
        return None
    begin_s, end_s = max(earlier, default=since_s), max(moment.end_s for moment in counted)
    if end_s <= begin_s:
        return None
    kernels = [moment for moment in counted if moment.kind == "kernel"]
    copies = [moment for moment in counted if moment.kind == "copy"]
    names = {moment.name for moment in kernels}
    exchanging = {name for name in names if _COLLECTIVE.search(name)}
    on_tensor_cores = {name for name in names if _TENSOR_CORES.search(name.lower())}
    computing = [moment for moment in kernels if moment.name not in exchanging]
    busy = _union(counted, begin_s, end_s)
    busy_s = _length(busy)
    in_kernels_s = sum(kernel.took_s for kernel in kernels)
    return TraceWindow(
        t=began_t + end_s,
        attempt=attempt,
        step=step,
        steps=steps,
        wall_s=end_s - begin_s,
        busy_s=busy_s,
        comm_s=max(0.0, busy_s - _length(_union([*computing, *copies], begin_s, end_s))) if exchanging else 0.0,
        copy_s=max(0.0, busy_s - _length(_union(kernels, begin_s, end_s))) if copies else 0.0,
        launches=len(kernels),
        kernel_median_s=statistics.median(kernel.took_s for kernel in kernels) if kernels else None,
        kernels=_shares(kernels),
        gaps=_gaps(busy, begin_s, end_s, host),
        tensor_core_share=sum(kernel.took_s for kernel in kernels if kernel.name in on_tensor_cores) / in_kernels_s
        if in_kernels_s > 0
        else None,
    )


def _union(moments: Iterable[Moment], begin_s: float, end_s: float) -> list[Interval]:
    """When at least one of them was on, within [begin_s, end_s]: ascending, apart from each other."""
    merged: list[Interval] = []
    for start, end in sorted((max(m.start_s, begin_s), min(m.end_s, end_s)) for m in moments):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _shares(kernels: Iterable[Moment]) -> list[KernelShare]:
    took: dict[str, list[float]] = {}
    for kernel in kernels:
        took.setdefault(kernel.name, []).append(kernel.took_s)
    most = sorted(took, key=lambda name: -sum(took[name]))[:MOST]
    return [KernelShare(name=_short(name), count=len(took[name]), total_s=sum(took[name])) for name in most]


def _short(name: str) -> str:
    return name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "…"


def _gaps(busy: Sequence[Interval], begin_s: float, end_s: float, host: list[Moment]) -> list[Gap]:
    edges = [begin_s, *(edge for interval in busy for edge in interval), end_s]
    between = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start]
    longest = sorted(between, key=lambda gap: gap[0] - gap[1])[:MOST]
    host.sort(key=lambda moment: moment.start_s)
    starts = [moment.start_s for moment in host]
    return [
        Gap(took_s=end - start, host=_mostly_in([m for m in host[: bisect.bisect(starts, end)] if m.end_s > start],
                                                start, end))
        for start, end in longest
    ]  # fmt: skip


def _mostly_in(moments: Sequence[Moment], start_s: float, end_s: float) -> str:
    """The name that the host was in for most of [start_s, end_s], each instant by the call that began last; empty where
    it was in none. Moments in ascending order of their start."""
    edges = {start_s, end_s}
    for moment in moments:
        edges.update(edge for edge in (moment.start_s, moment.end_s) if start_s < edge < end_s)
    took: dict[str, float] = {}
    ordered = sorted(edges)
    for begin, end in itertools.pairwise(ordered):
        name = next((m.name for m in reversed(moments) if m.start_s <= begin and m.end_s >= end), "")
        took[name] = took.get(name, 0.0) + end - begin
    return _short(max(took, key=lambda name: took[name]))
