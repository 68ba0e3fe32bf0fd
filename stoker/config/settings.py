"""The settings of a run: one tree of frozen dataclasses, read from and written to TOML, flattened into the flags.

A field that is not set is `AUTO` (None) until `training/defaults/derive.py` fills it and writes down why; after that
no field that the model has is None, as the types say. `config.toml` of a run folder holds these values, and under
`[reasons]` the reason of each one that stoker chose; a value without a reason was set by the user. Field names are
unique over all sections: they are the flags (`--rate`), the TOML keys and the parameters of `stoker.train`. (`for_` is
`--for` and
`for`.)
"""

import dataclasses
import math
import numbers
import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import tomli_w
from cyclopts import Parameter

from stoker.errors import ConfigError, nearest

AUTO: Any = None
"""The value of a field that nobody has set yet."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What is read, and what is done to a picture before the model sees it."""

    data: Annotated[str, Parameter(parse=False)] = AUTO
    """Folder or file of the data set, the address of one, or `demo`; the command's argument."""
    format: Literal["coco", "voc", "yolo", "tfrecord", "csv"] = AUTO
    """How the annotations are written, where stoker's own finding is wrong."""
    classes: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = AUTO
    """Only these classes, in this order; boxes of others are left out, and their pictures stay as background."""
    val_fraction: float = AUTO
    """Share of the pictures held back when the data set names no validation split; chosen by a stable hash."""
    max_bad_fraction: float = AUTO
    """Share of the pictures that may be unusable before training stops; one always may, unless it is 0."""
    image_size: tuple[int, int] = AUTO
    """Height and width in pixels of the tensor a picture is resized into; multiples of 32 (SSD300: 20)."""
    resize: Literal["letterbox", "squash"] = AUTO
    """letterbox keeps the aspect and pads; squash stretches to the canvas, as TF's fixed-shape resizer does."""
    augment: Literal["default", "none"] = AUTO
    """recipe: each picture is varied anew, as the recipe says; none: all of the following that is not set is 0."""
    hflip: float = AUTO
    """Probability of a horizontal flip."""
    scale_jitter_prob: float = AUTO
    """Probability that a picture is shown at another scale: cropped (zoomed in) or shrunk (zoomed out)."""
    scale_range: tuple[float, float] = AUTO
    """Smallest and largest scale of such a picture, relative to the one that fits the canvas."""
    min_object_covered: float = AUTO
    """Share of one box, at least, that a crop shows; else another is drawn, after ten the whole picture is shown."""
    brightness: float = AUTO
    """Brightness is scaled by a factor drawn from 1 ± this; 0 leaves it, as with the next three."""
    contrast: float = AUTO
    """The distance from the picture's mean grey is scaled by a factor drawn from 1 ± this."""
    saturation: float = AUTO
    """The distance of a pixel from its own grey is scaled by a factor drawn from 1 ± this."""
    hue: float = AUTO
    """Colours are turned by up to ± this share of the colour circle, 0 … 0.5."""
    mosaic: float = AUTO
    """Probability that a picture becomes a mosaic of itself and three others, but for the last tenth of training."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The detector."""

    model: str = AUTO
    """Architecture; `stoker models` lists them with what each costs and is for."""
    weights: str = AUTO
    """Where training starts: coco, imagenet (the backbone only), none, a file, or the address of one."""
    backbone_norm: Literal["frozen_bn", "bn", "sync_bn"] = AUTO
    """BatchNorm of the backbone: kept as loaded, or trained; sync: over all devices (proved on one: gloo has none)."""
    trainable_backbone_layers: int = AUTO
    """How many stages of the backbone are trained, counted from its end; 0 … 5."""
    anchor_sizes: Annotated[tuple[float, ...], Parameter(consume_multiple=True)] = AUTO
    """Base size of the anchors in pixels of the canvas, one per pyramid level; SSD has one more at the end."""
    anchor_scales: Annotated[tuple[float, ...], Parameter(consume_multiple=True)] = AUTO
    """Factors of the base size, all used at every level."""
    aspect_ratios: Annotated[tuple[float, ...], Parameter(consume_multiple=True)] = AUTO
    """Height over width of the anchors."""
    fg_iou_thresh: float = AUTO
    """An anchor with at least this IoU with a box is matched to it."""
    bg_iou_thresh: float = AUTO
    """An anchor whose best IoU is below this is background; between the two it is ignored."""
    focal_alpha: float = AUTO
    """Weight of the positives in the focal loss, 0 … 1."""
    focal_gamma: float = AUTO
    """Focusing exponent of the focal loss, from 0."""
    box_loss: Literal["l1", "giou"] = AUTO
    """Loss of the boxes: L1 of the encoded offsets, or generalised IoU of the decoded boxes."""
    reduced_tail: bool = AUTO
    """Width of the end of SSDlite's MobileNetV3: half, as its COCO weights have it, or full, as ImageNet's have it."""
    nms_free: bool = AUTO
    """Ember: also learn to find each object at one point alone, so that detections need no suppression."""
    depthwise: bool = AUTO
    """Ember: 3 × 3 convolutions of the neck look at each channel apart, and 1 × 1 ones join them: less work."""
    activation_checkpointing: bool = AUTO
    """Keep less for the backward pass and compute it again there: a bigger batch in the same memory, slower steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """How the weights move."""

    optimizer: Literal["sgd", "adamw"] = AUTO
    """sgd (momentum) or adamw."""
    lr: float = AUTO
    """Peak learning rate."""
    backbone_lr_mult: float = AUTO
    """Factor of the rate for the weights of the backbone's body; below 1 keeps more of what pretrained ones know."""
    momentum: float = AUTO
    """Momentum of sgd; first beta of adamw."""
    weight_decay: float = AUTO
    """Weight decay; not applied to biases and norms."""
    lr_scheduler: Literal["cosine", "multistep", "exponential", "constant"] = AUTO
    """Course of the rate after the warm-up (step: a tenth at 2/3 and 8/9 of the length; exponential: to 1 %)."""
    warmup_steps: int = AUTO
    """Steps over which the rate rises linearly from a thousandth of its peak."""
    clip_grad_norm: float = AUTO
    """Largest norm of the gradient; 0 does not clip."""
    ema_decay: float = AUTO
    """Decay of the averaged weights that are evaluated and saved; 0 keeps no average."""
    grad_accum_steps: int = AUTO
    """Micro-batches that one step's batch is split into, to save memory."""
    max_skipped_steps: int = AUTO
    """Steps in a row with gradients that are not finite until it goes back at a third of the rate; thrice is exit 6."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How long, on what, and how often it is saved and scored."""

    max_duration: str = AUTO
    """Length: `12ep` (epochs), `5000` (steps), or `30min`."""
    batch_size: int = AUTO
    """Pictures per optimizer step."""
    auto_batch: bool = AUTO
    """Try batches on the device and take the one with the best time per picture; the rate follows it."""
    compile: Annotated[bool, Parameter(negative="--no-compile")] = AUTO
    """Run the model operator by operator, for debugging; --no-eager compiles it (minutes, kept for later runs)."""
    precision: Literal["fp32", "bf16", "fp16"] = AUTO
    """Arithmetic of convolutions and products; weights stay fp32."""
    device: str = AUTO
    """cpu, cuda, mps, xpu …; default: the accelerator that torch finds, else the cpu."""
    workers: int | Literal["auto"] = AUTO
    """Threads that read and decode pictures; 0: their number is tuned while training."""
    cache: Literal["none", "ram", "disk"] = AUTO
    """Keep training pictures decoded, at up to 1.5 times their size in the canvas: on the local disk, or in memory."""
    jpeg_decoder: Literal["cpu", "nvjpeg"] = AUTO
    """Who decodes training pictures: the cores, or the GPU (JPEGs; without a cache). Chosen by trying both."""
    seed: int = AUTO
    """Decides initial weights, order and augmentation; the same seed gives the same run."""
    eval_every: str = AUTO
    """Length between evaluations, as in --for; 0 evaluates at the end only."""
    patience: int = AUTO
    """Evaluations in a row without a better AP, counted from the first above 0, that end it early; 0 never does."""
    checkpoint_every: str = AUTO
    """Length between checkpoints, as in --for; 0 saves at the end and on a signal only."""
    price_per_device_hour: float = AUTO
    """Money per device-hour, for the ledger; 0 when unknown."""


