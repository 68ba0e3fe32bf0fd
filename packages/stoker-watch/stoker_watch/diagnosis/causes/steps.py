"""The device is idle in or between steps: the host issues work too late or waits, the batch is too small, or devices
wait for each other: for one slow rank, or in collectives that computing does not hide."""

import collections
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from stoker_watch.diagnosis.causes import host
from stoker_watch.diagnosis.causes.cause import Cause, common_threshold, find_cause, worst
from stoker_watch.diagnosis.causes.shared import (
    binomial_tail,
    driver_utilization,
    fraction_of_phase,
    has_enough_stacks,
    is_long_enough,
    make_evidence,
    make_finding,
    make_phase_finding,
    make_stack_finding,
    make_traced_finding,
    max_gpu_memory_fraction,
    percent,
    phase_evidence,
    process_cpu_evidence,
    samples_contradict,
    stack_evidence,
)
from stoker_watch.diagnosis.places import costly
from stoker_watch.diagnosis.places.totals import find_places, merge_by, merge_places
from stoker_watch.diagnosis.run_data import PlaceTotal, RunRecords
from stoker_watch.findings.finding import Evidence, Finding, Severity
from stoker_watch.runs.schemas import AFTER_STEP, LOOP_IN_STEP, WITHOUT_GRADIENTS

_WAIT_KINDS = ("sync", "idle", "comm", "input_wait", "other", "checkpoint", "python", "gc")
"""Kinds of stacks in which the training thread can wait without a core: all but computing, decoding, compiling."""

PYTHON_BOUND = find_cause("python_bound")
HEAVY_PLACE = find_cause("heavy_place")
HOST_DEVICE_SYNCS = find_cause("host_device_syncs")
STRAGGLER = find_cause("straggler")
_TRACE_ESTIMATE = "the fraction of the traced time without work, times the time in steps; tracing slows the host"
_OWN_KINDS = ("input_wait", "decode", "checkpoint", "gc", "python", "idle", "other", AFTER_STEP, WITHOUT_GRADIENTS)
"""Kinds of stacks in which a rank works on what is only its own."""
_BETWEEN_STEPS = ("python", "gc", "decode", AFTER_STEP)
"""Kinds of places of the training thread between steps, in which it does not wait."""
_IN_STEPS = ("compute", "compile")
_OTHER_CAUSES = ("compile", "checkpoint", WITHOUT_GRADIENTS)
"""Kinds of places that `recompiles`, `checkpoint_heavy` and `evaluation_heavy` name."""
_PYTHON = ("python", "gc")
"""Kinds of samples in which a thread computes in Python."""


def python_bound(run: RunRecords, cause: Cause) -> Finding | None:
    """The thread computes between steps: by its stack samples, or the process uses a core meanwhile. If nothing tells
    computing from waiting, only `host` counts, with a low confidence. What a library does between the steps in its own
    loop, as metrics and handlers of ignite do, is info while it is small."""
    lines = [place for place in _heavy_training_places(run) if place.call or costly.is_callees(place)]
    if any(place.seconds >= run.stacks.main_thread.get("python", 0.0) / 2 for place in lines):
        return None  # one line is most of it: `heavy_place`
    phases = _between_step_phases(run)
    fraction = fraction_of_phase(run, *phases)
    thread_is_idle = None if fraction is None else _is_thread_idle(run, fraction)
    largest = _largest_place(run)
    caller = None if largest is None else costly.find_caller(run, largest)
    place_s = 0.0 if largest is None else (caller or largest).seconds * max(1, run.num_ranks)
    from_stacks = _finding_from_stacks(
        run, cause, "Python", *_PYTHON, places=_places_between_steps(run), place_s=place_s
    )
    from_stacks = None if _is_in_evaluations(run, fraction) else _name_place(from_stacks, largest, caller, place_s)
    if fraction is not None and _is_loop_overhead(run, phases):
        in_steps = run.stacks.fraction(*_PYTHON) - fraction
        return from_stacks if cause.severity(in_steps) is not None and _computes_in_places(run) else None
    if fraction is not None and not _recurs(run, phases):
        return from_stacks
    if thread_is_idle is None:
        phases = tuple(name for name in phases if name == "host")
        duration_s = sum(run.steady.phases.get(name, 0.0) for name in phases)
        thread_cpu_s = sum(run.steady.thread_cpu_s.get(name, 0.0) for name in phases)
        if run.steady.thread_cpu_s and thread_cpu_s < cause.threshold("busy") * duration_s:
            return from_stacks  # it waited, or got no core
    if not phases or thread_is_idle is True or (thread_is_idle is None and from_stacks is not None):
        return from_stacks
    places: Sequence[Evidence | None] = _places_between_steps(run) or [stack_evidence(run, "Python", *_PYTHON)]
    evidence = [process_cpu_evidence(run), *places]
    confidence = 0.5 if thread_is_idle is None else None
    in_library = run.is_external and has_enough_stacks(run) and not _computes_in_places(run)
    is_small = fraction is not None and fraction < (cause.critical_threshold or 1.0)
    from_phases = make_phase_finding(
        run, cause, *phases, extra_evidence=evidence, confidence=confidence,
        severity="info" if in_library and is_small and cause.severity(fraction or 0.0) is not None else None,
    )  # fmt: skip
    return _name_place(from_phases, largest, caller, place_s) or from_stacks


