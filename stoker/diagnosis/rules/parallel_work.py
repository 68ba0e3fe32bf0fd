"""Rules of "too little parallel work": the device has pictures, and stands still or works at half its width."""

from stoker.diagnosis.catalogue import CATALOG
from stoker.diagnosis.rules.finding import (
    counter_evidence,
    cpu_demand,
    cpu_demand_ratio,
    format_percent,
    fraction_of_phase,
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


def python_bound(run: RunRecords) -> Finding | None:
    """The thread computes between steps: its stacks say so, or the process uses a core meanwhile. Where nobody can tell
    whether it computes or waits, `host` alone is believed half."""
    phases = _between_step_phases(run)
    fraction = fraction_of_phase(run, *phases)
    thread_is_idle = None if fraction is None else _is_thread_idle(run, fraction)
    from_stacks = _finding_from_stacks(run, "python_bound", "Python", "python")
    if thread_is_idle is None:
        phases = tuple(name for name in phases if name == "host")
    if not phases or thread_is_idle is True or (thread_is_idle is None and from_stacks is not None):
        return from_stacks
    extra_evidence = [_process_cpu_evidence(run), stack_evidence(run, "Python", "python")]
    from_phases = make_phase_finding(
        run, "python_bound", *phases, extra_evidence=extra_evidence, confidence=0.5 if thread_is_idle is None else None
    )
    return from_phases or from_stacks


def host_device_syncs(run: RunRecords) -> Finding | None:
    """The thread waits by name; between steps, while the process uses little of a core; or in steps of a job that
    computes on processors, while they use less than the steps take."""
    between_phases = _between_step_phases(run)
    fraction = fraction_of_phase(run, *between_phases)
    thread_is_idle = fraction is not None and _is_thread_idle(run, fraction) is True
    phases = (*(("sync",) if run.phase_seconds("sync") > 0 else ()), *(between_phases if thread_is_idle else ()))
    extra_evidence = [_process_cpu_evidence(run), stack_evidence(run, "a wait", "sync", "idle")]
    from_phases = (
        make_phase_finding(run, "host_device_syncs", *phases, extra_evidence=extra_evidence) if phases else None
    )
    return (
        from_phases
        or _idle_in_steps_finding(run)
        or _finding_from_stacks(run, "host_device_syncs", "a wait", "sync", "idle")
    )


def _idle_in_steps_finding(run: RunRecords) -> Finding | None:
    """By the thread's own processor time; else by a lower bound: all that the process used is taken for steps."""
    process_cpu, fraction, thread_utilization = (
        cpu_demand(run),
        fraction_of_phase(run, "compute"),
        thread_cpu_utilization(run, "compute"),
    )
    if run.is_native_run or not run.on_cpu or run.num_ranks > 1 or process_cpu is None or not fraction:
        return None
    idle_fraction = fraction - process_cpu
    if thread_utilization is not None:  # where cores are short, a thread's part of what was withheld is not known
        idle_fraction = (
            min(idle_fraction, fraction * (1 - thread_utilization))
            if cpu_demand_ratio(run) != 1
            else fraction * (1 - thread_utilization)
        )
    text = f"the process used {process_cpu:.2f} cores while {format_percent(fraction)} of the time was in steps"
    cpu_evidence = Evidence(text=text, value=process_cpu, source="devices.jsonl: process_cpu")
    if thread_utilization is not None:
        text = f"the training thread computed {format_percent(thread_utilization)} of its time in steps"
        cpu_evidence = Evidence(text=text, value=thread_utilization, source="steps.jsonl: cpu.compute")
    return make_finding(run, "host_device_syncs", idle_fraction, [cpu_evidence, phase_evidence(run, "compute"), stack_evidence(run, "a wait", "sync", "idle")],
                 lost_s=idle_fraction * run.steady.device_s,
                 estimate_basis="the time in steps in which no processor worked")  # fmt: skip


def launch_bound(run: RunRecords) -> Finding | None:
    traces, cause = run.traces, CATALOG["launch_bound"]
    kernel_s = traces.median_kernel_s.value
    if traces.idle_fraction is None or kernel_s is None or kernel_s > cause.threshold("kernel_s"):
        return None
    text = (
        f"the median kernel takes {1e6 * kernel_s:.1f} µs, and a step has {traces.launches / max(1, traces.steps):,.0f}"
    )
    evidence = [
        _idle_evidence(run),
        Evidence(text=text, value=kernel_s, source="traces.jsonl: kernel_median_s"),
        _host_bound_evidence(run),
    ]
    return make_finding(
        run,
        cause.id,
        traces.idle_fraction,
        evidence,
        lost_s=_idle_device_s(run, traces.idle_fraction),
        estimate_basis=_TRACE_ESTIMATE,
    )


def host_bound_steps(run: RunRecords) -> Finding | None:
    """By traces where there are some, else by the second witness."""
    traced_idle_fraction = run.traces.idle_fraction
    if traced_idle_fraction is not None:
        return make_finding(run, "host_bound_steps", traced_idle_fraction, [_idle_evidence(run), _host_bound_evidence(run)], lost_s=_idle_device_s(run, traced_idle_fraction),
                     estimate_basis=_TRACE_ESTIMATE)  # fmt: skip
    gpu_utilization = driver_utilization(run)
    compute_fraction = fraction_of_phase(run, "compute")
    if gpu_utilization is None or compute_fraction is None:
        return None
    driver_evidence = counter_evidence(
        f"the driver saw kernels {100 * gpu_utilization:.0f} % of the time", gpu_utilization, "gpus"
    )
    idle_fraction = compute_fraction - gpu_utilization
    return make_finding(run, "host_bound_steps", idle_fraction, [phase_evidence(run, "compute"), driver_evidence, _host_bound_evidence(run)],
                 lost_s=idle_fraction * run.steady.device_s,
                 estimate_basis="the driver's utilisation is a sample, and coarse")  # fmt: skip


def batch_too_small(run: RunRecords) -> Finding | None:
    cause = CATALOG["batch_too_small"]
    steady = run.steady
    probe = run.probes.get("twice_the_batch")
    if probe is not None and probe.ratio > 1:
        saved_fraction = 1 - 1 / probe.ratio
        return make_finding(run, cause.id, saved_fraction, [_batch_size_evidence(run), _step_rate_evidence(run)], lost_s=saved_fraction * run.phase_seconds("compute"),
                     estimate_basis="what twice the batch saved while it was tried", confidence=0.8)  # fmt: skip
    if not is_long_enough(run) or not steady.steps_with_image_count:
        return None
    if steady.num_images / steady.steps_with_image_count > cause.threshold("batch_size") or "batch_size" in run.auto_settings:
        return None
    memory_fraction = run.host.max_memory_fraction
    fractions = [
        gpu.max_memory_used_bytes / gpu.memory_total_bytes
        for gpu in run.gpus.values()
        if gpu.max_memory_used_bytes and gpu.memory_total_bytes
    ]
    memory_fraction = max(fractions) if fractions and not run.on_cpu else memory_fraction
    worked_fraction = fraction_of_phase(run, "compute", "host", "unattributed")
    if (
        (memory_fraction is not None and memory_fraction > cause.threshold("memory"))
        or not worked_fraction
        or not steady.steps
    ):
        return None
    step_s = worked_fraction * steady.device_s / steady.steps / run.num_devices
    overhead_fraction = min(1.0, cause.threshold("overhead_s") / step_s) if step_s > 0 else None
    return make_finding(run, cause.id, overhead_fraction, [_batch_size_evidence(run), _step_rate_evidence(run)])


def low_sm_activity(run: RunRecords) -> Finding | None:
    means = [gpu.sm_active.value for gpu in run.gpus.values() if gpu.sm_active.value is not None]
    if not means:
        return None
    max_sm_active = max(means)
    sm_evidence = counter_evidence(
        "at most {} of the multiprocessors had work while the GPU was busy", max_sm_active, "gpus.sm_active"
    )
    return make_finding(run, "low_sm_activity", 1 - max_sm_active, [sm_evidence])


def recompiles(run: RunRecords) -> Finding | None:
    compile_s = run.steady.phases.get("compile", 0.0)
    if compile_s > 0 and is_long_enough(run):
        return make_finding(
            run, "recompiles", run.steady_phase_fraction("compile"), [phase_evidence(run, "compile")], lost_s=compile_s
        )
    return _finding_from_stacks(run, "recompiles", "compiling", "compile")


RULES = (
    python_bound, host_device_syncs, launch_bound, host_bound_steps, batch_too_small, low_sm_activity, recompiles,
)  # fmt: skip

_TRACE_ESTIMATE = "the share of the traced time without work, times the time in steps; tracing slows the host"


def driver_utilization(run: RunRecords) -> float | None:
    """Mean over the GPUs, where they are just the devices that train."""
    means = [gpu.utilization.value for gpu in run.gpus.values() if gpu.utilization.value is not None]
    if not means or len(means) != len(run.gpus) or len(means) != run.totals.devices:
        return None
    return sum(means) / len(means)


def _finding_from_stacks(run: RunRecords, cause_id: str, description: str, *kinds: str) -> Finding | None:
    """Of a job whose loop nobody times. No device stood still for longer than its driver says."""
    fraction = stack_fraction(run, cause_id, *kinds)
    if fraction is None or not is_long_enough(run):
        return None
    gpu_utilization = [gpu.utilization.value for gpu in run.gpus.values() if gpu.utilization.value is not None]
    fraction = min(fraction, 1 - max(gpu_utilization, default=0.0))
    evidence = [stack_evidence(run, description, *kinds), _process_cpu_evidence(run)]
    return make_finding(run, cause_id, fraction, evidence, lost_s=sampled_device_s(run, fraction),
                 estimate_basis="the share of the main thread's stacks")  # fmt: skip


def _between_step_phases(run: RunRecords) -> tuple[str, ...]:
    """Phases in which the training thread is between steps, in its loop's own code; of a loop in `stoker.measure` what
    nothing brackets is such."""
    names = ("host",) if run.is_native_run or run.is_external else ("host", "unattributed")
    return tuple(name for name in names if run.phase_seconds(name) > 0)


def _is_thread_idle(run: RunRecords, fraction: float) -> bool | None:
    """Whether the thread used little of a core between steps: that was measured, or the process used little, if it used
    one in the rest of the time."""
    thread_utilization = thread_cpu_utilization(run, *_between_step_phases(run))
    if thread_utilization is not None:
        return thread_utilization < CATALOG["host_device_syncs"].threshold("busy")
    process_cpu = cpu_demand(run)
    if process_cpu is None or fraction <= 0:
        return None
    return max(0.0, process_cpu - (1 - fraction)) / fraction < CATALOG["host_device_syncs"].threshold("busy")


def _process_cpu_evidence(run: RunRecords) -> Evidence | None:
    process_cpu = run.host.process_cpu.value
    return (
        None
        if process_cpu is None
        else counter_evidence(f"the process used {process_cpu:.2f} cores", process_cpu, "process_cpu")
    )


def _idle_device_s(run: RunRecords, idle_fraction: float) -> float:
    return idle_fraction * run.phase_seconds("compute")


def _idle_evidence(run: RunRecords) -> Evidence | None:
    idle_fraction, traces = run.traces.idle_fraction, run.traces
    if idle_fraction is None:
        return None
    text = f"no kernel and no copy ran in {format_percent(idle_fraction)} of {traces.steps} traced steps"
    if traces.longest_gap is not None:
        duration_s, host_op = traces.longest_gap
        text += f"; the longest gap was {1e3 * duration_s:.1f} ms, with the host in {host_op or 'Python'}"
    return Evidence(text=text, value=idle_fraction, source="traces.jsonl: busy_s, wall_s, gaps")


def _host_bound_evidence(run: RunRecords) -> Evidence | None:
    if not run.host_bound_checked_steps:
        return None
    fraction = run.host_bound_steps / run.host_bound_checked_steps
    text = f"the device had finished {format_percent(fraction)} of the steps when the last of their work was only just issued"
    return Evidence(text=text, value=fraction, source="steps.jsonl: starved")


def _batch_size_evidence(run: RunRecords) -> Evidence | None:
    steady = run.steady
    if not steady.steps_with_image_count:
        return None
    batch_size = steady.num_images / steady.steps_with_image_count
    return Evidence(text=f"{batch_size:g} pictures a step", value=batch_size, source="steps.jsonl: pictures, steps")


def _step_rate_evidence(run: RunRecords) -> Evidence | None:
    steady = run.steady
    if not steady.steps or steady.wall_s <= 0:
        return None
    steps_per_s = steady.steps / steady.wall_s
    return Evidence(text=f"{steps_per_s:,.1f} steps a second", value=steps_per_s, source="steps.jsonl: steps, wall_s")
