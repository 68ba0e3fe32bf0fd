"""The model is compiled again and again."""

from stoker.diagnosis.causes.cause import Cause
from stoker.diagnosis.causes.shared import (
    is_long_enough,
    make_finding,
    make_stack_finding,
    phase_evidence,
    process_cpu_evidence,
)
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

RECOMPILES = Cause(
    id="recompiles",
    title="The model is compiled again and again",
    reason="GPU under-utilized (host- or launch-bound)",
    symptom="some steps take seconds; torch logs recompilations; shapes change from step to step",
    required_records=("steps.jsonl: phases.compile, or stacks.jsonl: main_thread.compile",),
    warning_threshold=0.05,
    critical_threshold=0.25,
    metric="compile after the first steps, fraction of the device time after the start",
    source="heuristic: a program with fixed shapes compiles once",
    supersedes=("python_bound",),
    confidence=0.85,
    fix="Use fixed shapes: one --image-size, drop_last=True; torch.compile(dynamic=True), or mark_dynamic on what "
    "changes; TORCH_LOGS=recompiles shows the reason",
    external_fix="Use fixed shapes: images of one size, drop_last=True; torch.compile(dynamic=True), or mark_dynamic "
    "on what changes; TORCH_LOGS=recompiles shows the reason. For tf.function an input_signature",
)


def recompiles(run: RunRecords) -> Finding | None:
    compile_s = run.steady.phases.get("compile", 0.0)
    if compile_s > 0 and is_long_enough(run):
        fraction = run.steady_phase_fraction("compile")
        return make_finding(run, RECOMPILES, fraction, [phase_evidence(run, "compile")], lost_s=compile_s)
    utilizations = [gpu.utilization.value for gpu in run.gpus.values() if gpu.utilization.value is not None]
    evidence = [process_cpu_evidence(run)]
    max_fraction = 1 - max(utilizations, default=0.0)
    return make_stack_finding(
        run, RECOMPILES, "compiling", "compile", extra_evidence=evidence, max_fraction=max_fraction
    )
