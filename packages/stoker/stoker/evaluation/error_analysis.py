"""Error analysis: error types of detections at IoU 0.5, the worst and best images, the content of evaluation.json.

Matching is COCO's (`coco.py`): per class, the best score first, each to the free ground truth box with the highest IoU
of at least 0.5; detections in a crowd region are ignored. Each class gets the score threshold with the best F1, and
false positives above it get the first error type that applies (TIDE, Bolya et al., ECCV 2020):

    duplicate     IoU ≥ 0.5 with a ground truth box of its class that a detection with a higher score has matched
    localization  0.1 ≤ IoU < 0.5 with a ground truth box of its class, and no larger IoU with another class
    class         IoU ≥ 0.5 with a ground truth box of another class
    both          0.1 ≤ IoU < 0.5 with a ground truth box of another class
    background    IoU < 0.1 with every ground truth box
    missed        a ground truth box without a true positive, and without a localization or class error

TIDE weights error types by the AP that they cost; here they are counted at the threshold that one would use.
`evaluate.py` computes the metrics; no torch here.
"""

import dataclasses
from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.data.index import Index
from stoker.evaluation.coco import CocoMatches, CocoResult, only_evaluated
from stoker.evaluation.detections import Detections, GroundTruth
from stoker_watch.runs.evaluation import (
    ERROR_TYPES,
    HISTOGRAM_BINS,
    ClassEvaluation,
    ConfusionMatrix,
    ConfusionPair,
    Curves,
    DetectionBox,
    Evaluation,
    GroundTruthBox,
    ImageEvaluation,
)

FOREGROUND_IOU = 0.5
"""TIDE's t_f."""

MAX_CURVES, MAX_CONFUSIONS, MAX_IMAGES, MAX_BOXES = 100, 50, 12, 100
"""Limits of evaluation.json: classes with curves of their own, confused pairs, images per list, ground truth boxes and
detections per image. About 600 kB if all limits are reached."""
MAX_MATRIX_CLASSES = 20
"""Classes of the confusion matrix, the most frequent ones."""
TRUE_POSITIVE, CROWD = "", "crowd"
"""`error_type` of detections that are not errors."""


