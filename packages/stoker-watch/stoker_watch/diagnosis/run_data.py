"""What the rules use: a run's records as sums, means, maxima and time series, in bounded memory; and what is known of a
job that has ended.

`reader.py` fills it in one pass over each file, `termination.py` reads the end, the rules in `causes/` and
`postmortem.py` judge it. What was not recorded is None or empty, never zero. "Steady" is the time after the start: see
`reader.py`. Plain arithmetic without numpy, so that `stoker why` starts fast.
"""

import bisect
import collections
import dataclasses
import math
import signal
from collections.abc import Callable
from statistics import median
from typing import Any

from stoker_watch.diagnosis.places.sampled import Cost, PlaceTotal
from stoker_watch.findings.finding import Finding
from stoker_watch.runs.schemas import DeviceSample, Event, Place, Probe, StackWindow
from stoker_watch.runs.totals import Totals, TotalsSum, add_amounts

MAX_EXAMPLES = 3
"""Number of names and lines that are kept as examples."""
MAX_POINTS = 256
"""The most of a time series: when there are more, neighboring points are averaged, so a run of weeks has as many."""
END_KINDS = ("finished", "failed", "preempted")
"""Events that say how an attempt ended."""
MAX_START_SAMPLES = 3600
"""Samples of devices.jsonl before the first step that are kept: an hour."""


@dataclasses.dataclass(kw_only=True)
class Mean:
    """The mean and the extremes of the values that are not None; all None if there are none."""

    total: float = 0.0
    count: int = 0
    min_value: float | None = None
    max_value: float | None = None

    def add(self, value: float | None) -> None:
        if value is None:
            return
        self.total += value
        self.count += 1
        self.min_value = value if self.min_value is None else min(self.min_value, value)
        self.max_value = value if self.max_value is None else max(self.max_value, value)

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclasses.dataclass(frozen=True)
class LinearFit:
    """A straight line through some points. slope: per second; r_squared: the fraction of the variance that it
    explains."""

    slope: float
    r_squared: float


