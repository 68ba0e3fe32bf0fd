"""Computes the metrics of evaluations in the background: the device runs the model, then a thread scores the
detections.

The training thread runs the EMA weights on the validation split, copies them to the host and continues with its steps.
A thread of this module computes the metrics, writes evaluation.json and best.safetensors if this is the best so far,
and reports to the run's events, the screen and TensorBoard. When the training takes the metrics into account, and what
follows from them, is in `evaluator.py`.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

import msgspec
import torch

from stoker.data.batch import Batch
from stoker.data.loading.loader import Loader
from stoker.evaluation.evaluate import build_evaluation, compute_coco_result, detect, ground_truth, sample_images
from stoker.evaluation.metrics import Detections, Metrics
from stoker.hardware.cgroup import host_memory
from stoker.hardware.device import ReadyEvent
from stoker.runs.records import BEST, EVALUATION
from stoker.training import checkpoint
from stoker.training.attempt import Attempt
from stoker.training.recorder import Recorder
from stoker.training.start import make_validation_loader

BASE_BYTES, BYTES_PER_DETECTION = 2**25, 400
"""Host memory at the peak of computing metrics. Measured: 232 bytes per detection with 7 ground truth boxes per image,
372 with 60; plus some 10 MB for curves and temporary blocks."""
SIGNAL_POLL_S = 0.1
"""Longest delay until a signal is handled while metrics are awaited."""


@dataclasses.dataclass(frozen=True)
class PendingEvaluation:
    """The detections of an evaluation whose metrics are not known yet."""

    step: int
    detections: Detections
    weights: checkpoint.HostSnapshot
    """The EMA weights that made them; their metadata is not written yet."""

    def to_state(self) -> dict[str, Any]:
        """A part of a checkpoint's state. Waits for the copy of the weights."""
        self.weights.ready.synchronize()
        columns = {field.name: getattr(self.detections, field.name) for field in dataclasses.fields(Detections)}
        detections = {name: torch.from_numpy(column) for name, column in columns.items()}
        return {"step": self.step, "detections": detections, "weights": self.weights.weights}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        detections = Detections(**{name: column.numpy() for name, column in state["detections"].items()})
        weights = checkpoint.HostSnapshot(state["step"], {}, state["weights"], {}, ReadyEvent(None))
        return cls(state["step"], detections, weights)


class _EvalTask:
    """An evaluation whose metrics are being computed."""

    def __init__(self, pending: PendingEvaluation, best_ap: float) -> None:
        self.pending, self.best_ap = pending, best_ap
        self.publishing = threading.Lock()
        """Held while its results are written, and while it is canceled."""
        self.is_canceled = False
        self.metrics: Metrics | None = None
        """Set when all results are written."""
        self.error: BaseException | None = None
        self.done = threading.Event()


class AsyncEvaluator:
    """Runs one evaluation at a time. Called by the training thread only."""

    def __init__(self, attempt: Attempt, recorder: Recorder) -> None:
        setup = attempt.setup
        self._setup, self._log_event, self._recorder = setup, attempt.log_event, recorder
        self._memory_note_logged = False
        self._ground_truth = ground_truth(setup.index, setup.val_indices)
        self._num_workers = 0
        """Loader threads at the end of the last evaluation."""
        self._task: _EvalTask | None = None

    def run_inference(self, poll: Callable[[], None]) -> Detections:
        """Detections of the EMA weights on the validation split. poll: called between batches; it may raise."""
        setup = self._setup

        def poll_between_batches(loader: Loader) -> Iterator[Batch]:
            for batch in loader:
                poll()
                yield batch

        initial_workers = max(self._num_workers, setup.loader.stats().workers)
        with contextlib.closing(make_validation_loader(setup, initial_workers=initial_workers)) as loader:
            batches, precision = poll_between_batches(loader), setup.config.run.precision
            detections = detect(setup.optimizer.ema_model, batches, setup.device, precision=precision)
            self._num_workers = loader.stats().workers
        return detections

    def start(self, pending: PendingEvaluation, best_ap: float) -> None:
        """Starts computing metrics; the task before has been collected. best_ap: of the evaluations before."""
        assert self._task is None
        task = self._task = _EvalTask(pending, best_ap)
        # A daemon: if the process ends without waiting for it, its unwritten results are not needed.
        threading.Thread(target=self._run, args=(task,), name="stoker-scorer", daemon=True).start()

    def has_memory(self, detections: Detections) -> bool:
        """Whether the host's memory allows computing metrics while training. Logs a note once if not."""
        limit_bytes, used_bytes = host_memory()
        needed_bytes, free_bytes = BASE_BYTES + BYTES_PER_DETECTION * len(detections), limit_bytes - used_bytes
        if needed_bytes > free_bytes and not self._memory_note_logged:
            self._log_event(
                "info",
                "training waits for the metrics of each evaluation: they take "
                f"{needed_bytes / 2**20:,.0f} MiB of host memory, {free_bytes / 2**20:,.0f} MiB are free",
            )
            self._memory_note_logged = True
        return needed_bytes <= free_bytes

    def collect(self, poll: Callable[[], None]) -> Metrics | None:
        """Waits for the metrics of the running task and returns them; None without a task. Raises the task's error.

        poll: called while it waits; it may raise.
        """
        task = self._task
        if task is None:
            return None
        while not task.done.wait(SIGNAL_POLL_S):
            poll()
        self._task = None
        if task.error is not None:
            raise task.error
        return task.metrics

    def cancel(self) -> PendingEvaluation | None:
        """Cancels the running task and returns its evaluation; None if there is none or its metrics are published.

        Nothing of a canceled task is written afterwards.
        """
        task = self._task
        if task is None:
            return None
        with task.publishing:
            task.is_canceled = task.metrics is None
        if not task.is_canceled:
            task.done.wait()
            return None
        self._task = None
        return task.pending

    def _run(self, task: _EvalTask) -> None:
        try:
            self._compute_metrics(task)
        except BaseException as error:  # noqa: BLE001  # carried to the training thread by `collect`
            task.error = error
        task.done.set()

    def _compute_metrics(self, task: _EvalTask) -> None:
        setup, step, detections = self._setup, task.pending.step, task.pending.detections
        result = compute_coco_result(self._ground_truth, detections)
        metrics = result.metrics
        is_best = (metrics.ap or 0.0) > task.best_ap
        evaluation = (
            build_evaluation(result, self._ground_truth, detections, setup.index, step=step) if is_best else None
        )
        images = sample_images(setup.index, setup.val_indices, detections)
        with task.publishing:
            if task.is_canceled:
                return
            if evaluation is not None:
                setup.folder.replace(EVALUATION, evaluation)
                metadata = msgspec.structs.replace(setup.metadata, step=step, ap=metrics.ap)
                setup.writer.save_weights(dataclasses.replace(task.pending.weights, metadata=metadata.header()), [BEST])
            setup.folder.event("evaluated", step=step, metrics=msgspec.to_builtins(metrics))
            self._recorder.add_evaluation(step, metrics, images)
            task.metrics = metrics
