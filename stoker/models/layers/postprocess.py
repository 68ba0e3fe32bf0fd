"""From dense predictions to detections: best candidates, NMS, a fixed number of detections.

Everything has fixed shapes except NMS itself; the host must know the length of its result. That host sync has the name
"nms".
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.ops import batched_nms

from stoker.hardware.host_sync import allow_host_sync
from stoker.models.layers.boxes import clip, decode
from stoker.models.layers.losses import at_least_fp32

PRE_NMS_TOP_N = 1000
"""Boxes of a pyramid level before NMS: torchvision's default (RetinaNet.topk_candidates)."""
MAX_DETECTIONS = 100
"""Boxes of an image after NMS: COCO's maxDets, and torchvision's default for Faster R-CNN."""


class BatchDetections(NamedTuple):
    """K detections of each of B images, best first."""

    boxes: Tensor
    """float32 [B, K, 4], xyxy in pixels of the original image; zeros where not valid."""
    scores: Tensor
    """float32 [B, K], 0 … 1, falling; zero where not valid."""
    labels: Tensor
    """int64 [B, K], 0 … C-1; zero where not valid."""
    valid: Tensor
    """bool [B, K]; the valid ones come first."""


class DetectorProtocol(Protocol):
    """What finding boxes asks of a model (`evaluate.detect_batches`): a detector of MODELS, or `onnx_model.OnnxModel`.

    Only `decode` reads the call's result, so its type is up to the model.
    """

    @property
    def iou_threshold(self) -> float:
        """Default NMS threshold."""

    def __call__(self, images: Tensor, /) -> Any:
        """images: uint8 [B, 3, H, W], as in `Batch`."""

    def decode(
        self,
        outputs: Any,
        resized_size: Tensor,
        scale: Tensor,
        original_size: Tensor,
        *,
        score_threshold: float,
        iou_threshold: float | None,
    ) -> BatchDetections:
        """Boxes in pixels of the original images; `resized_size`, `scale`, `original_size` as in `Batch`."""

    def modules(self) -> Iterator[nn.Module]: ...

    def eval(self) -> Any: ...


class Candidates(NamedTuple):
    """Boxes before NMS, of all pyramid levels."""

    boxes: Tensor
    """float32 [B, N, 4], in pixels of the model input, inside `resized_size`."""
    scores: Tensor
    """float32 [B, N]; zero if the score is not above the threshold, or the box has no area inside `resized_size`."""
    labels: Tensor
    """int64 [B, N]."""


def select_candidates(
    logits: Tensor,
    deltas: Tensor,
    anchors: Tensor,
    num_anchors_per_level: tuple[int, ...],
    resized_size: Tensor,
    *,
    score_threshold: float | Tensor,
    pre_nms_top_n: int = PRE_NMS_TOP_N,
) -> Candidates:
    """The `pre_nms_top_n` best scores of each pyramid level, decoded and clipped to `resized_size` [B, 2].

    logits: [B, A, C] sigmoid logits; deltas: [B, A, 4]; anchors: [A, 4]; num_anchors_per_level: sums to A. The logits
    are ranked, not the scores: the sigmoid keeps their order, and no fp32 copy of all of them is needed.
    """
    values, indices, labels = topk_per_level(logits, num_anchors_per_level, pre_nms_top_n)
    chosen_deltas = at_least_fp32(deltas.gather(1, indices[..., None].expand(-1, -1, 4)))
    boxes = decode(chosen_deltas, anchors.index_select(0, indices.flatten()).view(*indices.shape, 4))
    return clip_and_filter(
        resized_size, boxes, at_least_fp32(values).sigmoid(), labels, score_threshold=score_threshold
    )


