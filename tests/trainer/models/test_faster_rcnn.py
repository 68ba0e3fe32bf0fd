"""torchvision's Faster R-CNN is the oracle: same weights, same batch, same lots, same losses, gradients, detections."""

import pytest
import torch
from torch import Tensor, nn

from stoker.models import build, faster_rcnn
from tests.trainer.models.samples import make_batch, settings_of
from tests.trainer.models.two_stages import ROI_SAMPLES, calibrated, oracle_detections, oracle_losses, oracle_of

CLASSES = 7
pytestmark = pytest.mark.usefixtures("small")
R18, R50, MOBILENET = "faster_rcnn_resnet18_fpn", "faster_rcnn_resnet50_fpn", "faster_rcnn_mobilenet_v3_large_fpn"
SETUPS = {"resnet18": (R18, (64, 96)), "mobilenet": (MOBILENET, (128, 64)), "resnet50": (R50, (64, 96))}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer regions and a narrower second stage, whose products are nearly all of the time on a CPU."""
    monkeypatch.setattr(faster_rcnn, "HIDDEN", 16)
    monkeypatch.setattr(faster_rcnn, "ROI_SAMPLES", ROI_SAMPLES[0])
    monkeypatch.setattr(faster_rcnn, "ROI_MAX_POSITIVES", ROI_SAMPLES[1])


def relative(ours: Tensor, theirs: Tensor) -> float:
    scale = theirs.norm().item()
    return (ours - theirs).norm().item() / (scale if scale > 1e-8 else 1.0)


@pytest.mark.parametrize(
    ("setup", "counts"),
    [
        pytest.param("resnet18", (3, 7), marks=pytest.mark.slow),
        ("mobilenet", (16, 1)),
        pytest.param("resnet18", (16, 1), marks=pytest.mark.slow),
        pytest.param("resnet18", (0, 5), marks=pytest.mark.slow),
        pytest.param("mobilenet", (3, 7), marks=pytest.mark.slow),
        pytest.param("resnet50", (3, 7), marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_are_those_of_torchvision(setup: str, counts: tuple[int, ...]) -> None:
    name, image_size = SETUPS[setup]
    model = calibrated(name, CLASSES, image_size).train()
    oracle = oracle_of(model).train()
    batch = make_batch(counts, image_size, CLASSES, seed=sum(counts))
    resized_size = batch.resized_size.clone()
    resized_size[1] -= torch.tensor([9, 21], dtype=torch.int32)  # the second image does not fill the model input
    batch = batch._replace(boxes=batch.boxes.double(), resized_size=resized_size)
    ours, theirs = model.loss(model(batch.images), batch), oracle_losses(oracle, model, batch)
    assert ours.keys() == theirs.keys()
    for part, loss in theirs.items():
        assert relative(ours[part], loss) < 1e-9, part
        assert loss > 0, part
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    our_gradients, their_gradients = _gradients(model, ours, names), _gradients(oracle, theirs, names)
    for n, mine, other in zip(names, our_gradients, their_gradients, strict=True):
        assert relative(mine, other) < 1e-6, n


def _gradients(model: nn.Module, losses: dict[str, Tensor], names: list[str]) -> list[Tensor]:
    parameters = [model.get_parameter(name) for name in names]
    found = torch.autograd.grad(sum(losses.values()), parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


@pytest.mark.slow
def test_a_batch_without_a_box_trains_the_first_stage_and_the_classes() -> None:
    model = calibrated(R18, CLASSES, (64, 96)).train()
    oracle = oracle_of(model).train()
    batch = make_batch((0, 0), (64, 96), CLASSES)
    batch = batch._replace(boxes=batch.boxes.double())
    ours, theirs = model.loss(model(batch.images), batch), oracle_losses(oracle, model, batch)
    for part, loss in theirs.items():
        assert relative(ours[part], loss) < 1e-9, part
        assert (loss > 0) == (part in ("loss_objectness", "loss_classifier"))


@pytest.mark.slow
def test_losses_in_fp32_are_those_in_fp64() -> None:
    model = calibrated(R18, CLASSES, (64, 96)).train()
    batch = make_batch((3, 7), (64, 96), CLASSES)
    single = model.loss(model(batch.images), batch)
    model.double()
    double = model.loss(model(batch.images), batch)
    for part, loss in double.items():
        assert single[part].dtype == torch.float32
        assert relative(single[part].double(), loss) < 1e-5, part


@pytest.mark.slow
def test_losses_in_mixed_precision_are_fp32_and_near() -> None:
    model = calibrated(R18, CLASSES, (64, 96)).train()
    batch = make_batch((3, 7), (64, 96), CLASSES)
    with torch.autocast("cpu", torch.bfloat16):
        raw = model(batch.images)
        mixed = model.loss(raw, batch)
    assert raw.features[0].dtype == torch.bfloat16
    sum(mixed.values()).backward()
    for part, loss in model.loss(model(batch.images), batch).items():
        assert mixed[part].dtype == torch.float32
        assert relative(mixed[part], loss) < 0.2, part


@pytest.mark.slow
@pytest.mark.parametrize("setup", ["resnet18", pytest.param("mobilenet", marks=pytest.mark.slow)])
def test_detections_are_those_of_torchvision(setup: str) -> None:
    name, image_size = SETUPS[setup]
    model = calibrated(name, CLASSES, image_size).eval()
    oracle = oracle_of(model).eval()
    batch = make_batch((0, 0, 0), image_size, CLASSES, seed=5)
    # The second image was shrunk to half and fills a part of the model input; the third was squashed.
    resized_size = torch.tensor([image_size, (image_size[0] - 40, image_size[1] - 24), image_size], dtype=torch.int32)
    size = torch.stack((resized_size[0], resized_size[1] * 2, resized_size[2] * torch.tensor([3, 1])))
    batch = batch._replace(resized_size=resized_size, original_size=size.int(), scale=resized_size / size)
    model.max_candidates = 7000  # torchvision has no bound
    with torch.no_grad():
        theirs = oracle_detections(oracle, model, batch)
        found = model.decode(model(batch.images), resized_size, batch.scale, batch.original_size)
    for image, expected in enumerate(theirs):
        valid = found.valid[image]
        assert 20 < len(expected["scores"]) <= 100
        assert valid.tolist() == [slot < len(expected["scores"]) for slot in range(100)]
        torch.testing.assert_close(found.scores[image][valid], expected["scores"], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(found.boxes[image][valid], expected["boxes"], rtol=1e-6, atol=1e-4)
        assert torch.equal(found.labels[image][valid], expected["labels"] - 1)


@pytest.mark.slow
def test_candidates_are_the_best_of_an_image() -> None:
    model = calibrated(R18, CLASSES, (64, 96)).eval()
    batch = make_batch((0,), (64, 96), CLASSES)
    with torch.no_grad():
        raw = model(batch.images)
        model.max_candidates = 50
        few = model.candidates(raw, batch.resized_size, score_threshold=0.0)
        model.max_candidates = 100
        more = model.candidates(raw, batch.resized_size, score_threshold=0.0)
    assert few.boxes.shape == (1, 50, 4)
    for some, all_of_them in zip(few, more, strict=True):
        assert torch.equal(some, all_of_them[:, :50])


@pytest.mark.slow
def test_two_halves_average_to_the_whole_batch_where_samples_are_equally_many() -> None:
    model = calibrated(R18, CLASSES, (64, 96)).train()
    batch = make_batch((3, 7, 0, 1), (64, 96), CLASSES)
    whole = model.loss(model(batch.images), batch)
    halves = [type(batch)(*(field[half] for field in batch)) for half in (slice(0, 2), slice(2, 4))]
    parts = [model.loss(model(half.images), half) for half in halves]
    for part in ("loss_objectness", "loss_rpn_box_reg"):
        assert relative((parts[0][part] + parts[1][part]) / 2, whole[part]) < 1e-5


@pytest.mark.slow
def test_the_sample_follows_the_draw_alone() -> None:
    model = calibrated(R18, CLASSES, (64, 96)).train()
    batch = make_batch((3, 7), (64, 96), CLASSES)
    raw = model(batch.images)
    torch.manual_seed(1)
    first = model.loss(raw, batch)
    torch.manual_seed(2)
    assert all(torch.equal(first[part], loss) for part, loss in model.loss(raw, batch).items())
    other = model.loss(raw, batch._replace(rand=batch.rand.roll(1, 0)))
    assert first["loss_objectness"] != other["loss_objectness"]
    assert first["loss_classifier"] != other["loss_classifier"]


def test_weights_that_are_not_finite_make_losses_that_are_not() -> None:
    model = build(settings_of(R18), CLASSES).train()
    batch = make_batch((3, 0), (64, 96), CLASSES)
    with torch.no_grad():
        model.backbone.fpn.layer_blocks[0][0].weight.fill_(torch.nan)
    losses = model.loss(model(batch.images), batch)
    assert not torch.isfinite(sum(losses.values()))
