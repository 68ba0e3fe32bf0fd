"""The job lives and makes no progress: a hang, or TensorFlow's record reader at an empty file."""

from stoker.diagnosis.causes.cause import HEURISTIC, Cause, Threshold
from stoker.diagnosis.causes.shared import make_evidence, make_finding
from stoker.diagnosis.run_data import MAX_EXAMPLES, RunRecords
from stoker.runs.schemas import Finding

MIN_GAP_S = 10.0

HUNG = Cause(
    id="hung",
    title="The job lives and makes no progress",
    reason="failure: hang",
    symptom="no step for far longer than usual; nothing computes",
    required_records=("steps.jsonl: window_steps, t", "devices.jsonl: process_cpu"),
    critical_threshold=6.0,
    metric="time since the last step, divided by the longest time between two steps before",
    source=HEURISTIC,
    thresholds={
        "min_duration_s": Threshold(
            MIN_GAP_S, "seconds since the last step (heuristic; collectives time out after 600 s and more)"
        ),
        "idle_cpu": Threshold(0.15, "cores in use below which nothing computes (heuristic)"),
        "idle_gpu": Threshold(0.05, "utilization of every GPU below which nothing computes (heuristic)"),
        "spinning_s": Threshold(
            1800.0,
            "seconds from which it is a hang though something is busy: NCCL waits in a kernel; three times its time "
            "limit of 600 s (torch.distributed, default_pg_timeout)",
        ),
    },
    supersedes=(
        "input_bound",
        "slow_storage",
        "too_few_workers",
        "slow_decode",
        "communication_bound",
        "straggler",
        "host_device_syncs",
        "python_bound",
    ),
    confidence=0.8,
    fix="py-spy dump --pid shows where each process waits: a collective that one rank does not reach, a storage that "
    "does not answer, a lock; then end the job and continue from its checkpoint",
    command="py-spy dump --pid",
)

EMPTY_INPUT = Cause(
    id="empty_input",
    title="The job reads a file of zero bytes and does not continue",
    reason="failure: bad records",
    symptom="a core at 100 %, no step and no message: TensorFlow's record reader spins on an empty shard",
    required_records=("events.jsonl: warning with data.empty_inputs", "steps.jsonl: window_steps, t"),
    critical_threshold=1,
    metric="empty files that it has open while it prints nothing and does no step",
    source="by count; watch/recorder.py defines for how long it must print nothing",
    thresholds={
        "min_duration_s": Threshold(
            MIN_GAP_S, "seconds since the last step, if there was one: as hung; a job that does steps is not delayed"
        )
    },
    supersedes=("hung", "input_bound", "slow_storage", "too_few_workers", "slow_decode"),
    confidence=0.85,
    fix="Make or copy the named file again, or remove it from the job's list, and start the job again",
)


def hung(run: RunRecords) -> Finding | None:
    """No step for far longer than any took before, and nothing computes; or for so long that it does not matter."""
    cause, gap = HUNG, run.progress_gap
    if gap is None or gap.gap_s < cause.threshold("min_duration_s") or gap.max_earlier_gap_s <= 0:
        return None
    cpu, gpu = gap.process_cpu.value, gap.gpu_utilization.value
    gpu_is_idle = gpu is None or gpu < cause.threshold("idle_gpu")
    is_idle = cpu is not None and cpu < cause.threshold("idle_cpu") and gpu_is_idle
    if not is_idle and gap.gap_s < cause.threshold("spinning_s"):
        return None
    text = f"no step for {gap.gap_s:,.0f} s; the longest before took {gap.max_earlier_gap_s:.1f} s"
    evidence = [make_evidence(text, gap.gap_s, "steps.jsonl: t, window_steps; devices.jsonl: t")]
    if cpu is not None:
        evidence.append(make_evidence(f"the process used {cpu:.2f} cores meanwhile", cpu, "devices.jsonl: process_cpu"))
    return make_finding(
        run,
        cause,
        gap.gap_s / gap.max_earlier_gap_s,
        evidence,
        lost_s=gap.gap_s * run.num_devices,
        estimate_basis="all since the last step",
    )


def empty_input(run: RunRecords) -> Finding | None:
    files, gap, has_steps = run.empty_inputs, run.progress_gap, bool(run.totals.steps)
    if not files or (has_steps and (gap is None or gap.gap_s < EMPTY_INPUT.threshold("min_duration_s"))):
        return None
    evidence = [make_evidence(f"{path}: 0 bytes", 0.0, "events.jsonl: warning") for path in files[:MAX_EXAMPLES]]
    if gap is not None and has_steps:
        evidence.append(make_evidence(f"no step for {gap.gap_s:,.0f} s", gap.gap_s, "steps.jsonl: t; devices.jsonl: t"))
    return make_finding(run, EMPTY_INPUT, len(files), evidence)
