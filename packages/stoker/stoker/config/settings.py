"""The settings of a run: one tree of frozen dataclasses, read from and written to TOML, flattened into the flags.

A field that is not set is `AUTO` (None) until `training/defaults/derive.py` fills it and records the reason. After that
no field that the model has is None, as the types say. `config.toml` of a run folder holds these values, and under
`[reasons]` why stoker chose them; a value without a reason was set by the user. Field names are unique over all
sections: they are flags (`--lr`), TOML keys and keyword arguments. `keywords.pyi` is generated from this file.
"""

import contextlib
import dataclasses
import functools
import math
import numbers
import os
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import tomli_w
from cyclopts import Parameter

from stoker.config.architectures import inherit
from stoker.config.sync_method import parse_sync
from stoker.knowledge import read_toml
from stoker_watch import regular_files
from stoker_watch.durations import join_length, parse_duration
from stoker_watch.errors import ConfigError, did_you_mean, make_error, nearest

AUTO: Any = None
"""The value of a field that is not set yet."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The data set, and what is done to an image before the model gets it."""

    data: Annotated[str, Parameter(parse=False)] = AUTO
    """Folder or file of the data set, its URI, or `demo`; the argument of the command."""
    format: Literal[
        "coco", "voc", "kitti", "yolo", "tfrecord", "openimages", "via", "csv", "cvat", "labelme", "label-studio",
        "createml", "jsonl", "webdataset", "parquet", "public",
    ] = AUTO  # fmt: skip
    """Format of the annotations, where automatic detection is wrong."""
    classes: tuple[str, ...] = AUTO
    """Train only these classes, in this order. Boxes of other classes are dropped; their images stay as background."""
    train: str = AUTO
    """Annotation file of the training split, with `--val`, where the files of DATA do not tell; DATA has the images."""
    val: str = AUTO
    """Annotation file of the validation split; without it, a part of the training images is used."""
    splits: str = AUTO
    """Folder of lists (train.txt, val.txt, test.txt) as `stoker data split` writes it; replaces the splits of DATA."""
    val_fraction: float = AUTO
    """Fraction of the images held out when the data set has no validation split."""
    split_method: Literal["stratified", "hash"] = AUTO
    """How these images are chosen: stratified by class, or by a hash of the file name (stays when images are added)."""
    max_bad_fraction: float = AUTO
    """Fraction of the images that may be unusable before training stops; one is always allowed, unless this is 0."""
    max_bad_boxes: float = AUTO
    """Fraction of the boxes of a split that may be left out as wrong before training stops; images that lose all of
    theirs are left out."""
    allow_outside: bool = AUTO
    """Read images that the data set names outside its folder: by absolute paths, `..` or links (docs/data.md)."""
    image_size: tuple[int, int] = AUTO
    """Height and width of the model input in pixels; multiples of 32 (SSD300: 20). One number means a square."""
    resize: Literal["letterbox", "squash"] = AUTO
    """letterbox keeps the aspect ratio and pads; squash stretches to the input size, as TF's fixed_shape_resizer."""
    augment: Literal["default", "none"] = AUTO
    """default: the augmentation of the recipe; none: every augmentation setting that is not set is 0."""
    hflip: float = AUTO
    """Probability of a horizontal flip."""
    scale_jitter_prob: float = AUTO
    """Probability that an image is shown at another scale: cropped (zoomed in) or shrunk (zoomed out)."""
    scale_range: tuple[float, float] = AUTO
    """Smallest and largest scale for that, relative to the scale that fits the input size."""
    min_object_covered: float = AUTO
    """Minimum fraction of at least one box inside a crop; after ten failed draws the full image is used."""
    brightness: float = AUTO
    """Brightness is multiplied by a factor drawn from 1 ± this value; 0 switches it off, as for the next three."""
    contrast: float = AUTO
    """The distance from the mean gray of the image is multiplied by a factor drawn from 1 ± this value."""
    saturation: float = AUTO
    """The distance of each pixel from its own gray is multiplied by a factor drawn from 1 ± this value."""
    hue: float = AUTO
    """The hue is rotated by up to ± this fraction of the color circle, 0 … 0.5."""
    mosaic: float = AUTO
    """Probability that an image becomes a mosaic of itself and three others; off in the last tenth of training."""
    mixup: float = AUTO
    """Probability that an image, before mosaics are made, is blended with another; in the first half of training."""
    repeat_thresh: float = AUTO
    """Repeat images of classes that fewer than this fraction of the images have; epochs stay as long (docs/data.md)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The detector."""

    model: str = AUTO
    """Architecture; `stoker models` lists them with their cost and purpose."""
    weights: str = AUTO
    """Initial weights: objects365+coco, coco, objects365, imagenet (backbone only), none, a file, or the URI of one."""
    backbone_norm: Literal["frozen_bn", "bn", "sync_bn"] = AUTO
    """BatchNorm of the backbone: frozen_bn keeps the loaded statistics, bn trains them, sync_bn also shares them
    between devices."""
    trainable_backbone_layers: int = AUTO
    """Number of backbone stages that are trained, counted from the last one; 0 … 5."""
    anchor_sizes: tuple[float, ...] = AUTO
    """Base size of the anchors in pixels of the model input, one per pyramid level; SSD has one more at the end."""
    anchor_scales: tuple[float, ...] = AUTO
    """Factors of the base size, all used at every level."""
    aspect_ratios: tuple[float, ...] = AUTO
    """Aspect ratios of the anchors: height over width, as in torchvision."""
    fg_iou_thresh: float = AUTO
    """An anchor with at least this IoU with a box is matched to it."""
    bg_iou_thresh: float = AUTO
    """An anchor whose best IoU is below this is background; between the two thresholds it is ignored."""
    focal_alpha: float = AUTO
    """Weight of the positives in the focal loss, 0 … 1."""
    focal_gamma: float = AUTO
    """Focusing exponent of the focal loss, from 0."""
    box_loss: Literal["l1", "giou"] = AUTO
    """Box regression loss: L1 of the encoded offsets, or generalized IoU of the decoded boxes."""
    reduced_tail: Annotated[bool, Parameter(negative="--no-reduced-tail")] = AUTO
    """SSDlite: half as many channels in the last stage of MobileNetV3, as its COCO weights have."""
    nms_free: bool = AUTO
    """Ember: train an additional one-to-one head, so that inference needs no NMS."""
    depthwise: bool = AUTO
    """Ember: use depthwise-separable convolutions in the neck (fewer FLOPs)."""
    queries: int = AUTO
    """D-FINE, DEIMv2, RF-DETR: boxes that are predicted for an image; at least as many as it has objects."""
    class_loss: Literal["vfl", "mal"] = AUTO
    """D-FINE, DEIMv2: varifocal loss, or DEIM's matchability-aware loss."""
    activation_checkpointing: bool = AUTO
    """Recompute activations in the backward pass: a larger batch in the same memory, slower steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """The optimizer and the learning rate."""

    optimizer: Literal["sgd", "adamw", "muon"] = AUTO
    """sgd (with momentum), adamw, or muon for the kernels of convolutions and adamw for the rest."""
    lr: float = AUTO
    """Peak learning rate."""
    backbone_lr_mult: float = AUTO
    """Factor of the learning rate for the backbone; below 1 keeps more of the pretrained features."""
    momentum: float = AUTO
    """Momentum of sgd; first beta of adamw. The momentum of muon is always 0.95."""
    weight_decay: float = AUTO
    """Weight decay; not applied to biases and norms."""
    lr_scheduler: Literal["cosine", "multistep", "exponential", "constant"] = AUTO
    """Learning rate schedule after the warm-up (multistep: × 0.1 at 2/3 and 8/9 of the length; exponential: to 1 %)."""
    warmup_steps: int = AUTO
    """Steps over which the learning rate rises linearly from a thousandth of its peak."""
    clip_grad_norm: float = AUTO
    """Maximum norm of the gradient; 0 does not clip."""
    ema_decay: float = AUTO
    """Decay of the EMA weights, which are evaluated and saved; 0 keeps no EMA."""
    grad_accum_steps: int = AUTO
    """Micro-batches that the batch of one step is split into, to save memory. The batch size is the total."""
    max_skipped_steps: int = AUTO
    """Consecutive steps with non-finite gradients before a rollback with lr/3; the third time is exit code 6."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Length, device, checkpoints and evaluation."""

    max_duration: str = AUTO
    """Length of training: `12ep` (epochs), `5000` (steps) or `30min`; --epochs, --steps and --max-time set it."""
    batch_size: int = AUTO
    """Images per optimizer step, in total."""
    auto_batch: bool = AUTO
    """Try batch sizes on the device and take the one with the best time per image; the learning rate follows it."""
    compile: Annotated[bool, Parameter(negative="--no-compile")] = AUTO
    """Compile the model with torch.compile (takes minutes; the result is cached for later runs)."""
    cuda_graph: bool = AUTO
    """Replay the whole step as one CUDA graph: less work for the host, more memory. No GPU has tried it yet."""
    shard: bool = AUTO
    """Divide weights, gradients and optimizer state among the devices (FSDP): for models too big for one."""
    sync: str = AUTO
    """How devices keep one model: plain, bf16, every:8, auto."""
    precision: Literal["fp32", "bf16", "fp16"] = AUTO
    """Precision of convolutions and matrix products; weights stay fp32."""
    device: str = AUTO
    """cpu, cuda, mps, xpu …; default: an NVIDIA GPU, else the CPU."""
    workers: int | Literal["auto"] = AUTO
    """Threads that read and decode images; auto tunes their number while training."""
    worker_processes: int | Literal["auto"] = AUTO
    """Processes that the workers are spread over; 0: threads of the training process; auto decides at each start."""
    cache: Literal["none", "ram", "disk"] = AUTO
    """Keep decoded training images, at up to 1.5 times the input size: in memory (ram) or on the local disk."""
    jpeg_decoder: Literal["cpu", "nvjpeg"] = AUTO
    """Where JPEGs are decoded: on the CPU or on the GPU (nvjpeg; without a cache). Chosen by measuring."""
    seed: int = AUTO
    """Decides initial weights, order and augmentation; the same seed gives the same run."""
    shuffle_buffer: int = AUTO
    """Images of shards that are held to be mixed, on all devices together: parts of shards are then read at once; 0:
    random order (docs/data.md)."""
    eval_every: str = AUTO
    """Interval between evaluations, as a length (1ep, 500, 10min); 0 evaluates at the end only."""
    patience: int = AUTO
    """Stop after this many evaluations in a row without a better AP, counted from the first AP above 0; 0: never."""
    checkpoint_every: str = AUTO
    """Interval between checkpoints, as a length; 0 saves at the end and on a signal only."""
    price_per_device_hour: float = AUTO
    """Price of a device-hour, for the ledger; 0 when unknown."""

    @property
    def num_workers(self) -> int:
        """`workers` as a number; 0: it is tuned while training."""
        return 0 if self.workers == "auto" else self.workers


