"""The machine: its cores, memory, disks and open files; and a job that makes no progress on it."""

import dataclasses
from typing import Any

import msgspec

from stoker_watch.diagnosis.causes.cause import Cause, common_threshold, find_cause, worst
from stoker_watch.diagnosis.causes.mistakes import mistake_evidence, mistakes_of
from stoker_watch.diagnosis.causes.shared import (
    fit_stairs,
    fit_steady_growth,
    format_duration,
    make_evidence,
    make_finding,
    percent,
    sample_evidence,
)
from stoker_watch.diagnosis.endings import find_raising_lines, find_thread_exceptions
from stoker_watch.diagnosis.places.costly import MAIN_FRACTION, READS
from stoker_watch.diagnosis.places.stuck import LAUNCHES, describe_stuck, stuck_places
from stoker_watch.diagnosis.run_data import MAX_EXAMPLES, HostStats, LinearFit, ProgressGap, RunRecords, TimeSeries
from stoker_watch.findings.finding import Evidence, Finding, Severity
from stoker_watch.runs.schemas import Holder

_ESTIMATE = "this fraction of the CPU time, of the phases that wait for the CPU"

CPU_QUOTA = find_cause("cpu_quota")
CPU_CONTENTION = find_cause("cpu_contention")
HOST_MEMORY_NEAR_LIMIT = find_cause("host_memory_near_limit")
HOST_MEMORY_LEAK = find_cause("host_memory_leak")
SHARED_MEMORY_SMALL = find_cause("shared_memory_small")
FD_LIMIT_NEAR = find_cause("fd_limit_near")
GIB = 2**30
MIN_WAITS = 40
"""Samples of a training thread from which it is known to wait all the time."""


def cpu_quota(run: RunRecords, cause: Cause) -> Finding | None:
    throttled = run.host.throttled.value
    if throttled is None:
        return None
    text = "the CPU quota withheld {} of the CPU time that the run demanded"
    evidence = [sample_evidence(text, throttled, "throttled_s"), _pressure_evidence(run)]
    lost_s = _lost_device_s(run, throttled)
    return make_finding(run, cause, throttled, evidence, lost_s=lost_s, estimate_basis=_ESTIMATE)


def cpu_contention(run: RunRecords, cause: Cause) -> Finding | None:
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
    lost_s = _lost_device_s(run, fraction)
    return make_finding(run, cause, fraction, evidence, lost_s=lost_s, estimate_basis=_ESTIMATE)


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


def threads_oversubscribed(run: RunRecords, cause: Cause) -> Finding | None:
    """Threads that wait for cores which other processes use are not too many: only the run's part of the cores
    counts. Threads of an OpenMP pool sleep at each barrier until the last one got a core, so few of them are runnable
    at once: their number counts then, if the runnable ones wait longer than they run."""
    return _runnable_threads(run, cause) or _threads_of_torch(run, cause)


def _threads_of_torch(run: RunRecords, cause: Cause) -> Finding | None:
    """By the number that torch was told; steps that a device computes hardly use them."""
    seen = mistakes_of(run, cause)
    if not seen or not run.on_cpu:
        return None
    (kind, values), *_ = seen
    threads_evidence = [mistake_evidence(kind, values), _pressure_evidence(run)]
    return make_finding(run, cause, 1.0, threads_evidence, severity=kind.severity, title=kind.title, fix=kind.fix)


def _runnable_threads(run: RunRecords, cause: Cause) -> Finding | None:
    running, cores = run.host.threads_running, run.host.cores
    if running.value is None or not cores or running.count < cause.threshold("min_samples"):
        return None
    own_part = 1 - (run.host.other_processes_cpu.value or 0.0)
    own_threads, active, got = running.value * own_part, run.host.threads_active.value, run.host.process_cpu.value
    waits = got is not None and got > 0 and own_threads / got >= cause.threshold("min_demand_ratio")
    if active is not None and waits and active >= cause.threshold("min_active_per_core") * cores:
        text = f"{active:,.0f} threads computed by turns on {cores:g} cores, and waited for them longer than they ran"
        evidence = make_evidence(text, active / cores, "devices.jsonl: threads_active, threads_running, process_cpu")
        return make_finding(run, cause, active / cores, [evidence, _pressure_evidence(run)])
    if own_threads - cores < cause.threshold("min_extra_threads"):
        return None
    text = f"{running.value:,.0f} threads ran or waited for a core, on {cores:g} cores"
    threads_evidence = make_evidence(text, running.value / cores, "devices.jsonl: threads_running, cpu_limit_cores")
    return make_finding(run, cause, own_threads / cores, [threads_evidence, _pressure_evidence(run)])


