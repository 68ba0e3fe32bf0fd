"""Dry run of training: whole steps on the worst case that a run can produce, before anything else is done; and the
batch size that they find: one that fits the memory, or with `--auto-batch` the one with the best time per image.

The worst case fills the whole model input and all padded boxes. On an accelerator, memory is what the allocator
counted, and the whole batch is tried first, then its halves, thirds and so on, until one fits. On a CPU, the bytes of
the tensors alive at the same time are counted, in the forward pass of one image.
"""

import dataclasses
import functools
import math
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.config.settings import Config
from stoker.data.augment import MOSAIC_GROUP_SIZE, augment_batch
from stoker.data.batch import NUM_RAND, Batch
from stoker.data.index import Index
from stoker.data.loading.loader import compute_max_boxes
from stoker.hardware.device import Device
from stoker.hardware.memory_errors import is_out_of_memory
from stoker.hardware.xla import end_step
from stoker.models import build
from stoker.training.cluster import ONE_DEVICE, Devices
from stoker.training.optim import OptimizerStep
from stoker.training.state import TrainSetup, count_micro_batches
from stoker.training.step import make_loss_fn
from stoker_watch.errors import ConfigError, OutOfMemoryError

MEMORY_FRACTION = 0.9
"""Fraction of the free memory that a step may use; the rest is for fragmentation and cuDNN's workspace."""
ROUNDS = 3
"""Measurements per batch size; the shortest counts, since disturbances only add time."""
STEPS_PER_ROUND = 3
"""Steps per round on an accelerator: waiting after each step would hide that the host runs ahead."""
MAX_ROUNDS_S = 4.0
"""No further round of a batch size begins after this many seconds."""
MAX_TRIALS_S = 60.0
"""Seconds for the trials of all batch sizes; the next one begins only if it is expected to end in time."""
MAX_SLOWDOWN = 1.03
"""A smaller batch is taken if its time per image is at most this factor above the best."""
GIB = 2**30
NO_TRIAL_OF_SHARDS = "one device cannot try a step of a model that is divided among several"


class BatchTrial(NamedTuple):
    """The measurement of one batch size, in images."""

    micro_batch_size: int
    peak_bytes: int
    seconds_per_image: float


