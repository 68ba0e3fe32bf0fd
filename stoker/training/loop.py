"""The one training loop, top to bottom: a step, then what is due after it.

No step waits for the device: losses and norms are summed there (`LossAccumulator`) and read when their copy has
arrived. The training thread sets the phase of the ledger; steps.jsonl gets a line per second. What a step computes is
in `forward.py` and `optim.py`, how a run starts in `start.py`, signals and rollbacks in `recovery.py`. Errors end the
run with the exit codes of `errors.py`; after a signal the loop saves and exits with code 75.
"""

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from stoker.config.durations import parse_duration
from stoker.config.settings import Config, settings_table
from stoker.data.augment.device import augment_batch
from stoker.data.batch import Batch
from stoker.errors import Preempted, StokerError, StorageError
from stoker.evaluation.metrics import Metrics
from stoker.hardware.device import ReadyEvent, out_of_memory_as_error
from stoker.monitor.monitor import monitoring
from stoker.monitor.options import MonitoringOptions
from stoker.profiling.ledger import Ledger, TimeBreakdown
from stoker.profiling.telemetry.sampler import TelemetrySampler
from stoker.profiling.trace import Tracer
from stoker.report.tensorboard import Board
from stoker.report.terminal import Screen
from stoker.runs.records import BEST, FINAL, STEPS, WARNING_KINDS
from stoker.runs.schemas import StepWindow
from stoker.training import bucket_run, checkpoint, run_selection, start
from stoker.training.async_eval import AsyncEvaluator, PendingEvaluation
from stoker.training.cluster import require_one_process
from stoker.training.cuda_graph import CudaCapture, CudaGraphStep
from stoker.training.defaults.dry_run import make_worst_case_batch
from stoker.training.forward import compile_forward_backward, make_loss_fn, train_step
from stoker.training.input_probe import PrefetchedInputProbe
from stoker.training.optim import NO_STATS, StepStats, lr_at
from stoker.training.recovery import (
    ROLLBACK_LR_DIVISOR,
    StopRequest,
    make_stability_monitor,
    make_stop_error,
    roll_back,
    stop_on_signals,
)
from stoker.training.state import EventLogger, TrainSetup, collect_state
from stoker.training.triggers import IntervalTrigger
from stoker.training.vertex import copying_results, vertex_folders

WINDOW_S = 1.0
"""Seconds of a line of steps.jsonl."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a finished training returns. run: its folder; metrics: of the final weights, on the validation split."""

    run: Path
    steps: int
    metrics: Metrics


def train(
    user_config: Config,
    *,
    run_dir: str | None = None,
    resume: str | None = None,
    accept_changed_data: bool = False,
    started_s: float | None = None,
    trace: bool = False,
    monitor: MonitoringOptions = MonitoringOptions(),  # noqa: B008  # frozen
    log_format: Literal["text", "json"] = "text",
) -> Result:
    """Trains until the requested length is reached.

    run_dir: folder or URI of the run; resume: an unfinished run to continue, with its own settings;
    accept_changed_data: continue a run also if its data set changed; started_s: the moment of `time.perf_counter` from
    which the ledger counts, default now; trace: keep Chrome traces of some steps; monitor: alerts and metrics while it
    runs; log_format: json writes JSON lines to stdout and text to stderr.
    Raises StokerError; `Preempted` after a signal, when everything is saved.
    """
    started_s = time.perf_counter() if started_s is None else min(started_s, time.perf_counter())
    monitor.validate()
    require_one_process()
    vertex = vertex_folders()
    if run_dir is None and resume is None:
        run_dir = vertex.checkpoints
    screen = Screen(sys.stderr if log_format == "json" else None)
    with stop_on_signals() as stop_request, screen, contextlib.ExitStack() as stack:
        remote = bucket_run.join_bucket_run(run_dir, resume, stop_request=stop_request, stack=stack, note=screen.note)
        if remote is not None:
            run_dir, resume = (str(remote.local_dir), None) if resume is None else (None, str(remote.local_dir))
        path, user_config, messages = run_selection.choose_run(
            run_selection.with_absolute_paths(user_config), run_dir, resume, stack
        )
        with out_of_memory_as_error("looking for the batch that fits"):
            resolved = start.resolve_run(user_config, path)
        stop_request.check()
        folder = run_selection.open_run_folder(resolved.config, resolved.reasons, path, run_dir, stack, messages)
        if remote is not None:
            messages += remote.messages
            stack.push(remote.finish)
        stack.callback(run_selection.write_diagnosis, folder, screen.warning)
        stack.enter_context(monitoring(folder, monitor, stop=lambda: stop_request.request("an alert"), log=log_format))
        setup: TrainSetup | None = None

        def current_step() -> int | None:
            return None if setup is None else setup.state.step

        def log_event(kind: str, text: str, /, **data: Any) -> None:
            """Prints a line and writes the same line into the run's events."""
            (screen.warning if kind in WARNING_KINDS else screen.note)(text)
            folder.event(kind, text, step=current_step(), **data)

        try:
            with (
                out_of_memory_as_error("training"),
                bucket_run.uploading(remote, stop_request, log_event),
                copying_results(folder.path, vertex, log_event),
            ):
                screen.settings(settings_table(resolved.config, resolved.reasons))
                for line in messages:
                    log_event("info", line)
                processes = start.start_worker_processes(resolved.config, resolved.index, resolved.device, log_event)
                if processes is not None:
                    stack.callback(processes.close)
                setup = start.build(resolved, folder, log_event, processes, accept_changed_data=accept_changed_data)
                stack.callback(setup.loader.close)
                stop_request.check()
                metrics = Training(setup, screen, stop_request, started_s, log_event, trace).run()
        except StokerError as error:
            kind = "preempted" if isinstance(error, Preempted) else "failed"
            folder.event(kind, str(error), step=current_step(), exit_code=error.exit_code)
            raise
        except BaseException as error:
            folder.event("failed", f"{type(error).__name__}: {error}", step=current_step())
            raise
        return Result(folder.path, setup.state.step, metrics)


