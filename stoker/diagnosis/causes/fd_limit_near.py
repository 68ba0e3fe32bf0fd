"""The process will run out of file descriptors."""

from stoker.diagnosis.causes.cause import find_cause
from stoker.diagnosis.causes.host_memory import HOST_MEMORY_LEAK
from stoker.diagnosis.causes.shared import (
    fit_steady_growth,
    format_duration,
    make_evidence,
    make_finding,
)
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

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
