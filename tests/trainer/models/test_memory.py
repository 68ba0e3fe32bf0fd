"""Activation checkpointing: the same numbers, the same names, less memory; and what a step takes, on a fake device."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stoker.data.batch import Batch
from stoker.models import MODELS, Detector, build
from stoker.models.layers.activation_checkpointing import segments
from stoker.models.layers.norms import SafeSyncBatchNorm
from tests import fakes
from tests.host_sync import ForbidHostSync
from tests.trainer.models.samples import ALIKE, make_batch, settings_of

CANVAS, CLASSES = (64, 96), 5
CHEAP = ("retinanet_tiny_fpn", "retinanet_mobilenet_v2_fpn")
ALL = [name if name in CHEAP else pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name not in ALIKE]


def pair(name: str, norm: str = "bn") -> tuple[Detector, Detector]:
    """The same model, keeping everything, and keeping the inputs of its segments."""
    models = []
    for less in (False, True):
        torch.manual_seed(0)
        settings = settings_of(name, backbone_norm=norm, trainable_backbone_layers=5, activation_checkpointing=less)
        models.append(build(settings, CLASSES).double().train())
    return models[0], models[1]


def in_double(batch: Batch) -> Batch:
    """Images in fp64, so that nothing rounds differently."""
    return batch._replace(images=batch.images.double())


def step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    losses: dict[str, Tensor] = model.loss(model(batch.images), batch)  # type: ignore[operator]
    torch.stack(list(losses.values())).sum().backward()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_losses_gradients_and_statistics_are_the_same(name: str):
    batch = in_double(make_batch((3, 1), CANVAS, CLASSES))
    whole, less = pair(name)
    losses = [step(model, batch) for model in (whole, less)]
    assert losses[0] == losses[1]
    state = less.state_dict()
    assert list(state) == list(whole.state_dict())
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-12, atol=1e-12, msg=key)
    assert all(value > 0 for key, value in state.items() if key.endswith("num_batches_tracked"))
    gradients = dict(less.named_parameters())
    for key, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[key].grad, parameter.grad, rtol=1e-9, atol=1e-12, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_every_model_has_segments_and_they_keep_less(name: str):
    """Bytes that the forward pass leaves for the backward pass."""
    batch = in_double(make_batch((3, 1), CANVAS, CLASSES))
    whole, less = pair(name)
    assert segments(less)
    kept = []
    for model in (whole, less):
        storages: dict[int, int] = {}

        def keep(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor.detach()  # an output that its own gradient function keeps would never be freed

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(batch.images)
        kept.append(sum(storages.values()))
    # Measured: RF-DETR keeps 2 % less only.
    assert kept[1] < (1.0 if name.startswith("rf_detr") else 0.7) * kept[0]


def test_a_copy_computes_with_its_own_weights():
    """The averaged weights are a copy."""
    _, model = pair("retinanet_tiny_fpn")
    batch = in_double(make_batch((3, 1), CANVAS, CLASSES))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    step(other, batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in other.parameters())
    assert all(norm.num_batches_tracked == 0 for norm in model.modules() if isinstance(norm, _BatchNorm))


def test_without_gradients_nothing_is_computed_twice(monkeypatch: pytest.MonkeyPatch):
    _, model = pair("retinanet_tiny_fpn")
    monkeypatch.setattr("stoker.models.layers.activation_checkpointing.checkpoint", None)
    with torch.inference_mode():
        model(in_double(make_batch((0,), CANVAS, CLASSES)).images)


def test_it_makes_no_host_sync():
    _, model = pair("retinanet_tiny_fpn")
    batch = in_double(make_batch((3, 1), CANVAS, CLASSES))
    step(model, batch)  # makes the anchors
    with ForbidHostSync():
        step(model, batch)


@pytest.mark.slow
def test_compiled_it_is_one_program_with_the_same_statistics():
    whole, less = (model.float() for model in pair("retinanet_tiny_fpn"))
    batch = make_batch((3, 1), CANVAS, CLASSES)
    step(whole, batch)
    torch._dynamo.reset()
    compiled = torch.compile(lambda some: less.loss(less(some.images), some), fullgraph=True, backend="aot_eager")
    torch.stack(list(compiled(batch).values())).sum().backward()
    state = less.state_dict()
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-3, atol=1e-5, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["retinanet_tiny_fpn", "retinanet_mobilenet_v2_fpn"])
def test_sync_norms_of_one_process_are_ordinary_ones(name: str):
    """Several: tests/trainer/training/test_ranks.py. Weights go both ways."""
    batch = in_double(make_batch((3, 1), CANVAS, CLASSES))
    plain, _ = pair(name)
    sync, _ = pair(name, norm="sync_bn")
    assert any(isinstance(module, SafeSyncBatchNorm) for module in sync.modules())
    sync.load_state_dict(plain.state_dict())
    plain.load_state_dict(sync.state_dict())
    assert step(plain, batch) == step(sync, batch)
    state = sync.state_dict()
    for key, value in plain.state_dict().items():
        assert torch.equal(state[key], value), key
    gradients = dict(sync.named_parameters())
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[key].grad, parameter.grad, rtol=1e-12, atol=1e-12, msg=key)


@pytest.mark.slow
def test_the_peak_of_resnet50_is_lower_by_its_activations():
    """RetinaNet-R50, 80 classes, 800 × 800, 32 images, bf16: the known case, and how much less it takes. What is left
    are mostly the temporaries of the loss, computed in one block where memory is as large as an H200's."""
    known = fakes.Trial(model="retinanet_resnet50_fpn", batch=32, slots=100, image_size=(800, 800))
    less = fakes.Trial(**{**vars(known), "settings": {"activation_checkpointing": True}})
    outcomes = fakes.run(known, less)
    assert [outcome.error for outcome in outcomes] == [None, None]
    gib = [outcome.peak / 2**30 for outcome in outcomes]
    assert gib[0] == pytest.approx(12.98, abs=0.1)
    assert gib[1] == pytest.approx(8.30, abs=0.1)