class TimeSeries:
    """Values over time, at most MAX_POINTS, each the mean of the same number of consecutive values."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._points_per_bin = 1
        self._pending: list[tuple[float, float]] = []

    def add(self, t: float, value: float | None) -> None:
        """Ignores None and values that are not finite."""
        if value is None or not math.isfinite(value):
            return
        self._pending.append((t, float(value)))
        if len(self._pending) < self._points_per_bin:
            return
        self._points.append(_centroid(self._pending))
        self._pending = []
        if len(self._points) >= MAX_POINTS:
            self._points = [_centroid(self._points[n : n + 2]) for n in range(0, MAX_POINTS, 2)]
            self._points_per_bin *= 2

    @property
    def points(self) -> list[tuple[float, float]]:
        """(t, value), in the order in which they were added."""
        return self._points + ([_centroid(self._pending)] if self._pending else [])

    @property
    def values(self) -> list[float]:
        return [value for _, value in self.points]

    @property
    def span_s(self) -> float:
        points = self.points
        return points[-1][0] - points[0][0] if points else 0.0

    @property
    def growth(self) -> float:
        values = self.values
        return values[-1] - values[0] if values else 0.0

    def fit_line(self, start_fraction: float = 0.0, end_fraction: float = 1.0) -> LinearFit | None:
        """Least squares through a part of the points, given as fractions of them; None with fewer than three."""
        points = self.points
        selected = points[int(start_fraction * len(points)) : math.ceil(end_fraction * len(points))]
        if len(selected) < 3:
            return None
        t_mean, v_mean = _centroid(selected)
        tt = sum((t - t_mean) ** 2 for t, _ in selected)
        vv = sum((v - v_mean) ** 2 for _, v in selected)
        tv = sum((t - t_mean) * (v - v_mean) for t, v in selected)
        if tt <= 0:
            return None
        return LinearFit(tv / tt, tv * tv / (tt * vv) if vv > 0 else 0.0)

    def without_releases(self, max_fraction: float) -> "TimeSeries":
        """Without the falls between neighbors of a rising series, as of memory that was given back once, if these are
        few: at most this fraction of the points, and of the rise."""
        points, found, released, falls = self.points, TimeSeries(), 0.0, 0
        for (_, before), (t, value) in zip([points[0], *points], points, strict=False) if points else ():
            released += max(0.0, before - value)
            falls += value < before
            found.add(t, value + released)
        is_small = released <= max_fraction * found.growth and falls <= max_fraction * len(points)
        return found if is_small else self

    def over(self, clock: "TimeSeries") -> "TimeSeries":
        """The values over those of a series that rises, such as steps, where that has a point before and after."""
        times, found = clock.points, TimeSeries()
        for t, value in self.points:
            index = bisect.bisect_right(times, t, key=lambda point: point[0])
            if 0 < index < len(times):
                (before_t, before), (after_t, after) = times[index - 1 : index + 1]
                found.add(before + (after - before) * (t - before_t) / (after_t - before_t), value)
        return found

    def running_medians(self, window_size: int) -> list[float]:
        """Medians of `window_size` consecutive values; empty if there are fewer."""
        values = self.values
        return [median(values[n : n + window_size]) for n in range(len(values) - window_size + 1)]


def _centroid(points: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(t for t, _ in points) / len(points), sum(v for _, v in points) / len(points)


# A job that has ended


@dataclasses.dataclass(frozen=True)
class LogLine:
    """A line of an output or a log. source: `file:number`."""

    text: str
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Termination:
    """What is known of a job that has ended. None: not known. Fractions are 0 … 1, of the newest sample.

    exit_code: as in `subprocess`, a signal is its negative number; a shell's 128 + signal counts as that signal.
    oom_kills: kills by the kernel in the job's cgroup while it ran (memory.events: oom_kill, after - before).
    kernel_log: lines of the kernel's log of that time; pids: the job's processes. xids: Xid errors of its GPUs.
    empty_inputs: input files of zero bytes. memory_growth: growth of memory_fraction between the last two samples.
    handled_error: traceback of an error that the program handled only to end; Python has printed none of it.
    """

    exit_code: int | None = None
    source: str = ""
    """Where its end is recorded; empty: it is not."""
    output: tuple[LogLine, ...] = ()
    kernel_log: tuple[LogLine, ...] = ()
    pids: frozenset[int] = frozenset()
    xids: tuple[LogLine, ...] = ()
    oom_kills: int | None = None
    memory_fraction: float | None = None
    memory_growth: float = 0.0
    gpu_memory_fraction: float | None = None
    gpu_used: bool | None = None
    """Whether a kernel ran on any GPU."""
    shm_fraction: float | None = None
    disk_free_bytes: int | None = None
    samples_source: str = ""
    empty_inputs: tuple[str, ...] = ()
    handled_error: tuple[LogLine, ...] = ()
    hang: "HangInfo | None" = None

    @property
    def signal(self) -> int | None:
        code = self.exit_code
        if code is None:
            return None
        if code < 0:
            return -code
        return code - 128 if 128 < code <= 128 + signal.NSIG else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HangInfo:
    """The time before an end without a step and without a line of output."""

    duration_s: float
    source: str
    """Record of the newest step."""
    usual_s: float | None = None
    """The longest time between two records of steps before; None: there are fewer than two."""
    cpu_cores: float | None = None
    """CPU-seconds per second of the job's processes in it."""
    main_thread_state: str | None = None
    """The key of `StackWindow.main_thread` of nearly all samples in it."""
    frame: str | None = None
    """The most frequent frame in the job's own files."""
    stacks_source: str = ""


