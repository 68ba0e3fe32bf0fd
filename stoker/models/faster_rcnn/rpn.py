"""The first stage of Faster R-CNN (arXiv 1506.01497): the region proposal network, its proposals, its losses.

Everything has fixed shapes and needs no host sync, also NMS (`layers/nms.py`). With torchvision's weights, losses and
proposals equal those of its RegionProposalNetwork, and so do the names in `state_dict`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.hardware.device import block_size
from stoker.models.layers.anchors import AnchorGenerator
from stoker.models.layers.boxes import cell_anchors, clip, decode, encode
from stoker.models.layers.matching import BACKGROUND, match_anchors
from stoker.models.layers.nms import MAX_PAIRS, fixed_point_nms
from stoker.models.layers.rank_mean import loss_divisor
from stoker.models.layers.sampling import batched_gather, random_keys, sample_balanced

NMS_THRESH = 0.7
"""NMS threshold of the proposals of a level (section 3.3)."""
MIN_BOX_PX = 1e-3
"""Proposals with a shorter side are dropped (torchvision)."""
SAMPLES_PER_IMAGE, MAX_POSITIVES_PER_IMAGE = 256, 128
"""Anchors of an image in the loss, and at most so many positive ones (section 3.1.3)."""
SMOOTH_L1_BETA = 1 / 9
"""Where the smooth L1 loss changes from quadratic to linear (torchvision, Detectron)."""


class RPNOutputs(NamedTuple):
    """Predictions at A anchors of B images, in the dtype the network computed in."""

    logits: Tensor
    """[B, A], objectness."""
    deltas: Tensor
    """[B, A, 4], boxes encoded relative to their anchors."""
    anchors: Tensor
    """float32 [A, 4], xyxy in pixels of the model input."""
    num_anchors_per_level: tuple[int, ...]
    """How many of the A anchors each pyramid level has, finest level first."""


class Proposals(NamedTuple):
    """K proposals of each image, best first."""

    boxes: Tensor
    """float32 [B, K, 4], in pixels of the model input, inside `resized_size`; zeros where not valid."""
    valid: Tensor
    """bool [B, K]."""
    unconverged: Tensor
    """bool [B]: NMS did not converge, so some overlapping boxes may have stayed."""


class RPNHead(nn.Module):
    """A convolution, then objectness and box per anchor, shared by all levels; with torchvision's names.

    Levels, each [B, channels, h, w] → (logits [B, A], deltas [B, A, 4]).
    """

    def __init__(self, channels: int, num_anchors: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(inplace=True)))
        self.cls_logits = nn.Conv2d(channels, num_anchors, 1)
        self.bbox_pred = nn.Conv2d(channels, num_anchors * 4, 1)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                assert layer.bias is not None
                nn.init.normal_(layer.weight, std=0.01)
                nn.init.zeros_(layer.bias)

    def forward(self, levels: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        hidden = [self.conv(level) for level in levels]
        # In channels-last memory the permutation and the flattening are views.
        logits = [self.cls_logits(features).permute(0, 2, 3, 1).flatten(1) for features in hidden]
        deltas = [self.bbox_pred(features).permute(0, 2, 3, 1).flatten(1) for features in hidden]
        joined = torch.cat(deltas, dim=1)
        return torch.cat(logits, dim=1), joined.view(joined.shape[0], -1, 4)


class RegionProposalNetwork(nn.Module):
    """The network with its anchors. sizes: one per level, finest first, as `anchor_sizes` of `ModelSettings`."""

    def __init__(
        self, channels: int, *, sizes: Sequence[float], scales: Sequence[float], aspect_ratios: Sequence[float]
    ) -> None:
        super().__init__()
        self.head = RPNHead(channels, len(scales) * len(aspect_ratios))
        self.anchors = AnchorGenerator(cell_anchors(size, scales, aspect_ratios) for size in sizes)

    def forward(self, levels: Sequence[Tensor], image_size: tuple[int, int]) -> RPNOutputs:
        """levels: finest first, each [B, C, h, w]; image_size: height and width of the model input."""
        grids = [(level.shape[2], level.shape[3]) for level in levels]
        logits, deltas = self.head(levels)
        return RPNOutputs(logits, deltas, self.anchors(image_size, grids), self.anchors.num_anchors_per_level(grids))


def propose(
    rpn_outputs: RPNOutputs,
    resized_size: Tensor,
    *,
    pre_nms_top_n: int,
    post_nms_top_n: int,
    score_threshold: float = 0.0,
) -> Proposals:
    """The best `post_nms_top_n` proposals of each image: the `pre_nms_top_n` best anchors of each level, decoded,
    clipped to `resized_size` [B, 2], without small ones, after NMS per level.

    rpn_outputs: at least fp32; score_threshold: minimum objectness.
    """
    counts = [min(pre_nms_top_n, num_anchors) for num_anchors in rpn_outputs.num_anchors_per_level]
    best_logits, indices, start = [], [], 0
    for count, num_anchors in zip(counts, rpn_outputs.num_anchors_per_level, strict=True):
        level_logits, level_index = rpn_outputs.logits[:, start : start + num_anchors].topk(count, dim=1)
        best_logits.append(level_logits)
        indices.append(level_index + start)
        start += num_anchors
    logits, index = torch.cat(best_logits, dim=1), torch.cat(indices, dim=1)
    anchors = rpn_outputs.anchors.index_select(0, index.flatten()).view(*index.shape, 4)
    boxes = clip(decode(batched_gather(rpn_outputs.deltas, index), anchors), resized_size)
    eligible = ((boxes[..., 2:] - boxes[..., :2]) >= MIN_BOX_PX).all(-1)  # false for NaN
    if score_threshold > 0:
        eligible = eligible & (logits.sigmoid() >= score_threshold)
    nms = _nms_of_levels if boxes.device.type == "cpu" else _nms_of_padded_levels
    keep, converged = nms(boxes, eligible, counts)
    score, index = torch.where(keep, logits, -torch.inf).topk(min(post_nms_top_n, logits.shape[1]), dim=1)
    valid = score > -torch.inf
    return Proposals(torch.where(valid[..., None], batched_gather(boxes, index), 0.0), valid, ~converged)


def _nms_of_levels(boxes: Tensor, eligible: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """NMS within each level: (kept: bool [B, K], converged: bool [B]). boxes: [B, K, 4], the levels one after the
    other, `counts` boxes each; eligible: bool [B, K]."""
    keep, converged = zip(
        *(
            fixed_point_nms(level_boxes, level_eligible, iou_threshold=NMS_THRESH)
            for level_boxes, level_eligible in zip(
                torch.split(boxes, counts, 1), torch.split(eligible, counts, 1), strict=True
            )
        ),
        strict=True,
    )
    return torch.cat(keep, dim=1), torch.stack(converged).all(0)


def _nms_of_padded_levels(boxes: Tensor, eligible: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """The same with all levels at once, for accelerators: a fifth of the launches, for some IoUs of padding."""
    longest = max(counts)

    def padded(values: Tensor) -> Tensor:
        levels = [
            level if level.shape[1] == longest
            else torch.cat((level, level.new_zeros(level.shape[0], longest - level.shape[1], *level.shape[2:])), dim=1)
            for level in torch.split(values, counts, 1)
        ]  # fmt: skip
        return torch.stack(levels, dim=1).flatten(0, 1)

    keep, converged = fixed_point_nms(padded(boxes), padded(eligible), iou_threshold=NMS_THRESH)
    by_level = keep.view(boxes.shape[0], len(counts), longest).unbind(1)
    return (
        torch.cat([level[:, :count] for level, count in zip(by_level, counts, strict=True)], dim=1),
        converged.view(boxes.shape[0], len(counts)).all(1),
    )


def propose_in_groups(
    rpn_outputs: RPNOutputs, resized_size: Tensor, *, pre_nms_top_n: int, post_nms_top_n: int, score_threshold: float
) -> Proposals:
    """`propose` for groups of images: on a CPU at most MAX_PAIRS IoUs are computed at once, on an accelerator at most
    `device.block_size`, of all levels."""
    logits = rpn_outputs.logits
    if logits.device.type == "cpu":
        images_per_group = max(1, MAX_PAIRS // pre_nms_top_n**2)
    else:
        pairs = len(rpn_outputs.num_anchors_per_level) * pre_nms_top_n**2
        images_per_group = max(1, block_size(logits) // pairs)
    groups = [
        propose(
            rpn_outputs._replace(logits=logits[image_slice], deltas=rpn_outputs.deltas[image_slice]),
            resized_size[image_slice],
            pre_nms_top_n=pre_nms_top_n,
            post_nms_top_n=post_nms_top_n,
            score_threshold=score_threshold,
        )
        for image_slice in (
            slice(first, first + images_per_group) for first in range(0, resized_size.shape[0], images_per_group)
        )
    ]
    return Proposals(*(torch.cat(field) for field in zip(*groups, strict=True)))


def rpn_loss(
    rpn_outputs: RPNOutputs,
    boxes: Tensor,
    valid: Tensor,
    rand: Tensor,
    *,
    fg_iou_thresh: float,
    bg_iou_thresh: float,
) -> tuple[Tensor, Tensor]:
    """(objectness loss, box loss): scalars, both divided by the number of sampled anchors of the batch.

    rpn_outputs: at least fp32; boxes: [B, M, 4]; valid: bool [B, M]; rand: float32 [B] in [0, 1), seed of the sample.
    """
    gt_index = match_anchors(
        boxes, valid, rpn_outputs.anchors, fg_iou_thresh=fg_iou_thresh, bg_iou_thresh=bg_iou_thresh
    )
    sampled = sample_balanced(
        random_keys(rand, gt_index.shape[1], stream=0),
        gt_index >= 0,
        gt_index == BACKGROUND,
        num_samples=SAMPLES_PER_IMAGE,
        max_positives=MAX_POSITIVES_PER_IMAGE,
    )
    num_sampled = loss_divisor(sampled.valid.sum())
    logits = sampled.gather(rpn_outputs.logits)
    objectness = functional.binary_cross_entropy_with_logits(
        logits, sampled.positive.to(logits.dtype), reduction="none"
    )
    anchors = rpn_outputs.anchors.index_select(0, sampled.indices.flatten()).view(*sampled.indices.shape, 4)
    target = encode(batched_gather(boxes, sampled.gather(gt_index).clamp(min=0)), anchors)
    offset_sum = smooth_l1_box_loss(sampled.gather(rpn_outputs.deltas), target, sampled.positive)
    return torch.where(sampled.valid, objectness, 0.0).sum() / num_sampled, offset_sum / num_sampled


def smooth_l1_box_loss(deltas: Tensor, target: Tensor, positive: Tensor) -> Tensor:
    """Sum of the smooth L1 loss of deltas [B, S, 4] over the positive samples, bool [B, S]. `target` may be infinite at
    the others, so it is replaced before the arithmetic."""
    masked_target = torch.where(positive[..., None], target, 0.0)
    per_coordinate = functional.smooth_l1_loss(deltas, masked_target, beta=SMOOTH_L1_BETA, reduction="none")
    return torch.where(positive[..., None], per_coordinate, 0.0).sum()
