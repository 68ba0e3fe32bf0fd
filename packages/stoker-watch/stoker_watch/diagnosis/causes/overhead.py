"""Work besides the steps that takes a large part of the run: evaluation, checkpoints, starting, restarts."""

import re
from typing import Any

from stoker_watch.diagnosis.causes.cause import Cause, find_cause, worst
from stoker_watch.diagnosis.causes.host import CPU_CONTENTION, busiest_processes_evidence
from stoker_watch.diagnosis.causes.shared import (
    attempts_evidence,
    fraction_of_phase,
    is_long_enough,
    is_short,
    is_very_short,
    make_evidence,
    make_finding,
    make_phase_finding,
    make_stack_finding,
    percent,
    phase_evidence,
    rare_worker_start_fraction,
    sample_evidence,
    wait_in_evaluations_s,
)
from stoker_watch.diagnosis.places import costly
from stoker_watch.diagnosis.places.totals import find_places
from stoker_watch.diagnosis.run_data import PlaceTotal, RunRecords
from stoker_watch.findings.finding import Evidence, Finding, Severity
from stoker_watch.runs.schemas import AFTER_STEP, WITHOUT_GRADIENTS

EVALUATION_HEAVY = find_cause("evaluation_heavy")
STARTUP_HEAVY = find_cause("startup_heavy")
MAX_EVENT = 0.5
"""Fraction of the lines of stacks.jsonl up to which what was seen in a row was a single event."""
MAX_LINES = 3
"""Lines of a function that the evidence names."""
MAX_BY_CLOCK = 1.5
"""Time of a place by the clock of the wait for input, over that of its samples, up to which these were too few."""
ONE_RANK = 0.9
"""Fraction of the time that all ranks spent in a phase, from which rank 0 counts as the only one that was in it."""
_EVALUATES = r"(^|[._])(eval|evaluate\w*|predict\w*|validate\w*|validation|test)$"
"""Calls of an evaluation."""
_LOADING_KINDS = ("input_wait", "decode")
"""Kinds of stacks of a training thread that loads."""
_BETWEEN_KINDS = ("python", "gc", "other", "idle", AFTER_STEP)
"""Kinds of stacks between steps."""


def evaluation_heavy(run: RunRecords, cause: Cause) -> Finding | None:
    """Not of a job whose clock saw no step, as one of JAX: what looks like an evaluation to it may be the training."""
    if run.is_external and not run.phase_seconds("compute") and not run.clock_saw_steps:
        return None
    steady = run.steady
    starts_s = max(0.0, steady.worker_start_s - steady.phases.get("input_wait", 0.0))  # at least so many in evaluations
    rest = (fraction_of_phase(run, "eval") or 0.0) - starts_s / max(steady.wall_s, 1e-9)
    if starts_s and rest < cause.threshold("often") and workers_start_again(run, find_cause("workers_start_again")):
        return None
    count = run.learning.num_evaluations
    eval_s, evidence = run.phase_seconds("eval"), list[Evidence | None]()
    if eval_s >= cause.threshold("min_duration_s"):
        evidence.append(_places_beside_steps(run, cause))
    place, fix = find_places(run, call=_EVALUATES), None
    if not run.is_external or place is None or place.seconds < cause.threshold("places") * eval_s:
        place = None
    else:
        text = f"most often by {costly.describe_place(place)}"
        evidence.append(make_evidence(text, place.seconds, "stacks.jsonl: places"))
        fix = cause.other_fixes["place"].replace("PLACE", place.line)
    return _repeated_phase_finding(
        run, cause, "eval", count, "evaluations", "evaluated", extra_evidence=evidence, fix=fix,
        place="" if place is None else place.line,
    )  # fmt: skip


