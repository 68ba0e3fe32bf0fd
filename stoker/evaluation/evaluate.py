"""COCO metrics: runs a model over pictures with known boxes and scores what it finds.

`detect` runs the model, `score` compares (`coco.py`), `evaluate` does both; `appraise` adds where a model is wrong
(`error_analysis.py`) for evaluation.json. Detections leave the device by a side stream and are read one batch later,
so the host never waits for the batch it has just issued. The waits have names: "detections", and "nms" inside the
model's `decode`. Several ranks each detect in their share of the pictures (`Loader`'s rank and ranks); the
shares together, in any order, score as one. Pictures without known boxes are `predict.py`'s.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stoker.data.batch import Batch
from stoker.data.images.decode import thumbnail
from stoker.data.index import Index
from stoker.data.loading.loader import Loader, Quarantine, box_slots
from stoker.data.validation.problems import MAX_BAD
from stoker.errors import DataError
from stoker.evaluation import coco
from stoker.evaluation.coco import Scored
from stoker.evaluation.document import (
    ClassEvaluation,
    Confusion,
    Curves,
    Evaluation,
    FoundBox,
    PictureEvaluation,
    TrueBox,
)  # fmt: skip
from stoker.evaluation.error_analysis import (
    RIGHT,
    Judged,
    PictureScore,
    by_class,
    count_mistakes,
    judge,
    worst_and_best,
)
from stoker.evaluation.metrics import Detections, GroundTruth, Metrics
from stoker.hardware.device import Device, Ready
from stoker.hardware.host_sync import allow_host_wait
from stoker.inference.draw import Shown
from stoker.models.layers.postprocess import Finder

SCORE_THRESHOLD = 0.05
"""Boxes below are not decoded: torchvision's default (RetinaNet.score_thresh) and its published COCO numbers'."""
CURVES_KEPT, CONFUSIONS_KEPT, PICTURES_KEPT, BOXES_KEPT = 100, 50, 12, 100
"""Most of each that evaluation.json holds: classes with curves of their own, confused pairs, pictures a list, true and
found boxes a picture. Some 600 kB where everything is at its limit."""


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


def evaluation_loader(
    index: Index,
    rows: NDArray[np.int64],
    device: Device,
    *,
    batch: int,
    canvas: tuple[int, int],
    resize: str,
    threads: int,
    begin: int = 0,
    max_bad: float = MAX_BAD,
    rank: int = 0,
    ranks: int = 1,
    on_quarantine: Callable[[Quarantine], None] | None = None,
) -> Loader:
    """One pass over some rows of an index, or over a rank's share of them; close it. See `Loader`."""
    return Loader(
        index,
        rows,
        device=device,
        batch=batch,
        canvas=canvas,
        resize=resize,
        boxes=box_slots(index, rows),
        seed=0,  # nothing is drawn
        threads=threads,
        begin=begin,
        train=False,
        max_bad=max_bad,
        rank=rank,
        ranks=ranks,
        on_quarantine=on_quarantine,
    )


def evaluate(
    model: Finder,
    batches: Iterable[Batch],
    index: Index,
    rows: NDArray[np.int64],
    device: Device,
    *,
    precision: str,
    score_threshold: float = SCORE_THRESHOLD,
    iou_threshold: float | None = None,
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
    model: Finder,
    batches: Iterable[Batch],
    device: Device,
    *,
    precision: str,
    score_threshold: float = SCORE_THRESHOLD,
    iou_threshold: float | None = None,
) -> Detections:
    """What the model finds in all the pictures of `batches`; see `detect_batches`."""
    found = detect_batches(
        model, batches, device, precision=precision, score_threshold=score_threshold, iou_threshold=iou_threshold
    )
    return Detections.concatenate(list(found))


