"""Rules of "data loading". Several look at the same wait for pictures; the catalogue says which replaces which."""

from stoker.diagnosis.catalogue import CATALOGUE
from stoker.diagnosis.rules.finding import (
    counter,
    found,
    has_stacks,
    is_long_enough,
    of_phase,
    percent,
    phase,
    sampled_s,
    share_of,
    stack_share,
    stacks,
    thread_cpu,
    wanted_cpu,
)
from stoker.diagnosis.run_data import Records
from stoker.runs.schemas import Evidence, Finding


def input_bound(seen: Records) -> Finding | None:
    stage, of_wait = _largest_stage(seen)
    busy = seen.cores_busy
    idle_below = CATALOGUE["too_few_threads"].limit("busy_cores")
    hint = ""
    if stage == "fetch":
        where = "a bucket in the machine's own region" if seen.from_bucket else "a faster disk"
        first = f"{where} comes" if seen.settings.get("cache", "none") != "none" else f"{where} or --cache comes"
        hint = f"; most of the wait is for bytes here, so {first} first"
    elif busy is not None and busy >= idle_below:
        hint = "; the cores are busy here, so more --threads do not help"
    elif busy is not None and seen.settings.get("threads") != 0:
        hint = "; cores are idle here, so more --threads come first, or --threads 0, which finds their number"
    return _wait(seen, "input_bound", [_of_wait(seen, stage, of_wait), _cores(seen)], more_fix=hint)


def slow_storage(seen: Records) -> Finding | None:
    """By the loader's stages; of a loop without them, by a process that rests while it waits for pictures."""
    stage, of_wait = _largest_stage(seen)
    if stage is not None:
        if stage != "fetch" or of_wait < CATALOGUE["slow_storage"].limit("of_wait"):
            return None
        return _wait(seen, "slow_storage", [_of_wait(seen, stage, of_wait), _received(seen), _cores(seen)])
    rests = _rests_while_waiting(seen)
    if rests is None or _decodes_itself(seen):
        return None
    computed_s = seen.totals.cpu.get("input_wait", 0.0)  # by the training thread, which decodes where nobody else does
    return _wait(seen, "slow_storage", [rests, stacks(seen, "a wait for pictures", "input_wait")], confidence=0.65,
                 not_s=computed_s)  # fmt: skip


def cold_cache(seen: Records) -> Finding | None:
    first_s, all_s = seen.first_epoch_fetch_s, seen.totals.input.get("fetch", 0.0)
    if first_s is None or all_s <= 0 or not is_long_enough(seen):
        return None
    of_fetch = first_s / all_s
    if of_fetch < CATALOGUE["cold_cache"].limit("of_fetch") or not _passed_twice(seen):
        return None
    text = f"{percent(of_fetch)} of the waiting for bytes was in the first pass over the pictures"
    evidence = [Evidence(text=text, value=of_fetch, place="steps.jsonl: input.fetch"), phase(seen, "input_wait")]
    return found(seen, "cold_cache", first_s / seen.totals.device_s, evidence, lost_s=first_s)


def network_saturated(seen: Records) -> Finding | None:
    cause, received = CATALOGUE["network_saturated"], seen.host.received
    stage, of_wait = _largest_stage(seen)
    if stage != "fetch" or of_wait < cause.limit("of_wait") or not _waits(seen):
        return None
    if received.value is None or received.most is None or received.count < cause.limit("least_samples"):
        return None
    if received.value < cause.limit("least_bytes_s"):
        return None
    evidence = [phase(seen, "input_wait"), _of_wait(seen, stage, of_wait), _received(seen)]
    return found(seen, cause.id, received.value / received.most, evidence, lost_s=seen.seconds("input_wait"))


def slow_decode(seen: Records) -> Finding | None:
    """By the loader's stages; of a loop without them, by its own stacks, or by processes that compute while it waits:
    what else would they do."""
    stage, of_wait = _largest_stage(seen)
    if stage is not None:
        if stage != "decode" or of_wait < CATALOGUE["slow_decode"].limit("of_wait"):
            return None
        return _wait(seen, "slow_decode", [_of_wait(seen, stage, of_wait), _cores(seen)])
    if _decodes_itself(seen):
        return _wait(seen, "slow_decode", [stacks(seen, "decoding", "decode"), _cores(seen)])
    busy = _loads_with(seen)
    if busy is None or _rests_while_waiting(seen) is not None:
        return None
    return _wait(seen, "slow_decode", [_loading(busy), _cores(seen)], confidence=0.65)


