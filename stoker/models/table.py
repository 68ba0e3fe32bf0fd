"""`MODELS`, the table of architectures, and `build`. A new detector is a new entry (docs/add-a-model.md)."""

import dataclasses
from typing import Any

import torch

from stoker.config.settings import SECTION_OF, Config, ModelSettings
from stoker.errors import ConfigError, nearest
from stoker.models.architecture import Architecture, ComputeCost, Defaults
from stoker.models.detector import Detector
from stoker.models.ember.ember import (
    EMBER_DEFAULTS,
    EMBER_PRETRAINED_DEFAULTS,
    EMBER_TUNING,
    ember_builder,
    ember_options,
)
from stoker.models.faster_rcnn.faster_rcnn import FASTER_RCNN_DEFAULTS, faster_rcnn_builder
from stoker.models.fcos.fcos import FCOS_DEFAULTS, fcos_builder
from stoker.models.layers.activation_checkpointing import checkpoint_activations
from stoker.models.layers.winograd import use_winograd_without_avx512
from stoker.models.retinanet.retinanet import (
    FOCAL_DEFAULTS,
    RETINANET_DEFAULTS,
    RETINANET_FPNLITE_DEFAULTS,
    RETINANET_MOBILENET_DEFAULTS,
    retinanet_builder,
)
from stoker.models.ssd.backbones import detect_reduced_tail
from stoker.models.ssd.ssd import SSD300, SSDLite

PYTORCH_URL = "https://download.pytorch.org/models"
"""Where torchvision's files of weights are. The names are those of its enumerations, which are not imported for the
reason in `resnet.py`."""


def _make_architecture(*, defaults: Defaults, **fields: Any) -> Architecture:
    values = {name: value for name, (value, _) in defaults.items()}
    return Architecture(defaults=values, reasons={name: reason for name, (_, reason) in defaults.items()}, **fields)


