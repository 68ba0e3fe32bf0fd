"""COCO metrics: runs a model over pictures with known boxes and scores what it finds.

`detect` runs the model, `score` compares, `evaluate` does both. Detections leave the device by a side stream and are
read one batch later, so the host never waits for the batch it has just issued. The waits have names: "detections", and
"nms" inside the model's `decode`. Matching is faster-coco-eval's C++; pycocotools is the oracle in the tests (equal
within 1e-9). Pictures without known boxes are `predict.py`'s.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from faster_coco_eval import COCO, COCOeval_faster
from numpy.typing import NDArray
from torch import Tensor, nn

from stoker.batch import Batch
from stoker.data.index import Index
from stoker.device import Device, Ready
from stoker.draw import Shown
from stoker.errors import DataError
from stoker.metrics import TWELVE, ClassMetrics, Detections, Metrics
from stoker.models import Detector
from stoker.waits import allow_host_wait

SCORE_THRESHOLD = 0.05
"""Boxes below are not decoded: torchvision's default (RetinaNet.score_thresh) and its published COCO numbers'."""
IOU_THRESHOLD = 0.5
"""NMS: torchvision's default (RetinaNet.nms_thresh)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroundTruth:
    """K true boxes of P pictures, as columns."""

    pictures: NDArray[np.int64]
    """[P], rows of the index."""
    row: NDArray[np.int64]
    """[K], the picture of each box."""
    boxes: NDArray[np.float32]
    """[K, 4], xyxy in pixels of the original picture."""
    label: NDArray[np.int64]
    """[K], 0 … C-1."""
    crowd: NDArray[np.bool_]
    """[K], regions with many objects: a detection inside one counts neither for nor against."""
    area: NDArray[np.float64]
    """[K], decides small, medium and large; the source's own where it says one."""
    class_names: tuple[str, ...]


def ground_truth(index: Index, rows: NDArray[np.int64]) -> GroundTruth:
    """The true boxes of some rows of an index."""
    rows = np.asarray(rows, np.int64)
    starts, counts = index.offsets[rows], index.offsets[rows + 1] - index.offsets[rows]
    before = np.cumsum(counts) - counts
    box = np.repeat(starts - before, counts) + np.arange(counts.sum(), dtype=np.int64)
    return GroundTruth(
        pictures=rows,
        row=np.repeat(rows, counts),
        boxes=index.boxes[box],
        label=index.labels[box].astype(np.int64),
        crowd=index.crowd[box],
        area=index.area[box],
        class_names=tuple(index.class_names),
    )


def evaluate(
    model: Detector,
    batches: Iterable[Batch],
    index: Index,
    rows: NDArray[np.int64],
    device: Device,
    *,
    precision: str,
    score_threshold: float = SCORE_THRESHOLD,
    iou_threshold: float = IOU_THRESHOLD,
) -> Metrics:
    """Runs the model over `batches`, an evaluation loader of `rows` of the index, and scores what it finds.

    Raises DataError when the rows have no box to score against.
    """
    truth = ground_truth(index, rows)
    require_boxes(truth)  # before the device works for nothing
    found = detect(
        model, batches, device, precision=precision, score_threshold=score_threshold, iou_threshold=iou_threshold
    )
    return score(truth, found)


def detect(
    model: Detector,
    batches: Iterable[Batch],
    device: Device,
    *,
    precision: str,
    score_threshold: float = SCORE_THRESHOLD,
    iou_threshold: float = IOU_THRESHOLD,
) -> Detections:
    """What the model finds in all the pictures of `batches`; see `detect_batches`."""
    found = detect_batches(
        model, batches, device, precision=precision, score_threshold=score_threshold, iou_threshold=iou_threshold
    )
    return Detections.concatenate(list(found))