def _is_in_evaluations(run: RunRecords, between_steps: float | None) -> bool:
    """Whether the clock saw little time between steps, and Python in no more samples than evaluations explain:
    `evaluation_heavy`. between_steps: fraction of the time, by the clock."""
    minimum = PYTHON_BOUND.warning_threshold or 0.0
    evaluating = fraction_of_phase(run, "eval") if run.phase_seconds("eval") > 0 else None
    if between_steps is None or evaluating is None or between_steps >= minimum:
        return False
    return run.stacks.fraction(*_PYTHON) - evaluating < minimum


def _heavy_training_places(run: RunRecords) -> list[PlaceTotal]:
    found = costly.heavy_places(run, HEAVY_PLACE.warning_threshold or 0.0)
    return [place for place in found if place.role == "training"]


def _largest_place(run: RunRecords) -> PlaceTotal | None:
    """The largest of the training thread without a cause of its own; None if it is a wait for input."""
    places = (*_heavy_training_places(run), *costly.list_places(run))
    first = next((place for place in places if place.role == "training" and place.kind not in _OTHER_CAUSES), None)
    return None if first is None or first.kind == "input_wait" else first


def _name_place(
    finding: Finding | None, place: PlaceTotal | None, caller: PlaceTotal | None, place_s: float
) -> Finding | None:
    """The finding of time between steps with the place in its title and with its seconds, if that takes most of it: the
    rest is what any framework's loop costs. caller: of `find_caller`; place_s: seconds of that, else of the place, as
    if all ranks were there."""
    if finding is None or place is None or 2 * place_s < (finding.lost_device_s or 0.0):
        return finding
    title = f"{finding.title}: {costly.name_cost(place, caller)}"
    lost_s = finding.lost_device_s or 0.0
    whole = caller or place
    if place_s < lost_s or place_s * whole.low_s / whole.seconds > lost_s:  # some of it is in steps, by the clock
        cost = None if finding.lost_cost is None else finding.lost_cost * place_s / (lost_s or 1.0)
        finding = msgspec.structs.replace(finding, lost_device_s=place_s, lost_cost=cost)
    return msgspec.structs.replace(finding, title=title, place=place.line)


def _places_between_steps(run: RunRecords) -> list[Evidence]:
    """The largest places of the training thread outside of steps and imports, or in a Python loop around a model, and
    of other threads, which hold the interpreter's lock meanwhile."""
    places = [place for place in costly.list_places(run)
              if (place.role == "thread" or (place.role == "training" and place.kind in _BETWEEN_STEPS))
              and not re.search(costly.IMPORT, place.call)]  # fmt: skip
    places = sorted([*places, *costly.list_loops(run)], key=lambda place: -place.seconds)
    return [_place_evidence(place) for place in places[: int(PYTHON_BOUND.threshold("max_places"))]]


def _place_evidence(place: PlaceTotal) -> Evidence:
    where = ", in a Python loop inside of steps" if place.kind == LOOP_IN_STEP else ""
    where = ", in another thread, which holds the interpreter's lock meanwhile" if place.role == "thread" else where
    text = f"{place.seconds:,.1f} s in {costly.describe_place(place)}{where}"
    return make_evidence(text, place.seconds, "stacks.jsonl: places")


def _computes_in_places(run: RunRecords) -> bool:
    """Whether lines of the job's own code take enough of it: a framework's loop has Python of its own in each step."""
    total = merge_places(
        place for place in costly.list_places(run) if place.role == "training" and place.kind in _PYTHON
    )
    minimum = PYTHON_BOUND.warning_threshold or 0.0
    return total is not None and total.low_s >= minimum * run.observed_s(total)


