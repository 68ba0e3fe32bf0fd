"""The batch, or the whole job, is too small for the device."""

from stoker.diagnosis.causes.cause import find_cause, worst
from stoker.diagnosis.causes.shared import (
    fraction_of_phase,
    is_long_enough,
    make_evidence,
    make_finding,
    max_gpu_memory_fraction,
    sample_evidence,
)
from stoker.diagnosis.run_data import RunRecords
from stoker.findings.finding import Evidence, Finding, Severity

BATCH_TOO_SMALL = find_cause("batch_too_small")

GPU_OVERSIZED = find_cause("gpu_oversized")


def batch_too_small(run: RunRecords) -> Finding | None:
    cause, steady = BATCH_TOO_SMALL, run.steady
    evidence = [_batch_size_evidence(run), _step_rate_evidence(run)]
    probe = run.probes.get("double_batch")
    if probe is not None and probe.ratio > 1:
        saved_fraction = 1 - 1 / probe.ratio
        return make_finding(
            run,
            cause,
            saved_fraction,
            evidence,
            lost_s=saved_fraction * run.phase_seconds("compute"),
            estimate_basis="what twice the batch saved in the experiment",
            confidence=0.8,
        )
    if not is_long_enough(run) or not steady.steps_with_image_count or "batch_size" in run.auto_settings:
        return None
    if steady.num_images / steady.steps_with_image_count > cause.threshold("batch_size"):
        return None
    gpu_fraction = None if run.on_cpu else max_gpu_memory_fraction(run)
    memory_fraction = run.host.memory_fraction.max_value if gpu_fraction is None else gpu_fraction
    if memory_fraction is not None and memory_fraction > cause.threshold("memory"):
        return None
    worked_fraction = fraction_of_phase(run, "compute", "host", "unattributed")
    if not worked_fraction or not steady.steps:
        return None
    step_s = worked_fraction * steady.device_s / steady.steps / run.num_devices
    overhead_fraction = min(1.0, cause.threshold("overhead_s") / step_s) if step_s > 0 else None
    return make_finding(run, cause, overhead_fraction, evidence)


def gpu_oversized(run: RunRecords) -> Finding | None:
    """Free memory alone is info: a larger batch need not be faster."""
    active = [gpu.sm_active.value for gpu in run.gpus.values() if gpu.sm_active.value is not None]
    sm_idle = 1 - max(active) if active else None
    used = None if run.on_cpu or not is_long_enough(run) else max_gpu_memory_fraction(run)
    sm_severity = None if sm_idle is None else GPU_OVERSIZED.severity(sm_idle)
    is_unused = used is not None and GPU_OVERSIZED.severity(1 - used) is not None
    memory_severity: Severity | None = "info" if is_unused else None
    evidence: list[Evidence | None] = []
    if sm_severity is not None and sm_idle is not None:
        text = "at most {} of the multiprocessors had work while the GPU was busy"
        evidence.append(sample_evidence(text, 1 - sm_idle, "gpus.sm_active"))
    if memory_severity is not None:
        evidence.append(sample_evidence("at most {} of the memory was in use", used, "gpus.memory_used_bytes"))
    severity = worst([sm_severity, memory_severity])
    if severity is None:
        return None
    confidence = 0.6 if sm_severity is None else None
    return make_finding(run, GPU_OVERSIZED, 1.0, evidence, severity=severity, confidence=confidence)


def _batch_size_evidence(run: RunRecords) -> Evidence | None:
    steady = run.steady
    if not steady.steps_with_image_count:
        return None
    batch_size = steady.num_images / steady.steps_with_image_count
    return make_evidence(f"{batch_size:g} images per step", batch_size, "steps.jsonl: num_images, window_steps")


def _step_rate_evidence(run: RunRecords) -> Evidence | None:
    steady = run.steady
    if not steady.steps or steady.wall_s <= 0:
        return None
    steps_per_s = steady.steps / steady.wall_s
    return make_evidence(f"{steps_per_s:,.1f} steps per second", steps_per_s, "steps.jsonl: window_steps, wall_s")
