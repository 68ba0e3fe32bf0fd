"""Saves checkpoints: at intervals, before a stop, and at the end; and the final weights. What they contain is in
`resume.py`, how they are written in `checkpoint.py`.
"""

from collections.abc import Sequence

from stoker.config.durations import parse_duration
from stoker.errors import Preempted, StokerError, StorageError
from stoker.evaluation.metrics import Metrics
from stoker.runs.records import FINAL
from stoker.training.evaluator import Evaluator
from stoker.training.parallel import Attempt
from stoker.training.resume import Part, collect_state
from stoker.training.state import IntervalTrigger

GRACE_FRACTION = 0.5
"""Of the notice of a machine that goes, for the write; the rest is for the end of a step, and for an upload."""


class Saver:
    """The checkpoints of a training. parts: whose state they have."""

    def __init__(self, attempt: Attempt, parts: Sequence[Part], evaluator: Evaluator, *, grace_s: float | None) -> None:
        """grace_s: the shortest notice before the machine goes; None: unknown."""
        setup, run = attempt.setup, attempt.setup.config.run
        self._setup, self._parallel, self._ledger = setup, attempt.parallel, attempt.ledger
        self._log_event, self._parts = attempt.log_event, parts
        self._evaluator, self._grace_s = evaluator, grace_s
        self._is_warned = False
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
        with self._ledger.phase("checkpoint"):
            writer.wait()
            if parallel.has_saved(writer.saved_step == setup.state.step):
                return
            parallel.equalize()
            snapshot = parallel.take_snapshot(collect_state(setup, self._parts), ap=None)
            if snapshot is not None:
                writer.save(snapshot)
        parallel.after_save()
        self._warn_of_short_notice(writer.longest_write_s)
        self.trigger.reset()

    def _warn_of_short_notice(self, write_s: float) -> None:
        """Says once that a checkpoint may not be written in the time that the machine's notice gives."""
        if not self._is_warned and self._grace_s is not None and write_s > GRACE_FRACTION * self._grace_s:
            self._is_warned = True
            text = f"a checkpoint takes {write_s:.3g} s to write; the machine gives {self._grace_s:.0f} s of notice"
            self._log_event("warning", f"{text}: a preemption may lose the steps since the last checkpoint")

    def save_final(self, metrics: Metrics) -> None:
        """Writes the final weights."""
        with self._ledger.phase("checkpoint"):
            snapshot = self._parallel.take_snapshot({}, ap=metrics.ap)
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
