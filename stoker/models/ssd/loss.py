"""SSD's anchor assignment and loss with hard negative mining (arXiv 1512.02325, section 2.2).

Everything has fixed shapes and needs no host sync.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from stoker.models.layers.boxes import iou
from stoker.models.layers.matching import BACKGROUND, map_blocks


def match_ssd_anchors(
    boxes: Tensor, valid: Tensor, anchors: Tensor, *, fg_iou_thresh: float, block: int | None = None
) -> Tensor:
    """Index of each anchor's box, or `BACKGROUND`: int64 [B, A]. The rule of torchvision's `SSDMatcher`.

    An anchor is assigned to the box with the largest IoU (the first among equals) if that is at least `fg_iou_thresh`.
    In addition, each box gets the anchor with its largest IoU, even if that was assigned to another box; if two boxes
    have the same best anchor, the last one gets it. One difference: a box that overlaps no anchor gets none, where
    torchvision gives it the first anchor.

    boxes: float [B, M, 4] xyxy; valid: bool [B, M]; anchors: float [A, 4]; block: as in `matching.match_anchors`.
    """
    match = partial(_match, anchors=anchors, fg_iou_thresh=fg_iou_thresh)
    return map_blocks(match, boxes, valid, anchors.shape[0], block)


def _match(boxes: Tensor, valid: Tensor, boxes_per_block: int, *, anchors: Tensor, fg_iou_thresh: float) -> Tensor:
    shape = (boxes.shape[0], anchors.shape[0])
    best_iou = boxes.new_full(shape, -1.0)
    best_gt = torch.zeros(shape, dtype=torch.int64, device=boxes.device)
    forced_gt = torch.full(shape, BACKGROUND, dtype=torch.int64, device=boxes.device)
    gt_indices = torch.arange(boxes.shape[1], device=boxes.device)
    for start in range(0, boxes.shape[1], boxes_per_block):
        overlap = iou(boxes[:, start : start + boxes_per_block], anchors)
        overlap = overlap.masked_fill(~valid[:, start : start + boxes_per_block, None], -1.0)
        best_overlap, gt_index = overlap.max(dim=1)
        better = best_overlap > best_iou  # strictly, so that the first of equal boxes keeps the anchor
        best_gt = torch.where(better, gt_index + start, best_gt)
        best_iou = torch.where(better, best_overlap, best_iou)
        max_overlap, best_anchor = overlap.max(dim=2)
        forced = torch.where(max_overlap > 0, gt_indices[start : start + boxes_per_block], BACKGROUND)
        forced_gt = forced_gt.scatter_reduce(1, best_anchor, forced, "amax")
    by_threshold = torch.where(best_iou >= fg_iou_thresh, best_gt, BACKGROUND)
    return torch.where(forced_gt >= 0, forced_gt, by_threshold)


def hard_negative_cross_entropy(logits: Tensor, target: Tensor, *, neg_to_pos_ratio: int = 3) -> Tensor:
    """Cross-entropy summed over the positive anchors and, in each image, over the background anchors with the largest
    loss, `neg_to_pos_ratio` times as many: float [].

    logits: float [B, A, 1 + C]; target: int64 [B, A], 0 for background. Among equal losses, the first anchors are
    chosen. If an image has too few background anchors, all are used; torchvision then uses positive ones twice.
    """
    loss = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
    positive = target > 0
    # Positive anchors get a loss of 0 here, so they are ranked behind all negatives with a loss.
    ranked_negatives = torch.where(positive, 0.0, loss).sort(dim=1, descending=True, stable=True).values
    is_hard = torch.arange(target.shape[1], device=target.device) < neg_to_pos_ratio * positive.sum(1, keepdim=True)
    return torch.where(positive, loss, 0.0).sum() + torch.where(is_hard, ranked_negatives, 0.0).sum()
