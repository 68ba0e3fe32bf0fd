"""SSD (arXiv 1512.02325): six maps of decreasing size, a convolution over each, a box per anchor, softmax over classes.

There are two: SSD300 on VGG-16, and SSDlite on MobileNetV3 (arXiv 1801.04381, section 6.2) with separable
convolutions. With the same weights, losses and detections equal torchvision's, and so do the names in `state_dict`.
Class 0 is the background, the user's class c is c + 1. `backbones.py` has the backbones, `loss.py` assignment and loss.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.config.settings import ModelSettings
from stoker.data.batch import Batch
from stoker.models.detector import ClassHeadSpec, Detector
from stoker.models.layers.anchors import AnchorGenerator, GridSize
from stoker.models.layers.boxes import decode, encode, grid_anchors
from stoker.models.layers.losses import at_least_fp32
from stoker.models.layers.norms import lite_norm, trainable_norm
from stoker.models.layers.postprocess import Candidates, clip_and_filter
from stoker.models.layers.rank_mean import loss_divisor
from stoker.models.ssd.backbones import (
    VGG,
    MobileNet,
    SSDScoringHead,
    conv_predictor,
    init_weights,
    mobilenet_key,
    separable_predictor,
    vgg_key,
)
from stoker.models.ssd.loss import hard_negative_cross_entropy, match_ssd_anchors

BOX_CODER_WEIGHTS = (10.0, 10.0, 5.0, 5.0)
"""Factors of the encoded offsets: the inverse of the "variances" of the original's prior boxes; torchvision's
BoxCoder."""


class SSDOutputs(NamedTuple):
    """Predictions for B images at A anchors, in the dtype the network computed in."""

    logits: Tensor
    """[B, A, 1 + C], softmax logits, the background's first."""
    deltas: Tensor
    """[B, A, 4], boxes encoded relative to their anchors, times BOX_CODER_WEIGHTS."""
    anchors: Tensor
    """float32 [A, 4], xyxy in pixels of the model input."""


class SSDAnchorGenerator(AnchorGenerator):
    """Anchors whose first center is half a step from the input's top and left edge.

    shapes: of each map, finest first, [n, 2] widths and heights in pixels, limited to the input size; steps: as in
    `SSD`. For torchvision's input sizes (300 × 300, 320 × 320) the anchors equal those of its `DefaultBoxGenerator`.
    """

    def __init__(self, shapes: Iterable[Tensor], steps: Sequence[int | None]) -> None:
        super().__init__(shapes)
        self.steps = steps

    def level_anchors(self, level: int, image_size: tuple[int, int], grid: GridSize) -> Tensor:
        step = self.steps[level]
        step_y, step_x = (step, step) if step is not None else (image_size[0] / grid[0], image_size[1] / grid[1])
        width, height = self._base_anchors(level).unbind(1)
        half_w, half_h = width.clamp(max=image_size[1]) / 2, height.clamp(max=image_size[0]) / 2
        x, y = step_x / 2, step_y / 2
        base_anchors = torch.stack((x - half_w, y - half_h, x + half_w, y + half_h), dim=1)
        return grid_anchors(base_anchors, grid, (step_y, step_x))


