"""Rules of "data loading". Several look at the same wait for pictures; the catalogue says which replaces which."""

from stoker.diagnosis.catalogue import CATALOG
from stoker.diagnosis.rules.finding import (
    counter_evidence,
    cpu_demand,
    format_percent,
    fraction_of_phase,
    has_enough_stacks,
    is_long_enough,
    make_finding,
    make_phase_finding,
    phase_evidence,
    sampled_device_s,
    stack_evidence,
    stack_fraction,
    thread_cpu_utilization,
)
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Evidence, Finding


def input_bound(run: RunRecords) -> Finding | None:
    stage, stage_fraction = _largest_stage(run)
    cpu_utilization = run.cpu_utilization
    busy_threshold = CATALOG["too_few_workers"].threshold("busy_cores")
    hint = ""
    if stage == "fetch":
        faster_source = "a bucket in the machine's own region" if run.from_bucket else "a faster disk"
        advice = (
            f"{faster_source} comes"
            if run.settings.get("cache", "none") != "none"
            else f"{faster_source} or --cache comes"
        )
        hint = f"; most of the wait is for bytes here, so {advice} first"
    elif cpu_utilization is not None and cpu_utilization >= busy_threshold:
        hint = "; the cores are busy here, so more --workers do not help"
    elif cpu_utilization is not None and run.settings.get("workers") != 0:
        hint = "; cores are idle here, so more --workers come first, or --workers auto, which finds their number"
    return _input_wait_finding(
        run,
        "input_bound",
        [_stage_evidence(run, stage, stage_fraction), _cpu_utilization_evidence(run)],
        fix_suffix=hint,
    )


def slow_storage(run: RunRecords) -> Finding | None:
    """By the loader's stages; of a loop without them, by a process that rests while it waits for pictures."""
    stage, stage_fraction = _largest_stage(run)
    if stage is not None:
        if stage != "fetch" or stage_fraction < CATALOG["slow_storage"].threshold("of_wait"):
            return None
        return _input_wait_finding(
            run,
            "slow_storage",
            [_stage_evidence(run, stage, stage_fraction), _network_evidence(run), _cpu_utilization_evidence(run)],
        )
    idle_evidence = _idle_while_waiting_evidence(run)
    if idle_evidence is None or _decodes_in_training_thread(run):
        return None
    computed_s = run.totals.thread_cpu_s.get("input_wait", 0.0)  # by the training thread, which decodes where nobody else does
    return _input_wait_finding(run, "slow_storage", [idle_evidence, stack_evidence(run, "a wait for pictures", "input_wait")], confidence=0.65,
                 excluded_s=computed_s)  # fmt: skip


def cold_cache(run: RunRecords) -> Finding | None:
    first_epoch_s, total_fetch_s = run.first_epoch_fetch_s, run.totals.input_wait_stages.get("fetch", 0.0)
    if first_epoch_s is None or total_fetch_s <= 0 or not is_long_enough(run):
        return None
    first_epoch_fraction = first_epoch_s / total_fetch_s
    if first_epoch_fraction < CATALOG["cold_cache"].threshold("of_fetch") or not _saw_two_epochs(run):
        return None
    text = f"{format_percent(first_epoch_fraction)} of the waiting for bytes was in the first pass over the pictures"
    evidence = [
        Evidence(text=text, value=first_epoch_fraction, source="steps.jsonl: input.fetch"),
        phase_evidence(run, "input_wait"),
    ]
    return make_finding(run, "cold_cache", first_epoch_s / run.totals.device_s, evidence, lost_s=first_epoch_s)


def network_saturated(run: RunRecords) -> Finding | None:
    cause, received = CATALOG["network_saturated"], run.host.net_received_bytes_s
    stage, stage_fraction = _largest_stage(run)
    if stage != "fetch" or stage_fraction < cause.threshold("of_wait") or not _is_input_bound(run):
        return None
    if received.value is None or received.max_value is None or received.count < cause.threshold("least_samples"):
        return None
    if received.value < cause.threshold("least_bytes_s"):
        return None
    evidence = [phase_evidence(run, "input_wait"), _stage_evidence(run, stage, stage_fraction), _network_evidence(run)]
    return make_finding(
        run, cause.id, received.value / received.max_value, evidence, lost_s=run.phase_seconds("input_wait")
    )