def _recurs(run: RunRecords, phases: tuple[str, ...]) -> bool:
    """Whether time between steps is more than a single event."""
    steady = run.steady
    rest_s = sum(steady.phases.get(name, 0.0) - steady.longest_phases.get(name, 0.0) for name in phases)
    return rest_s >= PYTHON_BOUND.threshold("min_rest") * steady.device_s


def _is_loop_overhead(run: RunRecords, phases: tuple[str, ...]) -> bool:
    """Whether the training thread computes so little between two steps that it is what any framework's loop costs."""
    if not run.is_external or not run.steady.thread_cpu_s or not run.steady.steps:
        return False
    cpu_s = sum(run.steady.thread_cpu_s.get(name, 0.0) for name in phases)
    return cpu_s / run.steady.steps < PYTHON_BOUND.threshold("min_step_cpu_s")


def host_device_syncs(run: RunRecords, cause: Cause) -> Finding | None:
    """The phase `sync`; the time between steps while the process uses little of a core; or, in a job that trains on the
    CPU, the time in steps in which it computes less than that. Nothing there waits for a device, so the lines count."""
    finding = _find_host_device_syncs(run)
    if finding is None or not run.is_external or not run.on_cpu:
        return finding
    others = (*_IN_STEPS, "input_wait", "decode")  # waits for input are findings of their own
    outside = [place for place in costly.list_places(run) if place.role == "training" and place.kind not in others]
    places = [place for place in outside if not re.search(costly.IMPORT, place.call)]
    lines = [_place_evidence(place) for place in places[: int(PYTHON_BOUND.threshold("max_places"))]]
    return msgspec.structs.replace(finding, evidence=[*finding.evidence, *lines], fix=cause.other_fixes["cpu"])


def _find_host_device_syncs(run: RunRecords) -> Finding | None:
    cause = HOST_DEVICE_SYNCS
    phases = ("sync",) if run.phase_seconds("sync") > 0 else ()
    between_phases = _between_step_phases(run)
    fraction = fraction_of_phase(run, *between_phases)
    if fraction is not None and _is_thread_idle(run, fraction) is True and not _computes_elsewhere(run):
        phases = (*phases, *between_phases)
    evidence = [process_cpu_evidence(run), stack_evidence(run, "a wait", "sync", "idle")]
    from_phases = make_phase_finding(run, cause, *phases, extra_evidence=evidence) if phases else None
    found = from_phases or _idle_in_steps_finding(run)
    is_unknown = run.is_external and run.on_cpu and host.cpu_demand(run) is None
    if found is None and not is_unknown and not _computes_elsewhere(run):
        utilization = host.thread_cpu_utilization(run, *run.steady.phases)
        kinds = tuple(kind for kind in ("sync", "idle") if kind not in _waits_for_own_threads(run))
        if kinds:
            max_fraction = 1.0 if utilization is None else 1 - min(1.0, utilization)
            found = _finding_from_stacks(run, cause, "a wait", *kinds, max_fraction=max_fraction)
    heavy = next((place for place in _heavy_training_places(run) if place.kind != "input_wait"), None)
    if heavy is not None and found is not None and 2 * heavy.seconds >= (found.lost_device_s or 0.0):
        return None  # one place is most of it: `heavy_place`
    return found


def _waits_for_own_threads(run: RunRecords) -> tuple[str, ...]:
    """Kinds of samples in which the training thread waits for other threads of its process, which compute, as JAX's
    does on a CPU: its waits for the device are the computing, and so are compiled functions where they explain both."""
    process_cpu, ratio = run.host.process_cpu.value, host.cpu_demand_ratio(run)
    if not run.on_cpu or process_cpu is None or ratio is None:
        return ()
    waiting = run.stacks.fraction("sync", "idle")
    others_cpu = ratio * process_cpu / run.num_ranks - (1 - waiting)
    if waiting <= HOST_DEVICE_SYNCS.threshold("handed_over") and "jax" not in run.frameworks:
        return ()  # JAX issues all work to other threads, and waits for some of it
    explained = HOST_DEVICE_SYNCS.threshold("explained")
    sleeps = find_places(run, kind="idle", call="sleep") is not None
    if not sleeps and others_cpu >= 2 * explained * waiting:
        return "sync", "idle"
    return ("sync",) if others_cpu >= explained * run.stacks.fraction("sync") else ()


