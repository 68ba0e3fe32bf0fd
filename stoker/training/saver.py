"""Saves checkpoints: at intervals, before a stop, and at the end; and the final weights.

Where the user set no interval, a save may cost MAX_COST of the time: a large model on a slow disk is saved less often
than every two minutes.
"""

import statistics
import time
from collections import deque
from collections.abc import Sequence

from stoker.config.durations import parse_duration
from stoker.errors import CaptureFailed, Preempted, StokerError, StorageError
from stoker.evaluation.metrics import Metrics
from stoker.runs.records import FINAL
from stoker.training.evaluator import Evaluator
from stoker.training.parallel import Attempt
from stoker.training.resume import Part, collect_state
from stoker.training.state import IntervalTrigger
from stoker.training.step import describe_error

MAX_COST = 0.01
"""Fraction of the time that saves may cost where the user set no interval."""
WRITE_FACTOR = 2.0
"""The interval is then at least so many times as long as a write in the background."""
MAX_INTERVAL_S = 1800.0
MIN_CHANGE = 1.2
KEPT_SAVES = 5
"""The medians of so many saves count, so that a disk that hangs once changes nothing for long."""
GRACE_FRACTION = 0.5
"""Of the notice of a machine that goes, for the write; the rest is for the end of a step, and for an upload."""


class Saver:
    """The checkpoints of a training. parts: whose state they have."""

    def __init__(
        self,
        attempt: Attempt,
        parts: Sequence[Part],
        evaluator: Evaluator,
        *,
        is_interval_fixed: bool,
        grace_s: float | None,
    ) -> None:
        """is_interval_fixed: the user set it. grace_s: the shortest notice before the machine goes; None: unknown."""
        setup, run = attempt.setup, attempt.setup.config.run
        self._setup, self._parallel, self._ledger = setup, attempt.parallel, attempt.ledger
        self._log_event, self._parts = attempt.log_event, parts
        self._evaluator = evaluator
        self._is_interval_fixed, self._grace_s = is_interval_fixed, grace_s
        self._is_warned = False
        self._costs: deque[tuple[float, float]] = deque(maxlen=KEPT_SAVES)
        self.trigger = IntervalTrigger(
            parse_duration(run.checkpoint_every, "checkpoint-every"), len(setup.train_indices), run.batch_size
        )
        self._shortest_s = self.trigger.interval_s

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
            if parallel.has_saved(writer.saved_step == setup.state.step):
                return
            parallel.equalize()
            snapshot = parallel.take_snapshot(collect_state(setup, self._parts), ap=None)
            if snapshot is not None:
                writer.save(snapshot)
        parallel.after_save()
        if writer.write_s is not None:  # of the save before
            cost_s = time.perf_counter() - start_s + (writer.write_cpu_s if setup.device.is_cpu else 0.0)
            self._follow_cost(cost_s, writer.write_s)
        self.trigger.reset()

    def _follow_cost(self, cost_s: float, write_s: float) -> None:
        """cost_s: seconds that training lost by a save; write_s: of the write in the background."""
        if not self._is_warned and self._grace_s is not None and write_s > GRACE_FRACTION * self._grace_s:
            self._is_warned = True
            text = f"a checkpoint takes {write_s:.3g} s to write; the machine gives {self._grace_s:.0f} s of notice"
            self._log_event("warning", f"{text}: a preemption may lose the steps since the last checkpoint")
        self._costs.append((cost_s, write_s))
        cost_s, write_s = map(statistics.median, zip(*self._costs, strict=True))
        before_s = self.trigger.interval_s
        interval_s = max(self._shortest_s, min(MAX_INTERVAL_S, max(cost_s / MAX_COST, WRITE_FACTOR * write_s)))
        if not self._is_interval_fixed and not before_s / MIN_CHANGE <= interval_s <= MIN_CHANGE * before_s:
            self.trigger.interval_s = interval_s
            self._log_event(
                "info",
                f"checkpoint-every: {before_s:.0f} s → {interval_s:.0f} s: a save costs {cost_s:.2g} s of training and "
                f"is written in {write_s:.2g} s",
            )

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
