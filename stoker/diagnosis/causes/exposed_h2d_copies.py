"""The device waits for copies from the host."""

from stoker.diagnosis.causes.cause import Cause
from stoker.diagnosis.causes.input_bound import TF_PROFILER_SOURCE
from stoker.diagnosis.causes.shared import make_evidence, make_finding, make_phase_finding, percent
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

EXPOSED_H2D_COPIES = Cause(
    id="exposed_h2d_copies",
    title="The device waits for copies from the host",
    reason="data loading",
    symptom="short pauses before each step, while the bus is busy",
    required_records=("steps.jsonl: phases (or traces.jsonl: copy_s)",),
    warning_threshold=0.05,
    critical_threshold=0.20,
    metric="h2d, fraction of the device time after the start; or, in a trace, of the time in which only copies ran",
    source="as input_bound: " + TF_PROFILER_SOURCE,
    probe="cached_batch",
    confidence=0.8,
    fix="Copy while the device computes: pinned memory and a separate stream (DataLoader(pin_memory=True), "
    ".to(device, non_blocking=True)); uint8 images instead of floats are a quarter of the bytes",
)


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
