"""Cross-stage-partial networks: the body of the ember family, and the path aggregation that is its neck.

A block sends half of its channels through residual convolutions and joins what every one of them made to the other half
(CSPNet, arXiv 1911.11929; ELAN, arXiv 2211.04800, section 3): half the work of residual blocks of the same width, and
short ways for the gradient. The neck hands features down to the finest map and up again (PANet, arXiv 1803.01534).

Activations are ReLUs: accelerators, oneDNN and onnxruntime compute one with the convolution before it, and SiLU in
passes of its own over memory.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.models.layers.convolutions import convolution, separable
from stoker.models.layers.norms import Norm

Make = Callable[..., nn.Sequential]
"""`convolution` or `separable`."""
POOLED = 5
"""Side of the pooling windows of `Pooled`, which follow each other three times: 5, 9 and 13 places (SPP,
arXiv 1406.4729, as YOLOv4 has it, arXiv 2004.10934)."""


class Residual(nn.Module):
    """Two 3 × 3 convolutions, made by `make`, around which the input goes, too."""

    def __init__(self, channels: int, norm: Norm, make: Make) -> None:
        super().__init__()
        self.first = make(channels, channels, norm)
        self.second = make(channels, channels, norm)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, channels, H, W] → the same shape."""
        added: Tensor = x + self.second(self.first(x))
        return added


class CrossStage(nn.Module):
    """Half of the output's channels pass by, half go through `depth` residual blocks; all that these made is joined."""

    def __init__(self, inputs: int, outputs: int, depth: int, norm: Norm, make: Make = convolution) -> None:
        super().__init__()
        half = outputs // 2
        self.beside = convolution(inputs, half, norm, kernel=1)
        self.through = convolution(inputs, half, norm, kernel=1)
        self.blocks = nn.ModuleList(Residual(half, norm, make) for _ in range(depth))
        self.join = convolution((2 + depth) * half, outputs, norm, kernel=1)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, inputs, H, W] → [B, outputs, H, W]."""
        parts = [self.beside(x), self.through(x)]
        for block in self.blocks:
            parts.append(block(parts[-1]))
        joined: Tensor = self.join(torch.cat(parts, dim=1))
        return joined


class Pooled(nn.Module):
    """What is largest in ever wider windows, beside the features themselves: the coarsest map sees most of it."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.narrow = convolution(channels, channels // 2, norm, kernel=1)
        self.join = convolution(2 * channels, channels, norm, kernel=1)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, channels, H, W] → the same shape."""
        parts = [self.narrow(x)]
        for _ in range(3):
            parts.append(functional.max_pool2d(parts[-1], POOLED, stride=1, padding=POOLED // 2))
        joined: Tensor = self.join(torch.cat(parts, dim=1))
        return joined


class CspBody(nn.Sequential):
    """Five stages at strides 2 … 32 of `width` to 16 · `width` channels; `depths`: residual blocks in the last four."""

    def __init__(self, width: int, depths: Sequence[int], norm: Norm) -> None:
        super().__init__()
        self.add_module("stem", convolution(3, width, norm, stride=2))
        for number, depth in enumerate(depths, start=1):
            channels = width * 2**number
            stage = [convolution(channels // 2, channels, norm, stride=2), CrossStage(channels, channels, depth, norm)]
            if number == len(depths):
                stage.append(Pooled(channels, norm))
            self.add_module(f"layer{number}", nn.Sequential(*stage))


class PathAggregation(nn.Module):
    """Feature maps, finest first, each half as large as the one before, joined downwards and then upwards.

    inputs, channels: of each map, before and after; depth: residual blocks of each `CrossStage`; depthwise: whether
    its 3 × 3 convolutions are `separable`.
    """

    def __init__(
        self, inputs: Sequence[int], channels: Sequence[int], depth: int, norm: Norm, *, depthwise: bool
    ) -> None:
        super().__init__()
        make: Make = separable if depthwise else convolution
        count = len(inputs)
        # A body's map that is wider than ours would make the convolutions behind it dear.
        self.narrow = nn.ModuleList(
            convolution(got, wanted, norm, kernel=1) if got > wanted else nn.Identity()
            for got, wanted in zip(inputs, channels, strict=True)
        )
        widths = [min(got, wanted) for got, wanted in zip(inputs, channels, strict=True)]
        joined = [*channels[:-1], widths[-1]]
        self.down = nn.ModuleList(
            CrossStage(joined[n + 1] + widths[n], channels[n], depth, norm, make) for n in range(count - 1)
        )
        self.halve = nn.ModuleList(make(channels[n], channels[n], norm, stride=2) for n in range(count - 1))
        self.up = nn.ModuleList(
            CrossStage(channels[n] + joined[n + 1], channels[n + 1], depth, norm, make) for n in range(count - 1)
        )

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """maps: finest first, each [B, inputs, h, w] → the same with `channels`."""
        merged = [narrow(some) for narrow, some in zip(self.narrow, maps, strict=True)]
        for n in reversed(range(len(merged) - 1)):
            with torch.autocast(merged[n].device.type, enabled=False):  # which would enlarge in fp32
                coarser = functional.interpolate(merged[n + 1], scale_factor=2.0, mode="nearest")
            merged[n] = self.down[n](torch.cat((coarser, merged[n]), dim=1))
        levels = [merged[0]]
        for n, finer in enumerate(merged[1:]):
            levels.append(self.up[n](torch.cat((self.halve[n](levels[-1]), finer), dim=1)))
        return levels
