"""Facts and warnings about a run's data, against counts by hand."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from stoker.config.settings import Config, from_fields
from stoker.data.index import Index, open_index
from stoker.models.ember import REG_MAX
from stoker.training.defaults.checks import warn_oversized_boxes
from tests.drawn import draw


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return open_index(draw(tmp_path / "data", train=3, val=1, side=64))


def config(model: str, side: int) -> Config:
    return from_fields({"data": "unread", "model": model, "image_size": (side, side), "resize": "letterbox"})


def test_boxes_longer_than_ember_predicts_are_counted(index: Index) -> None:
    first, last = index.offsets[index.image_indices("train")[0]], index.offsets[index.image_indices("train")[-1] + 1]
    boxes = index.boxes.copy()
    boxes[first:last] = (0, 0, 10, 10)
    boxes[first] = (1, 0, 61, 4)  # 60 pixels of 64
    long = dataclasses.replace(index, boxes=boxes)
    assert warn_oversized_boxes(config("ember_n", 1024), long) is None  # 60 · 1024 / 64 = 960
    assert 2 * (REG_MAX - 1) * 32 == 960  # what the table says of the longest box at stride 32
    said = warn_oversized_boxes(config("ember_n", 1056), long)
    assert said is not None
    assert said.startswith(f"1 of {last - first} boxes are longer than 960 pixels at the image size 1056×1056 (up")
    assert warn_oversized_boxes(config("retinanet_tiny_fpn", 1056), long) is None


def test_images_without_boxes_give_no_warning(index: Index) -> None:
    empty = dataclasses.replace(index, offsets=np.zeros_like(index.offsets), boxes=index.boxes[:0],
                                labels=index.labels[:0], crowd=index.crowd[:0])  # fmt: skip
    assert warn_oversized_boxes(config("ember_n", 1056), empty) is None
