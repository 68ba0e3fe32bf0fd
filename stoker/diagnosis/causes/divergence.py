"""Training diverges: the loss became NaN, or training is unstable (skipped steps, rollbacks, loss spikes)."""

from stoker.diagnosis.causes.cause import Severity, find_cause, worst
from stoker.diagnosis.causes.learning_rate import event_evidence, lr_command, lr_evidence
from stoker.diagnosis.causes.shared import make_evidence, make_finding
from stoker.diagnosis.run_data import MAX_EXAMPLES, RunRecords
from stoker.runs.schemas import Evidence, Finding

NON_FINITE_LOSS = find_cause("non_finite_loss")

UNSTABLE_TRAINING = find_cause("unstable_training")


def non_finite_loss(run: RunRecords) -> Finding | None:
    learning, points = run.learning, run.learning.loss.points
    event, num_windows = learning.non_finite_event, learning.windows_without_loss
    has_lost_loss = bool(points) and num_windows >= NON_FINITE_LOSS.threshold("windows")
    if event is None and (run.is_external or not has_lost_loss):
        return None
    if event is not None and not num_windows and points and points[-1][0] > event.t + 1.0:
        return None  # it became finite again
    evidence: list[Evidence | None] = [event_evidence(event) if event is not None else None]
    if has_lost_loss:
        text = f"the last {num_windows} windows of steps had no finite loss"
        evidence.append(make_evidence(text, num_windows, "steps.jsonl: losses"))
    rollbacks = learning.events.get("rolled_back", [])
    evidence += [lr_evidence(run), *(event_evidence(rollback) for rollback in rollbacks[-MAX_EXAMPLES:])]
    return make_finding(
        run,
        NON_FINITE_LOSS,
        1,
        evidence,
        lost_s=learning.device_s_without_loss or None,
        estimate_basis="all since the last finite loss" if learning.device_s_without_loss else "",
        command=lr_command(rollbacks[-1].data.get("lr")) if rollbacks else None,
    )


def unstable_training(run: RunRecords) -> Finding | None:
    cause, learning = UNSTABLE_TRAINING, run.learning
    rollbacks, spikes = learning.events.get("rolled_back", []), learning.events.get("loss_spike", [])
    fraction = learning.skipped_steps / run.totals.steps if run.totals.steps else 0.0
    skip_severity = cause.severity(fraction)
    rollback_severity = _count_severity(len(rollbacks), "rollbacks")
    spike_severity = _count_severity(len(spikes), "spikes")
    severity = worst([skip_severity, rollback_severity, spike_severity])
    if severity is None:
        return None
    evidence: list[Evidence] = []
    command, lost_s = None, None
    if skip_severity is not None:
        text = f"{learning.skipped_steps:,} of {run.totals.steps:,} steps were skipped: their gradients were not finite"
        evidence.append(make_evidence(text, learning.skipped_steps, "steps.jsonl: skipped_steps"))
        lost_s = fraction * run.phase_seconds("compute")
    if spike_severity is not None:
        evidence += [event_evidence(event) for event in spikes[-MAX_EXAMPLES:]]
        command = lr_command(spikes[-1].data.get("suggested_lr"))
    if rollback_severity is not None:
        evidence += [event_evidence(event) for event in rollbacks[-MAX_EXAMPLES:]]
        command = lr_command(rollbacks[-1].data.get("lr"))
    return make_finding(run, cause, fraction, evidence, severity=severity, lost_s=lost_s, command=command)


def _count_severity(count: int, name: str) -> Severity | None:
    if count >= UNSTABLE_TRAINING.threshold(f"{name}_critical"):
        return "critical"
    return "warning" if count >= UNSTABLE_TRAINING.threshold(f"{name}_warning") else None
