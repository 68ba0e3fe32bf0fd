"""The training waits for images: the arithmetic of that wait, and its reasons, which are storage, decoding, too few
cores or workers, copies to the device."""

from typing import Any

import msgspec

from stoker_watch.diagnosis.causes.cause import find_cause, find_note
from stoker_watch.diagnosis.causes.explanation import BY_SAMPLES, Explanation, explain_traced
from stoker_watch.diagnosis.causes.host import (
    CPU_CONTENTION,
    children_cpu,
    contended_fraction,
    cpu_demand,
    thread_cpu_utilization,
)
from stoker_watch.diagnosis.causes.memory import is_under_memory_pressure
from stoker_watch.diagnosis.causes.overhead import rare_worker_start_fraction
from stoker_watch.diagnosis.causes.shared import (
    cpu_utilization_evidence,
    fraction_of_phase,
    has_enough_stacks,
    is_long_enough,
    make_evidence,
    percent,
    samples_contradict,
    stack_evidence,
)
from stoker_watch.diagnosis.places.describe import describe_place, name_role
from stoker_watch.diagnosis.places.grouping import CALLS
from stoker_watch.diagnosis.places.sampled import Cost
from stoker_watch.diagnosis.run_data import RunRecords
from stoker_watch.findings.finding import Evidence

INPUT_BOUND = find_cause("input_bound")
SLOW_STORAGE = find_cause("slow_storage")
SLOW_DECODE = find_cause("slow_decode")
TOO_FEW_WORKERS = find_cause("too_few_workers")
NO_WORKERS_TITLE = "The training thread prepares the images itself while cores are idle"
MIN_STAGE_FRACTION = SLOW_STORAGE.threshold("min_stage_fraction")
BUSY_CORES = find_cause("too_few_cores").threshold("max_core_utilization")
MAX_IDLE_CPU = SLOW_STORAGE.threshold("cpu_while_waiting")


def input_bound(run: RunRecords, cost: Cost) -> Explanation | None:
    stage, stage_fraction = largest_stage(run)
    if is_under_memory_pressure(run) or cold_cache_fraction(run) is not None:
        return None  # the wait is for memory: `host_memory_near_limit`; or it is over: the note `cold_cache`
    evidence = [stage_evidence(run, stage, stage_fraction), cpu_utilization_evidence(run)]
    return _explain_wait(run, cost, evidence, is_computing=True)


def _explain_wait(
    run: RunRecords,
    cost: Cost,
    evidence: list[Evidence | None],
    *,
    is_computing: bool = False,
    **options: Any,
) -> Explanation | None:
    """is_computing: the wait is for threads that compute. Other processes delay them too, so the fraction that they
    took is added to the threshold (heuristic)."""
    min_measured, saved = INPUT_BOUND.threshold("warning_threshold_on_cpu") if run.on_cpu else 0.0, 1.0
    waited_s = run.phase_seconds("input_wait")
    if not run.is_native_run:
        if decodes_in_training_thread(run):
            min_measured = max(min_measured, INPUT_BOUND.threshold("warning_threshold_without_workers"))
        elif is_computing:
            min_measured += contended_fraction(run)
        if waited_s > 0 and run.is_external and waited_s < INPUT_BOUND.threshold("min_wait_s"):
            return None
        if waited_s <= 0 and run.on_cpu:
            min_measured = max(min_measured, INPUT_BOUND.threshold("warning_threshold_of_stacks"))
        evidence = [*evidence, *_loading_evidence(run, cost)]
    if (started := rare_worker_start_fraction(run)) and waited_s > 0:
        min_measured = max(min_measured, started)
        saved = max(0.0, 1 - started * run.steady.wall_s * run.num_ranks / waited_s)
    basis = "" if waited_s > 0 else BY_SAMPLES
    return Explanation(evidence=evidence, min_measured=min_measured, saved=saved, basis=basis, **options)


def _loading_evidence(run: RunRecords, cost: Cost) -> list[Evidence]:
    """Lines of who loads the data."""
    minimum = INPUT_BOUND.threshold("min_place_samples")
    places = [place for place in cost.parts or (place for place in run.places if place.role == "thread" and place.line)
              if place.samples >= minimum and not place.is_startup]  # fmt: skip
    found = []
    for place in places[: int(INPUT_BOUND.threshold("max_places"))]:
        text = f"{place.seconds:,.1f} s in {describe_place(place)}, in {name_role(run, place.role)}"
        found.append(make_evidence(text, place.seconds, "stacks.jsonl: places"))
    return found


