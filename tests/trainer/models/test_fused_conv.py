"""Convolutions with fused bias, residual and ReLU: values and gradients are those of the separate operators, and the
call fits cuDNN's operators, whose schema every build of torch has. What they compute on a GPU: tests/trainer/gpu."""

import functools

import pytest
import torch
from torch import Tensor, nn

from stoker.models import build
from stoker.models.layers import convolutions
from stoker.models.layers.convolutions import ConvReLU, fold_frozen_norms, use_fused_convs
from stoker.models.layers.norms import FrozenBatchNorm2d
from stoker.models.layers.winograd import without_winograd
from stoker.models.networks import BasicBlock, Bottleneck
from tests import fakes
from tests.trainer.models.samples import make_batch, settings_of

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
"""Of bf16: a unit in the last place."""

Gradients = dict[str, Tensor]


def frozen_block(kind: str) -> nn.Module:
    torch.manual_seed(0)
    blocks = {
        "projection": lambda: Bottleneck(32, 16, 2, FrozenBatchNorm2d),
        "identity": lambda: Bottleneck(64, 16, 1, FrozenBatchNorm2d),
        "groups": lambda: Bottleneck(64, 32, 1, FrozenBatchNorm2d, groups=4, group_width=16),
        "basic": lambda: BasicBlock(32, 32, 1, FrozenBatchNorm2d),
        "head": lambda: ConvReLU(nn.Conv2d(32, 16, 3, padding=1)),
    }
    block = blocks[kind]()
    for norm in block.modules():
        if isinstance(norm, FrozenBatchNorm2d):
            for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
                tensor.uniform_(0.2, 1.5)
            norm.update_buffers()
    fold_frozen_norms(block)
    return block.to(memory_format=torch.channels_last)


def step(block: nn.Module, x: Tensor, grad: Tensor, *, bf16: bool) -> tuple[Tensor, Gradients]:
    dtype = torch.bfloat16 if bf16 else torch.float32
    x = x.to(dtype, memory_format=torch.channels_last, copy=True).requires_grad_()
    block.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        output = block(x)
    output.backward(grad.to(output.dtype))
    assert x.grad is not None
    weights = {name: weight.grad for name, weight in block.named_parameters() if weight.grad is not None}
    return output.detach(), weights | {"x": x.grad}


def assert_same(found: tuple[Tensor, Gradients], expected: tuple[Tensor, Gradients], dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    assert found[0].dtype == expected[0].dtype
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance * expected[0].abs().max().item())
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        atol = tolerance * gradient.abs().max().item()
        torch.testing.assert_close(found[1][name], gradient, rtol=tolerance, atol=atol, msg=name)


KINDS = [("projection", 32), ("identity", 64), ("groups", 64), ("basic", 32), ("head", 32)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "channels"), KINDS)
def test_values_and_gradients_are_those_of_the_separate_operators(kind: str, channels: int, dtype: torch.dtype) -> None:
    block = frozen_block(kind)
    x = torch.randn(2, channels, 9, 13)
    grad = torch.randn_like(block(x))
    expected = step(block, x, grad, bf16=dtype == torch.bfloat16)
    use_fused_convs(block, True)
    calls: list[str] = []
    with _CountedCalls(calls):
        found = step(block, x, grad, bf16=dtype == torch.bfloat16)
    assert len(calls) == {"basic": 2, "head": 1}.get(kind, 3)
    assert_same(found, expected, dtype)


class _CountedCalls(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "stoker":
            self.calls.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("kind", "channels"), KINDS[:1] + KINDS[-1:])
def test_it_can_be_compiled_as_one_graph(kind: str, channels: int, backend: str) -> None:
    block = frozen_block(kind)
    x = torch.randn(2, channels, 9, 13)
    grad = torch.randn_like(block(x))
    expected = step(block, x, grad, bf16=True)
    use_fused_convs(block, True)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=False)
    assert_same(step(compiled, x, grad, bf16=True), _renamed(expected), torch.bfloat16)


def _renamed(result: tuple[Tensor, Gradients]) -> tuple[Tensor, Gradients]:
    return result[0], {name if name == "x" else f"_orig_mod.{name}": value for name, value in result[1].items()}


