"""Records a training: a line of steps.jsonl a second, the screen, TensorBoard, and what the other ranks send.

Losses and norms are summed on the device (`LossAccumulator`) and read when their copy has arrived, so no step waits.

Of several ranks, rank 0 alone writes the run folder; the others send it what is theirs (`RankFolder`), through the
store of the process group: no exchange waits for it, and their machines need not see the folder. Rank 0 writes the
windows and the telemetry of rank n to `ranks/000n/`, its warnings to events.jsonl, and the images that it could not use
to quarantine.jsonl (`RankRecords`).

A loss that jumps and steps that are skipped are reported at once (`StabilityAlerts`). `resume.py` acts when gradients
stay non-finite; the diagnosis judges the learning rate by the records.
"""

import contextlib
import functools
import itertools
import math
import operator
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from stoker.data.loading.loader import QuarantinedImage
from stoker.evaluation.draw import ImageWithBoxes
from stoker.hardware.device import ReadyEvent
from stoker.report.tensorboard import Board
from stoker.training.loss_sums import NO_STATS, StepStats
from stoker.training.parallel import LoopContext
from stoker.training.ranks import Ranks
from stoker.training.resume import Recovery, name_images
from stoker.training.state import EventLogger, TrainSetup
from stoker_watch.errors import DataError
from stoker_watch.hardware import calibration
from stoker_watch.recording.ledger import TimeBreakdown
from stoker_watch.runs.evaluation import Metrics
from stoker_watch.runs.records import (
    DEVICES,
    EVENTS,
    QUARANTINE,
    RANKS,
    STACKS,
    STEPS,
    WARNING_KINDS,
    RunFolder,
    read_lines,
)
from stoker_watch.runs.schemas import DeviceSample, Event, Quarantined, StackWindow, StepWindow

SENT: dict[str, type[msgspec.Struct]] = {
    STEPS: StepWindow,
    DEVICES: DeviceSample,
    STACKS: StackWindow,
    QUARANTINE: Quarantined,
    EVENTS: Event,
}
"""Files of records whose lines are sent to rank 0, as [name, line]."""
MAX_WARNINGS = 20
"""Warnings that a rank sends per attempt: eight ranks with the same trouble must not fill the screen."""


class RankFolder(RunFolder):
    """The run folder as a rank other than 0 sees it: what it writes is sent to rank 0."""

    def __init__(self, path: Path, attempt: int, ranks: Ranks) -> None:
        super().__init__(path, attempt)
        self._ranks = ranks
        self._num_warnings = itertools.count(1)

    def append(self, name: str, line: msgspec.Struct) -> None:
        """Sends a line of SENT; other records are those of rank 0."""
        if name in SENT:
            self._ranks.post(msgspec.json.encode((name, line)))

    def event(self, kind: str, text: str = "", *, step: int | None = None, **data: Any) -> None:
        """Sends the text of a warning, and `out_of_memory` whole: the next attempt reads its sizes. Other events
        happen in all ranks: rank 0 writes them."""
        if kind != "out_of_memory":
            if kind not in WARNING_KINDS or next(self._num_warnings) > MAX_WARNINGS:
                return
            kind, data = "warning", {}
        self.append(EVENTS, Event(t=time.time(), attempt=self.attempt, kind=kind, step=step, text=text, data=data))

    def replace(self, name: str, value: msgspec.Struct) -> None:
        """Rank 0 writes the files."""


