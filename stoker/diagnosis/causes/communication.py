"""Devices wait for each other: one slow rank, or collectives that computing does not hide."""

from stoker.diagnosis.causes.cause import Cause, find_cause
from stoker.diagnosis.causes.host import contended_fraction
from stoker.diagnosis.causes.shared import (
    fraction_of_phase,
    make_evidence,
    make_finding,
    make_phase_finding,
    make_stack_finding,
    percent,
    phase_evidence,
)
from stoker.diagnosis.run_data import RunRecords
from stoker.findings.finding import Finding

STRAGGLER = find_cause("straggler")


def straggler(run: RunRecords, cause: Cause) -> Finding | None:
    """Only if most of the waiting is for one rank: ranks that are late in turn have another cause."""
    waits = run.totals.straggler_s
    waited_s, fraction = run.phase_seconds("straggler"), fraction_of_phase(run, "straggler")
    if fraction is None or waited_s <= 0:
        return None
    slowest_evidence = None
    if waits:
        rank = max(waits, key=lambda name: waits[name])
        if waits[rank] / sum(waits.values()) < cause.threshold("min_slowest_fraction"):
            return None
        text = f"rank {rank} is the slow one: the others waited {waits[rank]:,.1f} device-seconds for it"
        slowest_evidence = make_evidence(text, rank, "ranks/*/steps.jsonl: phases.comm")
    waiting_fraction = fraction * run.num_ranks / (run.num_ranks - 1) if run.num_ranks > 1 else fraction
    evidence = [slowest_evidence, phase_evidence(run, "straggler")]
    confidence = None if slowest_evidence else 0.6
    return make_finding(
        run,
        cause,
        waiting_fraction,
        evidence,
        lost_s=waited_s,
        min_measured=_min_fraction(run),
        confidence=confidence,
    )


def _min_fraction(run: RunRecords) -> float | None:
    return (
        STRAGGLER.threshold("warning_threshold_on_cpu") + contended_fraction(run) / 4
        if run.is_external and run.on_cpu
        else None
    )


def communication_bound(run: RunRecords, cause: Cause) -> Finding | None:
    min_measured = _min_fraction(run)
    if run.phase_seconds("comm") > 0:
        return make_phase_finding(run, cause, "comm", min_measured=min_measured)
    traces = run.traces
    if traces.wall_s <= 0 or traces.comm_s <= 0:
        return make_stack_finding(run, cause, "a collective", "comm", min_measured=min_measured)
    fraction = traces.comm_s / traces.wall_s
    text = f"only collectives ran in {percent(fraction)} of {traces.steps} traced steps"
    return make_finding(
        run,
        cause,
        fraction,
        [make_evidence(text, fraction, "traces.jsonl: comm_s")],
        lost_s=fraction * run.phase_seconds("compute"),
        estimate_basis="the traced fraction of the time in steps",
    )
