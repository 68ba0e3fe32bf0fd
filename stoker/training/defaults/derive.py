"""Fills every setting that the user did not set, from the data, the device and the recipe, each with its reason.

`derive` is the only place where a default is decided. It never changes what the user set. `auto_batch.py` tries the
batch size on the device; everything else is arithmetic on the index. Names of models are not here: what differs between
architectures is in their rows of `MODELS`.
"""

import dataclasses
import functools
import importlib.util
import math
import os
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stoker.config.durations import Duration, parse_duration
from stoker.config.recipes import RECIPES
from stoker.config.settings import Config, check
from stoker.config.sync_method import parse_sync
from stoker.data.anchor_fit import AnchorConfig, best_image_size, box_dimensions, percentile_anchor_sizes
from stoker.data.augment.device import MOSAIC_GROUP_SIZE
from stoker.data.images import cache_policy
from stoker.data.images.pixel_cache import CachedImageSpec
from stoker.data.index import Index
from stoker.data.loading import decoder_choice
from stoker.data.loading.autotune import default_num_workers
from stoker.data.loading.shard_order import choose_buffer
from stoker.data.validation.problems import DEFAULT_MAX_BAD_BOXES, DEFAULT_MAX_BAD_FRACTION
from stoker.data.validation.stats import ModelInput
from stoker.errors import ConfigError
from stoker.hardware.cgroup import host_cores, host_memory
from stoker.hardware.device import Device, untested_accelerator
from stoker.models import Architecture, get_architecture
from stoker.models.architecture import FamilyTuning
from stoker.models.table import check_image_size, check_settings
from stoker.models.weights.hub import local_path
from stoker.models.weights.load import PRETRAINED_NAMES, read_weights
from stoker.training.cluster import ONE_DEVICE, Devices
from stoker.training.defaults import auto_batch, trial_cache
from stoker.training.defaults.model_choice import (
    choose_image_side,
    choose_model,
    estimate_images_per_second,
)

EPOCHS, MIN_STEPS, MAX_IMAGES_SEEN = 12, 1_500, 90_000 * 16
"""12 epochs (Detectron2's 1x schedule), at least 1,500 steps, at most as many images as this schedule takes on COCO."""
TINY_EPOCHS = 10
"""Of the tiny model, which has too few weights to profit from more (LOG.md, "The demo in four minutes")."""
FROM_SCRATCH_FACTOR = 3
"""Factor of the length for random weights: a detector then reaches the accuracy of pretrained ones, after three to six
times as many epochs (He et al. 2018, "Rethinking ImageNet Pre-training", arXiv 1811.08883)."""
NUM_EVALUATIONS = 12
"""Evaluations of a training."""

DEFAULTS: dict[str, tuple[Any, str]] = {
    "classes": ((), "every class of the data set"),
    "val_fraction": (0.1, "a tenth, if the data set has no validation split"),
    "max_bad_fraction": (DEFAULT_MAX_BAD_FRACTION, "more bad files mean a wrong path or a broken copy"),
    "max_bad_boxes": (DEFAULT_MAX_BAD_BOXES, "more bad boxes mean a wrong list of classes or wrong coordinates"),
    "split_method": ("stratified", "every class has its fraction in the validation split"),
    "allow_outside": (False, "the files of others should not name yours"),
    "resize": ("letterbox", "keeps the aspect ratio of the images"),
    "augment": ("default", "varies the images against overfitting"),
    "hflip": (0.5, "as torchvision's detection references"),
    "scale_jitter_prob": (0.5, "every other image at another scale"),
    "scale_range": ((0.7, 1.5), "mild: object sizes stay like those of the data"),
    "min_object_covered": (0.5, "a crop shows at least half of one object (SSD: 0.1 to 0.9)"),
    "brightness": (0.125, "as SSD: 32 of 255"),
    "contrast": (0.125, "a quarter of SSD's: mild; more was not measured"),
    "saturation": (0.125, "a quarter of SSD's: mild; more was not measured"),
    "hue": (0.0, "classes may differ by color alone"),
    "mosaic": (0.0, "helps in long training only: objects at half their size, next to seams"),
    "clip_grad_norm": (10.0, "clips outliers only; a typical norm is 1 to 5"),
    "max_skipped_steps": (20, "twenty skipped steps in a row are not an accident"),
    "seed": (0, "the same command gives the same run"),
    "price_per_device_hour": (0.0, "unknown"),
    "worker_processes": ("auto", "processes on 8 or more cores that feed a GPU, else threads"),
    "patience": (0, "the learning rate schedule is for the whole length"),
    "checkpoint_every": ("2min", "a killed run loses at most two minutes; saving is in the background"),
    "momentum": (0.9, "usual for any batch size"),
    "backbone_lr_mult": (1.0, "one learning rate for all weights, as in torchvision's and Detectron2's recipes"),
    "auto_batch": (False, "the recipe's batch size, or smaller micro-batches if it does not fit"),
    "cuda_graph": (False, "no GPU has shown yet that it pays; --cuda-graph tries it"),
    "shard": (False, "each device has the whole model"),
    "stages": (1, "each device has the whole model"),
    "sync": ("plain", "gradients are averaged exactly, in every step"),
    "activation_checkpointing": (False, "the batch fits without"),
}
"""Setting → value and reason, if nothing else decides it."""

