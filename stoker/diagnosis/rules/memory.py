"""Rules about memory, on the device and on the host, and about what else runs out: /dev/shm, open files."""

from stoker.diagnosis.catalogue import CATALOG
from stoker.diagnosis.rules.finding import counter_evidence, is_long_enough, make_finding
from stoker.diagnosis.run_data import RunRecords
from stoker.diagnosis.series import LinearFit, TimeSeries
from stoker.runs.schemas import Evidence, Finding

GIB = 2**30


def gpu_memory_unused(run: RunRecords) -> Finding | None:
    fractions = [
        gpu.max_memory_used_bytes / gpu.memory_total_bytes
        for gpu in run.gpus.values()
        if gpu.max_memory_used_bytes and gpu.memory_total_bytes
    ]
    if not fractions or not is_long_enough(run) or run.on_cpu:
        return None
    memory_evidence = counter_evidence("at most {} of the memory was in use", max(fractions), "gpus.memory_used_bytes")
    return make_finding(run, "gpu_memory_unused", 1 - max(fractions), [memory_evidence])


def gpu_memory_leak(run: RunRecords) -> Finding | None:
    leaks = [(index, gpu, fit) for index, gpu in run.gpus.items() if (fit := _fit_memory_leak(gpu.memory)) is not None]
    candidates = [(gpu.memory_total_bytes - gpu.memory.values[-1], fit, index, gpu)
            for index, gpu, fit in leaks if gpu.memory_total_bytes]  # fmt: skip
    if not candidates or any(gpu.other_processes.value for _, _, _, gpu in candidates):
        return None
    free_bytes, fit, index, gpu = min(candidates, key=lambda candidate: candidate[0] / candidate[1].slope)
    text = f"GPU {index}: {gpu.memory.growth / GIB:.2f} GiB more in {gpu.memory.span_s:,.0f} s, in a straight line"
    evidence = [
        Evidence(text=text, value=fit.slope, source="devices.jsonl: gpus.memory_used_bytes"),
        _time_to_full_evidence(max(0.0, free_bytes) / fit.slope),
    ]
    return make_finding(run, "gpu_memory_leak", max(0.0, free_bytes) / fit.slope / 3600, evidence)


def gpu_memory_fragmented(run: RunRecords) -> Finding | None:
    cause, peak_bytes = CATALOG["gpu_memory_fragmented"], run.memory_peak_bytes
    if peak_bytes is None or run.on_cpu or len(run.gpus) != 1:
        return None
    (gpu,) = run.gpus.values()
    if not gpu.max_memory_used_bytes or not gpu.memory_total_bytes or gpu.other_processes.value != 0:
        return None
    if gpu.max_memory_used_bytes / gpu.memory_total_bytes < cause.threshold("full"):
        return None
    text = f"the driver shows {gpu.max_memory_used_bytes / GIB:.1f} GiB in use, the program had at most {peak_bytes / GIB:.1f}"
    fraction = (gpu.max_memory_used_bytes - peak_bytes) / gpu.memory_total_bytes
    evidence = [Evidence(text=text, value=fraction, source="devices.jsonl: gpus.memory_used_bytes; steps.jsonl")]
    return make_finding(run, cause.id, fraction, evidence)


def gpu_memory_near_limit(run: RunRecords) -> Finding | None:
    sizes = [gpu.memory_total_bytes for gpu in run.gpus.values() if gpu.memory_total_bytes]
    if run.memory_peak_bytes is None or not sizes or run.on_cpu:
        return None
    fraction = run.memory_peak_bytes / min(sizes)
    text = f"{run.memory_peak_bytes / GIB:.1f} of {min(sizes) / GIB:.1f} GiB were allocated"
    evidence = [Evidence(text=text, value=fraction, source="steps.jsonl: memory_peak_bytes")]
    return make_finding(run, "gpu_memory_near_limit", fraction, evidence)


def host_memory_near_limit(run: RunRecords) -> Finding | None:
    fraction = run.host.max_memory_fraction
    if fraction is None:
        return None
    text = f"at most {100 * fraction:.0f} % of the limit was in use"
    evidence = [Evidence(text=text, value=fraction, source="devices.jsonl: memory_used_bytes")]
    return make_finding(run, "host_memory_near_limit", fraction, evidence)


def host_memory_leak(run: RunRecords) -> Finding | None:
    """A cache that is being filled grows as straight, so a run that keeps decoded pictures abstains."""
    host, fit = run.host, _fit_memory_leak(run.host.rss)
    if fit is None or host.memory_free_bytes is None or run.settings.get("cache", "none") != "none":
        return None
    remaining_s = host.memory_free_bytes / fit.slope
    text = f"{host.rss.growth / 2**20:,.0f} MiB more in {host.rss.span_s:,.0f} s, in a straight line " \
           f"({fit.slope / 2**20:.2f} MiB/s)"  # fmt: skip
    evidence = [
        Evidence(text=text, value=fit.slope, source="devices.jsonl: rss_bytes"),
        _time_to_full_evidence(remaining_s),
    ]
    return make_finding(run, "host_memory_leak", remaining_s / 3600, evidence)


