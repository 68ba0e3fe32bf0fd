"""Which batch to train with: one that fits the memory, and with `--auto-batch` the one with the best time per picture.

Both are tried with the worst case that the run can produce (`dry_run.py`), before anything is spent. On an accelerator
the peak at one and at two pictures gives the line on which the largest batch lies, which is then tried itself. On a CPU
memory is counted: what lives in one picture's forward pass. As a program it prints JSON, for others that may not import
training:

    python -m stoker.training.defaults.auto_batch DATA --model retinanet_resnet50_fpn --image-size 800 800
    python -m stoker.training.defaults.auto_batch --config runs/mine/config.toml --batch-size 16
"""

import itertools
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from cyclopts import App, Parameter

from stoker.config.settings import Config, from_toml
from stoker.data.augment.device import MOSAIC_GROUP_SIZE
from stoker.data.index import Index, open_index
from stoker.data.loading.loader import compute_max_boxes
from stoker.errors import ConfigError, OutOfMemoryError, StokerError
from stoker.hardware.device import Device, select_device
from stoker.training.defaults.dry_run import BatchTrial, DryRun, PeakMemoryMode, try_sizes

GIB = 2**30

MAX_SLOWDOWN = 1.03
"""A smaller batch is taken where its time per picture is at most this factor above the best."""


