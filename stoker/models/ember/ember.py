"""Ember: a small, modern detector without anchors, after the literature alone.

A backbone of cross-stage-partial blocks, or an ImageNet-pretrained one; path aggregation over strides 8, 16 and 32
(`csp_pafpn.py`); for each level two towers, one for classes and one for boxes. A point predicts a logit per class and,
for each side of its box, a distribution over distances, whose mean is the distance (GFL, Li et al. 2020, arXiv
2006.04388). Which points have to find which box is decided by what the network predicts already
(`task_aligned_assigner.py`).

With `nms_free` there is a second pair of towers, which learns to find each box at one point alone (YOLOv10, Wang et al.
2024, arXiv 2405.14458): its boxes need no NMS. It learns from the features and does not change them.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stoker.config.settings import ModelSettings
from stoker.data.batch import Batch
from stoker.models.architecture import PRETRAINED_DEFAULTS, Defaults, ModelBuilder
from stoker.models.backbones import BackboneWithNeck, build_backbone_with_neck
from stoker.models.detector import ClassHeadSpec, Detector
from stoker.models.ember.csp_pafpn import PAFPN
from stoker.models.ember.task_aligned_assigner import assign_task_aligned
from stoker.models.fcos.fcos import MIN_STRIDE, PointGenerator, Points, ltrb_to_boxes
from stoker.models.layers.boxes import giou
from stoker.models.layers.convolutions import conv_norm_relu, separable_conv_norm_relu
from stoker.models.layers.losses import at_least_fp32, soft_binary_cross_entropy
from stoker.models.layers.norms import NORMS, Norm, trainable_norm
from stoker.models.layers.postprocess import PRE_NMS_TOP_N, Candidates, clip_and_filter, topk_per_level
from stoker.models.retinanet.retinanet import PRIOR_PROBABILITY

REG_MAX = 16
"""Distances of a distribution: 0 … 15 strides, up to 480 pixels from the point at stride 32."""
MAX_BOX_PX = 2 * (REG_MAX - 1) * 32
"""Pixels of the model input: the longest side of a box that it can predict."""
TAL_TOPK = 10
"""Points that learn to find a box, at most. TOOD: 13, on five levels; here on three."""
IOU_THRESHOLD = 0.7
"""Of NMS: two objects of a class may overlap by more than the usual 0.5."""
CLASS_LAYER_INDEX = 2
"""Place of the last layer in a tower of classes."""
CLASS_WEIGHT, BOX_WEIGHT, DFL_WEIGHT = 2.0, 2.5, 0.5
"""Of the parts of the loss: PP-YOLOE's (arXiv 2203.16250, equation 3), with twice the weight of the classes; LOG.md,
"Ember", has what that brings."""


class HeadOutputs(NamedTuple):
    """Of B images at A points, in the type the network computed in."""

    logits: Tensor
    """[B, A, C], one sigmoid logit per class."""
    ltrb_logits: Tensor
    """[B, A, 4 · BINS], logits of the distances to the left, top, right and bottom of the box, in the level's unit."""


class EmberOutputs(NamedTuple):
    """What the network predicts. many: many points for each box; one: one for each. Either is None where it has no
    use: `one` without `nms_free`, `many` beside it outside of training."""

    one_to_many: HeadOutputs | None
    one_to_one: HeadOutputs | None
    points: Points
    num_points_per_level: tuple[int, ...]
    """How many of the A points each level has, finest level first."""


class DecoupledHead(nn.Module):
    """For each level: two convolutions and the boxes' sides; two pairs of a depthwise and a 1 × 1 convolution and the
    classes. The classes' tower is the lighter one: what is there is easier to say than where it ends."""

    def __init__(self, channels: list[int], num_classes: int, norm: Norm) -> None:
        super().__init__()
        box_channels, class_channels = (
            4 * REG_MAX,
            channels[0],
        )  # whatever the number of classes: weights for one are a start for another
        self.sides = nn.ModuleList(
            nn.Sequential(
                conv_norm_relu(width, box_channels, norm),
                conv_norm_relu(box_channels, box_channels, norm),
                nn.Conv2d(box_channels, 4 * REG_MAX, 1),
            )
            for width in channels
        )
        self.classes = nn.ModuleList(
            nn.Sequential(
                separable_conv_norm_relu(width, class_channels, norm),
                separable_conv_norm_relu(class_channels, class_channels, norm),
                nn.Conv2d(class_channels, num_classes, 1),
            )
            for width in channels
        )
        for level_head in self.classes:
            nn.init.constant_(
                level_head.get_parameter(f"{CLASS_LAYER_INDEX}.bias"),
                -math.log((1 - PRIOR_PROBABILITY) / PRIOR_PROBABILITY),
            )

    def forward(self, levels: list[Tensor]) -> HeadOutputs:
        """Levels, each [B, channels, h, w], finest first."""
        logits, ltrb_logits = (
            # In channels-last memory the permutation and the flattening are views.
            torch.cat(
                [
                    level_head(x).permute(0, 2, 3, 1).flatten(1, 2)
                    for level_head, x in zip(level_heads, levels, strict=True)
                ],
                1,
            )
            for level_heads in (self.classes, self.sides)
        )
        return HeadOutputs(logits, ltrb_logits)


