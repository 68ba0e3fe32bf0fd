"""Losses of detectors that predict a set of boxes (DETR, Carion et al. 2020, arXiv 2005.12872).

Everything is per query, with fixed shapes: K stacks of predictions (of the layers of a decoder, or of groups of
queries) for B images with Q queries, and M slots for boxes. A query without a box has the target `BACKGROUND`; its
share of a loss is masked. All is at least fp32; the callers switch autocast off. Boxes are center and size as fractions
of the image, unless a name says otherwise.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from stoker.models.layers.boxes import cxcywh_to_xyxy, iou_and_giou, xyxy_scale, xyxy_to_cxcywh
from stoker.models.layers.hungarian import assign
from stoker.models.layers.matching import BACKGROUND

CLASS_COST, L1_COST, GIOU_COST = 2.0, 5.0, 2.0
"""Weights of the costs of a pair of a query and a box (DINO, arXiv 2203.03605; D-FINE too)."""
COST_ALPHA, COST_GAMMA = 0.25, 2.0
"""The class cost is a focal loss with these."""


class Truth(NamedTuple):
    boxes: Tensor
    """[B, M, 4]; any value where not valid."""
    labels: Tensor
    """int64 [B, M]."""
    valid: Tensor
    """bool [B, M]."""


def make_truth(boxes: Tensor, labels: Tensor, valid: Tensor, image_size: tuple[int, int], dtype: torch.dtype) -> Truth:
    """From boxes xyxy in pixels of images of `image_size` (height, width)."""
    return Truth(xyxy_to_cxcywh(boxes.to(dtype)) / xyxy_scale(image_size, boxes), labels, valid)


def match(logits: Tensor, boxes: Tensor, truth: Truth) -> Tensor:
    """The box of each query by bipartite matching, or `BACKGROUND`, of logits [K, B, Q, C] and boxes [K, B, Q, 4]:
    int64 [K, B, Q]. Without gradients."""
    shape = (*logits.shape[:3], truth.labels.shape[1])
    with torch.no_grad():
        probability = logits.gather(3, truth.labels[None, :, None].expand(shape)).sigmoid()
        if_absent = (1 - COST_ALPHA) * probability**COST_GAMMA * -(1 - probability + 1e-8).log()
        cost = COST_ALPHA * (1 - probability) ** COST_GAMMA * -(probability + 1e-8).log() - if_absent
        cost *= CLASS_COST
        for predicted, wanted in zip(boxes.unbind(-1), truth.boxes.unbind(-1), strict=True):  # not all four at once
            cost += L1_COST * (predicted[..., None] - wanted[None, :, None]).abs()
        first = cxcywh_to_xyxy(boxes)[..., None, :].expand(*shape, 4)
        second = cxcywh_to_xyxy(truth.boxes)[None, :, None].expand(*shape, 4)
        cost = cost - GIOU_COST * iou_and_giou(first, second)[1]
        query = assign(cost.flatten(0, 1), truth.valid.repeat(shape[0], 1)).unflatten(0, shape[:2])
        place = torch.where(query >= 0, query, shape[2])  # an extra query takes what has none, and is cut off
        slots = torch.arange(shape[3], device=query.device).expand_as(query)
        unassigned = torch.full((*shape[:2], shape[2] + 1), BACKGROUND, device=query.device)
        return unassigned.scatter(-1, place, slots)[..., :-1]


def union_of_matchings(index: Tensor, num_boxes: int) -> Tensor:
    """The box that most of K matchings [K, B, Q] give to a query, the first of equal ones: int64 [B, Q] (D-FINE, Peng
    et al. 2024, arXiv 2410.13842, appendix A.1: a box gets all queries that some layer matched with it)."""
    slot = torch.where(index >= 0, index, num_boxes).permute(1, 2, 0)
    votes = torch.zeros((*slot.shape[:2], num_boxes + 1), dtype=torch.int64, device=index.device)
    votes = votes.scatter_add(2, slot, torch.ones_like(slot))[..., :num_boxes]
    rank = votes * num_boxes + torch.arange(num_boxes - 1, -1, -1, device=index.device)
    best = rank.max(2)
    return torch.where(best.values >= num_boxes, best.indices, BACKGROUND)


def matched(values: Tensor, index: Tensor) -> Tensor:
    """What `index` [K, B, Q] says of `values` [B, M] or [B, M, D]: [K, B, Q] or [K, B, Q, D]; slot 0 for no box."""
    columns = values if values.dim() == 3 else values[..., None]
    place = index.clamp(min=0)[..., None].expand(*index.shape, columns.shape[2])
    found = columns.expand(index.shape[0], -1, -1, -1).gather(2, place)
    return found if values.dim() == 3 else found[..., 0]


class BoxTerms(NamedTuple):
    """Losses and overlap of each query, [K, B, Q]; 0 without a box."""

    l1: Tensor
    giou: Tensor
    """1 - generalized IoU."""
    iou: Tensor
    """Without gradient."""


def box_terms(boxes: Tensor, index: Tensor, truth: Truth, image_size: tuple[int, int]) -> BoxTerms:
    """boxes: [K, B, Q, 4], with sizes not below 0; index: [K, B, Q]. In pixels, epsilons of areas are negligible."""
    unassigned = index < 0
    # A query without a box gets its own, so that the masked terms and their gradients are finite.
    target = torch.where(unassigned[..., None], boxes.detach(), matched(truth.boxes, index))
    scale = xyxy_scale(image_size, boxes)
    overlap, generalized = iou_and_giou(cxcywh_to_xyxy(boxes) * scale, cxcywh_to_xyxy(target) * scale)
    l1, loss = (boxes - target).abs().sum(-1), 1 - generalized
    return BoxTerms(*(term.masked_fill(unassigned, 0.0) for term in (l1, loss, overlap.detach())))


def quality_class_terms(
    logits: Tensor, index: Tensor, truth: Truth, quality: Tensor, *, kind: str, alpha: float, gamma: float
) -> Tensor:
    """Class loss of each query, summed over the classes: [K, B, Q].

    logits: [K, B, Q, C]; quality: [K, B, Q], 0 … 1, IoU with the box. With p = sigmoid(logit), without a gradient:
    vfl: varifocal loss (VarifocalNet, arXiv 2008.13367, equation 2): target quality, weight quality; other classes
    alpha · p^gamma. mal: matchability-aware loss (DEIM, arXiv 2412.04234, equation 3): target quality^gamma, weight 1;
    other classes p^gamma.
    """
    at_label = logits.gather(3, matched(truth.labels, index)[..., None])[..., 0]
    target, weight, negative_weight = (quality, quality, alpha) if kind == "vfl" else (quality**gamma, 1.0, 1.0)
    as_positive = weight * (functional.softplus(at_label) - target * at_label)
    as_negative, others = (
        negative_weight * x.detach().sigmoid() ** gamma * functional.softplus(x) for x in (at_label, logits)
    )
    return others.sum(-1) + torch.where(index >= 0, as_positive - as_negative, 0.0)
