"""Where a model is wrong: detections against true boxes at IoU 0.5, kinds of mistakes, the worst and best pictures.

Matching is COCO's: per class, the best score first, each to the free true box with the highest IoU of at least 0.5; a
detection that only a crowd region covers does not count. Then each class gets the score threshold with the best F1, and
what is left above it is sorted into kinds after TIDE (Bolya et al., ECCV 2020), the first that fits:

    duplicate     IoU ≥ 0.5 with a true box of its class, which a better score has already
    localisation  0.1 ≤ IoU < 0.5 with a true box of its class, and more than with any other
    class         IoU ≥ 0.5 with a true box of another class
    both          0.1 ≤ IoU < 0.5 with a true box of another class
    background    IoU < 0.1 with every true box
    missed        a true box that no detection is right about, nor wrong about by place or class alone

TIDE weighs kinds by the AP that they cost; here they are counted at the threshold that one would use. The scores are
`evaluate.py`'s; no torch here.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.evaluation import BINS, MISTAKES
from stoker.metrics import Detections, GroundTruth

IOU, BACKGROUND = 0.5, 0.1
"""TIDE's t_f and t_b."""
MOST = 100
"""Detections of a class in a picture that count, the best ones: COCO's."""
_PAIRS = 4_000_000
"""Pairs of boxes whose overlap is computed at once: some 300 MB."""

RIGHT, CROWD = "", "crowd"
"""What a detection is that is no mistake."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matches:
    """The columns of `found` in the order of `order`; N of them count."""

    order: NDArray[np.int64]
    """[N], indices into the detections, the best score first."""
    truth: NDArray[np.int64]
    """[N], the true box that a detection is right about; -1: none, -2: it lies in a crowd region."""
    overlaps: NDArray[np.float32]
    """[P], IoU of every pair of boxes of a picture that reaches BACKGROUND; with a crowd region: the covered share."""
    pair_found: NDArray[np.int64]
    """[P], place in `order`, ascending; of one place the largest overlap first, crowd regions at the end."""
    pair_truth: NDArray[np.int64]
    """[P]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfClass:
    """What matching says of a class; the fields are those of `evaluation.ClassEvaluation`."""

    threshold: float | None
    f1: float | None
    precision: float | None
    recall: float | None
    right_scores: list[int]
    wrong_scores: list[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """Everything above its class's threshold, judged."""

    places: NDArray[np.int64]
    """[M], indices into the detections."""
    truth: NDArray[np.int64]
    """[M], as in Matches."""
    kind: list[str]
    """[M], RIGHT, CROWD or one of MISTAKES."""
    about: NDArray[np.int64]
    """[M], the true box that a mistake of place or class is about; -1: none."""
    is_found: NDArray[np.bool_]
    """[K], of each true box, whether a detection is right about it."""
    is_missed: NDArray[np.bool_]
    """[K], whether none is even wrong about it by place or class alone."""


def match(truth: GroundTruth, found: Detections) -> Matches:
    """Matches as COCO does at IoU 0.5."""
    order = np.argsort(-found.score, kind="stable")
    order = order[_ranks(found.row[order], found.label[order]) < MOST]
    parts = list(_overlaps(truth, found, order))
    pair_found, pair_truth, overlaps = (
        (np.concatenate(column) for column in zip(*parts, strict=True))
        if parts
        else (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32))
    )
    crowd = truth.crowd
    # for each detection the largest overlap first, of equal ones the later box, crowd regions at the end: as COCO asks
    by_score = np.lexsort((-pair_truth, -overlaps, crowd[pair_truth], pair_found))
    pair_found, pair_truth, overlaps = pair_found[by_score], pair_truth[by_score], overlaps[by_score]
    same = found.label[order][pair_found] == truth.label[pair_truth]
    candidates = np.flatnonzero(same & (overlaps >= IOU))
    matched = np.full(len(order), -1, np.int64)
    taken = np.zeros(len(truth.row), np.bool_)
    for place, box in zip(pair_found[candidates].tolist(), pair_truth[candidates].tolist(), strict=True):
        if matched[place] == -1:
            if crowd[box]:
                matched[place] = -2
            elif not taken[box]:
                matched[place], taken[box] = box, True
    return Matches(order=order, truth=matched, overlaps=overlaps, pair_found=pair_found, pair_truth=pair_truth)


