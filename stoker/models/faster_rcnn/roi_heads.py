"""The second stage of Faster R-CNN: regions to learn from, the network that judges them, what its errors cost.

With torchvision's weights, losses and class scores are those of its RoIHeads, and so are the names in `state_dict`.
Classes: 0 is the background, the user's class c is c + 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.models.faster_rcnn.rpn import Proposals, offset_loss
from stoker.models.layers.boxes import decode, encode, iou
from stoker.models.layers.roi_align import SIDE
from stoker.models.layers.sampling import lots, sample, take

HIDDEN = 1024
"""Width of both hidden layers of the box head (FPN, arXiv 1612.03144, section 4.2)."""
FOREGROUND_IOU = 0.5
"""A region that overlaps a box by less is background (Fast R-CNN, arXiv 1504.08083, section 2.3)."""
SAMPLED, SAMPLED_POSITIVE = 512, 128
"""Regions of a picture that the loss looks at, and how many of them may be positive (torchvision, Detectron)."""
OFFSET_SCALE = (10.0, 10.0, 5.0, 5.0)
"""Factors of the encoded offsets x, y, log w, log h: the inverse of their usual spread (torchvision, Detectron)."""


class Regions(NamedTuple):
    """S slots of each picture."""

    boxes: Tensor
    """[B, S, 4], in pixels of the canvas, finite also where not `taken`."""
    target: Tensor
    """int64 [B, S]: 0 for the background, label + 1, anything where not `taken`."""
    offsets: Tensor
    """[B, S, 4], the encoded box; anything where not `positive`."""
    positive: Tensor
    """bool [B, S]."""
    taken: Tensor
    """bool [B, S]."""


class BoxHead(nn.Module):
    """Two hidden layers, with torchvision's names: pooled features [N, C, SIDE, SIDE] → [N, HIDDEN]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc6 = nn.Linear(channels * SIDE**2, HIDDEN)
        self.fc7 = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, features: Tensor) -> Tensor:
        return functional.relu(self.fc7(functional.relu(self.fc6(features.flatten(1)))))


class BoxPredictor(nn.Module):
    """Classes and, for each class, a box: [N, HIDDEN] → ([N, 1 + C], [N, (1 + C) · 4])."""

    def __init__(self, class_count: int) -> None:
        super().__init__()
        self.cls_score = nn.Linear(HIDDEN, 1 + class_count)
        self.bbox_pred = nn.Linear(HIDDEN, (1 + class_count) * 4)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.cls_score(hidden), self.bbox_pred(hidden)


class RegionHead(nn.Module):
    """Judges regions: pooled features [B · S, C, SIDE, SIDE] → (logits [B · S, 1 + C], deltas [B · S, 1 + C, 4])."""

    def __init__(self, channels: int, class_count: int) -> None:
        super().__init__()
        self.box_head = BoxHead(channels)
        self.box_predictor = BoxPredictor(class_count)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        logits, deltas = self.box_predictor(self.box_head(features))
        return logits, deltas.unflatten(1, (-1, 4))


def sample_regions(proposals: Proposals, boxes: Tensor, labels: Tensor, valid: Tensor, draw: Tensor) -> Regions:
    """Proposals and the boxes themselves, of which a sample is taken.

    boxes: [B, M, 4]; labels: int64 [B, M]; valid: bool [B, M]; draw: float32 [B] in [0, 1), decides the sample.
    """
    # A box of no area would be a region without a logarithm of its size; it could teach nothing.
    valid = valid & (boxes[..., 2:] > boxes[..., :2]).all(-1)
    regions = torch.cat((proposals.boxes, boxes), dim=1)
    there = torch.cat((proposals.valid, valid), dim=1)
    overlap, slot = iou(boxes, regions).masked_fill(~valid[..., None], -1.0).max(dim=1)
    positive = overlap >= FOREGROUND_IOU
    chosen = sample(
        lots(draw, regions.shape[1], purpose=1),
        there & positive,
        there & ~positive,
        slots=SAMPLED,
        positives=SAMPLED_POSITIVE,
    )
    own = chosen.of(slot)
    picked = chosen.of(regions)
    offsets = encode(take(boxes, own), picked) * _scale_like(picked)
    target = torch.where(chosen.positive, take(labels, own) + 1, 0)
    return Regions(picked, target, offsets, chosen.positive, chosen.taken)


def region_loss(logits: Tensor, deltas: Tensor, regions: Regions) -> tuple[Tensor, Tensor]:
    """(classes, boxes): scalars, both divided by the number of sampled regions of the batch.

    logits: at least fp32 [B · S, 1 + C]; deltas: [B · S, 1 + C, 4], of which the box of the region's class counts.
    """
    count = regions.taken.sum().clamp(min=1)
    target = regions.target.flatten()
    classes = functional.cross_entropy(logits, target, reduction="none").view_as(regions.taken)
    own = deltas.gather(1, target[:, None, None].expand(-1, 1, 4)).view_as(regions.offsets)
    offsets = offset_loss(own, regions.offsets, regions.positive)
    return torch.where(regions.taken, classes, 0.0).sum() / count, offsets / count


def boxes_of_classes(deltas: Tensor, regions: Tensor) -> Tensor:
    """Boxes [..., 4] that deltas [..., 4] mean at regions [..., 4]."""
    return decode(deltas / _scale_like(regions), regions)


def _scale_like(boxes: Tensor) -> Tensor:
    """OFFSET_SCALE beside boxes: [4] on their device, made there."""
    x, _, w, _ = OFFSET_SCALE
    side = torch.arange(4, device=boxes.device)
    return torch.where(side < 2, x, w).to(boxes.dtype)
