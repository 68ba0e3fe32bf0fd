"""Work besides the steps that takes a large part of the run: evaluation, checkpoints, starting, restarts."""

from collections.abc import Sequence
from typing import Any

import msgspec

from stoker_watch.diagnosis.causes.cause import Cause, common_threshold, find_cause, worst
from stoker_watch.diagnosis.causes.explanation import Explanation
from stoker_watch.diagnosis.causes.host import CPU_CONTENTION, busiest_processes_evidence
from stoker_watch.diagnosis.causes.shared import (
    attempts_evidence,
    fraction_of_phase,
    is_long_enough,
    is_short,
    is_very_short,
    make_evidence,
    make_finding,
    percent,
    phase_evidence,
    sample_evidence,
    waits_for_rank_0_s,
)
from stoker_watch.diagnosis.causes.steps import waits_for_own_threads
from stoker_watch.diagnosis.places.describe import (
    describe_place,
    frequency,
    is_single_event,
    loader_thread_row,
    name_cost,
    name_role,
)
from stoker_watch.diagnosis.places.grouping import CALLS, FIXES, functions_with_steps, is_decoder
from stoker_watch.diagnosis.places.sampled import TAKES_CORES, Cost, PlaceTotal
from stoker_watch.diagnosis.places.totals import find_places, merge_by
from stoker_watch.diagnosis.run_data import RunRecords
from stoker_watch.findings.finding import SEVERITIES, Evidence, Finding, Severity
from stoker_watch.runs.schemas import AFTER_STEP, WITHOUT_GRADIENTS

EVALUATION_HEAVY, CHECKPOINT_HEAVY = find_cause("evaluation_heavy"), find_cause("checkpoint_heavy")
STARTUP_HEAVY = find_cause("startup_heavy")
HEAVY_PLACE, WORKERS_START_AGAIN = find_cause("heavy_place"), find_cause("workers_start_again")
_OTHER_KINDS = frozenset({"checkpoint", "compile", "comm", AFTER_STEP, WITHOUT_GRADIENTS})
"""Kinds of places that have causes of their own."""
_WAITS_FOR_RANKS = ("comm", "straggler")
MAX_LINES = 3
"""Lines of a function that the evidence names."""
_LOADING_KINDS = ("input_wait", "decode")
"""Kinds of stacks of a training thread that loads."""


def evaluation_heavy(run: RunRecords, cost: Cost) -> Explanation | None:
    """Not of a job whose clock saw no step, as one of JAX: what looks like an evaluation to it may be the training."""
    if run.is_external and not run.phase_seconds("compute") and not run.clock_saw_steps:
        return None
    cause, eval_s, evidence = EVALUATION_HEAVY, run.phase_seconds("eval"), list[Evidence | None]()
    if not eval_s:
        return None
    if eval_s >= cause.threshold("min_duration_s"):
        evidence.append(_places_in_evaluations(run))
    place, fix = find_places(run, call=CALLS["evaluates"]), None
    if not run.is_external or place is None or place.seconds < cause.threshold("places") * eval_s:
        place = None
    else:
        text = f"most often by {describe_place(place)}"
        evidence.append(make_evidence(text, place.seconds, "stacks.jsonl: places"))
        fix = cause.other_fixes["place"].replace("PLACE", place.line)
    count = run.learning.num_evaluations
    found = _explain_repeated(run, cost, cause, "eval", count, "evaluations", "evaluated", evidence, fix=fix)
    return None if found is None else msgspec.structs.replace(found, place="" if place is None else place.line)


def _places_in_evaluations(run: RunRecords) -> Evidence | None:
    """Places in the evaluations besides forward passes."""
    have_steps = functions_with_steps(
        place for place in run.places if place.role == "training" and not place.is_startup
    )
    places = [cost.place for cost in run.costs if cost.phase == "eval" and cost.place is not None
              and cost.place.file_and_function not in have_steps]  # fmt: skip
    if sum(place.seconds for place in places) < EVALUATION_HEAVY.threshold("places") * run.phase_seconds("eval"):
        return None
    parts = ", ".join(f"{place.seconds:,.1f} s in {describe_place(place)}" for place in places[:MAX_LINES])
    return make_evidence(f"places in it: {parts}", None, "stacks.jsonl: places")


