"""evaluate.py against pycocotools, and its handling of batches, modes and odd splits."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stoker.config.settings import ModelSettings
from stoker.data.batch import NUM_RAND, Batch
from stoker.data.index import open_index
from stoker.evaluation import coco
from stoker.evaluation.detections import Detections, empty_detections
from stoker.evaluation.error_analysis import build_evaluation
from stoker.evaluation.evaluate import (
    GroundTruth,
    compute_coco_result,
    compute_metrics,
    detect,
    evaluation_loader,
    ground_truth,
    sample_images,
)
from stoker.hardware.device import Device
from stoker.models import BatchDetections, build, get_architecture
from stoker_watch.errors import DataError
from stoker_watch.runs.evaluation import COCO_SUMMARY, Metrics
from tests.drawn import draw
from tests.fixtures.evaluation_evaluate import columns, detections, pycocotools, random_case
from tests.host_sync import ForbidHostSync, HostSyncError

CPU = Device(torch.device("cpu"))


def oracle(truth: GroundTruth, found: Detections) -> tuple[list[float], list[float], list[float]]:
    """pycocotools: the twelve numbers, AP of each class, AP50 of each class; -1 where undefined."""
    run = pycocotools(truth, found)
    precision = run.eval["precision"][:, :, :, 0, 2]

    def mean(part: np.ndarray) -> float:
        return float(part[part > -1].mean()) if (part > -1).any() else -1.0

    classes = range(len(truth.class_names))
    return list(run.stats), [mean(precision[:, :, k]) for k in classes], [mean(precision[0, :, k]) for k in classes]


def assert_equals_oracle(truth: GroundTruth, found: Detections) -> Metrics:
    metrics = compute_metrics(truth, found)
    stats, ap, ap50 = oracle(truth, found)
    ours = [getattr(metrics, name) for name in COCO_SUMMARY]
    for name, mine, theirs in zip(COCO_SUMMARY, ours, stats, strict=True):
        assert (-1.0 if mine is None else mine) == pytest.approx(theirs, abs=1e-9), name
    assert [-1.0 if c.ap is None else c.ap for c in metrics.per_class] == pytest.approx(ap, abs=1e-9)
    assert [-1.0 if c.ap50 is None else c.ap50 for c in metrics.per_class] == pytest.approx(ap50, abs=1e-9)
    return metrics


@pytest.mark.slow
@given(seed=st.integers(0, 2**32), images=st.integers(1, 12), class_count=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_random_boxes_score_as_pycocotools(seed: int, images: int, class_count: int) -> None:
    assert_equals_oracle(*random_case(seed, images, class_count))


@given(seed=st.integers(0, 2**32), images=st.integers(1, 4), class_count=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_boxes_of_few_sizes_at_few_places_score_as_pycocotools(seed: int, images: int, class_count: int) -> None:
    """Equal overlaps, overlaps equal to a threshold, the same box twice, areas of 32² and 96² exactly, equal scores."""
    draw = np.random.default_rng(seed)

    def boxes(count: int) -> np.ndarray:
        corner = draw.choice([0, 8, 16, 32], (count, 2))
        return np.concatenate([corner, corner + draw.choice([16, 32, 64, 96, 144], (count, 2))], axis=1)

    gt_rows, rows = [], np.sort(draw.integers(0, images, int(draw.integers(0, 60 * images))))
    for _ in range(images):
        mine = boxes(int(draw.integers(0, 9)))
        gt_rows.append([(*box, float(draw.integers(class_count)), float(draw.random() < 0.2), 1.0) for box in mine])
    index = columns([[(0, 0, 32, 32, 0, 0, 1.0)], *gt_rows], class_count)
    found = detections((rows + 1).tolist(), boxes(len(rows)), draw.integers(1, 5, len(rows)) / 5,
                       draw.integers(0, class_count, len(rows)), range(images + 1))  # fmt: skip
    assert_equals_oracle(ground_truth(index, np.arange(images + 1)), found)


def test_recalls_are_reached_where_the_quotient_of_counts_says_so() -> None:
    """0.07 of 100 boxes are 7.000000000000001 in floating point, and 7 / 100 is 0.07 all the same."""
    boxes = np.arange(1, 3000)
    needed = coco._required_hits(boxes)
    for n in range(0, len(boxes), 7):
        recall = np.arange(boxes[n] + 1) / boxes[n]
        reached = np.searchsorted(recall, np.linspace(0, 1, 101), side="left")
        assert (needed[n] == np.maximum(reached, 1)).all(), boxes[n]


def test_more_than_a_hundred_detections_in_an_image_score_as_pycocotools() -> None:
    truth, found = random_case(5, 4, 2, max_found=400)
    assert max(np.bincount(found.image_index)) > 200
    metrics = assert_equals_oracle(truth, found)
    assert metrics.ar1 is not None
    assert metrics.ar1 < (metrics.ar100 or 0)


@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_parts_of_the_images_score_as_one_in_any_order(seed: int, ranks: int) -> None:
    truth, found = random_case(seed, 9, 3)
    parts = []
    for rank in np.random.default_rng(seed).permutation(ranks).tolist():
        mine = found.select(found.image_index % ranks == rank)
        parts.append(dataclasses.replace(mine, image_indices=found.image_indices[found.image_indices % ranks == rank]))
    together = Detections.concatenate(parts)
    index = columns([[] for _ in range(10)], 3)
    one, many = (build_evaluation(compute_coco_result(truth, of), truth, of, index, step=1) for of in (found, together))
    assert one == many


def test_each_rank_detects_in_its_part(tmp_path: Path) -> None:
    """Three loaders as three processes would have: together every image once, and the score of one."""
    index = open_index(draw(tmp_path / "data", val=7))
    rows = index.image_indices("val")
    row = get_architecture("retinanet_tiny_fpn")
    torch.manual_seed(0)
    model = build(ModelSettings(model="retinanet_tiny_fpn", weights="none", **row.defaults), 3)

    def share(rank: int, ranks: int) -> Detections:
        with evaluation_loader(index, rows, CPU, batch_size=2, image_size=(64, 64), resize="letterbox", workers=1,
                               rank=rank, world_size=ranks) as batches:  # fmt: skip
            return detect(model, batches, CPU, precision="fp32", score_threshold=0.0)

    parts = [share(rank, 3) for rank in (2, 0, 1)]
    assert [sorted(of.image_indices.tolist()) for of in parts] == [rows[[4, 5]].tolist(), rows[[0, 1, 6]].tolist(),
                                                               rows[[2, 3]].tolist()]  # fmt: skip
    truth = ground_truth(index, rows)
    assert len(parts[0]) > 0
    assert compute_metrics(truth, Detections.concatenate(parts)) == compute_metrics(truth, share(0, 1))


def test_area_ranges_come_from_the_source_not_from_the_box() -> None:
    """A box of 40 × 40 whose source says an area of 900 (a thin polygon) is small."""
    index = columns([[(0, 0, 40, 40, 0, 0, 900 / 1600), (100, 100, 140, 140, 0, 0, 1.0)]], 1)
    found = detections([0], [[0, 0, 40, 40]], [0.9], [0], [0])
    metrics = assert_equals_oracle(ground_truth(index, np.array([0])), found)
    assert (metrics.ar_small, metrics.ar_medium, metrics.ar_large) == (1.0, 0.0, None)


def test_detections_inside_a_crowd_count_neither_way() -> None:
    index = columns([[(0, 0, 100, 100, 0, 0, 1.0), (200, 0, 400, 200, 0, 1, 1.0)]], 1)
    truth = ground_truth(index, np.array([0]))
    good = detections([0], [[0, 0, 100, 100]], [0.5], [0], [0])
    crowded = detections([0] * 3, [[0, 0, 100, 100], [210, 10, 230, 30], [300, 50, 330, 90]], [0.5, 0.9, 0.8],
                         [0] * 3, [0])  # fmt: skip
    assert compute_metrics(truth, good).ap == pytest.approx(1.0)
    assert assert_equals_oracle(truth, crowded).ap == pytest.approx(1.0)
    assert compute_metrics(truth, crowded).boxes == 1


def test_per_class_by_name_and_none_where_undefined() -> None:
    index = columns([[(0, 0, 50, 50, 0, 0, 1.0)], [(0, 0, 60, 60, 2, 0, 1.0)]], 3)
    found = detections([0, 1], [[0, 0, 50, 50], [0, 0, 60, 45]], [0.9, 0.9], [0, 2], [0, 1])  # IoU 1 and 0.75
    metrics = assert_equals_oracle(ground_truth(index, np.array([0, 1])), found)
    first, second, third = metrics.per_class
    assert (first.name, first.ap, first.ap50, first.boxes) == ("class 0", 1.0, 1.0, 1)
    assert (second.name, second.ap, second.ap50, second.boxes) == ("class 1", None, None, 0)
    assert third.ap == pytest.approx(0.6)  # right at six of the ten thresholds, 0.50 … 0.75
    assert third.ap50 == 1.0


def test_nothing_found_is_zero_not_a_crash() -> None:
    index = columns([[(0, 0, 50, 50, 0, 0, 1.0)], []], 2)
    metrics = assert_equals_oracle(ground_truth(index, np.array([0, 1])), empty_detections([0, 1]))
    assert (metrics.ap, metrics.ap50, metrics.ar100, metrics.ap_small) == (0.0, 0.0, 0.0, None)
    assert (metrics.num_images, metrics.boxes, metrics.detections) == (2, 1, 0)


@pytest.mark.parametrize("boxes", [[], [(0, 0, 50, 50, 0, 1, 1.0)]], ids=["none", "only crowd"])
def test_a_split_without_boxes_is_a_data_error(boxes: list[tuple[float, ...]]) -> None:
    truth = ground_truth(columns([boxes], 1), np.array([0]))
    with pytest.raises(DataError, match="nothing to evaluate"):
        compute_metrics(truth, empty_detections([0]))


def test_images_that_were_not_seen_are_left_out_and_counted() -> None:
    index = columns([[(0, 0, 50, 50, 0, 0, 1.0)], [(0, 0, 60, 60, 0, 0, 1.0)]], 1)
    found = detections([0], [[0, 0, 50, 50]], [0.9], [0], [0])
    metrics = compute_metrics(ground_truth(index, np.array([0, 1])), found)
    assert (metrics.ap, metrics.num_images, metrics.missing, metrics.boxes) == (1.0, 1, 1, 1)


def test_only_the_boxes_of_the_given_rows_count() -> None:
    index = columns([[(0, 0, 9, 9, 0, 0, 1.0)], [], [(1, 1, 8, 8, 1, 0, 1.0), (2, 2, 7, 7, 0, 1, 1.0)]], 2)
    truth = ground_truth(index, np.array([2, 1]))
    assert truth.image_index.tolist() == [2, 2]
    assert truth.label.tolist() == [1, 0]
    assert truth.crowd.tolist() == [False, True]
    assert truth.boxes.tolist() == [[1, 1, 8, 8], [2, 2, 7, 7]]


def test_scoring_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    compute_metrics(*random_case(1, 3, 2))
    assert capfd.readouterr() == ("", "")


class Painter(nn.Module):
    """A double of a detector: finds the box that the image's first pixels spell, in one of three slots."""

    iou_threshold = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.BatchNorm2d(3)
        self.trained = nn.BatchNorm2d(3)
        self.frozen.eval()
        self.modes: list[bool] = []
        self.requested: tuple[float, float] | None = None

    def forward(self, images: Tensor) -> Tensor:
        self.modes.append(self.trained.training)
        return images[:, 0, 0, :4].float()

    def decode(self, raw: Tensor, resized_size: Tensor, scale: Tensor, size: Tensor, *, score_threshold: float,
               iou_threshold: float) -> BatchDetections:  # fmt: skip
        assert resized_size.shape == size.shape == (len(raw), 2)
        self.requested = (score_threshold, iou_threshold)
        yx = scale.flip(1).repeat(1, 2)
        boxes = torch.stack([raw / yx, raw / yx + 500, raw * 0], dim=1)
        scores = torch.tensor([0.9, 0.8, 0.0]).expand(len(raw), 3)
        valid = torch.tensor([True, False, False]).expand(len(raw), 3)
        return BatchDetections(boxes, scores, torch.zeros(len(raw), 3, dtype=torch.int64), valid)