class DryRun:
    """The model and optimizer of a config, with random weights that are never updated. `config` needs the image size,
    precision, the optimizer and the model's settings."""

    def __init__(self, config: Config, index: Index, device: Device) -> None:
        self.config, self.index, self.device = config, index, device
        self.make_batch = functools.partial(
            make_worst_case_batch,
            image_size=config.data.image_size,
            max_boxes=compute_max_boxes(index, index.image_indices("train"), mosaic=config.data.mosaic),
            num_classes=len(index.class_names),
            device=device,
        )
        """Makes the worst case of so many images."""
        self.budget_bytes = int(MEMORY_FRACTION * device.memory().free)
        """Bytes that steps may use, weights included."""
        model = build(config.model, len(index.class_names)).to(device.torch_device).train()
        has_decay = config.optim.ema_decay is not None
        optim = config.optim if has_decay else dataclasses.replace(config.optim, ema_decay=0.99)
        self.optimizer = OptimizerStep(model, optim, device, precision=config.run.precision)
        self._loss_fn = make_loss_fn(model, compile=False)
        self.min_size = 2 if any(isinstance(module, _BatchNorm) for module in model.modules()) else 1
        """Images of the smallest step: of one, trained norms have no variance where a map has a single position."""

    def compute_loss(self, batch: Batch) -> Tensor:
        """The sum of the losses, a scalar; not compiled, since compiling for every batch size would take minutes."""
        with self.device.autocast(self.config.run.precision):
            losses = self._loss_fn(batch)
        return torch.stack(list(losses.values())).sum()

    def step(self, batch: Batch) -> None:
        """Augmentation, forward, losses, backward, and the optimizer at a learning rate of 0."""
        settings = self.config.data
        if batch.images.shape[0] % MOSAIC_GROUP_SIZE:  # a part of a group; training makes mosaics of whole ones
            settings = dataclasses.replace(settings, mosaic=0.0)
        self.optimizer.backward(self.compute_loss(augment_batch(batch, settings, 0.0)))
        self.optimizer.step(0.0, 0)
        end_step(batch.images.device)

    def measure_peak_bytes(self, count: int) -> int:
        """Bytes at the peak of two steps (the second has all optimizer state) and an evaluation; on a CPU of a step.
        Raises torch.OutOfMemoryError."""
        if self.device.is_cpu:
            memory = PeakMemoryMode("cpu")
            for tensor in _pytree.tree_leaves((self.optimizer.state_dict(), self.optimizer.ema_model.state_dict())):
                if isinstance(tensor, Tensor):
                    memory.add(tensor)
            batch = self.make_batch(count)
            with memory:
                self.step(batch)
            return memory.peak_bytes
        self.device.empty_cache()
        self.device.reset_peak_memory()
        try:
            batch = self.make_batch(count)
            for _ in range(2):
                self.step(batch)
            ema_model = self.optimizer.ema_model.eval()
            with torch.no_grad(), self.device.autocast(self.config.run.precision):
                ema_model.decode(ema_model(batch.images), batch.resized_size, batch.scale, batch.original_size)
            ema_model.train()
            self.device.synchronize()
            return self.device.memory().peak
        finally:
            self.device.empty_cache()

    def measure_step_s(self, count: int) -> float:
        """Seconds of a step of `count` images, after a warm-up step. Waits for the device between rounds only."""
        batch = self.make_batch(count)
        self.step(batch)
        self.device.synchronize()
        steps = 1 if self.device.is_cpu else STEPS_PER_ROUND
        start_s, best_s = time.perf_counter(), float("inf")
        for _ in range(ROUNDS):
            round_start_s = time.perf_counter()
            for _ in range(steps):
                self.step(batch)
            self.device.synchronize()
            best_s = min(best_s, (time.perf_counter() - round_start_s) / steps)
            if time.perf_counter() - start_s > MAX_ROUNDS_S:
                break
        return best_s


def try_sizes(dry_run: DryRun, sizes: Iterable[int]) -> tuple[list[BatchTrial], str | None]:
    """(trials of micro-batches of increasing `sizes`, as long as they fit the memory budget and MAX_TRIALS_S; why they
    ended before the last size, or None)."""
    start_s, duration_s = time.perf_counter(), 0.0
    trials: list[BatchTrial] = []
    for count in sizes:
        trial_start_s = time.perf_counter()
        if trial_start_s - start_s + 2 * duration_s > MAX_TRIALS_S:
            return trials, f"trials end after {MAX_TRIALS_S:.0f} s"
        peak_bytes = _extrapolate_peak_bytes(trials, count)
        try:
            if peak_bytes <= dry_run.budget_bytes:
                peak_bytes = dry_run.measure_peak_bytes(count)
            if peak_bytes <= dry_run.budget_bytes:
                trials.append(BatchTrial(count, int(peak_bytes), dry_run.measure_step_s(count) / count))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        if not trials or trials[-1].micro_batch_size != count:
            return trials, f"{count} do not fit"
        duration_s = time.perf_counter() - trial_start_s
    return trials, None


def _extrapolate_peak_bytes(trials: list[BatchTrial], count: int) -> float:
    """Bytes at `count` on the line through the last two trials; 0 if there are not two."""
    if len(trials) < 2:
        return 0.0
    a, b = trials[-2:]
    slope = (b.peak_bytes - a.peak_bytes) / (b.micro_batch_size - a.micro_batch_size)
    return b.peak_bytes + slope * (count - b.micro_batch_size)


def make_worst_case(setup: TrainSetup) -> Batch:
    """A micro-batch of the shapes of training."""
    return make_worst_case_batch(
        setup.rank_batch_size // setup.micro_batches,
        image_size=setup.config.data.image_size,
        max_boxes=setup.max_boxes,
        num_classes=len(setup.index.class_names),
        device=setup.device,
    )


