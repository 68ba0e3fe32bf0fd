"""Errors of the GPU hardware and its driver: Xid errors, and memory errors that ECC counted."""

from stoker.diagnosis.causes.cause import Severity, find_cause, worst
from stoker.diagnosis.causes.shared import make_evidence, make_finding
from stoker.diagnosis.run_data import RunRecords
from stoker.diagnosis.xids import find_xid
from stoker.runs.schemas import Evidence, Finding

_MAX_XID_LINES = 5

GPU_ERRORS = find_cause("gpu_errors")


def gpu_errors(run: RunRecords) -> Finding | None:
    xid_severity, xid_evidence = _judge_xids(run)
    ecc_severity, ecc_evidence = _judge_ecc(run)
    severity = worst([xid_severity, ecc_severity])
    if severity is None:
        return None
    command = None if xid_severity is not None else "nvidia-smi -q -d ECC,ROW_REMAPPER"
    return make_finding(run, GPU_ERRORS, 1, [*xid_evidence, *ecc_evidence], severity=severity, command=command)


def _judge_xids(run: RunRecords) -> tuple[Severity | None, list[Evidence]]:
    counts = {(index, number): count for index, gpu in run.gpus.items() for number, count in gpu.xid_counts.items()}
    for event in run.gpu_faults:
        gpu_index, xid_number = event.data.get("gpu"), event.data.get("xid")
        if isinstance(xid_number, int):
            counts.setdefault((gpu_index if isinstance(gpu_index, int) else -1, xid_number), 1)
    if not counts:
        return None, []
    evidence, level = [], 1
    for (index, number), count in sorted(counts.items()):
        xid = find_xid(number)
        level = level if xid.origin == "program" else 2
        gpu_name = f"GPU {index}" if index >= 0 else "a GPU"
        origin = "" if xid.origin == "either" else f"; mostly an error of the {xid.origin}"
        text = f"Xid {number} on {gpu_name}, {count} times: {xid.meaning}{origin}. {xid.fix}"
        evidence.append(make_evidence(text, number, "devices.jsonl: gpus.xids"))
    return GPU_ERRORS.severity(level), evidence[:_MAX_XID_LINES]


def _judge_ecc(run: RunRecords) -> tuple[Severity | None, list[Evidence]]:
    cause, most, evidence = GPU_ERRORS, 0.0, []
    for index, gpu in run.gpus.items():
        corrected, uncorrected = (
            0 if pair is None else max(0, pair[1] - pair[0]) for pair in (gpu.ecc_corrected, gpu.ecc_uncorrected)
        )
        if corrected or uncorrected:
            text = f"GPU {index}: {corrected:,} memory errors were corrected, {uncorrected:,} were not, during the run"
            evidence.append(
                make_evidence(text, corrected + uncorrected, "devices.jsonl: gpus.ecc_corrected, ecc_uncorrected")
            )
            most = max(most, corrected + uncorrected * cause.threshold("uncorrected"))
    levels: tuple[Severity, ...] = ("critical", "warning", "info")
    severity = next((level for level in levels if most >= cause.threshold(f"corrected_{level}")), None)
    return severity, evidence
