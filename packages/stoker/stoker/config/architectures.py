"""What is known about each detector architecture without torch: the rows of knowledge/models.toml.

The networks themselves are in `stoker/models/`; its `MODELS` are these rows.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from stoker.knowledge import read_toml

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
    name: str = ""
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

    @property
    def compute_side(self) -> int:
        """Side in pixels of the square that `cost` is of; the image size of a run depends on its data."""
        return self.default_image_size // self.size_divisor * self.size_divisor


def read_architectures() -> dict[str, Architecture]:
    """Value of `--model` → architecture, in the order of the file."""
    tables = read_toml("models.toml")
    return {
        name: make_architecture({"name": name, **row}, tables["defaults"], url=tables["url"], tuning=tables["tuning"])
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
