"""Why the device waits for images: storage, decoding, too few cores or workers, copies to the device."""

from stoker.diagnosis.causes.cause import find_cause
from stoker.diagnosis.causes.input_bound import (
    BUSY_CORES,
    cold_cache_fraction,
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
from stoker.diagnosis.causes.memory import is_under_memory_pressure
from stoker.diagnosis.causes.shared import (
    cpu_utilization_evidence,
    fraction_of_phase,
    make_evidence,
    make_finding,
    make_phase_finding,
    percent,
    samples_contradict,
    stack_evidence,
)
from stoker.diagnosis.run_data import RunRecords
from stoker.findings.finding import Evidence, Finding

SLOW_STORAGE = find_cause("slow_storage")
_SATURATED_FIX = "; the network is saturated, so fewer bytes help: images stored at no more than twice the image size"


def slow_storage(run: RunRecords) -> Finding | None:
    """By the loader's stages; in a loop without stages, by a process that is idle while it waits for images."""
    if cold_cache_fraction(run) is not None:
        return None  # the wait is over: the note `cold_cache`
    stage, stage_fraction = largest_stage(run)
    if stage is not None:
        if not is_mostly(run, "fetch"):
            return None
        network_evidence = _network_evidence(run)
        evidence = [stage_evidence(run, stage, stage_fraction), network_evidence, cpu_utilization_evidence(run)]
        suffix = _SATURATED_FIX if _network_is_saturated(run) else ""
        return make_input_wait_finding(run, SLOW_STORAGE, evidence, fix_suffix=suffix)
    idle_evidence = idle_while_waiting_evidence(run)
    if idle_evidence is None or decodes_in_training_thread(run):
        return None
    # CPU time of the training thread in the wait is decoding, which faster storage does not save.
    computed_s = run.totals.thread_cpu_s.get("input_wait", 0.0)
    evidence = [idle_evidence, stack_evidence(run, "a wait for images", "input_wait")]
    return make_input_wait_finding(run, SLOW_STORAGE, evidence, confidence=0.65, excluded_s=computed_s)


def _network_is_saturated(run: RunRecords) -> bool:
    cause, received = SLOW_STORAGE, run.host.net_received_bytes_s
    if received.value is None or not received.max_value or received.count < cause.threshold("min_samples"):
        return False
    is_constant = received.value / received.max_value >= cause.threshold("saturated")
    return is_constant and received.value >= cause.threshold("min_bytes_s")


def _network_evidence(run: RunRecords) -> Evidence | None:
    value, max_received = run.host.net_received_bytes_s.value, run.host.net_received_bytes_s.max_value
    if value is None or max_received is None:
        return None
    text = f"{value / 1e6:,.0f} MB/s were received, at most {max_received / 1e6:,.0f}"
    if _network_is_saturated(run):
        text += ": the network is saturated"
    return make_evidence(text, value, "devices.jsonl: net_received_bytes_s")


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


EXPOSED_H2D_COPIES = find_cause("exposed_h2d_copies")


def exposed_h2d_copies(run: RunRecords) -> Finding | None:
    if run.phase_seconds("h2d") > 0:
        return make_phase_finding(run, EXPOSED_H2D_COPIES, "h2d")
    traces = run.traces
    if not traces.wall_s:
        return None
    fraction = traces.copy_s / traces.wall_s
    text = f"only copies ran in {percent(fraction)} of {traces.steps} traced steps"
    return make_finding(
        run,
        EXPOSED_H2D_COPIES,
        fraction,
        [make_evidence(text, fraction, "traces.jsonl: copy_s")],
        lost_s=fraction * run.phase_seconds("compute"),
        estimate_basis="the traced fraction of the time in steps",
    )
