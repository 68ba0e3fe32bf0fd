"""Task-aligned assignment: against a slow, plain reading of the paper, and in the cases that break such code."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stoker.models.ember import TALAssignment, assign_task_aligned
from stoker.models.fcos import grid_points
from stoker.models.layers.matching import BACKGROUND

CANVAS = (64, 96)
CENTRE = grid_points(CANVAS, [(8, 12), (4, 6), (2, 3)], torch.device("cpu"), shift=0.5).center
REACH = 4.0
ALPHA, BETA = 1.0, 6.0
"""TOOD, section 4.1; not imported, so that a change of the module's constants fails."""


def overlap_of(a: list[float], b: list[float]) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    return width * height / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - width * height)


def by_the_paper(
    logits: Tensor, predicted: Tensor, boxes: Tensor, labels: Tensor, valid: Tensor, most: int
) -> tuple[list[int], list[float]]:
    """Slots and qualities of one image."""
    center, scores = CENTRE.tolist(), logits.sigmoid()
    overlaps, alignments = {}, {}
    wants: dict[int, list[int]] = {}
    for m, (x1, y1, x2, y2) in enumerate(boxes.tolist()):
        if not valid[m]:
            continue
        half_width, half_height = max((x2 - x1) / 2, REACH), max((y2 - y1) / 2, REACH)
        near = []
        for a, (x, y) in enumerate(center):
            if abs(x - (x1 + x2) / 2) <= half_width and abs(y - (y1 + y2) / 2) <= half_height:
                overlaps[m, a] = overlap_of([x1, y1, x2, y2], predicted[a].tolist())
                alignments[m, a] = scores[a, labels[m]].item() ** ALPHA * overlaps[m, a] ** BETA
                near.append(a)
        for a in sorted(near, key=lambda a: -alignments[m, a])[:most]:
            wants.setdefault(a, []).append(m)
    slots, best = [BACKGROUND] * len(center), {}
    for a, rivals in wants.items():
        slots[a] = max(rivals, key=lambda m: (overlaps[m, a], -m))
    for m in {slot for slot in slots if slot >= 0}:
        mine = [a for a, slot in enumerate(slots) if slot == m]
        best[m] = max(alignments[m, a] for a in mine), max(overlaps[m, a] for a in mine)
    qualities = [
        0.0 if m < 0 or best[m][0] == 0 else alignments[m, a] / best[m][0] * best[m][1] for a, m in enumerate(slots)
    ]
    return slots, qualities


def random_case(
    counts: tuple[int, ...], slots: int, seed: int, *, classes: int = 3, largest: float = 0.7
) -> dict[str, Tensor]:
    """Random boxes in scattered slots, and predictions that all overlap what is around their point."""
    draw = torch.Generator().manual_seed(seed)
    images, points = len(counts), CENTRE.shape[0]
    size = torch.tensor([CANVAS[1], CANVAS[0]])
    boxes, valid = torch.zeros(images, slots, 4), torch.zeros(images, slots) > 0
    for b, count in enumerate(counts):
        used = torch.randperm(slots, generator=draw)[:count]
        first, last = torch.rand(2, count, 2, generator=draw)
        sides = 1.0 + last**2 * largest * size
        corner = first * (size - sides)
        boxes[b, used] = torch.cat((corner, corner + sides), 1)
        valid[b, used] = True
    around = torch.rand(images, points, 4, generator=draw) * 24 + 8.5
    predicted = torch.cat((CENTRE - around[..., :2], CENTRE + around[..., 2:]), -1)
    labels = torch.randint(0, classes, (images, slots), generator=draw)
    logits = torch.randn(images, points, classes, generator=draw) * 2
    return {"logits": logits, "predicted": predicted, "boxes": boxes, "labels": labels, "valid": valid}


def found_for(case: dict[str, Tensor], most: int, block: int | None = None) -> TALAssignment:
    return assign_task_aligned(
        case["logits"], case["predicted"], CENTRE, case["boxes"], case["labels"], case["valid"],
        center_radius=REACH, topk=most, block=block,
    )  # fmt: skip


