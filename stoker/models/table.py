"""The table of architectures, and `build`. A new detector is a new row; there is nothing to register."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torchvision.models import MobileNet_V2_Weights, ResNet18_Weights, ResNet50_Weights
from torchvision.models.detection import FCOS_ResNet50_FPN_Weights, RetinaNet_ResNet50_FPN_Weights

from stoker.config import SECTION_OF, Config, ModelSettings
from stoker.errors import ConfigError, nearest
from stoker.models.backbones import Coarser, Norm, pyramid
from stoker.models.detector import Detector
from stoker.models.fcos import FCOS
from stoker.models.retinanet import RetinaNet


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """A row of MODELS."""

    build: Callable[[ModelSettings, int], Detector]
    what_for: str
    parameters: int
    """With 80 classes and the default settings (frozen norms have none)."""
    recipe: str
    """The starting point in `recipes.RECIPES` that it is trained from."""
    canvas_side: int
    """Side of the square whose area the canvas has at most, in pixels, where the user does not say."""
    defaults: Mapping[str, Any]
    """Values of the ModelSettings fields that the architecture uses; it has no others."""
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


def _retinanet(
    body: str, *, channels: int = 256, depth: int = 4, coarser: Coarser = "p6p7", norm: Norm | None = None
) -> Callable[[ModelSettings, int], Detector]:
    """Builds RetinaNets on a body of BODIES: FPN and towers of `channels`, towers of `depth` convolutions; norm: in FPN
    and towers, None for none."""

    def build(settings: ModelSettings, class_count: int) -> RetinaNet:
        backbone = pyramid(
            body,
            channels,
            norm=settings.norm,
            trainable_stages=settings.trainable_stages,
            coarser=coarser,
            fpn_norm=norm,
        )
        return RetinaNet(backbone, settings, class_count, channels=channels, depth=depth, norm=norm)

    return build


_FCOS: dict[str, tuple[Any, str]] = {
    "focal_alpha": (0.25, "FCOS paper, section 2.1: as RetinaNet"),
    "focal_gamma": (2.0, "FCOS paper, section 2.1: as RetinaNet"),
}


def _fcos(body: str, *, channels: int = 256, depth: int = 4) -> Callable[[ModelSettings, int], Detector]:
    """Builds FCOS on a body of BODIES: FPN and towers of `channels`, towers of `depth` convolutions."""

    def build(settings: ModelSettings, class_count: int) -> FCOS:
        backbone = pyramid(body, channels, norm=settings.norm, trainable_stages=settings.trainable_stages)
        return FCOS(backbone, settings, class_count, channels=channels, depth=depth)

    return build


MODELS: dict[str, Architecture] = {
    "retinanet_resnet50_fpn": _row(
        build=_retinanet("resnet50"),
        what_for="GPUs; the reference: torchvision's RetinaNet, 36.4 AP on COCO with torchvision's weights",
        parameters=33_786_804,
        recipe="standard",
        canvas_side=800,
        defaults={**_FOCAL, **_ANCHORS, **_PRETRAINED, "box_loss": ("l1", "as torchvision trained it")},
        urls={
            "coco": RetinaNet_ResNet50_FPN_Weights.COCO_V1.url,
            "imagenet": ResNet50_Weights.IMAGENET1K_V1.url,
        },
    ),
    "retinanet_mobilenet_v2_fpn": _row(
        build=_retinanet("mobilenet_v2", channels=128, depth=2),
        what_for="small GPUs, and CPUs with patience: a light backbone, towers of 2 convolutions of 128 channels",
        parameters=4_570_292,
        recipe="light",
        canvas_side=320,
        defaults={
            **_FOCAL,
            **_ANCHORS,
            **_PRETRAINED,
            "box_loss": ("giou", "detections are scored by overlap; torchvision's second RetinaNet recipe has it too"),
        },
        urls={"imagenet": MobileNet_V2_Weights.IMAGENET1K_V1.url},
    ),
    "retinanet_tiny_fpn": _row(
        build=_retinanet("tiny", channels=48, depth=2, coarser=None, norm=nn.BatchNorm2d),
        what_for="the demo, tests, and CPUs: learns simple objects in pictures of 128 pixels in minutes",
        parameters=631_640,
        recipe="tiny",
        canvas_side=320,
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
    "fcos_resnet50_fpn": _row(
        build=_fcos("resnet50"),
        what_for="GPUs; no anchors to choose: torchvision's FCOS, 39.2 AP on COCO with torchvision's weights",
        parameters=32_244_245,
        recipe="standard",
        canvas_side=800,
        defaults={**_FCOS, **_PRETRAINED},
        urls={
            "coco": FCOS_ResNet50_FPN_Weights.COCO_V1.url,
            "imagenet": ResNet50_Weights.IMAGENET1K_V1.url,
        },
    ),
    "fcos_resnet18_fpn": _row(
        build=_fcos("resnet18", channels=128, depth=2),
        what_for="small GPUs; no anchors to choose: ResNet-18, towers of 2 convolutions of 128 channels",
        parameters=12_709_269,
        recipe="light",
        canvas_side=320,
        defaults={**_FCOS, **_PRETRAINED},
        urls={"imagenet": ResNet18_Weights.IMAGENET1K_V1.url},
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
    """The model that `settings` (no field AUTO that it uses) describe, with random weights, in channels-last memory.

    Raises ConfigError for an unknown name, for a setting that the architecture does not have, and for a number of
    anchor sizes other than it needs.
    """
    row = architecture(settings.model)
    check_settings(settings)
    if settings.anchor_sizes is not None:
        needed = len(row.defaults["anchor_sizes"])
        if len(settings.anchor_sizes) != needed:
            raise ConfigError(
                f"--anchor-sizes has {len(settings.anchor_sizes)} numbers.",
                cause=f"{settings.model} needs {needed}, finest level first",
                fix=f"give {needed} numbers, as its own: {' '.join(f'{x:g}' for x in row.defaults['anchor_sizes'])}",
            )
    return row.build(settings, class_count).to(memory_format=torch.channels_last)


OF_EVERY_MODEL = frozenset({"model", "weights", "norm", "trainable_stages", "checkpoint_activations"})


def check_settings(settings: ModelSettings) -> None:
    """Raises ConfigError for a setting that is set and that the architecture does not have."""
    defaults = architecture(settings.model).defaults
    for field in dataclasses.fields(settings):
        if getattr(settings, field.name) is not None and field.name not in OF_EVERY_MODEL | defaults.keys():
            raise ConfigError(
                f"{settings.model} has no --{field.name.replace('_', '-')}.",
                choices=[name.replace("_", "-") for name in sorted(OF_EVERY_MODEL | defaults.keys())],
                fix="leave it out, or take another --model (`stoker models`)",
            )


def open_fields(config: Config) -> list[str]:
    """Settings that a run of the config's model needs and that are AUTO."""
    used = OF_EVERY_MODEL | architecture(config.model.model).defaults.keys()
    have = config.set_fields()
    return [name for name, section in SECTION_OF.items() if name not in have and (section != "model" or name in used)]
