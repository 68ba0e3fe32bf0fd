"""What is worth a line below the findings and needs no action: time that is explained, and records that are missing."""

import math
from collections.abc import Iterable
from typing import Any

from stoker_watch.diagnosis.causes.cause import NoteKind, find_note
from stoker_watch.diagnosis.causes.input import cold_cache_fraction
from stoker_watch.diagnosis.causes.shared import (
    driver_utilization,
    fraction_of_phase,
    has_enough_stacks,
    is_long_enough,
    percent,
)
from stoker_watch.diagnosis.run_data import RunRecords
from stoker_watch.findings.finding import Finding

_GPU_PHASES = ("compute", "eval", "comm", "straggler", "recovery", "checkpoint", "compile", "h2d", "sync")
"""Phases in which a GPU may be seen at work; NCCL waits in a kernel."""


Values = dict[str, Any]
"""What a note says, for the braces of its text."""


def unattributed_time(run: RunRecords, kind: NoteKind) -> Values | None:
    """In an external job most time is unattributed as long as nothing looks inside; where stacks were sampled, `why`
    estimates its parts."""
    if run.is_external and has_enough_stacks(run):
        return None
    fraction = fraction_of_phase(run, "unattributed")
    name = "min_fraction_external" if run.is_external else "min_fraction"
    return {"fraction": percent(fraction)} if fraction is not None and fraction >= kind.threshold(name) else None


def telemetry_mismatch(run: RunRecords, kind: NoteKind) -> Values | None:
    utilization = driver_utilization(run)
    if utilization is None or run.is_external or not is_long_enough(run):
        return None
    ledger_fraction = run.steady_phase_fraction(*_GPU_PHASES)
    if utilization - ledger_fraction < kind.threshold("min_difference"):
        return None
    return {"driver": percent(utilization), "ledger": percent(ledger_fraction)}


def cold_cache(run: RunRecords, kind: NoteKind) -> Values | None:  # noqa: ARG001 (all notes take it)
    fraction = cold_cache_fraction(run)
    return None if fraction is None else {"fraction": percent(fraction)}


def intentional_idle(run: RunRecords, kind: NoteKind) -> Values | None:
    fraction = fraction_of_phase(run, "idle")
    return None if fraction is None or fraction < kind.threshold("min_fraction") else {"fraction": percent(fraction)}


def no_telemetry(run: RunRecords, kind: NoteKind) -> Values | None:
    device = run.settings.get("device")
    on_gpu = isinstance(device, str) and device.startswith("cuda")
    if (run.num_samples and not (on_gpu and not run.gpus)) or run.totals.wall_s < kind.threshold("min_duration_s"):
        return None
    return {"missing": "has no GPU" if run.num_samples else "has no line", "wall_s": run.totals.wall_s}


def no_step_output(run: RunRecords, kind: NoteKind) -> Values | None:
    if not run.is_external or run.totals.steps or run.totals.wall_s < kind.threshold("min_duration_s"):
        return None
    return {"wall_s": run.totals.wall_s}


def hardly_begun(run: RunRecords, kind: NoteKind) -> Values | None:
    usual, steps = run.facts.get("usual_steps"), run.totals.step
    if not isinstance(usual, int) or not 0 < steps < kind.threshold("max_fraction") * usual:
        return None
    return {"steps": steps, "usual": usual}


def predicted_step(run: RunRecords, kind: NoteKind) -> Values | None:  # noqa: ARG001 (all notes take it)
    predicted_s, error = run.facts.get("predicted_step_s"), run.facts.get("predicted_step_error")
    compute_s = run.steady.phases.get("compute", 0.0)
    if not isinstance(predicted_s, float) or not isinstance(error, float) or not run.steady.steps or not compute_s:
        return None
    measured_s = compute_s / run.steady.steps
    difference = measured_s / predicted_s - 1 if predicted_s > 0 else math.inf
    return {"predicted_s": predicted_s, "error": 100 * error, "measured_s": measured_s, "difference": 100 * difference}


def damaged_events(run: RunRecords, kind: NoteKind) -> Values | None:  # noqa: ARG001 (all notes take it)
    found = run.events.damaged
    return {"count": len(found), "first": found[0]} if found else None


_NOTES = (
    unattributed_time, telemetry_mismatch, cold_cache, intentional_idle, no_telemetry, no_step_output, hardly_begun,
    predicted_step, damaged_events,
)  # fmt: skip
NOTES = tuple((find_note(note.__name__), note) for note in _NOTES)


def collect_notes(run: RunRecords, findings: Iterable[Finding]) -> list[Finding]:
    """The notes on a run, in the order of NOTES. findings: those of the same run, by the rules."""
    found = {finding.id for finding in findings}
    return [
        Finding(id=kind.id, severity="info", title=kind.text.format(**values), place=kind.record)
        for kind, note in NOTES
        if not found & set(kind.omitted_with) and (values := note(run, kind)) is not None
    ]