@dataclasses.dataclass(kw_only=True)
class EventSummary:
    """What the events say of a run, and of its newest attempt."""

    last: Event | None = None
    attempts: int = 0
    """Number of the newest attempt; 0: the run never started."""
    end: Event | None = None
    """How the newest attempt ended; None: no event says so."""
    end_line: int = 0
    """Line of events.jsonl in which it stands."""
    detached_t: float | None = None
    """Unix time at which the newest attempt was no longer watched, and ran on; None: it was watched to its end."""
    recording_ended: tuple[float, str] | None = None
    """(Unix time, reason) at which the steps of the newest attempt were no longer recorded, though it ran on."""
    output_start: Event | None = None
    """The first event of the newest attempt that says where its output begins."""
    job: dict[str, Any] | None = None
    """The job that `stoker watch --pid` was attached to."""
    coverage: dict[str, str] = dataclasses.field(default_factory=dict)
    """For an external job: data source → what was recorded, or why it was not. Else empty."""
    damaged: list[str] = dataclasses.field(default_factory=list)
    """Events whose data cannot be read: their lines, and why."""

    def add(self, line_number: int, event: Event) -> None:
        self.last = event
        if event.attempt > self.attempts:
            self.attempts, self.end, self.end_line, self.output_start = event.attempt, None, 0, None
            self.detached_t = self.recording_ended = None
        if event.attempt == self.attempts:
            if event.kind in END_KINDS:
                self.end, self.end_line = event, line_number
            if event.data.get("detached"):
                self.detached_t = event.t
            if reason := event.data.get("recording_ended"):
                self.recording_ended = event.t, str(reason)
            if self.output_start is None and "output_offset" in event.data:
                self.output_start = event
        if event.kind in ("started", "resumed"):
            self.job = event.data.get("job", self.job)
        self.coverage = event.data.get("coverage", self.coverage)
        if "damaged" in event.data:
            self.damaged.append(f"line {line_number}: {event.data['damaged']}")


# A run


@dataclasses.dataclass(kw_only=True)
class SteadyStats:
    """Windows after the start, of the rank that writes the run's folder."""

    device_s: float = 0.0
    wall_s: float = 0.0
    phases: dict[str, float] = dataclasses.field(default_factory=dict)
    longest_phases: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of each phase in the window that has the most of it."""
    thread_cpu_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """CPU-seconds of the training thread by the phase that it was in; empty: not measured."""
    process_cpu: Mean = dataclasses.field(default_factory=Mean)
    """Cores that the training process used in each window: all its threads, without its children."""
    steps: int = 0
    num_images: int = 0
    steps_with_image_count: int = 0
    """Steps of windows that have a number of images."""
    compile_windows: int = 0
    """Windows in which something was compiled."""
    compile_s: TimeSeries = dataclasses.field(default_factory=TimeSeries)
    """Seconds of compilations so far, over `wall_s`."""
    worker_starts: int = 0
    worker_start_s: float = 0.0
    steps_without_gradients: int = 0
    recompile_windows: int | None = None
    """Windows in which something was compiled that had been compiled before. None: not measured."""
    recompile_lines: int = 0
    """Lines of steps.jsonl with one, of any length."""
    recompiles: int = 0
    """Compilations of what had been compiled before."""


@dataclasses.dataclass(kw_only=True)
class LearningStats:
    """Losses and learning rates, and the events about them."""

    loss: TimeSeries = dataclasses.field(default_factory=TimeSeries)
    lr: Mean = dataclasses.field(default_factory=Mean)
    newest_lr: float | None = None
    steps_with_vanished_lr: int = 0
    """Steps at a small fraction of the highest learning rate before them."""
    skipped_steps: int = 0
    first_step: int | None = None
    """Steps before the first window that has a loss."""
    windows_without_loss: int = 0
    """Windows with steps since the last window that had a loss."""
    device_s_without_loss: float = 0.0
    """Device-seconds of these windows."""
    non_finite_event: Event | None = None
    events: dict[str, list[Event]] = dataclasses.field(default_factory=dict)
    """Kind → events about the loss and the learning rate."""
    best: tuple[float, float, int | None] | None = None
    """(t, AP, step) of the best evaluation."""
    newest_ap: float | None = None
    num_gt_boxes: int | None = None
    """Ground truth boxes of the newest evaluation."""
    num_evaluations: int = 0
    evals_since_best: int = 0
    device_s_since_best: float = 0.0


@dataclasses.dataclass(kw_only=True)
class HostStats:
    """The host in a part of the run: after the start, or before."""

    cores: float | None = None
    cpu_utilization: Mean = dataclasses.field(default_factory=Mean)
    other_processes_cpu: Mean = dataclasses.field(default_factory=Mean)
    """Fraction of the cores that processes outside this run used."""
    busiest_processes: dict[str, float] = dataclasses.field(default_factory=dict)
    """Command of a process outside this run → sum over the samples of the cores that it used."""
    process_cpu: Mean = dataclasses.field(default_factory=Mean)
    threads_running: Mean = dataclasses.field(default_factory=Mean)
    threads_active: Mean = dataclasses.field(default_factory=Mean)
    bound_cores: Mean = dataclasses.field(default_factory=Mean)
    unbound_cores: Mean = dataclasses.field(default_factory=Mean)
    """Both only of samples in which the job's threads were bound to fewer cores than they might use."""
    psi_cpu: Mean = dataclasses.field(default_factory=Mean)
    psi_memory: Mean = dataclasses.field(default_factory=Mean)
    psi_io: Mean = dataclasses.field(default_factory=Mean)
    throttled: Mean = dataclasses.field(default_factory=Mean)
    """Fraction of the CPU time that this run demanded and its quota withheld."""
    net_received_bytes_s: Mean = dataclasses.field(default_factory=Mean)
    memory_fraction: Mean = dataclasses.field(default_factory=Mean)
    """Memory in use as a fraction of the limit, over the whole run."""
    memory_free_bytes: int | None = None
    """Bytes below the limit in the newest sample."""
    rss: TimeSeries = dataclasses.field(default_factory=TimeSeries)
    largest_rss: TimeSeries = dataclasses.field(default_factory=TimeSeries)
    """That of the process that has the most memory."""
    swap: Mean = dataclasses.field(default_factory=Mean)
    disk_free_bytes: Mean = dataclasses.field(default_factory=Mean)
    """Over the whole run."""
    shm_fraction: Mean = dataclasses.field(default_factory=Mean)
    """Use of /dev/shm as a fraction of its size, over the whole run."""
    shm_total_bytes: int | None = None
    open_fds: TimeSeries = dataclasses.field(default_factory=TimeSeries)
    max_fds: int | None = None
    oom_kills: int = 0