def topk_per_level(
    values: Tensor, num_anchors_per_level: tuple[int, ...], pre_nms_top_n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The `pre_nms_top_n` largest `values` [B, A, C] of each pyramid level, best first: (values, anchor indices 0 …
    A-1, labels), each [B, N]; num_anchors_per_level: sums to A."""
    classes = values.shape[2]
    chosen, indices, start = [], [], 0
    for count in num_anchors_per_level:
        flat = values[:, start : start + count].flatten(1)
        value, index = flat.topk(min(pre_nms_top_n, flat.shape[1]), dim=1)
        chosen.append(value)
        indices.append(index + start * classes)
        start += count
    index = torch.cat(indices, dim=1)
    # Not torch.div(…, rounding_mode="floor"): its ONNX export goes through float32, which is wrong from 2^24 on.
    return torch.cat(chosen, dim=1), index // classes, index % classes


def clip_and_filter(
    resized_size: Tensor, boxes: Tensor, scores: Tensor, labels: Tensor, *, score_threshold: float | Tensor
) -> Candidates:
    """Boxes [B, N, 4] clipped to `resized_size` [B, 2]. The score [B, N] of a box becomes 0 if it is not above the
    threshold or nothing of the box is inside."""
    clipped = clip(boxes, resized_size)
    # A box in the padding is clipped to a line at the image's edge, which NMS would not remove.
    is_box = (clipped[..., 2:] > clipped[..., :2]).all(-1)
    return Candidates(clipped, torch.where((scores > score_threshold) & is_box, scores, 0.0), labels)


def nms_per_class(candidates: Candidates, *, iou_threshold: float, max_detections: int) -> BatchDetections:
    """NMS within each class of each image; the best `max_detections` of the remaining boxes, best first.

    Of two boxes of a class with an IoU above `iou_threshold`, the better one stays. Synchronizes, as "nms". The boxes
    stay in pixels of the model input.
    """
    with allow_host_sync("nms"):
        per_image = [_nms_image(*image, iou_threshold, max_detections) for image in zip(*candidates, strict=True)]
    boxes, scores, labels = (torch.stack(column) for column in zip(*per_image, strict=True))
    return BatchDetections(boxes, scores, labels, scores > 0)


def _nms_image(
    boxes: Tensor, scores: Tensor, labels: Tensor, iou_threshold: float, max_detections: int
) -> tuple[Tensor, Tensor, Tensor]:
    positive = scores > 0
    boxes, scores, labels = boxes[positive], scores[positive], labels[positive]
    keep = batched_nms(boxes, scores, labels, iou_threshold)[:max_detections]
    num_padding = max_detections - keep.shape[0]
    return (
        functional.pad(boxes[keep], (0, 0, 0, num_padding)),
        functional.pad(scores[keep], (0, num_padding)),
        functional.pad(labels[keep], (0, num_padding)),
    )


def topk_detections(candidates: Candidates, max_detections: int) -> BatchDetections:
    """The best `max_detections` candidates of each image, best first, without NMS. The boxes stay in pixels of the
    model input."""
    scores, indices = candidates.scores.topk(min(max_detections, candidates.scores.shape[1]), dim=1)
    boxes = candidates.boxes.gather(1, indices[..., None].expand(-1, -1, 4))
    valid = scores > 0
    labels = torch.where(valid, candidates.labels.gather(1, indices), 0)
    detections = BatchDetections(torch.where(valid[..., None], boxes, 0.0), scores, labels, valid)
    num_padding = max_detections - scores.shape[1]
    return BatchDetections(
        *(functional.pad(column, (0, 0) * (column.dim() - 2) + (0, num_padding)) for column in detections)
    )


def rescale_to_original(detections: BatchDetections, scale: Tensor, original_size: Tensor) -> BatchDetections:
    """The detections with boxes in pixels of the original images; `scale`, `original_size` [B, 2] as in `Batch`."""
    scale_xyxy = scale.flip(1).repeat(1, 2)[:, None, :]  # x, y, x, y
    return detections._replace(boxes=clip(detections.boxes / scale_xyxy, original_size))
