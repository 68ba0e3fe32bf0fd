"""Evaluates at intervals, and decides what follows: which weights are the best, and whether training goes on.

The training thread runs the EMA weights on the validation split, copies the detections to the host and continues with
its steps. Another thread computes the metrics, writes evaluation.json and best.safetensors if this is the best so far,
and reports to the run's events, the screen and TensorBoard.

The metrics are taken into account at fixed points of the stream: before the next evaluation, a checkpoint or a
rollback, at the end, and at once if they could end the run (`patience`), so nothing that a run decides depends on how
long they take. A signal does not wait: an evaluation without metrics goes into the checkpoint with its detections and
weights, and the continued run computes its metrics first.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from stoker.data.batch import Batch
from stoker.data.loading.loader import Loader
from stoker.evaluation.detections import Detections
from stoker.evaluation.error_analysis import build_evaluation
from stoker.evaluation.evaluate import compute_coco_result, detect, ground_truth, sample_images
from stoker.evaluation.thumbnails import make_thumbnails
from stoker.hardware.device import ReadyEvent
from stoker.models.weights.model_file import METADATA_KEY, read_metadata
from stoker.training import checkpoint
from stoker.training.out_of_memory import retry_in_smaller_batches
from stoker.training.parallel import LoopContext
from stoker.training.recorder import Recorder
from stoker.training.resume import Resumed
from stoker.training.start import make_validation_loader
from stoker.training.state import IntervalTrigger
from stoker.training.stopper import Stopper
from stoker_watch.durations import parse_duration
from stoker_watch.errors import WeightsError
from stoker_watch.runs.evaluation import Metrics
from stoker_watch.runs.records import BEST, EVALUATION, THUMBNAILS

MAX_COST = 0.1
"""Fraction of the time that evaluations may take where the user set no interval."""
SIGNAL_POLL_S = 0.1
"""Longest delay until a signal is handled while metrics are awaited."""


@dataclasses.dataclass(frozen=True)
class PendingEvaluation:
    """The detections of an evaluation without metrics yet, and the EMA weights that made them, without metadata."""

    step: int
    detections: Detections
    weights: checkpoint.HostSnapshot

    def to_state(self) -> dict[str, Any]:
        """A part of a checkpoint's state. Waits for the copy of the weights."""
        self.weights.ready.synchronize()
        detections = {name: torch.from_numpy(column) for name, column in vars(self.detections).items()}
        return {"step": self.step, "detections": detections, "weights": self.weights.weights}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        detections = Detections(**{name: column.numpy() for name, column in state["detections"].items()})
        weights = checkpoint.HostSnapshot(state["step"], {}, state["weights"], {}, ReadyEvent(None))
        return cls(state["step"], detections, weights)


class _EvalTask:
    def __init__(self, pending: PendingEvaluation, best_ap: float) -> None:
        self.pending, self.best_ap = pending, best_ap
        self.publishing = threading.Lock()
        """Held while its results are written, and while it is canceled."""
        self.is_canceled = self.is_published = False
        self.metrics: Future[Metrics | None] = Future()


def _read_ap(file: Path) -> float:
    """The AP in the header of a file of weights; −1 if there is none."""
    try:
        with safe_open(file, "pt") as opened:
            header = opened.metadata() or {}
        ap = read_metadata(header[METADATA_KEY], file).ap
    except (OSError, SafetensorError, KeyError, WeightsError):
        return -1.0
    return -1.0 if ap is None else ap


