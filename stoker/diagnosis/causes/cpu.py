"""Too little CPU time: a container's quota, other processes, or too many threads; and how much the run demanded."""

from stoker.diagnosis.causes.cause import common_threshold, find_cause
from stoker.diagnosis.causes.shared import make_evidence, make_finding, percent, sample_evidence
from stoker.diagnosis.run_data import MAX_EXAMPLES, HostStats, RunRecords
from stoker.findings.finding import Evidence, Finding

_ESTIMATE = "this fraction of the CPU time, of the phases that wait for the CPU"

CPU_QUOTA = find_cause("cpu_quota")

CPU_CONTENTION = find_cause("cpu_contention")

THREADS_OVERSUBSCRIBED = find_cause("threads_oversubscribed")


def cpu_quota(run: RunRecords) -> Finding | None:
    throttled = run.host.throttled.value
    if throttled is None:
        return None
    text = "the CPU quota withheld {} of the CPU time that the run demanded"
    evidence = [sample_evidence(text, throttled, "throttled_s"), _pressure_evidence(run)]
    lost_s = _lost_device_s(run, throttled)
    return make_finding(run, CPU_QUOTA, throttled, evidence, lost_s=lost_s, estimate_basis=_ESTIMATE)


def cpu_contention(run: RunRecords) -> Finding | None:
    """A busy neighbor alone costs nothing: the run must have demanded more than it got."""
    taken = _cpu_taken_by_others(run)
    utilization, others, process_cpu = run.cpu_utilization, run.host.other_processes_cpu.value, run.host.process_cpu
    if taken is None or utilization is None or others is None or process_cpu.value is None:
        return None
    fraction, demanded = taken
    evidence = [
        make_evidence(
            f"the cores were {100 * utilization:.0f} % busy, {100 * others:.0f} % with other processes",
            others,
            "devices.jsonl: cpu_core_utilization, process_cpu",
        ),
        busiest_processes_evidence(run.host),
        make_evidence(
            f"its threads demanded {demanded:.2f} cores and got {process_cpu.value:.2f}",
            fraction,
            "devices.jsonl: threads_running, process_cpu",
        ),
        _pressure_evidence(run),
    ]
    lost_s = _lost_device_s(run, fraction)
    return make_finding(run, CPU_CONTENTION, fraction, evidence, lost_s=lost_s, estimate_basis=_ESTIMATE)


def contended_fraction(run: RunRecords) -> float:
    """Fraction by which other processes slowed the run down; 0 if it is not known."""
    taken = _cpu_taken_by_others(run)
    return 0.0 if taken is None else taken[0]


def busiest_processes_evidence(host: HostStats) -> Evidence | None:
    """The names of the other processes that used most CPU time, and how many cores on average."""
    count = host.other_processes_cpu.count
    if not host.busiest_processes or not count:
        return None
    busiest = sorted(host.busiest_processes.items(), key=lambda item: -item[1])[:MAX_EXAMPLES]
    names = ", ".join(f"{name} ({cores / count:.2f} cores)" for name, cores in busiest)
    text = f"the busiest other processes: {names}"
    return make_evidence(text, sum(cores for _, cores in busiest) / count, "devices.jsonl: busiest_processes")


def threads_oversubscribed(run: RunRecords) -> Finding | None:
    """Threads that wait for cores which other processes use are not too many: only the run's part of the cores
    counts."""
    cause, running, cores = THREADS_OVERSUBSCRIBED, run.host.threads_running, run.host.cores
    if running.value is None or not cores or running.count < cause.threshold("min_samples"):
        return None
    own_threads = running.value * (1 - (run.host.other_processes_cpu.value or 0.0))
    if own_threads - cores < cause.threshold("min_extra_threads"):
        return None
    text = f"{running.value:,.0f} threads ran or waited for a core, on {cores:g} cores"
    threads_evidence = make_evidence(text, running.value / cores, "devices.jsonl: threads_running, cpu_limit_cores")
    return make_finding(run, cause, own_threads / cores, [threads_evidence, _pressure_evidence(run)])


def cpu_demand(run: RunRecords) -> float | None:
    """Cores that the run used, or would have used without other processes and quotas. None if there are few samples, or
    if an unknown amount of CPU time was withheld."""
    process_cpu, ratio = run.host.process_cpu, cpu_demand_ratio(run)
    if process_cpu.value is None or process_cpu.count < common_threshold("min_samples") or ratio is None:
        return None
    return process_cpu.value * ratio


def cpu_demand_ratio(run: RunRecords) -> float | None:
    """CPU time that the run's threads demanded divided by what they got: 1 while the cores are not saturated. None if
    they are saturated, also by other processes, and the threads were not counted."""
    utilization, others = run.cpu_utilization, run.host.other_processes_cpu.value
    if run.is_external and utilization is None:
        return None  # without telemetry, a thread that waits cannot be told from one that gets no core
    is_saturated = utilization is not None and utilization >= CPU_CONTENTION.threshold("busy")
    is_throttled = CPU_QUOTA.severity(run.host.throttled.value or 0.0) is not None
    if not is_saturated and not is_throttled:
        return 1.0
    process_cpu, demanded = run.host.process_cpu.value, run.host.threads_running.value
    if process_cpu and demanded is not None:
        return max(1.0, demanded / process_cpu)
    if is_throttled or (others is not None and CPU_CONTENTION.severity(others) is not None):
        return None
    return 1.0


def thread_cpu_utilization(run: RunRecords, *phases: str) -> float | None:
    """CPU-seconds that the training thread demanded per second of these phases, after the start, if it computes by
    itself. None: not measured, or a GPU computes, whose phases are not the thread's."""
    duration_s, ratio = sum(run.steady.phases.get(name, 0.0) for name in phases), cpu_demand_ratio(run)
    if not run.steady.thread_cpu_s or not run.on_cpu or duration_s <= 0 or ratio is None:
        return None
    return ratio * sum(run.steady.thread_cpu_s.get(name, 0.0) for name in phases) / duration_s


def _cpu_taken_by_others(run: RunRecords) -> tuple[float, float] | None:
    """(fraction by which other processes slowed the run, cores that its threads demanded).

    Demand of up to one core: the fraction of the time in which the thread waited while others had its core. Demand of
    more: the fraction of the demand. Time that a quota or the run's own threads withheld does not count. None if the
    cores are not saturated, or the threads were not counted.
    """
    utilization, others, cores = run.cpu_utilization, run.host.other_processes_cpu.value, run.host.cores
    process_cpu, demanded = run.host.process_cpu, run.host.threads_running.value
    if utilization is None or others is None or not cores or process_cpu.value is None or demanded is None:
        return None
    if utilization < CPU_CONTENTION.threshold("busy") or process_cpu.count < common_threshold("min_samples"):
        return None
    if demanded <= 0:
        return None
    throttled_cores = (run.host.throttled.value or 0.0) * process_cpu.value
    missing_cores = min(others * cores, demanded - process_cpu.value) - throttled_cores
    return max(0.0, missing_cores) / max(1.0, demanded), demanded


def _lost_device_s(run: RunRecords, fraction: float) -> float:
    """Device-seconds that a lack of CPU time cost. A run that trains on the CPU loses them in all its work."""
    names = ("compute", "input_wait", "host", "unattributed", "eval") if run.on_cpu else ("input_wait", "host")
    return fraction * run.phase_seconds(*names)


def _pressure_evidence(run: RunRecords) -> Evidence | None:
    value = run.host.psi_cpu.value
    text = f"some task waited for a core {percent(value or 0.0)} of the time"
    return None if value is None else make_evidence(text, value, "devices.jsonl: psi_cpu")
