"""From dense predictions to detections: best candidates, NMS, a fixed number of detections.

Everything has fixed shapes except torchvision's NMS; the host must know the length of its result. That host sync has
the name "nms". On an accelerator, greedy NMS as the fixed point of a rule, in a fixed number of rounds, takes its
place, without a host sync and for whole batches (docs/decisions/0007); for the rare image for which that is not exact,
torchvision's NMS repeats it when the host reads the detections (`ExactnessCheck`). The proposals of Faster R-CNN use
NMS in rounds in training and in evaluation.
"""

import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.hardware.host_sync import allow_host_sync
from stoker.hardware.xla import XLA_KINDS
from stoker.models.layers.boxes import batched_gather, clip, cxcywh_to_xyxy, iou, xyxy_scale

NMS_ROUNDS = 32
"""Rounds of `fixed_point_nms`: one per link of the longest chain of boxes in which each decides about the next one, and
one to detect convergence: 10 for 2,000 boxes around 20 objects. Even: without convergence, too many boxes stay."""
MAX_PAIRS = 2**25
"""IoUs that are computed at once: 128 MiB in fp32; about four such tensors exist at the same time."""


def fixed_point_nms(
    boxes: Tensor, eligible: Tensor, *, iou_threshold: float, labels: Tensor | None = None, num_rounds: int = NMS_ROUNDS
) -> tuple[Tensor, Tensor]:
    """Greedy NMS of the `eligible` ones (bool [B, K]) of boxes [B, K, 4], best first, in fixed shapes: (kept: bool
    [B, K], converged: bool [B]). labels [B, K]: NMS within each label; None: all boxes have one label.

    The result of greedy NMS is the only fixed point of this rule: a box is kept if no better kept box has an IoU above
    `iou_threshold` with it. Starting with "all kept", each round is right for one more link of every chain of boxes.
    After an even number of rounds, the kept boxes include those of greedy NMS; after an odd number, they are included.
    """
    overlaps = iou(boxes, boxes) > iou_threshold
    if labels is not None:
        overlaps = overlaps & (labels[:, :, None] == labels[:, None, :])
    # Half the bytes of fp32 for each round to read. Sums of zeros and ones are never rounded to zero.
    dtype = boxes.dtype if boxes.device.type == "cpu" else torch.float16
    suppresses = overlaps.triu(1).to(dtype)  # [B, K, K]: row suppresses column
    previous = keep = eligible
    for _ in range(num_rounds):
        previous = keep
        keep = eligible & (torch.bmm(previous[:, None].to(dtype), suppresses)[:, 0] == 0)
    return keep, (keep == previous).all(1)


@cache
def torchvision_nms() -> Callable[[Tensor, Tensor, float], Tensor]:
    """torchvision's greedy NMS of boxes [K, 4] with scores [K] and an IoU threshold: indices int64, best first. Loads
    its operators without importing torchvision, which imports torch's compiler: 3 s."""
    spec = importlib.util.find_spec("torchvision")
    libraries = list(Path(spec.origin).parent.glob("_C*.so")) if spec and spec.origin else []
    if len(libraries) == 1:
        torch.ops.load_library(libraries[0])
    else:
        importlib.import_module("torchvision")
    return torch.ops.torchvision.nms


def largest_float32(value: float) -> float:
    """The largest float32 that is not above `value`: an fp32 number is above both or above none. torch would compare
    with the nearest one, which may be above `value`; torchvision's NMS on a CPU compares in double precision."""
    nearest = np.float32(value)
    return float(nearest if float(nearest) <= value else np.nextafter(nearest, np.float32(-np.inf)))


PRE_NMS_TOP_N = 1000
"""Boxes of a pyramid level before NMS: torchvision's default (RetinaNet.topk_candidates)."""
MAX_DETECTIONS = 100
"""Boxes of an image after NMS: COCO's maxDets, and torchvision's default for Faster R-CNN."""
MAX_BOXES_IN_ONE_NMS = 1000
"""torchvision's: of more boxes, NMS of each label takes less time than NMS of all of them moved apart."""
MAX_NMS_BOXES = 1024
"""Best boxes of an image, of all levels, that NMS in rounds compares; IoUs grow with their square. If more of them are
above the score threshold and fewer than MAX_DETECTIONS are left, the image is repeated by torchvision's NMS."""


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
    check: "ExactnessCheck | None" = None
    """None if the detections are exact for certain."""


