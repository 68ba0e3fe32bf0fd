"""Derives every setting that the user did not set, from the data, the device and the recipe, each with its reason.

`SETTINGS` is the table: a row for each setting, in the order in which they depend on each other. The function of a
setting is named after it: the learning rate is derived in `derive_lr`. Nothing here changes what the user set;
`checks.py` refuses what excludes each other. Names of models are not here: what differs between architectures is in
their rows of `MODELS`.
"""

import functools
import importlib.util
import math
import os
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.config.architectures import PRETRAINED_NAMES
from stoker.config.settings import SECTION_OF, Config, ModelSettings, check_config, read_recipes, setting_rows
from stoker.data.anchor_fit import AnchorConfig, best_image_size, box_dimensions, percentile_anchor_sizes
from stoker.data.images import pixel_cache
from stoker.data.images.pixel_cache import CachedImageSpec
from stoker.data.index import Index
from stoker.data.loading import device_decoder
from stoker.data.loading.shard_order import choose_buffer
from stoker.data.loading.stats import default_num_workers
from stoker.data.validation.problems import DEFAULT_MAX_BAD_BOXES, DEFAULT_MAX_BAD_FRACTION
from stoker.data.validation.stats import ModelInput
from stoker.hardware.device import Device
from stoker.hardware.selection import untested_accelerator
from stoker.models import Architecture, get_architecture
from stoker.models.table import FAMILIES, check_image_size, check_settings
from stoker.models.weights.hub import local_path
from stoker.models.weights.load import check_pretrained, read_weights
from stoker.training.cluster import ONE_DEVICE, Devices
from stoker.training.defaults import checks
from stoker.training.defaults.dry_run import NO_TRIAL_OF_SHARDS, DryRun, find_batch_size
from stoker.training.defaults.model_choice import Fetch, choose_image_side, choose_model, estimate_images_per_second
from stoker.training.lr_policy import scale_lr
from stoker_watch.durations import Duration, parse_duration
from stoker_watch.hardware.cgroup import host_cores, host_memory

Choice = tuple[Any, str]
"""A value and the reason for it."""


def derive(
    user_config: Config, index: Index, device: Device, devices: Devices = ONE_DEVICE, fetch: Fetch | None = None
) -> tuple[Config, dict[str, str]]:
    """(complete config, reasons of the fields that `user_config` did not set). devices: how many train together; fetch:
    see `choose_model`. Raises ConfigError for impossible settings, OutOfMemoryError if not even one image fits."""
    checks.check_user_settings(user_config, index, device, devices)
    config, reasons = Derivation(user_config, index, device, devices, fetch).fill(SETTINGS)
    check_config(config)
    return config, reasons


def derive_for_plan(user_config: Config, index: Index, device: Device) -> tuple[Config, dict[str, str]]:
    """The part of `derive` that tries nothing on the device, which need not be here: all about data and model, the
    length, and as the batch size the user's or the recipe's. Raises ConfigError."""
    rows = {name: row for name, row in SETTINGS.items() if name not in TRIED}
    config, reasons = Derivation(user_config, index, device).fill(rows | {"batch_size": recipe_batch_size})
    check_config(config)
    return config, reasons


def derive_data(user_config: Config, index: Index, device: Device) -> tuple[Config, dict[str, str]]:
    """The settings that decide the model's input, and the model. Nothing is tried on the device."""
    return Derivation(user_config, index, device).fill({name: SETTINGS[name] for name in MODEL_INPUT})


