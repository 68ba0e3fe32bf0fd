"""Which box each anchor has to find, with fixed shapes and without a host wait.

The rule is torchvision's `Matcher` with low-quality matches (Faster R-CNN, section 3.1.2): an anchor belongs to the box
it overlaps most when that is at least `foreground_iou`; below `background_iou` it is background; between the two it is
ignored. And every box gets the anchors that overlap it most, however little, so that none is without. One difference: a
box that overlaps no anchor at all gets none, where torchvision gives it every anchor that overlaps nothing.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from stoker.hardware.device import block_of
from stoker.models.layers.boxes import iou

BACKGROUND = -1
IGNORED = -2


def match(
    boxes: Tensor,
    valid: Tensor,
    anchors: Tensor,
    *,
    foreground_iou: float,
    background_iou: float,
    block: int | None = None,
) -> Tensor:
    """Slot of the box of each anchor, `BACKGROUND` or `IGNORED`: int64 [B, A].

    boxes: float [B, M, 4] xyxy; valid: bool [B, M]; anchors: float [A, 4]. An anchor that overlaps several boxes
    equally belongs to the one in the lowest slot. Pictures are taken together, and slots apart, so that no more than
    `block` overlaps are computed at once; default: as suits the device. All those of a batch (32 pictures, 100 boxes,
    120,087 anchors at 800 × 800) would take 1.4 GiB, and about six such tensors live together.
    """

    def some(boxes: Tensor, valid: Tensor, rows: int) -> Tensor:
        return _match(boxes, valid, anchors, foreground_iou, background_iou, rows)

    return by_blocks(some, boxes, valid, anchors.shape[0], block)


def by_blocks(
    some: Callable[[Tensor, Tensor, int], Tensor], boxes: Tensor, valid: Tensor, count: int, block: int | None
) -> Tensor:
    """`some(boxes [b, M, 4], valid [b, M], rows)` of as many pictures at a time as `block` allows with `count` anchors,
    one after the other: [B, …]. `rows` is how many of the M slots it may take at once. Without gradients."""
    parts, rows = blocks(boxes, count, block)
    with torch.no_grad():
        return torch.cat([some(boxes[part], valid[part], rows) for part in parts])


def blocks(boxes: Tensor, count: int, block: int | None) -> tuple[list[slice], int]:
    """(pictures that are taken together, slots that are taken at once), so that of boxes [B, M, 4] and `count` places
    no more than `block` pairs are computed at once; default: as suits the device."""
    block = block or block_of(boxes)
    pictures = max(1, block // max(1, boxes.shape[1] * count))
    return [slice(first, first + pictures) for first in range(0, boxes.shape[0], pictures)], max(1, block // count)


def _match(
    boxes: Tensor, valid: Tensor, anchors: Tensor, foreground_iou: float, background_iou: float, rows: int
) -> Tensor:
    shape = (boxes.shape[0], anchors.shape[0])
    best_iou = boxes.new_full(shape, -1.0)
    best = torch.zeros(shape, dtype=torch.int64, device=boxes.device)
    is_best_of_a_box = torch.zeros(shape, dtype=torch.bool, device=boxes.device)
    for start in range(0, boxes.shape[1], rows):
        rows_valid = valid[:, start : start + rows, None]
        overlap = iou(boxes[:, start : start + rows], anchors).masked_fill(~rows_valid, -1.0)
        value, slot = overlap.max(dim=1)
        better = value > best_iou  # strictly, so that the lowest slot keeps an anchor that several boxes share
        best = torch.where(better, slot + start, best)
        best_iou = torch.where(better, value, best_iou)
        most = overlap.amax(dim=2, keepdim=True)
        is_best_of_a_box |= ((overlap == most) & (most > 0)).any(dim=1)
    by_threshold = torch.where(best_iou < foreground_iou, IGNORED, best)
    by_threshold = torch.where(best_iou < background_iou, BACKGROUND, by_threshold)
    return torch.where(is_best_of_a_box, best, by_threshold)
