"""The device is idle inside steps: kernels are issued too late, or are too short for the host to keep up."""

from stoker.diagnosis.causes.cause import Cause, find_cause
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
from stoker.findings.finding import Evidence, Finding

_TRACE_ESTIMATE = "the fraction of the traced time without work, times the time in steps; tracing slows the host"

LAUNCH_BOUND = find_cause("launch_bound")

HOST_BOUND_STEPS = find_cause("host_bound_steps")


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