def derive_model_input(user_config: Config, index: Index, device: Device) -> ModelInput:
    """The model and its input for `stoker data stats`: what `derive` would choose."""
    anchor_settings = ("anchor_sizes", "anchor_scales", "aspect_ratios")
    known = Derivation(user_config, index, device)
    matching = ("fg_iou_thresh", "bg_iou_thresh", "focal_alpha", "focal_gamma")
    known.fill({name: SETTINGS[name] for name in (*MODEL_INPUT, *anchor_settings, *matching)})
    arch, model, image_size = known.arch, known.config.model, known.config.data.image_size
    anchors = None
    if all(name in arch.defaults for name in anchor_settings):  # those of SSD depend on the level
        anchors = AnchorConfig(tuple(model.anchor_sizes), tuple(model.anchor_scales), tuple(model.aspect_ratios))
    flags = {"model": f"--model {model.model}", "image_size": f"--image-size {image_size[0]} {image_size[1]}"}
    return ModelInput(
        model=model.model,
        anchors=anchors,
        image_size=image_size,
        image_size_reason=known.reasons.get("image_size", "set by --image-size"),
        resize=known.config.data.resize,
        side=choose_image_side(arch, index, device, known.config.data.resize),
        multiple=arch.size_divisor,
        set_flags=tuple(flag for name, flag in flags.items() if name not in known.reasons),
        settings=known.config.set_fields() if anchors or "anchor_sizes" not in arch.defaults else {},
    )


