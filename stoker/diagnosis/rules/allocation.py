"""Rules of "allocation and scheduling": starts and stops, checkpoints, processors, other users of the machine.

Clocks, heat and other users of the GPUs: `gpus.py`.
"""

from stoker.diagnosis.catalogue import CATALOG
from stoker.diagnosis.rules.finding import (
    attempts_evidence,
    counter_evidence,
    cpu_taken_by_others,
    format_percent,
    fraction_of_phase,
    make_finding,
    make_phase_finding,
    phase_evidence,
)
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Evidence, Finding


def startup_heavy(run: RunRecords) -> Finding | None:
    """compile counts as far as it belongs to the start: what comes later is `recompiles`."""
    compile_s = max(0.0, run.phase_seconds("compile") - run.steady.phases.get("compile", 0.0))
    seconds = run.phase_seconds("startup") + compile_s
    if seconds < CATALOG["startup_heavy"].threshold("least_s") or not run.totals.steps:  # it may still be starting
        return None
    evidence = [
        phase_evidence(run, "startup"),
        phase_evidence(run, "compile") if compile_s else None,
        attempts_evidence(run),
    ]
    return make_finding(run, "startup_heavy", seconds / run.totals.device_s, evidence, lost_s=seconds)


def checkpoint_heavy(run: RunRecords) -> Finding | None:
    return _checkpoint_finding(run, "checkpoint_heavy", [])


def checkpoint_disk_slow(run: RunRecords) -> Finding | None:
    waiting_fraction = run.host.psi_io.value
    if waiting_fraction is None or waiting_fraction < CATALOG["checkpoint_disk_slow"].threshold("psi_io"):
        return None
    io_evidence = counter_evidence("some task waited for storage {} of the time", waiting_fraction, "psi_io")
    return _checkpoint_finding(run, "checkpoint_disk_slow", [io_evidence])


def cpu_quota(run: RunRecords) -> Finding | None:
    throttled = run.host.throttled.value
    if throttled is None:
        return None
    quota_evidence = counter_evidence(
        "the CPU quota withheld {} of the processor time that the run wanted", throttled, "throttled_s"
    )
    return make_finding(run, "cpu_quota", throttled, [quota_evidence, _cpu_pressure_evidence(run)], lost_s=_lost_to_cpu_s(run, throttled),
                 estimate_basis=_CPU_ESTIMATE)  # fmt: skip


def cpu_contention(run: RunRecords) -> Finding | None:
    """A busy neighbour alone takes nothing: the run must have wanted more than it got."""
    taken_cpu, cpu_utilization, other_processes_cpu, process_cpu = (
        cpu_taken_by_others(run),
        run.cpu_utilization,
        run.host.other_processes_cpu.value,
        run.host.process_cpu,
    )
    if taken_cpu is None or cpu_utilization is None or other_processes_cpu is None or process_cpu.value is None:
        return None
    fraction, demanded = taken_cpu
    text = f"the cores were {100 * cpu_utilization:.0f} % busy, {100 * other_processes_cpu:.0f} % with other processes"
    demand_text = f"its threads wanted {demanded:.2f} cores and got {process_cpu.value:.2f}"
    evidence = [
        Evidence(text=text, value=other_processes_cpu, source="devices.jsonl: cpu, process_cpu"),
        Evidence(text=demand_text, value=fraction, source="devices.jsonl: threads_running, process_cpu"),
        _cpu_pressure_evidence(run),
    ]
    return make_finding(
        run, "cpu_contention", fraction, evidence, lost_s=_lost_to_cpu_s(run, fraction), estimate_basis=_CPU_ESTIMATE
    )


def threads_oversubscribed(run: RunRecords) -> Finding | None:
    cause, threads_running, cores = CATALOG["threads_oversubscribed"], run.host.threads_running, run.host.cores
    if threads_running.value is None or not cores or threads_running.count < cause.threshold("samples"):
        return None
    if threads_running.value - cores < cause.threshold("more"):
        return None
    text = f"{threads_running.value:,.0f} threads ran or wanted to, on {cores:g} cores"
    thread_evidence = Evidence(
        text=text, value=threads_running.value / cores, source="devices.jsonl: threads_running, cores"
    )
    return make_finding(run, cause.id, threads_running.value / cores, [thread_evidence, _cpu_pressure_evidence(run)])


def intentional_idle(run: RunRecords) -> Finding | None:
    return make_phase_finding(run, "intentional_idle", "idle")


def work_lost_to_restarts(run: RunRecords) -> Finding | None:
    lost_s = run.phase_seconds("recovery")
    return make_finding(run, "work_lost_to_restarts", run.phase_fraction("recovery"), [phase_evidence(run, "recovery"), attempts_evidence(run)],
                 lost_s=lost_s)  # fmt: skip


def frequent_restarts(run: RunRecords) -> Finding | None:
    count = run.totals.attempts
    if not count or run.totals.wall_s / count > CATALOG["frequent_restarts"].threshold("mean_s"):
        return None
    text = f"an attempt lasts {run.totals.wall_s / count / 60:.1f} min on average"
    evidence = [
        attempts_evidence(run),
        Evidence(text=text, value=run.totals.wall_s / count, source="steps.jsonl: wall_s"),
    ]
    return make_finding(run, "frequent_restarts", count, evidence)


RULES = (
    startup_heavy, checkpoint_heavy, checkpoint_disk_slow, cpu_quota, cpu_contention, threads_oversubscribed,
    intentional_idle, work_lost_to_restarts, frequent_restarts,
)  # fmt: skip

_CPU_ESTIMATE = "this share of the processor time, of what waits for processors"


def _checkpoint_finding(run: RunRecords, cause_id: str, extra_evidence: list[Evidence | None]) -> Finding | None:
    """The last checkpoint is what the run leaves behind, so it does not count."""
    cause, count = CATALOG[cause_id], run.num_checkpoints
    if run.phase_seconds("checkpoint") < cause.threshold("least_s"):
        return None
    fraction = fraction_of_phase(run, "checkpoint")
    if fraction is None or (count and fraction * (count - 1) / count < (cause.warning_threshold or 0.0)):
        return None
    count_evidence = (
        Evidence(text=f"{count} checkpoints", value=float(count), source="events.jsonl: checkpoint") if count else None
    )
    return make_phase_finding(run, cause_id, "checkpoint", extra_evidence=[count_evidence, *extra_evidence])


def _lost_to_cpu_s(run: RunRecords, fraction: float) -> float:
    """Device-seconds that a lack of processors took: a device that computes there loses them in all that it does."""
    names = ("compute", "input_wait", "host", "unattributed", "eval") if run.on_cpu else ("input_wait", "host")
    return fraction * run.phase_seconds(*names)


def _cpu_pressure_evidence(run: RunRecords) -> Evidence | None:
    waiting_fraction = run.host.psi_cpu.value
    if waiting_fraction is None:
        return None
    return counter_evidence(
        f"some task waited for a core {format_percent(waiting_fraction)} of the time", waiting_fraction, "psi_cpu"
    )
