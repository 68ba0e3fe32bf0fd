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
from stoker.evaluation.evaluate import appraise, detect, ground_truth, score_with_matches, some_pictures
from stoker.evaluation.metrics import Detections, Metrics
from stoker.hardware.cgroup import host_memory
from stoker.hardware.device import Ready
from stoker.report.tensorboard import Board
from stoker.report.terminal import Screen
from stoker.runs.records import BEST, EVALUATION
from stoker.training import checkpoint
from stoker.training.start import Job, Say, validation_loader

BASE_BYTES, BYTES_A_DETECTION = 2**25, 400
"""Host memory at the peak of scoring. Measured: 232 bytes a detection with 7 true boxes a picture, 372 with 60; some
10 MB for curves and what lies in blocks."""
HEED_S = 0.1
"""How late a signal may be seen while a score is waited for."""


@dataclasses.dataclass(frozen=True)
class Unscored:
    """What an evaluation has found, while nobody knows how good that is."""

    step: int
    found: Detections
    weights: checkpoint.Snapshot
    """The averaged weights that found it; their card is not written yet."""

    def as_state(self) -> dict[str, Any]:
        """A part of a checkpoint's state. Waits for the copy of the weights."""
        self.weights.ready.wait()
        columns = {field.name: getattr(self.found, field.name) for field in dataclasses.fields(Detections)}
        found = {name: torch.from_numpy(column) for name, column in columns.items()}
        return {"step": self.step, "found": found, "weights": self.weights.weights}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        found = Detections(**{name: column.numpy() for name, column in state["found"].items()})
        return cls(state["step"], found, checkpoint.Snapshot(state["step"], {}, state["weights"], {}, Ready(None)))


def find_boxes(job: Job, meanwhile: Callable[[], None]) -> Detections:
    """What the averaged weights find in the validation split. meanwhile: called between batches; it may raise."""

    def pictures(batches: Loader) -> Iterator[Batch]:
        for batch in batches:
            meanwhile()
            yield batch

    with contextlib.closing(validation_loader(job)) as batches:
        found = detect(job.stepper.averaged, pictures(batches), job.device, precision=job.config.run.precision)
        job.evaluation_threads = batches.stats().threads
    return found


class _Work:
    """An evaluation that is being scored."""

    def __init__(self, unscored: Unscored) -> None:
        self.unscored = unscored
        self.publishing = threading.Lock()
        """Held while files and lines of it are written, and by who gives it up."""
        self.given_up = False
        self.metrics: Metrics | None = None
        """When all of it is written."""
        self.error: BaseException | None = None
        self.done = threading.Event()


class Scorer:
    """Scores one evaluation at a time. Called by the training thread only."""

    def __init__(self, job: Job, screen: Screen, board: Board, say: Say) -> None:
        self._job, self._screen, self._board, self._say = job, screen, board, say
        self._said = False
        self._truth = ground_truth(job.index, job.val_rows)
        self._work: _Work | None = None
        self.metrics: Metrics | None = None
        """Of the newest evaluation of this attempt that was taken in."""

    def start(self, unscored: Unscored) -> None:
        """Begins; what was begun before has been taken in."""
        assert self._work is None
        work = self._work = _Work(unscored)
        # Ends with the process, should that not wait for it: what it has not written by then is not missed.
        threading.Thread(target=self._run, args=(work,), name="stoker-scorer", daemon=True).start()

    def go_on(self) -> None:
        """Begins with what a signal had not waited for, if the job's state has such."""
        if self._job.unscored is not None:
            self.start(Unscored.from_state(self._job.unscored))
            self._job.unscored = None

    def has_room(self, found: Detections) -> bool:
        """Whether the host's memory allows scoring beside training. Says so, once, where it does not."""
        limit, used = host_memory()
        needed, free = BASE_BYTES + BYTES_A_DETECTION * len(found), limit - used
        if needed > free and not self._said:
            self._say("note", "training waits for the score of each evaluation: that takes "
                      f"{needed / 2**20:,.0f} MiB of host memory, {free / 2**20:,.0f} MiB are free")  # fmt: skip
            self._said = True
        return needed <= free

    def take_in(self, meanwhile: Callable[[], None]) -> None:
        """Waits for the score, if one is under way, and makes it a part of the job's state. Raises what it raised.

        meanwhile: called while it waits; it may give the score up.
        """
        work = self._work
        if work is None:
            return
        while not work.done.wait(HEED_S):
            meanwhile()
        self._work = None
        if work.error is not None:
            raise work.error
        assert work.metrics is not None
        self.metrics, job = work.metrics, self._job
        ap = work.metrics.ap or 0.0
        if ap > job.best_ap:
            job.best_ap, job.stale = ap, 0
        elif job.best_ap > 0:  # before the first hit a training is at its beginning, not at a standstill
            job.stale += 1

    def give_up(self) -> Unscored | None:
        """What is not scored yet, of which nothing will be written any more; None: nothing, or there is a score."""
        work = self._work
        if work is None:
            return None
        with work.publishing:
            work.given_up = work.metrics is None
        if not work.given_up:
            work.done.wait()
            return None
        self._work = None
        return work.unscored

    def _run(self, work: _Work) -> None:
        try:
            self._score(work)
        except BaseException as error:  # noqa: BLE001  # carried to the training thread by `take_in`
            work.error = error
        work.done.set()

    def _score(self, work: _Work) -> None:
        job, step, found = self._job, work.unscored.step, work.unscored.found
        scored = score_with_matches(self._truth, found)
        metrics = scored.metrics
        is_best = (metrics.ap or 0.0) > job.best_ap
        evaluation = appraise(scored, self._truth, found, job.index, step=step) if is_best else None
        pictures = some_pictures(job.index, job.val_rows, found)
        with work.publishing:
            if work.given_up:
                return
            if evaluation is not None:
                job.folder.replace(EVALUATION, evaluation)
                card = msgspec.structs.replace(job.card, step=step, ap=metrics.ap)
                job.writer.save_weights(dataclasses.replace(work.unscored.weights, card=card.header()), [BEST])
            job.folder.event("evaluated", step=step, metrics=msgspec.to_builtins(metrics))
            self._screen.evaluated(step, metrics)
            self._board.metrics(step, metrics)
            self._board.pictures(step, pictures, job.index.class_names)
            work.metrics = metrics
