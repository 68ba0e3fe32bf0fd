"""The GPU itself: its clock, errors, link, tensor cores; who else computes on it, and whether the job uses it."""

import functools
from typing import Literal

import msgspec

from stoker_watch.diagnosis.causes.cause import LEVELS, Cause, find_cause, worst
from stoker_watch.diagnosis.causes.explanation import Explanation
from stoker_watch.diagnosis.causes.shared import make_evidence, make_finding, percent, sample_evidence
from stoker_watch.diagnosis.places.sampled import Cost
from stoker_watch.diagnosis.run_data import GpuStats, RunRecords
from stoker_watch.findings.finding import SEVERITIES, Evidence, Finding, Severity
from stoker_watch.knowledge import read_toml

_BY_REASON = (
    (0.9, "heat", "nvidia-smi -q -d TEMPERATURE"),
    (0.8, "power", "nvidia-smi -q -d POWER"),
    (0.7, "set_clock", "nvidia-smi -rgc"),
)
"""Confidence, name of the fix, command."""
GPU_CLOCKS_LOW = find_cause("gpu_clocks_low")
GPU_ERRORS = find_cause("gpu_errors")
PCIE_DEGRADED = find_cause("pcie_degraded")
_MAX_XID_LINES = 5
_Judged = tuple[Severity | None, float, Evidence | None]


def gpu_clocks_low(run: RunRecords, cost: Cost) -> Explanation | None:
    """The GPU with the highest severity; at the same severity heat comes before power, and power before a set clock."""
    candidates = []
    for index, gpu in run.gpus.items():
        if gpu.busy_samples < GPU_CLOCKS_LOW.threshold("min_samples"):
            continue
        for order, (severity, value, evidence) in enumerate((_hot(gpu, index), _capped(gpu, index), _low(gpu, index))):
            if severity is not None:
                candidates.append((SEVERITIES.index(severity), order, -value, index, evidence))
    if not candidates or cost.place is not None:
        return None
    severity_index, order, negative_value, index, evidence = min(candidates, key=lambda candidate: candidate[:4])
    deficit = run.gpus[index].clock_deficit.value
    clock_evidence = None
    if deficit is not None:
        text = f"the clock of GPU {index} was at {percent(1 - deficit)} of its maximum under load"
        clock_evidence = make_evidence(text, 1 - deficit, "devices.jsonl: gpus.sm_clock_mhz, sm_clock_max_mhz")
    confidence, reason, command = _BY_REASON[order]
    return Explanation(
        evidence=[evidence, clock_evidence], saved=min(1.0, deficit or 0.0), measured=-negative_value,
        basis="the missing fraction of the clock, of the time in which the device computed",
        severity=SEVERITIES[severity_index], confidence=confidence, fix=GPU_CLOCKS_LOW.other_fixes[reason],
        command=command,
    )  # fmt: skip


def _hot(gpu: GpuStats, index: int) -> _Judged:
    fraction = gpu.thermal_throttled_samples / gpu.busy_samples
    text = f"heat throttled GPU {index} in {percent(fraction)} of {gpu.busy_samples} samples under load"
    if gpu.temperature.max_value is not None:
        text += f", at {gpu.temperature.max_value:.0f} °C"
    evidence = make_evidence(text, fraction, "devices.jsonl: gpus.throttle_reasons")
    if fraction >= GPU_CLOCKS_LOW.threshold("hot_critical"):
        return "critical", fraction, evidence
    return ("warning" if fraction >= GPU_CLOCKS_LOW.threshold("hot_warning") else None), fraction, evidence


def _capped(gpu: GpuStats, index: int) -> _Judged:
    fraction, deficit = gpu.power_capped_samples / gpu.busy_samples, gpu.clock_deficit.value
    if deficit is None or fraction < GPU_CLOCKS_LOW.threshold("min_capped_fraction"):
        return None, 0.0, None
    text = f"the power limit slowed GPU {index} in {percent(fraction)} of {gpu.busy_samples} samples under load"
    evidence = make_evidence(text, fraction, "devices.jsonl: gpus.throttle_reasons")
    if deficit >= GPU_CLOCKS_LOW.threshold("capped_warning"):
        return "warning", deficit, evidence
    return ("info" if deficit >= GPU_CLOCKS_LOW.threshold("capped_info") else None), deficit, evidence


