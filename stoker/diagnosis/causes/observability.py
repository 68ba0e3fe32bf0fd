"""Causes of the reason "blindness": what nobody can see, or what two witnesses say differently. Data only."""

from stoker.diagnosis.causes.cause import HEURISTIC, Cause, Threshold

CAUSES = (
    Cause(
        id="unattributed_time",
        title="Time that no clock saw",
        reason="blindness",
        symptom="the phases that are named do not explain the run",
        required_records=("steps.jsonl: phases",),
        info_threshold=0.03,
        warning_threshold=0.10,
        metric="unattributed, share of the device time after the start; of a watched job never above info",
        source="what stoker's own tests allow the ledger in steady state is 3 %",
        thresholds={
            "watched": Threshold(0.50, "of a job that stoker did not write: from where on it is told (our judgment)")
        },
        confidence=0.9,
        fix="A process that was stopped or swapped out, or work between steps that nothing brackets "
        "(`stoker.measure` has "
        "m.phase for it). In a run of stoker's own, report it",
    ),
    Cause(
        id="telemetry_mismatch",
        title="The driver saw the GPU work when the run did not",
        reason="blindness",
        symptom="utilisation is high while the ledger says that the device waits",
        required_records=("steps.jsonl: phases", "devices.jsonl: gpus.utilisation of just the devices that train"),
        warning_threshold=0.25,
        metric="the driver's utilisation minus the share of phases in which the device works",
        source="our judgment: beyond what the driver's sample period blurs, as host_bound_steps",
        confidence=0.6,
        fix="Another process on the GPU (nvidia-smi), or work that the ledger does not know: report it",
        command="nvidia-smi",
    ),
    Cause(
        id="gpu_not_used",
        title="There is a GPU, and the job does not use it",
        reason="blindness",
        symptom="the job trains, slowly, on the processors",
        required_records=("devices.jsonl: gpus.utilisation", "steps.jsonl: steps"),
        warning_threshold=1,
        metric="1: steps were done, and no GPU did anything",
        source="by count",
        thresholds={
            "idle": Threshold(0.02, "mean utilisation below which a GPU is not used (our judgment)"),
            "samples": Threshold(20, "samples while steps were done (our judgment)"),
        },
        supersedes=("idle_gpus", "gpu_memory_unused"),
        confidence=0.8,
        fix="A build of the framework with CUDA for this driver (torch.cuda.is_available(), "
        "tf.config.list_physical_devices('GPU')); in a container `--gpus all`; of stoker leave --device out",
        external_fix="A build of the framework with CUDA for this driver (torch.cuda.is_available(), "
        "tf.config.list_physical_devices('GPU')), the model and the batches moved there; in a "
        "container `--gpus all`",
        command="nvidia-smi",
    ),
    Cause(
        id="no_telemetry",
        title="Nobody watched the machine",
        reason="blindness",
        symptom="devices.jsonl is missing or has no GPU of a run on a GPU: half of the diagnosis abstains",
        required_records=("steps.jsonl: wall_s",),
        info_threshold=3600.0,
        metric="seconds of the run without a line of devices.jsonl, or on a GPU without one that has a GPU",
        source=HEURISTIC,
        confidence=0.9,
        fix="Look for the event that says why (NVML, /proc in the container); install the driver's libnvidia-ml there",
    ),
    Cause(
        id="no_step_output",
        title="The watched job says nothing about its steps",
        reason="blindness",
        symptom="no steps, no losses: only the machine's counters tell of it",
        required_records=("events.jsonl: data.watched", "steps.jsonl: steps"),
        info_threshold=120.0,
        metric="seconds watched without a step",
        source=HEURISTIC,
        confidence=0.9,
        fix="Have it print steps and losses (`loss: 0.5` with a counter is enough), or `with stoker.measure(…)` around "
        "its loop",
    ),
)
