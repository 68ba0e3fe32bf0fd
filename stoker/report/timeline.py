"""Where on a run's time line its findings and events lie: marks, as data. How they look: `page/timeline.py`.

A finding's evidence names a record and a field, or a line. From that its time follows: a phase was worst in the longest
stretch in which it took more than in the mean; a counter was at its worst at its extreme; an event has a time. Evidence
that names no time gives no mark.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from stoker.report.series import Series, Shares
from stoker.runs.records import WARNING_KINDS
from stoker.runs.schemas import Event, Finding

MOST_OF_A_FINDING, MOST_EVENTS = 20, 300
"""Marks of one finding, and of events, at most."""

_CURVES = {
    "cpu": "cpu/mean", "process_cpu": "cpu/this process, cores", "rss_bytes": "memory/process",
    "memory_used_bytes": "memory/used", "psi_cpu": "pressure/cpu", "psi_memory": "pressure/memory",
    "psi_io": "pressure/io", "throttled_s": "pressure/held back by the quota, s",
}  # fmt: skip
"""Field of devices.jsonl → name of the report's curve."""
_OF_GPU = {"utilisation": "utilisation", "memory_used_bytes": "memory", "power_w": "power, W",
           "temperature_c": "temperature, °C", "sm_clock_mhz": "clock, MHz"}  # fmt: skip
_LOW_IS_BAD = frozenset({"utilisation", "clock, MHz"})
_SHOWN_EVENTS = WARNING_KINDS | {"evaluated", "checkpoint", "resumed", "preempted", "failed", "finished"}


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A time or a stretch of it, in seconds since the run's start."""

    kind: Literal["finding", "event"]
    name: str
    """The finding's cause, or the event's kind."""
    from_s: float
    to_s: float
    text: str
    number: int | None = None
    """Place of the finding among those of the report, from 1."""


def marks(
    findings: Iterable[Finding], events: list[Event], phases: Shares, machine: dict[str, Series], start_t: float
) -> list[Mark]:
    """All marks. events: of the whole run, in order; phases, machine: the report's, in seconds since `start_t`."""
    found: list[Mark] = []
    for number, finding in enumerate(findings, start=1):
        mine = [
            Mark(kind="finding", name=finding.cause, from_s=from_s, to_s=to_s, text=one.text, number=number)
            for one in finding.evidence
            for from_s, to_s in _spans(one.place, events, phases, machine, start_t)
        ]
        found += list(dict.fromkeys(mine))[:MOST_OF_A_FINDING]
    told = [event for event in events if event.kind in _SHOWN_EVENTS]
    for event in told[: MOST_EVENTS // 2] + told[max(MOST_EVENTS // 2, len(told) - MOST_EVENTS // 2) :]:
        at_s = max(0.0, event.t - start_t)
        text = f"{event.kind}: {event.text.partition(chr(10))[0]}"[:200]
        found.append(Mark(kind="event", name=event.kind, from_s=at_s, to_s=at_s, text=text))
    return found


def _spans(
    place: str, events: list[Event], phases: Shares, machine: dict[str, Series], start_t: float
) -> Iterator[tuple[float, float]]:
    """The times that a place in the records speaks of."""
    if (named := re.match(r"steps\.jsonl: (?:phases\.)?(\w+)", place)) is not None:
        name = "input_wait" if named[1] == "input" else named[1]
        if (span := worst_stretch(phases, name)) is not None:
            yield span
    elif (line := re.match(r"events\.jsonl:(\d+)", place)) is not None:
        if 0 < int(line[1]) <= len(events):
            yield _at(events[int(line[1]) - 1].t - start_t)
    elif (kind := re.match(r"events\.jsonl: (\w+)", place)) is not None:
        yield from (_at(event.t - start_t) for event in events if event.kind == kind[1])
    elif (fields := re.match(r"devices\.jsonl: ([\w., ]+)", place)) is not None:
        for field in re.split(r",\s*", fields[1]):
            for name, series in machine.items():
                if (worst := _extreme(field, name, series)) is not None:
                    yield _at(worst)


def _at(s: float) -> tuple[float, float]:
    return max(0.0, s), max(0.0, s)


def worst_stretch(phases: Shares, name: str) -> tuple[float, float] | None:
    """From where to where a phase took at least its mean share, in the stretch in which it took most; None: it took
    nothing."""
    shares = phases.parts.get(name, [])
    if not any(shares):
        return None
    mean = sum(shares) / len(shares) * (1 - 1e-9)  # the mean of equal numbers may be above them
    best, best_amount, begin, amount = (0, 0), 0.0, 0, 0.0
    for n, share in enumerate([*shares, -1.0]):
        together = n == 0 or n == len(shares) or phases.x[n] - phases.x[n - 1] < 1.5 * phases.width
        if share >= mean and together:
            amount += share
            continue
        if amount > best_amount:
            best, best_amount = (begin, n - 1), amount
        begin, amount = (n, share) if share >= mean else (n + 1, 0.0)
    return phases.x[best[0]], phases.x[best[1]] + phases.width


def _extreme(field: str, name: str, series: Series) -> float | None:
    """When a counter was at its worst; None where the curve is not the field's."""
    if field.startswith("gpus."):
        wanted = _OF_GPU.get(field.removeprefix("gpus."))
        if wanted is None or not name.startswith("gpu ") or name.partition("/")[2] != wanted:
            return None
    elif (wanted := _CURVES.get(field)) != name:
        return None
    if wanted in _LOW_IS_BAD:
        return min(((v, x) for v, x in zip(series.low, series.x, strict=True) if v is not None), default=(0, None))[1]
    return max(((v, x) for v, x in zip(series.high, series.x, strict=True) if v is not None), default=(0, None))[1]
