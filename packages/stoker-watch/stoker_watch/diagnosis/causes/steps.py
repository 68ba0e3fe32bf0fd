"""The device is idle in or between steps: the host issues work too late or waits, the batch is too small, or devices
wait for each other: for one slow rank, or in collectives that computing does not hide."""

import collections
from collections.abc import Sequence
from typing import Any

import msgspec

from stoker_watch.diagnosis.causes import host, memory
from stoker_watch.diagnosis.causes.cause import Cause, common_threshold, find_cause, worst
from stoker_watch.diagnosis.causes.explanation import BY_SAMPLES, Explanation, explain_traced
from stoker_watch.diagnosis.causes.shared import (
    binomial_tail,
    driver_utilization,
    fraction_of_phase,
    has_enough_stacks,
    is_long_enough,
    make_evidence,
    make_finding,
    max_gpu_memory_fraction,
    percent,
    process_cpu_evidence,
    samples_contradict,
    stack_evidence,
    waits_for_rank_0_s,
)
from stoker_watch.diagnosis.places.describe import describe_place, is_single_event
from stoker_watch.diagnosis.places.grouping import CALLS, RECOMPILED_BY
from stoker_watch.diagnosis.places.sampled import Cost, PlaceTotal
from stoker_watch.diagnosis.places.totals import find_places, merge_by
from stoker_watch.diagnosis.run_data import RunRecords
from stoker_watch.findings.finding import Evidence, Finding, Severity
from stoker_watch.runs.schemas import AFTER_STEP, WITHOUT_GRADIENTS

_WAIT_KINDS = ("sync", "idle", "comm", "input_wait", "other", "checkpoint", "python", "gc")
"""Kinds of stacks in which the training thread can wait without a core: all but computing, decoding, compiling."""

PYTHON_BOUND = find_cause("python_bound")
RECOMPILES, LAUNCH_BOUND = find_cause("recompiles"), find_cause("launch_bound")
BATCH_TOO_SMALL, COMMUNICATION_BOUND = find_cause("batch_too_small"), find_cause("communication_bound")
HOST_DEVICE_SYNCS = find_cause("host_device_syncs")
STRAGGLER = find_cause("straggler")
_TRACE_ESTIMATE = "the fraction of the traced time without work, times the time in steps; tracing slows the host"
_OWN_KINDS = ("input_wait", "decode", "checkpoint", "gc", "python", "idle", "other", AFTER_STEP, WITHOUT_GRADIENTS)
"""Kinds of stacks in which a rank works on what is only its own."""
_BETWEEN_STEPS = ("python", "gc", "decode", AFTER_STEP)
"""Kinds of places of the training thread between steps, in which it does not wait."""
_WAITS = ("idle", "sync")
_WITH_WAITS = ("straggler", "comm", "compute")
"""Phases in which a rank may wait for another one."""
_OF_RANK_0 = ("eval", "checkpoint")
"""Phases that rank 0 may be in alone, and whose causes have the waits for it."""
_PYTHON = ("python", "gc")
"""Kinds of samples in which a thread computes in Python."""


