"""Classification networks without the classifier, and ember's own; `backbones.py` has the table of all backbones.

ResNet and ResNeXt (arXiv 1512.03385, 1611.05431), MobileNetV2 and MobileNetV3-large (arXiv 1801.04381, 1905.02244) have
the names (without MobileNet's prefix `features.`) and weights of torchvision. They are not torchvision's modules,
because importing torchvision takes longer than building the model: its operators import torch's compiler (LOG.md,
"Start-up"). The same seed gives the same weights.

Cross-stage-partial networks are the CSP backbone of the ember family, and its PAFPN neck. A CSP layer sends half of its
channels through residual blocks and concatenates the output of each block with the other half (CSPNet, arXiv
1911.11929; ELAN, arXiv 2211.04800, section 3): half the FLOPs of residual blocks of the same width, and short gradient
paths. The neck merges features top-down to the finest map, then bottom-up (PANet, arXiv 1803.01534). Activations are
ReLUs: accelerators, oneDNN and onnxruntime fuse a ReLU with the convolution before it, while SiLU takes passes over
memory of its own.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.models.layers.convolutions import FoldedConv2d, conv_norm, conv_relu, separable_conv_norm, upsample_2x
from stoker.models.layers.norms import Norm

NUM_IMAGENET_CLASSES = 1000


class ResidualBlock(nn.Module):
    """Convolutions with norms and ReLUs, and a shortcut: [B, in, H, W] → [B, out, H / stride, W / stride]."""

    def __init__(self, in_channels: int, stride: int, norm: Norm, convs: Sequence[nn.Conv2d]) -> None:
        super().__init__()
        self.num_convs, self.out_channels = len(convs), convs[-1].out_channels
        for number, conv in enumerate(convs, start=1):
            self.add_module(f"conv{number}", conv)
            self.add_module(f"bn{number}", norm(conv.out_channels))
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or in_channels != self.out_channels:
            projection = nn.Conv2d(in_channels, self.out_channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, norm(self.out_channels))
        self.fused_convs = False

    def forward(self, x: Tensor) -> Tensor:
        convs = [getattr(self, f"conv{number}") for number in range(1, self.num_convs + 1)]
        out = x
        if self.fused_convs and isinstance(convs[-1], FoldedConv2d):
            for conv in convs[:-1]:
                out = conv_relu(conv, out)
            return conv_relu(convs[-1], out, x if self.downsample is None else self.downsample(x))
        for number, conv in enumerate(convs, start=1):
            out = getattr(self, f"bn{number}")(conv(out))
            if number < self.num_convs:
                out = self.relu(out)
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class BasicBlock(ResidualBlock):
    """Two 3 × 3 convolutions to `channels`."""

    def __init__(self, in_channels: int, channels: int, stride: int, norm: Norm) -> None:
        first = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        super().__init__(in_channels, stride, norm, [first, nn.Conv2d(channels, channels, 3, padding=1, bias=False)])


class Bottleneck(ResidualBlock):
    """1 × 1, 3 × 3 (with the stride, as in torchvision) and 1 × 1 convolutions to 4 · channels.

    groups, group_width: of the 3 × 3 convolution in ResNeXt; the width of a group is that for 64 channels.
    """

    def __init__(
        self, in_channels: int, channels: int, stride: int, norm: Norm, *, groups: int = 1, group_width: int = 64
    ) -> None:
        width = channels * group_width // 64 * groups
        convs = [
            nn.Conv2d(in_channels, width, 1, bias=False),
            nn.Conv2d(width, width, 3, stride, padding=1, groups=groups, bias=False),
            nn.Conv2d(width, 4 * channels, 1, bias=False),
        ]
        super().__init__(in_channels, stride, norm, convs)


def resnet(
    norm: Norm, *, block: Callable[[int, int, int, Norm], ResidualBlock], num_blocks: tuple[int, ...]
) -> nn.Sequential:
    """Images [B, 3, H, W] → [B, C, ⌈H / 32⌉, ⌈W / 32⌉]; num_blocks: of layer1 … layer4."""
    children: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        bn1=norm(64),
        relu=nn.ReLU(inplace=True),
        maxpool=nn.MaxPool2d(3, stride=2, padding=1),
    )
    in_channels = 64
    for layer, count in enumerate(num_blocks):
        blocks = []
        for number in range(count):
            blocks.append(block(in_channels, 64 * 2**layer, 2 if layer and not number else 1, norm))
            in_channels = blocks[-1].out_channels
        children[f"layer{layer + 1}"] = nn.Sequential(*blocks)
    nn.Linear(in_channels, NUM_IMAGENET_CLASSES)  # draws the random numbers that torchvision's classifier does
    return _initialize(nn.Sequential(children))


V2_STAGES = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip
"""(expansion factor, channels, blocks, stride of the first block): table 2 of the MobileNetV2 paper."""


class V3Block(NamedTuple):
    """A row of table 1 of the MobileNetV3 paper."""

    kernel_size: int
    expanded: int
    channels: int
    squeezed: int
    """Channels of the squeeze-and-excitation; 0 for none."""
    activation: type[nn.ReLU | nn.Hardswish]
    stride: int


V3_BLOCKS = (
    (3, 16, 16, 0, nn.ReLU, 1), (3, 64, 24, 0, nn.ReLU, 2), (3, 72, 24, 0, nn.ReLU, 1), (5, 72, 40, 24, nn.ReLU, 2),
    (5, 120, 40, 32, nn.ReLU, 1), (5, 120, 40, 32, nn.ReLU, 1), (3, 240, 80, 0, nn.Hardswish, 2),
    (3, 200, 80, 0, nn.Hardswish, 1), (3, 184, 80, 0, nn.Hardswish, 1), (3, 184, 80, 0, nn.Hardswish, 1),
    (3, 480, 112, 120, nn.Hardswish, 1), (3, 672, 112, 168, nn.Hardswish, 1),
)  # fmt: skip
"""Without the last three blocks, whose width depends on `reduced_tail`."""


def mobilenet_v2(norm: Norm) -> nn.Sequential:
    """Images [B, 3, H, W] → [B, 1280, ⌈H / 32⌉, ⌈W / 32⌉]: 19 children, named by their numbers."""
    layers: list[nn.Module] = [conv_norm(3, 32, norm, activation=nn.ReLU6, stride=2)]
    in_channels = 32
    for factor, channels, count, first_stride in V2_STAGES:
        for number in range(count):
            layers.append(InvertedResidualV2(in_channels, channels, first_stride if number == 0 else 1, factor, norm))
            in_channels = channels
    layers.append(conv_norm(in_channels, 1280, norm, activation=nn.ReLU6, kernel_size=1))
    return _initialize(nn.Sequential(*layers), [nn.Linear(1280, NUM_IMAGENET_CLASSES)])


def mobilenet_v3_large(norm: Norm, *, reduced_tail: bool = False) -> nn.Sequential:
    """Images [B, 3, H, W] → [B, 960, ⌈H / 32⌉, ⌈W / 32⌉]: 17 children, named by their numbers.

    reduced_tail: the blocks at stride 32 and the output have half the channels (section 6.3 of the paper).
    """
    divisor = 2 if reduced_tail else 1
    width, expanded = 160 // divisor, 960 // divisor
    tail = (
        (5, 672, width, 168, nn.Hardswish, 2),
        (5, expanded, width, expanded // 4, nn.Hardswish, 1),
        (5, expanded, width, expanded // 4, nn.Hardswish, 1),
    )
    layers: list[nn.Module] = [conv_norm(3, 16, norm, activation=nn.Hardswish, stride=2)]
    in_channels = 16
    for row in V3_BLOCKS + tail:
        layers.append(InvertedResidualV3(in_channels, block := V3Block(*row), norm))
        in_channels = block.channels
    layers.append(conv_norm(in_channels, 6 * in_channels, norm, activation=nn.Hardswish, kernel_size=1))
    hidden_channels = 1280 // divisor
    classifier = [nn.Linear(6 * in_channels, hidden_channels), nn.Linear(hidden_channels, NUM_IMAGENET_CLASSES)]
    return _initialize(nn.Sequential(*layers), classifier)


class InvertedResidualV2(nn.Module):
    """1 × 1, depthwise 3 × 3 and 1 × 1 convolutions, the last without activation; a shortcut where the shape stays."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, factor: int, norm: Norm) -> None:
        super().__init__()
        width = in_channels * factor
        layers: list[nn.Module] = []
        if factor != 1:
            layers.append(conv_norm(in_channels, width, norm, activation=nn.ReLU6, kernel_size=1))
        layers.append(conv_norm(width, width, norm, activation=nn.ReLU6, stride=stride, groups=width))
        layers += [nn.Conv2d(width, out_channels, 1, bias=False), norm(out_channels)]
        self.conv = nn.Sequential(*layers)
        self.has_shortcut = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return x + out if self.has_shortcut else out