def cores_bound(run: RunRecords, cause: Cause) -> Finding | None:
    """Threads that are bound to a part of the cores cost only what they demand beyond it: the part must be full. If it
    is most of the cores, too many threads are the fault; a quota hides what they would get."""
    bound, cores, demand = run.host.bound_cores, run.host.unbound_cores.value, run.host.threads_running
    demanded, got = demand.value, run.host.process_cpu.value
    if bound.value is None or cores is None or demanded is None or got is None:
        return None
    if bound.count < cause.threshold("min_samples") or 2 * bound.count < demand.count:
        return None
    if bound.value > cause.threshold("max_part") * cores or got < cause.threshold("busy") * bound.value:
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
    lost_s = _lost_device_s(run, fraction)
    return make_finding(run, cause, fraction, evidence, lost_s=lost_s, estimate_basis=_ESTIMATE)


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


def host_memory_near_limit(run: RunRecords, cause: Cause) -> Finding | None:
    host = run.host
    evidence: list[Evidence | None] = []
    kill_severity: Severity | None = "critical" if host.oom_kills else None
    if kill_severity is not None:
        text = f"the kernel killed {host.oom_kills} processes of the cgroup because of memory"
        evidence.append(make_evidence(text, host.oom_kills, "devices.jsonl, events.jsonl: oom_kills"))
    used = host.memory_fraction.max_value
    used_severity = None if used is None else cause.severity(used)
    if used is not None and used_severity is not None:
        text = f"at most {100 * used:.0f} % of the limit was in use"
        evidence.append(make_evidence(text, used, "devices.jsonl: memory_used_bytes"))
    pressure_severity = _pressure_severity(run)
    if pressure_severity is not None:
        waiting = host.psi_memory.value
        evidence.append(sample_evidence("some task waited for memory {} of the time", waiting, "psi_memory"))
        if grown := _swap_growth(run):
            text = f"swap grew by {grown / GIB:.2f} GiB"
            evidence.append(make_evidence(text, grown, "devices.jsonl: swap_used_bytes"))
    severity = worst([kill_severity, used_severity, pressure_severity])
    if severity is None:
        return None
    options: dict[str, Any] = {"confidence": 0.95} if kill_severity else {}
    if not kill_severity and not used_severity:  # only pressure
        options = {"confidence": 0.7, "command": "--cache disk", "config_patch": {"cache": "disk"}}
    return make_finding(run, cause, 1.0, evidence, severity=severity, **options)


def is_under_memory_pressure(run: RunRecords) -> bool:
    """Tasks wait for memory: other causes are then only its symptoms."""
    return _pressure_severity(run) is not None


def _pressure_severity(run: RunRecords) -> Severity | None:
    cause = HOST_MEMORY_NEAR_LIMIT
    pressure = max(run.host.psi_memory.value or 0.0, _swap_growth(run) / cause.threshold("swap_bytes"))
    if pressure >= cause.threshold("pressure_critical"):
        return "critical"
    return "warning" if pressure >= cause.threshold("pressure_warning") else None


def _swap_growth(run: RunRecords) -> float:
    swap = run.host.swap
    return 0.0 if swap.max_value is None or swap.min_value is None else swap.max_value - swap.min_value


def host_memory_leak(run: RunRecords, cause: Cause) -> Finding | None:
    """A cache that fills grows in a straight line too, so there is no finding for a run that keeps decoded images. Of a
    job that ended because memory was full, the limit may be one that the telemetry does not see (`ulimit -v`)."""
    host = run.host
    if host.memory_free_bytes is None or run.settings.get("cache", "none") != "none":
        return None
    found = describe_growth(run)
    if found is None:
        return None
    text, slope = found
    evidence: list[Evidence | None] = [make_evidence(text, slope, "devices.jsonl: rss_bytes"), _growth_of_workers(host)]
    if run.ended_for_memory:
        evidence.append(make_evidence("it grew until the job ended because memory was full", source="its end"))
        return name_holder(run, make_finding(run, cause, 0.0, evidence, confidence=0.9))
    remaining_s = host.memory_free_bytes / slope
    evidence.append(time_to_full_evidence(run, remaining_s))
    is_far = remaining_s > cause.threshold("max_extrapolation") * host.rss.span_s
    if is_far and not run.facts.get("growth"):  # nothing holds it, so an allocator may: only a longer run tells
        text = f"seen for {host.rss.span_s:,.0f} s only, and nothing was seen that holds it: watch it for longer"
        finding = make_finding(run, cause, remaining_s / 3600, [*evidence, make_evidence(text, host.rss.span_s)])
        return None if finding is None else msgspec.structs.replace(finding, severity="info")
    return name_holder(run, make_finding(run, cause, remaining_s / 3600, evidence))


