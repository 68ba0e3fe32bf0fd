"""Saves checkpoints: at intervals, before a stop, and at the end; and the final weights."""

import time
from collections.abc import Sequence

from stoker.config.durations import parse_duration
from stoker.errors import CaptureFailed, Preempted, StokerError, StorageError
from stoker.evaluation.metrics import Metrics
from stoker.runs.records import FINAL
from stoker.training.attempt import Attempt
from stoker.training.cuda_graph import describe_error
from stoker.training.evaluator import Evaluator
from stoker.training.resume import Part, collect_state
from stoker.training.save_interval import SaveTimes
from stoker.training.snapshots import Snapshots
from stoker.training.triggers import IntervalTrigger


class Saver:
    """The checkpoints of a training. parts: whose state they have."""

    def __init__(
        self,
        attempt: Attempt,
        parts: Sequence[Part],
        snapshots: Snapshots,
        evaluator: Evaluator,
        save_times: SaveTimes,
    ) -> None:
        setup, run = attempt.setup, attempt.setup.config.run
        self._setup, self._parallel, self._ledger = setup, attempt.parallel, attempt.ledger
        self._log_event, self._parts = attempt.log_event, parts
        self._snapshots, self._evaluator, self._save_times = snapshots, evaluator, save_times
        self.trigger = IntervalTrigger(
            parse_duration(run.checkpoint_every, "checkpoint-every"), len(setup.train_indices), run.batch_size
        )

    def after_step(self) -> None:
        """Saves if it is due."""
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
            if parallel.savers.share_value(writer.saved_step == setup.state.step):
                return
            parallel.equalize()
            snapshot = self._snapshots.take(collect_state(setup, self._parts), ap=None)
            if snapshot is not None:
                writer.save(snapshot)
        parallel.after_save()
        if writer.write_s is not None:  # of the save before
            cost_s = time.perf_counter() - start_s + (writer.write_cpu_s if setup.device.is_cpu else 0.0)
            for kind, text in self._save_times.update(cost_s, writer.write_s):
                self._log_event(kind, text)
            if self._save_times.interval_s is not None:
                self.trigger.set_seconds(self._save_times.interval_s)
        self.trigger.reset()

    def save_before_restart(self, error: CaptureFailed) -> None:
        """Saves the state after the last step, for an attempt that does not try what failed in the next one."""
        setup, loader = self._setup, self._setup.loader
        self._log_event("cuda_graph_failed", f"{error.what} {error.cause}; training restarts without a graph")
        try:
            # The step that failed has not run, so its batch comes again.
            position = loader.state_dict()["position"] - setup.config.run.batch_size
            loader.load_state_dict(loader.state_dict() | {"position": position})
            self.save()
            with self._ledger.phase("checkpoint"):
                setup.writer.wait()
        except RuntimeError as save_error:  # of the device; the next attempt continues from the checkpoint before
            self._log_event("checkpoint_failed", f"the state could not be saved: {describe_error(save_error)}")

    def save_final(self, metrics: Metrics) -> None:
        """Writes the final weights."""
        with self._ledger.phase("checkpoint"):
            snapshot = self._snapshots.take({}, ap=metrics.ap)
            if snapshot is not None:
                self._setup.writer.save_weights(snapshot, [FINAL])

    def raise_failure(self) -> None:
        """Raises StorageError if the final weights could not be written."""
        failure, run = self._setup.writer.failure, self._setup.folder.path
        if failure is not None:
            raise StorageError(
                "The final weights could not be saved.",
                location=run,
                cause=failure,
                fix=f"make room; then `stoker train --resume {run}` finishes the run",
            )

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
                fix="make room; the same command continues from the checkpoint before",
            )
        return Preempted(
            f"Stopped by {requested_by} at step {step:,}; everything is saved.",
            location=run,
            fix=f"the same command, or `stoker train --resume {run}`, continues",
        )
