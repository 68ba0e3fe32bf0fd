"""Rules about the GPUs themselves: clocks, heat, power, other users, GPUs that nobody uses, errors of the hardware."""

from collections.abc import Callable

from stoker.diagnosis.catalogue import CATALOGUE
from stoker.diagnosis.rules.finding import found, percent
from stoker.diagnosis.run_data import Gpu, Records
from stoker.diagnosis.xids import UNKNOWN, XIDS
from stoker.runs.schemas import Evidence, Finding


def gpu_hot(seen: Records) -> Finding | None:
    worst = _worst(seen, "gpu_hot", lambda gpu: gpu.hot / gpu.busy)
    if worst is None:
        return None
    share, index, gpu = worst
    text = f"GPU {index} was throttled by heat in {percent(share)} of {gpu.busy} samples under load"
    if gpu.temperature.most is not None:
        text += f", at {gpu.temperature.most:.0f} °C"
    evidence = [Evidence(text=text, value=share, place="devices.jsonl: gpus.throttle_reasons"), _clock(gpu, index)]
    return found(seen, "gpu_hot", share, evidence, lost_s=_slower(seen, gpu), estimate=_CLOCK)


def gpu_power_capped(seen: Records) -> Finding | None:
    cause = CATALOGUE["gpu_power_capped"]
    worst = _worst(seen, cause.id, lambda gpu: gpu.clock_missing.value
                   if gpu.capped / gpu.busy >= cause.limit("capped") else None)  # fmt: skip
    if worst is None:
        return None
    missing, index, gpu = worst
    text = f"the power limit held GPU {index} in {percent(gpu.capped / gpu.busy)} of {gpu.busy} samples under load"
    evidence = [
        Evidence(text=text, value=gpu.capped / gpu.busy, place="devices.jsonl: "
        "gpus.throttle_reasons"), _clock(gpu, index),
    ]  # fmt: skip
    return found(seen, cause.id, missing, evidence, lost_s=_slower(seen, gpu), estimate=_CLOCK)


def gpu_clock_low(seen: Records) -> Finding | None:
    worst = _worst(seen, "gpu_clock_low", lambda gpu: gpu.clock_missing.value)
    if worst is None:
        return None
    missing, index, gpu = worst
    said = None
    if gpu.set_low:
        text = f"the driver says that somebody has set it, in {percent(gpu.set_low / gpu.busy)} of the samples"
        said = Evidence(text=text, value=gpu.set_low / gpu.busy, place="devices.jsonl: gpus.throttle_reasons")
    return found(seen, "gpu_clock_low", missing, [_clock(gpu, index), said], lost_s=_slower(seen, gpu), estimate=_CLOCK)


def gpu_shared(seen: Records) -> Finding | None:
    shares = [(gpu.others.value, index) for index, gpu in seen.gpus.items() if gpu.others.value is not None]
    if not shares:
        return None
    share, index = max(shares)
    text = f"another process was on GPU {index} in {percent(share)} of the samples"
    return found(seen, "gpu_shared", share,
                 [Evidence(text=text, value=share, place="devices.jsonl: gpus.other_processes")])  # fmt: skip


def idle_gpus(seen: Records) -> Finding | None:
    """What they cost is lost device time only where the ledger counts them."""
    cause = CATALOGUE["idle_gpus"]
    used = {index: gpu.utilisation.value for index, gpu in seen.gpus.items()
            if gpu.utilisation.value is not None and gpu.utilisation.count >= cause.limit("samples")}  # fmt: skip
    idle = sorted(index for index, share in used.items() if share < cause.limit("idle"))
    if len(used) < 2 or max(used.values()) < cause.limit("works"):
        return None
    text = f"GPU {', '.join(map(str, idle))} did nothing, of {len(used)} GPUs"
    counted = seen.totals.devices >= len(used)
    evidence = [Evidence(text=text, value=float(len(idle)), place="devices.jsonl: gpus.utilisation")]
    lost_s = len(idle) * seen.totals.wall_s if counted else None
    return found(seen, cause.id, len(idle), evidence, lost_s=lost_s)


def gpu_errors(seen: Records) -> Finding | None:
    counts: dict[tuple[int, int], int] = {}
    for index, gpu in seen.gpus.items():
        for number, times in gpu.xids.items():
            counts[index, number] = counts.get((index, number), 0) + times
    for event in seen.gpu_faults:
        where, xid_number = event.data.get("gpu"), event.data.get("xid")
        key = where if isinstance(where, int) else -1
        if isinstance(xid_number, int) and (key, xid_number) not in counts:
            counts[key, xid_number] = 1
    if not counts:
        return None
    evidence, grave = [], 1
    for (index, number), times in sorted(counts.items()):
        xid = XIDS.get(number, UNKNOWN)
        grave = grave if xid.whose == "program" else 2
        which = f"GPU {index}" if index >= 0 else "a GPU"
        text = f"Xid {number} on {which}, {times} times: {xid.meaning}; mostly the {xid.whose}'s. {xid.fix}"
        if xid.whose == "either":
            text = f"Xid {number} on {which}, {times} times: {xid.meaning}. {xid.fix}"
        evidence.append(Evidence(text=text, value=float(number), place="devices.jsonl: gpus.xids"))
    return found(seen, "gpu_errors", grave, evidence[:5])


def gpu_memory_errors(seen: Records) -> Finding | None:
    cause = CATALOGUE["gpu_memory_errors"]
    worst, evidence = 0.0, []
    for index, gpu in seen.gpus.items():
        corrected, uncorrected = (0 if pair is None else max(0, pair[1] - pair[0])
                                  for pair in (gpu.corrected, gpu.uncorrected))  # fmt: skip
        if corrected or uncorrected:
            text = f"GPU {index}: {corrected:,} errors corrected, {uncorrected:,} not, while the run lived"
            evidence.append(Evidence(text=text, value=float(corrected + uncorrected),
                                     place="devices.jsonl: gpus.ecc_corrected, ecc_uncorrected"))  # fmt: skip
            worst = max(worst, corrected + uncorrected * cause.limit("uncorrected"))
    return found(seen, cause.id, worst, evidence)


RULES = (
    gpu_hot, gpu_power_capped, gpu_clock_low, gpu_shared, idle_gpus, gpu_errors, gpu_memory_errors,
)  # fmt: skip

_CLOCK = "the share of the clock that is missing, of the time in which the device computed"


def _worst(seen: Records, cause_id: str, measure: Callable[[Gpu], float | None]) -> tuple[float, int, Gpu] | None:
    """(the largest measure, its GPU) of those with enough samples under load."""
    least = CATALOGUE[cause_id].limit("samples")
    rows = [(value, index) for index, gpu in seen.gpus.items()
            if gpu.busy >= least and (value := measure(gpu)) is not None]  # fmt: skip
    if not rows:
        return None
    value, index = max(rows)
    return value, index, seen.gpus[index]


def _clock(gpu: Gpu, index: int) -> Evidence | None:
    missing = gpu.clock_missing.value
    if missing is None:
        return None
    text = f"the clock of GPU {index} was at {percent(1 - missing)} of its largest under load"
    return Evidence(text=text, value=1 - missing, place="devices.jsonl: gpus.sm_clock_mhz, sm_clock_max_mhz")


def _slower(seen: Records, gpu: Gpu) -> float | None:
    missing = gpu.clock_missing.value
    return None if missing is None or not seen.seconds("compute") else missing * seen.seconds("compute")
