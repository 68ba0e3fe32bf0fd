"""Named starting points: functions that return a partial config; which one a model has is in its row of MODELS.

What a recipe leaves open is derived or a default. A user's own setting wins over the recipe's;
`training/defaults/derive.py` writes the recipe's name as the reason of each value.
"""

from collections.abc import Callable

from stoker.config.settings import Config, from_fields


def tiny() -> Config:
    """A 0.6 M-parameter detector from scratch: minutes on a CPU. docs: LOG.md, "the demo's recipe"."""
    return from_fields(
        {
            "weights": "none",
            "optimizer": "adamw",
            "lr": 3e-3,
            "momentum": 0.9,
            "weight_decay": 0.02,
            "lr_scheduler": "cosine",
            "batch_size": 16,
            # It has too few weights to learn its pictures by heart, which is what these are against.
            "scale_jitter_prob": 0.0,
            "brightness": 0.0,
            "contrast": 0.0,
            "saturation": 0.0,
        }
    )


def light() -> Config:
    """Small models on pretrained bodies, at about 320 x 320: an hour on a CPU, minutes on a small GPU."""
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
    """Ember from random weights. LOG.md, "Ember": what else was tried."""
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
    """Models on ResNets at about 800 x 800; SGD as torchvision's reference: 0.01 at 16 pictures."""
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
    """SSD300; torchvision's reference: SGD of 0.002 at 32 pictures, a weight decay of 5e-4."""
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
