"""From what was asked for to a run that can begin: settings, data, model, loader, and the state to continue from.

A continued run takes every setting from its own config.toml: nothing is derived twice. Which run it is: `runs.py`.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from stoker import models
from stoker.config.durations import parse_duration
from stoker.config.settings import Config, check, from_toml
from stoker.data.images.cache_policy import open_cache
from stoker.data.images.pixel_cache import CachedImageSpec
from stoker.data.index import Index, open_index, require_images
from stoker.data.loading.loader import Loader, QuarantinedImage, compute_max_boxes
from stoker.data.validation.problems import PROBLEM_KINDS
from stoker.errors import CheckpointError, DataError
from stoker.evaluation.evaluate import evaluation_loader, ground_truth, require_boxes
from stoker.hardware.device import Device, configure_malloc, select_device
from stoker.models.table import check_image_size
from stoker.models.weights.load import load_weights
from stoker.models.weights.model_file import ModelMetadata
from stoker.runs.records import (
    BEST,
    CONFIG,
    EVENTS,
    QUARANTINE,
    STEPS,
    RunFolder,
    read_lines,
)
from stoker.runs.schemas import Event, Quarantined, StepWindow
from stoker.training import checkpoint
from stoker.training.defaults.dataset_facts import collect_facts, warn_oversized_boxes
from stoker.training.defaults.derive import derive, total_steps
from stoker.training.optim import LossAccumulator, OptimizerStep

MAX_EXAMPLES = 2
"""Places of each kind of problem that are said at the start; `stoker data check` has all."""


class EventLogger(Protocol):
    """Says a line to the person and writes it into the run's events, with the numbers that belong to it."""

    def __call__(self, kind: str, text: str, /, **data: Any) -> None: ...


@dataclasses.dataclass
class TrainState:
    """A run that is ready to train."""

    folder: RunFolder
    config: Config
    device: Device
    index: Index
    train_indices: NDArray[np.int64]
    """Rows of the training split."""
    val_indices: NDArray[np.int64]
    model: models.Detector
    optimizer: OptimizerStep[models.Detector]
    loss_accumulator: LossAccumulator
    loader: Loader
    quarantine: Callable[[QuarantinedImage], None]
    """Writes down a picture that cannot be used; of evaluation too."""
    writer: checkpoint.CheckpointWriter
    metadata: ModelMetadata
    total_steps: int | None
    """None where the length is given in minutes."""
    max_boxes: int
    """M, box slots of a batch."""
    step: int = 0
    """Optimizer steps that the state contains."""
    trained_s: float = 0.0
    """Wall seconds that the steps of the state took, over all attempts."""
    best_ap: float = -1.0
    evals_since_best: int = 0
    """Evaluations since the best one."""
    evaluated_step: int = -1
    """Step of the last evaluation."""
    eval_workers: int = 0
    """That loaded the pictures at the end of the last evaluation."""
    pending_eval: dict[str, Any] | None = None
    """The last evaluation, where the state was saved before anybody knew its score (`scoring.Unscored`)."""
    redo_until: int = 0
    """Steps up to this one were done before and lost, with an earlier attempt or by going back."""
    rollback_count: int = 0
    """How often the run has gone back to an earlier state and on from there at a lower rate (`recovery.py`)."""
    diverged_step: int | None = None
    """The step whose skip made too many in a row, where the state was saved after it and before anybody read that."""


@dataclasses.dataclass
class ResolvedRun:
    """What a run trains on and with, before it has a folder."""

    config: Config
    reasons: dict[str, str]
    device: Device
    index: Index


