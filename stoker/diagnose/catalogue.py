"""The causes that stoker knows, as data: what each looks like, what proves it, from where on it counts, what to do.

Every threshold of the diagnosis is here, with its source; `rules.py` has the code that looks. A cause belongs to one of
the seven reasons for which a GPU stands idle, or to one of the ways in which a job dies. What ended a job is in
`deaths.py`.
"""

from typing import Literal

import msgspec

Reason = Literal[
    "too little parallel work", "data loading", "architecture and hyper-parameters", "memory", "communication",
    "allocation and scheduling", "blindness",
    "dies: GPU memory", "dies: host memory", "dies: shared memory", "dies: driver or library mismatch", "dies: storage",
    "dies: paths or environment", "dies: bad records", "dies: divergence", "dies: hang", "dies: preemption",
    "unknown",
]  # fmt: skip


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the catalogue."""

    id: str
    title: str
    reason: Reason
    looks_like: str
    """What a person sees."""
    needs: tuple[str, ...]
    """Records without which the rule abstains, as `file: field`."""
    warn_from: float
    """The rule is silent below; what is measured is said in `measure`."""
    critical_from: float | None = None
    measure: str
    source: str
    """Where the thresholds come from."""
    fix: str
    command: str | None = None
    """What to run or to add to the command line."""


STARTUP_LEAST_S = 60.0
"""A start shorter than this is never a finding: its share of a short run says nothing. Our judgment."""
IDLE_CORES_BELOW = 0.7
"""Mean busy share of the cores below which more threads can help. Our judgment: decoding threads reach 0.9 and more."""
SATURATED_FROM = 0.85
"""Mean busy share of the cores from which other processes' load is taken from us. Our judgment."""
OOM_IS_NEAR = "our judgment: the next larger batch of boxes, fragment or fork has to fit into what is left"

