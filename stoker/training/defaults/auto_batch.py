"""Which batch size to train with: one that fits the memory, or with `--auto-batch` the one with the best time per
image.

Both are tried on the worst case that the run can produce (`dry_run.py`), before anything else is done. On an
accelerator, the whole batch is tried first, then its halves, thirds and so on, until one fits. On a CPU, memory is
counted: the tensors alive in the forward pass of one image. What trials found is remembered, so that the same command
does not repeat them.
"""

import functools
import itertools
import math
import os
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec
import torch

from stoker.config.settings import Config
from stoker.data.augment import MOSAIC_GROUP_SIZE
from stoker.data.index import Index
from stoker.data.loading.loader import compute_max_boxes
from stoker.errors import ConfigError, OutOfMemoryError
from stoker.hardware.device import Device
from stoker.storage.local_files import cache_folder, write_atomic
from stoker.training.cluster import ONE_DEVICE, Devices
from stoker.training.defaults.dry_run import BatchTrial, DryRun, PeakMemoryMode, try_sizes

GIB = 2**30

NO_TRIAL_OF_SHARDS = "one device cannot try a step of a model that is divided among several"

MAX_SLOWDOWN = 1.03
"""A smaller batch is taken if its time per image is at most this factor above the best."""


PACKAGE = Path(__file__).resolve().parents[2]
MEMORY_TOLERANCE = 0.05
"""Trials are repeated if the free memory differs by more than this fraction."""
WITHOUT_EFFECT = frozenset(
    {"data", "format", "classes", "val_fraction", "allow_outside", "seed", "max_duration", "workers",
     "worker_processes", "cache", "eval_every", "patience", "checkpoint_every", "price_per_device_hour",
     "max_bad_fraction", "max_bad_boxes", "sync", "train", "val", "splits", "split_method", "shuffle_buffer"}
)  # fmt: skip
"""Settings that a trial does not depend on."""


class _Found(msgspec.Struct):
    free_bytes: int
    batch_size: int
    micro_batches: int
    reason: str


def choose_batch_size(
    config: Config,
    index: Index,
    device: Device,
    *,
    recipe_batch_size: int,
    num_images: int,
    devices: Devices = ONE_DEVICE,
) -> tuple[int, int, str]:
    """`find_batch_size`, or what it found before: with these settings, device and versions, numbers of
    images, classes and boxes, and about as much free memory."""
    choose = functools.partial(
        find_batch_size,
        config, index, device, recipe_batch_size=recipe_batch_size, num_images=num_images, devices=devices,
    )  # fmt: skip
    if device.is_cpu and not config.run.auto_batch:
        return choose()
    free_bytes = device.memory().free
    sizes = [recipe_batch_size, num_images, len(index.class_names), devices.count, devices.on_host]
    key = _key(config, index, device, sizes)
    path = cache_folder() / "batch-sizes" / f"{key}.json"
    found = _read(path)
    if found is not None and abs(free_bytes / found.free_bytes - 1) <= MEMORY_TOLERANCE:
        return found.batch_size, found.micro_batches, f"{found.reason}; found by an earlier run"
    batch_size, micro_batches, reason = choose()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, msgspec.json.encode(_Found(free_bytes, batch_size, micro_batches, reason)))
    return batch_size, micro_batches, reason


