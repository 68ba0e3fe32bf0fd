"""From the user's settings to a run that can begin: settings, data, model, loader, and the checkpoint to continue from.

A continued run takes every setting from its own config.toml: nothing is derived twice. Which run that is, is decided in
`run_selection.py`; what is built is described in `state.py`.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker import models
from stoker.config.settings import EXTENDABLE, PER_ATTEMPT, Config, check_config, from_toml
from stoker.data.anchor_fit import AnchorConfig, best_iou, box_dimensions, recommend_anchors
from stoker.data.images.pixel_cache import CachedImageSpec, open_cache
from stoker.data.index import Index, open_index_of, refuse
from stoker.data.index_digest import digest_images
from stoker.data.loading.loader import Loader, LoaderSpec, QuarantinedImage, compute_max_boxes
from stoker.data.loading.processes import WorkerProcesses, choose_worker_processes
from stoker.data.validation.problems import PROBLEM_KINDS
from stoker.evaluation.evaluate import evaluation_loader
from stoker.hardware.cpu import configure_malloc
from stoker.hardware.device import Device
from stoker.hardware.selection import select_device
from stoker.models.table import check_image_size
from stoker.models.weights.hub import fetch_weights
from stoker.models.weights.load import load_weights, shapes_only
from stoker.models.weights.model_file import ModelMetadata
from stoker.preflight.host import estimate_checkpoint_bytes
from stoker.preflight.short import as_error, quick_findings, require_meant_device
from stoker.training import checkpoint
from stoker.training.cluster import Devices
from stoker.training.defaults.checks import check_devices, warn_few_queries, warn_oversized_boxes, warn_random_weights
from stoker.training.defaults.derive import derive, total_steps, usual_length
from stoker.training.defaults.model_choice import Fetch
from stoker.training.defaults.sync_choice import choose_sync
from stoker.training.extension import plan_extension
from stoker.training.loss_sums import LossAccumulator
from stoker.training.optim import ModelDivision, OptimizerStep
from stoker.training.ranks import Ranks
from stoker.training.state import NOT_EXTENDED, EventLogger, Extension, TrainSetup, read_extension, read_initial_ranks
from stoker_watch.diagnosis.causes.learning import ANCHORS_MISS_BOXES
from stoker_watch.durations import parse_duration
from stoker_watch.errors import CheckpointError
from stoker_watch.hardware import calibration
from stoker_watch.hardware.cgroup import host_cores
from stoker_watch.runs.records import BEST, CONFIG, QUARANTINE, RunFolder
from stoker_watch.runs.schemas import Quarantined

COVERED_IOU = 0.5
"""IoU from which an anchor covers a box: the lowest threshold for a positive anchor of all models (PASCAL VOC's)."""
MAX_BOXES = 4_000
"""Boxes that are compared with the anchors: a fraction is known to 1.6 points (two standard errors) at worst."""
MAX_EXAMPLES = 2
"""Examples of each kind of problem that are printed at the start; `stoker data check` prints all."""


@dataclasses.dataclass
class ResolvedRun:
    """What a run trains on and with, before it has a folder."""

    config: Config
    reasons: dict[str, str]
    device: Device
    index: Index
    ranks: Ranks
    extension: Extension | None = None
    """Of a finished run, that this attempt begins."""


def resolve_run(
    user_config: Config,
    path: Path | None,
    ranks: Ranks | None = None,
    devices: Devices | None = None,
    fetch: Fetch | None = fetch_weights,
) -> ResolvedRun:
    """Opens the data and derives the settings, or rereads those of the run `path`. ranks: those that train; default:
    this process alone. For a plan: devices, how many there will be without their ranks, and no `fetch`, so that nothing
    is downloaded. Raises StokerError."""
    ranks = ranks or Ranks()
    devices = devices or ranks.devices()
    config, reasons = user_config, dict[str, str]()
    if path is not None:
        config, reasons = ranks.share(lambda: _read_run_config(path, user_config))
    check_config(config)
    check_image_size(config)
    device = select_device(ranks.device_name(config.run.device))
    require_meant_device(device, config.run.device)
    device.prepare_for_fixed_shapes()
    index = ranks.locally_first(lambda: open_index_of(config.data))  # one rank writes its cache, the others read it
    refuse(index, max_bad_fraction=config.data.max_bad_fraction, max_bad_boxes=config.data.max_bad_boxes)
    if path is None:
        config, reasons = ranks.share(lambda: derive(user_config, index, device, devices, fetch))
    else:
        check_devices(config, devices.count)
    if config.run.sync == "auto":
        method, reason = choose_sync(config, index, device, ranks)
        config, reasons = config.replace(sync=method), reasons | {"sync": reason}
    extension = ranks.share(
        lambda: None if path is None else plan_extension(path, config, len(index.image_indices("train")))
    )
    return ResolvedRun(config, reasons, device, index, ranks, extension)


def _read_run_config(path: Path, user_config: Config) -> tuple[Config, dict[str, str]]:
    """The settings of a run and the reasons of those that were derived, with what the user gives for this attempt."""
    changed = {name: value for name, value in user_config.set_fields().items() if name in PER_ATTEMPT | EXTENDABLE}
    config, reasons = from_toml(path / CONFIG)
    config = config.replace(**changed)
    if missing := models.unset_fields(config):
        raise CheckpointError(
            "The run was started by an earlier version of stoker and cannot be continued exactly.",
            location=path / CONFIG,
            cause=f"it has no value for {', '.join(missing)}",
            fix=f"continue with the version that started it, or start a new run with --weights {path / BEST}",
        )
    return config, {name: reason for name, reason in reasons.items() if name not in changed}


def start_worker_processes(
    resolved: ResolvedRun, log_event: EventLogger, *, stack_reader: int = 0
) -> WorkerProcesses | None:
    """The processes that load images, while the model is built; None: threads do it. Close them after the loaders.
    stack_reader: PID of what reads their stacks, 0: none."""
    run, index, device = resolved.config.run, resolved.index, resolved.device
    count, reason = choose_worker_processes(
        run.worker_processes,
        is_cpu=device.is_cpu,
        cores=host_cores(),
        is_remote=index.remote_object(int(index.image_indices("train")[0])) is not None,
        jpeg_decoder=run.jpeg_decoder,
    )
    if run.num_workers:
        count = min(count, run.num_workers)
    if count or run.worker_processes not in ("auto", 0):
        log_event("info", f"loader: {count or 'no'} worker processes: {reason}")
    return WorkerProcesses(count, device, stack_reader=stack_reader) if count else None


def build(
    resolved: ResolvedRun,
    folder: RunFolder,
    log_event: EventLogger,
    processes: WorkerProcesses | None,
    *,
    accept_changed_data: bool,
) -> tuple[TrainSetup, checkpoint.LoadedCheckpoint | None]:
    """Everything the loop needs, at step 0 with pretrained weights; and in rank 0 the checkpoint to continue from.
    accept_changed_data: continue also if images or boxes are not those of the checkpoint. Raises CheckpointError."""
    config, device, index, ranks = resolved.config, resolved.device, resolved.index, resolved.ranks
    ranks.share(lambda: report_preflight(resolved, folder, log_event))
    if device.is_cpu:
        configure_malloc()
    device.empty_cache()  # of the dry runs of batches, whose peak is not that of training either
    device.reset_peak_memory()
    for kind, message in describe_data(index):
        log_event(kind, message)
    log_event("info", f"run: {folder.path}" + ("" if folder.attempt == 1 else f", attempt {folder.attempt}"))
    loaded = checkpoint.load_checkpoint(folder.path, log_event) if ranks.is_main else None
    if folder.attempt == 1 and ranks.is_main:
        text, facts = collect_facts(config, index)
        folder.event("info", text, facts=facts)
        for warning in warn_about_settings(resolved):
            log_event("warning", warning)
        log_prediction(config, device, log_event)
    starts_here = loaded is None and ranks.is_main
    is_divided = not ranks.alone and config.run.shard
    # The whole of a model that is divided among devices may not fit one.
    initial_device = Device(torch.device("cpu")) if is_divided else device
    model = build_initial_model(config, index, initial_device, log_event if starts_here else None)
    sharding: ModelDivision | None = None
    if is_divided:
        from stoker.training.fsdp import Sharding  # torch.distributed, which other runs need not import

        sharding = Sharding.over(ranks, device.torch_device)
        if ranks.share_value(starts_here):
            model.load_state_dict(ranks.share_tensors(model.state_dict()))
    setup = make_setup(
        resolved,
        model,
        folder,
        log_event,
        checkpoint.CheckpointWriter(folder.path, log_event, has_folder=ranks.is_main),
        processes,
        sharding=sharding,
        quarantine=_make_quarantine_reporter(folder, log_event),
        accept_changed_data=accept_changed_data,
        initial_ranks=ranks.share(lambda: read_initial_ranks(folder.path)),
        extension=ranks.share(lambda: read_extension(folder.path)),
    )
    return setup, loaded


def make_setup(
    resolved: ResolvedRun,
    model: models.Detector,
    folder: RunFolder,
    log_event: EventLogger,
    writer: checkpoint.CheckpointWriter,
    processes: WorkerProcesses | None,
    *,
    quarantine: Callable[[QuarantinedImage], None],
    sharding: ModelDivision | None = None,
    accept_changed_data: bool = False,
    initial_ranks: int = 1,
    extension: Extension = NOT_EXTENDED,
    image_indices: NDArray[np.int64] | None = None,
) -> TrainSetup:
    """Makes what steps need of a model with its first weights. image_indices: see `make_training_loader`."""
    config, device, index = resolved.config, resolved.device, resolved.index
    train_indices = index.image_indices("train")
    max_boxes = compute_max_boxes(index, train_indices, mosaic=config.data.mosaic)
    loader = make_training_loader(
        config, index, device, max_boxes=max_boxes, log_event=log_event, processes=processes,
        on_quarantine=quarantine, ranks=resolved.ranks, image_indices=image_indices,
    )  # fmt: skip
    return TrainSetup(
        folder=folder,
        config=config,
        device=device,
        index=index,
        train_indices=train_indices,
        val_indices=index.image_indices("val"),
        model=model,
        optimizer=OptimizerStep(model, config.optim, device, precision=config.run.precision, sharding=sharding),
        loss_accumulator=LossAccumulator(device, max_skipped_steps=config.optim.max_skipped_steps),
        loader=loader,
        processes=processes,
        quarantine=quarantine,
        writer=writer,
        metadata=ModelMetadata(
            settings=config.model,
            class_names=index.class_names,
            image_size=config.data.image_size,
            resize=config.data.resize,
        ),
        data_digest=digest_images(index, ("train", "val")),
        make_initial_model=functools.partial(build_initial_model, config, index),
        accept_changed_data=accept_changed_data,
        total_steps=total_steps(parse_duration(config.run.max_duration), len(train_indices), config.run.batch_size),
        max_boxes=max_boxes,
        ranks=resolved.ranks,
        initial_ranks=initial_ranks,
        extension=extension,
    )


def collect_facts(config: Config, index: Index) -> tuple[str, dict[str, Any]]:
    """Facts about the data that the diagnosis needs and cannot measure afterwards, as a sentence and by name:
    `median_pixels` of the training images, if their sizes are known; `pretrained`: weights that exist for the model;
    `usual_steps`: of the default length;
    for models with anchors `anchor_coverage`, the fraction of boxes that an anchor at their center covers with
    COVERED_IOU, and, if that is low, better `anchor_sizes`."""
    train_indices = index.image_indices("train")
    facts: dict[str, Any] = {
        "num_images": len(train_indices),
        "boxes": int((index.offsets[train_indices + 1] - index.offsets[train_indices]).sum()),
        "pretrained": sorted(models.get_architecture(config.model.model).urls),
        "usual_steps": usual_length(config.model, len(train_indices), config.run.batch_size)[1],
    }
    areas = index.original_size[train_indices].astype(np.float64).prod(1)
    if (areas > 0).any():
        facts["median_pixels"] = float(np.median(areas[areas > 0]))
    text = f"data: {facts['num_images']:,} training images with {facts['boxes']:,} boxes"
    model = config.model
    if model.anchor_sizes and model.anchor_scales and model.aspect_ratios:
        box_sizes = box_dimensions(index, train_indices, config.data.image_size, config.data.resize).resized_wh
        box_sizes = box_sizes[(box_sizes > 0).all(1)]
        if len(box_sizes):
            box_sizes = box_sizes[np.linspace(0, len(box_sizes) - 1, min(len(box_sizes), MAX_BOXES)).astype(np.int64)]
            anchors = AnchorConfig(tuple(model.anchor_sizes), tuple(model.anchor_scales), tuple(model.aspect_ratios))
            coverage = float((best_iou(box_sizes, anchors.anchor_wh()) >= COVERED_IOU).mean())
            facts["anchor_coverage"] = coverage
            text += f"; anchors cover {100 * coverage:.0f} % of them"
            if ANCHORS_MISS_BOXES.severity(coverage) is not None:
                better = recommend_anchors(box_sizes, config.data.image_size, anchors, iou_threshold=COVERED_IOU)[0]
                facts["anchor_sizes"] = list(better.sizes)
    return text, facts


def find_prediction(config: Config, device: Device) -> calibration.PredictedStep | None:
    """What `stoker plan` predicted for such a training on this device, if it did."""
    return calibration.find_prediction(
        model=config.model.model, image_size=config.data.image_size, batch_size=config.run.batch_size,
        precision=config.run.precision, device=device.name,
    )  # fmt: skip


def log_prediction(config: Config, device: Device, log_event: EventLogger) -> None:
    """An event with what `stoker plan` predicted for such a training on this device, if it did."""
    if (predicted := find_prediction(config, device)) is not None:
        text = f"`stoker plan` predicted {predicted.step_s:.3g} s a step ± {100 * predicted.step_error:.0f} %"
        facts = {"predicted_step_s": predicted.step_s, "predicted_step_error": predicted.step_error}
        log_event("info", text, facts=facts)


def report_preflight(resolved: ResolvedRun, folder: RunFolder, log_event: EventLogger) -> None:
    """Logs what could slow this training, as far as milliseconds show it. Raises PreflightError if it would fail."""
    if resolved.device.is_cpu and (reason := resolved.reasons.get("device")) is not None:
        text = f"training on the CPU: {reason}. `stoker check` says more; --device cpu, if it is meant"
        log_event("preflight", text, check="no_gpu")
    with shapes_only():
        model = models.build(resolved.config.model, len(resolved.index.class_names))
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    size = estimate_checkpoint_bytes(num_weights, resolved.config.optim.optimizer)
    for finding in quick_findings(resolved.device, folder.path, size):
        if finding.severity == "blocker":
            raise as_error(finding)
        log_event("preflight", f"{finding.title} ({finding.evidence_text}); fix: {finding.fix}", check=finding.id)


def warn_about_settings(resolved: ResolvedRun) -> list[str]:
    config = resolved.config
    warnings = (
        warn_oversized_boxes(config, resolved.index),
        warn_few_queries(config.model, resolved.index),
        warn_random_weights(config.model, resolved.reasons),
    )
    return [warning for warning in warnings if warning is not None]


def describe_data(index: Index) -> list[tuple[str, str]]:
    """("info" or "warning", text) of the notes and the problems of a data set."""
    messages = [("info", f"data: {note}") for note in index.notes]
    for problem in index.problems:
        kind = PROBLEM_KINDS[problem.kind]
        examples = ", ".join(problem.examples[:MAX_EXAMPLES]) + (", …" if problem.count > MAX_EXAMPLES else "")
        text = f"data: {problem.count} × {problem.title}, {kind.effect} ({examples})"
        messages.append(("warning" if kind.action != "kept" or kind.severity else "info", text))
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
    ranks: Ranks | None = None,
    image_indices: NDArray[np.int64] | None = None,
) -> Loader:
    """The stream of training samples, from its beginning; with several ranks, this rank's part of each batch.
    image_indices: the images of the stream; default: the training split."""
    ranks = ranks or Ranks()
    data, train_indices = config.data, index.image_indices("train") if image_indices is None else image_indices
    cached = CachedImageSpec.for_augmentation(
        data.image_size, data.resize, scale_jitter_prob=data.scale_jitter_prob, scale_range=data.scale_range
    )
    spec = LoaderSpec(
        device=device,
        batch_size=config.run.batch_size // ranks.world_size,
        rank=ranks.rank,
        world_size=ranks.world_size,
        image_size=data.image_size,
        resize=data.resize,
        scale_jitter_prob=data.scale_jitter_prob,
        scale_range=data.scale_range,
        min_object_covered=data.min_object_covered,
        max_boxes=max_boxes,
        seed=config.run.seed,
        shuffle_buffer=config.run.shuffle_buffer,
        repeat_thresh=data.repeat_thresh,
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


def make_validation_loader(setup: TrainSetup) -> Loader:
    """One pass over the validation split, in batches of the size of a micro-batch of training, or smaller."""
    run, data = setup.config.run, setup.config.data
    return evaluation_loader(
        setup.index,
        setup.val_indices,
        setup.device,
        batch_size=setup.state.sizes.eval,
        image_size=data.image_size,
        resize=data.resize,
        workers=run.workers,
        initial_workers=setup.loader.stats().workers,
        max_bad_fraction=data.max_bad_fraction,
        rank=setup.ranks.rank,
        world_size=setup.ranks.world_size,
        processes=setup.processes,
        jpeg_decoder=run.jpeg_decoder,
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
        line = Quarantined(
            t=time.time(), attempt=folder.attempt, image_index=bad_image.image_index, path=bad_image.source,
            error=bad_image.error, sample_position=bad_image.sample_position, replaced_by=bad_image.replaced_by,
        )  # fmt: skip
        folder.append(QUARANTINE, line)
        log_event("warning", f"image excluded: {bad_image.source}: {bad_image.error}")

    return report
