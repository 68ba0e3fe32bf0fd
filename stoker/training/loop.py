"""The one training loop, top to bottom: a step, then what is due after it.

No step waits for the device: losses and norms are summed there (`LossAccumulator`) and read when their copy has
arrived. The training thread sets the phase of the ledger; steps.jsonl gets a line per second. What a step computes is
in `forward.py` and `optim.py`, how a run starts in `start.py`, signals and rollbacks in `recovery.py`. Errors end the
run with the exit codes of `errors.py`; after a signal the loop saves and exits with code 75.
"""

import contextlib
import dataclasses
import functools
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import torch
from torch import Tensor

from stoker.config.durations import parse_duration
from stoker.config.settings import Config, settings_table
from stoker.config.sync_method import parse_sync
from stoker.data.augment.device import augment_batch, makes_mosaics
from stoker.data.batch import Batch
from stoker.errors import CaptureFailed, DataError, Preempted, StokerError, StorageError
from stoker.evaluation.metrics import Detections, Metrics
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
from stoker.training.cluster import find_place
from stoker.training.cuda_graph import CudaCapture, CudaGraphStep, describe_error, has_failed
from stoker.training.defaults.dry_run import make_worst_case_batch
from stoker.training.forward import compile_forward_backward, make_loss_fn, train_step
from stoker.training.host_memory import HostMemoryGuard
from stoker.training.input_probe import PrefetchedInputProbe
from stoker.training.notices import NoticeWatcher, time_limit_s
from stoker.training.optim import NO_STATS, StepStats, lr_at
from stoker.training.out_of_memory import Activity, OutOfMemory, shrink_batches, try_memory
from stoker.training.rank_records import RankRecords, open_folder
from stoker.training.ranks import Ranks, joined
from stoker.training.recovery import (
    ROLLBACK_LR_DIVISOR,
    StopRequest,
    make_stability_monitor,
    make_stop_error,
    roll_back,
    stop_on_signals,
)
from stoker.training.save_interval import SaveTimes, mean_time_between_failures_s
from stoker.training.state import EventLogger, TrainSetup, collect_state, share_state
from stoker.training.step_times import log_measured_steps
from stoker.training.triggers import Due, IntervalTrigger
from stoker.training.vertex import VertexFolders, copying_results, vertex_folders
from stoker.training.watchdog import HangDetector, Watchdog, min_limit_s

if TYPE_CHECKING:
    from stoker.training.replica import Agreement, Replica

WINDOW_S = 1.0
"""Seconds of a line of steps.jsonl."""

