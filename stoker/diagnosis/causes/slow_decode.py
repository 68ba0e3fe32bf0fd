"""Decoding limits the run: slow decoding, too few cores for a GPU, or too few workers while cores are idle."""

from stoker.diagnosis.causes.cause import Cause, Threshold
from stoker.diagnosis.causes.host_memory import is_under_memory_pressure
from stoker.diagnosis.causes.input_bound import (
    BUSY_CORES,
    CPU_WARNING_THRESHOLD,
    MIN_STAGE_FRACTION,
    STAGE_RECORDS,
    TF_PROFILER_SOURCE,
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

SLOW_DECODE = Cause(
    id="slow_decode",
    title="Decoding and transforming images delays the training",
    reason="data loading",
    symptom="the device waits while the loader's threads or processes decode and resize",
    required_records=STAGE_RECORDS,
    warning_threshold=0.05,
    critical_threshold=0.20,
    metric="input_wait, fraction of the device time after the start, if most of it is decode",
    source=TF_PROFILER_SOURCE,
    thresholds={
        "warning_threshold_on_cpu": CPU_WARNING_THRESHOLD,
        "min_stage_fraction": MIN_STAGE_FRACTION,
        "large": Threshold(
            8.0,
            "pixels of the median image over those of the image size, from which smaller files are advised: JPEG "
            "decoders skip work in steps of 2, 4 and 8 (DCT scaling), and 8 times the pixels is beyond the first "
            "(heuristic; benchmarks/loader.py has the cost by size)",
        ),
    },
    supersedes=("input_bound",),
    probe="cached_batch",
    confidence=0.8,
    fix="Decode once: --cache disk keeps decoded images; or decode on the GPU (--jpeg-decoder nvjpeg); or store "
    "images at no more than twice the image size",
    external_fix="Decode less, or elsewhere: images stored at no more than twice the model's input size, a faster "
    "decoder (libjpeg-turbo, nvJPEG, DALI), fewer transforms per image, decoded images that are kept (tf.data cache); "
    "and in loader workers instead of the training thread",
    command="--cache disk",
    config_patch={"cache": "disk"},
)

TOO_FEW_CORES = Cause(
    id="too_few_cores",
    title="The machine has too few CPU cores for its GPU",
    reason="data loading",
    symptom="the GPU waits while every core decodes",
    required_records=("steps.jsonl: phases", "devices.jsonl: cpu_core_utilization, gpus"),
    warning_threshold=0.05,
    critical_threshold=0.20,
    metric="input_wait, fraction of the device time after the start, on a GPU, if most of it is decode and the cores "
    "are busy",
    source=TF_PROFILER_SOURCE,
    thresholds={"min_stage_fraction": MIN_STAGE_FRACTION, "max_core_utilization": BUSY_CORES},
    supersedes=("slow_decode", "input_bound"),
    probe="cached_batch",
    confidence=0.8,
    fix="Use a machine type with more vCPUs per GPU; or reduce the work: --jpeg-decoder nvjpeg, --cache disk",
    external_fix="Use a machine type with more vCPUs per GPU; or reduce the work: decode on the GPU (nvJPEG, DALI), "
    "store images at no more than twice the model's input size",
    command="--jpeg-decoder nvjpeg",
    config_patch={"jpeg_decoder": "nvjpeg"},
)

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
    if not run.gpus or utilization is None or utilization < BUSY_CORES.value or not is_mostly(run, "decode"):
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
