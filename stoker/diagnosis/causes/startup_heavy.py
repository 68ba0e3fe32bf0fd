"""Starting takes a large part of the run."""

from stoker.diagnosis.causes.cause import HEURISTIC, Cause, Threshold
from stoker.diagnosis.causes.shared import attempts_evidence, make_finding, phase_evidence
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

STARTUP_HEAVY = Cause(
    id="startup_heavy",
    title="Starting takes a large part of the run",
    reason="allocation and scheduling",
    symptom="minutes pass before the first step of each attempt",
    required_records=("steps.jsonl: phases",),
    warning_threshold=0.10,
    metric="startup and compile, fraction of all device time",
    source=HEURISTIC,
    thresholds={
        "min_duration_s": Threshold(
            60.0,
            "device-seconds of starting below which there is no finding: their fraction of a short run means nothing "
            "(heuristic)",
        )
    },
    confidence=0.9,
    fix="Keep weights, index and images on a disk that survives the machine (STOKER_CACHE_DIR, STOKER_WEIGHTS_DIR), "
    "and restart less often",
    external_fix="Keep weights, images and compiled code on a disk that survives the machine (TORCH_HOME, "
    "TORCHINDUCTOR_CACHE_DIR, the container's image), and restart less often",
)


def startup_heavy(run: RunRecords) -> Finding | None:
    """`compile` counts as far as it belongs to the start; later compilation is `recompiles`."""
    compile_s = max(0.0, run.phase_seconds("compile") - run.steady.phases.get("compile", 0.0))
    seconds = run.phase_seconds("startup") + compile_s
    if seconds < STARTUP_HEAVY.threshold("min_duration_s") or not run.totals.steps:  # it may still be starting
        return None
    evidence = [
        phase_evidence(run, "startup"),
        phase_evidence(run, "compile") if compile_s else None,
        attempts_evidence(run),
    ]
    return make_finding(run, STARTUP_HEAVY, seconds / run.totals.device_s, evidence, lost_s=seconds)
