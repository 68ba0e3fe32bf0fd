"""The device waits for copies from the host."""

from stoker.diagnosis.causes.cause import find_cause
from stoker.diagnosis.causes.shared import make_evidence, make_finding, make_phase_finding, percent
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

EXPOSED_H2D_COPIES = find_cause("exposed_h2d_copies")


def exposed_h2d_copies(run: RunRecords) -> Finding | None:
    if run.phase_seconds("h2d") > 0:
        return make_phase_finding(run, EXPOSED_H2D_COPIES, "h2d")
    traces = run.traces
    if not traces.wall_s:
        return None
    fraction = traces.copy_s / traces.wall_s
    text = f"only copies ran in {percent(fraction)} of {traces.steps} traced steps"
    return make_finding(
        run,
        EXPOSED_H2D_COPIES,
        fraction,
        [make_evidence(text, fraction, "traces.jsonl: copy_s")],
        lost_s=fraction * run.phase_seconds("compute"),
        estimate_basis="the traced fraction of the time in steps",
    )
