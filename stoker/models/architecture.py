"""`Architecture`: what stoker knows about a detector architecture. The table of all of them, `MODELS`, is in
`table.py`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from stoker.config.settings import ModelSettings
from stoker.models.detector import Detector

ModelBuilder = Callable[[ModelSettings, int], Detector]
"""(settings, number of classes) → detector. No setting that the architecture uses is AUTO."""

Defaults = Mapping[str, tuple[Any, str]]
"""Field of ModelSettings → (value, reason for it)."""

PRETRAINED_DEFAULTS: Defaults = {
    "backbone_norm": ("frozen_bn", "the backbone is pretrained and a detector's batches are small"),
    "trainable_backbone_layers": (
        3,
        "the first two stages are general enough as they were pretrained (torchvision's default)",
    ),
}
"""Of most detectors with an ImageNet-pretrained backbone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeCost:
    """For 80 classes at `default_image_size`. `python -m tests.models.test_table` computes these numbers."""

    gflop: float
    """GFLOPs to process one image, before NMS: multiplications and additions of convolutions and matrix products."""
    training_gflop: float
    """GFLOPs per image of a training step, forward and backward, with the default settings."""
    memory_gib: float
    """Peak memory of a training step: the recipe's batch in bf16, at most 100 boxes per image, with EMA weights.
    Only tensors are counted; the allocator, the driver and cuDNN need more."""


OptionsFromWeights = Callable[[Mapping[str, Tensor]], dict[str, bool]]
"""Values of fields of ModelSettings that a file of weights decides, from its tensors by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyTuning:
    """Defaults that were measured for one family of architectures only."""

    cpu_image_size: int
    """`default_image_size` on a CPU, if the boxes are large enough."""
    min_box_px: float
    """Side of the square of the area that nine of ten boxes must have at `cpu_image_size`."""
    many_views: float
    """How often each image is seen from which `strong_augmentation` is the default."""
    strong_augmentation: Mapping[str, Any]
    """Values of fields of DataSettings."""
    frozen_backbone_lr_mult: float
    """Factor of the learning rate for a pretrained backbone with frozen norms."""
    max_box_px: int
    """Longest box side in pixels of the model input that the family can predict."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """An entry of MODELS."""

    build: ModelBuilder
    description: str
    num_params: int
    """For 80 classes with the default settings. Frozen norms have no parameters."""
    cost: ComputeCost
    recipe: str
    """Name in `config.recipes.RECIPES` of the default training settings."""
    default_image_size: int
    """Side of a square in pixels: the default input size has at most its area."""
    size_divisor: int = 32
    """Height and width of the input are multiples of it. Most networks halve the image five times."""
    anchors_scale_with_image_size: bool = False
    """Whether the default anchor sizes are for `default_image_size` and are scaled with the input size."""
    defaults: Mapping[str, Any]
    """Values of the ModelSettings fields that the architecture uses; it has no others."""
    reasons: Mapping[str, str]
    """The reason for each field of `defaults`."""
    urls: Mapping[str, str]
    """`coco` and `imagenet` → URL of pretrained weights; empty if there are none."""
    pretrained_norm_eps: float | None = None
    """Epsilon of the norms of the pretrained classifier, if it differs from the detector's."""
    tuning: FamilyTuning | None = None
    """None: the general defaults apply."""
    options_from_weights: OptionsFromWeights | None = None
    """Settings that a file of weights decides; None: there are no such settings."""
    pretrained_options: Mapping[str, Mapping[str, bool]] = dataclasses.field(default_factory=dict)
    """The same for pretrained weights by name (`coco`, `imagenet`)."""
