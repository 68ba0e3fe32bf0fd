"""Images that could not be read, and are in quarantine."""

from stoker.diagnosis.causes.cause import Cause
from stoker.diagnosis.causes.shared import make_evidence, make_finding
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

BAD_IMAGES = Cause(
    id="bad_images",
    title="Images could not be used",
    reason="failure: bad records",
    symptom="other images replace them; above 1 % the run stops",
    required_records=("quarantine.jsonl",),
    warning_threshold=1,
    metric="images in quarantine",
    source="any is an image that was paid for and not learned from",
    confidence=0.95,
    fix="Copy or download the named files again, or remove them from the annotations",
    command="stoker data check",
)


def bad_images(run: RunRecords) -> Finding | None:
    count = run.num_quarantined
    evidence = [make_evidence(f"{count:,} images", count, "quarantine.jsonl")]
    evidence += [
        make_evidence(f"{path}: {error}", source="quarantine.jsonl") for path, error in run.quarantined.items()
    ]
    return make_finding(run, BAD_IMAGES, count, evidence)
