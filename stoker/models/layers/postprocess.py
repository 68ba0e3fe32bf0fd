"""From what a dense detector predicts to the boxes it stands by: best candidates, NMS, a fixed number of slots.

Everything has fixed shapes except the suppression itself, whose result's length the host must know; that wait has the
name "nms".
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.ops import batched_nms

from stoker.hardware.host_sync import allow_host_wait
from stoker.models.layers.boxes import clip, decode
from stoker.models.layers.losses import at_least_fp32

CANDIDATES = 1000
"""Boxes of a pyramid level that go into suppression: torchvision's default (RetinaNet.topk_candidates)."""
DETECTIONS = 100
"""Boxes of a picture that are left: what COCO scores, and torchvision's default (RetinaNet.detections_per_img)."""


class Detections(NamedTuple):
    """Detected boxes of B pictures in K slots each, best first."""

    boxes: Tensor
    """float32 [B, K, 4], xyxy in pixels of the original picture; zeros where not valid."""
    scores: Tensor
    """float32 [B, K], 0 … 1, falling; zero where not valid."""
    labels: Tensor
    """int64 [B, K], 0 … C-1; zero where not valid."""
    valid: Tensor
    """bool [B, K]; the valid slots come first."""


class Finder(Protocol):
    """What finding boxes asks of a model (`evaluate.detect_batches`): a detector of MODELS, or `onnx_model.OnnxModel`.

    The call's result goes to `decode` and nowhere else, so what it is each model decides.
    """

    @property
    def iou_threshold(self) -> float:
        """Two boxes of a class that overlap more are one object, where the caller does not say otherwise."""

    def __call__(self, images: Tensor, /) -> Any:
        """images: uint8 [B, 3, H, W], as in `Batch`."""

    def decode(
        self,
        raw: Any,
        content: Tensor,
        scale: Tensor,
        size: Tensor,
        *,
        score_threshold: float,
        iou_threshold: float | None,
    ) -> Detections:
        """Boxes in pixels of the original pictures; `content`, `scale` and `size` as in `Batch`."""

    def modules(self) -> Iterator[nn.Module]: ...

    def eval(self) -> Any: ...


class Candidates(NamedTuple):
    """Boxes before suppression, those of all pyramid levels one after the other."""

    boxes: Tensor
    """float32 [B, N, 4], in pixels of the canvas, inside `content`."""
    scores: Tensor
    """float32 [B, N]; zero where the score is not above the threshold, or the box has no area inside `content`."""
    labels: Tensor
    """int64 [B, N]."""


def candidates_of(
    logits: Tensor,
    deltas: Tensor,
    anchors: Tensor,
    levels: tuple[int, ...],
    content: Tensor,
    *,
    score_threshold: float | Tensor,
    per_level: int = CANDIDATES,
) -> Candidates:
    """The `per_level` best scores of each pyramid level, decoded and clipped to `content` [B, 2].

    logits: [B, A, C] sigmoid logits; deltas: [B, A, 4]; anchors: [A, 4]; levels: how many of the A anchors each level
    has. Logits are ranked as they are, since the sigmoid keeps their order: no fp32 copy of all of them is made.
    """
    values, place, labels = best_of_levels(logits, levels, per_level)
    chosen_deltas = at_least_fp32(deltas.gather(1, place[..., None].expand(-1, -1, 4)))
    boxes = decode(chosen_deltas, anchors.index_select(0, place.flatten()).view(*place.shape, 4))
    return candidates_in(content, boxes, at_least_fp32(values).sigmoid(), labels, score_threshold=score_threshold)


def best_of_levels(values: Tensor, levels: tuple[int, ...], per_level: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `per_level` largest `values` [B, A, C] of each pyramid level: (themselves, places 0 … A-1, labels), each
    [B, N], a level's best first; levels: how many of the A places each has."""
    classes = values.shape[2]
    chosen, indices, start = [], [], 0
    for count in levels:
        flat = values[:, start : start + count].flatten(1)
        value, index = flat.topk(min(per_level, flat.shape[1]), dim=1)
        chosen.append(value)
        indices.append(index + start * classes)
        start += count
    index = torch.cat(indices, dim=1)
    # Not torch.div(…, rounding_mode="floor"): as ONNX that goes through float32, which is wrong from 2^24 on.
    return torch.cat(chosen, dim=1), index // classes, index % classes


def candidates_in(
    content: Tensor, boxes: Tensor, scores: Tensor, labels: Tensor, *, score_threshold: float | Tensor
) -> Candidates:
    """Boxes [B, N, 4] clipped to `content` [B, 2], with the scores [B, N] of those that count, zero for the others."""
    inside = clip(boxes, content)
    # What was found in the padding alone is clipped to a line along the picture's edge, which no other box suppresses.
    is_box = (inside[..., 2:] > inside[..., :2]).all(-1)
    return Candidates(inside, torch.where((scores > score_threshold) & is_box, scores, 0.0), labels)


def suppress(candidates: Candidates, *, iou_threshold: float, slots: int) -> Detections:
    """Non-maximum suppression within each class of each picture; the best `slots` that are left, best first.

    Of two boxes of a class that overlap by more than `iou_threshold` the better stays. Waits for the host, by the name
    "nms". The boxes stay in pixels of the canvas.
    """
    with allow_host_wait("nms"):
        rows = [_suppress(*picture, iou_threshold, slots) for picture in zip(*candidates, strict=True)]
    boxes, scores, labels = (torch.stack(column) for column in zip(*rows, strict=True))
    return Detections(boxes, scores, labels, scores > 0)


def _suppress(
    boxes: Tensor, scores: Tensor, labels: Tensor, iou_threshold: float, slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    above = scores > 0
    boxes, scores, labels = boxes[above], scores[above], labels[above]
    keep = batched_nms(boxes, scores, labels, iou_threshold)[:slots]
    empty = slots - keep.shape[0]
    return (
        functional.pad(boxes[keep], (0, 0, 0, empty)),
        functional.pad(scores[keep], (0, empty)),
        functional.pad(labels[keep], (0, empty)),
    )


def best_of(candidates: Candidates, slots: int) -> Detections:
    """The best `slots` of the candidates of each picture, best first, whatever they overlap. The boxes stay in pixels
    of the canvas."""
    scores, place = candidates.scores.topk(min(slots, candidates.scores.shape[1]), dim=1)
    boxes = candidates.boxes.gather(1, place[..., None].expand(-1, -1, 4))
    valid = scores > 0
    labels = torch.where(valid, candidates.labels.gather(1, place), 0)
    found = Detections(torch.where(valid[..., None], boxes, 0.0), scores, labels, valid)
    empty = slots - scores.shape[1]
    return Detections(*(functional.pad(some, (0, 0) * (some.dim() - 2) + (0, empty)) for some in found))


def to_original(detections: Detections, scale: Tensor, size: Tensor) -> Detections:
    """The same with boxes in pixels of the original pictures: `scale` [B, 2] and `size` [B, 2] as in `Batch`."""
    per_side = scale.flip(1).repeat(1, 2)[:, None, :]  # x, y, x, y
    return detections._replace(boxes=clip(detections.boxes / per_side, size))
