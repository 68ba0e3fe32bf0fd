"""The machine: its cores, disks and storage."""

from collections.abc import Sequence

from stoker_watch.diagnosis.causes.cause import Cause, common_threshold, find_cause, worst
from stoker_watch.diagnosis.causes.explanation import Explanation
from stoker_watch.diagnosis.causes.mistakes import mistake_evidence, mistakes_of
from stoker_watch.diagnosis.causes.shared import (
    make_evidence,
    make_finding,
    percent,
    sample_evidence,
)
from stoker_watch.diagnosis.places.sampled import Cost
from stoker_watch.diagnosis.run_data import MAX_EXAMPLES, HostStats, RunRecords
from stoker_watch.findings.finding import Evidence, Finding, Severity

_ESTIMATE = "this fraction of the CPU time, of the phases that wait for the CPU"

CPU_QUOTA = find_cause("cpu_quota")
CPU_CONTENTION = find_cause("cpu_contention")
CORES_BOUND, THREADS_OVERSUBSCRIBED = find_cause("cores_bound"), find_cause("threads_oversubscribed")
DISK_NEARLY_FULL = find_cause("disk_nearly_full")


def cpu_quota(run: RunRecords, cost: Cost) -> Explanation | None:
    throttled = run.host.throttled.value
    if throttled is None:
        return None
    text = "the CPU quota withheld {} of the CPU time that the run demanded"
    evidence = [sample_evidence(text, throttled, "throttled_s"), _pressure_evidence(run)]
    return _explain_withheld(run, cost, throttled, evidence)


def cpu_contention(run: RunRecords, cost: Cost) -> Explanation | None:
    """A busy neighbor alone costs nothing: the run must have demanded more than it got."""
    taken = _cpu_taken_by_others(run)
    utilization, others, process_cpu = run.cpu_utilization, run.host.other_processes_cpu.value, run.host.process_cpu
    if taken is None or utilization is None or others is None or process_cpu.value is None:
        return None
    fraction, demanded = taken
    busy = f"the cores were {100 * utilization:.0f} % busy, {100 * others:.0f} % with other processes"
    got = f"its threads demanded {demanded:.2f} cores and got {process_cpu.value:.2f}"
    evidence = [
        make_evidence(busy, others, "devices.jsonl: cpu_core_utilization, process_cpu"),
        busiest_processes_evidence(run.host),
        make_evidence(got, fraction, "devices.jsonl: threads_running, process_cpu"),
        _pressure_evidence(run),
    ]
    return _explain_withheld(run, cost, fraction, evidence)


def _explain_withheld(
    run: RunRecords, cost: Cost, fraction: float, evidence: Sequence[Evidence | None]
) -> Explanation | None:
    """A lack of CPU time, in a cost. A run that trains on the CPU loses by it in all its work."""
    if cost.phase in ("compute", "unattributed", "eval") and not run.on_cpu:
        return None
    return Explanation(evidence=evidence, saved=min(1.0, fraction), measured=fraction, basis=_ESTIMATE)


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


def threads_oversubscribed(run: RunRecords, cost: Cost) -> Explanation | None:  # noqa: ARG001 (it is of all costs)
    """Threads that wait for cores which other processes use are not too many: only the run's part of the cores
    counts. Threads of an OpenMP pool sleep at each barrier until the last one got a core, so few of them are runnable
    at once: their number counts then, if the runnable ones wait longer than they run."""
    return _runnable_threads(run) or _threads_of_torch(run)


def _threads_of_torch(run: RunRecords) -> Explanation | None:
    """By the number that torch was told; steps that a device computes hardly use them."""
    seen = mistakes_of(run, THREADS_OVERSUBSCRIBED)
    if not seen or not run.on_cpu:
        return None
    (kind, values), *_ = seen
    evidence = [mistake_evidence(kind, values), _pressure_evidence(run)]
    return Explanation(
        evidence=evidence, saved=0.0, measured=1.0, severity=kind.severity, title=kind.title, fix=kind.fix
    )


