"""What is known about each detector architecture without torch: the rows of knowledge/models.toml.

The networks themselves are in `stoker/models/`; its `MODELS` are these rows.
"""

import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from stoker.knowledge import read_toml
from stoker_watch import regular_files
from stoker_watch.errors import ConfigError, nearest

PRETRAINED_NAMES = ("objects365+coco", "coco", "objects365", "imagenet")
"""Names that `--weights` accepts, besides `none` and files; the default is the first that a model has.
`objects365+coco`: trained on Objects365, then on COCO; `imagenet`: weights of a classifier, for the backbone."""
HUB_FILE = "https://huggingface.co/{}/resolve/main/model.safetensors"
"""The file of weights of a repository of Hugging Face."""


class ComputeCost(msgspec.Struct, frozen=True, kw_only=True):
    """Costs for 80 classes at `default_image_size`, computed by `python -m tests.trainer.models.test_table`."""

    gflop: float
    """GFLOPs to process one image, before NMS: multiplications and additions of convolutions and matrix products."""
    training_gflop: float
    """GFLOPs per image of a training step, forward and backward, with the default settings, without the optimizer."""
    memory_gib: float
    """Peak memory of a training step: the recipe's batch in bf16, at most 100 boxes per image, with EMA weights.
    Only tensors are counted; the allocator, the driver and cuDNN need more."""


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults that were measured for one family of architectures only."""

    cpu_image_size: int
    """`default_image_size` on a CPU, if the boxes are large enough."""
    min_box_px: float
    """Side of the square of the area that nine of ten boxes must have at `cpu_image_size`."""
    many_views: float
    """How often each image is seen from which `strong_augmentation` is the default."""
    strong_augmentation: dict[str, float | tuple[float, float]]
    """Values of fields of DataSettings."""
    frozen_backbone_lr_mult: float
    """Factor of the learning rate for a pretrained backbone with frozen norms."""
    max_box_px: int
    """Longest box side in pixels of the model input that the family can predict."""


class Architecture(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An architecture, by its row."""

    family: str
    """Its row in `FAMILIES` of `models/table.py`."""
    network: Mapping[str, Any] = {}
    """Arguments of the family's builder."""
    description: str
    num_params: int
    """Parameters for 80 classes with the default settings. Frozen norms have none."""
    cost: ComputeCost
    recipe: str
    """Name in knowledge/recipes.toml of the default training settings."""
    default_image_size: int
    """Side of a square in pixels: the default input size has at most its area."""
    size_divisor: int = 32
    """Height and width of the input are multiples of it. Most networks halve the image five times."""
    anchors_scale_with_image_size: bool = False
    """Whether the default anchor sizes are for `default_image_size` and are scaled with the input size."""
    defaults: Mapping[str, Any]
    """Values of the ModelSettings fields that the architecture uses; it has no others."""
    reasons: Mapping[str, str]
    urls: Mapping[str, str]
    """A name of PRETRAINED_NAMES, in their order → URL of pretrained weights; empty if there are none."""
    pretrained_norm_eps: float | None = None
    """Epsilon of the norms of the pretrained classifier, if it differs from the detector's."""
    tuning: Tuning | None = None
    """None: the general defaults apply."""
    pretrained_options: Mapping[str, Mapping[str, bool]] = {}
    """Settings that pretrained weights decide, by their name."""


def read_architectures() -> dict[str, Architecture]:
    """Value of `--model` → architecture, in the order of the file."""
    tables = read_toml("models.toml")
    return {
        name: make_architecture(row, tables["defaults"], url=tables["url"], tuning=tables["tuning"])
        for name, row in tables["models"].items()
    }


def make_architecture(
    row: dict[str, Any], groups: dict[str, Any], *, url: str = "", tuning: Mapping[str, Any] | None = None
) -> Architecture:
    """The architecture of a row. groups: tables of defaults by name; tuning: by family. Raises msgspec.ValidationError
    for a row of another form."""
    fields = dict(row)
    defaults, files = inherit(fields.pop("defaults", {}), groups), fields.pop("weights", {})
    fields |= {
        "defaults": {
            name: tuple(value) if isinstance(value := default["value"], list) else value
            for name, default in defaults.items()
        },
        "reasons": {name: default["reason"] for name, default in defaults.items()},
        "urls": {name: (HUB_FILE if "/" in file else f"{url}/{{}}").format(file) for name, file in files.items()},
        "tuning": (tuning or {}).get(row.get("family", "")),
    }
    return msgspec.convert(fields, Architecture)


def inherit(table: dict[str, Any], groups: dict[str, Any]) -> dict[str, Any]:
    """The values of a table and of the groups that it inherits; its own and those of later groups win."""
    merged: dict[str, Any] = {}
    for group in table.get("inherits", ()):
        merged |= inherit(groups[group], groups)
    return merged | {name: default for name, default in table.items() if name != "inherits"}


