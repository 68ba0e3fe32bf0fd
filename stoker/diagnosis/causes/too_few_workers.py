"""One or two workers prepare the images while cores are idle."""

from stoker.diagnosis.causes.cause import Cause, Threshold
from stoker.diagnosis.causes.input_bound import (
    BUSY_CORES,
    CPU_WARNING_THRESHOLD,
    MIN_STAGE_FRACTION,
    TF_PROFILER_SOURCE,
    decodes_in_training_thread,
    idle_while_waiting_evidence,
    is_mostly,
    largest_stage,
    loader_cpu,
    loader_cpu_evidence,
    make_input_wait_finding,
    stage_evidence,
)
from stoker.diagnosis.causes.shared import cpu_utilization_evidence, make_evidence
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

TOO_FEW_WORKERS = Cause(
    id="too_few_workers",
    title="One or two workers prepare images while cores are idle",
    reason="data loading",
    symptom="the device waits, one core is at 100 %, the others are idle",
    required_records=(
        "steps.jsonl: phases",
        "config.toml: run.workers, or data.workers of an event, or stacks.jsonl",
    ),
    warning_threshold=0.05,
    critical_threshold=0.20,
    metric="input_wait, fraction of the device time after the start, if most of it is decode, the loader has few "
    "workers and cores are idle",
    source=TF_PROFILER_SOURCE,
    thresholds={
        "max_loader_cores": Threshold(
            1.25,
            "cores in use besides the training thread's, of a loader whose number of workers is not recorded, up to "
            "which it has one worker (heuristic)",
        ),
        "warning_threshold_on_cpu": CPU_WARNING_THRESHOLD,
        "min_stage_fraction": MIN_STAGE_FRACTION,
        "max_workers": Threshold(
            2,
            "threads, or DataLoader workers, that are few (and fewer than half of the cores, or at most one; "
            "heuristic)",
        ),
        "max_core_utilization": BUSY_CORES,
    },
    supersedes=("slow_decode", "input_bound"),
    probe="more_workers",
    confidence=0.85,
    fix="Use --workers auto, which finds the number",
    external_fix="Use DataLoader(num_workers=) of about the cores per GPU, with persistent_workers=True; in tf.data "
    "map(num_parallel_calls=tf.data.AUTOTUNE) and prefetch; in Keras PyDataset(workers=, use_multiprocessing=True)",
    command="--workers auto",
    config_patch={"workers": "auto"},
)


def too_few_workers(run: RunRecords) -> Finding | None:
    cause = TOO_FEW_WORKERS
    cores, utilization = run.host.cores, run.cpu_utilization
    if cores is None or cores < 2 or utilization is None or utilization >= BUSY_CORES.value:
        return None
    stage, stage_fraction = largest_stage(run)
    if stage is not None and not is_mostly(run, "decode"):
        return None
    if stage is None and idle_while_waiting_evidence(run) is not None:
        return None
    num_workers = _num_workers(run)
    if num_workers is not None:
        if num_workers > 1 and (num_workers > cause.threshold("max_workers") or num_workers >= cores / 2):
            return None
        text = f"{num_workers} threads or processes load images, {cores:g} cores are available"
        source = "config.toml: run.workers" if run.is_native_run else "events.jsonl: data.workers"
        workers_evidence = make_evidence(text, num_workers, source)
        evidence = [stage_evidence(run, stage, stage_fraction), workers_evidence, cpu_utilization_evidence(run)]
        return make_input_wait_finding(run, cause, evidence)
    loader_cores = loader_cpu(run)
    if loader_cores is None or loader_cores > cause.threshold("max_loader_cores"):
        return None
    evidence = [loader_cpu_evidence(loader_cores), cpu_utilization_evidence(run)]
    return make_input_wait_finding(run, cause, evidence, confidence=0.6)


def _num_workers(run: RunRecords) -> int | None:
    """Workers that load images; None if not recorded, or if the loader finds the number by itself."""
    num_workers = run.settings.get("workers") if run.is_native_run else run.facts.get("workers")
    if num_workers is None and not run.is_native_run and decodes_in_training_thread(run):
        return 0
    return num_workers if isinstance(num_workers, int) else None
