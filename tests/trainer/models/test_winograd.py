"""Winograd's convolution against torch's, and where it is used."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from stoker.models.layers import winograd
from stoker.models.layers.convolutions import fold_frozen_norms
from stoker.models.layers.norms import FrozenBatchNorm2d
from stoker.models.layers.winograd import WinogradConv, use_winograd_without_avx512


@pytest.mark.parametrize("rows_at_once", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("shape", [(3, 5, 7, 9, 6), (2, 4, 8, 8, 5), (1, 3, 1, 2, 4), (5, 2, 4, 13, 1)])
def test_output_and_gradients_are_those_of_a_convolution(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], rows_at_once: int
):
    batch, channels, height, width, filters = shape
    monkeypatch.setattr(winograd, "MAX_TILE_ELEMENTS", 36 * -(-width // 4) * channels * rows_at_once)
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    x, weight = random(batch, channels, height, width), random(filters, channels, 3, 3)
    for wanted in ("x", "weight", "both"):
        x.requires_grad_(wanted != "weight")
        weight.requires_grad_(wanted != "x")
        inputs = [tensor for tensor in (x, weight) if tensor.requires_grad]
        expected, found = functional.conv2d(x, weight, padding=1), WinogradConv.apply(x, weight)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert found.is_contiguous(memory_format=torch.channels_last)
        grad = random(batch, filters, height, width)
        for one, other in zip(
            torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_error_in_fp32_is_a_few_times_that_of_a_direct_convolution():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 128, 20, 20, generator=generator), torch.randn(128, 128, 3, 3, generator=generator)
    exact = functional.conv2d(x.double(), weight.double(), padding=1)
    direct, found = functional.conv2d(x, weight, padding=1), WinogradConv.apply(x, weight)
    assert (found - exact).std() < 1e-5 * exact.std()
    assert (found - exact).std() < 20 * (direct - exact).std()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(128, 128, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(128, 128, 3, padding=1, bias=False),
        nn.ReLU(inplace=True),
        nn.Conv2d(128, 128, 3, padding=1, bias=False),
        FrozenBatchNorm2d(128),
        nn.Conv2d(128, 128, 3, padding=1, stride=2),
        nn.Conv2d(128, 8, 3, padding=1),
        nn.Conv2d(8, 8, 1),
    )
    fold_frozen_norms(layers)
    return layers.to(memory_format=torch.channels_last)


@pytest.mark.parametrize(("capability", "uses"), [("AVX2", 3), ("AVX512", 0), ("DEFAULT", 0)])
def test_wide_convolutions_use_it_without_avx512(monkeypatch: pytest.MonkeyPatch, capability: str, uses: int):
    plain, model = network(), network()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    use_winograd_without_avx512(model)
    called: list[torch.Size] = []
    apply = WinogradConv.apply
    monkeypatch.setattr(WinogradConv, "apply", lambda x, weight: called.append(x.shape) or apply(x, weight))
    x = torch.randn(4, 128, 20, 20)
    outputs = [each(x) for each in (plain, model)]
    assert len(called) == uses
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-3, atol=1e-4)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-2, atol=1e-3 * float(other.grad.abs().max()))
    called.clear()
    model(x[:, :, :4])  # too small
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
    assert not called


def test_a_copy_uses_its_own_weights(monkeypatch: pytest.MonkeyPatch):
    """The average of weights is a copy of the model."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    model = network()
    use_winograd_without_avx512(model)
    duplicate = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in duplicate.parameters():
            parameter.zero_()
        x = torch.randn(4, 128, 20, 20)
        assert duplicate(x).abs().max() == 0
        assert model(x).abs().max() > 0
