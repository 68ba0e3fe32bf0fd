"""The parts of the two-stage detector: NMS in rounds, sampling by lot, pooling from a pyramid."""

import inspect

import pytest
import torch
from torch import Tensor
from torchvision.models.detection import faster_rcnn as torchvision_faster_rcnn
from torchvision.ops import MultiScaleRoIAlign, nms

from stoker.models import faster_rcnn
from stoker.models.faster_rcnn import FasterRCNN, Proposals, propose, sample_rois
from stoker.models.layers import postprocess
from stoker.models.layers.boxes import AnchorOutputs
from stoker.models.layers.matching import KEY_RANGE, random_keys, sample_balanced
from stoker.models.layers.postprocess import NMS_ROUNDS, fixed_point_nms
from stoker.models.layers.roi_align import assign_fpn_level, multiscale_roi_align, roi_align_each_level


def clustered(count: int, seed: int) -> Tensor:
    """Boxes [count, 4] around 20 objects, best first."""
    draw = torch.Generator().manual_seed(seed)
    center, side = torch.rand(20, 2, generator=draw) * 500, torch.rand(20, 2, generator=draw) * 80 + 10
    own = torch.randint(20, (count,), generator=draw)
    middle = center[own] + torch.randn(count, 2, generator=draw) * side[own] * 0.1
    half = side[own] * torch.exp(torch.randn(count, 2, generator=draw) * 0.1) / 2
    return torch.cat((middle - half, middle + half), 1)


def greedy(boxes: Tensor, threshold: float) -> list[int]:
    """torchvision's NMS of boxes that are best first."""
    return sorted(nms(boxes, torch.arange(len(boxes), 0, -1.0), threshold).tolist())


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7])
def test_kept_boxes_are_those_of_greedy_nms(threshold: float) -> None:
    boxes = torch.stack([clustered(500, seed) for seed in range(3)])
    stay, calibrated = fixed_point_nms(boxes, torch.ones(3, 500, dtype=torch.bool), iou_threshold=threshold)
    assert calibrated.all()
    for own, kept in zip(boxes, stay, strict=True):
        assert kept.nonzero()[:, 0].tolist() == greedy(own, threshold)
        assert 10 < kept.sum() < 450


def test_what_takes_no_part_suppresses_nothing() -> None:
    boxes = clustered(300, 1)[None]
    eligible = torch.arange(300)[None] % 3 > 0
    stay, _ = fixed_point_nms(boxes, eligible, iou_threshold=0.5)
    places = eligible[0].nonzero()[:, 0]
    assert stay[0].nonzero()[:, 0].tolist() == places[greedy(boxes[0, places], 0.5)].tolist()


def chain(count: int, step: float = 3.0) -> Tensor:
    """Boxes of which each overlaps the one before and the one after it, and no other, by more than a half (step 3) or
    more than 0.7 (step 1.5)."""
    start = torch.arange(count) * step
    return torch.stack((start, torch.zeros(count), start + 10, torch.full((count,), 10.0)), 1)


@pytest.mark.parametrize("rounds", [1, 2, 7, 8, 99])
def test_a_long_chain_is_right_as_far_as_the_rounds_go(rounds: int) -> None:
    boxes = chain(100)[None]
    gt = torch.arange(100) % 2 == 0  # greedy: every other one
    assert greedy(boxes[0], 0.5) == gt.nonzero()[:, 0].tolist()
    stay, calibrated = fixed_point_nms(
        boxes, torch.ones(1, 100, dtype=torch.bool), iou_threshold=0.5, num_rounds=rounds
    )
    assert not calibrated
    assert torch.equal(stay[0, :rounds], gt[:rounds])
    larger, smaller = (stay[0], gt) if rounds % 2 == 0 else (gt, stay[0])
    assert (larger | ~smaller).all()  # the smaller is part of the larger
    if rounds < 99:
        assert not torch.equal(stay[0], gt)