def _read(path: Path) -> _Found | None:
    """None if there is no file, or a damaged one: the trials will replace it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Found)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _key(config: Config, index: Index, device: Device, counts: list[int]) -> str:
    """Of everything else that the trials depend on; stoker's version is the time of its newest file."""
    facts = [
        {name: value for name, value in sorted(config.set_fields().items()) if name not in WITHOUT_EFFECT},
        counts,
        compute_max_boxes(index, index.image_indices("train"), mosaic=config.data.mosaic),
        [device.kind, device.name, device.memory().total, torch.get_num_threads()],
        [torch.__version__, torch.version.cuda, os.environ.get("PYTORCH_CUDA_ALLOC_CONF")],
        max(file.stat().st_mtime_ns for file in PACKAGE.rglob("*.py")),
    ]
    return blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def find_batch_size(
    config: Config,
    index: Index,
    device: Device,
    *,
    recipe_batch_size: int,
    num_images: int,
    devices: Devices = ONE_DEVICE,
) -> tuple[int, int, str]:
    """(images per step of all devices, micro-batches per step, reason): for the user's batch size, for the fastest one
    with `--auto-batch`, else for the recipe's.

    `config` needs the image size, precision, the optimizer and the model's settings; num_images: of the training split.
    Raises OutOfMemoryError if one image does not fit, ConfigError if both `--auto-batch` and a batch size are set.
    """
    user_batch_size: int | None = config.set_fields().get("batch_size")
    if user_batch_size is not None and config.run.auto_batch:
        raise ConfigError(
            f"--auto-batch and --batch-size {user_batch_size} exclude each other.", fix="leave one of them out"
        )
    total_size: int = user_batch_size if user_batch_size is not None else max(1, min(recipe_batch_size, num_images))
    target_size = -(-total_size // devices.count)
    if user_batch_size is None and config.data.mosaic > 0:
        target_size = max(MOSAIC_GROUP_SIZE, target_size // MOSAIC_GROUP_SIZE * MOSAIC_GROUP_SIZE)
    source = "set by the user" if user_batch_size is not None else f"the recipe's {recipe_batch_size}"
    if user_batch_size is None and total_size < recipe_batch_size:
        source = f"the training split has {num_images} images"
    if (config.run.shard or config.run.num_stages > 1) and not device.is_cpu:
        source += f", {target_size} on each of {devices.count} devices"
        return target_size * devices.count, 1, f"{source}; not tried: {NO_TRIAL_OF_SHARDS}"
    dry_run = make_dry_run(config, index, device)
    if device.is_cpu:
        dry_run.budget_bytes //= devices.on_host
    if config.run.auto_batch:
        target_size, source = _fastest_batch_size(dry_run, max(1, num_images // devices.count), target_size)
    min_size = min(dry_run.min_size, target_size)
    if device.is_cpu:
        max_size, evidence = _max_size_on_cpu(dry_run, min_size)
    else:
        max_size, evidence = _max_size_on_device(dry_run, min_size, target_size)
    if max_size < min_size:
        height, width = config.data.image_size
        count_text = "one image" if min_size == 1 else f"{min_size} images"
        suggestion = "" if config.model.activation_checkpointing else "--activation-checkpointing, "
        raise OutOfMemoryError(
            f"Not even {count_text} of {width}x{height} pixels fit the memory of {device.name}.",
            cause=evidence,
            fix=f"{suggestion}a smaller --image-size or --model, or a device with more memory",
        )
    micro_batches = next(n for n in range(1, target_size + 1) if target_size % n == 0 and target_size // n <= max_size)
    split = "" if micro_batches == 1 else f", so in {micro_batches} micro-batches"
    if devices.count > 1:
        source += f", {target_size} on each of {devices.count} devices"
    return target_size * devices.count, micro_batches, f"{source}; {evidence}{split}"


def make_dry_run(config: Config, index: Index, device: Device) -> DryRun:
    max_boxes = compute_max_boxes(index, index.image_indices("train"), mosaic=config.data.mosaic)
    return DryRun(config, device, num_classes=len(index.class_names), max_boxes=max_boxes)


def candidate_sizes(dry_run: DryRun, num_images: int) -> Iterator[int]:
    """Micro-batch sizes that can be tried: powers of two whose batch (times `grad_accum_steps`) has whole mosaic groups
    and at most `num_images` images."""
    config = dry_run.config
    micro_batches = config.optim.grad_accum_steps or 1
    min_size = max(
        dry_run.min_size,
        MOSAIC_GROUP_SIZE // math.gcd(MOSAIC_GROUP_SIZE, micro_batches) if config.data.mosaic > 0 else 1,
    )
    return itertools.takewhile(
        lambda size: size * micro_batches <= num_images, (min_size * 2**n for n in itertools.count())
    )


def pick_fastest(trials: Iterable[BatchTrial]) -> BatchTrial:
    """The smallest whose time per image is within MAX_SLOWDOWN of the best."""
    trials = list(trials)
    best = min(trial.seconds_per_image for trial in trials)
    return next(trial for trial in trials if trial.seconds_per_image <= MAX_SLOWDOWN * best)


def _fastest_batch_size(dry_run: DryRun, num_images: int, fallback: int) -> tuple[int, str]:
    """(batch size, reason with the times); `fallback` if no size could be tried."""
    trials: list[BatchTrial] = []
    end = f"the training split has {num_images} images"
    for trial in try_sizes(dry_run, candidate_sizes(dry_run, num_images)):
        if isinstance(trial, BatchTrial):
            trials.append(trial)
        else:
            end = trial
    if not trials:
        return fallback, f"no batch size could be tried: {end}"
    micro_batches = dry_run.config.optim.grad_accum_steps or 1
    table = ", ".join(
        f"{trial.micro_batch_size * micro_batches}: {1e3 * trial.seconds_per_image:.3g} ms" for trial in trials
    )
    compile_note = "" if not dry_run.config.run.compile else ", not compiled as in training"
    fastest = pick_fastest(trials).micro_batch_size * micro_batches
    return fastest, f"fastest of the trials, time per image at {table}{compile_note}; {end}"


def _max_size_on_cpu(dry_run: DryRun, min_size: int) -> tuple[int, str]:
    memory = PeakMemoryMode("cpu")
    model, worst_batch = dry_run.optimizer.model, dry_run.make_batch(min_size)
    for tensor in model.state_dict().values():
        memory.add(tensor)
    initial_bytes = memory.current_bytes
    with memory:
        loss = dry_run.compute_loss(worst_batch)
        if dry_run.config.model.activation_checkpointing:  # without it, the peak is at the end of the forward pass
            torch.autograd.backward(loss)
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    # Weights, gradients, two moments and the EMA; half as much again of the activations for temporaries.
    bytes_per_image = 1.5 * (memory.peak_bytes - initial_bytes) / min_size
    free_bytes = dry_run.budget_bytes - 5 * weight_bytes
    evidence = f"{bytes_per_image / 2**20:,.0f} MiB per image of {free_bytes / GIB:.0f} GiB"
    return int(free_bytes // bytes_per_image), evidence


def _max_size_on_device(dry_run: DryRun, min_size: int, target_size: int) -> tuple[int, str]:
    """(the largest equal part of `target_size` that fits, or 0; evidence).

    The largest comes first: in each trial cuDNN times its convolutions for that size, for many seconds, and only the
    choices for the size of training are used again.
    """
    limit_bytes = dry_run.budget_bytes
    parts = [target_size // n for n in range(1, target_size + 1) if target_size % n == 0]
    for count in (*(part for part in parts if part > min_size), min_size):
        try:
            used_bytes = dry_run.measure_peak_bytes(count)
        except torch.OutOfMemoryError:
            continue
        if used_bytes <= limit_bytes:
            images = f"{count} {'image' if count == 1 else 'images'}"
            return count, f"{used_bytes / GIB:.1f} of {limit_bytes / GIB:.1f} GiB at {images}, measured"
    return 0, f"{min_size} at a time take more than {limit_bytes / GIB:.1f} GiB"