def _computes_elsewhere(run: RunRecords) -> bool:
    """Whether the training thread leaves the work to other threads of the process, as TensorFlow's does on a CPU: it
    waits most of the time, and they use as much CPU time as would explain it. None of it is lost then."""
    process_cpu, ratio = run.steady.process_cpu.value, host.cpu_demand_ratio(run)
    if process_cpu is None and run.host.process_cpu.value is not None:
        process_cpu = run.host.process_cpu.value / run.num_ranks
    thread_cpu_s = sum(run.steady.thread_cpu_s.values())
    if process_cpu is None or ratio is None or not run.on_cpu or not run.steady.thread_cpu_s or run.steady.wall_s <= 0:
        return False
    thread_cpu = thread_cpu_s / run.steady.wall_s
    others_cpu = ratio * max(0.0, process_cpu - thread_cpu)
    idle_fraction = 1 - min(1.0, ratio * thread_cpu)
    return (
        idle_fraction > HOST_DEVICE_SYNCS.threshold("handed_over")
        and others_cpu >= HOST_DEVICE_SYNCS.threshold("explained") * idle_fraction
    )


def _idle_in_steps_finding(run: RunRecords) -> Finding | None:
    """By the thread's own CPU time; else by a lower bound: all CPU time of the process is counted as time in steps."""
    process_cpu, fraction = host.cpu_demand(run), fraction_of_phase(run, "compute")
    if run.is_native_run or not run.on_cpu or run.num_ranks > 1 or process_cpu is None or not fraction:
        return None
    idle_fraction = fraction - process_cpu
    text = f"the process used {process_cpu:.2f} cores while {percent(fraction)} of the time was in steps"
    cpu_evidence = make_evidence(text, process_cpu, "devices.jsonl: process_cpu")
    utilization = host.thread_cpu_utilization(run, "compute")
    if utilization is not None:
        thread_idle_fraction = fraction * (1 - utilization)
        # While cores are scarce, it is not known how much of the withheld CPU time was the thread's.
        is_scarce = host.cpu_demand_ratio(run) != 1
        is_shared = is_scarce or _computes_elsewhere(run)
        idle_fraction = min(idle_fraction, thread_idle_fraction) if is_shared else thread_idle_fraction
        text = f"the training thread computed {percent(utilization)} of its time in steps"
        cpu_evidence = make_evidence(text, utilization, "steps.jsonl: thread_cpu_s.compute")
    if samples_contradict(run, idle_fraction, *_WAIT_KINDS):
        return None
    evidence = [cpu_evidence, phase_evidence(run, "compute"), stack_evidence(run, "a wait", "sync", "idle")]
    lost_s, basis = idle_fraction * run.steady_device_s, "the time in steps in which no core worked"
    return make_finding(run, HOST_DEVICE_SYNCS, idle_fraction, evidence, lost_s=lost_s, estimate_basis=basis)


def _finding_from_stacks(
    run: RunRecords,
    cause: Cause,
    description: str,
    *kinds: str,
    max_fraction: float = 1.0,
    places: Iterable[Evidence] = (),
    place_s: float = 0.0,
) -> Finding | None:
    """A device was not idle for longer than its driver reports."""
    utilizations = [gpu.utilization.value for gpu in run.gpus.values() if gpu.utilization.value is not None]
    max_fraction = min(max_fraction, 1 - max(utilizations, default=0.0))
    evidence = [process_cpu_evidence(run), *places]
    return make_stack_finding(
        run, cause, description, *kinds, extra_evidence=evidence, max_fraction=max_fraction, place_s=place_s
    )


def _between_step_phases(run: RunRecords) -> tuple[str, ...]:
    """Phases in which the training thread is between steps, in its loop's own code. In a loop inside `measure`,
    unattributed time is such time."""
    names = ("host",) if run.is_native_run or run.is_external else ("host", "unattributed")
    return tuple(name for name in names if run.phase_seconds(name) > 0)


def _is_thread_idle(run: RunRecords, fraction: float) -> bool | None:
    """Whether the thread used little of a core between steps: measured, or deduced from the process' CPU time, if the
    thread used a core in the rest of the time."""
    utilization = host.thread_cpu_utilization(run, *_between_step_phases(run))
    if utilization is not None:
        return utilization < PYTHON_BOUND.threshold("busy")
    process_cpu = host.cpu_demand(run)
    if process_cpu is None or fraction <= 0:
        return None
    return max(0.0, process_cpu - (1 - fraction)) / fraction < PYTHON_BOUND.threshold("busy")