@settings(deadline=None, max_examples=25)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    most=st.integers(1, 13),
    seed=st.integers(0, 2**20),
    largest=st.sampled_from([0.02, 0.3, 0.9]),
)
def test_it_is_what_the_paper_says(counts: list[int], most: int, seed: int, largest: float) -> None:
    case = random_case(tuple(counts), 9, seed, largest=largest)
    found = found_for(case, most)
    for b in range(len(counts)):
        slots, qualities = by_the_paper(**{name: some[b] for name, some in case.items()}, most=most)
        assert found.gt_index[b].tolist() == slots
        assert found.quality[b].tolist() == pytest.approx(qualities, rel=1e-4, abs=1e-6)


@settings(deadline=None, max_examples=20)
@given(block=st.integers(1, 4000), seed=st.integers(0, 2**20))
def test_how_it_is_cut_into_blocks_changes_nothing(block: int, seed: int) -> None:
    case = random_case((4, 0, 9), 9, seed)
    whole, cut = found_for(case, 10, block=10**9), found_for(case, 10, block=block)
    assert torch.equal(whole.gt_index, cut.gt_index)
    torch.testing.assert_close(whole.quality, cut.quality)  # powers in other places of a vector are rounded otherwise


@settings(deadline=None, max_examples=30)
@given(x=st.floats(0, 96), y=st.floats(0, 64), width=st.floats(1e-3, 7), height=st.floats(1e-3, 7))
def test_every_box_has_a_point_however_small_and_wherever(x: float, y: float, width: float, height: float) -> None:
    case = random_case((1,), 1, 0)
    case["boxes"][0, 0] = torch.tensor([x - width / 2, y - height / 2, x + width / 2, y + height / 2])
    case["valid"][0, 0] = True
    for most in (1, 10):
        count = (found_for(case, most).gt_index == 0).sum().item()
        assert 1 <= count <= most


def test_an_image_without_boxes_has_background_alone() -> None:
    found = found_for(random_case((0, 3), 5, 1), 10)
    assert (found.gt_index[0] == BACKGROUND).all()
    assert found.quality[0].abs().sum() == 0
    assert (found.gt_index[1] >= 0).any()


def test_more_boxes_than_points_share_them() -> None:
    count = CENTRE.shape[0] + 50
    case = random_case((count,), count, 3)
    found = found_for(case, 10)
    assert 0.9 * CENTRE.shape[0] < (found.gt_index >= 0).sum() <= CENTRE.shape[0]
    assert found.quality.isfinite().all()


def test_of_equal_boxes_the_lowest_slot_has_the_points() -> None:
    case = random_case((3,), 3, 5)
    case["boxes"][0] = torch.tensor([20.0, 20.0, 60.0, 50.0])
    case["labels"][:] = 1
    found = found_for(case, 10)
    assert set(found.gt_index.flatten().tolist()) == {BACKGROUND, 0}
    assert (found.gt_index == 0).sum() == 10


def test_predictions_that_overlap_nothing_are_positive_of_no_quality() -> None:
    """The start of a training may be so: a box keeps its points, and nothing is divided by 0."""
    case = random_case((2,), 2, 7, largest=0.2)
    case["predicted"] = torch.tensor([500.0, 500.0, 510.0, 510.0]).expand_as(case["predicted"])
    found = found_for(case, 10)
    assert (found.gt_index >= 0).any()
    assert (found.quality == 0).all()


def test_the_best_point_of_a_box_should_score_its_largest_overlap() -> None:
    case = random_case((1,), 1, 11)
    case["boxes"][0, 0] = torch.tensor([10.0, 10.0, 60.0, 50.0])
    found = found_for(case, 10)
    mine = found.gt_index[0] == 0
    overlaps = [overlap_of([10.0, 10.0, 60.0, 50.0], box) for box in case["predicted"][0][mine].tolist()]
    assert math.isclose(found.quality.max().item(), max(overlaps), rel_tol=1e-5)
