"""HGNetv2 (PP-HGNetV2 of PaddleClas, as D-FINE has it) and the encoders of D-FINE and DEIMv2 on top of it.

A stage downsamples by a depthwise convolution and has blocks that concatenate the outputs of all their layers. Hybrid
encoder (RT-DETR, Zhao et al. 2023, arXiv 2304.08069, section 4.2): a transformer layer on the coarsest map, then a
top-down and a bottom-up path of CSP-ELAN blocks. Lite encoder (DEIMv2, Huang et al. 2025, arXiv 2509.20787): for one
map; it makes a second, coarser one. Maps are [B, C, h, w]; h and w of the finest are multiples of the coarsest's.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.knowledge import read_toml
from stoker.models.layers.convolutions import conv_norm, pad_and_fold, upsample_2x
from stoker.models.layers.norms import NORMS, Norm, NormKind, trainable_norm
from stoker.models.layers.transformer import EncoderLayer, SinePositions


class StageSpec(NamedTuple):
    middle: int
    """Channels of the layers in a block."""
    out: int
    num_blocks: int
    kernel_size: int
    light: bool


class HGNetSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stem: tuple[int, int]
    stages: tuple[StageSpec, ...]
    num_layers: int
    affine: bool


HGNETS = msgspec.convert(read_toml("models.toml")["hgnets"], dict[str, HGNetSpec])
"""Value of `network.backbone` → network."""
silu_conv = partial(conv_norm, activation=nn.SiLU)
plain_conv = partial(conv_norm, activation=None)


class LearnedAffine(nn.Module):
    """x · scale + bias with one number each, learned."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias.to(x.dtype), x, self.scale.to(x.dtype))


def _layer(affine: bool, in_channels: int, out_channels: int, norm: Norm, **options: Any) -> nn.Sequential:
    """Convolution, norm, ReLU, and the learned numbers."""
    layer = conv_norm(in_channels, out_channels, norm, **options)
    return layer.append(LearnedAffine()) if affine else layer


