"""The levers of `stoker tune`: which settings it may change, and which values it tries from the present ones.

Pure: settings and facts in, changes out. The table is knowledge/levers.toml; a lever whose values depend on the present
settings names a rule, a function of this file. What is tried when is decided in `policy.py`.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import msgspec

from stoker.knowledge import read_toml
from stoker_watch.durations import parse_duration
from stoker_watch.errors import UsageError, did_you_mean

Changes = dict[str, Any]
MAX_OVERHEAD = 0.1
"""Fraction of the time for evaluations, as `derive_eval_every` has it; a tenth of it for checkpoints."""
MIN_EVALUATIONS = 4
"""Evaluations that a run keeps at the least: fewer say little about its best weights (an assumption)."""


class Lever(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of knowledge/levers.toml, which describes the fields."""

    name: str
    setting: str
    loss: str
    values: list[Any] = []
    rule: str = ""
    gain: float
    tolerance: float | None = None
    compare: Literal["losses", "inputs"] = "losses"
    needs: str = ""
    cause: str


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the levers need to know about machine, data and recipe, besides the settings."""

    machine: str
    """Fingerprint: what was measured on another machine does not count here."""
    data: str
    """Digest of the data set."""
    device_kind: str
    """cpu, cuda …"""
    cores: int
    """Cores for each device that trains."""
    best_precision: str
    num_images: int
    """Images of the training split."""
    epochs: float | None
    """Length of the run; None: it is a time."""
    cache_kinds: list[str]
    """Kinds of caches that have room for all decoded images."""
    recipe_batch_size: int
    recipe_optimizer_is_sgd: bool
    """Whether the learning rate follows the batch size, not its square root (`derive_lr`)."""
    size_divisor: int
    """Height and width of an image size are multiples of it."""
    devices: int = 1
    """Devices that train together."""
    smaller_models: dict[str, Changes] = {}
    """Models of the same family with fewer parameters → the settings of the model that differ; the largest first."""
    suggestions: dict[str, Changes] = {}
    """Lever → what the data suggest (`data/validation/suggestions.py`)."""


@functools.cache
def all_levers() -> dict[str, Lever]:
    """All levers by name, in the order of the table."""
    return {name: msgspec.convert({"name": name, **row}, Lever) for name, row in read_toml("levers.toml").items()}


def choose_levers(names: Iterable[str], *, allow_accuracy: bool) -> tuple[Lever, ...]:
    """The levers with these names, or all; only with `allow_accuracy` those that change results. Raises UsageError."""
    levers, names = all_levers(), list(names)
    for name in names:
        if name not in levers:
            raise UsageError(did_you_mean(f"--levers: there is no lever {name!r}", name, levers), choices=levers)
        if levers[name].tolerance is None and not allow_accuracy:
            raise UsageError(f"--levers {name}: it may cost accuracy.", fix="add --allow accuracy")
    chosen = [levers[name] for name in names] or list(levers.values())
    return tuple(lever for lever in chosen if allow_accuracy or lever.tolerance is not None)


def why_unavailable(lever: Lever, facts: Facts) -> str:
    """Why the lever cannot be tried here; empty: it can."""
    if lever.needs == "cuda" and facts.device_kind != "cuda":
        return f"it needs CUDA; the device is {facts.device_kind}"
    if lever.needs == "ranks" and facts.devices == 1:
        return "it needs several devices: --devices"
    if lever.needs == "epochs" and facts.epochs is not None and facts.epochs < 2:
        return f"the run sees each image {facts.epochs:.2g} times: nothing is read twice"
    if lever.name == "cache" and not facts.cache_kinds:
        return "neither memory nor disk has room for all decoded images"
    return ""


def values(lever: Lever, settings: Mapping[str, Any], facts: Facts, phases: Mapping[str, float]) -> list[Changes]:
    """What to try, in this order. settings: the present ones; phases: seconds per image."""
    found = RULES[lever.rule](settings, facts, phases) if lever.rule else lever.values
    changes = [_with_companions(lever.setting, value, settings, facts) for value in found]
    return [change for change in changes if any(settings.get(name) != value for name, value in change.items())]


def _with_companions(setting: str, value: Any, settings: Mapping[str, Any], facts: Facts) -> Changes:
    """The change with what must follow it."""
    changes: Changes = {setting: value}
    if setting == "batch_size":
        ratio = value / settings["batch_size"]
        factor = ratio if facts.recipe_optimizer_is_sgd else math.sqrt(ratio)
        changes["lr"] = float(f"{settings['lr'] * factor:.3g}")
        if value % (facts.devices * settings["grad_accum_steps"]):
            changes["grad_accum_steps"] = 1
        for name in ("max_duration", "eval_every", "checkpoint_every"):  # the same images between two of them
            length = parse_duration(settings[name], name)
            if length.unit == "steps" and length.value:
                changes[name] = str(max(1, round(length.value / ratio)))
        changes["warmup_steps"] = max(1, round(settings["warmup_steps"] / ratio))
        if decay := settings.get("ema_decay"):  # over the same images, at least ten steps
            changes["ema_decay"] = float(f"{max(0.9, 1 - ratio * (1 - decay)):.5g}")
    if setting == "model":
        changes |= facts.smaller_models[value]
    return changes


def _more_workers(settings: Mapping[str, Any], facts: Facts, _phases: Mapping[str, float]) -> list[Any]:
    """Twice as many as cores, since threads wait for storage; as many as cores; tuned while training."""
    now = settings["workers"]
    if now == "auto":
        return [2 * facts.cores]
    return [count for count in (2 * facts.cores, facts.cores) if count > now] + ["auto"]


def _batches_up_to_recipe(settings: Mapping[str, Any], facts: Facts, _phases: Mapping[str, float]) -> list[Any]:
    """The recipe's batch size, and its parts: its learning rate is known to work for it."""
    largest = min(facts.recipe_batch_size, facts.num_images)
    sizes = [largest, largest // 2, largest // 4]
    unit = facts.devices * (4 if settings["mosaic"] else 1)
    sizes = [size // unit * unit for size in sizes]
    return [size for size in dict.fromkeys(sizes) if size > settings["batch_size"]]


def _rarer(
    phase: str, fraction: float, settings: Mapping[str, Any], facts: Facts, phases: Mapping[str, float]
) -> list[Any]:
    """The interval, in steps, with which evaluations or checkpoints take `fraction` of the time, if they take more."""
    name, batch_size = f"{phase}_every", settings["batch_size"]
    length = parse_duration(settings["max_duration"], "max-duration")
    every = interval_images(settings, name, facts, phases)
    others = sum(seconds for other, seconds in phases.items() if other not in ("eval", "checkpoint"))
    event_images = phases.get(phase, 0.0) * every / others if every and others else 0.0  # that its time would train on
    steps = math.ceil(event_images / batch_size * (1 - fraction) / fraction)
    if phase == "eval" and length.unit != "minutes":
        total = length.value if length.unit == "steps" else length.value * facts.num_images / batch_size
        steps = min(steps, max(1, int(total // MIN_EVALUATIONS)))
    now = interval_images(settings, name, facts, None)
    return [str(steps)] if now is not None and steps * batch_size > 1.05 * now else []


def interval_images(
    settings: Mapping[str, Any], name: str, facts: Facts, phases: Mapping[str, float] | None
) -> float | None:
    """Images between two evaluations or checkpoints; None: there are none before the end, or the interval is a time
    and `phases`, which say how long an image takes, are not given."""
    interval = parse_duration(settings[name], name)
    if not interval.value:
        return None
    if interval.unit == "minutes":
        seconds = sum(phases.values()) if phases else 0.0
        return interval.value * 60 / seconds if seconds else None
    return interval.value * (facts.num_images if interval.unit == "epochs" else settings["batch_size"])


def _smaller_images(settings: Mapping[str, Any], facts: Facts, _phases: Mapping[str, float]) -> list[Any]:
    """Three quarters and half of each side."""
    sides, divisor = settings["image_size"], facts.size_divisor
    sizes = [tuple(max(divisor, round(side * factor / divisor) * divisor) for side in sides) for factor in (0.75, 0.5)]
    return [size for size in sizes if min(size) >= 32 and math.prod(size) < math.prod(sides)]


RULES: dict[str, Callable[[Mapping[str, Any], Facts, Mapping[str, float]], list[Any]]] = {
    "more_workers": _more_workers,
    "caches": lambda now, facts, _: (
        facts.cache_kinds if now["cache"] == "none" and now["jpeg_decoder"] == "cpu" else []
    ),
    "fastest_precision": lambda _now, facts, _: [facts.best_precision],
    "batches_up_to_recipe": _batches_up_to_recipe,
    "rarer_evaluations": functools.partial(_rarer, "eval", MAX_OVERHEAD),
    "rarer_checkpoints": functools.partial(_rarer, "checkpoint", MAX_OVERHEAD / 10),
    "smaller_images": _smaller_images,
    "smaller_models": lambda _now, facts, _: list(facts.smaller_models),
}