_CAUSES = (
    Cause(
        id="input_bound",
        title="The device waits for pictures",
        reason="data loading",
        looks_like="the device is busy in bursts; img/s does not rise with a faster device or a larger batch",
        needs=("steps.jsonl: phases",),
        warn_from=0.05,
        critical_from=0.20,
        measure="input_wait, share of all device time",
        source="TensorFlow Profiler, op_stats_to_input_pipeline_analysis.cc: 5 % moderately, 20 % highly input-bound",
        fix="Prepare pictures faster: decoded pictures that are kept (--cache disk), a machine with more cores per "
        "device, or pictures stored at no more than twice the canvas",
    ),
    Cause(
        id="starved_inside_steps",
        title="The device stands still inside steps",
        reason="too little parallel work",
        looks_like="the ledger says compute, the driver says idle: kernels are too small or launched too late",
        needs=("steps.jsonl: phases", "devices.jsonl: gpus.utilisation of just the devices that train"),
        warn_from=0.20,
        measure="share of compute in the ledger minus the driver's utilisation",
        source="our judgment: the driver's sample period of 1/6 to 1 s (NVML manual, nvmlDeviceGetUtilizationRates) "
        "blurs less than this over a run",
        fix="Give each step more work: a larger --batch or --canvas",
        command="--batch",
    ),
    Cause(
        id="startup_heavy",
        title="Starting takes a large part of the run",
        reason="allocation and scheduling",
        looks_like="minutes pass before the first step of each attempt",
        needs=("steps.jsonl: phases",),
        warn_from=0.10,
        measure=f"startup and compile, share of all device time, when they take {STARTUP_LEAST_S:.0f} s or more",
        source="our judgment",
        fix="Keep weights, index and pictures on a disk that survives the machine (STOKER_CACHE_DIR, "
        "STOKER_WEIGHTS_DIR), and restart less often",
    ),
    Cause(
        id="evaluation_heavy",
        title="Evaluation takes a large part of the run",
        reason="architecture and hyper-parameters",
        looks_like="training pauses for long and often",
        needs=("steps.jsonl: phases",),
        warn_from=0.10,
        critical_from=0.30,
        measure="eval, share of all device time",
        source="our judgment",
        fix="Evaluate less often",
        command="--eval-every",
    ),
    Cause(
        id="checkpoint_heavy",
        title="Checkpoints hold the training up",
        reason="allocation and scheduling",
        looks_like="img/s drops whenever a checkpoint is due",
        needs=("steps.jsonl: phases",),
        warn_from=0.03,
        measure="checkpoint, share of all device time",
        source="our judgment: files are written in the background, so only the copy of the state should show",
        fix="Save less often, or to a faster disk",
        command="--checkpoint-every",
    ),
    Cause(
        id="checkpoints_failed",
        title="Checkpoints could not be saved",
        reason="dies: storage",
        looks_like="training goes on, but a restart would lose more work than it should",
        needs=("events.jsonl: checkpoint_failed",),
        warn_from=1,
        measure="checkpoints that failed",
        source="any is one too many",
        fix="Make room on the run's disk, or put the run on another one (--run)",
    ),
    Cause(
        id="steps_skipped",
        title="Steps were thrown away because gradients were not finite",
        reason="dies: divergence",
        looks_like="the loss jumps; pictures are seen and nothing is learnt from them",
        needs=("steps.jsonl: skipped",),
        warn_from=0.005,
        critical_from=0.10,
        measure="skipped, share of all steps",
        source="ten times what fp16 loss scaling skips by itself (torch.amp.GradScaler grows every 2,000 steps)",
        fix="A lower --rate, a longer --warmup, --clip 1, or --precision bf16 or fp32",
        command="--rate",
    ),
    Cause(
        id="rate_lowered",
        title="Training diverged and went on at a lower rate",
        reason="dies: divergence",
        looks_like="the step number jumps back once or twice, and the rate is a third from there on",
        needs=("events.jsonl: slowed",),
        warn_from=1,
        critical_from=2,
        measure="times that the run went back because its gradients stayed non-finite",
        source="any is one too many: what was learnt between is lost, and the rest is learnt more slowly",
        fix="Start the next run at the rate that this one came through with, or below; where it still diverged, look "
        "for broken boxes with `stoker data check`",
        command="--rate",
    ),
    Cause(
        id="loss_spikes",
        title="The loss jumped",
        reason="dies: divergence",
        looks_like="a curve that falls, and in between is far above itself for a while",
        needs=("events.jsonl: loss_spike",),
        warn_from=2,
        critical_from=10,
        measure="jumps to twice the running median and eight standard deviations above it",
        source="our judgment: training gets over a single jump by itself; training/stability.py has what a jump is",
        fix="A lower --rate, a longer --warmup or a smaller --clip; jumps at the same pictures in every epoch: look at "
        "their boxes",
        command="--rate",
    ),
    Cause(
        id="rate_too_high",
        title="The learning rate looks too high",
        reason="architecture and hyper-parameters",
        looks_like="the loss rises after the warm-up, or the gradient grows, or many steps are skipped",
        needs=("events.jsonl: rate_too_high",),
        warn_from=1,
        measure="stretches of the run that looked so while they were trained",
        source="training/stability.py has the thresholds",
        fix="A third of the rate, or a longer --warmup",
        command="--rate",
    ),
    Cause(
        id="rate_too_low",
        title="The learning rate looks too low",
        reason="architecture and hyper-parameters",
        looks_like="a fifth of the run is over, and loss and gradient are what they were at its beginning",
        needs=("events.jsonl: rate_too_low",),
        warn_from=1,
        measure="stretches of the run that looked so while they were trained",
        source="training/stability.py has the thresholds",
        fix="Ten times the rate, unless the weights had learnt these pictures before",
        command="--rate",
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
        source="our judgment",
        fix="Save more often, and leave the run time to save when it is stopped (SIGTERM, then at least 30 s)",
        command="--checkpoint-every",
    ),
    Cause(
        id="unattributed_time",
        title="Time that no clock saw",
        reason="blindness",
        looks_like="the phases that are named do not explain the run",
        needs=("steps.jsonl: phases",),
        warn_from=0.03,
        measure="unattributed, share of all device time",
        source="what stoker's own tests allow the ledger in steady state",
        fix="A process that was stopped or swapped out, or a gap in stoker's ledger: where the machine was not "
        "suspended, report it",
    ),
    Cause(
        id="host_memory_near_limit",
        title="Host memory is nearly full",
        reason="dies: host memory",
        looks_like="the kernel kills the process (exit 137) without a message",
        needs=("devices.jsonl: memory_used_bytes, memory_limit_bytes",),
        warn_from=0.90,
        critical_from=0.97,
        measure="most memory in use, share of the limit (of the machine, or of the container where that is tighter)",
        source=OOM_IS_NEAR,
        fix="Fewer --threads, a smaller --batch, a higher memory limit of the container, or fewer other processes",
        command="--threads",
    ),
    Cause(
        id="gpu_memory_near_limit",
        title="GPU memory is nearly full",
        reason="dies: GPU memory",
        looks_like="torch.OutOfMemoryError, often hours in, at an unusual batch or after an evaluation",
        needs=("steps.jsonl: memory_peak_bytes", "devices.jsonl: gpus.memory_total_bytes"),
        warn_from=0.95,
        measure="most memory allocated, share of the smallest GPU",
        source=OOM_IS_NEAR,
        fix="A smaller --batch or --canvas, or --accumulate 2",
        command="--accumulate 2",
    ),
    Cause(
        id="quarantined_pictures",
        title="Pictures could not be used",
        reason="dies: bad records",
        looks_like="other pictures stand in for them; above 1 % the run stops",
        needs=("quarantine.jsonl",),
        warn_from=1,
        measure="pictures in quarantine",
        source="any is a picture that was paid for and not learnt from",
        fix="Copy or download the named files again, or take them out of the annotations",
    ),
    Cause(
        id="cpu_contention",
        title="Other work takes the processors",
        reason="allocation and scheduling",
        looks_like="img/s varies with the hour; the same run is faster elsewhere",
        needs=("devices.jsonl: process_cpu, and throttled_s or cpu",),
        warn_from=0.05,
        critical_from=0.25,
        measure="share of the wanted processor time that the container's CPU quota withheld; or, where the cores are "
        f"{100 * SATURATED_FROM:.0f} % busy, the share of them that other processes use",
        source="our judgment",
        fix="A higher CPU quota for the container, fewer --threads than cores, or a machine of its own",
    ),
)

CATALOGUE: dict[str, Cause] = {cause.id: cause for cause in _CAUSES}