def python_bound(run: RunRecords, cost: Cost) -> Explanation | None:
    """The thread computes between steps: by its stack samples, or the process uses a core meanwhile. If nothing tells
    computing from waiting, it has a low confidence. What a library does between the steps in its own loop, as metrics
    and handlers of ignite do, is info while it is small."""
    places = _places_between_steps(run)
    shown: Sequence[Evidence | None] = places or [stack_evidence(run, "Python", *_PYTHON)]
    evidence = [*shown, process_cpu_evidence(run)]
    if cost.place is not None:
        is_none = cost.place.kind in _WAITS or is_single_event(cost.place)
        return None if is_none else Explanation(evidence=evidence, basis=BY_SAMPLES)
    between = _between_step_phases(run)
    fraction, clock_s = fraction_of_phase(run, *between), sum(run.steady.phases.get(name, 0.0) for name in between)
    if cost.phase not in between or fraction is None or cost.steady_s > 2 * clock_s:  # as the samples show
        computes = run.stacks.fraction(*_PYTHON) >= (PYTHON_BOUND.warning_threshold or 0.0)
        saved = run.stacks.fraction(*_PYTHON) if cost.phase == "unattributed" else 1.0
        return Explanation(evidence=evidence, saved=saved, basis=BY_SAMPLES) if computes else None
    thread_is_idle = _is_thread_idle(run, fraction)
    if thread_is_idle or _is_loop_overhead(run, between) or not _recurs(run, between):
        return None
    thread_cpu_s = sum(run.steady.thread_cpu_s.get(name, 0.0) for name in between)
    is_unsure = thread_is_idle is None
    if is_unsure and run.steady.thread_cpu_s and thread_cpu_s < PYTHON_BOUND.threshold("busy") * cost.steady_s:
        return None  # it waited, or got no core
    is_small = (
        not places and run.is_external and has_enough_stacks(run) and PYTHON_BOUND.severity(fraction) == "warning"
    )
    return Explanation(evidence=evidence, confidence=0.5 if is_unsure else None, severity="info" if is_small else None)


def _places_between_steps(run: RunRecords) -> list[Evidence]:
    """The largest places of the training thread outside of steps, and of other threads, which hold the interpreter's
    lock meanwhile."""
    own = [part for cost in run.costs for part in cost.parts
           if cost.place is not None and cost.role == "training" and part.kind in _BETWEEN_STEPS]  # fmt: skip
    places = list(merge_by(own, lambda part: (part.line, part.function, part.call)).values())
    places += [place for place in run.places
               if place.role == "thread" and place.line and place.kind != "idle" and not place.is_startup]  # fmt: skip
    places = sorted(places, key=lambda place: -place.seconds)
    return [_place_evidence(place) for place in places[: int(PYTHON_BOUND.threshold("max_places"))]]


def _place_evidence(place: PlaceTotal) -> Evidence:
    where = ", in another thread, which holds the interpreter's lock meanwhile" if place.role == "thread" else ""
    text = f"{place.seconds:,.1f} s in {describe_place(place)}{where}"
    return make_evidence(text, place.seconds, "stacks.jsonl: places")


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


def host_device_syncs(run: RunRecords, cost: Cost) -> Explanation | None:
    """The phase `sync`; the time between steps while the process uses little of a core; or, in a job that trains on the
    CPU, the time in steps in which it computes less than that. Nothing there waits for a device, so the lines count."""
    evidence = [stack_evidence(run, "a wait", "sync", "idle"), process_cpu_evidence(run)]
    fix = None
    if run.is_external and run.on_cpu:
        fix, evidence = HOST_DEVICE_SYNCS.other_fixes["cpu"], [*evidence, *_places_between_steps(run)]
    if cost.phase == "compute":
        return _idle_in_steps(run, evidence, fix) if cost.place is None else None
    if _computes_elsewhere(run):
        return None
    explained = waits_for_own_threads(run)
    if cost.place is not None:
        is_wait = cost.role == "training" and cost.place.kind in _WAITS and cost.place.kind not in explained
        return Explanation(evidence=evidence, fix=fix, basis=BY_SAMPLES) if is_wait else None
    between = _between_step_phases(run)
    fraction = fraction_of_phase(run, *between)
    if (cost.phase == "sync" and run.phase_seconds("sync") > 0) or (cost.phase in between and fraction is not None):
        is_wait = cost.phase == "sync" or _is_thread_idle(run, fraction or 0.0) is True
        return Explanation(evidence=evidence, fix=fix) if is_wait else None
    kind = {"sync": "sync", "host": "idle"}.get(cost.phase)
    if kind is None or kind in explained:
        return None
    saved = _waiting_fraction(run, cost, kind)
    return Explanation(evidence=evidence, fix=fix, saved=saved, basis=BY_SAMPLES) if saved > 0 else None


