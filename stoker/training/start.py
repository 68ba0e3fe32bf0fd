"""From the user's settings to a run that can begin: settings, data, model, loader, and the state to continue from.

A continued run takes every setting from its own config.toml: nothing is derived twice. Which run that is, is decided in
`run_selection.py`; what is built is described in `state.py`.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import torch

from stoker import models
from stoker.config.durations import parse_duration
from stoker.config.settings import Config, check, from_run
from stoker.data.images.cache_policy import open_cache
from stoker.data.images.pixel_cache import CachedImageSpec
from stoker.data.index import Index, open_index_of, require_images
from stoker.data.index_digest import digest_images
from stoker.data.loading.loader import Loader, LoaderSpec, QuarantinedImage, compute_max_boxes
from stoker.data.loading.processes import WorkerProcesses, choose_worker_processes
from stoker.data.validation.problems import PROBLEM_KINDS
from stoker.errors import CheckpointError, DataError
from stoker.evaluation.evaluate import evaluation_loader, ground_truth, require_boxes
from stoker.hardware.cgroup import host_cores
from stoker.hardware.device import Device, configure_malloc, select_device
from stoker.models.table import check_image_size
from stoker.models.weights.load import load_weights
from stoker.models.weights.model_file import ModelMetadata
from stoker.runs.records import BEST, CONFIG, QUARANTINE, RunFolder
from stoker.runs.schemas import Quarantined
from stoker.training import checkpoint
from stoker.training.defaults.dataset_facts import collect_facts, warn_oversized_boxes
from stoker.training.defaults.derive import derive, total_steps
from stoker.training.defaults.model_choice import warn_random_weights
from stoker.training.optim import LossAccumulator, OptimizerStep
from stoker.training.state import EventLogger, TrainSetup, load_checkpoint, restore_state

MAX_EXAMPLES = 2
"""Examples of each kind of problem that are printed at the start; `stoker data check` prints all."""


@dataclasses.dataclass
class ResolvedRun:
    """What a run trains on and with, before it has a folder."""

    config: Config
    reasons: dict[str, str]
    device: Device
    index: Index


def resolve_run(user_config: Config, path: Path | None) -> ResolvedRun:
    """Opens the data and derives the settings, or rereads those of the run `path`. Raises StokerError."""
    stored = None if path is None else from_run(path / CONFIG)
    requested = user_config if stored is None else stored[0]
    if path is not None and (unknown := models.unset_fields(requested)):
        raise CheckpointError(
            "The run was started by an earlier version of stoker and cannot be continued exactly.",
            location=path / CONFIG,
            cause=f"it has no value for {', '.join(unknown)}",
            fix=f"continue with the version that started it, or start a new run with --weights {path / BEST}",
        )
    check(requested)
    check_image_size(requested)
    device = select_device(requested.run.device)
    if device.kind == "cuda":
        torch.backends.cudnn.benchmark = True  # all shapes are fixed, so the fastest convolutions are found once
    index = open_index_of(requested.data)
    require_images(
        index,
        [split for split in ("train", "val") if split in index.splits],
        max_bad_fraction=requested.data.max_bad_fraction,
        max_bad_boxes=requested.data.max_bad_boxes,
    )
    for split in ("train", "val"):
        if split not in index.splits:
            raise DataError(
                f"The data set has no {split} split.",
                location=index.source,
                choices=index.splits,
                fix="name a data set with images to train on and images to validate on",
            )
    require_boxes(ground_truth(index, index.image_indices("val")))
    config, reasons = derive(user_config, index, device) if stored is None else stored
    return ResolvedRun(config, reasons, device, index)


def start_worker_processes(
    config: Config, index: Index, device: Device, log_event: EventLogger
) -> WorkerProcesses | None:
    """The processes that load images, while the model is built; None: threads do it. Close them after the loaders."""
    requested = config.run.worker_processes
    count, reason = choose_worker_processes(
        requested,
        is_cpu=device.is_cpu,
        cores=host_cores(),
        is_remote=index.remote_object(int(index.image_indices("train")[0])) is not None,
        jpeg_decoder=config.run.jpeg_decoder,
    )
    if config.run.num_workers:
        count = min(count, config.run.num_workers)
    if count or requested not in ("auto", 0):
        log_event("info", f"loader: {count or 'no'} worker processes: {reason}")
    return WorkerProcesses(count, device) if count else None


def build(
    resolved: ResolvedRun,
    folder: RunFolder,
    log_event: EventLogger,
    processes: WorkerProcesses | None = None,
    *,
    accept_changed_data: bool = False,
) -> TrainSetup:
    """Everything the loop needs, in the state of the newest checkpoint, or at step 0 with pretrained weights.

    accept_changed_data: continue also if images or boxes are not those of the checkpoint. Raises CheckpointError.
    """
    config, device, index = resolved.config, resolved.device, resolved.index
    if device.is_cpu:
        configure_malloc()
    device.empty_cache()  # of the dry runs of batches, whose peak is not that of training either
    device.reset_peak_memory()
    for kind, message in describe_data(index):
        log_event(kind, message)
    log_event("info", f"run: {folder.path}" + ("" if folder.attempt == 1 else f", attempt {folder.attempt}"))
    loaded = load_checkpoint(folder.path, log_event)
    if folder.attempt == 1:
        text, facts = collect_facts(config, index)
        folder.event("info", text, facts=facts)
        for warning in warn_about_settings(resolved):
            log_event("warning", warning)
    model = build_initial_model(config, index, device, log_event if loaded is None else None)
    train_indices, val_indices = index.image_indices("train"), index.image_indices("val")
    max_boxes = compute_max_boxes(index, train_indices, mosaic=config.data.mosaic)
    quarantine = _make_quarantine_reporter(folder, log_event)
    loader = make_training_loader(
        config,
        index,
        device,
        max_boxes=max_boxes,
        log_event=log_event,
        processes=processes,
        on_quarantine=quarantine,
    )
    setup = TrainSetup(
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
        processes=processes,
        quarantine=quarantine,
        writer=checkpoint.CheckpointWriter(folder.path, log_event),
        metadata=ModelMetadata(
            settings=config.model,
            class_names=index.class_names,
            image_size=config.data.image_size,
            resize=config.data.resize,
        ),
        data_digest=digest_images(index, ("train", "val")),
        accept_changed_data=accept_changed_data,
        total_steps=total_steps(parse_duration(config.run.max_duration), len(train_indices), config.run.batch_size),
        max_boxes=max_boxes,
    )
    restore_state(setup, loaded, log_event)
    return setup


def warn_about_settings(resolved: ResolvedRun) -> list[str]:
    """What the derived settings cannot do well, as warnings."""
    warnings = (warn_oversized_boxes(resolved.config, resolved.index), warn_random_weights(resolved.reasons))
    return [warning for warning in warnings if warning is not None]


def describe_data(index: Index) -> list[tuple[str, str]]:
    """("info" or "warning", text) of the notes and the problems of a data set."""
    messages = [("info", f"data: {note}") for note in index.notes]
    for problem in index.problems:
        kind = PROBLEM_KINDS[problem.kind]
        examples = ", ".join(problem.examples[:MAX_EXAMPLES]) + (", …" if problem.count > MAX_EXAMPLES else "")
        text = f"data: {problem.count} × {problem.title}, {kind.effect} ({examples})"
        messages.append(("info" if kind.action == "kept" else "warning", text))
    return messages


def make_training_loader(
    config: Config,
    index: Index,
    device: Device,
    *,
    max_boxes: int,
    log_event: EventLogger,
    processes: WorkerProcesses | None = None,
    on_quarantine: Callable[[QuarantinedImage], None] | None = None,
) -> Loader:
    """The stream of training samples, from its beginning."""
    data, train_indices = config.data, index.image_indices("train")
    cached = CachedImageSpec.for_augmentation(
        data.image_size, data.resize, scale_jitter_prob=data.scale_jitter_prob, scale_range=data.scale_range
    )
    spec = LoaderSpec(
        device=device,
        batch_size=config.run.batch_size,
        image_size=data.image_size,
        resize=data.resize,
        scale_jitter_prob=data.scale_jitter_prob,
        scale_range=data.scale_range,
        min_object_covered=data.min_object_covered,
        max_boxes=max_boxes,
        seed=config.run.seed,
        workers=config.run.workers,
        max_bad_fraction=data.max_bad_fraction,
        jpeg_decoder=config.run.jpeg_decoder,
    )
    return Loader(
        index,
        train_indices,
        spec,
        cache=open_cache(config.run.cache, index, train_indices, cached, log_event),
        processes=processes,
        on_quarantine=on_quarantine,
        on_tuned=lambda text: log_event("info", text),
    )


def make_validation_loader(setup: TrainSetup, *, initial_workers: int) -> Loader:
    """One pass over the validation split, in batches of the size of a micro-batch of training."""
    run, data = setup.config.run, setup.config.data
    return evaluation_loader(
        setup.index,
        setup.val_indices,
        setup.device,
        batch_size=max(1, run.batch_size // setup.config.optim.grad_accum_steps),
        image_size=data.image_size,
        resize=data.resize,
        workers=run.workers,
        initial_workers=initial_workers,
        max_bad_fraction=data.max_bad_fraction,
        processes=setup.processes,
        on_quarantine=setup.quarantine,
    )


def build_initial_model(config: Config, index: Index, device: Device, log_event: EventLogger | None) -> models.Detector:
    """The model with the weights that a run starts from, reported by `log_event`. None: a checkpoint will fill it."""
    torch.manual_seed(config.run.seed)
    model = models.build(config.model, len(index.class_names))
    if log_event is not None:
        for sentence in load_weights(model, config.model, class_names=index.class_names):
            log_event("info", f"weights: {sentence}")
    return model.to(device.torch_device).train()


def _make_quarantine_reporter(folder: RunFolder, log_event: EventLogger) -> Callable[[QuarantinedImage], None]:
    """Reports and records each image once; every evaluation meets the same ones."""
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
        log_event("warning", f"image excluded: {bad_image.source}: {bad_image.error}")

    return report
