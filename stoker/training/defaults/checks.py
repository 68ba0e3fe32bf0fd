"""Refuses settings of the user that exclude each other on these devices, before anything is derived or tried.

Only for new runs: one that was started with `--shard` or `--sync` continues on one device, too.
"""

from collections.abc import Mapping

from stoker.config.settings import Config, ModelSettings
from stoker.config.sync_method import parse_sync
from stoker.data.augment.device import MOSAIC_GROUP_SIZE
from stoker.data.index import Index
from stoker.errors import ConfigError
from stoker.hardware.device import Device
from stoker.training.cluster import Devices
from stoker.training.defaults.auto_batch import NO_TRIAL_OF_SHARDS


def check_user_settings(config: Config, index: Index, device: Device, devices: Devices) -> None:
    """Raises ConfigError for what cannot be combined with each other, the data or the devices."""
    run = config.run
    if run.sync is not None and parse_sync(run.sync).kind not in ("plain", "auto"):
        _check_sync(config, devices.count)
    if run.shard:
        _check_shard(config, devices.count)
    if run.num_stages > 1:
        _check_stages(config, devices.count)
    if run.shuffle_buffer and not index.image_ranges(index.image_indices("train")).length.all():
        raise ConfigError(
            f"--shuffle-buffer {run.shuffle_buffer} is for shards, and images of the data set are files.",
            fix="leave it out: the order of files is random; `stoker data pack` makes shards",
        )
    if run.jpeg_decoder == "nvjpeg":
        _check_nvjpeg(run.cache, device)
    if run.cuda_graph and device.kind != "cuda":
        raise ConfigError(f"--cuda-graph needs an NVIDIA GPU, and the run is on {run.device or device.torch_device}.")
    if run.cuda_graph and devices.count > 1:
        raise ConfigError(
            f"--cuda-graph is for one device, and the run is on {devices.count}.", fix="leave out --cuda-graph"
        )
    if run.cache == "ram" and devices.on_host > 1 and run.num_stages == 1:
        raise ConfigError(
            f"--cache ram keeps all images once for each of the {devices.on_host} devices.", choices=("none", "disk")
        )


def _check_sync(config: Config, num_devices: int) -> None:
    if num_devices == 1:
        raise ConfigError(
            f"--sync {config.run.sync} is an exchange between devices, and the run is on one.",
            fix="--devices N, or leave out --sync",
        )
    if config.run.shard:
        raise ConfigError(
            f"--shard and --sync {config.run.sync} exclude each other.",
            cause="a divided model exchanges its weights too, in its own way",
            fix="leave out one of them",
        )


def _check_shard(config: Config, num_devices: int) -> None:
    if num_devices == 1:
        raise ConfigError(
            "--shard divides the model among devices, and the run is on one.",
            fix="--devices N, or leave out --shard",
        )
    if config.run.compile:
        raise ConfigError(
            "--shard and --compile exclude each other.",
            cause="a compiled step would need the whole model at once",
            fix="leave out --compile",
        )
    if config.run.auto_batch:
        raise ConfigError(
            "--shard and --auto-batch exclude each other.",
            cause=NO_TRIAL_OF_SHARDS,
            fix="--batch-size N, with --grad-accum-steps M if it does not fit",
        )


def _check_stages(config: Config, num_devices: int) -> None:
    run = config.run
    if num_devices == 1:
        raise ConfigError(
            f"--stages {run.stages} needs as many devices, and the run is on one.",
            fix=f"--devices {run.stages}, or leave out --stages",
        )
    for flag, is_set, cause in (
        ("--compile", run.compile, "a compiled step would need the whole model at once"),
        ("--auto-batch", run.auto_batch, NO_TRIAL_OF_SHARDS),
        ("--cuda-graph", run.cuda_graph, "a step has exchanges in its middle"),
    ):
        if is_set:
            raise ConfigError(f"--stages and {flag} exclude each other.", cause=cause, fix=f"leave out {flag}")


def _check_nvjpeg(cache: str | None, device: Device) -> None:
    if device.is_cpu:
        raise ConfigError("--jpeg-decoder nvjpeg needs a GPU, and the run is on a CPU.", choices=("cpu",))
    if cache not in (None, "none"):
        raise ConfigError(
            f"--jpeg-decoder nvjpeg cannot be combined with --cache {cache}.",
            cause="the cache holds images that the CPU decoded, and then nothing is decoded any more",
            fix="leave one of them out",
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