def _waiting_fraction(run: RunRecords, cost: Cost, kind: str) -> float:
    """Fraction of a cost without a clock in which the thread waits, and not for a device that works for it."""
    busy = max((gpu.utilization.value or 0.0 for gpu in run.gpus.values()), default=0.0)
    saved = (1 - busy) / max(run.stacks.fraction(*_WAITS), 1e-9)
    if kind == "idle":
        saved = min(saved, run.stacks.fraction("idle") * run.steady.wall_s / cost.seconds)
    return min(1.0, saved)


def waits_for_own_threads(run: RunRecords) -> tuple[str, ...]:
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


def _idle_in_steps(run: RunRecords, evidence: list[Evidence | None], fix: str | None) -> Explanation | None:
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
    if idle_fraction <= 0 or samples_contradict(run, idle_fraction, *_WAIT_KINDS):
        return None
    return Explanation(
        evidence=[cpu_evidence, *evidence], saved=min(1.0, idle_fraction / fraction), measured=idle_fraction, fix=fix,
        basis="the time in steps in which no core worked",
    )  # fmt: skip


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


def recompiles(run: RunRecords, cost: Cost) -> Explanation | None:
    """By the count of repeated compilations; without it, by windows or stack samples with any compilation."""
    steady, threshold = run.steady, RECOMPILES.threshold
    most_steps = max(threshold("min_recompiles"), threshold("per_step") * steady.steps)
    in_each_step = steady.steps > 0 and steady.recompiles >= most_steps
    compile_s = steady.phases.get("compile", 0.0)
    if not in_each_step:
        if steady.recompile_windows is not None:
            is_burst = steady.recompile_lines < threshold("min_lines")
            is_small = is_burst and run.steady_phase_fraction("compile") < threshold("burst")
            if steady.recompile_windows < threshold("min_windows") or is_small:
                return None
        if compile_s > 0 and _late_compile_fraction(run) < threshold("late"):
            return None  # all was compiled by then
        windows, least = steady.compile_windows, threshold("min_windows")
        if compile_s <= 0:
            windows, least = run.stacks.compile_windows, threshold("min_stack_windows")
            if run.stacks.fraction("compile") < threshold("min_stack_fraction"):
                return None
        if windows < least:
            return None
    saved = cost.steady_s / cost.seconds  # what is compiled at the start is no repetition
    if cost.phase == "startup":  # before the first step that the output shows
        saved = min(1.0, max(0.0, run.recompiled_s - compile_s) * run.num_ranks / cost.seconds)
        if not saved:
            return None
    function, grown = run.facts.get("recompiled"), memory.describe_growth(run)
    why = run.facts.get("recompiled_why") or ""
    told = f"{function} was compiled again most often{f': {why}' if why else ''}"
    kind = next((name for name, pattern in RECOMPILED_BY.items() if pattern.search(why)), "")
    evidence = [
        make_evidence(told, None, "events.jsonl: data.facts.recompiled") if function else None,
        stack_evidence(run, "compiling", "compile"),
        make_evidence(f"most of it in {describe_place(cost.place)}", cost.place.seconds) if cost.place else None,
        make_evidence(f"memory grows meanwhile, as each compiled graph is kept: {grown[0]}") if grown else None,
    ]  # fmt: skip
    basis = "" if compile_s > 0 else BY_SAMPLES
    return Explanation(evidence=evidence, saved=saved, basis=basis, fix=RECOMPILES.other_fixes.get(kind))


def _late_compile_fraction(run: RunRecords) -> float:
    """Fraction of the later half of the time after the start that compilations took."""
    points = run.steady.compile_s.points
    end_s, compiled_s = points[-1]
    half_s, before_s = max((point for point in points if point[0] <= end_s / 2), default=(0.0, 0.0))
    return (compiled_s - before_s) / max(end_s - half_s, 1e-9)


