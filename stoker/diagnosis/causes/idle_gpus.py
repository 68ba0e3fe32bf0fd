"""GPUs that the job does not use: all of them, or some."""

from stoker.diagnosis.causes.cause import find_cause
from stoker.diagnosis.causes.shared import make_evidence, make_finding, sample_evidence
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

IDLE_GPUS = find_cause("idle_gpus")

GPU_NOT_USED = find_cause("gpu_not_used")


def idle_gpus(run: RunRecords) -> Finding | None:
    """Idle GPUs are lost device time only if the ledger counts them."""
    cause = IDLE_GPUS
    utilization = {
        index: gpu.utilization.value
        for index, gpu in run.gpus.items()
        if gpu.utilization.value is not None and gpu.utilization.count >= cause.threshold("min_samples")
    }
    if len(utilization) < 2 or max(utilization.values()) < cause.threshold("min_busy_utilization"):
        return None
    idle = sorted(index for index, value in utilization.items() if value < cause.threshold("max_idle_utilization"))
    text = f"GPU {', '.join(map(str, idle))} did nothing, of {len(utilization)} GPUs"
    lost_s = len(idle) * run.totals.wall_s if run.totals.devices >= len(utilization) else None
    return make_finding(
        run, cause, len(idle), [make_evidence(text, len(idle), "devices.jsonl: gpus.utilization")], lost_s=lost_s
    )


def gpu_not_used(run: RunRecords) -> Finding | None:
    cause = GPU_NOT_USED
    means = [gpu.utilization for gpu in run.gpus.values() if gpu.utilization.value is not None]
    if not means or len(means) != len(run.gpus) or run.steady.steps == 0:
        return None
    utilization = max(mean.value or 0.0 for mean in means)
    if utilization >= cause.threshold("max_idle_utilization"):
        return None
    if min(mean.count for mean in means) < cause.threshold("min_samples"):
        return None
    device = run.settings.get("device")
    evidence = [
        sample_evidence("no GPU was used more than {} of the time", utilization, "gpus.utilization"),
        None if device is None else make_evidence(f"the run computes on {device}", source="config.toml: run.device"),
    ]
    basis = "the GPU was available all the time"
    return make_finding(run, cause, 1, evidence, lost_s=run.totals.device_s, estimate_basis=basis)
