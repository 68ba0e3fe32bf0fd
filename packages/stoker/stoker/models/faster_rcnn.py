"""Faster R-CNN (arXiv 1506.01497) on a feature pyramid (arXiv 1612.03144), a two-stage detector.

First the region proposal network with its proposals and losses, then the RoI heads (sampling, box head, losses), at the
end the detector. `layers/roi_align.py` pools features. With the same weights, losses and detections equal those of
torchvision's FasterRCNN, and so do the names in `state_dict`; only the random selection of anchors and RoIs differs
(`layers/matching.py`). Everything has fixed shapes and needs no host sync, also NMS (`layers/postprocess.py`). In the
second stage class 0 is the background, the user's class c is c + 1.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.config.settings import ModelSettings
from stoker.data.batch import Batch, RandSlot
from stoker.hardware.block_size import block_size
from stoker.models.backbones import build_backbone_with_fpn
from stoker.models.detector import ClassHeadSpec, Detector
from stoker.models.layers.boxes import (
    AnchorGenerator,
    AnchorOutputs,
    batched_gather,
    cell_anchors,
    clip,
    coder_weights_like,
    decode,
    encode,
    iou,
    rows_at,
)
from stoker.models.layers.losses import at_least_fp32
from stoker.models.layers.matching import BACKGROUND, match_anchors, random_keys, sample_balanced
from stoker.models.layers.postprocess import MAX_PAIRS, Candidates, fixed_point_nms, topk_per_level
from stoker.models.layers.rank_mean import loss_divisor
from stoker.models.layers.roi_align import OUTPUT_SIZE, multiscale_roi_align
from stoker.models.retinanet import ConvHead

CHANNELS = 256
"""Channels of the FPN's levels."""
NMS_THRESH = 0.7
"""NMS threshold of the proposals of a level (section 3.3)."""
MIN_PROPOSAL_PX = 1e-3
"""Proposals with a shorter side are dropped (torchvision)."""
RPN_SAMPLES, RPN_MAX_POSITIVES = 256, 128
"""Anchors of an image in the loss, and at most so many positive ones (section 3.1.3)."""
SMOOTH_L1_BETA = 1 / 9
"""Where the smooth L1 loss changes from quadratic to linear (torchvision, Detectron)."""


class Proposals(NamedTuple):
    """K proposals of each image, best first."""

    boxes: Tensor
    """float32 [B, K, 4], in pixels of the model input, inside `resized_size`; zeros where not valid."""
    valid: Tensor
    """bool [B, K]."""


