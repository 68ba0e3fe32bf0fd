"""Images that could not be read, and are in quarantine."""

from stoker.diagnosis.causes.cause import find_cause
from stoker.diagnosis.causes.shared import make_evidence, make_finding
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

BAD_IMAGES = find_cause("bad_images")


def bad_images(run: RunRecords) -> Finding | None:
    count = run.num_quarantined
    evidence = [make_evidence(f"{count:,} images", count, "quarantine.jsonl")]
    evidence += [
        make_evidence(f"{path}: {error}", source="quarantine.jsonl") for path, error in run.quarantined.items()
    ]
    return make_finding(run, BAD_IMAGES, count, evidence)
