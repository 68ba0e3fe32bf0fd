"""1 × 1 convolutions on one thread of a CPU, as convolutions of more and smaller images.

On one thread, torch gives a 1 × 1 convolution of fewer than 16 images in fp32 to its own matrix product (`use_mkldnn`
in its Convolution.cpp). oneDNN takes 0.56 of that time with AVX-512 and 0.73 with AVX2, forward and backward (LOG.md,
"1 × 1 convolutions on one thread"). Channels-last maps are also at least 16 images of fewer rows, without a copy.
"""

import types
from typing import Any

import torch
from torch import Tensor, nn

MIN_IMAGES = 16
"""From which torch takes oneDNN on one thread."""


def use_onednn_for_pointwise(model: nn.Module) -> None:
    """Makes the 1 × 1 convolutions of a model use oneDNN also for few images on one thread of a CPU."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            shape = module.kernel_size, module.stride, module.padding, module.groups
            if shape == ((1, 1), (1, 1), (0, 0), 1):
                module._conv_forward = types.MethodType(_conv_forward, module)  # type: ignore[method-assign]


def _conv_forward(conv: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    fits = (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and len(x) < MIN_IMAGES
        and torch.get_num_threads() == 1
        and x.is_contiguous(memory_format=torch.channels_last)
        and not torch.is_autocast_enabled("cpu")
    )
    parts = num_parts(len(x), x.shape[2]) if fits else 1
    return (
        type(conv)._conv_forward(conv, x, weight, bias) if parts == 1 else PointwiseConv.apply(x, weight, bias, parts)
    )


def num_parts(images: int, height: int) -> int:
    """The fewest equal parts of an image by rows that make MIN_IMAGES of all; 1: there are none."""
    return next((n for n in range(-(-MIN_IMAGES // max(1, images)), height + 1) if height % n == 0), 1)


class PointwiseConv(torch.autograd.Function):
    """(x [B, C, H, W], weight [K, C, 1, 1], bias [K] or None, parts of an image) → [B, K, H, W], channels-last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parts, ctx.has_bias = parts, bias is not None
        y = torch.conv2d(_split(x, parts), weight, bias)
        return _join(y, parts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, y_grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        y_grad = y_grad.contiguous(memory_format=torch.channels_last)
        x_grad, weight_grad, bias_grad = torch.ops.aten.convolution_backward(
            _split(y_grad, ctx.parts), _split(x, ctx.parts), weight, [len(weight)] if ctx.has_bias else None,
            (1, 1), (0, 0), (1, 1), False, (0, 0), 1, ctx.needs_input_grad[:3],
        )  # fmt: skip
        return None if x_grad is None else _join(x_grad, ctx.parts), weight_grad, bias_grad, None


def _split(x: Tensor, parts: int) -> Tensor:
    """[B, C, H, W] → a view [B · parts, C, H / parts, W]"""
    images, channels, height, width = x.shape
    return x.permute(0, 2, 3, 1).reshape(images * parts, height // parts, width, channels).permute(0, 3, 1, 2)


def _join(x: Tensor, parts: int) -> Tensor:
    """[B · parts, C, H / parts, W] → [B, C, H, W] with the same memory, but for autograd no view, which could not be
    changed in place."""
    images, channels, height, width = x.shape
    joined = x.permute(0, 2, 3, 1).reshape(images // parts, height * parts, width, channels)
    return joined.permute(0, 3, 1, 2).data