def resolve_run(user_config: Config, path: Path | None) -> ResolvedRun:
    """Opens the data and derives the settings, or rereads those of the run `path`. Raises StokerError."""
    stored = None if path is None else from_toml(path / CONFIG)
    requested = user_config if stored is None else stored[0]
    if path is not None and (unknown := models.unset_fields(requested)):
        raise CheckpointError(
            "The run was started by an earlier version of stoker and cannot be continued exactly.",
            location=path / CONFIG,
            cause=f"it does not say {', '.join(unknown)}",
            fix=f"continue with the version that started it, or start a new run with --weights {path / BEST}",
        )
    check(requested)
    check_image_size(requested)
    device = select_device(requested.run.device)
    data = requested.data
    index = open_index(data.data, format=data.format, val_fraction=data.val_fraction, classes=data.classes or ())
    require_images(index, ("train", "val"), max_bad_fraction=requested.data.max_bad_fraction)
    for split in ("train", "val"):
        if split not in index.splits:
            raise DataError(
                f"The data set has no {split} split.",
                location=index.source,
                choices=index.splits,
                fix="name a data set with pictures to train on and to hold back",
            )
    require_boxes(ground_truth(index, index.image_indices("val")))
    config, reasons = derive(user_config, index, device) if stored is None else stored
    return ResolvedRun(config, reasons, device, index)


def build(resolved: ResolvedRun, folder: RunFolder, log_event: EventLogger) -> TrainState:
    """Everything the loop needs, in the state of the newest sound checkpoint, or at step 0 with pretrained weights."""
    config, device, index = resolved.config, resolved.device, resolved.index
    if device.is_cpu:
        configure_malloc()
    device.empty_cache()  # of the trials of batches, whose peak is not that of training either
    device.reset_peak_memory()
    for note in index.notes:
        log_event("info", f"data: {note}")
    for problem in index.problems:
        description = f"{problem.count} × {problem.title}, {PROBLEM_KINDS[problem.kind].effect}"
        examples = ", ".join(problem.examples[:MAX_EXAMPLES]) + (", …" if problem.count > MAX_EXAMPLES else "")
        log_event(
            "info" if PROBLEM_KINDS[problem.kind].action == "kept" else "warning", f"data: {description} ({examples})"
        )
    log_event("info", f"run: {folder.path}" + ("" if folder.attempt == 1 else f", attempt {folder.attempt}"))
    loaded = load_checkpoint(folder.path, log_event)
    if folder.attempt == 1:
        text, facts = collect_facts(config, index)
        folder.event("info", text, facts=facts)
        if (warning := warn_oversized_boxes(config, index)) is not None:
            log_event("warning", warning)
    model = build_initial_model(config, index, device, log_event if loaded is None else None)
    train_indices, val_indices = index.image_indices("train"), index.image_indices("val")
    max_boxes = compute_max_boxes(index, train_indices, mosaic=config.data.mosaic)
    quarantine = _make_quarantine_reporter(folder, log_event)
    loader = make_training_loader(
        config, index, device, max_boxes=max_boxes, log_event=log_event, on_quarantine=quarantine
    )
    state = TrainState(
        folder=folder,
        config=config,
        device=device,
        index=index,
        train_indices=train_indices,
        val_indices=val_indices,
        model=model,
        optimizer=OptimizerStep(model, config.optim, device, precision=config.run.precision),
        loss_accumulator=LossAccumulator(device, max_skipped_steps=config.optim.max_skipped_steps),
        loader=loader,
        quarantine=quarantine,
        writer=checkpoint.CheckpointWriter(folder.path, log_event),
        metadata=ModelMetadata(
            settings=config.model,
            class_names=index.class_names,
            image_size=config.data.image_size,
            resize=config.data.resize,
        ),
        total_steps=total_steps(parse_duration(config.run.max_duration), len(train_indices), config.run.batch_size),
        max_boxes=max_boxes,
    )
    restore_state(state, loaded, log_event)
    return state


