"""Evaluation with COCO metrics: runs a model over annotated images and scores its detections.

`detect` runs the model, `compute_metrics` scores (`coco.py`); `error_analysis.py` makes evaluation.json of both.
Detections are copied by a side stream and read one batch later, so the host does not wait for the batch that it has
just issued. Named host syncs: "detections", and "nms": on a CPU in the model's `decode`, on an accelerator for images
whose NMS in rounds was not exact. With several ranks, each evaluates its part of the images; the concatenated
detections, in any order, give the same score. Images without annotations: `inference/predict.py`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stoker.data.batch import Batch
from stoker.data.images.decode import thumbnail
from stoker.data.index import Index
from stoker.data.loading.loader import Loader, LoaderSpec, QuarantinedImage, compute_max_boxes
from stoker.data.loading.processes import WorkerProcesses
from stoker.evaluation import coco
from stoker.evaluation.coco import CocoResult, only_evaluated
from stoker.evaluation.detections import Detections, GroundTruth, boxes_in_image
from stoker.evaluation.draw import ImageWithBoxes
from stoker.hardware.device import Device, ReadyEvent
from stoker.hardware.host_sync import allow_host_sync
from stoker.models.layers.postprocess import DetectorProtocol, ExactnessCheck
from stoker_watch.errors import DataError, make_error
from stoker_watch.runs.evaluation import Metrics

SCORE_THRESHOLD = 0.05
"""Minimum score of a detection: torchvision's default (RetinaNet.score_thresh), also of its published COCO metrics."""
SHOWN_SCORE = 0.3
"""Minimum score of a detection that `sample_images` shows."""


def ground_truth(index: Index, image_indices: NDArray[np.int64]) -> GroundTruth:
    """The ground truth boxes of some images of an index."""
    image_indices = np.asarray(image_indices, np.int64)
    starts, counts = index.offsets[image_indices], index.offsets[image_indices + 1] - index.offsets[image_indices]
    before = np.cumsum(counts) - counts
    box_index = np.repeat(starts - before, counts) + np.arange(counts.sum(), dtype=np.int64)
    return GroundTruth(
        image_indices=image_indices,
        image_index=np.repeat(image_indices, counts),
        boxes=index.boxes[box_index],
        label=index.labels[box_index].astype(np.int64),
        crowd=index.crowd[box_index],
        area=index.area[box_index],
        class_names=tuple(index.class_names),
    )


def evaluation_loader(
    index: Index,
    image_indices: NDArray[np.int64],
    device: Device,
    *,
    processes: WorkerProcesses | None = None,
    on_quarantine: Callable[[QuarantinedImage], None] | None = None,
    **options: Any,
) -> Loader:
    """One pass over some rows of an index, or over a rank's fraction of them; close it. options: fields of
    `LoaderSpec`; batch_size, image_size and resize must be given. An evaluation draws no random numbers."""
    max_boxes = compute_max_boxes(index, image_indices)
    spec = LoaderSpec(device=device, max_boxes=max_boxes, seed=0, train=False, **options)
    return Loader(index, image_indices, spec, processes=processes, on_quarantine=on_quarantine)


def detect(model: DetectorProtocol, batches: Iterable[Batch], device: Device, **options: Any) -> Detections:
    """The detections in all images of `batches`; options: those of `detect_batches`."""
    return Detections.concatenate(list(detect_batches(model, batches, device, **options)))


def detect_batches(
    model: DetectorProtocol,
    batches: Iterable[Batch],
    device: Device,
    *,
    precision: str,
    score_threshold: float = SCORE_THRESHOLD,
    iou_threshold: float | None = None,
    max_detections: int | None = None,
) -> Iterator[Detections]:
    """The detections of each batch, one batch late; boxes in pixels of the original images, without padding images
    (image_index -1). max_detections: of an image; None: the model's own maximum.

    Afterwards every module of the model is in its previous mode (training or evaluation).
    """
    stream = device.make_stream()
    pending: Callable[[], Detections] | None = None
    limit = {} if max_detections is None else {"max_detections": max_detections}
    with in_eval_mode(model):
        for batch in batches:
            # no_grad, not inference_mode: tensors cached here (anchors) are used in the next training step
            with torch.no_grad(), device.autocast(precision):
                detections = model.decode(
                    model(batch.images),
                    batch.resized_size,
                    batch.scale,
                    batch.original_size,
                    score_threshold=score_threshold,
                    iou_threshold=iou_threshold,
                    **limit,
                )
            copied = [detections.boxes, detections.scores, detections.labels, detections.valid, batch.image_index]
            if detections.check is not None:
                copied.append(detections.check.is_exact)
            issued = functools.partial(_read_detections, *stream.to_host(copied), detections.check)
            if pending is not None:
                yield pending()
            pending = issued
    if pending is not None:
        yield pending()


