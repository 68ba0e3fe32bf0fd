"""Assignment of ground truth boxes to anchors, and random samples of them, with fixed shapes and without host syncs.

The rule is torchvision's `Matcher` with low-quality matches (Faster R-CNN, section 3.1.2): an anchor is assigned to the
box with the largest IoU if that is at least `fg_iou_thresh`; below `bg_iou_thresh` it is background; between the two
it is ignored. In addition, every box gets the anchors with its largest IoU, however small. One difference: a box that
overlaps no anchor gets none, where torchvision assigns it every anchor with an IoU of 0.

Samples need no random generator: their sort keys are a hash of the image's random number in `Batch.rand` and of each
candidate's index. So they depend only on (seed, epoch, index), on every device and after every resume.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from stoker.hardware.block_size import block_size
from stoker.models.layers.boxes import batched_gather, iou

BACKGROUND = -1
IGNORED = -2


def match_anchors(
    boxes: Tensor,
    valid: Tensor,
    anchors: Tensor,
    *,
    fg_iou_thresh: float,
    bg_iou_thresh: float,
    single_best: bool = False,
    block: int | None = None,
) -> Tensor:
    """Index of each anchor's box, `BACKGROUND` or `IGNORED`: int64 [B, A].

    boxes: float [B, M, 4] xyxy; valid: bool [B, M]; anchors: float [A, 4]. Among boxes with equal IoU, an anchor gets
    the first. single_best: the rule of torchvision's `SSDMatcher`, a box gets only the first anchor with its largest
    IoU, and the last of several boxes with the same best anchor gets it. block: maximum number of IoUs computed at
    once (default: that of `hardware/block_size.py`); all of 32 images, 100 boxes and 120,087 anchors (800 × 800) would
    take 1.4 GiB.
    """

    def match(boxes: Tensor, valid: Tensor, boxes_per_block: int) -> Tensor:
        shape = (boxes.shape[0], anchors.shape[0])
        best_iou = boxes.new_full(shape, -1.0)
        best_gt = torch.zeros(shape, dtype=torch.int64, device=boxes.device)
        is_best_for_gt = torch.zeros(shape, dtype=torch.bool, device=boxes.device)
        forced_gt = torch.full(shape, BACKGROUND, dtype=torch.int64, device=boxes.device) if single_best else None
        for start in range(0, boxes.shape[1], boxes_per_block):
            part = slice(start, start + boxes_per_block)
            overlap = iou(boxes[:, part], anchors).masked_fill_(~valid[:, part, None], -1.0)
            best_overlap, gt_index = overlap.max(dim=1)
            better = best_overlap > best_iou  # strictly, so that the first of equal boxes keeps the anchor
            best_gt = torch.where(better, gt_index + start, best_gt)
            best_iou = torch.where(better, best_overlap, best_iou)
            if forced_gt is not None:
                max_overlap, best_anchor = overlap.max(dim=2)
                indices = torch.arange(start, start + overlap.shape[1], device=boxes.device)
                forced = torch.where(max_overlap > 0, indices, BACKGROUND)  # else no anchor is the best for this box
                forced_gt = forced_gt.scatter_reduce(1, best_anchor, forced, "amax")
            else:
                max_overlap = overlap.amax(dim=2, keepdim=True)
                max_overlap = max_overlap.masked_fill(max_overlap <= 0, torch.inf)
                is_best_for_gt |= (overlap == max_overlap).any(dim=1)
        by_threshold = torch.where(best_iou < fg_iou_thresh, IGNORED, best_gt)
        by_threshold = torch.where(best_iou < bg_iou_thresh, BACKGROUND, by_threshold)
        if forced_gt is not None:
            return torch.where(forced_gt >= 0, forced_gt, by_threshold)
        return torch.where(is_best_for_gt, best_gt, by_threshold)

    return map_blocks(match, boxes, valid, anchors.shape[0], block)


def map_blocks(
    fn: Callable[[Tensor, Tensor, int], Tensor], boxes: Tensor, valid: Tensor, num_anchors: int, block: int | None
) -> Tensor:
    """`fn(boxes [b, M, 4], valid [b, M], boxes_per_block)` of `plan_blocks`, concatenated: [B, …]. No gradients."""
    image_slices, boxes_per_block = plan_blocks(boxes, num_anchors, block)
    with torch.no_grad():
        return torch.cat([fn(boxes[image_slice], valid[image_slice], boxes_per_block) for image_slice in image_slices])


def plan_blocks(boxes: Tensor, num_anchors: int, block: int | None) -> tuple[list[slice], int]:
    """(slices of images, number of boxes per block), so that at most `block` pairs of boxes [B, M, 4] and `num_anchors`
    anchors are computed at once; default: `block_size.block_size`."""
    block = block or block_size(boxes)
    images_per_block = max(1, block // max(1, boxes.shape[1] * num_anchors))
    slices = [slice(first, first + images_per_block) for first in range(0, boxes.shape[0], images_per_block)]
    return slices, max(1, block // num_anchors)


KEY_RANGE = 2**32
"""Random keys are in [0, KEY_RANGE); the smallest are sampled."""


class SampledIndices(NamedTuple):
    """S samples of each image: positive ones first, then negative ones, then padding."""

    indices: Tensor
    """int64 [B, S], 0 … N-1; any candidate where not valid."""
    positive: Tensor
    """bool [B, S]."""
    valid: Tensor
    """bool [B, S]."""

    def gather(self, values: Tensor) -> Tensor:
        """The samples of `values` [B, N] or [B, N, D]: [B, S] or [B, S, D]."""
        return batched_gather(values, self.indices)


def random_keys(rand: Tensor, count: int, *, stream: int) -> Tensor:
    """int64 [B, count] in [0, KEY_RANGE), different within an image; rand: float32 [B] in [0, 1), of which 24 bits are
    used; stream: 0 … 255, for independent keys of one image."""
    seed = _hash((rand * 2**24).to(torch.int64) + (stream << 24))
    return _hash(seed[:, None] ^ torch.arange(count, device=rand.device))


def _hash(x: Tensor) -> Tensor:
    """A bijective hash of int64 in [0, 2^32) (T. Mueller's integer hash). No product exceeds 63 bits."""
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & (KEY_RANGE - 1)
    return x ^ (x >> 16)


def sample_balanced(
    keys: Tensor, positive: Tensor, negative: Tensor, *, num_samples: int, max_positives: int
) -> SampledIndices:
    """At most `max_positives` positive candidates, and negative ones up to `num_samples`, by ascending key.

    keys: int64 [B, N], different within an image; positive, negative: bool [B, N], never both. The rule of
    torchvision's BalancedPositiveNegativeSampler: with too few negatives there are fewer samples.
    """
    max_positive_key = (
        torch.where(positive, keys, KEY_RANGE).topk(min(max_positives, keys.shape[1]), largest=False).values[:, -1:]
    )
    sort_keys = torch.where(
        positive & (keys <= max_positive_key), keys, torch.where(negative, keys + KEY_RANGE, 2 * KEY_RANGE)
    )
    value, indices = sort_keys.topk(min(num_samples, keys.shape[1]), largest=False)
    return SampledIndices(indices, value < KEY_RANGE, value < 2 * KEY_RANGE)
