"""Refuses settings of the user that exclude each other on these devices, before anything is derived or tried.

Only for new runs: one that was started with `--shard` or `--sync` continues on one device, too. And warns of what
derived settings cannot do well.
"""

from collections.abc import Mapping

from stoker.config.settings import Config, ModelSettings
from stoker.config.sync_method import parse_sync
from stoker.data.anchor_fit import box_dimensions
from stoker.data.augment import MOSAIC_GROUP_SIZE
from stoker.data.index import Index
from stoker.errors import ConfigError
from stoker.hardware.device import Device
from stoker.models import get_architecture
from stoker.training.cluster import Devices
from stoker.training.defaults.auto_batch import NO_TRIAL_OF_SHARDS
from stoker.training.defaults.model_choice import FROM_SCRATCH, NOT_DOWNLOADED


def check_user_settings(config: Config, index: Index, device: Device, devices: Devices) -> None:
    """Raises ConfigError for what cannot be combined with each other, the data or the devices."""
    run, method, stages = config.run, f"--sync {config.run.sync}", f"--stages {config.run.stages}"
    has_sync = run.sync is not None and parse_sync(run.sync).kind not in ("plain", "auto")
    has_stages = run.num_stages > 1
    for flag, is_set, what, count in (
        (method, has_sync, "is an exchange between devices", "N"),
        ("--shard", run.shard, "divides the model among devices", "N"),
        (stages, has_stages, "needs as many devices", run.stages),
    ):
        if is_set and devices.count == 1:
            fix = f"--devices {count}, or leave out {flag.partition(' ')[0]}"
            raise ConfigError(f"{flag} {what}, and the run is on one.", fix=fix)
    own_way = "a divided model exchanges its weights too, in its own way"
    whole_model = "a compiled step would need the whole model at once"
    for first, second, are_set, cause, fix in (
        ("--shard", method, run.shard and has_sync, own_way, "leave out one of them"),
        ("--shard", "--compile", run.shard and run.compile, whole_model, "leave out --compile"),
        ("--shard", "--auto-batch", run.shard and run.auto_batch, NO_TRIAL_OF_SHARDS,
         "--batch-size N, with --grad-accum-steps M if it does not fit"),
        ("--stages", "--compile", has_stages and run.compile, whole_model, "leave out --compile"),
        ("--stages", "--auto-batch", has_stages and run.auto_batch, NO_TRIAL_OF_SHARDS, "leave out --auto-batch"),
        ("--stages", "--cuda-graph", has_stages and run.cuda_graph, "a step has exchanges in its middle",
         "leave out --cuda-graph"),
    ):  # fmt: skip
        if are_set:
            raise ConfigError(f"{first} and {second} exclude each other.", cause=cause, fix=fix)
    if run.shuffle_buffer and not index.image_ranges(index.image_indices("train")).length.all():
        raise ConfigError(
            f"--shuffle-buffer {run.shuffle_buffer} is for shards, and images of the data set are files.",
            fix="leave it out: the order of files is random; `stoker data pack` makes shards",
        )
    if run.jpeg_decoder == "nvjpeg" and device.is_cpu:
        raise ConfigError("--jpeg-decoder nvjpeg needs a GPU, and the run is on a CPU.", choices=("cpu",))
    if run.jpeg_decoder == "nvjpeg" and run.cache not in (None, "none"):
        raise ConfigError(
            f"--jpeg-decoder nvjpeg cannot be combined with --cache {run.cache}.",
            cause="the cache holds images that the CPU decoded, and then nothing is decoded any more",
            fix="leave one of them out",
        )
    if run.cuda_graph and device.kind != "cuda":
        raise ConfigError(f"--cuda-graph needs an NVIDIA GPU, and the run is on {run.device or device.torch_device}.")
    if run.cuda_graph and devices.count > 1:
        raise ConfigError(
            f"--cuda-graph is for one device, and the run is on {devices.count}.", fix="leave out --cuda-graph"
        )
    if run.cache == "ram" and devices.on_host > 1 and not has_stages:
        raise ConfigError(
            f"--cache ram keeps all images once for each of the {devices.on_host} devices.", choices=("none", "disk")
        )


def check_devices(config: Config, count: int) -> None:
    """Raises ConfigError if so many devices cannot each get the same part of a batch, or a stage of the model."""
    if count > 1 and config.run.num_stages > 1:
        from stoker.training.stages import check_stages  # torch.distributed

        check_stages(config, count)
        return
    batch_size, group_size = config.run.batch_size, MOSAIC_GROUP_SIZE if (config.data.mosaic or 0) > 0 else 1
    unit = count * group_size
    if count == 1 or batch_size is None or batch_size % unit == 0:
        return
    near = sorted({max(unit, batch_size // unit * unit), -(-batch_size // unit) * unit})
    fitting = [n for n in range(1, batch_size + 1) if batch_size % (n * group_size) == 0]
    cause = "all devices get as many images, so that all steps have one shape and no device waits for another"
    raise ConfigError(
        f"--batch-size {batch_size} is the total, and cannot be divided equally among {count} devices.",
        cause=cause if group_size == 1 else f"{cause}; a mosaic is made of four images of one device",
        fix=f"--batch-size {' or '.join(map(str, near))}"
        + (f", or --devices {' or '.join(map(str, fitting[-4:]))}" if fitting else ""),
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
            raise ConfigError(
                f"--{'no-' if value else ''}{flag} does not fit --weights {settings.weights}.",
                cause=f"it was trained {'with' if value else 'without'} --{flag}",
                fix=f"--{'' if value else 'no-'}{flag}, or other weights",
            )


def warn_oversized_boxes(config: Config, index: Index) -> str | None:
    """A warning if boxes are longer than the model can predict, else None.

    The model then predicts a part of such a box, which counts as a miss from 1.05 times the longest length for IoU
    0.95, to twice for IoU 0.5.
    """
    tuning = get_architecture(config.model.model).tuning
    if tuning is None:
        return None
    box_sizes = box_dimensions(index, index.image_indices("train"), config.data.image_size, config.data.resize)
    longer_sides = box_sizes.resized_wh.max(1, initial=0.0)
    count = int((longer_sides > tuning.max_box_px).sum())
    if not count:
        return None
    height, width = config.data.image_size
    return (
        f"{count:,} of {len(longer_sides):,} boxes are longer than {tuning.max_box_px} pixels at the image size "
        f"{height}×{width} (up to {longer_sides.max():.0f}): {config.model.model} cannot predict them whole; take a "
        "smaller --image-size or another model"
    )


def warn_random_weights(reasons: Mapping[str, str]) -> str | None:
    """A warning if the model was chosen because pretrained weights could not be downloaded. reasons: of `derive`."""
    reason = reasons.get("model", "")
    return f"model: {FROM_SCRATCH}: {reason}" if reason.startswith(NOT_DOWNLOADED) else None