Section = DataSettings | ModelSettings | OptimSettings | RunSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    data: Annotated[DataSettings, Parameter(name="*", group="Data")] = DataSettings()
    model: Annotated[ModelSettings, Parameter(name="*", group="Model")] = ModelSettings()
    optim: Annotated[OptimSettings, Parameter(name="*", group="Optimisation")] = OptimSettings()
    run: Annotated[RunSettings, Parameter(name="*", group="Run")] = RunSettings()

    def set_fields(self) -> dict[str, Any]:
        """The fields that are not AUTO, by name."""
        return {name: value for name, value in self.items() if value is not None}

    def items(self) -> list[tuple[str, Any]]:
        return [(name, getattr(getattr(self, section), name)) for name, section in SECTION_OF.items()]

    def replace(self, **changes: Any) -> "Config":
        """A copy with fields changed by their own names, whatever their section; unknown names are a ConfigError."""
        by_section: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            by_section.setdefault(_section_of(name), {})[name] = value
        return dataclasses.replace(
            self, **{s: dataclasses.replace(getattr(self, s), **values) for s, values in by_section.items()}
        )


SECTIONS: dict[str, type[Section]] = {
    "data": DataSettings,
    "model": ModelSettings,
    "optim": OptimSettings,
    "run": RunSettings,
}
SECTION_OF: dict[str, str] = {f.name: s for s, kind in SECTIONS.items() for f in dataclasses.fields(kind)}
"""Section of every field, in the order of declaration."""


