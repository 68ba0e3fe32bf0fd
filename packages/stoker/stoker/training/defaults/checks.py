"""Refuses settings of the user that exclude each other on these devices (knowledge/conflicts.toml), before anything is
derived or tried. Only for new runs: one that was started with `--shard` or `--sync` continues on one device, too. And
warns of what derived settings cannot do well."""

from collections.abc import Mapping

import msgspec
import numpy as np

from stoker.config.settings import Config, ModelSettings
from stoker.config.sync_method import parse_sync
from stoker.data.anchor_fit import box_dimensions
from stoker.data.augment import MOSAIC_GROUP_SIZE
from stoker.data.index import Index
from stoker.hardware.device import Device
from stoker.knowledge import read_toml
from stoker.models import get_architecture
from stoker.training.cluster import ONE_DEVICE, Devices, can_divide
from stoker.training.defaults.model_choice import (
    COST_OF_RANDOM_WEIGHTS,
    FROM_SCRATCH,
    NOT_DOWNLOADED,
    ON_GPU,
    PRETRAINED,
)
from stoker_watch.errors import ConfigError, make_error


class SettingConflict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of knowledge/conflicts.toml."""

    conditions: tuple[str, ...]
    message: str
    fix: str
    cause: str | None = None


def refuse_conflicts(
    conditions: set[str], config: Config, device: object = None, devices: Devices = ONE_DEVICE
) -> None:
    """Raises ConfigError for the first row whose conditions all hold."""
    run = config.run
    values = {"sync": run.sync, "cache": run.cache, "device": device}
    for row in msgspec.convert(read_toml("conflicts.toml")["conflict"], tuple[SettingConflict, ...]):
        if conditions.issuperset(row.conditions):
            message, fix = (
                text.format(**values, count=devices.count, on_host=devices.on_host) for text in (row.message, row.fix)
            )
            raise ConfigError(message, cause=row.cause, fix=fix)


def has_sync(config: Config) -> bool:
    """Whether the ranks are to exchange their gradients in another way than the plain one."""
    return config.run.sync is not None and parse_sync(config.run.sync).kind not in ("plain", "auto")


def check_user_settings(config: Config, index: Index | None, device: Device, devices: Devices) -> None:
    """Raises ConfigError for what cannot be combined with each other, the data or the devices. index: None: the data is
    not looked at."""
    run = config.run
    conditions = {
        "sync": has_sync(config),
        "shard": run.shard,
        "muon": config.optim.optimizer == "muon",
        "compile": run.compile,
        "auto_batch": run.auto_batch,
        "cuda_graph": run.cuda_graph,
        "nvjpeg": run.jpeg_decoder == "nvjpeg",
        "cache": run.cache not in (None, "none"),
        "ram_cache": run.cache == "ram",
        "cpu": device.is_cpu,
        "no_nvidia_gpu": device.kind != "cuda",
        "one_device": devices.count == 1,
        "several_devices": devices.count > 1,
        "several_on_host": devices.on_host > 1,
    }
    holding = {name for name, holds in conditions.items() if holds}
    refuse_conflicts(holding, config, run.device or device.torch_device, devices)
    has_shards = index is None or index.image_ranges(index.image_indices("train")).length.all()
    if run.shuffle_buffer and not has_shards:
        raise make_error(ConfigError, "shuffle-buffer-without-shards", shuffle_buffer=run.shuffle_buffer)
    if run.shuffle_buffer and config.data.repeat_thresh:
        raise make_error(ConfigError, "repeats-with-shards", repeat_thresh=config.data.repeat_thresh)


def check_devices(config: Config, count: int) -> None:
    """Raises ConfigError if so many devices cannot each get the same part of a batch."""
    batch_size, unit = config.run.batch_size, count * (MOSAIC_GROUP_SIZE if (config.data.mosaic or 0) > 0 else 1)
    if batch_size is None or can_divide({"batch_size": batch_size, "mosaic": config.data.mosaic}, count):
        return
    raise ConfigError(
        f"--batch-size {batch_size} is the total, and cannot be divided equally among {count} devices.",
        cause="all devices get as many images, and with --mosaic a multiple of four",
        fix=f"--batch-size {-(-batch_size // unit) * unit}",
    )


def check_micro_batches(config: Config, num_devices: int) -> None:
    """Raises ConfigError if the images of each device cannot be divided into `grad_accum_steps` equal parts."""
    part = config.run.batch_size // num_devices
    if part % config.optim.grad_accum_steps:
        raise ConfigError(
            f"--grad-accum-steps {config.optim.grad_accum_steps} does not divide the {part} images of each device.",
            cause=f"--batch-size {config.run.batch_size} on {num_devices} devices",
            choices=[n for n in range(1, part + 1) if part % n == 0],
        )


def check_options(settings: ModelSettings, options_of_weights: Mapping[str, bool]) -> None:
    """Raises ConfigError for an option of the model that is set to another value than its weights were trained with."""
    for name, value in options_of_weights.items():
        if getattr(settings, name) not in (None, value):
            flag = name.replace("_", "-")
            asked, fitting = (f"--no-{flag}", f"--{flag}") if value else (f"--{flag}", f"--no-{flag}")
            raise ConfigError(
                f"{asked} does not fit --weights {settings.weights}.",
                cause=f"it was trained {'with' if value else 'without'} --{flag}",
                fix=f"{fitting}, or other weights",
            )


def warn_oversized_boxes(config: Config, index: Index) -> str | None:
    """A warning if boxes are longer than the model can predict, else None. It then predicts a part of such a box, which
    counts as a miss from 1.05 times the longest length for IoU 0.95, to twice for IoU 0.5."""
    tuning, (height, width) = get_architecture(config.model.model).tuning, config.data.image_size
    if tuning is None:
        return None
    box_sizes = box_dimensions(index, index.image_indices("train"), config.data.image_size, config.data.resize)
    longer_sides = box_sizes.resized_wh.max(1, initial=0.0)
    count = int((longer_sides > tuning.max_box_px).sum())
    if not count:
        return None
    return (
        f"{count:,} of {len(longer_sides):,} boxes are longer than {tuning.max_box_px} pixels at the image size "
        f"{height}×{width} (up to {longer_sides.max():.0f}): {config.model.model} cannot predict them whole; take a "
        "smaller --image-size or another model"
    )


def warn_few_queries(settings: ModelSettings, index: Index) -> str | None:
    """A warning if images have more boxes than the model has queries, each of which predicts one, else None."""
    if "queries" not in get_architecture(settings.model).defaults:
        return None
    images = index.image_indices("train")
    counts = np.diff(index.offsets)[images]
    above = int((counts > settings.queries).sum())
    if not above:
        return None
    return (
        f"{above:,} of {len(images):,} images have more boxes than {settings.model} has queries ({settings.queries}; "
        f"up to {counts.max()} boxes), and a query detects one: --queries {-(-int(counts.max()) // 50) * 50}"
    )


def warn_random_weights(settings: ModelSettings, reasons: Mapping[str, str]) -> str | None:
    """A warning if the run starts from random weights and there is an alternative, else None. reasons: of `derive`."""
    arch, reason = get_architecture(settings.model), reasons.get("model", "")
    if NOT_DOWNLOADED in reason:
        return f"model: {FROM_SCRATCH}: {reason}"
    if settings.weights != "none" or not (arch.urls or arch.tuning):
        return None
    flag = f"--weights {next(iter(arch.urls))}" if arch.urls else f"--model {PRETRAINED} (on a GPU {ON_GPU})"
    return f"weights: random ones cost accuracy: {COST_OF_RANDOM_WEIGHTS}; {flag} starts from pretrained ones"
