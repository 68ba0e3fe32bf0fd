"""Restarts cost the run time: work is lost and done again, or the run is restarted again and again."""

from stoker.diagnosis.causes.cause import HEURISTIC, Cause, Severity, Threshold, worst
from stoker.diagnosis.causes.shared import attempts_evidence, make_evidence, make_finding, phase_evidence
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Evidence, Finding

COSTLY_RESTARTS = Cause(
    id="costly_restarts",
    title="Restarts cost the run time",
    reason="failure: preemption",
    symptom="after a restart the step number is behind where it was; or many attempts of a few minutes each",
    required_records=("steps.jsonl: phases, wall_s", "events.jsonl: attempt"),
    warning_threshold=0.02,
    critical_threshold=0.20,
    metric="recovery (steps done again, and state read back), fraction of all device time; or the number of attempts",
    source=HEURISTIC,
    thresholds={
        "attempts_warning": Threshold(4, "attempts that are many, if they are short (heuristic)"),
        "attempts_critical": Threshold(12, "attempts that are critical, if they are short (heuristic)"),
        "mean_s": Threshold(1800.0, "mean length of a short attempt (heuristic: Google's spot VMs live for hours)"),
    },
    confidence=0.9,
    fix="Save more often, and leave the run time to save when it is stopped (SIGTERM, then at least 30 s); look at "
    "what ended each attempt (events.jsonl, the scheduler's log): another zone or machine type, an ordinary machine "
    "instead of a spot machine, or an error that repeats",
    external_fix="Save more often, and save when the job is stopped (SIGTERM, then at least 30 s); look at what ended "
    "each attempt (the scheduler's log): another zone or machine type, an ordinary machine instead of a spot machine, "
    "or an error that repeats",
    command="--checkpoint-every 1min",
    config_patch={"checkpoint_every": "1min"},
)


def costly_restarts(run: RunRecords) -> Finding | None:
    cause, count = COSTLY_RESTARTS, run.totals.attempts
    fraction = run.phase_fraction("recovery")
    lost_severity = cause.severity(fraction)
    evidence: list[Evidence] = [phase_evidence(run, "recovery")] if lost_severity is not None else []
    evidence.append(attempts_evidence(run))
    count_severity: Severity | None = None
    mean_s = run.totals.wall_s / max(1, count)
    if count >= cause.threshold("attempts_warning") and mean_s <= cause.threshold("mean_s"):
        count_severity = "critical" if count >= cause.threshold("attempts_critical") else "warning"
        evidence.append(
            make_evidence(f"an attempt lasts {mean_s / 60:.1f} min on average", mean_s, "steps.jsonl: wall_s")
        )
    severity = worst([lost_severity, count_severity])
    if severity is None:
        return None
    lost_s = run.phase_seconds("recovery") if lost_severity is not None else None
    return make_finding(run, cause, fraction, evidence, severity=severity, lost_s=lost_s)
