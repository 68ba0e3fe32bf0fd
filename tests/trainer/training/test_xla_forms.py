"""What stoker computes in other operators on XLA devices, on a CPU that passes for one: the same values and steps.
On XLA itself: `make test-xla`."""

import copy

import pytest
import torch
from torch import nn

from stoker.config.settings import OptimSettings
from stoker.hardware.device import Device
from stoker.models import build
from stoker.models.layers import convolutions, deformable_attention, norms, postprocess, roi_align
from stoker.training import make_optimizer, norm_stats
from stoker.training.optim import OptimizerStep
from tests.trainer.models.samples import make_batch, settings_of

XLA_HERE = frozenset({"cpu"})


def test_upsampling(monkeypatch: pytest.MonkeyPatch):
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    gradient = torch.randn(2, 3, 8, 10)
    expected = convolutions.upsample_2x(x)
    expected_grad = torch.autograd.grad(expected, x, gradient)[0]
    monkeypatch.setattr(convolutions, "XLA_KINDS", XLA_HERE)
    actual = convolutions.upsample_2x(x)
    assert torch.equal(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual, x, gradient)[0], expected_grad)


def test_roi_align(monkeypatch: pytest.MonkeyPatch):
    levels = [torch.randn(2, 8, size, size, requires_grad=True) for size in (16, 8)]
    corner, size = torch.rand(2, 7, 2) * 60, torch.rand(2, 7, 2) * 60 + 4
    boxes = torch.cat((corner, corner + size), dim=2)
    results = []
    for kinds in (frozenset(), XLA_HERE):
        monkeypatch.setattr(roi_align, "XLA_KINDS", kinds)
        pooled = roi_align.multiscale_roi_align(levels, (8, 16), boxes)
        results.append([pooled, *torch.autograd.grad(pooled.square().sum(), levels)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_sampling_of_deformable_attention(monkeypatch: pytest.MonkeyPatch):
    """Also outside of the map, and at the centers of cells, where the slope is that of the right side."""
    inputs = [torch.randn(2, 12, 4, 3, dtype=torch.float64), torch.rand(2, 5, 4, 6, 2, dtype=torch.float64) * 1.6 - 0.3]
    inputs[1][0, 0] = torch.tensor([0.375, 0.5])
    inputs.append(torch.rand(2, 5, 4, 6, dtype=torch.float64))
    value, locations, weights = (tensor.requires_grad_() for tensor in inputs)
    results = []
    for kinds in (frozenset(), XLA_HERE):
        monkeypatch.setattr(deformable_attention, "XLA_KINDS", kinds)
        sampled = deformable_attention.sample_levels(value, [(2, 4), (2, 2)], locations, weights, [4, 2])
        results.append([sampled, *torch.autograd.grad(sampled.square().sum(), (value, locations, weights))])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_running_statistics_of_a_norm(monkeypatch: pytest.MonkeyPatch):
    plain, xla = norms.SafeBatchNorm2d(3).double(), norms.SafeBatchNorm2d(3).double()
    for images in (torch.randn(2, 3, 2, 1, dtype=torch.float64), torch.randn(4, 3, 1, 1, dtype=torch.float64)):
        with monkeypatch.context() as patch:
            patch.setattr(norms, "XLA_KINDS", XLA_HERE)
            actual = xla(images)
        torch.testing.assert_close(actual, plain(images))
    torch.testing.assert_close(xla.state_dict(), plain.state_dict())


def test_nms_on_the_host(monkeypatch: pytest.MonkeyPatch):
    corner = torch.rand(2, 30, 2) * 20
    boxes = torch.cat((corner, corner + 10), dim=2)
    candidates = postprocess.Candidates(boxes, torch.rand(2, 30), torch.randint(3, (2, 30)))
    expected = postprocess.nms_per_class(candidates, iou_threshold=0.5, max_detections=8)
    monkeypatch.setattr(postprocess, "XLA_KINDS", XLA_HERE)
    actual = postprocess.nms_per_class(candidates, iou_threshold=0.5, max_detections=8)
    assert all(torch.equal(a, b) for a, b in zip(actual[:4], expected[:4], strict=True))


def train(model: nn.Module, optimizer: str) -> dict[str, torch.Tensor]:
    settings = OptimSettings(
        optimizer=optimizer,  # type: ignore[arg-type]
        lr=0.01, backbone_lr_mult=1.0, momentum=0.9, weight_decay=0.01, clip_grad_norm=1.0, ema_decay=0.99,
    )  # fmt: skip
    model = copy.deepcopy(model).train()
    step = OptimizerStep(model, settings, Device(torch.device("cpu")), precision="fp32")
    for number in range(4):
        batch = make_batch((3, 1), (64, 64), 5, seed=number)
        loss = sum(model.loss(model(batch.images), batch).values())
        step.backward(loss * (torch.nan if number == 2 else 1.0))
        found_inf = step.step(0.01 * (number + 1), number)[1]
        assert bool(found_inf) == (number == 2)
    states = step.state_dict()["optimizer"]["state"]
    tensors = {f"{n}.{name}": tensor for n, state in states.items() for name, tensor in state.items()}
    return {**tensors, **model.state_dict(), **{f"ema.{n}": t for n, t in step.ema_model.state_dict().items()}}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_steps_without_fused_kernels_and_without_views(optimizer: str, monkeypatch: pytest.MonkeyPatch):
    """Four steps, one of them skipped: weights, moments, running statistics and EMA weights."""
    torch.manual_seed(0)
    model = build(settings_of("retinanet_tiny_fpn"), 5).double()
    expected = train(model, optimizer)
    for module in (make_optimizer, norm_stats):
        monkeypatch.setattr(module, "XLA_KINDS", XLA_HERE)
    actual = train(model, optimizer)
    assert actual.keys() == expected.keys()
    assert float(expected["0.step"]) == 3 if optimizer != "sgd" else "0.momentum_buffer" in expected
    for name, tensor in expected.items():  # the largest difference seen is 3e-6 of a norm
        distance = float((actual[name].double() - tensor.double()).norm())
        assert distance <= 1e-5 * float(tensor.double().norm()) + 1e-12, name