MICRO_BATCHES_PER_STAGE = 4
"""Four micro-batches per stage: a bubble of at most 20 % (GPipe, Huang et al. 2019, section 2.3)."""
AUGMENTATIONS = ("hflip", "scale_jitter_prob", "brightness", "contrast", "saturation", "hue", "mosaic")
"""Settings that `--augment none` sets to 0."""


class _ConfigBuilder:
    """A config that is being filled, and the reasons."""

    def __init__(self, user_config: Config) -> None:
        self.config = user_config
        self.reasons: dict[str, str] = {}

    def get(self, name: str) -> Any:
        return self.config.set_fields().get(name)

    def set_default(self, name: str, value: Any, reason: str) -> None:
        """Sets the field unless it is set already."""
        if self.get(name) is None:
            self.config = self.config.replace(**{name: value})
            self.reasons[name] = reason


def derive(
    user_config: Config, index: Index, device: Device, devices: Devices = ONE_DEVICE
) -> tuple[Config, dict[str, str]]:
    """(complete config, reasons of the fields that `user_config` did not set). devices: how many train together.

    Raises ConfigError for impossible settings, OutOfMemoryError if not even one image fits.
    """
    builder = _ConfigBuilder(user_config)
    set_default, get = builder.set_default, builder.get
    train_indices = index.image_indices("train")
    _fill_model_settings(builder, index, device)
    set_default("precision", *device.best_precision())
    set_default("workers", *_choose_workers(device))
    if get("sync") is not None:
        _check_sync(builder, devices)
    if get("shard"):
        _fill_sharding(builder, devices)
    if get("stages") > 1:
        _fill_stages(builder, devices)
        devices = ONE_DEVICE  # one loads the images, and each works on whole batches
    _fill_batch_size(builder, len(train_indices), index, device, devices)
    _fill_duration(builder, len(train_indices), len(index.image_indices("val")) if "val" in index.splits else 0)
    _fill_shuffle_buffer(builder, index, devices)
    if get("jpeg_decoder") == "nvjpeg":
        _check_nvjpeg(get("cache"), device)
        set_default("cache", "none", "--jpeg-decoder nvjpeg: images for a cache are decoded on the CPU")
    if get("cache") is None:
        set_default("cache", *_choose_cache(builder.config, index, devices))
    measure_step_s = functools.cache(lambda: _measure_step_s(builder.config, index, device, devices))
    if get("jpeg_decoder") is None:
        set_default("jpeg_decoder", *_choose_decoder(builder.config, index, device, measure_step_s, devices))
    if get("compile") is None:
        set_default("compile", *choose_compile(builder.config, len(train_indices), device, measure_step_s))
    if get("cuda_graph") and device.kind != "cuda":
        raise ConfigError(f"--cuda-graph needs an NVIDIA GPU, and the run is on {get('device')}.")
    if get("cuda_graph") and devices.count > 1:
        raise ConfigError(
            f"--cuda-graph is for one device, and the run is on {devices.count}.", fix="leave out --cuda-graph"
        )
    if get("cache") == "ram" and devices.on_host > 1:
        raise ConfigError(
            f"--cache ram keeps all images once for each of the {devices.on_host} devices.",
            choices=("none", "disk"),
        )
    check(builder.config)
    return builder.config, builder.reasons