class SSD(Detector):
    """The detector. backbone: gives six maps of `out_channels`; make_layer: (channels, outputs) → the predictor of one
    map."""

    aspect_ratios: ClassVar[tuple[tuple[float, ...], ...]]
    """Aspect ratios above 1 of each map's anchors; each is used as width / height and as height / width."""
    steps: ClassVar[tuple[int | None, ...]]
    """Distance between neighboring anchors in pixels; None: the map's positions divide the input evenly."""
    pre_nms_top_n_per_class: ClassVar[int]
    """Boxes of a class before NMS."""
    class_layer_key: ClassVar[str] = "head.classification_head.module_list.{}"

    box_coder_weights: Tensor

    def __init__(
        self,
        backbone: VGG | MobileNet,
        settings: ModelSettings,
        num_classes: int,
        *,
        make_layer: Callable[[int, int], nn.Module],
        mean: tuple[float, ...],
        std: tuple[float, ...],
    ) -> None:
        super().__init__(settings, num_classes, mean=mean, std=std)
        self.backbone = backbone
        pairs = itertools.pairwise(settings.anchor_sizes)
        shapes = [
            _anchor_shapes(*sizes, aspect_ratios)
            for sizes, aspect_ratios in zip(pairs, self.aspect_ratios, strict=True)
        ]
        heads = {"classification_head": 1 + num_classes, "regression_head": 4}
        self.head = nn.ModuleDict(
            {
                name: SSDScoringHead(
                    [
                        make_layer(n, len(map_shapes) * outputs)
                        for n, map_shapes in zip(backbone.out_channels, shapes, strict=True)
                    ],
                    outputs,
                )
                for name, outputs in heads.items()
            }
        )
        self.register_buffer("box_coder_weights", torch.tensor(BOX_CODER_WEIGHTS), persistent=False)
        self.anchors = SSDAnchorGenerator((torch.tensor(map_shapes) for map_shapes in shapes), self.steps)

    def predict(self, levels: list[Tensor], image_size: tuple[int, int]) -> SSDOutputs:
        """levels: the six maps; image_size: multiples of the architecture's `size_divisor`."""
        anchors = self.anchors(image_size, [(x.shape[2], x.shape[3]) for x in levels])
        return SSDOutputs(self.head["classification_head"](levels), self.head["regression_head"](levels), anchors)

    def loss(self, outputs: SSDOutputs, batch: Batch) -> dict[str, Tensor]:
        """`classification` (cross-entropy, hard negatives 3:1 in each image) and `bbox_regression` (smooth L1), fp32
        scalars, both divided by the number of positive anchors of the batch (at least 1), as in torchvision. So the
        losses of two half batches average to that of the whole batch only if both have equally many positives."""
        with torch.autocast(outputs.logits.device.type, enabled=False):
            gt_index = match_ssd_anchors(
                batch.boxes, batch.valid, outputs.anchors, fg_iou_thresh=self.settings.fg_iou_thresh
            )
            positive, index = gt_index >= 0, gt_index.clamp(min=0)
            num_positive = loss_divisor(positive.sum())
            target = torch.where(positive, batch.labels.gather(1, index) + 1, 0)
            boxes = batch.boxes.gather(1, index[..., None].expand(-1, -1, 4))
            # Masked before the arithmetic: the encoded box of a padding entry is infinite.
            target_deltas = torch.where(
                positive[..., None], encode(boxes, outputs.anchors) * self.box_coder_weights, 0.0
            )
            deltas = torch.where(positive[..., None], at_least_fp32(outputs.deltas), 0.0)
            offset_loss = functional.smooth_l1_loss(deltas, target_deltas, reduction="sum")
            class_loss = hard_negative_cross_entropy(at_least_fp32(outputs.logits), target)
            return {"classification": class_loss / num_positive, "bbox_regression": offset_loss / num_positive}

    def candidates(self, outputs: SSDOutputs, resized_size: Tensor, *, score_threshold: float | Tensor) -> Candidates:
        """The `pre_nms_top_n_per_class` best of each class."""
        with torch.autocast(outputs.logits.device.type, enabled=False):
            scores = at_least_fp32(outputs.logits).softmax(-1)[..., 1:].transpose(1, 2)
            best_scores, indices = scores.topk(min(self.pre_nms_top_n_per_class, scores.shape[2]), dim=2)
            labels = torch.arange(self.num_classes, device=indices.device)[:, None].expand_as(indices).flatten(1)
            indices = indices.flatten(1)
            deltas = (
                at_least_fp32(outputs.deltas.gather(1, indices[..., None].expand(-1, -1, 4))) / self.box_coder_weights
            )
            anchors = outputs.anchors.index_select(0, indices.flatten()).view(*indices.shape, 4)
            return clip_and_filter(
                resized_size, decode(deltas, anchors), best_scores.flatten(1), labels, score_threshold=score_threshold
            )

    def class_heads(self) -> tuple[ClassHeadSpec, ...]:
        return tuple(
            ClassHeadSpec(self.class_layer_key.format(level), 2 + 2 * len(aspect_ratios), has_background=True)
            for level, aspect_ratios in enumerate(self.aspect_ratios)
        )


def _anchor_shapes(size: float, next_size: float, aspect_ratios: tuple[float, ...]) -> list[tuple[float, float]]:
    """Widths and heights of a map's anchors in pixels: squares of `size` and of the geometric mean of `size` and
    `next_size`, then those with the area of the first for each ratio and its inverse (section 2.2)."""
    geometric_mean = math.sqrt(size * next_size)
    shapes = [(size, size), (geometric_mean, geometric_mean)]
    for aspect_ratio in aspect_ratios:
        long, short = size * math.sqrt(aspect_ratio), size / math.sqrt(aspect_ratio)
        shapes += [(long, short), (short, long)]
    return shapes


class SSD300(SSD):
    """On VGG-16, with the normalization of its ImageNet weights: pixels of 0 … 255 minus their mean."""

    iou_threshold = 0.45
    backbone_prefixes = ("backbone.features.", "backbone.extra.0.1.", "backbone.extra.0.3.", "backbone.extra.0.5.")
    aspect_ratios = ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,))
    # The last two maps have no padding, so their positions are not multiples of a stride; for 300 pixels these steps
    # are torchvision's 100 and 300.
    steps = (8, 16, 32, 64, None, None)
    pre_nms_top_n_per_class = 400

    def __init__(self, settings: ModelSettings, num_classes: int) -> None:
        backbone = VGG(settings.trainable_backbone_layers)
        mean, std = (0.48235, 0.45882, 0.40784), (1 / 255, 1 / 255, 1 / 255)
        super().__init__(backbone, settings, num_classes, make_layer=conv_predictor, mean=mean, std=std)

    def backbone_key(self, name: str) -> str:
        return "backbone." + vgg_key(name)


class SSDLite(SSD):
    """On MobileNetV3-large, with separable convolutions in the heads."""

    iou_threshold = 0.55
    backbone_prefixes = ("backbone.features.",)
    aspect_ratios = ((2, 3),) * 6
    steps = (None,) * 6
    pre_nms_top_n_per_class = 300
    class_layer_key = "head.classification_head.module_list.{}.1"

    def __init__(self, settings: ModelSettings, num_classes: int) -> None:
        backbone = MobileNet(settings.backbone_norm, settings.trainable_backbone_layers, settings.reduced_tail)
        norm = lite_norm(trainable_norm(settings.backbone_norm))

        def make_layer(in_channels: int, out_channels: int) -> nn.Sequential:
            return separable_predictor(in_channels, out_channels, norm)

        half = (0.5, 0.5, 0.5)
        super().__init__(backbone, settings, num_classes, make_layer=make_layer, mean=half, std=half)
        init_weights(self)

    def backbone_key(self, name: str) -> str:
        return "backbone." + mobilenet_key(name)