class Derivation:
    """What a setting is derived from: the data, the device, and `config`, the settings so far."""

    def __init__(
        self,
        user_config: Config,
        index: Index,
        device: Device,
        devices: Devices = ONE_DEVICE,
        fetch: Fetch | None = None,
    ) -> None:
        self.config, self.index, self.device, self.fetch = user_config, index, device, fetch
        self.reasons: dict[str, str] = {}
        self.devices = devices
        self.train_indices: NDArray[np.int64] = index.image_indices("train")
        self.num_images = len(self.train_indices)
        self.num_val_images = len(index.image_indices("val")) if "val" in index.splits else 0

    def fill(self, table: "Mapping[str, Row]") -> tuple[Config, dict[str, str]]:
        """Walks the table once: keeps and checks what the user set, derives the rest. The settings and the reasons."""
        for name, row in table.items():
            if self.config.set_fields().get(name) is None and (choice := self._choose(name, row)) is not None:
                self.config = self.config.replace(**{name: choice[0]})
                self.reasons[name] = choice[1]
            if name in CHECKS:
                CHECKS[name](self)
        return self.config, self.reasons

    def _choose(self, name: str, row: "Row") -> Choice | None:
        """The choice of the first that decides: `--augment none`, the recipe, the row, the weights, the model."""
        if name in AUGMENTATIONS and self.config.data.augment == "none":
            return 0.0, "--augment none"
        if name in self.recipe_settings:
            return self.recipe_settings[name], f"recipe {self.arch.recipe}"
        choice = row(self) if callable(row) else row
        if choice is not None or name not in self.arch.defaults:
            return choice
        if name in self.options_of_weights:
            return self.options_of_weights[name], f"as the weights ({self.config.model.weights}) have it"
        return self.arch.defaults[name], self.arch.reasons[name]

    @property
    def arch(self) -> Architecture:
        return get_architecture(self.config.model.model)

    @property
    def recipe(self) -> Config:
        return read_recipes()[self.arch.recipe]

    @property
    def recipe_settings(self) -> dict[str, Any]:
        """What the recipe sets as it is: its learning rates are for its batch size and for pretrained weights, its
        optimizer for whole kernels."""
        settings = {} if self.config.model.model is None else self.recipe.set_fields()
        derived = ("batch_size", "lr", "backbone_lr_mult", "optimizer")
        return {name: value for name, value in settings.items() if name not in derived}

    @functools.cached_property
    def options_of_weights(self) -> Mapping[str, bool]:
        """Settings of the model that its initial weights decide."""
        arch, weights = self.arch, self.config.model.weights
        options_from_weights = FAMILIES[arch.family].options_from_weights
        if options_from_weights is not None and weights not in ("none", *PRETRAINED_NAMES):
            return options_from_weights(read_weights(local_path(weights)).tensors)
        return arch.pretrained_options.get(weights, {})

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the run; None if its length is a time."""
        return total_steps(parse_duration(self.config.run.max_duration), self.num_images, self.config.run.batch_size)

    @functools.cached_property
    def batch_trial(self) -> tuple[int, int, str]:
        """(batch size, micro-batches per step, reason): what fits the device. Raises OutOfMemoryError."""
        return find_batch_size(
            self.config, self.index, self.device,
            recipe_batch_size=self.recipe.run.batch_size, num_images=self.num_images, devices=self.devices,
        )  # fmt: skip

    @functools.cached_property
    def step_s(self) -> float:
        """Seconds of an optimizer step of the chosen batch size, not compiled; tried on the device."""
        micro_batches = self.config.optim.grad_accum_steps
        dry_run = DryRun(self.config, self.index, self.device)
        count = self.config.run.batch_size // (micro_batches * self.devices.count)
        return dry_run.measure_step_s(count) * micro_batches


Derive = Callable[[Derivation], Choice | None]
Row = Choice | Derive | None

AUGMENTATIONS = ("hflip", "scale_jitter_prob", "brightness", "contrast", "saturation", "hue", "mosaic", "mixup")
"""Settings that `--augment none` sets to 0."""


def derive_model(known: Derivation) -> Choice:
    """By device, images and weights: docs/models.md."""
    model = known.config.model
    choose = functools.partial(choose_model, known.index, known.device, model.weights, queries=model.queries)
    check_image_size(known.config.replace(model=choose()[0]))  # before a download
    return choose(fetch=known.fetch)


def derive_weights(known: Derivation) -> Choice:
    """The first of objects365+coco, coco, objects365, imagenet that the model has; else none."""
    choice = next(iter(known.arch.urls), "none")
    reasons = {
        "objects365+coco": "of the larger data, as its authors advise for fine-tuning; license: docs/models.md",
        "imagenet": "the backbone's; there are none for the whole detector",
        "none": "there are no pretrained weights for this model",
    }
    return choice, reasons.get(choice, "trained as a detector")


def derive_format(known: Derivation) -> Choice:
    """Detected from the files."""
    return known.index.format, "detected"


def derive_image_size(known: Derivation) -> Choice:
    """The aspect ratio of most images, and at most the pixels that the model was designed for."""
    arch = known.arch
    side = choose_image_side(arch, known.index, known.device, known.config.data.resize)
    note = "" if side == arch.default_image_size else "on a CPU "
    return best_image_size(known.index.original_size[known.train_indices], side, arch.size_divisor, context=note)


def derive_scale_jitter_prob(known: Derivation) -> Choice:
    """0.5: every other image at another scale; more for ember if images are seen many times."""
    return _stronger_augmentation(known, "scale_jitter_prob") or (0.5, "every other image at another scale")


def derive_scale_range(known: Derivation) -> Choice:
    """0.7 1.5: mild, object sizes stay like those of the data; wider for ember if images are seen many times."""
    strong = None if known.config.data.scale_jitter_prob == 0 else _stronger_augmentation(known, "scale_range")
    return strong or ((0.7, 1.5), "mild: object sizes stay like those of the data")


def _stronger_augmentation(known: Derivation, name: str) -> Choice | None:
    """The choice if each image is seen many times, with the recipe's batch size: `--auto-batch` comes later."""
    arch, config = known.arch, known.config
    batch_size = config.run.batch_size or min(known.num_images, known.recipe.run.batch_size)
    if arch.tuning is None:
        return None
    length = parse_duration(config.run.max_duration) if config.run.max_duration else None
    steps = total_steps(length, known.num_images, batch_size) if length else _default_length(known, batch_size)[1]
    if steps is not None:
        num_seen = float(steps * batch_size)
    elif length is not None and known.device.computes_on_host:
        num_seen = length.value * 60 * estimate_images_per_second(arch, config.data.image_size)
    else:
        return None  # how fast an accelerator is, is not known
    views = num_seen / max(1, known.num_images)
    if views < arch.tuning.many_views:
        return None
    reason = f"each image is seen about {views:.0f} times: stronger augmentation against overfitting"
    return arch.tuning.strong_augmentation[name], reason


def derive_backbone_norm(known: Derivation) -> Choice | None:
    """bn for random weights, else the model's."""
    is_random = known.config.model.weights == "none"
    return ("bn", "there are no statistics to freeze: the weights are random") if is_random else None


def derive_trainable_backbone_layers(known: Derivation) -> Choice | None:
    """5 for random weights, else the model's."""
    return (5, "the weights are random") if known.config.model.weights == "none" else None