def derive_for_plan(user_config: Config, index: Index, device: Device) -> tuple[Config, dict[str, str]]:
    """The part of `derive` that tries nothing on the device, which need not be here: all about data and model, the
    length, and as the batch size the user's or the recipe's. Raises ConfigError."""
    builder = _ConfigBuilder(user_config)
    _fill_model_settings(builder, index, device)
    num_images = len(index.image_indices("train"))
    recipe_batch_size = RECIPES[get_architecture(builder.get("model")).recipe]().run.batch_size
    builder.set_default("batch_size", max(1, min(recipe_batch_size, num_images)), f"the recipe's {recipe_batch_size}")
    _fill_duration(builder, num_images, len(index.image_indices("val")) if "val" in index.splits else 0)
    check(builder.config)
    return builder.config, builder.reasons


def derive_data(user_config: Config, index: Index, device: Device) -> tuple[Config, dict[str, str]]:
    """The first part of `derive`: the settings that decide the model's input. Nothing is tried on the device."""
    builder = _ConfigBuilder(user_config)
    _fill_basics(builder, index, device)
    return builder.config, builder.reasons


def derive_model_input(user_config: Config, index: Index, device: Device) -> ModelInput:
    """The model and its input for `stoker data stats`: what `derive` would choose."""
    builder = _ConfigBuilder(user_config)
    _fill_basics(builder, index, device)
    get = builder.get
    arch = get_architecture(get("model"))
    _fill_anchor_sizes(builder, arch, index)
    names = ("anchor_sizes", "anchor_scales", "aspect_ratios")
    anchors = None
    if all(name in arch.defaults for name in names):  # those of SSD depend on the level
        sizes, scales, ratios = (tuple(get(name) or arch.defaults[name]) for name in names)
        anchors = AnchorConfig(sizes, scales, ratios)
    flags = []
    if (model := user_config.model.model) is not None:
        flags.append(f"--model {model}")
    if (size := user_config.data.image_size) is not None:
        flags.append(f"--image-size {size[0]} {size[1]}")
    return ModelInput(
        model=get("model"),
        anchors=anchors,
        image_size=get("image_size"),
        image_size_reason=builder.reasons.get("image_size", "set by --image-size"),
        resize=get("resize"),
        side=choose_image_side(arch, index, device, get("resize")),
        multiple=arch.size_divisor,
        set_flags=tuple(flags),
    )


def _fill_model_settings(builder: _ConfigBuilder, index: Index, device: Device) -> None:
    """What the data, the model, its recipe, its weights and DEFAULTS decide. Raises ConfigError."""
    user_model = builder.config.model
    _fill_basics(builder, index, device)
    set_default, get = builder.set_default, builder.get
    arch = get_architecture(get("model"))
    check_settings(dataclasses.replace(user_model, model=get("model")))
    _fill_options_of_weights(builder, arch)
    if get("weights") == "none":
        set_default("backbone_norm", "bn", "there are no statistics to freeze: the weights are random")
        set_default("trainable_backbone_layers", 5, "the weights are random")
    _fill_anchor_sizes(builder, arch, index)
    for name, value in arch.defaults.items():
        set_default(name, value, arch.reasons[name])


def _fill_anchor_sizes(builder: _ConfigBuilder, arch: Architecture, index: Index) -> None:
    """The anchor sizes of models that take them from the boxes or from the image size."""
    get = builder.get
    if get("weights") == "none" and arch.recipe == "tiny":
        image_size = get("image_size")
        box_sizes = box_dimensions(index, index.image_indices("train"), image_size, get("resize")).resized_wh
        num_sizes = len(arch.defaults["anchor_sizes"])
        builder.set_default("anchor_sizes", *percentile_anchor_sizes(box_sizes, image_size, num_sizes))
    if arch.anchors_scale_with_image_size:
        factor = math.sqrt(math.prod(get("image_size"))) / arch.default_image_size
        sizes = tuple(float(f"{size * factor:.4g}") for size in arch.defaults["anchor_sizes"])
        reason = f"{arch.reasons['anchor_sizes']}, times {factor:.3g} at this image size"
        builder.set_default("anchor_sizes", sizes, reason)


