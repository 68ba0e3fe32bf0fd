"""Which batch to train with: one that fits the memory, and with `--fit` the one with the best time per picture.

Both are tried with the worst case that the run can produce (`dry_run.py`), before anything is spent. On an accelerator
the peak at one and at two pictures gives the line on which the largest batch lies, which is then tried itself. On a CPU
memory is counted: what lives in one picture's forward pass. As a program it prints JSON, for others that may not import
training:

    python -m stoker.training.defaults.auto_batch DATA --model retinanet_resnet50_fpn --canvas 800 800
    python -m stoker.training.defaults.auto_batch --config runs/mine/config.toml --batch 16
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
from stoker.data.augment.device import GROUP
from stoker.data.index import Index, open_index
from stoker.data.loading.loader import box_slots
from stoker.errors import ConfigError, OutOfMemoryError, StokerError
from stoker.hardware.device import Device, pick
from stoker.training.defaults.dry_run import LiveBytes, Rehearsal, Tried, try_sizes

GIB = 2**30

SLACK = 1.03
"""A smaller batch is taken where its time per picture is at most this factor above the best."""


def batch(config: Config, index: Index, device: Device, *, wanted: int, pictures: int) -> tuple[int, int, str]:
    """(pictures per step, micro-batches per step, reason), for the config's batch, or the fastest one where it says
    `fit`, or else the recipe's `wanted`.

    `config` needs canvas, precision, the optimizer and the model's settings; `pictures` is how many the training split
    has. Raises OutOfMemoryError when one picture does not fit, ConfigError when both fit and batch are asked for.
    """
    asked: int | None = config.set_fields().get("batch")
    if asked is not None and config.run.fit:
        raise ConfigError(f"--fit chooses the batch, and --batch {asked} says it.", fix="leave one of them out")
    rehearsal = rehearsal_of(config, index, device)
    target: int = asked if asked is not None else max(1, min(wanted, pictures))
    if asked is None and config.data.mosaic > 0:
        target = max(GROUP, target // GROUP * GROUP)
    whose = "asked for" if asked is not None else f"the recipe's {wanted}"
    if asked is None and target < wanted:
        whose = f"the training split has {pictures} pictures"
    if config.run.fit:
        target, whose = _fastest(rehearsal, pictures, target)
    least = min(rehearsal.least, target)
    if device.is_cpu:
        largest, evidence = _largest_on_cpu(rehearsal, least)
    else:
        largest, evidence = _largest_on_device(rehearsal, least, target)
    if largest < least:
        height, width = config.data.canvas
        plural = "one picture" if least == 1 else f"{least} pictures"
        less = "" if config.model.checkpoint_activations else "--checkpoint-activations, "
        raise OutOfMemoryError(
            f"Not even {plural} of {width}x{height} pixels fit the memory of {device.name}.",
            cause=evidence,
            fix=f"{less}a smaller --canvas or --model, or a device with more memory",
        )
    parts = next(n for n in range(1, target + 1) if target % n == 0 and target // n <= largest)
    return target, parts, f"{whose}; {evidence}" + ("" if parts == 1 else f", so in {parts} parts")


def rehearsal_of(config: Config, index: Index, device: Device) -> Rehearsal:
    slots = box_slots(index, index.rows("train"), mosaic=config.data.mosaic)
    return Rehearsal(config, device, classes=len(index.class_names), slots=slots)


def sizes(rehearsal: Rehearsal, pictures: int) -> Iterator[int]:
    """Micro-batches that can be tried: powers of two whose batch, `accumulate` times as large, has whole groups for
    mosaics and is no more than the training split of `pictures`."""
    config = rehearsal.config
    parts = config.optim.accumulate or 1
    least = max(rehearsal.least, GROUP // math.gcd(GROUP, parts) if config.data.mosaic > 0 else 1)
    return itertools.takewhile(lambda size: size * parts <= pictures, (least * 2**n for n in itertools.count()))


def gather(rehearsal: Rehearsal, pictures: int, only: int | None = None) -> tuple[list[Tried], str]:
    """All sizes that could be tried, or `only` one; smallest first; and why there is no more."""
    tried: list[Tried] = []
    for some in try_sizes(rehearsal, sizes(rehearsal, pictures) if only is None else [only]):
        if not isinstance(some, Tried):
            return tried, some
        tried.append(some)
    return tried, f"the training split has {pictures} pictures" if only is None else "asked for"


def fastest(tried: Iterable[Tried]) -> Tried:
    """The smallest whose time per picture is within SLACK of the best."""
    tried = list(tried)
    best = min(some.seconds_per_picture for some in tried)
    return next(some for some in tried if some.seconds_per_picture <= SLACK * best)


def _fastest(rehearsal: Rehearsal, pictures: int, otherwise: int) -> tuple[int, str]:
    """(batch, reason with the table of times); `otherwise` where no size could be tried."""
    tried, end = gather(rehearsal, pictures)
    if not tried:
        return otherwise, f"no batch could be tried: {end}"
    parts = rehearsal.config.optim.accumulate or 1
    table = ", ".join(f"{some.pictures * parts}: {1e3 * some.seconds_per_picture:.3g} ms" for some in tried)
    timed = "" if rehearsal.config.run.eager else ", not compiled as in training"
    return fastest(tried).pictures * parts, f"fastest of those tried, a picture at {table}{timed}; {end}"


def _largest_on_cpu(rehearsal: Rehearsal, least: int) -> tuple[int, str]:
    live = LiveBytes("cpu")
    model, case = rehearsal.stepper.model, rehearsal.case(least)
    for tensor in model.state_dict().values():
        live.add(tensor)
    before = live.now
    with live:
        loss = rehearsal.loss(case)
        if rehearsal.config.model.checkpoint_activations:  # else the forward pass ends at its peak
            torch.autograd.backward(loss)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    # Gradients, two moments and the average beside the weights; half as much again of what is kept, for temporaries.
    picture = 1.5 * (live.peak - before) / least
    free = rehearsal.budget - 5 * weights
    return int(free // picture), f"{picture / 2**20:,.0f} MiB a picture of {free / GIB:.0f} GiB"


def _largest_on_device(rehearsal: Rehearsal, least: int, target: int) -> tuple[int, str]:
    def peak(count: int) -> int | None:
        """Bytes, or None when `count` pictures do not fit."""
        try:
            return rehearsal.peak(count)
        except torch.OutOfMemoryError:
            return None

    limit = rehearsal.budget
    one, two = peak(least), peak(2 * least)
    if one is None or one > limit:
        return 0, f"{least} at a time take more than {limit / GIB:.1f} GiB"
    if two is None:
        return least, f"{2 * least} pictures do not fit into {limit / GIB:.1f} GiB"
    slope = max(1, two - one) / least
    count = min(target, int(least + (limit - one) / slope))
    while count > least:
        used = peak(count)
        if used is not None and used <= limit:
            return count, f"{used / GIB:.1f} of {limit / GIB:.1f} GiB at {count} pictures, tried"
        count -= max(1, count // 8)
    return least, f"{one / GIB:.1f} of {limit / GIB:.1f} GiB at {least} at a time, tried"


def as_json(asked: Config, index: Index, device: Device) -> dict[str, Any]:
    """What the program prints: every batch that was tried, or the one that `asked` names."""
    from stoker.training.defaults.derive import derive  # which imports this module

    parts = asked.optim.accumulate or 1
    config, _ = derive(asked.replace(batch=asked.run.batch or GROUP * parts, fit=False, decoder="host"), index, device)
    rehearsal = rehearsal_of(config, index, device)
    only = None if asked.run.batch is None else asked.run.batch // parts
    tried, end = gather(rehearsal, len(index.rows("train")), only)
    return {
        "device": device.name,
        "budget_bytes": rehearsal.budget,
        "model": config.model.model,
        "canvas": config.data.canvas,
        "precision": config.run.precision,
        "classes": rehearsal.classes,
        "slots": rehearsal.slots,
        "accumulate": parts,
        "tried": tried,
        "end": end,
        "fastest_batch": fastest(tried).pictures * parts if tried else None,
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
    given = config.set_fields() if data is None else {**config.set_fields(), "data": data}
    asked = stored.replace(**given)
    where = asked.data
    index = open_index(where.data, format=where.format, val_fraction=where.val_fraction, classes=where.classes or ())
    print(msgspec.json.encode(as_json(asked, index, pick(asked.run.device))).decode())


if __name__ == "__main__":
    app = App(name="python -m stoker.training.defaults.auto_batch", default_parameter=Parameter(negative=()))
    app.default(program)
    try:
        app()
    except StokerError as error:
        print(f"stoker: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