class EmberNetwork(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An ember that `stoker search --architecture` found, or of a recipe file, `--model FILE`. The name of the model
    says all of it, so that a run, its checkpoints and its exports do not need the file."""

    family: Literal["ember"]
    block: Literal["csp", "inverted"]
    width: int
    """Channels at stride 2; twice as many at each stride after it."""
    depths: tuple[int, ...]
    """Blocks at strides 4, 8, 16 and 32."""
    channels: tuple[int, ...]
    """Channels of the neck, at strides 8, 16 and 32."""
    num_blocks: int = 1
    """Blocks of a layer of the neck."""
    head_depth: int = 2
    """Convolutions of a head before its last one."""

    def name(self) -> str:
        depths, channels = "".join(map(str, self.depths)), ".".join(map(str, self.channels))
        return f"ember-{self.block}-w{self.width}-d{depths}-n{channels}-b{self.num_blocks}-h{self.head_depth}"


RECIPE_KEYS = EmberNetwork.__struct_fields__
NETWORK_NAME = re.compile(r"ember-(csp|inverted)-w(\d+)-d(\d{4})-n(\d+)\.(\d+)\.(\d+)-b(\d)-h(\d)")


def read_recipe(path: Path) -> EmberNetwork:
    """The network of a recipe file. Raises ConfigError that names the file, the key and the valid ones."""
    try:
        table = tomllib.loads(regular_files.read_text(path, max_bytes=1 << 16))
    except OSError as error:
        raise ConfigError("The model's file cannot be read.", location=path, cause=error.strerror) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError("The model's file is not valid TOML.", location=path, cause=str(error)) from error
    for key in table:
        if key not in RECIPE_KEYS:
            near = nearest(key, RECIPE_KEYS)
            text = f"A model has no {key!r}" + (f"; did you mean {near!r}?" if near else ".")
            raise ConfigError(text, location=path, choices=RECIPE_KEYS)
    if table.get("family") != "ember":
        raise ConfigError(
            f"A file of family {table.get('family')!r} cannot be built.", location=path, choices=["ember"]
        )
    try:
        network = msgspec.convert(table, EmberNetwork)
    except msgspec.ValidationError as error:
        raise ConfigError("The model's file is wrong.", location=path, cause=str(error)) from error
    return check_network(network, path)


def check_network(network: EmberNetwork, location: Path | None = None) -> EmberNetwork:
    """Raises ConfigError for numbers that no ember has."""
    for name, values, count, (low, high) in (
        ("width", [network.width], 1, (4, 256)), ("depths", network.depths, 4, (1, 9)),
        ("channels", network.channels, 3, (8, 1024)), ("num_blocks", [network.num_blocks], 1, (1, 9)),
        ("head_depth", [network.head_depth], 1, (1, 4)),
    ):  # fmt: skip
        if len(values) != count or any(not low <= value <= high for value in values):
            raise ConfigError(
                f"{name} = {values if count > 1 else values[0]} is out of range.", location=location,
                choices=[f"{low} … {high}" + (f", {count} numbers" if count > 1 else "")],
            )  # fmt: skip
        if name in ("width", "channels") and any(value % 2 for value in values):
            raise ConfigError(f"{name} must be even: half of it goes each way of a CSP layer.", location=location)
    return network


def parse_network(name: str) -> EmberNetwork | None:
    """The network of a name; None for other names. Raises ConfigError for numbers out of range."""
    found = NETWORK_NAME.fullmatch(name)
    if found is None:
        return None
    block, width, depths, a, b, c, blocks, head = found.groups()
    return check_network(
        EmberNetwork(
            family="ember", block="csp" if block == "csp" else "inverted", width=int(width),
            depths=tuple(int(digit) for digit in depths), channels=(int(a), int(b), int(c)), num_blocks=int(blocks),
            head_depth=int(head),
        )
    )  # fmt: skip


@functools.cache
def architecture_of(network_name: str) -> Architecture | None:
    """The architecture of a network's name: ember_n's row, its cost scaled with the square of the width, roughly."""
    network = parse_network(network_name)
    if network is None:
        return None
    row = read_architectures()["ember_n"]
    factor = (network.width / 16) ** 2 * (1.0 if network.block == "csp" else 0.5)
    cost = ComputeCost(**{name: value * factor for name, value in msgspec.structs.asdict(row.cost).items()})
    kind = {"block": network.block, "width": network.width, "depths": network.depths}
    built: dict[str, Any] = {
        "backbone": kind, "channels": network.channels, "num_blocks": network.num_blocks,
        "head_depth": network.head_depth,
    }  # fmt: skip
    return msgspec.structs.replace(
        row, network=built, cost=cost, num_params=round(row.num_params * factor), description="found or written by hand"
    )


def model_name(text: str) -> str:
    """The name of a model: of a recipe file, `x.toml`, the name of its network. Raises ConfigError."""
    return read_recipe(Path(text)).name() if text.endswith(".toml") else text


def find_architecture(name: str) -> Architecture | None:
    """The architecture by the name of a row or a network, or by a recipe file. Raises ConfigError for a wrong file."""
    return read_architectures().get(name) or architecture_of(model_name(name))