@dataclasses.dataclass(kw_only=True)
class GpuStats:
    """One GPU, after the start."""

    utilization: Mean = dataclasses.field(default_factory=Mean)
    busy_samples: int = 0
    """Samples in which the GPU worked; the counts and clock below are of these."""
    clock_deficit: Mean = dataclasses.field(default_factory=Mean)
    """Missing fraction of the maximum clock."""
    thermal_throttled_samples: int = 0
    power_capped_samples: int = 0
    app_clock_samples: int = 0
    """Busy samples for which the driver reports this reason."""
    link_deficit: Mean = dataclasses.field(default_factory=Mean)
    """Missing fraction of the PCIe link's maximum speed."""
    link_description: str = ""
    temperature: Mean = dataclasses.field(default_factory=Mean)
    sm_active: Mean = dataclasses.field(default_factory=Mean)
    tensor_active: Mean = dataclasses.field(default_factory=Mean)
    other_processes: Mean = dataclasses.field(default_factory=Mean)
    """1 if another process computes on it, else 0."""
    memory: TimeSeries = dataclasses.field(default_factory=TimeSeries)
    max_memory_used_bytes: int | None = None
    """Peak."""
    memory_total_bytes: int | None = None
    ecc_corrected: tuple[int, int] | None = None
    ecc_uncorrected: tuple[int, int] | None = None
    """Counters, the first and the newest of the whole run."""
    xid_counts: dict[int, int] = dataclasses.field(default_factory=dict)
    """Xid number → count, over the whole run."""