def test_a_chain_that_the_rounds_suffice_for_is_settled() -> None:
    boxes = torch.stack((chain(NMS_ROUNDS), chain(NMS_ROUNDS) * 7))
    stay, calibrated = fixed_point_nms(boxes, torch.ones(2, NMS_ROUNDS, dtype=torch.bool), iou_threshold=0.5)
    assert calibrated.tolist() == [True, True]
    assert stay[1].nonzero()[:, 0].tolist() == greedy(boxes[1], 0.5)


def test_there_are_proposals_of_images_that_ran_out_of_rounds() -> None:
    count = 200
    anchors = torch.cat((chain(count, 1.5), clustered(count, 2) + 1000))
    rising = torch.linspace(5, -5, count)
    logits = torch.cat((rising, rising)).repeat(2, 1)
    logits[1] = rising[torch.randperm(count, generator=torch.Generator().manual_seed(0))].repeat(2)
    resized_size = torch.tensor([[2000, 2000]] * 2, dtype=torch.int32)
    predicted = AnchorOutputs(logits[..., None], torch.zeros(2, 2 * count, 4), anchors, (count, count))
    found = propose(predicted, resized_size, top_n=300, min_score=0.0)
    assert found.boxes.shape == (2, 300, 4)
    assert not found.boxes[~found.valid].any()


def test_keys_are_different_within_an_image_and_spread() -> None:
    draw = torch.tensor([0.0, 0.25, 0.25 + 2**-24])
    own = random_keys(draw, 100_000, stream=0)
    assert own.min() >= 0
    assert own.max() < KEY_RANGE
    assert all(len(some.unique()) == 100_000 for some in own)
    share = own.double() / KEY_RANGE
    assert (share.mean(1) - 0.5).abs().max() < 0.005
    # Those of neighboring draws, of neighboring candidates and of other purposes have nothing to do with each other.
    others = torch.stack(
        (share[0], share[1], share[2], share[0].roll(1), random_keys(draw, 100_000, stream=1)[0] / KEY_RANGE)
    )
    correlation = torch.corrcoef(others) - torch.eye(5)
    assert correlation.abs().max() < 0.02
    assert torch.equal(own, random_keys(draw, 100_000, stream=0))


@pytest.mark.parametrize(
    ("positives", "negatives", "expected"), [(40, 500, (8, 24)), (3, 500, (3, 29)), (40, 5, (8, 5))]
)
def test_a_sample_has_the_least_keys(positives: int, negatives: int, expected: tuple[int, int]) -> None:
    own = random_keys(torch.tensor([0.1, 0.7]), 600, stream=0)
    kind = torch.full((2, 600), -1)
    for image in range(2):
        order = torch.randperm(600, generator=torch.Generator().manual_seed(image))
        kind[image, order[:positives]] = 1
        kind[image, order[positives : positives + negatives]] = 0
    chosen = sample_balanced(own, kind == 1, kind == 0, num_samples=32, max_positives=8)
    for image in range(2):
        for value, count in zip((1, 0), expected, strict=True):
            least = [place for place in own[image].argsort().tolist() if kind[image, place] == value][:count]
            slots = chosen.valid[image] & (chosen.positive[image] == bool(value))
            assert chosen.indices[image][slots].tolist() == least


def test_a_sample_has_no_more_skeys_than_candidates() -> None:
    positive = torch.tensor([[True, False, False]])
    chosen = sample_balanced(
        random_keys(torch.tensor([0.5]), 3, stream=0), positive, ~positive, num_samples=256, max_positives=128
    )
    assert chosen.indices.sort().values.tolist() == [[0, 1, 2]]
    assert chosen.valid.all()


def test_a_box_without_an_area_is_no_region() -> None:
    boxes = torch.tensor([[[10.0, 10, 30, 40], [20, 20, 20, 50]]])
    none = Proposals(torch.zeros(1, 4, 4), torch.zeros(1, 4) > 0)
    found = sample_rois(none, boxes, torch.tensor([[3, 4]]), torch.ones(1, 2) > 0, torch.zeros(1))
    assert found.valid.sum() == 1
    assert found.boxes[found.valid].tolist() == [[10, 10, 30, 40]]
    assert found.target[found.valid].tolist() == [4]
    assert torch.isfinite(found.offsets[found.valid]).all()