def largest_stage(run: RunRecords) -> tuple[str | None, float]:
    """(the stage with most of the wait, its fraction of the wait); (None, 0) if the loader does not record stages."""
    stages = {name: duration_s for name, duration_s in run.totals.input_wait_stages.items() if name != "queue"}
    waited_s = run.phase_seconds("input_wait")
    if waited_s <= 0 or not any(stages.values()):
        return None, 0.0
    name = max(stages, key=lambda stage: stages[stage])
    return name, stages[name] / waited_s


def is_mostly(run: RunRecords, stage: str) -> bool:
    name, fraction = largest_stage(run)
    return name == stage and fraction >= MIN_STAGE_FRACTION


def cold_cache_fraction(run: RunRecords) -> float | None:
    """Fraction of the wait for bytes that was in the first epoch, if it was nearly all and the wait is over; else None.
    The caches of the machine or of stoker were empty then."""
    first_epoch_s, fetch_s = run.first_epoch_fetch_s, run.totals.input_wait_stages.get("fetch", 0.0)
    num_images = run.facts.get("num_images")
    if first_epoch_s is None or fetch_s <= 0 or not is_long_enough(run) or not isinstance(num_images, int):
        return None
    if not run.totals.num_images >= 2 * num_images > 0:
        return None
    kind = find_note("cold_cache")  # slow storage that was only a cold cache needs no fix
    is_notable = first_epoch_s / run.totals.device_s >= kind.threshold("min_lost_fraction")
    is_cold = first_epoch_s / fetch_s >= kind.threshold("min_first_epoch_fraction")
    return first_epoch_s / fetch_s if is_cold and is_notable else None


def stage_evidence(run: RunRecords, stage: str | None, fraction: float) -> Evidence | None:
    if stage is None:
        return None
    descriptions = {"fetch": "the bucket" if run.from_bucket else "reading files", "decode": "decoding and resizing"}
    text = f"of this {100 * fraction:.0f} % {stage}" + (f": {descriptions[stage]}" if stage in descriptions else "")
    return make_evidence(text, fraction, f"steps.jsonl: input_wait_stages.{stage}")


def decodes_in_training_thread(run: RunRecords) -> bool:
    """Whether most of the wait is decoding by the training thread itself: by its CPU time, else by stack samples."""
    utilization = thread_cpu_utilization(run, "input_wait")
    if utilization is not None:
        return utilization >= MAX_IDLE_CPU
    min_fraction = MIN_STAGE_FRACTION * _wait_fraction(run)
    return has_enough_stacks(run) and run.stacks.fraction("decode") > min_fraction


def preparing_evidence(run: RunRecords) -> Evidence | None:
    utilization = thread_cpu_utilization(run, "input_wait")
    if utilization is None:
        return None
    text = f"the training thread prepares the batches itself: it computed {percent(min(1.0, utilization))} of that time"
    return make_evidence(text, min(1.0, utilization), "steps.jsonl: thread_cpu_s.input_wait")


def loader_cpu(run: RunRecords) -> float | None:
    """Cores that the job used besides the training thread's work on steps; None for stoker's own loader, which records
    its stages, and on a CPU with JAX, whose threads compute the steps."""
    process_cpu, fraction = cpu_demand(run), _wait_fraction(run)
    if run.is_native_run or process_cpu is None or fraction <= 0 or (run.on_cpu and "jax" in run.frameworks):
        return None
    utilization = thread_cpu_utilization(run, "input_wait")
    if run.facts.get("workers") == 0 and utilization is not None:
        return utilization * fraction  # the training thread is the loader
    if (worker_utilization := _worker_utilization(run)) is not None:
        return worker_utilization * float(run.facts["workers"]) * run.num_ranks
    others_cpu = children_cpu(run)
    if others_cpu is not None and utilization is not None and run.computes_with_torch:
        return others_cpu + utilization * fraction  # its other threads compute steps; TensorFlow's also load
    return max(0.0, process_cpu - _training_thread_cpu(run, fraction))


def loader_cpu_evidence(cores: float) -> Evidence:
    text = f"the process and its children used {cores:.2f} cores besides the training thread's work"
    return make_evidence(text, cores, "devices.jsonl: process_cpu")


def _worker_utilization(run: RunRecords) -> float | None:
    """Fraction of the time in which a worker process of the loader computed, 0 … 1: the CPU time of the job besides
    that of the training processes. A worker that limits the training never waits for a free place, so the rest is a
    wait for bytes. None without such processes, or if it was not measured."""
    workers, used = run.facts.get("workers"), children_cpu(run)
    if not isinstance(workers, int) or workers <= 0 or run.is_native_run or used is None:
        return None
    return min(1.0, used / (workers * run.num_ranks))


