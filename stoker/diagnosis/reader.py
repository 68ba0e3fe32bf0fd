"""Reads a run's folder into `Records`: one pass over each file, in bounded memory, whether it lives, ended or died.

The start of an attempt is all up to its first window with steps, and that window too while it is short: caches,
autotuning and allocators warm up in it. Its end is what no clock saw after its last step, or saw between steps: a
process goes away. What is between is steady, and is what shares of time are of; so a short run is judged like a long
one. Sums of the whole run, which say what was lost, are `totals.py`'s.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

from stoker.diagnosis import postmortem
from stoker.diagnosis.catalogue import CATALOGUE, common
from stoker.diagnosis.run_data import Gpu, Records, Silence
from stoker.runs import records
from stoker.runs.schemas import (
    DeviceSample,
    Event,
    GpuSample,
    Probe,
    Quarantined,
    StackWindow,
    StepWindow,
    TraceWindow,
)
from stoker.runs.totals import folders, totals
from stoker.storage.uri import is_address

SHOWN = 3
"""Names and lines that are kept of many."""
FRAMES = 64
"""Frames of stacks that are counted; a loop has a few."""

_HOT = 0x08 | 0x20 | 0x40
_CAPPED = 0x04 | 0x80
_SET = 0x02
"""NVML's bits of why a clock is low: hardware, software and hardware thermal slowdown; software power cap and power
brake; a clock that somebody set (nvml.h, nvmlClocksEventReason…)."""

_START = ("startup", "compile")
"""Phases that a window with steps may begin with."""
_WAITING = 1000
"""Windows without steps that are kept until it is known whether steps follow: a quarter of an hour of them, at
least."""

_ENDS = ("finished", "failed", "preempted")


def read(run: Path, price: float | None = None) -> Records:
    """The records of a run, live, dead or finished. price: money per device-hour; None: as the run was told."""
    tables = records.read_settings(run) or {}  # without their schema: a run of another version has them there too
    reasons = tables.pop("reasons", {})
    settings: dict[str, Any] = {}
    for table in tables.values():
        settings |= table if isinstance(table, dict) else {}
    seen = Records(
        totals=totals(run),
        price=records.price_of(run) if price is None else price,
        settings=settings,
        reasons=frozenset(reasons),
        from_bucket=is_address(str(settings.get("data", ""))),
        ours=bool(settings),
        ended=postmortem.of_run(run),
    )
    newest = _read_events(run, seen)
    stretches = _read_steps(run, seen, newest)
    _read_devices(run, seen, stretches)
    paths: set[str] = set()
    for line in records.read_lines(run, records.QUARANTINE, Quarantined):
        paths.add(line.path)
        if len(seen.quarantined) < SHOWN:
            seen.quarantined.setdefault(line.path, line.error)
    seen.quarantined_count = len(paths)
    ranks = folders(run)
    seen.ranks = len(ranks)
    for trace in records.read_lines(run, records.TRACES, TraceWindow):
        _add_trace(seen, trace)
    for folder in ranks.values():
        for stack in records.read_lines(folder, records.STACKS, StackWindow):
            _add_stacks(seen, stack, stretches.get(stack.attempt))
    for probe in records.read_lines(run, records.PROBES, Probe):
        if not probe.reason and probe.ratio > 0:
            seen.probes[probe.what] = probe
    return seen


def _read_events(run: Path, seen: Records) -> Event | None:
    """The end of the newest attempt, where it has one."""
    end: Event | None = None
    learning = seen.learning
    for event in records.read_lines(run, records.EVENTS, Event):
        if event.kind in ("started", "resumed"):
            end = None
            seen.empty_inputs = []
            seen.watched |= "watched" in event.data
        elif event.kind in _ENDS:
            end = event
        elif event.kind == "checkpoint":
            seen.checkpoints += 1
        elif event.kind == "checkpoint_failed":
            seen.checkpoint_failures.append(event.text)
        elif event.kind == "gpu_fault":
            seen.gpu_faults.append(event)
        elif event.kind in records.LEARNING_KINDS:
            learning.events.setdefault(event.kind, []).append(event)
        elif event.kind == "evaluated":
            _add_evaluation(seen, event)
        elif event.kind == "warning":
            if "not_finite" in event.data:
                learning.not_finite = event
            empty = event.data.get("empty_inputs")
            if isinstance(empty, list):
                seen.empty_inputs = [str(path) for path in empty]
            if "storage" in event.data or "could not be written" in event.text or "did not reach" in event.text:
                seen.storage_warnings.append(event.text)
        if event.kind == "note" and isinstance(event.data.get("facts"), dict):
            seen.facts |= event.data["facts"]
        workers = event.data.get("workers")
        if isinstance(workers, int):
            seen.facts["workers"] = workers
    return end


def _add_evaluation(seen: Records, event: Event) -> None:
    learning = seen.learning
    learning.evaluations += 1
    metrics = event.data.get("metrics")
    ap = metrics.get("ap") if isinstance(metrics, dict) else None
    if not isinstance(ap, int | float):
        return
    learning.newest_ap = float(ap)
    boxes = metrics.get("boxes") if isinstance(metrics, dict) else None
    learning.boxes = boxes if isinstance(boxes, int) else None
    if learning.best is None or ap > learning.best[1]:
        learning.best, learning.evaluations_since_best = (event.t, float(ap), event.step), 0
    else:
        learning.evaluations_since_best += 1


class _Stretch(NamedTuple):
    """The steady time of an attempt, Unix seconds: after its start, up to its last window with steps. In that window it
    may end, and free what it had."""

    begin_t: float
    end_t: float

    def holds(self, t: float) -> bool:
        return self.begin_t < t < self.end_t

    def outside(self, begin_t: float, end_t: float) -> float:
        """Share of a time that does not lie in it."""
        inside_s = max(0.0, min(end_t, self.end_t) - max(begin_t, self.begin_t))
        return 1 - inside_s / (end_t - begin_t) if end_t > begin_t else 0.0


def _read_steps(run: Path, seen: Records, end: Event | None) -> dict[int, _Stretch]:
    """Attempt → its steady time."""
    stretches: dict[int, _Stretch] = {}
    last_t: float | None = None
    longest_s, attempt = 0.0, 0
    fetch_s, pictures, wanted = 0.0, 0, seen.facts.get("pictures")
    waiting: list[StepWindow] = []
    """Windows without steps, which are of the end unless steps follow."""
    for window in records.read_lines(run, records.STEPS, StepWindow):
        learning = seen.learning
        if window.attempt != attempt:
            _add_end(seen, waiting)
            attempt, last_t, longest_s = window.attempt, None, 0.0
        if window.memory_peak_bytes is not None:
            seen.memory_peak_bytes = max(seen.memory_peak_bytes or 0, window.memory_peak_bytes)
        if window.starved is not None:
            seen.starved += window.starved
            seen.starved_of += window.steps
        _add_learning(seen, window)
        if learning.best is not None and window.t > learning.best[0]:
            learning.device_s_since_best += window.wall_s * window.devices
        pictures += window.pictures
        fetch_s += window.input.get("fetch", 0.0)
        if isinstance(wanted, int) and seen.first_epoch_fetch_s is None and pictures >= wanted > 0:
            seen.first_epoch_fetch_s = fetch_s
        stretch = stretches.get(window.attempt)
        if window.steps > 0:
            started_s = sum(window.phases.get(name, 0.0) for name in _START) / max(1, window.devices)
            longest_s = max(longest_s, window.wall_s - started_s if last_t is None else window.t - last_t)
            last_t = window.t
            stretches[window.attempt] = _Stretch(
                window.t if stretch is None else stretch.begin_t, window.t - window.wall_s
            )
        if stretch is not None and window.steps > 0:
            for earlier in (*waiting, window):
                _add_steady(seen, earlier)
            waiting.clear()
        elif stretch is not None:
            waiting.append(window)
            if len(waiting) > _WAITING:
                _add_end(seen, waiting)
        elif window.steps > 0 and window.wall_s > common("first_window_s") and not seen.watched:
            _add_steady(seen, window, without=_START)
    _add_end(seen, waiting)
    if (end is None or end.kind != "finished") and last_t is not None and attempt == seen.totals.attempts:
        seen.silence = Silence(since_s=0.0, usual_s=longest_s, last_t=last_t)
    return stretches


def _add_end(seen: Records, waiting: list[StepWindow]) -> None:
    for window in waiting:
        _add_steady(seen, window, without=("unattributed", "host"))
    waiting.clear()


def _add_steady(seen: Records, window: StepWindow, *, without: tuple[str, ...] = ()) -> None:
    """without: phases of the window that are of the start or the end."""
    steady, device_s = seen.steady, window.wall_s * window.devices
    for name, took_s in window.phases.items():
        if name in without:
            device_s -= took_s
        else:
            steady.phases[name] = steady.phases.get(name, 0.0) + took_s
    for name, took_s in window.input.items():
        steady.input[name] = steady.input.get(name, 0.0) + took_s
    for name, took_s in window.cpu.items():
        if name not in without:
            steady.cpu[name] = steady.cpu.get(name, 0.0) + took_s
    steady.device_s += max(0.0, device_s)
    steady.wall_s += max(0.0, device_s) / max(1, window.devices)
    steady.steps += window.steps
    if window.pictures:
        steady.pictures += window.pictures
        steady.pictured_steps += window.steps


def _add_learning(seen: Records, window: StepWindow) -> None:
    learning = seen.learning
    learning.skipped += window.skipped
    learning.rate.add(window.rate)
    learning.norm.add(window.t, window.grad_norm)
    loss = window.losses.get("total", next(iter(window.losses.values()), None))
    if loss is not None:
        learning.loss.add(window.t, loss)
        if learning.first_step is None:
            learning.first_step = window.step - window.steps
    if window.steps:
        has = loss is not None and math.isfinite(loss)
        learning.without_loss = 0 if has else learning.without_loss + 1
        learning.lost_since_s = 0.0 if has else learning.lost_since_s + window.wall_s * window.devices


def _read_devices(run: Path, seen: Records, stretches: dict[int, _Stretch]) -> None:
    silence = seen.silence
    for sample in records.read_lines(run, records.DEVICES, DeviceSample):
        seen.samples += 1
        stretch = stretches.get(sample.attempt)
        steady = stretch is not None and stretch.holds(sample.t)
        _add_extremes(seen, sample)
        if silence is not None and sample.t > silence.last_t:
            silence.since_s = sample.t - silence.last_t
            if silence.since_s > silence.usual_s:
                silence.cpu.add(sample.process_cpu)
                for gpu in sample.gpus:
                    silence.gpu.add(gpu.utilisation)
        if steady:
            _add_host(seen, sample)
        for gpu in sample.gpus:
            _add_gpu(seen.gpus.setdefault(gpu.index, Gpu()), gpu, sample.t, steady=steady)


def _add_extremes(seen: Records, sample: DeviceSample) -> None:
    """What counts whenever it was: also a start can fill a disk."""
    host = seen.host
    if sample.memory_used_bytes is not None and sample.memory_limit_bytes:
        host.memory_share = max(host.memory_share or 0.0, sample.memory_used_bytes / sample.memory_limit_bytes)
        host.memory_free = max(0, sample.memory_limit_bytes - sample.memory_used_bytes)
    if sample.disk_free_bytes is not None:
        free = sample.disk_free_bytes
        host.disk_free = free if host.disk_free is None else min(host.disk_free, free)
    if sample.shm_total_bytes:
        host.shm_bytes = sample.shm_total_bytes
        if sample.shm_used_bytes is not None:
            host.shm = max(host.shm or 0.0, sample.shm_used_bytes / sample.shm_total_bytes)
    host.oom_kills += sample.oom_kills or 0
    host.cores = sample.cores if sample.cores is not None else (float(len(sample.cpu)) if sample.cpu else host.cores)


def _add_host(seen: Records, sample: DeviceSample) -> None:
    host = seen.host
    host.samples += 1
    if sample.cpu:
        busy = sum(sample.cpu) / len(sample.cpu)
        host.busy.add(busy)
        if sample.process_cpu is not None:
            host.others.add(max(0.0, busy - sample.process_cpu / len(sample.cpu)))
    for mean, value in (
        (host.process_cpu, sample.process_cpu), (host.threads_running, sample.threads_running),
        (host.psi_cpu, sample.psi_cpu), (host.psi_memory, sample.psi_memory), (host.psi_io, sample.psi_io),
        (host.received, sample.net_received_bytes_s), (host.swap, sample.swap_used_bytes),
    ):  # fmt: skip
        mean.add(value)
    host.rss.add(sample.t, sample.rss_bytes)
    host.handles.add(sample.t, sample.handles)
    host.handles_limit = sample.handles_limit if sample.handles_limit is not None else host.handles_limit
    if sample.throttled_s is not None and sample.process_cpu is not None:
        wanted = sample.throttled_s + sample.process_cpu
        host.withheld.add(sample.throttled_s / wanted if wanted > 0 else 0.0)


def _add_gpu(gpu: Gpu, sample: GpuSample, t: float, *, steady: bool) -> None:
    for number in sample.xids:
        gpu.xids[number] = gpu.xids.get(number, 0) + 1
    if sample.ecc_corrected is not None:
        gpu.corrected = (gpu.corrected[0] if gpu.corrected else sample.ecc_corrected, sample.ecc_corrected)
    if sample.ecc_uncorrected is not None:
        gpu.uncorrected = (gpu.uncorrected[0] if gpu.uncorrected else sample.ecc_uncorrected, sample.ecc_uncorrected)
    if sample.memory_total_bytes:
        gpu.memory_bytes = sample.memory_total_bytes
    if not steady:
        return
    gpu.utilisation.add(sample.utilisation)
    if sample.other_processes is not None:
        gpu.others.add(1.0 if sample.other_processes > 0 else 0.0)
    gpu.memory.add(t, sample.memory_used_bytes)
    if sample.memory_used_bytes is not None:
        gpu.memory_used = max(gpu.memory_used or 0, sample.memory_used_bytes)
    if sample.utilisation is None or sample.utilisation < CATALOGUE["gpu_hot"].limit("busy"):
        return
    gpu.busy += 1
    reasons = sample.throttle_reasons or 0
    gpu.hot += bool(reasons & _HOT)
    gpu.capped += bool(reasons & _CAPPED)
    gpu.set_low += bool(reasons & _SET)
    gpu.temperature.add(sample.temperature_c)
    gpu.sm_active.add(sample.sm_active)
    gpu.tensor_active.add(sample.tensor_active)
    if sample.sm_clock_mhz is not None and sample.sm_clock_max_mhz:
        gpu.clock_missing.add(max(0.0, 1.0 - sample.sm_clock_mhz / sample.sm_clock_max_mhz))
    generation, width = sample.pcie_generation, sample.pcie_width
    if generation and width and sample.pcie_generation_max and sample.pcie_width_max:
        has = width / sample.pcie_width_max * 2.0 ** (generation - sample.pcie_generation_max)
        gpu.link_missing.add(max(0.0, 1.0 - has))
        most = f"generation {sample.pcie_generation_max} x{sample.pcie_width_max}"
        gpu.link = f"generation {generation} x{width} of {most}"


def _add_trace(seen: Records, trace: TraceWindow) -> None:
    found = seen.traces
    if trace.wall_s <= 0:
        return
    found.windows += 1
    found.steps += trace.steps
    found.wall_s += trace.wall_s
    found.busy_s += min(trace.busy_s, trace.wall_s)
    found.comm_s += trace.comm_s
    found.copy_s += trace.copy_s
    found.launches += trace.launches
    found.kernel_s.add(trace.kernel_median_s)
    found.tensor_cores.add(trace.tensor_core_share)
    for gap in trace.gaps[:1]:
        if found.longest_gap is None or gap.took_s > found.longest_gap[0]:
            found.longest_gap = (gap.took_s, gap.host)


def _add_stacks(seen: Records, window: StackWindow, stretch: _Stretch | None) -> None:
    """Of a line that reaches into the start or the end, as many samples of no kind of training are left out as belong
    there."""
    if stretch is None or window.t - window.wall_s >= stretch.end_t or window.t <= stretch.begin_t:
        return
    found, counts = seen.stacks, {kind: share * window.samples for kind, share in window.main.items()}
    too_many = stretch.outside(window.t - window.wall_s, window.t) * window.samples
    for kind in ("other", "idle"):
        less = min(too_many, counts.get(kind, 0.0))
        too_many -= less
        counts[kind] = counts.get(kind, 0.0) - less
    found.samples += round(sum(counts.values()))
    for kind, count in counts.items():
        found.main[kind] = found.main.get(kind, 0.0) + count
    for frame, share in window.frames.items():
        if frame in found.frames or len(found.frames) < FRAMES:
            found.frames[frame] = found.frames.get(frame, 0.0) + share * window.samples