@contextlib.contextmanager
def in_eval_mode(model: nn.Module | DetectorProtocol) -> Iterator[None]:
    """The whole model in evaluation mode. Afterwards each module is in its own previous mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _read_detections(tensors: list[Tensor], ready: ReadyEvent, check: ExactnessCheck | None) -> Detections:
    """The detections of one batch, after its copies have arrived: the four columns of `BatchDetections`,
    `Batch.image_index`, and `is_exact` of the check if there is one."""
    with allow_host_sync("detections"):  # of the batch before the current one
        ready.synchronize()
        boxes, scores, labels, valid, image_index, *is_exact = (tensor.numpy() for tensor in tensors)
    if check is not None and not is_exact[0].all():
        images = np.flatnonzero(~is_exact[0]).tolist()
        repeated = check.repeat(images)
        with allow_host_sync("nms"):
            for column, values in zip((boxes, scores, labels, valid), repeated[:4], strict=True):
                column[images] = values.cpu().numpy()
    valid = valid & (image_index >= 0)[:, None]
    return Detections(
        image_index=np.broadcast_to(image_index[:, None], valid.shape)[valid].astype(np.int64),
        boxes=boxes[valid].astype(np.float32, copy=False),
        score=scores[valid].astype(np.float32, copy=False),
        label=labels[valid].astype(np.int64, copy=False),
        image_indices=image_index[image_index >= 0].astype(np.int64),
    )


def compute_metrics(gt: GroundTruth, detections: Detections) -> Metrics:
    """The twelve COCO metrics, and AP and AP50 of each class. Images that were not evaluated are left out.

    Raises DataError without ground truth boxes.
    """
    return compute_coco_result(gt, detections).metrics


def compute_coco_result(gt: GroundTruth, detections: Detections) -> CocoResult:
    """The metrics of `compute_metrics`, with the precision-recall curves and the matches."""
    require_boxes(gt)
    evaluated_gt, evaluated_detections = only_evaluated(gt, detections)
    result = coco.compute_metrics(evaluated_gt, evaluated_detections)
    num_missing = len(gt.image_indices) - len(evaluated_gt.image_indices)
    return dataclasses.replace(result, metrics=msgspec.structs.replace(result.metrics, missing=num_missing))


def sample_images(
    index: Index, image_indices: NDArray[np.int64], detections: Detections, *, count: int = 4
) -> list[ImageWithBoxes]:
    """Some of the evaluated images with ground truth and detections, for display; the same ones at every evaluation."""
    chosen_indices = image_indices[
        np.unique(np.linspace(0, len(image_indices) - 1, min(count, len(image_indices))).round().astype(np.int64))
    ]
    gt = ground_truth(index, chosen_indices)
    gt_detections = boxes_in_image(gt.boxes, gt.label)
    gt_detections = dataclasses.replace(gt_detections, image_index=gt.image_index, image_indices=chosen_indices)
    confident = detections.select(detections.score >= SHOWN_SCORE)
    return [
        ImageWithBoxes(
            path=index.path(image_index),
            load_image=functools.partial(read_thumbnail, index, image_index),
            gt=gt_detections.of_image(image_index),
            detections=confident.of_image(image_index),
        )
        for image_index in chosen_indices.tolist()
    ]


def read_thumbnail(index: Index, image_index: int, max_side: int) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    """(uint8 [h, w, 3] RGB, upright as the boxes; height and width of the original). Raises OSError, DataError,
    StorageError."""
    annotated_size = (int(index.original_size[image_index, 0]), int(index.original_size[image_index, 1]))
    return thumbnail(index.read(image_index), index.path(image_index), max_side, annotated_size=annotated_size)


def require_boxes(gt: GroundTruth) -> None:
    """Raises DataError without ground truth boxes that are not crowd regions."""
    if gt.crowd.all():
        boxes = f"{len(gt.image_index)} boxes, all of them crowd regions" if len(gt.image_index) else "no boxes"
        raise make_error(DataError, "nothing-to-evaluate", num_images=len(gt.image_indices), boxes=boxes)