def batch(rows: list[int], boxes: list[list[int]], scale: float = 0.5) -> Batch:
    count = len(rows)
    images = torch.zeros(count, 3, 32, 32, dtype=torch.uint8)
    images[:, 0, 0, :4] = torch.tensor(boxes, dtype=torch.uint8)
    return Batch(
        images=images,
        boxes=torch.zeros(count, 1, 4),
        labels=torch.zeros(count, 1, dtype=torch.int64),
        valid=torch.zeros(count, 1, dtype=torch.bool),
        resized_size=torch.full((count, 2), 32, dtype=torch.int32),
        scale=torch.full((count, 2), scale),
        original_size=torch.full((count, 2), 64, dtype=torch.int32),
        image_index=torch.tensor(rows),
        rand=torch.zeros(count, NUM_RAND),
    )


def test_a_loader_of_full_batches_with_filling_is_scored_in_original_pixels() -> None:
    index = columns([[(2, 2, 20, 20, 0, 0, 1.0)], [(4, 4, 40, 30, 0, 0, 1.0)], [(6, 6, 50, 50, 0, 0, 1.0)]], 1)
    batches = [
        batch([0, 1], [[1, 1, 10, 10], [2, 2, 20, 15]]),
        batch([2, -1], [[3, 3, 25, 25], [3, 3, 25, 25]]),
    ]
    model = Painter()
    found = detect(model, batches, CPU, precision="fp32", score_threshold=0.1, iou_threshold=0.6)
    metrics = compute_metrics(ground_truth(index, np.arange(3)), found)
    assert metrics.ap == pytest.approx(1.0)
    assert (metrics.num_images, metrics.detections, metrics.missing) == (3, 3, 0)
    assert model.requested == (0.1, 0.6)