Section = DataSettings | ModelSettings | OptimSettings | RunSettings

PER_ATTEMPT = frozenset({"workers", "worker_processes", "checkpoint_every"})
"""Settings that change neither weights nor scores: each attempt of a run may have others."""
EXTENDABLE = frozenset({"max_duration", "lr"})
"""Settings that change when a finished run is trained further."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    data: Annotated[DataSettings, Parameter(name="*", group="Data")] = DataSettings()
    model: Annotated[ModelSettings, Parameter(name="*", group="Model")] = ModelSettings()
    optim: Annotated[OptimSettings, Parameter(name="*", group="Optimization")] = OptimSettings()
    run: Annotated[RunSettings, Parameter(name="*", group="Run")] = RunSettings()

    def set_fields(self) -> dict[str, Any]:
        """The fields that are not AUTO, by name."""
        return {name: value for name, value in self.items() if value is not None}

    def of_attempt(self) -> dict[str, Any]:
        """The fields of PER_ATTEMPT that are set, by name."""
        return {name: value for name, value in self.set_fields().items() if name in PER_ATTEMPT}

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
    "data": DataSettings, "model": ModelSettings, "optim": OptimSettings, "run": RunSettings,
}  # fmt: skip
SECTION_OF: dict[str, str] = {f.name: s for s, kind in SECTIONS.items() for f in dataclasses.fields(kind)}
"""Section of every field, in the order of declaration."""


def _section_of(name: str) -> str:
    if name not in SECTION_OF:
        near = nearest(name, SECTION_OF)
        what = f"There is no setting called {name!r}" + (f"; did you mean {near!r}?" if near else ".")
        raise ConfigError(what, choices=sorted(SECTION_OF))
    return SECTION_OF[name]


def from_fields(fields: dict[str, Any]) -> Config:
    """A Config from field names and values, whatever their sections; None leaves a field open, paths become text and
    NumPy's numbers Python's. Raises ConfigError for an unknown name or a value of the wrong kind."""
    tables: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in join_length(fields).items():
        if value is not None:
            if isinstance(value, numbers.Number) and hasattr(value, "item"):
                value = value.item()
            tables[_section_of(name)][name] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return _convert(tables, None)


def to_toml(config: Config, reasons: dict[str, str]) -> str:
    """The text of config.toml. `reasons`: field name → why stoker chose the value; fields the user set have none."""
    tables: dict[str, Any] = {section: {} for section in SECTIONS}
    for name, value in config.set_fields().items():
        tables[SECTION_OF[name]][name] = list(value) if isinstance(value, tuple) else value
    tables["reasons"] = {name: reason for name, reason in reasons.items()}
    return tomli_w.dumps(tables)


def read_user_toml(path: Path, what: str, **advice: str) -> tuple[str, dict[str, Any]]:
    """The text and the tables of a file that a user wrote. what: the file, in words. Raises ConfigError."""
    try:
        text = regular_files.read_text(path, max_bytes=regular_files.MAX_TOML_BYTES)
        return text, tomllib.loads(text)
    except FileNotFoundError as error:
        raise ConfigError(f"{what} does not exist.", location=path, **advice) from error
    except OSError as error:
        cause = error.strerror or str(error)
        raise ConfigError(f"{what} cannot be read.", location=path, cause=cause, **advice) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} is not valid TOML.", location=path, cause=str(error), **advice) from error


def from_toml(path: Path) -> tuple[Config, dict[str, str]]:
    """Config and reasons of a config.toml. Raises ConfigError that names the file and the key."""
    text, tables = read_user_toml(path, "The configuration file")
    for name, value in tables.items():
        if name not in (*SECTIONS, "reasons") or not isinstance(value, dict):
            raise _misplaced(path, text, "", name, value)
    if tables.get("run", {}).get("stages") == 1:  # a setting of earlier commits, which wrote it into each run
        del tables["run"]["stages"]
        tables.get("reasons", {}).pop("stages", None)
    reasons = {key: str(reason) for key, reason in tables.pop("reasons", {}).items()}
    for section, table in tables.items():
        for key, value in table.items():
            if SECTION_OF.get(key) != section:
                raise _misplaced(path, text, section, key, value)
    return _convert(tables, path, text), reasons


def _misplaced(path: Path, text: str, section: str, key: str, value: Any) -> ConfigError:
    """The error of a key that a section does not have. section: empty above the first one."""
    location = _locate(path, text, section, key)
    if not section and key in (*SECTIONS, "reasons") and (key not in SECTION_OF or isinstance(value, list)):
        return ConfigError(f"{key!r} is a section.", location=location, fix=f"write [{key}] in a line of its own")
    if not section and isinstance(value, dict):
        what = did_you_mean(f"There is no section [{key}]", key, SECTIONS)
        return ConfigError(what, location=location, choices=SECTIONS)
    what = f"[{section}] has no setting {key!r}" if section else f"{key!r} is outside of the sections"
    name, value, is_guess = _find_meant(key, value)
    if not name and key.replace("-", "_") in read_toml("commands.toml")["train"]["train"]:
        fix = f"give it on the command line: stoker train --config {path} --{flag_of(key)} …"
        return ConfigError(f"{key!r} is a flag and not a setting.", location=location, fix=fix)
    if not name:
        known = [known for known, its_section in SECTION_OF.items() if its_section == section] or SECTIONS
        return ConfigError(f"{what}, and there is no such setting.", location=location, choices=known)
    of = SECTION_OF[name]
    meant = f"`{name}` belongs to [{of}]" if name == key else f"it is `{name}` in [{of}]"
    what += f"; did you mean `{name}` of [{of}]?" if is_guess else f": {meant}."
    try:
        lines = tomli_w.dumps({of: {name: value}}).strip()
    except TypeError:  # a value that no setting has
        lines = f"[{of}]\n{name} = …"
    return ConfigError(what, location=location, fix="write in this section\n" + textwrap.indent(lines, " " * 10))


def _find_meant(key: str, value: Any) -> tuple[str, Any, bool]:
    """(the setting that a key means, its value there, whether the name is a guess). No name: nothing is like it."""
    flag, rows = flag_of(key).lower(), read_toml("flags.toml")["flags"]["train"]  # as other tools name it
    name = next((row["flag"] for row in rows if "flag" in row and flag in row["names"]), flag).replace("-", "_")
    if name in ("epochs", "steps", "max_time") and type(value) in (int, float):
        with contextlib.suppress(ConfigError):  # a length that cannot be is shown as it is
            value = join_length({name: value})["max_duration"]
        return "max_duration", value, False
    if name in SECTION_OF:
        return name, value, False
    if key.replace("-", "_") in read_toml("commands.toml")["train"]["train"]:
        return "", value, True
    return nearest(key, SECTION_OF) or "", value, True


def _locate(path: Path, text: str, section: str, key: str) -> str:
    """`file:line` of a key, as far as plain lines tell; else the file."""
    inside = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line):
            inside = header[1].strip("\"'")
        of_key = re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line)
        of_section = rf"\s*{re.escape(section)}\s*\.\s*{re.escape(key)}\s*="
        is_here = bool(of_key) and inside == section
        if is_here or (not section and header and inside == key) or (section and re.match(of_section, line)):
            return f"{path}:{number}"
    return str(path)


class SettingRow(msgspec.Struct, forbid_unknown_fields=True):
    """A setting's row in knowledge/settings.toml."""

    bounds: tuple[int | float, int | float] | None = None
    """Lowest and highest value, both allowed."""
    default: Any = AUTO
    """The value if the user sets none; AUTO: it is derived."""
    reason: str = ""


