"""Where a model is wrong: detections against true boxes at IoU 0.5, kinds of mistakes, the worst and best pictures.

Matching is COCO's (`coco.py`): per class, the best score first, each to the free true box with the highest IoU of at
least 0.5; a detection that only a crowd region covers does not count. Then each class gets the score threshold with the
best F1, and what is left above it is sorted into kinds after TIDE (Bolya et al., ECCV 2020), the first that fits:

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

import numpy as np
from numpy.typing import NDArray

from stoker.evaluation.coco import Matches
from stoker.evaluation.document import BINS, MISTAKES
from stoker.evaluation.metrics import Detections, GroundTruth

IOU = 0.5
"""TIDE's t_f."""

RIGHT, CROWD = "", "crowd"
"""What a detection is that is no mistake."""


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


def by_class(truth: GroundTruth, found: Detections, matches: Matches) -> list[OfClass]:
    """The best threshold of each class, and its histograms of scores."""
    best_first = matches.by_class[matches.truth[matches.by_class] != -2]
    label, score = found.label[matches.order[best_first]], found.score[matches.order[best_first]]
    is_right = matches.truth[best_first] >= 0
    ends = np.searchsorted(label, np.arange(len(truth.class_names)), "right").tolist()
    counts = np.bincount(truth.label[~truth.crowd], minlength=len(truth.class_names))
    answers, start = [], 0
    for number, end in enumerate(ends):
        right, scores = is_right[start:end], score[start:end]
        start = end
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
    score, label = found.score[matches.order], found.label[matches.order]
    above = np.flatnonzero(score.astype(np.float64) >= thresholds[label])
    places = above[np.argsort(-score[above], kind="stable")]
    matched = matches.truth[places]
    ours, our_overlap = _nearest(truth, label, matches, places, same=True)
    others, other_overlap = _nearest(truth, label, matches, places, same=False)
    kind = np.select(
        [
            matched >= 0,
            matched == -2,
            (ours < 0) & (others < 0),
            our_overlap >= IOU,
            (ours >= 0) & (our_overlap >= other_overlap),
            other_overlap >= IOU,
        ],
        [RIGHT, CROWD, "background", "duplicate", "localisation", "class"],
        "both",
    )
    wrong = matched == -1
    about = np.where(np.isin(kind, ["duplicate", "localisation"]), ours, others)
    about[~wrong] = -1
    is_found = np.zeros(len(truth.row), np.bool_)
    is_found[matched[matched >= 0]] = True
    touched = is_found.copy()
    touched[about[np.isin(kind, ["localisation", "class"])]] = True
    return Judged(
        places=matches.order[places], truth=matched, kind=kind.tolist(), about=about, is_found=is_found,
        is_missed=~touched & ~truth.crowd,
    )  # fmt: skip


def _nearest(
    truth: GroundTruth, label: NDArray[np.int64], matches: Matches, places: NDArray[np.int64], *, same: bool
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Of each of the places [M] the true box of its class, or of another, that it overlaps most (of equal ones the
    later), and by how much; -1 and 0 where it overlaps none. Crowd regions are none."""
    asked = ~truth.crowd[matches.pair_truth] & ((label[matches.pair_found] == truth.label[matches.pair_truth]) == same)
    found, box, overlap = matches.pair_found[asked], matches.pair_truth[asked], matches.overlaps[asked]
    last = np.lexsort((box, overlap, found))  # of what is written to one place, the last stays
    nearest, by = np.full(len(label), -1, np.int64), np.zeros(len(label))
    nearest[found[last]], by[found[last]] = box[last], overlap[last]
    return nearest[places], by[places]


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
