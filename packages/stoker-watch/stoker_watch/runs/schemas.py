"""The schemas of a run's records: the lines of steps.jsonl, events.jsonl, devices.jsonl and the others.

Data only. A field that is absent was not measured; it is never zero. `records.py` writes and reads the files,
`docs/run-folder.md` describes them for people, and a test keeps the two in step.
"""

from typing import Annotated, Any, TypedDict

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Number = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
Whole = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
Finite = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
Role = Annotated[str, msgspec.Meta(pattern="^(training|worker|thread)$")]


class Record(msgspec.Struct, kw_only=True):
    """What the lines of most files begin with."""

    t: Amount
    """Unix time, seconds."""
    attempt: Count
    """Attempt of the run, from 1."""


class StepWindow(Record, kw_only=True, omit_defaults=True):
    """A line of steps.jsonl: at least one second of a run, up to `t`. The phases add up to wall_s × devices."""

    step: Whole
    """Optimizer steps done at the end of the window."""
    window_steps: Whole
    """Optimizer steps inside the window."""
    num_images: Whole
    """Images trained on inside the window."""
    wall_s: Number
    """Length of the window, seconds."""
    devices: Whole
    """Number of devices that the phases cover."""
    ranks: Whole = 1
    """Ranks that train alike: together they have so many times the images."""
    phases: dict[str, Number]
    """Device-seconds by phase; a phase that took no time is absent."""
    input_wait_stages: dict[str, Number] = {}
    """Device-seconds of `input_wait` by loader stage, one of INPUT_STAGES; they add up to it."""
    losses: dict[str, Finite] = {}
    """Mean of each loss over the finite steps of the window, and `total`."""
    lr: Finite | None = None
    """Learning rate of the last step."""
    grad_norm: Finite | None = None
    """Mean norm of the gradient before clipping, over the finite steps."""
    skipped_steps: Whole = 0
    """Steps of the window that were skipped because a gradient was not finite."""
    memory_peak_bytes: Whole | None = None
    """Peak device memory allocated so far; on a CPU the resident memory of the process."""
    host_bound_steps: Whole | None = None
    """Host-bound steps of the window: the device had finished all earlier work when the host issued the last kernel,
    so it waited for the host inside the step. None: not measured (on a CPU, host and device are one)."""
    thread_cpu_s: dict[str, Number] = {}
    """CPU-seconds of the training thread by the phase that the thread was in (not the device); absent: not measured."""
    process_cpu_s: Number | None = None
    """CPU-seconds of the training process in the window: all its threads, without its children. More than
    `thread_cpu_s` adds up to: other threads of it compute."""
    recompiles: Whole | None = None
    """Compilations of the window of functions that had been compiled before. None: not measured (TensorFlow's traces
    and JAX's compilations are)."""
    recompiled_s: Number = 0.0
    """Seconds of these of the function of a watched job in JAX that took most; they are in `phases` as well."""
    worker_starts: Whole = 0
    """Loaders of a watched PyTorch job that started worker processes in the window, after the first step."""
    worker_start_s: Number = 0.0
    """Seconds of starting and ending these, and of the wait for their first batch; they are in other phases as well."""
    steps_without_gradients: Whole = 0
    """Steps of a watched PyTorch job in the window in which no parameter of the optimizer had a gradient."""


class TraceWindow(Record, kw_only=True, omit_defaults=True):
    """A line of traces.jsonl: a few steps under the profiler. A sample; the profiler slows these steps down."""

    step: int
    """Optimizer steps done at the end of the window."""
    window_steps: int
    """Optimizer steps in the window."""
    wall_s: float
    """Length of the window, seconds."""
    busy_s: float
    """Seconds of wall_s in which the device ran at least one kernel or copy."""
    comm_s: float = 0.0
    """Seconds of busy_s in which it ran only kernels of a collective."""
    copy_s: float = 0.0
    """Seconds of busy_s in which it ran only copies."""
    launches: int = 0
    """Kernel launches."""
    kernel_median_s: float | None = None
    """Median duration of a kernel, seconds."""
    gaps: "list[Gap]" = []
    """The ten longest gaps without work, the longest first."""
    tensor_core_fraction: float | None = None
    """Fraction of the kernel time in kernels that use tensor cores, by their names."""
    slowdown: float | None = None
    """Duration of the window's steps over that of the steps before it, on the host's clock: 1.05 is 5 % slower."""


class Gap(msgspec.Struct, kw_only=True):
    """A time in which the device had no work."""

    duration_s: float
    """Length of the gap, seconds."""
    host_op: str
    """What the training thread ran meanwhile: the innermost operator or runtime call; empty: Python."""


