"""What a line of each of a run's records is: the schemas of steps.jsonl, events.jsonl, devices.jsonl and the others.

Data only. A field that is absent is one that nobody measured, never zero. `folder.py` writes and reads the files,
`docs/run-folder.md` describes them for people, and a test holds the two together.
"""

from typing import Any

import msgspec


class StepWindow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of steps.jsonl: at least one second of a run. The phases of a window add up to wall_s × devices."""

    t: float
    """Unix time, seconds, at the end of the window."""
    attempt: int
    """1 for the first start of the run, one more after each restart."""
    step: int
    """Optimizer steps done at the end of the window."""
    window_steps: int
    """Of these, inside the window."""
    num_images: int
    """Pictures trained on inside the window."""
    wall_s: float
    devices: int
    phases: dict[str, float]
    """Device-seconds by phase; a phase that is absent took none."""
    input_wait_stages: dict[str, float] = {}
    """Device-seconds of `input_wait` by what was waited for, one of INPUT_STAGES; they add up to it."""
    losses: dict[str, float] = {}
    """Mean of each part of the loss over the finite steps of the window, and `total`."""
    lr: float | None = None
    grad_norm: float | None = None
    """Mean norm of the gradient before clipping, over the finite steps."""
    skipped_steps: int = 0
    """Steps of the window that were skipped because a gradient was not finite."""
    memory_peak_bytes: int | None = None
    host_bound_steps: int | None = None
    """Steps of the window whose work the device had done when the thread had only just issued the last of it: it waited
    for the host inside them. None: nobody looked (a CPU computes while it is told)."""
    thread_cpu_s: dict[str, float] = {}
    """Processor seconds of the training thread by the phase it was in (its own line, not the device's); absent: nobody
    measured."""


class TraceWindow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of traces.jsonl: a few steps under the profiler, so a sample, and slower than the others."""

    t: float
    attempt: int
    step: int
    """Optimizer steps done at its end."""
    window_steps: int
    wall_s: float
    busy_s: float
    """Of wall_s, seconds in which the device ran at least one kernel or copy."""
    comm_s: float = 0.0
    """Of busy_s, seconds in which it ran nothing but kernels of a collective."""
    copy_s: float = 0.0
    """Of busy_s, seconds in which it ran nothing but copies."""
    launches: int = 0
    """Kernels."""
    kernel_median_s: float | None = None
    kernels: list["KernelTime"] = []
    """The ten that took most."""
    gaps: list["Gap"] = []
    """The ten longest times without work, the longest first."""
    tensor_core_fraction: float | None = None
    """Of the kernels' time, that in kernels whose names are of tensor cores."""


class KernelTime(msgspec.Struct, kw_only=True):
    """Kernels of one name in a trace."""

    name: str
    count: int
    total_s: float


class Gap(msgspec.Struct, kw_only=True):
    """A time in which the device had nothing to do."""

    duration_s: float
    host_op: str
    """What the training thread was in meanwhile: the profiler's innermost operator or runtime call; empty: Python."""


class StackWindow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of stacks.jsonl: where the threads of a watched job were, by samples of their stacks (py-spy)."""

    t: float
    attempt: int
    pid: int
    wall_s: float
    """Since the line before."""
    samples: int
    """Times that the stacks were read in it."""
    main_thread: dict[str, float] = {}
    """Share of the samples in which the main thread was in: input_wait, decode, compute, sync, comm, checkpoint,
    compile, python, other, idle. They add up to 1."""
    frames: dict[str, float] = {}
    """`function (file:line)` of the main thread's own innermost frame → share of the samples; at most five."""
    active_threads: float | None = None
    """Mean number of threads that ran."""


class Probe(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of probes.jsonl: one thing was changed for a few dozen steps; the speed before and after."""

    t: float
    attempt: int
    probe: str
    """One of PROBE_KINDS."""
    steps: int
    """Of each side."""
    before_img_per_s: float
    after_img_per_s: float
    ratio: float
    """After over before; a median of pairs that were measured in turn."""
    ratio_low: float
    ratio_high: float
    """Its 90 % interval."""
    automatic: bool = False
    """Done by the run itself, within 1 % of its time."""
    reason: str = ""
    """Why it could not be measured; the numbers are 0 then."""


PROBE_KINDS = ("cached_batch", "double_batch", "no_allreduce", "compiled", "fewer_workers", "more_workers")
"""What a probe changes."""


class Event(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of events.jsonl: something that happened once."""

    t: float
    attempt: int
    kind: str
    """One of EVENT_KINDS."""
    step: int | None = None
    text: str = ""
    """The line a person saw."""
    data: dict[str, Any] = {}


class GpuSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One GPU as the driver sees it. None: the machine does not say."""

    index: int
    utilization: float | None = None
    """Share of the last sample period in which a kernel ran, 0 … 1."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    temperature_c: int | None = None
    throttle_reasons: int | None = None
    """NVML's bit mask of clock event reasons."""
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    memory_utilization: float | None = None
    """Share of the driver's last sample period in which its memory was read or written, 0 … 1."""
    sm_active: float | None = None
    """Of the time since the line before (GPM, Hopper and later), mean share of the multiprocessors that had work."""
    sm_occupancy: float | None = None
    """Mean share of the warps that these can hold."""
    tensor_active: float | None = None
    """Share of the time in which the tensor cores worked."""
    dram_active: float | None = None
    """Share of the memory's bandwidth that was used."""
    pcie_sent_bytes_s: float | None = None
    pcie_received_bytes_s: float | None = None
    """As the GPU sees it: sent to the host, received from it."""
    nvlink_sent_bytes_s: float | None = None
    nvlink_received_bytes_s: float | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    """Lanes; the maxima are of this GPU in this slot."""
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    """Memory errors since the driver was loaded."""
    xids: list[int] = []
    """Errors that the driver reported since the line before, by NVIDIA's numbers."""
    mig: bool | None = None
    """The GPU is a MIG slice, or is cut into some."""
    vgpu: bool | None = None
    other_processes: int | None = None
    """Computing processes on it that are not of this run."""
    energy_j: float | None = None
    """Since the driver was loaded."""


class DeviceSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of devices.jsonl: the second witness, once a second. Shares are of the time since the line before."""

    t: float
    attempt: int
    gpus: list[GpuSample] = []
    cpu_core_utilization: list[float] = []
    """Busy share of each core of the machine, 0 … 1."""
    process_cpu: float | None = None
    """Processor seconds per second of this process and its children."""
    rss_bytes: int | None = None
    """Resident memory of this process and its children."""
    memory_used_bytes: int | None = None
    memory_limit_bytes: int | None = None
    """Of the host, or of the cgroup where that is tighter."""
    psi_cpu: float | None = None
    psi_memory: float | None = None
    psi_io: float | None = None
    """Pressure stall information, share of time in which some task waited, 0 … 1."""
    throttled_s: float | None = None
    """Processor-seconds that the cgroup's CPU quota held back runnable threads, since the line before."""
    cpu_limit_cores: float | None = None
    """Processors that this run may use: affinity and quota."""
    threads: int | None = None
    """Of this process and its children."""
    threads_running: float | None = None
    """Of these, the mean number that ran or waited for a processor."""
    page_cache_bytes: int | None = None
    swap_used_bytes: int | None = None
    read_bytes_s: float | None = None
    written_bytes_s: float | None = None
    """By this process and its children, from and to storage (page cache hits are not counted)."""
    disk_read_bytes_s: float | None = None
    disk_written_bytes_s: float | None = None
    """By the whole machine."""
    disk_free_bytes: int | None = None
    """Where the run's folder is."""
    net_received_bytes_s: float | None = None
    net_sent_bytes_s: float | None = None
    """By the machine (of a container: by it), loopback not counted."""
    shm_used_bytes: int | None = None
    shm_total_bytes: int | None = None
    """/dev/shm."""
    open_fds: int | None = None
    """Open files of the process among these that has most."""
    max_fds: int | None = None
    oom_kills: int | None = None
    """Processes of the cgroup that the kernel killed for memory since the line before."""


class Quarantined(msgspec.Struct, kw_only=True):
    """A line of quarantine.jsonl: a picture that could not be used, and what stood in for it."""

    t: float
    attempt: int
    image_index: int
    path: str
    error: str
    sample_position: int
    """Place in the stream of training samples from which on the picture is not used."""
    replaced_by: int
    """Row that took its place there."""


class Evidence(msgspec.Struct, kw_only=True):
    """A number, and where a person can look it up."""

    text: str
    value: float | None = None
    source: str = ""


class Finding(msgspec.Struct, kw_only=True):
    """An answer of the diagnosis; the causes are those of `diagnosis/catalogue.py`."""

    cause: str
    severity: str
    """info, warning or critical."""
    title: str
    evidence: list[Evidence]
    lost_device_s: float | None = None
    lost_cost: float | None = None
    fix: str = ""
    command: str | None = None
    confidence: float | None = None
    probe_result: str | None = None
    config_patch: dict[str, Any] = {}
    """Settings of config.toml that mend it, by name."""
