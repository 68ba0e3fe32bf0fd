"""Image size and anchors for the shapes of a data set. Boxes with the shapes of anchors are fully covered."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.data.anchor_fit import (
    AnchorConfig,
    best_image_size,
    best_iou,
    box_dimensions,
    percentile_anchor_sizes,
    recommend_anchors,
)
from stoker.data.index import Index, open_index
from stoker.models import get_architecture
from stoker.models.layers.boxes import cell_anchors, iou
from tests.drawn import draw

PAPER = AnchorConfig((32.0, 64.0, 128.0, 256.0, 512.0), (1.0, 2 ** (1 / 3), 2 ** (2 / 3)), (0.5, 1.0, 2.0))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return open_index(draw(tmp_path_factory.mktemp("drawn"), train=60, val=12))


def row_of_sizes(index: Index, image_size: tuple[int, int], resize: str, levels: int) -> tuple[tuple[float, ...], str]:
    return percentile_anchor_sizes(
        box_dimensions(index, index.image_indices("train"), image_size, resize).resized_wh, image_size, levels
    )


@pytest.mark.parametrize(
    ("sizes", "side", "image_size"),
    [
        ([(480, 640)] * 9, 320, (288, 384)),
        ([(640, 480)] * 9, 320, (384, 288)),
        ([(320, 320)] * 9, 320, (320, 320)),
        ([(128, 128)] * 9, 320, (128, 128)),
        ([(100, 100)] * 9, 320, (128, 128)),
        ([(800, 800)] * 9, 800, (800, 800)),
        ([(0, 0)] * 9, 800, (800, 800)),
    ],
)
def test_image_size_has_the_aspect_ratio_of_the_data(
    sizes: list[tuple[int, int]], side: int, image_size: tuple[int, int]
):
    found, reason = best_image_size(np.array(sizes, np.int32), side)
    assert found == image_size
    assert reason


def test_image_size_of_mixed_data_wastes_little():
    rng = np.random.default_rng(0)
    sizes = np.stack([rng.integers(300, 700, 500), rng.integers(300, 1200, 500)], 1).astype(np.int32)
    (height, width), _ = best_image_size(sizes, 800)
    assert height % 32 == width % 32 == 0
    assert height * width <= 1.1 * 800**2
    assert width > height


def test_anchor_sizes_span_the_boxes(index: Index):
    sizes, _ = row_of_sizes(index, (64, 64), "letterbox", 3)
    sides = np.sqrt((index.boxes[:, 2:] - index.boxes[:, :2]).prod(1))
    assert np.percentile(sides, 5) < sizes[0] < sizes[1] < sizes[2] < np.percentile(sides, 95)
    half, _ = row_of_sizes(index, (32, 32), "letterbox", 3)
    assert half[1] == pytest.approx(sizes[1] / 2, abs=1)


def test_anchor_sizes_follow_the_resize_policy(index: Index):
    small, _ = row_of_sizes(index, (64, 64), "letterbox", 3)
    assert row_of_sizes(index, (128, 128), "letterbox", 3)[0] == pytest.approx([2 * s for s in small], abs=1)
    assert row_of_sizes(index, (64, 256), "letterbox", 3)[0] == small
    assert row_of_sizes(index, (64, 256), "squash", 3)[0] == pytest.approx([2 * s for s in small], abs=1)


@given(
    st.lists(st.floats(4, 600), min_size=1, max_size=5),
    st.lists(st.floats(0.5, 2), min_size=1, max_size=3),
    st.lists(st.floats(0.2, 5), min_size=1, max_size=3),
)
def test_shapes_are_those_of_the_models_anchors(sizes, scales, ratios):
    cells = torch.cat([cell_anchors(size, scales, ratios) for size in sizes])
    expected = (cells[:, 2:] - cells[:, :2]).numpy()
    found = AnchorConfig(tuple(sizes), tuple(scales), tuple(ratios)).anchor_wh()
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, expected.tolist()))


def test_the_papers_anchors_are_the_models_own():
    defaults = get_architecture("retinanet_resnet50_fpn").defaults
    assert (
        AnchorConfig(*(tuple(defaults[name]) for name in ("anchor_sizes", "anchor_scales", "aspect_ratios"))) == PAPER
    )


def test_best_iou_of_known_shapes():
    shapes = PAPER.anchor_wh()
    assert best_iou(shapes, shapes) == pytest.approx(1)
    assert best_iou(shapes[:1] * 0.5, shapes[:1]) == pytest.approx(0.25)
    assert best_iou(np.array([[8.0, 8.0]]), np.array([[32.0, 32.0]])) == pytest.approx(1 / 16)


@given(st.lists(st.tuples(st.floats(1, 900), st.floats(1, 900)), min_size=1, max_size=20))
def test_iou_is_that_of_centered_boxes(sides):
    boxes, shapes = np.array(sides), PAPER.anchor_wh()
    centered = [torch.tensor(np.concatenate([-x / 2, x / 2], 1), dtype=torch.float64) for x in (boxes, shapes)]
    assert best_iou(boxes, shapes) == pytest.approx(iou(*centered).max(1).values.numpy())


def test_anchors_that_fit_are_kept_and_others_replaced():
    rng = np.random.default_rng(0)
    fitting = PAPER.anchor_wh()[rng.integers(0, 45, 500)] * rng.uniform(0.95, 1.05, (500, 2))
    assert recommend_anchors(fitting, (800, 800), PAPER, iou_threshold=0.5)[0] == PAPER
    for sides in (rng.uniform(6, 18, (500, 2)), rng.uniform(20, 200, (500, 1)) * [[1.0, 6.0]]):
        found, why = recommend_anchors(sides, (800, 800), PAPER, iou_threshold=0.5)
        before, after = ((best_iou(sides, a.anchor_wh()) >= 0.5).mean() for a in (PAPER, found))
        assert after > before + 0.2
        assert "pretrained" in why
        assert [len(x) for x in found] == [5, 3, 3]
        assert list(found.sizes) == sorted(found.sizes)
    assert recommend_anchors(np.zeros((0, 2)), (800, 800), PAPER, iou_threshold=0.5)[0] == PAPER


def test_dimensions_exclude_crowds_and_images_of_unknown_size(index: Index):
    image_indices = index.image_indices("train")
    sides = box_dimensions(index, image_indices, (128, 128), "letterbox")
    assert sides.resized_wh == pytest.approx(sides.original_wh * 2)
    assert len(sides.box_index) == int(np.diff(index.offsets)[image_indices].sum())
    unknown = index.original_size.copy()
    unknown[image_indices[0]] = 0
    fewer = box_dimensions(index, image_indices, (128, 128), "letterbox", unknown)
    assert image_indices[0] not in fewer.image_index
    assert set(fewer.image_index.tolist()) == set(sides.image_index.tolist()) - {int(image_indices[0])}
