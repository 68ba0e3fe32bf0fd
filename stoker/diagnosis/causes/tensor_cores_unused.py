"""The GPU's tensor cores are not used."""

from stoker.diagnosis.causes.cause import Cause, Threshold
from stoker.diagnosis.causes.shared import make_evidence, make_finding, percent
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

TENSOR_CORES_UNUSED = Cause(
    id="tensor_cores_unused",
    title="The tensor cores are not used",
    reason="architecture and hyper-parameters",
    symptom="the GPU is busy and slow: arithmetic is fp32 without TF32",
    required_records=("devices.jsonl: gpus.tensor_active, sm_active; or traces.jsonl: tensor_core_fraction",),
    warning_threshold=0.02,
    lower_is_worse=True,
    metric="fraction of the time, while the multiprocessors work, in which the tensor cores work; or, in a trace, "
    "fraction of the kernel time in kernels that use them",
    source="heuristic: convolutions in bf16 keep them busy more than a tenth of the time; fp32 not at all",
    thresholds={
        "sm_active": Threshold(0.3, "mean fraction of the multiprocessors with work, below which it is no proof")
    },
    confidence=0.75,
    fix="Use --precision bf16",
    external_fix="Use torch.autocast with bf16, or torch.set_float32_matmul_precision('high') for TF32; in Keras "
    "mixed_precision.set_global_policy('mixed_bfloat16')",
    command="--precision bf16",
    config_patch={"precision": "bf16"},
)


def tensor_cores_unused(run: RunRecords) -> Finding | None:
    cause, precision = TENSOR_CORES_UNUSED, run.settings.get("precision")
    precision_evidence = (
        None if precision is None else make_evidence(f"precision {precision}", source="config.toml: run.precision")
    )
    active = [
        gpu.tensor_active.value
        for gpu in run.gpus.values()
        if gpu.tensor_active.value is not None
        and gpu.sm_active.value is not None
        and gpu.sm_active.value >= cause.threshold("sm_active")
    ]
    if active:
        text = f"the tensor cores worked {percent(max(active))} of the time"
        active_evidence = make_evidence(text, max(active), "devices.jsonl: gpus.tensor_active")
        return make_finding(run, cause, max(active), [active_evidence, precision_evidence])
    fraction = run.traces.tensor_core_fraction.value
    if fraction is None or precision in ("bf16", "fp16") or not run.gpus:
        return None
    text = f"{percent(fraction)} of the kernel time was in kernels that use the tensor cores"
    trace_evidence = make_evidence(text, fraction, "traces.jsonl: tensor_core_fraction")
    return make_finding(run, cause, fraction, [trace_evidence, precision_evidence], confidence=0.6)
