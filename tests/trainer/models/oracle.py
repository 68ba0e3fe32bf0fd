"""torchvision's RetinaNet with the weights of one of ours, in torchvision's own custom for classes, both in float64.

Its class head has one more channel than ours and its labels are ours + 1. The extra channel 0 stands for no class; here
it gets a bias at which it costs nothing, as it would in a trained model.

In float64, because the gradients of a deep ReLU network differ by a percent when its activations differ in the last bit
of a float32: some cross the kink of a ReLU. Where such a difference is 1e-16, none does.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchvision import models
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops import FrozenBatchNorm2d
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from stoker.data.batch import Batch
from stoker.models import Detector
from stoker.models.backbones import TinyBackbone

CLASS_HEAD = "head.classification_head.cls_logits."


class Parts(NamedTuple):
    """What torchvision needs to build the RetinaNet of a row of MODELS. backbone: takes norm_layer, gives the
    network."""

    backbone: Callable[..., nn.Module]
    stages: Mapping[str, int]
    channels: int = 256
    depth: int = 4
    norm: type[nn.Module] | None = None
    extra_levels: bool = True
    lite: bool = False


_BASIC = {"layer2": 128, "layer3": 256, "layer4": 512}
_BOTTLENECK = {"layer2": 512, "layer3": 1024, "layer4": 2048}
_V2 = (lambda **norm: models.mobilenet_v2(**norm).features, {"6": 32, "13": 96, "18": 1280}, 128)

PARTS: dict[str, Parts] = {
    "retinanet_resnet18_fpn": Parts(models.resnet18, _BASIC),
    "retinanet_resnet34_fpn": Parts(models.resnet34, _BASIC),
    "retinanet_resnet50_fpn": Parts(models.resnet50, _BOTTLENECK),
    "retinanet_resnet101_fpn": Parts(models.resnet101, _BOTTLENECK),
    "retinanet_resnext50_32x4d_fpn": Parts(models.resnext50_32x4d, _BOTTLENECK),
    "retinanet_mobilenet_v2_fpn": Parts(*_V2, depth=2),
    "retinanet_mobilenet_v2_fpnlite": Parts(*_V2, lite=True),
    "retinanet_mobilenet_v3_large_fpn": Parts(
        lambda **norm: models.mobilenet_v3_large(**norm).features, {"6": 40, "12": 112, "16": 960}, 128, depth=2
    ),
    "retinanet_tiny_fpn": Parts(  # its backbone is ours
        lambda norm_layer: TinyBackbone(16, norm_layer),
        {"layer2": 48, "layer3": 64, "layer4": 96},
        48,
        depth=2,
        norm=nn.BatchNorm2d,
        extra_levels=False,
    ),
}

SMALL_MODELS = (
    "ember_n",
    "retinanet_mobilenet_v2_fpnlite",
    "retinanet_tiny_fpn",
    "fcos_resnet18_fpn",
    "faster_rcnn_resnet18_fpn",
    "ssdlite320_mobilenet_v3_large",
)
"""A fast model of each kind. Tests of the other models are in the slow suite."""


def oracle_of(model: Detector, image_size: tuple[int, int]) -> RetinaNet:
    """The oracle of a model. Turns the model into float64, too."""
    settings, parts = model.settings, PARTS[model.settings.model]
    norm = FrozenBatchNorm2d if settings.backbone_norm == "frozen_bn" else nn.BatchNorm2d
    backbone = BackboneWithFPN(
        parts.backbone(norm_layer=norm),
        {name: name for name in parts.stages},
        list(parts.stages.values()),
        parts.channels,
        LastLevelP6P7(parts.channels, parts.channels),
        norm_layer=parts.norm,
    )
    if not parts.extra_levels:
        backbone.fpn.extra_blocks = None
    sizes = tuple(tuple(int(size * scale) for scale in settings.anchor_scales) for size in settings.anchor_sizes)
    anchors = len(settings.anchor_scales) * len(settings.aspect_ratios)
    head = RetinaNetHead(parts.channels, anchors, model.num_classes + 1, norm_layer=parts.norm)
    for tower in (head.classification_head, head.regression_head):
        tower.conv = tower.conv[: parts.depth]
    head.regression_head._loss_type = settings.box_loss
    if parts.lite:
        _make_lite(backbone, head, parts.depth)
    oracle = RetinaNet(
        backbone,
        model.num_classes + 1,
        anchor_generator=AnchorGenerator(sizes, (tuple(settings.aspect_ratios),) * len(sizes)),
        head=head,
        fg_iou_thresh=settings.fg_iou_thresh,
        bg_iou_thresh=settings.bg_iou_thresh,
        min_size=min(image_size),
        max_size=max(image_size),
        image_mean=model.pixel_mean.flatten().tolist(),
        image_std=model.pixel_std.flatten().tolist(),
        detections_per_img=100,
    )
    state = oracle.double().state_dict()
    assert state.keys() == model.state_dict().keys()
    state.update({name: to_oracle(model, name, tensor, -100.0) for name, tensor in model.state_dict().items()})
    oracle.load_state_dict(state)
    for name, parameter in oracle.named_parameters():
        parameter.requires_grad_(model.get_parameter(name).requires_grad)
    model.double().load_state_dict(model.state_dict())  # loading makes what is derived from the weights anew
    return oracle


def _make_lite(backbone: BackboneWithFPN, head: RetinaNetHead, depth: int) -> None:
    """Replaces the 3 × 3 convolutions of torchvision's FPN and head by separable ones, in place."""
    fpn, channels = backbone.fpn, backbone.out_channels
    norm = functools.partial(nn.BatchNorm2d, channels, eps=1e-3, momentum=0.03)

    def depthwise(stride: int = 1) -> nn.Conv2d:
        return nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False)

    def separable(stride: int = 1) -> nn.Sequential:
        return nn.Sequential(depthwise(stride), nn.Conv2d(channels, channels, 1, bias=False))

    def block(stride: int = 1) -> nn.Sequential:
        return nn.Sequential(separable(stride), norm(), nn.ReLU6())

    for level in range(len(fpn.layer_blocks)):
        fpn.layer_blocks[level] = block()
    fpn.extra_blocks.p6, fpn.extra_blocks.p7 = block(2), block(2)
    for tower, last in ((head.classification_head, "cls_logits"), (head.regression_head, "bbox_reg")):
        tower.conv = nn.Sequential(depthwise())
        setattr(tower, last, nn.Conv2d(channels, getattr(tower, last).out_channels, 1))
    head.tower = nn.ModuleList(
        nn.ModuleDict({"conv": separable(), "norms": nn.ModuleList(norm() for _ in range(5))}) for _ in range(depth)
    )
    original = head.forward

    def forward(levels: list[Tensor]) -> dict[str, Tensor]:
        for layer in head.tower:
            levels = [
                norm(layer["conv"](level)).clamp(0, 6) for norm, level in zip(layer["norms"], levels, strict=True)
            ]
        return original(levels)

    head.forward = forward