def recompiles(run: RunRecords, cause: Cause) -> Finding | None:
    """By the count of repeated compilations; without it, by windows or stack samples with any compilation."""
    steady, min_windows = run.steady, cause.threshold("min_windows")
    most_steps = max(cause.threshold("min_recompiles"), cause.threshold("per_step") * steady.steps)
    in_each_step = steady.steps > 0 and steady.recompiles >= most_steps
    if steady.recompile_windows is not None and not in_each_step:
        is_burst = steady.recompile_lines < cause.threshold("min_lines")
        is_small = is_burst and run.steady_phase_fraction("compile") < cause.threshold("burst")
        if steady.recompile_windows < min_windows or is_small:
            return None
    compile_s = steady.phases.get("compile", 0.0)
    if compile_s > 0 and not in_each_step and _late_compile_fraction(run) < cause.threshold("late"):
        return None  # all was compiled by then
    if compile_s > 0 and (in_each_step or is_long_enough(run)):
        if steady.compile_windows < min_windows and not in_each_step:
            return None
        fraction, function = run.steady_phase_fraction("compile"), run.facts.get("recompiled")
        text = f"{function} was compiled again most often"
        named = make_evidence(text, None, "events.jsonl: data.facts.recompiled") if function else None
        grown = host.describe_growth(run)
        kept = make_evidence(f"memory grows meanwhile, as each compiled graph is kept: {grown[0]}") if grown else None
        evidence = [phase_evidence(run, "compile"), named, stack_evidence(run, "compiling", "compile"), kept]
        return make_finding(run, cause, fraction, evidence, lost_s=run.num_ranks * max(compile_s, run.recompiled_s))
    if run.stacks.compile_windows < cause.threshold("min_stack_windows"):
        return None
    if run.stacks.fraction("compile") < cause.threshold("min_stack_fraction"):
        return None
    place = find_places(run, kind="^compile$")
    places = [] if place is None else [make_evidence(f"most of it in {costly.describe_place(place)}", place.seconds)]
    place_s = 0.0 if place is None else place.seconds
    return _finding_from_stacks(run, cause, "compiling", "compile", places=places, place_s=place_s)


def _late_compile_fraction(run: RunRecords) -> float:
    """Fraction of the later half of the time after the start that compilations took."""
    points = run.steady.compile_s.points
    end_s, compiled_s = points[-1]
    half_s, before_s = max((point for point in points if point[0] <= end_s / 2), default=(0.0, 0.0))
    return (compiled_s - before_s) / max(end_s - half_s, 1e-9)


def launch_bound(run: RunRecords, cause: Cause) -> Finding | None:
    traces, idle_fraction = run.traces, run.traces.idle_fraction
    kernel_s = traces.median_kernel_s.value
    if idle_fraction is None or kernel_s is None or kernel_s > cause.threshold("kernel_s"):
        return None
    launches = traces.launches / max(1, traces.steps)
    text = f"the median kernel takes {1e6 * kernel_s:.1f} µs, and a step has {launches:,.0f}"
    kernel_evidence = make_evidence(text, kernel_s, "traces.jsonl: kernel_median_s")
    return _finding_from_traces(run, cause, idle_fraction, kernel_evidence)


def host_bound_steps(run: RunRecords, cause: Cause) -> Finding | None:
    """By traces if there are any, else by the driver's utilization."""
    if run.traces.idle_fraction is not None:
        return _finding_from_traces(run, cause, run.traces.idle_fraction, None)
    utilization, compute_fraction = driver_utilization(run), fraction_of_phase(run, "compute")
    if utilization is None or compute_fraction is None:
        return None
    text = f"the driver saw kernels {100 * utilization:.0f} % of the time"
    idle_fraction = compute_fraction - utilization
    driver_evidence = make_evidence(text, idle_fraction, "devices.jsonl: gpus.utilization")
    evidence = [driver_evidence, phase_evidence(run, "compute"), _host_bound_evidence(run)]
    lost_s, basis = idle_fraction * run.steady_device_s, "the driver's utilization is a coarse sample"
    return make_finding(run, cause, idle_fraction, evidence, lost_s=lost_s, estimate_basis=basis)


def _finding_from_traces(
    run: RunRecords, cause: Cause, idle_fraction: float, kernel_evidence: Evidence | None
) -> Finding | None:
    traces = run.traces
    text = f"no kernel and no copy ran in {percent(idle_fraction)} of {traces.steps} traced steps"
    if traces.longest_gap is not None:
        duration_s, host_op = traces.longest_gap
        text += f"; the longest gap was {1e3 * duration_s:.1f} ms, with the host in {host_op or 'Python'}"
    idle_evidence = make_evidence(text, idle_fraction, "traces.jsonl: busy_s, wall_s, gaps")
    evidence = [idle_evidence, kernel_evidence, _host_bound_evidence(run)]
    lost_s = idle_fraction * run.phase_seconds("compute")
    return make_finding(run, cause, idle_fraction, evidence, lost_s=lost_s, estimate_basis=_TRACE_ESTIMATE)