AFTER_STEP = "after step"
"""Kind of a place that computes, in a line of the training loop after its step: samples, an evaluation."""
WITHOUT_GRADIENTS = "without gradients"
"""Kind of a place that runs layers with gradients off: an evaluation, samples, a teacher."""
LOOP_IN_STEP = "loop in step"
"""Kind of a place that computes, in a Python loop inside of the training step, but not over layers of a model."""


class Place(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """Where samples of stacks were: a line of the job's own code, and what it called."""

    line: str = ""
    """`file:line` of the innermost frame in a file of the job, relative to its working directory. Empty: none is."""
    function: str = ""
    """The function of that line."""
    call: str = ""
    """What that line called, as it can be imported: `copy.deepcopy`; of a call into C, from the text of the line:
    `gc.collect`. Empty: the line's own work."""
    callers: str = ""
    """The lines of the job's own code that called that function, the nearest first: `train.py:118 < train.py:156`."""
    leaf: str = ""
    """The innermost frame, `function (package/file.py)`, where it is another one than the call."""
    kind: str
    """One of the kinds of `StackWindow.main_thread`, AFTER_STEP, WITHOUT_GRADIENTS or LOOP_IN_STEP."""
    part: str = ""
    """In a training of stoker's own: the part of stoker (`evaluation`). `function` is then one of stoker with its
    file and line, and `line` is empty, unless stoker called a file of the user."""
    samples: Count
    """Number of samples there."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """What holds memory that grows, in `data.facts.growth` of an event."""

    text: str
    """What it is and how it grew: a list, dictionary, set or deque of the job's own code."""
    name: str
    """As the source has it."""
    place: str
    """File and line that adds to it."""
    bytes: float
    """Estimate of what was added."""
    graph: bool
    """Whether it has tensors that keep the graph of their step."""
    grown: float
    """Bytes that the process had more meanwhile."""


class StackWindow(Record, kw_only=True, omit_defaults=True):
    """A line of stacks.jsonl: what the threads of a job ran, by samples of their stacks."""

    pid: int
    """Process whose stacks were sampled."""
    wall_s: Amount
    """Seconds since the previous line."""
    samples: Count
    """Number of stack samples in it."""
    main_thread: dict[str, float] = {}
    """Fraction of the samples in which the main thread was in: input_wait, decode, compute, sync, comm, checkpoint,
    compile, gc (garbage collection), python, other, idle. They add up to 1."""
    frames: dict[str, float] = {}
    """`function (file:line)` of the innermost frame of the job's own code → fraction of the samples; at most five."""
    process_cpu: Amount | None = None
    """CPU-seconds per second of the process in this time: all its threads, without its children."""
    role: Role = "training"
    """What the process does: `training`, or `worker` for one that loads data for another one, also for threads of the
    training process that load. `thread`: what other threads do in the job's own code. Samples of threads without such
    work are in the sum of the rest."""
    places: list[Place] = []
    """Where the main thread was, the most frequent first; their samples add up to `samples`. The last one may be the
    sum of the rest, without a line."""


class Probe(Record, kw_only=True, omit_defaults=True):
    """A line of probes.jsonl: an experiment. One thing is changed for a few dozen steps; the speed before and after."""

    probe: str
    """One of PROBE_KINDS; of `stoker tune`, a lever (stoker/knowledge/levers.toml), or of TUNE_KINDS or LR_KINDS."""
    steps: int
    """Steps on each side of the comparison."""
    before_img_per_s: float
    """Images per second of the run as it is."""
    after_img_per_s: float
    """Images per second with the change."""
    ratio: float
    """After divided by before; the geometric mean of pairs that were measured alternately."""
    ratio_low: float
    ratio_high: float
    """Its 95 % interval."""
    automatic: bool = False
    """Made by the run itself, within 1 % of its time."""
    reason: str = ""
    """Why it could not be measured; the numbers are then 0. Of a trial that was measured: why it was not kept."""
    trial: int = 0
    """Number of the trial of `stoker tune`, from 1; the newest line of a trial counts. 0: an experiment of `why`."""
    state: str = ""
    """The state of a trial, one of TRIAL_STATES."""
    kept: bool = False
    """Whether what follows is measured against this trial's settings."""
    changes: dict[str, Any] = {}
    """Settings that a trial changes, by name."""
    fraction: float = 0.0
    """Fraction of the time in the phase that a trial is to shorten, before it."""
    pairs: list[tuple[float, float]] = []
    """Seconds per image before and after, of windows that were measured one after the other."""
    phases: dict[str, float] = {}
    """Seconds per image by phase, with the change."""
    bounds: dict[str, float] = {}
    """Seconds per image of whole steps (`train`), of steps on one batch (`step`) and of loading alone (`load`); seconds
    of an evaluation (`eval`) and of a checkpoint (`checkpoint`)."""
    ap: tuple[float, float] | None = None
    """Mean AP before and after of short trainings, of a lever that changes the results."""
    ap_pairs: list[tuple[float, float]] = []
    """The same, one pair for each seed."""
    ap_gain: tuple[float, float, float] | None = None
    """Their mean difference, and the ends of its 95 % interval."""
    lrs: list[float] = []
    """Learning rates of a range test."""
    losses: list[float] = []
    """Its losses, one for each of `lrs` but the last, if that was not finite."""
    scores: dict[str, float] = {}
    """The scores in a learning-rate sweep: `ap` and `ap50` of the validation split, and `loss`, the mean of the last
    third of the training losses. Empty: it diverged."""
    seconds: float = 0.0
    """Wall time of a trial."""
    machine: str = ""
    """Fingerprint of the machine of a trial."""
    data: str = ""
    """Digest of its data set."""


TRIAL_STATES = ("planned", "run", "passed", "failed", "unavailable")
"""passed: measured, and the same training, also where it was not kept."""
TUNE_KINDS = ("bounds", "confirm")
"""Trials that change nothing or all: the bounds of the speed, and the last configuration against the first."""
LR_KINDS = ("range_test", "lr")
"""Trials of `stoker tune --lr`: the ramp, and a short training."""
PROBE_KINDS = ("cached_batch", "double_batch", "no_allreduce", "compiled", "fewer_workers", "more_workers")
"""What a probe changes."""


Mistake = dict[str, str | bool | Finite]
"""What the hook of a watched job saw in its training loop: `kind`, `place` and values."""
_Facts = TypedDict("_Facts", {
    "num_images": Count, "boxes": Count, "pretrained": list[str], "median_pixels": Amount, "anchor_coverage": Fraction,
    "anchor_sizes": list[Amount], "predicted_step_s": Amount, "predicted_step_error": Amount, "recompiled": str,
    "growth": list[Holder],
    "mistakes": list[Mistake],
}, total=False)  # fmt: skip
_Job = TypedDict("_Job", {"pid": Positive, "start_ticks": Count, "boot": str})
_Kernels = TypedDict("_Kernels", {"convs": bool, "loss": bool})
SettingsData = TypedDict("SettingsData", {
    "backbone_norm": str, "batch_size": Positive, "brightness": Number, "cache": str, "contrast": Number, "data": str,
    "device": str, "hue": Number, "image_size": tuple[Positive, Positive],
    "max_duration": Annotated[str, msgspec.Meta(max_length=64)], "mosaic": Number, "precision": str,
    "price_per_device_hour": Amount, "saturation": Number, "scale_range": tuple[Number, Number], "stages": Positive,
    "trainable_backbone_layers": Count, "weights": str, "workers": Count | str,
}, total=False)  # fmt: skip
"""What is read of the settings of a run, in its config.toml and in the event `resumed`."""
_Restart = TypedDict("_Restart", {"oom_kills": Count}, total=False)
_Metrics = TypedDict("_Metrics", {"ap": Fraction | None, "boxes": Count}, total=False)
EventData = TypedDict("EventData", {
    "alert_delivery": bool, "best_ap": Annotated[float, msgspec.Meta(ge=-1, le=1)], "count": Count,
    "coverage": dict[str, str], "damaged": str, "empty_inputs": list[str], "eval_batch_size": Positive,
    "exit_code": Annotated[int, msgspec.Meta(gt=-(2**16), lt=2**16)] | None, "facts": _Facts, "gpu": Count,
    "handled_error": list[str], "job": _Job, "kernel": list[str], "kernels": _Kernels, "lr": Amount, "measured": Any,
    "metrics": _Metrics, "micro_batch_size": Positive, "not_finite": str, "oom_kills": Count, "output_head": Count,
    "output_offset": Count, "pids": list[int], "price_per_device_hour": Amount, "ranks": Positive,
    "restart": _Restart, "rollback_step": Count, "settings": SettingsData, "stages": Positive, "storage": bool,
    "suggested_lr": Amount, "traceback": list[str], "workers": Count, "write_s": Amount, "xid": Count,
}, total=False)  # fmt: skip
"""What is read of the data of events, which others may have written; a test finds readers of other keys."""


class Event(Record, kw_only=True, omit_defaults=True):
    """A line of events.jsonl: something that happened once."""

    kind: str
    """One of EVENT_KINDS."""
    step: Count | None = None
    """Optimizer steps done then; for `evaluated`, those of the evaluated weights."""
    text: str = ""
    """The line that was printed."""
    data: dict[str, Any] = {}
    """Values that belong to it, by kind; where they are not as `EventData` says, only `damaged`, the reason."""

    def __post_init__(self) -> None:
        try:
            msgspec.convert(self.data, EventData)
        except msgspec.ValidationError as error:
            self.data = {"damaged": str(error)}


class GpuSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One GPU, as the driver reports it. None: not available on this machine."""

    index: int
    """Number of the GPU in the driver."""
    utilization: float | None = None
    """Fraction of the driver's last sample period in which a kernel ran, 0 … 1."""
    memory_used_bytes: int | None = None
    """Memory in use."""
    memory_total_bytes: int | None = None
    """Memory of the GPU."""
    power_w: float | None = None
    """Power draw."""
    power_limit_w: float | None = None
    """Power limit."""
    sm_clock_mhz: int | None = None
    """Clock of the multiprocessors."""
    temperature_c: int | None = None
    """Temperature."""
    throttle_reasons: int | None = None
    """NVML's bit mask of clock event reasons."""
    sm_clock_max_mhz: int | None = None
    """Highest clock of the multiprocessors."""
    sm_active: float | None = None
    """Mean fraction of the multiprocessors with work since the previous line (GPM counters, Hopper and later)."""
    tensor_active: float | None = None
    """Fraction of the time in which the tensor cores worked."""
    dram_active: float | None = None
    """Fraction of the memory bandwidth that was used."""
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    """Number of lanes; the maxima are those of this GPU in this slot."""
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    """Memory errors since the driver was loaded."""
    xids: list[int] = []
    """Xid errors that the driver reported since the previous line, by NVIDIA's numbers."""
    mig: bool | None = None
    """The GPU is a MIG slice or is divided into MIG slices."""
    vgpu: bool | None = None
    """The GPU is shared by a hypervisor."""
    other_processes: int | None = None
    """Compute processes on it that do not belong to this run."""


class DeviceSample(Record, kw_only=True, omit_defaults=True):
    """A line of devices.jsonl: system telemetry, once a second. Fractions are of the time since the previous line."""

    gpus: list[GpuSample] = []
    """One for each GPU that this process may use; none without the NVIDIA driver."""
    cpu_core_utilization: list[float] = []
    """Utilization of each core of the machine, 0 … 1."""
    process_cpu: float | None = None
    """CPU-seconds per second of this process and its children."""
    busiest_processes: dict[str, float] = {}
    """Command name → cores in use, of processes outside the run; the three busiest, while these use the cores."""
    rss_bytes: int | None = None
    """Resident memory of this process and its children."""
    largest_rss_bytes: int | None = None
    """That of the process with the most: the training process, as its loader workers have less."""
    memory_used_bytes: int | None = None
    memory_limit_bytes: int | None = None
    """Both of the host, or of the cgroup where its limit is lower."""
    psi_cpu: float | None = None
    psi_memory: float | None = None
    psi_io: float | None = None
    """Pressure stall information: fraction of the time in which some task waited, 0 … 1."""
    throttled_s: float | None = None
    """Seconds in which the cgroup's CPU quota throttled runnable threads, since the previous line."""
    cpu_limit_cores: float | None = None
    """Number of cores that this run may use, by affinity and quota."""
    threads_running: float | None = None
    """Mean number of threads of this process and its children that ran or waited for a core."""
    threads_active: int | None = None
    """Threads of them that took at least 0.005 of a core."""
    bound_cores: int | None = None
    """Number of cores that those of them which computed are bound to, where they might use more."""
    unbound_cores: int | None = None
    """Number of cores that they might use: the first process of the job may, or what watches it."""
    swap_used_bytes: int | None = None
    """Swap in use."""
    disk_free_bytes: int | None = None
    """On the file system of the run folder."""
    net_received_bytes_s: float | None = None
    """By the machine (in a container: by the container), without loopback."""
    shm_used_bytes: int | None = None
    shm_total_bytes: int | None = None
    """/dev/shm."""
    open_fds: int | None = None
    """Open file descriptors of the process that has the most."""
    max_fds: int | None = None
    """Maximum number of open files of that process."""
    oom_kills: int | None = None
    """Processes of the cgroup that the kernel's OOM killer killed since the previous line."""


class Quarantined(Record, kw_only=True):
    """A line of quarantine.jsonl: a bad image, and its substitute."""

    image_index: int
    """Index of the image in the data set."""
    path: str
    """Its file."""
    error: str
    """Why it cannot be used."""
    sample_position: int
    """Position in the stream of training samples from which the image is no longer used."""
    replaced_by: int
    """Index of the image that replaces it there; -1: none (evaluation)."""
