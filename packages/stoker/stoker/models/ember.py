"""Ember: a small, modern anchor-free detector, written from the literature alone.

A CSP backbone or an ImageNet-pretrained one; a PAFPN over strides 8, 16 and 32 (`networks.py`); a decoupled head per
level, for classes and for boxes. A point predicts a logit per class and, for each side of its box, a distribution over
distances, whose mean is the distance (GFL, Li et al. 2020, arXiv 2006.04388).

Boxes are assigned to points by the current predictions (TOOD, Feng et al. 2021, arXiv 2108.07755, section 3.2), with
fixed shapes and without host syncs. The points inside a box are its candidates. The alignment of a candidate is
score^ALPHA · IoU^BETA, with its score for the box's class and the IoU of its predicted box. The `topk` best aligned
candidates of a box are its positives; a point that is positive for several boxes is assigned to the one with the
largest IoU. The target score of a positive is its alignment, scaled so that the maximum over a box's positives equals
their largest IoU.

With `nms_free` there is a second, one-to-one head, trained to detect each box at a single point (YOLOv10, Wang et al.
2024, arXiv 2405.14458), so its boxes need no NMS. Its gradient does not reach the features.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stoker.config.settings import ModelSettings
from stoker.data.batch import Batch
from stoker.models.backbones import build_backbone_with_neck
from stoker.models.detector import ClassHeadSpec, Detector
from stoker.models.fcos import MIN_STRIDE, PointGenerator, Points, ltrb_to_boxes
from stoker.models.layers.boxes import batched_gather, giou, iou
from stoker.models.layers.convolutions import conv_norm, flatten_map, separable_conv_norm
from stoker.models.layers.losses import at_least_fp32, soft_binary_cross_entropy
from stoker.models.layers.matching import BACKGROUND, plan_blocks
from stoker.models.layers.norms import NORMS, Norm, trainable_norm
from stoker.models.layers.postprocess import PRE_NMS_TOP_N, Candidates, clip_and_filter, topk_per_level
from stoker.models.layers.rank_mean import loss_divisor
from stoker.models.networks import PAFPN, ConvFactory
from stoker.models.retinanet import PRIOR_LOGIT

REG_MAX = 16
"""Number of distances of a distribution: 0 … 15 strides, up to 480 pixels from the point at stride 32."""
TAL_TOPK = 10
"""Maximum number of positive points of a box. TOOD: 13 on five levels; here there are three."""
IOU_THRESHOLD = 0.7
"""NMS threshold: two objects of a class may overlap by more than the usual 0.5."""
HEAD_DEPTH = 2
"""Convolutions of a head before its last layer, which has this index."""
CLASS_WEIGHT, BOX_WEIGHT, DFL_WEIGHT = 2.0, 2.5, 0.5
"""Weights of the loss terms: PP-YOLOE's (arXiv 2203.16250, equation 3), but of the classes twice (LOG.md, "Ember")."""


class HeadOutputs(NamedTuple):
    """Predictions for B images at A points, in the dtype the network computed in."""

    logits: Tensor
    """[B, A, C], one sigmoid logit per class."""
    ltrb_logits: Tensor
    """[B, A, 4 · REG_MAX], logits of the distances to the left, top, right and bottom of the box, in strides."""


class EmberOutputs(NamedTuple):
    """Predictions. one_to_many: None in evaluation with `nms_free`; one_to_one: None without `nms_free`."""

    one_to_many: HeadOutputs | None
    one_to_one: HeadOutputs | None
    points: Points
    num_points_per_level: tuple[int, ...]
    """How many of the A points each level has, finest level first."""