class Training:
    """The loop of one attempt: `run` goes through it from start to end."""

    def __init__(
        self,
        setup: TrainSetup,
        screen: Screen,
        stop_request: StopRequest,
        started_s: float,
        log_event: EventLogger,
        trace: bool = False,
    ) -> None:
        self.setup, self.state = setup, setup.state
        self.screen, self.stop_request, self.log_event = screen, stop_request, log_event
        device, run, num_images = setup.device, setup.config.run, len(setup.train_indices)
        self.ledger = Ledger(device.make_clock(), start_s=started_s, ranges=device.make_nvtx_ranges())
        setup.loader.on_copy_awaited = self.ledger.begin_h2d_wait
        self.tracer = Tracer(device, setup.folder, self.ledger, log_event, chrome=trace)
        self.board = Board(
            setup.folder.path, purge_step=self.state.step, on_error=lambda text: log_event("warning", text)
        )
        self.stream = device.make_stream()
        ema_weights = setup.optimizer.ema_model.state_dict()
        self.arenas = checkpoint.reserve_arenas(device, ema_weights, collect_state(setup))
        self.evaluator = AsyncEvaluator(setup, screen, self.board, log_event)
        self.max_duration = parse_duration(run.max_duration)
        self.eval_trigger = IntervalTrigger(parse_duration(run.eval_every, "eval-every"), num_images, run.batch_size)
        self.checkpoint_trigger = IntervalTrigger(
            parse_duration(run.checkpoint_every, "checkpoint-every"), num_images, run.batch_size
        )
        self.loss_fn = make_loss_fn(setup.model, compile=run.compile)
        self.train_batch: Callable[[Batch], None] = self.train_eagerly
        if run.cuda_graph:
            self.train_batch = CudaGraphStep(self.train_eagerly, CudaCapture(), self.report_failed_capture)
        self.pending_copy: ReadyEvent | None = None
        self.pending_stats: tuple[list[Tensor], ReadyEvent, int] | None = None
        self.last_read_step = self.state.step
        self.window_start_s = -math.inf  # the first step has a line of its own: the initial loss
        self.lr, self.training_warning_logged = 0.0, False
        self.stability_monitor = make_stability_monitor(setup)
        self.input_probe = PrefetchedInputProbe(setup, self.ledger, log_event)

    def run(self) -> Metrics:
        """Trains until the length is reached, then evaluates and saves. Returns the metrics of the final weights."""
        setup, state = self.setup, self.state
        with TelemetrySampler(setup.folder), contextlib.closing(self.board), contextlib.closing(self):
            if setup.config.run.compile and self.progress() < 1:
                self.compile()
            self.write_window(self.ledger.window(0.0), NO_STATS, 0)
            self.run_steps()
            while state.diverged_step is not None:
                self.roll_back(state.diverged_step)
                self.run_steps()
            if self.is_out_of_patience() and self.progress() < 1:
                self.log_event(
                    "info",
                    f"stopped at step {state.step:,}: {state.evals_since_best} evaluations without an AP above "
                    f"{state.best_ap:.3f}, whose weights are {BEST}",
                )
            self.save_checkpoint()
            metrics = self.evaluate_final()
            with self.ledger.phase("checkpoint"):
                setup.writer.wait()
            self.finish_stats()
            if setup.writer.failure is not None:
                raise StorageError(
                    "The final weights could not be saved.",
                    location=setup.folder.path,
                    cause=setup.writer.failure,
                    fix=f"make room; then `stoker train --resume {setup.folder.path}` finishes the run",
                )
        setup.folder.event("finished", f"{state.step:,} steps", step=state.step, metrics=msgspec.to_builtins(metrics))
        return metrics

    def run_steps(self) -> None:
        """Steps, and what is due after each, until the length is reached or the training diverged."""
        state = self.state
        self.evaluator.resume()
        self.collect_eval()
        if state.evaluated_step != state.step and self.is_evaluation_due():
            self.evaluate()  # a signal or a kill came between the checkpoint of this step and its evaluation
        while state.diverged_step is None and self.progress() < 1 and not self.is_out_of_patience():
            self.input_probe.before_step(self.progress())
            self.step()
            self.tracer.after_step(state.step)
            self.read_stats()
            self.handle_pending_signals()
            if self.checkpoint_trigger.is_due(state.step):
                self.save_checkpoint()
            if self.is_evaluation_due():
                self.evaluate()
        self.flush_stats()

    def is_evaluation_due(self) -> bool:
        """Whether an evaluation is due before the end and no rollback is pending."""
        if not self.eval_trigger.is_due(self.state.step) or self.progress() >= 1:
            return False
        self.flush_stats()  # also so that an evaluation has windows of its own
        return self.state.diverged_step is None

    def roll_back(self, failed_at: int) -> None:
        """Continues from the last healthy state, at a lower learning rate."""
        self.collect_eval()
        with self.ledger.phase("recovery"):
            roll_back(self.setup, failed_at, self.lr, self.log_event)
        self.last_read_step = self.state.step
        self.pending_copy = self.evaluator.metrics = None
        self.stability_monitor = make_stability_monitor(self.setup)

    def compile(self) -> None:
        """Compiles the step before the first image is loaded."""
        setup, config = self.setup, self.setup.config
        self.screen.note("compiling the model; --no-compile trains without")
        with self.ledger.phase("compile"):
            batch = make_worst_case_batch(
                config.run.batch_size // config.optim.grad_accum_steps,
                image_size=config.data.image_size,
                max_boxes=setup.max_boxes,
                num_classes=len(setup.index.class_names),
                device=setup.device,
            )
            autocast = setup.device.autocast(config.run.precision)
            try:
                compile_forward_backward(setup.model, self.loss_fn, setup.optimizer, batch, autocast)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 (compilers raise anything; the run can do without)
                self.log_event("warning", f"compiling failed, training without: {describe_error(error)}")
                self.loss_fn = make_loss_fn(setup.model, compile=False)

    def step(self) -> None:
        """One optimizer step: load a batch, augment, forward, losses, backward, update of the weights."""
        setup, state, config = self.setup, self.state, self.setup.config
        start_s = time.perf_counter()
        with self.ledger.phase("input_wait"):
            batch = next(setup.loader)
            self.ledger.split_input_wait(setup.loader.last_wait)
        with self.ledger.compute(is_redo=state.step < state.redo_until):
            if self.pending_copy is not None:  # a snapshot is being copied: the weights may change only after it
                self.pending_copy.block_main_stream()
                self.pending_copy = None
            batch = augment_batch(batch, config.data, self.progress())
            self.lr = lr_at(config.optim, state.step, self.progress()) / ROLLBACK_LR_DIVISOR**state.rollback_count
            setup.optimizer.set_scalars(self.lr, state.step)
            self.train_batch(batch)
        state.step += 1
        state.trained_s += time.perf_counter() - start_s

    def train_eagerly(self, batch: Batch) -> None:
        """Forward, losses, backward, update of the weights, sums of the losses."""
        setup, config = self.setup, self.setup.config
        autocast = setup.device.autocast(config.run.precision)
        micro_batches = config.optim.grad_accum_steps
        train_step(self.loss_fn, setup.optimizer, setup.loss_accumulator, batch, micro_batches, autocast)

    def report_failed_capture(self, error: Exception) -> None:
        """Clears what the capture left; the training goes on without a CUDA graph."""
        self.setup.optimizer.zero_grad()
        self.log_event("warning", f"capturing a CUDA graph failed, training without: {describe_error(error)}")

    def progress(self) -> float:
        """Fraction of the length that is done, 0 … 1."""
        if self.setup.total_steps is not None:
            return self.state.step / self.setup.total_steps
        return self.state.trained_s / (60 * self.max_duration.value)

    def is_out_of_patience(self) -> bool:
        """Whether the last `patience` evaluations in a row had no better AP."""
        return 0 < self.setup.config.run.patience <= self.state.evals_since_best

    def read_stats(self, *, wait: bool = False) -> None:
        """Writes the line of a window once a second, with the losses of steps whose copy has arrived.

        wait: waits for the device and writes the line now.
        """
        state, accumulator = self.state, self.setup.loss_accumulator
        if self.pending_stats is None:
            if not wait and time.perf_counter() - self.window_start_s < WINDOW_S:
                return
            self.window_start_s = time.perf_counter()
            tensors, ready = self.stream.to_host(accumulator.take())
            self.pending_stats = (tensors, ready, state.step - self.last_read_step)
            self.last_read_step = state.step
        tensors, ready, steps = self.pending_stats
        if not wait and not ready.done():
            return
        ready.synchronize()
        self.pending_stats = None
        stats = accumulator.read(tensors, steps)
        self.write_window(self.ledger.window(0.0), stats, steps)
        if stats.diverged_step is not None:
            state.diverged_step = stats.diverged_step

    def flush_stats(self) -> None:
        """Writes the lines of all steps so far. Waits for the device, so only called where the loop waits anyway."""
        while self.pending_stats is not None or self.state.step > self.last_read_step:
            self.read_stats(wait=True)

    def finish_stats(self) -> None:
        """Writes the last lines: all steps, and what the device did after them."""
        self.flush_stats()
        self.setup.device.synchronize()
        self.write_window(self.ledger.finish(), NO_STATS, 0)

    def write_window(self, breakdown: TimeBreakdown | None, stats: StepStats, steps: int) -> None:
        """Writes a line of steps.jsonl, and the same to the screen and TensorBoard."""
        setup = self.setup
        if breakdown is None or breakdown.wall_s <= 0:
            return
        window = StepWindow(
            t=time.time(),
            attempt=setup.folder.attempt,
            step=self.last_read_step,
            window_steps=steps,
            num_images=steps * setup.config.run.batch_size,
            wall_s=breakdown.wall_s,
            devices=1,
            phases=breakdown.phases,
            input_wait_stages=breakdown.input_wait_stages,
            losses=stats.losses,
            lr=self.lr if steps else None,
            grad_norm=stats.grad_norm,
            skipped_steps=stats.skipped_steps,
            memory_peak_bytes=setup.device.memory().peak,
            host_bound_steps=breakdown.host_bound_steps,
            thread_cpu_s=breakdown.thread_cpu_s,
        )
        setup.folder.append(STEPS, window)
        self.board.add_window(window)
        self.input_probe.observe(window)
        if steps:
            self.show_progress(window)
            for alert in self.stability_monitor.update(window, self.progress()):
                self.log_event(alert.kind, alert.text, **alert.data)

    def show_progress(self, window: StepWindow) -> None:
        fraction_done, memory = self.progress(), self.setup.device.memory()
        remaining_s = self.state.trained_s * (1 - fraction_done) / fraction_done if 0 < fraction_done < 1 else None
        self.screen.progress(
            window,
            fraction_done=min(1.0, fraction_done),
            total_steps=self.setup.total_steps,
            eta_s=remaining_s,
            memory=(memory.peak, memory.total),
        )

    def save_checkpoint(self, pending_eval: PendingEvaluation | None = None) -> None:
        """Starts saving a checkpoint, unless this step has one; the files are written in the background.

        pending_eval: an evaluation without metrics, which the continued run computes first.
        """
        writer = self.setup.writer
        self.collect_eval()
        with self.ledger.phase("checkpoint"):
            writer.wait()
            if writer.saved_step == self.state.step:
                return
            pending_state = None if pending_eval is None else pending_eval.to_state()
            snapshot = self.snapshot(collect_state(self.setup) | {"pending_eval": pending_state}, ap=None)
            writer.save(snapshot)
        self.pending_copy = snapshot.ready
        self.checkpoint_trigger.reset()

    def snapshot(self, state: dict[str, Any], *, ap: float | None) -> checkpoint.HostSnapshot:
        """The EMA weights with their metadata, and a state to continue from (empty for a file of weights alone)."""
        step = self.state.step
        metadata = msgspec.structs.replace(self.setup.metadata, step=step, ap=ap).header()
        weights = self.setup.optimizer.ema_model.state_dict()
        return checkpoint.snapshot(
            self.stream, step=step, metadata=metadata, weights=weights, state=state, arenas=self.arenas
        )

    def evaluate(self, *, wait: bool = False) -> None:
        """Runs the EMA weights on the validation split and starts computing the metrics in the background.

        Waits for the metrics if `wait`, if they could end the run (`patience`), or if the host lacks the memory.
        """
        state = self.state
        self.collect_eval()
        with self.ledger.phase("eval"):
            detections = self.evaluator.run_inference(self.handle_pending_signals)
        with self.ledger.phase("checkpoint"):
            ema_weights = self.snapshot({}, ap=None)
        self.pending_copy = ema_weights.ready
        self.evaluator.start(PendingEvaluation(state.step, detections, ema_weights))
        state.evaluated_step = state.step
        self.eval_trigger.reset()
        # The evaluation has waited for the device, so the model may read its warning from it.
        if not self.training_warning_logged and (warning := self.setup.model.training_warning()) is not None:
            self.log_event("warning", warning)
            self.training_warning_logged = True
        could_end_run = 0 < self.setup.config.run.patience <= state.evals_since_best + 1
        if wait or could_end_run or not self.evaluator.has_memory(detections):
            self.collect_eval()
        self.write_window(self.ledger.window(0.0), NO_STATS, 0)

    def collect_eval(self) -> None:
        """Applies the metrics of the last evaluation, before anything else than steps. A signal saves at once."""
        self.tracer.abandon()
        with self.ledger.phase("eval"):
            self.evaluator.collect(self.handle_pending_signals)

    def evaluate_final(self) -> Metrics:
        """Evaluates the final weights, unless the run just did (`patience`), and saves them."""
        if self.evaluator.metrics is None or self.state.evaluated_step != self.state.step:
            self.evaluate(wait=True)
        metrics = self.evaluator.metrics
        assert metrics is not None
        with self.ledger.phase("checkpoint"):
            snapshot = self.snapshot({}, ap=metrics.ap)
            self.setup.writer.save_weights(snapshot, [FINAL])
        return metrics

    def handle_pending_signals(self) -> None:
        """After a stop signal saves and ends the training; after SIGUSR2 traces the next steps."""
        if self.stop_request.trace_requested:
            self.stop_request.trace_requested = False
            self.tracer.request()
        if self.stop_request.requested_by:
            self.preempt()

    def preempt(self) -> None:
        """Saves and ends with exit code 75; without saving if another process has taken over the run."""
        if self.stop_request.error is not None:
            raise self.stop_request.error
        self.log_event("info", f"{self.stop_request.requested_by}: saving")
        self.save_checkpoint(self.evaluator.cancel())
        with self.ledger.phase("checkpoint"):
            self.setup.writer.wait()
        self.finish_stats()
        raise make_stop_error(self.setup, self.stop_request)

    def close(self) -> None:
        """Stops background work, however the training ended; an uncollected evaluation is in no checkpoint."""
        self.evaluator.cancel()
        self.tracer.close()
        self.setup.writer.wait()
        unlogged_steps, self.last_read_step = self.state.step - self.last_read_step, self.state.step
        if unlogged_steps:  # after an error: the time of these steps is known, their losses are not
            with contextlib.suppress(RuntimeError):  # a lost device must not hide the error that ended the run
                self.write_window(self.ledger.window(0.0), NO_STATS, unlogged_steps)


def describe_error(error: Exception) -> str:
    """Type and first lines of an error, in one line; those of compilers have pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join([f"{type(error).__name__}:", *lines[:2]])