def idle_while_waiting_evidence(run: RunRecords) -> Evidence | None:
    """The process computed so little that its threads were idle during the wait; None if they were not."""
    worker_utilization = _worker_utilization(run)
    if worker_utilization is not None:
        if worker_utilization >= MAX_IDLE_CPU:
            return None
        workers = f"the loader's {run.facts['workers']} worker processes"
        text = f"{workers} computed {percent(worker_utilization)} of the time"
        return make_evidence(text, worker_utilization, "devices.jsonl: process_cpu; steps.jsonl: process_cpu_s")
    process_cpu, loader_cores = cpu_demand(run), loader_cpu(run)
    if process_cpu is None or loader_cores is None or loader_cores / _wait_fraction(run) >= MAX_IDLE_CPU:
        return None
    text = f"the process used {process_cpu:.2f} cores: its threads were idle while it waited for images"
    return make_evidence(text, process_cpu, "devices.jsonl: process_cpu")


def _wait_fraction(run: RunRecords) -> float:
    """Fraction of the time after the start in which the training thread waited for images or prepared them itself."""
    if run.phase_seconds("input_wait") > 0:
        return fraction_of_phase(run, "input_wait") or 0.0
    return run.stacks.fraction("input_wait", "decode")


def _training_thread_cpu(run: RunRecords, wait_fraction: float) -> float:
    """Cores that the training thread used while it did not wait for images: all that time if not measured."""
    other_phases = [name for name in run.steady.phases if name != "input_wait"]
    utilization = thread_cpu_utilization(run, *other_phases)
    return (1 - wait_fraction) * (1.0 if utilization is None else min(1.0, utilization))


def slow_storage(run: RunRecords, cost: Cost) -> Explanation | None:
    """By the loader's stages; in a loop without stages, by a process that is idle while it waits for images."""
    if cold_cache_fraction(run) is not None:
        return None  # the wait is over: the note `cold_cache`
    stage, stage_fraction = largest_stage(run)
    if stage is not None:
        if not is_mostly(run, "fetch"):
            return None
        evidence = [stage_evidence(run, stage, stage_fraction), _network_evidence(run), cpu_utilization_evidence(run)]
        return _explain_wait(run, cost, evidence)
    idle_evidence = idle_while_waiting_evidence(run)
    if idle_evidence is None or decodes_in_training_thread(run):
        return None
    if cost.place is not None and cost.does != "read":
        return None  # idle cores are not slow storage: who loads was elsewhere
    # CPU time of the training thread in the wait is decoding, which faster storage does not save.
    computed_s, waited_s = run.totals.thread_cpu_s.get("input_wait", 0.0), run.phase_seconds("input_wait")
    saved = max(0.0, 1 - computed_s / waited_s) if waited_s > 0 else 1.0
    waits = _native_loader_evidence(run, "without a core they can only wait for files or a server")
    if cost.place is not None:
        text = f"{cost.steady_s:,.1f} s of the wait are of who loads the images, in a call that reads or waits"
        waits = make_evidence(text, cost.steady_s, "stacks.jsonl: places")
    evidence = [idle_evidence, stack_evidence(run, "a wait for images", "input_wait"), waits]
    found = _explain_wait(run, cost, evidence, confidence=0.65 if waits is None else 0.8)
    return None if found is None else msgspec.structs.replace(found, saved=min(saved, found.saved))


def _native_loader_evidence(run: RunRecords, so: str) -> Evidence | None:
    """No Python code loads the images, so none computes, sleeps or waits for a lock: TensorFlow's own threads load, of
    which there are no stacks. so: what follows."""
    if "tensorflow" not in run.frameworks or run.stacks.samples < SLOW_STORAGE.threshold("min_native_samples"):
        return None
    if any(place.role != "training" and place.line and not place.is_startup for place in run.places):
        return None
    text = (
        f"in none of {run.stacks.samples} samples did Python code of the job load images: TensorFlow's own threads do, "
        f"and {so}"
    )
    return make_evidence(text, float(run.stacks.samples), "stacks.jsonl: places")


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
        text += ": the network is saturated, so fewer bytes help: images stored at no more than twice the image size"
    return make_evidence(text, value, "devices.jsonl: net_received_bytes_s")


