"""Evaluates at intervals, and decides what follows: which weights are the best, and whether training goes on.

The metrics are computed in the background (`async_eval.py`). They are taken into account at fixed points of the stream:
before the next evaluation, a checkpoint or a rollback, at the end, and at once if they could end the run (`patience`).
If need be, the training waits for them there. So nothing that a run decides depends on how long the metrics take.

A signal does not wait: an evaluation without metrics goes into the checkpoint with its detections and weights, and the
continued run computes its metrics first.
"""

from typing import Any

from stoker.config.durations import parse_duration
from stoker.evaluation.metrics import Detections, Metrics
from stoker.training.async_eval import AsyncEvaluator, PendingEvaluation
from stoker.training.attempt import Attempt
from stoker.training.out_of_memory import retry_in_smaller_batches
from stoker.training.recorder import Recorder
from stoker.training.resume import Resumed
from stoker.training.snapshots import Snapshots
from stoker.training.stopper import Stopper
from stoker.training.triggers import IntervalTrigger


class Evaluator:
    """The evaluations of a training."""

    def __init__(self, attempt: Attempt, recorder: Recorder, snapshots: Snapshots, stopper: Stopper) -> None:
        setup, run = attempt.setup, attempt.setup.config.run
        self._attempt, self._setup, self._parallel, self._ledger = attempt, setup, attempt.parallel, attempt.ledger
        self._recorder, self._snapshots, self._stopper = recorder, snapshots, stopper
        self.trigger = IntervalTrigger(
            parse_duration(run.eval_every, "eval-every"), len(setup.train_indices), run.batch_size
        )
        self.scorer = AsyncEvaluator(attempt, recorder)
        self.best_ap, self.evals_since_best, self.evaluated_step = -1.0, 0, -1
        self._pending: PendingEvaluation | None = None
        """The last evaluation, if its metrics were not known when the state was saved."""
        self._metrics: Metrics | None = None
        """Of the newest evaluation of this attempt whose metrics are known."""
        self._is_warning_logged = False

    def state(self) -> dict[str, Any]:
        """Its part of a checkpoint."""
        return {
            "best_ap": self.best_ap,
            "evals_since_best": self.evals_since_best,
            "evaluated_step": self.evaluated_step,
            "pending_eval": None if self._pending is None else self._pending.to_state(),
        }

    def resume(self, resumed: Resumed) -> None:
        saved = resumed.saved
        self.best_ap, self.evals_since_best, self.evaluated_step = resumed.best_ap, 0, -1
        self._pending = self._metrics = None
        if saved is None:
            return
        self.best_ap, self.evaluated_step = max(resumed.best_ap, saved["best_ap"]), saved["evaluated_step"]
        if resumed.is_after_rollback:  # patience counts again, and the evaluation that was pending has its metrics
            return
        self.evals_since_best = saved["evals_since_best"]
        if saved["pending_eval"] is not None and not resumed.is_changed:
            self._pending = PendingEvaluation.from_state(saved["pending_eval"])

    @property
    def is_out_of_patience(self) -> bool:
        """Whether the last `patience` evaluations in a row had no better AP."""
        return 0 < self._setup.config.run.patience <= self.evals_since_best

    def before_steps(self) -> None:
        """Before the first step, and after a rollback: scores the evaluation left pending at preemption; runs one that
        was due at the step of the checkpoint."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self.scorer.start(pending, self.best_ap)
        self.collect()
        self._share_patience()
        if self.evaluated_step != self._setup.state.step:
            self.after_step()

    def after_step(self) -> None:
        """Evaluates if it is due, unless the training ends here or has diverged."""
        state = self._setup.state
        is_due = self._parallel.agreed.evaluate or self.trigger.is_due_at(state.step)
        if not is_due or self._setup.progress >= 1:
            return
        self._recorder.flush()  # also so that an evaluation has windows of its own
        if state.diverged_step is None:
            self.evaluate()

    def evaluate(self, *, wait: bool = False) -> None:
        """Runs the EMA weights on the validation split and starts computing the metrics in the background.

        Waits for the metrics if `wait`, if they could end the run (`patience`), or if the host lacks the memory.
        """
        setup, parallel, step = self._setup, self._parallel, self._setup.state.step
        self.collect()
        if self._metrics is None:
            self._attempt.hang_detector.allow_silence(2)  # the first batch chooses kernels, as the first step does
        with self._ledger.phase("eval"):
            parallel.equalize()
            parts = setup.ranks.gather(self._detect())
        self.trigger.reset()
        parallel.after_evaluation()
        with self._ledger.phase("checkpoint"):
            ema_weights = self._snapshots.take({}, ap=None)
        self.evaluated_step = step
        if parts is None or ema_weights is None:  # rank 0 has those of all, and computes the metrics
            self._attempt.hang_detector.allow_silence()  # it may have to wait for those of the evaluation before
        else:
            detections = parts[0] if len(parts) == 1 else Detections.concatenate(parts)
            self.scorer.start(PendingEvaluation(step, detections, ema_weights), self.best_ap)
            self._log_training_warning()
            could_end_run = 0 < setup.config.run.patience <= self.evals_since_best + 1
            if wait or could_end_run or not self.scorer.has_memory(detections):
                self.collect()
        self._share_patience()
        self._recorder.end_window()

    def evaluate_final(self) -> Metrics:
        """The metrics of the final weights, which are evaluated unless that was just done (`patience`)."""
        ranks = self._setup.ranks
        self._attempt.hang_detector.allow_silence()  # other ranks wait while rank 0 computes and writes
        if ranks.share(lambda: self._metrics is None or self.evaluated_step != self._setup.state.step):
            self.evaluate(wait=True)
        metrics: Metrics | None = ranks.share_value(self._metrics)
        assert metrics is not None
        return metrics

    def collect(self) -> None:
        """Takes the metrics of the last evaluation into account, before anything else than steps. May raise
        `Stopping` while it waits."""
        self._attempt.tracer.abandon()
        with self._ledger.phase("eval"):
            metrics = self.scorer.collect(self._stopper.check)
        if metrics is None:
            return
        self._metrics, ap = metrics, metrics.ap or 0.0
        if ap > self.best_ap:
            self.best_ap, self.evals_since_best = ap, 0
        elif self.best_ap > 0:  # until the first AP above 0, training has only just begun
            self.evals_since_best += 1

    def _share_patience(self) -> None:
        """Rank 0 alone knows the metrics. It has collected them if they could end the run."""
        if self._setup.config.run.patience:
            self.evals_since_best = self._setup.ranks.share_value(self.evals_since_best)

    def cancel(self) -> None:
        """Nothing of a running evaluation is written any longer; the next checkpoint has it."""
        self._pending = self.scorer.cancel()

    def _detect(self) -> Detections:
        setup = self._setup

        def run_inference() -> Detections:
            with self._parallel.whole_weights(setup.optimizer.ema_model):
                return self.scorer.run_inference(self._stopper.check_in_evaluation)

        detections = retry_in_smaller_batches(self._attempt, "evaluation", run_inference)
        self._stopper.check_in_evaluation(is_last=True)
        return detections

    def _log_training_warning(self) -> None:
        """The evaluation has waited for the device, so the model may read its warning from it."""
        if not self._is_warning_logged and (warning := self._setup.model.training_warning()) is not None:
            self._attempt.log_event("warning", warning)
            self._is_warning_logged = True
