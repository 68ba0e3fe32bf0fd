"""What is worth a line below the findings and needs no action: time that is explained, and records that are missing."""

import math
from collections.abc import Iterable

from stoker.diagnosis.causes.cause import NoteKind, find_note
from stoker.diagnosis.causes.input import cold_cache_fraction
from stoker.diagnosis.causes.shared import driver_utilization, fraction_of_phase, is_long_enough, percent
from stoker.diagnosis.run_data import RunRecords
from stoker.findings.finding import Finding

_GPU_PHASES = ("compute", "eval", "comm", "straggler", "recovery", "checkpoint", "compile", "h2d", "sync")
"""Phases in which a GPU may be seen at work; NCCL waits in a kernel."""


def unattributed_time(run: RunRecords, kind: NoteKind) -> str | None:
    """In an external job most time is unattributed as long as nothing looks inside."""
    fraction = fraction_of_phase(run, "unattributed")
    name = "min_fraction_external" if run.is_external else "min_fraction"
    if fraction is None or fraction < kind.threshold(name):
        return None
    return (
        f"{percent(fraction)} of the time after the start was not attributed to any phase: a process that was stopped "
        "or swapped out, or work between steps that nothing brackets (`stoker.measure` has m.phase for it)"
    )


def telemetry_mismatch(run: RunRecords, kind: NoteKind) -> str | None:
    utilization = driver_utilization(run)
    if utilization is None or run.is_external or not is_long_enough(run):
        return None
    ledger_fraction = run.steady_phase_fraction(*_GPU_PHASES)
    if utilization - ledger_fraction < kind.threshold("min_difference"):
        return None
    return (
        f"the driver saw kernels {percent(utilization)} of the time, by the ledger the device worked "
        f"{percent(ledger_fraction)} of it: another process on the GPU (nvidia-smi), or work that the ledger does not "
        "know"
    )


def cold_cache(run: RunRecords, kind: NoteKind) -> str | None:  # noqa: ARG001 (all notes take it)
    fraction = cold_cache_fraction(run)
    if fraction is None:
        return None
    return (
        f"{percent(fraction)} of the wait for bytes was in the first epoch: caches were empty. For many short runs, "
        "keep the cache folder (STOKER_CACHE_DIR) on a disk that survives the machine, or copy the images there before"
    )


def intentional_idle(run: RunRecords, kind: NoteKind) -> str | None:
    fraction = fraction_of_phase(run, "idle")
    if fraction is None or fraction < kind.threshold("min_fraction"):
        return None
    return f"the device had no work to do {percent(fraction)} of the time after the start (phase idle)"


def no_telemetry(run: RunRecords, kind: NoteKind) -> str | None:
    device = run.settings.get("device")
    on_gpu = isinstance(device, str) and device.startswith("cuda")
    if run.num_samples and not (on_gpu and not run.gpus):
        return None
    if run.totals.wall_s < kind.threshold("min_duration_s"):
        return None
    missing = "has no GPU" if run.num_samples else "has no line"
    return (
        f"devices.jsonl {missing}, of a run of {run.totals.wall_s:,.0f} s: rules that need it abstain. An event gives "
        "the reason (NVML, /proc in the container); the driver's libnvidia-ml may be missing there"
    )


def no_step_output(run: RunRecords, kind: NoteKind) -> str | None:
    if not run.is_external or run.totals.steps or run.totals.wall_s < kind.threshold("min_duration_s"):
        return None
    return (
        f"no step in {run.totals.wall_s:,.0f} s: the job prints nothing about its steps. Let it print steps and losses "
        "(`loss: 0.5` with a counter is enough), or put `with stoker.measure(…)` around its loop"
    )


def predicted_step(run: RunRecords, kind: NoteKind) -> str | None:  # noqa: ARG001 (all notes take it)
    predicted_s, error = run.facts.get("predicted_step_s"), run.facts.get("predicted_step_error")
    compute_s = run.steady.phases.get("compute", 0.0)
    if not isinstance(predicted_s, float) or not isinstance(error, float) or not run.steady.steps or not compute_s:
        return None
    measured_s = compute_s / run.steady.steps / max(1, run.totals.devices)
    difference = measured_s / predicted_s - 1 if predicted_s > 0 else math.inf
    return (
        f"`stoker plan` predicted {predicted_s:.3g} s a step ± {100 * error:.0f} %, measured {measured_s:.3g} s "
        f"({100 * difference:+.0f} %)"
    )


_NOTES = (
    unattributed_time, telemetry_mismatch, cold_cache, intentional_idle, no_telemetry, no_step_output, predicted_step,
)  # fmt: skip
NOTES = tuple((find_note(note.__name__), note) for note in _NOTES)


def collect_notes(run: RunRecords, findings: Iterable[Finding]) -> list[Finding]:
    """The notes on a run, in the order of NOTES. findings: those of the same run, by the rules."""
    found = {finding.id for finding in findings}
    return [
        Finding(id=kind.id, severity="info", title=text, place=kind.record)
        for kind, note in NOTES
        if not found & set(kind.omitted_with) and (text := note(run, kind)) is not None
    ]
