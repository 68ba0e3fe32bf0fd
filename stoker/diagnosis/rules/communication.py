"""Rules of "communication": exchanges, the ranks that hold them up, and the link to the host."""

from stoker.diagnosis.catalogue import CATALOG
from stoker.diagnosis.rules.finding import (
    format_percent,
    fraction_of_phase,
    is_long_enough,
    make_finding,
    make_phase_finding,
    phase_evidence,
    sampled_device_s,
    stack_evidence,
    stack_fraction,
)
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Evidence, Finding


def straggler(run: RunRecords) -> Finding | None:
    """Only where it is mostly one: ranks that are late by turns are no slow rank."""
    cause, slowest = CATALOG["straggler"], run.totals.straggler_s
    waited_s = run.phase_seconds("straggler")
    fraction = fraction_of_phase(run, "straggler")
    if fraction is None or waited_s <= 0:
        return None
    slowest_evidence = None
    if slowest:
        rank = max(slowest, key=lambda name: slowest[name])
        slowest_fraction = slowest[rank] / sum(slowest.values())
        if slowest_fraction < cause.threshold("one"):
            return None
        text = f"rank {rank} is the slow one: the others waited {slowest[rank]:,.1f} device-seconds for it"
        slowest_evidence = Evidence(text=text, value=float(rank), source="ranks/*/steps.jsonl: phases.comm")
    waiting_fraction = fraction * run.num_ranks / (run.num_ranks - 1) if run.num_ranks > 1 else fraction
    return make_finding(run, cause.id, waiting_fraction, [slowest_evidence, phase_evidence(run, "straggler")], lost_s=waited_s,
                 confidence=None if slowest_evidence else 0.6)  # fmt: skip


def communication_bound(run: RunRecords) -> Finding | None:
    if run.phase_seconds("comm") > 0:
        return make_phase_finding(run, "communication_bound", "comm")
    traces = run.traces
    if traces.wall_s > 0 and traces.comm_s > 0:
        fraction = traces.comm_s / traces.wall_s
        text = f"nothing but exchanges ran in {format_percent(fraction)} of {traces.steps} traced steps"
        evidence = [Evidence(text=text, value=fraction, source="traces.jsonl: comm_s")]
        return make_finding(run, "communication_bound", fraction, evidence, lost_s=fraction * run.phase_seconds("compute"),
                     estimate_basis="the traced share of the time in steps")  # fmt: skip
    sampled_fraction = stack_fraction(run, "communication_bound", "comm")
    if sampled_fraction is None or not is_long_enough(run):
        return None
    return make_finding(run, "communication_bound", sampled_fraction, [stack_evidence(run, "an exchange", "comm")],
                 lost_s=sampled_device_s(run, sampled_fraction), estimate_basis="the share of the main thread's stacks")  # fmt: skip


def pcie_degraded(run: RunRecords) -> Finding | None:
    cause = CATALOG["pcie_degraded"]
    link_deficits = [(gpu.link_deficit.value, index, gpu.link_description) for index, gpu in run.gpus.items()
            if gpu.link_deficit.value is not None and gpu.link_deficit.count >= cause.threshold("samples")]  # fmt: skip
    if not link_deficits:
        return None
    link_deficit, index, link = max(link_deficits)
    text = f"the link of GPU {index} is {link} while it works"
    evidence = [Evidence(text=text, value=link_deficit, source="devices.jsonl: gpus.pcie_generation, pcie_width")]
    return make_finding(run, cause.id, link_deficit, evidence)


RULES = (straggler, communication_bound, pcie_degraded)
