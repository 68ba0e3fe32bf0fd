"""Work besides the steps that takes a large part of the run: evaluation, checkpoints, starting, restarts."""

from typing import Any

from stoker.diagnosis.causes.cause import Cause, find_cause, worst
from stoker.diagnosis.causes.host import CPU_CONTENTION, busiest_processes_evidence
from stoker.diagnosis.causes.shared import (
    attempts_evidence,
    is_short,
    is_very_short,
    make_evidence,
    make_finding,
    make_repeated_phase_finding,
    phase_evidence,
    sample_evidence,
)
from stoker.diagnosis.run_data import RunRecords
from stoker.findings.finding import Evidence, Finding, Severity

EVALUATION_HEAVY = find_cause("evaluation_heavy")

STARTUP_HEAVY = find_cause("startup_heavy")


def evaluation_heavy(run: RunRecords, cause: Cause) -> Finding | None:
    count = run.learning.num_evaluations
    count_evidence = make_evidence(f"{count} evaluations", count, "events.jsonl: evaluated")
    options = _short_run_options(run, cause, count)
    return make_repeated_phase_finding(run, cause, "eval", count, count_evidence, **options)


def checkpoint_heavy(run: RunRecords, cause: Cause) -> Finding | None:
    count, waiting = run.num_checkpoints, run.host.psi_io.value
    count_evidence = make_evidence(f"{count} checkpoints", count, "events.jsonl: checkpoint_saved")
    options = _short_run_options(run, cause, count)
    if waiting is None or waiting < cause.threshold("psi_io"):
        return make_repeated_phase_finding(run, cause, "checkpoint", count, count_evidence, **options)
    text = "the disk is slow: some task waited for storage {} of the time"
    return make_repeated_phase_finding(
        run,
        cause,
        "checkpoint",
        count,
        count_evidence,
        extra_evidence=[sample_evidence(text, waiting, "psi_io")],
        command="--run-dir",
        config_patch={},
        confidence=0.7,
        **options,
    )


def _short_run_options(run: RunRecords, cause: Cause, count: int) -> dict[str, Any]:
    """Options of a finding: in a short run whose evaluations or checkpoints were not counted, a higher threshold; info
    in a very short one."""
    if not is_short(run) or count:
        return {}
    is_info = cause is EVALUATION_HEAVY and is_very_short(run)
    return {"min_measured": cause.threshold("short_run"), "severity": "info" if is_info else None}


def startup_heavy(run: RunRecords, cause: Cause) -> Finding | None:
    """`compile` counts as far as it belongs to the start; later compilation is `recompiles`. The fix is that of what
    delayed the start: other processes, or a compiler."""
    compile_s = max(0.0, run.phase_seconds("compile") - run.steady.phases.get("compile", 0.0))
    seconds = run.phase_seconds("startup") + compile_s
    if seconds < cause.threshold("min_duration_s") or not run.totals.steps:  # it may still be starting
        return None
    evidence = [
        phase_evidence(run, "startup"),
        phase_evidence(run, "compile") if compile_s else None,
        attempts_evidence(run),
    ]
    fraction = seconds / run.totals.device_s
    severity: Severity | None = "info" if is_short(run) else None
    cause_evidence, fix = _startup_cause(run, compile_s / seconds)
    return make_finding(
        run,
        cause,
        fraction,
        [*evidence, *cause_evidence],
        severity=severity,
        min_measured=cause.warning_threshold,
        lost_s=seconds,
        fix=fix,
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
        evidence.append(
            make_evidence(f"an attempt lasts {mean_s / 60:.1f} min on average", mean_s, "steps.jsonl: wall_s")
        )
    severity = worst([lost_severity, count_severity])
    if severity is None:
        return None
    lost_s = run.phase_seconds("recovery") if lost_severity is not None else None
    return make_finding(run, cause, fraction, evidence, severity=severity, lost_s=lost_s)
