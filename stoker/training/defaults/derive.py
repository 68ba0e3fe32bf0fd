"""Fills every setting that the user left open, from the data, the device and the recipe, each with its reason.

`derive` is the only place where a default is decided. It never changes what the user set. The batch is tried on the
device by `auto_batch.py`; everything else is arithmetic on what the index says.
"""

import math
from typing import Any

from stoker.config.recipes import RECIPES
from stoker.config.settings import Config, Duration, check, parse_duration
from stoker.data.anchor_fit import best_canvas, box_sides, spread_sizes
from stoker.data.images import cache_policy
from stoker.data.images.pixel_cache import Form
from stoker.data.index import Index
from stoker.data.loading import decoder_choice
from stoker.data.loading.autotune import first_threads
from stoker.data.validation.problems import MAX_BAD
from stoker.errors import ConfigError
from stoker.hardware.device import Device, host_cores, untried
from stoker.models import Architecture, architecture
from stoker.models.ember.ember import options_of
from stoker.models.ssd.backbones import tail_of
from stoker.models.table import check_canvas, check_settings
from stoker.models.weights.hub import local
from stoker.models.weights.load import NAMED, read
from stoker.training.defaults import auto_batch
from stoker.training.defaults.model_choice import (
    BODY_RATE,
    OFTEN,
    VARIED,
    is_ember,
    model_for,
    pictures_a_second,
    side_for,
)

EPOCHS, LEAST_STEPS, MOST_PICTURES = 12, 1_500, 90_000 * 16
"""12 epochs (Detectron2's 1x schedule), at least 1,500 steps, at most the pictures that this schedule takes of COCO."""
FROM_SCRATCH = 3
"""Times as long where the weights are random: a detector then ends where pretrained ones do, after three to six times
as many epochs (He et al. 2018, "Rethinking ImageNet Pre-training", arXiv 1811.08883)."""
EVALUATIONS = 12
"""Of the validation split, in the course of a training."""

PLAIN: dict[str, tuple[Any, str]] = {
    "classes": ((), "every class of the data set"),
    "val_fraction": (0.1, "a tenth, where the data set names no validation split"),
    "max_bad": (MAX_BAD, "a few bad files are an accident, more are a wrong path or a broken copy"),
    "resize": ("letterbox", "keeps the aspect of the pictures"),
    "augment": ("recipe", "pictures are varied, so that a model learns what they share"),
    "flip": (0.5, "as torchvision's detection references"),
    "crop": (0.5, "every other picture at another scale"),
    "zoom": ((0.7, 1.5), "mild: sizes of objects stay like those of the data"),
    "overlap": (0.5, "a crop shows half of some object at least (SSD: 0.1 to 0.9)"),
    "brightness": (0.125, "as SSD: 32 of 255"),
    "contrast": (0.125, "a quarter of SSD's: mild; more was not measured"),
    "saturation": (0.125, "a quarter of SSD's: mild; more was not measured"),
    "hue": (0.0, "classes may differ by their colour alone"),
    "mosaic": (0.0, "pays in long training only: objects at half their size, beside seams"),
    "clip": (10.0, "holds back outliers only; a usual norm is 1 to 5"),
    "max_skipped": (20, "twenty bad steps in a row are no accident"),
    "seed": (0, "the same command gives the same run"),
    "price": (0.0, "unknown"),
    "patience": (0, "the rate's course is laid out for the whole length"),
    "checkpoint_every": ("2min", "a killed run loses two minutes; saving is in the background"),
    "momentum": (0.9, "usual, whatever the batch"),
    "backbone_rate": (1.0, "every weight at the same rate, as torchvision's and Detectron2's recipes"),
    "fit": (False, "the recipe's batch, or less where it does not fit"),
    "eager": (True, "compiling takes minutes, and no GPU has shown yet that they pay; --no-eager tries"),
    "checkpoint_activations": (False, "the batch fits without"),
}


AUGMENTATIONS = ("flip", "crop", "brightness", "contrast", "saturation", "hue", "mosaic")
"""What `--augment none` sets to 0."""


class _Filling:
    """A config that is being filled; keeps the reasons."""

    def __init__(self, asked: Config) -> None:
        self.config = asked
        self.reasons: dict[str, str] = {}

    def get(self, name: str) -> Any:
        return self.config.set_fields().get(name)

    def put(self, name: str, value: Any, reason: str) -> None:
        """Sets the field unless it is set."""
        if self.get(name) is None:
            self.config = self.config.replace(**{name: value})
            self.reasons[name] = reason


