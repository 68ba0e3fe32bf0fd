"""The GPU's memory: nearly full, by the program or by fragments; or a leak that will fill it."""

from stoker.diagnosis.causes.cause import find_cause
from stoker.diagnosis.causes.host_memory import (
    GIB,
    fit_memory_leak,
    time_to_full_evidence,
)
from stoker.diagnosis.causes.shared import make_evidence, make_finding
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

GPU_MEMORY_NEAR_LIMIT = find_cause("gpu_memory_near_limit")

GPU_MEMORY_LEAK = find_cause("gpu_memory_leak")


def gpu_memory_near_limit(run: RunRecords) -> Finding | None:
    return _nearly_full(run) or _fragmented(run)


def _nearly_full(run: RunRecords) -> Finding | None:
    sizes = [gpu.memory_total_bytes for gpu in run.gpus.values() if gpu.memory_total_bytes]
    if run.memory_peak_bytes is None or not sizes or run.on_cpu:
        return None
    fraction = run.memory_peak_bytes / min(sizes)
    text = f"{run.memory_peak_bytes / GIB:.1f} of {min(sizes) / GIB:.1f} GiB were allocated"
    evidence = [make_evidence(text, fraction, "steps.jsonl: memory_peak_bytes")]
    return make_finding(run, GPU_MEMORY_NEAR_LIMIT, fraction, evidence)


def _fragmented(run: RunRecords) -> Finding | None:
    cause, peak_bytes = GPU_MEMORY_NEAR_LIMIT, run.memory_peak_bytes
    if peak_bytes is None or run.on_cpu or len(run.gpus) != 1:
        return None
    (gpu,) = run.gpus.values()
    used_bytes, total_bytes = gpu.max_memory_used_bytes, gpu.memory_total_bytes
    if not used_bytes or not total_bytes or gpu.other_processes.value != 0:
        return None
    fraction = (used_bytes - peak_bytes) / total_bytes
    if used_bytes / total_bytes < cause.threshold("min_used_fraction") or fraction < cause.threshold("fragmented"):
        return None
    text = (
        f"the driver shows {used_bytes / GIB:.1f} GiB in use, the program allocated at most {peak_bytes / GIB:.1f}: "
        "the memory is fragmented"
    )
    evidence = [make_evidence(text, fraction, "devices.jsonl: gpus.memory_used_bytes; steps.jsonl: memory_peak_bytes")]
    command = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    return make_finding(
        run, cause, fraction, evidence, severity="warning", command=command, config_patch={}, confidence=0.6
    )


def gpu_memory_leak(run: RunRecords) -> Finding | None:
    leaks = [
        (max(0.0, gpu.memory_total_bytes - gpu.memory.values[-1]) / fit.slope, index)
        for index, gpu in run.gpus.items()
        if (fit := fit_memory_leak(gpu.memory)) is not None and gpu.memory_total_bytes
    ]
    if not leaks or any(run.gpus[index].other_processes.value for _, index in leaks):
        return None
    remaining_s, index = min(leaks)
    memory, fit = run.gpus[index].memory, fit_memory_leak(run.gpus[index].memory)
    text = f"GPU {index}: {memory.growth / GIB:.2f} GiB more in {memory.span_s:,.0f} s, in a straight line"
    slope = None if fit is None else fit.slope
    evidence = [make_evidence(text, slope, "devices.jsonl: gpus.memory_used_bytes"), time_to_full_evidence(remaining_s)]
    return make_finding(run, GPU_MEMORY_LEAK, remaining_s / 3600, evidence)