def too_few_threads(seen: Records) -> Finding | None:
    cause = CATALOGUE["too_few_threads"]
    cores, busy = seen.host.cores, seen.cores_busy
    if cores is None or cores < 2 or busy is None or busy >= cause.limit("busy_cores"):
        return None
    stage, of_wait = _largest_stage(seen)
    threads, loading = _threads(seen), _loads_with(seen)
    if stage is not None and (stage != "decode" or of_wait < cause.limit("of_wait")):
        return None
    if stage is None and _rests_while_waiting(seen) is not None:
        return None
    if threads is not None:
        if threads > 1 and (threads > cause.limit("few") or threads >= cores / 2):
            return None
        said = Evidence(
            text=f"{threads} threads or processes load pictures, {cores:g} cores are there",
            value=float(threads),
            place="config.toml: run.threads" if seen.ours else "events.jsonl: data.workers",
        )
        return _wait(seen, cause.id, [_of_wait(seen, stage, of_wait), said, _cores(seen)])
    if loading is None or loading > cause.limit("one_core"):
        return None
    return _wait(seen, cause.id, [_loading(loading), _cores(seen)], confidence=0.6)


def too_few_cores(seen: Records) -> Finding | None:
    cause = CATALOGUE["too_few_cores"]
    stage, of_wait = _largest_stage(seen)
    busy = seen.cores_busy
    if not seen.gpus or busy is None or busy < cause.limit("busy_cores"):
        return None
    if stage != "decode" or of_wait < cause.limit("of_wait"):
        return None
    cores = seen.host.cores
    said = None if cores is None else Evidence(
        text=f"{cores / len(seen.gpus):g} cores for each "
        f"GPU", value=cores / len(seen.gpus), place="devices.jsonl: cores"
    )  # fmt: skip
    return _wait(seen, cause.id, [_of_wait(seen, stage, of_wait), _cores(seen), said])


def pictures_too_large(seen: Records) -> Finding | None:
    cause = CATALOGUE["pictures_too_large"]
    pixels, canvas = seen.facts.get("pixels_median"), seen.settings.get("canvas")
    stage, of_wait = _largest_stage(seen)
    share = share_of(seen, "input_wait")
    if not isinstance(pixels, int | float) or not isinstance(canvas, list | tuple) or len(canvas) != 2:
        return None
    if (
        stage != "decode"
        or of_wait < cause.limit("of_wait")
        or share is None
        or share < _least(seen, cause.limit("wait"))
    ):
        return None
    ratio = pixels / max(1, canvas[0] * canvas[1])
    text = f"the median picture has {pixels / 1e6:.1f} megapixels, the canvas {canvas[0] * canvas[1] / 1e6:.2f}"
    evidence = [
        phase(seen, "input_wait"), _of_wait(seen, stage, of_wait),
        Evidence(text=text, value=ratio, place="events.jsonl: note, data.facts.pixels_median; config.toml: "
        "data.canvas"),
    ]  # fmt: skip
    return found(seen, cause.id, ratio, evidence, lost_s=seen.seconds("input_wait"))


def copies_exposed(seen: Records) -> Finding | None:
    if seen.seconds("h2d") > 0:
        return of_phase(seen, "copies_exposed", "h2d")
    traces = seen.traces
    if not traces.wall_s:
        return None
    share = traces.copy_s / traces.wall_s
    text = f"nothing but copies ran in {percent(share)} of {traces.steps} traced steps"
    evidence = [Evidence(text=text, value=share, place="traces.jsonl: copy_s")]
    return found(seen, "copies_exposed", share, evidence, lost_s=share * seen.seconds("compute"),
                 estimate="the traced share of the time in steps")  # fmt: skip


RULES = (
    input_bound, slow_storage, cold_cache, network_saturated, slow_decode, too_few_threads, too_few_cores,
    pictures_too_large, copies_exposed,
)  # fmt: skip


def _wait(
    seen: Records, cause_id: str, more: list[Evidence | None], *, more_fix: str = "",
    confidence: float | None = None, not_s: float = 0.0,
) -> Finding | None:  # fmt: skip
    """A cause that is as large as the wait for pictures: measured by a clock, else estimated from stacks."""
    if seen.seconds("input_wait") > 0:
        return of_phase(seen, cause_id, "input_wait", more=more, threshold=_least(seen), more_fix=more_fix,
                        confidence=confidence, not_s=not_s)  # fmt: skip
    share = stack_share(seen, cause_id, "input_wait", "decode")
    if share is None or not is_long_enough(seen):
        return None
    evidence = [stacks(seen, "a wait for pictures or in decoding", "input_wait", "decode"), *more]
    return found(seen, cause_id, share, evidence, lost_s=sampled_s(seen, share), threshold=_least(seen),
                 estimate="the share of the main thread's stacks", more_fix=more_fix,
                 confidence=confidence)  # fmt: skip