def _runnable_threads(run: RunRecords) -> Explanation | None:
    running, cores, threshold = run.host.threads_running, run.host.cores, THREADS_OVERSUBSCRIBED.threshold
    if running.value is None or not cores or running.count < threshold("min_samples"):
        return None
    own_part = 1 - (run.host.other_processes_cpu.value or 0.0)
    own_threads, active, got = running.value * own_part, run.host.threads_active.value, run.host.process_cpu.value
    waits = got is not None and got > 0 and own_threads / got >= threshold("min_demand_ratio")
    if active is not None and waits and active >= threshold("min_active_per_core") * cores:
        text = f"{active:,.0f} threads computed by turns on {cores:g} cores, and waited for them longer than they ran"
        evidence = make_evidence(text, active / cores, "devices.jsonl: threads_active, threads_running, process_cpu")
        return Explanation(evidence=[evidence, _pressure_evidence(run)], saved=0.0, measured=active / cores)
    if own_threads - cores < threshold("min_extra_threads"):
        return None
    text = f"{running.value:,.0f} threads ran or waited for a core, on {cores:g} cores"
    evidence = make_evidence(text, running.value / cores, "devices.jsonl: threads_running, cpu_limit_cores")
    return Explanation(evidence=[evidence, _pressure_evidence(run)], saved=0.0, measured=own_threads / cores)


def cores_bound(run: RunRecords, cost: Cost) -> Explanation | None:
    """Threads that are bound to a part of the cores cost only what they demand beyond it: the part must be full. If it
    is most of the cores, too many threads are the fault; a quota hides what they would get."""
    bound, cores, demand = run.host.bound_cores, run.host.unbound_cores.value, run.host.threads_running
    demanded, got = demand.value, run.host.process_cpu.value
    if bound.value is None or cores is None or demanded is None or got is None:
        return None
    if bound.count < CORES_BOUND.threshold("min_samples") or 2 * bound.count < demand.count:
        return None
    if bound.value > CORES_BOUND.threshold("max_part") * cores or got < CORES_BOUND.threshold("busy") * bound.value:
        return None
    if CPU_QUOTA.severity(run.host.throttled.value or 0.0) is not None:
        return None
    fraction = max(0.0, demanded - got) / max(1.0, demanded)
    text = f"the threads that computed are bound to {bound.value:.2g} of {cores:g} cores"
    told = f"they demanded {demanded:.2f} cores and got {got:.2f}"
    evidence = [
        make_evidence(text, bound.value, "devices.jsonl: bound_cores, unbound_cores"),
        make_evidence(told, fraction, "devices.jsonl: threads_running, process_cpu"),
    ]
    return _explain_withheld(run, cost, fraction, evidence)


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


def children_cpu(run: RunRecords) -> float | None:
    """Cores that the job demanded for processes that do not train."""
    process_cpu, training_cpu, ratio = run.host.process_cpu.value, run.steady.process_cpu.value, cpu_demand_ratio(run)
    if process_cpu is None or training_cpu is None or ratio is None:
        return None
    return ratio * max(0.0, process_cpu - run.num_ranks * training_cpu)


def taken_by_children(run: RunRecords) -> float:
    """Fraction of the steps on a CPU by which processes of the job that do not train slow them: what all its threads
    demanded beyond the cores that they got, as far as that is the demand of these processes."""
    children, demanded, got = children_cpu(run), run.host.threads_running.value, run.host.process_cpu.value
    if not run.on_cpu or not children or demanded is None or got is None or cpu_demand_ratio(run) in (None, 1):
        return 0.0
    by_others = contended_fraction(run) * max(1.0, demanded)
    return max(0.0, min(children, demanded - got - by_others)) / max(1.0, demanded)


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


def _pressure_evidence(run: RunRecords) -> Evidence | None:
    value = run.host.psi_cpu.value
    text = f"some task waited for a core {percent(value or 0.0)} of the time"
    return None if value is None else make_evidence(text, value, "devices.jsonl: psi_cpu")


def storage_errors(run: RunRecords, cause: Cause) -> Finding | None:
    failures, warnings = list(dict.fromkeys(run.checkpoint_failures)), run.storage_warnings
    has_failed = len(run.checkpoint_failures) >= cause.threshold("failed_checkpoints")
    failure_severity: Severity | None = "warning" if has_failed else None
    severity = worst([failure_severity, cause.severity(len(warnings))])
    if severity is None:
        return None
    evidence = [make_evidence(text, source="events.jsonl: checkpoint_failed") for text in failures[:MAX_EXAMPLES]]
    evidence += [make_evidence(text, source="events.jsonl: warning") for text in warnings[-MAX_EXAMPLES:]]
    confidence = 0.95 if has_failed else None
    return make_finding(run, cause, len(warnings), evidence, severity=severity, confidence=confidence)


def disk_nearly_full(run: RunRecords, cause: Cause) -> Finding | None:
    free_bytes = run.host.disk_free_bytes.min_value
    if free_bytes is None:
        return None
    text = f"only {free_bytes / 2**20:,.0f} MiB were free at the lowest"
    return make_finding(run, cause, free_bytes, [make_evidence(text, free_bytes, "devices.jsonl: disk_free_bytes")])