def to_oracle(model: Detector, name: str, tensor: Tensor, unused: float = 0.0) -> Tensor:
    """Our parameter (or gradient) as the oracle has it: `unused` in the bias of each anchor's channel 0."""
    if not name.startswith(CLASS_HEAD):
        return tensor
    by_anchor = tensor.unflatten(0, (model.class_heads()[0].num_anchors, -1))
    first = torch.full_like(by_anchor[:, :1], unused if name.endswith("bias") else 0.0)
    return torch.cat((first, by_anchor), dim=1).flatten(0, 1)


def oracle_losses(oracle: RetinaNet, batch: Batch) -> dict[str, Tensor]:
    targets = [
        {"boxes": boxes[valid], "labels": labels[valid] + 1}
        for boxes, labels, valid in zip(batch.boxes, batch.labels, batch.valid, strict=True)
    ]
    return oracle(list(batch.images.double() / 255), targets)


def oracle_detections(oracle: RetinaNet, batch: Batch) -> list[dict[str, Tensor]]:
    """The oracle's own post-processing, of images that fill only `resized_size` of the model input."""
    pixels = torch.stack([oracle.transform.normalize(image.double() / 255) for image in batch.images])
    features = list(oracle.backbone(pixels).values())
    outputs = oracle.head(features)
    resized_sizes = [tuple(resized_size.tolist()) for resized_size in batch.resized_size]
    images = ImageList(pixels, resized_sizes)
    anchors = oracle.anchor_generator(images, features)
    each = oracle.anchor_generator.num_anchors_per_location()[0]
    counts = [feature.shape[2] * feature.shape[3] * each for feature in features]
    split = {name: list(output.split(counts, dim=1)) for name, output in outputs.items()}
    found = oracle.postprocess_detections(split, [list(some.split(counts)) for some in anchors], resized_sizes)
    return oracle.transform.postprocess(found, resized_sizes, [tuple(size.tolist()) for size in batch.original_size])