def _least(seen: Records, usual: float = 0.0) -> float:
    return CATALOGUE["input_bound"].limit("warn_from_on_cpu") if seen.on_cpu else usual


def _waits(seen: Records) -> bool:
    return input_bound(seen) is not None


def _waiting_share(seen: Records) -> float:
    """Of the time after the start, waiting for pictures or preparing them in the training thread itself."""
    if seen.seconds("input_wait") > 0:
        return share_of(seen, "input_wait") or 0.0
    return seen.stacks.share("input_wait", "decode")


def _decodes_itself(seen: Records) -> bool:
    """Whether most of the wait is the training thread's own decoding: it computes meanwhile, or its stacks say so."""
    computes = thread_cpu(seen, "input_wait")
    if computes is not None:
        return computes >= CATALOGUE["slow_storage"].limit("cpu_while_waiting")
    of_wait = CATALOGUE["slow_decode"].limit("of_wait")
    return has_stacks(seen) and seen.stacks.share("decode") > of_wait * _waiting_share(seen)


def _largest_stage(seen: Records) -> tuple[str | None, float]:
    """(the stage with most of the wait, its share of it); (None, 0) where the loader tells of no stages."""
    stages = {name: took_s for name, took_s in seen.totals.input.items() if name != "queue"}
    waited_s = seen.seconds("input_wait")
    if waited_s <= 0 or not any(stages.values()):
        return None, 0.0
    name = max(stages, key=lambda stage: stages[stage])
    return name, stages[name] / waited_s


def _of_wait(seen: Records, stage: str | None, share: float) -> Evidence | None:
    if stage is None:
        return None
    what = {"fetch": "the bucket" if seen.from_bucket else "reading files", "decode": "decoding and resizing"}
    text = f"of this {100 * share:.0f} % {stage}" + (f": {what[stage]}" if stage in what else "")
    return Evidence(text=text, value=share, place=f"steps.jsonl: input.{stage}")


def _rests_while_waiting(seen: Records) -> Evidence | None:
    """That the process computed too little for its thread to have been busy while it waited."""
    cpu, share = wanted_cpu(seen), _waiting_share(seen)
    if seen.ours or cpu is None or share <= 0:
        return None
    per_wait = max(0.0, cpu - _elsewhere(seen, share)) / share
    if per_wait >= CATALOGUE["slow_storage"].limit("cpu_while_waiting"):
        return None
    text = f"the process used {cpu:.2f} cores: its threads rested while it waited for pictures"
    return Evidence(text=text, value=cpu, place="devices.jsonl: process_cpu")


def _loads_with(seen: Records) -> float | None:
    """Cores' worth of processor time beside the training thread's work on steps; our own loader tells of itself."""
    cpu, share = wanted_cpu(seen), _waiting_share(seen)
    return None if seen.ours or cpu is None or share <= 0 else max(0.0, cpu - _elsewhere(seen, share))


def _elsewhere(seen: Records, share: float) -> float:
    """Cores' worth of processor time of the training thread while it does not wait for pictures: all that time, where
    nobody measured it."""
    others = [name for name in seen.steady.phases if name != "input_wait"]
    computes = thread_cpu(seen, *others)
    return (1 - share) * (1.0 if computes is None else min(1.0, computes))


def _loading(cores: float) -> Evidence:
    text = f"the process and its children used {cores:.2f} cores beside the training thread's work"
    return Evidence(text=text, value=cores, place="devices.jsonl: process_cpu")


def _threads(seen: Records) -> int | None:
    """That load pictures; None where nobody says, or where the loader finds their number by itself."""
    threads = seen.settings.get("threads") if seen.ours else seen.facts.get("workers")
    if threads is None and not seen.ours and _decodes_itself(seen):
        return 0
    if not isinstance(threads, int) or (seen.ours and threads == 0):
        return None
    return threads


def _passed_twice(seen: Records) -> bool:
    pictures = seen.facts.get("pictures")
    return isinstance(pictures, int) and seen.totals.pictures >= 2 * pictures > 0


def _cores(seen: Records) -> Evidence | None:
    busy = seen.cores_busy
    return None if busy is None else Evidence(
        text=f"the cores were {100 * busy:.0f} % busy", value=busy, place="devices.jsonl: cpu"
    )  # fmt: skip


def _received(seen: Records) -> Evidence | None:
    value, most = seen.host.received.value, seen.host.received.most
    if value is None or most is None:
        return None
    text = f"{value / 1e6:,.0f} MB/s were received, at most {most / 1e6:,.0f}"
    return counter(text, value, "net_received_bytes_s")