@dataclasses.dataclass(kw_only=True)
class TraceStats:
    """Sums over all profiler windows."""

    steps: int = 0
    wall_s: float = 0.0
    busy_s: float = 0.0
    comm_s: float = 0.0
    copy_s: float = 0.0
    launches: int = 0
    median_kernel_s: Mean = dataclasses.field(default_factory=Mean)
    """Mean of the windows' medians."""
    tensor_core_fraction: Mean = dataclasses.field(default_factory=Mean)
    longest_gap: tuple[float, str] | None = None

    @property
    def idle_fraction(self) -> float | None:
        """Fraction of the traced time without work on the device."""
        return max(0.0, 1.0 - self.busy_s / self.wall_s) if self.wall_s > 0 else None


@dataclasses.dataclass(kw_only=True)
class StackStats:
    """Samples of the main threads of the training processes."""

    samples: int = 0
    """After the start."""
    compile_windows: int = 0
    """Lines of stacks.jsonl in which the main thread compiled."""
    main_thread: dict[str, float] = dataclasses.field(default_factory=dict)
    """Kind of work → seconds that its samples stand for: a job is sampled more often at its beginning."""
    frames: dict[str, float] = dataclasses.field(default_factory=dict)
    """Frame in the job's own code → the same, of at most MAX_FRAMES."""

    def fraction(self, *kinds: str) -> float:
        total_s = sum(self.main_thread.values())
        return sum(self.main_thread.get(kind, 0.0) for kind in kinds) / total_s if total_s else 0.0

    def add(self, other: "StackStats") -> None:
        self.samples += other.samples
        self.compile_windows += other.compile_windows
        add_amounts(self.main_thread, other.main_thread)
        add_amounts(self.frames, other.frames)


@dataclasses.dataclass(kw_only=True)
class StartStall:
    """A training thread that waits in one line before any step: all of its newest samples."""

    place: Place
    since_t: float
    until_t: float


@dataclasses.dataclass(kw_only=True)
class ProgressGap:
    """The time since the last step, in a run that has not finished."""

    last_step_t: float
    """Unix time of the last step."""
    gap_s: float
    max_earlier_gap_s: float
    """The longest time between two windows with steps before."""
    waited_s: float = 0.0
    """The wait for input in the gap, by the clock in the job."""
    process_cpu: Mean = dataclasses.field(default_factory=Mean)
    gpu_utilization: Mean = dataclasses.field(default_factory=Mean)


@dataclasses.dataclass(kw_only=True)
class TrainingStats:
    """The machine from the first step to the last, of all attempts."""

    start_t: float = math.inf
    end_t: float = -math.inf
    sm_active: Mean = dataclasses.field(default_factory=Mean)
    utilization: Mean = dataclasses.field(default_factory=Mean)
    """Both of the GPUs of this machine, if all of them train."""
    process_cpu: Mean = dataclasses.field(default_factory=Mean)
    cpu_limit_cores: Mean = dataclasses.field(default_factory=Mean)
    max_gpu_memory_fraction: float | None = None
    """Over the whole run."""
    mig: bool | None = None

    def add(self, sample: DeviceSample, num_devices: int) -> None:
        for gpu in sample.gpus:
            if gpu.memory_used_bytes is not None and gpu.memory_total_bytes:
                fraction = gpu.memory_used_bytes / gpu.memory_total_bytes
                self.max_gpu_memory_fraction = max(self.max_gpu_memory_fraction or 0.0, fraction)
            self.mig = self.mig or gpu.mig
        if not self.start_t <= sample.t <= self.end_t:
            return
        if len(sample.gpus) <= num_devices:  # otherwise some of them do not train
            for gpu in sample.gpus:
                self.sm_active.add(gpu.sm_active)
                self.utilization.add(gpu.utilization)
        self.process_cpu.add(sample.process_cpu)
        self.cpu_limit_cores.add(sample.cpu_limit_cores)