def check_losses_and_gradients(model: Detector, oracle: RetinaNet, batch: Batch) -> None:
    """Asserts that model and oracle have the same losses and the same gradients of them."""
    batch = batch._replace(boxes=batch.boxes.double())
    ours, theirs = model.loss(model(batch.images), batch), oracle_losses(oracle, batch)
    assert ours.keys() == theirs.keys()
    for part, loss in theirs.items():
        assert torch.isfinite(loss)
        assert relative(ours[part], loss) < 1e-9, part
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    our_gradients, their_gradients = _gradients(model, ours, names), _gradients(oracle, theirs, names)
    whole = torch.cat([gradient.flatten() for gradient in their_gradients]).norm()
    assert whole > 0
    for name, mine, other in zip(names, our_gradients, their_gradients, strict=True):
        # A bias before a norm has nothing but rounding for a gradient.
        assert (to_oracle(model, name, mine) - other).norm() < 1e-6 * other.norm() + 1e-9 * whole, name


def check_detections(model: Detector, oracle: RetinaNet, batch: Batch, *, score_threshold: float) -> int:
    """Asserts that model and oracle find the same, best first; how many boxes that is in the first image."""
    oracle.score_thresh, oracle.detections_per_img = score_threshold, 10_000
    with torch.no_grad():
        theirs = [_without_lines(one) for one in oracle_detections(oracle, batch)]
        raw = model(batch.images)
        found = model.decode(raw, batch.resized_size, batch.scale, batch.original_size, score_threshold=score_threshold)
    for image, expected in enumerate(theirs):
        valid = found.valid[image]
        assert valid.tolist() == [slot < len(expected["scores"]) for slot in range(100)]
        torch.testing.assert_close(found.scores[image][valid], expected["scores"], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(found.boxes[image][valid], expected["boxes"], rtol=1e-6, atol=1e-4)
        assert torch.equal(found.labels[image][valid], expected["labels"] - 1)
        for padded in (found.boxes[image], found.scores[image], found.labels[image]):
            assert not padded[~valid].any()
    return len(theirs[0]["scores"])


def _without_lines(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The best 100 without the boxes that lay in the padding alone: torchvision cuts them to lines and keeps them."""
    is_box = (found["boxes"][:, 2:] > found["boxes"][:, :2]).all(1)
    return {name: values[is_box][:100] for name, values in found.items()}


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference, relative to theirs; absolute where theirs is nothing."""
    scale = theirs.norm().item()
    return (ours - theirs).norm().item() / (scale if scale > 1e-8 else 1.0)


def _gradients(model: nn.Module, losses: dict[str, Tensor], names: list[str]) -> list[Any]:
    parameters = [model.get_parameter(name) for name in names]
    found = torch.autograd.grad(sum(losses.values()), parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
