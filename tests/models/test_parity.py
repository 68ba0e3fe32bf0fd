"""torchvision's RetinaNet is the oracle: same weights, same batch, same losses, gradients and detections."""

import pytest
import torch
from torch import Tensor

from tests.models.oracle import oracle_detections, oracle_losses, oracle_of, to_oracle
from tests.models.samples import make_batch, settings_of, settled_model

CLASSES = 7
COUNTS = [(3, 7), (0, 5), (0, 0), (16, 1)]
SETUPS = {
    "mobilenet": ("retinanet_mobilenet_v2_fpn", "train", (192, 256)),
    "mobilenet-tall": ("retinanet_mobilenet_v2_fpn", "frozen", (224, 96)),
    "resnet50": ("retinanet_resnet50_fpn", "frozen", (64, 96)),
}


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference, relative to theirs; absolute where theirs is nothing."""
    scale = theirs.norm().item()
    return (ours - theirs).norm().item() / (scale if scale > 1e-8 else 1.0)


@pytest.mark.parametrize("box_loss", ["l1", "giou"])
@pytest.mark.parametrize("setup", SETUPS)
def test_losses_and_gradients_are_those_of_torchvision(setup: str, box_loss: str) -> None:
    name, norm, canvas = SETUPS[setup]
    model = settled_model(settings_of(name, norm=norm, box_loss=box_loss), CLASSES, canvas).train()
    oracle = oracle_of(model, canvas).train()
    for seed, counts in enumerate(COUNTS):
        batch = make_batch(counts, canvas, CLASSES, seed=seed)
        ours, theirs = model.loss(model(batch.images), batch), oracle_losses(oracle, batch)
        assert ours.keys() == theirs.keys()
        for part, loss in theirs.items():
            assert torch.isfinite(loss)
            assert relative(ours[part], loss) < 1e-4, (part, counts)
        names = [n for n, p in model.named_parameters() if p.requires_grad]
        our_gradients, their_gradients = _gradients(model, ours, names), _gradients(oracle, theirs, names)
        whole = torch.cat([gradient.flatten() for gradient in their_gradients]).norm()
        for n, mine, other in zip(names, our_gradients, their_gradients, strict=True):
            # A bias before a norm has nothing but rounding for a gradient.
            assert (to_oracle(n, mine) - other).norm() < 1e-3 * other.norm() + 1e-6 * whole, (n, counts)


def _gradients(model: torch.nn.Module, losses: dict[str, Tensor], names: list[str]) -> list[Tensor]:
    parameters = [model.get_parameter(name) for name in names]
    found = torch.autograd.grad(sum(losses.values()), parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


@pytest.mark.parametrize(("candidates", "best"), [(1000, None), (40, None), (1000, 20)])
@pytest.mark.parametrize("setup", ["mobilenet-tall", "resnet50"])
def test_detections_are_those_of_torchvision(setup: str, candidates: int, best: int | None) -> None:
    name, norm, canvas = SETUPS[setup]
    model = settled_model(settings_of(name, norm=norm), CLASSES, canvas).eval()
    oracle = oracle_of(model, canvas).eval()
    model.per_level = candidates
    batch = make_batch((0, 0, 0), canvas, CLASSES, seed=5)
    # The second picture was shrunk to half and fills a part of the canvas; the third was squashed.
    content = torch.tensor([canvas, (canvas[0] - 40, canvas[1] - 24), canvas], dtype=torch.int32)
    size = torch.stack((content[0], content[1] * 2, content[2] * torch.tensor([3, 1])))
    batch = batch._replace(content=content, size=size.int(), scale=content / size)
    score_threshold = 0.05
    if best is not None:  # a threshold that leaves the first picture that many boxes
        with torch.no_grad():
            whole = model.decode(model(batch.images), batch.content, batch.scale, batch.size)
        score_threshold = whole.scores[0, best].item()
    oracle.topk_candidates, oracle.score_thresh, oracle.detections_per_img = candidates, score_threshold, 10_000
    with torch.no_grad():
        theirs = [_without_lines(one) for one in oracle_detections(oracle, batch)]
        found = model.decode(
            model(batch.images),
            batch.content,
            batch.scale,
            batch.size,
            score_threshold=score_threshold,
        )
    count = len(theirs[0]["scores"])
    assert 30 < count <= 100 if best is None else count == best  # else the test shows nothing
    for picture, expected in enumerate(theirs):
        valid = found.valid[picture]
        assert valid.tolist() == [slot < len(expected["scores"]) for slot in range(100)]
        torch.testing.assert_close(found.scores[picture][valid], expected["scores"], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.boxes[picture][valid], expected["boxes"], rtol=1e-4, atol=1e-3)
        assert torch.equal(found.labels[picture][valid], expected["labels"] - 1)
        for padded in (found.boxes[picture], found.scores[picture], found.labels[picture]):
            assert not padded[~valid].any()


def _without_lines(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The best 100 without the boxes that lay in the padding alone: torchvision cuts them to lines and keeps them."""
    is_box = (found["boxes"][:, 2:] > found["boxes"][:, :2]).all(1)
    return {name: values[is_box][:100] for name, values in found.items()}


def test_two_halves_average_to_the_whole_batch() -> None:
    canvas = (96, 128)
    model = settled_model(settings_of("retinanet_mobilenet_v2_fpn"), CLASSES, canvas).train()
    batch = make_batch((3, 7, 0, 1), canvas, CLASSES)
    whole = model.loss(model(batch.images), batch)
    halves = [type(batch)(*(field[half] for field in batch)) for half in (slice(0, 2), slice(2, 4))]
    parts = [model.loss(model(half.images), half) for half in halves]
    for part, loss in whole.items():
        assert relative((parts[0][part] + parts[1][part]) / 2, loss) < 1e-5
