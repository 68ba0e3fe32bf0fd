"""COCO metrics from columns: matches detections to ground truth boxes, then computes the curves and their means.

The rules are those of pycocotools' cocoeval.py, the oracle in the tests (equal within 1e-9): per image and class the
100 best detections, each matched to the free ground truth box with the largest IoU at ten thresholds, else to crowd
regions and boxes outside the area range, which are ignored. The computation is vectorized. The only loop has one step
for the n-th pair of boxes of all images and classes at once, at all thresholds (a bit each) and areas. So scoring a
data set of COCO's size takes about a second, mostly inside NumPy without the interpreter lock, which the training
thread needs (decision 9). `benchmarks/steps/evaluate.py` measures both.

`error_analysis.py` classifies the errors; no torch here.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.evaluation.detections import Detections, GroundTruth
from stoker_watch.runs.evaluation import COCO_SUMMARY, NUM_RECALL_POINTS, ClassMetrics, Metrics

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
AREA_RANGES = np.array([(0, 1e10), (0, 32**2), (32**2, 96**2), (96**2, 1e10)], np.float64)
"""All, small, medium, large: square pixels, both limits included."""
MAX_DETECTIONS = 100
"""Maximum number of detections of a class in an image."""
MIN_PAIR_IOU = 0.1
"""Pairs with a smaller IoU are dropped. TIDE's t_b (Bolya et al., ECCV 2020); COCO needs only those from 0.5 on."""
_PAIRS_PER_BLOCK = 250_000
"""Pairs of boxes whose IoU is computed at once: about 20 MB, so most of it stays in a core's cache."""
_ALL_THRESHOLDS = np.uint16(2 ** len(IOU_THRESHOLDS) - 1)

ThresholdBits = NDArray[np.uint16]
"""A bit for each of IOU_THRESHOLDS, the lowest for 0.5."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CocoMatches:
    """The N detections that count, sorted by image, class and descending score, and their matches."""

    order: NDArray[np.int64]
    """[N], indices into the detections."""
    by_class: NDArray[np.int64]
    """[N], positions in `order`, sorted by class and descending score, then by image."""
    gt_index: NDArray[np.int64]
    """[N], index of the ground truth box matched at IoU 0.5; -1: none, -2: a crowd region."""
    pair_detection: NDArray[np.int64]
    """[P], position in `order` of each pair of boxes of an image with an IoU of at least MIN_PAIR_IOU, ascending."""
    pair_gt: NDArray[np.int64]
    """[P], the ground truth box of each pair."""
    pair_iou: NDArray[np.float64]
    """[P], IoU; for a crowd region, the fraction of the detection inside it."""
    tp: ThresholdBits
    """[4, N], for each of AREA_RANGES the thresholds at which a detection is a true positive."""
    ignored: ThresholdBits
    """[4, N], those at which it is ignored."""
    rank: NDArray[np.int64]
    """[N], number of detections of its class and image with a higher score."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CocoResult:
    """The metrics, and the curves and matches behind them."""

    metrics: Metrics
    precision: NDArray[np.float64]
    """[10 IoU thresholds 0.50 … 0.95, 101 recalls, classes] for all areas and 100 detections; -1 where undefined."""
    matches: CocoMatches