def launch_bound(run: RunRecords, cost: Cost) -> Explanation | None:
    kernel_s = run.traces.median_kernel_s.value
    if cost.place is not None or kernel_s is None or kernel_s > LAUNCH_BOUND.threshold("kernel_s"):
        return None
    launches = run.traces.launches / max(1, run.traces.steps)
    text = f"the median kernel takes {1e6 * kernel_s:.1f} µs, and a step has {launches:,.0f}"
    return _explain_by_traces(run, make_evidence(text, kernel_s, "traces.jsonl: kernel_median_s"))


def host_bound_steps(run: RunRecords, cost: Cost) -> Explanation | None:
    """By traces if there are any, else by the driver's utilization."""
    if cost.place is not None:
        return None
    if run.traces.idle_fraction is not None:
        return _explain_by_traces(run, None)
    utilization, compute_fraction = driver_utilization(run), fraction_of_phase(run, "compute")
    if utilization is None or not compute_fraction or utilization >= compute_fraction:
        return None
    text = f"the driver saw kernels {100 * utilization:.0f} % of the time"
    idle_fraction = compute_fraction - utilization
    evidence = [make_evidence(text, idle_fraction, "devices.jsonl: gpus.utilization"), _host_bound_evidence(run)]
    return Explanation(
        evidence=evidence, saved=idle_fraction / compute_fraction, measured=idle_fraction,
        basis="the driver's utilization is a coarse sample",
    )  # fmt: skip


def _explain_by_traces(run: RunRecords, kernel_evidence: Evidence | None) -> Explanation | None:
    traces, idle_fraction = run.traces, run.traces.idle_fraction
    if idle_fraction is None:
        return None
    text = f"no kernel and no copy ran in {percent(idle_fraction)} of {traces.steps} traced steps"
    if traces.longest_gap is not None:
        duration_s, host_op = traces.longest_gap
        text += f"; the longest gap was {1e3 * duration_s:.1f} ms, with the host in {host_op or 'Python'}"
    idle_evidence = make_evidence(text, idle_fraction, "traces.jsonl: busy_s, wall_s, gaps")
    evidence = [idle_evidence, kernel_evidence, _host_bound_evidence(run)]
    return Explanation(evidence=evidence, saved=idle_fraction, measured=idle_fraction, basis=_TRACE_ESTIMATE)


def _host_bound_evidence(run: RunRecords) -> Evidence | None:
    if not run.host_bound_checked_steps:
        return None
    fraction = run.host_bound_steps / run.host_bound_checked_steps
    text = f"in {percent(fraction)} of the steps the device had finished its work before the host issued the last of it"
    return make_evidence(text, fraction, "steps.jsonl: host_bound_steps")


def batch_too_small(run: RunRecords, cost: Cost) -> Explanation | None:
    steady, threshold = run.steady, BATCH_TOO_SMALL.threshold
    evidence = [_batch_size_evidence(run), _step_rate_evidence(run)]
    probe = run.probes.get("double_batch")
    if cost.place is not None:
        return None
    if probe is not None and probe.ratio > 1:
        saved, basis = 1 - 1 / probe.ratio, "what twice the batch saved in the experiment"
        return Explanation(evidence=evidence, saved=saved, measured=saved, basis=basis, confidence=0.8)
    if not is_long_enough(run) or not steady.steps_with_image_count or "batch_size" in run.auto_settings:
        return None
    if steady.num_images / steady.steps_with_image_count > threshold("batch_size"):
        return None
    gpu_fraction = None if run.on_cpu else max_gpu_memory_fraction(run)
    memory_fraction = run.host.memory_fraction.max_value if gpu_fraction is None else gpu_fraction
    if memory_fraction is not None and memory_fraction > threshold("memory"):
        return None
    worked_fraction = fraction_of_phase(run, "compute", "host", "unattributed")
    if not worked_fraction or not steady.steps:
        return None
    step_s = worked_fraction * steady.wall_s / steady.steps
    is_own = run.is_native_run  # a detector, whose operations are known
    overhead_s = threshold("overhead_on_cpu_s" if is_own and run.on_cpu else "overhead_s")
    overhead_fraction = min(1.0, overhead_s / step_s) if step_s > 0 else 1.0
    confidence = threshold("sure") if is_own or overhead_fraction == 1.0 else None
    return Explanation(evidence=evidence, measured=overhead_fraction, saved=0.0, confidence=confidence)


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


