"""Which points have to find which box, by what the detector predicts already: task-aligned assignment (TOOD, Feng et
al. 2021, arXiv 2108.07755, section 3.2), with fixed shapes and without a host wait.

A point is a candidate of a box that it lies inside of. How well it is aligned is score^ALPHA · IoU^BETA, of its score
for the box's class and the overlap of its own predicted box. The `most` best aligned candidates of a box are its
positives; a point that several boxes want goes to the one that it overlaps most. What a positive's score should become
is its alignment, scaled so that the best positive of a box has the largest IoU among them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from stoker.models.layers.boxes import iou
from stoker.models.layers.losses import at_least_fp32
from stoker.models.layers.matching import BACKGROUND, blocks

ALPHA, BETA = 1.0, 6.0
"""Of the score and of the IoU: TOOD, section 4.1."""


class Aligned(NamedTuple):
    """For B pictures at A points."""

    slot: Tensor
    """int64 [B, A], of the box that a point has to find, or `BACKGROUND`."""
    quality: Tensor
    """float32 [B, A], what its score for that box's class should be, 0 … 1; 0 where there is no box."""


def assign(
    logits: Tensor,
    predicted: Tensor,
    centre: Tensor,
    boxes: Tensor,
    labels: Tensor,
    valid: Tensor,
    *,
    reach: float,
    most: int,
    block: int | None = None,
) -> Aligned:
    """The box of each point. Without gradients.

    logits: [B, A, C], of the classes, of any type; predicted: float32 [B, A, 4] xyxy; centre: float32 [A, 2], the
    points; boxes: float32 [B, M, 4] xyxy; labels: int64 [B, M]; valid: bool [B, M]. reach: pixels from its centre
    that a box has candidates in at least, however small it is: with half the distance between points every box has
    one. Of two boxes that a point overlaps equally, the one in the lower slot has it. Pictures are taken together,
    and slots apart, so that no more than `block` alignments are computed at once; default: as suits the device.
    """
    parts, rows = blocks(boxes, centre.shape[0], block)
    most = min(most, centre.shape[0])
    with torch.no_grad():
        found = [
            _assign(logits[p], predicted[p], centre, boxes[p], labels[p], valid[p], reach, most, rows) for p in parts
        ]
        return Aligned(*(torch.cat(column) for column in zip(*found, strict=True)))


def _assign(
    logits: Tensor,
    predicted: Tensor,
    centre: Tensor,
    boxes: Tensor,
    labels: Tensor,
    valid: Tensor,
    reach: float,
    most: int,
    rows: int,
) -> Aligned:
    shape = predicted.shape[:2]
    slot = torch.full(shape, BACKGROUND, dtype=torch.int64, device=boxes.device)
    overlap, alignment = predicted.new_full(shape, -1.0), predicted.new_zeros(shape)
    by_class = logits.transpose(1, 2)
    for start in range(0, boxes.shape[1], rows):
        part = slice(start, start + rows)
        with_each = iou(boxes[:, part], predicted)
        score = at_least_fp32(by_class.gather(1, labels[:, part, None].expand(-1, -1, shape[1]))).sigmoid()
        aligned = torch.where(
            _is_near(boxes[:, part], centre, reach) & valid[:, part, None], score**ALPHA * with_each**BETA, -1.0
        )
        value, place = aligned.topk(most, dim=2)
        wanted = torch.zeros_like(aligned, dtype=torch.bool).scatter_(2, place, value >= 0)
        largest, index = torch.where(wanted, with_each, -1.0).max(dim=1)
        better = largest > overlap  # strictly, so that the lowest slot keeps a point that equal boxes share
        slot = torch.where(better, index + start, slot)
        overlap = torch.where(better, largest, overlap)
        alignment = torch.where(better, aligned.gather(1, index[:, None])[:, 0], alignment)
    positive, index = slot >= 0, slot.clamp(min=0)

    def of_its_box(values: Tensor) -> Tensor:
        """The largest of the values of all points that have the same box."""
        values = torch.where(positive, values, 0.0)
        return values.new_zeros(valid.shape).scatter_reduce(1, index, values, "amax").gather(1, index)

    scaled = alignment / of_its_box(alignment).clamp(min=torch.finfo(alignment.dtype).tiny) * of_its_box(overlap)
    return Aligned(slot, torch.where(positive, scaled, 0.0))


def _is_near(boxes: Tensor, centre: Tensor, reach: float) -> Tensor:
    """bool [B, M, A]: the points inside of each box, or within `reach` of its centre along x and y."""
    middle = (boxes[..., :2] + boxes[..., 2:]) / 2
    half = ((boxes[..., 2:] - boxes[..., :2]) / 2).clamp(min=reach)
    off = (centre - middle[..., None, :]).abs() <= half[..., None, :]
    return off[..., 0] & off[..., 1]