class RankRecords:
    """Writes in rank 0 what the other ranks send."""

    def __init__(self, setup: TrainSetup, log_event: EventLogger) -> None:
        self._folder, self._ranks, self._loader = setup.folder, setup.ranks, setup.loader
        self._quarantine, self._log_event = setup.quarantine, log_event

    def write(self) -> None:
        """Writes what has arrived. Raises DataError if too many images of all ranks cannot be used."""
        if not self._ranks.is_main:
            return
        for rank, data in self._ranks.collect():
            file, raw = msgspec.json.decode(data, type=tuple[str, msgspec.Raw])
            line: Any = msgspec.json.decode(raw, type=SENT[file])
            if file == EVENTS:
                self._log_event(line.kind, f"rank {rank}: {line.text}", **line.data, rank=rank)
                continue
            if file == QUARANTINE:
                bad = QuarantinedImage(line.image_index, line.path, line.error, line.sample_position, line.replaced_by)
                self._quarantine(bad)
                if bad.replaced_by >= 0:
                    self._loader.quarantine_elsewhere(bad)
                continue
            name = f"{RANKS}/{rank:04d}/{file}"
            (self._folder.path / name).parent.mkdir(parents=True, exist_ok=True)
            self._folder.append(name, line)


def open_folder(ranks: Ranks, open_in_main: Callable[[], RunFolder]) -> RunFolder:
    """The run folder: rank 0 opens it, the others send to it."""
    if ranks.alone:
        return open_in_main()
    opened: list[RunFolder] = []

    def open_and_describe() -> tuple[Path, int]:
        opened.append(open_in_main())
        return opened[0].path, opened[0].attempt

    path, attempt = ranks.share(open_and_describe)
    return opened[0] if opened else RankFolder(path, attempt, ranks)


SPIKE_WINDOWS, MIN_SPIKE_WINDOWS = 64, 16
"""Windows that a spike is compared with (about a minute), and their minimum number."""
SPIKE_SIGMAS, SPIKE_RATIO = 8.0, 2.0
"""A spike is this many standard deviations of the log-loss above the median, and this many times the median. Eight,
since losses of single detection batches are far from normally distributed; twice, since long windows vary so little
that 5 % would be a spike otherwise. Heuristics."""
SPIKE_COOLDOWN_WINDOWS = 16
"""Windows without a spike after which the next one is reported."""


def is_spike(loss: float, previous: Sequence[float]) -> bool:
    """Whether `loss` is far above the losses of the previous windows; all positive. False if there are too few. It
    compares logarithms, so the unit of the loss does not matter. The noise of windows, which are one step or hundreds,
    differs by a factor of ten between models; it is measured, as the median absolute deviation."""
    if len(previous) < MIN_SPIKE_WINDOWS:
        return False
    baseline = statistics.median(previous)
    log_std = 1.4826 * statistics.median(abs(math.log(value / baseline)) for value in previous)
    return loss > SPIKE_RATIO * baseline and math.log(loss / baseline) > SPIKE_SIGMAS * log_std


JUMPED_RATIO = 4.0
"""A gradient of a tensor in the step with the largest loss, over its mean in the windows before, that is named; and by
how much it must exceed the same ratio of half of the tensors: a jump of all says nothing about one. Heuristics."""
LARGE_UPDATE = 0.03
"""Change of a weight in a step over its norm that is named at a spike. About 0.001 is usual (A. Karpathy, CS231n,
"Ratio of weights:updates"), 0.01 in heads that begin small. A heuristic."""


class Suspects(NamedTuple):
    """How `StabilityAlerts` names what a spike is from. parameters: names, in the order of the norms of the gradients;
    name_images: those of the step after so many steps; clip_grad_norm: 0 is none; update_ratios: `OptimizerStep`'s."""

    parameters: Sequence[str] = ()
    name_images: Callable[[int], str] = str
    clip_grad_norm: float = 0.0
    update_ratios: Callable[[], dict[str, float]] = dict


