"""/dev/shm, the memory that loader processes share, is nearly full or very small."""

from stoker.diagnosis.causes.cause import HEURISTIC, Cause, Threshold
from stoker.diagnosis.causes.shared import make_evidence, make_finding, sample_evidence
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

SHARED_MEMORY_SMALL = Cause(
    id="shared_memory_small",
    title="/dev/shm is nearly full",
    reason="failure: shared memory",
    symptom="DataLoader workers die with a bus error, or 'unable to allocate shared memory'",
    required_records=("devices.jsonl: shm_used_bytes, shm_total_bytes",),
    info_threshold=0.50,
    warning_threshold=0.80,
    critical_threshold=0.95,
    metric="peak use of /dev/shm, fraction of its size",
    source=HEURISTIC + ": a worker's next batch has to fit",
    thresholds={
        "docker_bytes": Threshold(
            64 * 2**20,
            "size up to which a half full /dev/shm is reported: docker's default (docker run, --shm-size), less than "
            "a batch of 16 images of 800 × 800 as floats",
        )
    },
    confidence=0.8,
    fix="Use `docker run --shm-size 8g` or `--ipc host`, in Kubernetes an emptyDir of medium Memory at /dev/shm; or "
    "fewer loader workers",
    command="docker run --shm-size 8g",
)


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