def memory_pressure(run: RunRecords) -> Finding | None:
    cause, host = CATALOG["memory_pressure"], run.host
    waiting_fraction = host.psi_memory.value
    swap_growth = (
        0.0 if host.swap.max_value is None or host.swap.min_value is None else host.swap.max_value - host.swap.min_value
    )
    if waiting_fraction is None and not swap_growth:
        return None
    evidence = [counter_evidence("some task waited for memory {} of the time", waiting_fraction, "psi_memory")]
    if swap_growth:
        text = f"swap grew by {swap_growth / GIB:.2f} GiB"
        evidence.append(Evidence(text=text, value=swap_growth, source="devices.jsonl: swap_used_bytes"))
    return make_finding(
        run, cause.id, max(waiting_fraction or 0.0, swap_growth / cause.threshold("swap_bytes")), evidence
    )


def processes_killed_for_memory(run: RunRecords) -> Finding | None:
    num_kills = run.host.oom_kills
    text = f"the kernel killed {num_kills} processes of the cgroup for memory"
    evidence = [Evidence(text=text, value=float(num_kills), source="devices.jsonl: oom_kills")]
    return make_finding(run, "processes_killed_for_memory", num_kills, evidence)


def shared_memory_small(run: RunRecords) -> Finding | None:
    """A full one is worth a word only where something of the job is in it; a small one where it is half full."""
    cause, used_fraction, size_bytes = (
        CATALOG["shared_memory_small"],
        run.host.max_shm_fraction,
        run.host.shm_total_bytes,
    )
    if used_fraction is None or size_bytes is None:
        return None
    if used_fraction < (cause.warning_threshold or 1.0) and size_bytes > cause.threshold("docker_bytes"):
        return None
    evidence = [
        counter_evidence("at most {} of /dev/shm was in use", used_fraction, "shm_used_bytes"),
        Evidence(
            text=f"it has {size_bytes / 2**20:,.1f} MiB",
            value=float(size_bytes),
            source="devices.jsonl: shm_total_bytes",
        ),
    ]
    return make_finding(run, cause.id, used_fraction, evidence)


def fd_limit_near(run: RunRecords) -> Finding | None:
    cause, open_fds, max_fds = CATALOG["fd_limit_near"], run.host.open_fds, run.host.max_fds
    if not open_fds.points or not max_fds:
        return None
    peak_fds = max(open_fds.values)
    fraction = peak_fds / max_fds
    evidence = [
        Evidence(
            text=f"{peak_fds:,.0f} of {max_fds:,} files were open", value=fraction, source="devices.jsonl: handles"
        )
    ]
    fit = _fit_steady_growth(open_fds, cause.id)
    if fit is not None and open_fds.growth >= cause.threshold("least_growth"):
        hours = (max_fds - peak_fds) / fit.slope / 3600
        text = f"{open_fds.growth:,.0f} more in {open_fds.span_s:,.0f} s, in a straight line: in {_format_duration(3600 * hours)} " \
               "there are none left"  # fmt: skip
        evidence.append(Evidence(text=text, value=fit.slope, source="devices.jsonl: handles"))
        if hours <= (CATALOG["host_memory_leak"].warning_threshold or 0.0) and fraction < (
            cause.warning_threshold or 1.0
        ):
            fraction = cause.warning_threshold or 1.0
    return make_finding(run, cause.id, fraction, evidence)


RULES = (
    gpu_memory_unused, gpu_memory_leak, gpu_memory_fragmented, gpu_memory_near_limit, host_memory_near_limit,
    host_memory_leak, memory_pressure, processes_killed_for_memory, shared_memory_small, fd_limit_near,
)  # fmt: skip


def _fit_memory_leak(series: TimeSeries) -> LinearFit | None:
    """The line of a leak of memory."""
    cause = CATALOG["host_memory_leak"]
    return _fit_steady_growth(series, cause.id) if series.growth >= cause.threshold("least_growth_bytes") else None


def _fit_steady_growth(series: TimeSeries, cause_id: str) -> LinearFit | None:
    cause = CATALOG[cause_id]
    return series.fit_steady_growth(
        min_r_squared=cause.threshold("straight"), min_slope_ratio=cause.threshold("goes_on"), min_span_s=cause.threshold("least_span_s"),
        min_points=cause.threshold("least_points"),
    )  # fmt: skip


def _time_to_full_evidence(remaining_s: float) -> Evidence:
    return Evidence(text=f"in {_format_duration(remaining_s)} it is full", value=remaining_s)


def _format_duration(seconds: float) -> str:
    hours = seconds / 3600
    days = hours / 24
    if days >= 2:
        return f"{days:,.0f} days"
    return f"{hours:.1f} h" if hours >= 1 else f"{seconds / 60:.0f} min"
