"""Rules about a job that is about to die, or hangs: progress, storage, bad records. Errors of GPUs are in `gpus.py`."""

from stoker.diagnosis.catalogue import CATALOGUE
from stoker.diagnosis.reader import SHOWN
from stoker.diagnosis.rules.finding import found
from stoker.diagnosis.run_data import Records
from stoker.runs.schemas import Evidence, Finding


def hung(seen: Records) -> Finding | None:
    """No step for far longer than any took before, and nothing computes; or for so long that it does not matter."""
    cause, silence = CATALOGUE["hung"], seen.silence
    if silence is None or silence.since_s < cause.limit("least_s") or silence.usual_s <= 0:
        return None
    cpu, gpu = silence.cpu.value, silence.gpu.value
    idle = cpu is not None and cpu < cause.limit("idle_cpu") and (gpu is None or gpu < cause.limit("idle_gpu"))
    if not idle and silence.since_s < cause.limit("spinning_s"):
        return None
    text = f"no step for {silence.since_s:,.0f} s; the longest before took {silence.usual_s:.1f} s"
    evidence = [Evidence(text=text, value=silence.since_s, place="steps.jsonl: t, steps; devices.jsonl: t")]
    if cpu is not None:
        text = f"the process used {cpu:.2f} cores meanwhile"
        evidence.append(Evidence(text=text, value=cpu, place="devices.jsonl: process_cpu"))
    return found(seen, cause.id, silence.since_s / silence.usual_s, evidence, lost_s=silence.since_s * seen.devices,
                 estimate="all since the last step")  # fmt: skip


def empty_input(seen: Records) -> Finding | None:
    cause, files, silence = CATALOGUE["empty_input"], seen.empty_inputs, seen.silence
    if not files or (seen.totals.steps and (silence is None or silence.since_s < cause.limit("least_s"))):
        return None
    evidence = [Evidence(text=f"{path}: 0 bytes", value=0.0, place="events.jsonl: warning") for path in files[:SHOWN]]
    if silence is not None and seen.totals.steps:
        text = f"no step for {silence.since_s:,.0f} s"
        evidence.append(Evidence(text=text, value=silence.since_s, place="steps.jsonl: t; devices.jsonl: t"))
    return found(seen, cause.id, len(files), evidence)


def checkpoints_failed(seen: Records) -> Finding | None:
    failed = seen.checkpoint_failures
    texts = list(dict.fromkeys(failed))[:SHOWN]
    evidence = [Evidence(text=text, place="events.jsonl: checkpoint_failed") for text in texts]
    return found(seen, "checkpoints_failed", len(failed), evidence)


def disk_nearly_full(seen: Records) -> Finding | None:
    free = seen.host.disk_free
    if free is None:
        return None
    text = f"{free / 2**20:,.0f} MiB were free, at the least"
    evidence = [Evidence(text=text, value=float(free), place="devices.jsonl: disk_free_bytes")]
    return found(seen, "disk_nearly_full", free, evidence)


def storage_errors(seen: Records) -> Finding | None:
    said = seen.storage_warnings
    evidence = [Evidence(text=text, place="events.jsonl: warning") for text in said[-SHOWN:]]
    return found(seen, "storage_errors", len(said), evidence)


def quarantined_pictures(seen: Records) -> Finding | None:
    count = seen.quarantined_count
    evidence = [Evidence(text=f"{count:,} pictures", value=float(count), place="quarantine.jsonl")]
    evidence += [
        Evidence(text=f"{path}: {error}", place="quarantine.jsonl")
        for path, error in list(seen.quarantined.items())[:SHOWN]
    ]
    return found(seen, "quarantined_pictures", count, evidence)


RULES = (hung, empty_input, checkpoints_failed, disk_nearly_full, storage_errors, quarantined_pictures)