def _places_beside_steps(run: RunRecords, cause: Cause) -> Evidence | None:
    """Places outside of forward passes and steps, which may be in the evaluations; None if they take a small part of
    the time of these."""
    have_steps, own_kinds = costly.functions_with_steps(run), ("python", "decode", "gc")
    places = []
    for place in costly.list_places(run):
        is_own = place.kind in own_kinds and place.file_and_function not in have_steps
        if place.role == "training" and (is_own or place.kind in (AFTER_STEP, WITHOUT_GRADIENTS)):
            places.append(place)
    if not places or sum(place.seconds for place in places) < cause.threshold("places") * run.phase_seconds("eval"):
        return None
    parts = ", ".join(f"{place.seconds:,.1f} s in {costly.describe_place(place)}" for place in places[:MAX_LINES])
    text = f"places outside of forward passes and steps, which may be in it: {parts}"
    return make_evidence(text, None, "stacks.jsonl: places")


def checkpoint_heavy(run: RunRecords, cause: Cause) -> Finding | None:
    if run.is_external and not run.phase_seconds("compute", "checkpoint"):  # without a clock, as with JAX
        place = find_places(run, kind="^checkpoint$")
        named = None if place is None else make_evidence(f"most of it in {costly.describe_place(place)}", place.seconds)
        minimum = cause.threshold("short_run") if is_short(run) else None
        return make_stack_finding(
            run, cause, "saving a checkpoint", "checkpoint", extra_evidence=[named], min_measured=minimum
        )
    waiting, options = run.host.psi_io.value, {}
    if waiting is not None and waiting >= cause.threshold("psi_io"):
        evidence = sample_evidence("the disk is slow: some task waited for storage {} of the time", waiting, "psi_io")
        options = {"extra_evidence": [evidence], "command": "--run-dir", "config_patch": {}, "confidence": 0.7}
    count = run.num_checkpoints
    return _repeated_phase_finding(run, cause, "checkpoint", count, "checkpoints", "checkpoint_saved", **options)


def _repeated_phase_finding(
    run: RunRecords, cause: Cause, phase: str, count: int, noun: str, event_kind: str, **options: Any
) -> Finding | None:
    """As `make_phase_finding`, of a phase that `count` events made. The last event does not count: the run needs it. In
    a short run whose events were not counted, the threshold is higher, unless evaluations were seen often, and
    evaluations in a very short one are info unless they take half of it."""
    fraction = fraction_of_phase(run, phase)
    if fraction is None or run.phase_seconds(phase) < cause.threshold("min_duration_s"):
        return None
    if count and fraction * (count - 1) / count < (cause.warning_threshold or 0.0):
        return None
    if is_short(run) and not count:
        is_info, minimum = False, cause.threshold("short_run")
        if cause is EVALUATION_HEAVY and run.eval_windows >= cause.threshold("min_seen"):  # not only after an epoch
            is_info, minimum = fraction < cause.threshold("often"), cause.warning_threshold or 0.0
        elif cause is EVALUATION_HEAVY:
            is_info = is_very_short(run) and fraction < cause.threshold("half")
        options |= {"min_measured": minimum, "severity": "info" if is_info else None}
    counted = make_evidence(f"{count} {noun}", count, f"events.jsonl: {event_kind}") if count else None
    waited_s, waits = _waits_for_rank_0_s(run, phase), None
    if waited_s:
        text = f"only rank 0 did this; the others waited {waited_s:,.1f} s for it, in all"
        waits = make_evidence(text, waited_s, "ranks/*/steps.jsonl: phases")
    extra_evidence = [counted, waits, *options.pop("extra_evidence", ())]
    return make_phase_finding(run, cause, phase, extra_evidence=extra_evidence, waited_s=waited_s, **options)


def _waits_for_rank_0_s(run: RunRecords, phase: str) -> float:
    """Device-seconds that the other ranks waited for rank 0 while it alone was in a phase."""
    alone_s = run.steady.phases.get(phase, 0.0)
    if run.num_ranks < 2 or alone_s < ONE_RANK * run.phase_seconds(phase):
        return 0.0
    return min(run.totals.straggler_s.get(0, 0.0), (run.num_ranks - 1) * alone_s)