def straggler(run: RunRecords, cost: Cost) -> Explanation | None:
    """Only if most of the waiting is for one rank: ranks that are late in turn have another cause. By the clocks of the
    collectives; else by the stacks, as an all-reduce inside of the backward pass (gloo) hides the wait for a rank. Lost
    is the time of the ranks that wait, and of the slow one as far as a place outside of its steps takes it."""
    if run.num_ranks < 2 or not is_long_enough(run):
        return None
    waits = run.totals.straggler_s
    fraction = (fraction_of_phase(run, "straggler") or 0.0) * run.num_ranks / (run.num_ranks - 1)
    rank = max(waits, key=lambda name: waits[name], default=None)
    is_late = fraction >= (_min_fraction(run) or STRAGGLER.warning_threshold or 0.0)
    if rank is None or not is_late or waits[rank] < STRAGGLER.threshold("min_slowest_fraction") * sum(waits.values()):
        return _straggler_by_stacks(run, cost)
    excess = _own_excess(run)
    text = f"rank {rank} is the slow one: the others waited {waits[rank]:,.1f} s for it, in all"
    evidence: list[Evidence | None] = [make_evidence(text, rank, "ranks/*/steps.jsonl: phases")]
    named: dict[str, Any] = {}
    is_here = False
    if excess is not None and excess[0] == rank:
        evidence.append(excess[2])
        named, is_here = _name_slow_rank(rank, excess[3]), _is_at(cost, rank, excess[3])
    found = Explanation(evidence=evidence, measured=fraction, **named)
    if cost.phase == "comm" and 2 * run.phase_seconds("straggler") >= run.phase_seconds("comm"):
        return msgspec.structs.replace(found, saved=0.0)  # it hides what they take
    if excess is not None and is_here:
        saved = min(1.0, excess[1] / max(excess[3].seconds, 1e-9))
        return msgspec.structs.replace(found, saved=saved, leaves_rest=True)
    if cost.phase != "straggler":
        return None
    alone_s = sum(waits_for_rank_0_s(run, name) for name in _OF_RANK_0) if rank == 0 else 0.0
    saved = 1 - alone_s / max(run.phase_seconds("straggler"), 1e-9)
    return msgspec.structs.replace(found, saved=min(1.0, saved)) if saved > 0 else None


def _straggler_by_stacks(run: RunRecords, cost: Cost) -> Explanation | None:
    """A rank that is in a line of its own for much longer than the others, which wait at least as long for it: they
    wait for nobody else then."""
    excess = _own_excess(run)
    if excess is None:
        return None
    rank, excess_s, evidence, place = excess
    at_place = {other: sum(one.steady_s for one in run.costs if _is_at(one, other, place)) for other in run.rank_phases}
    of_others_s = max((seconds for other, seconds in at_place.items() if other != rank), default=0.0)
    excess_s = max(excess_s, at_place[rank] - of_others_s)
    of_phases = [run.rank_steady_phases.get(cost.rank, {}).get(name, 0.0) for name in _WITH_WAITS]
    is_here = _is_at(cost, rank, place)
    if not is_here and (cost.phase not in _WITH_WAITS or cost.place is not None or cost.rank == rank):
        return None
    return Explanation(
        evidence=[evidence], measured=excess_s / run.steady.wall_s, **_name_slow_rank(rank, place),
        saved=min(1.0, excess_s / max(at_place[rank] if is_here else sum(of_phases), 1e-9)),
        basis="the samples of its stacks, for each rank: all wait for it",
    )  # fmt: skip