class DecoupledHead(nn.Module):
    """Per level: convolutions and the box distances; separable convolutions and the classes, which are easier."""

    def __init__(self, channels: Sequence[int], num_classes: int, norm: Norm) -> None:
        super().__init__()
        self.num_classes = num_classes
        # The widths do not depend on the number of classes, so weights of other classes can be loaded. Half of the
        # channels of the finest level for the boxes: the same AP as with all of it, with 14 % fewer FLOPs (LOG.md).
        box_channels = max(16, min(4 * REG_MAX, channels[0] // 2))

        def branches(make_conv: ConvFactory, hidden: int, outputs: int) -> nn.ModuleList:
            return nn.ModuleList(
                nn.Sequential(
                    *(make_conv(hidden if n else width, hidden, norm) for n in range(HEAD_DEPTH)),
                    nn.Conv2d(hidden, outputs, 1),
                )
                for width in channels
            )

        self.sides = branches(conv_norm, box_channels, 4 * REG_MAX)
        self.classes = branches(separable_conv_norm, channels[0], num_classes)
        for level_head in self.classes:
            nn.init.constant_(level_head.get_parameter(f"{HEAD_DEPTH}.bias"), PRIOR_LOGIT)

    def forward(self, levels: list[Tensor]) -> HeadOutputs:
        """levels: each [B, channels, h, w], finest first."""
        logits, ltrb_logits = (
            torch.cat([flatten_map(head(x), outputs) for head, x in zip(heads, levels, strict=True)], 1)
            for heads, outputs in ((self.classes, self.num_classes), (self.sides, 4 * REG_MAX))
        )
        return HeadOutputs(logits, ltrb_logits)


class Ember(Detector):
    """The detector, on a backbone of BACKBONES. channels: of the three levels, at
    strides 8, 16 and 32; num_blocks: as in `PAFPN`."""

    pre_nms_top_n = PRE_NMS_TOP_N
    """Boxes of a level before NMS."""

    bin_distances: Tensor

    def __init__(
        self, settings: ModelSettings, num_classes: int, *, backbone: str,
        channels: Sequence[int], num_blocks: int,
    ) -> None:  # fmt: skip
        super().__init__(settings, num_classes)
        self.iou_threshold = 1.0 if settings.nms_free else IOU_THRESHOLD
        norm = NORMS[trainable_norm(settings.backbone_norm)]
        neck = partial(PAFPN, channels=channels, num_blocks=num_blocks, norm=norm, depthwise=settings.depthwise)
        self.backbone = build_backbone_with_neck(
            backbone, neck, norm=settings.backbone_norm, trainable_stages=settings.trainable_backbone_layers
        )
        self.num_levels = len(channels)
        self.head = nn.ModuleDict({"many": DecoupledHead(channels, num_classes, norm)})
        if settings.nms_free:
            self.head["one"] = DecoupledHead(channels, num_classes, norm)
        self.points = PointGenerator(shift=0.5)
        self.register_buffer("bin_distances", torch.tensor([float(n) for n in range(REG_MAX)]), persistent=False)

    def predict(self, levels: list[Tensor], image_size: tuple[int, int]) -> EmberOutputs:
        grids = [(level.shape[2], level.shape[3]) for level in levels]
        points = self.points(image_size, grids, levels[0].device)
        nms_free = self.settings.nms_free
        one_to_many = self.head["many"](levels) if self.training or not nms_free else None
        one_to_one = self.head["one"]([level.detach() for level in levels]) if nms_free else None
        return EmberOutputs(one_to_many, one_to_one, points, tuple(height * width for height, width in grids))

    def decode_boxes(self, ltrb_logits: Tensor, center: Tensor, stride: Tensor) -> Tensor:
        """Boxes xyxy, float32 [..., 4], from logits [..., 4 · REG_MAX] at points: center [..., 2], stride [...]."""
        probabilities = at_least_fp32(ltrb_logits).reshape(*ltrb_logits.shape[:-1], 4, REG_MAX).softmax(-1)
        # A column instead of a vector: 8 % less time per image in onnxruntime.
        return ltrb_to_boxes(
            (probabilities @ self.bin_distances.to(probabilities.dtype)[:, None]).squeeze(-1), center, stride
        )

    def loss(self, outputs: EmberOutputs, batch: Batch) -> dict[str, Tensor]:
        """`classification` (cross-entropy with the quality), `bbox_regression` (1 - GIoU) and `bbox_distribution`
        (distribution focal loss), fp32 scalars; with `nms_free` also those of the one-to-one head, prefix `one_`.

        The last two are sums over the points with a box. (TOOD weights them by quality, so that badly predicted boxes,
        mostly small ones, hardly learn: LOG.md, "Ember".) All are divided by the sum of the quality over the batch, at
        least 1: the parts of an accumulated batch have equal weights.
        """
        assert outputs.one_to_many is not None
        losses = self._loss(outputs.one_to_many, outputs.points, batch, TAL_TOPK)
        if outputs.one_to_one is not None:
            one_to_one_losses = self._loss(outputs.one_to_one, outputs.points, batch, 1)
            losses |= {f"one_{name}": value for name, value in one_to_one_losses.items()}
        return losses

    def _loss(self, predicted: HeadOutputs, points: Points, batch: Batch, topk: int) -> dict[str, Tensor]:
        logits, ltrb_logits = predicted
        with torch.autocast(logits.device.type, enabled=False):
            with torch.no_grad():
                assignment = assign_task_aligned(
                    logits, self.decode_boxes(ltrb_logits, points.center, points.stride), points.center,
                    batch.boxes, batch.labels, batch.valid, center_radius=MIN_STRIDE / 2, topk=topk,
                )  # fmt: skip
            total_quality = loss_divisor(assignment.quality.sum())
            label = batch.labels.gather(1, assignment.gt_index.clamp(min=0))
            class_losses = soft_binary_cross_entropy(logits, label, assignment.quality)
            # No more points than that have a box: the box losses are computed for them only, with a fixed shape.
            gt_index, point_index = assignment.gt_index.topk(
                min(assignment.gt_index.shape[1], topk * batch.valid.shape[1]), dim=1
            )
            unassigned = gt_index < 0
            center, stride = points.center[point_index], points.stride[point_index]
            positive_logits = at_least_fp32(batched_gather(ltrb_logits, point_index))
            pred_boxes = self.decode_boxes(positive_logits, center, stride)
            # Points without a box get their own prediction, so that the masked losses are finite.
            gt_boxes = batched_gather(batch.boxes, gt_index.clamp(min=0))
            gt_boxes = torch.where(unassigned[..., None], pred_boxes.detach(), gt_boxes)
            gious = giou(pred_boxes, gt_boxes)
            dfl = distribution_focal_loss(positive_logits, boxes_to_ltrb(gt_boxes, center, stride))
            return {
                "classification": CLASS_WEIGHT * class_losses.sum() / total_quality,
                "bbox_regression": BOX_WEIGHT * (1 - gious).masked_fill(unassigned, 0.0).sum() / total_quality,
                "bbox_distribution": DFL_WEIGHT * dfl.masked_fill(unassigned, 0.0).sum() / total_quality,
            }

    def candidates(self, outputs: EmberOutputs, resized_size: Tensor, *, score_threshold: float | Tensor) -> Candidates:
        """The `pre_nms_top_n` best of each level; with `nms_free` of the one-to-one head."""
        predicted = outputs.one_to_many if outputs.one_to_one is None else outputs.one_to_one
        assert predicted is not None
        with torch.autocast(predicted.logits.device.type, enabled=False):
            logits, point_index, label = topk_per_level(
                predicted.logits, outputs.num_points_per_level, self.pre_nms_top_n
            )
            ltrb_logits = batched_gather(predicted.ltrb_logits, point_index)
            scores = at_least_fp32(logits).sigmoid()
            boxes = self.decode_boxes(ltrb_logits, *outputs.points.at(point_index))
            return clip_and_filter(resized_size, boxes, scores, label, score_threshold=score_threshold)

    def class_heads(self) -> tuple[ClassHeadSpec, ...]:
        return tuple(
            ClassHeadSpec(f"head.{name}.classes.{level}.{HEAD_DEPTH}")
            for name in self.head
            for level in range(self.num_levels)
        )


def boxes_to_ltrb(boxes: Tensor, center: Tensor, stride: Tensor) -> Tensor:
    """Distances of points [..., 2] to the sides of boxes [..., 4], in strides [...]: inverse of `ltrb_to_boxes`."""
    return torch.cat((center - boxes[..., :2], boxes[..., 2:] - center), dim=-1) / stride[..., None]


def distribution_focal_loss(ltrb_logits: Tensor, distances: Tensor) -> Tensor:
    """Distribution focal loss (GFL, equation 6): cross-entropy of the two bins around the target distance, weighted
    linearly; the mean over the four sides: [...].

    ltrb_logits: [..., 4 · REG_MAX]; distances: [..., 4], clipped to the range of the bins.
    """
    log_probs = at_least_fp32(ltrb_logits).reshape(*ltrb_logits.shape[:-1], 4, REG_MAX).log_softmax(-1)
    distances = distances.to(log_probs.dtype).clamp(0, REG_MAX - 1.01)
    lower_bin = distances.floor()
    upper_weight, index = distances - lower_bin, lower_bin.to(torch.int64)
    lower_log_prob, upper_log_prob = log_probs.gather(-1, torch.stack((index, index + 1), -1)).unbind(-1)
    return -torch.lerp(lower_log_prob, upper_log_prob, upper_weight).mean(-1)


def ember_options(tensors: Mapping[str, Tensor]) -> dict[str, bool]:
    """`nms_free` and `depthwise` of the ember with these weights; empty for weights of another model."""
    if not any(name.startswith("head.many.") for name in tensors):
        return {}
    return {
        "nms_free": any(name.startswith("head.one.") for name in tensors),
        "depthwise": "backbone.neck.down.0.blocks.0.first.0.0.weight" in tensors,
    }


ALPHA, BETA = 1.0, 6.0
"""Exponents of the score and of the IoU: TOOD, section 4.1."""


class TALAssignment(NamedTuple):
    """What A points of B images are assigned to."""

    gt_index: Tensor
    """int64 [B, A], index of a point's box, or `BACKGROUND`."""
    quality: Tensor
    """float32 [B, A], the target score for the box's class, 0 … 1; 0 without a box."""


def assign_task_aligned(
    logits: Tensor,
    pred_boxes: Tensor,
    center: Tensor,
    boxes: Tensor,
    labels: Tensor,
    valid: Tensor,
    *,
    center_radius: float,
    topk: int,
    block: int | None = None,
) -> TALAssignment:
    """The box of each point. Without gradients.

    logits: [B, A, C], of the classes, of any dtype; pred_boxes: float32 [B, A, 4] xyxy; center: float32 [A, 2], the
    points; boxes: float32 [B, M, 4] xyxy; labels: int64 [B, M]; valid: bool [B, M]; center_radius: points within these
    pixels of a box's center along x and y are candidates, too: with half the distance between points, every box has
    one. Among boxes with equal IoU, a point gets the first. block: as in `matching.match_anchors`.
    """
    image_slices, boxes_per_block = plan_blocks(boxes, center.shape[0], block)
    topk = min(topk, center.shape[0])

    def assign(images: slice) -> TALAssignment:
        gt_boxes, predicted, by_class = boxes[images], pred_boxes[images], logits[images].transpose(1, 2)
        best: tuple[Tensor, ...] | None = None  # index of a point's box, its IoU, its alignment
        for start in range(0, gt_boxes.shape[1], boxes_per_block):
            part = slice(start, start + boxes_per_block)
            pairwise_iou = iou(gt_boxes[:, part], predicted)
            channel = labels[images, part, None].expand(-1, -1, by_class.shape[2])
            score = at_least_fp32(by_class.gather(1, channel)).sigmoid()
            corners = gt_boxes[:, part, None]
            half_size = ((corners[..., 2:] - corners[..., :2]) / 2).clamp(min=center_radius)
            is_within = (center - (corners[..., :2] + corners[..., 2:]) / 2).abs() <= half_size
            is_candidate = is_within[..., 0] & is_within[..., 1] & valid[images, part, None]
            pairwise_alignment = torch.where(is_candidate, score**ALPHA * pairwise_iou**BETA, -1.0)
            value, point_index = pairwise_alignment.topk(topk, dim=2)
            is_other = torch.ones_like(pairwise_alignment, dtype=torch.bool).scatter_(2, point_index, value < 0)
            max_iou, index = pairwise_iou.masked_fill_(is_other, -1.0).max(dim=1)
            alignment = pairwise_alignment.gather(1, index[:, None])[:, 0]
            if best is None:
                best = index, max_iou, alignment
            else:
                better = max_iou > best[1]  # strictly, so that the first of equal boxes keeps the point
                found = index + start, max_iou, alignment
                best = tuple(torch.where(better, new, old) for new, old in zip(found, best, strict=True))
        assert best is not None, "batches have at least one slot for a box"
        gt_index, best_iou, alignment = best
        unassigned, index = (best_iou >= 0).logical_not(), gt_index.expand(2, -1, -1)
        # Maxima over all points with the same box.
        values = torch.stack((alignment, best_iou)).masked_fill_(unassigned, 0.0)
        maxima = values.new_zeros(2, *gt_boxes.shape[:2]).scatter_reduce_(2, index, values, "amax").gather(2, index)
        scaled = alignment / maxima[0].clamp(min=torch.finfo(alignment.dtype).tiny) * maxima[1]
        return TALAssignment(gt_index.masked_fill(unassigned, BACKGROUND), scaled.masked_fill_(unassigned, 0.0))

    with torch.no_grad():
        assignments = [assign(images) for images in image_slices]
        if len(assignments) == 1:
            return assignments[0]
        return TALAssignment(*(torch.cat(column) for column in zip(*assignments, strict=True)))
