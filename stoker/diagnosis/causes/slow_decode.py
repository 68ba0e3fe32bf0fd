"""Decoding limits the run: slow decoding, too few cores for a GPU, or too few workers while cores are idle."""

from stoker.diagnosis.causes.cause import find_cause
from stoker.diagnosis.causes.host_memory import is_under_memory_pressure
from stoker.diagnosis.causes.input_bound import (
    BUSY_CORES,
    decodes_in_training_thread,
    idle_while_waiting_evidence,
    is_mostly,
    largest_stage,
    loader_cpu,
    loader_cpu_evidence,
    make_input_wait_finding,
    preparing_evidence,
    stage_evidence,
)
from stoker.diagnosis.causes.shared import (
    cpu_utilization_evidence,
    fraction_of_phase,
    make_evidence,
    samples_contradict,
    stack_evidence,
)
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Evidence, Finding

SLOW_DECODE = find_cause("slow_decode")

TOO_FEW_CORES = find_cause("too_few_cores")

TOO_FEW_WORKERS = find_cause("too_few_workers")


def slow_decode(run: RunRecords) -> Finding | None:
    """By the loader's stages; in a loop without stages, by its stack samples, or by processes that compute during the
    wait."""
    if is_under_memory_pressure(run):
        return None  # decoding is slow for want of memory: `host_memory_near_limit`
    stage, stage_fraction = largest_stage(run)
    if stage is not None:
        if not is_mostly(run, "decode"):
            return None
        evidence = [stage_evidence(run, stage, stage_fraction), cpu_utilization_evidence(run), _size_evidence(run)]
        return make_input_wait_finding(run, SLOW_DECODE, evidence)
    if decodes_in_training_thread(run):
        samples = stack_evidence(run, "the preparation of batches", "decode", "input_wait")
        evidence = [preparing_evidence(run), samples, cpu_utilization_evidence(run)]
        contradicted = samples_contradict(run, fraction_of_phase(run, "input_wait") or 0.0, "decode", "input_wait")
        confidence = SLOW_DECODE.confidence / 2 if contradicted else None
        return make_input_wait_finding(run, SLOW_DECODE, evidence, confidence=confidence)
    cores = loader_cpu(run)
    if cores is None or idle_while_waiting_evidence(run) is not None:
        return None
    evidence = [loader_cpu_evidence(cores), cpu_utilization_evidence(run)]
    return make_input_wait_finding(run, SLOW_DECODE, evidence, confidence=0.65, is_computing=True)


def too_few_cores(run: RunRecords) -> Finding | None:
    stage, stage_fraction = largest_stage(run)
    utilization = run.cpu_utilization
    if not run.gpus or utilization is None or utilization < BUSY_CORES or not is_mostly(run, "decode"):
        return None
    cores_evidence = None
    if run.host.cores is not None:
        cores_per_gpu = run.host.cores / len(run.gpus)
        cores_evidence = make_evidence(
            f"{cores_per_gpu:g} cores for each GPU", cores_per_gpu, "devices.jsonl: cpu_limit_cores"
        )
    evidence = [
        stage_evidence(run, stage, stage_fraction),
        cpu_utilization_evidence(run),
        cores_evidence,
        _size_evidence(run),
    ]
    return make_input_wait_finding(run, TOO_FEW_CORES, evidence)


def _size_evidence(run: RunRecords) -> Evidence | None:
    """The images are far larger than the model's input."""
    median_pixels, image_size = run.facts.get("median_pixels"), run.settings.get("image_size")
    if not isinstance(median_pixels, int | float) or not isinstance(image_size, list | tuple) or len(image_size) != 2:
        return None
    input_pixels = max(1, image_size[0] * image_size[1])
    ratio = median_pixels / input_pixels
    if ratio < SLOW_DECODE.threshold("large"):
        return None
    text = (
        f"the median image has {median_pixels / 1e6:.1f} megapixels, the model's input {input_pixels / 1e6:.2f}: "
        "smaller files decode faster"
    )
    return make_evidence(text, ratio, "events.jsonl: info, data.facts.median_pixels; config.toml: data.image_size")


def too_few_workers(run: RunRecords) -> Finding | None:
    cause = TOO_FEW_WORKERS
    cores, utilization = run.host.cores, run.cpu_utilization
    if cores is None or cores < 2 or utilization is None or utilization >= BUSY_CORES:
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
        return make_input_wait_finding(run, cause, evidence, is_computing=True)
    loader_cores = loader_cpu(run)
    if loader_cores is None or loader_cores > cause.threshold("max_loader_cores"):
        return None
    evidence = [loader_cpu_evidence(loader_cores), cpu_utilization_evidence(run)]
    return make_input_wait_finding(run, cause, evidence, confidence=0.6, is_computing=True)


def _num_workers(run: RunRecords) -> int | None:
    """Workers that load images; None if not recorded, or if the loader finds the number by itself."""
    num_workers = run.settings.get("workers") if run.is_native_run else run.facts.get("workers")
    if num_workers is None and not run.is_native_run and decodes_in_training_thread(run):
        return 0
    return num_workers if isinstance(num_workers, int) else None