def _is_at(cost: Cost, rank: int, place: PlaceTotal) -> bool:
    """Whether a cost of a rank is at a place; a wait for its loader has been divided by what workers did."""
    is_wait = place.kind == cost.phase == "input_wait"
    return cost.rank == rank and (is_wait or any(place.line == part.line for part in cost.parts))


def _name_slow_rank(rank: int, place: PlaceTotal) -> dict[str, Any]:
    """Options of `make_finding`."""
    title = f"Rank {rank} is slower than the others, and all wait for it: {describe_place(place)}"
    return {"title": title, "place": place.line, "fix": STRAGGLER.other_fixes["place"]}


def _own_excess(run: RunRecords) -> tuple[int, float, Evidence, PlaceTotal] | None:
    """(rank, seconds, evidence, the place) of the line outside of steps that takes certainly more of one rank's time
    than of any other's; None if nothing does."""
    places = [place for place in run.places if place.role == "training" and not place.is_startup]
    samples: collections.Counter[int] = collections.Counter()
    for place in places:
        samples[place.rank] += place.samples
    own = (place for place in places
           if place.kind in _OWN_KINDS and place.line and not CALLS["import"].search(place.call))  # fmt: skip
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
    return best


def _min_fraction(run: RunRecords) -> float | None:
    if not run.is_external or not run.on_cpu:
        return None
    return STRAGGLER.threshold("warning_threshold_on_cpu") + host.contended_fraction(run) / 4


def communication_bound(run: RunRecords, cost: Cost) -> Explanation | None:
    """If most of it is a collective that the job's own code calls outside of the backward pass, with its line. Where
    more ranks train on the CPU than there are cores, they wait for each other's turn, which is info."""
    if cost.phase == "compute":
        return (
            None
            if cost.place is not None or run.phase_seconds("comm")
            else explain_traced(run, "collectives", "comm_s")
        )
    own = _own_collective(run)
    fixes = COMMUNICATION_BOUND.other_fixes
    fix = fixes["own collective"] if own else fixes["cpu"] if run.on_cpu else None
    evidence: list[Evidence | None] = [] if run.phase_seconds("comm") else [stack_evidence(run, "a collective", "comm")]
    severity: Severity | None = None
    cores = run.host.cores
    if own is None and run.on_cpu and cores is not None and run.num_ranks > cores:
        text = f"{run.num_ranks} ranks take turns on {cores:g} cores"
        evidence.append(make_evidence(text, run.num_ranks, "devices.jsonl: cpu_limit_cores"))
        severity = "info"
    title = place = ""
    if own is not None:
        text = f"{own.samples} of the samples in collectives are in {describe_place(own)}"
        evidence.append(make_evidence(text, own.samples, "ranks/*/stacks.jsonl: places"))
        title, place = f"The ranks wait for each other in {describe_place(own)}", own.line
    return Explanation(
        evidence=evidence, min_measured=_min_fraction(run) or 0.0, fix=fix, title=title, place=place, severity=severity,
        basis="" if run.phase_seconds("comm") else BY_SAMPLES,
    )  # fmt: skip


def _own_collective(run: RunRecords) -> PlaceTotal | None:
    """The line with most of the samples of collectives, if the job calls one there itself."""
    found = [place for place in run.places if place.kind == "comm" and place.line and not place.is_startup]
    totals = merge_by((place for place in found if place.role == "training"), lambda place: place.line).values()
    largest = max(totals, key=lambda total: total.samples, default=None)
    if largest is None or run.is_native_run or largest.call.endswith("backward"):
        return None
    is_most = 2 * largest.samples > sum(total.samples for total in totals)
    return largest if is_most and largest.samples >= COMMUNICATION_BOUND.threshold("min_samples") else None