class RegionProposalNetwork(nn.Module):
    """A convolution, objectness and box per anchor, shared by all levels, with torchvision's names; the anchors."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        num_anchors = len(settings.anchor_scales) * len(settings.aspect_ratios)
        conv = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU(inplace=True))
        cls_logits, bbox_pred = (nn.Conv2d(CHANNELS, num_anchors * outputs, 1) for outputs in (1, 4))
        self.head = ConvHead([conv], cls_logits=(cls_logits, 1), bbox_pred=(bbox_pred, 4))
        for layer in self.head.modules():
            if isinstance(layer, nn.Conv2d):
                assert layer.bias is not None
                nn.init.normal_(layer.weight, std=0.01)
                nn.init.zeros_(layer.bias)
        self.anchors = AnchorGenerator(
            cell_anchors(size, settings.anchor_scales, settings.aspect_ratios) for size in settings.anchor_sizes
        )

    def forward(self, levels: list[Tensor], image_size: tuple[int, int]) -> AnchorOutputs:
        """levels: finest first, each [B, C, h, w]; image_size: height and width of the model input."""
        grids = [(level.shape[2], level.shape[3]) for level in levels]
        logits, deltas = (torch.cat(predicted, dim=1) for predicted in self.head(levels))
        anchors = self.anchors(image_size, grids)
        return AnchorOutputs(logits, deltas, anchors, self.anchors.num_anchors_per_level(grids))


def propose(rpn_outputs: AnchorOutputs, resized_size: Tensor, *, top_n: int, min_score: float) -> Proposals:
    """The best `top_n` proposals of each image: the `top_n` best anchors of each level, decoded, clipped to
    `resized_size` [B, 2], without small ones, after NMS per level.

    rpn_outputs: at least fp32; min_score: minimum objectness.
    """
    counts = [min(top_n, num_anchors) for num_anchors in rpn_outputs.num_anchors_per_level]
    logits, index, _ = topk_per_level(rpn_outputs.logits, rpn_outputs.num_anchors_per_level, top_n)
    deltas, anchors = batched_gather(rpn_outputs.deltas, index), rows_at(rpn_outputs.anchors, index)
    boxes = clip(decode(deltas, anchors), resized_size)
    eligible = ((boxes[..., 2:] - boxes[..., :2]) >= MIN_PROPOSAL_PX).all(-1)  # false for NaN
    if min_score > 0:
        eligible = eligible & (logits.sigmoid() >= min_score)
    kept = torch.where(_nms_of_levels(boxes, eligible, counts), logits, -torch.inf)
    score, index = kept.topk(min(top_n, logits.shape[1]), dim=1)
    valid = score > -torch.inf
    return Proposals(torch.where(valid[..., None], batched_gather(boxes, index), 0.0), valid)


def _nms_of_levels(boxes: Tensor, eligible: Tensor, counts: list[int]) -> Tensor:
    """NMS within each level: kept, bool [B, K]. boxes: [B, K, 4], the levels one after the other, `counts` boxes each;
    eligible: bool [B, K]. Without convergence a few overlapping boxes too many are kept. On accelerators all levels are
    padded to the longest and done at once: a fifth of the launches, for some IoUs of padding."""
    if boxes.device.type == "cpu":
        levels = zip(torch.split(boxes, counts, 1), torch.split(eligible, counts, 1), strict=True)
        return torch.cat([fixed_point_nms(*level, iou_threshold=NMS_THRESH)[0] for level in levels], dim=1)
    longest = max(counts)

    def padded(values: Tensor) -> Tensor:
        other_axes = [0, 0] * (values.dim() - 2)
        rows = [
            functional.pad(level, (*other_axes, 0, longest - count)) if count < longest else level
            for level, count in zip(torch.split(values, counts, 1), counts, strict=True)
        ]
        return torch.stack(rows, dim=1).flatten(0, 1)

    keep, _ = fixed_point_nms(padded(boxes), padded(eligible), iou_threshold=NMS_THRESH)
    by_level = keep.view(boxes.shape[0], len(counts), longest).unbind(1)
    return torch.cat([level[:, :count] for level, count in zip(by_level, counts, strict=True)], dim=1)


def propose_in_groups(rpn_outputs: AnchorOutputs, resized_size: Tensor, *, top_n: int, min_score: float) -> Proposals:
    """`propose` for groups of images: on a CPU at most MAX_PAIRS IoUs are computed at once, on an accelerator at most
    `block_size.block_size`, of all levels."""
    logits = rpn_outputs.logits
    max_pairs = MAX_PAIRS if logits.device.type == "cpu" else block_size(logits)
    images_per_group = max(1, max_pairs // (len(rpn_outputs.num_anchors_per_level) * top_n**2))
    columns = (column.split(images_per_group) for column in (logits, rpn_outputs.deltas, resized_size))
    groups = [
        propose(rpn_outputs._replace(logits=some, deltas=deltas), sizes, top_n=top_n, min_score=min_score)
        for some, deltas, sizes in zip(*columns, strict=True)
    ]
    return Proposals(*(torch.cat(field) for field in zip(*groups, strict=True)))


def rpn_loss(
    rpn_outputs: AnchorOutputs, boxes: Tensor, valid: Tensor, rand: Tensor, thresholds: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """(objectness loss, box loss): scalars, both divided by the number of sampled anchors of the batch.

    rpn_outputs: at least fp32; boxes: [B, M, 4]; valid: bool [B, M]; rand: float32 [B] in [0, 1), seed of the sample;
    thresholds: those of `match_anchors`.
    """
    gt_index = match_anchors(boxes, valid, rpn_outputs.anchors, **thresholds)
    sampled = sample_balanced(
        random_keys(rand, gt_index.shape[1], stream=0),
        gt_index >= 0,
        gt_index == BACKGROUND,
        num_samples=RPN_SAMPLES,
        max_positives=RPN_MAX_POSITIVES,
    )
    num_sampled = loss_divisor(sampled.valid.sum())
    logits = sampled.gather(rpn_outputs.logits[..., 0])
    objectness = functional.binary_cross_entropy_with_logits(
        logits, sampled.positive.to(logits.dtype), reduction="none"
    )
    anchors = rows_at(rpn_outputs.anchors, sampled.indices)
    target = encode(batched_gather(boxes, sampled.gather(gt_index).clamp(min=0)), anchors)
    offset_sum = smooth_l1_box_loss(sampled.gather(rpn_outputs.deltas), target, sampled.positive)
    return torch.where(sampled.valid, objectness, 0.0).sum() / num_sampled, offset_sum / num_sampled


def smooth_l1_box_loss(deltas: Tensor, target: Tensor, positive: Tensor) -> Tensor:
    """Sum of the smooth L1 loss of deltas [B, S, 4] over the positive samples, bool [B, S]. `target` may be infinite at
    the others, so it is replaced before the arithmetic."""
    masked_target = torch.where(positive[..., None], target, 0.0)
    per_coordinate = functional.smooth_l1_loss(deltas, masked_target, beta=SMOOTH_L1_BETA, reduction="none")
    return torch.where(positive[..., None], per_coordinate, 0.0).sum()


HIDDEN = 1024
"""Width of both hidden layers of the box head (FPN, arXiv 1612.03144, section 4.2)."""
FG_IOU_THRESH = 0.5
"""A RoI with a smaller IoU with all boxes is background (Fast R-CNN, arXiv 1504.08083, section 2.3)."""
ROI_SAMPLES, ROI_MAX_POSITIVES = 512, 128
"""RoIs of an image in the loss, and at most so many positive ones (torchvision, Detectron)."""


class SampledRois(NamedTuple):
    """S RoIs of each image."""

    boxes: Tensor
    """[B, S, 4], in pixels of the model input, finite also where not valid."""
    target: Tensor
    """int64 [B, S]: 0 for the background, label + 1; undefined where not valid."""
    offsets: Tensor
    """[B, S, 4], the encoded box; undefined where not positive."""
    positive: Tensor
    """bool [B, S]."""
    valid: Tensor
    """bool [B, S]."""


class RoIHead(nn.Module):
    """Two hidden layers, then classes and, for each class, a box, with torchvision's names: pooled features
    [B · S, C, OUTPUT_SIZE, OUTPUT_SIZE] → (logits [B · S, 1 + C], deltas [B · S, 1 + C, 4])."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.box_head = nn.ModuleDict(
            {"fc6": nn.Linear(CHANNELS * OUTPUT_SIZE**2, HIDDEN), "fc7": nn.Linear(HIDDEN, HIDDEN)}
        )
        self.box_predictor = nn.ModuleDict(
            {"cls_score": nn.Linear(HIDDEN, 1 + num_classes), "bbox_pred": nn.Linear(HIDDEN, (1 + num_classes) * 4)}
        )

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        hidden = functional.relu(self.box_head["fc6"](features.flatten(1)))
        hidden = functional.relu(self.box_head["fc7"](hidden))
        logits, deltas = self.box_predictor["cls_score"](hidden), self.box_predictor["bbox_pred"](hidden)
        return logits, deltas.unflatten(1, (-1, 4))


