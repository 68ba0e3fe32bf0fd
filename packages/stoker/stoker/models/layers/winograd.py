"""Winograd's convolution for CPUs without AVX-512: 3 × 3 with a quarter of the multiplications.

F(4 × 4, 3 × 3) of Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (arXiv 1509.09308): the input is
cut into overlapping 6 × 6 tiles; tiles and weights are transformed; matrix products replace the convolution; a last
transform gives 4 × 4 tiles of the output. With AVX2, forward and backward pass then take 0.4 to 0.6 of the time of
oneDNN's convolutions; with AVX-512, those are the faster ones (LOG.md, "The step without AVX-512"). The price is
rounding: the error is about four times that of a direct convolution in fp32.
"""

import contextlib
import types
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

MIN_TILES, MIN_CHANNELS = 100, 128
"""Below, the transforms take longer than the products save."""
MAX_TILE_ELEMENTS = 2**21
"""Elements of the transformed tiles of the input that are held at once, if a row of tiles does not need more."""

_computes_directly = ContextVar("_computes_directly", default=False)


@contextlib.contextmanager
def without_winograd() -> Iterator[None]:
    """Computes all convolutions of the block directly: FLOPs that are counted in it are the same on all machines."""
    token = _computes_directly.set(True)
    try:
        yield
    finally:
        _computes_directly.reset(token)


def _for_rows_and_columns(transform: list[list[float]]) -> Tensor:
    matrix = torch.tensor(transform, dtype=torch.float64)
    return torch.kron(matrix, matrix)


INPUT_TRANSFORM = _for_rows_and_columns(
    [
        [4, 0, -5, 0, 1, 0],
        [0, -4, -4, 1, 1, 0],
        [0, 4, -4, -1, 1, 0],
        [0, -2, -1, 2, 1, 0],
        [0, 2, -1, -2, 1, 0],
        [0, 4, 0, -5, 0, 1],
    ]
)
"""[36, 36], of a 6 × 6 tile of the input: the paper's B, transposed (section 4.3)."""
WEIGHT_TRANSFORM = _for_rows_and_columns(
    [
        [1 / 4, 0, 0],
        [-1 / 6, -1 / 6, -1 / 6],
        [-1 / 6, 1 / 6, -1 / 6],
        [1 / 24, 1 / 12, 1 / 6],
        [1 / 24, -1 / 12, 1 / 6],
        [0, 0, 1],
    ]
)
"""[36, 9]: the paper's G."""
OUTPUT_TRANSFORM = _for_rows_and_columns(
    [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]]
)
"""[16, 36], to a 4 × 4 tile of the output: the paper's A, transposed."""


def use_winograd_without_avx512(model: nn.Module) -> None:
    """Makes the wide 3 × 3 convolutions of a model use it on a CPU without AVX-512."""
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        for module in model.modules():
            if isinstance(module, nn.Conv2d) and _is_wide_3x3(module):
                module._conv_forward = types.MethodType(_conv_forward, module)  # type: ignore[method-assign]


def _is_wide_3x3(conv: nn.Conv2d) -> bool:
    return (
        (conv.kernel_size, conv.stride, conv.padding, conv.dilation) == ((3, 3), (1, 1), (1, 1), (1, 1))
        and conv.groups == 1
        and min(conv.in_channels, conv.out_channels) >= MIN_CHANNELS
    )


