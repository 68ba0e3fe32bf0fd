"""Restarts cost the run time: work is lost and done again, or the run is restarted again and again."""

from stoker.diagnosis.causes.cause import Severity, find_cause, worst
from stoker.diagnosis.causes.shared import attempts_evidence, make_evidence, make_finding, phase_evidence
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Evidence, Finding

COSTLY_RESTARTS = find_cause("costly_restarts")


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