class InvertedResidualV3(nn.Module):
    """The block of MobileNetV3: with squeeze-and-excitation after the depthwise convolution."""

    def __init__(self, in_channels: int, spec: V3Block, norm: Norm) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width, make = spec.expanded, partial(conv_norm, norm=norm, activation=spec.activation)
        if width != in_channels:
            layers.append(make(in_channels, width, kernel_size=1))
        layers.append(make(width, width, kernel_size=spec.kernel_size, stride=spec.stride, groups=width))
        if spec.squeezed:
            layers.append(SqueezeExcitation(width, spec.squeezed))
        layers.append(conv_norm(width, spec.channels, norm, activation=None, kernel_size=1))
        self.block = nn.Sequential(*layers)
        self.has_shortcut = spec.stride == 1 and in_channels == spec.channels

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        if self.has_shortcut:
            out += x
        return out


class SqueezeExcitation(nn.Module):
    """Multiplies each channel by a factor of 0 … 1 computed from the means of all channels (arXiv 1709.01507)."""

    def __init__(self, channels: int, squeezed_channels: int) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, squeezed_channels, 1)
        self.fc2 = nn.Conv2d(squeezed_channels, channels, 1)
        self.activation = nn.ReLU()
        self.scale_activation = nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale_activation(self.fc2(self.activation(self.fc1(self.avgpool(x))))) * x