class ExactnessCheck(NamedTuple):
    """Tells, once the host reads it, for which images NMS in rounds was not exact, and repeats NMS for them."""

    is_exact: Tensor
    """bool [B]"""
    repeat: Callable[[list[int]], BatchDetections]
    """The detections of these images by torchvision's NMS. Synchronizes, as "nms"."""


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
        max_detections: int = MAX_DETECTIONS,
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


def best_of_queries(
    logits: Tensor, boxes: Tensor, image_size: tuple[int, int], resized_size: Tensor, score_threshold: float | Tensor
) -> Candidates:
    """The best pairs of a query and a class, MAX_DETECTIONS or as many as there are queries. logits: [B, Q, C]; boxes:
    [B, Q, 4], center and size as fractions of images of `image_size` (height, width)."""
    num_queries, num_classes = logits.shape[1:]
    with torch.autocast(logits.device.type, enabled=False):
        count = min(max(MAX_DETECTIONS, num_queries), num_queries * num_classes)
        best, place = logits.flatten(1).topk(count, dim=1)
        pixels = cxcywh_to_xyxy(batched_gather(boxes, place // num_classes)) * xyxy_scale(image_size, boxes)
        return clip_and_filter(
            resized_size, pixels, best.sigmoid(), place % num_classes, score_threshold=score_threshold
        )


def nms_per_class(candidates: Candidates, *, iou_threshold: float, max_detections: int) -> BatchDetections:
    """NMS within each class of each image; the best `max_detections` of the remaining boxes, best first.

    Of two boxes of a class with an IoU above `iou_threshold`, the better one stays. On a CPU by torchvision, which
    synchronizes, as "nms", and so on the host for XLA; on other accelerators in rounds, and the result has a `check`.
    The boxes stay in pixels of the model input.
    """
    device = candidates.scores.device
    if device.type in XLA_KINDS:
        with allow_host_sync("nms"):
            on_host = Candidates(*(column.cpu() for column in candidates))
            found = greedy_nms(on_host, iou_threshold=iou_threshold, max_detections=max_detections)
            boxes, scores, labels, valid = (column.to(device) for column in found[:4])
            return BatchDetections(boxes, scores, labels, valid)
    by_device = greedy_nms if device.type == "cpu" else nms_in_rounds
    return by_device(candidates, iou_threshold=iou_threshold, max_detections=max_detections)


def nms_in_rounds(candidates: Candidates, *, iou_threshold: float, max_detections: int) -> BatchDetections:
    """`greedy_nms` of the best MAX_NMS_BOXES of each image, for whole batches and without a host sync."""
    best = _best_first(candidates, MAX_NMS_BOXES)
    num_boxes, eligible = best.scores.shape[1], best.scores > 0
    images_per_group = max(1, MAX_PAIRS // num_boxes**2)
    columns = (column.split(images_per_group) for column in (best.boxes, eligible, best.labels))
    threshold = largest_float32(iou_threshold)
    rounds = [
        fixed_point_nms(boxes, some, iou_threshold=threshold, labels=labels)
        for boxes, some, labels in zip(*columns, strict=True)
    ]
    keep, converged = (torch.cat(parts) for parts in zip(*rounds, strict=True))
    kept_best = _best_first(best._replace(scores=torch.where(keep, best.scores, 0.0)), max_detections)
    had_all = (candidates.scores > 0).sum(1) <= num_boxes
    is_exact = converged & (had_all | (keep.sum(1) >= max_detections))

    def repeat(images: list[int]) -> BatchDetections:
        with allow_host_sync("nms"):
            some = Candidates(*(column[images] for column in candidates))
        return greedy_nms(some, iou_threshold=iou_threshold, max_detections=max_detections)

    return _as_detections(kept_best, max_detections)._replace(check=ExactnessCheck(is_exact, repeat))


def greedy_nms(candidates: Candidates, *, iou_threshold: float, max_detections: int) -> BatchDetections:
    """`nms_per_class` by torchvision, image by image. Synchronizes, as "nms"."""
    found = []
    with allow_host_sync("nms"):
        for columns in zip(*candidates, strict=True):
            positive = columns[1] > 0
            image = Candidates(*(column[positive] for column in columns))
            keep = _greedy_keep(*image, iou_threshold)[:max_detections]
            kept = Candidates(*(column[keep][None] for column in image))
            found.append(_as_detections(kept, max_detections)[:4])
    boxes, scores, labels, valid = (torch.cat(column) for column in zip(*found, strict=True))
    return BatchDetections(boxes, scores, labels, valid)


def _greedy_keep(boxes: Tensor, scores: Tensor, labels: Tensor, iou_threshold: float) -> Tensor:
    """Indices of the boxes [K, 4] that NMS within each label keeps, best first; as torchvision's `batched_nms`."""
    nms = torchvision_nms()
    if 0 < len(boxes) <= MAX_BOXES_IN_ONE_NMS:  # one call; boxes of different labels are moved apart
        offsets = labels.to(boxes.dtype) * (boxes.max() + 1)
        return nms(boxes + offsets[:, None], scores, iou_threshold)
    order = labels.argsort(stable=True)
    sizes = torch.bincount(labels).tolist()
    kept = [some[nms(boxes[some], scores[some], iou_threshold)] for some in torch.split(order, sizes)]
    keep = torch.cat([order[:0], *kept]).sort().values
    return keep[scores[keep].argsort(descending=True, stable=True)]


def topk_detections(candidates: Candidates, max_detections: int) -> BatchDetections:
    """The best `max_detections` candidates of each image, best first, without NMS, in pixels of the model input."""
    indices = candidates.scores.topk(min(max_detections, candidates.scores.shape[1]), dim=1).indices
    return _as_detections(_select(candidates, indices), max_detections)


def _best_first(candidates: Candidates, count: int) -> Candidates:
    """The `count` candidates of each image with the highest scores, as in a stable sort."""
    place = torch.arange(candidates.scores.shape[1], device=candidates.scores.device)
    # The bits of positive floats are in the order of the floats. Unlike `sort`, `topk` takes no launches per image.
    rank = (candidates.scores.view(torch.int32).to(torch.int64) << 32) - place
    return _select(candidates, rank.topk(min(count, candidates.scores.shape[1]), dim=1).indices)


def _select(candidates: Candidates, indices: Tensor) -> Candidates:
    """The candidates at `indices`, int64 [B, K]."""
    return Candidates(*(batched_gather(column, indices) for column in candidates))


def _as_detections(best: Candidates, max_detections: int) -> BatchDetections:
    """At most `max_detections` candidates, best first, padded to so many; those with a score of 0 are not valid."""
    valid = best.scores > 0
    labels = torch.where(valid, best.labels, 0)
    num_padding = max_detections - valid.shape[1]
    boxes = torch.where(valid[..., None], best.boxes, 0.0)
    return BatchDetections(
        functional.pad(boxes, (0, 0, 0, num_padding)),
        functional.pad(best.scores, (0, num_padding)),
        functional.pad(labels, (0, num_padding)),
        functional.pad(valid, (0, num_padding)),
    )


def rescale_to_original(detections: BatchDetections, scale: Tensor, original_size: Tensor) -> BatchDetections:
    """The detections with boxes in pixels of the original images; `scale`, `original_size` [B, 2] as in `Batch`."""
    scale_xyxy = scale.flip(1).repeat(1, 2)[:, None, :]  # x, y, x, y
    boxes = clip(detections.boxes / scale_xyxy, original_size)
    if (check := detections.check) is None:
        return detections._replace(boxes=boxes)

    def repeat(images: list[int]) -> BatchDetections:
        with allow_host_sync("nms"):
            sizes = scale[images], original_size[images]
        return rescale_to_original(check.repeat(images), *sizes)

    return detections._replace(boxes=boxes, check=check._replace(repeat=repeat))