def derive(asked: Config, index: Index, device: Device) -> tuple[Config, dict[str, str]]:
    """(config without an open field, reasons of the fields that `asked` left open).

    Raises ConfigError for settings that cannot be, OutOfMemoryError when not even one picture fits.
    """
    filling = _Filling(asked)
    put, get = filling.put, filling.get
    _begin(filling, index, device)
    rows = index.rows("train")
    row = architecture(get("model"))
    check_settings(asked.replace(model=get("model")).model)
    if "tail" in row.defaults:
        put("tail", *_tail(get("weights"), get("tail")))
    if is_ember(row) and get("weights") not in ("none", *NAMED):
        _keep_options(filling)
    if get("weights") == "none":
        put("norm", "train", "there are no statistics to freeze: the weights are random")
        put("trainable_stages", 5, "the weights are random")
        if row.recipe == "tiny":
            canvas = get("canvas")
            put("anchor_sizes", *spread_sizes(box_sides(index, rows, canvas, get("resize")).canvas, canvas,
                                             len(row.defaults["anchor_sizes"])))  # fmt: skip
    if row.anchors_follow_canvas:
        factor = math.sqrt(math.prod(get("canvas"))) / row.canvas_side
        sizes = tuple(float(f"{size * factor:.4g}") for size in row.defaults["anchor_sizes"])
        put("anchor_sizes", sizes, f"{row.reasons['anchor_sizes']}, on this canvas {factor:.3g} times as large")
    for name, value in row.defaults.items():
        put(name, value, row.reasons[name])
    put("precision", *device.best_precision())
    put("threads", *_threads(device))
    _batch(filling, len(rows), index, device)
    _length(filling, len(rows), len(index.rows("val")) if "val" in index.splits else 0)
    if get("decoder") == "nvjpeg":
        _check_nvjpeg(get("cache"), device)
        put("cache", "none", "--decoder nvjpeg: the host decodes for a cache")
    if get("cache") is None:
        put("cache", *_cache(filling.config, index))
    if get("decoder") is None:
        put("decoder", *_decoder(filling.config, index, device))
    check(filling.config)
    return filling.config, filling.reasons


def derive_data(asked: Config, index: Index, device: Device) -> tuple[Config, dict[str, str]]:
    """The first part of `derive`: all that decides what a picture looks like to the model. Nothing is tried."""
    filling = _Filling(asked)
    _begin(filling, index, device)
    return filling.config, filling.reasons


def _begin(filling: _Filling, index: Index, device: Device) -> None:
    """What the data, the model, its recipe and PLAIN say by themselves."""
    put, get = filling.put, filling.get
    put("device", str(device.torch_device), _why_device(device))
    put("format", index.format, "found")
    if get("augment") == "none":
        for name in AUGMENTATIONS:
            put(name, 0.0, "--augment none")
    row = _model(filling, index, device)
    for name, value in RECIPES[row.recipe]().set_fields().items():
        if name not in ("batch", "rate"):
            put(name, value, f"recipe {row.recipe}")
    if row.urls:
        best = "coco" if "coco" in row.urls else "imagenet"
        put("weights", best, "a detector's own" if best == "coco" else "the backbone's; there are none of a detector")
    put("weights", "none", "there are none for this model")
    put("resize", *PLAIN["resize"])
    side = side_for(row, index, device, get("resize"))
    where = "" if side == row.canvas_side else "on a CPU "
    put("canvas", *best_canvas(index.size[index.rows("train")], side, row.canvas_multiple, where=where))
    check_canvas(filling.config)
    if is_ember(row) and row.urls and get("weights") != "none" and get("norm") in (None, "frozen"):
        put("backbone_rate", BODY_RATE, "its norms are frozen, and its features must not outgrow those of the neck")
    if is_ember(row) and get("crop") != 0:
        _vary(filling, row, len(index.rows("train")), device)
    for name, (value, reason) in PLAIN.items():
        put(name, value, reason)


def _vary(filling: _Filling, row: Architecture, pictures: int, device: Device) -> None:
    """VARIED, where each picture is seen OFTEN with the recipe's batch: what `--fit` will find is not known yet."""
    get = filling.get
    batch = get("batch") or min(pictures, RECIPES[row.recipe]().run.batch)
    a_second = pictures_a_second(row, get("canvas")) if device.is_cpu else None
    seen = times_seen(get("for_"), _epochs(row, get("weights")), pictures, batch, a_second)
    if seen is not None and seen >= OFTEN:
        for name, value in VARIED.items():
            why = f"each picture is seen about {seen:.0f} times: varied more, or it is learnt by heart"
            filling.put(name, value, why)


def _why_device(device: Device) -> str:
    if not device.is_cpu:
        return "the accelerator that torch found"
    kind = untried()
    return "no accelerator" if kind is None else f"training on {kind} was never tried; --device {kind} takes it"


def _model(filling: _Filling, index: Index, device: Device) -> Architecture:
    """The model's row; sets the model where it is not set."""
    if filling.get("model") is None:
        filling.put("model", *model_for(index, device, filling.get("weights")))
    return architecture(filling.get("model"))


