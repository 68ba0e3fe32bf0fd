"""The device waits for the bytes of images, from a disk, a bucket or a saturated network."""

from stoker.diagnosis.causes.cause import find_cause
from stoker.diagnosis.causes.input_bound import (
    cold_cache_fraction,
    decodes_in_training_thread,
    idle_while_waiting_evidence,
    is_mostly,
    largest_stage,
    make_input_wait_finding,
    stage_evidence,
)
from stoker.diagnosis.causes.shared import cpu_utilization_evidence, make_evidence, stack_evidence
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Evidence, Finding

SLOW_STORAGE = find_cause("slow_storage")
_SATURATED_FIX = "; the network is saturated, so fewer bytes help: images stored at no more than twice the image size"


def slow_storage(run: RunRecords) -> Finding | None:
    """By the loader's stages; in a loop without stages, by a process that is idle while it waits for images."""
    if cold_cache_fraction(run) is not None:
        return None  # the wait is over: the note `cold_cache`
    stage, stage_fraction = largest_stage(run)
    if stage is not None:
        if not is_mostly(run, "fetch"):
            return None
        network_evidence = _network_evidence(run)
        evidence = [stage_evidence(run, stage, stage_fraction), network_evidence, cpu_utilization_evidence(run)]
        suffix = _SATURATED_FIX if _network_is_saturated(run) else ""
        return make_input_wait_finding(run, SLOW_STORAGE, evidence, fix_suffix=suffix)
    idle_evidence = idle_while_waiting_evidence(run)
    if idle_evidence is None or decodes_in_training_thread(run):
        return None
    # CPU time of the training thread in the wait is decoding, which faster storage does not save.
    computed_s = run.totals.thread_cpu_s.get("input_wait", 0.0)
    evidence = [idle_evidence, stack_evidence(run, "a wait for images", "input_wait")]
    return make_input_wait_finding(run, SLOW_STORAGE, evidence, confidence=0.65, excluded_s=computed_s)


def _network_is_saturated(run: RunRecords) -> bool:
    cause, received = SLOW_STORAGE, run.host.net_received_bytes_s
    if received.value is None or not received.max_value or received.count < cause.threshold("min_samples"):
        return False
    is_constant = received.value / received.max_value >= cause.threshold("saturated")
    return is_constant and received.value >= cause.threshold("min_bytes_s")


def _network_evidence(run: RunRecords) -> Evidence | None:
    value, max_received = run.host.net_received_bytes_s.value, run.host.net_received_bytes_s.max_value
    if value is None or max_received is None:
        return None
    text = f"{value / 1e6:,.0f} MB/s were received, at most {max_received / 1e6:,.0f}"
    if _network_is_saturated(run):
        text += ": the network is saturated"
    return make_evidence(text, value, "devices.jsonl: net_received_bytes_s")