def _section_of(name: str) -> str:
    if name not in SECTION_OF:
        near = nearest(name, SECTION_OF)
        raise ConfigError(
            f"There is no setting called {name!r}" + (f"; did you mean {near!r}?" if near else "."),
            choices=sorted(n.rstrip("_") for n in SECTION_OF),
        )
    return SECTION_OF[name]


def from_fields(fields: dict[str, Any]) -> Config:
    """A Config from field names and values, whatever their sections; None leaves a field open, paths become text and
    NumPy's numbers Python's.

    Raises ConfigError for an unknown name or a value of the wrong kind.
    """
    tables: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in fields.items():
        if value is not None:
            if isinstance(value, numbers.Number) and hasattr(value, "item"):
                value = value.item()
            tables[_section_of(name)][name] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return _convert(tables, None)


def to_toml(config: Config, reasons: dict[str, str]) -> str:
    """The text of config.toml. `reasons`: field name → why stoker chose the value; fields the user set have none."""
    tables: dict[str, Any] = {section: {} for section in SECTIONS}
    for name, value in config.set_fields().items():
        tables[SECTION_OF[name]][name.rstrip("_")] = list(value) if isinstance(value, tuple) else value
    tables["reasons"] = {name.rstrip("_"): reason for name, reason in reasons.items()}
    return tomli_w.dumps(tables)


def from_toml(path: Path) -> tuple[Config, dict[str, str]]:
    """Config and reasons of a config.toml. Raises ConfigError that names the file and the key."""
    try:
        tables = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError("The configuration file does not exist.", location=path) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("The configuration is not valid TOML.", location=path, cause=str(error)) from error
    reasons = {_field_name(key): str(why) for key, why in tables.pop("reasons", {}).items()}
    for section, table in tables.items():
        if section not in SECTIONS:
            raise ConfigError(f"There is no section [{section}].", location=path, choices=SECTIONS)
        for key in table:
            if SECTION_OF.get(_field_name(key)) != section:
                known = [n.rstrip("_") for n, s in SECTION_OF.items() if s == section]
                raise ConfigError(f"[{section}] has no setting {key!r}.", location=path, choices=known)
    renamed = {s: {_field_name(k): v for k, v in table.items()} for s, table in tables.items()}
    return _convert(renamed, path), reasons


def _convert(tables: dict[str, dict[str, Any]], location: Path | None) -> Config:
    """Section → field → value, as a Config of checked types."""
    try:
        return msgspec.convert(tables, Config)
    except msgspec.ValidationError as error:
        cause, _, path = str(error).partition(" - at `$.")
        section, _, name = path.partition("[")[0].rstrip("`").partition(".")
        kind = get_type_hints(SECTIONS[section]).get(name) if section in SECTIONS else None
        raise ConfigError(
            f"--{_flag(name)} {tables[section][name]!r} is of the wrong kind."
            if kind
            else "A setting is of the wrong kind.",
            location=location,
            cause=cause,
            choices=get_args(kind) if get_origin(kind) is Literal else (),
        ) from error


def _field_name(key: str) -> str:
    return key if key in SECTION_OF else key + "_"


_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(ep|epochs?|min|minutes?|h|hours?|s|steps?)?\s*$")


@dataclasses.dataclass(frozen=True)
class Duration:
    """A length of training in one of three units."""

    value: float
    unit: Literal["steps", "epochs", "minutes"]

    def __str__(self) -> str:
        return f"{self.value:g}" + {"steps": "", "epochs": "ep", "minutes": "min"}[self.unit]


def parse_duration(text: str, flag: str = "for") -> Duration:
    """`12ep` → epochs, `5000` or `5000steps` → steps, `30min`, `2h` → minutes. ConfigError names the flag."""
    match = _DURATION.match(text)
    valid = ("12ep (epochs)", "5000 (steps)", "30min", "2h")
    if match is None:
        raise ConfigError(f"--{flag} {text!r} is not a length of training.", choices=valid)
    value, unit = float(match[1]), match[2] or "steps"
    if unit.startswith("ep"):
        return Duration(value, "epochs")
    if unit.startswith("min"):
        return Duration(value, "minutes")
    if unit.startswith("h"):
        return Duration(value * 60, "minutes")
    if unit == "s":
        raise ConfigError(f"--{flag} {text!r} could mean steps or seconds.", choices=valid)
    if value != int(value):
        raise ConfigError(f"--{flag} {text!r}: steps are whole.", choices=valid)
    return Duration(value, "steps")


