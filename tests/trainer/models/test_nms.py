"""NMS of final detections in rounds equals torchvision's, needs no host sync, and says for which images it is not
exact; those are repeated when the host reads them."""

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.ops import batched_nms

from stoker.data.batch import Batch
from stoker.evaluation.evaluate import detect_batches
from stoker.hardware.device import Device
from stoker.models.layers import postprocess
from stoker.models.layers.postprocess import (
    BatchDetections,
    Candidates,
    greedy_nms,
    largest_float32,
    nms_in_rounds,
    rescale_to_original,
)
from tests.host_sync import ForbidHostSync

CPU = Device(torch.device("cpu"))
EIGHTHS = 8
"""Coordinates are multiples of 1/8 pixel, so that torchvision's offset of 80 classes does not round them."""


def image_of(rng: np.random.Generator, *, boxes: int, classes: int, clusters: int, ties: bool) -> list[Tensor]:
    """(boxes, scores, labels) of one image: clusters of similar boxes; with ties, few different scores and some boxes
    twice. A tenth of the scores is zero."""
    center, side = rng.uniform(0, 500, (clusters, 2)), rng.uniform(10, 120, (clusters, 2))
    own = rng.integers(0, clusters, boxes)
    middle = center[own] + rng.normal(0, 0.15, (boxes, 2)) * side[own]
    half = side[own] * np.exp(rng.normal(0, 0.15, (boxes, 2))) / 2
    xyxy = np.round(np.concatenate((middle - half, middle + half), 1) * EIGHTHS) / EIGHTHS
    scores = rng.uniform(0.05, 1, boxes).astype(np.float32)
    if ties:
        scores = np.ceil(scores * 4) / 4
        xyxy[boxes // 2 :] = xyxy[: boxes - boxes // 2]
    scores[rng.uniform(size=boxes) < 0.1] = 0
    return [torch.tensor(some) for some in (xyxy.astype(np.float32), scores, rng.integers(0, classes, boxes))]


def chain(count: int) -> list[Tensor]:
    """Boxes of which each overlaps only its neighbors, by more than a half, best first: a round settles one of them."""
    start = torch.arange(count) * 3.0
    boxes = torch.stack((start, torch.zeros(count), start + 10, torch.full((count,), 10.0)), 1)
    return [boxes, torch.linspace(0.9, 0.1, count), torch.zeros(count, dtype=torch.int64)]


def as_candidates(*images: list[Tensor]) -> Candidates:
    """Images with equally many boxes."""
    return Candidates(*(torch.stack(column) for column in zip(*images, strict=True)))


def torchvision_nms(image: list[Tensor], threshold: float, most: int) -> list[Tensor]:
    """(boxes, scores, labels) that torchvision keeps, best first."""
    boxes, scores, labels = (column[image[1] > 0] for column in image)
    kept = batched_nms(boxes, scores, labels, threshold)[:most]
    return [boxes[kept], scores[kept], labels[kept]]


def check_image(found: BatchDetections, number: int, want: list[Tensor]) -> None:
    count = len(want[1])
    valid = found.valid[number]
    assert valid.tolist() == [True] * count + [False] * (len(valid) - count)
    for column, wanted in zip((found.boxes, found.scores, found.labels), want, strict=True):
        assert torch.equal(column[number, :count], wanted)
        assert not column[number, count:].any()


def test_500_random_images_are_as_in_torchvision() -> None:
    rng = np.random.default_rng(0)
    num_exact = num_kept = 0
    for case in range(25):
        boxes = (1, 7, 60, 200, 300)[case % 5]
        threshold, most = float(rng.choice([0.3, 0.45, 0.5, 0.6, 0.7])), int(rng.choice([5, 100]))
        images = [
            image_of(
                rng,
                boxes=boxes,
                classes=(1, 3, 80)[number % 3],
                clusters=int(rng.integers(1, 12)),
                ties=number % 2 == 0,
            )
            for number in range(20)
        ]
        images[case % 20][1].zero_()  # an image without candidates
        with ForbidHostSync():
            found = nms_in_rounds(as_candidates(*images), iou_threshold=threshold, max_detections=most)
        assert found.boxes.shape == (20, most, 4)
        assert found.check is not None
        for number, image in enumerate(images):
            if found.check.is_exact[number]:
                check_image(found, number, torchvision_nms(image, threshold, most))
                num_exact, num_kept = num_exact + 1, num_kept + int(found.valid[number].sum())
    assert num_exact >= 495
    assert num_kept > 5000


def test_integer_boxes_whose_iou_is_the_threshold() -> None:
    """Intersection 6, union 10: 0.6 in fp32 is above 0.6 in double precision, so torchvision removes the second box."""
    boxes = torch.tensor([[0.0, 0.0, 8.0, 1.0], [2.0, 0.0, 10.0, 1.0]])
    image = [boxes, torch.tensor([0.9, 0.8]), torch.zeros(2, dtype=torch.int64)]
    for threshold, count in ((0.6, 1), (0.61, 2), (0.59, 1)):
        found = nms_in_rounds(as_candidates(image), iou_threshold=threshold, max_detections=5)
        assert len(torchvision_nms(image, threshold, 5)[0]) == count
        assert found.valid.sum() == count


@pytest.mark.parametrize("value", [0.1, 0.3, 0.45, 0.5, 0.6, 0.65, 0.7])
def test_comparing_with_the_fp32_threshold_is_comparing_with_the_exact_one(value: float) -> None:
    near = np.float32(value)
    for number in (np.nextafter(near, np.float32(0)), near, np.nextafter(near, np.float32(1))):
        assert (float(number) > value) == (number > np.float32(largest_float32(value)))


def test_images_whose_rounds_or_boxes_were_too_few_are_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postprocess, "MAX_NMS_BOXES", 64)
    rng = np.random.default_rng(1)
    one_cluster = image_of(rng, boxes=200, classes=1, clusters=1, ties=False)
    two = image_of(rng, boxes=200, classes=1, clusters=1, ties=False)
    two[1][60:] = 0
    spread = image_of(rng, boxes=200, classes=80, clusters=100, ties=False)
    long = chain(200)
    long[1][60:] = 0
    candidates = as_candidates(one_cluster, two, spread, long)
    found = nms_in_rounds(candidates, iou_threshold=0.5, max_detections=20)
    assert found.check is not None
    assert found.check.is_exact.tolist() == [False, True, True, False]
    for number in (1, 2):
        check_image(found, number, torchvision_nms([c[number] for c in candidates], 0.5, 20))
    repeated = found.check.repeat([0, 3])
    for place, number in enumerate((0, 3)):
        check_image(repeated, place, torchvision_nms([c[number] for c in candidates], 0.5, 20))


