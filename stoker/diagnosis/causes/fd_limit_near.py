"""The process will run out of file descriptors."""

from stoker.diagnosis.causes.cause import HEURISTIC, Cause, Threshold
from stoker.diagnosis.causes.host_memory import HOST_MEMORY_LEAK
from stoker.diagnosis.causes.shared import (
    STEADY_GROWTH,
    fit_steady_growth,
    format_duration,
    make_evidence,
    make_finding,
)
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

FD_LIMIT_NEAR = Cause(
    id="fd_limit_near",
    title="The process will run out of file descriptors",
    reason="failure: paths or environment",
    symptom="OSError: [Errno 24] Too many open files, often in a loader worker, hours in",
    required_records=("devices.jsonl: open_fds, max_fds",),
    warning_threshold=0.80,
    critical_threshold=0.95,
    metric="open file descriptors of one process, fraction of its limit; steady growth that reaches the limit within "
    "a day counts as a warning",
    source=HEURISTIC,
    thresholds=STEADY_GROWTH
    | {"min_growth": Threshold(30, "more open files, in a straight line, that are a leak (heuristic)")},
    confidence=0.8,
    fix="Close opened files (with open(…)); torch.multiprocessing.set_sharing_strategy('file_system'); `ulimit -n "
    "65536` to gain time",
    command="ulimit -n 65536",
)


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