def test_each_module_is_left_in_its_own_mode_also_after_a_failure() -> None:
    model = Painter()

    def broken() -> Any:
        yield batch([0], [[1, 1, 9, 9]])
        raise RuntimeError("the loader broke")

    with pytest.raises(RuntimeError, match="the loader broke"):
        detect(model, broken(), CPU, precision="fp32")
    assert model.modes == [False]
    assert (model.training, model.trained.training, model.frozen.training) == (True, True, False)


def test_detections_survive_buffers_that_are_used_again() -> None:
    """A loader may fill the same memory with its next batch."""
    reused = batch([0], [[1, 1, 10, 10]])

    def loader() -> Any:
        yield reused
        reused.image_index[0] = 1
        reused.images[0, 0, 0, :4] = torch.tensor([2, 2, 20, 20], dtype=torch.uint8)
        yield reused

    found = detect(Painter(), loader(), CPU, precision="fp32")
    assert found.image_indices.tolist() == [0, 1]
    assert found.boxes.tolist() == [[2, 2, 20, 20], [4, 4, 40, 40]]


def test_rows_that_fill_a_batch_are_left_out() -> None:
    found = detect(Painter(), [batch([4, -1], [[1, 1, 9, 9]] * 2)], CPU, precision="fp32")
    assert (found.image_index.tolist(), found.image_indices.tolist()) == ([4], [4])


