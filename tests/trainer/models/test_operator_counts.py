"""How many operators a step issues on an accelerator: each costs the host a launch. Losses are counted on meta tensors,
whole steps on the fake accelerator, nodes of the compiled program on fake CUDA tensors."""

import contextlib

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from stoker.config.settings import ModelSettings
from stoker.hardware import block_size as blocks
from stoker.models import MODELS, Detector, build
from stoker.planning.fake_accelerator import MEMORY_BYTES
from tests import fakes
from tests.trainer.models.samples import make_batch, settings_of

RESNET50 = fakes.Trial(model="retinanet_resnet50_fpn", batch=32, slots=100, image_size=(800, 800))
EMBER = fakes.Trial(model="ember_n", batch=32, slots=100, image_size=(640, 640), optimizer="muon")
TWO_STAGES = fakes.Trial(model="faster_rcnn_resnet50_fpn", batch=32, slots=100, image_size=(800, 1344))


def build_on(device_type: str, trial: fakes.Trial) -> Detector:
    settings = ModelSettings(**{**MODELS[trial.model].defaults, "model": trial.model})
    return build(settings, trial.classes).to(device_type).train()


def with_batch(trial: fakes.Trial, batch: int) -> fakes.Trial:
    return fakes.Trial(**{**vars(trial), "batch": batch})


def count_loss_operators(model: Detector, trial: fakes.Trial) -> int:
    """Operators of matching, loss and their backward pass."""
    counts = fakes.OperatorCounts()
    batch = fakes.fake_batch(trial)

    def as_leaf(value: object) -> object:
        is_prediction = isinstance(value, Tensor) and value.requires_grad
        return value.detach().bfloat16().requires_grad_() if is_prediction else value

    outputs = _pytree.tree_map(as_leaf, model(batch.images))
    with counts:
        torch.stack(list(model.loss(outputs, batch).values())).sum().backward()
    return sum(counts.by_phase.values())


@pytest.fixture
def meta_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are made of meta tensors, for which torch has no autocast; losses switch it off anyway."""
    monkeypatch.setattr(fakes, "DEVICE", "meta")
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr("stoker.models.detector.is_on_accelerator", lambda _: False)  # asks for autocast


@pytest.mark.usefixtures("meta_tensors")
@pytest.mark.parametrize(
    ("name", "image_size", "limit"),
    [
        # The cheap backbone has the pyramid, the anchors and the loss of ResNet-50.
        ("retinanet_mobilenet_v2_fpn", (800, 800), 300),  # GIoU
        ("ember_n", (640, 640), 230),
        ("ssdlite320_mobilenet_v3_large", (320, 320), 130),
        pytest.param("retinanet_resnet50_fpn", (800, 800), 200, marks=pytest.mark.slow),
        pytest.param("fcos_resnet50_fpn", (800, 800), 280, marks=pytest.mark.slow),
        pytest.param("faster_rcnn_resnet50_fpn", (800, 1344), 800, marks=pytest.mark.slow),
    ],
)
def test_a_loss_issues_few_operators_for_any_batch(name: str, image_size: tuple[int, int], limit: int) -> None:
    trial = fakes.Trial(model=name, slots=100, image_size=image_size)
    model = build_on("meta", trial)
    of_8, of_32 = (count_loss_operators(model, with_batch(trial, batch)) for batch in (8, 32))
    assert of_8 <= of_32 <= min(limit, 1.05 * of_8)


@pytest.mark.parametrize(
    "name", ["retinanet_tiny_fpn", "ember_n", "fcos_resnet18_fpn", "ssdlite320_mobilenet_v3_large"]
)
def test_losses_and_gradients_do_not_depend_on_the_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, from one image and one box at a time to the whole batch."""
    model = build(settings_of(name), 5).double().train()
    batch = make_batch((3, 0, 7, 1), (64, 96), 5)
    batch = batch._replace(images=batch.images.double(), boxes=batch.boxes.double())

    def as_leaf(value: object) -> object:
        is_prediction = isinstance(value, Tensor) and value.requires_grad
        return value.detach().requires_grad_() if is_prediction else value

    outputs = _pytree.tree_map(as_leaf, model(batch.images))
    predictions = [leaf for leaf in _pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    results = []
    for block in (1, 1000, 20_000, 2**30):
        monkeypatch.setattr(blocks, "CPU_BLOCK_SIZE", block)
        losses = model.loss(outputs, batch)
        results.append((losses, torch.autograd.grad(torch.stack(list(losses.values())).sum(), predictions)))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-13, atol=1e-13)


@pytest.fixture(scope="module")
def outcomes() -> list[fakes.Outcome]:
    return fakes.run(RESNET50, with_batch(RESNET50, 8), EMBER, TWO_STAGES)


@pytest.mark.slow
def test_a_step_issues_few_operators(outcomes: list[fakes.Outcome]) -> None:
    assert [outcome.error for outcome in outcomes] == [None] * 4
    of_32, of_8, ember, two_stages = (outcome.operators for outcome in outcomes)
    assert set(of_32) == {"augmentation", "forward", "loss", "backward", "optimizer"}
    assert of_32 == of_8
    assert of_32["loss"] <= 200
    assert sum(of_32.values()) <= 1000
    assert sum(ember.values()) <= 1090  # 10 keep the gradients of the step with the largest loss, 170 are of Muon
    assert sum(two_stages.values()) <= 1500


@pytest.mark.slow
def test_one_block_fits_the_memory(outcomes: list[fakes.Outcome]) -> None:
    assert outcomes[0].peak <= 16 * 2**30


@pytest.mark.slow
@pytest.mark.parametrize(("trial", "limit"), [(RESNET50, 1000), (EMBER, 1000), (TWO_STAGES, 1300)])
def test_forward_and_loss_are_one_small_graph(trial: fakes.Trial, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> object:
        nodes.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    def memory(_device: torch.device) -> tuple[int, int]:
        torch._dynamo.graph_break()  # raises if it is part of the compiled program
        return MEMORY_BYTES, MEMORY_BYTES

    monkeypatch.setattr(fakes, "DEVICE", "cuda")
    monkeypatch.setattr(torch.accelerator, "get_memory_info", memory)
    monkeypatch.setattr(blocks, "_block_sizes", {})
    model = build_on("cpu", trial)
    torch._dynamo.reset()
    compiled = torch.compile(lambda batch: model.loss(model(batch.images), batch), fullgraph=True, backend=backend)
    with fakes.fake_tensors():
        fakes.to_fake(model, "cuda")
        batch = fakes.fake_batch(trial)
        model(batch.images)  # makes the anchors
        compiled(batch)
    assert len(nodes) == 1
    assert nodes[0] <= limit
