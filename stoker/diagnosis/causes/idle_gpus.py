"""GPUs that the job does not use: all of them, or some."""

from stoker.diagnosis.causes.cause import Cause, Threshold
from stoker.diagnosis.causes.shared import make_evidence, make_finding, sample_evidence
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

MAX_IDLE_UTILIZATION = Threshold(0.02, "mean utilization below which a GPU is not used (heuristic)")

IDLE_GPUS = Cause(
    id="idle_gpus",
    title="Some GPUs are idle",
    reason="allocation and scheduling",
    symptom="several GPUs are allocated, and one trains",
    required_records=("devices.jsonl: gpus.utilization of two or more",),
    warning_threshold=1,
    metric="number of GPUs that were never used while others worked",
    source="by count",
    thresholds={
        "max_idle_utilization": MAX_IDLE_UTILIZATION,
        "min_busy_utilization": Threshold(0.2, "mean utilization of another from which the job works (heuristic)"),
        "min_samples": Threshold(5, "samples, at least (heuristic)"),
    },
    confidence=0.85,
    fix="Train on all of them (`stoker launch`, torchrun --nproc-per-node), or allocate as many as are used "
    "(CUDA_VISIBLE_DEVICES)",
    command="torchrun --nproc-per-node",
)

GPU_NOT_USED = Cause(
    id="gpu_not_used",
    title="There is a GPU, and the job does not use it",
    reason="observability gaps",
    symptom="the job trains, slowly, on the CPU",
    required_records=("devices.jsonl: gpus.utilization", "steps.jsonl: window_steps"),
    warning_threshold=1,
    metric="1: steps were done, and no GPU worked",
    source="by count",
    thresholds={
        "max_idle_utilization": MAX_IDLE_UTILIZATION,
        "min_samples": Threshold(20, "samples while steps were done (heuristic)"),
    },
    supersedes=("idle_gpus", "gpu_oversized"),
    confidence=0.8,
    fix="Install a build of the framework with CUDA for this driver (torch.cuda.is_available()); in a container use "
    "`--gpus all`; leave --device out",
    external_fix="Install a build of the framework with CUDA for this driver (torch.cuda.is_available(), "
    "tf.config.list_physical_devices('GPU')), and move the model and the batches to the GPU; in a container use "
    "`--gpus all`",
    command="nvidia-smi",
)


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
