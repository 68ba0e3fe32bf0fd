"""The one training loop, top to bottom: a step, then whatever is due after it.

Nothing in a step waits for the device: losses and norms are summed on it (`Meter`) and read once their copy is there.
The ledger is told what the thread does; steps.jsonl gets a line per second. What a step decides is `optim.py`, what is
due at the start is `start.py`. Errors end the run as the exception tree says; a signal saves first and exits with 75.
"""

import contextlib
import dataclasses
import math
import sys
import time
from pathlib import Path
from typing import Any, Literal

import msgspec
from torch import Tensor

from stoker.config.durations import parse_duration
from stoker.config.settings import Config, settings_table
from stoker.data.augment.device import augment_batch
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
from stoker.training.async_eval import AsyncEvaluator, PendingEvaluation, run_inference
from stoker.training.defaults.dry_run import make_worst_case_batch
from stoker.training.forward import compile_forward_backward, forward_backward, make_loss_fn
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
from stoker.training.start import TrainState
from stoker.training.triggers import IntervalTrigger

WINDOW_S = 1.0


@dataclasses.dataclass(frozen=True)
class Result:
    """What a finished training leaves. metrics: of the final weights, on the validation split."""

    run: Path
    steps: int
    metrics: Metrics


def train(
    user_config: Config, *, run_dir: str | None = None, resume: str | None = None, started_s: float | None = None,
    trace: bool = False, monitor: MonitoringOptions = MonitoringOptions(), log_format: Literal["text", "json"] = "text",  # noqa: B008  # frozen
) -> Result:  # fmt: skip
    """Trains until the asked length is reached.

    run: folder of the run (`--run`); resume: an unfinished run to continue, with its own settings; started_s: the
    moment of `time.perf_counter` from which on the ledger counts, default now; trace: keep Chrome traces of some steps;
    monitor: who is told of what, while it lives; log: json writes JSON lines to stdout, what a person reads to stderr.
    Raises StokerError; `Preempted` after a signal, when everything is saved.
    """
    started_s = time.perf_counter() if started_s is None else min(started_s, time.perf_counter())
    monitor.validate()
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
        state: TrainState | None = None

        def log_event(kind: str, text: str, /, **data: Any) -> None:
            """A line for the person and the same line in the run's events."""
            (screen.warning if kind in WARNING_KINDS else screen.note)(text)
            folder.event(kind, text, step=None if state is None else state.step, **data)

        try:
            with out_of_memory_as_error("training"), bucket_run.uploading(remote, stop_request, log_event):
                screen.settings(settings_table(resolved.config, resolved.reasons))
                for line in messages:
                    log_event("info", line)
                state = start.build(resolved, folder, log_event)
                stack.callback(state.loader.close)
                stop_request.check()
                metrics = Training(state, screen, stop_request, started_s, log_event, trace).run()
        except StokerError as error:
            kind = "preempted" if isinstance(error, Preempted) else "failed"
            folder.event(kind, str(error), step=None if state is None else state.step, exit_code=error.exit_code)
            raise
        except BaseException as error:
            folder.event("failed", f"{type(error).__name__}: {error}", step=None if state is None else state.step)
            raise
        return Result(folder.path, state.step, metrics)


