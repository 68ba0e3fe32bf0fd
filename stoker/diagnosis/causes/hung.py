"""The job lives and makes no progress: a hang, or TensorFlow's record reader at an empty file."""

from stoker.diagnosis.causes.cause import find_cause
from stoker.diagnosis.causes.shared import make_evidence, make_finding
from stoker.diagnosis.run_data import MAX_EXAMPLES, RunRecords
from stoker.findings.finding import Finding

HUNG = find_cause("hung")

EMPTY_INPUT = find_cause("empty_input")


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