def _initialize(network: nn.Sequential, classifier: Sequence[nn.Linear] = ()) -> nn.Sequential:
    """Gives `network` torchvision's random weights; classifier: draws the random numbers that it does there."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for linear in classifier:
        nn.init.normal_(linear.weight, 0, 0.01)
    return network


ConvFactory = Callable[..., nn.Sequential]
"""`conv_norm` or `separable_conv_norm`."""
POOL_SIZE = 5
"""Window of `SPPF`'s poolings, which cover 5, 9 and 13 positions (SPP, arXiv 1406.4729; YOLOv4, arXiv 2004.10934)."""


class Residual(nn.Module):
    """Two 3 × 3 convolutions from `make_conv` with a skip connection; relu_last: the last ReLU is that of the sum."""

    def __init__(
        self, channels: int, norm: Norm, make_conv: ConvFactory = conv_norm, *, relu_last: bool = False
    ) -> None:
        super().__init__()
        self.first = make_conv(channels, channels, norm)
        self.second = make_conv(channels, channels, norm, **({"activation": None} if relu_last else {}))
        self.relu_last = relu_last

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(self.first(x))
        return functional.relu(out) if self.relu_last else out


class CSPLayer(nn.Module):
    """Half of the channels skip the `num_blocks` residual blocks; the outputs of all blocks are concatenated."""

    def __init__(
        self, in_channels: int, out_channels: int, num_blocks: int, norm: Norm, make_conv: ConvFactory = conv_norm
    ) -> None:
        super().__init__()
        half = out_channels // 2
        self.beside = conv_norm(in_channels, half, norm, kernel_size=1)
        self.through = conv_norm(in_channels, half, norm, kernel_size=1)
        self.blocks = nn.ModuleList(Residual(half, norm, make_conv) for _ in range(num_blocks))
        self.join = conv_norm((2 + num_blocks) * half, out_channels, norm, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.beside(x), self.through(x)]
        for block in self.blocks:
            features.append(block(features[-1]))
        return self.join(torch.cat(features, dim=1))


class SPPF(nn.Module):
    """Spatial pyramid pooling (fast): concatenates the features with their maxima over windows of 5, 9 and 13."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.narrow = conv_norm(channels, channels // 2, norm, kernel_size=1)
        self.join = conv_norm(2 * channels, channels, norm, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.narrow(x)]
        for _ in range(3):
            features.append(functional.max_pool2d(features[-1], POOL_SIZE, stride=1, padding=POOL_SIZE // 2))
        return self.join(torch.cat(features, dim=1))


class CSPBackbone(nn.Sequential):
    """Five stages at strides 2 … 32 of `width` to 16 · `width` channels; `depths`: residual blocks in the last four."""

    def __init__(self, width: int, depths: Sequence[int], norm: Norm) -> None:
        super().__init__()
        self.add_module("stem", conv_norm(3, width, norm, stride=2))
        for stage_number, num_blocks in enumerate(depths, start=1):
            channels = width * 2**stage_number
            stage: list[nn.Module] = [
                conv_norm(channels // 2, channels, norm, stride=2),
                CSPLayer(channels, channels, num_blocks, norm),
            ]
            if stage_number == len(depths):
                stage.append(SPPF(channels, norm))
            self.add_module(f"layer{stage_number}", nn.Sequential(*stage))


class PAFPN(nn.Module):
    """Path aggregation over feature maps, finest first, each half as large as the one before.

    in_channels, channels: of each map; num_blocks: of each `CSPLayer`; depthwise: with separable 3 × 3 convolutions.
    """

    def __init__(
        self, in_channels: Sequence[int], channels: Sequence[int], num_blocks: int, norm: Norm, *, depthwise: bool
    ) -> None:
        super().__init__()
        make_conv: ConvFactory = separable_conv_norm if depthwise else conv_norm
        num_levels = len(in_channels)
        # Maps wider than the neck are narrowed first, which saves FLOPs in the layers after it.
        self.narrow = nn.ModuleList(
            conv_norm(in_width, out_width, norm, kernel_size=1) if in_width > out_width else nn.Identity()
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
            merged[n] = self.down[n](torch.cat((upsample_2x(merged[n + 1]), merged[n]), dim=1))
        levels = [merged[0]]
        for n, finer in enumerate(merged[1:]):
            levels.append(self.up[n](torch.cat((self.halve[n](levels[-1]), finer), dim=1)))
        return levels