def _growth_of_workers(host: HostStats) -> Evidence | None:
    """Where less than half of the growth is that of the process with the most memory, the others have it."""
    grown, largest = host.rss.growth, host.largest_rss.growth
    if len(host.largest_rss.points) < len(host.rss.points) or largest >= grown / 2:
        return None
    text = (
        f"{max(0.0, grown - largest) / 2**20:,.0f} MiB of it are in the processes besides the largest one, as loader "
        "workers are: look at what the data set and its transforms keep"
    )
    return make_evidence(text, grown - largest, "devices.jsonl: largest_rss_bytes")


def name_holder(run: RunRecords, finding: Finding | None) -> Finding | None:
    """The finding of growing memory with what holds it, if that was seen from inside the job."""
    holders = msgspec.convert(run.facts.get("growth", []), list[Holder])
    if finding is None or not holders:
        return finding
    first, evidence = holders[0], list(finding.evidence)
    for holder in holders:
        size = f", about {holder.bytes / 2**20:,.0f} MiB"
        size = "; the tensors keep the graph of their step" if holder.graph else size
        text = f"{holder.text}{size}; the process had {holder.grown / 2**20:,.0f} MiB more meanwhile"
        evidence.append(make_evidence(text, holder.bytes, "events.jsonl: data.facts.growth"))
    fix = HOST_MEMORY_LEAK.other_fixes["graph" if first.graph else "container"].replace("NAME", first.name)
    title = f"{finding.title}: `{first.name}` in {first.place} holds it"
    return msgspec.structs.replace(finding, title=title, evidence=evidence, fix=fix, place=first.place, confidence=0.9)


def describe_growth(run: RunRecords) -> tuple[str, float] | None:
    """(how the job's memory on the host grows, bytes per second), if by stairs or in a straight line, over time or over
    steps, which may become slower; else None. Of all processes, else of the one with the most: pages that a loader
    worker shares with the process that has forked it count twice in the sum."""
    rss, steps_per_s, min_bytes = run.host.rss, _steps_per_s(run), HOST_MEMORY_LEAK.threshold("min_growth_bytes")
    if rss.growth >= min_bytes and (stairs := fit_stairs(rss)) is not None:
        steps = steps_per_s * stairs.interval_s
        every = f"{steps:,.0f} steps ({stairs.interval_s:,.0f} s)" if steps else f"{stairs.interval_s:,.0f} s"
        text = f"{stairs.size / 2**20:,.0f} MiB more every {every}, by stairs, as at the end of an epoch"
        return text, stairs.size / stairs.interval_s
    for series in (rss, run.host.largest_rss):
        if series.growth < min_bytes:
            continue
        fit = fit_steady_growth(series)
        if fit is None and steps_per_s and run.totals.attempts == 1:
            over_steps = fit_steady_growth(series.over(run.step_counts))
            fit = None if over_steps is None else dataclasses.replace(over_steps, slope=over_steps.slope * steps_per_s)
        if fit is not None:
            per_step = f", {fit.slope / steps_per_s / 2**20:,.2f} MiB a step" if steps_per_s else ""
            text = f"{series.growth / 2**20:,.0f} MiB more in {series.span_s:,.0f} s, in a straight line "
            return f"{text}({fit.slope / 2**20:.2f} MiB/s{per_step})", fit.slope
    return None


def _steps_per_s(run: RunRecords) -> float:
    return run.steady.steps / run.steady.wall_s if run.steady.wall_s > 0 else 0.0


def fit_memory_leak(series: TimeSeries) -> LinearFit | None:
    return fit_steady_growth(series) if series.growth >= HOST_MEMORY_LEAK.threshold("min_growth_bytes") else None


def time_to_full_evidence(run: RunRecords, remaining_s: float) -> Evidence:
    step = run.totals.steps + _steps_per_s(run) * remaining_s
    at_step = f", at step {float(f'{step:.2g}'):,.0f}" if _steps_per_s(run) else ""
    return make_evidence(f"it will be full in {format_duration(remaining_s)}{at_step}", remaining_s)


def gpu_memory_near_limit(run: RunRecords, cause: Cause) -> Finding | None:
    return _nearly_full(run, cause) or _fragmented(run, cause)


