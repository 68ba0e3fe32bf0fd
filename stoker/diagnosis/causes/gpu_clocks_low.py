"""The GPU runs below its clock: because of heat, of its power limit, or because someone set the clock."""

from stoker.diagnosis.causes.cause import SEVERITIES, Severity, find_cause
from stoker.diagnosis.causes.shared import make_evidence, make_finding, percent
from stoker.diagnosis.run_data import GpuStats, RunRecords
from stoker.runs.schemas import Evidence, Finding

_HEAT_FIX = "Check the cooling: fans, dust, the neighboring slot; in a cloud use another machine, and report this one"
_POWER_FIX = (
    "`nvidia-smi -pl` up to the board's own limit, if you may; a better power supply; else this is the GPU's speed"
)
_SET_CLOCK_FIX = "`nvidia-smi -rgc` and `nvidia-smi -rac` remove clocks that someone set"
_BY_REASON = (
    (0.9, _HEAT_FIX, "nvidia-smi -q -d TEMPERATURE"),
    (0.8, _POWER_FIX, "nvidia-smi -q -d POWER"),
    (0.7, _SET_CLOCK_FIX, "nvidia-smi -rgc"),
)
"""Confidence, fix, command: of heat, of the power limit, of a set clock."""

GPU_CLOCKS_LOW = find_cause("gpu_clocks_low")


def gpu_clocks_low(run: RunRecords) -> Finding | None:
    """The GPU with the highest severity; at the same severity heat comes before power, and power before a set clock."""
    candidates = []
    for index, gpu in run.gpus.items():
        if gpu.busy_samples < GPU_CLOCKS_LOW.threshold("min_samples"):
            continue
        for order, (severity, value, evidence) in enumerate((_hot(gpu, index), _capped(gpu, index), _low(gpu, index))):
            if severity is not None:
                candidates.append((SEVERITIES.index(severity), order, -value, index, evidence))
    if not candidates:
        return None
    severity_index, order, negative_value, index, evidence = min(candidates, key=lambda candidate: candidate[:4])
    deficit = run.gpus[index].clock_deficit.value
    compute_s = run.phase_seconds("compute")
    confidence, fix, command = _BY_REASON[order]
    return make_finding(
        run,
        GPU_CLOCKS_LOW,
        -negative_value,
        [evidence, _clock_evidence(run.gpus[index], index)],
        severity=SEVERITIES[severity_index],
        lost_s=deficit * compute_s if deficit is not None and compute_s else None,
        estimate_basis="the missing fraction of the clock, of the time in which the device computed",
        confidence=confidence,
        fix=fix,
        command=command,
    )


_Judged = tuple[Severity | None, float, Evidence | None]


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


def _clock_evidence(gpu: GpuStats, index: int) -> Evidence | None:
    deficit = gpu.clock_deficit.value
    if deficit is None:
        return None
    text = f"the clock of GPU {index} was at {percent(1 - deficit)} of its maximum under load"
    return make_evidence(text, 1 - deficit, "devices.jsonl: gpus.sm_clock_mhz, sm_clock_max_mhz")