STRIDES, CANVAS = (4, 8, 16, 32), (512, 640)


def pyramid(dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, 5, CANVAS[0] // stride, CANVAS[1] // stride) for stride in STRIDES]
    maps = [torch.randn(shape, dtype=dtype, generator=draw) for shape in shapes]
    return [some.contiguous(memory_format=torch.channels_last).requires_grad_() for some in maps]


def regions(dtype: torch.dtype) -> Tensor:
    """Boxes of all sizes in two images, cut off at the model input; many at its edges, some below a feature cell."""
    draw = torch.Generator().manual_seed(1)
    size = torch.tensor([CANVAS[1], CANVAS[0]])
    center = torch.rand(2, 400, 2, generator=draw) * size * 1.2 - 0.1 * size
    half = torch.exp(torch.rand(2, 400, 2, generator=draw) * 8 - 2)
    boxes = torch.cat((center - half, center + half), -1)
    return torch.minimum(boxes.clamp(min=0), size.repeat(2).float()).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-4)])
@pytest.mark.parametrize(
    "how", [multiscale_roi_align, lambda *given: roi_align_each_level(*given, assign_fpn_level(given[2], given[1]))]
)
def test_pooled_features_and_gradients_are_those_of_torchvision(how, dtype: torch.dtype, tolerance: float) -> None:  # type: ignore[no-untyped-def]
    boxes, ours, theirs = regions(dtype), pyramid(dtype), pyramid(dtype)
    assert assign_fpn_level(boxes, STRIDES).unique().tolist() == [0, 1, 2, 3]
    found = how(ours, STRIDES, boxes)
    named = {str(place): some for place, some in enumerate(theirs)}
    expected = MultiScaleRoIAlign(list(named), 7, 2)(named, list(boxes), [CANVAS] * 2)
    assert (found - expected).abs().max() < tolerance
    weight = torch.randn(found.shape, dtype=dtype, generator=torch.Generator().manual_seed(2))
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.grad - other.grad).abs().max() < tolerance * other.grad.abs().max()


def test_one_level_takes_all_boxes() -> None:
    boxes, level = regions(torch.float64), pyramid(torch.float64)[3]
    expected = MultiScaleRoIAlign(["0"], 7, 2)({"0": level}, list(boxes), [CANVAS] * 2)
    assert (multiscale_roi_align([level], [32], boxes) - expected).abs().max() < 1e-12


def test_constants_are_torchvisions_defaults() -> None:
    defaults = {name: p.default for name, p in inspect.signature(torchvision_faster_rcnn.FasterRCNN).parameters.items()}
    rpn_samples, roi_samples = defaults["rpn_batch_size_per_image"], defaults["box_batch_size_per_image"]
    assert (rpn_samples, rpn_samples * defaults["rpn_positive_fraction"]) == (
        faster_rcnn.RPN_SAMPLES, faster_rcnn.RPN_MAX_POSITIVES,
    )  # fmt: skip
    assert (roi_samples, roi_samples * defaults["box_positive_fraction"]) == (
        faster_rcnn.ROI_SAMPLES, faster_rcnn.ROI_MAX_POSITIVES,
    )  # fmt: skip
    assert defaults["box_fg_iou_thresh"] == defaults["box_bg_iou_thresh"] == faster_rcnn.FG_IOU_THRESH
    assert defaults["rpn_nms_thresh"] == faster_rcnn.NMS_THRESH
    assert defaults["rpn_post_nms_top_n_train"] == FasterRCNN.num_train_proposals
    assert defaults["rpn_post_nms_top_n_test"] == FasterRCNN.num_test_proposals
    assert (defaults["box_nms_thresh"], defaults["box_detections_per_img"]) == (
        FasterRCNN.iou_threshold, postprocess.MAX_DETECTIONS,
    )  # fmt: skip
