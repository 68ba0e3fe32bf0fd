"""torchvision's Matcher is the oracle, image by image, without the padding that it does not know."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.models.detection._utils import Matcher
from torchvision.ops import box_iou

from stoker.models.layers.matching import BACKGROUND, match_anchors

# Whole coordinates on a small grid: boxes tie with each other, repeat, and equal anchors all the time.
corners = st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 8), st.integers(1, 8))
images = st.lists(st.lists(corners, max_size=6), min_size=1, max_size=3)

EVERYWHERE = torch.tensor([[-1.0, -1.0, 21.0, 21.0]])
"""An anchor that overlaps every box: a box that overlaps none is where we differ on purpose."""


def xyxy(corner: tuple[int, int, int, int]) -> list[float]:
    x, y, width, height = corner
    return [float(x), float(y), float(x + width), float(y + height)]


def expected(boxes: Tensor, slots: Tensor, anchors: Tensor, foreground: float, background: float) -> Tensor:
    """The oracle's matches of one image, in slots of the padded batch."""
    if len(slots) == 0:
        return torch.full((len(anchors),), BACKGROUND)
    found = Matcher(foreground, background, allow_low_quality_matches=True)(box_iou(boxes[slots], anchors))
    return torch.where(found >= 0, slots[found.clamp(min=0)], found)


@given(
    images=images,
    anchors=st.lists(corners, min_size=1, max_size=12),
    thresholds=st.sampled_from([(0.5, 0.4), (0.7, 0.3), (0.5, 0.5), (0.2, 0.0)]),
    block=st.sampled_from([1, 7, 30, None]),
    gap=st.integers(0, 2),
)
@settings(max_examples=200, deadline=None)
def test_matches_are_those_of_torchvision(
    images: list[list[tuple[int, int, int, int]]],
    anchors: list[tuple[int, int, int, int]],
    thresholds: tuple[float, float],
    block: int | None,
    gap: int,
) -> None:
    slots = 8 + 2 * gap
    boxes, valid = torch.zeros(len(images), slots, 4), torch.zeros(len(images), slots, dtype=torch.bool)
    for image, corners_of_it in enumerate(images):
        for place, corner in enumerate(corners_of_it):
            boxes[image, gap + place] = torch.tensor(xyxy(corner))
            valid[image, gap + place] = True
    grid = torch.cat((torch.tensor([xyxy(corner) for corner in anchors]), EVERYWHERE))
    foreground, background = thresholds
    found = match_anchors(boxes, valid, grid, fg_iou_thresh=foreground, bg_iou_thresh=background, block=block)
    for image in range(len(images)):
        used = valid[image].nonzero()[:, 0]
        assert torch.equal(found[image], expected(boxes[image], used, grid, foreground, background))


def test_a_box_that_overlaps_no_anchor_takes_none() -> None:
    anchors = torch.tensor([[0.0, 0.0, 4.0, 4.0], [4.0, 0.0, 8.0, 4.0]])
    boxes = torch.tensor([[[20.0, 20.0, 24.0, 24.0]]])
    found = match_anchors(boxes, torch.ones(1, 1, dtype=torch.bool), anchors, fg_iou_thresh=0.5, bg_iou_thresh=0.4)
    assert found.tolist() == [[BACKGROUND, BACKGROUND]]


def test_what_padding_holds_does_not_matter() -> None:
    draw = torch.Generator().manual_seed(0)
    anchors = torch.rand(50, 2, generator=draw) * 10
    anchors = torch.cat((anchors, anchors + 5), 1)
    boxes, valid = anchors[:6].clone()[None], torch.tensor([[True, False, True, True, False, False]])
    known = match_anchors(boxes, valid, anchors, fg_iou_thresh=0.5, bg_iou_thresh=0.4)
    boxes[0, [1, 4, 5]] = torch.nan
    assert torch.equal(known, match_anchors(boxes, valid, anchors, fg_iou_thresh=0.5, bg_iou_thresh=0.4))
    assert set(known[0].tolist()) <= {-2, -1, 0, 2, 3}


def test_thresholds_are_exact() -> None:
    heights = [100.0, 51.0, 49.0, 42.0, 38.0]  # IoU 1.00, 0.51 … 0.38 with the box
    anchors = torch.tensor([[0.0, 0.0, 100.0, height] for height in heights])
    boxes, valid = torch.tensor([[[0.0, 0.0, 100.0, 100.0]]]), torch.tensor([[True]])
    gt_index = match_anchors(boxes, valid, anchors, fg_iou_thresh=0.5, bg_iou_thresh=0.4)
    assert gt_index.tolist() == [[0, 0, -2, -2, -1]]
