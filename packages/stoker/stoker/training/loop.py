"""The training loop, top to bottom: a step, then the services that have something to do after it.

A step loads a batch and trains on it (`step.py`: augmentation, forward, losses, backward, update). `parallel` exchanges
gradients and signals between processes, and does nothing where one process trains. The services own their state and put
it into the checkpoints themselves: `recorder` (records, screen, TensorBoard), `stopper` (signals, notices, time
limits), `saver` (checkpoints), `evaluator` (evaluations, patience), `recovery` (rollbacks). No step waits for its
result. How a run is opened and closed is in `run.py`, how it is built in `start.py`, how it continues in `resume.py`.
"""

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec

from stoker.report.terminal import Screen
from stoker.training.checkpoint import LoadedCheckpoint
from stoker.training.defaults.derive import usual_length
from stoker.training.evaluator import Evaluator
from stoker.training.make_step import Step, make_parallel
from stoker.training.out_of_memory import HostMemoryGuard
from stoker.training.parallel import LoopContext
from stoker.training.recorder import Recorder, log_measured_steps
from stoker.training.resume import Recovery, StateOwner, collect_state, send_to_other_ranks
from stoker.training.state import EventLogger, IntervalTrigger, Signals, TrainSetup
from stoker.training.stopper import Stopper, Stopping, StopRequest
from stoker.training.trace import Tracer
from stoker.training.watchdog import HangDetector, Watchdog, min_limit_s
from stoker_watch.diagnosis.causes.cause import find_note
from stoker_watch.durations import parse_duration
from stoker_watch.errors import CaptureFailed, Preempted, StokerError, StorageError, make_error
from stoker_watch.recording.ledger import Ledger
from stoker_watch.recording.telemetry.sampler import TelemetrySampler
from stoker_watch.runs.evaluation import Metrics
from stoker_watch.runs.records import BEST, FINAL

HARDLY_BEGUN = find_note("hardly_begun").threshold("max_fraction")
"""Fraction of the usual length below which scores say little."""
MAX_COST = 0.01
"""Fraction of the time that saves may cost where the user set no interval."""
WRITE_FACTOR = 2.0
"""The interval is then at least so many times as long as a write in the background."""
MAX_INTERVAL_S = 1800.0
MIN_CHANGE = 1.2
KEPT_SAVES = 5
"""The median of so many saves counts, so that a disk that hangs once changes nothing for long."""