def checkpoint_heavy(run: RunRecords, cost: Cost) -> Explanation | None:
    cause = CHECKPOINT_HEAVY
    if run.is_external and not run.phase_seconds("compute", "checkpoint"):  # without a clock, as with JAX
        place = find_places(run, kind="^checkpoint$")
        named = None if place is None else make_evidence(f"most of it in {describe_place(place)}", place.seconds)
        minimum = cause.threshold("short_run") if is_short(run) else 0.0
        return Explanation(evidence=[named], min_measured=minimum, basis="the samples of the place")
    waiting, options = run.host.psi_io.value, {}
    evidence: list[Evidence | None] = []
    if waiting is not None and waiting >= cause.threshold("psi_io"):
        evidence = [sample_evidence("the disk is slow: some task waited for storage {} of the time", waiting, "psi_io")]
        options = {"command": "--run-dir", "config_patch": {}, "confidence": 0.7}
    count = run.num_checkpoints
    return _explain_repeated(
        run, cost, cause, "checkpoint", count, "checkpoints", "checkpoint_saved", evidence, **options
    )


def _explain_repeated(
    run: RunRecords, cost: Cost, cause: Cause, phase: str, count: int, noun: str, event_kind: str,
    evidence: list[Evidence | None], **options: Any,
) -> Explanation | None:  # fmt: skip
    """A phase that `count` events made. The last event does not count: the run needs it. In a short run whose events
    were not counted, the threshold is higher, unless evaluations were seen often, and evaluations in a very short one
    are info unless they take half of it."""
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
    waited_s, waits = waits_for_rank_0_s(run, phase), None
    if waited_s:
        text = f"only rank 0 did this; the others waited {waited_s:,.1f} s for it, in all"
        waits = make_evidence(text, waited_s, "ranks/*/steps.jsonl: phases")
    if cost.phase == "straggler":
        if not waited_s:
            return None
        options["saved"] = min(1.0, waited_s / run.phase_seconds("straggler"))
    return Explanation(evidence=[counted, waits, *evidence], **options)


def heavy_place(run: RunRecords, cost: Cost) -> Explanation | None:
    """A line that takes much of the time, and which nothing explains. A place is no cause: the fix lists what each
    possible one would show."""
    place, cause = cost.place, HEAVY_PLACE
    if place is None or not is_long_enough(run) or place.kind in _OTHER_KINDS or cost.phase in _WAITS_FOR_RANKS:
        return None
    is_loaders = cost.phase != TAKES_CORES and not (cost.role == "training" and has_workers(run))
    if is_loaders and is_decoder(place):
        return None
    if place.kind in waits_for_own_threads(run):
        return None  # its process computes meanwhile, as JAX's does
    is_small = 2 * cost.steady_s < run.steady.phases.get("eval", 0.0)
    if cost.phase == "eval" and (is_small or CALLS["evaluates"].search(place.call)):
        return None  # a part of the evaluations, or one as a whole
    if cost.low_s < (cause.warning_threshold or 0.0) * run.steady.wall_s:
        return None
    if place.samples < cause.threshold("min_samples") or cost.place_s < cause.threshold("min_duration_s"):
        return None
    busy = [gpu.utilization.value for gpu in run.gpus.values() if gpu.utilization.value is not None]
    saved = 1.0
    if busy and run.num_ranks == 1 and cost.role == "training":  # no more than the time in which the device was idle
        saved = min(1.0, (1 - max(busy)) * run.steady.wall_s / cost.place_s)
    return Explanation(
        evidence=_place_evidence(run, cost, cost.whole or place), saved=saved, basis="the samples of the place",
        severity="info" if is_single_event(place) else None, title=name_cost(place, cost.whole),
        place=cost.parts[0].line if "-" in place.line else place.line, fix=_find_fix(run, place),
    )  # fmt: skip