def make_training_loader(
    config: Config,
    index: Index,
    device: Device,
    *,
    max_boxes: int,
    log_event: EventLogger,
    on_quarantine: Callable[[QuarantinedImage], None] | None = None,
) -> Loader:
    """The stream of training samples, from its beginning."""
    data, train_indices = config.data, index.image_indices("train")
    form = CachedImageSpec.for_augmentation(
        data.image_size, data.resize, scale_jitter_prob=data.scale_jitter_prob, scale_range=data.scale_range
    )
    return Loader(
        index,
        train_indices,
        device=device,
        batch_size=config.run.batch_size,
        image_size=data.image_size,
        resize=data.resize,
        scale_jitter_prob=data.scale_jitter_prob,
        scale_range=data.scale_range,
        min_object_covered=data.min_object_covered,
        max_boxes=max_boxes,
        seed=config.run.seed,
        workers=config.run.num_workers,
        max_bad_fraction=data.max_bad_fraction,
        on_quarantine=on_quarantine,
        on_tuned=lambda text: log_event("info", text),
        cache=open_cache(config.run.cache, index, train_indices, form, log_event),
        jpeg_decoder=config.run.jpeg_decoder,
    )


def build_initial_model(config: Config, index: Index, device: Device, log_event: EventLogger | None) -> models.Detector:
    """The model with the weights that a run starts from, said by `say`; None: without them, as a state will fill it."""
    torch.manual_seed(config.run.seed)
    model = models.build(config.model, len(index.class_names))
    if log_event is not None:
        for sentence in load_weights(model, config.model, class_names=index.class_names):
            log_event("info", f"weights: {sentence}")
    return model.to(device.torch_device).train()


def load_checkpoint(run: Path, log_event: EventLogger) -> checkpoint.LoadedCheckpoint | None:
    """The newest checkpoint of the way that the run is on: one that it went back behind is not looked at again."""
    if rollbacks := read_rollbacks(run):
        checkpoint.discard_checkpoints(
            run, after=rollbacks[-1].data["rollback_step"], rollback_count=rollbacks[-1].data["count"]
        )
    return checkpoint.load_newest(run, log_event)


def read_rollbacks(run: Path) -> list[Event]:
    """The times that the run went back to go on at a lower rate. What makes it so is this line of its events: a kill
    before it leaves a run that will diverge again, one after it a run that goes on from there."""
    return [event for event in read_lines(run, EVENTS, Event) if event.kind == "rolled_back"]


def _make_quarantine_reporter(folder: RunFolder, log_event: EventLogger) -> Callable[[QuarantinedImage], None]:
    """Says and records each picture once; every evaluation meets the same ones."""
    reported: set[int] = set()

    def report(bad_image: QuarantinedImage) -> None:
        if bad_image.image_index in reported:
            return
        reported.add(bad_image.image_index)
        folder.append(
            QUARANTINE,
            Quarantined(
                t=time.time(),
                attempt=folder.attempt,
                image_index=bad_image.image_index,
                path=bad_image.source,
                error=bad_image.error,
                sample_position=bad_image.sample_position,
                replaced_by=bad_image.replaced_by,
            ),
        )
        log_event("warning", f"picture left out: {bad_image.source}: {bad_image.error}")

    return report


def _known_bad_images(run: Path, from_checkpoint: dict[int, int]) -> dict[int, int]:
    """Row → position of every picture that an attempt quarantined in training, `until` being those of a checkpoint.

    The rest comes from quarantine.jsonl: an attempt that goes over the same stretch again replaces the same pictures,
    also one whose file is readable by now.
    """
    lines = read_lines(run, QUARANTINE, Quarantined)
    return {line.image_index: line.sample_position for line in lines if line.replaced_by >= 0} | from_checkpoint


def dataset_fingerprint(state: TrainState) -> dict[str, Any]:
    """What must be the same for a checkpoint to continue: a part of its state."""
    return {"num_images": len(state.train_indices), "classes": list(state.index.class_names), "max_boxes": state.max_boxes}


def collect_state(state: TrainState) -> dict[str, Any]:
    """What `restore` needs beside the averaged weights: tensors that are still on the device, and plain numbers."""
    return {
        "optimizer_step": state.optimizer.state_dict(),
        "loader": state.loader.state_dict(),
        "trained_s": state.trained_s,
        "best_ap": state.best_ap,
        "evals_since_best": state.evals_since_best,
        "evaluated_step": state.evaluated_step,
        "data": dataset_fingerprint(state),
        "skipped_streak": state.loss_accumulator.skipped_streak(),
        "rollbacks": state.rollback_count,
    }