def _tail(weights: str, asked: str | None) -> tuple[str, str]:
    """The width that the weights have, and why. Raises ConfigError where another is asked for."""
    if weights == "none":
        return "half", "table 6 of the MobileNetV3 paper"
    found = {"coco": "half", "imagenet": "full"}.get(weights) or tail_of(read(local(weights)).tensors)
    if asked not in (None, found):
        raise ConfigError(f"--tail {asked} does not fit --weights {weights}.", fix=f"--tail {found}, or leave it out")
    return found, f"as the weights ({weights}) have it"


def _keep_options(filling: _Filling) -> None:
    """Of an ember's file. Raises ConfigError where others are asked for."""
    weights = filling.get("weights")
    for name, value in options_of(read(local(weights)).tensors).items():
        if filling.get(name) not in (None, value):
            flag = name.replace("_", "-")
            raise ConfigError(
                f"--weights {weights} was trained {'with' if value else 'without'} --{flag}.",
                fix=f"leave --{'' if filling.get(name) else 'no-'}{flag} out, or start from other weights",
            )
        filling.put(name, value, "as the weights have it")


def _threads(device: Device) -> tuple[int, str]:
    first = first_threads(host_cores(), is_cpu=device.is_cpu)
    share = "; no more than these decode, as the model needs the cores itself" if device.is_cpu else ""
    return 0, f"tuned while training, from {first} on{share}"


def _batch(filling: _Filling, pictures: int, index: Index, device: Device) -> None:
    recipe = architecture(filling.get("model")).recipe
    usual = RECIPES[recipe]()
    optimizer = filling.get("optimizer")
    filling.put("weight_decay", 0.02 if optimizer == "adamw" else 1e-4, f"usual for {optimizer}")
    batch, accumulate, reason = auto_batch.batch(
        filling.config, index, device, wanted=usual.run.batch, pictures=pictures
    )
    filling.put("batch", batch, reason)
    filling.put("accumulate", accumulate, "the batch fits whole" if accumulate == 1 else reason)
    base, base_batch, source = _usual_rate(recipe, optimizer)
    power, rule = RATE_RULES[optimizer]
    rate = base * (filling.get("batch") / base_batch) ** power
    filling.put("rate", float(f"{rate:.3g}"), f"{source}: {base:g} at {base_batch} pictures, {rule}")


RATE_RULES = {"sgd": (1.0, "linear rule (Goyal et al. 2017)"), "adamw": (0.5, "root rule (Malladi et al. 2022)")}
"""Optimizer → power of the batch with which the rate grows, and its name.

SGD: a step of k times the pictures goes as far as k steps (Goyal et al. 2017, "Accurate, Large Minibatch SGD"). AdamW
divides by the gradient's size, so noise, which falls with the root of the batch, is what must stay the same (Malladi et
al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms"; Krizhevsky 2014 has the root for all).
Momentum and the betas stay: the linear rule is derived for a fixed momentum, and Malladi's rule for the betas,
1 - k (1 - beta), has no value for k of 10 and more. The averaged weights follow by themselves: their horizon is a share
of the length, so the same number of pictures at any batch."""


def _cache(config: Config, index: Index) -> tuple[str, str]:
    data, run = config.data, config.run
    rows = index.rows("train")
    steps = total_steps(parse_duration(run.for_), len(rows), run.batch)
    return cache_policy.choose(
        cache_policy.situation(
            index,
            rows,
            Form.of(data.canvas, data.resize, crop=data.crop, zoom=data.zoom),
            closest=data.zoom[1] if data.crop > 0 else 1.0,
            epochs=None if steps is None else steps * run.batch / len(rows),
            threads=run.threads or first_threads(host_cores(), is_cpu=run.device == "cpu"),
        )
    )


def _check_nvjpeg(cache: str | None, device: Device) -> None:
    """Raises ConfigError where --decoder nvjpeg cannot be."""
    if device.is_cpu:
        raise ConfigError("--decoder nvjpeg needs a GPU, and the run is on a CPU.", choices=("host",))
    if cache not in (None, "none"):
        raise ConfigError(
            f"--decoder nvjpeg does not go with --cache {cache}.",
            cause="the cache is filled by what the host decodes, and then nothing is decoded any more",
            fix="leave one of them out",
        )


def _decoder(config: Config, index: Index, device: Device) -> tuple[str, str]:
    """Who decodes, and why; on a GPU both are tried, with a step of the batch that was chosen."""
    if config.run.cache != "none":
        return "host", "decoded pictures are kept, and the host decodes them once"

    def step_s() -> float:
        count = config.run.batch // config.optim.accumulate
        return auto_batch.rehearsal_of(config, index, device).seconds(count) / count

    data = config.data
    return decoder_choice.decide(
        index, index.rows("train"), device, canvas=data.canvas, resize=data.resize, batch=config.run.batch,
        step_s=step_s,
    )  # fmt: skip


