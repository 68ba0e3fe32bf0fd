"""error_analysis.py against pycocotools' own matching, each kind of error by itself, and evaluation.json as a
whole."""

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.evaluation.coco import match_detections
from stoker.evaluation.detections import Detections, GroundTruth
from stoker.evaluation.error_analysis import (
    MAX_MATRIX_CLASSES,
    ClassThreshold,
    build_evaluation,
    classify_errors,
    compute_class_stats,
    confusion_matrix,
    worst_and_best,
)
from stoker.evaluation.evaluate import compute_coco_result, ground_truth
from stoker_watch.errors import UsageError
from stoker_watch.runs.evaluation import ERROR_TYPES, NUM_RECALL_POINTS, Evaluation, read_evaluation
from stoker_watch.runs.records import EVALUATION, RunFolder
from tests.fixtures.evaluation_evaluate import columns, detections, pycocotools, random_case

DOCUMENT = (Path(__file__).parents[3] / "docs/run-folder.md").read_text()


def test_every_error_type_is_documented() -> None:
    found = re.findall(
        r"^\| `(\w+)` \|", DOCUMENT.partition("| error type | when |")[2].partition("\n\n")[0], re.MULTILINE
    )
    assert found == list(ERROR_TYPES)


@pytest.mark.slow
@given(seed=st.integers(0, 2**32), images=st.integers(1, 8), class_count=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_matches_are_those_of_pycocotools(seed: int, images: int, class_count: int) -> None:
    gt, found = random_case(seed, images, class_count)
    matches = match_detections(gt, found)
    ours = {int(n): int(m) for n, m in zip(matches.order, matches.gt_index, strict=True)}
    theirs: dict[int, int] = {}
    for cell in pycocotools(gt, found).evalImgs:
        if cell is not None and cell["aRng"] == [0, 10**10]:
            for number, box, ignored in zip(cell["dtIds"], cell["dtMatches"][0], cell["dtIgnore"][0], strict=True):
                theirs[number - 1] = -2 if ignored else int(box) - 1
    assert ours == theirs


def test_only_a_hundred_detections_of_a_class_in_an_image_count() -> None:
    gt, found = random_case(5, 3, 2, max_found=400)
    matches = match_detections(gt, found)
    counted = found.select(matches.order)
    groups = np.unique(np.stack([counted.image_index, counted.label]), axis=1, return_counts=True)[1]
    assert groups.max() == 100
    assert len(found) > len(matches.order)


@pytest.mark.parametrize(
    ("kind", "box", "label", "missed"),
    [
        ("", (0, 0, 100, 100), 0, 0),
        ("localization", (0, 0, 100, 30), 0, 0),
        ("class", (0, 0, 100, 100), 1, 0),
        ("both", (0, 0, 100, 30), 1, 1),
        ("background", (500, 500, 600, 600), 0, 1),
        ("crowd", (310, 310, 320, 320), 0, 1),
    ],
)
def test_each_kind_of_error(kind: str, box: tuple[int, ...], label: int, missed: int) -> None:
    index = columns([[(0, 0, 100, 100, 0, 0, 1.0), (300, 300, 400, 400, 0, 1, 1.0)],
                     [(0, 0, 50, 50, 0, 0, 1.0), (60, 60, 90, 90, 1, 0, 1.0)]], 2)  # fmt: skip
    gt = ground_truth(index, np.arange(2))
    right = [[0, 0, 50, 50], [60, 60, 90, 90]]  # gives both classes a threshold
    found = detections([0, 1, 1], [box, *right], [0.9, 0.8, 0.8], [label, 0, 1], [0, 1])
    matches = match_detections(gt, found)
    classified = classify_errors(gt, found, matches, compute_class_stats(gt, found, matches))
    assert classified.error_type == [kind, "", ""]
    assert classified.is_missed.sum() == missed


def test_a_second_detection_of_a_box_is_a_duplicate_also_when_it_is_nearer() -> None:
    gt = ground_truth(columns([[(0, 0, 100, 100, 0, 0, 1.0), (200, 0, 300, 100, 0, 0, 1.0)]], 1), np.array([0]))
    found = detections([0] * 3, [[0, 0, 100, 90], [0, 0, 100, 100], [200, 0, 300, 100]], [0.9, 0.8, 0.7], [0] * 3, [0])
    matches = match_detections(gt, found)
    classified = classify_errors(gt, found, matches, compute_class_stats(gt, found, matches))
    assert classified.error_type == ["", "duplicate", ""]
    assert not classified.is_missed.any()


@given(seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_no_threshold_has_a_better_f1(seed: int) -> None:
    gt, found = random_case(seed, 6, 3)
    matches = match_detections(gt, found)
    score, label = found.score[matches.order], found.label[matches.order]
    for number, answer in enumerate(compute_class_stats(gt, found, matches)):
        boxes = int((gt.label[~gt.crowd] == number).sum())
        mine = (label == number) & (matches.gt_index != -2)
        best = 0.0
        for threshold in np.unique(score[mine]):
            above = mine & (score >= threshold)
            best = max(best, 2 * (matches.gt_index[above] >= 0).sum() / (above.sum() + boxes))
            if float(threshold) == answer.threshold:
                assert answer.f1 == pytest.approx(2 * (matches.gt_index[above] >= 0).sum() / (above.sum() + boxes))
        assert (answer.f1 or 0.0) == pytest.approx(best)
        assert sum(answer.tp_scores) == (matches.gt_index[mine] >= 0).sum()
        assert sum(answer.tp_scores) + sum(answer.fp_scores) == mine.sum()


def evaluated(gt: GroundTruth, found: Detections, images: int, class_count: int) -> Evaluation:
    index = columns([[] for _ in range(images)], class_count)
    return build_evaluation(compute_coco_result(gt, found), gt, found, index, step=7)


@given(seed=st.integers(0, 2**32), images=st.integers(1, 12))
@settings(max_examples=25, deadline=None)
def test_an_evaluation_adds_up_and_comes_back_from_its_file(seed: int, images: int) -> None:
    gt, found = random_case(seed, images, 3)
    answer = evaluated(gt, found, images + 1, 3)
    assert msgspec.json.decode(msgspec.json.encode(answer), type=Evaluation) == answer
    for of in answer.classes:
        assert of.curves is not None
        if of.ap is not None:
            assert len(of.curves.iou75) == NUM_RECALL_POINTS
            assert np.mean(of.curves.mean) == pytest.approx(of.ap, abs=1e-4)
            assert np.mean(of.curves.iou50) == pytest.approx(of.ap50, abs=1e-4)
        detected = of.tp + sum(count for kind, count in of.error_types.items() if kind != "missed")
        assert (of.precision or 0.0) == pytest.approx(of.tp / detected if detected else 0.0)
        assert (of.recall or 0.0) == pytest.approx(of.tp / of.boxes if of.boxes else 0.0)
    assert np.mean(answer.curves.iou75) == pytest.approx(answer.metrics.ap75, abs=1e-4)
    assert np.mean(answer.curves.mean) == pytest.approx(answer.metrics.ap, abs=1e-4)
    assert sum(one.count for one in answer.confusions) == sum(of.error_types.get("class", 0) for of in answer.classes)
    matrix, order = np.array(answer.confusion_matrix.counts), answer.confusion_matrix.labels
    of_class, background = [answer.classes[label] for label in order], -1
    assert sorted(order) == [0, 1, 2]
    assert not matrix[3].any()
    assert not matrix[:, 3].any(), "there are no other classes"
    assert matrix[:3].sum(1).tolist() == [of.boxes for of in of_class], "each ground truth box once"
    assert np.diag(matrix)[:3].tolist() == [of.tp for of in of_class]
    errors = [sum(count for kind, count in of.error_types.items() if kind != "missed") for of in of_class]
    assert matrix[:, :3].sum(0).tolist() == [of.tp + n for of, n in zip(of_class, errors, strict=True)], "as predicted"
    assert matrix[background, background] == 0
    for one in (*answer.worst, *answer.best):
        assert one.tp == sum(box.error_type == "" for box in one.detections) == sum(b.detected for b in one.gt_boxes)
        assert one.fp == sum(box.error_type in ERROR_TYPES for box in one.detections)
        assert one.fn == sum(not (box.detected or box.crowd) for box in one.gt_boxes)
        assert one.byte_range == ((one.image_index * 100, 50) if one.image_index % 2 else None)
    assert not {one.image_index for one in answer.worst} & {one.image_index for one in answer.best}


def test_a_confusion_matrix_is_bounded_and_loses_nothing() -> None:
    gt, found = random_case(3, 12, 30)
    answer = evaluated(gt, found, 13, 30)
    matrix = np.array(answer.confusion_matrix.counts)
    assert matrix.shape == (MAX_MATRIX_CLASSES + 2, MAX_MATRIX_CLASSES + 2)
    assert matrix[:-1].sum() == sum(of.boxes for of in answer.classes)
    shown = [answer.classes[label].boxes for label in answer.confusion_matrix.labels]
    assert matrix[: len(shown)].sum(1).tolist() == shown == sorted(shown, reverse=True)


def test_a_right_box_with_a_wrong_detection_is_right() -> None:
    """By hand: red found as red and as green; green found as red twice; blue missed; red of nothing."""
    boxes = [(0, 0, 10, 10), (30, 0, 40, 10), (60, 0, 70, 10)]
    index = columns([[(*box, label, 0, 100.0) for label, box in enumerate(boxes)]], 3)
    gt = ground_truth(index, np.array([0]))
    found = [
        (boxes[0], 0, 0.9),
        (boxes[0], 1, 0.8),
        (boxes[1], 0, 0.7),
        (boxes[1], 2, 0.6),
        ((80, 80, 90, 90), 0, 0.95),
    ]
    some = Detections(
        image_index=np.zeros(5, np.int64), boxes=np.array([box for box, *_ in found], np.float32),
        score=np.array([score for *_, score in found], np.float32), label=np.array([label for _, label, _ in found]),
        image_indices=np.array([0]),
    )  # fmt: skip
    matches = compute_coco_result(gt, some).matches
    zero = [ClassThreshold(0.0, None, None, None, [], [])] * 3
    matrix = confusion_matrix(gt, some, classify_errors(gt, some, matches, zero))
    assert matrix.labels == [0, 1, 2]
    assert np.array(matrix.counts)[[0, 1, 2, 4]][:, [0, 1, 2, 4]].tolist() == [
        [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [1, 1, 1, 0],
    ]  # fmt: skip


def test_worst_and_best_images() -> None:
    """Four images: perfect, one of two found, nothing found of two, empty and nothing found."""
    two = [(0, 0, 10, 10, 0, 0, 1.0), (20, 20, 40, 40, 0, 0, 1.0)]
    gt = ground_truth(columns([two, two, two, []], 1), np.arange(4))
    found = detections([0, 0, 1], [[0, 0, 10, 10], [20, 20, 40, 40], [0, 0, 10, 10]], [0.9] * 3, [0] * 3, range(4))
    matches = match_detections(gt, found)
    classified = classify_errors(gt, found, matches, compute_class_stats(gt, found, matches))
    worst, best = worst_and_best(gt, found, classified, gt.image_indices, 12)
    assert [(one.image_index, one.fn) for one in worst] == [(2, 2)]
    assert [(one.image_index, round(one.f1, 2)) for one in best] == [(0, 1.0), (1, 0.67)]


def test_images_that_the_model_did_not_see_are_in_no_list() -> None:
    gt = ground_truth(columns([[(0, 0, 9, 9, 0, 0, 1.0)], [(0, 0, 9, 9, 0, 0, 1.0)]], 1), np.arange(2))
    answer = evaluated(gt, detections([0], [[0, 0, 9, 9]], [0.9], [0], [0]), 2, 1)
    assert (answer.classes[0].error_types, answer.worst, [one.image_index for one in answer.best]) == ({}, [], [0])


def test_a_full_evaluation_is_small() -> None:
    gt, found = random_case(3, 300, 5, max_found=100)
    assert len(msgspec.json.encode(evaluated(gt, found, 301, 5))) < 400_000


def test_an_evaluation_that_cannot_be_written_is_an_event(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, 1)
    (tmp_path / EVALUATION).mkdir()  # a rename onto a folder fails
    answer = evaluated(*random_case(3, 3, 2), 4, 2)
    folder.replace(EVALUATION, answer)
    folder.close()
    assert f"{EVALUATION} could not be written" in (tmp_path / "events.jsonl").read_text()
    (tmp_path / EVALUATION).rmdir()
    assert read_evaluation(tmp_path) is None
    folder.replace(EVALUATION, answer)
    assert read_evaluation(tmp_path) == answer
    (tmp_path / EVALUATION).write_text('{"step": "no"}')
    with pytest.raises(UsageError, match="evaluation"):
        read_evaluation(tmp_path)
