"""What a row of `MODELS` says about an architecture. The rows are in `table.py`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from stoker.config.settings import ModelSettings
from stoker.models.detector import Detector

ModelBuilder = Callable[[ModelSettings, int], Detector]
"""Makes the detector of settings, none of which that it uses is AUTO, for so many classes."""

Defaults = Mapping[str, tuple[Any, str]]
"""Values of fields of ModelSettings, each with the reason for it."""

PRETRAINED_DEFAULTS: Defaults = {
    "backbone_norm": ("frozen_bn", "the backbone is pretrained and a detector's batches are small"),
    "trainable_backbone_layers": (
        3,
        "the first two stages are general enough as they were pretrained (torchvision's default)",
    ),
}
"""What most detectors on a classifier's body have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeCost:
    """With 80 classes, on the square of `canvas_side`. `python -m tests.models.test_table` computes them."""

    gflop: float
    """1e9 operations to find objects in a picture: products and sums of convolutions and matrices, before NMS."""
    training_gflop: float
    """The same of a training step, per picture, forward and backward, with the default settings."""
    memory_gib: float
    """At the peak of a training step: the recipe's batch in bf16, at most 100 boxes a picture, averaged weights.
    Counted on tensors; what an allocator, a driver and cuDNN take comes on top."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """A row of MODELS."""

    build: ModelBuilder
    description: str
    num_params: int
    """With 80 classes and the default settings (frozen norms have none)."""
    cost: ComputeCost
    recipe: str
    """The starting point in `recipes.RECIPES` that it is trained from."""
    default_image_size: int
    """Side of the square whose area the canvas has at most, in pixels, where the user does not say."""
    size_divisor: int = 32
    """What both sides of the canvas are multiples of; most networks halve the picture five times."""
    anchors_scale_with_image_size: bool = False
    """Whether its default anchor sizes are those of a square of `canvas_side`, and grow and shrink with the canvas."""
    defaults: Mapping[str, Any]
    """Values of the ModelSettings fields that the architecture uses; it has no others."""
    reasons: Mapping[str, str]
    """Why, for each field of `defaults`."""
    urls: Mapping[str, str]
    """Addresses of pretrained weights, `coco` and `imagenet`, where there are such."""
    pretrained_norm_eps: float | None = None
    """Epsilon of the norms of classifiers on its body, where it is not that of its own norms."""