class Fixed(torch.nn.Module):
    """A model that finds the same candidates in every batch. in_rounds: `decode` is that on an accelerator."""

    iou_threshold = 0.5

    def __init__(self, candidates: Candidates, *, in_rounds: bool) -> None:
        super().__init__()
        self.candidates, self.nms = candidates, nms_in_rounds if in_rounds else greedy_nms

    def forward(self, images: Tensor) -> Tensor:
        return images

    def decode(self, _: Tensor, __: Tensor, scale: Tensor, original_size: Tensor, **___: object) -> BatchDetections:
        selected = self.nms(self.candidates, iou_threshold=0.5, max_detections=30)
        return rescale_to_original(selected, scale, original_size)


def batches() -> Iterator[Batch]:
    size = torch.tensor([[600, 700]] * 3, dtype=torch.int32)
    for number in range(3):
        yield Batch(
            images=torch.zeros(3, 3, 8, 8, dtype=torch.uint8), boxes=torch.zeros(3, 1, 4),
            labels=torch.zeros(3, 1, dtype=torch.int64), valid=torch.zeros(3, 1, dtype=torch.bool), resized_size=size,
            scale=torch.tensor([[0.5, 0.25]]).repeat(3, 1) * (number + 1), original_size=size,
            image_index=torch.tensor([3, 4, -1 if number == 2 else 5]), rand=torch.zeros(3, 1),
        )  # fmt: skip


def test_detections_that_were_repeated_late_are_as_if_torchvision_had_made_all() -> None:
    rng = np.random.default_rng(2)
    easy = image_of(rng, boxes=90, classes=3, clusters=5, ties=False)
    candidates = as_candidates(easy, chain(90), easy)
    found, want = (
        list(
            detect_batches(
                Fixed(candidates, in_rounds=in_rounds), batches(), CPU, precision="fp32", score_threshold=0.05,
                iou_threshold=None,
            )
        )
        for in_rounds in (True, False)
    )  # fmt: skip
    assert len(found) == 3
    for ours, theirs in zip(found, want, strict=True):
        for name in ("image_index", "boxes", "score", "label", "image_indices"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
    plain = nms_in_rounds(candidates, iou_threshold=0.5, max_detections=30)
    greedy = greedy_nms(candidates, iou_threshold=0.5, max_detections=30)
    assert not torch.equal(plain.boxes[1], greedy.boxes[1]), "so that repeating it made the difference"


def test_nms_of_a_batch_on_an_accelerator_waits_for_nothing() -> None:
    """On another device than the CPU, `nms_per_class` takes the rounds; the meta device has no values to wait for."""
    candidates = Candidates(
        torch.empty(8, 5000, 4, device="meta"),
        torch.empty(8, 5000, device="meta"),
        torch.empty(8, 5000, dtype=torch.int64, device="meta"),
    )
    with ForbidHostSync():
        found = postprocess.nms_per_class(candidates, iou_threshold=0.5, max_detections=100)
    assert found.boxes.shape == (8, 100, 4)
    assert found.check is not None


SCRIPT = """
import sys, torch
from stoker.models.layers.postprocess import torchvision_nms
nms = torchvision_nms()
assert "torchvision" not in sys.modules
import torchvision
boxes = torch.rand(100, 4, generator=torch.Generator().manual_seed(0)) * 50
boxes[:, 2:] += boxes[:, :2]
scores = torch.linspace(0, 1, 100)
kept = nms(boxes, scores, 0.5)
assert 1 < len(kept) < 100
assert torch.equal(kept, torchvision.ops.nms(boxes, scores, 0.5))
"""


@pytest.mark.slow
def test_torchvisions_nms_is_used_without_importing_torchvision_and_with_it() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("num_boxes", [0, 1, 300, 1000, 1001, 2500])
@pytest.mark.parametrize("num_labels", [1, 7])
def test_greedy_nms_within_labels_is_torchvisions(num_boxes: int, num_labels: int) -> None:
    random = torch.Generator().manual_seed(num_boxes)
    boxes = torch.rand(1, num_boxes, 4, generator=random) * 200
    boxes[..., 2:] = boxes[..., :2] + boxes[..., 2:] / 2
    scores = torch.randperm(num_boxes, generator=random)[None] / num_boxes  # one is 0, which is no candidate
    labels = torch.randint(0, num_labels, (1, num_boxes), generator=random)
    found = greedy_nms(Candidates(boxes, scores, labels), iou_threshold=0.5, max_detections=100)
    positive = scores[0] > 0
    expected = batched_nms(boxes[0][positive], scores[0][positive], labels[0][positive], 0.5)[:100]
    count = int(found.valid.sum())
    assert count == len(expected)
    assert torch.equal(found.boxes[0, :count], boxes[0][positive][expected])