@functools.cache
def setting_rows() -> dict[str, SettingRow]:
    """Setting → its row, for those that have one."""
    return msgspec.convert(read_toml("settings.toml"), dict[str, SettingRow])


@functools.cache
def read_recipes() -> dict[str, Config]:
    """Name in knowledge/recipes.toml → the settings that models of a kind are trained with, a partial config. The row
    of a model names its recipe; `training/defaults/derive.py` records it as the reason of each value."""
    rows = read_toml("recipes.toml")
    return {name: from_fields(inherit(fields, rows)) for name, fields in rows.items()}


_VALUES: dict[Any, str] = {
    str: "text",
    int: "whole number",
    bool: "yes or no",
    int | Literal["auto"]: "whole number, or auto",
    float: "number",
    tuple[int, int]: "two whole numbers",
    tuple[float, float]: "two numbers",
    tuple[float, ...]: "numbers",
    tuple[str, ...]: "names",
}


def valid_values(name: str) -> tuple[str, ...]:
    """The choices of a setting, or in words what it takes."""
    kind = get_type_hints(SECTIONS[SECTION_OF[name]])[name]
    return get_args(kind) if get_origin(kind) is Literal else (_VALUES[kind],)


_EXAMPLES = {"yes or no": "true", "two whole numbers": "[320, 320]", "two numbers": "[0.5, 2.0]",
             "numbers": "[0.5, 1.0]", "names": '["cat", "dog"]', "text": '"…"'}  # fmt: skip
