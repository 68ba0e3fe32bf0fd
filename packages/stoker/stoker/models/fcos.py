"""FCOS (arXiv 2006.09214): a feature pyramid, two convolutional heads, one box per point, no anchors.

A point predicts its distances to the four sides of a box, the classes, and its centerness in the box, which lowers the
score of boxes predicted far from their center. With the same weights, losses and detections equal those of
torchvision's FCOS, and so do the names in `state_dict`. As there, points lie at the multiples of a level's stride (the
paper shifts them by half a stride). Classes are as in `retinanet.py`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.config.settings import ModelSettings
from stoker.data.batch import Batch
from stoker.hardware.xla import device_of_constants
from stoker.models.backbones import build_backbone_with_fpn
from stoker.models.detector import ClassHeadSpec, Detector
from stoker.models.layers.boxes import area, batched_gather, giou, rows_at
from stoker.models.layers.convolutions import is_on_accelerator
from stoker.models.layers.losses import at_least_fp32, focal_loss
from stoker.models.layers.matching import BACKGROUND, map_blocks
from stoker.models.layers.postprocess import PRE_NMS_TOP_N, Candidates, clip_and_filter, topk_per_level
from stoker.models.layers.rank_mean import loss_divisor
from stoker.models.retinanet import PRIOR_LOGIT, ConvHead, head_conv

MIN_STRIDE = 8
"""Stride of the finest level in pixels. Each further level has twice the stride of the one before it."""
CENTER_SAMPLING_RADIUS = 1.5
"""A positive point is at most this many strides away from the center of its box, along x and y (section 2.2)."""
REGRESS_RANGE = (4, 8)
"""A level detects boxes whose farthest side is this many strides away from the point: 64 … 128 px at stride 16
(section 2.2). The finest level has no lower limit, the coarsest no upper one."""
NUM_GROUPS = 32
"""Groups of GroupNorm, as in torchvision."""


class Points(NamedTuple):
    """The A points of all levels, float32, in pixels of the model input."""

    center: Tensor
    """[A, 2], x and y."""
    stride: Tensor
    """[A], of the point's level: unit of its predicted distances."""
    min_distance: Tensor
    """[A], the distance to the farthest side of a box is larger."""
    max_distance: Tensor
    """[A], the distance to the farthest side of a box is smaller."""

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """(center [..., 2], stride [...]) of the points `index` [...]."""
        return rows_at(self.center, index), rows_at(self.stride, index)


class FCOSOutputs(NamedTuple):
    """Predictions for B images at A points, in the dtype the network computed in."""

    logits: Tensor
    """[B, A, C], one sigmoid logit per class."""
    distances: Tensor
    """[B, A, 4], from the point to the left, top, right and bottom of its box, in strides; not negative."""
    centerness: Tensor
    """[B, A], a sigmoid logit."""
    points: Points
    num_points_per_level: tuple[int, ...]
    """How many of the A points each pyramid level has, finest level first."""