def _host_bound_evidence(run: RunRecords) -> Evidence | None:
    if not run.host_bound_checked_steps:
        return None
    fraction = run.host_bound_steps / run.host_bound_checked_steps
    text = f"in {percent(fraction)} of the steps the device had finished its work before the host issued the last of it"
    return make_evidence(text, fraction, "steps.jsonl: host_bound_steps")


def batch_too_small(run: RunRecords, cause: Cause) -> Finding | None:
    steady = run.steady
    evidence = [_batch_size_evidence(run), _step_rate_evidence(run)]
    probe = run.probes.get("double_batch")
    if probe is not None and probe.ratio > 1:
        saved = 1 - 1 / probe.ratio
        lost_s, basis = saved * run.phase_seconds("compute"), "what twice the batch saved in the experiment"
        return make_finding(run, cause, saved, evidence, lost_s=lost_s, estimate_basis=basis, confidence=0.8)
    if not is_long_enough(run) or not steady.steps_with_image_count or "batch_size" in run.auto_settings:
        return None
    if steady.num_images / steady.steps_with_image_count > cause.threshold("batch_size"):
        return None
    gpu_fraction = None if run.on_cpu else max_gpu_memory_fraction(run)
    memory_fraction = run.host.memory_fraction.max_value if gpu_fraction is None else gpu_fraction
    if memory_fraction is not None and memory_fraction > cause.threshold("memory"):
        return None
    worked_fraction = fraction_of_phase(run, "compute", "host", "unattributed")
    if not worked_fraction or not steady.steps:
        return None
    step_s = worked_fraction * steady.wall_s / steady.steps
    is_own = run.is_native_run  # a detector, whose operations are known
    overhead_s = cause.threshold("overhead_on_cpu_s" if is_own and run.on_cpu else "overhead_s")
    overhead_fraction = min(1.0, overhead_s / step_s) if step_s > 0 else None
    confidence = cause.threshold("sure") if is_own or overhead_fraction == 1.0 else None
    return make_finding(run, cause, overhead_fraction, evidence, confidence=confidence)


def gpu_oversized(run: RunRecords, cause: Cause) -> Finding | None:
    """Free memory alone is info: a larger batch need not be faster."""
    active = [gpu.sm_active.value for gpu in run.gpus.values() if gpu.sm_active.value is not None]
    sm_idle = 1 - max(active) if active else None
    used = None if run.on_cpu or not is_long_enough(run) else max_gpu_memory_fraction(run)
    sm_severity = None if sm_idle is None else cause.severity(sm_idle)
    is_unused = used is not None and cause.severity(1 - used) is not None
    memory_severity: Severity | None = "info" if is_unused else None
    evidence: list[Evidence | None] = []
    if sm_severity is not None and sm_idle is not None:
        text = "at most {} of the multiprocessors had work while the GPU was busy"
        evidence.append(make_evidence(text.format(percent(1 - sm_idle)), sm_idle, "devices.jsonl: gpus.sm_active"))
    if is_unused and used is not None:
        text = f"at most {percent(used)} of the memory was in use"
        evidence.append(make_evidence(text, 1 - used, "devices.jsonl: gpus.memory_used_bytes"))
    severity = worst([sm_severity, memory_severity])
    if severity is None:
        return None
    confidence = 0.6 if sm_severity is None else None
    return make_finding(run, cause, 1.0, evidence, severity=severity, confidence=confidence)


def _batch_size_evidence(run: RunRecords) -> Evidence | None:
    steady = run.steady
    if not steady.steps_with_image_count:
        return None
    batch_size = steady.num_images / steady.steps_with_image_count
    return make_evidence(f"{batch_size:g} images per step", batch_size, "steps.jsonl: num_images, window_steps")


def _step_rate_evidence(run: RunRecords) -> Evidence | None:
    steady = run.steady
    if not steady.steps or steady.wall_s <= 0:
        return None
    steps_per_s = steady.steps / steady.wall_s
    return make_evidence(f"{steps_per_s:,.1f} steps per second", steps_per_s, "steps.jsonl: window_steps, wall_s")


# Communication


