"""Rules of "communication": exchanges, the ranks that hold them up, and the link to the host."""

from stoker.diagnosis.catalogue import CATALOGUE
from stoker.diagnosis.rules.finding import (
    found,
    is_long_enough,
    of_phase,
    percent,
    phase,
    sampled_s,
    share_of,
    stack_share,
    stacks,
)
from stoker.diagnosis.run_data import Records
from stoker.runs.schemas import Evidence, Finding


def straggler(seen: Records) -> Finding | None:
    """Only where it is mostly one: ranks that are late by turns are no slow rank."""
    cause, slowest = CATALOGUE["straggler"], seen.totals.slowest
    waited_s = seen.seconds("straggler")
    share = share_of(seen, "straggler")
    if share is None or waited_s <= 0:
        return None
    named = None
    if slowest:
        rank = max(slowest, key=lambda name: slowest[name])
        of_all = slowest[rank] / sum(slowest.values())
        if of_all < cause.limit("one"):
            return None
        text = f"rank {rank} is the slow one: the others waited {slowest[rank]:,.1f} device-seconds for it"
        named = Evidence(text=text, value=float(rank), place="ranks/*/steps.jsonl: phases.comm")
    of_waiting = share * seen.ranks / (seen.ranks - 1) if seen.ranks > 1 else share
    return found(seen, cause.id, of_waiting, [named, phase(seen, "straggler")], lost_s=waited_s,
                 confidence=None if named else 0.6)  # fmt: skip


def communication_bound(seen: Records) -> Finding | None:
    if seen.seconds("comm") > 0:
        return of_phase(seen, "communication_bound", "comm")
    traces = seen.traces
    if traces.wall_s > 0 and traces.comm_s > 0:
        share = traces.comm_s / traces.wall_s
        text = f"nothing but exchanges ran in {percent(share)} of {traces.steps} traced steps"
        evidence = [Evidence(text=text, value=share, place="traces.jsonl: comm_s")]
        return found(seen, "communication_bound", share, evidence, lost_s=share * seen.seconds("compute"),
                     estimate="the traced share of the time in steps")  # fmt: skip
    sampled = stack_share(seen, "communication_bound", "comm")
    if sampled is None or not is_long_enough(seen):
        return None
    return found(seen, "communication_bound", sampled, [stacks(seen, "an exchange", "comm")],
                 lost_s=sampled_s(seen, sampled), estimate="the share of the main thread's stacks")  # fmt: skip


def pcie_degraded(seen: Records) -> Finding | None:
    cause = CATALOGUE["pcie_degraded"]
    rows = [(gpu.link_missing.value, index, gpu.link) for index, gpu in seen.gpus.items()
            if gpu.link_missing.value is not None and gpu.link_missing.count >= cause.limit("samples")]  # fmt: skip
    if not rows:
        return None
    missing, index, link = max(rows)
    text = f"the link of GPU {index} is {link} while it works"
    evidence = [Evidence(text=text, value=missing, place="devices.jsonl: gpus.pcie_generation, pcie_width")]
    return found(seen, cause.id, missing, evidence)


RULES = (straggler, communication_bound, pcie_degraded)