def slow_decode(run: RunRecords, cost: Cost) -> Explanation | None:
    """By the loader's stages; in a loop without stages, by its stack samples, or by processes that compute during the
    wait."""
    if is_under_memory_pressure(run):
        return None  # decoding is slow for want of memory: `host_memory_near_limit`
    stage, stage_fraction = largest_stage(run)
    if stage is not None:
        if not is_mostly(run, "decode"):
            return None
        evidence = [stage_evidence(run, stage, stage_fraction), cpu_utilization_evidence(run), _size_evidence(run)]
        return _explain_wait(run, cost, evidence)
    if cost.role == "training" and decodes_in_training_thread(run):
        samples = stack_evidence(run, "the preparation of batches", "decode", "input_wait")
        despite_workers = _loads_despite_workers(run)
        evidence = [preparing_evidence(run), despite_workers, samples, cpu_utilization_evidence(run)]
        contradicted = samples_contradict(run, fraction_of_phase(run, "input_wait") or 0.0, "decode", "input_wait")
        confidence = SLOW_DECODE.confidence / 2 if contradicted else None
        fix = None if despite_workers is None else SLOW_DECODE.other_fixes["despite workers"]
        return _explain_wait(run, cost, evidence, confidence=confidence, fix=fix)
    cores = loader_cpu(run)
    if cores is None or idle_while_waiting_evidence(run) is not None:
        return None
    evidence = [loader_cpu_evidence(cores), cpu_utilization_evidence(run)]
    if cost.does in ("decode", "read") and cost.low_s >= SLOW_DECODE.threshold("min_decoding_fraction") * cost.place_s:
        text = f"{cost.steady_s:,.1f} s of the wait are of who loads the images, in decoding or a transform"
        evidence.append(make_evidence(text, cost.steady_s, "stacks.jsonl: places"))
        return _explain_wait(run, cost, evidence, is_computing=True)
    if computes := _native_loader_evidence(run, "they compute meanwhile"):
        return _explain_wait(run, cost, [*evidence, computes], confidence=0.8, is_computing=True)
    return _explain_wait(run, cost, evidence, confidence=0.65, is_computing=True)


def _loads_despite_workers(run: RunRecords) -> Evidence | None:
    """That the training thread loads by itself although the loader has workers, as a sampler does that opens images."""
    kinds = ("decode", "input_wait")
    own = [place for place in run.places if place.role == "training" and place.kind in kinds and place.callers
           and not place.is_startup and not CALLS["loader"].search(place.call)
           and not CALLS["loop"].search(place.call)]  # fmt: skip
    if not run.facts.get("workers") or not own:
        return None
    largest = max(own, key=lambda place: place.seconds)
    text = (
        f"the loader has workers, and the training thread itself was {largest.seconds:,.0f} s in "
        f"{describe_place(largest)}, called from {largest.callers}"
    )
    return make_evidence(text, largest.seconds, "stacks.jsonl: places")


def too_few_cores(run: RunRecords, cost: Cost) -> Explanation | None:
    stage, stage_fraction = largest_stage(run)
    utilization = run.cpu_utilization
    if not run.gpus or utilization is None or utilization < BUSY_CORES or not is_mostly(run, "decode"):
        return None
    if CPU_CONTENTION.severity(contended_fraction(run)) is not None:
        return None  # others have the cores
    evidence = [stage_evidence(run, stage, stage_fraction), cpu_utilization_evidence(run)]
    if run.host.cores is not None:
        per_gpu = run.host.cores / len(run.gpus)
        evidence.append(make_evidence(f"{per_gpu:g} cores for each GPU", per_gpu, "devices.jsonl: cpu_limit_cores"))
    return _explain_wait(run, cost, [*evidence, _size_evidence(run)])


def _size_evidence(run: RunRecords) -> Evidence | None:
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


def too_few_workers(run: RunRecords, cost: Cost) -> Explanation | None:
    cause, cores, utilization = TOO_FEW_WORKERS, run.host.cores, run.cpu_utilization
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
        title = "" if num_workers else NO_WORKERS_TITLE
        return _explain_wait(run, cost, evidence, is_computing=True, title=title)
    loader_cores = loader_cpu(run)
    if loader_cores is None or loader_cores > cause.threshold("max_loader_cores"):
        return None
    computes = _native_loader_evidence(run, "as many as one computes meanwhile")
    if cost.does in ("decode", "work"):
        text = f"{cost.steady_s:,.1f} s of the wait are of who loads the images, in code that computes"
        computes = make_evidence(text, cost.steady_s, "stacks.jsonl: places")
    evidence = [loader_cpu_evidence(loader_cores), cpu_utilization_evidence(run), computes]
    confidence = 0.6 if computes is None else 0.8
    return _explain_wait(run, cost, evidence, confidence=confidence, is_computing=True)


def _num_workers(run: RunRecords) -> int | None:
    """Workers that load images; None if not recorded, or if the loader finds the number by itself."""
    num_workers = run.settings.get("workers") if run.is_native_run else run.facts.get("workers")
    if num_workers is None and not run.is_native_run and decodes_in_training_thread(run):
        return 0
    return num_workers if isinstance(num_workers, int) else None


def exposed_h2d_copies(run: RunRecords, cost: Cost) -> Explanation | None:
    if cost.phase == "h2d":
        return Explanation()
    return explain_traced(run, "copies", "copy_s") if not run.phase_seconds("h2d") else None
