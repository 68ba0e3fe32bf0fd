"""COCO's numbers from columns: which detection is right about which true box, and the curves and means over that.

The rules are those of pycocotools' cocoeval.py, which is the oracle in the tests (equal within 1e-9): per picture and
class the 100 best detections, each to the free true box with the largest IoU at ten thresholds, with crowd regions and
boxes outside an area range to fall back on. Whole columns are worked on at once. What is left for a loop is one step
for the n-th pair of boxes of every picture and class together, at all thresholds (a bit each) and areas. So a score of
COCO's size takes about a second, most of it inside NumPy with the interpreter free for the training thread (decision
9). `benchmarks/evaluate.py` measures both.

What the matches say about mistakes is `error_analysis.py`; no torch here.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.evaluation.document import RECALLS
from stoker.evaluation.metrics import TWELVE, ClassMetrics, Detections, GroundTruth, Metrics

IOUS = np.linspace(0.5, 0.95, 10)
AREAS = np.array([(0, 1e10), (0, 32**2), (32**2, 96**2), (96**2, 1e10)], np.float64)
"""All, small, medium, large: areas in pixels, both ends included."""
MOST = 100
"""Detections of a class in a picture that count, the best ones."""
BACKGROUND = 0.1
"""Pairs that overlap less are not kept. TIDE's t_b (Bolya et al., ECCV 2020); COCO asks from 0.5 on."""
_PAIRS = 250_000
"""Pairs of boxes whose overlap is computed at once: some 20 MB, so most of it stays in a core's cache."""
_ALL = np.uint16(2 ** len(IOUS) - 1)

Bits = NDArray[np.uint16]
"""A bit for each of IOUS, the lowest for 0.5."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matches:
    """The detections that count, N of them, by picture, class and falling score, and what each is right about."""

    order: NDArray[np.int64]
    """[N], indices into the detections."""
    by_class: NDArray[np.int64]
    """[N], places in `order`, by class and falling score; of equal ones by picture."""
    truth: NDArray[np.int64]
    """[N], at IoU 0.5 the true box that a detection is right about; -1: none, -2: it lies in a crowd region."""
    pair_found: NDArray[np.int64]
    """[P], place in `order` of each pair of boxes of a picture that overlap by BACKGROUND or more, ascending."""
    pair_truth: NDArray[np.int64]
    """[P]."""
    overlaps: NDArray[np.float64]
    """[P], IoU; with a crowd region the share of the detection inside it."""
    right: Bits
    """[4, N], for each of AREAS the thresholds at which a detection is right."""
    ignored: Bits
    """[4, N], those at which it counts neither way."""
    rank: NDArray[np.int64]
    """[N], how many detections of its class in its picture score better."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """The metrics, and what they are means of."""

    metrics: Metrics
    precision: NDArray[np.float64]
    """[10 IoU thresholds 0.50 … 0.95, 101 recalls, classes] of all areas and 100 detections; -1 where undefined."""
    matches: Matches


def match(truth: GroundTruth, found: Detections) -> Matches:
    """Matches as COCO does."""
    order = np.lexsort((-found.score, found.label, found.row))  # stable: equal scores stay in their order
    row, label = found.row[order], found.label[order]
    starts = _starts(row, label)
    rank = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    counts = rank < MOST
    order, row, label, rank = order[counts], row[counts], label[counts], rank[counts]

    parts = list(_overlaps(truth, found, order))
    pair_found, pair_truth, overlaps = (np.concatenate(column) for column in zip(*parts, strict=True))
    same = np.flatnonzero((overlaps >= IOUS[0]) & (label[pair_found] == truth.label[pair_truth]))
    place, box, overlap = pair_found[same], pair_truth[same], overlaps[same]
    # for each detection the largest overlap first, of equal ones the later box: pycocotools replaces equals
    nearest = np.lexsort((-box, -overlap, place))
    place, box, overlap = place[nearest], box[nearest], overlap[nearest]

    outside = (truth.area < AREAS[:, :1]) | (truth.area > AREAS[:, 1:])
    aside = truth.crowd | outside  # [4, K], true boxes that need not be found
    # a detection falls back on those only when no other is left for it
    turn = np.argsort(2 * place + aside[:, box], axis=1, kind="stable")
    hits = _greedy(place, box[turn], overlap[turn], _starts(row, label), truth.crowd)
    hit_aside = np.take_along_axis(aside[:, box], turn, axis=1)
    right = np.stack([_spread(place, np.where(a, 0, h), len(order)) for a, h in zip(hit_aside, hits, strict=True)])
    ignored = np.stack([_spread(place, np.where(a, h, 0), len(order)) for a, h in zip(hit_aside, hits, strict=True)])
    boxes = found.boxes[order].astype(np.float64)
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    far = (area < AREAS[:, :1]) | (area > AREAS[:, 1:])
    ignored |= np.where(far, ~right & _ALL, np.uint16(0))

    matched = np.full(len(order), -1, np.int64)
    at_half = np.flatnonzero(hits[0] & 1)
    chosen = box[turn[0, at_half]]
    matched[place[at_half]] = np.where(truth.crowd[chosen], -2, chosen)
    return Matches(
        order=order, by_class=np.lexsort((-found.score[order], label)), truth=matched, pair_found=pair_found,
        pair_truth=pair_truth, overlaps=overlaps, right=right, ignored=ignored, rank=rank,
    )  # fmt: skip


def _starts(*columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where in sorted columns [N] a new combination begins."""
    new = np.ones(len(columns[0]), np.bool_)
    new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return np.flatnonzero(new)