def restore_state(state: TrainState, loaded: checkpoint.LoadedCheckpoint | None, log_event: EventLogger) -> None:
    """Puts a checkpoint's state into the job, or that of step 0 when there is none. Weights are left alone then."""
    windows = read_lines(state.folder.path, STEPS, StepWindow)
    state.redo_until = max((window.step for window in windows), default=0)
    rollbacks = read_rollbacks(state.folder.path)
    state.rollback_count = max([state.rollback_count, *(event.data["count"] for event in rollbacks)])
    state.loss_accumulator = LossAccumulator(state.device, max_skipped_steps=state.config.optim.max_skipped_steps)
    state.diverged_step = state.pending_eval = None
    # The best weights stay the best, also where training went back behind them.
    best_ap = max([-1.0, *(event.data["best_ap"] for event in rollbacks)])
    if loaded is None:
        if state.folder.attempt > 1 or state.rollback_count:
            log_event("info", "no checkpoint yet: starting from the first step")
        quarantined = _known_bad_images(state.folder.path, {})
        state.loader.load_state_dict(state.loader.state_dict() | {"position": 0, "quarantined": quarantined})
        state.step, state.trained_s, state.best_ap, state.evals_since_best, state.evaluated_step = (
            0,
            0.0,
            best_ap,
            0,
            -1,
        )
        return
    if loaded.state["data"] != dataset_fingerprint(state):
        raise CheckpointError(
            "The data set is not the one that the run was started with.",
            location=state.index.source,
            cause=f"then {_describe_dataset(loaded.state['data'])}, now {_describe_dataset(dataset_fingerprint(state))}",
            fix="start a new run with another --run, or put the data set back",
        )
    state.optimizer.load_state_dict(loaded.state["optimizer_step"], loaded.weights)
    loader_state = loaded.state["loader"]
    state.loader.load_state_dict(
        loader_state | {"quarantined": _known_bad_images(state.folder.path, loader_state["quarantined"])}
    )
    state.diverged_step = state.loss_accumulator.load_skipped_streak(loaded.state["skipped_streak"])
    state.rollback_count = max(state.rollback_count, loaded.state["rollbacks"])
    state.step = loaded.step
    state.trained_s = loaded.state["trained_s"]
    state.best_ap = max(best_ap, loaded.state["best_ap"])
    state.evaluated_step = loaded.state["evaluated_step"]
    if loaded.state["rollbacks"] == state.rollback_count:
        state.evals_since_best, state.pending_eval = loaded.state["evals_since_best"], loaded.state["pending_eval"]
    else:  # gone back to it: patience begins anew at the lower rate, and what was unscored then has its score
        state.evals_since_best = 0
    lost_steps = max(0, state.redo_until - state.step)
    log_event(
        "info",
        f"continuing from step {state.step:,}" + (f"; {lost_steps:,} steps are done again" if lost_steps else ""),
    )


def make_validation_loader(state: TrainState) -> Loader:
    """One pass over the validation split, in batches of the size that training has in memory at once."""
    run, data = state.config.run, state.config.data
    return evaluation_loader(
        state.index,
        state.val_indices,
        state.device,
        batch_size=max(1, run.batch_size // state.config.optim.grad_accum_steps),
        image_size=data.image_size,
        resize=data.resize,
        workers=run.num_workers,
        initial_workers=max(state.eval_workers, state.loader.stats().workers),
        max_bad_fraction=data.max_bad_fraction,
        on_quarantine=state.quarantine,
    )


def _describe_dataset(data: dict[str, Any]) -> str:
    return f"{data['num_images']:,} images, {len(data['classes'])} classes, at most {data['max_boxes']} boxes"