"""Examples of values in TOML that are not numbers alone."""


def _convert(tables: dict[str, dict[str, Any]], path: Path | None, text: str = "") -> Config:
    """Section → field → value, as a Config of checked types. path, text: of the file."""
    side = tables.get("data", {}).get("image_size")
    if type(side) is int:
        tables["data"]["image_size"] = (side, side)
    try:
        return msgspec.convert(tables, Config)
    except msgspec.ValidationError as error:
        cause, _, at = str(error).partition(" - at `$.")
        section, _, name = at.partition("[")[0].rstrip("`").partition(".")
        if SECTION_OF.get(name) != section:
            raise ConfigError("A setting is of the wrong kind.", location=path, cause=cause) from error
        valid = valid_values(name)
        example = _EXAMPLES.get(valid[0]) if path else None
        raise ConfigError(
            f"--{flag_of(name)} {tables[section][name]!r} is of the wrong kind.",
            location=None if path is None else _locate(path, text, section, name),
            choices=valid,
            fix=example and f"{name} = {example}",
        ) from error


def check_config(config: Config) -> None:
    """Raises ConfigError for the first field that is set to a value it cannot have. AUTO fields pass."""
    for check in (_check_bounds, _check_images, _check_anchors, _check_batch, _check_lengths):
        check(config)


