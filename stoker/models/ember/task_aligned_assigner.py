"""Task-aligned assignment of boxes to points by the current predictions (TOOD, Feng et al. 2021, arXiv 2108.07755,
section 3.2), with fixed shapes and without host syncs.

The points inside a box are its candidates. The alignment of a candidate is score^ALPHA · IoU^BETA, with its score for
the box's class and the IoU of its predicted box. The `topk` best aligned candidates of a box are its positives; a point
that is positive for several boxes is assigned to the one with the largest IoU. The target score of a positive is its
alignment, scaled so that the maximum over a box's positives equals their largest IoU.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from stoker.models.layers.boxes import iou
from stoker.models.layers.losses import at_least_fp32
from stoker.models.layers.matching import BACKGROUND, plan_blocks

ALPHA, BETA = 1.0, 6.0
"""Exponents of the score and of the IoU: TOOD, section 4.1."""


class TALAssignment(NamedTuple):
    """Of B images at A points."""

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
    points; boxes: float32 [B, M, 4] xyxy; labels: int64 [B, M]; valid: bool [B, M]; center_radius: in pixels, points
    within it along x and y of a box's center are candidates, too: with half the distance between points, every box has
    one. Among boxes with equal IoU, a point gets the first. block: maximum number of pairs computed at once; default:
    `device.block_size`.
    """
    image_slices, boxes_per_block = plan_blocks(boxes, center.shape[0], block)
    topk = min(topk, center.shape[0])
    with torch.no_grad():
        assignments = [
            _assign(
                logits[p], pred_boxes[p], center, boxes[p], labels[p], valid[p], center_radius, topk, boxes_per_block
            )
            for p in image_slices
        ]
        if len(assignments) == 1:
            return assignments[0]
        return TALAssignment(*(torch.cat(column) for column in zip(*assignments, strict=True)))


def _assign(
    logits: Tensor,
    pred_boxes: Tensor,
    center: Tensor,
    boxes: Tensor,
    labels: Tensor,
    valid: Tensor,
    center_radius: float,
    topk: int,
    boxes_per_block: int,
) -> TALAssignment:
    shape = pred_boxes.shape[:2]
    best: tuple[Tensor, Tensor, Tensor] | None = None  # index of a point's box, its IoU, its alignment
    by_class = logits.transpose(1, 2)
    for start in range(0, boxes.shape[1], boxes_per_block):
        block = slice(start, start + boxes_per_block)
        pairwise_iou = iou(boxes[:, block], pred_boxes)
        score = at_least_fp32(by_class.gather(1, labels[:, block, None].expand(-1, -1, shape[1]))).sigmoid()
        pairwise_alignment = torch.where(
            _is_candidate(boxes[:, block], center, center_radius) & valid[:, block, None],
            score**ALPHA * pairwise_iou**BETA,
            -1.0,
        )
        value, point_index = pairwise_alignment.topk(topk, dim=2)
        is_other = torch.ones_like(pairwise_alignment, dtype=torch.bool).scatter_(2, point_index, value < 0)
        max_iou, index = pairwise_iou.masked_fill_(is_other, -1.0).max(dim=1)
        alignment = pairwise_alignment.gather(1, index[:, None])[:, 0]
        if best is None:
            best = index, max_iou, alignment
        else:
            better = max_iou > best[1]  # strictly, so that the first of equal boxes keeps the point
            best = (
                torch.where(better, index + start, best[0]),
                torch.where(better, max_iou, best[1]),
                torch.where(better, alignment, best[2]),
            )
    assert best is not None, "batches have at least one slot for a box"
    gt_index, best_iou, alignment = best
    unassigned, index = (best_iou >= 0).logical_not(), gt_index.expand(2, *shape)
    # Maxima over all points with the same box.
    values = torch.stack((alignment, best_iou)).masked_fill_(unassigned, 0.0)
    maxima = values.new_zeros(2, *valid.shape).scatter_reduce_(2, index, values, "amax").gather(2, index)
    scaled = alignment / maxima[0].clamp(min=torch.finfo(alignment.dtype).tiny) * maxima[1]
    return TALAssignment(gt_index.masked_fill(unassigned, BACKGROUND), scaled.masked_fill_(unassigned, 0.0))


def _is_candidate(boxes: Tensor, center: Tensor, center_radius: float) -> Tensor:
    """bool [B, M, A]: the points inside each box, or within `center_radius` of its center along x and y."""
    box_center = (boxes[..., :2] + boxes[..., 2:]) / 2
    half_size = ((boxes[..., 2:] - boxes[..., :2]) / 2).clamp(min=center_radius)
    is_within = (center - box_center[..., None, :]).abs() <= half_size[..., None, :]
    return is_within[..., 0] & is_within[..., 1]