def detect_batches(
    model: Detector,
    batches: Iterable[Batch],
    device: Device,
    *,
    precision: str,
    score_threshold: float,
    iou_threshold: float,
) -> Iterator[Detections]:
    """What the model finds, batch by batch and one batch late; boxes in original pixels, rows of image_id -1 left out.

    Leaves every module of the model in the mode (training or not) in which it was.
    """
    stream = device.make_stream()
    pending: tuple[list[Tensor], Ready] | None = None
    with in_eval_mode(model):
        for batch in batches:
            # no_grad, not inference_mode: what a model caches here (anchors) must serve the training step after it
            with torch.no_grad():
                with device.autocast(precision):
                    raw = model(batch.images)
                found = model.decode(
                    raw,
                    batch.content,
                    batch.scale,
                    batch.size,
                    score_threshold=score_threshold,
                    iou_threshold=iou_threshold,
                )
            issued = stream.to_host((found.boxes, found.scores, found.labels, found.valid, batch.image_id))
            if pending is not None:
                yield _read(*pending)
            pending = issued
    if pending is not None:
        yield _read(*pending)


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """The whole model in evaluation mode; after it each module is as it was (frozen norms among trained ones)."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _read(tensors: list[Tensor], ready: Ready) -> Detections:
    """The columns of one batch, once its copies have arrived."""
    with allow_host_wait("detections"):  # of the batch before the one that the device works on
        ready.wait()
        boxes, scores, labels, valid, image_id = (tensor.numpy() for tensor in tensors)
    valid = valid & (image_id >= 0)[:, None]
    return Detections(
        row=np.broadcast_to(image_id[:, None], valid.shape)[valid].astype(np.int64),
        boxes=boxes[valid].astype(np.float32, copy=False),
        score=scores[valid].astype(np.float32, copy=False),
        label=labels[valid].astype(np.int64, copy=False),
        pictures=image_id[image_id >= 0].astype(np.int64),
    )


def score(truth: GroundTruth, found: Detections) -> Metrics:
    """The twelve COCO numbers, and AP and AP50 of each class. Pictures that the model did not see are left out.

    Raises DataError when there is no box to score against.
    """
    require_boxes(truth)
    pictures = truth.pictures[np.isin(truth.pictures, found.pictures)]
    true = np.isin(truth.row, pictures)
    seen = np.isin(found.row, pictures)
    true_anns = _annotations(truth.row[true], truth.boxes[true], truth.label[true], "area", truth.area[true])
    for annotation, crowd in zip(true_anns, truth.crowd[true].tolist(), strict=True):
        annotation["iscrowd"] = int(crowd)
    found_anns = _annotations(found.row[seen], found.boxes[seen], found.label[seen], "score", found.score[seen])
    for annotation in found_anns:
        annotation["area"] = annotation["bbox"][2] * annotation["bbox"][3]
    frame = {
        "images": [{"id": row} for row in pictures.tolist()],
        "categories": [{"id": label, "name": name} for label, name in enumerate(truth.class_names)],
    }
    run = COCOeval_faster(
        COCO(frame | {"annotations": true_anns}, print_function=_silent),
        COCO(frame | {"annotations": found_anns}, print_function=_silent),
        "bbox",
        print_function=_silent,
    )
    run.evaluate()
    run.accumulate()
    run.summarize()
    counted = np.bincount(truth.label[true & ~truth.crowd], minlength=len(truth.class_names))
    precision = np.asarray(run.eval["precision"])[:, :, :, 0, -1]  # [IoU, recall, class] of all areas, 100 detections
    per_class = [
        ClassMetrics(
            name=name, ap=_mean(precision[:, :, label]), ap50=_mean(precision[0, :, label]), boxes=int(counted[label])
        )
        for label, name in enumerate(truth.class_names)
    ]
    return Metrics(
        **{name: None if value < 0 else float(value) for name, value in zip(TWELVE, run.stats[:12], strict=True)},
        per_class=per_class,
        pictures=len(pictures),
        boxes=int(counted.sum()),
        detections=int(seen.sum()),
        missing=len(truth.pictures) - len(pictures),
    )


def some_pictures(
    index: Index, rows: NDArray[np.int64], found: Detections, *, count: int = 4, score_threshold: float = 0.3
) -> list[Shown]:
    """A few of the evaluated pictures with true and found boxes, to look at: the same ones at every evaluation."""
    chosen = rows[np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(np.int64))]
    truth = ground_truth(index, chosen)
    ones = np.ones(len(truth.row), np.float32)
    true = Detections(row=truth.row, boxes=truth.boxes, score=ones, label=truth.label, pictures=chosen)
    shown = found.where(found.score >= score_threshold)
    return [Shown(path=index.path(row), truth=true.of(row), found=shown.of(row)) for row in chosen.tolist()]


def require_boxes(truth: GroundTruth) -> None:
    """Raises DataError when there is no box to score against."""
    if truth.crowd.all():
        boxes = f"{len(truth.row)} boxes, all of them crowd regions" if len(truth.row) else "no boxes"
        raise DataError(
            "There is nothing to score against: the pictures to evaluate have no boxes.",
            cause=f"{len(truth.pictures)} pictures, {boxes}",
            fix="evaluate another split, or annotate this one",
        )


def _annotations(
    row: NDArray[Any], boxes: NDArray[Any], label: NDArray[Any], key: str, values: NDArray[Any]
) -> list[dict[str, Any]]:
    """Columns as the list of dicts that COCO tools read; ids from 1, since they take 0 for "no match"."""
    corners = boxes.astype(np.float64)
    xywh = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1).tolist()
    columns = zip(row.tolist(), xywh, label.tolist(), values.tolist(), strict=True)
    return [
        {"id": n, "image_id": image, "bbox": box, "category_id": category, key: value}
        for n, (image, box, category, value) in enumerate(columns, start=1)
    ]


def _mean(precision: NDArray[Any]) -> float | None:
    defined = precision[precision > -1]
    return float(defined.mean()) if defined.size else None


def _silent(*_: object, **__: object) -> None:
    """faster-coco-eval reports its progress through this."""