def possible_causes(run: RunRecords, group: Sequence[tuple[Finding, list[int]]]) -> Finding:
    """The place of some uncertain findings: a line, if stacks show one, else the phase."""
    first = max((finding for finding, _ in group), key=lambda finding: finding.lost_device_s or 0.0)
    costs = [run.costs[index] for index in dict.fromkeys(index for _, indices in group for index in indices)]
    largest = max(costs, key=lambda cost: cost.seconds)
    place = largest.place if 2 * largest.seconds >= sum(cost.seconds for cost in costs) else None
    where = f"the phase {costs[0].phase}" if place is None else describe_place(place)
    severity = min((finding.severity for finding, _ in group), key=SEVERITIES.index)
    if (first.lost_device_s or 0.0) < common_threshold("min_guessed_fraction") * run.steady_device_s:
        severity = "info"  # neither certain nor large
    told = [
        f"{guess.title} ({guess.confidence or 0:.0%}; it is so if {find_cause(guess.id).tell}; then: {guess.fix})"
        for guess, _ in group
    ]
    return msgspec.structs.replace(
        first,
        id=HEAVY_PLACE.id,
        title=f"{first.lost_device_s or 0:,.0f} s in {where}; the cause is not certain",
        severity=severity,
        evidence=list({item.text: item for guess, _ in group for item in guess.evidence}.values()),
        fix="Possible causes: " + "; ".join(told),
        command=None,
        config_patch={},
        confidence=None,  # the seconds are certain, and what they are of is not
        place="" if place is None else place.line,
    )


def _place_evidence(run: RunRecords, cost: Cost, whole: PlaceTotal) -> list[Evidence]:
    place = cost.place
    assert place is not None
    what = name_role(run, cost.role)
    observed_s, often = run.observed_s(place), frequency(run, place)
    text = (
        f"{what} was there {whole.seconds:,.0f} s of {observed_s:,.0f} (95 %: {whole.low_s:,.0f} to "
        f"{whole.high_s:,.0f}), in {whole.samples} samples{f', {often}' if often else ''}"
    )
    evidence = [make_evidence(text, whole.seconds / observed_s if observed_s else None, "stacks.jsonl: places")]
    if place.grown is not None:
        ratio = place.grown[1] / max(place.grown[0], place.grown[1] / 99)
        grows = f"it takes longer and longer: {ratio:.2g} times as much of the time in the end as at the beginning"
        evidence.append(make_evidence(grows, ratio, "stacks.jsonl: places"))
    leaves = sorted((count, leaf) for leaf, count in place.leaves.items() if leaf)
    if leaves and 2 * leaves[-1][0] > place.samples:
        evidence.append(make_evidence(f"mostly in {leaves[-1][1]}", leaves[-1][0], "stacks.jsonl: places.leaf"))
    lines = list(merge_by(cost.parts, lambda part: (part.line, part.function, part.call)).values())
    lines = [part for part in sorted(lines, key=lambda part: -part.seconds) if round(part.seconds)]
    if len(lines) > 1:
        parts = ", ".join(f"{part.seconds:,.0f} s in {describe_place(part)}" for part in lines[:MAX_LINES])
        evidence.append(make_evidence(parts, None, "stacks.jsonl: places"))
    if place.callers:
        evidence.append(make_evidence(f"called from {place.callers}", source="stacks.jsonl: places.callers"))
    return evidence


def _find_fix(run: RunRecords, place: PlaceTotal) -> str | None:
    """The fix of a training thread that loads data which workers could prepare or do prepare; else that of what is
    called; None: that of the cause."""
    if place.role == "training" and place.kind in _LOADING_KINDS and not run.is_native_run:
        if not has_workers(run):
            return HEAVY_PLACE.other_fixes["no workers"]
        if place.kind == "decode":
            return HEAVY_PLACE.other_fixes["despite workers"]
    name = next((name for name, pattern in FIXES.items() if pattern.search(place.call)), None)
    of_loader = loader_thread_row(run).get("faster") if place.role == "worker" else None
    grows = None if place.grown is None else HEAVY_PLACE.other_fixes["grows"]
    return ". ".join(filter(None, [grows, name and HEAVY_PLACE.other_fixes[name], of_loader])) or None


def has_workers(run: RunRecords) -> bool:
    """Whether processes of a loader, or threads, prepare the batches."""
    return bool(run.facts.get("workers")) or any(place.role == "worker" for place in run.places)


