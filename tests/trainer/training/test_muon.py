"""Muon's updates against singular value decompositions, and its steps against an optimizer written out."""

import copy

import pytest
import torch
from torch import Tensor, nn

from stoker.hardware.device import Device
from stoker.training.muon import MOMENTUM, NUM_ITERATIONS, is_matrix, orthogonalize
from stoker.training.optim import OptimizerStep
from tests.fixtures.training_optim import make_images, settings
from tests.host_sync import ForbidHostSync

CPU = Device(torch.device("cpu"))


def by_svd(matrix: Tensor) -> Tensor:
    """Jordan et al.'s quintic, applied to the singular values of the matrix over its Frobenius norm."""
    u, values, v = torch.linalg.svd(matrix.double() / matrix.double().norm(), full_matrices=False)
    for _ in range(NUM_ITERATIONS):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return u @ values.diag() @ v


@pytest.mark.parametrize("shape", [(16, 144), (64, 64), (64, 576), (256, 128)])
def test_singular_values_change_and_directions_stay(shape: tuple[int, int]):
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(shape, generator=generator) * scale for scale in (1e-6, 1.0, 1e6)]
    matrices.append(matrices[1] * torch.logspace(0, -4, shape[1]))  # badly conditioned
    stacks = [torch.stack(matrices[:3]), torch.stack(matrices[3:]).mT.contiguous()]
    found_stacks = orthogonalize(stacks)
    for found, matrix in zip([*found_stacks[0], *found_stacks[1].mT], matrices, strict=True):
        expected = by_svd(matrix)
        assert (found.double() - expected).norm() <= 1e-4 * expected.norm()


def test_zeros_stay_and_factors_scale():
    stacks = [torch.stack([torch.zeros(4, 8), torch.ones(4, 8)]), torch.randn(1, 8, 4)]
    plain = orthogonalize(stacks)
    scaled = orthogonalize(stacks, torch.tensor([1.0, 2.0, 3.0])[:, None, None])
    assert torch.equal(plain[0][0], stacks[0][0])
    torch.testing.assert_close(scaled[0][1], 2 * plain[0][1])
    torch.testing.assert_close(scaled[1], 3 * plain[1])


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
              nn.Conv2d(8, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
              nn.Conv2d(6, 6, 3, groups=6, bias=False), nn.Conv2d(6, 12, 1, bias=False), nn.BatchNorm2d(12),
              nn.Conv2d(12, 4, 1)]  # fmt: skip
    return nn.Sequential(*layers)


def reference_steps(model: nn.Sequential, bad: tuple[int, ...], steps: int) -> None:
    """Kernels 3 and 7 by Muon with weight decay, the rest by AdamW; bad steps are left out."""
    kernels = [model[3].weight, model[7].weight]
    others = [model[n].weight for n in (0, 6, 9)]
    rest = [p for p in model.parameters() if not any(p is q for q in (*kernels, *others))]
    groups = [{"params": others, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.999))
    momenta = [torch.zeros_like(kernel) for kernel in kernels]
    for step in range(steps):
        if step in bad:
            continue
        model.zero_grad()
        model(make_images(step, bad=False)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with torch.no_grad():
            for kernel, momentum in zip(kernels, momenta, strict=True):
                momentum.copy_(MOMENTUM * momentum + (1 - MOMENTUM) * kernel.grad)
                direction = MOMENTUM * momentum + (1 - MOMENTUM) * kernel.grad
                update = by_svd(direction.flatten(1)).view_as(kernel).to(kernel.dtype)
                kernel *= 1 - 0.02 * 0.01
                kernel -= 0.02 * 0.2 * max(len(kernel), kernel[0].numel()) ** 0.5 * update
                kernel.grad = None
        adamw.step()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_steps_equal_a_reference_that_leaves_out_bad_ones(precision: str, memory_format: torch.memory_format):
    bad = (0, 4)
    theirs = make_model()
    model = copy.deepcopy(theirs).to(memory_format=memory_format)
    ours = OptimizerStep(model, settings(optimizer="muon", clip_grad_norm=0.05), CPU, precision=precision)
    for step in range(8):
        ours.backward(ours.model(make_images(step, bad=step in bad)).square().mean())
        assert bool(ours.step(0.02, step)[1]) == (step in bad)
    reference_steps(theirs, bad, 8)
    for (name, found), expected in zip(ours.model.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5, msg=name)


def test_its_state_continues_exactly_in_another_memory_format():
    def make(memory_format: torch.memory_format) -> OptimizerStep:
        model = make_model().to(memory_format=memory_format)
        return OptimizerStep(model, settings(optimizer="muon", ema_decay=0.9), CPU, precision="fp32")

    one, two = make(torch.channels_last), make(torch.contiguous_format)
    for step in range(3):
        one.backward(one.model(make_images(step, bad=False)).square().mean())
        one.step(0.01, step)
    two.load_state_dict(copy.deepcopy(one.state_dict()), copy.deepcopy(one.ema_model.state_dict()))
    for stepper in (one, two):
        for step in range(3, 7):
            stepper.backward(stepper.model(make_images(step, bad=False)).square().mean())
            stepper.step(0.01, step)
    for found, expected in zip(two.model.parameters(), one.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_which_weights_are_its_own():
    model = make_model()
    own = {f"{n}.{name}" for n, module in enumerate(model) for name, _ in module.named_parameters()
           if is_matrix(module, name)}  # fmt: skip
    assert own == {"3.weight", "7.weight"}, "not that of images, with groups, or of the prediction"


def test_update_ratios_are_what_the_last_step_changed():
    model = make_model()
    stepper = OptimizerStep(model, settings(optimizer="muon", weight_decay=0.0), CPU, precision="fp32")
    for step in range(20):  # the same gradient, nearly: Nesterov's look ahead is then that of the momentum
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        stepper.backward(model(make_images(0, bad=False)).square().mean())
        stepper.step(1e-4, step)
    found = stepper.update_ratios()
    for name in ("3.weight", "7.weight"):
        weight = model.get_parameter(name)
        expected = ((weight - before[name]).norm() / weight.norm()).item()
        assert found[name] == pytest.approx(expected, rel=0.02), name
    assert found.keys() == {f"{n}.weight" for n in (0, 3, 6, 7, 9)}


def test_a_step_never_waits_for_the_device():
    stepper = OptimizerStep(make_model(), settings(optimizer="muon", ema_decay=0.9), CPU, precision="fp16")
    for step in range(2):
        with ForbidHostSync():
            stepper.backward(stepper.model(make_images(0, bad=False)).square().mean())
            stepper.step(0.1, step)