def heavy_place(run: RunRecords, cause: Cause) -> Finding | None:
    """The line that takes most of the time outside of the steps: of the training thread, or of the loader workers while
    the training waits for them. A place is no cause: the fix lists what each possible one would show."""
    if not is_long_enough(run):
        return None
    input_wait = fraction_of_phase(run, "input_wait") or run.stacks.fraction("input_wait")
    busy = [gpu.utilization.value for gpu in run.gpus.values() if gpu.utilization.value is not None]
    idle_fraction = 1 - max(busy) if busy and run.num_ranks == 1 else None
    for place in sorted(costly.heavy_places(run, cause.warning_threshold or 0.0), key=_is_single_event):
        observed_s = run.observed_s(place)
        measured, what = place.seconds / observed_s, "the training thread"
        if place.role == "worker":  # what they do costs only the time in which the training waits for them
            measured, what = measured * input_wait, "each loader worker"
        elif place.role == "thread":
            measured, what = min(measured, input_wait), "a thread besides the training thread"
        elif idle_fraction is not None:  # the place costs no more than the time in which the device was idle
            measured = min(measured, idle_fraction)
        if place.kind == "input_wait":
            measured -= rare_worker_start_fraction(run)
        if place.samples < cause.threshold("min_samples") or measured * observed_s < cause.threshold("min_duration_s"):
            continue
        often = costly.frequency(run, place)
        text = (
            f"{what} was there {place.seconds:,.0f} s of {observed_s:,.0f} (95 %: {place.low_s:,.0f} to "
            f"{place.high_s:,.0f}), in {place.samples} samples{f', {often}' if often else ''}"
        )
        evidence = [make_evidence(text, measured, "stacks.jsonl: places")]
        leaves = sorted((count, leaf) for leaf, count in place.leaves.items() if leaf)
        if leaves and 2 * leaves[-1][0] > place.samples:
            evidence.append(make_evidence(f"mostly in {leaves[-1][1]}", leaves[-1][0], "stacks.jsonl: places.leaf"))
        lines = costly.called_places(run, place) if costly.is_callees(place) else [
            other for other in costly.list_places(run)
            if other.role == place.role and (other.function == place.function or other.call == place.call != "")
            and place.call in ("", other.call, costly.module_of(other.call))
        ]  # fmt: skip
        lines = [other for other in lines if round(other.seconds)]
        if len(lines) > 1:
            parts = ", ".join(
                f"{other.seconds:,.0f} s in {costly.describe_place(other)}" for other in lines[:MAX_LINES]
            )
            evidence.append(make_evidence(parts, None, "stacks.jsonl: places"))
        if place.callers:
            evidence.append(make_evidence(f"called from {place.callers}", source="stacks.jsonl: places.callers"))
        caller = (
            None if costly.is_callees(place) else costly.find_caller(run, place) or costly.find_neighbors(run, place)
        )
        whole = caller or place
        lost_s = measured * whole.seconds / place.seconds * run.steady_device_s
        basis = "the fraction of the samples"
        if place.role == "worker":  # without it, a worker would be faster by as much, until nothing waits for it
            waited_s = run.steady_device_s * input_wait + wait_in_evaluations_s(run)
            lost_s = min(waited_s, whole.seconds / observed_s * run.steady_device_s)
        if place.role == "training" and run.num_ranks == 1:
            lost_s, basis = _lost_in_place(run, whole)
            lost_s = lost_s if idle_fraction is None else min(lost_s, idle_fraction * run.steady.device_s)
        is_info = _is_single_event(place) and cause.severity(measured) is not None
        finding = make_finding(
            run, cause, measured, evidence, lost_s=lost_s, estimate_basis=basis,
            severity="info" if is_info else None, title=costly.name_cost(place, caller), place=place.line,
            fix=_find_fix(run, cause, place),
        )  # fmt: skip
        if finding is not None:
            return finding
    return None


