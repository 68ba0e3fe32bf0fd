"""1 × 1 convolutions on one thread of a CPU: the values and gradients of torch's, and where they are used."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from stoker.models.layers.pointwise import PointwiseConv, num_parts, use_onednn_for_pointwise


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, dtype=dtype).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(("images", "height", "parts"), [
    (8, 20, 2), (3, 20, 10), (1, 40, 20), (1, 16, 16), (1, 10, 1), (7, 9, 3), (5, 7, 7), (2, 7, 1), (15, 3, 3),
])  # fmt: skip
def test_images_are_cut_into_equal_parts(images: int, height: int, parts: int) -> None:
    assert num_parts(images, height) == parts


@pytest.mark.parametrize("wanted", ["x", "weight", "both"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 20, 9, 7), (8, 16, 10, 10, 1), (1, 3, 16, 1, 4), (5, 1, 7, 6, 3)])
def test_output_and_gradients_are_those_of_a_convolution(shape: tuple[int, ...], has_bias: bool, wanted: str) -> None:
    torch.manual_seed(0)
    images, channels, height, width, filters = shape
    x = random(images, channels, height, width, dtype=torch.float64).requires_grad_(wanted != "weight")
    weight = random(filters, channels, 1, 1, dtype=torch.float64).requires_grad_(wanted != "x")
    bias = torch.randn(filters, dtype=torch.float64, requires_grad=wanted != "x") if has_bias else None
    expected = functional.conv2d(x, weight, bias)
    found = PointwiseConv.apply(x, weight, bias, num_parts(images, height))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert found.is_contiguous(memory_format=torch.channels_last)
    inputs = [tensor for tensor in (x, weight, bias) if tensor is not None and tensor.requires_grad]
    for grad in (random(*expected.shape, dtype=torch.float64), torch.randn(expected.shape, dtype=torch.float64)):
        pairs = zip(
            torch.autograd.grad(found, inputs, grad, retain_graph=True),
            torch.autograd.grad(expected, inputs, grad, retain_graph=True),
            strict=True,
        )
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(8, 16, 1),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 1, stride=2),
        nn.Conv2d(16, 4, 3),
    )
    return layers.to(memory_format=torch.channels_last)


def operators_of(model: nn.Module, x: torch.Tensor) -> tuple[dict[str, int], torch.Tensor]:
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        output = model(x)
        output.square().sum().backward()
    return {event.key: event.count for event in recorded.key_averages()}, output


def test_onednn_computes_them_for_few_images_on_one_thread() -> None:
    plain, model = network(), network()
    use_onednn_for_pointwise(model)
    x = random(4, 8, 20, 20)
    (before, expected), (after, found) = operators_of(plain, x), operators_of(model, x)
    assert before["aten::_slow_conv2d_forward"] == 2, "what torch does without it"
    assert not {"aten::_slow_conv2d_forward", "aten::_slow_conv2d_backward"} & after.keys()
    assert after["PointwiseConv"] == 2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5 * float(other.grad.abs().max()))  # type: ignore[union-attr]


@pytest.mark.parametrize("case", ["16 images", "two threads", "channels first", "autocast", "float64", "compiled"])
def test_it_is_torchs_where_that_has_onednn_or_another_type(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    apply = PointwiseConv.apply
    monkeypatch.setattr(PointwiseConv, "apply", lambda *inputs: called.append(1) or apply(*inputs))
    model, x = network().eval(), random(16 if case == "16 images" else 4, 8, 20, 20)
    use_onednn_for_pointwise(model)
    model(random(4, 8, 20, 20))
    assert called == [1, 1]
    called.clear()
    if case == "two threads":
        torch.set_num_threads(2)
    elif case == "channels first":
        model, x = model[:1].to(memory_format=torch.contiguous_format), x.contiguous()
    elif case == "float64":
        model, x = model.double(), x.double()
    elif case == "compiled":
        model = torch.compile(model, backend="eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        model(x)
    assert not called


def test_a_copy_uses_its_own_weights() -> None:
    """The average of weights is a copy of the model."""
    model = network()
    use_onednn_for_pointwise(model)
    duplicate = copy.deepcopy(model)
    x = random(4, 8, 20, 20)
    with torch.no_grad():
        for parameter in duplicate.parameters():
            parameter.zero_()
        assert duplicate(x).abs().max() == 0
        assert model(x).abs().max() > 0