class Training:
    """The loop of one attempt, and its services: `run` goes through it from start to end."""

    def __init__(
        self,
        setup: TrainSetup,
        loaded: LoadedCheckpoint | None,
        screen: Screen,
        stop_request: StopRequest,
        started_s: float,
        log_event: EventLogger,
        *,
        trace: bool = False,
        on_hang: Callable[[int], object] | None = None,
        adapted: frozenset[str] = frozenset(),
        stop_stacks: Callable[[], object] = lambda: None,
    ) -> None:
        """loaded: in rank 0, the checkpoint to continue from; started_s: from when on the ledger counts; trace: keep
        Chrome traces of some steps; on_hang: ends the process with this exit code if the training hangs, None: it is
        only recorded; adapted: settings of intervals that the user did not set; stop_stacks: ends their sampling."""
        self.setup, self.state, self.log_event = setup, setup.state, log_event
        self.on_hang, self.stop_stacks = on_hang, stop_stacks
        self.ledger = Ledger(setup.device.make_clock(), start_s=started_s, ranges=setup.device.make_nvtx_ranges())
        self.tracer = Tracer(setup.device, setup.folder, self.ledger, log_event, chrome=trace)
        self.parallel = make_parallel(setup, log_event)
        limit_s = min_limit_s(is_remote=setup.index.remote_object(int(setup.train_indices[0])) is not None)
        self.hang_detector = HangDetector(limit_s or math.inf)
        self.context = LoopContext(
            setup, self.parallel, self.ledger, self.tracer, self.hang_detector, screen, log_event
        )
        self.train = Step(self.context)
        self.recovery = Recovery(setup, log_event)
        self.recorder = Recorder(self.context, self.recovery)
        self.stopper = Stopper(self.context, stop_request, HostMemoryGuard(setup.loader, log_event))
        self.evaluator = Evaluator(self.context, self.recorder, self.stopper, adapts_interval="eval_every" in adapted)
        self.owners = (self.parallel, self.recovery, self.evaluator)
        self.saver = Saver(self.context, self.owners, self.evaluator, adapts_interval="checkpoint_every" in adapted)
        self.services = (self.recorder, self.stopper, self.saver, self.evaluator)
        setup.loader.on_copy_awaited = self.ledger.begin_h2d_wait
        setup.ranks.share(lambda: self.recovery.restore(self.owners, loaded))
        self.follow_main()

    def run(self) -> Metrics:
        """Trains until the length is reached, then evaluates and saves. Returns the metrics of the final weights.
        Raises StorageError if these could not be written."""
        setup = self.setup
        with (
            TelemetrySampler(setup.folder) if setup.ranks.local_rank == 0 else contextlib.nullcontext(),
            contextlib.closing(self.recorder),
            contextlib.closing(self),
            self.watchdog(),
            self.parallel.timing_waits(self.ledger),
        ):
            metrics = self.train_to_the_end()
            if metrics is None:
                self.save_and_stop()
            self.finish_records()
            if (failure := setup.writer.failure) is not None:
                run = setup.folder.path
                raise make_error(StorageError, "final-weights-not-saved", run, cause=failure, run=run)
        log_measured_steps(setup, self.log_event)
        self.say_if_hardly_begun()
        step = self.state.step
        setup.folder.event(
            "finished",
            f"{step:,} steps",
            step=step,
            metrics=msgspec.to_builtins(metrics),
            trained_s=self.state.trained_s,
            max_duration=setup.config.run.max_duration,
        )
        return metrics

    def say_if_hardly_begun(self) -> None:
        """A line about a training that is much shorter than data of this size usually need."""
        setup, run = self.setup, self.setup.config.run
        usual = usual_length(setup.config.model, len(setup.train_indices), run.batch_size)[1]
        if setup.ranks.is_main and self.state.step < HARDLY_BEGUN * usual:
            text = (
                f"trained for {self.state.step:,} steps of about {usual:,} that such a training takes: its scores say "
            )
            self.log_event("info", f"{text}little yet; `stoker train --resume {setup.folder.path} --epochs N` goes on")

    def train_to_the_end(self) -> Metrics | None:
        """Does all steps, with rollbacks, the last evaluation and the final weights; None if it is asked to stop."""
        state = self.state
        try:
            self.parallel.reserve_snapshots(collect_state(self.setup, self.owners) | {"pending_eval": None})
            self.train.prepare()
            self.setup.ranks.limit_exchanges()
            self.recorder.end_window()
            self.run_steps()
            while state.diverged_step is not None:
                self.roll_back(state.diverged_step)
                self.run_steps()
            self.saver.save()
            metrics = self.evaluator.evaluate_final()
            self.saver.save_final(metrics)
        except Stopping:
            return None
        except CaptureFailed as error:
            self.log_event("cuda_graph_failed", f"{error.what} {error.cause}; later attempts train without a graph")
            if self.stopper.is_asked:
                raise Preempted(f"Stopped by {self.stopper.request.requested_by}.", cause=error.what) from error
            raise  # without a save: the capture may have spoiled the device
        return metrics

    def run_steps(self) -> None:
        """Does steps, and what is due after each, until the length is reached or the training diverged."""
        state = self.state
        self.evaluator.before_steps()
        while state.diverged_step is None and self.setup.progress < 1 and not self.evaluator.is_out_of_patience:
            self.step()
            for service in self.services:
                service.after_step()
        self.recorder.flush()
        if self.evaluator.is_out_of_patience and self.setup.progress < 1 and state.diverged_step is None:
            found = f"{self.evaluator.evals_since_best} evaluations without an AP above {self.evaluator.best_ap:.3f}"
            self.log_event("info", f"stopped at step {state.step:,}: {found}, whose weights are {BEST}")

    def step(self) -> None:
        """Loads a batch, trains on it, agrees on what follows."""
        state, start_s = self.state, time.perf_counter()
        with self.ledger.phase("input_wait"):
            batch = self.parallel.next_batch(self.setup.loader)
            self.ledger.split_input_wait(self.setup.loader.last_wait)
        with self.ledger.compute(is_redo=state.step < state.redo_until):
            self.parallel.wait_for_snapshot()
            state.lr = self.recovery.lr()
            self.train(batch, self.own_signals())
            self.parallel.limit_steps_ahead()
        state.step += 1
        duration_s = time.perf_counter() - start_s
        self.trained_s += duration_s
        state.follow(self.parallel.agree(self.own_signals()))
        self.hang_detector.report(duration_s)

    def own_signals(self) -> Signals:
        """What this process knows: others are told with the next step."""
        return Signals(
            stop=self.stopper.is_asked,
            evaluate=self.evaluator.trigger.is_due_by_clock(),
            save=self.saver.trigger.is_due_by_clock(),
            trained_s=self.trained_s,
        )

    def roll_back(self, failed_at: int) -> None:
        """Continues from the last healthy state, at a lower learning rate."""
        self.evaluator.collect()
        with self.ledger.phase("recovery"):
            self.setup.ranks.share(lambda: self.recovery.roll_back(failed_at, self.evaluator.best_ap, self.owners))
            self.follow_main()

    def follow_main(self) -> None:
        """All ranks continue from the state that rank 0 has restored."""
        send_to_other_ranks(self.setup, self.owners)
        self.trained_s = self.state.trained_s
        self.recorder.begin()

    def save_and_stop(self) -> NoReturn:
        """Saves and ends with exit code 75; without saving if another process has taken over the run."""
        request = self.stopper.request
        if request.error is not None:
            raise request.error
        request.request("a signal to another rank")  # unless this one was asked, too
        notice = "" if request.grace_s is None else f", in {request.grace_s:.0f} s"
        self.log_event("info", f"{request.requested_by}: saving{notice}")
        self.evaluator.cancel()
        self.saver.save()
        self.finish_records()
        raise self.saver.make_stop_error(request.requested_by)

    def finish_records(self) -> None:
        """Waits until all is written that this attempt has to write."""
        with self.ledger.phase("checkpoint"):
            self.setup.writer.wait()
        self.recorder.finish()
        self.stop_stacks()
        self.hang_detector.allow_silence()
        self.recorder.finish_ranks()

    def watchdog(self) -> contextlib.AbstractContextManager[object]:
        if self.hang_detector.limit_s == math.inf:
            return contextlib.nullcontext()
        return Watchdog(
            self.setup.folder,
            self.hang_detector,
            phase=lambda: self.ledger.thread_phase,
            step=lambda: self.state.step,
            on_hang=self.on_hang,
            ranks=self.setup.ranks,
        )

    def close(self) -> None:
        """Stops background work, however the training ended; an uncollected evaluation is in no checkpoint."""
        self.evaluator.cancel()
        self.tracer.close()
        self.setup.writer.wait()


