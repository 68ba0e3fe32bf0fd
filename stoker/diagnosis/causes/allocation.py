"""Causes of the reason "allocation and scheduling": the machine, its other users, starts and stops. Data only."""

from stoker.diagnosis.causes.cause import HEURISTIC, Cause, Threshold

NVML_SOURCE = "NVML manual, nvmlClocksEventReasons"
MIN_BUSY_UTILIZATION = Threshold(0.5, "utilisation of a GPU's sample from which it counts")
MIN_BUSY_SAMPLES = Threshold(5, "such samples, at least (our judgment)")
INPUT_SYMPTOMS = ("too_few_workers", "too_few_cores", "slow_decode", "input_bound")
"""What a lack of processor time looks like from inside."""

CAUSES = (
    Cause(
        id="startup_heavy",
        title="Starting takes a large part of the run",
        reason="allocation and scheduling",
        symptom="minutes pass before the first step of each attempt",
        required_records=("steps.jsonl: phases",),
        warning_threshold=0.10,
        metric="startup and compile, share of all device time",
        source=HEURISTIC,
        thresholds={
            "least_s": Threshold(
                60.0,
                "device-seconds of starting below which it is never a finding: its share of a short "
                "run says nothing (our judgment)",
            )
        },
        confidence=0.9,
        fix="Keep weights, index and pictures on a disk that survives the machine (STOKER_CACHE_DIR, "
        "STOKER_WEIGHTS_DIR), and restart less often",
        external_fix="Keep weights, pictures and compiled code on a disk that survives the machine (TORCH_HOME, "
        "TORCHINDUCTOR_CACHE_DIR, the image of the container), and restart less often",
    ),
    Cause(
        id="checkpoint_heavy",
        title="Checkpoints hold the training up",
        reason="allocation and scheduling",
        symptom="img/s drops whenever a checkpoint is due",
        required_records=("steps.jsonl: phases",),
        warning_threshold=0.05,
        critical_threshold=0.25,
        metric="checkpoint, share of the device time after the start; of those that are not the last, where "
        "their number "
        "is known",
        source="our judgment: files are written in the background, so only the copy of the state should show",
        thresholds={"least_s": Threshold(0.5, "seconds of saving below which nothing is said (our judgment)")},
        confidence=0.9,
        fix="Save less often, or to a faster disk",
        external_fix="Save less often, to a faster disk, or in the background "
        "(torch.distributed.checkpoint.async_save; a copy of the state in a thread)",
        command="--checkpoint-every 10min",
        config_patch={"checkpoint_every": "10min"},
    ),
    Cause(
        id="checkpoint_disk_slow",
        title="The disk under the checkpoints is slow",
        reason="allocation and scheduling",
        symptom="each checkpoint takes seconds, and tasks wait for storage meanwhile",
        required_records=("steps.jsonl: phases", "devices.jsonl: psi_io"),
        warning_threshold=0.05,
        critical_threshold=0.25,
        metric="as checkpoint_heavy, while tasks wait for storage",
        source="as checkpoint_heavy",
        thresholds={
            "psi_io": Threshold(0.10, "share of the time in which some task waited for storage (our judgment)"),
            "least_s": Threshold(0.5, "as checkpoint_heavy"),
        },
        supersedes=("checkpoint_heavy",),
        confidence=0.7,
        fix="Put the run on a local SSD (--run DIR) and copy it away afterwards, or save less often",
        external_fix="Save to a local SSD and copy it away afterwards, or save less often",
        command="--run",
    ),
    Cause(
        id="cpu_quota",
        title="The container's CPU quota holds the job back",
        reason="allocation and scheduling",
        symptom="nproc shows many cores, and the job gets a part of their time, in bursts",
        required_records=("devices.jsonl: throttled_s, process_cpu",),
        warning_threshold=0.05,
        critical_threshold=0.25,
        metric="share of the wanted processor time that the quota withheld",
        source=HEURISTIC,
        supersedes=("threads_oversubscribed", "cpu_contention", *INPUT_SYMPTOMS),
        confidence=0.85,
        fix="A higher CPU limit of the container (Kubernetes: resources.limits.cpu; docker: --cpus), or no more "
        "threads than it has",
        command="docker run --cpus",
    ),
    Cause(
        id="cpu_contention",
        title="Other processes take the processors",
        reason="allocation and scheduling",
        symptom="img/s varies with the hour; the same run is faster elsewhere",
        required_records=("devices.jsonl: cpu, process_cpu, threads_running",),
        info_threshold=0.10,
        warning_threshold=0.20,
        critical_threshold=0.50,
        metric="processor time that the run's threads wanted (they ran, or waited for a processor) and other "
        "processes had, where the cores are busy: share of what they wanted, or of the time, where they wanted less "
        "than a core",
        source="our judgment: a fifth of the speed is worth a word to the neighbours; less comes and goes",
        thresholds={
            "busy": Threshold(
                0.85, "mean busy share of the cores from which others' load may be taken from us (our judgment)"
            )
        },
        supersedes=("too_few_cores",),
        confidence=0.7,
        fix="Fewer jobs on the machine, a machine of its own, or cores that are set apart (taskset, cpuset)",
    ),
    Cause(
        id="threads_oversubscribed",
        title="Far more threads run than there are cores",
        reason="allocation and scheduling",
        symptom="all cores busy, much of it in the kernel and in spinning; fewer threads are faster",
        required_records=("devices.jsonl: threads_running, cores (or cpu)",),
        warning_threshold=3.0,
        critical_threshold=8.0,
        metric="mean of the threads that run or want to, per core",
        source="our judgment: libraries start one thread a core each (OpenMP, BLAS, OpenCV), so two of them are usual",
        thresholds={
            "more": Threshold(
                5, "threads more than cores, at least: on two cores a loader and a model want six (our judgment)"
            ),
            "samples": Threshold(4, "samples (our judgment)"),
        },
        supersedes=INPUT_SYMPTOMS,
        probe="fewer_threads",
        confidence=0.75,
        fix="OMP_NUM_THREADS=1 in loader processes, torch.set_num_threads, cv2.setNumThreads(0); of stoker --workers auto",
        external_fix="OMP_NUM_THREADS=1 in loader processes, torch.set_num_threads, cv2.setNumThreads(0), fewer "
        "loader workers",
        command="OMP_NUM_THREADS=1",
        config_patch={"workers": 0},
    ),
    Cause(
        id="idle_gpus",
        title="Some GPUs do nothing",
        reason="allocation and scheduling",
        symptom="several GPUs are allocated, and one trains",
        required_records=("devices.jsonl: gpus.utilisation of two or more",),
        warning_threshold=1,
        metric="GPUs that were never used while others worked",
        source="by count",
        thresholds={
            "idle": Threshold(0.02, "mean utilisation below which a GPU is not used (our judgment)"),
            "works": Threshold(0.2, "mean utilisation of another from which the job works (our judgment)"),
            "samples": MIN_BUSY_SAMPLES,
        },
        confidence=0.85,
        fix="Train on all of them (`stoker launch`, torchrun --nproc-per-node), or allocate as many as are used "
        "(CUDA_VISIBLE_DEVICES)",
        command="torchrun --nproc-per-node",
    ),
    Cause(
        id="gpu_shared",
        title="Other processes compute on the GPU",
        reason="allocation and scheduling",
        symptom="speed varies without a reason; nvidia-smi lists more processes",
        required_records=("devices.jsonl: gpus.other_processes",),
        warning_threshold=0.20,
        metric="share of the samples in which another process was on one of the GPUs",
        source=HEURISTIC,
        confidence=0.75,
        fix="End them (nvidia-smi names them), another GPU (CUDA_VISIBLE_DEVICES), or exclusive mode (nvidia-smi -c 3)",
        command="nvidia-smi",
    ),
    Cause(
        id="gpu_hot",
        title="The GPU is throttled because it is hot",
        reason="allocation and scheduling",
        symptom="clocks fall after some minutes of load; the temperature stands at its limit",
        required_records=("devices.jsonl: gpus.throttle_reasons, utilisation",),
        warning_threshold=0.10,
        critical_threshold=0.50,
        metric="share of the samples under load with a thermal slowdown",
        source=NVML_SOURCE + ": SwThermalSlowdown, HwThermalSlowdown, HwSlowdown; the share is our judgment",
        thresholds={"busy": MIN_BUSY_UTILIZATION, "samples": MIN_BUSY_SAMPLES},
        supersedes=("gpu_clock_low", "gpu_power_capped"),
        confidence=0.9,
        fix="Cooling: fans, dust, the slot beside it; in a cloud another machine, and report this one",
    ),
    Cause(
        id="gpu_power_capped",
        title="The GPU is held back by its power limit",
        reason="allocation and scheduling",
        symptom="the clock is below its maximum, the power at its limit",
        required_records=("devices.jsonl: gpus.throttle_reasons, sm_clock_mhz, sm_clock_max_mhz, utilisation",),
        info_threshold=0.15,
        warning_threshold=0.30,
        metric="share of the clock that is missing, where the power limit holds it in most samples under load",
        source=NVML_SOURCE + ": SwPowerCap, HwPowerBrake. Large GPUs at full load lose some of their clock to it by "
        "design, so a little is only told",
        thresholds={
            "busy": MIN_BUSY_UTILIZATION,
            "samples": MIN_BUSY_SAMPLES,
            "capped": Threshold(0.5, "share of those samples (our judgment)"),
        },
        supersedes=("gpu_clock_low",),
        confidence=0.8,
        fix="`nvidia-smi -pl` up to the board's own limit, where one may; a better power supply; else it is "
        "what this GPU "
        "gives",
        command="nvidia-smi -q -d POWER",
    ),
    Cause(
        id="gpu_clock_low",
        title="The GPU's clock is set low",
        reason="allocation and scheduling",
        symptom="the clock stays at one low value under load; neither heat nor power holds it",
        required_records=("devices.jsonl: gpus.sm_clock_mhz, sm_clock_max_mhz, utilisation",),
        info_threshold=0.20,
        warning_threshold=0.35,
        metric="share of the largest clock that is missing under load",
        source="our judgment; " + NVML_SOURCE + ": ApplicationsClocksSetting is a clock that somebody has set",
        thresholds={"busy": MIN_BUSY_UTILIZATION, "samples": MIN_BUSY_SAMPLES},
        confidence=0.7,
        fix="`nvidia-smi -rgc` and `nvidia-smi -rac` take limits away that somebody has set",
        command="nvidia-smi -rgc",
    ),
    Cause(
        id="intentional_idle",
        title="Nothing was asked of the device",
        reason="allocation and scheduling",
        symptom="the job lives, and waits for something else",
        required_records=("steps.jsonl: phases.idle",),
        warning_threshold=0.05,
        critical_threshold=0.30,
        metric="idle, share of the device time after the start",
        source=HEURISTIC,
        confidence=0.9,
        fix="End the job, or give the device back, while there is nothing to train",
    ),
    Cause(
        id="work_lost_to_restarts",
        title="Restarts lost work",
        reason="dies: preemption",
        symptom="after a restart the step number is behind where it was",
        required_records=("steps.jsonl: phases",),
        warning_threshold=0.02,
        critical_threshold=0.20,
        metric="recovery (steps done again and state read back), share of all device time",
        source=HEURISTIC,
        confidence=0.9,
        fix="Save more often, and leave the run time to save when it is stopped (SIGTERM, then at least 30 s)",
        external_fix="Save more often, and save when the job is stopped (SIGTERM, then at least 30 s)",
        command="--checkpoint-every 1min",
        config_patch={"checkpoint_every": "1min"},
    ),
    Cause(
        id="frequent_restarts",
        title="The run is restarted again and again",
        reason="dies: preemption",
        symptom="many attempts, each of a few minutes",
        required_records=("events.jsonl: attempt", "steps.jsonl: wall_s"),
        warning_threshold=4,
        critical_threshold=12,
        metric="attempts, where they last less than half an hour on average",
        source=HEURISTIC,
        thresholds={
            "mean_s": Threshold(1800.0, "mean length of an attempt (our judgment: Google's spot VMs live hours)")
        },
        confidence=0.8,
        fix="Look at what ended each attempt (events.jsonl, the scheduler's log): another zone or machine type "
        "where spot "
        "machines live longer, an ordinary machine, or the error that repeats",
    ),
)