class StabilityAlerts:
    """Looks at the windows of a training in order. peak_lr: the peak learning rate since the last rollback."""

    def __init__(self, log_event: EventLogger, peak_lr: float, suspects: Suspects | None = None) -> None:
        self._log_event, self._suggested_lr = log_event, float(f"{peak_lr / 3:.2g}")
        self._suspects = suspects or Suspects()
        self._recent_norms: deque[tuple[float, list[float]]] = deque(maxlen=MIN_SPIKE_WINDOWS)
        """Norm of the whole gradient, and of each tensor's, of windows without a spike."""
        self._recent_losses: deque[float] = deque(maxlen=SPIKE_WINDOWS)
        self._windows_since_spike = SPIKE_COOLDOWN_WINDOWS
        self._skipped_steps, self._next_skip_report = 0, 1

    def check(self, window: StepWindow, stats: StepStats = NO_STATS, *, tolerated_skips: int) -> None:
        """Logs what is new in this window. tolerated_skips: loss scaling of fp16 finds its limit by overflowing, so a
        single skipped step is normal."""
        self._skipped_steps += window.skipped_steps
        if window.skipped_steps > tolerated_skips and self._skipped_steps >= self._next_skip_report:
            self._next_skip_report = 2 * self._skipped_steps  # a run that keeps skipping must not fill the screen
            text = f"{self._skipped_steps:,} steps skipped so far: their gradients were not finite"
            self._log_event("warning", text, skipped=self._skipped_steps)
        loss, previous = window.losses.get("total"), list(self._recent_losses)
        if loss is None or not 0 < loss < math.inf:
            return
        self._recent_losses.append(loss)
        if not is_spike(loss, previous):
            self._windows_since_spike += 1
            if stats.grad_norm is not None:
                self._recent_norms.append((stats.grad_norm, stats.mean_norms))
            return
        if self._windows_since_spike >= SPIKE_COOLDOWN_WINDOWS:
            baseline = statistics.median(previous)
            where, more = self._find_suspects(stats)
            flags = "".join(f" or --{name.replace('suggested_', '').replace('_', '-')} {more[name]:g}"
                            for name in more if name.startswith("suggested"))  # fmt: skip
            self._log_event(
                "loss_spike",
                f"the loss jumped to {loss:.3g} at step {window.step:,}, {loss / baseline:.1f} times its median of "
                f"{baseline:.3g}{where}; if it does not fall again: --lr {self._suggested_lr:g}{flags}",
                at=window.step,
                loss=loss,
                baseline=baseline,
                windows=len(previous),
                suggested_lr=self._suggested_lr,
                **more,
            )
        self._windows_since_spike = 0

    def _find_suspects(self, stats: StepStats) -> tuple[str, dict[str, Any]]:
        """(text, data) about the step with the largest loss: its images, the tensor whose gradient grew most, and a
        limit of the norm that would have held it back."""
        suspects = self._suspects
        if stats.worst_step is None:
            return "", {}
        data: dict[str, Any] = {"worst_step": stats.worst_step + 1, "images": suspects.name_images(stats.worst_step)}
        text = f", most in step {data['worst_step']:,} with the images {data['images']}"
        before = [norms for _, norms in self._recent_norms if len(norms) == len(suspects.parameters)]
        if not before or len(stats.worst_norms) != len(suspects.parameters):
            return text, data
        usual = [statistics.fmean(column) for column in zip(*before, strict=True)]
        ratios = [now / mean if mean else 0.0 for now, mean in zip(stats.worst_norms, usual, strict=True)]
        largest = max(ratios, default=0.0)
        if largest > JUMPED_RATIO * max(1.0, statistics.median(ratios)):
            data |= {"parameter": suspects.parameters[ratios.index(largest)], "gradient_ratio": largest}
            text += f"; the gradient of {data['parameter']} was {largest:.0f} times its mean there"
        updates = suspects.update_ratios()
        if updates and max(updates.values()) > LARGE_UPDATE:
            data["fastest_parameter"], data["update_ratio"] = max(updates.items(), key=operator.itemgetter(1))
            text += f"; a step changes {data['fastest_parameter']} by {data['update_ratio']:.1%}, about 0.1% is usual"
        norm = math.hypot(*stats.worst_norms)
        limit = float(f"{2 * statistics.median(norm for norm, _ in self._recent_norms):.2g}")
        if norm > JUMPED_RATIO * limit and not 0 < suspects.clip_grad_norm <= limit:
            data["suggested_clip_grad_norm"] = limit
        return text, data


WINDOW_S = 1.0
"""Seconds of a line of steps.jsonl."""
MIN_WINDOWS = 5
"""Windows with steps, after the first, without which a run says nothing about the time of a step."""