class Saver:
    """The checkpoints of a training. owners: whose state they have; adapts_interval: the user set none."""

    def __init__(
        self, context: LoopContext, owners: Sequence[StateOwner], evaluator: Evaluator, *, adapts_interval: bool
    ) -> None:
        setup, run = context.setup, context.setup.config.run
        self._setup, self._parallel, self._ledger = setup, context.parallel, context.ledger
        self._log_event, self._owners, self._evaluator = context.log_event, owners, evaluator
        self._adapts_interval = adapts_interval
        self._costs: deque[float] = deque(maxlen=KEPT_SAVES)
        self.trigger = IntervalTrigger(
            parse_duration(run.checkpoint_every, "checkpoint-every"), len(setup.train_indices), run.batch_size
        )
        self._shortest_s = self.trigger.interval_s

    def after_step(self) -> None:
        if self._parallel.agreed.save or self.trigger.is_due_at(self._setup.state.step):
            self.save()

    def save(self) -> None:
        """Starts saving a checkpoint, unless this step has one; the files are written in the background."""
        setup, parallel, writer = self._setup, self._parallel, self._setup.writer
        if not parallel.takes_part_in_saves:
            return
        self._evaluator.collect()
        start_s = time.perf_counter()
        with self._ledger.phase("checkpoint"):
            writer.wait()
            if parallel.has_saved(writer.saved_step == setup.state.step):
                return
            parallel.equalize()
            snapshot = parallel.take_snapshot(collect_state(setup, self._owners), ap=None)
            if snapshot is not None:
                writer.save(snapshot)
        parallel.after_save()
        if writer.write_s is not None:  # of the save before
            self._follow_cost(time.perf_counter() - start_s, writer.write_s)
        self.trigger.reset()

    def _follow_cost(self, pause_s: float, write_s: float) -> None:
        """Saves less often on a slow disk. pause_s: that training waited for a save; write_s: in the background."""
        self._costs.append(max(pause_s / MAX_COST, WRITE_FACTOR * write_s))
        before_s = self.trigger.interval_s
        interval_s = max(self._shortest_s, min(MAX_INTERVAL_S, statistics.median(self._costs)))
        if self._adapts_interval and not before_s / MIN_CHANGE <= interval_s <= MIN_CHANGE * before_s:
            self.trigger.interval_s = interval_s
            text = f"checkpoint-every: {before_s:.0f} s → {interval_s:.0f} s"
            self._log_event("info", f"{text}: training waits {pause_s:.2g} s, the write takes {write_s:.2g} s")

    def save_final(self, metrics: Metrics) -> None:
        with self._ledger.phase("checkpoint"):
            snapshot = self._parallel.take_snapshot({}, ap=metrics.ap)
            if snapshot is not None:
                self._setup.writer.save_weights(snapshot, FINAL)

    def make_stop_error(self, requested_by: str | None) -> StokerError:
        """The error of a run that was stopped: Preempted, or StorageError if its state could not be saved."""
        if not self._setup.ranks.is_main:
            return Preempted(f"Stopped by {requested_by}; rank 0 has saved the state.")
        step, run, writer = self._setup.state.step, self._setup.folder.path, self._setup.writer
        if writer.saved_step != step:
            return StorageError(
                f"Stopped by {requested_by} at step {step:,}, and the state could not be saved.",
                location=run,
                cause=writer.failure,
                fix="make room, or the folder writable; the same command continues from the checkpoint before",
            )
        return make_error(Preempted, "stopped-and-saved", run, requested_by=requested_by, step=step, run=run)
