"""/dev/shm, the memory that loader processes share, is nearly full or very small."""

from stoker.diagnosis.causes.cause import find_cause
from stoker.diagnosis.causes.shared import make_evidence, make_finding, sample_evidence
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

SHARED_MEMORY_SMALL = find_cause("shared_memory_small")


def shared_memory_small(run: RunRecords) -> Finding | None:
    cause, used, size_bytes = SHARED_MEMORY_SMALL, run.host.shm_fraction.max_value, run.host.shm_total_bytes
    if used is None or size_bytes is None:
        return None
    if used < (cause.warning_threshold or 1.0) and size_bytes > cause.threshold("docker_bytes"):
        return None
    evidence = [
        sample_evidence("at most {} of /dev/shm was in use", used, "shm_used_bytes"),
        make_evidence(f"its size is {size_bytes / 2**20:,.1f} MiB", size_bytes, "devices.jsonl: shm_total_bytes"),
    ]
    return make_finding(run, cause, used, evidence)
