"""Marks of findings and events on the timeline of a run, as data. `page/timeline.py` draws them.

The evidence of a finding names a record and a field, or a line. This gives a time: for a phase, the stretch above its
mean in which it took most; for a counter, the time of its extreme; for an event, its own time. Other evidence gives no
mark.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from stoker.findings.finding import Finding
from stoker.report.series import FractionSeries, Series
from stoker.runs.records import WARNING_KINDS
from stoker.runs.schemas import Event

MAX_MARKS_PER_FINDING, MAX_EVENTS = 20, 300
"""Maximum number of marks of one finding, and of events."""

_CURVE_BY_FIELD = {
    "cpu_core_utilization": "cpu/mean", "process_cpu": "cpu/this process, cores", "rss_bytes": "memory/process",
    "memory_used_bytes": "memory/used", "psi_cpu": "pressure/cpu", "psi_memory": "pressure/memory",
    "psi_io": "pressure/io", "throttled_s": "pressure/throttled, s",
}  # fmt: skip
"""Field of devices.jsonl → curve of the report."""
_GPU_CURVE_BY_FIELD = {"utilization": "utilization", "memory_used_bytes": "memory", "power_w": "power, W",
           "temperature_c": "temperature, °C", "sm_clock_mhz": "clock, MHz"}  # fmt: skip
_LOW_IS_BAD = frozenset({"utilization", "clock, MHz"})
_SHOWN_EVENTS = WARNING_KINDS | {"evaluated", "checkpoint_saved", "resumed", "preempted", "failed", "finished"}


class TimelineMark(msgspec.Struct, frozen=True, kw_only=True):
    """A time span, in seconds since the start of the run."""

    kind: Literal["finding", "event"]
    name: str
    """The finding's cause, or the event's kind."""
    start_s: float
    end_s: float
    text: str
    finding_number: int | None = None
    """Number of the finding in the report, from 1."""


def collect_marks(
    findings: Iterable[Finding], events: list[Event], phases: FractionSeries, machine: dict[str, Series], start_t: float
) -> list[TimelineMark]:
    """All marks. events: all events of the run, in order; phases, machine: in seconds since `start_t`."""
    result: list[TimelineMark] = []
    for number, finding in enumerate(findings, start=1):
        finding_marks = [
            TimelineMark(
                kind="finding",
                name=finding.id,
                start_s=start_s,
                end_s=end_s,
                text=evidence.text,
                finding_number=number,
            )
            for evidence in finding.evidence
            for start_s, end_s in _spans(evidence.source, events, phases, machine, start_t)
        ]
        result += list(dict.fromkeys(finding_marks))[:MAX_MARKS_PER_FINDING]
    listed = [event for event in events if event.kind in _SHOWN_EVENTS]
    for event in listed[: MAX_EVENTS // 2] + listed[max(MAX_EVENTS // 2, len(listed) - MAX_EVENTS // 2) :]:
        at_s = max(0.0, event.t - start_t)
        text = f"{event.kind}: {event.text.partition(chr(10))[0]}"[:200]
        result.append(TimelineMark(kind="event", name=event.kind, start_s=at_s, end_s=at_s, text=text))
    return result


def _spans(
    source: str, events: list[Event], phases: FractionSeries, machine: dict[str, Series], start_t: float
) -> Iterator[tuple[float, float]]:
    """The time spans of a source in the records."""
    if (phase_match := re.match(r"steps\.jsonl: (?:phases\.)?(\w+)", source)) is not None:
        name = "input_wait" if phase_match[1] in ("input", "input_wait_stages") else phase_match[1]
        if (span := worst_stretch(phases, name)) is not None:
            yield span
    elif (line_match := re.match(r"events\.jsonl:(\d+)", source)) is not None:
        if 0 < int(line_match[1]) <= len(events):
            yield _instant(events[int(line_match[1]) - 1].t - start_t)
    elif (kind_match := re.match(r"events\.jsonl: (\w+)", source)) is not None:
        yield from (_instant(event.t - start_t) for event in events if event.kind == kind_match[1])
    elif (fields_match := re.match(r"devices\.jsonl: ([\w., ]+)", source)) is not None:
        for field in re.split(r",\s*", fields_match[1]):
            for name, series in machine.items():
                if (worst_s := _extreme(field, name, series)) is not None:
                    yield _instant(worst_s)


def _instant(s: float) -> tuple[float, float]:
    return max(0.0, s), max(0.0, s)


def worst_stretch(phases: FractionSeries, name: str) -> tuple[float, float] | None:
    """(start, end) of the stretch with at least the mean fraction of a phase in which the phase took most time. None if
    the phase took no time."""
    fractions = phases.fractions.get(name, [])
    if not any(fractions):
        return None
    mean = sum(fractions) / len(fractions) * (1 - 1e-9)  # rounding: the mean of equal numbers may be above them
    best, best_amount, begin, amount = (0, 0), 0.0, 0, 0.0
    for n, fraction in enumerate([*fractions, -1.0]):
        is_adjacent = n == 0 or n == len(fractions) or phases.x[n] - phases.x[n - 1] < 1.5 * phases.width
        if fraction >= mean and is_adjacent:
            amount += fraction
            continue
        if amount > best_amount:
            best, best_amount = (begin, n - 1), amount
        begin, amount = (n, fraction) if fraction >= mean else (n + 1, 0.0)
    return phases.x[best[0]], phases.x[best[1]] + phases.width


def _extreme(field: str, name: str, series: Series) -> float | None:
    """Time at which a counter was at its worst; None if the curve does not belong to the field."""
    if field.startswith("gpus."):
        curve_name = _GPU_CURVE_BY_FIELD.get(field.removeprefix("gpus."))
        if curve_name is None or not name.startswith("gpu ") or name.partition("/")[2] != curve_name:
            return None
    elif (curve_name := _CURVE_BY_FIELD.get(field)) != name:
        return None
    if curve_name in _LOW_IS_BAD:
        return min(((v, x) for v, x in zip(series.low, series.x, strict=True) if v is not None), default=(0, None))[1]
    return max(((v, x) for v, x in zip(series.high, series.x, strict=True) if v is not None), default=(0, None))[1]
