"""What the boxes suggest: known data in, the settings and their numbers out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.data.anchor_fit import AnchorConfig, best_iou
from stoker.data.index import open_index
from stoker.data.validation.suggestions import Suggestion, suggest
from tests.trainer.data.test_stats import PAPER, write

SETTINGS: dict[str, Any] = {
    "image_size": (800, 800), "resize": "letterbox", "anchor_sizes": PAPER.sizes, "anchor_scales": PAPER.scales,
    "aspect_ratios": PAPER.ratios, "fg_iou_thresh": 0.5, "bg_iou_thresh": 0.4, "focal_alpha": 0.25, "focal_gamma": 2.0,
}  # fmt: skip


def found(
    folder: Path, boxes: list[list[tuple[float, float, float, float]]], labels: int = 1, **more: Any
) -> dict[str, Suggestion]:
    settings = SETTINGS | {name: value for name, value in more.items() if name in SETTINGS}
    options = {name: value for name, value in more.items() if name not in SETTINGS}
    data = write(folder, boxes, labels=labels)
    write(folder, boxes[:2], split="valid", labels=labels)
    return {one.lever: one for one in suggest(open_index(data), settings, multiple=32, **options)}


def test_boxes_that_fit_suggest_nothing(tmp_path: Path) -> None:
    boxes = [[(100, 100, 60 + 7 * n, 60 + 7 * n), (400, 400, 45, 90)] for n in range(40)]
    assert set(found(tmp_path, boxes)) <= {"focal"}


def test_long_thin_boxes_get_anchors_with_a_better_possible_recall(tmp_path: Path) -> None:
    boxes = [[(100, 100, 30 + n, 6 * (30 + n))] for n in range(60)]
    all_ = found(tmp_path, boxes)
    one = all_["anchors"]
    anchors = AnchorConfig(one.changes["anchor_sizes"], PAPER.scales, one.changes["aspect_ratios"])
    ious = best_iou(np.array([[30.0 + n, 6.0 * (30 + n)] for n in range(60)]), anchors.anchor_wh())
    assert one.after == pytest.approx(float((ious >= 0.5).mean()))
    assert one.after > one.before + 0.5
    matcher = all_["matcher"]
    assert 0.35 <= matcher.changes["fg_iou_thresh"] < 0.5
    assert matcher.changes["bg_iou_thresh"] < matcher.changes["fg_iou_thresh"]


def test_the_focusing_follows_the_fraction_of_positive_anchors(tmp_path: Path) -> None:
    """One small box among 120,000 anchors; and an input that is nearly one object."""
    few = found(tmp_path / "few", [[(100, 100, 32, 32)]] * 5)
    assert few.get("focal") is None or few["focal"].after >= 2
    many = found(tmp_path / "many", [[(20 * k, 20 * k, 200, 200) for k in range(30)]] * 5, image_size=(160, 160))
    assert many["focal"].after < 2


def test_a_rare_class_suggests_repeats(tmp_path: Path) -> None:
    """Class 3 is in one of 100 images, class 2 in 40, class 1 in all."""
    boxes = [[(100, 100, 60, 60)] * (3 if n == 0 else 2 if n < 40 else 1) for n in range(100)]
    one = found(tmp_path, boxes, labels=3)["repeat_thresh"]
    assert one.changes == {"repeat_thresh": 0.4}
    assert "factor 6.3" in one.evidence  # sqrt(0.4 / 0.01)


def test_the_image_size_grows_with_small_boxes_and_shrinks_with_the_latency(tmp_path: Path) -> None:
    boxes = [[(100, 100, 24, 24), (300, 300, 60, 60)]] * 5
    one = found(tmp_path / "a", boxes, image_size=(160, 160))["box_image_size"]
    assert one.changes["image_size"] == (320, 320), "24 of 800 pixels are 7.7 of 256, and 9.6 of the next size"
    assert (one.before, one.after) == (0.5, 0.0)
    limited = {"image_size": (160, 160), "latency_ms": lambda size: size[0] * size[1] / 1000, "max_latency_ms": 20.0}
    assert found(tmp_path / "b", boxes, **limited)["box_image_size"].changes["image_size"] == (128, 128), "16.4 ms"