def _check_bounds(config: Config) -> None:
    rows = setting_rows()
    for name, value in config.set_fields().items():
        bounds = rows[name].bounds if name in rows else None
        if bounds is not None and value != "auto" and not bounds[0] <= value <= bounds[1]:
            choices = [f"{bounds[0]:g} … {bounds[1]:g}", *(["auto"] if name in ("workers", "worker_processes") else [])]
            raise ConfigError(f"--{flag_of(name)} {value} is out of range.", choices=choices)


def _check_images(config: Config) -> None:
    data, batch_size = config.data, config.run.batch_size
    if data.image_size is not None and min(data.image_size) < 32:  # of what else it must be a multiple, its model says
        raise ConfigError(f"--image-size {data.image_size[0]} {data.image_size[1]}: both sides must be at least 32.")
    if data.scale_range is not None and not 0.05 <= data.scale_range[0] <= data.scale_range[1] <= 20:
        low, high = data.scale_range
        raise ConfigError(f"--scale-range {low} {high}: wanted 0.05 <= smallest <= largest <= 20.")
    if data.mosaic and batch_size is not None and batch_size % 4:
        raise ConfigError(
            f"--mosaic {data.mosaic:g} needs a batch that is a multiple of 4, not {batch_size}.",
            cause="a mosaic is made of four consecutive images of the batch",
            fix=f"--batch-size {max(4, batch_size // 4 * 4)}, or --mosaic 0",
        )
    if data.mixup and data.mosaic == 0:
        raise ConfigError(f"--mixup {data.mixup:g} needs mosaics.", fix="--mosaic 0.5, or --mixup 0")