def derive_anchor_sizes(known: Derivation) -> Choice | None:
    """retinanet_tiny_fpn: percentiles of the boxes; faster_rcnn and others: scaled with the image size."""
    arch, config = known.arch, known.config
    if arch.recipe == "tiny" and config.model.weights == "none":
        image_size = config.data.image_size
        box_sizes = box_dimensions(known.index, known.train_indices, image_size, config.data.resize).resized_wh
        return percentile_anchor_sizes(box_sizes, image_size, len(arch.defaults["anchor_sizes"]))
    if arch.anchors_scale_with_image_size:
        factor = math.sqrt(math.prod(config.data.image_size)) / arch.default_image_size
        sizes = tuple(float(f"{size * factor:.4g}") for size in arch.defaults["anchor_sizes"])
        return sizes, f"{arch.reasons['anchor_sizes']}, times {factor:.3g} at this image size"
    return None


def derive_device(known: Derivation) -> Choice:
    """An NVIDIA GPU, else the CPU; others only by name."""
    name = str(known.device.torch_device)
    if not known.device.is_cpu:
        return name, "the accelerator that torch found"
    if (untried_device := untested_accelerator()) is None:
        return name, "no accelerator"
    return name, f"training on {untried_device} is untested; --device {untried_device} uses it"


def derive_precision(known: Derivation) -> Choice:
    """The fastest one with which training is stable on the device."""
    return known.device.best_precision()


def derive_workers(known: Derivation) -> Choice:
    """auto: tuned while training."""
    is_cpu = known.device.is_cpu
    note = "; at most as many decode, as the model needs the cores itself" if is_cpu else ""
    return "auto", f"tuned while training, starting with {default_num_workers(host_cores(), is_cpu=is_cpu)}{note}"


def derive_batch_size(known: Derivation) -> Choice:
    """The recipe's, or the fastest one with `--auto-batch`."""
    batch_size, _, reason = known.batch_trial
    return batch_size, reason


def recipe_batch_size(known: Derivation) -> Choice:
    """The recipe's, where nothing can be tried."""
    batch_size = known.recipe.run.batch_size
    return max(1, min(batch_size, known.num_images)), f"the recipe's {batch_size}"


def derive_grad_accum_steps(known: Derivation) -> Choice:
    """As many micro-batches as memory asks for."""
    _, micro_batches, reason = known.batch_trial
    return micro_batches, "the whole batch fits" if micro_batches == 1 else reason


def _check_batch(known: Derivation) -> None:
    """Tries the batch, also one that the user set."""
    _ = known.batch_trial
    checks.check_micro_batches(known.config, known.devices.count)


def derive_backbone_lr_mult(known: Derivation) -> Choice:
    """The recipe's for pretrained weights (D-FINE, DEIMv2, RF-DETR); 0.3 for ember on a pretrained backbone with frozen
    norms; else 1.0, one learning rate for all weights, as in torchvision's and Detectron2's recipes."""
    arch, model, of_recipe = known.arch, known.config.model, known.recipe.optim.backbone_lr_mult
    if model.weights != "none" and of_recipe is not None:
        return of_recipe, f"recipe {arch.recipe}"
    if arch.tuning is not None and arch.urls and model.weights != "none" and model.backbone_norm == "frozen_bn":
        reason = "its norms are frozen, and its features must not outgrow those of the neck"
        return arch.tuning.frozen_backbone_lr_mult, reason
    return 1.0, "one learning rate for all weights, as in torchvision's and Detectron2's recipes"


def derive_optimizer(known: Derivation) -> Choice:
    """The recipe's; adamw with `--shard` where that is muon."""
    if known.recipe.optim.optimizer == "muon" and known.config.run.shard:
        return "adamw", "muon needs whole kernels, which --shard divides"
    return known.recipe.optim.optimizer, f"recipe {known.arch.recipe}"