def straggler(run: RunRecords, cause: Cause) -> Finding | None:
    """Only if most of the waiting is for one rank: ranks that are late in turn have another cause. By the clocks of the
    collectives; else by the stacks, as an all-reduce inside of the backward pass (gloo) hides the wait for a rank. Lost
    is the time of the ranks that wait, and of the slow one as far as a place outside of its steps takes it."""
    waits = run.totals.straggler_s
    waited_s, fraction = run.phase_seconds("straggler"), fraction_of_phase(run, "straggler")
    by_stacks = _straggler_by_stacks(run, cause)
    if fraction is None or waited_s <= 0:
        return by_stacks
    slowest_evidence = place_evidence = place = None
    lost_s = waited_s
    if waits:
        rank = max(waits, key=lambda name: waits[name])
        if waits[rank] / sum(waits.values()) < cause.threshold("min_slowest_fraction"):
            return by_stacks
        text = f"rank {rank} is the slow one: the others waited {waits[rank]:,.1f} s for it, in all"
        slowest_evidence = make_evidence(text, rank, "ranks/*/steps.jsonl: phases")
        excess = _own_excess(run)
        if excess is not None and excess[0] == rank:  # outside of steps: the device of the slow rank waits as long
            place_evidence, place = excess[2:]
            lost_s += min(excess[1], waited_s / max(1, run.num_ranks - 1))
    waiting_fraction = fraction * run.num_ranks / (run.num_ranks - 1) if run.num_ranks > 1 else fraction
    evidence = [slowest_evidence, place_evidence, phase_evidence(run, "straggler")]
    confidence = None if slowest_evidence else 0.6
    named: dict[str, Any] = {} if place is None else _name_slow_rank(cause, rank, place)
    by_clock = make_finding(
        run, cause, waiting_fraction, evidence, lost_s=lost_s, min_measured=_min_fraction(run), confidence=confidence,
        **named,
    )  # fmt: skip
    return by_clock or by_stacks


def _straggler_by_stacks(run: RunRecords, cause: Cause) -> Finding | None:
    """A rank that is in a line of its own for much longer than the others, which wait at least as long for it: they
    wait for nobody else then."""
    excess = _own_excess(run)
    if excess is None or run.num_ranks < 2 or not is_long_enough(run):
        return None
    rank, excess_s, evidence, place = excess
    return make_finding(
        run, cause, excess_s / run.steady.wall_s, [evidence], **_name_slow_rank(cause, rank, place),
        lost_s=excess_s * run.num_ranks, estimate_basis="the samples of its stacks, for each rank: all wait for it",
    )  # fmt: skip


def _name_slow_rank(cause: Cause, rank: int, place: PlaceTotal) -> dict[str, Any]:
    """Options of `make_finding`."""
    title = f"Rank {rank} is slower than the others, and all wait for it: {costly.describe_place(place)}"
    return {"title": title, "place": place.line, "fix": cause.other_fixes["place"]}


def _own_excess(run: RunRecords) -> tuple[int, float, Evidence, PlaceTotal] | None:
    """(rank, seconds, evidence, the place) of the line outside of steps that takes certainly more of one rank's time
    than of any other's; None if nothing does."""
    places = [place for place in run.places if place.role == "training" and not place.is_startup]
    samples: collections.Counter[int] = collections.Counter()
    for place in places:
        samples[place.rank] += place.samples
    own = (place for place in places
           if place.kind in _OWN_KINDS and place.line and not re.search(costly.IMPORT, place.call))  # fmt: skip
    by_line: dict[str, dict[int, PlaceTotal]] = {}
    for (line, rank), total in merge_by(own, lambda place: (place.line, place.rank)).items():
        by_line.setdefault(line, {})[rank] = total
    best: tuple[int, float, Evidence, PlaceTotal] | None = None
    for line, totals in by_line.items():
        rank = max(totals, key=lambda rank: totals[rank].seconds)
        others_s = max((total.seconds for other, total in totals.items() if other != rank), default=0.0)
        place, seconds = totals[rank], totals[rank].seconds - others_s
        # if all ranks were there equally often, these samples would be a part of all in the line, by chance
        chance = binomial_tail(
            place.samples, sum(total.samples for total in totals.values()), samples[rank] / samples.total()
        )
        is_seen = chance <= common_threshold("max_chance")
        is_certain = place.low_s - others_s >= STRAGGLER.threshold("min_own_fraction") * run.steady.wall_s
        if is_seen and is_certain and (best is None or seconds > best[1]):
            text = f"rank {rank} spent {seconds:,.1f} s more than the others in {place.call or place.kind} at {line}"
            best = rank, seconds, make_evidence(text, seconds, "ranks/*/stacks.jsonl: places"), place
    if best is None:
        return None
    rank, seconds, evidence, place = best
    return rank, max(seconds, _function_excess_s(run, rank, place), _neighbors_excess_s(run, place)), evidence, place


