"""torchvision's Faster R-CNN with the weights of one of ours and the same lots, both in float64.

In float64, because proposals are ranked: in float32 many of torchvision's probabilities of an object are equal, and the
order of equal ones is nobody's choice. And because a difference in the last bit of a float32 may move a box across a
threshold of overlap.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN as Oracle
from torchvision.models.detection import faster_rcnn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import mobilenet_backbone, resnet_fpn_backbone
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import FrozenBatchNorm2d

from stoker.data.batch import Batch, RandSlot
from stoker.models import build
from stoker.models.faster_rcnn import FasterRCNN
from stoker.models.layers.matching import random_keys
from tests.trainer.models.samples import make_batch, settings_of

RPN_SAMPLES, ROI_SAMPLES = (256, 128), (96, 24)
"""(samples, at most so many positive ones) of an image in the two stages: torchvision's, and a smaller second stage."""


def calibrated(
    name: str, classes: int, image_size: tuple[int, int], *, norm: str = "frozen_bn", seed: int = 0
) -> FasterRCNN:
    """A model whose norms have the statistics of random images and whose heads are far from their timid start."""
    torch.manual_seed(seed)
    trained = build(settings_of(name, backbone_norm="bn"), classes).train()
    for module in trained.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        trained(make_batch((0, 0, 0), image_size, classes, seed=seed + 1).images)
        for layer, std in (
            (trained.rpn.head.cls_logits, 0.05),
            (trained.rpn.head.bbox_pred, 0.01),
            (trained.roi_heads.box_predictor.cls_score, 0.2),
            (trained.roi_heads.box_predictor.bbox_pred, 0.1),
        ):
            layer.weight.normal_(std=std)
        # Away from the corner of the image: of proposals that are cut off there, and smaller than a feature cell, the
        # features are the same, so the order of their scores is nobody's choice.
        trained.rpn.head.bbox_pred.bias.view(-1, 4)[:, :2] = 0.9
    model = build(settings_of(name, backbone_norm=norm), classes)
    model.load_state_dict(trained.state_dict(), strict=False)
    assert isinstance(model, FasterRCNN)
    return model


def oracle_of(model: FasterRCNN) -> Oracle:
    """The oracle of a model. Turns the model into float64, too."""
    settings = model.settings
    norm: Any = FrozenBatchNorm2d if settings.backbone_norm == "frozen_bn" else nn.BatchNorm2d
    options: dict[str, Any] = {}
    if settings.model == "faster_rcnn_mobilenet_v3_large_fpn":
        backbone = mobilenet_backbone(
            backbone_name="mobilenet_v3_large", weights=None, fpn=True, norm_layer=norm, trainable_layers=6
        )
        options["rpn_score_thresh"] = 0.05
        options["rpn_anchor_generator"] = AnchorGenerator(((32, 64, 128, 256, 512),) * 3, ((0.5, 1.0, 2.0),) * 3)
    else:
        body = settings.model.split("_")[2]
        backbone = resnet_fpn_backbone(backbone_name=body, weights=None, norm_layer=norm, trainable_layers=5)
    head, predictor = model.roi_heads.box_head, model.roi_heads.box_predictor
    oracle = faster_rcnn.FasterRCNN(
        backbone,
        box_head=faster_rcnn.TwoMLPHead(head.fc6.in_features, head.fc7.in_features),
        box_predictor=faster_rcnn.FastRCNNPredictor(head.fc7.in_features, predictor.cls_score.out_features),
        **options,
    ).double()
    state = oracle.state_dict()
    assert {n: t.shape for n, t in state.items()} == {n: t.shape for n, t in model.state_dict().items()}
    oracle.load_state_dict(model.state_dict())
    for name, parameter in oracle.named_parameters():
        parameter.requires_grad_(model.get_parameter(name).requires_grad)
    model.double()
    assign = oracle.rpn.assign_targets_to_anchors

    def assign_in_double(*given: Any) -> tuple[list[Tensor], list[Tensor]]:  # its labels are float32, so is their loss
        labels, boxes = assign(*given)
        return [some.double() for some in labels], boxes

    oracle.rpn.assign_targets_to_anchors = assign_in_double
    return oracle


class Sampler(NamedTuple):
    """In the place of torchvision's BalancedPositiveNegativeSampler: least lots first instead of randperm's."""

    random_keys: list[Tensor]
    slots: int
    positives: int

    def __call__(self, labels: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        masks: tuple[list[Tensor], list[Tensor]] = ([], [])
        for own, some in zip(self.random_keys, labels, strict=True):
            assert len(own) == len(some)
            order = own.argsort()
            positive = order[some[order] >= 1][: self.positives]
            negative = order[some[order] == 0][: self.slots - len(positive)]
            for chosen, mask in zip((positive, negative), masks, strict=True):
                mask.append(torch.zeros(len(own), dtype=torch.uint8).index_fill(0, chosen, 1))
        return masks


def oracle_losses(oracle: Oracle, model: FasterRCNN, batch: Batch) -> dict[str, Tensor]:
    targets = [
        {"boxes": boxes[valid], "labels": labels[valid] + 1}
        for boxes, labels, valid in zip(batch.boxes, batch.labels, batch.valid, strict=True)
    ]
    images, features, anchors = _features(oracle, model, batch)
    draw = batch.rand[:, RandSlot.SAMPLE]
    oracle.rpn.fg_bg_sampler = Sampler(list(random_keys(draw, sum(anchors), stream=0)), *RPN_SAMPLES)
    boxes, first = oracle.rpn(images, features, targets)
    # Ours has as many slots for proposals as there can be, then one for each slot of a box.
    slots = min(2000, sum(min(2000, count) for count in anchors))
    every = random_keys(draw, slots + batch.boxes.shape[1], stream=1)
    own = [
        torch.cat((some[: len(found)], some[slots:][valid]))
        for some, found, valid in zip(every, boxes, batch.valid, strict=True)
    ]
    oracle.roi_heads.fg_bg_sampler = Sampler(own, *ROI_SAMPLES)
    _, second = oracle.roi_heads(features, boxes, images.image_sizes, targets)
    return {**first, **second}


def oracle_detections(oracle: Oracle, model: FasterRCNN, batch: Batch) -> list[dict[str, Tensor]]:
    images, features, _ = _features(oracle, model, batch)
    boxes, _ = oracle.rpn(images, features)
    found, _ = oracle.roi_heads(features, boxes, images.image_sizes)
    sizes = [tuple(size.tolist()) for size in batch.original_size]
    return oracle.transform.postprocess(found, images.image_sizes, sizes)


def _features(oracle: Oracle, model: FasterRCNN, batch: Batch) -> tuple[ImageList, dict[str, Tensor], list[int]]:
    """(images, features by level, number of anchors of each level)."""
    pixels = model.normalize(batch.images)
    features = oracle.backbone(pixels)
    each = oracle.rpn.anchor_generator.num_anchors_per_location()[0]
    counts = [some.shape[2] * some.shape[3] * each for some in features.values()]
    return ImageList(pixels, [tuple(resized_size.tolist()) for resized_size in batch.resized_size]), features, counts