def _spread(place: NDArray[np.int64], bits: NDArray[Any], count: int) -> Bits:
    """[count], of each place all its bits; no two of them are the same."""
    return np.bincount(place, weights=bits, minlength=count).astype(np.uint16)


def _greedy(
    place: NDArray[np.int64],
    box: NDArray[np.int64],
    overlap: NDArray[np.float64],
    groups: NDArray[np.int64],
    crowd: NDArray[np.bool_],
) -> Bits:
    """[4, P], the thresholds at which a pair of boxes is a match, when pairs are asked one after the other.

    place: [P], the detection, ascending; box, overlap: [4, P], its true boxes in the order in which they are asked;
    groups: the detections at which a new picture or class begins: no box is in two of them.
    """
    reached = ((1 << np.searchsorted(np.minimum(IOUS, 1 - 1e-10), overlap, "right")) - 1).astype(np.uint16)
    group = np.searchsorted(groups, place, "right")
    starts = _starts(group)
    nth = np.arange(len(place)) - np.repeat(starts, np.diff(np.append(starts, len(place))))
    steps = np.argsort(nth, kind="stable")  # the first pair of every group, then the second …
    ends = np.cumsum(np.bincount(nth)).tolist()
    place, box, reached = place[steps], box[:, steps], reached[:, steps]
    lasting = np.where(crowd[box], np.uint16(0), _ALL)  # a crowd region is never taken
    done = np.zeros((4, int(place.max(initial=-1)) + 1), np.uint16)
    taken = np.zeros((4, len(crowd)), np.uint16)
    hits = np.empty_like(reached)
    area = np.arange(4)[:, None]
    start = 0
    for end in ends:
        now, mine, theirs = slice(start, end), place[start:end], box[:, start:end]
        hit = reached[:, now] & ~done[:, mine] & ~taken[area, theirs]
        done[:, mine] |= hit
        taken[area, theirs] |= hit & lasting[:, now]
        hits[:, now] = hit
        start = end
    answer = np.empty_like(hits)
    answer[:, steps] = hits
    return answer


def _overlaps(truth: GroundTruth, found: Detections, order: NDArray[np.int64]) -> Iterator[tuple[NDArray[Any], ...]]:
    """(place in `order`, true box, overlap) of all pairs of boxes of a picture that reach BACKGROUND, part by part."""
    true_order = np.argsort(truth.row, kind="stable")
    rows = truth.row[true_order]
    true_sides = truth.boxes[true_order].T.astype(np.float64)
    true_area = (true_sides[2] - true_sides[0]) * (true_sides[3] - true_sides[1])
    true_crowd = truth.crowd[true_order]
    sides = found.boxes[order].T.astype(np.float64)
    area = (sides[2] - sides[0]) * (sides[3] - sides[1])
    first = np.searchsorted(rows, found.row[order], "left")
    count = np.searchsorted(rows, found.row[order], "right") - first
    ends = np.cumsum(count)
    start = 0
    yield np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float64)
    while start < len(order):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _PAIRS, "right")))
        counts = count[start:stop]
        left = np.repeat(np.arange(start, stop), counts)
        right = np.arange(len(left)) + np.repeat(first[start:stop] - (ends[start:stop] - counts - before), counts)
        width = np.minimum(sides[2, left], true_sides[2, right]) - np.maximum(sides[0, left], true_sides[0, right])
        height = np.minimum(sides[3, left], true_sides[3, right]) - np.maximum(sides[1, left], true_sides[1, right])
        meet = (width > 0) & (height > 0)
        left, right, inside = left[meet], right[meet], width[meet] * height[meet]
        share = inside / np.where(true_crowd[right], area[left], area[left] + true_area[right] - inside)
        kept = share >= BACKGROUND
        yield left[kept], true_order[right[kept]], share[kept]
        start = stop