NO_BATCH = Batch(*[torch.empty(0)] * len(Batch._fields))
"""What a stage of the model gets that is not the first (`pipeline.py`)."""
Attempted = TypeVar("Attempted")


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
    exit_when_hung: bool = False,
) -> Result:
    """Trains until the requested length is reached.

    run_dir: folder or URI of the run; resume: an unfinished run to continue, with its own settings;
    accept_changed_data: continue a run also if its data set changed; started_s: the moment of `time.perf_counter` from
    which the ledger counts, default now; trace: keep Chrome traces of some steps; monitor: alerts and metrics while it
    runs; log_format: json writes JSON lines to stdout and text to stderr; exit_when_hung: end the process with code 7
    if the training hangs, instead of only recording it.
    Raises StokerError; `Preempted` after a signal, when everything is saved.
    """
    started_s = time.perf_counter() if started_s is None else min(started_s, time.perf_counter())
    monitor.validate()
    place = find_place()
    vertex = vertex_folders()
    if run_dir is None and resume is None:
        run_dir = vertex.checkpoints
    with (
        joined(place) as ranks,
        stop_on_signals() as stop_request,
        contextlib.ExitStack() as stack,
    ):
        screen = stack.enter_context(make_screen(ranks, log_format, stack))
        remote: bucket_run.BucketRun | None = None

        def choose_run() -> tuple[Path | None, Config, list[str]]:
            nonlocal remote, run_dir, resume
            given = run_selection.with_absolute_paths(user_config)
            remote = bucket_run.join_bucket_run(
                run_dir, resume, given, stop_request=stop_request, stack=stack, note=screen.note
            )
            if remote is not None:
                run_dir, resume = (str(remote.local_dir), None) if resume is None else (None, str(remote.local_dir))
            return run_selection.choose_run(given, run_dir, resume, stack)

        path, user_config, messages = ranks.share(choose_run)
        with out_of_memory_as_error("looking for the batch that fits"):
            resolved = start.resolve_run(user_config, path, ranks)
        check_stop(stop_request, ranks)
        folder = open_folder(
            ranks,
            lambda: run_selection.open_run_folder(
                resolved.config, resolved.reasons, path, run_dir, stack, messages, ranks.world_size
            ),
        )
        if remote is not None:
            messages += remote.messages
            stack.push(remote.finish)
        if ranks.is_main:
            stop = functools.partial(stop_request.request, "an alert")
            stack.callback(run_selection.write_diagnosis, folder, screen.warning)
            stack.enter_context(monitoring(folder, monitor, stop=stop, log=log_format))
        setup: TrainSetup | None = None

        def current_step() -> int | None:
            return None if setup is None else setup.state.step

        def log_event(kind: str, text: str, /, **data: Any) -> None:
            """Prints a line and writes the same line into the run's events."""
            (screen.warning if kind in WARNING_KINDS else screen.note)(text)
            folder.event(kind, text, step=current_step(), **data)

        try:
            with (
                ranks.explaining(),
                out_of_memory_as_error("training"),
                bucket_run.uploading(remote, stop_request, log_event),
                copying_results(folder.path, vertex if ranks.is_main else VertexFolders(), log_event),
            ):
                screen.settings(settings_table(resolved.config, resolved.reasons))
                for line in messages:
                    log_event("info", line)
                processes = start.start_worker_processes(resolved.config, resolved.index, resolved.device, log_event)
                if processes is not None:
                    stack.callback(processes.close)
                setup = start.build(
                    resolved, folder, log_event, processes, accept_changed_data=accept_changed_data, ranks=ranks
                )
                stack.callback(setup.loader.close)
                notices = NoticeWatcher(
                    lambda notice: stop_request.request(notice.reason, grace_s=notice.grace_s), log_event
                )
                stack.callback(notices.stop)
                notices.start()
                check_stop(stop_request, ranks)
                metrics = Training(
                    setup,
                    screen,
                    stop_request,
                    started_s,
                    log_event,
                    trace=trace,
                    exit_when_hung=exit_when_hung,
                    notice_grace_s=notices.grace_s,
                    adapt_checkpoint_interval="checkpoint_every" in resolved.reasons,
                ).run()
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
        *,
        trace: bool = False,
        exit_when_hung: bool = False,
        notice_grace_s: float | None = None,
        adapt_checkpoint_interval: bool = False,
    ) -> None:
        self.setup, self.state = setup, setup.state
        self.screen, self.stop_request, self.log_event = screen, stop_request, log_event
        device, run, num_images = setup.device, setup.config.run, len(setup.train_indices)
        self.ledger = Ledger(device.make_clock(), start_s=started_s, ranges=device.make_nvtx_ranges())
        setup.loader.on_copy_awaited = self.ledger.begin_h2d_wait
        self.tracer = Tracer(device, setup.folder, self.ledger, log_event, chrome=trace)
        self.ranks = setup.ranks
        self.board = Board(
            setup.folder.path if self.ranks.is_main else None,
            purge_step=self.state.step,
            on_error=lambda text: log_event("warning", text),
        )
        self.stream = device.make_stream()
        self.sharding = setup.optimizer.sharding
        self.arenas = (
            checkpoint.reserve_arenas(device, setup.optimizer.ema_model.state_dict(), collect_state(setup))
            if self.sharding is None
            else None
        )
        self.evaluator = AsyncEvaluator(setup, screen, self.board, log_event)
        self.max_duration = parse_duration(run.max_duration)
        self.eval_trigger = IntervalTrigger(parse_duration(run.eval_every, "eval-every"), num_images, run.batch_size)
        self.checkpoint_trigger = IntervalTrigger(
            parse_duration(run.checkpoint_every, "checkpoint-every"), num_images, run.batch_size
        )
        self.loss_fn = make_loss_fn(setup.model, compile=run.compile, cast_together=self.sharding is None)
        self.replica: Replica | None = None
        if setup.is_staged:
            from stoker.training.pipeline import Pipeline  # torch.distributed, which one process does not need

            self.replica = Pipeline(setup)
        elif not self.ranks.alone:
            from stoker.training import replica

            self.replica = replica.Replica(setup, self.loss_fn, parse_sync(run.sync))
        self.saves_together = self.sharding is not None or (self.replica is not None and self.replica.keeps_own_state)
        self.records = RankRecords(setup, log_event)
        self.train_batch = self.make_train_batch()
        self.pending_copy: ReadyEvent | None = None
        self.pending_stats: tuple[list[Tensor], ReadyEvent, int] | None = None
        self.last_read_step = self.state.step
        self.window_start_s = -math.inf  # the first step has a line of its own: the initial loss
        self.lr, self.training_warning_logged = 0.0, False
        self.stability_monitor = make_stability_monitor(setup)
        self.input_probe = PrefetchedInputProbe(setup, self.ledger, log_event)
        self.memory_guard = HostMemoryGuard(setup.loader, log_event)
        self.save_times = SaveTimes(
            60 * parse_duration(run.checkpoint_every).value if adapt_checkpoint_interval else None,
            mean_time_between_failures_s(setup.folder.path),
            grace_s=notice_grace_s,
        )
        limit_s = time_limit_s()
        self.time_limit_at_s = math.inf if limit_s is None else time.perf_counter() + limit_s
        self.hang_detector = HangDetector(math.inf)
        self.on_hang = os._exit if exit_when_hung else None

    def run(self) -> Metrics:
        """Trains until the length is reached, then evaluates and saves. Returns the metrics of the final weights."""
        setup, state = self.setup, self.state
        with (
            TelemetrySampler(setup.folder) if self.ranks.local_rank == 0 else contextlib.nullcontext(),
            contextlib.closing(self.board),
            contextlib.closing(self),
            self.watchdog(),
            contextlib.nullcontext() if self.replica is None else self.replica.timing_waits(self.ledger),
        ):
            if setup.config.run.compile and not setup.is_staged and self.progress() < 1:
                self.retry_in_smaller_batches("training", self.compile)
            elif self.replica is not None:
                self.warm_up(self.replica)
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
            self.hang_detector.allow_silence()
            self.records.finish()
            if setup.writer.failure is not None:
                raise StorageError(
                    "The final weights could not be saved.",
                    location=setup.folder.path,
                    cause=setup.writer.failure,
                    fix=f"make room; then `stoker train --resume {setup.folder.path}` finishes the run",
                )
        if self.ranks.alone:
            log_measured_steps(setup, self.log_event)
        setup.folder.event("finished", f"{state.step:,} steps", step=state.step, metrics=msgspec.to_builtins(metrics))
        return metrics

    def watchdog(self) -> contextlib.AbstractContextManager[object]:
        """What ends the training if it hangs."""
        setup, state = self.setup, self.state
        is_remote = setup.index.remote_object(int(setup.train_indices[0])) is not None
        limit_s = min_limit_s(is_remote=is_remote)
        if limit_s is None:
            return contextlib.nullcontext()
        self.hang_detector = HangDetector(limit_s)
        return Watchdog(
            setup.folder,
            self.hang_detector,
            phase=lambda: self.ledger.thread_phase,
            step=lambda: state.step,
            on_hang=self.on_hang,
            ranks=setup.ranks,
        )

    def run_steps(self) -> None:
        """Steps, and what is due after each, until the length is reached or the training diverged."""
        state = self.state
        self.evaluator.resume()
        self.collect_eval()
        if state.evaluated_step != state.step and self.is_evaluation_due():
            self.evaluate()  # a signal or a kill came between the checkpoint of this step and its evaluation
        while state.diverged_step is None and self.progress() < 1 and not self.is_out_of_patience():
            if self.replica is None:  # a pause of one rank would be a pause of all
                self.input_probe.before_step(self.progress())
            try:
                self.step()
            except CaptureFailed as error:
                self.save_after_failed_capture(error)
                raise
            if self.ranks.is_main:
                self.tracer.after_step(state.step)
            self.read_stats()
            self.handle_pending_signals()
            if self.is_checkpoint_due():
                self.save_checkpoint()
            if self.is_evaluation_due():
                self.evaluate()
        self.flush_stats()

    def is_evaluation_due(self) -> bool:
        """Whether an evaluation is due before the end and no rollback is pending."""
        if self.replica is not None and self.eval_trigger.follows_clock:
            is_due = self.replica.agreed.evaluate
        else:
            is_due = self.eval_trigger.is_due(self.state.step)
        if not is_due or self.progress() >= 1:
            return False
        self.flush_stats()  # also so that an evaluation has windows of its own
        return self.state.diverged_step is None

    def is_checkpoint_due(self) -> bool:
        """Whether one is due. Rank 0 alone decides and saves, unless all ranks have a part of the state."""
        if self.saves_together and self.replica is not None and self.checkpoint_trigger.follows_clock:
            return self.replica.agreed.save
        return self.checkpoint_trigger.is_due(self.state.step)

    def roll_back(self, failed_at: int) -> None:
        """Continues from the last healthy state, at a lower learning rate."""
        self.collect_eval()
        with self.ledger.phase("recovery"):
            self.ranks.share(lambda: roll_back(self.setup, failed_at, self.lr, self.log_event))
            share_state(self.setup)
        if self.replica is not None:
            self.replica.reset()
        self.last_read_step = self.state.step
        self.pending_copy = self.evaluator.metrics = None
        self.stability_monitor = make_stability_monitor(self.setup)

    def compile(self) -> None:
        """Compiles the step before the first image is loaded."""
        setup, config = self.setup, self.setup.config
        self.screen.note("compiling the model; --no-compile trains without")
        with self.ledger.phase("compile"):
            if self.replica is not None:  # all ranks must train the same: a failure ends the run
                self.warm_up(self.replica)
                return
            batch = self.make_worst_case()
            autocast = setup.device.autocast(config.run.precision)
            try:
                compile_forward_backward(setup.model, self.loss_fn, setup.optimizer, batch, autocast)
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:  # noqa: BLE001 (compilers raise anything; the run can do without)
                self.log_event("warning", f"compiling failed, training without: {describe_error(error)}")
                self.loss_fn = make_loss_fn(setup.model, compile=False)

    def make_worst_case(self) -> Batch:
        """A micro-batch of the shapes of training."""
        setup = self.setup
        return make_worst_case_batch(
            setup.rank_batch_size // setup.micro_batches,
            image_size=setup.config.data.image_size,
            max_boxes=setup.max_boxes,
            num_classes=len(setup.index.class_names),
            device=setup.device,
        )

    def warm_up(self, replica: "Replica") -> None:
        """A step of all ranks that changes nothing; see `Replica.warm_up`."""
        replica.warm_up(self.make_worst_case(), self.setup.device.autocast(self.setup.config.run.precision))

    def step(self) -> None:
        """One optimizer step: load a batch, augment, forward, losses, backward, update of the weights."""
        setup, state, config = self.setup, self.state, self.setup.config
        start_s = time.perf_counter()
        with self.ledger.phase("input_wait"):
            batch = next(setup.loader) if setup.loads_images else NO_BATCH
            self.ledger.split_input_wait(setup.loader.last_wait if setup.loads_images else [])
        with self.ledger.compute(is_redo=state.step < state.redo_until):
            if self.pending_copy is not None:  # a snapshot is being copied: the weights may change only after it
                self.pending_copy.block_main_stream()
                self.pending_copy = None
            self.lr = lr_at(config.optim, state.step, self.progress()) / ROLLBACK_LR_DIVISOR**state.rollback_count
            self.retry_in_smaller_batches("training", lambda: self.train_on(batch))
        state.step += 1
        duration_s = time.perf_counter() - start_s
        if self.replica is None:
            state.trained_s += duration_s
        else:
            self.follow(self.replica.agree(duration_s))
        self.hang_detector.report(duration_s)

    def follow(self, agreement: "Agreement") -> None:
        """Takes over what all ranks know after the same step."""
        self.state.trained_s = agreement.trained_s
        if agreement.diverged_step is not None:
            self.state.diverged_step = agreement.diverged_step

    def train_on(self, batch: Batch) -> None:
        """The part of a step that needs the device's memory; repeatable if it fails before the update."""
        self.setup.optimizer.set_scalars(self.lr, self.state.step)
        self.train_batch(batch)

    def augment(self, batch: Batch) -> Batch:
        return augment_batch(batch, self.setup.config.data, self.progress()) if self.setup.loads_images else batch

    def retry_in_smaller_batches(self, activity: Activity, attempt: Callable[[], Attempted]) -> Attempted:
        """The result of `attempt`, repeated with fewer images at a time for as long as memory is exhausted. With
        several ranks the next attempt of the run does so: the others are in the middle of the same step."""
        while isinstance(result := try_memory(attempt), OutOfMemory):
            shrink_batches(self.setup, activity, result.message, self.log_event)
            self.hang_detector.allow_silence()  # new shapes: kernels are chosen or compiled again
            if activity == "training":
                self.train_batch = self.make_train_batch()
        return result

    def make_train_batch(self) -> Callable[[Batch], None]:
        """What augments a batch and trains on it: operator by operator, or with --cuda-graph a graph of them."""
        if self.replica is not None:
            return functools.partial(self.train_on_ranks, self.replica)
        if not self.setup.config.run.cuda_graph or has_failed(self.setup.folder.path):
            return self.train_eagerly
        data = self.setup.config.data
        return CudaGraphStep(self.train_eagerly, CudaCapture(), lambda: makes_mosaics(data, self.progress()))

    def train_eagerly(self, batch: Batch) -> None:
        """Augmentation, forward, losses, backward, update of the weights, sums of the losses."""
        setup, config = self.setup, self.setup.config
        autocast = setup.device.autocast(config.run.precision)
        batch = self.augment(batch)
        train_step(self.loss_fn, setup.optimizer, setup.loss_accumulator, batch, setup.micro_batches, autocast)

    def train_on_ranks(self, replica: "Replica", batch: Batch) -> None:
        """The same on this rank's part of a batch; the gradients are those of the whole batch."""
        setup, step = self.setup, self.state.step
        triggers = (self.eval_trigger, self.checkpoint_trigger)
        replica.train_step(
            self.augment(batch),
            setup.micro_batches,
            setup.device.autocast(setup.config.run.precision),
            stop=self.stop_request.requested_by is not None,
            due=Due(*(trigger.follows_clock and trigger.is_due(step) for trigger in triggers)),
        )

    def save_after_failed_capture(self, error: CaptureFailed) -> None:
        """Saves the state after the last step, for an attempt without a graph. Raises Preempted after a stop signal."""
        setup, loader_state = self.setup, self.setup.loader.state_dict()
        self.log_event("cuda_graph_failed", f"{error.what} {error.cause}; training restarts without a graph")
        batch_start = loader_state["position"] - setup.config.run.batch_size
        try:
            # The step that failed has not run, so its batch comes again.
            setup.loader.load_state_dict(loader_state | {"position": batch_start})
            self.save_checkpoint(self.evaluator.cancel())
        except RuntimeError as save_error:  # of the device; the next attempt continues from the checkpoint before
            self.log_event("checkpoint_failed", f"the state could not be saved: {describe_error(save_error)}")
        setup.writer.wait()
        if self.stop_request.requested_by is not None:
            raise make_stop_error(setup, self.stop_request) from error

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
        if stats.diverged_step is not None and self.replica is None:
            state.diverged_step = stats.diverged_step

    def flush_stats(self) -> None:
        """Writes the lines of all steps so far. Waits for the device, so only called where the loop waits anyway."""
        while self.pending_stats is not None or self.state.step > self.last_read_step:
            self.read_stats(wait=True)
        if self.replica is not None:
            self.follow(self.replica.agree_on_all())

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
            num_images=steps * setup.rank_batch_size if setup.loads_images else 0,
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
        self.records.write()
        if not self.ranks.alone:  # shown is the speed of all
            window = msgspec.structs.replace(window, num_images=steps * setup.config.run.batch_size)
        self.board.add_window(window)
        self.input_probe.observe(window)
        if steps and self.ranks.is_main:
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
        if not self.ranks.is_main and not self.saves_together:
            return
        self.collect_eval()
        start_s = time.perf_counter()
        with self.ledger.phase("checkpoint"):
            writer.wait()
            is_saved = writer.saved_step == self.state.step
            if self.ranks.share_value(is_saved) if self.saves_together else is_saved:
                return
            if self.replica is not None:
                self.replica.equalize()
                if self.sharding is None and not self.ranks.is_main:
                    self.replica.forget_due()
                    return
            pending_state = None if pending_eval is None else pending_eval.to_state()
            snapshot = self.snapshot(collect_state(self.setup) | {"pending_eval": pending_state}, ap=None)
            writer.save(snapshot)
        self.pending_copy = snapshot.ready
        if self.saves_together and self.replica is not None:
            self.replica.forget_due()
        if writer.write_s is not None:  # of the save before
            cost_s = time.perf_counter() - start_s + (writer.write_cpu_s if self.setup.device.is_cpu else 0.0)
            for kind, text in self.save_times.update(cost_s, writer.write_s):
                self.log_event(kind, text)
            if self.save_times.interval_s is not None:
                self.checkpoint_trigger.set_seconds(self.save_times.interval_s)
        self.checkpoint_trigger.reset()

    def snapshot(self, state: dict[str, Any], *, ap: float | None) -> checkpoint.HostSnapshot:
        """The EMA weights with their metadata, and a state to continue from (empty for a file of weights alone). Of
        divided parameters, all ranks make one together, and that of rank 0 has the whole tensors."""
        step = self.state.step
        metadata = msgspec.structs.replace(self.setup.metadata, step=step, ap=ap).header()
        weights = self.setup.optimizer.ema_model.state_dict()
        if self.sharding is not None:
            weights, state = self.sharding.gather((weights, state))
            return checkpoint.HostSnapshot(step, metadata, weights, state, ReadyEvent(None))
        return checkpoint.snapshot(
            self.stream, step=step, metadata=metadata, weights=weights, state=state, arenas=self.arenas
        )

    def evaluate(self, *, wait: bool = False) -> None:
        """Runs the EMA weights on the validation split and starts computing the metrics in the background.

        Waits for the metrics if `wait`, if they could end the run (`patience`), or if the host lacks the memory.
        """
        state = self.state
        self.collect_eval()
        if self.evaluator.metrics is None:
            self.hang_detector.allow_silence(2)  # the first batch of an evaluation chooses kernels, as the first step
        if self.replica is not None:
            with self.ledger.phase("eval"):
                self.replica.equalize()
        with self.ledger.phase("eval"):
            detections = self.retry_in_smaller_batches(
                "evaluation", lambda: self.evaluator.run_inference(self.poll_in_evaluation)
            )
            if self.ranks.end_vote():  # the one after the last batch
                self.preempt()
            parts = self.ranks.gather(detections)
        self.eval_trigger.reset()
        if self.replica is not None:
            self.replica.forget_due()
        ema_weights: checkpoint.HostSnapshot | None = None
        if parts is not None or self.sharding is not None:
            with self.ledger.phase("checkpoint"):
                ema_weights = self.snapshot({}, ap=None)
        if parts is None or ema_weights is None:  # rank 0 has those of all, and computes the metrics
            state.evaluated_step = state.step
            self.share_patience()
            self.hang_detector.allow_silence()  # rank 0 may wait for the metrics of the evaluation before
            self.write_window(self.ledger.window(0.0), NO_STATS, 0)
            return
        detections = parts[0] if self.ranks.alone else Detections.concatenate(parts)
        self.pending_copy = ema_weights.ready
        self.evaluator.start(PendingEvaluation(state.step, detections, ema_weights))
        state.evaluated_step = state.step
        # The evaluation has waited for the device, so the model may read its warning from it.
        if not self.training_warning_logged and (warning := self.setup.model.training_warning()) is not None:
            self.log_event("warning", warning)
            self.training_warning_logged = True
        could_end_run = 0 < self.setup.config.run.patience <= state.evals_since_best + 1
        if wait or could_end_run or not self.evaluator.has_memory(detections):
            self.collect_eval()
        self.share_patience()
        self.write_window(self.ledger.window(0.0), NO_STATS, 0)

    def share_patience(self) -> None:
        """Only rank 0 knows the metrics. They can end the run only if it has collected them at once."""
        if self.setup.config.run.patience:
            self.state.evals_since_best = self.ranks.share_value(self.state.evals_since_best)

    def poll_in_evaluation(self) -> None:
        """Between two batches of an evaluation: handles signals. Ranks leave it after the same batch."""
        if self.replica is None:
            self.handle_pending_signals()
            return
        self.hang_detector.report()
        if self.ranks.end_vote():
            self.preempt()
        self.ranks.begin_vote(self.stop_request.requested_by is not None)

    def collect_eval(self) -> None:
        """Applies the metrics of the last evaluation, before anything else than steps. A signal saves at once."""
        self.tracer.abandon()
        with self.ledger.phase("eval"):  # ranks stop after the same step, so rank 0 does not stop here
            self.evaluator.collect(self.handle_pending_signals if self.replica is None else self.hang_detector.report)

    def evaluate_final(self) -> Metrics:
        """Evaluates the final weights, unless the run just did (`patience`), and saves them."""
        evaluator, state = self.evaluator, self.state
        self.hang_detector.allow_silence()  # other ranks wait while rank 0 computes and writes
        if self.ranks.share(lambda: evaluator.metrics is None or state.evaluated_step != state.step):
            self.evaluate(wait=True)
        metrics: Metrics | None = self.ranks.share_value(self.evaluator.metrics)
        assert metrics is not None
        with self.ledger.phase("checkpoint"):
            snapshot = self.snapshot({}, ap=metrics.ap)
            self.setup.writer.save_weights(snapshot, [FINAL])
        return metrics

    def handle_pending_signals(self) -> None:
        """After a stop signal saves and ends the training; after SIGUSR2 traces the next steps."""
        self.hang_detector.report()
        self.memory_guard.poll()
        if time.perf_counter() > self.time_limit_at_s - self.save_times.time_limit_margin_s:
            self.stop_request.request("the time limit of the Slurm job", grace_s=self.save_times.time_limit_margin_s)
        if self.stop_request.trace_requested:
            self.stop_request.trace_requested = False
            self.tracer.request()
        must_stop = self.stop_request.requested_by is not None if self.replica is None else self.replica.agreed.stop
        if must_stop:
            self.preempt()

    def preempt(self) -> None:
        """Saves and ends with exit code 75; without saving if another process has taken over the run."""
        if self.stop_request.error is not None:
            raise self.stop_request.error
        self.stop_request.request("a signal to another rank")  # unless this one was asked, too
        grace_s = self.stop_request.grace_s
        notice = ""
        if grace_s is not None:
            longest_s = self.save_times.longest_write_s
            notice = f", in {grace_s:.0f} s; the longest save so far took {longest_s:.2g} s"
        self.log_event("info", f"{self.stop_request.requested_by}: saving{notice}")
        self.save_checkpoint(self.evaluator.cancel())
        with self.ledger.phase("checkpoint"):
            self.setup.writer.wait()
        self.finish_stats()
        self.hang_detector.allow_silence()
        self.records.finish()
        if not self.ranks.is_main:
            raise Preempted(f"Stopped by {self.stop_request.requested_by}; rank 0 has saved the state.")
        raise make_stop_error(self.setup, self.stop_request)

    def close(self) -> None:
        """Stops background work, however the training ended; an uncollected evaluation is in no checkpoint."""
        self.evaluator.cancel()
        self.tracer.close()
        self.setup.writer.wait()
        with contextlib.suppress(RuntimeError, DataError):  # neither a lost store nor the limit of images ended the run
            self.records.write()
        unlogged_steps, self.last_read_step = self.state.step - self.last_read_step, self.state.step
        if unlogged_steps:  # after an error: the time of these steps is known, their losses are not
            with contextlib.suppress(RuntimeError):  # a lost device must not hide the error that ended the run
                self.write_window(self.ledger.window(0.0), NO_STATS, unlogged_steps)


def make_screen(ranks: Ranks, log_format: Literal["text", "json"], stack: contextlib.ExitStack) -> Screen:
    """The terminal; of rank 0 only. stack: closes what the others write to."""
    if not ranks.is_main:
        return Screen(stack.enter_context(Path(os.devnull).open("w")))
    return Screen(sys.stderr if log_format == "json" else None)


def check_stop(stop_request: StopRequest, ranks: Ranks) -> None:
    """Raises Preempted, or the error, if this rank or another was asked to stop. Before the first step."""
    if ranks.any(stop_request.requested_by is not None):
        stop_request.request("a signal to another rank")
        stop_request.check()
