"""Recipes: the settings that models of a kind are trained with. The row of a model in MODELS names its recipe.

Settings that a recipe does not set are derived or have a default. A setting of the user overrides the recipe;
`training/defaults/derive.py` records the name of the recipe as the reason of each value.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from stoker.config.settings import Config, from_fields


def _recipe(*, optimizer: str, lr: float, weight_decay: float, batch_size: int, **others: Any) -> Config:
    """A partial config, with what all recipes have in common."""
    settings = {"optimizer": optimizer, "lr": lr, "weight_decay": weight_decay, "batch_size": batch_size}
    return from_fields({**settings, "momentum": 0.9, "lr_scheduler": "cosine", **others})


RECIPES: dict[str, Callable[[], Config]] = {
    # A 0.6 M-parameter detector from scratch: minutes on a CPU. LOG.md, "The demo's recipe".
    "tiny": partial(
        _recipe,
        optimizer="adamw",
        lr=2.1e-3,
        weight_decay=0.02,
        batch_size=8,
        weights="none",
        # The model is too small to overfit, so it needs no strong augmentation.
        scale_jitter_prob=0.0,
        brightness=0.0,
        contrast=0.0,
        saturation=0.0,
    ),
    # Small models on pretrained backbones, at about 320 × 320: an hour on a CPU, minutes on a small GPU.
    "light": partial(_recipe, optimizer="adamw", lr=1e-3, weight_decay=0.02, batch_size=8),
    # Ember from random weights. What else was tried: LOG.md, "Ember".
    "ember": partial(_recipe, optimizer="adamw", lr=4e-3, weight_decay=0.05, batch_size=8),
    # Models on ResNets at about 800 × 800; torchvision's reference: SGD with lr 0.01 at a batch size of 16.
    "standard": partial(_recipe, optimizer="sgd", lr=0.01, weight_decay=1e-4, batch_size=16),
    # SSD300; torchvision's reference: SGD with lr 0.002 at a batch size of 32, weight decay 5e-4.
    "ssd": partial(_recipe, optimizer="sgd", lr=0.002, weight_decay=5e-4, batch_size=32),
}
"""By name; each row of `models.MODELS` says from which it is trained."""