def score(truth: GroundTruth, found: Detections) -> Scored:
    """The twelve COCO numbers, AP and AP50 of each class, and the precision-recall curves.

    All pictures of the detections are pictures of the truth, and the truth has a box that counts.
    """
    matches = match(truth, found)
    classes = len(truth.class_names)
    label = found.label[matches.order[matches.by_class]]
    rank = matches.rank[matches.by_class]
    precision = np.empty((len(AREAS), len(IOUS), RECALLS, classes))
    recall = {most: np.empty((len(AREAS), len(IOUS), classes)) for most in (1, 10, MOST)}
    for n, (low, high) in enumerate(AREAS.tolist()):
        inside = ~truth.crowd & (truth.area >= low) & (truth.area <= high)
        boxes = np.bincount(truth.label[inside], minlength=classes)
        needed = _needed(boxes)
        right, counts = matches.right[n, matches.by_class], ~matches.ignored[n, matches.by_class]
        for t in range(len(IOUS)):
            hits = np.flatnonzero(right & np.uint16(1 << t))
            so_far = np.cumsum(counts >> np.uint16(t) & np.uint16(1), dtype=np.int64)
            precision[n, t] = _curve(label, hits, so_far, needed).T
            for most, of in recall.items():
                of[n, t] = np.bincount(label[hits][rank[hits] < most], minlength=classes) / np.maximum(boxes, 1)
        precision[n, :, :, boxes == 0] = -1.0
        for of in recall.values():
            of[n, :, boxes == 0] = -1.0
    counted = np.bincount(truth.label[~truth.crowd], minlength=classes)
    whole = precision[0]
    twelve = (
        whole, whole[0], whole[5], *precision[1:], recall[1][0], recall[10][0], *recall[MOST]
    )  # fmt: skip
    means: dict[str, Any] = {name: _mean(part) for name, part in zip(TWELVE, twelve, strict=True)}
    metrics = Metrics(
        **means,
        per_class=[
            ClassMetrics(
                name=name, ap=_mean(whole[:, :, k]), ap50=_mean(whole[0, :, k]), boxes=int(counted[k])
            )
            for k, name in enumerate(truth.class_names)
        ],
        pictures=len(truth.pictures),
        boxes=int(counted.sum()),
        detections=len(found),
    )  # fmt: skip
    return Scored(metrics=metrics, precision=whole, matches=matches)


def _needed(boxes: NDArray[np.int64]) -> NDArray[np.int64]:
    """[classes, 101], how many of a class's boxes must be found for each recall, 1 at least."""
    recalls, total = np.linspace(0, 1, RECALLS), np.maximum(boxes, 1)[:, None]
    needed = np.ceil(recalls * total).astype(np.int64)
    needed -= (needed - 1) / total >= recalls  # the product was rounded; COCO compares the quotient
    needed += needed / total < recalls
    return np.maximum(needed, 1)


def _curve(
    label: NDArray[np.int64], hits: NDArray[np.int64], so_far: NDArray[np.int64], needed: NDArray[np.int64]
) -> NDArray[np.float64]:
    """[classes, 101], interpolated precision: the best one at this recall or a higher one; 0 where none reaches it.

    label: [N], by class and falling score; hits: places of the right ones; so_far: [N], how many count up to there.
    Precision has its maxima at hits, so only these are looked at.
    """
    classes = len(needed)
    of = label[hits]
    right = np.bincount(of, minlength=classes)
    first = np.cumsum(right) - right
    before = np.append(0, so_far)[np.searchsorted(label, np.arange(classes))]
    precision = (np.arange(len(hits)) - first[of] + 1) / (so_far[hits] - before[of])
    reached = needed <= right[:, None]
    at = np.where(reached, first[:, None] + needed - 1, (first + right)[:, None])
    # the best between one recall and the next; an empty stretch gives its first, which is of a higher recall, too
    best = np.maximum.reduceat(np.append(precision, 0.0), at.ravel()).reshape(at.shape)
    curve: NDArray[np.float64] = np.maximum.accumulate(np.where(reached, best, 0.0)[:, ::-1], axis=1)[:, ::-1]
    return curve


def _mean(part: NDArray[np.float64]) -> float | None:
    """Of what is defined; None where nothing is."""
    defined = part[part > -1]
    return float(defined.mean()) if len(defined) else None