def _find_fix(run: RunRecords, cause: Cause, place: PlaceTotal) -> str | None:
    """The fix of a training thread that loads data which workers could prepare or do prepare, or that waits for a lock;
    None: that of the cause."""
    if place.role == "training" and place.kind in _LOADING_KINDS and not run.is_native_run:
        if not costly.has_workers(run):
            return cause.other_fixes["no workers"]
        if place.kind == "decode":
            return find_cause("slow_decode").other_fixes["despite workers"]
    return cause.other_fixes["lock"] if place.call.startswith("with ") else None


def _is_single_event(place: PlaceTotal) -> bool:
    """Whether it was seen in at most two lines of stacks.jsonl in a row: what happens once, as the end of the loaders
    of a job, is a large part of a short run only."""
    return place.bursts == 1 and place.windows <= 2 and place.window_fraction < MAX_EVENT


def _lost_in_place(run: RunRecords, place: PlaceTotal) -> tuple[float, str]:
    """(seconds of the training thread in a place, what they rest on): the place's share of the samples of a phase, by
    the clock of that: the time between steps, within the interval of the place's own samples, or the wait for input;
    else the samples, at most all after the start."""
    loads = place.kind in _LOADING_KINDS
    kinds = _LOADING_KINDS if loads else _BETWEEN_KINDS if place.kind in _BETWEEN_KINDS else ()
    others = [other for other in run.places if not other.is_startup] if loads else costly.list_places(run)
    counted = [other for other in others if other.kind in kinds and not re.search(costly.IMPORT, other.call)]
    sampled_s = sum(other.seconds for other in counted if other.role == "training")
    clock_s = run.steady.phases.get("input_wait" if loads else "host", 0.0)
    by_clock = clock_s * place.seconds / sampled_s if sampled_s > 0 else 0.0
    if place.low_s <= by_clock <= (MAX_BY_CLOCK * place.seconds if loads else place.high_s):
        what = "the wait for input" if loads else "the time between steps"
        return by_clock, f"the clock of {what}, by the places of the samples in it"
    return min(place.seconds, run.steady.device_s), "the samples of the place"


def workers_start_again(run: RunRecords, cause: Cause) -> Finding | None:
    """A loader without persistent workers starts them again for each epoch: by the clock of the hook; without it by
    workers that import modules after the first steps, as spawn and forkserver make them do."""
    steady = run.steady
    fraction = steady.worker_start_s / max(steady.wall_s, 1e-9)
    if steady.worker_start_s > 0 and _loading_s(run) >= steady.worker_start_s / 2:
        return None  # the training thread itself loads meanwhile, as a sampler does: `heavy_place`
    is_most = steady.worker_starts >= 2 and fraction >= cause.threshold("few_starts")
    if (is_most or steady.worker_starts >= cause.threshold("min_starts")) and steady.worker_start_s > 0:
        text = (
            f"worker processes were started {steady.worker_starts} times after the first step; starting and ending "
            f"them, and their first batches, took {steady.worker_start_s:,.1f} s"
        )
        source = "steps.jsonl: worker_starts, worker_start_s"
        clocked: list[Evidence | None] = [make_evidence(text, steady.worker_start_s, source)]
        if (place := find_places(run, call=costly.STARTS_WORKERS)) is not None:
            clocked.append(make_evidence(f"most often by {place.line}", place.seconds, "stacks.jsonl: places"))
        min_measured = cause.threshold("short_run") if is_short(run) else None
        lost_s = steady.worker_start_s * run.num_ranks
        return make_finding(run, cause, fraction, clocked, lost_s=lost_s, min_measured=min_measured)
    imports = find_places(run, "worker", kind="^other$", call=costly.STARTS)
    input_wait = fraction_of_phase(run, "input_wait") or run.stacks.fraction("input_wait")
    if imports is None or imports.samples < cause.threshold("min_samples") or imports.bursts < 2:
        return None
    if imports.bursts <= int(run.facts.get("workers", 1)):
        return None  # each of them was started once
    fraction = imports.seconds / run.observed_s(imports)
    text = f"the loader's workers imported modules in {percent(fraction)} of their samples after the first steps"
    evidence = [make_evidence(text, fraction, "stacks.jsonl: places"), phase_evidence(run, "input_wait")]
    if fraction < cause.threshold("min_fraction"):
        return None
    lost_s = fraction * input_wait * run.steady_device_s
    basis = "the fraction of the workers' samples, of the wait"
    return make_finding(run, cause, input_wait, evidence, lost_s=lost_s, estimate_basis=basis)


