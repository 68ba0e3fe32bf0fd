"""Recipes: functions that return a partial config. The row of a model in MODELS names its recipe.

Settings that a recipe does not set are derived or have a default. A setting of the user overrides the recipe;
`training/defaults/derive.py` records the name of the recipe as the reason of each value.
"""

from collections.abc import Callable

from stoker.config.settings import Config, from_fields


def tiny() -> Config:
    """A 0.6 M-parameter detector from scratch: minutes on a CPU. LOG.md, "The demo's recipe"."""
    return from_fields(
        {
            "weights": "none",
            "optimizer": "adamw",
            "lr": 2.1e-3,
            "momentum": 0.9,
            "weight_decay": 0.02,
            "lr_scheduler": "cosine",
            "batch_size": 8,
            # The model is too small to overfit, so it needs no strong augmentation.
            "scale_jitter_prob": 0.0,
            "brightness": 0.0,
            "contrast": 0.0,
            "saturation": 0.0,
        }
    )


def light() -> Config:
    """Small models on pretrained backbones, at about 320 × 320: an hour on a CPU, minutes on a small GPU."""
    return from_fields(
        {
            "optimizer": "adamw",
            "lr": 1e-3,
            "momentum": 0.9,
            "weight_decay": 0.02,
            "lr_scheduler": "cosine",
            "batch_size": 8,
        }
    )


def ember() -> Config:
    """Ember from random weights. What else was tried: LOG.md, "Ember"."""
    return from_fields(
        {
            "optimizer": "adamw",
            "lr": 4e-3,
            "momentum": 0.9,
            "weight_decay": 0.05,
            "lr_scheduler": "cosine",
            "batch_size": 8,
        }
    )


def standard() -> Config:
    """Models on ResNets at about 800 x 800; SGD as torchvision's reference: lr 0.01 at a batch size of 16."""
    return from_fields(
        {
            "optimizer": "sgd",
            "lr": 0.01,
            "momentum": 0.9,
            "weight_decay": 1e-4,
            "lr_scheduler": "cosine",
            "batch_size": 16,
        }
    )


def ssd() -> Config:
    """SSD300; torchvision's reference: SGD with lr 0.002 at a batch size of 32, weight decay 5e-4."""
    return from_fields(
        {
            "optimizer": "sgd",
            "lr": 0.002,
            "momentum": 0.9,
            "weight_decay": 5e-4,
            "lr_scheduler": "cosine",
            "batch_size": 32,
        }
    )


RECIPES: dict[str, Callable[[], Config]] = {
    "tiny": tiny,
    "light": light,
    "ember": ember,
    "standard": standard,
    "ssd": ssd,
}
"""By name; each row of `models.MODELS` says from which it is trained."""