class Training:
    """The state of the loop between steps."""

    def __init__(
        self,
        state: TrainState,
        screen: Screen,
        stop_request: StopRequest,
        started_s: float,
        log_event: start.EventLogger,
        trace: bool = False,
    ) -> None:
        self.state, self.screen, self.stop_request, self.log_event = state, screen, stop_request, log_event
        run, optim = state.config.run, state.config.optim
        self.ledger = Ledger(state.device.make_clock(), start_s=started_s, ranges=state.device.make_nvtx_ranges())
        state.loader.on_copy_awaited = self.ledger.begin_h2d_wait
        self.tracer = Tracer(state.device, state.folder, self.ledger, log_event, chrome=trace)
        self.board = Board(state.folder.path, purge_step=state.step, on_error=lambda text: log_event("warning", text))
        self.stream = state.device.make_stream()
        self.evaluator = AsyncEvaluator(state, screen, self.board, log_event)
        self.max_duration = parse_duration(run.max_duration)
        self.eval_trigger = IntervalTrigger(
            parse_duration(run.eval_every, "eval-every"), len(state.train_indices), run.batch_size
        )
        self.checkpoint_trigger = IntervalTrigger(
            parse_duration(run.checkpoint_every, "checkpoint-every"), len(state.train_indices), run.batch_size
        )
        self.micro_batches = optim.grad_accum_steps
        self.loss_fn = make_loss_fn(state.model, eager=not run.compile)
        self.pending_copy: ReadyEvent | None = None
        self.pending_stats: tuple[list[Tensor], ReadyEvent, int] | None = None
        self.last_read_step = state.step
        self.window_start_s = -math.inf  # the first step has a line of its own: where the loss began
        self.lr, self.training_warning_logged = 0.0, False
        self.diverged_step = state.diverged_step
        """Step whose skip made too many in a row; the run goes back then."""
        self.stability_monitor = make_stability_monitor(state)
        self.input_probe = PrefetchedInputProbe(state, self.ledger, log_event)

    def run(self) -> Metrics:
        """Steps until the length is reached, then scores and saves. Returns the final weights' metrics."""
        state = self.state
        with TelemetrySampler(state.folder), contextlib.closing(self.board), contextlib.closing(self):
            if state.config.run.compile and self.progress() < 1:
                self.compile()
            self.write_window(self.ledger.window(0.0), NO_STATS, 0)
            self.run_steps()
            while self.diverged_step is not None:
                self.roll_back(self.diverged_step)
                self.run_steps()
            if self.is_out_of_patience() and self.progress() < 1:
                self.log_event("info", f"stopped at step {state.step:,}: {state.evals_since_best} evaluations without an AP above "
                         f"{state.best_ap:.3f}, whose weights are {BEST}")  # fmt: skip
            self.save_checkpoint()
            metrics = self.evaluate_final()
            with self.ledger.phase("checkpoint"):
                state.writer.wait()
            self.finish_stats()
            if state.writer.failure is not None:
                raise StorageError(
                    "The final weights could not be saved.",
                    location=state.folder.path,
                    cause=state.writer.failure,
                    fix=f"make room; then `stoker train --resume {state.folder.path}` ends the run",
                )
        state.folder.event("finished", f"{state.step:,} steps", step=state.step, metrics=msgspec.to_builtins(metrics))
        return metrics

    def run_steps(self) -> None:
        """Steps, and what is due after each, until the length is reached or too many in a row were skipped."""
        state = self.state
        self.evaluator.resume()
        self.collect_eval()
        if state.evaluated_step != state.step and self.is_evaluation_due():
            self.evaluate()  # what had come between the checkpoint of this step and its evaluation: a signal, a kill
        while self.diverged_step is None and self.progress() < 1 and not self.is_out_of_patience():
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
        """Whether to evaluate now: in the middle of the length, and not on a way that leads back."""
        if not self.eval_trigger.is_due(self.state.step) or self.progress() >= 1:
            return False
        self.flush_stats()  # also so that an evaluation has windows of its own
        return self.diverged_step is None

    def roll_back(self, failed_at: int) -> None:
        """Begins again from the last sound state, at a lower rate."""
        self.collect_eval()
        with self.ledger.phase("recovery"):
            roll_back(self.state, failed_at, self.lr, self.log_event)
        self.last_read_step, self.diverged_step = self.state.step, self.state.diverged_step
        self.pending_copy = self.evaluator.metrics = None
        self.stability_monitor = make_stability_monitor(self.state)

    def compile(self) -> None:
        """Makes the program of the step, before its first picture is loaded."""
        state, run = self.state, self.state.config.run
        self.screen.note("compiling the model; --no-compile does without")
        with self.ledger.phase("compile"):
            batch = make_worst_case_batch(run.batch_size // self.micro_batches, image_size=state.config.data.image_size, max_boxes=state.max_boxes,
                              num_classes=len(state.index.class_names), device=state.device)  # fmt: skip
            compile_forward_backward(
                state.model, self.loss_fn, state.optimizer, batch, state.device.autocast(run.precision)
            )

    def step(self) -> None:
        """One optimizer step: its pictures, forward, losses, backward, the weights' move."""
        state, config = self.state, self.state.config
        start_s = time.perf_counter()
        with self.ledger.phase("input_wait"):
            batch = next(state.loader)
            self.ledger.split_input_wait(state.loader.last_wait)
        with self.ledger.compute(is_redo=state.step < state.redo_until):
            if self.pending_copy is not None:  # a snapshot is being copied: the weights may move only after it
                self.pending_copy.block_main_stream()
                self.pending_copy = None
            batch = augment_batch(batch, config.data, self.progress())
            losses = forward_backward(
                self.loss_fn, state.optimizer, batch, self.micro_batches, state.device.autocast(config.run.precision)
            )
            self.lr = lr_at(config.optim, state.step, self.progress()) / ROLLBACK_LR_DIVISOR**state.rollback_count
            grad_norm, found_inf = state.optimizer.step(self.lr, state.step)
            state.loss_accumulator.add(losses, grad_norm, found_inf, state.step)
        state.step += 1
        state.trained_s += time.perf_counter() - start_s

    def progress(self) -> float:
        """Share of the length that is done, 0 … 1."""
        if self.state.total_steps is not None:
            return self.state.step / self.state.total_steps
        return self.state.trained_s / (60 * self.max_duration.value)

    def is_out_of_patience(self) -> bool:
        """Whether the last `patience` evaluations in a row brought no better AP."""
        return 0 < self.state.config.run.patience <= self.state.evals_since_best

    def read_stats(self, *, wait: bool = False) -> None:
        """Writes a window's line once a second, with the losses of the steps whose copy has arrived; wait: now."""
        state = self.state
        if self.pending_stats is None:
            if not wait and time.perf_counter() - self.window_start_s < WINDOW_S:
                return
            self.window_start_s = time.perf_counter()
            tensors, ready = self.stream.to_host(state.loss_accumulator.take())
            self.pending_stats = (tensors, ready, state.step - self.last_read_step)
            self.last_read_step = state.step
        tensors, ready, steps = self.pending_stats
        if not wait and not ready.done():
            return
        ready.synchronize()
        self.pending_stats = None
        stats = state.loss_accumulator.read(tensors, steps)
        self.write_window(self.ledger.window(0.0), stats, steps)
        if stats.diverged_step is not None:
            self.diverged_step = stats.diverged_step

    def flush_stats(self) -> None:
        """Writes the lines of all steps so far: waits for the device, so only where it is waited for anyway."""
        while self.pending_stats is not None or self.state.step > self.last_read_step:
            self.read_stats(wait=True)

    def finish_stats(self) -> None:
        """The last lines: all steps, and what the device did after them."""
        self.flush_stats()
        self.state.device.synchronize()
        self.write_window(self.ledger.finish(), NO_STATS, 0)

    def write_window(self, breakdown: TimeBreakdown | None, stats: StepStats, steps: int) -> None:
        """A line of steps.jsonl, and the same for the screen and TensorBoard."""
        state = self.state
        if breakdown is None or breakdown.wall_s <= 0:
            return
        window = StepWindow(
            t=time.time(),
            attempt=state.folder.attempt,
            step=self.last_read_step,
            window_steps=steps,
            num_images=steps * state.config.run.batch_size,
            wall_s=breakdown.wall_s,
            devices=1,
            phases=breakdown.phases,
            input_wait_stages=breakdown.input_wait_stages,
            losses=stats.losses,
            lr=self.lr if steps else None,
            grad_norm=stats.grad_norm,
            skipped_steps=stats.skipped_steps,
            memory_peak_bytes=state.device.memory().peak,
            host_bound_steps=breakdown.host_bound_steps,
            thread_cpu_s=breakdown.thread_cpu_s,
        )
        state.folder.append(STEPS, window)
        self.board.add_window(window)
        self.input_probe.observe(window)
        if steps:
            self.show_progress(window)
            for alert in self.stability_monitor.update(window, self.progress()):
                self.log_event(alert.kind, alert.text, **alert.data)

    def show_progress(self, window: StepWindow) -> None:
        fraction_done, memory = self.progress(), self.state.device.memory()
        remaining_s = self.state.trained_s * (1 - fraction_done) / fraction_done if 0 < fraction_done < 1 else None
        self.screen.progress(window, fraction_done=min(1.0, fraction_done), total_steps=self.state.total_steps, eta_s=remaining_s,
                             memory=(memory.peak, memory.total))  # fmt: skip

    def save_checkpoint(self, pending_eval: PendingEvaluation | None = None) -> None:
        """Starts saving a checkpoint, unless this step's is there; the files are written in the background.

        unscored: what the continued run shall score first; else a score that is under way is waited for.
        """
        state = self.state
        self.collect_eval()
        with self.ledger.phase("checkpoint"):
            state.writer.wait()
            if state.writer.saved_step == state.step:
                return
            pending_state = None if pending_eval is None else pending_eval.to_state()
            snapshot = self.snapshot(start.collect_state(state) | {"pending_eval": pending_state}, ap=None)
            state.writer.save(snapshot)
        self.pending_copy = snapshot.ready
        self.checkpoint_trigger.reset()

    def snapshot(self, state: dict[str, Any], *, ap: float | None) -> checkpoint.HostSnapshot:
        """The averaged weights with their card, and a state to continue from (empty for the weights alone)."""
        train_state = self.state
        train_state.metadata.step, train_state.metadata.ap = train_state.step, ap
        weights = train_state.optimizer.ema_model.state_dict()
        return checkpoint.snapshot(
            self.stream, step=train_state.step, metadata=train_state.metadata.header(), weights=weights, state=state
        )

    def evaluate(self, *, wait: bool = False) -> None:
        """Runs the averaged weights over the validation split. How good they are is found out beside training, or at
        once where that is asked for, could end the run, or lacks the memory."""
        state = self.state
        self.collect_eval()
        with self.ledger.phase("eval"):
            detections = run_inference(state, self.handle_pending_signals)
        with self.ledger.phase("checkpoint"):
            ema_weights = self.snapshot({}, ap=None)
        self.pending_copy = ema_weights.ready
        self.evaluator.start(PendingEvaluation(state.step, detections, ema_weights))
        state.evaluated_step = state.step
        self.eval_trigger.reset()
        if (
            not self.training_warning_logged and (warning := state.model.training_warning()) is not None
        ):  # the device has been waited for
            self.log_event("warning", warning)
            self.training_warning_logged = True
        if (
            wait
            or 0 < state.config.run.patience <= state.evals_since_best + 1
            or not self.evaluator.has_memory(detections)
        ):
            self.collect_eval()
        self.write_window(self.ledger.window(0.0), NO_STATS, 0)

    def collect_eval(self) -> None:
        """Before something else than steps: takes in a score that is there; a signal meanwhile saves at once."""
        self.tracer.abandon()
        with self.ledger.phase("eval"):
            self.evaluator.collect(self.handle_pending_signals)

    def evaluate_final(self) -> Metrics:
        """Scores and saves the final weights, if patience has not ended the run after their score."""
        state = self.state
        if self.evaluator.metrics is None or state.evaluated_step != state.step:
            self.evaluate(wait=True)
        metrics = self.evaluator.metrics
        assert metrics is not None
        with self.ledger.phase("checkpoint"):
            snapshot = self.snapshot({}, ap=metrics.ap)
            state.writer.save_weights(snapshot, [FINAL])
        return metrics

    def handle_pending_signals(self) -> None:
        """Where a signal has come, the training is saved and ends; after SIGUSR2 the next steps are traced."""
        if self.stop_request.trace_requested:
            self.stop_request.trace_requested = False
            self.tracer.request()
        if self.stop_request.requested_by:
            self.preempt()

    def preempt(self) -> None:
        """Saves and leaves with exit code 75; without saving where the run is not ours any more."""
        state = self.state
        if self.stop_request.error is not None:
            raise self.stop_request.error
        self.log_event("info", f"{self.stop_request.requested_by}: saving")
        self.save_checkpoint(self.evaluator.cancel())
        with self.ledger.phase("checkpoint"):
            state.writer.wait()
        self.finish_stats()
        raise make_stop_error(state, self.stop_request)

    def close(self) -> None:
        """Ends what goes on beside, whatever ended the training; a score that nobody took in has no checkpoint."""
        self.evaluator.cancel()
        self.tracer.close()
        self.state.writer.wait()
        unlogged_steps, self.last_read_step = self.state.step - self.last_read_step, self.state.step
        if unlogged_steps:  # an error ended it: the time of these steps is known, their losses are not
            with contextlib.suppress(RuntimeError):  # of a device that is gone: it is not to hide the error
                self.write_window(self.ledger.window(0.0), NO_STATS, unlogged_steps)