def derive_lr(known: Derivation) -> Choice:
    """The recipe's, scaled with the batch size: linearly for sgd, with its square root for adamw and muon.

    SGD: a step with k times the images moves as far as k steps (Goyal et al. 2017, "Accurate, Large Minibatch SGD").
    AdamW divides by the gradient's magnitude, so the noise must stay the same, which falls with the square root of the
    batch size (Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms"). Momentum and the
    betas stay: Malladi's rule for them, 1 - k (1 - beta), is not defined for k of 10 and more.
    """
    (base_lr, base_batch_size, source), optimizer = _reference_lr(known), known.config.optim.optimizer
    lr = scale_lr(base_lr, known.config.run.batch_size / base_batch_size, optimizer)
    rule = "linear rule (Goyal et al. 2017)" if optimizer == "sgd" else "square root rule (Malladi et al. 2022)"
    return float(f"{lr:.3g}"), f"{source}: {base_lr:g} at {base_batch_size} images, {rule}"


def _reference_lr(known: Derivation) -> tuple[float, int, str]:
    """(learning rate, its batch size, its source)."""
    optimizer, recipe = known.config.optim.optimizer, known.recipe
    if (optimizer == "sgd") == (recipe.optim.optimizer == "sgd"):  # muon's updates are as large as adamw's
        return recipe.optim.lr, recipe.run.batch_size, f"recipe {known.arch.recipe}"
    if optimizer != "sgd":
        return 1e-3, 16, "usual for adamw"
    return 0.01, 16, "torchvision's reference"


EPOCHS, MIN_STEPS, MAX_IMAGES_SEEN = 12, 1_500, 90_000 * 16
"""12 epochs (Detectron2's 1x schedule), at least 1,500 steps, at most as many images as this schedule takes on COCO."""
TINY_EPOCHS = 10
"""Epochs of the tiny model, whose few weights profit from no more (LOG.md, "The demo in four minutes")."""
FROM_SCRATCH_FACTOR = 3
"""Factor of the length for random weights: a detector then reaches the accuracy of pretrained ones, after three to six
times as many epochs (He et al. 2018, "Rethinking ImageNet Pre-training", arXiv 1811.08883)."""
NUM_EVALUATIONS = 12


def derive_max_duration(known: Derivation) -> Choice:
    """12 epochs, 36 from random weights, 10 of retinanet_tiny_fpn; at least 1,500 steps, at most as many images as that
    many epochs of COCO have."""
    epochs, steps = _default_length(known, known.config.run.batch_size)
    full_steps = round(epochs * known.num_images / known.config.run.batch_size)
    reason = f"{epochs} epochs of {known.num_images:,} images{' from random weights' if epochs > EPOCHS else ''}"
    if steps != full_steps:
        bound = "at least" if steps > full_steps else "at most"
        reason += f" would be {full_steps:,} steps; {bound} {steps:,}"
    return str(steps), reason


def derive_warmup_steps(known: Derivation) -> Choice:
    """5 % of the length, at most 500 steps; longer for a batch size above the recipe's."""
    return choose_warmup_steps(known.total_steps, known.config.run.batch_size / _reference_lr(known)[1])


def choose_warmup_steps(total: int | None, batch_ratio: float) -> tuple[int, str]:
    """Warm-up steps and the reason. total: steps of the run, None if it has a time; batch_ratio: batch size relative to
    the reference. Goyal et al. need a longer warm-up for a larger batch: 780 steps at 32 times their reference. With
    the square root of the batch size, 500 steps at 16 images become 2,000 at 256."""
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


def derive_eval_every(known: Derivation) -> Choice:
    """12 evaluations, at most one per epoch, in at most a tenth of the time."""
    batch_size, total = known.config.run.batch_size, known.total_steps
    if total is None:
        minutes = parse_duration(known.config.run.max_duration).value / NUM_EVALUATIONS
        return str(Duration(max(0.001, round(minutes, 3)), "minutes")), "12 times in total"
    # Forward passes cost about a third of a training step.
    cost_interval = math.ceil(3.5 * known.num_val_images / batch_size)
    interval = max(math.ceil(known.num_images / batch_size), cost_interval, math.ceil(total / NUM_EVALUATIONS))
    reason = "at most once per epoch, 12 times in total, and for a tenth of the time"
    return ("0", f"only at the end: {reason}") if interval >= total else (str(interval), reason)


