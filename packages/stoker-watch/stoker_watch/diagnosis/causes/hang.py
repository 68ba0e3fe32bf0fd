"""A job that lives and makes no progress."""

import msgspec

from stoker_watch.diagnosis import postmortem
from stoker_watch.diagnosis.causes.cause import Cause
from stoker_watch.diagnosis.causes.shared import make_evidence, make_finding
from stoker_watch.diagnosis.endings import endings, find_raising_lines, find_thread_exceptions
from stoker_watch.diagnosis.places.grouping import CALLS
from stoker_watch.diagnosis.places.stuck import LAUNCHES, MAIN_FRACTION, describe_stuck, stuck_places
from stoker_watch.diagnosis.run_data import MAX_EXAMPLES, ProgressGap, RunRecords
from stoker_watch.findings.finding import Evidence, Finding

MIN_WAITS = 40
"""Samples of a training thread from which it is known to wait all the time."""


def hung(run: RunRecords, cause: Cause) -> Finding | None:
    """No step for far longer than any took before, and nothing computes but a loader for which the training waits all
    that time; or for so long that it does not matter. Before the first step: all that trains waits in one line, and
    nothing computes."""
    gap = run.progress_gap
    if gap is None and not run.totals.steps:
        return _hung_at_the_start(run, cause)
    if gap is None or gap.gap_s < cause.threshold("min_duration_s") or gap.max_earlier_gap_s <= 0:
        return None
    cpu, gpu = gap.process_cpu.value, gap.gpu_utilization.value
    gpu_is_idle = gpu is None or gpu < cause.threshold("idle_gpu")
    is_idle = cpu is not None and cpu < cause.threshold("idle_cpu") and gpu_is_idle
    spins = gap.gap_s >= cause.threshold("spinning_loader_s") and _waits_for_one_batch(run, gap)
    if not is_idle and not spins and gap.gap_s < cause.threshold("spinning_s"):
        return None
    text = f"no step for {gap.gap_s:,.0f} s; the longest before took {gap.max_earlier_gap_s:.1f} s"
    evidence = [make_evidence(text, gap.gap_s, "steps.jsonl: t, window_steps; devices.jsonl: t")]
    if cpu is not None:
        evidence.append(make_evidence(f"the process used {cpu:.2f} cores meanwhile", cpu, "devices.jsonl: process_cpu"))
    output = run.read_output() if run.termination is None else run.termination.output
    ended_threads = find_thread_exceptions(output)
    for span in ended_threads[-1:]:
        line, own = output[span[1]], find_raising_lines(output, span)
        at = f", raised at {own[0]}" if own else ""
        evidence.append(make_evidence(f"a thread ended by {line.text}{at}", source=line.source))
    measured, lost_s = gap.gap_s / gap.max_earlier_gap_s, gap.gap_s * run.num_devices
    evidence, basis = [*evidence, *stuck_evidence(run)], "all since the last step"
    fix = cause.other_fixes["thread"] if ended_threads else None
    title = "" if run.termination is None else f"No progress in the last {gap.gap_s:,.0f} s before it ended"
    finding = make_finding(run, cause, measured, evidence, title=title, lost_s=lost_s, estimate_basis=basis, fix=fix)
    return None if finding is None else name_stuck(run, finding)


def _waits_for_one_batch(run: RunRecords, gap: ProgressGap) -> bool:
    """Whether training threads were in a wait for their loaders in each of the newest samples, and for all this time by
    the clock: an evaluation computes meanwhile, and its waits are its own."""
    newest = [window for window in run.newest_stacks.values() if window.role == "training"]
    waits = [window.samples >= MIN_WAITS and window.main_thread.get("input_wait", 0.0) >= 1 for window in newest]
    return bool(waits) and all(waits) and gap.waited_s >= MAIN_FRACTION * gap.gap_s