def _fill_basics(builder: _ConfigBuilder, index: Index, device: Device) -> None:
    """What the data, the model, its recipe and DEFAULTS decide."""
    set_default, get = builder.set_default, builder.get
    set_default("device", str(device.torch_device), _device_reason(device))
    set_default("format", index.format, "detected")
    if get("augment") == "none":
        for name in AUGMENTATIONS:
            set_default(name, 0.0, "--augment none")
    arch = _fill_model(builder, index, device)
    for name, value in RECIPES[arch.recipe]().set_fields().items():
        if name not in ("batch_size", "lr"):
            set_default(name, value, f"recipe {arch.recipe}")
    if arch.urls:
        if "coco" in arch.urls:
            set_default("weights", "coco", "trained as a detector")
        set_default("weights", "imagenet", "the backbone's; there are none for the whole detector")
    set_default("weights", "none", "there are no pretrained weights for this model")
    set_default("resize", *DEFAULTS["resize"])
    side = choose_image_side(arch, index, device, get("resize"))
    note = "" if side == arch.default_image_size else "on a CPU "
    set_default(
        "image_size",
        *best_image_size(index.original_size[index.image_indices("train")], side, arch.size_divisor, context=note),
    )
    check_image_size(builder.config)
    if arch.tuning is not None:
        if arch.urls and get("weights") != "none" and get("backbone_norm") in (None, "frozen_bn"):
            reason = "its norms are frozen, and its features must not outgrow those of the neck"
            set_default("backbone_lr_mult", arch.tuning.frozen_backbone_lr_mult, reason)
        if get("scale_jitter_prob") != 0:
            _fill_stronger_augmentation(builder, arch, arch.tuning, len(index.image_indices("train")), device)
    for name, (value, reason) in DEFAULTS.items():
        set_default(name, value, reason)


def _fill_stronger_augmentation(
    builder: _ConfigBuilder, arch: Architecture, tuning: FamilyTuning, num_images: int, device: Device
) -> None:
    """If each image is seen many times, with the recipe's batch size: that of `--auto-batch` is not known yet."""
    get = builder.get
    batch_size = get("batch_size") or min(num_images, RECIPES[arch.recipe]().run.batch_size)
    images_per_second = estimate_images_per_second(arch, get("image_size")) if device.is_cpu else None
    views = views_per_image(
        get("max_duration"), _default_epochs(arch, get("weights")), num_images, batch_size, images_per_second
    )
    if views is not None and views >= tuning.many_views:
        for name, value in tuning.strong_augmentation.items():
            reason = f"each image is seen about {views:.0f} times: stronger augmentation against overfitting"
            builder.set_default(name, value, reason)


def _device_reason(device: Device) -> str:
    if not device.is_cpu:
        return "the accelerator that torch found"
    untried_device = untested_accelerator()
    return (
        "no accelerator"
        if untried_device is None
        else f"training on {untried_device} is untested; --device {untried_device} uses it"
    )


def _fill_model(builder: _ConfigBuilder, index: Index, device: Device) -> Architecture:
    """The model's row of MODELS; chooses the model if it is not set."""
    if builder.get("model") is None:
        builder.set_default("model", *choose_model(index, device, builder.get("weights")))
    return get_architecture(builder.get("model"))


def _fill_options_of_weights(builder: _ConfigBuilder, arch: Architecture) -> None:
    """Settings of the model that its initial weights decide. Raises ConfigError if the user set others."""
    weights = builder.get("weights")
    options: Mapping[str, bool] = arch.pretrained_options.get(weights, {})
    if arch.options_from_weights is not None and weights not in ("none", *PRETRAINED_NAMES):
        options = arch.options_from_weights(read_weights(local_path(weights)).tensors)
    for name, value in options.items():
        if builder.get(name) not in (None, value):
            flag = name.replace("_", "-")
            raise ConfigError(
                f"--{'no-' if value else ''}{flag} does not fit --weights {weights}.",
                cause=f"it was trained {'with' if value else 'without'} --{flag}",
                fix=f"--{'' if value else 'no-'}{flag}, or other weights",
            )
        builder.set_default(name, value, f"as the weights ({weights}) have it")