def _nearly_full(run: RunRecords, cause: Cause) -> Finding | None:
    sizes = [gpu.memory_total_bytes for gpu in run.gpus.values() if gpu.memory_total_bytes]
    if run.memory_peak_bytes is None or not sizes or run.on_cpu:
        return None
    fraction = run.memory_peak_bytes / min(sizes)
    text = f"{run.memory_peak_bytes / GIB:.1f} of {min(sizes) / GIB:.1f} GiB were allocated"
    evidence = [make_evidence(text, fraction, "steps.jsonl: memory_peak_bytes")]
    return make_finding(run, cause, fraction, evidence)


def _fragmented(run: RunRecords, cause: Cause) -> Finding | None:
    peak_bytes = run.memory_peak_bytes
    if peak_bytes is None or run.on_cpu or len(run.gpus) != 1:
        return None
    (gpu,) = run.gpus.values()
    used_bytes, total_bytes = gpu.max_memory_used_bytes, gpu.memory_total_bytes
    if not used_bytes or not total_bytes or gpu.other_processes.value != 0:
        return None
    fraction = (used_bytes - peak_bytes) / total_bytes
    if used_bytes / total_bytes < cause.threshold("min_used_fraction") or fraction < cause.threshold("fragmented"):
        return None
    text = (
        f"the driver shows {used_bytes / GIB:.1f} GiB in use, the program allocated at most {peak_bytes / GIB:.1f}: "
        "the memory is fragmented"
    )
    evidence = [make_evidence(text, fraction, "devices.jsonl: gpus.memory_used_bytes; steps.jsonl: memory_peak_bytes")]
    command = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    options: dict[str, Any] = {"severity": "warning", "command": command, "config_patch": {}, "confidence": 0.7}
    return make_finding(run, cause, fraction, evidence, **options)


def gpu_memory_leak(run: RunRecords, cause: Cause) -> Finding | None:
    leaks = [
        (max(0.0, gpu.memory_total_bytes - gpu.memory.values[-1]) / fit.slope, index)
        for index, gpu in run.gpus.items()
        if (fit := fit_memory_leak(gpu.memory)) is not None and gpu.memory_total_bytes
    ]
    if not leaks or any(run.gpus[index].other_processes.value for _, index in leaks):
        return None
    remaining_s, index = min(leaks)
    memory, fit = run.gpus[index].memory, fit_memory_leak(run.gpus[index].memory)
    text = f"GPU {index}: {memory.growth / GIB:.2f} GiB more in {memory.span_s:,.0f} s, in a straight line"
    slope = None if fit is None else fit.slope
    grown = make_evidence(text, slope, "devices.jsonl: gpus.memory_used_bytes")
    evidence = [grown, time_to_full_evidence(run, remaining_s)]
    return name_holder(run, make_finding(run, cause, remaining_s / 3600, evidence))


def shared_memory_small(run: RunRecords, cause: Cause) -> Finding | None:
    used, size_bytes = run.host.shm_fraction.max_value, run.host.shm_total_bytes
    if used is None or size_bytes is None:
        return None
    if used < (cause.warning_threshold or 1.0) and size_bytes > cause.threshold("docker_bytes"):
        return None
    evidence = [
        sample_evidence("at most {} of /dev/shm was in use", used, "shm_used_bytes"),
        make_evidence(f"its size is {size_bytes / 2**20:,.1f} MiB", size_bytes, "devices.jsonl: shm_total_bytes"),
    ]
    return make_finding(run, cause, used, evidence)


def fd_limit_near(run: RunRecords, cause: Cause) -> Finding | None:
    open_fds, max_fds = run.host.open_fds, run.host.max_fds
    if not open_fds.points or not max_fds:
        return None
    peak_fds = max(open_fds.values)
    fraction, text = peak_fds / max_fds, f"{peak_fds:,.0f} of {max_fds:,} file descriptors were open"
    evidence = [make_evidence(text, fraction, "devices.jsonl: open_fds")]
    fit = fit_steady_growth(open_fds)
    if fit is None or open_fds.growth < cause.threshold("min_growth"):
        return make_finding(run, cause, fraction, evidence)
    remaining_s = (max_fds - peak_fds) / fit.slope
    text = (
        f"{open_fds.growth:,.0f} more in {open_fds.span_s:,.0f} s, in a straight line: the limit will be reached "
        f"in {format_duration(remaining_s)}"
    )
    evidence.append(make_evidence(text, fit.slope, "devices.jsonl: open_fds"))
    return make_finding(run, cause, fraction, evidence, severity=HOST_MEMORY_LEAK.severity(remaining_s / 3600))


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
    finding = make_finding(run, cause, measured, evidence, lost_s=lost_s, estimate_basis=basis, fix=fix)
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
    if duration_s < cause.threshold("start_reading_s" if READS.search(longest.place.call) else "start_s"):
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
