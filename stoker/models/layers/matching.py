"""Which box each anchor has to find, with fixed shapes and without a host sync.

The rule is torchvision's `Matcher` with low-quality matches (Faster R-CNN, section 3.1.2): an anchor belongs to the box
it overlaps most when that is at least `foreground_iou`; below `background_iou` it is background; between the two it is
ignored. And every box gets the anchors that overlap it most, however little, so that none is without. One difference: a
box that overlaps no anchor at all gets none, where torchvision gives it every anchor that overlaps nothing.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from stoker.hardware.device import block_size
from stoker.models.layers.boxes import iou

BACKGROUND = -1
IGNORED = -2


def match_anchors(
    boxes: Tensor,
    valid: Tensor,
    anchors: Tensor,
    *,
    fg_iou_thresh: float,
    bg_iou_thresh: float,
    block: int | None = None,
) -> Tensor:
    """Slot of the box of each anchor, `BACKGROUND` or `IGNORED`: int64 [B, A].

    boxes: float [B, M, 4] xyxy; valid: bool [B, M]; anchors: float [A, 4]. An anchor that overlaps several boxes
    equally belongs to the one in the lowest slot. Images are taken together, and slots apart, so that no more than
    `block` overlaps are computed at once; default: as suits the device. All those of a batch (32 images, 100 boxes,
    120,087 anchors at 800 × 800) would take 1.4 GiB, and about six such tensors live together.
    """

    def match_block(boxes: Tensor, valid: Tensor, boxes_per_block: int) -> Tensor:
        return _match(boxes, valid, anchors, fg_iou_thresh, bg_iou_thresh, boxes_per_block)

    return map_blocks(match_block, boxes, valid, anchors.shape[0], block)


def map_blocks(
    fn: Callable[[Tensor, Tensor, int], Tensor], boxes: Tensor, valid: Tensor, num_anchors: int, block: int | None
) -> Tensor:
    """`some(boxes [b, M, 4], valid [b, M], rows)` of as many images at a time as `block` allows with `count` anchors,
    one after the other: [B, …]. `rows` is how many of the M slots it may take at once. Without gradients."""
    image_slices, boxes_per_block = plan_blocks(boxes, num_anchors, block)
    with torch.no_grad():
        return torch.cat([fn(boxes[image_slice], valid[image_slice], boxes_per_block) for image_slice in image_slices])


def plan_blocks(boxes: Tensor, num_anchors: int, block: int | None) -> tuple[list[slice], int]:
    """(images that are taken together, slots that are taken at once), so that of boxes [B, M, 4] and `count` places
    no more than `block` pairs are computed at once; default: as suits the device."""
    block = block or block_size(boxes)
    images_per_block = max(1, block // max(1, boxes.shape[1] * num_anchors))
    return [slice(first, first + images_per_block) for first in range(0, boxes.shape[0], images_per_block)], max(
        1, block // num_anchors
    )


def _match(
    boxes: Tensor, valid: Tensor, anchors: Tensor, fg_iou_thresh: float, bg_iou_thresh: float, boxes_per_block: int
) -> Tensor:
    shape = (boxes.shape[0], anchors.shape[0])
    best_iou = boxes.new_full(shape, -1.0)
    best_gt = torch.zeros(shape, dtype=torch.int64, device=boxes.device)
    is_best_for_gt = torch.zeros(shape, dtype=torch.bool, device=boxes.device)
    for start in range(0, boxes.shape[1], boxes_per_block):
        block_valid = valid[:, start : start + boxes_per_block, None]
        overlap = iou(boxes[:, start : start + boxes_per_block], anchors).masked_fill(~block_valid, -1.0)
        best_overlap, gt_index = overlap.max(dim=1)
        better = best_overlap > best_iou  # strictly, so that the lowest slot keeps an anchor that several boxes share
        best_gt = torch.where(better, gt_index + start, best_gt)
        best_iou = torch.where(better, best_overlap, best_iou)
        max_overlap = overlap.amax(dim=2, keepdim=True)
        is_best_for_gt |= ((overlap == max_overlap) & (max_overlap > 0)).any(dim=1)
    by_threshold = torch.where(best_iou < fg_iou_thresh, IGNORED, best_gt)
    by_threshold = torch.where(best_iou < bg_iou_thresh, BACKGROUND, by_threshold)
    return torch.where(is_best_for_gt, best_gt, by_threshold)
