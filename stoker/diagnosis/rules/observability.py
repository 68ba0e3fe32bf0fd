"""Rules of "blindness": what nobody saw, and what two witnesses say differently."""

from stoker.diagnosis.catalogue import CATALOG
from stoker.diagnosis.rules.finding import (
    counter_evidence,
    format_percent,
    fraction_of_phase,
    is_long_enough,
    make_finding,
    phase_evidence,
)
from stoker.diagnosis.rules.parallel_work import driver_utilization
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Evidence, Finding

GPU_WORK_PHASES = ("compute", "eval", "comm", "straggler", "recovery", "checkpoint", "compile", "h2d", "sync")
"""Phases in which a GPU may be seen at work; NCCL waits in a kernel."""


def unattributed_time(run: RunRecords) -> Finding | None:
    """Of a watched job most time is unattributed as long as nothing looks inside: then it is said, and no more."""
    fraction = fraction_of_phase(run, "unattributed")
    cause = CATALOG["unattributed_time"]
    if fraction is None or (run.is_external and fraction < cause.threshold("watched")):
        return None
    measured = min(fraction, cause.info_threshold or 0.0) if run.is_external else fraction
    lost_s = None if run.is_external else run.phase_seconds("unattributed")
    return make_finding(run, cause.id, measured, [phase_evidence(run, "unattributed")], lost_s=lost_s)


def telemetry_mismatch(run: RunRecords) -> Finding | None:
    gpu_utilization = driver_utilization(run)
    if gpu_utilization is None or run.is_external or not is_long_enough(run):
        return None
    ledger_fraction = run.steady_phase_fraction(*GPU_WORK_PHASES)
    evidence = [
        counter_evidence("the driver saw kernels {} of the time", gpu_utilization, "gpus.utilisation"),
        Evidence(text=f"by the ledger the device worked {format_percent(ledger_fraction)} of it", value=ledger_fraction,
                 source="steps.jsonl: phases"),
    ]  # fmt: skip
    return make_finding(run, "telemetry_mismatch", gpu_utilization - ledger_fraction, evidence)


def gpu_not_used(run: RunRecords) -> Finding | None:
    cause = CATALOG["gpu_not_used"]
    means = [gpu.utilization for gpu in run.gpus.values() if gpu.utilization.value is not None]
    if not means or len(means) != len(run.gpus) or run.steady.steps == 0:
        return None
    max_utilization = max(mean.value or 0.0 for mean in means)
    if max_utilization >= cause.threshold("idle") or min(mean.count for mean in means) < cause.threshold("samples"):
        return None
    device = run.settings.get("device")
    evidence = [
        counter_evidence("no GPU was used more than {} of the time", max_utilization, "gpus.utilisation"),
        None if device is None else Evidence(text=f"the run computes on {device}", source="config.toml: run.device"),
    ]
    return make_finding(
        run, cause.id, 1, evidence, lost_s=run.totals.device_s, estimate_basis="the GPU was there all the time"
    )


def no_telemetry(run: RunRecords) -> Finding | None:
    wall_s = run.totals.wall_s
    device = run.settings.get("device")
    on_gpu = isinstance(device, str) and device.startswith("cuda")
    if run.num_samples and not (on_gpu and not run.gpus):
        return None
    missing_part = "has no GPU" if run.num_samples else "has no line"
    text = f"devices.jsonl {missing_part}, of a run of {wall_s:,.0f} s"
    return make_finding(run, "no_telemetry", wall_s, [Evidence(text=text, value=wall_s, source="devices.jsonl")])


def no_step_output(run: RunRecords) -> Finding | None:
    if not run.is_external or run.totals.steps:
        return None
    text = f"no step in {run.totals.wall_s:,.0f} s"
    evidence = [Evidence(text=text, value=run.totals.wall_s, source="steps.jsonl: steps")]
    return make_finding(run, "no_step_output", run.totals.wall_s, evidence)


RULES = (unattributed_time, telemetry_mismatch, gpu_not_used, no_telemetry, no_step_output)
