"""The device is idle inside steps: kernels are issued too late, or are too short for the host to keep up."""

from stoker.diagnosis.causes.cause import Cause, Threshold
from stoker.diagnosis.causes.shared import (
    driver_utilization,
    fraction_of_phase,
    make_evidence,
    make_finding,
    percent,
    phase_evidence,
    sample_evidence,
)
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Evidence, Finding

_TRACE_ESTIMATE = "the fraction of the traced time without work, times the time in steps; tracing slows the host"

LAUNCH_BOUND = Cause(
    id="launch_bound",
    title="Kernels are too short for the host to keep up",
    reason="GPU under-utilized (host- or launch-bound)",
    symptom="thousands of kernels of a few microseconds, and gaps between them, all through the step",
    required_records=("traces.jsonl: busy_s, kernel_median_s, launches",),
    warning_threshold=0.20,
    critical_threshold=0.50,
    metric="fraction of a traced step without any work on the device, if the median kernel is short",
    source="heuristic, on the cost of a launch: 3 to 10 µs of the host (CUDA programming guide, CUDA graphs)",
    thresholds={"kernel_s": Threshold(10e-6, "median length of a kernel: as long as the host takes to launch it")},
    supersedes=("host_bound_steps",),
    probe="compiled",
    confidence=0.8,
    fix="Use fewer and larger kernels: --compile (torch.compile, CUDA graphs), a larger --batch-size, channels-last "
    "and bf16, fused optimizers",
    external_fix="Use fewer and larger kernels: torch.compile(mode='reduce-overhead') or CUDA graphs, a larger batch, "
    "channels-last and bf16, fused optimizers; in TensorFlow jit_compile=True",
    command="--compile",
    config_patch={"compile": True},
)

HOST_BOUND_STEPS = Cause(
    id="host_bound_steps",
    title="The device is idle inside steps",
    reason="GPU under-utilized (host- or launch-bound)",
    symptom="the ledger shows compute, the driver shows an idle GPU: kernels are too small or launched too late",
    required_records=(
        "steps.jsonl: phases",
        "devices.jsonl: gpus.utilization of exactly the devices that train, or traces.jsonl",
    ),
    warning_threshold=0.20,
    metric="fraction of traced steps without work on the device; without traces, compute in the ledger minus the "
    "driver's utilization",
    source="heuristic: the driver's sample period of 1/6 to 1 s (NVML manual, nvmlDeviceGetUtilizationRates) blurs "
    "less than this over a run",
    probe="double_batch",
    confidence=0.6,
    fix="Give each step more work: a larger --batch-size or --image-size, or --compile",
    external_fix="Give each step more work: a larger batch or larger images, torch.compile; in TensorFlow "
    "jit_compile=True",
    command="--compile",
    config_patch={"compile": True},
)


def launch_bound(run: RunRecords) -> Finding | None:
    traces, idle_fraction = run.traces, run.traces.idle_fraction
    kernel_s = traces.median_kernel_s.value
    if idle_fraction is None or kernel_s is None or kernel_s > LAUNCH_BOUND.threshold("kernel_s"):
        return None
    launches = traces.launches / max(1, traces.steps)
    text = f"the median kernel takes {1e6 * kernel_s:.1f} µs, and a step has {launches:,.0f}"
    kernel_evidence = make_evidence(text, kernel_s, "traces.jsonl: kernel_median_s")
    return _finding_from_traces(run, LAUNCH_BOUND, idle_fraction, kernel_evidence)


def host_bound_steps(run: RunRecords) -> Finding | None:
    """By traces if there are any, else by the driver's utilization."""
    if run.traces.idle_fraction is not None:
        return _finding_from_traces(run, HOST_BOUND_STEPS, run.traces.idle_fraction, None)
    utilization, compute_fraction = driver_utilization(run), fraction_of_phase(run, "compute")
    if utilization is None or compute_fraction is None:
        return None
    text = f"the driver saw kernels {100 * utilization:.0f} % of the time"
    driver_evidence = sample_evidence(text, utilization, "gpus.utilization")
    idle_fraction = compute_fraction - utilization
    return make_finding(
        run,
        HOST_BOUND_STEPS,
        idle_fraction,
        [phase_evidence(run, "compute"), driver_evidence, _host_bound_evidence(run)],
        lost_s=idle_fraction * run.steady.device_s,
        estimate_basis="the driver's utilization is a coarse sample",
    )


def _finding_from_traces(
    run: RunRecords, cause: Cause, idle_fraction: float, kernel_evidence: Evidence | None
) -> Finding | None:
    traces = run.traces
    text = f"no kernel and no copy ran in {percent(idle_fraction)} of {traces.steps} traced steps"
    if traces.longest_gap is not None:
        duration_s, host_op = traces.longest_gap
        text += f"; the longest gap was {1e3 * duration_s:.1f} ms, with the host in {host_op or 'Python'}"
    idle_evidence = make_evidence(text, idle_fraction, "traces.jsonl: busy_s, wall_s, gaps")
    return make_finding(
        run,
        cause,
        idle_fraction,
        [idle_evidence, kernel_evidence, _host_bound_evidence(run)],
        lost_s=idle_fraction * run.phase_seconds("compute"),
        estimate_basis=_TRACE_ESTIMATE,
    )


def _host_bound_evidence(run: RunRecords) -> Evidence | None:
    if not run.host_bound_checked_steps:
        return None
    fraction = run.host_bound_steps / run.host_bound_checked_steps
    text = f"in {percent(fraction)} of the steps the device had finished its work before the host issued the last of it"
    return make_evidence(text, fraction, "steps.jsonl: host_bound_steps")