def sample_rois(proposals: Proposals, boxes: Tensor, labels: Tensor, valid: Tensor, rand: Tensor) -> SampledRois:
    """A sample of the proposals and the ground truth boxes.

    boxes: [B, M, 4]; labels: int64 [B, M]; valid: bool [B, M]; rand: float32 [B] in [0, 1), seed of the sample.
    """
    # Boxes without an area are dropped: the logarithm of their size is infinite.
    valid = valid & (boxes[..., 2:] > boxes[..., :2]).all(-1)
    rois = torch.cat((proposals.boxes, boxes), dim=1)
    is_available = torch.cat((proposals.valid, valid), dim=1)
    overlap, gt_index = iou(boxes, rois).masked_fill(~valid[..., None], -1.0).max(dim=1)
    positive = overlap >= FG_IOU_THRESH
    sampled = sample_balanced(
        random_keys(rand, rois.shape[1], stream=1),
        is_available & positive,
        is_available & ~positive,
        num_samples=ROI_SAMPLES,
        max_positives=ROI_MAX_POSITIVES,
    )
    sampled_gt_index = sampled.gather(gt_index)
    sampled_boxes = sampled.gather(rois)
    offsets = encode(batched_gather(boxes, sampled_gt_index), sampled_boxes) * coder_weights_like(sampled_boxes)
    target = torch.where(sampled.positive, batched_gather(labels, sampled_gt_index) + 1, 0)
    return SampledRois(sampled_boxes, target, offsets, sampled.positive, sampled.valid)