MODELS: dict[str, Architecture] = {
    "ember_n": _make_architecture(
        build=ember_builder("csp16", channels=(64, 128, 256), num_blocks=1),
        description="CPUs and edge devices: a small modern detector without anchors, from scratch",
        num_params=2_603_008,
        cost=ComputeCost(gflop=6.38, training_gflop=19.1, memory_gib=0.79),
        recipe="ember",
        default_image_size=640,
        defaults=EMBER_DEFAULTS,
        urls={},
        tuning=EMBER_TUNING,
        options_from_weights=ember_options,
    ),
    "ember_s": _make_architecture(
        build=ember_builder("csp32", channels=(128, 256, 512), num_blocks=1),
        description="small GPUs: three times the FLOPs of ember_n",
        num_params=9_459_536,
        cost=ComputeCost(gflop=21.4, training_gflop=64.1, memory_gib=1.4),
        recipe="ember",
        default_image_size=640,
        defaults=EMBER_DEFAULTS,
        urls={},
        tuning=EMBER_TUNING,
        options_from_weights=ember_options,
    ),
    "ember_m": _make_architecture(
        build=ember_builder("csp48", channels=(192, 384, 576), num_blocks=2),
        description="GPUs: nine times the FLOPs of ember_n",
        num_params=23_276_256,
        cost=ComputeCost(gflop=57.4, training_gflop=172.0, memory_gib=2.3),
        recipe="ember",
        default_image_size=640,
        defaults=EMBER_DEFAULTS,
        urls={},
        tuning=EMBER_TUNING,
        options_from_weights=ember_options,
    ),
    "ember_mobilenet_v2": _make_architecture(
        build=ember_builder("mobilenet_v2", channels=(64, 128, 256), num_blocks=1),
        description="CPUs, edge devices, similar classes: ember_n with an ImageNet-pretrained backbone",
        num_params=3_944_944,
        cost=ComputeCost(gflop=2.22, training_gflop=5.98, memory_gib=0.36),
        recipe="light",
        default_image_size=320,
        defaults=EMBER_PRETRAINED_DEFAULTS,
        urls={"imagenet": f"{PYTORCH_URL}/mobilenet_v2-b0353104.pth"},
        tuning=EMBER_TUNING,
        options_from_weights=ember_options,
    ),
    "ember_resnet18": _make_architecture(
        build=ember_builder("resnet18", channels=(64, 128, 256), num_blocks=1),
        description="GPUs, similar classes: ember with an ImageNet-pretrained backbone",
        num_params=12_772_976,
        cost=ComputeCost(gflop=33.7, training_gflop=81.0, memory_gib=0.78),
        recipe="light",
        default_image_size=640,
        defaults=EMBER_PRETRAINED_DEFAULTS,
        urls={"imagenet": f"{PYTORCH_URL}/resnet18-f37072fd.pth"},
        tuning=EMBER_TUNING,
        options_from_weights=ember_options,
    ),
    "retinanet_resnet50_fpn": _make_architecture(
        build=retinanet_builder("resnet50"),
        description="GPUs; the reference: torchvision's RetinaNet, 36.4 AP on COCO with torchvision's weights",
        num_params=33_786_804,
        cost=ComputeCost(gflop=297.0, training_gflop=846.0, memory_gib=6.8),
        recipe="standard",
        default_image_size=800,
        defaults=RETINANET_DEFAULTS,
        urls={
            "coco": f"{PYTORCH_URL}/retinanet_resnet50_fpn_coco-eeacb38b.pth",
            "imagenet": f"{PYTORCH_URL}/resnet50-0676ba61.pth",
        },
    ),
    "retinanet_resnet18_fpn": _make_architecture(
        build=retinanet_builder("resnet18"),
        description="GPUs with little memory, small data sets: at 640 pixels half the FLOPs of resnet50 at 800",
        num_params=20_810_676,
        cost=ComputeCost(gflop=151.0, training_gflop=432.0, memory_gib=3.1),
        recipe="standard",
        default_image_size=640,
        defaults=RETINANET_DEFAULTS,
        urls={"imagenet": f"{PYTORCH_URL}/resnet18-f37072fd.pth"},
    ),
    "retinanet_resnet34_fpn": _make_architecture(
        build=retinanet_builder("resnet34"),
        description="GPUs, between resnet18 and resnet50: at 640 pixels three fifths of the FLOPs of resnet50 at 800",
        num_params=30_911_412,
        cost=ComputeCost(gflop=181.0, training_gflop=515.0, memory_gib=3.4),
        recipe="standard",
        default_image_size=640,
        defaults=RETINANET_DEFAULTS,
        urls={"imagenet": f"{PYTORCH_URL}/resnet34-b627a593.pth"},
    ),
    "retinanet_resnet101_fpn": _make_architecture(
        build=retinanet_builder("resnet101"),
        description="large GPUs, accuracy before speed: a third more FLOPs than resnet50",
        num_params=52_726_708,
        cost=ComputeCost(gflop=392.0, training_gflop=1130.0, memory_gib=9.0),
        recipe="standard",
        default_image_size=800,
        defaults=RETINANET_DEFAULTS,
        urls={"imagenet": f"{PYTORCH_URL}/resnet101-63fe2227.pth"},
    ),
    "retinanet_resnext50_32x4d_fpn": _make_architecture(
        build=retinanet_builder("resnext50_32x4d"),
        description="large GPUs: the FLOPs of resnet50, with a better backbone (ImageNet 77.6 % against 76.1 %)",
        num_params=33_243_572,
        cost=ComputeCost(gflop=301.0, training_gflop=856.0, memory_gib=7.6),
        recipe="standard",
        default_image_size=800,
        defaults=RETINANET_DEFAULTS,
        urls={"imagenet": f"{PYTORCH_URL}/resnext50_32x4d-7cdf4587.pth"},
    ),
    "retinanet_mobilenet_v2_fpn": _make_architecture(
        build=retinanet_builder("mobilenet_v2", channels=128, num_convs=2),
        description="small GPUs, or CPUs if time allows: a light backbone, heads of 2 convolutions of 128 channels",
        num_params=4_570_292,
        cost=ComputeCost(gflop=8.14, training_gflop=23.8, memory_gib=0.53),
        recipe="light",
        default_image_size=320,
        defaults=RETINANET_MOBILENET_DEFAULTS,
        urls={"imagenet": f"{PYTORCH_URL}/mobilenet_v2-b0353104.pth"},
    ),
    "retinanet_mobilenet_v2_fpnlite": _make_architecture(
        build=retinanet_builder("mobilenet_v2", channels=128, lite=True),
        description="CPUs and small devices: TF's ssd_mobilenet_v2_fpnlite, a quarter of the FLOPs of mobilenet_v2_fpn",
        num_params=2_601_912,
        cost=ComputeCost(gflop=1.94, training_gflop=5.15, memory_gib=0.49),
        recipe="light",
        default_image_size=320,
        defaults=RETINANET_FPNLITE_DEFAULTS,
        urls={"imagenet": f"{PYTORCH_URL}/mobilenet_v2-b0353104.pth"},
    ),
    "retinanet_mobilenet_v3_large_fpn": _make_architecture(
        build=retinanet_builder("mobilenet_v3_large", channels=128, num_convs=2),
        description="small GPUs: as mobilenet_v2_fpn, with a better backbone (ImageNet 74.0 % against 71.9 %)",
        num_params=5_290_196,
        cost=ComputeCost(gflop=7.79, training_gflop=23.0, memory_gib=0.48),
        recipe="light",
        default_image_size=320,
        defaults=RETINANET_MOBILENET_DEFAULTS,
        urls={"imagenet": f"{PYTORCH_URL}/mobilenet_v3_large-8738ca79.pth"},
        pretrained_norm_eps=1e-3,
    ),
    "retinanet_tiny_fpn": _make_architecture(
        build=retinanet_builder("tiny", channels=48, num_convs=2, extra_blocks=None, with_norm=True),
        description="the demo, tests, and CPUs: learns simple objects in images of 128 pixels in minutes on a CPU",
        num_params=631_640,
        cost=ComputeCost(gflop=1.37, training_gflop=4.09, memory_gib=0.13),
        recipe="tiny",
        default_image_size=320,
        defaults={
            **FOCAL_DEFAULTS,
            "anchor_sizes": ((14.0, 28.0, 48.0), "objects of 1/10 to 1/2 of an image of 128 pixels"),
            "anchor_scales": ((1.0, 2**0.5), "two scales per octave"),
            "aspect_ratios": ((1.0,), "a third of the FLOPs of three ratios"),
            "backbone_norm": ("bn", "as its weights were trained"),
            "trainable_backbone_layers": (5, "as its weights were trained"),
            "box_loss": ("giou", "detections are scored by IoU"),
        },
        urls={},
    ),
    "fcos_resnet50_fpn": _make_architecture(
        build=fcos_builder("resnet50"),
        description="GPUs; no anchors to choose: torchvision's FCOS, 39.2 AP on COCO with torchvision's weights",
        num_params=32_244_245,
        cost=ComputeCost(gflop=256.0, training_gflop=722.0, memory_gib=5.3),
        recipe="standard",
        default_image_size=800,
        defaults=FCOS_DEFAULTS,
        urls={
            "coco": f"{PYTORCH_URL}/fcos_resnet50_fpn_coco-99b0c9b7.pth",
            "imagenet": f"{PYTORCH_URL}/resnet50-0676ba61.pth",
        },
    ),
    "fcos_resnet18_fpn": _make_architecture(
        build=fcos_builder("resnet18", channels=128, num_convs=2),
        description="small GPUs; no anchors to choose: ResNet-18, heads of 2 convolutions of 128 channels",
        num_params=12_709_269,
        cost=ComputeCost(gflop=11.1, training_gflop=28.2, memory_gib=0.34),
        recipe="light",
        default_image_size=320,
        defaults=FCOS_DEFAULTS,
        urls={"imagenet": f"{PYTORCH_URL}/resnet18-f37072fd.pth"},
    ),
    "faster_rcnn_resnet50_fpn": _make_architecture(
        build=faster_rcnn_builder("resnet50"),
        description="GPUs; two stages: torchvision's Faster R-CNN, 37.0 AP on COCO with torchvision's weights",
        num_params=41_704_036,
        cost=ComputeCost(gflop=269.0, training_gflop=715.0, memory_gib=7.7),
        recipe="standard",
        default_image_size=800,
        defaults=FASTER_RCNN_DEFAULTS,
        urls={
            "coco": f"{PYTORCH_URL}/fasterrcnn_resnet50_fpn_coco-258fb6c6.pth",
            "imagenet": f"{PYTORCH_URL}/resnet50-0676ba61.pth",
        },
    ),
    "faster_rcnn_resnet18_fpn": _make_architecture(
        build=faster_rcnn_builder("resnet18"),
        description="GPUs with little memory, small data sets; two stages",
        num_params=28_678_756,
        cost=ComputeCost(gflop=141.0, training_gflop=359.0, memory_gib=5.0),
        recipe="standard",
        default_image_size=640,
        defaults=FASTER_RCNN_DEFAULTS,
        urls={"imagenet": f"{PYTORCH_URL}/resnet18-f37072fd.pth"},
    ),
    "faster_rcnn_mobilenet_v3_large_fpn": _make_architecture(
        build=faster_rcnn_builder(
            "mobilenet_v3_large", return_layers={"13": 160, "16": 960}, num_pooled_levels=1, rpn_score_thresh=0.05
        ),
        description="fast, two stages, large objects: torchvision's, 32.8 AP on COCO with torchvision's weights",
        num_params=19_335_104,
        cost=ComputeCost(gflop=37.8, training_gflop=67.8, memory_gib=3.7),
        recipe="standard",
        default_image_size=800,
        defaults={
            **FASTER_RCNN_DEFAULTS,
            "trainable_backbone_layers": (2, "as many layers as torchvision trains by default"),
            "anchor_sizes": ((32.0, 32.0, 32.0), "torchvision's: all sizes at every level"),
            "anchor_scales": ((1.0, 2.0, 4.0, 8.0, 16.0), "torchvision's: 32 to 512 pixels at every level"),
        },
        urls={
            "coco": f"{PYTORCH_URL}/fasterrcnn_mobilenet_v3_large_fpn-fb6a3cc7.pth",
            "imagenet": f"{PYTORCH_URL}/mobilenet_v3_large-8738ca79.pth",
        },
        pretrained_norm_eps=1e-3,
    ),
    "ssdlite320_mobilenet_v3_large": _make_architecture(
        build=SSDLite,
        description="CPUs and edge devices: torchvision's SSDlite, 21.3 AP on COCO with torchvision's weights",
        num_params=3_301_460,
        cost=ComputeCost(gflop=1.13, training_gflop=3.36, memory_gib=0.45),
        recipe="light",
        default_image_size=320,
        anchors_scale_with_image_size=True,
        defaults={
            "fg_iou_thresh": (0.5, "SSD paper, section 2.2"),
            "anchor_sizes": ((64.0, 112.0, 160.0, 208.0, 256.0, 304.0, 320.0), "torchvision's: 0.2 to 0.95 of 320"),
            "backbone_norm": ("bn", "as torchvision trained it, with a slow momentum of 0.03"),
            "trainable_backbone_layers": (5, "as torchvision trained it; it is small"),
            "reduced_tail": (True, "table 6 of the MobileNetV3 paper"),
        },
        urls={
            "coco": f"{PYTORCH_URL}/ssdlite320_mobilenet_v3_large_coco-a79551df.pth",
            "imagenet": f"{PYTORCH_URL}/mobilenet_v3_large-8738ca79.pth",
        },
        options_from_weights=lambda tensors: {"reduced_tail": detect_reduced_tail(tensors)},
        pretrained_options={"coco": {"reduced_tail": True}, "imagenet": {"reduced_tail": False}},
    ),
    "ssd300_vgg16": _make_architecture(
        build=SSD300,
        description="comparison with the literature: torchvision's SSD300, 25.1 AP on COCO with torchvision's weights",
        num_params=34_305_206,
        cost=ComputeCost(gflop=68.7, training_gflop=189.0, memory_gib=2.4),
        recipe="ssd",
        default_image_size=300,
        size_divisor=20,
        anchors_scale_with_image_size=True,
        defaults={
            "fg_iou_thresh": (0.5, "SSD paper, section 2.2"),
            "anchor_sizes": ((21.0, 45.0, 99.0, 153.0, 207.0, 261.0, 315.0), "SSD paper, section 3.4: its COCO model"),
            "backbone_norm": ("frozen_bn", "VGG-16 has none"),
            "trainable_backbone_layers": (
                4,
                "the first stage is general enough as it was pretrained (torchvision's default)",
            ),
        },
        urls={
            "coco": f"{PYTORCH_URL}/ssd300_vgg16_coco-b556d3b4.pth",
            "imagenet": f"{PYTORCH_URL}/vgg16_features-amdegroot-88682ab5.pth",
        },
    ),
}
"""Value of `--model` → architecture."""


