"""The GPU's link to the host is slower than it could be."""

from stoker.diagnosis.causes.cause import Cause, Threshold
from stoker.diagnosis.causes.shared import make_evidence, make_finding
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

PCIE_DEGRADED = Cause(
    id="pcie_degraded",
    title="The GPU's link to the host is slower than it could be",
    reason="communication",
    symptom="copies take twice as long as on a similar machine",
    required_records=("devices.jsonl: gpus.pcie_generation, pcie_width and their maxima",),
    info_threshold=0.25,
    warning_threshold=0.45,
    metric="fraction of the link's speed that is missing while the GPU works: 1 - lanes × 2^generation over the maxima",
    source="PCI Express: each generation doubles the rate of a lane; half the speed or less is a defect or a wrong "
    "slot",
    thresholds={
        "busy": Threshold(0.5, "utilization of a sample from which it counts: an idle GPU lowers its link by itself"),
        "min_samples": Threshold(5, "such samples, at least (heuristic)"),
    },
    confidence=0.8,
    fix="Use another machine, and report this one; on your own machine: reseat the card, another slot, no riser, BIOS "
    "settings",
)


def pcie_degraded(run: RunRecords) -> Finding | None:
    deficits = [
        (gpu.link_deficit.value, index, gpu.link_description)
        for index, gpu in run.gpus.items()
        if gpu.link_deficit.value is not None and gpu.link_deficit.count >= PCIE_DEGRADED.threshold("min_samples")
    ]
    if not deficits:
        return None
    deficit, index, link = max(deficits)
    text = f"the link of GPU {index} is {link} while it works"
    evidence = [make_evidence(text, deficit, "devices.jsonl: gpus.pcie_generation, pcie_width")]
    return make_finding(run, PCIE_DEGRADED, deficit, evidence)