def test_no_batches_is_nothing_found() -> None:
    assert len(detect(Painter(), [], CPU, precision="fp32")) == 0


def test_the_boxes_of_one_image_come_best_first() -> None:
    found = detections([3, 1, 3, 3], np.arange(16), [0.2, 0.9, 0.7, 0.4], [0, 1, 2, 3], [1, 3])
    assert found.of_image(3).label.tolist() == [2, 3, 0]
    assert len(found.of_image(2)) == 0


def test_some_images_are_the_same_every_time_with_their_own_boxes() -> None:
    index = columns([[(n, n, n + 9, n + 9, n % 2, 0, 1.0)] for n in range(10)], 2)
    found = detections([3, 3, 9], [[1, 1, 2, 2], [3, 3, 4, 4], [5, 5, 6, 6]], [0.9, 0.1, 0.8], [0, 0, 1], range(10))
    shown = sample_images(index, np.arange(3, 10), found, count=3)
    assert [one.path for one in shown] == [Path("3.jpg"), Path("6.jpg"), Path("9.jpg")]
    assert [one.gt.boxes.tolist() for one in shown] == [[[n, n, n + 9, n + 9]] for n in (3, 6, 9)]
    assert [one.detections.boxes.tolist() for one in shown] == [[[1, 1, 2, 2]], [], [[5, 5, 6, 6]]]


def test_an_evaluation_waits_for_the_device_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real model, every operator watched: only "nms" and "detections" may wait."""
    row = get_architecture("retinanet_tiny_fpn")
    model = build(ModelSettings(model="retinanet_tiny_fpn", weights="none", **row.defaults), 2)
    batches = [batch([0, 1], [[1, 1, 9, 9]] * 2), batch([2, -1], [[1, 1, 9, 9]] * 2)]
    with ForbidHostSync():
        found = detect(model, batches, CPU, precision="fp32", score_threshold=0.0)
    assert found.image_indices.tolist() == [0, 1, 2]
    assert len(found) > 0
    monkeypatch.setattr("stoker.evaluation.evaluate.allow_host_sync", lambda _: contextlib.nullcontext())
    with pytest.raises(HostSyncError), ForbidHostSync():
        detect(model, batches, CPU, precision="fp32")