class Ember(Detector):
    """The detector. `channels`: of the three levels; `depth`: of the neck's blocks."""

    pre_nms_top_n = PRE_NMS_TOP_N
    """Boxes of a level that go into NMS."""

    bin_distances: Tensor

    def __init__(
        self, backbone: BackboneWithNeck, settings: ModelSettings, num_classes: int, channels: list[int]
    ) -> None:
        super().__init__(settings, num_classes)
        self.iou_threshold = 1.0 if settings.nms_free else IOU_THRESHOLD
        self.backbone = backbone
        self.num_levels = len(channels)
        norm = NORMS[trainable_norm(settings.backbone_norm)]
        self.head = nn.ModuleDict({"many": DecoupledHead(channels, num_classes, norm)})
        if settings.nms_free:
            self.head["one"] = DecoupledHead(channels, num_classes, norm)
        self.points = PointGenerator(shift=0.5)
        self.register_buffer("bin_distances", torch.arange(REG_MAX, dtype=torch.float32), persistent=False)

    def forward(self, images: Tensor) -> EmberOutputs:
        """images: uint8 [B, 3, H, W], RGB, H and W multiples of 32."""
        levels = self.backbone(self.normalize(images))
        grids = [(level.shape[2], level.shape[3]) for level in levels]
        points = self.points((images.shape[2], images.shape[3]), grids, images.device)
        nms_free = self.settings.nms_free
        one_to_many = self.head["many"](levels) if self.training or not nms_free else None
        one_to_one = self.head["one"]([level.detach() for level in levels]) if nms_free else None
        return EmberOutputs(one_to_many, one_to_one, points, tuple(height * width for height, width in grids))

    def decode_boxes(self, ltrb_logits: Tensor, center: Tensor, stride: Tensor) -> Tensor:
        """Boxes xyxy, float32 [..., 4], of distributions [..., 4 · BINS] at points `center` [..., 2]."""
        probabilities = at_least_fp32(ltrb_logits).reshape(*ltrb_logits.shape[:-1], 4, REG_MAX).softmax(-1)
        # By a column: onnxruntime multiplies a vector place by place, which took 8 % of a image's time.
        return ltrb_to_boxes(
            (probabilities @ self.bin_distances.to(probabilities.dtype)[:, None]).squeeze(-1), center, stride
        )

    def loss(self, outputs: EmberOutputs, batch: Batch) -> dict[str, Tensor]:
        """`classification` (cross-entropy with the quality), `bbox_regression` (1 - GIoU) and `bbox_distribution`
        (cross-entropy of the two distances around the true one), fp32 scalars; with `nms_free` the same with `one_`.

        The last two are sums over the points with a box. (TOOD weighs them by quality, so that boxes which are found
        badly, the small ones above all, hardly learn: LOG.md, "Ember".) All are divided by the sum of the quality over
        the batch, at least 1: the parts of a batch that is accumulated or spread over devices weigh the same, however
        many boxes each has.
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
            total_quality = assignment.quality.sum().clamp(min=1)
            label = batch.labels.gather(1, assignment.gt_index.clamp(min=0))
            class_losses = soft_binary_cross_entropy(logits, label, assignment.quality)
            # At most so many points have a box: what follows is computed for them alone, and stays of a fixed shape.
            gt_index, point_index = assignment.gt_index.topk(
                min(assignment.gt_index.shape[1], topk * batch.valid.shape[1]), dim=1
            )
            positive = gt_index >= 0
            center, stride = points.center[point_index], points.stride[point_index]
            # Points without a box get one of two units around themselves: what is masked out stays finite.
            dummy_boxes = ltrb_to_boxes(torch.ones_like(center).repeat(1, 1, 2), center, stride)
            gt_boxes = batch.boxes.gather(1, gt_index.clamp(min=0)[..., None].expand(-1, -1, 4))
            gt_boxes = torch.where(positive[..., None], gt_boxes, dummy_boxes)
            positive_logits = ltrb_logits.gather(1, point_index[..., None].expand(-1, -1, ltrb_logits.shape[2]))
            gious = giou(self.decode_boxes(positive_logits, center, stride), gt_boxes)
            dfl = distribution_focal_loss(positive_logits, boxes_to_ltrb(gt_boxes, center, stride))
            return {
                "classification": CLASS_WEIGHT * class_losses.sum() / total_quality,
                "bbox_regression": BOX_WEIGHT * torch.where(positive, 1 - gious, 0.0).sum() / total_quality,
                "bbox_distribution": DFL_WEIGHT * torch.where(positive, dfl, 0.0).sum() / total_quality,
            }

    def candidates(self, outputs: EmberOutputs, resized_size: Tensor, *, score_threshold: float | Tensor) -> Candidates:
        """The `per_level` best of each level; with `nms_free` those of the towers that find each box once."""
        predicted = outputs.one_to_many if outputs.one_to_one is None else outputs.one_to_one
        assert predicted is not None
        with torch.autocast(predicted.logits.device.type, enabled=False):
            logits, point_index, label = topk_per_level(
                predicted.logits, outputs.num_points_per_level, self.pre_nms_top_n
            )
            ltrb_logits = predicted.ltrb_logits.gather(
                1, point_index[..., None].expand(-1, -1, predicted.ltrb_logits.shape[2])
            )
            center = outputs.points.center.index_select(0, point_index.flatten()).view(*point_index.shape, 2)
            stride = outputs.points.stride.index_select(0, point_index.flatten()).view(point_index.shape)
            scores = at_least_fp32(logits).sigmoid()
            boxes = self.decode_boxes(ltrb_logits, center, stride)
            return clip_and_filter(resized_size, boxes, scores, label, score_threshold=score_threshold)

    def class_heads(self) -> tuple[ClassHeadSpec, ...]:
        return tuple(
            ClassHeadSpec(f"head.{name}.classes.{level}.{CLASS_LAYER_INDEX}")
            for name in self.head
            for level in range(self.num_levels)
        )


def boxes_to_ltrb(boxes: Tensor, center: Tensor, stride: Tensor) -> Tensor:
    """From points [..., 2] to the left, top, right and bottom of boxes [..., 4], in `unit` pixels [...]: [..., 4]; the
    inverse of `decode`."""
    return torch.cat((center - boxes[..., :2], boxes[..., 2:] - center), dim=-1) / stride[..., None]


def distribution_focal_loss(ltrb_logits: Tensor, distances: Tensor) -> Tensor:
    """Cross-entropy of the two whole distances around the true one, weighed by how near they are: [...], the mean of
    the four sides (distribution focal loss, GFL, equation 6).

    sides: [..., 4 · BINS], logits; distances: [..., 4]; what does not fit between the first and the last bin is cut.
    """
    log_probs = at_least_fp32(ltrb_logits).reshape(*ltrb_logits.shape[:-1], 4, REG_MAX).log_softmax(-1)
    distances = distances.to(log_probs.dtype).clamp(0, REG_MAX - 1.01)
    lower_bin = distances.floor()
    upper_weight, index = distances - lower_bin, lower_bin.to(torch.int64)[..., None]
    log_prob_pair = log_probs.gather(-1, index)[..., 0], log_probs.gather(-1, index + 1)[..., 0]
    return -torch.lerp(*log_prob_pair, upper_weight).mean(-1)


def ember_options(tensors: Mapping[str, Tensor]) -> dict[str, bool]:
    """`nms_free` and `depthwise` of the ember whose weights these are; nothing where they are of something else."""
    if not any(name.startswith("head.many.") for name in tensors):
        return {}
    return {
        "nms_free": any(name.startswith("head.one.") for name in tensors),
        "depthwise": "backbone.neck.down.0.blocks.0.first.0.0.weight" in tensors,
    }


EMBER_DEFAULTS: Defaults = {
    "backbone_norm": ("bn", "as its weights were trained"),
    "trainable_backbone_layers": (5, "as its weights were trained"),
    "nms_free": (False, "one pair of towers less; ember_n on BCCD has AP 0.595 so, and 0.574 with them"),
    "depthwise": (False, "no faster on a CPU; ember_n on BCCD has AP 0.595 so, and 0.584 with it"),
}
"""Of those with a backbone of their own."""
EMBER_PRETRAINED_DEFAULTS: Defaults = {
    **PRETRAINED_DEFAULTS,
    "nms_free": EMBER_DEFAULTS["nms_free"],
    "depthwise": EMBER_DEFAULTS["depthwise"],
}
"""Of those on a classifier's backbone."""


def ember_builder(backbone_name: str, *, channels: tuple[int, int, int], num_blocks: int) -> ModelBuilder:
    """Builds ember on a backbone of BACKBONES: `channels` at strides 8, 16 and 32; `depth`: of the neck's blocks."""

    def build(settings: ModelSettings, num_classes: int) -> Ember:
        norm = NORMS[trainable_norm(settings.backbone_norm)]
        neck = partial(PAFPN, channels=channels, num_blocks=num_blocks, norm=norm, depthwise=settings.depthwise)
        backbone = build_backbone_with_neck(
            backbone_name, neck, norm=settings.backbone_norm, trainable_stages=settings.trainable_backbone_layers
        )
        return Ember(backbone, settings, num_classes, list(channels))

    return build