class Recorder:
    """The records of this attempt of a run, from `begin` on."""

    def __init__(self, context: LoopContext, recovery: Recovery) -> None:
        self._context, self._setup, self._parallel = context, context.setup, context.parallel
        self._ledger, self._recovery = context.ledger, recovery
        self._board: Board | None = None
        """TensorBoard's files; in rank 0."""
        self._rank_records = RankRecords(context.setup, context.log_event)
        self._stream = context.setup.device.make_stream()
        self._pending: tuple[list[Tensor], ReadyEvent, int] | None = None
        """Sums of losses on their way to the host, and of how many steps."""
        self._last_read_step = 0
        self._window_start_s = -math.inf  # the first step has a line of its own: the initial loss

    def begin(self) -> None:
        """Call it at the first step of this attempt, and after a rollback."""
        setup = self._setup
        if self._board is None and setup.ranks.is_main:
            warn = functools.partial(self._context.log_event, "warning")
            self._board = Board(setup.folder.path, purge_step=setup.state.step, on_error=warn)
        self._last_read_step = setup.state.step
        suspects = Suspects(
            setup.optimizer.names, functools.partial(name_images, setup), setup.config.optim.clip_grad_norm or 0.0,
            setup.optimizer.update_ratios,
        )  # fmt: skip
        self._alerts = StabilityAlerts(self._context.log_event, self._recovery.peak_lr, suspects)

    def after_step(self) -> None:
        """Writes the line of a window once a second; rank 0 also takes profiler windows."""
        if self._setup.ranks.is_main:
            self._context.tracer.after_step(self._setup.state.step)
        self.read_stats()

    def read_stats(self, *, wait: bool = False) -> None:
        """Writes the line of a window once a second, with the losses of steps whose copy has arrived. wait: waits for
        the device and writes the line now."""
        state, accumulator = self._setup.state, self._setup.loss_accumulator
        if self._pending is None:
            if not wait and time.perf_counter() - self._window_start_s < WINDOW_S:
                return
            self._window_start_s = time.perf_counter()
            tensors, ready = self._stream.to_host(accumulator.take())
            self._pending = (tensors, ready, state.step - self._last_read_step)
            self._last_read_step = state.step
        tensors, ready, steps = self._pending
        if not wait and not ready.done():
            return
        ready.synchronize()
        self._pending = None
        stats = accumulator.read(tensors, steps)
        self._write_window(self._ledger.window(0.0), stats, steps)
        if stats.diverged_step is not None and self._setup.ranks.alone:  # ranks act at the same step, as they agree
            state.diverged_step = stats.diverged_step

    def flush(self) -> None:
        """Writes the lines of all steps so far. Waits for the device, so only called where the loop waits anyway."""
        while self._pending is not None or self._setup.state.step > self._last_read_step:
            self.read_stats(wait=True)
        self._setup.state.follow(self._parallel.agree_on_all())

    def end_window(self) -> None:
        """Writes a line of the time since the last one, in which there were no steps."""
        self._write_window(self._ledger.window(0.0), NO_STATS, 0)

    def add_evaluation(self, step: int, metrics: Metrics, images: Sequence[ImageWithBoxes]) -> None:
        """Shows the metrics of an evaluation, and some of its images. Callable from any thread, in rank 0."""
        self._context.screen.evaluated(step, metrics)
        if self._board is not None:
            self._board.add_metrics(step, metrics)
            self._board.add_images(step, images, self._setup.index.class_names)

    def finish(self) -> None:
        """Writes the last lines: all steps, and what the device did after them."""
        self.flush()
        self._setup.device.synchronize()
        self._write_window(self._ledger.finish(), NO_STATS, 0)

    def finish_ranks(self) -> None:
        """Writes the rest of what other ranks send. Called by all ranks, after their last line."""
        if not self._setup.ranks.alone:
            self._setup.ranks.barrier()  # every rank has sent its last line
            self._rank_records.write()

    def close(self) -> None:
        """Writes what is known, however the training ended."""
        try:
            with contextlib.suppress(RuntimeError, DataError):  # neither ended the run
                self._rank_records.write()
            step = self._setup.state.step
            unlogged_steps, self._last_read_step = step - self._last_read_step, step
            if unlogged_steps:  # after an error: the time of these steps is known, their losses are not
                with contextlib.suppress(RuntimeError):  # a lost device must not hide the error that ended the run
                    self._write_window(self._ledger.window(0.0), NO_STATS, unlogged_steps)
        finally:
            if self._board is not None:
                self._board.close()

    def _write_window(self, breakdown: TimeBreakdown | None, stats: StepStats, steps: int) -> None:
        """Writes a line of steps.jsonl, and the same to the screen and TensorBoard."""
        setup = self._setup
        if breakdown is None or breakdown.wall_s <= 0:
            return
        try:
            memory = setup.device.memory()
        except OSError:  # no free descriptor for /proc: an event of telemetry says so
            memory = None
        window = StepWindow(
            t=time.time(),
            attempt=setup.folder.attempt,
            step=self._last_read_step,
            window_steps=steps,
            num_images=steps * setup.rank_batch_size,
            wall_s=breakdown.wall_s,
            devices=1,
            ranks=setup.ranks.world_size,
            phases=breakdown.phases,
            input_wait_stages=breakdown.input_wait_stages,
            losses=stats.losses,
            lr=setup.state.lr if steps else None,
            grad_norm=stats.grad_norm,
            skipped_steps=stats.skipped_steps,
            memory_peak_bytes=None if memory is None else memory.peak,
            host_bound_steps=breakdown.host_bound_steps,
            thread_cpu_s=breakdown.thread_cpu_s,
        )
        setup.folder.append(STEPS, window)
        self._rank_records.write()
        window = msgspec.structs.replace(window, num_images=steps * setup.config.run.batch_size)  # shown is that of all
        if self._board is not None:
            self._board.add_window(window)
        if steps and setup.ranks.is_main:
            done, trained_s = setup.progress, setup.state.trained_s - setup.extension.trained_s
            self._context.screen.progress(
                window,
                fraction_done=max(0.0, min(1.0, done)),
                total_steps=setup.total_steps,
                eta_s=trained_s * (1 - done) / done if 0 < done < 1 else None,
                memory=None if memory is None else (memory.peak, memory.total),
            )
            self._alerts.check(window, stats, tolerated_skips=1 if setup.config.run.precision == "fp16" else 0)


