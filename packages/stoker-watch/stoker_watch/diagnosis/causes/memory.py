"""Memory of the host and of GPUs, and open files: near a limit, or growing."""

import dataclasses
import itertools
import statistics
from typing import Any

import msgspec

from stoker_watch.diagnosis.causes.cause import Cause, find_cause, worst
from stoker_watch.diagnosis.causes.shared import make_evidence, make_finding, sample_evidence
from stoker_watch.diagnosis.run_data import HostStats, LinearFit, RunRecords, TimeSeries
from stoker_watch.findings.finding import Evidence, Finding, Severity
from stoker_watch.runs.schemas import Holder

HOST_MEMORY_NEAR_LIMIT, HOST_MEMORY_LEAK = find_cause("host_memory_near_limit"), find_cause("host_memory_leak")
GPU_MEMORY_LEAK, SHARED_MEMORY_SMALL = find_cause("gpu_memory_leak"), find_cause("shared_memory_small")
FD_LIMIT_NEAR = find_cause("fd_limit_near")
GIB = 2**30


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
    if run.endings and run.endings[0].id in HOST_MEMORY_LEAK.leads_to:
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


def fit_steady_growth(series: TimeSeries) -> LinearFit | None:
    """The line of growth that looks like a leak: it is straight, and neither slows down nor has ended. All causes of
    this kind have the same thresholds."""
    threshold = GPU_MEMORY_LEAK.threshold
    if series.span_s < threshold("min_span_s") or len(series.points) < threshold("min_points"):
        return None
    series = series.without_releases(threshold("max_released"))
    whole, early, late = series.fit_line(), series.fit_line(0.0, 0.5), series.fit_line(0.5, 1.0)
    if whole is None or early is None or late is None or whole.slope <= 0:
        return None
    if whole.r_squared < threshold("min_r_squared") or late.slope < threshold("min_slope_ratio") * early.slope:
        return None
    newest = series.fit_line(0.8, 1.0)
    has_ended = newest is not None and newest.slope < threshold("min_newest_ratio") * late.slope
    return late if late.slope > 0 and not has_ended else None


@dataclasses.dataclass(frozen=True)
class Stairs:
    """Growth by stairs of about the same size, as at the end of each epoch. size: of a stair; interval_s: from one to
    the next."""

    size: float
    interval_s: float


def fit_stairs(series: TimeSeries) -> Stairs | None:
    """Stairs that go on: between them the series is flat, the last one is as large as the others and not long ago.
    Memory that is in use only for a time does not count: what counts at any moment is the least of the time after it.
    """
    threshold = HOST_MEMORY_LEAK.threshold
    points = series.points
    if series.span_s < threshold("min_stairs_span_s"):
        return None
    kept = list(itertools.accumulate(reversed(series.values), min))[::-1]
    growth = kept[-1] - kept[0] if kept else 0.0
    rises: list[tuple[float, float, float]] = []  # start, end, size
    was_rising = False
    for (start_t, _), (end_t, _), low, high in zip(points, points[1:], kept, kept[1:], strict=False):
        is_rising = high - low > threshold("flat_fraction") * growth
        if is_rising:
            begin_t, _, size = rises.pop() if was_rising else (start_t, 0.0, 0.0)
            rises.append((begin_t, end_t, size + high - low))
        was_rising = is_rising
    if len(rises) < threshold("min_stairs"):
        return None
    starts, sizes = [start for start, _, _ in rises], [size for _, _, size in rises]
    intervals = [later - earlier for earlier, later in itertools.pairwise(starts)]
    is_regular = max(intervals) <= 2 * min(intervals) and max(sizes[1:]) <= 2 * min(sizes[1:])
    noise = statistics.median(value - low for value, low in zip(series.values, kept, strict=True))
    is_noise = min(sizes[1:]) < 2 * noise
    is_flat_between = sum(end - start for start, end, _ in rises) <= series.span_s / 2
    goes_on = points[-1][0] - starts[-1] <= 2 * max(intervals)
    if is_noise or not (is_regular and is_flat_between and goes_on and sum(sizes) >= growth / 2):
        return None
    return Stairs(sum(sizes[1:]) / len(sizes[1:]), sum(intervals) / len(intervals))


def format_duration(seconds: float) -> str:
    hours = seconds / 3600
    days = hours / 24
    if days >= 2:
        return f"{days:,.0f} days"
    return f"{hours:.1f} h" if hours >= 1 else f"{seconds / 60:.0f} min"