def _ranks(row: NDArray[np.int64], label: NDArray[np.int64]) -> NDArray[np.int64]:
    """[N], how many earlier elements have the same row and label."""
    grouped = np.lexsort((label, row))  # stable: inside a group the order stays
    new = np.ones(len(row), np.bool_)
    new[1:] = (np.diff(row[grouped]) != 0) | (np.diff(label[grouped]) != 0)
    starts = np.flatnonzero(new)
    ranks = np.empty(len(row), np.int64)
    ranks[grouped] = np.arange(len(row)) - np.repeat(starts, np.diff(np.append(starts, len(row))))
    return ranks


def _overlaps(truth: GroundTruth, found: Detections, order: NDArray[np.int64]) -> Iterator[tuple[NDArray[Any], ...]]:
    """(place in `order`, true box, overlap) of all pairs of boxes that reach BACKGROUND, some pictures at a time."""
    true_order = np.argsort(truth.row, kind="stable")
    rows = truth.row[true_order]
    place = np.argsort(found.row[order], kind="stable")
    first = np.searchsorted(rows, found.row[order][place], "left")
    count = np.searchsorted(rows, found.row[order][place], "right") - first
    ends = np.cumsum(count)
    start = 0
    while start < len(place):
        done = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + _PAIRS, "right")))
        mine, counts = place[start:stop], count[start:stop]
        left = np.repeat(mine, counts)
        inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        right = true_order[np.repeat(first[start:stop], counts) + inside]
        overlap = _iou(found.boxes[order[left]], truth.boxes[right], truth.crowd[right])
        kept = overlap >= BACKGROUND
        yield left[kept], right[kept], overlap[kept]
        start = stop


def _iou(found: NDArray[np.float32], true: NDArray[np.float32], crowd: NDArray[np.bool_]) -> NDArray[np.float64]:
    """[P], IoU of two lists of boxes, pair by pair; with a crowd region the share of the found box inside it."""
    a, b = found.astype(np.float64), true.astype(np.float64)
    sides = np.clip(np.minimum(a[:, 2:], b[:, 2:]) - np.maximum(a[:, :2], b[:, :2]), 0, None)
    inside = sides[:, 0] * sides[:, 1]
    area_a, area_b = (np.prod(boxes[:, 2:] - boxes[:, :2], axis=1) for boxes in (a, b))
    whole = np.where(crowd, area_a, area_a + area_b - inside)
    share: NDArray[np.float64] = np.divide(inside, whole, out=np.zeros(len(whole)), where=whole > 0)
    return share


def by_class(truth: GroundTruth, found: Detections, matches: Matches) -> list[OfClass]:
    """The best threshold of each class, and its histograms of scores."""
    label, score = found.label[matches.order], found.score[matches.order]
    counts = np.bincount(truth.label[~truth.crowd], minlength=len(truth.class_names))
    answers = []
    for number in range(len(truth.class_names)):
        mine = (label == number) & (matches.truth != -2)
        right, scores = matches.truth[mine] >= 0, score[mine]
        histograms = [np.histogram(scores[of], BINS, (0, 1))[0].tolist() for of in (right, ~right)]
        threshold = f1 = precision = recall = None
        if right.any():
            hits = np.cumsum(right)
            f1s = 2 * hits / (np.arange(1, len(hits) + 1) + counts[number])
            f1s[:-1][scores[1:] == scores[:-1]] = -1.0  # a threshold cannot part equal scores
            best = int(f1s.argmax())
            threshold, f1 = float(scores[best]), float(f1s[best])
            precision, recall = float(hits[best] / (best + 1)), float(hits[best] / counts[number])
        answers.append(
            OfClass(
                threshold=threshold, f1=f1, precision=precision, recall=recall, right_scores=histograms[0],
                wrong_scores=histograms[1],
            )
        )  # fmt: skip
    return answers


