"""Checkpoints delay the training, because of their number or a slow disk."""

from stoker.diagnosis.causes.cause import Cause, Threshold
from stoker.diagnosis.causes.shared import make_evidence, make_repeated_phase_finding, sample_evidence
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

CHECKPOINT_HEAVY = Cause(
    id="checkpoint_heavy",
    title="Checkpoints delay the training",
    reason="allocation and scheduling",
    symptom="img/s drops whenever a checkpoint is due; if the disk is slow, tasks wait for storage meanwhile",
    required_records=("steps.jsonl: phases", "devices.jsonl: psi_io (whether the disk is slow)"),
    warning_threshold=0.05,
    critical_threshold=0.25,
    metric="checkpoint, fraction of the device time after the start; only the checkpoints before the last one, if "
    "their number is known",
    source="heuristic: files are written in the background, so only the copy of the state should be visible",
    thresholds={
        "min_duration_s": Threshold(0.5, "seconds of saving below which there is no finding (heuristic)"),
        "psi_io": Threshold(
            0.10, "fraction of the time in which some task waited for storage, from which the disk is slow (heuristic)"
        ),
    },
    confidence=0.9,
    fix="Save less often, or to a faster disk (put the run on a local SSD with --run DIR, and copy it away afterwards)",
    external_fix="Save less often, to a faster disk such as a local SSD, or in the background "
    "(torch.distributed.checkpoint.async_save; a copy of the state in a thread)",
    command="--checkpoint-every 10min",
    config_patch={"checkpoint_every": "10min"},
)


def checkpoint_heavy(run: RunRecords) -> Finding | None:
    count, waiting = run.num_checkpoints, run.host.psi_io.value
    count_evidence = make_evidence(f"{count} checkpoints", count, "events.jsonl: checkpoint_saved")
    if waiting is None or waiting < CHECKPOINT_HEAVY.threshold("psi_io"):
        return make_repeated_phase_finding(run, CHECKPOINT_HEAVY, "checkpoint", count, count_evidence)
    text = "the disk is slow: some task waited for storage {} of the time"
    return make_repeated_phase_finding(
        run,
        CHECKPOINT_HEAVY,
        "checkpoint",
        count,
        count_evidence,
        extra_evidence=[sample_evidence(text, waiting, "psi_io")],
        command="--run",
        config_patch={},
        confidence=0.7,
    )
