"""Devices wait for each other: one slow rank, or collectives that computing does not hide."""

from stoker.diagnosis.causes.cause import Cause, Threshold
from stoker.diagnosis.causes.cpu import contended_fraction
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
from stoker.runs.schemas import Finding

MIN_CPU_FRACTION = Threshold(
    0.20,
    "threshold of a watched job that trains on CPUs, plus a quarter of what others took: ranks share cores "
    "with each other, with gloo's threads and with other processes, so they are late by turns (heuristic)",
)

STRAGGLER = Cause(
    id="straggler",
    title="One rank is slower than the others, and all wait for it",
    reason="communication",
    symptom="every collective waits for the same rank; its own waits are short",
    required_records=("steps.jsonl and ranks/*/steps.jsonl: phases.comm or straggler",),
    warning_threshold=0.08,
    critical_threshold=0.25,
    metric="straggler, fraction of the device time after the start of the ranks that wait",
    source="heuristic: ranks on equal machines differ by less",
    thresholds={
        "warning_threshold_on_cpu": MIN_CPU_FRACTION,
        "min_slowest_fraction": Threshold(
            0.6, "fraction of the waiting that is for one rank: it is slow; otherwise ranks are late in turn"
        ),
    },
    supersedes=("communication_bound",),
    confidence=0.85,
    fix="Look at that rank's machine: a GPU that is throttled, other jobs, a slower disk, more or larger images in "
    "its part of the data; move it, or give every rank the same work",
)

COMMUNICATION_BOUND = Cause(
    id="communication_bound",
    title="The all-reduce of gradients is not hidden by computing",
    reason="communication",
    symptom="more devices gain little; all ranks wait about as long in each collective",
    required_records=("steps.jsonl: phases.comm (or traces.jsonl: comm_s, or stacks.jsonl: main_thread.comm)",),
    warning_threshold=0.10,
    critical_threshold=0.30,
    metric="comm, fraction of the device time after the start",
    source="heuristic: DistributedDataParallel hides nearly all of it on a good link (Li et al. 2020, figure 6)",
    thresholds={"warning_threshold_on_cpu": MIN_CPU_FRACTION},
    probe="no_allreduce",
    confidence=0.75,
    fix="Use a faster link (NVLink, one machine instead of two, the network of the provider's GPU clusters; "
    "NCCL_DEBUG=INFO shows which is used), fewer bytes (bf16 gradients), or fewer all-reduces (--grad-accum-steps, a "
    "larger --batch-size)",
    external_fix="Use a faster link (NVLink, one machine instead of two, the network of the provider's GPU clusters; "
    "NCCL_DEBUG=INFO shows which is used), fewer bytes (bf16 gradients, DistributedDataParallel's "
    "bf16_compress_hook), or fewer all-reduces (no_sync() over several batches, a larger batch)",
    command="--grad-accum-steps 2",
    config_patch={"grad_accum_steps": 2},
)


def straggler(run: RunRecords) -> Finding | None:
    """Only if most of the waiting is for one rank: ranks that are late in turn have another cause."""
    waits = run.totals.straggler_s
    waited_s, fraction = run.phase_seconds("straggler"), fraction_of_phase(run, "straggler")
    if fraction is None or waited_s <= 0:
        return None
    slowest_evidence = None
    if waits:
        rank = max(waits, key=lambda name: waits[name])
        if waits[rank] / sum(waits.values()) < STRAGGLER.threshold("min_slowest_fraction"):
            return None
        text = f"rank {rank} is the slow one: the others waited {waits[rank]:,.1f} device-seconds for it"
        slowest_evidence = make_evidence(text, rank, "ranks/*/steps.jsonl: phases.comm")
    waiting_fraction = fraction * run.num_ranks / (run.num_ranks - 1) if run.num_ranks > 1 else fraction
    evidence = [slowest_evidence, phase_evidence(run, "straggler")]
    confidence = None if slowest_evidence else 0.6
    return make_finding(
        run,
        STRAGGLER,
        waiting_fraction,
        evidence,
        lost_s=waited_s,
        min_measured=_min_fraction(run),
        confidence=confidence,
    )


def _min_fraction(run: RunRecords) -> float | None:
    return MIN_CPU_FRACTION.value + contended_fraction(run) / 4 if run.is_external and run.on_cpu else None


def communication_bound(run: RunRecords) -> Finding | None:
    min_measured = _min_fraction(run)
    if run.phase_seconds("comm") > 0:
        return make_phase_finding(run, COMMUNICATION_BOUND, "comm", min_measured=min_measured)
    traces = run.traces
    if traces.wall_s <= 0 or traces.comm_s <= 0:
        return make_stack_finding(run, COMMUNICATION_BOUND, "a collective", "comm", min_measured=min_measured)
    fraction = traces.comm_s / traces.wall_s
    text = f"only collectives ran in {percent(fraction)} of {traces.steps} traced steps"
    return make_finding(
        run,
        COMMUNICATION_BOUND,
        fraction,
        [make_evidence(text, fraction, "traces.jsonl: comm_s")],
        lost_s=fraction * run.phase_seconds("compute"),
        estimate_basis="the traced fraction of the time in steps",
    )
