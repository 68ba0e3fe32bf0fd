"""Reads a run folder into `RunRecords`: one pass over each file, in bounded memory, of a live, failed or finished run.

The start of an attempt ends with its first window with steps, and includes that window if it is short: caches,
autotuning and allocators warm up in it. The end of an attempt is the unattributed and host time after its last step, in
which the process exits; in a job that stoker did not write also a last evaluation and checkpoint, which every job has.
The time in between is steady: fractions of time are of it, so a short run is judged like a
long one. Lost time is computed from the sums of the whole run, `stoker_watch/runs/totals.py`.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stoker_watch.diagnosis.causes.cause import common_threshold
from stoker_watch.diagnosis.causes.gpu import GPU_CLOCKS_LOW
from stoker_watch.diagnosis.causes.learning import LR_TOO_LOW
from stoker_watch.diagnosis.costs import divide_time
from stoker_watch.diagnosis.places.totals import PlaceCounter
from stoker_watch.diagnosis.postmortem import explain
from stoker_watch.diagnosis.run_data import (
    MAX_EXAMPLES,
    GpuStats,
    HostStats,
    ProgressGap,
    RunRecords,
    StackStats,
    StartStall,
)
from stoker_watch.diagnosis.termination import EndReader
from stoker_watch.runs import records
from stoker_watch.runs.schemas import (
    DeviceSample,
    Event,
    GpuSample,
    Probe,
    Quarantined,
    StackWindow,
    StepWindow,
    TraceWindow,
)
from stoker_watch.runs.totals import TotalsSum, add_amounts, list_rank_dirs
from stoker_watch.storage.uri import is_uri

MAX_FRAMES = 64
"""Stack frames that are counted; a loop has a few."""

_THERMAL_BITS = 0x08 | 0x20 | 0x40
_POWER_BITS = 0x04 | 0x80
_APP_CLOCK_BIT = 0x02
"""NVML's reasons for a low clock: hardware, software and hardware thermal slowdown; software power cap and power brake;
a clock that someone set (nvml.h, nvmlClocksEventReason…)."""

_STARTUP_PHASES = ("startup", "compile")
"""Phases of the start that the first window with steps may contain."""
_MAX_PENDING_WINDOWS = 1000
"""Windows without steps that are kept until steps follow or the attempt ends: at least a quarter of an hour."""

_END_PHASES = ("unattributed", "host")
_EXTERNAL_END_PHASES = (*_END_PHASES, "compute", "eval", "checkpoint")
"""Phases after the last step that belong to the end."""
LAUNCHER_KINDS = frozenset({"idle", "other"})
"""Kinds of the stacks of a process that does not train: it waits for its children, or imports."""
_WAITS = frozenset({"idle", "input_wait", "sync", "comm"})
"""Kinds of stacks in which a thread can wait without end."""
_MIN_LOOP_FRACTION = 0.05
"""Fraction of the samples after the first step in a line from which it belongs to the loop."""
_HOST_MEANS = (
    "process_cpu", "threads_running", "threads_active", "bound_cores", "unbound_cores", "psi_cpu", "psi_memory",
    "psi_io", "net_received_bytes_s",
)  # fmt: skip
"""Fields of `DeviceSample` of which `HostStats` has the means."""
_FRAMEWORK_KINDS = frozenset({"compute", "sync", "comm", "compile"})
"""Kinds that only the code of a framework has."""


class Observer:
    """Gets each record while `read_run` reads it, for what only one command needs: first all events, then steps,
    then samples. Each method may be overridden."""

    def event(self, event: Event) -> None: ...

    def window(self, rank: int, window: StepWindow) -> None: ...

    def sample(self, sample: DeviceSample) -> None: ...


def read_run(run_dir: Path, *, observers: Iterable[Observer] = ()) -> RunRecords:
    """The records of a run; each file is read once, but stacks and steps of a job that only its output times."""
    observers = list(observers)
    tables = records.read_settings(run_dir) or {}
    settings: dict[str, Any] = {}
    for name, table in tables.items():
        settings |= table if isinstance(table, dict) and name != "reasons" else {}
    run_records = RunRecords(
        tables=tables,
        settings=settings,
        auto_settings=frozenset(tables.get("reasons", {})),
        from_bucket=is_uri(str(settings.get("data", ""))),
        is_native_run=bool(settings),
        recorded_price=float(tables.get("run", {}).get("price_per_device_hour", 0.0)),
    )
    ranks = list_rank_dirs(run_dir)
    run_records.num_ranks = len(ranks)
    _read_events(run_dir, run_records, observers)
    end = EndReader(run_dir, run_records.events)
    for trace in records.read_lines(run_dir, records.TRACES, TraceWindow):
        _add_trace(run_records, trace)
    steady_spans = _read_steps(ranks, run_records, end, observers)
    _read_devices(run_dir, run_records, steady_spans, end, observers)
    paths: set[str] = set()
    for quarantined in records.read_lines(run_dir, records.QUARANTINE, Quarantined):
        paths.add(quarantined.path)
        if len(run_records.quarantined) < MAX_EXAMPLES:
            run_records.quarantined.setdefault(quarantined.path, quarantined.error)
    run_records.num_quarantined = len(paths)
    _read_stacks(run_records, ranks, steady_spans, end)
    run_records.all_probes = list(records.read_lines(run_dir, records.PROBES, Probe))
    run_records.probes = {
        probe.probe: probe for probe in run_records.all_probes if not probe.reason and probe.ratio > 0
    }
    run_records.termination = end.termination()
    run_records.endings = () if run_records.termination is None else tuple(explain(run_records.termination))
    run_records.read_output = end.output_so_far
    run_records.price_per_device_hour = run_records.recorded_price
    run_records.costs = divide_time(run_records)
    run_records.freeze()
    return run_records


def _read_events(run_dir: Path, run_records: RunRecords, observers: list[Observer]) -> None:
    learning, summary, first_settings = run_records.learning, run_records.events, run_records.settings
    for number, event in records.numbered_lines(run_dir, records.EVENTS, Event):
        for observer in observers:
            observer.event(event)
        summary.add(number, event)
        if event.kind in ("started", "resumed"):
            run_records.empty_inputs = []
            changed = event.data.get("settings", {}) if run_records.is_native_run else {}
            run_records.settings = first_settings | changed
            run_records.is_external |= "coverage" in event.data
            run_records.recorded_price = event.data.get("price_per_device_hour", run_records.recorded_price)
            # of the attempt before, which could not record its end
            run_records.host.oom_kills += event.data.get("restart", {}).get("oom_kills", 0)
        elif event.kind == "checkpoint_saved":
            run_records.num_checkpoints += 1
        elif event.kind == "checkpoint_failed":
            run_records.checkpoint_failures.append(event.text)
        elif event.kind == "gpu_fault":
            run_records.gpu_faults.append(event)
        elif event.kind in records.STABILITY_KINDS:
            learning.events.setdefault(event.kind, []).append(event)
        elif event.kind == "evaluated":
            _add_evaluation(run_records, event)
        elif event.kind == "warning":
            if "not_finite" in event.data:
                learning.non_finite_event = event
            run_records.empty_inputs = event.data.get("empty_inputs", run_records.empty_inputs)
            if event.data.get("storage"):
                run_records.storage_warnings.append(event.text)
        inside = event.data.get("coverage", {}).get("inside the job", "")
        if inside.startswith("recorded: "):
            run_records.frameworks = inside
        if event.kind == "info":
            run_records.facts |= event.data.get("facts", {})
        if "workers" in event.data:
            run_records.facts["workers"] = event.data["workers"]


def _add_evaluation(run_records: RunRecords, event: Event) -> None:
    learning = run_records.learning
    learning.num_evaluations += 1
    metrics = event.data.get("metrics", {})
    if (ap := metrics.get("ap")) is None:
        return
    learning.newest_ap = ap
    learning.num_gt_boxes = metrics.get("boxes")
    if learning.best is None or ap > learning.best[1]:
        learning.best, learning.evals_since_best = (event.t, ap, event.step), 0
    else:
        learning.evals_since_best += 1


class _SteadySpan(NamedTuple):
    """The steady time of an attempt, Unix seconds: after its start, up to its last window with steps, in which the
    process may exit and free its memory."""

    start_t: float
    end_t: float

    def contains(self, t: float) -> bool:
        return self.start_t < t < self.end_t

    def outside_fraction(self, start_t: float, end_t: float) -> float:
        inside_s = max(0.0, min(end_t, self.end_t) - max(start_t, self.start_t))
        return 1 - inside_s / (end_t - start_t) if end_t > start_t else 0.0


def _read_steps(
    ranks: Mapping[int, Path], run_records: RunRecords, end: EndReader, observers: list[Observer]
) -> dict[int, _SteadySpan]:
    """Reads the steps of all ranks; returns attempt → its steady time."""
    steps, totals = _StepsReader(run_records), TotalsSum(len(ranks))
    for rank, folder in ranks.items():
        phases = run_records.rank_phases.setdefault(rank, {})
        steady_phases = run_records.rank_steady_phases.setdefault(rank, {})
        for number, window in records.numbered_lines(folder, records.STEPS, StepWindow):
            totals.add(rank, window)
            add_amounts(phases, window.phases)
            if rank == 0:
                steps.add(window)
                end.window(number, window)
            elif (span := steps.steady_spans.get(window.attempt)) and span.contains(window.t - window.wall_s / 2):
                add_amounts(steady_phases, window.phases)
            for observer in observers:
                observer.window(rank, window)
    run_records.totals = totals.totals(run_records.events.attempts)
    steps.finish()
    spans = steps.steady_spans
    if not spans:
        spans = _steady_by_stacks(ranks[0], run_records)
    elif steps.from_output:
        spans = _begin_with_the_loop(ranks[0], run_records, spans)
    run_records.rank_steady_phases[0] = run_records.steady.phases
    return spans


def _begin_with_the_loop(
    run_dir: Path, run_records: RunRecords, steady_spans: dict[int, _SteadySpan]
) -> dict[int, _SteadySpan]:
    """Steady times of a watched job whose steps are known from its output, which may show the first one late: a time
    begins with the earliest line of stacks.jsonl from which on most samples are in the lines of the loop, those that
    the samples after the first shown step are in."""
    windows: dict[int, list[StackWindow]] = {}
    for stacks in records.read_lines(run_dir, records.STACKS, StackWindow):
        if stacks.role == "training" and stacks.attempt in steady_spans:
            windows.setdefault(stacks.attempt, []).append(stacks)
    begin: dict[int, float] = {}
    for attempt, of_attempt in windows.items():
        shown_t = steady_spans[attempt].start_t
        loop = {
            place.line
            for stacks in of_attempt
            if stacks.t - stacks.wall_s / 2 > shown_t
            for place in stacks.places
            if place.line and place.samples >= _MIN_LOOP_FRACTION * stacks.samples
        }
        for stacks in sorted((one for one in of_attempt if one.t <= shown_t), key=lambda one: -one.t):
            in_loop = sum(place.samples for place in stacks.places if place.line in loop and place.kind != "compile")
            if in_loop < stacks.samples / 2:
                break
            begin[attempt] = stacks.t - stacks.wall_s
    if begin:
        for window in records.read_lines(run_dir, records.STEPS, StepWindow):
            middle_t, start_t = window.t - window.wall_s / 2, begin.get(window.attempt)
            if start_t is not None and start_t < middle_t and window.t <= steady_spans[window.attempt].start_t:
                _add_steady(run_records, window, excluded=_STARTUP_PHASES)
    return {attempt: span._replace(start_t=begin.get(attempt, span.start_t)) for attempt, span in steady_spans.items()}


def _steady_by_stacks(run_dir: Path, run_records: RunRecords) -> dict[int, _SteadySpan]:
    """Attempt → its steady time in a watched job whose output has no steps: from the first line of stacks.jsonl on in
    which most samples are neither an import nor a wait; only if a framework computes in it."""
    spans: dict[int, _SteadySpan] = {}
    trains = False
    for window in records.read_lines(run_dir, records.STACKS, StackWindow) if run_records.is_external else ():
        starts = sum(window.main_thread.get(kind, 0.0) for kind in LAUNCHER_KINDS) < 0.5
        if window.role == "training" and (starts or window.attempt in spans):
            trains |= not _FRAMEWORK_KINDS.isdisjoint(window.main_thread)
            start_t = spans[window.attempt].start_t if window.attempt in spans else window.t
            spans[window.attempt] = _SteadySpan(start_t, window.t)
    if not trains:
        return {}
    for step_window in records.read_lines(run_dir, records.STEPS, StepWindow):
        span = spans.get(step_window.attempt)
        if span is not None and span.contains(step_window.t - step_window.wall_s / 2):
            _add_steady(run_records, step_window)
    return spans


class _StepsReader:
    def __init__(self, run_records: RunRecords) -> None:
        self.steady_spans: dict[int, _SteadySpan] = {}
        self.from_output = run_records.is_external
        """Whether no hook saw a step: the output of the job has shown all that there are."""
        self._run_records = run_records
        self._last_t: float | None = None
        self._max_gap_s, self._attempt, self._waited_s = 0.0, 0, 0.0
        self._total_fetch_s, self._images_seen = 0.0, 0
        self._pending_windows: list[StepWindow] = []
        """Windows without steps: they belong to the end unless steps follow."""

    def add(self, window: StepWindow) -> None:
        run_records, pending_windows = self._run_records, self._pending_windows
        learning, dataset_size = run_records.learning, run_records.facts.get("num_images")
        if window.attempt != self._attempt:
            _add_trailing_windows(run_records, pending_windows)
            self._attempt, self._last_t, self._max_gap_s = window.attempt, None, 0.0
        if window.memory_peak_bytes is not None:
            run_records.memory_peak_bytes = max(run_records.memory_peak_bytes or 0, window.memory_peak_bytes)
        if window.host_bound_steps is not None:
            run_records.host_bound_steps += window.host_bound_steps
            run_records.host_bound_checked_steps += window.window_steps
        run_records.recompiled_s += window.recompiled_s * window.devices
        _add_learning(run_records, window)
        if learning.best is not None and window.t > learning.best[0]:
            learning.device_s_since_best += window.wall_s * window.devices
        self.from_output &= "compute" not in window.phases
        run_records.step_counts.add(window.t, window.step)
        self._images_seen += window.ranks * window.num_images
        self._total_fetch_s += window.ranks * window.input_wait_stages.get("fetch", 0.0)
        is_first_epoch = run_records.first_epoch_fetch_s is None
        if is_first_epoch and isinstance(dataset_size, int) and self._images_seen >= dataset_size > 0:
            run_records.first_epoch_fetch_s = self._total_fetch_s
        steady_span = self.steady_spans.get(window.attempt)
        # a loss without a step number is progress, too
        has_progress = window.window_steps > 0 or (run_records.is_external and not window.step and bool(window.losses))
        self._waited_s = 0.0 if has_progress else self._waited_s + window.phases.get("input_wait", 0.0) / window.devices
        if has_progress:
            run_records.eval_windows += bool(window.window_steps and window.phases.get("eval"))
            start_t = window.t - window.wall_s
            startup_s = sum(window.phases.get(name, 0.0) for name in _STARTUP_PHASES) / max(1, window.devices)
            gap_s = window.wall_s - startup_s if self._last_t is None else window.t - self._last_t
            self._max_gap_s, self._last_t = max(self._max_gap_s, gap_s), window.t
            self.steady_spans[window.attempt] = _SteadySpan(
                window.t if steady_span is None else steady_span.start_t, start_t
            )
            training = run_records.training
            training.start_t, training.end_t = min(training.start_t, start_t), max(training.end_t, window.t)
        is_long = window.wall_s > common_threshold("first_window_s")
        if steady_span is not None and has_progress:
            for pending in (*pending_windows, window):
                _add_steady(run_records, pending)
            pending_windows.clear()
        elif steady_span is not None:
            pending_windows.append(window)
            if len(pending_windows) > _MAX_PENDING_WINDOWS:
                _add_trailing_windows(run_records, pending_windows)
        elif window.window_steps > 0 and is_long and not run_records.is_external:
            _add_steady(run_records, window, excluded=_STARTUP_PHASES)

    def finish(self) -> None:
        run_records = self._run_records
        _add_trailing_windows(run_records, self._pending_windows)
        end, is_newest = run_records.events.end, self._attempt == run_records.totals.attempts
        if (end is None or end.kind != "finished") and self._last_t is not None and is_newest:
            run_records.progress_gap = ProgressGap(
                gap_s=0.0, max_earlier_gap_s=self._max_gap_s, last_step_t=self._last_t, waited_s=self._waited_s
            )


def _add_trailing_windows(run_records: RunRecords, pending_windows: list[StepWindow]) -> None:
    for window in pending_windows:
        _add_steady(run_records, window, excluded=_EXTERNAL_END_PHASES if run_records.is_external else _END_PHASES)
    pending_windows.clear()


def _add_steady(run_records: RunRecords, window: StepWindow, *, excluded: tuple[str, ...] = ()) -> None:
    """excluded: phases of the window that belong to the start or the end."""
    steady, device_s = run_records.steady, window.wall_s * window.devices
    for name, duration_s in window.phases.items():
        if name in excluded:
            device_s -= duration_s
        else:
            steady.phases[name] = steady.phases.get(name, 0.0) + duration_s
            steady.longest_phases[name] = max(steady.longest_phases.get(name, 0.0), duration_s)
    add_amounts(steady.thread_cpu_s, {name: s for name, s in window.thread_cpu_s.items() if name not in excluded})
    if window.process_cpu_s is not None and window.wall_s > 0:
        steady.process_cpu.add(window.process_cpu_s / window.wall_s)
    steady.device_s += max(0.0, device_s)
    steady.wall_s += max(0.0, device_s) / max(1, window.devices)
    steady.steps += window.window_steps
    steady.worker_starts += window.worker_starts
    steady.worker_start_s += window.worker_start_s
    steady.steps_without_gradients += window.steps_without_gradients
    if "compile" not in excluded:
        # a long line counts as lines of a second, as far as the compilations in it were counted
        lines = max(1, min(window.recompiles or 0, round(window.wall_s)))
        steady.compile_windows += lines * (window.phases.get("compile", 0.0) > 0)
        steady.compile_s.add(steady.wall_s, steady.phases.get("compile", 0.0))
        if window.recompiles is not None:
            steady.recompile_windows = (steady.recompile_windows or 0) + lines * (window.recompiles > 0)
            steady.recompile_lines += window.recompiles > 0
            steady.recompiles += window.recompiles
    if window.num_images:
        steady.num_images += window.num_images
        steady.steps_with_image_count += window.window_steps


def _add_learning(run_records: RunRecords, window: StepWindow) -> None:
    learning = run_records.learning
    learning.skipped_steps += window.skipped_steps
    learning.lr.add(window.lr)
    learning.newest_lr = learning.newest_lr if window.lr is None else window.lr
    highest = learning.lr.max_value or 0.0
    if window.lr is not None and window.lr <= LR_TOO_LOW.threshold("vanished") * highest:
        learning.steps_with_vanished_lr += window.window_steps
    loss = window.losses.get("total", next(iter(window.losses.values()), None))
    if loss is not None:
        learning.loss.add(window.t, loss)
        if learning.first_step is None:
            learning.first_step = window.step - window.window_steps
    if window.window_steps:
        if loss is not None and math.isfinite(loss):
            learning.windows_without_loss, learning.device_s_without_loss = 0, 0.0
        else:
            learning.windows_without_loss += 1
            learning.device_s_without_loss += window.wall_s * window.devices


def _read_devices(
    run_dir: Path,
    run_records: RunRecords,
    steady_spans: dict[int, _SteadySpan],
    end: EndReader,
    observers: list[Observer],
) -> None:
    progress_gap = run_records.progress_gap
    for number, sample in records.numbered_lines(run_dir, records.DEVICES, DeviceSample):
        run_records.num_samples += 1
        run_records.training.add(sample, run_records.totals.devices)
        end.sample(number, sample)
        for observer in observers:
            observer.sample(sample)
        steady_span = steady_spans.get(sample.attempt)
        is_steady = steady_span is not None and steady_span.contains(sample.t)
        _add_extremes(run_records, sample)
        if progress_gap is not None and sample.t > progress_gap.last_step_t:
            progress_gap.gap_s = sample.t - progress_gap.last_step_t
            if progress_gap.gap_s > progress_gap.max_earlier_gap_s:
                progress_gap.process_cpu.add(sample.process_cpu)
                for gpu in sample.gpus:
                    progress_gap.gpu_utilization.add(gpu.utilization)
        if sample.process_cpu is not None and not run_records.totals.steps:
            run_records.start_cpu.append((sample.t, sample.process_cpu))
        if is_steady:
            _add_host(run_records.host, sample)
        elif steady_span is None or sample.t <= steady_span.start_t:
            _add_host(run_records.startup_host, sample)
        for gpu in sample.gpus:
            _add_gpu(run_records.gpus.setdefault(gpu.index, GpuStats()), gpu, sample.t, is_steady=is_steady)


def _add_extremes(run_records: RunRecords, sample: DeviceSample) -> None:
    """Extremes over the whole run: a start can fill a disk too."""
    host = run_records.host
    if sample.memory_used_bytes is not None and sample.memory_limit_bytes:
        host.memory_fraction.add(sample.memory_used_bytes / sample.memory_limit_bytes)
        host.memory_free_bytes = max(0, sample.memory_limit_bytes - sample.memory_used_bytes)
    host.disk_free_bytes.add(sample.disk_free_bytes)
    if sample.shm_total_bytes:
        host.shm_total_bytes = sample.shm_total_bytes
        if sample.shm_used_bytes is not None:
            host.shm_fraction.add(sample.shm_used_bytes / sample.shm_total_bytes)
    host.oom_kills += sample.oom_kills or 0
    if sample.cpu_limit_cores is not None:
        host.cores = sample.cpu_limit_cores
    elif sample.cpu_core_utilization:
        host.cores = float(len(sample.cpu_core_utilization))
    run_records.startup_host.cores = host.cores


def _add_host(host: HostStats, sample: DeviceSample) -> None:
    if cores := sample.cpu_core_utilization:
        cpu_utilization = sum(cores) / len(cores)
        host.cpu_utilization.add(cpu_utilization)
        if sample.process_cpu is not None:
            host.other_processes_cpu.add(max(0.0, cpu_utilization - sample.process_cpu / len(cores)))
    add_amounts(host.busiest_processes, sample.busiest_processes)
    for name in _HOST_MEANS:
        getattr(host, name).add(getattr(sample, name))
    host.swap.add(sample.swap_used_bytes)
    host.rss.add(sample.t, sample.rss_bytes)
    host.largest_rss.add(sample.t, sample.largest_rss_bytes)
    host.open_fds.add(sample.t, sample.open_fds)
    host.max_fds = sample.max_fds if sample.max_fds is not None else host.max_fds
    if sample.throttled_s is not None and sample.process_cpu is not None:
        demanded_s = sample.throttled_s + sample.process_cpu
        host.throttled.add(sample.throttled_s / demanded_s if demanded_s > 0 else 0.0)


def _add_gpu(gpu: GpuStats, sample: GpuSample, t: float, *, is_steady: bool) -> None:
    for number in sample.xids:
        gpu.xid_counts[number] = gpu.xid_counts.get(number, 0) + 1
    gpu.ecc_corrected = _first_and_newest(gpu.ecc_corrected, sample.ecc_corrected)
    gpu.ecc_uncorrected = _first_and_newest(gpu.ecc_uncorrected, sample.ecc_uncorrected)
    if sample.memory_total_bytes:
        gpu.memory_total_bytes = sample.memory_total_bytes
    if not is_steady:
        return
    gpu.utilization.add(sample.utilization)
    if sample.other_processes is not None:
        gpu.other_processes.add(1.0 if sample.other_processes > 0 else 0.0)
    gpu.memory.add(t, sample.memory_used_bytes)
    if sample.memory_used_bytes is not None:
        gpu.max_memory_used_bytes = max(gpu.max_memory_used_bytes or 0, sample.memory_used_bytes)
    if sample.utilization is None or sample.utilization < GPU_CLOCKS_LOW.threshold("min_busy_utilization"):
        return
    gpu.busy_samples += 1
    reasons = sample.throttle_reasons or 0
    gpu.thermal_throttled_samples += bool(reasons & _THERMAL_BITS)
    gpu.power_capped_samples += bool(reasons & _POWER_BITS)
    gpu.app_clock_samples += bool(reasons & _APP_CLOCK_BIT)
    gpu.temperature.add(sample.temperature_c)
    gpu.sm_active.add(sample.sm_active)
    gpu.tensor_active.add(sample.tensor_active)
    if sample.sm_clock_mhz is not None and sample.sm_clock_max_mhz:
        gpu.clock_deficit.add(max(0.0, 1.0 - sample.sm_clock_mhz / sample.sm_clock_max_mhz))
    generation, width = sample.pcie_generation, sample.pcie_width
    if generation and width and sample.pcie_generation_max and sample.pcie_width_max:
        link_fraction = width / sample.pcie_width_max * 2.0 ** (generation - sample.pcie_generation_max)
        gpu.link_deficit.add(max(0.0, 1.0 - link_fraction))
        max_link = f"generation {sample.pcie_generation_max} x{sample.pcie_width_max}"
        gpu.link_description = f"generation {generation} x{width} of {max_link}"


def _first_and_newest(counters: tuple[int, int] | None, newest: int | None) -> tuple[int, int] | None:
    if newest is None:
        return counters
    return (newest if counters is None else counters[0]), newest


def _add_trace(run_records: RunRecords, trace: TraceWindow) -> None:
    stats = run_records.traces
    if trace.wall_s <= 0:
        return
    stats.steps += trace.window_steps
    stats.wall_s += trace.wall_s
    stats.busy_s += min(trace.busy_s, trace.wall_s)
    stats.comm_s += trace.comm_s
    stats.copy_s += trace.copy_s
    stats.launches += trace.launches
    stats.median_kernel_s.add(trace.kernel_median_s)
    stats.tensor_core_fraction.add(trace.tensor_core_fraction)
    for gap in trace.gaps[:1]:
        if stats.longest_gap is None or gap.duration_s > stats.longest_gap[0]:
            stats.longest_gap = (gap.duration_s, gap.host_op)


def _read_stacks(
    run_records: RunRecords, ranks: Mapping[int, Path], steady_spans: dict[int, _SteadySpan], end: EndReader
) -> None:
    """Adds up the samples of the processes that train, of all if none is known to; and the places of all roles."""
    by_process: dict[tuple[int, int], StackStats] = {}
    places = PlaceCounter()
    training_processes: set[tuple[int, int, int]] = set()
    last_step_t = run_records.progress_gap.last_step_t if run_records.progress_gap is not None else 0.0
    for rank, folder in ranks.items():
        for number, window in records.numbered_lines(folder, records.STACKS, StackWindow):
            is_own = any(place.part for place in window.places)
            process = (rank, window.attempt, window.pid)
            if window.role == "training":
                training_processes.add(process)
            is_process = window.role == "training" or (window.role == "worker" and process not in training_processes)
            middle_t = window.t - window.wall_s / 2
            if rank == 0 and not is_own and is_process:
                end.stacks(number, window)
            is_newest = window.attempt == run_records.totals.attempts and middle_t > last_step_t
            if is_newest and window.role == "thread":
                run_records.newest_threads[rank, window.pid] = window
            if is_process and is_newest:
                run_records.newest_stacks[rank, window.pid] = window
                if not run_records.totals.steps and run_records.is_external:
                    _add_stall(run_records.start_stalls, (rank, window.pid), window)
            run_records.loader_thread = window.loader or run_records.loader_thread
            steady_span = steady_spans.get(window.attempt)
            places.add(rank, window, is_startup=steady_span is None or middle_t <= steady_span.start_t)
            if window.role != "training" or is_own:
                continue  # the ledger has the phases of a training of stoker's own
            stats = by_process.setdefault((window.attempt, window.pid), StackStats())
            _add_stacks(stats, window, steady_span)
    run_records.places, run_records.place_totals = places.totals(LAUNCHER_KINDS)
    training = [stats for stats in by_process.values() if stats.main_thread.keys() - LAUNCHER_KINDS]
    for stats in training or by_process.values():
        run_records.stacks.add(stats)


def _add_stall(stalls: dict[tuple[int, int], StartStall], process: tuple[int, int], window: StackWindow) -> None:
    """Keeps since when a thread waits in one line; a window with another one ends it."""
    place = window.places[0] if len(window.places) == 1 else None
    earlier = stalls.pop(process, None)
    if place is None or not place.line or place.kind not in _WAITS:
        return
    if earlier is not None and (earlier.place.line, earlier.place.call) == (place.line, place.call):
        stalls[process] = dataclasses.replace(earlier, until_t=window.t)
    else:
        stalls[process] = StartStall(place=place, since_t=window.t - window.wall_s, until_t=window.t)


def _add_stacks(stats: StackStats, window: StackWindow, steady_span: _SteadySpan | None) -> None:
    """Leaves out as many samples of `other` and `idle` of a line as it has outside of the steady time."""
    if steady_span is None or window.t - window.wall_s >= steady_span.end_t or window.t <= steady_span.start_t:
        return
    counts = {kind: fraction * window.samples for kind, fraction in window.main_thread.items()}
    excess = steady_span.outside_fraction(window.t - window.wall_s, window.t) * window.samples
    for kind in ("other", "idle"):
        removed = min(excess, counts.get(kind, 0.0))
        excess -= removed
        counts[kind] = counts.get(kind, 0.0) - removed
    stats.samples += round(sum(counts.values()))
    stats.compile_windows += counts.get("compile", 0.0) > 0
    for kind, count in counts.items():
        if count > 0:
            stats.main_thread[kind] = stats.main_thread.get(kind, 0.0) + count * window.wall_s / window.samples
    for frame, fraction in window.frames.items():
        if frame in stats.frames or len(stats.frames) < MAX_FRAMES:
            stats.frames[frame] = stats.frames.get(frame, 0.0) + fraction * window.wall_s