def match_detections(gt: GroundTruth, detections: Detections) -> CocoMatches:
    """Matches detections to ground truth boxes by COCO's rules."""
    # stable: equal scores keep their order
    order = np.lexsort((-detections.score, detections.label, detections.image_index))
    image_index, label = detections.image_index[order], detections.label[order]
    starts = _starts(image_index, label)
    rank = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    in_top = rank < MAX_DETECTIONS
    order, image_index, label, rank = order[in_top], image_index[in_top], label[in_top], rank[in_top]

    pair_blocks = list(_iter_iou_pairs(gt, detections, order))
    pair_detection, pair_gt, pair_iou = (np.concatenate(column) for column in zip(*pair_blocks, strict=True))
    same_class = np.flatnonzero((pair_iou >= IOU_THRESHOLDS[0]) & (label[pair_detection] == gt.label[pair_gt]))
    det_index, gt_index, overlap = pair_detection[same_class], pair_gt[same_class], pair_iou[same_class]
    # for each detection the largest IoU first, among equal ones the last box, as in pycocotools
    best_first = np.lexsort((-gt_index, -overlap, det_index))
    det_index, gt_index, overlap = det_index[best_first], gt_index[best_first], overlap[best_first]

    gt_outside = (gt.area < AREA_RANGES[:, :1]) | (gt.area > AREA_RANGES[:, 1:])
    gt_ignore = gt.crowd | gt_outside  # [4, K], ground truth boxes that are ignored
    # a detection is matched to these only if no other box is left
    visit_order = np.argsort(2 * det_index + gt_ignore[:, gt_index], axis=1, kind="stable")
    hits = _greedy_match(det_index, gt_index[visit_order], overlap[visit_order], _starts(image_index, label), gt.crowd)
    hit_ignore = np.take_along_axis(gt_ignore[:, gt_index], visit_order, axis=1)
    tp, ignored = (
        np.stack([_sum_bits(det_index, bits, len(order)) for bits in np.where(hit_ignore == is_ignored, hits, 0)])
        for is_ignored in (False, True)
    )
    boxes = detections.boxes[order].astype(np.float64)
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    det_outside = (area < AREA_RANGES[:, :1]) | (area > AREA_RANGES[:, 1:])
    ignored |= np.where(det_outside, ~tp & _ALL_THRESHOLDS, np.uint16(0))

    matched_gt = np.full(len(order), -1, np.int64)
    at_half = np.flatnonzero(hits[0] & 1)
    chosen_gt = gt_index[visit_order[0, at_half]]
    matched_gt[det_index[at_half]] = np.where(gt.crowd[chosen_gt], -2, chosen_gt)
    return CocoMatches(
        order=order,
        by_class=np.lexsort((-detections.score[order], label)),
        gt_index=matched_gt,
        pair_detection=pair_detection,
        pair_gt=pair_gt,
        pair_iou=pair_iou,
        tp=tp,
        ignored=ignored,
        rank=rank,
    )