def get_architecture(name: str) -> Architecture:
    """The architecture called `name`. Raises ConfigError with the valid names."""
    if name not in MODELS:
        near = nearest(name, MODELS)
        raise ConfigError(
            f"There is no model called {name!r}" + (f"; did you mean {near!r}?" if near else "."), choices=MODELS
        )
    return MODELS[name]


def build(settings: ModelSettings, num_classes: int) -> Detector:
    """The model of `settings` (no field that it uses is AUTO), with random weights, in channels-last memory.

    Raises ConfigError for an unknown name, a setting that the architecture does not have, and a wrong number of anchor
    sizes.
    """
    arch = get_architecture(settings.model)
    check_settings(settings)
    if settings.anchor_sizes is not None:
        num_required = len(arch.defaults["anchor_sizes"])
        if len(settings.anchor_sizes) != num_required:
            raise ConfigError(
                f"--anchor-sizes has {len(settings.anchor_sizes)} numbers.",
                cause=f"{settings.model} needs {num_required}, finest level first",
                fix=f"give {num_required} numbers, as in the default: "
                + " ".join(f"{size:g}" for size in arch.defaults["anchor_sizes"]),
            )
    model = arch.build(settings, num_classes)
    if settings.activation_checkpointing:
        checkpoint_activations(model)
    use_winograd_without_avx512(model)
    return model.to(memory_format=torch.channels_last)


