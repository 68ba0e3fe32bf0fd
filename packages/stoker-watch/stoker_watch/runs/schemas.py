"""The schemas of a run's records: the lines of steps.jsonl, events.jsonl, devices.jsonl and the others.

Data only. A field that is absent was not measured; it is never zero. `records.py` writes and reads the files. What the
fields mean, with units and ranges, is in `docs/run-folder.toml`, from which `docs/run-folder.md` is generated; a test
keeps the three in step.
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
    attempt: Count


class StepWindow(Record, kw_only=True, omit_defaults=True):
    """A line of steps.jsonl: at least one second of a run, up to `t`. The phases add up to wall_s × devices."""

    step: Whole
    window_steps: Whole
    num_images: Whole
    wall_s: Number
    devices: Whole
    ranks: Whole = 1
    phases: dict[str, Number]
    input_wait_stages: dict[str, Number] = {}
    losses: dict[str, Finite] = {}
    lr: Finite | None = None
    grad_norm: Finite | None = None
    skipped_steps: Whole = 0
    memory_peak_bytes: Whole | None = None
    host_bound_steps: Whole | None = None
    thread_cpu_s: dict[str, Number] = {}
    process_cpu_s: Number | None = None
    recompiles: Whole | None = None
    recompiled_s: Number = 0.0
    worker_starts: Whole = 0
    worker_start_s: Number = 0.0
    steps_without_gradients: Whole = 0


class TraceWindow(Record, kw_only=True, omit_defaults=True):
    """A line of traces.jsonl: a few steps under the profiler. A sample; the profiler slows these steps down."""

    step: int
    window_steps: int
    wall_s: float
    busy_s: float
    comm_s: float = 0.0
    copy_s: float = 0.0
    launches: int = 0
    kernel_median_s: float | None = None
    gaps: "list[Gap]" = []
    tensor_core_fraction: float | None = None
    slowdown: float | None = None


class Gap(msgspec.Struct, kw_only=True):
    """A time in which the device had no work."""

    duration_s: float
    host_op: str


AFTER_STEP = "after step"
"""Kind of a place that computes, in a line of the training loop after its step: samples, an evaluation."""
WITHOUT_GRADIENTS = "without gradients"
"""Kind of a place that runs layers with gradients off: an evaluation, samples, a teacher."""
LOOP_IN_STEP = "loop in step"
"""Kind of a place that computes, in a Python loop inside of the training step, but not over layers of a model."""


class Place(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """Where samples of stacks were: a line of the job's own code, and what it called."""

    line: str = ""
    function: str = ""
    call: str = ""
    callers: str = ""
    leaf: str = ""
    kind: str
    part: str = ""
    samples: Count


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """What holds memory that grows, in `data.facts.growth` of an event."""

    text: str
    name: str
    place: str
    bytes: float
    graph: bool
    grown: float


class StackWindow(Record, kw_only=True, omit_defaults=True):
    """A line of stacks.jsonl: what the threads of a job ran, by samples of their stacks."""

    pid: int
    wall_s: Amount
    samples: Count
    main_thread: dict[str, float] = {}
    frames: dict[str, float] = {}
    process_cpu: Amount | None = None
    role: Role = "training"
    loader: str = ""
    places: list[Place] = []