def slow_decode(run: RunRecords) -> Finding | None:
    """By the loader's stages; of a loop without them, by its own stacks, or by processes that compute while it waits:
    what else would they do."""
    stage, stage_fraction = _largest_stage(run)
    if stage is not None:
        if stage != "decode" or stage_fraction < CATALOG["slow_decode"].threshold("of_wait"):
            return None
        return _input_wait_finding(
            run, "slow_decode", [_stage_evidence(run, stage, stage_fraction), _cpu_utilization_evidence(run)]
        )
    if _decodes_in_training_thread(run):
        return _input_wait_finding(
            run, "slow_decode", [stack_evidence(run, "decoding", "decode"), _cpu_utilization_evidence(run)]
        )
    loader_cpu = _loader_cpu(run)
    if loader_cpu is None or _idle_while_waiting_evidence(run) is not None:
        return None
    return _input_wait_finding(
        run, "slow_decode", [_loader_cpu_evidence(loader_cpu), _cpu_utilization_evidence(run)], confidence=0.65
    )


def too_few_workers(run: RunRecords) -> Finding | None:
    cause = CATALOG["too_few_workers"]
    cores, cpu_utilization = run.host.cores, run.cpu_utilization
    if cores is None or cores < 2 or cpu_utilization is None or cpu_utilization >= cause.threshold("busy_cores"):
        return None
    stage, stage_fraction = _largest_stage(run)
    num_workers, loader_cpu = _num_workers(run), _loader_cpu(run)
    if stage is not None and (stage != "decode" or stage_fraction < cause.threshold("of_wait")):
        return None
    if stage is None and _idle_while_waiting_evidence(run) is not None:
        return None
    if num_workers is not None:
        if num_workers > 1 and (num_workers > cause.threshold("few") or num_workers >= cores / 2):
            return None
        worker_evidence = Evidence(
            text=f"{num_workers} threads or processes load pictures, {cores:g} cores are there",
            value=float(num_workers),
            source="config.toml: run.threads" if run.is_native_run else "events.jsonl: data.workers",
        )
        return _input_wait_finding(
            run,
            cause.id,
            [_stage_evidence(run, stage, stage_fraction), worker_evidence, _cpu_utilization_evidence(run)],
        )
    if loader_cpu is None or loader_cpu > cause.threshold("one_core"):
        return None
    return _input_wait_finding(
        run, cause.id, [_loader_cpu_evidence(loader_cpu), _cpu_utilization_evidence(run)], confidence=0.6
    )


def too_few_cores(run: RunRecords) -> Finding | None:
    cause = CATALOG["too_few_cores"]
    stage, stage_fraction = _largest_stage(run)
    cpu_utilization = run.cpu_utilization
    if not run.gpus or cpu_utilization is None or cpu_utilization < cause.threshold("busy_cores"):
        return None
    if stage != "decode" or stage_fraction < cause.threshold("of_wait"):
        return None
    cores = run.host.cores
    core_evidence = None if cores is None else Evidence(
        text=f"{cores / len(run.gpus):g} cores for each "
        f"GPU", value=cores / len(run.gpus), source="devices.jsonl: cores"
    )  # fmt: skip
    return _input_wait_finding(
        run, cause.id, [_stage_evidence(run, stage, stage_fraction), _cpu_utilization_evidence(run), core_evidence]
    )