def test_gradients_that_nobody_needs_are_not_computed() -> None:
    """A residual alone, a frozen weight, an input without gradient."""
    weight, bias = torch.randn(4, 4, 1, 1), torch.zeros(4)
    x, residual = torch.randn(1, 4, 3, 3), torch.randn(1, 4, 3, 3)
    compute = functools.partial(torch.ops.stoker.conv_relu, bias=bias, stride=[1, 1], padding=[0, 0], dilation=[1, 1])
    for needed in (x, weight, residual):
        needed.requires_grad_()
        output = compute(x, weight, residual=residual, groups=1)
        output.sum().backward()
        assert needed.grad is not None
        assert all(tensor.grad is None for tensor in (x, weight, residual) if tensor is not needed)
        needed.requires_grad_(False)
        needed.grad = None


def test_only_frozen_norms_are_fused() -> None:
    """A trained norm has statistics of the batch between convolution and ReLU."""
    torch.manual_seed(0)
    block = Bottleneck(32, 16, 2, nn.BatchNorm2d).train()
    x = torch.randn(2, 32, 8, 8)
    expected = block(x)
    use_fused_convs(block, True)
    assert torch.equal(block(x), expected)


@pytest.mark.parametrize("name", ["cudnn_convolution_relu", "cudnn_convolution_add_relu"])
def test_the_arguments_are_those_of_the_schema(name: str) -> None:
    """A kernel with the names of the schema, in the place of cuDNN's, gets every argument where it belongs."""
    schema = getattr(torch.ops.aten, name).default._schema
    names = [argument.name for argument in schema.arguments]

    def compute(*values: object) -> Tensor:
        given = dict(zip(names, values, strict=True))
        output = torch.conv2d(
            given["self"], given["weight"], given["bias"], given["stride"], given["padding"], given["dilation"],
            given["groups"],
        )  # fmt: skip
        return (output + given.get("alpha", 0) * given["z"] if "z" in given else output).relu()

    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 8, 9, 9), torch.randn(6, 4, 3, 3), torch.randn(6)
    geometry = ((2, 2), (2, 2), (2, 2), 2)
    residual = torch.randn(2, 6, 5, 5) if "add" in name else None
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(name, compute, "CPU")
        found = convolutions._cudnn(x, weight, bias, residual, *geometry)
    torch.testing.assert_close(found, convolutions.separate_conv_relu(x, weight, bias, residual, *geometry))
    with pytest.raises(NotImplementedError, match=name):  # a CPU has none: what is above was the test's
        convolutions._cudnn(x, weight, bias, residual, *geometry)


def test_a_fake_has_the_layout_of_the_real_output() -> None:
    from torch._subclasses import FakeTensorMode

    x, weight, bias = torch.randn(2, 8, 9, 9), torch.randn(6, 8, 3, 3), torch.randn(6)
    x, weight = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, weight))
    rest = (None, [2, 2], [1, 1], [1, 1], 1)
    real = torch.ops.stoker.conv_relu(x, weight, bias, *rest)
    with FakeTensorMode() as mode:
        fake = torch.ops.stoker.conv_relu(*(mode.from_tensor(tensor) for tensor in (x, weight, bias)), *rest)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_losses_and_gradients_of_a_detector_stay() -> None:
    torch.manual_seed(0)
    model = build(settings_of("retinanet_resnet18_fpn"), 3).train()
    batch = make_batch((3, 0), (64, 96), 3)
    results = []
    for fused in (False, True):
        use_fused_convs(model, fused)
        model.zero_grad()
        with without_winograd():
            losses = model.loss(model(batch.images), batch)
            torch.stack(list(losses.values())).sum().backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        results.append((losses, gradients))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_step_with_fused_kernels_makes_no_host_sync() -> None:
    pytest.importorskip("triton")
    trials = [fakes.Trial(model="retinanet_resnet18_fpn", kernels=kernels) for kernels in (False, True)]
    separate, fused = fakes.run(*trials)
    assert (separate.error, fused.error) == (None, None)
    assert fused.operators["loss"] < separate.operators["loss"] / 2
    assert fused.operators["forward"] < separate.operators["forward"]