class Evaluator:
    """The evaluations of a training. Called by the training thread only."""

    def __init__(
        self, context: LoopContext, recorder: Recorder, stopper: Stopper, *, adapts_interval: bool = False
    ) -> None:
        """adapts_interval: the user set none; evaluations then take MAX_COST of the time at most."""
        self._adapts_interval = adapts_interval
        setup, run = context.setup, context.setup.config.run
        self._context, self._setup, self._parallel, self._ledger = context, setup, context.parallel, context.ledger
        self._recorder, self._stopper = recorder, stopper
        self.trigger = IntervalTrigger(
            parse_duration(run.eval_every, "eval-every"), len(setup.train_indices), run.batch_size
        )
        self._ground_truth = ground_truth(setup.index, setup.val_indices)
        self._task: _EvalTask | None = None
        self.best_ap, self.evals_since_best, self.evaluated_step = -1.0, 0, -1
        self._written_ap = -1.0
        """AP of best.safetensors, which an earlier attempt may have written after its last checkpoint."""
        self._pending: PendingEvaluation | None = None
        """The last evaluation, if its metrics were not known when the state was saved."""
        self._metrics: Metrics | None = None
        """Metrics of the newest evaluation of this attempt, as far as they are known."""

    def state(self) -> dict[str, Any]:
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
        self._written_ap = -1.0 if resumed.is_changed else _read_ap(self._setup.folder.path / BEST)
        if saved is None:
            return
        if resumed.is_changed:  # scores before and after cannot be compared
            self.best_ap, self.evaluated_step = -1.0, saved["evaluated_step"]
            return
        self.best_ap, self.evaluated_step = max(resumed.best_ap, saved["best_ap"]), saved["evaluated_step"]
        if 0 < self._setup.extension.step == self._setup.state.step:  # evaluated after its last checkpoint
            self.best_ap, self.evaluated_step = max(self.best_ap, self._written_ap), self._setup.state.step
            return
        if resumed.is_after_rollback:  # patience counts again, and the evaluation that was pending has its metrics
            return
        self.evals_since_best = saved["evals_since_best"]
        if saved["pending_eval"] is not None:
            self._pending = PendingEvaluation.from_state(saved["pending_eval"])

    @property
    def is_out_of_patience(self) -> bool:
        """Whether the last `patience` evaluations in a row had no better AP."""
        return 0 < self._setup.config.run.patience <= self.evals_since_best

    def before_steps(self) -> None:
        """Scores the evaluation left pending at preemption; runs one that was due at the step of the checkpoint."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self.start(pending)
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
        """Runs the EMA weights on the validation split and starts computing the metrics in the background. Waits for
        the metrics if `wait`, or if they could end the run (`patience`)."""
        setup, parallel, step = self._setup, self._parallel, self._setup.state.step
        start_s = time.perf_counter()
        self.collect()
        if self._metrics is None:
            self._context.hang_detector.allow_silence(2)  # the first batch chooses kernels, as the first step does
        with self._ledger.phase("eval"):
            parallel.equalize()
            detected = retry_in_smaller_batches(self._context, "evaluation", self.run_inference)
            self._stopper.check_in_evaluation(is_last=True)
            parts = setup.ranks.gather(detected)
        self.trigger.reset()
        if self._adapts_interval and self.trigger.interval_s:
            self.trigger.interval_s = max(self.trigger.interval_s, (time.perf_counter() - start_s) / MAX_COST)
        parallel.after_evaluation()
        with self._ledger.phase("checkpoint"):
            ema_weights = parallel.take_snapshot({}, ap=None)
        self.evaluated_step = step
        if parts is None or ema_weights is None:  # rank 0 has those of all, and computes the metrics
            self._context.hang_detector.allow_silence()  # it may have to wait for those of the evaluation before
        else:
            detections = parts[0] if len(parts) == 1 else Detections.concatenate(parts)
            self.start(PendingEvaluation(step, detections, ema_weights))
            if wait or 0 < setup.config.run.patience <= self.evals_since_best + 1:
                self.collect()
        self._share_patience()
        self._recorder.end_window()

    def evaluate_final(self) -> Metrics:
        """The metrics of the final weights, which are evaluated unless that was just done (`patience`)."""
        ranks = self._setup.ranks
        self._context.hang_detector.allow_silence()  # other ranks wait while rank 0 computes and writes
        if ranks.share(lambda: self._metrics is None or self.evaluated_step != self._setup.state.step):
            self.evaluate(wait=True)
        metrics: Metrics | None = ranks.share_value(self._metrics)
        assert metrics is not None
        return metrics

    def collect(self) -> None:
        """Takes the metrics of the last evaluation into account; raises what ended their computation or `Stopping`."""
        self._context.tracer.abandon()
        task = self._task
        if task is None:
            return
        with self._ledger.phase("eval"):
            while not wait([task.metrics], SIGNAL_POLL_S).done:
                self._stopper.check()
        self._task = None
        metrics = task.metrics.result()
        assert metrics is not None, "it was not canceled"
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
        """Nothing of an evaluation without metrics is written any longer; the next checkpoint has it."""
        task, self._pending = self._task, None
        if task is None:
            return
        with task.publishing:
            task.is_canceled = not task.is_published
        if task.is_canceled:
            self._task, self._pending = None, task.pending
        else:
            wait([task.metrics])

    def start(self, pending: PendingEvaluation) -> None:
        """Starts computing metrics; those of the evaluation before have been collected."""
        assert self._task is None
        task = self._task = _EvalTask(pending, max(self.best_ap, self._written_ap))

        def run() -> None:
            try:
                task.metrics.set_result(self._compute_metrics(task))
            except BaseException as error:  # noqa: BLE001  # carried to the training thread by `collect`
                task.metrics.set_exception(error)

        # A daemon: if the process ends without waiting for it, its unwritten results are not needed.
        threading.Thread(target=run, name="stoker-scorer", daemon=True).start()

    def _compute_metrics(self, task: _EvalTask) -> Metrics | None:
        """Computes, writes and reports the metrics, in a thread. None: it was canceled, and nothing is written."""
        setup, step, detections = self._setup, task.pending.step, task.pending.detections
        result = compute_coco_result(self._ground_truth, detections)
        metrics = result.metrics
        evaluation = None
        if (metrics.ap or 0.0) > task.best_ap:
            evaluation = build_evaluation(result, self._ground_truth, detections, setup.index, step=step)
            thumbnails = make_thumbnails(evaluation, setup.index)
        images = sample_images(setup.index, setup.val_indices, detections)
        with task.publishing:
            if task.is_canceled:
                return None
            if evaluation is not None:
                setup.folder.replace(THUMBNAILS, thumbnails)
                setup.folder.replace(EVALUATION, evaluation)
                changes = {"step": step, "ap": metrics.ap, "threshold": evaluation.threshold}
                metadata = msgspec.structs.replace(setup.metadata, **changes)
                setup.writer.save_weights(dataclasses.replace(task.pending.weights, metadata=metadata.header()), BEST)
            setup.folder.event("evaluated", step=step, metrics=msgspec.to_builtins(metrics))
            self._recorder.add_evaluation(step, metrics, images)
            task.is_published = True
        request = self._stopper.request
        if request.after_evaluation is not None and (reason := request.after_evaluation()) is not None:
            request.request(reason)
        return metrics

    def run_inference(self) -> Detections:
        """Detections of the EMA weights on the validation split, with the present batch size."""
        setup, model = self._setup, self._setup.optimizer.ema_model

        def poll_between_batches(loader: Loader) -> Iterator[Batch]:
            for batch in loader:
                self._stopper.check_in_evaluation()
                yield batch

        with self._parallel.whole_weights(model), contextlib.closing(make_validation_loader(setup)) as loader:
            return detect(model, poll_between_batches(loader), setup.device, precision=setup.config.run.precision)
