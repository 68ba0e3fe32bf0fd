"""The storage that the run writes to and reads from: errors of it, and a disk that is nearly full."""

from stoker.diagnosis.causes.cause import Cause, Severity, Threshold, worst
from stoker.diagnosis.causes.shared import make_evidence, make_finding
from stoker.diagnosis.run_data import MAX_EXAMPLES, RunRecords
from stoker.runs.schemas import Finding

STORAGE_ERRORS = Cause(
    id="storage_errors",
    title="Reads, uploads or checkpoints failed",
    reason="failure: storage",
    symptom="warnings about reads, uploads or records that had to be repeated; or checkpoints that could not be "
    "saved, so that a restart would lose more work than it should",
    required_records=("events.jsonl: checkpoint_failed, warning with data.storage, or about records or uploads",),
    info_threshold=1,
    warning_threshold=3,
    metric="number of such warnings; a checkpoint that failed is always a warning",
    source="heuristic: one is an accident of the network",
    thresholds={"failed_checkpoints": Threshold(1, "checkpoints that failed: any is one too many")},
    confidence=0.7,
    fix="Look at the named errors: a full disk (put the run on another one: --run-dir), the quota of requests (429), a "
    "bucket far away, a defective disk (dmesg)",
    external_fix="Look at the named errors: a full disk, the quota of requests (429), a bucket far away, a defective "
    "disk (dmesg)",
)

DISK_NEARLY_FULL = Cause(
    id="disk_nearly_full",
    title="The run's disk is nearly full",
    reason="failure: storage",
    symptom="the next checkpoint, or the one after it, ends with 'No space left on device'",
    required_records=("devices.jsonl: disk_free_bytes",),
    warning_threshold=1.0 * 2**30,
    critical_threshold=100.0 * 2**20,
    lower_is_worse=True,
    metric="minimum of the free bytes",
    source="heuristic: a checkpoint of RetinaNet with its optimizer is 0.4 GB, and the new one is complete before the "
    "old one is deleted",
    confidence=0.85,
    fix="Make room, keep fewer checkpoints, or put the run on another disk (--run-dir)",
    external_fix="Make room, keep fewer checkpoints, or write to another disk",
    command="--run-dir",
)


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