@dataclasses.dataclass(kw_only=True)
class RunRecords:
    """All of a run's records."""

    totals: Totals = dataclasses.field(default_factory=lambda: TotalsSum(1).totals(0))
    events: EventSummary = dataclasses.field(default_factory=EventSummary)
    training: TrainingStats = dataclasses.field(default_factory=TrainingStats)
    price_per_device_hour: float = 0.0
    """0: unknown."""
    recorded_price: float = 0.0
    """The price that the user gave the run: in its settings, or in the first event of a measured job. 0: unknown."""
    tables: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The tables of config.toml."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of config.toml by name; empty: there is none."""
    auto_settings: frozenset[str] = frozenset()
    """Names of the settings that stoker chose."""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Facts that events of the run contain: num_images, median_pixels, boxes, anchor_coverage, pretrained, workers."""
    loader_thread: str = ""
    """What runs the job's code in a thread of a loader: a row of frames.toml, `loader_threads`; empty: not known."""
    from_bucket: bool = False
    """The images are in a bucket."""
    is_external: bool = False
    """`stoker watch` recorded a job that stoker did not write: its phases are known only if the job reports them."""
    frameworks: str = ""
    """What `stoker watch` timed from inside the job, with the names of its frameworks; empty: nothing."""
    is_native_run: bool = False
    """A run of `stoker train`: all its phases are known."""
    steady: SteadyStats = dataclasses.field(default_factory=SteadyStats)
    learning: LearningStats = dataclasses.field(default_factory=LearningStats)
    host: HostStats = dataclasses.field(default_factory=HostStats)
    startup_host: HostStats = dataclasses.field(default_factory=HostStats)
    """The host before the first steps; only what `reader.py` adds up for both parts of the run."""
    gpus: dict[int, GpuStats] = dataclasses.field(default_factory=dict)
    num_samples: int = 0
    """Lines of devices.jsonl."""
    traces: TraceStats = dataclasses.field(default_factory=TraceStats)
    stacks: StackStats = dataclasses.field(default_factory=StackStats)
    places: list[PlaceTotal] = dataclasses.field(default_factory=list)
    """The largest first."""
    place_totals: dict[tuple[str, int], float] = dataclasses.field(default_factory=dict)
    """(role, rank) → seconds after the start that its samples cover."""
    recompiled_s: float = 0.0
    """Device-seconds of compiling again the function that took most, also before the first progress in the output."""
    eval_windows: int = 0
    """Lines of steps.jsonl of rank 0 with steps and time in evaluation."""
    newest_threads: dict[tuple[int, int], StackWindow] = dataclasses.field(default_factory=dict)
    """Like newest_stacks, of the other threads of these processes: what blocks in the job's own code, if anything."""
    newest_stacks: dict[tuple[int, int], StackWindow] = dataclasses.field(default_factory=dict)
    """(rank, pid) → its newest line of stacks.jsonl after the last step of the newest attempt."""
    probes: dict[str, Probe] = dataclasses.field(default_factory=dict)
    """Kind → the newest one that was measured."""
    all_probes: list[Probe] = dataclasses.field(default_factory=list)
    costs: list[Cost] = dataclasses.field(default_factory=list)
    """All of its time, by `costs.divide_time`."""
    num_ranks: int = 1
    """Number of ranks that have records."""
    rank_phases: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)
    """Rank → its device-seconds by phase, over the whole run."""
    rank_steady_phases: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)
    """The same after the start."""
    progress_gap: ProgressGap | None = None
    step_counts: TimeSeries = dataclasses.field(default_factory=TimeSeries)
    """Steps so far, of rank 0."""
    start_stalls: dict[tuple[int, int], StartStall] = dataclasses.field(default_factory=dict)
    """(rank, process) → where it waits, in a watched job without a step."""
    start_cpu: collections.deque[tuple[float, float]] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=MAX_START_SAMPLES)
    )
    """(Unix time, cores in use by the job) of the newest samples in it."""
    host_bound_steps: int = 0
    host_bound_checked_steps: int = 0
    """Steps of windows in which host-bound steps were counted."""
    first_epoch_fetch_s: float | None = None
    """Seconds of `fetch` in the first epoch; None: not known, or it has not ended."""
    memory_peak_bytes: int | None = None
    num_checkpoints: int = 0
    checkpoint_failures: list[str] = dataclasses.field(default_factory=list)
    storage_warnings: list[str] = dataclasses.field(default_factory=list)
    empty_inputs: list[str] = dataclasses.field(default_factory=list)
    """Files of zero bytes that an external job reads while it prints nothing, in its newest attempt."""
    gpu_faults: list[Event] = dataclasses.field(default_factory=list)
    quarantined: dict[str, str] = dataclasses.field(default_factory=dict)
    """Path → error, of the first few."""
    num_quarantined: int = 0
    termination: Termination | None = None
    """What is known of its end, if it neither runs nor finished."""
    read_output: Callable[[], tuple[LogLine, ...]] = tuple
    """Reads the output so far of a run that has not ended: only where a rule needs it."""
    endings: tuple[Finding, ...] = ()
    """What ended it, by `postmortem.explain`."""

    def __setattr__(self, name: str, value: object) -> None:
        """Raises FrozenInstanceError once all is read: rules and reports only look at it."""
        if "_is_read" in self.__dict__:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super().__setattr__(name, value)

    def freeze(self) -> None:
        self.__dict__["_is_read"] = True

    def phase_fraction(self, *phases: str) -> float:
        """Fraction of all device time."""
        return self.phase_seconds(*phases) / self.totals.device_s if self.totals.device_s > 0 else 0.0

    def phase_seconds(self, *phases: str) -> float:
        """Device-seconds, over the whole run."""
        return sum(self.totals.phases.get(phase, 0.0) for phase in phases)

    def steady_phase_fraction(self, *phases: str) -> float:
        """Fraction of the device time after the start; 0 if there is none."""
        duration_s = sum(self.steady.phases.get(phase, 0.0) for phase in phases)
        return duration_s / self.steady.device_s if self.steady.device_s > 0 else 0.0

    @property
    def num_devices(self) -> int:
        return max(1, self.totals.devices)

    @property
    def steady_device_s(self) -> float:
        """Device-seconds after the start, of all ranks: each has as much of it as rank 0, whose sums are `steady`."""
        return self.steady.device_s * self.num_ranks

    def observed_s(self, place: PlaceTotal) -> float:
        """Seconds after the start that the samples of a place's threads cover: of a training thread those of its rank;
        of workers and other threads those of all ranks, as their places are sums over these."""
        return sum(
            seconds for (role, rank), seconds in self.place_totals.items()
            if role == place.role and (rank == place.rank or role != "training")
        )  # fmt: skip

    @property
    def has_device(self) -> bool:
        """A device besides the CPU is known to train, or may: the telemetry has a GPU, or the settings name one."""
        return bool(self.gpus) and not self.on_cpu if self.num_samples else not self.on_cpu and self.is_native_run

    @property
    def loader(self) -> str:
        """Names of the loader in the stacks of the training thread; empty: none was seen."""
        places = [place for place in self.places if place.role == "training" and not place.part]
        seen = {text for place in places for text in (place.call, *place.leaves)}
        of_torch = ["torch.utils.data"] if "workers" in self.facts and "torch" in self.frameworks else []
        return " ".join([*filter(None, [self.loader_thread]), *sorted(seen), *of_torch])

    @property
    def computes_with_torch(self) -> bool:
        """Whether torch, and not TensorFlow, computes the steps of a watched job."""
        return "torch" in self.frameworks and "tensorflow" not in self.frameworks

    @property
    def clock_saw_steps(self) -> bool:
        """Whether `stoker watch` saw steps from inside the job: of JAX it sees compilations only."""
        return bool(self.frameworks) and "compilations of" not in self.frameworks

    @property
    def on_cpu(self) -> bool:
        """Training computes on the CPU: by the settings, or the telemetry has no GPU."""
        device = self.settings.get("device")
        return (self.num_samples > 0 and not self.gpus) if device is None else device == "cpu"

    @property
    def cpu_utilization(self) -> float | None:
        """Utilization of the cores, 0 … 1."""
        return self.host.cpu_utilization.value
