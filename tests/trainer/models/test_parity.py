"""torchvision's RetinaNet is the oracle: same weights, same batch, same losses, gradients and detections.

Here: every kind of batch and every setting. `test_retinanets.py` has every row of MODELS.
"""

import pytest
import torch

from tests.trainer.models.oracle import check_detections, check_losses_and_gradients, oracle_of, relative
from tests.trainer.models.samples import calibrated_model, make_batch, settings_of

CLASSES = 7
COUNTS = [(3, 7), (0, 5), (0, 0), (16, 1)]
SETUPS = {
    "mobilenet": ("retinanet_mobilenet_v2_fpn", (160, 64)),
    "lite": ("retinanet_mobilenet_v2_fpnlite", (64, 128)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "box_loss"),
    [
        ("lite", "giou"),
        pytest.param("mobilenet", "l1", marks=pytest.mark.slow),
        pytest.param("mobilenet", "giou", marks=pytest.mark.slow),
        pytest.param("lite", "l1", marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_are_those_of_torchvision(setup: str, box_loss: str) -> None:
    name, image_size = SETUPS[setup]
    model = calibrated_model(settings_of(name, box_loss=box_loss), CLASSES, image_size).train()
    oracle = oracle_of(model, image_size).train()
    for seed, counts in enumerate(COUNTS):
        check_losses_and_gradients(model, oracle, make_batch(counts, image_size, CLASSES, seed=seed))


@pytest.mark.parametrize(
    ("candidates", "best"),
    [(1000, 20), *(pytest.param(n, None, marks=pytest.mark.slow) for n in (1000, 40))],
)
@pytest.mark.parametrize("setup", ["lite", pytest.param("mobilenet", marks=pytest.mark.slow)])
def test_detections_are_those_of_torchvision(setup: str, candidates: int, best: int | None) -> None:
    name, image_size = SETUPS[setup]
    model = calibrated_model(settings_of(name), CLASSES, image_size).eval()
    oracle = oracle_of(model, image_size).eval()
    model.pre_nms_top_n = oracle.topk_candidates = candidates
    batch = make_batch((0, 0, 0), image_size, CLASSES, seed=5)
    # The second image was shrunk to half and fills a part of the model input; the third was squashed.
    resized_size = torch.tensor([image_size, (image_size[0] - 40, image_size[1] - 24), image_size], dtype=torch.int32)
    size = torch.stack((resized_size[0], resized_size[1] * 2, resized_size[2] * torch.tensor([3, 1])))
    batch = batch._replace(resized_size=resized_size, original_size=size.int(), scale=resized_size / size)
    score_threshold = 0.05
    if best is not None:  # a threshold that leaves the first image that many boxes
        with torch.no_grad():
            whole = model.decode(model(batch.images), batch.resized_size, batch.scale, batch.original_size)
        score_threshold = whole.scores[0, best - 1 : best + 1].mean().item()
    count = check_detections(model, oracle, batch, score_threshold=score_threshold)
    assert 30 < count <= 100 if best is None else count == best  # else the test shows nothing


def test_two_halves_average_to_the_whole_batch() -> None:
    image_size = (96, 128)
    model = calibrated_model(settings_of("retinanet_mobilenet_v2_fpn"), CLASSES, image_size).train()
    batch = make_batch((3, 7, 0, 1), image_size, CLASSES)
    whole = model.loss(model(batch.images), batch)
    halves = [type(batch)(*(field[half] for field in batch)) for half in (slice(0, 2), slice(2, 4))]
    parts = [model.loss(model(half.images), half) for half in halves]
    for part, loss in whole.items():
        assert relative((parts[0][part] + parts[1][part]) / 2, loss) < 1e-5