class Stem(nn.Module):
    """Images [B, 3, H, W] → [B, out, H / 4, W / 4]. 2 × 2 convolutions and pooling are padded right and below."""

    def __init__(self, middle: int, out: int, *, affine: bool, norm: Norm) -> None:
        super().__init__()
        layer = partial(_layer, affine, norm=norm)
        self.stem1 = layer(3, middle, stride=2)
        self.stem2a, self.stem2b = (
            layer(*widths, kernel_size=2) for widths in ((middle, middle // 2), (middle // 2, middle))
        )
        for branch in (self.stem2a, self.stem2b):
            conv = branch[0]
            assert isinstance(conv, nn.Conv2d)
            conv.padding = (0, 0)
        self.stem3, self.stem4 = layer(2 * middle, middle, stride=2), layer(middle, out, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.pad(self.stem1(x), (0, 1, 0, 1))
        branch = self.stem2b(functional.pad(self.stem2a(x), (0, 1, 0, 1)))
        pooled = functional.max_pool2d(x, 2, stride=1)
        return self.stem4(self.stem3(torch.cat((pooled, branch), 1)))


class Block(nn.Module):
    def __init__(
        self, in_channels: int, spec: StageSpec, num_layers: int, *, residual: bool, affine: bool, norm: Norm
    ) -> None:
        super().__init__()
        self.residual = residual
        layer = partial(_layer, affine, norm=norm)
        self.layers = nn.ModuleList()
        for width in [in_channels, *[spec.middle] * (num_layers - 1)]:
            if spec.light:
                depthwise = layer(spec.middle, spec.middle, kernel_size=spec.kernel_size, groups=spec.middle)
                pointwise = plain_conv(width, spec.middle, norm, kernel_size=1)
                self.layers.append(nn.Sequential(OrderedDict(conv1=pointwise, conv2=depthwise)))
            else:
                self.layers.append(layer(width, spec.middle, kernel_size=spec.kernel_size))
        total = in_channels + num_layers * spec.middle
        self.aggregation = nn.Sequential(
            layer(total, spec.out // 2, kernel_size=1), layer(spec.out // 2, spec.out, kernel_size=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        maps = [x]
        for layer in self.layers:
            maps.append(layer(maps[-1]))
        out: Tensor = self.aggregation(torch.cat(maps, 1))
        return out + x if self.residual else out


class HGStage(nn.Module):
    def __init__(self, in_channels: int, spec: StageSpec, number: int, network: HGNetSpec, norm: Norm) -> None:
        super().__init__()
        # The first stage has the stride of the stem.
        self.downsample = (
            plain_conv(in_channels, in_channels, norm, stride=2, groups=in_channels) if number else nn.Identity()
        )
        widths = [in_channels, *[spec.out] * (spec.num_blocks - 1)]
        self.blocks = nn.Sequential(
            *(
                Block(width, spec, network.num_layers, residual=index > 0, affine=network.affine, norm=norm)
                for index, width in enumerate(widths)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.downsample(x))


class HGNetBackbone(nn.Module):
    """A network of HGNETS and an encoder, which makes the maps of the decoder from those of the last `num_maps` stages;
    for one map the lite one. trainable_stages: of stem and stages, from the last of five; others: of the encoder."""

    def __init__(
        self, name: str, num_maps: int, channels: int, *, norm: NormKind, trainable_stages: int, feedforward: int,
        expansion: float, num_blocks: int, fused: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        spec, make_norm = HGNETS[name], NORMS[norm]
        self.num_maps = num_maps
        widths = [stage.out for stage in spec.stages[-num_maps:]]
        common: dict[str, Any] = {"expansion": expansion, "num_blocks": num_blocks, "norm": NORMS[trainable_norm(norm)]}
        encoder = (
            LiteEncoder(widths[0], channels, **common)
            if num_maps == 1
            else HybridEncoder(widths, channels, feedforward=feedforward, fused=fused, **common)
        )
        self.body = nn.ModuleDict({"stem": Stem(*spec.stem, affine=spec.affine, norm=make_norm)})
        widths = [spec.stem[1], *(stage.out for stage in spec.stages)]
        self.body["stages"] = nn.ModuleList(
            HGStage(widths[number], stage, number, spec, make_norm) for number, stage in enumerate(spec.stages)
        )
        self.encoder = encoder
        for part in [self.body["stem"], *self.body["stages"]][: max(0, 5 - trainable_stages)]:  # type: ignore[misc]
            part.requires_grad_(False)
        pad_and_fold(self.body)

    def forward(self, images: Tensor) -> list[Tensor]:
        x = self.body["stem"](images)
        maps: list[Tensor] = []
        for stage in self.body["stages"]:  # type: ignore[attr-defined]
            x = stage(x)
            maps = [*maps, x][-self.num_maps :]
        return self.encoder(maps)


class RepBlock(nn.Module):
    """A 3 × 3 and a 1 × 1 convolution side by side (RepVGG, arXiv 2101.03697), and SiLU."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.conv2 = (plain_conv(channels, channels, norm, kernel_size=size) for size in (3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(self.conv1(x) + self.conv2(x))


class RepCSPLayer(nn.Module):
    """Half of the channels pass `num_blocks` RepBlocks, and the other half is added. fused: one convolution makes both
    halves, and a 3 × 3 convolution follows (DEIMv2); otherwise that convolution is the caller's (D-FINE)."""

    def __init__(self, in_channels: int, out_channels: int, num_blocks: int, norm: Norm, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.conv1 = silu_conv(in_channels, out_channels * (2 if fused else 1), norm, kernel_size=1)
        self.conv2 = silu_conv(
            out_channels if fused else in_channels, out_channels, norm, kernel_size=3 if fused else 1
        )
        self.bottlenecks = nn.Sequential(*(RepBlock(out_channels, norm) for _ in range(num_blocks)))

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            bypass, main = self.conv1(x).chunk(2, 1)
            return self.conv2(bypass + self.bottlenecks(main))
        return self.bottlenecks(self.conv1(x)) + self.conv2(x)


class ELANBlock(nn.Module):
    """[B, in, h, w] → [B, channels, h, w]: two halves, and two CSP layers one after the other, concatenated."""

    def __init__(
        self, in_channels: int, channels: int, expansion: float, num_blocks: int, norm: Norm, *, fused: bool
    ) -> None:
        super().__init__()
        middle = round(expansion * channels // 2)
        self.conv1 = silu_conv(in_channels, 2 * channels, norm, kernel_size=1)
        self.csp_rep1, self.csp_rep2 = (
            RepCSPLayer(width, middle, num_blocks, norm, fused=fused) for width in (channels, middle)
        )
        after = [nn.Identity() if fused else silu_conv(middle, middle, norm) for _ in range(2)]
        self.conv2, self.conv3 = after
        self.conv4 = silu_conv(2 * channels + 2 * middle, channels, norm, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        halves = self.conv1(x)
        first = self.conv2(self.csp_rep1(halves.chunk(2, 1)[1]))
        return self.conv4(torch.cat((halves, first, self.conv3(self.csp_rep2(first))), 1))


class HybridEncoder(nn.Module):
    """Maps of `in_channels`, finest first → as many maps of `channels`. fused: DEIMv2's blocks, and sums of maps."""

    def __init__(
        self,
        in_channels: Sequence[int],
        channels: int,
        *,
        feedforward: int,
        expansion: float,
        num_blocks: int,
        norm: Norm,
        fused: bool,
    ) -> None:
        super().__init__()
        self.fused = fused
        steps = len(in_channels) - 1
        block = partial(
            ELANBlock, channels if fused else 2 * channels, channels, expansion, num_blocks, norm, fused=fused
        )
        self.input_proj = nn.ModuleList(plain_conv(width, channels, norm, kernel_size=1) for width in in_channels)
        self.positions = SinePositions(channels)
        self.layer = EncoderLayer(channels, feedforward)
        self.lateral_convs = nn.ModuleList(plain_conv(channels, channels, norm, kernel_size=1) for _ in range(steps))
        self.fpn_blocks = nn.ModuleList(block() for _ in range(steps))
        self.downsample_convs = nn.ModuleList(
            nn.Sequential(
                plain_conv(channels, channels, norm, kernel_size=1),
                plain_conv(channels, channels, norm, stride=2, groups=channels),
            )
            for _ in range(steps)
        )
        self.pan_blocks = nn.ModuleList(block() for _ in range(steps))

    def _fuse(self, first: Tensor, second: Tensor) -> Tensor:
        return first + second if self.fused else torch.cat((first, second), 1)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        maps = [project(x) for project, x in zip(self.input_proj, maps, strict=True)]
        coarsest = maps[-1]
        tokens = self.layer(coarsest.flatten(2).transpose(1, 2), self.positions(coarsest))
        top_down = [tokens.to(coarsest.dtype).transpose(1, 2).unflatten(2, coarsest.shape[2:])]
        for lateral, block, finer in zip(self.lateral_convs, self.fpn_blocks, reversed(maps[:-1]), strict=True):
            top_down[0] = lateral(top_down[0])
            upsampled = upsample_2x(top_down[0])
            top_down.insert(0, block(self._fuse(upsampled, finer)))
        out = top_down[:1]
        for downsample, block, same in zip(self.downsample_convs, self.pan_blocks, top_down[1:], strict=True):
            out.append(block(self._fuse(downsample(out[-1]), same)))
        return out


class LiteEncoder(nn.Module):
    """One map of `in_channels` → two maps of `channels`, the second at half the resolution, to which the mean over the
    image is added."""

    def __init__(self, in_channels: int, channels: int, *, expansion: float, num_blocks: int, norm: Norm) -> None:
        super().__init__()
        self.input_proj = nn.ModuleList([plain_conv(in_channels, channels, norm, kernel_size=1)])
        self.down_conv1, self.down_conv2, self.bi_fusion_conv = (
            silu_conv(channels, channels, norm, kernel_size=1) for _ in range(3)
        )
        self.fpn_block, self.pan_block = (
            ELANBlock(channels, channels, expansion, num_blocks, norm, fused=True) for _ in range(2)
        )

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        fine = self.input_proj[0](maps[0])
        coarse = self.down_conv1(functional.avg_pool2d(fine, 3, 2, 1))
        coarse = self.bi_fusion_conv(coarse + coarse.mean((2, 3), keepdim=True))
        fine = self.fpn_block(fine + upsample_2x(coarse))
        return [fine, self.pan_block(coarse + self.down_conv2(functional.avg_pool2d(fine, 3, 2, 1)))]