def log_measured_steps(setup: TrainSetup, log_event: EventLogger) -> None:
    """Adds the steps of this attempt to the calibration file, if one device trained and there were enough."""
    if not setup.ranks.alone:
        return
    config, device = setup.config, setup.device
    windows = [
        window
        for window in read_lines(setup.folder.path, STEPS, StepWindow)
        if window.attempt == setup.folder.attempt and window.window_steps
    ][1:]  # kernels are chosen and caches filled in the first
    if len(windows) < MIN_WINDOWS:
        return
    measured = calibration.MeasuredStep(
        t=time.time(),
        model=config.model.model,
        image_size=config.data.image_size,
        batch_size=config.run.batch_size,
        micro_batches=config.optim.grad_accum_steps,
        precision=config.run.precision,
        device=device.name,
        threads=torch.get_num_threads() if device.is_cpu else 0,
        compiled=config.run.compile or config.run.cuda_graph,
        step_s=statistics.median(window.phases.get("compute", 0.0) / window.window_steps for window in windows),
        steps=sum(window.window_steps for window in windows),
        peak_bytes=None if device.is_cpu else device.memory().peak,
        settings=calibration.step_settings(config.set_fields()),
        num_classes=len(setup.index.class_names),
        max_boxes=setup.max_boxes,
    )
    try:
        calibration.append(measured)
    except OSError as error:
        log_event("info", f"the time of a step was not added to {calibration.path()}: {error.strerror}")
