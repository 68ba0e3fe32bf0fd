"""Other processes compute on the GPU."""

from stoker.diagnosis.causes.cause import HEURISTIC, Cause
from stoker.diagnosis.causes.shared import make_evidence, make_finding, percent
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

GPU_SHARED = Cause(
    id="gpu_shared",
    title="Other processes compute on the GPU",
    reason="allocation and scheduling",
    symptom="the speed varies without a reason; nvidia-smi lists more processes",
    required_records=("devices.jsonl: gpus.other_processes",),
    warning_threshold=0.20,
    metric="fraction of the samples in which another process was on one of the GPUs",
    source=HEURISTIC,
    confidence=0.75,
    fix="End them (nvidia-smi lists them), use another GPU (CUDA_VISIBLE_DEVICES), or exclusive mode (nvidia-smi -c 3)",
    command="nvidia-smi",
)


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
