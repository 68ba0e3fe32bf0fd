"""Scores evaluations beside training: the device finds the boxes, then a thread says how good they are.

The training thread runs the averaged weights over the validation split, copies them to the host and goes on with its
steps. A thread of this module scores, writes evaluation.json and best.safetensors where this is the best so far, and
tells the run's events, the screen and TensorBoard. What it found out becomes part of the run's state when the training
thread takes it in, at fixed points of the stream: before the next evaluation, a checkpoint or a way back, at the end,
and at once where the score could end the run (`patience`). The thread is waited for there, if need be. So nothing that
a run decides depends on how long scoring takes.

A signal does not wait: what is not scored then goes into the checkpoint as it is, boxes and weights, and the run that
continues scores it first.
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
from stoker.report.tensorboard import Board
from stoker.report.terminal import Screen
from stoker.runs.records import BEST, EVALUATION
from stoker.training import checkpoint
from stoker.training.start import EventLogger, TrainState, make_validation_loader

BASE_BYTES, BYTES_PER_DETECTION = 2**25, 400
"""Host memory at the peak of scoring. Measured: 232 bytes a detection with 7 true boxes a picture, 372 with 60; some
10 MB for curves and what lies in blocks."""
SIGNAL_POLL_S = 0.1
"""How late a signal may be seen while a score is waited for."""


@dataclasses.dataclass(frozen=True)
class PendingEvaluation:
    """What an evaluation has found, while nobody knows how good that is."""

    step: int
    detections: Detections
    weights: checkpoint.HostSnapshot
    """The averaged weights that found it; their card is not written yet."""

    def to_state(self) -> dict[str, Any]:
        """A part of a checkpoint's state. Waits for the copy of the weights."""
        self.weights.ready.synchronize()
        columns = {field.name: getattr(self.detections, field.name) for field in dataclasses.fields(Detections)}
        detections = {name: torch.from_numpy(column) for name, column in columns.items()}
        return {"step": self.step, "found": detections, "weights": self.weights.weights}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        detections = Detections(**{name: column.numpy() for name, column in state["found"].items()})
        return cls(
            state["step"],
            detections,
            checkpoint.HostSnapshot(state["step"], {}, state["weights"], {}, ReadyEvent(None)),
        )


def run_inference(state: TrainState, poll: Callable[[], None]) -> Detections:
    """What the averaged weights find in the validation split. meanwhile: called between batches; it may raise."""

    def poll_between_batches(loader: Loader) -> Iterator[Batch]:
        for batch in loader:
            poll()
            yield batch

    with contextlib.closing(make_validation_loader(state)) as loader:
        detections = detect(
            state.optimizer.ema_model, poll_between_batches(loader), state.device, precision=state.config.run.precision
        )
        state.eval_workers = loader.stats().workers
    return detections


class _EvalTask:
    """An evaluation that is being scored."""

    def __init__(self, pending: PendingEvaluation) -> None:
        self.pending = pending
        self.publishing = threading.Lock()
        """Held while files and lines of it are written, and by who gives it up."""
        self.is_canceled = False
        self.metrics: Metrics | None = None
        """When all of it is written."""
        self.error: BaseException | None = None
        self.done = threading.Event()


class AsyncEvaluator:
    """Scores one evaluation at a time. Called by the training thread only."""

    def __init__(self, state: TrainState, screen: Screen, board: Board, log_event: EventLogger) -> None:
        self._state, self._screen, self._board, self._log_event = state, screen, board, log_event
        self._memory_note_logged = False
        self._ground_truth = ground_truth(state.index, state.val_indices)
        self._task: _EvalTask | None = None
        self.metrics: Metrics | None = None
        """Of the newest evaluation of this attempt that was taken in."""

    def start(self, pending: PendingEvaluation) -> None:
        """Begins; what was begun before has been taken in."""
        assert self._task is None
        task = self._task = _EvalTask(pending)
        # Ends with the process, should that not wait for it: what it has not written by then is not missed.
        threading.Thread(target=self._run, args=(task,), name="stoker-scorer", daemon=True).start()

    def resume(self) -> None:
        """Begins with what a signal had not waited for, if the job's state has such."""
        if self._state.pending_eval is not None:
            self.start(PendingEvaluation.from_state(self._state.pending_eval))
            self._state.pending_eval = None

    def has_memory(self, detections: Detections) -> bool:
        """Whether the host's memory allows scoring beside training. Says so, once, where it does not."""
        limit_bytes, used_bytes = host_memory()
        needed_bytes, free_bytes = BASE_BYTES + BYTES_PER_DETECTION * len(detections), limit_bytes - used_bytes
        if needed_bytes > free_bytes and not self._memory_note_logged:
            self._log_event("info", "training waits for the score of each evaluation: that takes "
                      f"{needed_bytes / 2**20:,.0f} MiB of host memory, {free_bytes / 2**20:,.0f} MiB are free")  # fmt: skip
            self._memory_note_logged = True
        return needed_bytes <= free_bytes

    def collect(self, poll: Callable[[], None]) -> None:
        """Waits for the score, if one is under way, and makes it a part of the job's state. Raises what it raised.

        meanwhile: called while it waits; it may give the score up.
        """
        task = self._task
        if task is None:
            return
        while not task.done.wait(SIGNAL_POLL_S):
            poll()
        self._task = None
        if task.error is not None:
            raise task.error
        assert task.metrics is not None
        self.metrics, state = task.metrics, self._state
        ap = task.metrics.ap or 0.0
        if ap > state.best_ap:
            state.best_ap, state.evals_since_best = ap, 0
        elif state.best_ap > 0:  # before the first hit a training is at its beginning, not at a standstill
            state.evals_since_best += 1

    def cancel(self) -> PendingEvaluation | None:
        """What is not scored yet, of which nothing will be written any more; None: nothing, or there is a score."""
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
        except BaseException as error:  # noqa: BLE001  # carried to the training thread by `take_in`
            task.error = error
        task.done.set()

    def _compute_metrics(self, task: _EvalTask) -> None:
        state, step, detections = self._state, task.pending.step, task.pending.detections
        result = compute_coco_result(self._ground_truth, detections)
        metrics = result.metrics
        is_best = (metrics.ap or 0.0) > state.best_ap
        evaluation = (
            build_evaluation(result, self._ground_truth, detections, state.index, step=step) if is_best else None
        )
        images = sample_images(state.index, state.val_indices, detections)
        with task.publishing:
            if task.is_canceled:
                return
            if evaluation is not None:
                state.folder.replace(EVALUATION, evaluation)
                metadata = msgspec.structs.replace(state.metadata, step=step, ap=metrics.ap)
                state.writer.save_weights(dataclasses.replace(task.pending.weights, metadata=metadata.header()), [BEST])
            state.folder.event("evaluated", step=step, metrics=msgspec.to_builtins(metrics))
            self._screen.evaluated(step, metrics)
            self._board.add_metrics(step, metrics)
            self._board.add_images(step, images, state.index.class_names)
            task.metrics = metrics