def _starts(*columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions in sorted columns [N] at which a new combination starts."""
    new = np.ones(len(columns[0]), np.bool_)
    new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return np.flatnonzero(new)


def _sum_bits(index: NDArray[np.int64], bits: NDArray[Any], count: int) -> ThresholdBits:
    """[count], the bits of each index combined; a bit occurs at most once per index."""
    return np.bincount(index, weights=bits, minlength=count).astype(np.uint16)


def _greedy_match(
    det_index: NDArray[np.int64],
    gt_index: NDArray[np.int64],
    pair_iou: NDArray[np.float64],
    groups: NDArray[np.int64],
    crowd: NDArray[np.bool_],
) -> ThresholdBits:
    """[4, P], the thresholds at which a pair of boxes is a match, if pairs are matched greedily in their order.

    det_index: [P], ascending; gt_index, pair_iou: [4, P], the candidates of each detection in order of preference;
    groups: the detections at which a new image or class starts, as no box is in two groups; crowd: [K].
    """
    reached = ((1 << np.searchsorted(np.minimum(IOU_THRESHOLDS, 1 - 1e-10), pair_iou, "right")) - 1).astype(np.uint16)
    group = np.searchsorted(groups, det_index, "right")
    starts = _starts(group)
    nth = np.arange(len(det_index)) - np.repeat(starts, np.diff(np.append(starts, len(det_index))))
    steps = np.argsort(nth, kind="stable")  # the first pair of every group, then the second ones …
    ends = np.cumsum(np.bincount(nth)).tolist()
    det_index, gt_index, reached = det_index[steps], gt_index[:, steps], reached[:, steps]
    exclusive = np.where(crowd[gt_index], np.uint16(0), _ALL_THRESHOLDS)  # a crowd region stays free
    det_matched = np.zeros((4, int(det_index.max(initial=-1)) + 1), np.uint16)
    gt_matched = np.zeros((4, len(crowd)), np.uint16)
    hits = np.empty_like(reached)
    area = np.arange(4)[:, None]
    start = 0
    for end in ends:
        step, dets, gts = slice(start, end), det_index[start:end], gt_index[:, start:end]
        hit = reached[:, step] & ~det_matched[:, dets] & ~gt_matched[area, gts]
        det_matched[:, dets] |= hit
        gt_matched[area, gts] |= hit & exclusive[:, step]
        hits[:, step] = hit
        start = end
    result = np.empty_like(hits)
    result[:, steps] = hits
    return result


def _iter_iou_pairs(
    gt: GroundTruth, detections: Detections, order: NDArray[np.int64]
) -> Iterator[tuple[NDArray[Any], ...]]:
    """(position in `order`, ground truth box, IoU) of all pairs of an image with at least MIN_PAIR_IOU, in blocks."""
    gt_order = np.argsort(gt.image_index, kind="stable")
    gt_image_index = gt.image_index[gt_order]
    gt_xyxy = gt.boxes[gt_order].T.astype(np.float64)
    gt_area = (gt_xyxy[2] - gt_xyxy[0]) * (gt_xyxy[3] - gt_xyxy[1])
    gt_crowd = gt.crowd[gt_order]
    det_xyxy = detections.boxes[order].T.astype(np.float64)
    det_area = (det_xyxy[2] - det_xyxy[0]) * (det_xyxy[3] - det_xyxy[1])
    first = np.searchsorted(gt_image_index, detections.image_index[order], "left")
    count = np.searchsorted(gt_image_index, detections.image_index[order], "right") - first
    ends = np.cumsum(count)
    start = 0
    yield np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float64)
    while start < len(order):
        before = int(ends[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + _PAIRS_PER_BLOCK, "right")))
        counts = count[start:end]
        det_index = np.repeat(np.arange(start, end), counts)
        gt_index = np.arange(len(det_index)) + np.repeat(first[start:end] - (ends[start:end] - counts - before), counts)
        size = np.minimum(det_xyxy[2:, det_index], gt_xyxy[2:, gt_index])
        size -= np.maximum(det_xyxy[:2, det_index], gt_xyxy[:2, gt_index])
        intersects = (size > 0).all(axis=0)
        det_index, gt_index = det_index[intersects], gt_index[intersects]
        intersection = size[:, intersects].prod(axis=0)
        pair_iou = intersection / np.where(
            gt_crowd[gt_index], det_area[det_index], det_area[det_index] + gt_area[gt_index] - intersection
        )
        keep = pair_iou >= MIN_PAIR_IOU
        yield det_index[keep], gt_order[gt_index[keep]], pair_iou[keep]
        start = end


def compute_metrics(gt: GroundTruth, detections: Detections) -> CocoResult:
    """The twelve COCO metrics, AP and AP50 of each class, and the precision-recall curves.

    All images of the detections are in the ground truth, which has at least one box that is not a crowd region.
    """
    matches = match_detections(gt, detections)
    num_classes = len(gt.class_names)
    label = detections.label[matches.order[matches.by_class]]
    rank = matches.rank[matches.by_class]
    precision = np.empty((len(AREA_RANGES), len(IOU_THRESHOLDS), NUM_RECALL_POINTS, num_classes))
    recall = np.empty((3, len(AREA_RANGES), len(IOU_THRESHOLDS), num_classes))
    for n, (low, high) in enumerate(AREA_RANGES.tolist()):
        in_area = ~gt.crowd & (gt.area >= low) & (gt.area <= high)
        num_gt = np.bincount(gt.label[in_area], minlength=num_classes)
        required_hits = _required_hits(num_gt)
        tp, counts = matches.tp[n, matches.by_class], ~matches.ignored[n, matches.by_class]
        for t in range(len(IOU_THRESHOLDS)):
            hits = np.flatnonzero(tp & np.uint16(1 << t))
            num_counted = np.cumsum(counts >> np.uint16(t) & np.uint16(1), dtype=np.int64)
            precision[n, t] = _interpolated_precision(label, hits, num_counted, required_hits).T
            for k, max_dets in enumerate((1, 10, MAX_DETECTIONS)):
                num_hits = np.bincount(label[hits][rank[hits] < max_dets], minlength=num_classes)
                recall[k, n, t] = num_hits / np.maximum(num_gt, 1)
        precision[n, :, :, num_gt == 0] = -1.0
        recall[:, n, :, num_gt == 0] = -1.0
    num_gt_total = np.bincount(gt.label[~gt.crowd], minlength=num_classes)
    precision_all = precision[0]
    by_iou = precision_all, precision_all[0], precision_all[5]
    summary = (*by_iou, *precision[1:], recall[0, 0], recall[1, 0], *recall[2])
    means: dict[str, Any] = {name: _mean(part) for name, part in zip(COCO_SUMMARY, summary, strict=True)}
    metrics = Metrics(
        **means,
        per_class=[
            ClassMetrics(
                name=name,
                ap=_mean(precision_all[:, :, k]),
                ap50=_mean(precision_all[0, :, k]),
                boxes=int(num_gt_total[k]),
            )
            for k, name in enumerate(gt.class_names)
        ],
        num_images=len(gt.image_indices),
        boxes=int(num_gt_total.sum()),
        detections=len(detections),
    )
    return CocoResult(metrics=metrics, precision=precision_all, matches=matches)


def _required_hits(num_gt: NDArray[np.int64]) -> NDArray[np.int64]:
    """[classes, 101], number of true positives needed for each recall, at least 1."""
    recalls, total = np.linspace(0, 1, NUM_RECALL_POINTS), np.maximum(num_gt, 1)[:, None]
    required = np.ceil(recalls * total).astype(np.int64)
    required -= (required - 1) / total >= recalls  # the product is rounded; COCO compares the quotient
    required += required / total < recalls
    return np.maximum(required, 1)


def _interpolated_precision(
    label: NDArray[np.int64], hits: NDArray[np.int64], num_counted: NDArray[np.int64], required_hits: NDArray[np.int64]
) -> NDArray[np.float64]:
    """[classes, 101], interpolated precision: the maximum at this or a higher recall; 0 if the recall is not reached.

    label: [N], sorted by class and descending score; hits: positions of the true positives, where precision has its
    maxima; num_counted: [N], cumulative number of detections that are not ignored.
    """
    num_classes = len(required_hits)
    hit_label = label[hits]
    num_hits = np.bincount(hit_label, minlength=num_classes)
    first = np.cumsum(num_hits) - num_hits
    before = np.append(0, num_counted)[np.searchsorted(label, np.arange(num_classes))]
    precision = (np.arange(len(hits)) - first[hit_label] + 1) / (num_counted[hits] - before[hit_label])
    reached = required_hits <= num_hits[:, None]
    segment_starts = np.where(reached, first[:, None] + required_hits - 1, (first + num_hits)[:, None])
    # the maximum between one recall and the next; an empty segment gives its first value, of a higher recall
    best = np.maximum.reduceat(np.append(precision, 0.0), segment_starts.ravel()).reshape(segment_starts.shape)
    curve: NDArray[np.float64] = np.maximum.accumulate(np.where(reached, best, 0.0)[:, ::-1], axis=1)[:, ::-1]
    return curve


def _mean(part: NDArray[np.float64]) -> float | None:
    """Mean of the defined values; None if there are none."""
    defined = part[part > -1]
    return float(defined.mean()) if len(defined) else None


def only_evaluated(gt: GroundTruth, detections: Detections) -> tuple[GroundTruth, Detections]:
    """Both without the images that only one of them has."""
    image_indices = gt.image_indices[np.isin(gt.image_indices, detections.image_indices)]
    mask = np.isin(gt.image_index, image_indices)
    columns = {name: getattr(gt, name)[mask] for name in ("image_index", "boxes", "label", "crowd", "area")}
    evaluated_gt = GroundTruth(image_indices=image_indices, class_names=gt.class_names, **columns)
    return evaluated_gt, dataclasses.replace(
        detections.select(np.isin(detections.image_index, image_indices)), image_indices=image_indices
    )