def images_too_large(run: RunRecords) -> Finding | None:
    cause = CATALOG["images_too_large"]
    median_pixels, image_size = run.facts.get("median_pixels"), run.settings.get("image_size")
    stage, stage_fraction = _largest_stage(run)
    fraction = fraction_of_phase(run, "input_wait")
    if not isinstance(median_pixels, int | float) or not isinstance(image_size, list | tuple) or len(image_size) != 2:
        return None
    if (
        stage != "decode"
        or stage_fraction < cause.threshold("of_wait")
        or fraction is None
        or fraction < _min_fraction(run, cause.threshold("wait"))
    ):
        return None
    ratio = median_pixels / max(1, image_size[0] * image_size[1])
    text = f"the median picture has {median_pixels / 1e6:.1f} megapixels, the canvas {image_size[0] * image_size[1] / 1e6:.2f}"
    evidence = [
        phase_evidence(run, "input_wait"), _stage_evidence(run, stage, stage_fraction),
        Evidence(text=text, value=ratio, source="events.jsonl: note, data.facts.median_pixels; config.toml: "
        "data.canvas"),
    ]  # fmt: skip
    return make_finding(run, cause.id, ratio, evidence, lost_s=run.phase_seconds("input_wait"))


def exposed_h2d_copies(run: RunRecords) -> Finding | None:
    if run.phase_seconds("h2d") > 0:
        return make_phase_finding(run, "exposed_h2d_copies", "h2d")
    traces = run.traces
    if not traces.wall_s:
        return None
    fraction = traces.copy_s / traces.wall_s
    text = f"nothing but copies ran in {format_percent(fraction)} of {traces.steps} traced steps"
    evidence = [Evidence(text=text, value=fraction, source="traces.jsonl: copy_s")]
    return make_finding(run, "exposed_h2d_copies", fraction, evidence, lost_s=fraction * run.phase_seconds("compute"),
                 estimate_basis="the traced share of the time in steps")  # fmt: skip


RULES = (
    input_bound, slow_storage, cold_cache, network_saturated, slow_decode, too_few_workers, too_few_cores,
    images_too_large, exposed_h2d_copies,
)  # fmt: skip


def _input_wait_finding(
    run: RunRecords, cause_id: str, extra_evidence: list[Evidence | None], *, fix_suffix: str = "",
    confidence: float | None = None, excluded_s: float = 0.0,
) -> Finding | None:  # fmt: skip
    """A cause that is as large as the wait for pictures: measured by a clock, else estimated from stacks."""
    if run.phase_seconds("input_wait") > 0:
        return make_phase_finding(run, cause_id, "input_wait", extra_evidence=extra_evidence, min_measured=_min_fraction(run), fix_suffix=fix_suffix,
                        confidence=confidence, excluded_s=excluded_s)  # fmt: skip
    fraction = stack_fraction(run, cause_id, "input_wait", "decode")
    if fraction is None or not is_long_enough(run):
        return None
    evidence = [stack_evidence(run, "a wait for pictures or in decoding", "input_wait", "decode"), *extra_evidence]
    return make_finding(run, cause_id, fraction, evidence, lost_s=sampled_device_s(run, fraction), min_measured=_min_fraction(run),
                 estimate_basis="the share of the main thread's stacks", fix_suffix=fix_suffix,
                 confidence=confidence)  # fmt: skip


def _min_fraction(run: RunRecords, default: float = 0.0) -> float:
    return CATALOG["input_bound"].threshold("warn_from_on_cpu") if run.on_cpu else default


def _is_input_bound(run: RunRecords) -> bool:
    return input_bound(run) is not None


def _input_wait_fraction(run: RunRecords) -> float:
    """Of the time after the start, waiting for pictures or preparing them in the training thread itself."""
    if run.phase_seconds("input_wait") > 0:
        return fraction_of_phase(run, "input_wait") or 0.0
    return run.stacks.fraction("input_wait", "decode")


def _decodes_in_training_thread(run: RunRecords) -> bool:
    """Whether most of the wait is the training thread's own decoding: it computes meanwhile, or its stacks say so."""
    thread_utilization = thread_cpu_utilization(run, "input_wait")
    if thread_utilization is not None:
        return thread_utilization >= CATALOG["slow_storage"].threshold("cpu_while_waiting")
    stage_fraction = CATALOG["slow_decode"].threshold("of_wait")
    return has_enough_stacks(run) and run.stacks.fraction("decode") > stage_fraction * _input_wait_fraction(run)