def _choose_workers(device: Device) -> tuple[str, str]:
    initial_workers = default_num_workers(host_cores(), is_cpu=device.is_cpu)
    note = "; at most as many decode, as the model needs the cores itself" if device.is_cpu else ""
    return "auto", f"tuned while training, starting with {initial_workers}{note}"


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


def _fill_batch_size(builder: _ConfigBuilder, num_images: int, index: Index, device: Device, devices: Devices) -> None:
    check_devices(builder.config, devices.count)
    recipe = get_architecture(builder.get("model")).recipe
    recipe_config = RECIPES[recipe]()
    optimizer = builder.get("optimizer")
    builder.set_default("weight_decay", 0.02 if optimizer == "adamw" else 1e-4, f"usual for {optimizer}")
    batch_size, accumulate, reason = trial_cache.choose_batch_size(
        builder.config,
        index,
        device,
        recipe_batch_size=recipe_config.run.batch_size,
        num_images=num_images,
        devices=devices,
    )
    builder.set_default("batch_size", batch_size, reason)
    if builder.get("stages") > 1:
        accumulate, reason = choose_micro_batches(batch_size, builder.get("stages"), accumulate)
    builder.set_default("grad_accum_steps", accumulate, "the whole batch fits" if accumulate == 1 else reason)
    part = builder.get("batch_size") // devices.count
    if part % builder.get("grad_accum_steps"):
        raise ConfigError(
            f"--grad-accum-steps {builder.get('grad_accum_steps')} does not divide the {part} images of each device.",
            cause=f"--batch-size {builder.get('batch_size')} on {devices.count} devices",
            choices=[n for n in range(1, part + 1) if part % n == 0],
        )
    base_lr, base_batch_size, source = _reference_lr(recipe, optimizer)
    exponent, rule = LR_SCALING_RULES[optimizer]
    lr = base_lr * (builder.get("batch_size") / base_batch_size) ** exponent
    builder.set_default("lr", float(f"{lr:.3g}"), f"{source}: {base_lr:g} at {base_batch_size} images, {rule}")


LR_SCALING_RULES = {
    "sgd": (1.0, "linear rule (Goyal et al. 2017)"),
    "adamw": (0.5, "square root rule (Malladi et al. 2022)"),
}
"""Optimizer → exponent of the batch size in the learning rate, and the rule's name.

SGD: a step with k times the images moves as far as k steps (Goyal et al. 2017, "Accurate, Large Minibatch SGD"). AdamW
divides by the gradient's magnitude, so the noise must stay the same, which falls with the square root of the batch size
(Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms"; Krizhevsky 2014 takes the square
root for all). Momentum and the betas stay: the linear rule is derived for a fixed momentum, and Malladi's rule for the
betas, 1 - k (1 - beta), is not defined for k of 10 and more. The EMA needs no rule: its horizon is a fraction of the
length, so it covers the same number of images at any batch size."""


def _choose_cache(config: Config, index: Index, devices: Devices) -> tuple[str, str]:
    data, run = config.data, config.run
    train_indices = index.image_indices("train")
    steps = total_steps(parse_duration(run.max_duration), len(train_indices), run.batch_size)
    kind, reason = cache_policy.choose_cache(
        cache_policy.collect_cache_inputs(
            index,
            train_indices,
            CachedImageSpec.for_augmentation(
                data.image_size, data.resize, scale_jitter_prob=data.scale_jitter_prob, scale_range=data.scale_range
            ),
            max_scale=data.scale_range[1] if data.scale_jitter_prob > 0 else 1.0,
            epochs=None if steps is None else steps * run.batch_size / len(train_indices),
            workers=run.num_workers or default_num_workers(host_cores(), is_cpu=run.device == "cpu"),
        )
    )
    if kind == "ram" and devices.on_host > 1:
        return "none", f"in memory, each of the {devices.on_host} devices would keep all images"
    return kind, reason