class Probe(Record, kw_only=True, omit_defaults=True):
    """A line of probes.jsonl: an experiment. One thing is changed for a few dozen steps; the speed before and after."""

    probe: str
    steps: int
    before_img_per_s: float
    after_img_per_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    automatic: bool = False
    reason: str = ""
    trial: int = 0
    state: str = ""
    kept: bool = False
    changes: dict[str, Any] = {}
    fraction: float = 0.0
    pairs: list[tuple[float, float]] = []
    phases: dict[str, float] = {}
    bounds: dict[str, float] = {}
    ap: tuple[float, float] | None = None
    ap_pairs: list[tuple[float, float]] = []
    ap_gain: tuple[float, float, float] | None = None
    lrs: list[float] = []
    losses: list[float] = []
    scores: dict[str, float] = {}
    seconds: float = 0.0
    machine: str = ""
    data: str = ""


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
    "recompiled_why": str, "growth": list[Holder], "mistakes": list[Mistake], "usual_steps": Positive,
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
_Extended = TypedDict("_Extended", {"step": Count, "trained_s": Amount, "before": str, "after": str}, total=False)
_Metrics = TypedDict("_Metrics", {"ap": Fraction | None, "boxes": Count}, total=False)
EventData = TypedDict("EventData", {
    "alert_delivery": bool, "best_ap": Annotated[float, msgspec.Meta(ge=-1, le=1)], "count": Count,
    "coverage": dict[str, str], "damaged": str, "detached": bool, "empty_inputs": list[str],
    "eval_batch_size": Positive,
    "exit_code": Annotated[int, msgspec.Meta(gt=-(2**16), lt=2**16)] | None, "extended": _Extended,
    "facts": _Facts, "gpu": Count,
    "handled_error": list[str], "job": _Job, "kernel": list[str], "kernels": _Kernels, "lr": Amount, "measured": Any,
    "max_duration": Annotated[str, msgspec.Meta(max_length=64)],
    "metrics": _Metrics, "micro_batch_size": Positive, "not_finite": str, "oom_kills": Count, "output_head": Count,
    "output_offset": Count, "pids": list[int], "price_per_device_hour": Amount, "ranks": Positive,
    "recording_ended": str, "restart": _Restart, "rollback_step": Count, "settings": SettingsData, "stages": Positive,
    "storage": bool, "suggested_lr": Amount, "traceback": list[str], "trained_s": Amount, "workers": Count,
    "write_s": Amount, "xid": Count,
}, total=False)  # fmt: skip
"""What is read of the data of events, which others may have written; a test finds readers of other keys."""


class Event(Record, kw_only=True, omit_defaults=True):
    """A line of events.jsonl: something that happened once."""

    kind: str
    step: Count | None = None
    text: str = ""
    data: dict[str, Any] = {}

    def __post_init__(self) -> None:
        try:
            msgspec.convert(self.data, EventData)
        except msgspec.ValidationError as error:
            self.data = {"damaged": str(error)}


class GpuSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One GPU, as the driver reports it. None: not available on this machine."""

    index: int
    utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    temperature_c: int | None = None
    throttle_reasons: int | None = None
    sm_clock_max_mhz: int | None = None
    sm_active: float | None = None
    tensor_active: float | None = None
    dram_active: float | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    xids: list[int] = []
    mig: bool | None = None
    vgpu: bool | None = None
    other_processes: int | None = None


class DeviceSample(Record, kw_only=True, omit_defaults=True):
    """A line of devices.jsonl: system telemetry, once a second. Fractions are of the time since the previous line."""

    gpus: list[GpuSample] = []
    cpu_core_utilization: list[float] = []
    process_cpu: float | None = None
    busiest_processes: dict[str, float] = {}
    rss_bytes: int | None = None
    largest_rss_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_limit_bytes: int | None = None
    psi_cpu: float | None = None
    psi_memory: float | None = None
    psi_io: float | None = None
    throttled_s: float | None = None
    cpu_limit_cores: float | None = None
    threads_running: float | None = None
    threads_active: int | None = None
    bound_cores: int | None = None
    unbound_cores: int | None = None
    swap_used_bytes: int | None = None
    disk_free_bytes: int | None = None
    net_received_bytes_s: float | None = None
    shm_used_bytes: int | None = None
    shm_total_bytes: int | None = None
    open_fds: int | None = None
    max_fds: int | None = None
    oom_kills: int | None = None


class Quarantined(Record, kw_only=True):
    """A line of quarantine.jsonl: a bad image, and its substitute."""

    image_index: int
    path: str
    error: str
    sample_position: int
    replaced_by: int