def make_worst_case_batch(
    count: int, *, image_size: tuple[int, int], max_boxes: int, num_classes: int, device: Device
) -> Batch:
    """A batch of `count` images that fill the image size (height, width), each with `max_boxes` boxes. The pixels are
    random, always the same: constant ones take less power to multiply, so that a GPU at its power limit runs faster
    than it will in training."""
    height, width = image_size
    torch_device = device.torch_device
    drawn_on = torch_device if device.has_streams else torch.device("cpu")  # XLA has no generators
    generator = torch.Generator(drawn_on).manual_seed(0)
    pixels = torch.randint(256, (count, height, width, 3), dtype=torch.uint8, device=drawn_on, generator=generator)
    top_left = torch.rand(count, max_boxes, 2, device=torch_device) * 0.5
    whwh = torch.tensor([width, height, width, height], dtype=torch.float32, device=torch_device)
    hw = torch.tensor([[height, width]], dtype=torch.int32, device=torch_device).expand(count, 2).contiguous()
    labels = torch.arange(max_boxes, device=torch_device) % num_classes
    return Batch(
        images=pixels.to(torch_device).permute(0, 3, 1, 2),
        boxes=torch.cat([top_left, top_left + 0.4], -1) * whwh,
        labels=labels.expand(count, max_boxes).contiguous(),
        valid=torch.ones(count, max_boxes, dtype=torch.bool, device=torch_device),
        resized_size=hw,
        scale=torch.ones(count, 2, device=torch_device),
        original_size=hw.clone(),
        image_index=torch.arange(count, device=torch_device),
        rand=torch.rand(count, NUM_RAND, device=drawn_on, generator=generator).to(torch_device),
    )


class PeakMemoryMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own bases are untyped
    """Counts the bytes of live tensors on a device type: `current_bytes`, and their maximum `peak_bytes`. Every storage
    counts once, rounded up to `rounding_bytes`. Memory used inside a single operator is not counted."""

    def __init__(self, device_type: str, rounding_bytes: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type, self.rounding_bytes = device_type, rounding_bytes
        self.current_bytes = self.peak_bytes = 0
        self.live_storages: dict[int, tuple[int, str]] = {}
        """Storage → bytes, and data type of the tensor that created it."""

    def add(self, tensor: Tensor, operator: str = "before") -> None:
        """Counts a tensor that was created before this mode was entered."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.device.type != self.device_type or key in self.live_storages:
            return
        size = -(-storage.nbytes() // self.rounding_bytes) * self.rounding_bytes
        self.live_storages[key] = (size, str(tensor.dtype))
        self.current_bytes += size
        weakref.finalize(storage, self._free, key)
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes = self.current_bytes
            self.at_peak(operator)

    def at_peak(self, operator: str) -> None:
        """Called when `operator` has raised the peak; override it to see which tensors are alive."""

    def _free(self, key: int) -> None:
        self.current_bytes -= self.live_storages.pop(key)[0]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from wrapping `__torch_dispatch__` in a function that imports torch._dynamo, for two seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in _pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf, str(func))
        return result


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
    with `--auto-batch`, else for the recipe's. num_images: of the training split. Raises OutOfMemoryError if one image
    does not fit, ConfigError if both `--auto-batch` and a batch size are set."""
    user_batch_size: int | None = config.set_fields().get("batch_size")
    if user_batch_size is not None and config.run.auto_batch:
        what = f"--auto-batch and --batch-size {user_batch_size} exclude each other."
        raise ConfigError(what, fix="leave one of them out")
    total_size: int = user_batch_size if user_batch_size is not None else max(1, min(recipe_batch_size, num_images))
    target_size = -(-total_size // devices.count)
    if user_batch_size is None and config.data.mosaic > 0:
        target_size = max(MOSAIC_GROUP_SIZE, target_size // MOSAIC_GROUP_SIZE * MOSAIC_GROUP_SIZE)
    source = "set by the user" if user_batch_size is not None else f"the recipe's {recipe_batch_size}"
    if user_batch_size is None and total_size < recipe_batch_size:
        source = f"the training split has {num_images} images"
    if config.run.shard:
        source += f", {target_size} on each of {devices.count} devices"
        return target_size * devices.count, 1, f"{source}; not tried: {NO_TRIAL_OF_SHARDS}"
    dry_run = DryRun(config, index, device)
    if device.is_cpu:
        dry_run.budget_bytes //= devices.on_host
    if config.run.auto_batch:
        target_size, source = _fastest_batch_size(dry_run, max(1, num_images // devices.count), target_size)
    min_size = min(dry_run.min_size, target_size)
    max_size, evidence = (
        _max_size_on_cpu(dry_run, min_size) if device.is_cpu else _max_size_on_device(dry_run, min_size, target_size)
    )
    if max_size < min_size:
        height, width = config.data.image_size
        images = "one image" if min_size == 1 else f"{min_size} images"
        suggestion = "" if config.model.activation_checkpointing else "--activation-checkpointing, "
        raise OutOfMemoryError(
            f"Not even {images} of {width}x{height} pixels fit the memory of {device.name}.",
            cause=evidence,
            fix=f"{suggestion}a smaller --image-size or --model, or a device with more memory",
        )
    micro_batches = count_micro_batches(target_size, max_size)
    split = "" if micro_batches == 1 else f", so in {micro_batches} micro-batches"
    if devices.count > 1:
        source += f", {target_size} on each of {devices.count} devices"
    return target_size * devices.count, micro_batches, f"{source}; {evidence}{split}"


def candidate_sizes(dry_run: DryRun, num_images: int) -> Iterator[int]:
    """Micro-batch sizes that can be tried: powers of two whose batch (times `grad_accum_steps`) has whole mosaic groups
    and at most `num_images` images."""
    micro_batches, size = dry_run.config.optim.grad_accum_steps or 1, dry_run.min_size
    if dry_run.config.data.mosaic > 0:
        size = max(size, MOSAIC_GROUP_SIZE // math.gcd(MOSAIC_GROUP_SIZE, micro_batches))
    while size * micro_batches <= num_images:
        yield size
        size *= 2


def pick_fastest(trials: Sequence[BatchTrial]) -> BatchTrial:
    """The smallest whose time per image is within MAX_SLOWDOWN of the best."""
    best = min(trial.seconds_per_image for trial in trials)
    return next(trial for trial in trials if trial.seconds_per_image <= MAX_SLOWDOWN * best)


def _fastest_batch_size(dry_run: DryRun, num_images: int, fallback: int) -> tuple[int, str]:
    """(batch size, reason with the times); `fallback` if no size could be tried."""
    trials, end = try_sizes(dry_run, candidate_sizes(dry_run, num_images))
    end = end or f"the training split has {num_images} images"
    if not trials:
        return fallback, f"no batch size could be tried: {end}"
    parts = dry_run.config.optim.grad_accum_steps or 1
    table = ", ".join(f"{trial.micro_batch_size * parts}: {1e3 * trial.seconds_per_image:.3g} ms" for trial in trials)
    compile_note = ", not compiled as in training" if dry_run.config.run.compile else ""
    fastest = pick_fastest(trials).micro_batch_size * parts
    return fastest, f"fastest of the trials, time per image at {table}{compile_note}; {end}"


def _max_size_on_cpu(dry_run: DryRun, min_size: int) -> tuple[int, str]:
    """(images that fit, evidence)."""
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
    """(the largest equal part of `target_size` that fits, or 0; evidence). The largest comes first: in each trial cuDNN
    times its convolutions for that size, for many seconds, and only those for the size of training are used again."""
    limit_bytes = dry_run.budget_bytes
    parts = [target_size // n for n in range(1, target_size + 1) if target_size % n == 0]
    for count in (*(part for part in parts if part > min_size), min_size):
        try:
            used_bytes = dry_run.measure_peak_bytes(count)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            continue
        if used_bytes <= limit_bytes:
            images = f"{count} {'image' if count == 1 else 'images'}"
            return count, f"{used_bytes / GIB:.1f} of {limit_bytes / GIB:.1f} GiB at {images}, measured"
    return 0, f"{min_size} at a time take more than {limit_bytes / GIB:.1f} GiB"
