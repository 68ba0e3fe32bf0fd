"""Queries for contrastive denoising (DINO, Zhang et al. 2022, arXiv 2203.03605, section 3.3) in fixed shapes.

A decoder is also trained to restore boxes and labels to which noise was added. Of an image with n boxes, a group has n
queries near the boxes (less than half their size away at each side), which have to find them, and n farther away, which
have to find nothing. The budget of NUM_DENOISING pairs is filled with as many whole groups as fit, at least one; the
rest is padding. Noise is a pure function of `Batch.rand`, so a resumed run has the same.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from stoker.data.batch import RandSlot
from stoker.models.layers.boxes import cxcywh_to_xyxy, xyxy_to_cxcywh
from stoker.models.layers.matching import BACKGROUND, KEY_RANGE, random_keys
from stoker.models.layers.set_criterion import Truth, matched

NUM_DENOISING = 100
LABEL_NOISE, BOX_NOISE = 0.5, 1.0
"""DINO, table 8 (half of LABEL_NOISE get a random label); D-FINE the same."""


class DenoisingQueries(NamedTuple):
    """N = 2 · NUM_DENOISING queries of each image."""

    labels: Tensor
    """int64 [B, N], with noise."""
    boxes: Tensor
    """[B, N, 4], center and size, with noise, 0 … 1."""
    group: Tensor
    """int64 [B, N]: queries see those of their group only; -1 for padding."""
    box: Tensor
    """int64 [B, N], the box that a query has to find, or `BACKGROUND`."""
    weight: Tensor
    """[B, N]: 1 / number of the image's groups, so that all boxes of a batch have the same weight; 0 for padding."""


def make_denoising_queries(truth: Truth, rand: Tensor, num_classes: int) -> DenoisingQueries:
    """rand: `Batch.rand`. An image with more than NUM_DENOISING boxes gets queries for its first ones."""
    batch_size, device, total = truth.valid.shape[0], truth.valid.device, 2 * NUM_DENOISING
    noise = random_keys(rand[:, RandSlot.DENOISING], 10 * total, stream=0).view(batch_size, 10, total) / KEY_RANGE
    count = truth.valid.sum(1, keepdim=True).clamp(max=NUM_DENOISING)
    size = count.clamp(min=1)
    place = torch.arange(total, device=device).expand(batch_size, -1)
    group, within = place // (2 * size), place % (2 * size)
    is_used = (group < NUM_DENOISING // size) & (count > 0)
    is_negative = within >= size
    slots = truth.valid.to(torch.int8).argsort(dim=1, descending=True, stable=True)  # valid ones first
    box = slots.gather(1, within % size)
    index = torch.where(is_used, box, BACKGROUND)[None]
    labels = matched(truth.labels, index)[0]
    random_label = (noise[:, 1] * num_classes).long().clamp(max=num_classes - 1)
    labels = torch.where(noise[:, 0] < LABEL_NOISE / 2, random_label, labels)
    boxes = matched(truth.boxes, index)[0]
    distance = noise[:, 2:6].transpose(1, 2) + is_negative[..., None]
    sign = torch.where(noise[:, 6:].transpose(1, 2) < 0.5, -1.0, 1.0)
    half_size = (boxes[..., 2:] * (BOX_NOISE / 2)).repeat(1, 1, 2)
    noisy = (cxcywh_to_xyxy(boxes) + (distance * sign).to(boxes.dtype) * half_size).clamp(0, 1)
    return DenoisingQueries(
        labels,
        xyxy_to_cxcywh(noisy).abs(),  # sides of far ones may have crossed
        torch.where(is_used, group, -1),
        torch.where(is_negative, BACKGROUND, index[0]),
        torch.where(is_used, 1 / (NUM_DENOISING // size), 0.0).to(boxes.dtype),
    )


def denoising_mask(group: Tensor, num_queries: int) -> Tensor:
    """Which queries attend to which: bool [B, 1, N + Q, N + Q]. All attend to the Q queries of the image, denoising
    ones also to their group."""
    all_groups = torch.nn.functional.pad(group, (0, num_queries), value=-2)
    return ((all_groups[:, None, :] == -2) | (all_groups[:, :, None] == all_groups[:, None, :]))[:, None]
