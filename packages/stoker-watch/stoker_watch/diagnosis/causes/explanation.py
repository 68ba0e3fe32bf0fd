"""Why a cost is there: what a rule of a cost returns, and the finding of the costs that it explains."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from stoker_watch.diagnosis.causes.cause import Cause, common_threshold
from stoker_watch.diagnosis.causes.shared import (
    cores_evidence,
    has_enough_stacks,
    is_long_enough,
    make_evidence,
    make_finding,
    percent,
    phase_evidence,
    sampled_device_s,
)
from stoker_watch.diagnosis.places.describe import describe_place
from stoker_watch.diagnosis.places.sampled import TAKES_CORES, Cost
from stoker_watch.diagnosis.run_data import RunRecords
from stoker_watch.findings.finding import Evidence, Finding, Severity

BY_SAMPLES = "the fraction of the main thread's stack samples"
"""What seconds rest on that no clock measured."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a cost is there. Costs with the same title and place become one finding."""

    evidence: Sequence[Evidence | None] = ()
    saved: float = 1.0
    """Fraction of the cost that the fix saves."""
    leaves_rest: bool = False
    """Whether less exact causes may explain the rest."""
    measured: float | None = None
    """What the thresholds of the cause are compared with; None: the fraction of the time after the start."""
    min_measured: float = 0.0
    """An additional minimum of it."""
    basis: str = ""
    """What the seconds rest on; empty: a clock measured them."""
    title: str = ""
    place: str = ""
    severity: Severity | None = None
    """Of what reaches a threshold, or has a `measured` of its own."""
    confidence: float | None = None
    fix: str | None = None
    command: str | None = None
    config_patch: dict[str, Any] | None = None
    """These are instead of the row's."""


def make_cost_finding(
    run: RunRecords, cause: Cause, explained: Sequence[tuple[Cost, float, Explanation]]
) -> Finding | None:
    """The finding of some costs, each with its seconds that no other finding has, and its explanation; None below the
    thresholds of the cause."""
    first = max(explained, key=lambda entry: entry[1])[2]
    steady_s = sum(
        seconds * explanation.saved * (cost.steady_s / cost.seconds if cost.seconds > 0 else 0.0)
        for cost, seconds, explanation in explained
    )
    lost_s: float | None = sum(seconds * explanation.saved for _, seconds, explanation in explained)
    measured = first.measured
    if measured is None:
        total_s = run.steady_device_s
        measured = steady_s / total_s if total_s > 0 else 0.0
    if first.measured is None and (cause.severity(measured) is None or not is_long_enough(run)):
        return None
    if first.basis == BY_SAMPLES:
        if not _is_certain(run, cause, measured):
            return None
        if sampled_device_s(run, measured) is None:
            lost_s = None  # too few samples for a duration
    phases = dict.fromkeys(cost.phase for cost, _, _ in explained if cost.place is None)
    clocks = [phase_evidence(run, name) for name in phases if run.phase_seconds(name) > 0]
    clocks += _relations(run, [cost for cost, _, _ in explained])
    is_by_clock = first.measured is None and first.basis != BY_SAMPLES
    evidence = [*clocks, *first.evidence] if is_by_clock else [*first.evidence, *clocks]
    return make_finding(
        run, cause, measured, evidence, severity=first.severity, title=first.title,
        place=first.place, lost_s=lost_s, estimate_basis=first.basis, min_measured=first.min_measured or None,
        fix=first.fix, command=first.command, config_patch=first.config_patch, confidence=first.confidence,
    )  # fmt: skip


def _relations(run: RunRecords, costs: Sequence[Cost]) -> list[Evidence]:
    """Why what others do costs time of the training thread, where it does not wait for input."""
    found = [
        make_evidence(f"the training thread waits for it in {describe_place(cost.awaited_in)}", cost.seconds)
        for cost in costs
        if cost.awaited_in is not None
    ]
    return [*found, *([cores_evidence(run)] if any(cost.phase == TAKES_CORES for cost in costs) else [])]


def _is_certain(run: RunRecords, cause: Cause, measured: float) -> bool:
    """Whether the samples are enough to show that a fraction of them exceeds the lowest threshold of a cause."""
    if not has_enough_stacks(run):
        return False
    error = math.sqrt(measured * (1 - measured) / run.stacks.samples) if 0 < measured < 1 else 0.0
    return cause.severity(measured - common_threshold("sigmas") * error) is not None


def explain_traced(run: RunRecords, what: str, field: str) -> Explanation | None:
    """The time of traced steps in which only `what` ran: a field of traces.jsonl, in seconds."""
    if run.traces.wall_s <= 0:
        return None
    fraction = getattr(run.traces, field) / run.traces.wall_s
    text = f"only {what} ran in {percent(fraction)} of {run.traces.steps} traced steps"
    evidence = [make_evidence(text, fraction, f"traces.jsonl: {field}")]
    basis = "the traced fraction of the time in steps"
    return Explanation(evidence=evidence, saved=min(1.0, fraction), measured=fraction, basis=basis)
