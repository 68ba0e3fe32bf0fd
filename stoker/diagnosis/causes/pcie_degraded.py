"""The GPU's link to the host is slower than it could be."""

from stoker.diagnosis.causes.cause import find_cause
from stoker.diagnosis.causes.shared import make_evidence, make_finding
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

PCIE_DEGRADED = find_cause("pcie_degraded")


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
