"""The storage that the run writes to and reads from: errors of it, and a disk that is nearly full."""

from stoker.diagnosis.causes.cause import find_cause, worst
from stoker.diagnosis.causes.shared import make_evidence, make_finding
from stoker.diagnosis.run_data import MAX_EXAMPLES, RunRecords
from stoker.findings.finding import Finding, Severity

STORAGE_ERRORS = find_cause("storage_errors")

DISK_NEARLY_FULL = find_cause("disk_nearly_full")


def storage_errors(run: RunRecords) -> Finding | None:
    failures, warnings = list(dict.fromkeys(run.checkpoint_failures)), run.storage_warnings
    has_failed = len(run.checkpoint_failures) >= STORAGE_ERRORS.threshold("failed_checkpoints")
    failure_severity: Severity | None = "warning" if has_failed else None
    severity = worst([failure_severity, STORAGE_ERRORS.severity(len(warnings))])
    if severity is None:
        return None
    evidence = [make_evidence(text, source="events.jsonl: checkpoint_failed") for text in failures[:MAX_EXAMPLES]]
    evidence += [make_evidence(text, source="events.jsonl: warning") for text in warnings[-MAX_EXAMPLES:]]
    confidence = 0.95 if has_failed else None
    return make_finding(run, STORAGE_ERRORS, len(warnings), evidence, severity=severity, confidence=confidence)


def disk_nearly_full(run: RunRecords) -> Finding | None:
    free_bytes = run.host.disk_free_bytes.min_value
    if free_bytes is None:
        return None
    text = f"at least {free_bytes / 2**20:,.0f} MiB were free"
    return make_finding(
        run, DISK_NEARLY_FULL, free_bytes, [make_evidence(text, free_bytes, "devices.jsonl: disk_free_bytes")]
    )
