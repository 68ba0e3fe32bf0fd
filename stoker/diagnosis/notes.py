"""What is worth a line below the findings and needs no action: time that is explained, and records that are missing."""

import math
from collections.abc import Callable, Iterable

import msgspec

from stoker.diagnosis.causes.cause import Threshold
from stoker.diagnosis.causes.input import COLD_CACHE, cold_cache_fraction
from stoker.diagnosis.causes.shared import driver_utilization, fraction_of_phase, is_long_enough, percent
from stoker.diagnosis.run_data import RunRecords
from stoker.findings.finding import Finding

_GPU_PHASES = ("compute", "eval", "comm", "straggler", "recovery", "checkpoint", "compile", "h2d", "sync")
"""Phases in which a GPU may be seen at work; NCCL waits in a kernel."""

_UNATTRIBUTED = {
    "min_fraction": Threshold(
        0.03, "unattributed, fraction of the device time after the start: stoker's own tests allow this in steady state"
    ),
    "min_fraction_external": Threshold(0.50, "the same of a job that stoker did not write (heuristic)"),
}
_TELEMETRY_MISMATCH = {
    "min_difference": Threshold(
        0.25,
        "the driver's utilization minus the fraction of phases in which the device works (heuristic: more than the "
        "driver's sample period blurs)",
    )
}
_INTENTIONAL_IDLE = {"min_fraction": Threshold(0.05, "idle, fraction of the device time after the start (heuristic)")}
_NO_TELEMETRY = {"min_duration_s": Threshold(3600.0, "seconds of a run without telemetry (heuristic)")}
_NO_STEP_OUTPUT = {"min_duration_s": Threshold(120.0, "seconds that a job was watched without a step (heuristic)")}


class NoteKind(msgspec.Struct, frozen=True):
    """A kind of note. omitted_with: causes that explain the same; with one of them there is no note."""

    id: str
    title: str
    find: Callable[[RunRecords], Finding | None]
    thresholds: dict[str, Threshold]
    omitted_with: tuple[str, ...] = ()


def collect_notes(run: RunRecords, findings: Iterable[Finding]) -> list[Finding]:
    """The notes on a run, in the order of NOTES. findings: those of the same run, by the rules."""
    found = {finding.id for finding in findings}
    notes = [kind.find(run) for kind in NOTES if not found & set(kind.omitted_with)]
    return [note for note in notes if note is not None]


def _note(id: str, text: str, place: str) -> Finding:
    """place: the record that it rests on."""
    return Finding(id=id, severity="info", title=text, place=place)


def _unattributed_time(run: RunRecords) -> Finding | None:
    """In an external job most time is unattributed as long as nothing looks inside."""
    fraction = fraction_of_phase(run, "unattributed")
    name = "min_fraction_external" if run.is_external else "min_fraction"
    if fraction is None or fraction < _UNATTRIBUTED[name].value:
        return None
    text = (
        f"{percent(fraction)} of the time after the start was not attributed to any phase: a process that was stopped "
        "or swapped out, or work between steps that nothing brackets (`stoker.measure` has m.phase for it)"
    )
    return _note("unattributed_time", text, "steps.jsonl: phases.unattributed")


def _telemetry_mismatch(run: RunRecords) -> Finding | None:
    utilization = driver_utilization(run)
    if utilization is None or run.is_external or not is_long_enough(run):
        return None
    ledger_fraction = run.steady_phase_fraction(*_GPU_PHASES)
    if utilization - ledger_fraction < _TELEMETRY_MISMATCH["min_difference"].value:
        return None
    text = (
        f"the driver saw kernels {percent(utilization)} of the time, by the ledger the device worked "
        f"{percent(ledger_fraction)} of it: another process on the GPU (nvidia-smi), or work that the ledger does not "
        "know"
    )
    return _note("telemetry_mismatch", text, "devices.jsonl: gpus.utilization; steps.jsonl: phases")