# Bounds of the numbers: field → (lowest, highest), both allowed.
_BOUNDS: dict[str, tuple[float, float]] = {
    "val_fraction": (0.001, 0.9),
    "max_bad": (0, 1),
    "flip": (0, 1),
    "crop": (0, 1),
    "overlap": (0, 1),
    "brightness": (0, 1),
    "contrast": (0, 1),
    "saturation": (0, 1),
    "hue": (0, 0.5),
    "mosaic": (0, 1),
    "trainable_stages": (0, 5),
    "foreground_iou": (0, 1),
    "background_iou": (0, 1),
    "focal_alpha": (0, 1),
    "focal_gamma": (0, 10),
    "rate": (1e-9, 100),
    "backbone_rate": (0, 1),
    "momentum": (0, 0.9999),
    "weight_decay": (0, 10),
    "warmup": (0, 10**9),
    "clip": (0, 1e9),
    "ema": (0, 0.999999),
    "accumulate": (1, 4096),
    "max_skipped": (1, 10**6),
    "batch": (1, 10**6),
    "threads": (0, 1024),
    "patience": (0, 10**6),
    "seed": (0, 2**63 - 1),
    "price": (0, 1e6),
}


def check(config: Config) -> None:
    """Raises ConfigError for the first field that is set to a value it cannot have. AUTO fields pass."""
    for name, value in config.set_fields().items():
        low, high = _BOUNDS.get(name, (None, None))
        if low is not None and high is not None and not low <= value <= high:
            raise ConfigError(f"--{_flag(name)} {value} is out of range.", choices=[f"{low:g} … {high:g}"])
    data, model, optim, run = config.data, config.model, config.optim, config.run
    if data.image_size is not None and min(data.image_size) < 32:  # of what else it must be a multiple, its model says
        raise ConfigError(f"--canvas {data.image_size[0]} {data.image_size[1]}: both sides must be at least 32.")
    if data.scale_range is not None and not 0.05 <= data.scale_range[0] <= data.scale_range[1] <= 20:
        raise ConfigError(
            f"--zoom {data.scale_range[0]} {data.scale_range[1]}: wanted 0.05 <= smallest <= largest <= 20."
        )
    if data.mosaic is not None and data.mosaic > 0 and run.batch_size is not None and run.batch_size % 4:
        raise ConfigError(
            f"--mosaic {data.mosaic:g} needs a batch that is a multiple of 4, not {run.batch_size}.",
            cause="a mosaic is made of four pictures that follow each other",
            fix=f"--batch {max(4, run.batch_size // 4 * 4)}, or --mosaic 0",
        )
    for name in ("anchor_sizes", "anchor_scales", "anchor_ratios"):
        values = getattr(model, name)
        if values is not None and not (values and all(0 < value < math.inf for value in values)):
            raise ConfigError(f"--{_flag(name)} needs at least one number, all above zero.")
    if None not in (model.fg_iou_thresh, model.bg_iou_thresh) and model.bg_iou_thresh > model.fg_iou_thresh:
        raise ConfigError("--background-iou must not be above --foreground-iou.")
    if run.batch_size is not None and optim.grad_accum_steps is not None and run.batch_size % optim.grad_accum_steps:
        raise ConfigError(
            f"--batch {run.batch_size} cannot be split into --accumulate {optim.grad_accum_steps} equal micro-batches.",
            choices=[n for n in range(1, run.batch_size + 1) if run.batch_size % n == 0],
        )
    if run.patience and run.eval_every is not None and parse_duration(run.eval_every, "eval-every").value <= 0:
        raise ConfigError(
            f"--patience {run.patience} counts evaluations, and there is only the one at the end.",
            cause=f"--eval-every {run.eval_every}",
            fix="--eval-every with a part of the length, as 1ep, or --patience 0",
        )
    for name in ("for_", "eval_every", "checkpoint_every"):
        text = getattr(run, name)
        if text is not None:
            length = parse_duration(text, _flag(name))
            if name == "for_" and length.value <= 0:
                raise ConfigError(f"--for {text!r}: the length must be above 0.")


def _flag(name: str) -> str:
    return name.rstrip("_").replace("_", "-")


def settings_table(config: Config, reasons: dict[str, str]) -> list[tuple[str, Any, str | None]]:
    """(flag, value, why stoker chose it or None where the user did) of every set field, for the screen and reports."""
    return [(_flag(name), value, reasons.get(name)) for name, value in config.set_fields().items()]