def _loading_s(run: RunRecords) -> float:
    """Seconds of the places in which the training thread itself loads, as far as they are large."""
    places = costly.heavy_places(run, find_cause("heavy_place").warning_threshold or 0.0)
    return sum(place.seconds for place in places if place.role == "training" and place.kind in _LOADING_KINDS)


def startup_heavy(run: RunRecords, cause: Cause) -> Finding | None:
    """`compile` counts as far as it belongs to the start; later compilation is `recompiles`. The fix is that of what
    delayed the start: other processes, or a compiler."""
    compile_s = max(0.0, run.phase_seconds("compile") - run.num_ranks * run.steady.phases.get("compile", 0.0))
    seconds = run.phase_seconds("startup") + compile_s
    if seconds < cause.threshold("min_duration_s") or not run.totals.steps:  # it may still be starting
        return None
    compiling = phase_evidence(run, "compile") if compile_s else None
    evidence = [phase_evidence(run, "startup"), compiling, attempts_evidence(run)]
    fraction = seconds / run.totals.device_s if run.totals.device_s > 0 else 0.0
    severity: Severity | None = "info" if is_short(run) else None
    cause_evidence, fix = _startup_cause(run, compile_s / seconds)
    evidence, minimum = [*evidence, *cause_evidence], cause.warning_threshold
    return make_finding(
        run, cause, fraction, evidence, severity=severity, min_measured=minimum, lost_s=seconds, fix=fix
    )


def _startup_cause(run: RunRecords, compile_fraction: float) -> tuple[list[Evidence | None], str | None]:
    """(evidence of what delayed the start, its fix); ([], None) if nothing stands out."""
    host, cause = run.startup_host, STARTUP_HEAVY
    others, utilization = host.other_processes_cpu.value, host.cpu_utilization.value
    if compile_fraction >= cause.threshold("compile"):
        return [], cause.other_fixes["compile"]
    if others is None or utilization is None or others < cause.threshold("contention"):
        return [], None
    if utilization < cause.threshold("busy"):
        return [], None
    text = f"during the start, the cores were {100 * utilization:.0f} % busy, {100 * others:.0f} % with other processes"
    contention = make_evidence(text, others, "devices.jsonl: cpu_core_utilization, process_cpu")
    return [contention, busiest_processes_evidence(host)], CPU_CONTENTION.fix


def costly_restarts(run: RunRecords, cause: Cause) -> Finding | None:
    count = run.totals.attempts
    fraction = run.phase_fraction("recovery")
    lost_severity = cause.severity(fraction)
    evidence: list[Evidence] = [phase_evidence(run, "recovery")] if lost_severity is not None else []
    evidence.append(attempts_evidence(run))
    count_severity: Severity | None = None
    mean_s = run.totals.wall_s / max(1, count)
    if count >= cause.threshold("attempts_warning") and mean_s <= cause.threshold("mean_s"):
        count_severity = "critical" if count >= cause.threshold("attempts_critical") else "warning"
        text = f"an attempt lasts {mean_s / 60:.1f} min on average"
        evidence.append(make_evidence(text, mean_s, "steps.jsonl: wall_s"))
    severity = worst([lost_severity, count_severity])
    if severity is None:
        return None
    lost_s = run.phase_seconds("recovery") if lost_severity is not None else None
    return make_finding(run, cause, fraction, evidence, severity=severity, lost_s=lost_s)