def _hung_at_the_start(run: RunRecords, cause: Cause) -> Finding | None:
    end, stalls = run.events.end, run.start_stalls
    others = [
        window
        for process, window in run.newest_stacks.items()
        if window.role == "training" and process not in stalls
        and any(place.line and not LAUNCHES.search(place.call) for place in window.places)
    ]  # fmt: skip
    stuck = [stall for stall in stalls.values() if not LAUNCHES.search(stall.place.call)]
    if not stuck or others or (end is not None and end.kind == "finished"):
        return None
    longest = max(stuck, key=lambda stall: stall.until_t - stall.since_t)
    duration_s = longest.until_t - longest.since_t
    if duration_s < cause.threshold("start_reading_s" if CALLS["reads"].search(longest.place.call) else "start_s"):
        return None
    used = [cores for t, cores in run.start_cpu if longest.since_t <= t <= longest.until_t]
    cpu = sum(used) / len(used) if used else 1.0
    if cpu >= cause.threshold("idle_cpu"):
        return None
    where = f"{longest.place.call or longest.place.function} at {longest.place.line}"
    finding = make_finding(
        run, cause, duration_s,
        [make_evidence(f"no step so far, and all {duration_s:,.0f} s in {where}", duration_s, "stacks.jsonl: places"),
         make_evidence(f"the job used {cpu:.2f} cores meanwhile", cpu, "devices.jsonl: process_cpu"),
         *stuck_evidence(run)],
        severity="critical", lost_s=duration_s * run.num_devices, estimate_basis="all in this line",
    )  # fmt: skip
    return None if finding is None else name_stuck(run, finding)


def stuck_evidence(run: RunRecords) -> list[Evidence]:
    """Who does not go on, and where; and who only waits for that."""
    stuck, waiting = stuck_places(run)
    texts = [
        f"{describe_stuck(who, place)}{f', in {place.function}' if place.function else ''}" for who, place, _ in stuck
    ]
    for who, place, _ in waiting:
        where = f"in {place.call or place.function} at {place.line}"
        texts.append(f"{who} only waits for {'it' if stuck else 'others'}, {where}")
    return [make_evidence(text, source="stacks.jsonl: places") for text in texts[:MAX_EXAMPLES]]


def name_stuck(run: RunRecords, finding: Finding) -> Finding:
    """The finding of a hang with who is stuck in its title, or that ranks wait at different lines, if the stacks show
    it."""
    stuck, waiting = stuck_places(run)
    if (stuck or waiting) and finding.id == "hung":
        pid = (stuck or waiting)[0].pid
        finding = msgspec.structs.replace(
            finding, command=f"{finding.command} {pid}", fix=finding.fix.replace("--pid", f"--pid {pid}", 1)
        )
    if stuck:
        title = f"{finding.title}: {describe_stuck(stuck[0].who, stuck[0].place)}"
        return msgspec.structs.replace(finding, title=title, place=stuck[0].place.line)
    lines: dict[str, list[str]] = {}
    for who, place, _ in waiting:
        lines.setdefault(f"in {place.call or place.function} at {place.line}", []).append(who)
    if len(lines) < 2 or run.num_ranks < 2:
        return finding
    told = ", ".join(f"{' and '.join(whose)} {where}" for where, whose in lines.items())
    return msgspec.structs.replace(finding, title=f"{finding.title}: the ranks wait at different lines, {told}")


def empty_input(run: RunRecords, cause: Cause) -> Finding | None:
    files, gap, has_steps = run.empty_inputs, run.progress_gap, bool(run.totals.steps)
    if not files or (has_steps and (gap is None or gap.gap_s < cause.threshold("min_duration_s"))):
        return None
    evidence = [make_evidence(f"{path}: 0 bytes", 0.0, "events.jsonl: warning") for path in files[:MAX_EXAMPLES]]
    if gap is not None and has_steps:
        evidence.append(make_evidence(f"no step for {gap.gap_s:,.0f} s", gap.gap_s, "steps.jsonl: t; devices.jsonl: t"))
    return make_finding(run, cause, len(files), evidence)


def explain_hang(run: RunRecords, ends: list[Finding], others: list[Finding]) -> list[Finding]:
    """What ended a job, of a hang with who is stuck; of one that lives and hangs, what it has printed of a failure."""
    if ends and endings()[ends[0].id].reason == "failure: hang":
        shown = msgspec.structs.replace(ends[0], evidence=ends[0].evidence + stuck_evidence(run))
        return [name_stuck(run, shown), *ends[1:]]
    if not ends and any(found.id == "hung" for found in others):
        return postmortem.explain_hang(run.read_output(), has_stepped=run.totals.steps > 0)
    return ends
