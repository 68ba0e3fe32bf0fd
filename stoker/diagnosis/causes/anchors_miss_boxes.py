"""The anchors do not fit the boxes of the data set."""

from stoker.diagnosis.causes.cause import find_cause
from stoker.diagnosis.causes.shared import make_evidence, make_finding, percent
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

ANCHORS_MISS_BOXES = find_cause("anchors_miss_boxes")


def anchors_miss_boxes(run: RunRecords) -> Finding | None:
    fraction, boxes = run.facts.get("anchor_coverage"), run.facts.get("boxes")
    if not isinstance(fraction, int | float) or not isinstance(boxes, int):
        return None
    if boxes < ANCHORS_MISS_BOXES.threshold("boxes"):
        return None
    text = f"{percent(fraction)} of {boxes:,} boxes overlap an anchor at their center with an IoU of 0.5 or more"
    evidence = [make_evidence(text, fraction, "events.jsonl: info, data.facts.anchor_coverage")]
    sizes = run.facts.get("anchor_sizes")
    if not isinstance(sizes, list) or not sizes:
        return make_finding(run, ANCHORS_MISS_BOXES, fraction, evidence)
    command = "--anchor-sizes " + " ".join(f"{size:g}" for size in sizes)
    return make_finding(
        run, ANCHORS_MISS_BOXES, fraction, evidence, command=command, config_patch={"anchor_sizes": sizes}
    )
