"""Memory of the host and of the GPU, /dev/shm, open files: nearly full, or a leak that will fill them."""

from stoker.diagnosis.causes.cause import find_cause, worst
from stoker.diagnosis.causes.shared import (
    fit_steady_growth,
    format_duration,
    make_evidence,
    make_finding,
    sample_evidence,
)
from stoker.diagnosis.run_data import RunRecords
from stoker.diagnosis.series import LinearFit, TimeSeries
from stoker.findings.finding import Evidence, Finding, Severity

GIB = 2**30


HOST_MEMORY_NEAR_LIMIT = find_cause("host_memory_near_limit")

HOST_MEMORY_LEAK = find_cause("host_memory_leak")


def host_memory_near_limit(run: RunRecords) -> Finding | None:
    cause, host = HOST_MEMORY_NEAR_LIMIT, run.host
    evidence: list[Evidence | None] = []
    kill_severity: Severity | None = "critical" if host.oom_kills else None
    if kill_severity is not None:
        text = f"the kernel killed {host.oom_kills} processes of the cgroup because of memory"
        evidence.append(make_evidence(text, host.oom_kills, "devices.jsonl: oom_kills"))
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
            evidence.append(
                make_evidence(f"swap grew by {grown / GIB:.2f} GiB", grown, "devices.jsonl: swap_used_bytes")
            )
    severity = worst([kill_severity, used_severity, pressure_severity])
    if severity is None:
        return None
    confidence = 0.95 if kill_severity else None if used_severity else 0.7
    only_pressure = not kill_severity and not used_severity
    return make_finding(
        run,
        cause,
        1.0,
        evidence,
        severity=severity,
        confidence=confidence,
        command="--cache disk" if only_pressure else None,
        config_patch={"cache": "disk"} if only_pressure else None,
    )


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


def host_memory_leak(run: RunRecords) -> Finding | None:
    """A cache that fills grows in a straight line too, so there is no finding for a run that keeps decoded images."""
    host, fit = run.host, fit_memory_leak(run.host.rss)
    if fit is None or host.memory_free_bytes is None or run.settings.get("cache", "none") != "none":
        return None
    remaining_s = host.memory_free_bytes / fit.slope
    text = (
        f"{host.rss.growth / 2**20:,.0f} MiB more in {host.rss.span_s:,.0f} s, in a straight line "
        f"({fit.slope / 2**20:.2f} MiB/s)"
    )
    evidence = [make_evidence(text, fit.slope, "devices.jsonl: rss_bytes"), time_to_full_evidence(remaining_s)]
    return make_finding(run, HOST_MEMORY_LEAK, remaining_s / 3600, evidence)


def fit_memory_leak(series: TimeSeries) -> LinearFit | None:
    """The line of growth that is a memory leak."""
    return fit_steady_growth(series) if series.growth >= HOST_MEMORY_LEAK.threshold("min_growth_bytes") else None


def time_to_full_evidence(remaining_s: float) -> Evidence:
    return make_evidence(f"it will be full in {format_duration(remaining_s)}", remaining_s)


GPU_MEMORY_NEAR_LIMIT = find_cause("gpu_memory_near_limit")

GPU_MEMORY_LEAK = find_cause("gpu_memory_leak")


def gpu_memory_near_limit(run: RunRecords) -> Finding | None:
    return _nearly_full(run) or _fragmented(run)


def _nearly_full(run: RunRecords) -> Finding | None:
    sizes = [gpu.memory_total_bytes for gpu in run.gpus.values() if gpu.memory_total_bytes]
    if run.memory_peak_bytes is None or not sizes or run.on_cpu:
        return None
    fraction = run.memory_peak_bytes / min(sizes)
    text = f"{run.memory_peak_bytes / GIB:.1f} of {min(sizes) / GIB:.1f} GiB were allocated"
    evidence = [make_evidence(text, fraction, "steps.jsonl: memory_peak_bytes")]
    return make_finding(run, GPU_MEMORY_NEAR_LIMIT, fraction, evidence)


def _fragmented(run: RunRecords) -> Finding | None:
    cause, peak_bytes = GPU_MEMORY_NEAR_LIMIT, run.memory_peak_bytes
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
    return make_finding(
        run, cause, fraction, evidence, severity="warning", command=command, config_patch={}, confidence=0.6
    )


def gpu_memory_leak(run: RunRecords) -> Finding | None:
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
    evidence = [make_evidence(text, slope, "devices.jsonl: gpus.memory_used_bytes"), time_to_full_evidence(remaining_s)]
    return make_finding(run, GPU_MEMORY_LEAK, remaining_s / 3600, evidence)


SHARED_MEMORY_SMALL = find_cause("shared_memory_small")


def shared_memory_small(run: RunRecords) -> Finding | None:
    cause, used, size_bytes = SHARED_MEMORY_SMALL, run.host.shm_fraction.max_value, run.host.shm_total_bytes
    if used is None or size_bytes is None:
        return None
    if used < (cause.warning_threshold or 1.0) and size_bytes > cause.threshold("docker_bytes"):
        return None
    evidence = [
        sample_evidence("at most {} of /dev/shm was in use", used, "shm_used_bytes"),
        make_evidence(f"its size is {size_bytes / 2**20:,.1f} MiB", size_bytes, "devices.jsonl: shm_total_bytes"),
    ]
    return make_finding(run, cause, used, evidence)


FD_LIMIT_NEAR = find_cause("fd_limit_near")


def fd_limit_near(run: RunRecords) -> Finding | None:
    cause, open_fds, max_fds = FD_LIMIT_NEAR, run.host.open_fds, run.host.max_fds
    if not open_fds.points or not max_fds:
        return None
    peak_fds = max(open_fds.values)
    fraction = peak_fds / max_fds
    evidence = [
        make_evidence(f"{peak_fds:,.0f} of {max_fds:,} file descriptors were open", fraction, "devices.jsonl: open_fds")
    ]
    fit = fit_steady_growth(open_fds)
    if fit is not None and open_fds.growth >= cause.threshold("min_growth"):
        remaining_s = (max_fds - peak_fds) / fit.slope
        hours = remaining_s / 3600
        text = (
            f"{open_fds.growth:,.0f} more in {open_fds.span_s:,.0f} s, in a straight line: the limit will be reached "
            f"in {format_duration(remaining_s)}"
        )
        evidence.append(make_evidence(text, fit.slope, "devices.jsonl: open_fds"))
        if hours <= (HOST_MEMORY_LEAK.warning_threshold or 0.0):
            fraction = max(fraction, cause.warning_threshold or 1.0)
    return make_finding(run, cause, fraction, evidence)
