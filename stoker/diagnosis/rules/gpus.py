"""Rules about the GPUs themselves: clocks, heat, power, other users, GPUs that nobody uses, errors of the hardware."""

from collections.abc import Callable

from stoker.diagnosis.catalogue import CATALOG
from stoker.diagnosis.rules.finding import format_percent, make_finding
from stoker.diagnosis.run_data import GpuStats, RunRecords
from stoker.diagnosis.xids import UNKNOWN_XID, XIDS
from stoker.runs.schemas import Evidence, Finding


def gpu_hot(run: RunRecords) -> Finding | None:
    worst = _find_worst(run, "gpu_hot", lambda gpu: gpu.thermal_throttled_samples / gpu.busy_samples)
    if worst is None:
        return None
    fraction, index, gpu = worst
    text = f"GPU {index} was throttled by heat in {format_percent(fraction)} of {gpu.busy_samples} samples under load"
    if gpu.temperature.max_value is not None:
        text += f", at {gpu.temperature.max_value:.0f} °C"
    evidence = [
        Evidence(text=text, value=fraction, source="devices.jsonl: gpus.throttle_reasons"),
        _clock_evidence(gpu, index),
    ]
    return make_finding(
        run, "gpu_hot", fraction, evidence, lost_s=_clock_lost_s(run, gpu), estimate_basis=_CLOCK_ESTIMATE
    )


def gpu_power_capped(run: RunRecords) -> Finding | None:
    cause = CATALOG["gpu_power_capped"]
    worst = _find_worst(run, cause.id, lambda gpu: gpu.clock_deficit.value
                   if gpu.power_capped_samples / gpu.busy_samples >= cause.threshold("capped") else None)  # fmt: skip
    if worst is None:
        return None
    clock_deficit, index, gpu = worst
    text = f"the power limit held GPU {index} in {format_percent(gpu.power_capped_samples / gpu.busy_samples)} of {gpu.busy_samples} samples under load"
    evidence = [
        Evidence(text=text, value=gpu.power_capped_samples / gpu.busy_samples, source="devices.jsonl: "
        "gpus.throttle_reasons"), _clock_evidence(gpu, index),
    ]  # fmt: skip
    return make_finding(
        run, cause.id, clock_deficit, evidence, lost_s=_clock_lost_s(run, gpu), estimate_basis=_CLOCK_ESTIMATE
    )


def gpu_clock_low(run: RunRecords) -> Finding | None:
    worst = _find_worst(run, "gpu_clock_low", lambda gpu: gpu.clock_deficit.value)
    if worst is None:
        return None
    clock_deficit, index, gpu = worst
    driver_evidence = None
    if gpu.app_clock_samples:
        text = f"the driver says that somebody has set it, in {format_percent(gpu.app_clock_samples / gpu.busy_samples)} of the samples"
        driver_evidence = Evidence(
            text=text, value=gpu.app_clock_samples / gpu.busy_samples, source="devices.jsonl: gpus.throttle_reasons"
        )
    return make_finding(
        run,
        "gpu_clock_low",
        clock_deficit,
        [_clock_evidence(gpu, index), driver_evidence],
        lost_s=_clock_lost_s(run, gpu),
        estimate_basis=_CLOCK_ESTIMATE,
    )


def gpu_shared(run: RunRecords) -> Finding | None:
    fractions = [
        (gpu.other_processes.value, index) for index, gpu in run.gpus.items() if gpu.other_processes.value is not None
    ]
    if not fractions:
        return None
    fraction, index = max(fractions)
    text = f"another process was on GPU {index} in {format_percent(fraction)} of the samples"
    return make_finding(run, "gpu_shared", fraction,
                 [Evidence(text=text, value=fraction, source="devices.jsonl: gpus.other_processes")])  # fmt: skip


def idle_gpus(run: RunRecords) -> Finding | None:
    """What they cost is lost device time only where the ledger counts them."""
    cause = CATALOG["idle_gpus"]
    utilization = {index: gpu.utilization.value for index, gpu in run.gpus.items()
            if gpu.utilization.value is not None and gpu.utilization.count >= cause.threshold("samples")}  # fmt: skip
    idle = sorted(index for index, fraction in utilization.items() if fraction < cause.threshold("idle"))
    if len(utilization) < 2 or max(utilization.values()) < cause.threshold("works"):
        return None
    text = f"GPU {', '.join(map(str, idle))} did nothing, of {len(utilization)} GPUs"
    is_counted = run.totals.devices >= len(utilization)
    evidence = [Evidence(text=text, value=float(len(idle)), source="devices.jsonl: gpus.utilisation")]
    lost_s = len(idle) * run.totals.wall_s if is_counted else None
    return make_finding(run, cause.id, len(idle), evidence, lost_s=lost_s)