def _largest_stage(run: RunRecords) -> tuple[str | None, float]:
    """(the stage with most of the wait, its share of it); (None, 0) where the loader tells of no stages."""
    stages = {name: duration_s for name, duration_s in run.totals.input_wait_stages.items() if name != "queue"}
    waited_s = run.phase_seconds("input_wait")
    if waited_s <= 0 or not any(stages.values()):
        return None, 0.0
    name = max(stages, key=lambda stage: stages[stage])
    return name, stages[name] / waited_s


def _stage_evidence(run: RunRecords, stage: str | None, fraction: float) -> Evidence | None:
    if stage is None:
        return None
    descriptions = {"fetch": "the bucket" if run.from_bucket else "reading files", "decode": "decoding and resizing"}
    text = f"of this {100 * fraction:.0f} % {stage}" + (f": {descriptions[stage]}" if stage in descriptions else "")
    return Evidence(text=text, value=fraction, source=f"steps.jsonl: input.{stage}")


def _idle_while_waiting_evidence(run: RunRecords) -> Evidence | None:
    """That the process computed too little for its thread to have been busy while it waited."""
    process_cpu, fraction = cpu_demand(run), _input_wait_fraction(run)
    if run.is_native_run or process_cpu is None or fraction <= 0:
        return None
    cpu_per_wait = max(0.0, process_cpu - _training_thread_cpu(run, fraction)) / fraction
    if cpu_per_wait >= CATALOG["slow_storage"].threshold("cpu_while_waiting"):
        return None
    text = f"the process used {process_cpu:.2f} cores: its threads rested while it waited for pictures"
    return Evidence(text=text, value=process_cpu, source="devices.jsonl: process_cpu")


def _loader_cpu(run: RunRecords) -> float | None:
    """Cores' worth of processor time beside the training thread's work on steps; our own loader tells of itself."""
    process_cpu, fraction = cpu_demand(run), _input_wait_fraction(run)
    return (
        None
        if run.is_native_run or process_cpu is None or fraction <= 0
        else max(0.0, process_cpu - _training_thread_cpu(run, fraction))
    )


def _training_thread_cpu(run: RunRecords, fraction: float) -> float:
    """Cores' worth of processor time of the training thread while it does not wait for pictures: all that time, where
    nobody measured it."""
    other_phases = [name for name in run.steady.phases if name != "input_wait"]
    thread_utilization = thread_cpu_utilization(run, *other_phases)
    return (1 - fraction) * (1.0 if thread_utilization is None else min(1.0, thread_utilization))


def _loader_cpu_evidence(cores: float) -> Evidence:
    text = f"the process and its children used {cores:.2f} cores beside the training thread's work"
    return Evidence(text=text, value=cores, source="devices.jsonl: process_cpu")


def _num_workers(run: RunRecords) -> int | None:
    """That load pictures; None where nobody says, or where the loader finds their number by itself."""
    num_workers = run.settings.get("workers") if run.is_native_run else run.facts.get("workers")
    if num_workers is None and not run.is_native_run and _decodes_in_training_thread(run):
        return 0
    if not isinstance(num_workers, int) or (run.is_native_run and num_workers == 0):
        return None
    return num_workers


def _saw_two_epochs(run: RunRecords) -> bool:
    num_images = run.facts.get("num_images")
    return isinstance(num_images, int) and run.totals.num_images >= 2 * num_images > 0


def _cpu_utilization_evidence(run: RunRecords) -> Evidence | None:
    cpu_utilization = run.cpu_utilization
    return None if cpu_utilization is None else Evidence(
        text=f"the cores were {100 * cpu_utilization:.0f} % busy", value=cpu_utilization, source="devices.jsonl: cpu"
    )  # fmt: skip


def _network_evidence(run: RunRecords) -> Evidence | None:
    value, max_received = run.host.net_received_bytes_s.value, run.host.net_received_bytes_s.max_value
    if value is None or max_received is None:
        return None
    text = f"{value / 1e6:,.0f} MB/s were received, at most {max_received / 1e6:,.0f}"
    return counter_evidence(text, value, "net_received_bytes_s")
