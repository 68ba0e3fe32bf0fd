"""The table of architectures, and `build`. A new detector is a new row; there is nothing to register."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torchvision.models import MobileNet_V2_Weights, ResNet50_Weights
from torchvision.models.detection import RetinaNet_ResNet50_FPN_Weights

from stoker.config import ModelSettings
from stoker.errors import ConfigError, nearest
from stoker.models.backbones import mobilenet_v2_pyramid, resnet50_pyramid, tiny_pyramid
from stoker.models.retinanet import RetinaNet

Detector = RetinaNet
"""What `build` returns: an nn.Module with `forward(images)`, `loss(raw, batch)` and `decode(raw, …)`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """A row of MODELS."""

    build: Callable[[ModelSettings, int], Detector]
    what_for: str
    parameters: int
    """With 80 classes and the default settings (frozen norms have none)."""
    levels: int
    """Pyramid levels; each has its own anchor size."""
    defaults: Mapping[str, Any]
    """Values of the ModelSettings fields that belong to the architecture."""
    reasons: Mapping[str, str]
    """Why, for each field of `defaults`."""
    urls: Mapping[str, str]
    """Addresses of pretrained weights, `coco` and `imagenet`, where there are such."""


def _row(*, defaults: Mapping[str, tuple[Any, str]], **fields: Any) -> Architecture:
    values = {name: value for name, (value, _) in defaults.items()}
    return Architecture(defaults=values, reasons={name: reason for name, (_, reason) in defaults.items()}, **fields)


_FOCAL: dict[str, tuple[Any, str]] = {
    "foreground_iou": (0.5, "RetinaNet paper, section 4"),
    "background_iou": (0.4, "RetinaNet paper, section 4"),
    "focal_alpha": (0.25, "RetinaNet paper, table 1b"),
    "focal_gamma": (2.0, "RetinaNet paper, table 1b"),
}
_ANCHORS: dict[str, tuple[Any, str]] = {
    "anchor_sizes": ((32.0, 64.0, 128.0, 256.0, 512.0), "RetinaNet paper: four times the stride of each level"),
    "anchor_scales": ((1.0, 2 ** (1 / 3), 2 ** (2 / 3)), "RetinaNet paper: three scales per octave"),
    "anchor_ratios": ((0.5, 1.0, 2.0), "RetinaNet paper, section 4"),
}
_PRETRAINED: dict[str, tuple[Any, str]] = {
    "norm": ("frozen", "the backbone is pretrained and a detector's batches are small"),
    "trainable_stages": (3, "the first two stages are general enough as they were pretrained (torchvision's default)"),
}


def _resnet50(settings: ModelSettings, class_count: int) -> RetinaNet:
    backbone = resnet50_pyramid(256, settings.norm, settings.trainable_stages)
    return RetinaNet(backbone, settings, class_count, channels=256, depth=4, norm=None)


def _mobilenet_v2(settings: ModelSettings, class_count: int) -> RetinaNet:
    backbone = mobilenet_v2_pyramid(128, settings.norm, settings.trainable_stages)
    return RetinaNet(backbone, settings, class_count, channels=128, depth=2, norm=None)


def _tiny(settings: ModelSettings, class_count: int) -> RetinaNet:
    backbone = tiny_pyramid(48, settings.norm, settings.trainable_stages)
    return RetinaNet(backbone, settings, class_count, channels=48, depth=2, norm=nn.BatchNorm2d)


MODELS: dict[str, Architecture] = {
    "retinanet_resnet50_fpn": _row(
        build=_resnet50,
        what_for="GPUs; the reference: torchvision's RetinaNet, 36.4 AP on COCO with torchvision's weights",
        parameters=33_786_804,
        levels=5,
        defaults={**_FOCAL, **_ANCHORS, **_PRETRAINED, "box_loss": ("l1", "as torchvision trained it")},
        urls={
            "coco": RetinaNet_ResNet50_FPN_Weights.COCO_V1.url,
            "imagenet": ResNet50_Weights.IMAGENET1K_V1.url,
        },
    ),
    "retinanet_mobilenet_v2_fpn": _row(
        build=_mobilenet_v2,
        what_for="small GPUs, and CPUs with patience: a light backbone, towers of 2 convolutions of 128 channels",
        parameters=4_570_292,
        levels=5,
        defaults={
            **_FOCAL,
            **_ANCHORS,
            **_PRETRAINED,
            "box_loss": ("giou", "detections are scored by overlap; torchvision's second RetinaNet recipe has it too"),
        },
        urls={"imagenet": MobileNet_V2_Weights.IMAGENET1K_V1.url},
    ),
    "retinanet_tiny_fpn": _row(
        build=_tiny,
        what_for="the demo, tests, and CPUs: learns simple objects in pictures of 128 pixels in minutes",
        parameters=631_640,
        levels=3,
        defaults={
            **_FOCAL,
            "anchor_sizes": ((14.0, 28.0, 48.0), "objects of 1/10 to 1/2 of a picture of 128 pixels"),
            "anchor_scales": ((1.0, 2**0.5), "two scales per octave"),
            "anchor_ratios": ((1.0,), "a third of the work of three ratios"),
            "norm": ("train", "there are no pretrained weights"),
            "trainable_stages": (5, "there are no pretrained weights"),
            "box_loss": ("giou", "detections are scored by overlap"),
        },
        urls={},
    ),
}
"""Every architecture by the name that `--model` takes."""


def architecture(name: str) -> Architecture:
    """The row of MODELS called `name`. Raises ConfigError with the valid names."""
    if name not in MODELS:
        near = nearest(name, MODELS)
        raise ConfigError(
            f"There is no model called {name!r}" + (f"; did you mean {near!r}?" if near else "."), choices=MODELS
        )
    return MODELS[name]


def build(settings: ModelSettings, class_count: int) -> Detector:
    """The model that `settings` (no field AUTO but `weights`) describe, with random weights, in channels-last memory.

    Raises ConfigError for an unknown name and for a number of anchor sizes that is not the number of pyramid levels.
    """
    row = architecture(settings.model)
    if len(settings.anchor_sizes) != row.levels:
        raise ConfigError(
            f"--anchor-sizes has {len(settings.anchor_sizes)} numbers.",
            cause=f"{settings.model} has {row.levels} pyramid levels, each with a size of its own",
            fix=f"give {row.levels} numbers, finest level first",
        )
    return row.build(settings, class_count).to(memory_format=torch.channels_last)
