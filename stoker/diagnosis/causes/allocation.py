"""Causes of the reason "allocation and scheduling": the machine, its other users, starts and stops. Data only."""

from stoker.diagnosis.causes.cause import OUR_JUDGMENT, Cause, Limit

NVML_REASONS = "NVML manual, nvmlClocksEventReasons"
BUSY = Limit(0.5, "utilisation of a GPU's sample from which it counts")
SAMPLES = Limit(5, "such samples, at least (our judgment)")
INPUT_SYMPTOMS = ("too_few_threads", "too_few_cores", "slow_decode", "input_bound")
"""What a lack of processor time looks like from inside."""

ROWS = (
    Cause(
        id="startup_heavy",
        title="Starting takes a large part of the run",
        reason="allocation and scheduling",
        looks_like="minutes pass before the first step of each attempt",
        needs=("steps.jsonl: phases",),
        warn_from=0.10,
        measure="startup and compile, share of all device time",
        source=OUR_JUDGMENT,
        limits={
            "least_s": Limit(
                60.0,
                "device-seconds of starting below which it is never a finding: its share of a short "
                "run says nothing (our judgment)",
            )
        },
        confidence=0.9,
        fix="Keep weights, index and pictures on a disk that survives the machine (STOKER_CACHE_DIR, "
        "STOKER_WEIGHTS_DIR), and restart less often",
        fix_elsewhere="Keep weights, pictures and compiled code on a disk that survives the machine (TORCH_HOME, "
        "TORCHINDUCTOR_CACHE_DIR, the image of the container), and restart less often",
    ),
    Cause(
        id="checkpoint_heavy",
        title="Checkpoints hold the training up",
        reason="allocation and scheduling",
        looks_like="img/s drops whenever a checkpoint is due",
        needs=("steps.jsonl: phases",),
        warn_from=0.05,
        critical_from=0.25,
        measure="checkpoint, share of the device time after the start; of those that are not the last, where "
        "their number "
        "is known",
        source="our judgment: files are written in the background, so only the copy of the state should show",
        limits={"least_s": Limit(0.5, "seconds of saving below which nothing is said (our judgment)")},
        confidence=0.9,
        fix="Save less often, or to a faster disk",
        fix_elsewhere="Save less often, to a faster disk, or in the background "
        "(torch.distributed.checkpoint.async_save; a copy of the state in a thread)",
        command="--checkpoint-every 10min",
        patch={"checkpoint_every": "10min"},
    ),
    Cause(
        id="checkpoint_disk_slow",
        title="The disk under the checkpoints is slow",
        reason="allocation and scheduling",
        looks_like="each checkpoint takes seconds, and tasks wait for storage meanwhile",
        needs=("steps.jsonl: phases", "devices.jsonl: psi_io"),
        warn_from=0.05,
        critical_from=0.25,
        measure="as checkpoint_heavy, while tasks wait for storage",
        source="as checkpoint_heavy",
        limits={
            "psi_io": Limit(0.10, "share of the time in which some task waited for storage (our judgment)"),
            "least_s": Limit(0.5, "as checkpoint_heavy"),
        },
        over=("checkpoint_heavy",),
        confidence=0.7,
        fix="Put the run on a local SSD (--run DIR) and copy it away afterwards, or save less often",
        fix_elsewhere="Save to a local SSD and copy it away afterwards, or save less often",
        command="--run",
    ),
    Cause(
        id="cpu_quota",
        title="The container's CPU quota holds the job back",
        reason="allocation and scheduling",
        looks_like="nproc shows many cores, and the job gets a part of their time, in bursts",
        needs=("devices.jsonl: throttled_s, process_cpu",),
        warn_from=0.05,
        critical_from=0.25,
        measure="share of the wanted processor time that the quota withheld",
        source=OUR_JUDGMENT,
        over=("threads_oversubscribed", "cpu_contention", *INPUT_SYMPTOMS),
        confidence=0.85,
        fix="A higher CPU limit of the container (Kubernetes: resources.limits.cpu; docker: --cpus), or no more "
        "threads than it has",
        command="docker run --cpus",
    ),
    Cause(
        id="cpu_contention",
        title="Other processes take the processors",
        reason="allocation and scheduling",
        looks_like="img/s varies with the hour; the same run is faster elsewhere",
        needs=("devices.jsonl: cpu, process_cpu, threads_running",),
        info_from=0.10,
        warn_from=0.20,
        critical_from=0.50,
        measure="processor time that the run's threads wanted (they ran, or waited for a processor) and other "
        "processes had, where the cores are busy: share of what they wanted, or of the time, where they wanted less "
        "than a core",
        source="our judgment: a fifth of the speed is worth a word to the neighbours; less comes and goes",
        limits={
            "busy": Limit(
                0.85, "mean busy share of the cores from which others' load may be taken from us (our judgment)"
            )
        },
        over=("too_few_cores",),
        confidence=0.7,
        fix="Fewer jobs on the machine, a machine of its own, or cores that are set apart (taskset, cpuset)",
    ),
    Cause(
        id="threads_oversubscribed",
        title="Far more threads run than there are cores",
        reason="allocation and scheduling",
        looks_like="all cores busy, much of it in the kernel and in spinning; fewer threads are faster",
        needs=("devices.jsonl: threads_running, cores (or cpu)",),
        warn_from=3.0,
        critical_from=8.0,
        measure="mean of the threads that run or want to, per core",
        source="our judgment: libraries start one thread a core each (OpenMP, BLAS, OpenCV), so two of them are usual",
        limits={
            "more": Limit(
                5, "threads more than cores, at least: on two cores a loader and a model want six (our judgment)"
            ),
            "samples": Limit(4, "samples (our judgment)"),
        },
        over=INPUT_SYMPTOMS,
        probe="fewer_threads",
        confidence=0.75,
        fix="OMP_NUM_THREADS=1 in loader processes, torch.set_num_threads, cv2.setNumThreads(0); of stoker --threads 0",
        fix_elsewhere="OMP_NUM_THREADS=1 in loader processes, torch.set_num_threads, cv2.setNumThreads(0), fewer "
        "loader workers",
        command="OMP_NUM_THREADS=1",
        patch={"threads": 0},
    ),
    Cause(
        id="idle_gpus",
        title="Some GPUs do nothing",
        reason="allocation and scheduling",
        looks_like="several GPUs are allocated, and one trains",
        needs=("devices.jsonl: gpus.utilisation of two or more",),
        warn_from=1,
        measure="GPUs that were never used while others worked",
        source="by count",
        limits={
            "idle": Limit(0.02, "mean utilisation below which a GPU is not used (our judgment)"),
            "works": Limit(0.2, "mean utilisation of another from which the job works (our judgment)"),
            "samples": SAMPLES,
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
        looks_like="speed varies without a reason; nvidia-smi lists more processes",
        needs=("devices.jsonl: gpus.other_processes",),
        warn_from=0.20,
        measure="share of the samples in which another process was on one of the GPUs",
        source=OUR_JUDGMENT,
        confidence=0.75,
        fix="End them (nvidia-smi names them), another GPU (CUDA_VISIBLE_DEVICES), or exclusive mode (nvidia-smi -c 3)",
        command="nvidia-smi",
    ),
    Cause(
        id="gpu_hot",
        title="The GPU is throttled because it is hot",
        reason="allocation and scheduling",
        looks_like="clocks fall after some minutes of load; the temperature stands at its limit",
        needs=("devices.jsonl: gpus.throttle_reasons, utilisation",),
        warn_from=0.10,
        critical_from=0.50,
        measure="share of the samples under load with a thermal slowdown",
        source=NVML_REASONS + ": SwThermalSlowdown, HwThermalSlowdown, HwSlowdown; the share is our judgment",
        limits={"busy": BUSY, "samples": SAMPLES},
        over=("gpu_clock_low", "gpu_power_capped"),
        confidence=0.9,
        fix="Cooling: fans, dust, the slot beside it; in a cloud another machine, and report this one",
    ),
    Cause(
        id="gpu_power_capped",
        title="The GPU is held back by its power limit",
        reason="allocation and scheduling",
        looks_like="the clock is below its maximum, the power at its limit",
        needs=("devices.jsonl: gpus.throttle_reasons, sm_clock_mhz, sm_clock_max_mhz, utilisation",),
        info_from=0.15,
        warn_from=0.30,
        measure="share of the clock that is missing, where the power limit holds it in most samples under load",
        source=NVML_REASONS + ": SwPowerCap, HwPowerBrake. Large GPUs at full load lose some of their clock to it by "
        "design, so a little is only told",
        limits={"busy": BUSY, "samples": SAMPLES, "capped": Limit(0.5, "share of those samples (our judgment)")},
        over=("gpu_clock_low",),
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
        looks_like="the clock stays at one low value under load; neither heat nor power holds it",
        needs=("devices.jsonl: gpus.sm_clock_mhz, sm_clock_max_mhz, utilisation",),
        info_from=0.20,
        warn_from=0.35,
        measure="share of the largest clock that is missing under load",
        source="our judgment; " + NVML_REASONS + ": ApplicationsClocksSetting is a clock that somebody has set",
        limits={"busy": BUSY, "samples": SAMPLES},
        confidence=0.7,
        fix="`nvidia-smi -rgc` and `nvidia-smi -rac` take limits away that somebody has set",
        command="nvidia-smi -rgc",
    ),
    Cause(
        id="idle_by_intent",
        title="Nothing was asked of the device",
        reason="allocation and scheduling",
        looks_like="the job lives, and waits for something else",
        needs=("steps.jsonl: phases.idle",),
        warn_from=0.05,
        critical_from=0.30,
        measure="idle, share of the device time after the start",
        source=OUR_JUDGMENT,
        confidence=0.9,
        fix="End the job, or give the device back, while there is nothing to train",
    ),
    Cause(
        id="work_lost_to_restarts",
        title="Restarts lost work",
        reason="dies: preemption",
        looks_like="after a restart the step number is behind where it was",
        needs=("steps.jsonl: phases",),
        warn_from=0.02,
        critical_from=0.20,
        measure="recovery (steps done again and state read back), share of all device time",
        source=OUR_JUDGMENT,
        confidence=0.9,
        fix="Save more often, and leave the run time to save when it is stopped (SIGTERM, then at least 30 s)",
        fix_elsewhere="Save more often, and save when the job is stopped (SIGTERM, then at least 30 s)",
        command="--checkpoint-every 1min",
        patch={"checkpoint_every": "1min"},
    ),
    Cause(
        id="frequent_restarts",
        title="The run is restarted again and again",
        reason="dies: preemption",
        looks_like="many attempts, each of a few minutes",
        needs=("events.jsonl: attempt", "steps.jsonl: wall_s"),
        warn_from=4,
        critical_from=12,
        measure="attempts, where they last less than half an hour on average",
        source=OUR_JUDGMENT,
        limits={"mean_s": Limit(1800.0, "mean length of an attempt (our judgment: Google's spot VMs live hours)")},
        confidence=0.8,
        fix="Look at what ended each attempt (events.jsonl, the scheduler's log): another zone or machine type "
        "where spot "
        "machines live longer, an ordinary machine, or the error that repeats",
    ),
)