def detect_batches(
    model: Finder,
    batches: Iterable[Batch],
    device: Device,
    *,
    precision: str,
    score_threshold: float,
    iou_threshold: float | None,
) -> Iterator[Detections]:
    """What the model finds, batch by batch and one batch late; boxes in original pixels, rows of image_id -1 left out.

    Leaves every module of the model in the mode (training or not) in which it was.
    """
    stream = device.make_stream()
    pending: tuple[list[Tensor], Ready] | None = None
    with in_eval_mode(model):
        for batch in batches:
            # no_grad, not inference_mode: what a model caches here (anchors) must serve the training step after it
            with torch.no_grad(), device.autocast(precision):
                found = model.decode(
                    model(batch.images),
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
def in_eval_mode(model: nn.Module | Finder) -> Iterator[None]:
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
    return score_with_matches(truth, found).metrics


def score_with_matches(truth: GroundTruth, found: Detections) -> Scored:
    """As `score`, with the precision-recall curves, and which detection is right about what."""
    require_boxes(truth)
    seen, counted = _seen(truth, found)
    scored = coco.score(seen, counted)
    missing = len(truth.pictures) - len(seen.pictures)
    return dataclasses.replace(scored, metrics=msgspec.structs.replace(scored.metrics, missing=missing))


def appraise(scored: Scored, truth: GroundTruth, found: Detections, index: Index, *, step: int) -> Evaluation:
    """What evaluation.json says: scores, curves, kinds of mistakes, and the worst and best pictures of the truth's.

    scored: `score_with_matches` of the same truth and detections.
    """
    truth, found = _seen(truth, found)
    matches = scored.matches
    classes = by_class(truth, found, matches)
    judged = judge(truth, found, matches, classes)
    mistakes = count_mistakes(truth, found, judged)
    boxes = [of.boxes for of in scored.metrics.per_class]
    drawn = set(np.argsort([-count for count in boxes], kind="stable")[:CURVES_KEPT].tolist())
    kinds, labels = np.array(judged.kind, object), found.label[judged.places]
    right = np.bincount(labels[kinds == RIGHT], minlength=len(classes)).tolist()
    confused = np.flatnonzero(kinds == "class")
    pairs, times = np.unique(
        np.stack([truth.label[judged.about[confused]], labels[confused]], axis=1), axis=0, return_counts=True
    )
    worst, best = worst_and_best(truth, found, judged, truth.pictures, PICTURES_KEPT)
    return Evaluation(
        step=step,
        split="val",
        metrics=scored.metrics,
        curves=_curves(scored.precision),
        classes=[
            ClassEvaluation(
                name=metrics.name,
                boxes=metrics.boxes,
                ap=metrics.ap,
                ap50=metrics.ap50,
                right=right[label],
                mistakes=mistakes[label],
                curves=_curves(scored.precision[:, :, label : label + 1]) if label in drawn else None,
                **vars(of),
            )
            for label, (metrics, of) in enumerate(zip(scored.metrics.per_class, classes, strict=True))
        ],
        confusions=[
            Confusion(true=int(pairs[n, 0]), found=int(pairs[n, 1]), count=int(times[n]))
            for n in np.argsort(-times, kind="stable")[:CONFUSIONS_KEPT].tolist()
        ],
        worst=[_picture(one, truth, found, judged, index) for one in worst],
        best=[_picture(one, truth, found, judged, index) for one in best],
    )


def _seen(truth: GroundTruth, found: Detections) -> tuple[GroundTruth, Detections]:
    """Both without the pictures that the model did not see, or of which the truth is not known."""
    pictures = truth.pictures[np.isin(truth.pictures, found.pictures)]
    mask = np.isin(truth.row, pictures)
    columns = {name: getattr(truth, name)[mask] for name in ("row", "boxes", "label", "crowd", "area")}
    true = GroundTruth(pictures=pictures, class_names=truth.class_names, **columns)
    return true, dataclasses.replace(found.where(np.isin(found.row, pictures)), pictures=pictures)


def _curves(precision: NDArray[np.float64]) -> Curves:
    """Means over the classes [10, 101, C] that have true boxes."""
    defined = precision[:, :, precision[0, 0] > -1]
    if not defined.shape[2]:
        return Curves(iou50=[], iou75=[], mean=[])
    mean = defined.mean(axis=2).round(4)
    return Curves(iou50=mean[0].tolist(), iou75=mean[5].tolist(), mean=defined.mean(axis=(0, 2)).round(4).tolist())


def _picture(
    one: PictureScore, truth: GroundTruth, found: Detections, judged: Judged, index: Index
) -> PictureEvaluation:
    true = np.flatnonzero(truth.row == one.row)
    mine = np.flatnonzero(found.row[judged.places] == one.row)
    height, width = index.size[one.row].tolist()
    return PictureEvaluation(
        row=one.row,
        path=index.place(one.row),
        span=index.span(one.row),
        size=(height, width) if height and width else None,
        f1=round(one.f1, 4),
        right=one.right,
        wrong=one.wrong,
        not_found=one.not_found,
        true_boxes=[
            TrueBox(box=_corners(truth.boxes[n]), label=int(truth.label[n]), crowd=bool(truth.crowd[n]),
                    found=bool(judged.is_found[n]))
            for n in true[:BOXES_KEPT].tolist()
        ],
        found_boxes=[
            FoundBox(box=_corners(found.boxes[place]), label=int(found.label[place]),
                     score=round(float(found.score[place]), 4), mistake=judged.kind[n])
            for n, place in zip(mine[:BOXES_KEPT].tolist(), judged.places[mine[:BOXES_KEPT]].tolist(), strict=True)
        ],
        left_out=max(0, len(true) - BOXES_KEPT) + max(0, len(mine) - BOXES_KEPT),
    )  # fmt: skip


def _corners(box: NDArray[np.float32]) -> tuple[float, float, float, float]:
    x0, y0, x1, y1 = (round(side, 1) for side in box.tolist())
    return x0, y0, x1, y1


def some_pictures(
    index: Index, rows: NDArray[np.int64], found: Detections, *, count: int = 4, score_threshold: float = 0.3
) -> list[Shown]:
    """A few of the evaluated pictures with true and found boxes, to look at: the same ones at every evaluation."""
    chosen = rows[np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(np.int64))]
    truth = ground_truth(index, chosen)
    ones = np.ones(len(truth.row), np.float32)
    true = Detections(row=truth.row, boxes=truth.boxes, score=ones, label=truth.label, pictures=chosen)
    shown = found.where(found.score >= score_threshold)
    return [
        Shown(
            path=index.path(row),
            picture=functools.partial(_thumbnail, index, row),
            truth=true.of(row),
            found=shown.of(row),
        )
        for row in chosen.tolist()
    ]


def _thumbnail(index: Index, row: int, side: int) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    said = (int(index.size[row, 0]), int(index.size[row, 1]))
    return thumbnail(index.read(row), index.path(row), side, said=said)


def require_boxes(truth: GroundTruth) -> None:
    """Raises DataError when there is no box to score against."""
    if truth.crowd.all():
        boxes = f"{len(truth.row)} boxes, all of them crowd regions" if len(truth.row) else "no boxes"
        raise DataError(
            "There is nothing to score against: the pictures to evaluate have no boxes.",
            cause=f"{len(truth.pictures)} pictures, {boxes}",
            fix="evaluate another split, or annotate this one",
        )
