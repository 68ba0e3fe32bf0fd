"""Rules of "blindness": what nobody saw, and what two witnesses say differently."""

from stoker.diagnosis.catalogue import CATALOGUE
from stoker.diagnosis.rules.finding import (
    counter,
    found,
    is_long_enough,
    percent,
    phase,
    share_of,
)
from stoker.diagnosis.rules.parallel_work import driver_utilisation
from stoker.diagnosis.run_data import Records
from stoker.runs.schemas import Evidence, Finding

WORKS = ("compute", "eval", "comm", "straggler", "recovery", "checkpoint", "compile", "h2d", "sync")
"""Phases in which a GPU may be seen at work; NCCL waits in a kernel."""


def unattributed_time(seen: Records) -> Finding | None:
    """Of a watched job most time is unattributed as long as nothing looks inside: then it is said, and no more."""
    share = share_of(seen, "unattributed")
    cause = CATALOGUE["unattributed_time"]
    if share is None or (seen.watched and share < cause.limit("watched")):
        return None
    measured = min(share, cause.info_from or 0.0) if seen.watched else share
    lost_s = None if seen.watched else seen.seconds("unattributed")
    return found(seen, cause.id, measured, [phase(seen, "unattributed")], lost_s=lost_s)


def witnesses_disagree(seen: Records) -> Finding | None:
    busy = driver_utilisation(seen)
    if busy is None or seen.watched or not is_long_enough(seen):
        return None
    worked = seen.steady_share(*WORKS)
    evidence = [
        counter("the driver saw kernels {} of the time", busy, "gpus.utilisation"),
        Evidence(text=f"by the ledger the device worked {percent(worked)} of it", value=worked,
                 place="steps.jsonl: phases"),
    ]  # fmt: skip
    return found(seen, "witnesses_disagree", busy - worked, evidence)


def gpu_not_used(seen: Records) -> Finding | None:
    cause = CATALOGUE["gpu_not_used"]
    means = [gpu.utilisation for gpu in seen.gpus.values() if gpu.utilisation.value is not None]
    if not means or len(means) != len(seen.gpus) or seen.steady.steps == 0:
        return None
    most = max(mean.value or 0.0 for mean in means)
    if most >= cause.limit("idle") or min(mean.count for mean in means) < cause.limit("samples"):
        return None
    device = seen.settings.get("device")
    evidence = [
        counter("no GPU was used more than {} of the time", most, "gpus.utilisation"),
        None if device is None else Evidence(text=f"the run computes on {device}", place="config.toml: run.device"),
    ]
    return found(seen, cause.id, 1, evidence, lost_s=seen.totals.device_s, estimate="the GPU was there all the time")


def no_telemetry(seen: Records) -> Finding | None:
    wall_s = seen.totals.wall_s
    device = seen.settings.get("device")
    on_gpu = isinstance(device, str) and device.startswith("cuda")
    if seen.samples and not (on_gpu and not seen.gpus):
        return None
    what = "has no GPU" if seen.samples else "has no line"
    text = f"devices.jsonl {what}, of a run of {wall_s:,.0f} s"
    return found(seen, "no_telemetry", wall_s, [Evidence(text=text, value=wall_s, place="devices.jsonl")])


def job_says_no_steps(seen: Records) -> Finding | None:
    if not seen.watched or seen.totals.steps:
        return None
    text = f"no step in {seen.totals.wall_s:,.0f} s"
    evidence = [Evidence(text=text, value=seen.totals.wall_s, place="steps.jsonl: steps")]
    return found(seen, "job_says_no_steps", seen.totals.wall_s, evidence)


RULES = (unattributed_time, witnesses_disagree, gpu_not_used, no_telemetry, job_says_no_steps)
