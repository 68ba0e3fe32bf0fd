"""The second stage of Faster R-CNN: sampling of RoIs, the box head, its losses.

With torchvision's weights, losses and class scores equal those of its RoIHeads, and so do the names in `state_dict`.
Class 0 is the background, the user's class c is c + 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.models.faster_rcnn.rpn import Proposals, smooth_l1_box_loss
from stoker.models.layers.boxes import decode, encode, iou
from stoker.models.layers.rank_mean import loss_divisor
from stoker.models.layers.roi_align import OUTPUT_SIZE
from stoker.models.layers.sampling import batched_gather, random_keys, sample_balanced

HIDDEN = 1024
"""Width of both hidden layers of the box head (FPN, arXiv 1612.03144, section 4.2)."""
FG_IOU_THRESH = 0.5
"""A RoI with a smaller IoU with all boxes is background (Fast R-CNN, arXiv 1504.08083, section 2.3)."""
SAMPLES_PER_IMAGE, MAX_POSITIVES_PER_IMAGE = 512, 128
"""RoIs of an image in the loss, and at most so many positive ones (torchvision, Detectron)."""
BOX_CODER_WEIGHTS = (10.0, 10.0, 5.0, 5.0)
"""Factors of the encoded offsets x, y, log w, log h: the inverse of their usual standard deviation (torchvision,
Detectron)."""


class SampledRois(NamedTuple):
    """S RoIs of each image."""

    boxes: Tensor
    """[B, S, 4], in pixels of the model input, finite also where not valid."""
    target: Tensor
    """int64 [B, S]: 0 for the background, label + 1; undefined where not valid."""
    offsets: Tensor
    """[B, S, 4], the encoded box; undefined where not positive."""
    positive: Tensor
    """bool [B, S]."""
    valid: Tensor
    """bool [B, S]."""


class BoxHead(nn.Module):
    """Two hidden layers, with torchvision's names: [N, C, OUTPUT_SIZE, OUTPUT_SIZE] → [N, HIDDEN]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc6 = nn.Linear(channels * OUTPUT_SIZE**2, HIDDEN)
        self.fc7 = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, features: Tensor) -> Tensor:
        return functional.relu(self.fc7(functional.relu(self.fc6(features.flatten(1)))))


class BoxPredictor(nn.Module):
    """Classes and, for each class, a box: [N, HIDDEN] → ([N, 1 + C], [N, (1 + C) · 4])."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.cls_score = nn.Linear(HIDDEN, 1 + num_classes)
        self.bbox_pred = nn.Linear(HIDDEN, (1 + num_classes) * 4)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.cls_score(hidden), self.bbox_pred(hidden)


class RoIHead(nn.Module):
    """Pooled features [B · S, C, OUTPUT_SIZE, OUTPUT_SIZE] → (logits [B · S, 1 + C], deltas [B · S, 1 + C, 4])."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.box_head = BoxHead(channels)
        self.box_predictor = BoxPredictor(num_classes)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        logits, deltas = self.box_predictor(self.box_head(features))
        return logits, deltas.unflatten(1, (-1, 4))


def sample_rois(proposals: Proposals, boxes: Tensor, labels: Tensor, valid: Tensor, rand: Tensor) -> SampledRois:
    """A sample of the proposals and the ground truth boxes.

    boxes: [B, M, 4]; labels: int64 [B, M]; valid: bool [B, M]; rand: float32 [B] in [0, 1), seed of the sample.
    """
    # Boxes without an area are dropped: the logarithm of their size is infinite.
    valid = valid & (boxes[..., 2:] > boxes[..., :2]).all(-1)
    rois = torch.cat((proposals.boxes, boxes), dim=1)
    is_available = torch.cat((proposals.valid, valid), dim=1)
    overlap, gt_index = iou(boxes, rois).masked_fill(~valid[..., None], -1.0).max(dim=1)
    positive = overlap >= FG_IOU_THRESH
    sampled = sample_balanced(
        random_keys(rand, rois.shape[1], stream=1),
        is_available & positive,
        is_available & ~positive,
        num_samples=SAMPLES_PER_IMAGE,
        max_positives=MAX_POSITIVES_PER_IMAGE,
    )
    sampled_gt_index = sampled.gather(gt_index)
    sampled_boxes = sampled.gather(rois)
    offsets = encode(batched_gather(boxes, sampled_gt_index), sampled_boxes) * _coder_weights_like(sampled_boxes)
    target = torch.where(sampled.positive, batched_gather(labels, sampled_gt_index) + 1, 0)
    return SampledRois(sampled_boxes, target, offsets, sampled.positive, sampled.valid)


def roi_loss(logits: Tensor, deltas: Tensor, rois: SampledRois) -> tuple[Tensor, Tensor]:
    """(class loss, box loss): scalars, both divided by the number of sampled RoIs of the batch.

    logits: at least fp32 [B · S, 1 + C]; deltas: [B · S, 1 + C, 4], of which only those of the RoI's class are used.
    """
    num_sampled = loss_divisor(rois.valid.sum())
    target = rois.target.flatten()
    class_losses = functional.cross_entropy(logits, target, reduction="none").view_as(rois.valid)
    class_deltas = deltas.gather(1, target[:, None, None].expand(-1, 1, 4)).view_as(rois.offsets)
    offset_sum = smooth_l1_box_loss(class_deltas, rois.offsets, rois.positive)
    return torch.where(rois.valid, class_losses, 0.0).sum() / num_sampled, offset_sum / num_sampled


def decode_class_boxes(deltas: Tensor, rois: Tensor) -> Tensor:
    """Boxes [..., 4] from deltas [..., 4] relative to RoIs [..., 4]."""
    return decode(deltas / _coder_weights_like(rois), rois)


def _coder_weights_like(boxes: Tensor) -> Tensor:
    """BOX_CODER_WEIGHTS [4], created on the device and with the dtype of `boxes`."""
    x, _, w, _ = BOX_CODER_WEIGHTS
    coordinate = torch.arange(4, device=boxes.device)
    return torch.where(coordinate < 2, x, w).to(boxes.dtype)