def derive_ema_decay(known: Derivation) -> Choice:
    """Averages over about 2 % of the length, at least 10 steps."""
    if known.total_steps is None:
        return 0.98, "averages over about 50 steps; the number of steps is not known in advance"
    horizon = max(10.0, 0.02 * known.total_steps)
    source = "2 % of the length" if horizon > 10 else "the minimum"
    return float(f"{min(0.9998, 1 - 1 / horizon):.5g}"), f"averages over about {horizon:.0f} steps, {source}"


def _default_length(known: Derivation, batch_size: int) -> tuple[int, int]:
    """(epochs, steps), which are more or fewer than the epochs if these were too short or too long."""
    return usual_length(known.config.model, known.num_images, batch_size)


def usual_length(model: ModelSettings, num_images: int, batch_size: int) -> tuple[int, int]:
    """(epochs, steps) of the default length for a model and so many images: what a training of them usually takes."""
    if get_architecture(model.model).recipe == "tiny":
        epochs = TINY_EPOCHS
    else:
        epochs = EPOCHS * (FROM_SCRATCH_FACTOR if model.weights == "none" else 1)
    max_steps = MAX_IMAGES_SEEN * epochs // EPOCHS // batch_size
    return epochs, min(max_steps, max(MIN_STEPS, round(epochs * num_images / batch_size)))


def total_steps(duration: Duration, num_images: int, batch_size: int) -> int | None:
    """Optimizer steps of a length; None if it is given in minutes."""
    match duration.unit:
        case "steps":
            return int(duration.value)
        case "epochs":
            return max(1, math.ceil(duration.value * num_images / batch_size))
        case "minutes":
            return None


def derive_shuffle_buffer(known: Derivation) -> Choice:
    """As many images of shards as a part of the free memory holds; 0 for images that are files."""
    limit, used = host_memory()
    return choose_buffer(
        known.index.image_ranges(known.train_indices),
        is_in_bucket=known.index.remote_object(int(known.train_indices[0])) is not None,
        batch_size=known.config.run.batch_size,
        num_ranks=known.devices.count,
        memory_bytes=max(0, limit - used) // known.devices.on_host,
    )


def derive_cache(known: Derivation) -> Choice:
    """Where decoded images fit, if decoding takes longer than reading them."""
    data, run = known.config.data, known.config.run
    if run.jpeg_decoder == "nvjpeg":
        return "none", "--jpeg-decoder nvjpeg: images for a cache are decoded on the CPU"
    spec = CachedImageSpec.for_augmentation(
        data.image_size, data.resize, scale_jitter_prob=data.scale_jitter_prob, scale_range=data.scale_range
    )
    steps = known.total_steps
    inputs = pixel_cache.collect_cache_inputs(
        known.index,
        known.train_indices,
        spec,
        max_scale=data.scale_range[1] if data.scale_jitter_prob > 0 else 1.0,
        epochs=None if steps is None else steps * run.batch_size / known.num_images,
    )
    kind, reason = pixel_cache.choose_cache(inputs)
    if kind == "ram" and known.devices.on_host > 1:
        return "none", f"in memory, each of the {known.devices.on_host} devices would keep all images"
    return kind, reason


def derive_jpeg_decoder(known: Derivation) -> Choice:
    """nvJPEG where the cores decode fewer images than the GPU trains on, with a step of the chosen batch size."""
    data, device_batch_size = known.config.data, known.config.run.batch_size // known.devices.count
    if known.config.run.shard:
        return "cpu", f"not tried: {NO_TRIAL_OF_SHARDS}"
    if known.config.run.cache != "none":
        return "cpu", "decoded images are cached; the CPU decodes each once"
    return device_decoder.measure_and_choose_decoder(
        known.index, known.train_indices, known.device, image_size=data.image_size, resize=data.resize,
        measure_step_s=lambda: known.step_s / device_batch_size,
    )  # fmt: skip


COMPILE_PAYS_FROM_S = 5 * 60.0
"""Length of a run, not compiled, from which compiling is expected to pay: a minute and a half of compiling, and three
tenths of the time of a step gained. Both are predictions, no GPU has confirmed them (decision 8)."""