def _low(gpu: GpuStats, index: int) -> _Judged:
    deficit = gpu.clock_deficit.value
    if deficit is None:
        return None, 0.0, None
    fraction, evidence = gpu.app_clock_samples / gpu.busy_samples, None
    if gpu.app_clock_samples:
        text = f"someone has set the clock of GPU {index}, as the driver reports in {percent(fraction)} of the samples"
        evidence = make_evidence(text, fraction, "devices.jsonl: gpus.throttle_reasons")
    return GPU_CLOCKS_LOW.severity(deficit), deficit, evidence


def gpu_shared(run: RunRecords, cause: Cause) -> Finding | None:
    fractions = [
        (gpu.other_processes.value, index) for index, gpu in run.gpus.items() if gpu.other_processes.value is not None
    ]
    if not fractions:
        return None
    fraction, index = max(fractions)
    text = f"another process was on GPU {index} in {percent(fraction)} of the samples"
    return make_finding(run, cause, fraction, [make_evidence(text, fraction, "devices.jsonl: gpus.other_processes")])


def idle_gpus(run: RunRecords, cause: Cause) -> Finding | None:
    """Idle GPUs are lost device time only if the ledger counts them."""
    utilization = {
        index: gpu.utilization.value
        for index, gpu in run.gpus.items()
        if gpu.utilization.value is not None and gpu.utilization.count >= cause.threshold("min_samples")
    }
    if len(utilization) < 2 or max(utilization.values()) < cause.threshold("min_busy_utilization"):
        return None
    idle = sorted(index for index, value in utilization.items() if value < cause.threshold("max_idle_utilization"))
    text = f"GPU {', '.join(map(str, idle))} did nothing, of {len(utilization)} GPUs"
    lost_s = len(idle) * run.totals.wall_s if run.totals.devices >= len(utilization) else None
    evidence = [make_evidence(text, len(idle), "devices.jsonl: gpus.utilization")]
    return make_finding(run, cause, len(idle), evidence, lost_s=lost_s)


def gpu_not_used(run: RunRecords, cause: Cause) -> Finding | None:
    means = [gpu.utilization for gpu in run.gpus.values() if gpu.utilization.value is not None]
    if not means or len(means) != len(run.gpus) or run.steady.steps == 0:
        return None
    utilization = max(mean.value or 0.0 for mean in means)
    if utilization >= cause.threshold("max_idle_utilization"):
        return None
    if min(mean.count for mean in means) < cause.threshold("min_samples"):
        return None
    device = run.settings.get("device")
    evidence = [
        sample_evidence("no GPU was used more than {} of the time", utilization, "gpus.utilization"),
        None if device is None else make_evidence(f"the run computes on {device}", source="config.toml: run.device"),
    ]
    basis = "the GPU was available all the time"
    return make_finding(run, cause, 1, evidence, lost_s=run.totals.device_s, estimate_basis=basis)