def _usual_rate(recipe: str, optimizer: str) -> tuple[float, int, str]:
    """(rate, the batch that it is for, whose it is)."""
    usual = RECIPES[recipe]()
    if optimizer == usual.optim.optimizer:
        return usual.optim.rate, usual.run.batch, f"recipe {recipe}"
    if optimizer == "adamw":
        return 1e-3, 16, "usual for adamw"
    return 0.01, 16, "torchvision's reference"


def warmup_steps(total: int | None, times: float) -> tuple[int, str]:
    """Steps of the warm-up and why. total: steps of the run, None when it has a time; times: of the usual batch.

    Goyal et al. need a warm-up that is longer the larger the batch: 5 of 90 epochs, 780 steps, at 32 times theirs. Root
    of the batch: 500 steps at 16 pictures become 2,000 at 256, a little over four epochs of COCO.
    """
    longer = math.sqrt(max(1.0, times))
    most, share = round(500 * longer), min(0.1, 0.05 * longer)
    if total is None:
        steps, reason = round(100 * longer), "the number of steps is not known beforehand"
    else:
        steps = min(most, max(1, int(total * share)))
        reason = f"{share * 100:.3g} % of the length, at most {most:,} steps"
    if longer > 1:
        reason += f"; longer, as the batch is {times:.3g} times the usual one (Goyal et al. 2017)"
    return steps, reason


def _length(filling: _Filling, pictures: int, val_pictures: int) -> None:
    put, get = filling.put, filling.get
    batch = get("batch")
    per_epoch = pictures / batch
    epochs = _epochs(architecture(get("model")), get("weights"))
    wanted, steps = round(epochs * per_epoch), _usual_steps(epochs, pictures, batch)
    reason = f"{epochs} epochs of {pictures:,} pictures{' from random weights' if epochs > EPOCHS else ''}"
    if steps != wanted:
        bound = "at least" if steps > wanted else "at most"
        reason += f" would be {wanted:,} steps; {bound} {steps:,}"
    put("for_", str(steps), reason)
    length = parse_duration(get("for_"))
    total = total_steps(length, pictures, batch)
    times = batch / _usual_rate(architecture(get("model")).recipe, get("optimizer"))[1]
    if total is None:
        put("warmup", *warmup_steps(None, times))
        part = Duration(max(0.001, round(length.value / EVALUATIONS, 3)), "minutes")
        put("eval_every", str(part), "12 times in all")
        put("ema", 0.98, "averages over about 50 steps; their number is not known beforehand")
        return
    put("warmup", *warmup_steps(total, times))
    # Forward passes cost about a third of a training step; evaluation may cost a tenth of training.
    costs = math.ceil(3.5 * val_pictures / batch)
    every = max(math.ceil(per_epoch), costs, math.ceil(total / EVALUATIONS))
    reason = "at most once an epoch, 12 times in all, and for a tenth of the time"
    if every >= total:
        put("eval_every", "0", f"only at the end: {reason}")
    else:
        put("eval_every", str(every), reason)
    horizon = max(10.0, 0.02 * total)
    share = "2 % of the length" if horizon > 10 else "the fewest that make an average"
    put("ema", float(f"{min(0.9998, 1 - 1 / horizon):.5g}"), f"averages over about {horizon:.0f} steps, {share}")


def _epochs(row: Architecture, weights: str) -> int:
    """The tiny model has too few weights to go on learning for long."""
    return EPOCHS * (FROM_SCRATCH if weights == "none" and row.recipe != "tiny" else 1)


def _usual_steps(epochs: int, pictures: int, batch: int) -> int:
    most = MOST_PICTURES * (epochs // EPOCHS) // batch
    return min(most, max(LEAST_STEPS, round(epochs * pictures / batch)))


def times_seen(
    asked: str | None, epochs: int, pictures: int, batch: int, a_second: float | None = None
) -> float | None:
    """How often each picture is seen in the length that is asked for, or the usual one of so many epochs.

    a_second: pictures, for a length in minutes; None where that is not known, and then the answer is None, too.
    """
    length = None if asked is None else parse_duration(asked)
    steps = _usual_steps(epochs, pictures, batch) if length is None else total_steps(length, pictures, batch)
    if steps is not None:
        return steps * batch / max(1, pictures)
    assert length is not None
    return None if a_second is None else length.value * 60 * a_second / max(1, pictures)


def total_steps(length: Duration, pictures: int, batch: int) -> int | None:
    """Optimizer steps of a length; None when it is given in minutes."""
    match length.unit:
        case "steps":
            return int(length.value)
        case "epochs":
            return max(1, math.ceil(length.value * pictures / batch))
        case "minutes":
            return None
