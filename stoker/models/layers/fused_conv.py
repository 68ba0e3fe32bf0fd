"""Convolution, bias, residual and ReLU as one operator (cuDNN's fused epilogue), for training on NVIDIA GPUs.

Without it each of them reads and writes the whole map: four passes in eager mode, one of them left by a compiler. The
backward pass is that of the separate operators. `use_fused_convs` switches it; `training/make_step.py`
decides by measurement. On a CPU the operator computes the separate ones, which is how its gradients are tested.
"""

# mypy: disable-error-code="no-untyped-call"
# (what registers operators in torch is untyped)

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.models.layers.norms import FoldedConv2d

aten = torch.ops.aten

_library = torch.library.Library("stoker", "FRAGMENT")
_library.define(
    "conv_relu(Tensor x, Tensor weight, Tensor bias, Tensor? residual, SymInt[] stride, SymInt[] padding,"
    " SymInt[] dilation, SymInt groups) -> Tensor"
)


def conv_relu(conv: nn.Conv2d, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """relu(conv(x) + residual), with the frozen norm of a folded convolution: [B, in, H, W] → [B, out, h, w].

    conv: with a bias or folded, padded by zeros; residual: [B, out, h, w]. Computes in the dtype of autocast.
    """
    weight, bias = conv.weights() if isinstance(conv, FoldedConv2d) else (conv.weight, conv.bias)
    tensors = [x, weight, bias, residual]
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        tensors = [None if tensor is None else tensor.to(dtype) for tensor in tensors]
    output: Tensor = torch.ops.stoker.conv_relu(*tensors, conv.stride, conv.padding, conv.dilation, conv.groups)
    return output


def use_fused_convs(model: nn.Module, enabled: bool) -> None:
    """Makes the blocks of `model` that can do so compute with `conv_relu`, or with separate operators again."""
    for module in model.modules():
        if hasattr(module, "fused_convs"):
            module.fused_convs = enabled  # type: ignore[assignment]


class ConvReLU(nn.Sequential):
    """A convolution with bias, and a ReLU: [B, in, H, W] → [B, out, h, w]."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__(conv, nn.ReLU(inplace=True))
        self.fused_convs = False

    def forward(self, x: Tensor) -> Tensor:
        conv = self[0]
        assert isinstance(conv, nn.Conv2d)
        activated: Tensor = conv_relu(conv, x) if self.fused_convs else super().forward(x)
        return activated


def _cudnn(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, *geometry: Any) -> Tensor:
    if residual is None:
        return torch.cudnn_convolution_relu(x, weight, bias, *geometry)
    return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, *geometry)


def _separate(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, *geometry: Any) -> Tensor:
    output = functional.conv2d(x, weight, bias, *geometry)
    if residual is not None:
        output += residual
    return output.relu_()


def _without_values(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, *geometry: Any) -> Tensor:  # noqa: ARG001
    *of_window, groups = geometry
    output: Tensor = aten.convolution(x, weight, None, *of_window, False, [0, 0], groups)
    return output


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, _, *ctx.geometry = inputs
    ctx.num_channels = bias.shape[0]
    ctx.save_for_backward(x, weight, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, output = ctx.saved_tensors
    *of_window, groups = ctx.geometry
    grad = aten.threshold_backward(grad, output, 0)
    wanted, residual_wanted = list(ctx.needs_input_grad[:3]), ctx.needs_input_grad[3]
    grads: list[Tensor | None] = [None, None, None]
    if any(wanted):
        grads = list(
            aten.convolution_backward(grad, x, weight, [ctx.num_channels], *of_window, False, [0, 0], groups, wanted)
        )
    return *grads, grad if residual_wanted else None, None, None, None, None


_library.impl("conv_relu", _cudnn, "CUDA")
_library.impl("conv_relu", _separate, "CPU")
torch.library.register_fake("stoker::conv_relu", _without_values, lib=_library)
torch.library.register_autograd("stoker::conv_relu", _backward, setup_context=_save, lib=_library)