def judge(truth: GroundTruth, found: Detections, matches: Matches, classes: list[OfClass]) -> Judged:
    """Sorts what is above the thresholds into right and kinds of mistakes. A class without a threshold has none."""
    thresholds = np.array([np.inf if of.threshold is None else of.threshold for of in classes], np.float64)
    label = found.label[matches.order]
    above = found.score[matches.order].astype(np.float64) >= thresholds[label]
    places = np.flatnonzero(above)
    is_found = np.zeros(len(truth.row), np.bool_)
    is_found[matches.truth[places][matches.truth[places] >= 0]] = True
    touched = is_found.copy()
    kind: list[str] = []
    about = np.full(len(places), -1, np.int64)
    starts = np.searchsorted(matches.pair_found, places, "left")
    stops = np.searchsorted(matches.pair_found, places, "right")
    for n, (place, start, stop) in enumerate(zip(places.tolist(), starts.tolist(), stops.tolist(), strict=True)):
        if matches.truth[place] != -1:
            kind.append(RIGHT if matches.truth[place] >= 0 else CROWD)
            continue
        plain = ~truth.crowd[matches.pair_truth[start:stop]]
        boxes, overlap = matches.pair_truth[start:stop][plain], matches.overlaps[start:stop][plain]
        mistake, box = _kind(boxes, overlap, truth.label[boxes] == label[place])
        kind.append(mistake)
        about[n] = box
        if mistake in ("localisation", "class"):
            touched[box] = True
    return Judged(
        places=matches.order[places], truth=matches.truth[places], kind=kind, about=about, is_found=is_found,
        is_missed=~touched & ~truth.crowd,
    )  # fmt: skip


def _kind(boxes: NDArray[np.int64], overlap: NDArray[Any], same: NDArray[np.bool_]) -> tuple[str, int]:
    """The mistake of a detection from its overlaps, the largest first, and the true box it is about."""
    if not len(boxes):
        return "background", -1
    ours, others = boxes[same], boxes[~same]
    with_ours = overlap[same][0] if len(ours) else 0.0
    with_others = overlap[~same][0] if len(others) else 0.0
    if with_ours >= IOU:
        return "duplicate", int(ours[0])
    if len(ours) and with_ours >= with_others:
        return "localisation", int(ours[0])
    return ("class" if with_others >= IOU else "both"), int(others[0])


def count_mistakes(truth: GroundTruth, found: Detections, judged: Judged) -> list[dict[str, int]]:
    """Kind → count, of each class: of a detection its own, of a missed box the true one."""
    counts: list[dict[str, int]] = [{} for _ in truth.class_names]
    labels = found.label[judged.places].tolist()
    said = [*zip(labels, judged.kind, strict=True), *((n, "missed") for n in truth.label[judged.is_missed].tolist())]
    for label, kind in said:
        if kind in MISTAKES:
            counts[label][kind] = counts[label].get(kind, 0) + 1
    return counts


@dataclasses.dataclass(frozen=True, kw_only=True)
class PictureScore:
    """What is right and wrong in a picture."""

    row: int
    f1: float
    right: int
    wrong: int
    not_found: int


def worst_and_best(
    truth: GroundTruth, found: Detections, judged: Judged, pictures: NDArray[np.int64], most: int
) -> tuple[list[PictureScore], list[PictureScore]]:
    """At most `most` of the pictures each: lowest F1 first (of equal ones the one with more mistakes), and highest
    first (of equal ones the one with more boxes). None is in both; a perfect one is no worst, one without a right box
    no best; a picture without true boxes in which nothing is found is neither."""
    place = {row: n for n, row in enumerate(pictures.tolist())}
    right, wrong, not_found = (np.zeros(len(pictures), np.int64) for _ in range(3))
    rows = found.row[judged.places].tolist()
    for row, kind in zip(rows, judged.kind, strict=True):
        if kind == RIGHT:
            right[place[row]] += 1
        elif kind != CROWD:
            wrong[place[row]] += 1
    for row in truth.row[~judged.is_found & ~truth.crowd].tolist():
        if row in place:
            not_found[place[row]] += 1
    mistakes = wrong + not_found
    f1 = np.divide(2 * right, 2 * right + mistakes, out=np.ones(len(pictures)), where=right + mistakes > 0)
    lowest = [n for n in np.lexsort((-mistakes, f1)).tolist() if mistakes[n]][:most]
    highest = [n for n in np.lexsort((-right, -f1)).tolist() if right[n]][:most]
    shared = set(lowest) & set(highest)  # few pictures: each goes where its F1 says
    lowest = [n for n in lowest if n not in shared or f1[n] < 0.5]
    highest = [n for n in highest if n not in shared or f1[n] >= 0.5]
    scores = [
        PictureScore(row=row, f1=float(f1[n]), right=int(right[n]), wrong=int(wrong[n]), not_found=int(not_found[n]))
        for row, n in place.items()
    ]
    return [scores[n] for n in lowest], [scores[n] for n in highest]
