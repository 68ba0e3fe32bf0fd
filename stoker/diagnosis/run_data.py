"""What the rules look at: a run's records as sums, means, maxima and courses, in bounded memory.

Data and small arithmetic on it. Made by `reader.py` in one pass over each file, judged by `rules/`. Whatever nobody
recorded is None or empty, never zero. "Steady" is the time after the start: see `reader.py`.
"""

import dataclasses
from typing import Any

from stoker.diagnosis.series import Mean, TimeSeries
from stoker.diagnosis.termination import Termination
from stoker.runs.schemas import Event, Probe
from stoker.runs.totals import Totals

MAX_EXAMPLES = 3
"""Number of names and lines that are kept as examples."""


@dataclasses.dataclass(kw_only=True)
class SteadyStats:
    """Windows after the start, of the rank that writes the run's folder."""

    device_s: float = 0.0
    wall_s: float = 0.0
    phases: dict[str, float] = dataclasses.field(default_factory=dict)
    input_wait_stages: dict[str, float] = dataclasses.field(default_factory=dict)
    thread_cpu_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Processor seconds of the training thread by the phase it was in; empty: nobody measured."""
    steps: int = 0
    num_images: int = 0
    steps_with_image_count: int = 0
    """Steps of windows that have a number of pictures."""


@dataclasses.dataclass(kw_only=True)
class LearningStats:
    """Losses and rates, and what was found about them while the run lived."""

    loss: TimeSeries = dataclasses.field(default_factory=TimeSeries)
    grad_norm: TimeSeries = dataclasses.field(default_factory=TimeSeries)
    lr: Mean = dataclasses.field(default_factory=Mean)
    skipped_steps: int = 0
    first_step: int | None = None
    """Steps that were done before the first window that has a loss."""
    windows_without_loss: int = 0
    """Windows with steps since the last one that had a loss."""
    device_s_without_loss: float = 0.0
    """Device-seconds of these."""
    non_finite_event: Event | None = None
    events: dict[str, list[Event]] = dataclasses.field(default_factory=dict)
    """Kind → events about the loss and the rate, each of which is news."""
    best: tuple[float, float, int | None] | None = None
    """(t, AP, step) of the best evaluation."""
    newest_ap: float | None = None
    num_gt_boxes: int | None = None
    """True boxes of the newest evaluation."""
    num_evaluations: int = 0
    evals_since_best: int = 0
    device_s_since_best: float = 0.0


@dataclasses.dataclass(kw_only=True)
class HostStats:
    """The host, after the start."""

    samples: int = 0
    cores: float | None = None
    cpu_utilization: Mean = dataclasses.field(default_factory=Mean)
    """Share of the cores."""
    other_processes_cpu: Mean = dataclasses.field(default_factory=Mean)
    """Share of the cores that processes outside this run used."""
    process_cpu: Mean = dataclasses.field(default_factory=Mean)
    threads_running: Mean = dataclasses.field(default_factory=Mean)
    psi_cpu: Mean = dataclasses.field(default_factory=Mean)
    psi_memory: Mean = dataclasses.field(default_factory=Mean)
    psi_io: Mean = dataclasses.field(default_factory=Mean)
    throttled: Mean = dataclasses.field(default_factory=Mean)
    """Share of the processor time that this run wanted and its quota did not give."""
    net_received_bytes_s: Mean = dataclasses.field(default_factory=Mean)
    max_memory_fraction: float | None = None
    """Most memory in use, share of the limit; of all the run."""
    memory_free_bytes: int | None = None
    """Bytes to the limit in the newest sample."""
    rss: TimeSeries = dataclasses.field(default_factory=TimeSeries)
    swap: Mean = dataclasses.field(default_factory=Mean)
    min_disk_free_bytes: int | None = None
    """Least, bytes; of all the run."""
    max_shm_fraction: float | None = None
    """Most of /dev/shm in use, share; of all the run."""
    shm_total_bytes: int | None = None
    open_fds: TimeSeries = dataclasses.field(default_factory=TimeSeries)
    max_fds: int | None = None
    oom_kills: int = 0


@dataclasses.dataclass(kw_only=True)
class GpuStats:
    """One GPU, after the start; `busy…` are of samples in which it was asked to work."""

    utilization: Mean = dataclasses.field(default_factory=Mean)
    busy_samples: int = 0
    """Such samples."""
    clock_deficit: Mean = dataclasses.field(default_factory=Mean)
    """Share of the largest clock."""
    thermal_throttled_samples: int = 0
    power_capped_samples: int = 0
    app_clock_samples: int = 0
    """Busy samples in which the driver says so."""
    link_deficit: Mean = dataclasses.field(default_factory=Mean)
    """Share of the link's speed."""
    link_description: str = ""
    temperature: Mean = dataclasses.field(default_factory=Mean)
    sm_active: Mean = dataclasses.field(default_factory=Mean)
    tensor_active: Mean = dataclasses.field(default_factory=Mean)
    other_processes: Mean = dataclasses.field(default_factory=Mean)
    """1 where another process computes on it, else 0."""
    memory: TimeSeries = dataclasses.field(default_factory=TimeSeries)
    max_memory_used_bytes: int | None = None
    """Most, bytes."""
    memory_total_bytes: int | None = None
    ecc_corrected: tuple[int, int] | None = None
    ecc_uncorrected: tuple[int, int] | None = None
    """Counters, first and newest; of all the run."""
    xid_counts: dict[int, int] = dataclasses.field(default_factory=dict)
    """Number → how often; of all the run."""