def _check_anchors(config: Config) -> None:
    model = config.model
    for name in ("anchor_sizes", "anchor_scales", "aspect_ratios"):
        values = getattr(model, name)
        if values is not None and not (values and all(0 < value < math.inf for value in values)):
            raise ConfigError(f"--{flag_of(name)} needs at least one number, all above zero.")
    if None not in (model.fg_iou_thresh, model.bg_iou_thresh) and model.bg_iou_thresh > model.fg_iou_thresh:
        raise ConfigError("--bg-iou-thresh must not be above --fg-iou-thresh.")


def _check_batch(config: Config) -> None:
    batch_size, micro_batches = config.run.batch_size, config.optim.grad_accum_steps
    if batch_size is not None and micro_batches is not None and batch_size % micro_batches:
        raise ConfigError(
            f"--batch-size {batch_size} is not a multiple of --grad-accum-steps {micro_batches}.",
            cause="the batch is split into equal micro-batches",
            choices=[n for n in range(1, batch_size + 1) if batch_size % n == 0],
        )
    if config.run.sync is not None:
        parse_sync(config.run.sync)


def _check_lengths(config: Config) -> None:
    run = config.run
    if run.patience and run.eval_every is not None and parse_duration(run.eval_every, "eval-every").value <= 0:
        raise make_error(ConfigError, "patience-without-evaluations", patience=run.patience, eval_every=run.eval_every)
    for name in ("max_duration", "eval_every", "checkpoint_every"):
        text = getattr(run, name)
        if text is not None:
            length = parse_duration(text, flag_of(name))
            if name == "max_duration" and length.value <= 0:
                raise ConfigError(f"--max-duration {text!r}: the length of training must be above 0.")


def flag_of(name: str) -> str:
    """The flag of a setting, without `--`."""
    return name.replace("_", "-")


def flag_words(name: str, value: Any) -> list[str]:
    """A setting as the words of a command line: `--image-size 128 128`, `--no-shard`, `--epochs 12`; the data is the
    argument itself."""
    if name == "data":
        return [str(value)]
    if name == "max_duration":
        length = parse_duration(str(value))
        if length.unit == "minutes":
            return ["--max-time", str(value)]
        return [f"--{length.unit}", f"{length.value:g}" if length.unit == "epochs" else str(int(length.value))]
    if isinstance(value, bool):
        return [f"--{'' if value else 'no-'}{flag_of(name)}"]
    values = value if isinstance(value, tuple | list) else (value,)
    return [f"--{flag_of(name)}", *(f"{one:.12g}" if isinstance(one, float) else str(one) for one in values)]


def format_flags(fields: Mapping[str, Any], names: Iterable[str]) -> str:
    """The settings `names` as they are typed, and which of them are not set."""
    typed = shlex.join(word for name in names if name in fields for word in flag_words(name, fields[name]))
    unset = ", ".join("DATA" if name == "data" else f"--{flag_of(name)}" for name in names if name not in fields)
    return " ".join(filter(None, [typed, unset and f"without {unset}"]))


def settings_table(config: Config, reasons: dict[str, str]) -> list[tuple[str, Any, str | None]]:
    """(flag, value, why stoker chose it or None where the user did) of every set field, for the screen and reports."""
    return [(flag_of(name), value, reasons.get(name)) for name, value in config.set_fields().items()]
