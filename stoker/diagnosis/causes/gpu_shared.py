"""Other processes compute on the GPU."""

from stoker.diagnosis.causes.cause import find_cause
from stoker.diagnosis.causes.shared import make_evidence, make_finding, percent
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

GPU_SHARED = find_cause("gpu_shared")


def gpu_shared(run: RunRecords) -> Finding | None:
    fractions = [
        (gpu.other_processes.value, index) for index, gpu in run.gpus.items() if gpu.other_processes.value is not None
    ]
    if not fractions:
        return None
    fraction, index = max(fractions)
    text = f"another process was on GPU {index} in {percent(fraction)} of the samples"
    return make_finding(
        run, GPU_SHARED, fraction, [make_evidence(text, fraction, "devices.jsonl: gpus.other_processes")]
    )