def _conv_forward(conv: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    fits = (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not _computes_directly.get()
        and len(x) * _num_tiles(x.shape[2]) * _num_tiles(x.shape[3]) >= MIN_TILES
    )
    if not fits:
        return type(conv)._conv_forward(conv, x, weight, bias)
    output: Tensor = WinogradConv.apply(x, weight)
    return output if bias is None else output.add_(bias[:, None, None])


def _num_tiles(side: int) -> int:
    return -(-side // 4)


class WinogradConv(torch.autograd.Function):
    """(x [B, C, H, W], weight [K, C, 3, 3]) → [B, K, H, W]: convolution with stride and padding 1, in channels-last
    memory. The transformed input is computed again for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        height, width = x.shape[2:]
        rows, columns = _num_tiles(height), _num_tiles(width)
        shape = (len(x), weight.shape[0], 4 * rows, 4 * columns)
        y = torch.empty(shape, dtype=x.dtype, memory_format=torch.channels_last)  # before what is freed at the end
        transformed_weight, output_transform = _transform_weight(weight), OUTPUT_TRANSFORM.to(x.dtype)
        y_tiles = _split(y.permute(0, 2, 3, 1))
        for part in _parts(x):
            product = torch.bmm(_transform_input(x, part), transformed_weight).flatten(1)
            target = y_tiles[:, :, *part]
            target.copy_((output_transform @ product).view(target.shape))
        if (height, width) == y.shape[2:]:
            return y
        return y[:, :, :height, :width].clone(memory_format=torch.channels_last)  # a view could not be changed in place

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, y_grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        x_wanted, weight_wanted = ctx.needs_input_grad
        channels, (height, width) = x.shape[1], x.shape[2:]
        rows, columns = _num_tiles(height), _num_tiles(width)
        y_grad = y_grad.permute(0, 2, 3, 1)
        if (height, width) != (4 * rows, 4 * columns):
            y_grad = functional.pad(y_grad, (0, 0, 0, 4 * columns - width, 0, 4 * rows - height))
        y_tiles = _split(y_grad)
        x_grad = x.new_zeros(len(x), 4 * rows + 4, 4 * columns + 4, channels) if x_wanted else None
        transformed_weight = _transform_weight(weight)
        input_transform, output_transform = INPUT_TRANSFORM.to(x.dtype), OUTPUT_TRANSFORM.to(x.dtype)
        transformed_weight_grad = torch.zeros_like(transformed_weight) if weight_wanted else None
        for images, tile_rows in _parts(x):
            part = y_tiles[:, :, images, tile_rows].reshape(16, -1)
            product_grad = (output_transform.t() @ part).view(36, -1, weight.shape[0])
            if transformed_weight_grad is not None:
                tiles = _transform_input(x, (images, tile_rows))
                transformed_weight_grad.baddbmm_(tiles.transpose(1, 2), product_grad)
            if x_grad is not None:
                tiles = torch.bmm(product_grad, transformed_weight.transpose(1, 2)).flatten(1)
                tiles = (input_transform.t() @ tiles).view(6, 6, len(x[images]), -1, columns, channels)
                first, last = tile_rows.start, tile_rows.stop
                _add_overlapping(_split(x_grad[images, 4 * first : 4 * last + 4]), tiles)
        weight_grad = None
        if transformed_weight_grad is not None:
            weight_grad = (WEIGHT_TRANSFORM.to(x.dtype).t() @ transformed_weight_grad.flatten(1)).view(
                3, 3, channels, -1
            )
            weight_grad = weight_grad.permute(3, 2, 0, 1)
        if x_grad is not None:
            x_grad = x_grad[:, 1 : 1 + height, 1 : 1 + width].contiguous().permute(0, 3, 1, 2)
        return x_grad, weight_grad


def _parts(x: Tensor) -> list[tuple[slice, slice]]:
    """Images and rows of tiles, so that the transformed tiles of a part have at most MAX_TILE_ELEMENTS elements."""
    rows = _num_tiles(x.shape[2])
    max_rows = max(1, MAX_TILE_ELEMENTS // (36 * _num_tiles(x.shape[3]) * x.shape[1]))
    num_images, rows_at_once = max(1, max_rows // rows), min(rows, max_rows)
    return [
        (slice(image, image + num_images), slice(row, min(rows, row + rows_at_once)))
        for image in range(0, len(x), num_images)
        for row in range(0, rows, rows_at_once)
    ]


def _split(maps: Tensor) -> Tensor:
    """[B, 4 · rows, 4 · columns, C] → a view [4, 4, B, rows, columns, C]"""
    batch, height, width, channels = maps.shape
    return maps.view(batch, height // 4, 4, width // 4, 4, channels).permute(2, 4, 0, 1, 3, 5)


def _transform_input(x: Tensor, part: tuple[slice, slice]) -> Tensor:
    """[B, C, H, W] → [36, tiles of the part, C]"""
    images, tile_rows = part
    height, width = x.shape[2:]
    top, bottom = 4 * tile_rows.start - 1, 4 * tile_rows.stop + 1
    band = x[images, :, max(0, top) : bottom].permute(0, 2, 3, 1)
    padding = (0, 0, 1, 4 * _num_tiles(width) + 1 - width, max(0, -top), max(0, bottom - height))
    tiles = functional.pad(band, padding).unfold(1, 6, 4).unfold(2, 6, 4).permute(4, 5, 0, 1, 2, 3)
    return (INPUT_TRANSFORM.to(x.dtype) @ tiles.reshape(36, -1)).view(36, -1, x.shape[1])


def _transform_weight(weight: Tensor) -> Tensor:
    """[K, C, 3, 3] → [36, C, K]"""
    flat = weight.detach().permute(2, 3, 1, 0).reshape(9, -1)
    return (WEIGHT_TRANSFORM.to(weight.dtype) @ flat).view(36, weight.shape[1], weight.shape[0])


def _add_overlapping(target: Tensor, tiles: Tensor) -> None:
    """Adds tiles [6, 6, B, rows, columns, C], 4 apart, to `target` [4, 4, B, rows + 1, columns + 1, C]."""
    target[:, :, :, :-1, :-1] += tiles[:4, :4]
    target[:2, :, :, 1:, :-1] += tiles[4:, :4]
    target[:, :2, :, :-1, 1:] += tiles[:4, 4:]
    target[:2, :2, :, 1:, 1:] += tiles[4:, 4:]