class LowPrecisionGroupNorm(nn.GroupNorm):
    """GroupNorm with the dtype of its input. Under autocast, GroupNorm and so the activations of the heads would be
    fp32: 7.3 instead of 4.7 GiB for 16 images of 800 × 800 on ResNet-50. Statistics are fp32 in any case."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            if not (is_on_accelerator(x) and torch.compiler.is_compiling()):
                weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
                return functional.group_norm(x, self.num_groups, weight, bias, self.eps)
            # The backward pass that Inductor makes of torch's operator moves a map's bytes 11 times, of this 7 times.
            exact, shape = at_least_fp32(x), (self.num_groups, -1, 1, 1)
            grouped = exact.unflatten(1, (self.num_groups, -1))
            mean, var = grouped.mean((2, 3, 4), True), grouped.var((2, 3, 4), correction=0, keepdim=True)
            scale = self.weight.view(shape) * (var + self.eps).rsqrt()
            shift = self.bias.view(shape) - scale * mean
            return torch.addcmul(shift.flatten(1, 2), exact, scale.flatten(1, 2)).to(x.dtype)


def _head_blocks(channels: int, num_convs: int) -> list[nn.Module]:
    """The convolutions of a head, each with norm and ReLU, as one list."""
    blocks: list[nn.Module] = []
    for _ in range(num_convs):
        blocks += head_conv(channels, channels), LowPrecisionGroupNorm(NUM_GROUPS, channels), nn.ReLU(inplace=True)
    return blocks


class FCOS(Detector):
    """The detector, on a backbone of BACKBONES. channels: of FPN and heads, NUM_GROUPS · n; num_convs: in a head."""

    iou_threshold = 0.6
    pre_nms_top_n = PRE_NMS_TOP_N
    """Boxes of a pyramid level before NMS."""

    def __init__(
        self, settings: ModelSettings, num_classes: int, *, backbone: str, channels: int = 256, num_convs: int = 4
    ) -> None:
        super().__init__(settings, num_classes)
        self.backbone = build_backbone_with_fpn(
            backbone, channels, norm=settings.backbone_norm, trainable_stages=settings.trainable_backbone_layers
        )
        class_head = ConvHead(
            _head_blocks(channels, num_convs),
            cls_logits=(head_conv(channels, num_classes, bias=PRIOR_LOGIT), num_classes),
        )
        box_head = ConvHead(
            _head_blocks(channels, num_convs),
            bbox_reg=(head_conv(channels, 4), 4),
            bbox_ctrness=(head_conv(channels, 1), 1),
        )
        self.head = nn.ModuleDict({"classification_head": class_head, "regression_head": box_head})
        self.points = PointGenerator()

    def predict(self, levels: list[Tensor], image_size: tuple[int, int]) -> FCOSOutputs:
        logits, distances, centerness = (
            torch.cat(output, dim=1)
            for head in ("classification_head", "regression_head")
            for output in self.head[head](levels)
        )
        grids = [(level.shape[2], level.shape[3]) for level in levels]
        points = self.points(image_size, grids, logits.device)
        return FCOSOutputs(logits, distances.relu(), centerness[..., 0], points, tuple(map(math.prod, grids)))

    def loss(self, outputs: FCOSOutputs, batch: Batch) -> dict[str, Tensor]:
        """`classification` (focal), `bbox_regression` (1 - GIoU) and `bbox_ctrness` (cross-entropy), fp32 scalars.

        Each is summed over the batch and divided by its number of positive points (at least 1), as in torchvision. So
        the parts of an accumulated batch have equal weights, in one step on the whole batch those of their positives.
        """
        settings, points = self.settings, outputs.points
        with torch.autocast(outputs.logits.device.type, enabled=False):
            gt_index = assign_points(batch.boxes, batch.valid, points)
            positive, index = gt_index >= 0, gt_index.clamp(min=0)
            num_positive = loss_divisor(positive.sum())
            target = torch.where(positive, batch.labels.gather(1, index), BACKGROUND)
            class_losses = focal_loss(outputs.logits, target, alpha=settings.focal_alpha, gamma=settings.focal_gamma)
            # Points without a box get one of two strides, so that the masked losses and gradients are finite.
            mask = positive[..., None]
            distances = torch.where(mask, at_least_fp32(outputs.distances), 1.0)
            boxes = batched_gather(batch.boxes, index)
            stride = points.stride[:, None]
            dummy_boxes = torch.cat((points.center - stride, points.center + stride), dim=-1)
            boxes = torch.where(mask, boxes, dummy_boxes)
            gious = giou(ltrb_to_boxes(distances, points.center, points.stride), boxes)
            left_top, right_bottom = points.center - boxes[..., :2], boxes[..., 2:] - points.center
            # Equation 3: 1 at the center of a box, 0 at its edge.
            centerness = (torch.minimum(left_top, right_bottom) / torch.maximum(left_top, right_bottom)).prod(-1).sqrt()
            centerness_losses = functional.binary_cross_entropy_with_logits(
                at_least_fp32(outputs.centerness), centerness, reduction="none"
            )
            return {
                "classification": class_losses.sum() / num_positive,
                "bbox_regression": torch.where(positive, 1 - gious, 0.0).sum() / num_positive,
                "bbox_ctrness": torch.where(positive, centerness_losses, 0.0).sum() / num_positive,
            }

    def candidates(self, outputs: FCOSOutputs, resized_size: Tensor, *, score_threshold: float | Tensor) -> Candidates:
        """The `pre_nms_top_n` best of each pyramid level; a score is the geometric mean of class and centerness."""
        with torch.autocast(outputs.logits.device.type, enabled=False):
            centerness = at_least_fp32(outputs.centerness).sigmoid()[..., None]
            combined_scores = (at_least_fp32(outputs.logits).sigmoid() * centerness).sqrt()
            scores, point_index, label = topk_per_level(
                combined_scores, outputs.num_points_per_level, self.pre_nms_top_n
            )
            distances = at_least_fp32(batched_gather(outputs.distances, point_index))
            boxes = ltrb_to_boxes(distances, *outputs.points.at(point_index))
            return clip_and_filter(resized_size, boxes, scores, label, score_threshold=score_threshold)

    def class_heads(self) -> tuple[ClassHeadSpec, ...]:
        return (ClassHeadSpec("head.classification_head.cls_logits"),)


class PointGenerator:
    """`grid_points` of each input size, cached: computing them takes dozens of kernels, as for `AnchorGenerator`."""

    def __init__(self, *, shift: float = 0.0) -> None:
        self.shift = shift
        self._cache: dict[tuple[tuple[int, int], torch.device], Points] = {}

    def __call__(self, image_size: tuple[int, int], grids: list[tuple[int, int]], device: torch.device) -> Points:
        key = (image_size, device)
        if key not in self._cache:
            with torch.inference_mode(False):  # tensors made in inference mode cannot be saved for backward later
                points = grid_points(image_size, grids, device_of_constants(device), shift=self.shift)
                self._cache[key] = Points(*(column.to(device) for column in points))
        return self._cache[key]


def grid_points(
    image_size: tuple[int, int], grids: list[tuple[int, int]], device: torch.device, *, shift: float = 0.0
) -> Points:
    """The points of pyramid levels of `grids` (height, width), finest first, by row; shift: offset from the multiples
    of the stride, in strides."""
    levels = []
    for level, (height, width) in enumerate(grids):
        y = (torch.arange(height, device=device, dtype=torch.float32) + shift) * (image_size[0] // height)
        x = (torch.arange(width, device=device, dtype=torch.float32) + shift) * (image_size[1] // width)
        center = torch.stack((x[None, :].expand(height, width), y[:, None].expand(height, width)), dim=-1).flatten(0, 1)
        stride = MIN_STRIDE * 2**level
        min_distance = stride * REGRESS_RANGE[0] if level > 0 else 0.0
        max_distance = stride * REGRESS_RANGE[1] if level + 1 < len(grids) else math.inf
        columns = [torch.full_like(center[:, 0], value) for value in (stride, min_distance, max_distance)]
        levels.append((center, *columns))
    return Points(*(torch.cat(column) for column in zip(*levels, strict=True)))


def assign_points(boxes: Tensor, valid: Tensor, points: Points, *, block: int | None = None) -> Tensor:
    """Index of each point's box, or `BACKGROUND`: int64 [B, A].

    boxes: float [B, M, 4] xyxy; valid: bool [B, M]. The candidates of a point are the boxes that contain it, with a
    center within CENTER_SAMPLING_RADIUS strides and the farthest side in the level's range. It is assigned to the one
    with the smallest area; among equal areas, to the first. (torchvision compares 1e8 - area, which in fp32 is a
    multiple of 8: there, areas with smaller differences are equal.) block: as in `matching.match_anchors`.
    """

    def assign(boxes: Tensor, valid: Tensor, boxes_per_block: int) -> Tensor:
        shape = (boxes.shape[0], points.center.shape[0])
        largest = torch.finfo(boxes.dtype).max  # instead of infinity, whose minimum torch_xla gives as this number
        min_area = boxes.new_full(shape, largest)
        best_gt = torch.full(shape, BACKGROUND, dtype=torch.int64, device=boxes.device)
        x, y = points.center.unbind(-1)
        for start in range(0, boxes.shape[1], boxes_per_block):
            part = slice(start, start + boxes_per_block)
            x1, y1, x2, y2 = boxes[:, part, :, None].unbind(2)
            center_distance = torch.maximum((x - (x1 + x2) / 2).abs(), (y - (y1 + y2) / 2).abs())
            is_candidate = valid[:, part, None] & (center_distance < CENTER_SAMPLING_RADIUS * points.stride)
            left, top, right, bottom = x - x1, y - y1, x2 - x, y2 - y
            is_candidate &= torch.minimum(torch.minimum(left, right), torch.minimum(top, bottom)) > 0
            farthest = torch.maximum(torch.maximum(left, right), torch.maximum(top, bottom))
            is_candidate &= (farthest > points.min_distance) & (farthest < points.max_distance)
            best_area, gt_index = torch.where(is_candidate, area(boxes[:, part])[..., None], largest).min(dim=1)
            better = best_area < min_area  # strictly, so that the first of equal boxes keeps the point
            best_gt = torch.where(better, gt_index + start, best_gt)
            min_area = torch.where(better, best_area, min_area)
        return best_gt

    return map_blocks(assign, boxes, valid, points.center.shape[0], block)


def ltrb_to_boxes(distances: Tensor, center: Tensor, stride: Tensor) -> Tensor:
    """Boxes xyxy [..., A, 4] from `distances` [..., A, 4], in strides [..., A], from the points `center`."""
    left_top, right_bottom = torch.split(distances * stride[..., None], 2, dim=-1)
    return torch.cat((center - left_top, center + right_bottom), dim=-1)