class ClassThreshold(NamedTuple):
    """The threshold of a class and its statistics; the fields are those of `metrics.ClassEvaluation`."""

    threshold: float | None
    f1: float | None
    precision: float | None
    recall: float | None
    tp_scores: list[int]
    fp_scores: list[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorAnalysis:
    """The M detections above their class's threshold, classified."""

    detection_index: NDArray[np.int64]
    """[M], indices into the detections."""
    gt_index: NDArray[np.int64]
    """[M], as in `CocoMatches`."""
    error_type: list[str]
    """[M], TRUE_POSITIVE, CROWD or one of ERROR_TYPES."""
    related_gt: NDArray[np.int64]
    """[M], the ground truth box of an error; -1: none."""
    is_detected: NDArray[np.bool_]
    """[K], whether a ground truth box has a true positive."""
    is_missed: NDArray[np.bool_]
    """[K], whether it has neither a true positive nor a localization or class error."""


def _best_f1(
    is_tp: NDArray[np.bool_], score: NDArray[np.float32], num_boxes: int
) -> tuple[float, float, float, float] | None:
    """(threshold, F1, precision, recall) at the score with the best F1 of detections, best score first."""
    if not is_tp.any():
        return None
    hits = np.cumsum(is_tp)
    f1s = 2 * hits / (np.arange(1, len(hits) + 1) + num_boxes)
    f1s[:-1][score[1:] == score[:-1]] = -1.0  # a threshold cannot separate equal scores
    best = int(f1s.argmax())
    return float(score[best]), float(f1s[best]), float(hits[best] / (best + 1)), float(hits[best] / num_boxes)


def best_threshold(gt: GroundTruth, detections: Detections, matches: CocoMatches) -> float | None:
    """The score with the best F1 of all classes together; None without true positives."""
    counted = np.flatnonzero(matches.gt_index != -2)
    counted = counted[np.argsort(-detections.score[matches.order[counted]], kind="stable")]
    score = detections.score[matches.order[counted]]
    best = _best_f1(matches.gt_index[counted] >= 0, score, int((~gt.crowd).sum()))
    return None if best is None else best[0]


def compute_class_stats(gt: GroundTruth, detections: Detections, matches: CocoMatches) -> list[ClassThreshold]:
    """The threshold with the best F1 of each class, and its histograms of scores."""
    best_first = matches.by_class[matches.gt_index[matches.by_class] != -2]
    label, score = detections.label[matches.order[best_first]], detections.score[matches.order[best_first]]
    is_tp = matches.gt_index[best_first] >= 0
    ends = np.searchsorted(label, np.arange(len(gt.class_names)), "right").tolist()
    counts = np.bincount(gt.label[~gt.crowd], minlength=len(gt.class_names))
    stats, start = [], 0
    for class_index, end in enumerate(ends):
        tp, scores = is_tp[start:end], score[start:end]
        start = end
        histograms = [np.histogram(scores[mask], HISTOGRAM_BINS, (0, 1))[0].tolist() for mask in (tp, ~tp)]
        best = _best_f1(tp, scores, int(counts[class_index]))
        stats.append(ClassThreshold(*(best or (None, None, None, None)), *histograms))
    return stats


def classify_errors(
    gt: GroundTruth, detections: Detections, matches: CocoMatches, classes: list[ClassThreshold]
) -> ErrorAnalysis:
    """Classifies the detections above the thresholds. A class without a threshold has none."""
    thresholds = np.array([np.inf if stats.threshold is None else stats.threshold for stats in classes], np.float64)
    score, label = detections.score[matches.order], detections.label[matches.order]
    above = np.flatnonzero(score.astype(np.float64) >= thresholds[label])
    positions = above[np.argsort(-score[above], kind="stable")]
    matched_gt = matches.gt_index[positions]
    same_class_gt, same_class_iou = _nearest(gt, label, matches, positions, same=True)
    other_class_gt, other_class_iou = _nearest(gt, label, matches, positions, same=False)
    error_type = np.select(
        [
            matched_gt >= 0,
            matched_gt == -2,
            (same_class_gt < 0) & (other_class_gt < 0),
            same_class_iou >= FOREGROUND_IOU,
            (same_class_gt >= 0) & (same_class_iou >= other_class_iou),
            other_class_iou >= FOREGROUND_IOU,
        ],
        [TRUE_POSITIVE, CROWD, "background", "duplicate", "localization", "class"],
        "both",
    )
    is_fp = matched_gt == -1
    related_gt = np.where(np.isin(error_type, ["duplicate", "localization"]), same_class_gt, other_class_gt)
    related_gt[~is_fp] = -1
    is_detected = np.zeros(len(gt.image_index), np.bool_)
    is_detected[matched_gt[matched_gt >= 0]] = True
    is_explained = is_detected.copy()
    is_explained[related_gt[np.isin(error_type, ["localization", "class"])]] = True
    return ErrorAnalysis(
        detection_index=matches.order[positions],
        gt_index=matched_gt,
        error_type=error_type.tolist(),
        related_gt=related_gt,
        is_detected=is_detected,
        is_missed=~is_explained & ~gt.crowd,
    )


def _nearest(
    gt: GroundTruth, label: NDArray[np.int64], matches: CocoMatches, positions: NDArray[np.int64], *, same: bool
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(index, IoU) of the ground truth box of its class (or of another class) with the largest IoU, the last among
    equal ones, for each of `positions` [M]; -1 and 0 without overlap. Crowd regions are left out."""
    mask = ~gt.crowd[matches.pair_gt] & ((label[matches.pair_detection] == gt.label[matches.pair_gt]) == same)
    det_index, gt_index, pair_iou = matches.pair_detection[mask], matches.pair_gt[mask], matches.pair_iou[mask]
    last = np.lexsort((gt_index, pair_iou, det_index))  # of several values for one index, the last one is kept
    nearest, nearest_iou = np.full(len(label), -1, np.int64), np.zeros(len(label))
    nearest[det_index[last]], nearest_iou[det_index[last]] = gt_index[last], pair_iou[last]
    return nearest[positions], nearest_iou[positions]


def count_error_types(gt: GroundTruth, detections: Detections, analysis: ErrorAnalysis) -> list[dict[str, int]]:
    """Error type → count, of each class: that of a detection, or of a missed box."""
    labels = detections.label[analysis.detection_index].tolist()
    counts = Counter(zip(labels, analysis.error_type, strict=True))
    counts.update((label, "missed") for label in gt.label[analysis.is_missed].tolist())
    return [
        {kind: counts[label, kind] for kind in ERROR_TYPES if counts[label, kind]}
        for label in range(len(gt.class_names))
    ]


def confusion_matrix(gt: GroundTruth, detections: Detections, analysis: ErrorAnalysis) -> ConfusionMatrix:
    """A ground truth box without a true positive is that of its best class error, else background; all other false
    positives are background of the ground truth."""
    background = len(gt.class_names)
    labels, error_type = detections.label[analysis.detection_index], np.array(analysis.error_type, object)
    best_last = np.flatnonzero(error_type == "class")[::-1]
    taken_by = np.full(len(gt.label), -1)
    taken_by[analysis.related_gt[best_last]] = best_last
    is_tp = error_type == TRUE_POSITIVE
    taken_by[analysis.gt_index[is_tp]] = np.flatnonzero(is_tp)
    is_free = np.isin(error_type, ERROR_TYPES)
    is_free[taken_by[taken_by >= 0]] = False
    boxes = ~gt.crowd
    rows = np.append(gt.label[boxes], np.full(is_free.sum(), background))
    predicted = np.append(labels, background)[taken_by[boxes]]  # -1 is the last one
    columns = np.append(predicted, labels[is_free])
    num_boxes = np.bincount(gt.label[boxes], minlength=background)
    shown = np.argsort(-num_boxes, kind="stable")[:MAX_MATRIX_CLASSES]
    position = np.full(background + 1, len(shown))
    position[shown], position[background] = np.arange(len(shown)), len(shown) + 1
    counts = np.zeros((len(shown) + 2,) * 2, np.int64)
    np.add.at(counts, (position[rows], position[columns]), 1)
    return ConfusionMatrix(labels=shown.tolist(), counts=counts.tolist())


class ImageF1(NamedTuple):
    image_index: int
    f1: float
    tp: int
    fp: int
    fn: int


def worst_and_best(
    gt: GroundTruth, detections: Detections, analysis: ErrorAnalysis, image_indices: NDArray[np.int64], max_images: int
) -> tuple[list[ImageF1], list[ImageF1]]:
    """(lowest F1 first, then more errors; highest F1 first, then more true positives), at most `max_images` each.

    No image is in both. Images without errors are not among the worst, and those without a true positive not among the
    best; an image without ground truth boxes and detections is in neither."""
    order = np.argsort(image_indices)
    det_images, error_type = detections.image_index[analysis.detection_index], np.array(analysis.error_type, object)
    missed_images = gt.image_index[~analysis.is_detected & ~gt.crowd]
    tp, fp, fn = (
        np.bincount(order[np.searchsorted(image_indices, images, sorter=order)], minlength=len(image_indices))
        for images in (
            det_images[error_type == TRUE_POSITIVE],
            det_images[np.isin(error_type, ERROR_TYPES)],
            missed_images[np.isin(missed_images, image_indices)],
        )
    )
    num_errors = fp + fn
    f1 = np.divide(2 * tp, 2 * tp + num_errors, out=np.ones(len(image_indices)), where=tp + num_errors > 0)
    lowest = [n for n in np.lexsort((-num_errors, f1)).tolist() if num_errors[n]][:max_images]
    highest = [n for n in np.lexsort((-tp, -f1)).tolist() if tp[n]][:max_images]
    in_both = set(lowest) & set(highest)  # few images: their F1 decides
    lowest = [n for n in lowest if n not in in_both or f1[n] < 0.5]
    highest = [n for n in highest if n not in in_both or f1[n] >= 0.5]
    scores = [
        ImageF1(image_index, round(float(f1[n]), 4), int(tp[n]), int(fp[n]), int(fn[n]))
        for n, image_index in enumerate(image_indices.tolist())
    ]
    return [scores[n] for n in lowest], [scores[n] for n in highest]


def build_evaluation(
    result: CocoResult, gt: GroundTruth, detections: Detections, index: Index, *, step: int
) -> Evaluation:
    """The content of evaluation.json: metrics, curves, error types, and the worst and best images.

    result: `compute_coco_result` of the same ground truth and detections.
    """
    gt, detections = only_evaluated(gt, detections)
    matches = result.matches
    class_stats = compute_class_stats(gt, detections, matches)
    analysis = classify_errors(gt, detections, matches, class_stats)
    error_counts = count_error_types(gt, detections, analysis)
    num_gt = [stats.boxes for stats in result.metrics.per_class]
    with_curves = set(np.argsort([-count for count in num_gt], kind="stable")[:MAX_CURVES].tolist())
    error_types, labels = np.array(analysis.error_type, object), detections.label[analysis.detection_index]
    num_tp = np.bincount(labels[error_types == TRUE_POSITIVE], minlength=len(class_stats)).tolist()
    confused_positions = np.flatnonzero(error_types == "class")
    pairs, pair_counts = np.unique(
        np.stack([gt.label[analysis.related_gt[confused_positions]], labels[confused_positions]], axis=1),
        axis=0,
        return_counts=True,
    )
    worst, best = worst_and_best(gt, detections, analysis, gt.image_indices, MAX_IMAGES)
    return Evaluation(
        step=step,
        split="val",
        metrics=result.metrics,
        curves=_curves(result.precision),
        classes=[
            ClassEvaluation(
                name=metrics.name,
                boxes=metrics.boxes,
                ap=metrics.ap,
                ap50=metrics.ap50,
                tp=num_tp[label],
                error_types=error_counts[label],
                curves=_curves(result.precision[:, :, label : label + 1]) if label in with_curves else None,
                **stats._asdict(),
            )
            for label, (metrics, stats) in enumerate(zip(result.metrics.per_class, class_stats, strict=True))
        ],
        threshold=best_threshold(gt, detections, matches),
        confusions=[
            ConfusionPair(gt_label=int(pairs[n, 0]), pred_label=int(pairs[n, 1]), count=int(pair_counts[n]))
            for n in np.argsort(-pair_counts, kind="stable")[:MAX_CONFUSIONS].tolist()
        ],
        worst=[_image_evaluation(image_f1, gt, detections, analysis, index) for image_f1 in worst],
        best=[_image_evaluation(image_f1, gt, detections, analysis, index) for image_f1 in best],
        confusion_matrix=confusion_matrix(gt, detections, analysis),
    )


def _curves(precision: NDArray[np.float64]) -> Curves:
    """Means of precision [10, 101, C] over the classes with ground truth boxes."""
    defined = precision[:, :, precision[0, 0] > -1]
    if not defined.shape[2]:
        return Curves(iou50=[], iou75=[], mean=[])
    mean = defined.mean(axis=2).round(4)
    return Curves(iou50=mean[0].tolist(), iou75=mean[5].tolist(), mean=defined.mean(axis=(0, 2)).round(4).tolist())


def _image_evaluation(
    image_f1: ImageF1, gt: GroundTruth, detections: Detections, analysis: ErrorAnalysis, index: Index
) -> ImageEvaluation:
    gt_positions = np.flatnonzero(gt.image_index == image_f1.image_index).tolist()
    det_images = detections.image_index[analysis.detection_index]
    det_positions = np.flatnonzero(det_images == image_f1.image_index).tolist()
    height, width = index.original_size[image_f1.image_index].tolist()
    return ImageEvaluation(
        **image_f1._asdict(),
        path=index.display_source(image_f1.image_index),
        byte_range=index.byte_range(image_f1.image_index),
        size=(height, width) if height and width else None,
        gt_boxes=[
            GroundTruthBox(
                box=_rounded_xyxy(gt.boxes[n]),
                label=int(gt.label[n]),
                crowd=bool(gt.crowd[n]),
                detected=bool(analysis.is_detected[n]),
            )
            for n in gt_positions[:MAX_BOXES]
        ],
        detections=[
            DetectionBox(
                box=_rounded_xyxy(detections.boxes[det_index]),
                label=int(detections.label[det_index]),
                score=round(float(detections.score[det_index]), 4),
                error_type=analysis.error_type[n],
            )
            for n, det_index in ((n, analysis.detection_index[n]) for n in det_positions[:MAX_BOXES])
        ],
        truncated_boxes=max(0, len(gt_positions) - MAX_BOXES) + max(0, len(det_positions) - MAX_BOXES),
    )


def _rounded_xyxy(box: NDArray[np.float32]) -> tuple[float, float, float, float]:
    x0, y0, x1, y1 = (round(coordinate, 1) for coordinate in box.tolist())
    return x0, y0, x1, y1