def gpu_errors(run: RunRecords) -> Finding | None:
    counts: dict[tuple[int, int], int] = {}
    for index, gpu in run.gpus.items():
        for number, count in gpu.xid_counts.items():
            counts[index, number] = counts.get((index, number), 0) + count
    for event in run.gpu_faults:
        gpu_index, xid_number = event.data.get("gpu"), event.data.get("xid")
        key = gpu_index if isinstance(gpu_index, int) else -1
        if isinstance(xid_number, int) and (key, xid_number) not in counts:
            counts[key, xid_number] = 1
    if not counts:
        return None
    evidence, fault_level = [], 1
    for (index, number), count in sorted(counts.items()):
        xid = XIDS.get(number, UNKNOWN_XID)
        fault_level = fault_level if xid.origin == "program" else 2
        gpu_name = f"GPU {index}" if index >= 0 else "a GPU"
        text = f"Xid {number} on {gpu_name}, {count} times: {xid.meaning}; mostly the {xid.origin}'s. {xid.fix}"
        if xid.origin == "either":
            text = f"Xid {number} on {gpu_name}, {count} times: {xid.meaning}. {xid.fix}"
        evidence.append(Evidence(text=text, value=float(number), source="devices.jsonl: gpus.xids"))
    return make_finding(run, "gpu_errors", fault_level, evidence[:5])


def gpu_memory_errors(run: RunRecords) -> Finding | None:
    cause = CATALOG["gpu_memory_errors"]
    worst, evidence = 0.0, []
    for index, gpu in run.gpus.items():
        corrected, uncorrected = (0 if pair is None else max(0, pair[1] - pair[0])
                                  for pair in (gpu.ecc_corrected, gpu.ecc_uncorrected))  # fmt: skip
        if corrected or uncorrected:
            text = f"GPU {index}: {corrected:,} errors corrected, {uncorrected:,} not, while the run lived"
            evidence.append(Evidence(text=text, value=float(corrected + uncorrected),
                                     source="devices.jsonl: gpus.ecc_corrected, ecc_uncorrected"))  # fmt: skip
            worst = max(worst, corrected + uncorrected * cause.threshold("uncorrected"))
    return make_finding(run, cause.id, worst, evidence)


RULES = (
    gpu_hot, gpu_power_capped, gpu_clock_low, gpu_shared, idle_gpus, gpu_errors, gpu_memory_errors,
)  # fmt: skip

_CLOCK_ESTIMATE = "the share of the clock that is missing, of the time in which the device computed"


def _find_worst(
    run: RunRecords, cause_id: str, measure: Callable[[GpuStats], float | None]
) -> tuple[float, int, GpuStats] | None:
    """(the largest measure, its GPU) of those with enough samples under load."""
    min_samples = CATALOG[cause_id].threshold("samples")
    candidates = [(value, index) for index, gpu in run.gpus.items()
            if gpu.busy_samples >= min_samples and (value := measure(gpu)) is not None]  # fmt: skip
    if not candidates:
        return None
    value, index = max(candidates)
    return value, index, run.gpus[index]


def _clock_evidence(gpu: GpuStats, index: int) -> Evidence | None:
    clock_deficit = gpu.clock_deficit.value
    if clock_deficit is None:
        return None
    text = f"the clock of GPU {index} was at {format_percent(1 - clock_deficit)} of its largest under load"
    return Evidence(text=text, value=1 - clock_deficit, source="devices.jsonl: gpus.sm_clock_mhz, sm_clock_max_mhz")


def _clock_lost_s(run: RunRecords, gpu: GpuStats) -> float | None:
    clock_deficit = gpu.clock_deficit.value
    return (
        None
        if clock_deficit is None or not run.phase_seconds("compute")
        else clock_deficit * run.phase_seconds("compute")
    )