def check_image_size(config: Config) -> None:
    """Raises ConfigError for an input size that the config's model does not support. AUTO is accepted."""
    set_fields = config.set_fields()
    if not {"image_size", "model"} <= set_fields.keys():
        return
    image_size, model = config.data.image_size, config.model.model
    arch = get_architecture(model)
    divisor = arch.size_divisor
    if any(side % divisor for side in image_size):
        raise ConfigError(
            f"--image-size {image_size[0]} {image_size[1]}: both sides must be multiples of {divisor} for {model}.",
            choices=[f"{max(1, round(side / divisor)) * divisor}" for side in image_size],
        )


COMMON_FIELDS = frozenset(
    {"model", "weights", "backbone_norm", "trainable_backbone_layers", "activation_checkpointing"}
)


def check_settings(settings: ModelSettings) -> None:
    """Raises ConfigError for a setting that is given but that the architecture does not have."""
    defaults = get_architecture(settings.model).defaults
    for field in dataclasses.fields(settings):
        if getattr(settings, field.name) is not None and field.name not in COMMON_FIELDS | defaults.keys():
            raise ConfigError(
                f"{settings.model} has no --{field.name.replace('_', '-')}.",
                choices=[name.replace("_", "-") for name in sorted(COMMON_FIELDS | defaults.keys())],
                fix="leave it out, or take another --model (`stoker models`)",
            )


OPTIONAL_FIELDS = frozenset({"train", "val", "splits"})
"""Settings that a complete config may lack: files that the user may name."""


def unset_fields(config: Config) -> list[str]:
    """Settings that a run of the config's model uses and that are AUTO."""
    used = COMMON_FIELDS | get_architecture(config.model.model).defaults.keys()
    set_fields = config.set_fields()
    return [
        name
        for name, section in SECTION_OF.items()
        if name not in {*set_fields, *OPTIONAL_FIELDS} and (section != "model" or name in used)
    ]