def roi_loss(logits: Tensor, deltas: Tensor, rois: SampledRois) -> tuple[Tensor, Tensor]:
    """(class loss, box loss): scalars, both divided by the number of sampled RoIs of the batch.

    logits: at least fp32 [B · S, 1 + C]; deltas: [B · S, 1 + C, 4], of which only those of the RoI's class are used.
    """
    num_sampled = loss_divisor(rois.valid.sum())
    target = rois.target.flatten()
    class_losses = functional.cross_entropy(logits, target, reduction="none").view_as(rois.valid)
    class_deltas = deltas.gather(1, target[:, None, None].expand(-1, 1, 4)).view_as(rois.offsets)
    offset_sum = smooth_l1_box_loss(class_deltas, rois.offsets, rois.positive)
    return torch.where(rois.valid, class_losses, 0.0).sum() / num_sampled, offset_sum / num_sampled


MIN_BOX_PX = 1e-2
"""Detections with a shorter side are dropped (torchvision)."""


class FasterRCNNOutputs(NamedTuple):
    """Outputs of the first stage, and the features for the second one."""

    rpn_outputs: AnchorOutputs
    features: tuple[Tensor, ...]
    """The levels that RoIs are pooled from, finest first, each [B, C, h, w]."""
    strides: tuple[int, ...]
    """Strides of `features`, in pixels of the model input."""


