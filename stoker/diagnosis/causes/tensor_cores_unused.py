"""The GPU's tensor cores are not used."""

from stoker.diagnosis.causes.cause import find_cause
from stoker.diagnosis.causes.shared import make_evidence, make_finding, percent
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

TENSOR_CORES_UNUSED = find_cause("tensor_cores_unused")


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