@dataclasses.dataclass(kw_only=True)
class TraceStats:
    """All profiler windows, summed up."""

    windows: int = 0
    steps: int = 0
    wall_s: float = 0.0
    busy_s: float = 0.0
    comm_s: float = 0.0
    copy_s: float = 0.0
    launches: int = 0
    median_kernel_s: Mean = dataclasses.field(default_factory=Mean)
    """Of the windows' medians."""
    tensor_core_fraction: Mean = dataclasses.field(default_factory=Mean)
    longest_gap: tuple[float, str] | None = None

    @property
    def idle_fraction(self) -> float | None:
        """Share of the traced time without work on the device."""
        return max(0.0, 1.0 - self.busy_s / self.wall_s) if self.wall_s > 0 else None


@dataclasses.dataclass(kw_only=True)
class StackStats:
    """Samples of the main threads of the training processes."""

    samples: int = 0
    """After the start."""
    main_thread: dict[str, float] = dataclasses.field(default_factory=dict)
    """What they were in → samples."""
    frames: dict[str, float] = dataclasses.field(default_factory=dict)
    """Own frame → samples; of at most FRAMES."""

    def fraction(self, *kinds: str) -> float:
        return sum(self.main_thread.get(kind, 0.0) for kind in kinds) / self.samples if self.samples else 0.0


@dataclasses.dataclass(kw_only=True)
class ProgressGap:
    """The time since the last step, in a run that has no end yet, or a sudden one."""

    last_step_t: float
    """When the last step was done, Unix time."""
    gap_s: float
    max_earlier_gap_s: float
    """The longest time between two windows with steps before."""
    process_cpu: Mean = dataclasses.field(default_factory=Mean)
    gpu_utilization: Mean = dataclasses.field(default_factory=Mean)


@dataclasses.dataclass(kw_only=True)
class RunRecords:
    """All of it."""

    totals: Totals
    price_per_device_hour: float = 0.0
    """Money per device-hour; 0: unknown."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of config.toml by their names; empty: it is not there."""
    auto_settings: frozenset[str] = frozenset()
    """Names of those that stoker chose."""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What a note of the run says of its data: pictures, median_pixels, boxes, anchor_coverage, pretrained, workers."""
    from_bucket: bool = False
    """The pictures lie in a bucket."""
    is_external: bool = False
    """A job that stoker did not write: its phases are known only where something tells them."""
    is_native_run: bool = False
    """A training of stoker's own, so all its phases are known."""
    steady: SteadyStats = dataclasses.field(default_factory=SteadyStats)
    learning: LearningStats = dataclasses.field(default_factory=LearningStats)
    host: HostStats = dataclasses.field(default_factory=HostStats)
    gpus: dict[int, GpuStats] = dataclasses.field(default_factory=dict)
    num_samples: int = 0
    """Lines of devices.jsonl."""
    traces: TraceStats = dataclasses.field(default_factory=TraceStats)
    stacks: StackStats = dataclasses.field(default_factory=StackStats)
    probes: dict[str, Probe] = dataclasses.field(default_factory=dict)
    """Kind → the newest that was measured."""
    num_ranks: int = 1
    """That have records."""
    progress_gap: ProgressGap | None = None
    host_bound_steps: int = 0
    host_bound_checked_steps: int = 0
    """Steps of windows in which somebody looked."""
    first_epoch_fetch_s: float | None = None
    """Of the fetching, in the first pass over the pictures; None: not known, or it has not ended."""
    memory_peak_bytes: int | None = None
    num_checkpoints: int = 0
    checkpoint_failures: list[str] = dataclasses.field(default_factory=list)
    storage_warnings: list[str] = dataclasses.field(default_factory=list)
    empty_inputs: list[str] = dataclasses.field(default_factory=list)
    """Files of zero bytes that a watched job reads and says nothing, of its newest attempt."""
    gpu_faults: list[Event] = dataclasses.field(default_factory=list)
    quarantined: dict[str, str] = dataclasses.field(default_factory=dict)
    """Path → error, of the first ones."""
    num_quarantined: int = 0
    termination: Termination | None = None
    """What is known of its end, where it neither lives nor finished."""

    def phase_fraction(self, *phases: str) -> float:
        """Of all device time."""
        return self.phase_seconds(*phases) / self.totals.device_s if self.totals.device_s > 0 else 0.0

    def phase_seconds(self, *phases: str) -> float:
        """Device-seconds, of all the run."""
        return sum(self.totals.phases.get(phase, 0.0) for phase in phases)

    def steady_phase_fraction(self, *phases: str) -> float:
        """Of the device time after the start; 0 where that is nothing."""
        duration_s = sum(self.steady.phases.get(phase, 0.0) for phase in phases)
        return duration_s / self.steady.device_s if self.steady.device_s > 0 else 0.0

    @property
    def num_devices(self) -> int:
        return max(1, self.totals.devices)

    @property
    def on_cpu(self) -> bool:
        """Training computes on processors: the settings say so, or the witness saw no GPU."""
        device = self.settings.get("device")
        return (self.num_samples > 0 and not self.gpus) if device is None else device == "cpu"

    @property
    def cpu_utilization(self) -> float | None:
        """Busy share of the processors that the run may use, where that is known."""
        return self.host.cpu_utilization.value