def _fill_shuffle_buffer(builder: _ConfigBuilder, index: Index, devices: Devices) -> None:
    """Raises ConfigError for a buffer of images that are not in shards."""
    train_indices = index.image_indices("train")
    ranges = index.image_ranges(train_indices)
    if builder.get("shuffle_buffer") and not ranges.length.all():
        raise ConfigError(
            f"--shuffle-buffer {builder.get('shuffle_buffer')} is for shards, and images of the data set are files.",
            fix="leave it out: the order of files is random; `stoker data pack` makes shards",
        )
    limit, used = host_memory()
    builder.set_default(
        "shuffle_buffer",
        *choose_buffer(
            ranges,
            is_in_bucket=index.remote_object(int(train_indices[0])) is not None,
            batch_size=builder.get("batch_size"),
            num_ranks=devices.count,
            memory_bytes=max(0, limit - used) // devices.on_host,
        ),
    )


def _check_nvjpeg(cache: str | None, device: Device) -> None:
    """Raises ConfigError if --jpeg-decoder nvjpeg is impossible."""
    if device.is_cpu:
        raise ConfigError("--jpeg-decoder nvjpeg needs a GPU, and the run is on a CPU.", choices=("cpu",))
    if cache not in (None, "none"):
        raise ConfigError(
            f"--jpeg-decoder nvjpeg cannot be combined with --cache {cache}.",
            cause="the cache holds images that the CPU decoded, and then nothing is decoded any more",
            fix="leave one of them out",
        )


def _fill_sharding(builder: _ConfigBuilder, devices: Devices) -> None:
    """Settings that --shard decides. Raises ConfigError for what it cannot be combined with.

    Only for new runs: one that was started with it continues on one device, too."""
    if devices.count == 1:
        raise ConfigError(
            "--shard divides the model among devices, and the run is on one.",
            fix="--devices N, or leave out --shard",
        )
    if builder.get("compile"):
        raise ConfigError(
            "--shard and --compile exclude each other.",
            cause="a compiled step would need the whole model at once",
            fix="leave out --compile",
        )
    if builder.get("auto_batch"):
        raise ConfigError(
            "--shard and --auto-batch exclude each other.",
            cause=auto_batch.NO_TRIAL_OF_SHARDS,
            fix="--batch-size N, with --grad-accum-steps M if it does not fit",
        )
    builder.set_default("compile", False, "compiling is not supported with --shard")
    builder.set_default("jpeg_decoder", "cpu", f"not tried: {auto_batch.NO_TRIAL_OF_SHARDS}")


def _fill_stages(builder: _ConfigBuilder, devices: Devices) -> None:
    """Settings that --stages decides. Raises ConfigError for what it cannot be combined with, as for --shard."""
    count = builder.get("stages")
    if devices.count == 1:
        raise ConfigError(
            f"--stages {count} needs as many devices, and the run is on one.",
            fix=f"--devices {count}, or leave out --stages",
        )
    check_devices(builder.config, devices.count)
    for name, cause in (
        ("compile", "a compiled step would need the whole model at once"),
        ("auto_batch", auto_batch.NO_TRIAL_OF_SHARDS),
        ("cuda_graph", "a step has exchanges in its middle"),
    ):
        if builder.get(name):
            flag = name.replace("_", "-")
            raise ConfigError(f"--stages and --{flag} exclude each other.", cause=cause, fix=f"leave out --{flag}")
    builder.set_default("compile", False, "compiling is not supported with --stages")
    builder.set_default("jpeg_decoder", "cpu", f"not tried: {auto_batch.NO_TRIAL_OF_SHARDS}")


