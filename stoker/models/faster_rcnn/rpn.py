"""The first stage of Faster R-CNN (arXiv 1506.01497): a region proposal network, what it proposes, what its errors
cost.

Everything has fixed shapes and makes no host wait, suppression included: `survivors` finds what greedy suppression
finds as the fixed point of a rule, in a fixed number of rounds. With torchvision's weights, losses and proposals are
those of its RegionProposalNetwork, and so are the names in `state_dict`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.models.layers.anchors import Anchors
from stoker.models.layers.boxes import cell_anchors, clip, decode, encode, iou
from stoker.models.layers.matching import BACKGROUND, match
from stoker.models.layers.sampling import lots, sample, take

IOU_THRESHOLD = 0.7
"""Of two proposals of a level that overlap more, the better stays (section 3.3)."""
ROUNDS = 32
"""Rounds of `survivors`. One is needed for each link of the longest chain of boxes in which each is suppressed, or
saved, by the one before it, and one to see that nothing changes: 10 in all for 2,000 boxes around 20 objects. Even, so
that where they do not suffice too many boxes stay rather than too few."""
SMALLEST_PX = 1e-3
"""A proposal with a shorter side is none (torchvision)."""
SAMPLED, SAMPLED_POSITIVE = 256, 128
"""Anchors of a picture that the loss looks at, and how many of them may be positive (section 3.1.3)."""
BETA = 1 / 9
"""Where the smooth L1 loss of offsets turns from a square into a line (torchvision, Detectron)."""
BLOCK = 2**25
"""Overlaps that are computed at once: 128 MiB each in fp32, of which about four live together."""


class Predicted(NamedTuple):
    """What the network says of the A anchors of B pictures, in the type it computed in."""

    logits: Tensor
    """[B, A], of there being an object."""
    deltas: Tensor
    """[B, A, 4], boxes encoded relative to their anchors."""
    anchors: Tensor
    """float32 [A, 4], xyxy in pixels of the canvas."""
    levels: tuple[int, ...]
    """How many of the A anchors each pyramid level has, finest level first."""


class Proposals(NamedTuple):
    """Boxes that may hold an object, best first, in K slots of each picture."""

    boxes: Tensor
    """float32 [B, K, 4], in pixels of the canvas, inside `content`; zeros where not valid."""
    valid: Tensor
    """bool [B, K]."""
    unconverged: Tensor
    """bool [B]: suppression ran out of rounds, and some that overlap may have stayed."""


class ProposalHead(nn.Module):
    """A convolution over each level, then objectness and box of each anchor of a place; with torchvision's names.

    Levels, each [B, channels, h, w] → (logits [B, A], deltas [B, A, 4]).
    """

    def __init__(self, channels: int, anchors: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(inplace=True)))
        self.cls_logits = nn.Conv2d(channels, anchors, 1)
        self.bbox_pred = nn.Conv2d(channels, anchors * 4, 1)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                assert layer.bias is not None
                nn.init.normal_(layer.weight, std=0.01)
                nn.init.zeros_(layer.bias)

    def forward(self, levels: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        hidden = [self.conv(level) for level in levels]
        # In channels-last memory the permutation and the flattening are views.
        logits = [self.cls_logits(some).permute(0, 2, 3, 1).flatten(1) for some in hidden]
        deltas = [self.bbox_pred(some).permute(0, 2, 3, 1).flatten(1) for some in hidden]
        joined = torch.cat(deltas, dim=1)
        return torch.cat(logits, dim=1), joined.view(joined.shape[0], -1, 4)


class ProposalNetwork(nn.Module):
    """The network with its anchors: sizes one per level, finest first, as in `ModelSettings`."""

    def __init__(
        self, channels: int, *, sizes: Sequence[float], scales: Sequence[float], ratios: Sequence[float]
    ) -> None:
        super().__init__()
        self.head = ProposalHead(channels, len(scales) * len(ratios))
        self.anchors = Anchors(cell_anchors(size, scales, ratios) for size in sizes)

    def forward(self, levels: Sequence[Tensor], canvas: tuple[int, int]) -> Predicted:
        """levels: finest first, each [B, C, h, w]; canvas: height and width of the pictures."""
        grids = [(level.shape[2], level.shape[3]) for level in levels]
        logits, deltas = self.head(levels)
        return Predicted(logits, deltas, self.anchors(canvas, grids), self.anchors.counts(grids))


def propose(
    predicted: Predicted, content: Tensor, *, per_level: int, slots: int, score_threshold: float = 0.0
) -> Proposals:
    """The best `slots` proposals of each picture: of each level the `per_level` best anchors, decoded, clipped to
    `content` [B, 2], without small ones, without those that a better one of the level overlaps.

    predicted: at least fp32; score_threshold: the least probability of an object.
    """
    boxes, scores, unconverged, start = [], [], [], 0
    for count in predicted.levels:
        logits, index = predicted.logits[:, start : start + count].topk(min(per_level, count), dim=1)
        index = index + start
        anchors = predicted.anchors.index_select(0, index.flatten()).view(*index.shape, 4)
        some = clip(decode(take(predicted.deltas, index), anchors), content)
        eligible = ((some[..., 2:] - some[..., :2]) >= SMALLEST_PX).all(-1)  # nor is a NaN
        if score_threshold > 0:
            eligible = eligible & (logits.sigmoid() >= score_threshold)
        stay, settled = survivors(some, eligible, iou_threshold=IOU_THRESHOLD)
        boxes.append(some)
        scores.append(torch.where(stay, logits, -torch.inf))
        unconverged.append(~settled)
        start += count
    every = torch.cat(scores, dim=1)
    score, index = every.topk(min(slots, every.shape[1]), dim=1)
    valid = score > -torch.inf
    best = torch.where(valid[..., None], take(torch.cat(boxes, dim=1), index), 0.0)
    return Proposals(best, valid, torch.stack(unconverged).any(0))


def survivors(boxes: Tensor, eligible: Tensor, *, iou_threshold: float, rounds: int = ROUNDS) -> tuple[Tensor, Tensor]:
    """What greedy non-maximum suppression leaves of boxes [B, K, 4] that are best first: (bool [B, K]; bool [B],
    whether `rounds` sufficed). Only `eligible` ones, bool [B, K], take part.

    Greedy suppression is the one answer to: a box stays when no better box that stays overlaps it by more than
    `iou_threshold`. Asked again of its own answer, from "all stay", this is right for one more link of every chain of
    boxes each time. After an even number of rounds what stays contains the answer, after an odd one it is contained.
    """
    better = (iou(boxes, boxes) > iou_threshold).triu(1).to(boxes.dtype)  # [B, K, K]: row suppresses column
    before = stay = eligible
    for _ in range(rounds):
        before = stay
        stay = eligible & (torch.bmm(before[:, None].to(boxes.dtype), better)[:, 0] == 0)
    return stay, (stay == before).all(1)


def propose_for_training(
    predicted: Predicted, content: Tensor, *, per_level: int, slots: int, score_threshold: float
) -> Proposals:
    """`propose` over groups of pictures, so that the overlaps within them stay small."""
    pictures = max(1, BLOCK // per_level**2)
    groups = [
        propose(
            predicted._replace(logits=predicted.logits[some], deltas=predicted.deltas[some]),
            content[some],
            per_level=per_level,
            slots=slots,
            score_threshold=score_threshold,
        )
        for some in (slice(first, first + pictures) for first in range(0, content.shape[0], pictures))
    ]
    return Proposals(*(torch.cat(field) for field in zip(*groups, strict=True)))


def proposal_loss(
    predicted: Predicted,
    boxes: Tensor,
    valid: Tensor,
    draw: Tensor,
    *,
    foreground_iou: float,
    background_iou: float,
) -> tuple[Tensor, Tensor]:
    """(objectness, boxes): scalars, both divided by the number of sampled anchors of the batch.

    predicted: at least fp32; boxes: [B, M, 4]; valid: bool [B, M]; draw: float32 [B] in [0, 1), decides the sample.
    """
    slot = match(boxes, valid, predicted.anchors, foreground_iou=foreground_iou, background_iou=background_iou)
    chosen = sample(
        lots(draw, slot.shape[1], purpose=0),
        slot >= 0,
        slot == BACKGROUND,
        slots=SAMPLED,
        positives=SAMPLED_POSITIVE,
    )
    count = chosen.taken.sum().clamp(min=1)
    logits = chosen.of(predicted.logits)
    objectness = functional.binary_cross_entropy_with_logits(logits, chosen.positive.to(logits.dtype), reduction="none")
    anchors = predicted.anchors.index_select(0, chosen.place.flatten()).view(*chosen.place.shape, 4)
    target = encode(take(boxes, chosen.of(slot).clamp(min=0)), anchors)
    offsets = offset_loss(chosen.of(predicted.deltas), target, chosen.positive)
    return torch.where(chosen.taken, objectness, 0.0).sum() / count, offsets / count


def offset_loss(deltas: Tensor, target: Tensor, positive: Tensor) -> Tensor:
    """Sum of the smooth L1 loss of deltas [B, S, 4] over the positive slots, bool [B, S]; `target` is anything at the
    others, also infinite, so it is replaced before the arithmetic."""
    safe = torch.where(positive[..., None], target, 0.0)
    each = functional.smooth_l1_loss(deltas, safe, beta=BETA, reduction="none")
    return torch.where(positive[..., None], each, 0.0).sum()