def choose_batch_size(
    config: Config, index: Index, device: Device, *, recipe_batch_size: int, num_images: int
) -> tuple[int, int, str]:
    """(pictures per step, micro-batches per step, reason), for the config's batch, or the fastest one where it says
    `fit`, or else the recipe's `wanted`.

    `config` needs canvas, precision, the optimizer and the model's settings; `pictures` is how many the training split
    has. Raises OutOfMemoryError when one picture does not fit, ConfigError when both fit and batch are asked for.
    """
    user_batch_size: int | None = config.set_fields().get("batch_size")
    if user_batch_size is not None and config.run.auto_batch:
        raise ConfigError(
            f"--auto-batch chooses the batch, and --batch-size {user_batch_size} says it.", fix="leave one of them out"
        )
    dry_run = make_dry_run(config, index, device)
    target_size: int = user_batch_size if user_batch_size is not None else max(1, min(recipe_batch_size, num_images))
    if user_batch_size is None and config.data.mosaic > 0:
        target_size = max(MOSAIC_GROUP_SIZE, target_size // MOSAIC_GROUP_SIZE * MOSAIC_GROUP_SIZE)
    source = "asked for" if user_batch_size is not None else f"the recipe's {recipe_batch_size}"
    if user_batch_size is None and target_size < recipe_batch_size:
        source = f"the training split has {num_images} pictures"
    if config.run.auto_batch:
        target_size, source = _fastest_batch_size(dry_run, num_images, target_size)
    min_size = min(dry_run.min_size, target_size)
    if device.is_cpu:
        max_size, evidence = _max_size_on_cpu(dry_run, min_size)
    else:
        max_size, evidence = _max_size_on_device(dry_run, min_size, target_size)
    if max_size < min_size:
        height, width = config.data.image_size
        count_text = "one picture" if min_size == 1 else f"{min_size} pictures"
        suggestion = "" if config.model.activation_checkpointing else "--activation-checkpointing, "
        raise OutOfMemoryError(
            f"Not even {count_text} of {width}x{height} pixels fit the memory of {device.name}.",
            cause=evidence,
            fix=f"{suggestion}a smaller --image-size or --model, or a device with more memory",
        )
    micro_batches = next(n for n in range(1, target_size + 1) if target_size % n == 0 and target_size // n <= max_size)
    return (
        target_size,
        micro_batches,
        f"{source}; {evidence}" + ("" if micro_batches == 1 else f", so in {micro_batches} parts"),
    )


def make_dry_run(config: Config, index: Index, device: Device) -> DryRun:
    slots = compute_max_boxes(index, index.image_indices("train"), mosaic=config.data.mosaic)
    return DryRun(config, device, num_classes=len(index.class_names), max_boxes=slots)


def candidate_sizes(dry_run: DryRun, num_images: int) -> Iterator[int]:
    """Micro-batches that can be tried: powers of two whose batch, `accumulate` times as large, has whole groups for
    mosaics and is no more than the training split of `pictures`."""
    config = dry_run.config
    micro_batches = config.optim.grad_accum_steps or 1
    min_size = max(
        dry_run.min_size,
        MOSAIC_GROUP_SIZE // math.gcd(MOSAIC_GROUP_SIZE, micro_batches) if config.data.mosaic > 0 else 1,
    )
    return itertools.takewhile(
        lambda size: size * micro_batches <= num_images, (min_size * 2**n for n in itertools.count())
    )


def run_trials(dry_run: DryRun, num_images: int, only_size: int | None = None) -> tuple[list[BatchTrial], str]:
    """All sizes that could be tried, or `only` one; smallest first; and why there is no more."""
    trials: list[BatchTrial] = []
    for trial in try_sizes(dry_run, candidate_sizes(dry_run, num_images) if only_size is None else [only_size]):
        if not isinstance(trial, BatchTrial):
            return trials, trial
        trials.append(trial)
    return trials, f"the training split has {num_images} pictures" if only_size is None else "asked for"


def pick_fastest(trials: Iterable[BatchTrial]) -> BatchTrial:
    """The smallest whose time per picture is within SLACK of the best."""
    trials = list(trials)
    best = min(trial.seconds_per_image for trial in trials)
    return next(trial for trial in trials if trial.seconds_per_image <= MAX_SLOWDOWN * best)


def _fastest_batch_size(dry_run: DryRun, num_images: int, fallback: int) -> tuple[int, str]:
    """(batch, reason with the table of times); `otherwise` where no size could be tried."""
    trials, end = run_trials(dry_run, num_images)
    if not trials:
        return fallback, f"no batch could be tried: {end}"
    micro_batches = dry_run.config.optim.grad_accum_steps or 1
    table = ", ".join(
        f"{trial.micro_batch_size * micro_batches}: {1e3 * trial.seconds_per_image:.3g} ms" for trial in trials
    )
    compile_note = "" if not dry_run.config.run.compile else ", not compiled as in training"
    return pick_fastest(
        trials
    ).micro_batch_size * micro_batches, f"fastest of those tried, a picture at {table}{compile_note}; {end}"


def _max_size_on_cpu(dry_run: DryRun, min_size: int) -> tuple[int, str]:
    memory = PeakMemoryMode("cpu")
    model, worst_batch = dry_run.optimizer.model, dry_run.make_batch(min_size)
    for tensor in model.state_dict().values():
        memory.add(tensor)
    initial_bytes = memory.current_bytes
    with memory:
        loss = dry_run.compute_loss(worst_batch)
        if dry_run.config.model.activation_checkpointing:  # else the forward pass ends at its peak
            torch.autograd.backward(loss)
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    # Gradients, two moments and the average beside the weights; half as much again of what is kept, for temporaries.
    bytes_per_image = 1.5 * (memory.peak_bytes - initial_bytes) / min_size
    free_bytes = dry_run.budget_bytes - 5 * weight_bytes
    return int(
        free_bytes // bytes_per_image
    ), f"{bytes_per_image / 2**20:,.0f} MiB a picture of {free_bytes / GIB:.0f} GiB"


def _max_size_on_device(dry_run: DryRun, min_size: int, target_size: int) -> tuple[int, str]:
    def try_peak_bytes(count: int) -> int | None:
        """Bytes, or None when `count` pictures do not fit."""
        try:
            return dry_run.measure_peak_bytes(count)
        except torch.OutOfMemoryError:
            return None

    limit_bytes = dry_run.budget_bytes
    min_peak, double_peak = try_peak_bytes(min_size), try_peak_bytes(2 * min_size)
    if min_peak is None or min_peak > limit_bytes:
        return 0, f"{min_size} at a time take more than {limit_bytes / GIB:.1f} GiB"
    if double_peak is None:
        return min_size, f"{2 * min_size} pictures do not fit into {limit_bytes / GIB:.1f} GiB"
    bytes_per_image = max(1, double_peak - min_peak) / min_size
    count = min(target_size, int(min_size + (limit_bytes - min_peak) / bytes_per_image))
    while count > min_size:
        used_bytes = try_peak_bytes(count)
        if used_bytes is not None and used_bytes <= limit_bytes:
            return count, f"{used_bytes / GIB:.1f} of {limit_bytes / GIB:.1f} GiB at {count} pictures, tried"
        count -= max(1, count // 8)
    return min_size, f"{min_peak / GIB:.1f} of {limit_bytes / GIB:.1f} GiB at {min_size} at a time, tried"


def as_json(user_config: Config, index: Index, device: Device) -> dict[str, Any]:
    """What the program prints: every batch that was tried, or the one that `asked` names."""
    from stoker.training.defaults.derive import derive  # which imports this module

    micro_batches = user_config.optim.grad_accum_steps or 1
    config, _ = derive(
        user_config.replace(
            batch=user_config.run.batch_size or MOSAIC_GROUP_SIZE * micro_batches, auto_batch=False, jpeg_decoder="cpu"
        ),
        index,
        device,
    )
    dry_run = make_dry_run(config, index, device)
    only_size = None if user_config.run.batch_size is None else user_config.run.batch_size // micro_batches
    trials, end = run_trials(dry_run, len(index.image_indices("train")), only_size)
    return {
        "device": device.name,
        "budget_bytes": dry_run.budget_bytes,
        "model": config.model.model,
        "image_size": config.data.image_size,
        "precision": config.run.precision,
        "classes": dry_run.num_classes,
        "slots": dry_run.max_boxes,
        "grad_accum_steps": micro_batches,
        "tried": trials,
        "end": end,
        "fastest_batch": pick_fastest(trials).micro_batch_size * micro_batches if trials else None,
    }


def program(
    data: str | None = None,
    /,
    *,
    config_toml: Annotated[Path | None, Parameter(name="--config")] = None,
    config: Annotated[Config, Parameter(name="*")] = Config(),  # noqa: B008  # frozen
) -> None:
    """Tries batches on the device and prints JSON: peak bytes and seconds per picture of each.

    Parameters
    ----------
    data
        Data set, as for `stoker train`.
    config_toml
        A run's config.toml: its settings, where no others are given.
    """
    stored = Config() if config_toml is None else from_toml(config_toml)[0].replace(batch=None)
    overrides = config.set_fields() if data is None else {**config.set_fields(), "data": data}
    user_config = stored.replace(**overrides)
    data_settings = user_config.data
    index = open_index(
        data_settings.data,
        format=data_settings.format,
        val_fraction=data_settings.val_fraction,
        classes=data_settings.classes or (),
    )
    print(msgspec.json.encode(as_json(user_config, index, select_device(user_config.run.device))).decode())


if __name__ == "__main__":
    app = App(name="python -m stoker.training.defaults.auto_batch", default_parameter=Parameter(negative=()))
    app.default(program)
    try:
        app()
    except StokerError as error:
        print(f"stoker: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
