"""Steps that the tests of planning share."""

from typing import Any

from stoker.models import MODELS
from stoker.planning.trace import StepSpec


def make_spec(model: str = "retinanet_tiny_fpn", side: int = 64, *, on_cpu: bool = True, **changes: Any) -> StepSpec:
    usual = {
        **{name: value for name, value in MODELS[model].defaults.items() if value is not None},
        "model": model, "image_size": [side, side], "precision": "fp32", "hflip": 0.5, "brightness": 0.1,
        "contrast": 0.1, "saturation": 0.1, "hue": 0.0, "mosaic": 0.0, "optimizer": "adamw", "backbone_lr_mult": 1.0,
        "momentum": 0.9, "weight_decay": 1e-4, "clip_grad_norm": 10.0, "ema_decay": 0.99,
    }  # fmt: skip
    return StepSpec(settings=usual | changes, num_classes=3, max_boxes=8, on_cpu=on_cpu)
