"""Cross-stage-partial networks: the CSP backbone of the ember family, and its PAFPN neck.

A CSP layer sends half of its channels through residual blocks and concatenates the output of each block with the other
half (CSPNet, arXiv 1911.11929; ELAN, arXiv 2211.04800, section 3): half the FLOPs of residual blocks of the same width,
and short gradient paths. The neck merges features top-down to the finest map, then bottom-up (PANet, arXiv 1803.01534).

Activations are ReLUs: accelerators, oneDNN and onnxruntime fuse a ReLU with the convolution before it, while SiLU takes
passes over memory of its own.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.models.layers.convolutions import conv_norm_relu, separable_conv_norm_relu
from stoker.models.layers.norms import Norm

ConvFactory = Callable[..., nn.Sequential]
"""`conv_norm_relu` or `separable_conv_norm_relu`."""
POOL_SIZE = 5
"""Window of the three poolings in sequence of `SPPF`, which cover 5, 9 and 13 positions (SPP, arXiv 1406.4729, with
YOLOv4's windows, arXiv 2004.10934)."""


class Residual(nn.Module):
    """Two 3 × 3 convolutions from `make_conv` with a skip connection."""

    def __init__(self, channels: int, norm: Norm, make_conv: ConvFactory) -> None:
        super().__init__()
        self.first = make_conv(channels, channels, norm)
        self.second = make_conv(channels, channels, norm)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, channels, H, W] → the same shape."""
        output: Tensor = x + self.second(self.first(x))
        return output


class CSPLayer(nn.Module):
    """Half of the channels skip the `num_blocks` residual blocks; the outputs of all blocks are concatenated."""

    def __init__(
        self, in_channels: int, out_channels: int, num_blocks: int, norm: Norm, make_conv: ConvFactory = conv_norm_relu
    ) -> None:
        super().__init__()
        half = out_channels // 2
        self.beside = conv_norm_relu(in_channels, half, norm, kernel_size=1)
        self.through = conv_norm_relu(in_channels, half, norm, kernel_size=1)
        self.blocks = nn.ModuleList(Residual(half, norm, make_conv) for _ in range(num_blocks))
        self.join = conv_norm_relu((2 + num_blocks) * half, out_channels, norm, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, in, H, W] → [B, out, H, W]."""
        features = [self.beside(x), self.through(x)]
        for block in self.blocks:
            features.append(block(features[-1]))
        joined: Tensor = self.join(torch.cat(features, dim=1))
        return joined


class SPPF(nn.Module):
    """Spatial pyramid pooling (fast): concatenates the features with their maxima over windows of 5, 9 and 13."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.narrow = conv_norm_relu(channels, channels // 2, norm, kernel_size=1)
        self.join = conv_norm_relu(2 * channels, channels, norm, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, channels, H, W] → the same shape."""
        features = [self.narrow(x)]
        for _ in range(3):
            features.append(functional.max_pool2d(features[-1], POOL_SIZE, stride=1, padding=POOL_SIZE // 2))
        joined: Tensor = self.join(torch.cat(features, dim=1))
        return joined


class CSPBackbone(nn.Sequential):
    """Five stages at strides 2 … 32 of `width` to 16 · `width` channels; `depths`: residual blocks in the last four."""

    def __init__(self, width: int, depths: Sequence[int], norm: Norm) -> None:
        super().__init__()
        self.add_module("stem", conv_norm_relu(3, width, norm, stride=2))
        for stage_number, num_blocks in enumerate(depths, start=1):
            channels = width * 2**stage_number
            stage = [
                conv_norm_relu(channels // 2, channels, norm, stride=2),
                CSPLayer(channels, channels, num_blocks, norm),
            ]
            if stage_number == len(depths):
                stage.append(SPPF(channels, norm))
            self.add_module(f"layer{stage_number}", nn.Sequential(*stage))


class PAFPN(nn.Module):
    """Path aggregation over feature maps, finest first, each half as large as the one before.

    in_channels, channels: of each map, before and after; num_blocks: residual blocks of each `CSPLayer`; depthwise:
    whether its 3 × 3 convolutions are separable.
    """

    def __init__(
        self, in_channels: Sequence[int], channels: Sequence[int], num_blocks: int, norm: Norm, *, depthwise: bool
    ) -> None:
        super().__init__()
        make_conv: ConvFactory = separable_conv_norm_relu if depthwise else conv_norm_relu
        num_levels = len(in_channels)
        # Maps wider than the neck are narrowed first, which saves FLOPs in the layers after it.
        self.narrow = nn.ModuleList(
            conv_norm_relu(in_width, out_width, norm, kernel_size=1) if in_width > out_width else nn.Identity()
            for in_width, out_width in zip(in_channels, channels, strict=True)
        )
        widths = [min(in_width, out_width) for in_width, out_width in zip(in_channels, channels, strict=True)]
        joined_widths = [*channels[:-1], widths[-1]]
        self.down = nn.ModuleList(
            CSPLayer(joined_widths[n + 1] + widths[n], channels[n], num_blocks, norm, make_conv)
            for n in range(num_levels - 1)
        )
        self.halve = nn.ModuleList(make_conv(channels[n], channels[n], norm, stride=2) for n in range(num_levels - 1))
        self.up = nn.ModuleList(
            CSPLayer(channels[n] + joined_widths[n + 1], channels[n + 1], num_blocks, norm, make_conv)
            for n in range(num_levels - 1)
        )

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """maps: finest first, each [B, in, h, w] → the same with `channels`."""
        merged = [narrow(feature) for narrow, feature in zip(self.narrow, maps, strict=True)]
        for n in reversed(range(len(merged) - 1)):
            with torch.autocast(merged[n].device.type, enabled=False):  # autocast upsamples in fp32
                coarser = functional.interpolate(merged[n + 1], scale_factor=2.0, mode="nearest")
            merged[n] = self.down[n](torch.cat((coarser, merged[n]), dim=1))
        levels = [merged[0]]
        for n, finer in enumerate(merged[1:]):
            levels.append(self.up[n](torch.cat((self.halve[n](levels[-1]), finer), dim=1)))
        return levels
