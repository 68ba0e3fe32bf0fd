"""The host's memory: nearly full, under pressure, already the reason of kills; or a leak that will fill it."""

from stoker.diagnosis.causes.cause import Severity, find_cause, worst
from stoker.diagnosis.causes.shared import (
    fit_steady_growth,
    format_duration,
    make_evidence,
    make_finding,
    sample_evidence,
)
from stoker.diagnosis.run_data import RunRecords
from stoker.diagnosis.series import LinearFit, TimeSeries
from stoker.runs.schemas import Evidence, Finding

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