def _cold_cache(run: RunRecords) -> Finding | None:
    fraction = cold_cache_fraction(run)
    if fraction is None:
        return None
    text = (
        f"{percent(fraction)} of the wait for bytes was in the first epoch: caches were empty. For many short runs, "
        "keep the cache folder (STOKER_CACHE_DIR) on a disk that survives the machine, or copy the images there before"
    )
    return _note("cold_cache", text, "steps.jsonl: input_wait_stages.fetch")


def _intentional_idle(run: RunRecords) -> Finding | None:
    fraction = fraction_of_phase(run, "idle")
    if fraction is None or fraction < _INTENTIONAL_IDLE["min_fraction"].value:
        return None
    text = f"the device had no work to do {percent(fraction)} of the time after the start (phase idle)"
    return _note("intentional_idle", text, "steps.jsonl: phases.idle")


def _no_telemetry(run: RunRecords) -> Finding | None:
    device = run.settings.get("device")
    on_gpu = isinstance(device, str) and device.startswith("cuda")
    if run.num_samples and not (on_gpu and not run.gpus):
        return None
    if run.totals.wall_s < _NO_TELEMETRY["min_duration_s"].value:
        return None
    missing = "has no GPU" if run.num_samples else "has no line"
    text = (
        f"devices.jsonl {missing}, of a run of {run.totals.wall_s:,.0f} s: rules that need it abstain. An event gives "
        "the reason (NVML, /proc in the container); the driver's libnvidia-ml may be missing there"
    )
    return _note("no_telemetry", text, "devices.jsonl")


def _no_step_output(run: RunRecords) -> Finding | None:
    if not run.is_external or run.totals.steps or run.totals.wall_s < _NO_STEP_OUTPUT["min_duration_s"].value:
        return None
    text = (
        f"no step in {run.totals.wall_s:,.0f} s: the job prints nothing about its steps. Let it print steps and losses "
        "(`loss: 0.5` with a counter is enough), or put `with stoker.measure(…)` around its loop"
    )
    return _note("no_step_output", text, "steps.jsonl: window_steps")


def _predicted_step(run: RunRecords) -> Finding | None:
    predicted_s, error = run.facts.get("predicted_step_s"), run.facts.get("predicted_step_error")
    compute_s = run.steady.phases.get("compute", 0.0)
    if not isinstance(predicted_s, float) or not isinstance(error, float) or not run.steady.steps or not compute_s:
        return None
    measured_s = compute_s / run.steady.steps / max(1, run.totals.devices)
    difference = measured_s / predicted_s - 1 if predicted_s > 0 else math.inf
    text = (
        f"`stoker plan` predicted {predicted_s:.3g} s a step ± {100 * error:.0f} %, measured {measured_s:.3g} s "
        f"({100 * difference:+.0f} %)"
    )
    return _note("predicted_step", text, "events.jsonl: info, data.facts; steps.jsonl: phases.compute")


NOTES = (
    NoteKind(
        "unattributed_time",
        "Time that was not attributed to any phase",
        _unattributed_time,
        _UNATTRIBUTED,
        omitted_with=("python_bound", "host_device_syncs"),
    ),
    NoteKind(
        "telemetry_mismatch",
        "The driver saw the GPU work when the ledger did not",
        _telemetry_mismatch,
        _TELEMETRY_MISMATCH,
    ),
    NoteKind("cold_cache", "The first epoch was slow, later ones are not", _cold_cache, COLD_CACHE),
    NoteKind(
        "intentional_idle",
        "The device had no work to do",
        _intentional_idle,
        _INTENTIONAL_IDLE,
        omitted_with=("hung",),
    ),
    NoteKind("no_telemetry", "There is no telemetry of the machine", _no_telemetry, _NO_TELEMETRY),
    NoteKind(
        "no_step_output",
        "The watched job prints nothing about its steps",
        _no_step_output,
        _NO_STEP_OUTPUT,
        omitted_with=("empty_input",),
    ),
    NoteKind("predicted_step", "The time of a step was predicted", _predicted_step, {}),
)