class FasterRCNN(Detector):
    """The detector, on a backbone of BACKBONES with an FPN. return_layers: as in `build_backbone_with_fpn`;
    num_pooled_levels: number of levels, from the finest, that RoIs are pooled from; rpn_score_thresh: minimum
    objectness of a proposal."""

    num_train_proposals = 2000
    """Proposals of an image after NMS, and anchors of a level before it (torchvision)."""
    num_test_proposals = 1000
    """The same in evaluation."""
    max_candidates = 1000
    """Best (RoI, class) scores of an image. torchvision has no limit; above 0.05 a trained model has fewer."""

    def __init__(
        self, settings: ModelSettings, num_classes: int, *, backbone: str,
        return_layers: Mapping[str, int] | None = None, num_pooled_levels: int = 4, rpn_score_thresh: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(settings, num_classes)
        self.num_pooled_levels, self.rpn_score_thresh = num_pooled_levels, rpn_score_thresh
        self.backbone = build_backbone_with_fpn(
            backbone, CHANNELS, norm=settings.backbone_norm, trainable_stages=settings.trainable_backbone_layers,
            min_level=2, extra_blocks="pool", return_layers=return_layers,
        )  # fmt: skip
        self.rpn = RegionProposalNetwork(settings)
        self.roi_heads = RoIHead(num_classes)

    def predict(self, levels: list[Tensor], image_size: tuple[int, int]) -> FasterRCNNOutputs:
        """The first stage; the second one runs in `loss` and `candidates`."""
        pooled_levels = tuple(levels[: self.num_pooled_levels])
        return FasterRCNNOutputs(
            self.rpn(levels, image_size),
            pooled_levels,
            tuple(image_size[0] // level.shape[2] for level in pooled_levels),
        )

    def loss(self, outputs: FasterRCNNOutputs, batch: Batch) -> dict[str, Tensor]:
        """torchvision's four fp32 scalars: `loss_objectness` and `loss_rpn_box_reg` of the first stage, means over the
        sampled anchors of the batch; `loss_classifier` and `loss_box_reg` of the second stage, the same over RoIs.

        The losses of two half batches average to that of the whole batch if all images have equally many samples:
        nearly always 256 anchors, and 512 RoIs unless there are fewer proposals.
        """
        rand = batch.rand[:, RandSlot.SAMPLE]
        device_type = outputs.rpn_outputs.logits.device.type
        with torch.autocast(device_type, enabled=False):
            rpn_outputs = _in_fp32(outputs.rpn_outputs)
            boxes = batch.boxes.to(rpn_outputs.deltas.dtype)
            objectness_loss, rpn_box_loss = rpn_loss(rpn_outputs, boxes, batch.valid, rand, self.match_thresholds())
            with torch.no_grad():
                proposals = propose_in_groups(
                    rpn_outputs, batch.resized_size, top_n=self.num_train_proposals, min_score=self.rpn_score_thresh
                )
                rois = sample_rois(proposals, boxes, batch.labels, batch.valid, rand)
            features = multiscale_roi_align(outputs.features, outputs.strides, rois.boxes)
        logits, deltas = self.roi_heads(features)
        with torch.autocast(device_type, enabled=False):
            class_loss, roi_box_loss = roi_loss(at_least_fp32(logits), at_least_fp32(deltas), rois)
        return {
            "loss_objectness": objectness_loss,
            "loss_rpn_box_reg": rpn_box_loss,
            "loss_classifier": class_loss,
            "loss_box_reg": roi_box_loss,
        }

    def candidates(
        self, outputs: FasterRCNNOutputs, resized_size: Tensor, *, score_threshold: float | Tensor
    ) -> Candidates:
        """The `max_candidates` best scores of a class at a proposal, with that class's box."""
        device_type = outputs.rpn_outputs.logits.device.type
        with torch.autocast(device_type, enabled=False):
            rpn_outputs = _in_fp32(outputs.rpn_outputs)
            proposals = propose(
                rpn_outputs, resized_size, top_n=self.num_test_proposals, min_score=self.rpn_score_thresh
            )
            features = multiscale_roi_align(outputs.features, outputs.strides, proposals.boxes)
        logits, deltas = self.roi_heads(features)
        with torch.autocast(device_type, enabled=False):
            num_proposals, num_classes = proposals.valid.shape[1], self.num_classes
            scores = at_least_fp32(logits).softmax(dim=1)[:, 1:].reshape(-1, num_proposals, num_classes)
            scores = torch.where(proposals.valid[..., None], scores, 0.0).flatten(1)
            score, indices = scores.topk(min(self.max_candidates, num_proposals * num_classes), dim=1)
            # Each index is a pair (RoI, class); only the boxes of the best pairs are decoded.
            selected_deltas = batched_gather(
                at_least_fp32(deltas)[:, 1:].reshape(-1, num_proposals * num_classes, 4), indices
            )
            rois = batched_gather(proposals.boxes, indices // num_classes)
            boxes = clip(decode(selected_deltas / coder_weights_like(rois), rois), resized_size)
            is_box = ((boxes[..., 2:] - boxes[..., :2]) >= MIN_BOX_PX).all(-1)
            return Candidates(boxes, torch.where((score > score_threshold) & is_box, score, 0.0), indices % num_classes)

    def class_heads(self) -> tuple[ClassHeadSpec, ...]:
        predictor = "roi_heads.box_predictor."
        return (
            ClassHeadSpec(predictor + "cls_score", has_background=True),
            ClassHeadSpec(predictor + "bbox_pred", outputs_per_class=4, has_background=True),
        )


def _in_fp32(rpn_outputs: AnchorOutputs) -> AnchorOutputs:
    return rpn_outputs._replace(logits=at_least_fp32(rpn_outputs.logits), deltas=at_least_fp32(rpn_outputs.deltas))