def derive_compile(known: Derivation) -> Choice:
    """Yes for long runs on CUDA."""
    if known.config.run.shard:
        return False, "compiling is not supported with --shard"
    if known.device.is_cpu:
        return False, "on a CPU, almost all of a step is convolutions, which compiling does not change"
    if known.device.kind != "cuda":
        return False, f"compiling is untested on {known.device.kind}"
    if (missing := missing_for_compile()) is not None:
        return False, f"{missing}; without it, torch.compile does not work on a GPU"
    steps = known.total_steps
    if steps is None:
        length_s, by = parse_duration(known.config.run.max_duration).value * 60, ""
    else:
        length_s, by = steps * known.step_s, f" by a trial of {known.step_s:.3g} s a step"
    length = f"{length_s / 60:,.0f} minutes{by}"
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


def _defaults(*sections: str) -> dict[str, Row]:
    """The settings that have a default, in the order of knowledge/settings.toml."""
    return {
        name: (tuple(row.default) if isinstance(row.default, list) else row.default, row.reason)
        for name, row in setting_rows().items()
        if SECTION_OF[name] in sections and row.reason
    }


SETTINGS: dict[str, Row] = {
    # The model and its input.
    "model": derive_model,
    "weights": derive_weights,
    **_defaults("data"),
    "format": derive_format,
    "max_bad_fraction": (DEFAULT_MAX_BAD_FRACTION, "more bad files mean a wrong path or a broken copy"),
    "max_bad_boxes": (DEFAULT_MAX_BAD_BOXES, "more bad boxes mean a wrong list of classes or wrong coordinates"),
    "image_size": derive_image_size,
    "scale_jitter_prob": derive_scale_jitter_prob,
    "scale_range": derive_scale_range,
    **dict.fromkeys(name for name, of in SECTION_OF.items() if of == "model" and name not in ("model", "weights")),
    "backbone_norm": derive_backbone_norm,
    "trainable_backbone_layers": derive_trainable_backbone_layers,
    "anchor_sizes": derive_anchor_sizes,
    # The device and the batch.
    **_defaults("model", "optim", "run"),
    "device": derive_device,
    "precision": derive_precision,
    "workers": derive_workers,
    "optimizer": derive_optimizer,
    **dict.fromkeys(("lr_scheduler", "weight_decay", "momentum")),
    "backbone_lr_mult": derive_backbone_lr_mult,
    "batch_size": derive_batch_size,
    "grad_accum_steps": derive_grad_accum_steps,
    # The learning rate and the length.
    "lr": derive_lr,
    "max_duration": derive_max_duration,
    "warmup_steps": derive_warmup_steps,
    "eval_every": derive_eval_every,
    "ema_decay": derive_ema_decay,
    # Loading and compiling.
    "shuffle_buffer": derive_shuffle_buffer,
    "cache": derive_cache,
    "jpeg_decoder": derive_jpeg_decoder,
    "compile": derive_compile,
}  # fmt: skip
"""Setting → its value and reason, or the function that derives them from what is above it. None: the recipe has it
(knowledge/recipes.toml), or the model's row (knowledge/models.toml), or the run goes without."""
MODEL_INPUT = [name for name in SETTINGS if name in ("model", "weights") or SECTION_OF[name] == "data"]
"""Settings that decide what images a model gets."""
TRIED = (
    "precision", "workers", "grad_accum_steps", "lr", "shuffle_buffer", "cache", "jpeg_decoder", "compile",
)  # fmt: skip
"""Settings that depend on the device and what was tried on it."""
CHECKS: dict[str, Callable[[Derivation], None]] = {
    "model": lambda known: check_settings(known.config.model),
    "weights": lambda known: check_pretrained(known.config.model),
    "image_size": lambda known: check_image_size(known.config),
    **dict.fromkeys(
        ("reduced_tail", "nms_free", "depthwise"),
        lambda known: checks.check_options(known.config.model, known.options_of_weights),
    ),
    "shard": lambda known: checks.check_devices(known.config, known.devices.count),
    "grad_accum_steps": _check_batch,
}
"""Setting → check of its value, the user's or a derived one, against what is above it."""