class Xid(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of NVIDIA's Xid errors, a row of `knowledge/xids.toml`. origin: where the error mostly comes from."""

    meaning: str
    origin: Literal["program", "machine", "either"]
    fix: str


@functools.cache
def _xids() -> dict[str, Xid]:
    return msgspec.convert(read_toml("xids.toml"), dict[str, Xid])


def find_xid(number: int) -> Xid:
    """What is known of the number; of one that is not in the file, where to look."""
    return _xids().get(str(number), _xids()["unknown"])


def gpu_errors(run: RunRecords, cause: Cause) -> Finding | None:
    xid_severity, xid_evidence = _judge_xids(run)
    ecc_severity, ecc_evidence = _judge_ecc(run)
    severity = worst([xid_severity, ecc_severity])
    if severity is None:
        return None
    command = None if xid_severity is not None else "nvidia-smi -q -d ECC,ROW_REMAPPER"
    return make_finding(run, cause, 1, [*xid_evidence, *ecc_evidence], severity=severity, command=command)


def _judge_xids(run: RunRecords) -> tuple[Severity | None, list[Evidence]]:
    counts = {(index, number): count for index, gpu in run.gpus.items() for number, count in gpu.xid_counts.items()}
    for event in run.gpu_faults:
        if "xid" in event.data:
            counts.setdefault((event.data.get("gpu", -1), event.data["xid"]), 1)
    if not counts:
        return None, []
    evidence, level = [], 1
    for (index, number), count in sorted(counts.items()):
        xid = find_xid(number)
        level = level if xid.origin == "program" else 2
        gpu_name = f"GPU {index}" if index >= 0 else "a GPU"
        origin = "" if xid.origin == "either" else f"; mostly an error of the {xid.origin}"
        text = f"Xid {number} on {gpu_name}, {count} times: {xid.meaning}{origin}. {xid.fix}"
        evidence.append(make_evidence(text, number, "devices.jsonl: gpus.xids"))
    return GPU_ERRORS.severity(level), evidence[:_MAX_XID_LINES]


def _judge_ecc(run: RunRecords) -> tuple[Severity | None, list[Evidence]]:
    cause, most, evidence = GPU_ERRORS, 0.0, []
    for index, gpu in run.gpus.items():
        corrected, uncorrected = (
            0 if pair is None else max(0, pair[1] - pair[0]) for pair in (gpu.ecc_corrected, gpu.ecc_uncorrected)
        )
        if corrected or uncorrected:
            text = f"GPU {index}: {corrected:,} memory errors were corrected, {uncorrected:,} were not, during the run"
            source = "devices.jsonl: gpus.ecc_corrected, ecc_uncorrected"
            evidence.append(make_evidence(text, corrected + uncorrected, source))
            most = max(most, corrected + uncorrected * cause.threshold("uncorrected"))
    severity = next((level for level in LEVELS if most >= cause.threshold(f"corrected_{level}")), None)
    return severity, evidence


def pcie_degraded(run: RunRecords, cause: Cause) -> Finding | None:
    deficits = [
        (gpu.link_deficit.value, index, gpu.link_description)
        for index, gpu in run.gpus.items()
        if gpu.link_deficit.value is not None and gpu.link_deficit.count >= cause.threshold("min_samples")
    ]
    if not deficits:
        return None
    deficit, index, link = max(deficits)
    text = f"the link of GPU {index} is {link} while it works"
    evidence = [make_evidence(text, deficit, "devices.jsonl: gpus.pcie_generation, pcie_width")]
    return make_finding(run, cause, deficit, evidence)


def tensor_cores_unused(run: RunRecords, cause: Cause) -> Finding | None:
    precision = run.settings.get("precision")
    told = make_evidence(f"precision {precision}", source="config.toml: run.precision")
    precision_evidence = None if precision is None else told
    active = [
        gpu.tensor_active.value
        for gpu in run.gpus.values()
        if gpu.tensor_active.value is not None
        and gpu.sm_active.value is not None
        and gpu.sm_active.value >= cause.threshold("sm_active")
    ]
    if active:
        text = f"the tensor cores worked {percent(max(active))} of the time"
        active_evidence = make_evidence(text, max(active), "devices.jsonl: gpus.tensor_active")
        return make_finding(run, cause, max(active), [active_evidence, precision_evidence])
    fraction = run.traces.tensor_core_fraction.value
    if fraction is None or precision in ("bf16", "fp16") or not run.gpus:
        return None
    text = f"{percent(fraction)} of the kernel time was in kernels that use the tensor cores"
    trace_evidence = make_evidence(text, fraction, "traces.jsonl: tensor_core_fraction")
    return make_finding(run, cause, fraction, [trace_evidence, precision_evidence], confidence=0.6)