def workers_start_again(run: RunRecords, cost: Cost) -> Explanation | None:
    """A loader without persistent workers starts them again for each epoch: by the clock of the hook; without it by
    workers that import modules after the first steps, as spawn and forkserver make them do."""
    steady, cause = run.steady, WORKERS_START_AGAIN
    fraction = steady.worker_start_s / max(steady.wall_s, 1e-9)
    is_most = steady.worker_starts >= 2 and fraction >= cause.threshold("few_starts")
    waited_s = steady.phases.get("input_wait", 0.0)
    own_s = sum(one.steady_s for one in run.costs
                if one.phase == "input_wait" and one.role == "training" and one.place is not None)  # fmt: skip
    if steady.worker_start_s > 0 and own_s >= steady.worker_start_s / 2:
        return None  # the training thread itself loads meanwhile, as a sampler does
    if (is_most or steady.worker_starts >= cause.threshold("min_starts")) and steady.worker_start_s > 0:
        text = (
            f"worker processes were started {steady.worker_starts} times after the first step; starting and ending "
            f"them, and their first batches, took {steady.worker_start_s:,.1f} s"
        )
        source = "steps.jsonl: worker_starts, worker_start_s"
        clocked: list[Evidence | None] = [make_evidence(text, steady.worker_start_s, source)]
        if (place := find_places(run, call=CALLS["starts_workers"])) is not None:
            clocked.append(make_evidence(f"most often by {place.line}", place.seconds, "stacks.jsonl: places"))
        minimum = cause.threshold("short_run") if is_short(run) else 0.0
        of_s = waited_s if cost.phase == "input_wait" else steady.phases.get("eval", 0.0)
        others_s = max(0.0, steady.worker_start_s - waited_s) if cost.phase == "eval" else steady.worker_start_s
        saved = min(1.0, others_s / of_s) if of_s > 0 else 0.0
        return Explanation(evidence=clocked, saved=saved, measured=fraction, min_measured=minimum) if saved else None
    imports = find_places(run, "worker", kind="^other$", call=CALLS["starts"])
    input_wait = fraction_of_phase(run, "input_wait") or run.stacks.fraction("input_wait")
    if imports is None or imports.samples < cause.threshold("min_samples") or imports.bursts < 2:
        return None
    if imports.bursts <= int(run.facts.get("workers", 1)) or cost.phase != "input_wait":
        return None  # each of them was started once
    fraction = imports.seconds / run.observed_s(imports)
    if fraction < cause.threshold("min_fraction"):
        return None
    text = f"the loader's workers imported modules in {percent(fraction)} of their samples after the first steps"
    evidence = [make_evidence(text, fraction, "stacks.jsonl: places"), phase_evidence(run, "input_wait")]
    basis = "the fraction of the workers' samples, of the wait"
    return Explanation(evidence=evidence, saved=fraction, measured=input_wait, basis=basis)


def rare_worker_start_fraction(run: RunRecords) -> float:
    """Fraction of the time after the start in which the training waited for loader workers that were started once more,
    as after the first epoch of a short run: a wait that will be rare. 0 if they are started again and again."""
    steady = run.steady
    if not run.is_external or steady.worker_starts >= WORKERS_START_AGAIN.threshold("min_starts"):
        return 0.0
    return min(steady.worker_start_s, steady.phases.get("input_wait", 0.0)) / max(steady.wall_s, 1e-9)


def startup_heavy(run: RunRecords, cost: Cost) -> Explanation | None:
    """`compile` counts as far as it belongs to the start; later compilation is `recompiles`. The fix is that of what
    delayed the start: other processes, or a compiler."""
    compile_s = max(0.0, run.phase_seconds("compile") - run.num_ranks * run.steady.phases.get("compile", 0.0))
    seconds = run.phase_seconds("startup") + compile_s
    if seconds < STARTUP_HEAVY.threshold("min_duration_s") or not run.totals.steps:  # it may still be starting
        return None
    outside_s = cost.seconds - cost.steady_s if cost.phase == "compile" else cost.seconds
    if cost.place is not None or outside_s <= 0:
        return None
    cause_evidence, fix = _startup_cause(run, compile_s / seconds)
    return Explanation(
        evidence=[phase_evidence(run, "compile") if compile_s else None, attempts_evidence(run), *cause_evidence],
        saved=outside_s / cost.seconds, measured=seconds / run.totals.device_s if run.totals.device_s > 0 else 0.0,
        min_measured=STARTUP_HEAVY.warning_threshold or 0.0, severity="info" if is_short(run) else None, fix=fix,
    )  # fmt: skip


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
