"""Rules about a job that is about to die, or hangs: progress, storage, bad records. Errors of GPUs are in `gpus.py`."""

from stoker.diagnosis.catalogue import CATALOG
from stoker.diagnosis.reader import MAX_EXAMPLES
from stoker.diagnosis.rules.finding import make_finding
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Evidence, Finding


def hung(run: RunRecords) -> Finding | None:
    """No step for far longer than any took before, and nothing computes; or for so long that it does not matter."""
    cause, progress_gap = CATALOG["hung"], run.progress_gap
    if progress_gap is None or progress_gap.gap_s < cause.threshold("least_s") or progress_gap.max_earlier_gap_s <= 0:
        return None
    cpu, gpu = progress_gap.process_cpu.value, progress_gap.gpu_utilization.value
    is_idle = (
        cpu is not None and cpu < cause.threshold("idle_cpu") and (gpu is None or gpu < cause.threshold("idle_gpu"))
    )
    if not is_idle and progress_gap.gap_s < cause.threshold("spinning_s"):
        return None
    text = f"no step for {progress_gap.gap_s:,.0f} s; the longest before took {progress_gap.max_earlier_gap_s:.1f} s"
    evidence = [Evidence(text=text, value=progress_gap.gap_s, source="steps.jsonl: t, steps; devices.jsonl: t")]
    if cpu is not None:
        text = f"the process used {cpu:.2f} cores meanwhile"
        evidence.append(Evidence(text=text, value=cpu, source="devices.jsonl: process_cpu"))
    return make_finding(run, cause.id, progress_gap.gap_s / progress_gap.max_earlier_gap_s, evidence, lost_s=progress_gap.gap_s * run.num_devices,
                 estimate_basis="all since the last step")  # fmt: skip


def empty_input(run: RunRecords) -> Finding | None:
    cause, files, progress_gap = CATALOG["empty_input"], run.empty_inputs, run.progress_gap
    if not files or (run.totals.steps and (progress_gap is None or progress_gap.gap_s < cause.threshold("least_s"))):
        return None
    evidence = [
        Evidence(text=f"{path}: 0 bytes", value=0.0, source="events.jsonl: warning") for path in files[:MAX_EXAMPLES]
    ]
    if progress_gap is not None and run.totals.steps:
        text = f"no step for {progress_gap.gap_s:,.0f} s"
        evidence.append(Evidence(text=text, value=progress_gap.gap_s, source="steps.jsonl: t; devices.jsonl: t"))
    return make_finding(run, cause.id, len(files), evidence)


def checkpoints_failed(run: RunRecords) -> Finding | None:
    failures = run.checkpoint_failures
    texts = list(dict.fromkeys(failures))[:MAX_EXAMPLES]
    evidence = [Evidence(text=text, source="events.jsonl: checkpoint_failed") for text in texts]
    return make_finding(run, "checkpoints_failed", len(failures), evidence)


def disk_nearly_full(run: RunRecords) -> Finding | None:
    free_bytes = run.host.min_disk_free_bytes
    if free_bytes is None:
        return None
    text = f"{free_bytes / 2**20:,.0f} MiB were free, at the least"
    evidence = [Evidence(text=text, value=float(free_bytes), source="devices.jsonl: disk_free_bytes")]
    return make_finding(run, "disk_nearly_full", free_bytes, evidence)


def storage_errors(run: RunRecords) -> Finding | None:
    warnings = run.storage_warnings
    evidence = [Evidence(text=text, source="events.jsonl: warning") for text in warnings[-MAX_EXAMPLES:]]
    return make_finding(run, "storage_errors", len(warnings), evidence)


def bad_images(run: RunRecords) -> Finding | None:
    count = run.num_quarantined
    evidence = [Evidence(text=f"{count:,} pictures", value=float(count), source="quarantine.jsonl")]
    evidence += [
        Evidence(text=f"{path}: {error}", source="quarantine.jsonl")
        for path, error in list(run.quarantined.items())[:MAX_EXAMPLES]
    ]
    return make_finding(run, "bad_images", count, evidence)


RULES = (hung, empty_input, checkpoints_failed, disk_nearly_full, storage_errors, bad_images)