def _neighbors_excess_s(run: RunRecords, place: PlaceTotal) -> float:
    """Seconds of a rank in a place and the statements around it that the others do not spend there; 0 without these."""
    whole = costly.find_neighbors(run, place)
    if whole is None:
        return 0.0
    ranks = (rank for rank in range(run.num_ranks) if rank != place.rank)
    others = [costly.find_neighbors(run, msgspec.structs.replace(place, rank=rank)) for rank in ranks]
    return whole.seconds - max((other.seconds for other in others if other is not None), default=0.0)


def _function_excess_s(run: RunRecords, rank: int, place: PlaceTotal) -> float:
    """Seconds of a rank in the whole function of a place that the others do not spend there; 0 of one that trains."""
    seconds: dict[int, float] = {rank: 0.0}
    trains_s = 0.0
    for other in run.places:
        if other.role != "training" or other.is_startup or other.file_and_function != place.file_and_function:
            continue
        if other.kind in (*_OWN_KINDS, "sync"):
            seconds[other.rank] = seconds.get(other.rank, 0.0) + other.seconds
        elif other.rank == rank:
            trains_s += other.seconds
    if trains_s >= costly.MIN_STEPS * seconds[rank]:
        return 0.0
    return seconds[rank] - max((own_s for other, own_s in seconds.items() if other != rank), default=0.0)


def _min_fraction(run: RunRecords) -> float | None:
    if not run.is_external or not run.on_cpu:
        return None
    return STRAGGLER.threshold("warning_threshold_on_cpu") + host.contended_fraction(run) / 4


def communication_bound(run: RunRecords, cause: Cause) -> Finding | None:
    """If most of it is a collective that the job's own code calls outside of the backward pass, with its line. Where
    more ranks train on the CPU than there are cores, they wait for each other's turn, which is info."""
    min_measured, own = _min_fraction(run), _own_collective(run, cause)
    fix = cause.other_fixes["own collective"] if own else cause.other_fixes["cpu"] if run.on_cpu else None
    if run.phase_seconds("comm") > 0:
        finding = make_phase_finding(run, cause, "comm", min_measured=min_measured, fix=fix)
    elif run.traces.wall_s <= 0 or run.traces.comm_s <= 0:
        place_s = 0.0 if own is None else own.seconds
        finding = make_stack_finding(
            run, cause, "a collective", "comm", place_s=place_s, min_measured=min_measured, fix=fix
        )
    else:
        return make_traced_finding(run, cause, "collectives", "comm_s")
    cores = run.host.cores
    if finding is not None and own is None and run.on_cpu and cores is not None and run.num_ranks > cores:
        text = f"{run.num_ranks} ranks take turns on {cores:g} cores"
        evidence = [*finding.evidence, make_evidence(text, run.num_ranks, "devices.jsonl: cpu_limit_cores")]
        finding = msgspec.structs.replace(finding, severity="info", evidence=evidence)
    if finding is None or own is None:
        return finding
    text = f"{own.samples} of the samples in collectives are in {costly.describe_place(own)}"
    evidence = [*finding.evidence, make_evidence(text, own.samples, "ranks/*/stacks.jsonl: places")]
    title = f"The ranks wait for each other in {costly.describe_place(own)}"
    if finding.lost_device_s is not None and own.seconds > finding.lost_device_s:
        ratio = own.seconds / max(finding.lost_device_s, 1e-9)  # the clock sees only a part of the job's own calls
        cost = None if finding.lost_cost is None else ratio * finding.lost_cost
        finding = msgspec.structs.replace(finding, lost_device_s=own.seconds, lost_cost=cost)
    return msgspec.structs.replace(finding, title=title, place=own.line, evidence=evidence)


def _own_collective(run: RunRecords, cause: Cause) -> PlaceTotal | None:
    """The line with most of the samples of collectives, if the job calls one there itself."""
    found = [place for place in run.places if place.kind == "comm" and place.line and not place.is_startup]
    totals = merge_by((place for place in found if place.role == "training"), lambda place: place.line).values()
    largest = max(totals, key=lambda total: total.samples, default=None)
    if largest is None or run.is_native_run or largest.call.endswith("backward"):
        return None
    is_most = 2 * largest.samples > sum(total.samples for total in totals)
    return largest if is_most and largest.samples >= cause.threshold("min_samples") else None