def choose_micro_batches(batch_size: int, stages: int, least: int) -> tuple[int, str]:
    """(micro-batches of a step, reason): up to MICRO_BATCHES_PER_STAGE for each stage, of at least two images (trained
    norms need several); not fewer than `least`, which memory asks for."""
    fitting = [n for n in range(1, batch_size // 2 + 1) if batch_size % n == 0]
    chosen = max([least, 1, *(n for n in fitting if n <= MICRO_BATCHES_PER_STAGE * stages)])
    bubble = (stages - 1) / (chosen + stages - 1)
    return chosen, f"{stages} stages of equal speed would wait {100 * bubble:.0f} % of a step"


def _check_sync(builder: _ConfigBuilder, devices: Devices) -> None:
    """Raises ConfigError for what --sync cannot be combined with. Only for new runs, as for --shard."""
    method = builder.get("sync")
    if parse_sync(method).kind in ("plain", "auto"):
        return
    if devices.count == 1:
        raise ConfigError(
            f"--sync {method} is an exchange between devices, and the run is on one.",
            fix="--devices N, or leave out --sync",
        )
    if builder.get("shard"):
        raise ConfigError(
            f"--shard and --sync {method} exclude each other.",
            cause="a divided model exchanges its weights too, in its own way",
            fix="leave out one of them",
        )


def _measure_step_s(config: Config, index: Index, device: Device, devices: Devices) -> float:
    """Seconds of an optimizer step of the chosen batch size, not compiled; tried on the device."""
    count = config.run.batch_size // (config.optim.grad_accum_steps * devices.count)
    return auto_batch.make_dry_run(config, index, device).measure_step_s(count) * config.optim.grad_accum_steps


def _choose_decoder(
    config: Config, index: Index, device: Device, measure_step_s: Callable[[], float], devices: Devices
) -> tuple[str, str]:
    """The decoder and the reason; on a GPU both are tried, with a step of the chosen batch size."""
    if config.run.cache != "none":
        return "cpu", "decoded images are cached; the CPU decodes each once"
    data, batch_size = config.data, config.run.batch_size // devices.count
    return decoder_choice.measure_and_choose_decoder(
        index,
        index.image_indices("train"),
        device,
        image_size=data.image_size,
        resize=data.resize,
        batch_size=batch_size,
        measure_step_s=lambda: measure_step_s() / batch_size,
    )


COMPILE_PAYS_FROM_S = 5 * 60.0
"""Length of a run, not compiled, from which compiling is expected to pay: a minute and a half of compiling, and three
tenths of the time of a step gained. Both are predictions, no GPU has confirmed them (decision 8)."""


def choose_compile(
    config: Config, num_images: int, device: Device, measure_step_s: Callable[[], float]
) -> tuple[bool, str]:
    """Whether to compile, and the reason. measure_step_s: seconds of a step that is not compiled."""
    if device.is_cpu:
        return False, "on a CPU, almost all of a step is convolutions, which compiling does not change"
    if device.kind != "cuda":
        return False, f"compiling is untested on {device.kind}"
    if (missing := missing_for_compile()) is not None:
        return False, f"{missing}; without it, torch.compile does not work on a GPU"
    duration = parse_duration(config.run.max_duration)
    steps = total_steps(duration, num_images, config.run.batch_size)
    length_s = duration.value * 60 if steps is None else steps * measure_step_s()
    length = f"{length_s / 60:,.0f} minutes" + (
        "" if steps is None else f" by a trial of {length_s / steps:.3g} s a step"
    )
    if length_s < COMPILE_PAYS_FROM_S:
        return False, f"the run is too short for minutes of compiling to pay ({length}); --compile does it"
    return True, f"the run is long enough for minutes of compiling to pay ({length}); not confirmed on a GPU yet"


def missing_for_compile() -> str | None:
    """What torch.compile needs on a GPU and this machine lacks, as the start of a sentence."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if os.environ.get("CC") is None and shutil.which("gcc") is None and shutil.which("clang") is None:
        return "there is no C compiler (gcc or clang)"  # triton compiles its launchers with it
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python.h is missing (install the package python3-dev)"
    return None


def _reference_lr(recipe: str, optimizer: str) -> tuple[float, int, str]:
    """(learning rate, its batch size, its source)."""
    recipe_config = RECIPES[recipe]()
    if optimizer == recipe_config.optim.optimizer:
        return recipe_config.optim.lr, recipe_config.run.batch_size, f"recipe {recipe}"
    if optimizer == "adamw":
        return 1e-3, 16, "usual for adamw"
    return 0.01, 16, "torchvision's reference"


def choose_warmup_steps(total: int | None, batch_ratio: float) -> tuple[int, str]:
    """Warm-up steps and the reason. total: steps of the run, None if it has a time; batch_ratio: batch size relative to
    the reference.

    Goyal et al. need a longer warm-up for a larger batch: 5 of 90 epochs, 780 steps, at 32 times their reference. With
    the square root of the batch size, 500 steps at 16 images become 2,000 at 256, a little over four epochs of COCO.
    """
    scale = math.sqrt(max(1.0, batch_ratio))
    max_steps, fraction = round(500 * scale), min(0.1, 0.05 * scale)
    if total is None:
        steps, reason = round(100 * scale), "the number of steps is not known in advance"
    else:
        steps = min(max_steps, max(1, int(total * fraction)))
        reason = f"{fraction * 100:.3g} % of the length, at most {max_steps:,} steps"
    if scale > 1:
        reason += f"; longer, as the batch size is {batch_ratio:.3g} times the reference (Goyal et al. 2017)"
    return steps, reason


def _fill_duration(builder: _ConfigBuilder, num_images: int, num_val_images: int) -> None:
    set_default, get = builder.set_default, builder.get
    batch_size = get("batch_size")
    steps_per_epoch = num_images / batch_size
    epochs = _default_epochs(get_architecture(get("model")), get("weights"))
    full_steps, steps = round(epochs * steps_per_epoch), _default_steps(epochs, num_images, batch_size)
    reason = f"{epochs} epochs of {num_images:,} images{' from random weights' if epochs > EPOCHS else ''}"
    if steps != full_steps:
        bound = "at least" if steps > full_steps else "at most"
        reason += f" would be {full_steps:,} steps; {bound} {steps:,}"
    set_default("max_duration", str(steps), reason)
    duration = parse_duration(get("max_duration"))
    total = total_steps(duration, num_images, batch_size)
    batch_ratio = batch_size / _reference_lr(get_architecture(get("model")).recipe, get("optimizer"))[1]
    if total is None:
        set_default("warmup_steps", *choose_warmup_steps(None, batch_ratio))
        eval_duration = Duration(max(0.001, round(duration.value / NUM_EVALUATIONS, 3)), "minutes")
        set_default("eval_every", str(eval_duration), "12 times in total")
        set_default("ema_decay", 0.98, "averages over about 50 steps; the number of steps is not known in advance")
        return
    set_default("warmup_steps", *choose_warmup_steps(total, batch_ratio))
    # Forward passes cost about a third of a training step; evaluation may cost a tenth of training.
    cost_interval = math.ceil(3.5 * num_val_images / batch_size)
    interval = max(math.ceil(steps_per_epoch), cost_interval, math.ceil(total / NUM_EVALUATIONS))
    reason = "at most once per epoch, 12 times in total, and for a tenth of the time"
    if interval >= total:
        set_default("eval_every", "0", f"only at the end: {reason}")
    else:
        set_default("eval_every", str(interval), reason)
    horizon = max(10.0, 0.02 * total)
    horizon_reason = "2 % of the length" if horizon > 10 else "the minimum"
    set_default(
        "ema_decay",
        float(f"{min(0.9998, 1 - 1 / horizon):.5g}"),
        f"averages over about {horizon:.0f} steps, {horizon_reason}",
    )


def _default_epochs(arch: Architecture, weights: str) -> int:
    if arch.recipe == "tiny":
        return TINY_EPOCHS
    return EPOCHS * (FROM_SCRATCH_FACTOR if weights == "none" else 1)


def _default_steps(epochs: int, num_images: int, batch_size: int) -> int:
    max_steps = MAX_IMAGES_SEEN * epochs // EPOCHS // batch_size
    return min(max_steps, max(MIN_STEPS, round(epochs * num_images / batch_size)))


def views_per_image(
    max_duration: str | None, epochs: int, num_images: int, batch_size: int, images_per_second: float | None = None
) -> float | None:
    """How often each image is seen in the requested length, or in the default one for so many epochs.

    images_per_second: for a length in minutes; without it, the result is None for such a length.
    """
    duration = None if max_duration is None else parse_duration(max_duration)
    steps = (
        _default_steps(epochs, num_images, batch_size)
        if duration is None
        else total_steps(duration, num_images, batch_size)
    )
    if steps is not None:
        return steps * batch_size / max(1, num_images)
    assert duration is not None
    return None if images_per_second is None else duration.value * 60 * images_per_second / max(1, num_images)


def total_steps(duration: Duration, num_images: int, batch_size: int) -> int | None:
    """Optimizer steps of a length; None if it is given in minutes."""
    match duration.unit:
        case "steps":
            return int(duration.value)
        case "epochs":
            return max(1, math.ceil(duration.value * num_images / batch_size))
        case "minutes":
            return None
