"""MobileNetV2 and MobileNetV3-large (arXiv 1801.04381, 1905.02244) without the classifier: names (without the prefix
`features.`) and weights as in torchvision.

They are not torchvision's modules for the reason in `resnet.py`. `backbones.py` has the table of all backbones.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from stoker.models.layers.norms import Norm
from stoker.models.resnet import NUM_IMAGENET_CLASSES

V2_STAGES = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip
"""(expansion factor, channels, blocks, stride of the first block): table 2 of the MobileNetV2 paper."""
V3_BLOCKS = (
    (3, 16, 16, 0, nn.ReLU, 1), (3, 64, 24, 0, nn.ReLU, 2), (3, 72, 24, 0, nn.ReLU, 1), (5, 72, 40, 24, nn.ReLU, 2),
    (5, 120, 40, 32, nn.ReLU, 1), (5, 120, 40, 32, nn.ReLU, 1), (3, 240, 80, 0, nn.Hardswish, 2),
    (3, 200, 80, 0, nn.Hardswish, 1), (3, 184, 80, 0, nn.Hardswish, 1), (3, 184, 80, 0, nn.Hardswish, 1),
    (3, 480, 112, 120, nn.Hardswish, 1), (3, 672, 112, 168, nn.Hardswish, 1),
)  # fmt: skip
"""(kernel size, expanded channels, channels, squeezed channels or 0 for none, activation, stride): table 1 of the
MobileNetV3 paper, without the last three blocks, whose width depends on `reduced_tail`."""


def mobilenet_v2(norm: Norm) -> nn.Sequential:
    """Images [B, 3, H, W] → [B, 1280, ⌈H / 32⌉, ⌈W / 32⌉]: 19 children, named by their numbers."""
    layers: list[nn.Module] = [_conv_norm(3, 32, norm, nn.ReLU6, stride=2)]
    in_channels = 32
    for factor, channels, count, first_stride in V2_STAGES:
        for number in range(count):
            layers.append(InvertedResidualV2(in_channels, channels, first_stride if number == 0 else 1, factor, norm))
            in_channels = channels
    layers.append(_conv_norm(in_channels, 1280, norm, nn.ReLU6, kernel_size=1))
    return _initialized(layers, [nn.Linear(1280, NUM_IMAGENET_CLASSES)])


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
    layers: list[nn.Module] = [_conv_norm(3, 16, norm, nn.Hardswish, stride=2)]
    in_channels = 16
    for kernel_size, expanded_channels, channels, squeezed_channels, activation, stride in V3_BLOCKS + tail:
        layers.append(
            InvertedResidualV3(
                in_channels, expanded_channels, channels, kernel_size=kernel_size, stride=stride,
                squeezed_channels=squeezed_channels, activation=activation, norm=norm,
            )
        )  # fmt: skip
        in_channels = channels
    layers.append(_conv_norm(in_channels, 6 * in_channels, norm, nn.Hardswish, kernel_size=1))
    hidden_channels = 1280 // divisor
    classifier = [nn.Linear(6 * in_channels, hidden_channels), nn.Linear(hidden_channels, NUM_IMAGENET_CLASSES)]
    return _initialized(layers, classifier)


class InvertedResidualV2(nn.Module):
    """1 × 1, depthwise 3 × 3 and 1 × 1 convolutions, the last without activation; a shortcut where the shape stays:
    [B, in, H, W] → [B, out, H / stride, W / stride]."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, factor: int, norm: Norm) -> None:
        super().__init__()
        width = in_channels * factor
        layers: list[nn.Module] = []
        if factor != 1:
            layers.append(_conv_norm(in_channels, width, norm, nn.ReLU6, kernel_size=1))
        layers.append(_conv_norm(width, width, norm, nn.ReLU6, stride=stride, groups=width))
        layers += [nn.Conv2d(width, out_channels, 1, bias=False), norm(out_channels)]
        self.conv = nn.Sequential(*layers)
        self.has_shortcut = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return x + out if self.has_shortcut else out


class InvertedResidualV3(nn.Module):
    """The block of MobileNetV3: as `InvertedResidualV2`, with squeeze-and-excitation after the depthwise convolution
    unless `squeezed_channels` is 0."""

    def __init__(
        self,
        in_channels: int,
        expanded_channels: int,
        out_channels: int,
        *,
        kernel_size: int,
        stride: int,
        squeezed_channels: int,
        activation: type[nn.ReLU | nn.Hardswish],
        norm: Norm,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        if expanded_channels != in_channels:
            layers.append(_conv_norm(in_channels, expanded_channels, norm, activation, kernel_size=1))
        layers.append(
            _conv_norm(
                expanded_channels, expanded_channels, norm, activation,
                kernel_size=kernel_size, stride=stride, groups=expanded_channels,
            )
        )  # fmt: skip
        if squeezed_channels:
            layers.append(SqueezeExcitation(expanded_channels, squeezed_channels))
        layers.append(_conv_norm(expanded_channels, out_channels, norm, None, kernel_size=1))
        self.block = nn.Sequential(*layers)
        self.has_shortcut = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        if self.has_shortcut:
            out += x
        return out


class SqueezeExcitation(nn.Module):
    """Multiplies each channel by a factor of 0 … 1 computed from the means of all channels (arXiv 1709.01507):
    [B, C, H, W] → the same shape."""

    def __init__(self, channels: int, squeezed_channels: int) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, squeezed_channels, 1)
        self.fc2 = nn.Conv2d(squeezed_channels, channels, 1)
        self.activation = nn.ReLU()
        self.scale_activation = nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        scale: Tensor = self.scale_activation(self.fc2(self.activation(self.fc1(self.avgpool(x)))))
        return scale * x


def _conv_norm(
    in_channels: int,
    out_channels: int,
    norm: Norm,
    activation: type[nn.ReLU | nn.ReLU6 | nn.Hardswish] | None,
    *,
    kernel_size: int = 3,
    stride: int = 1,
    groups: int = 1,
) -> nn.Sequential:
    conv = nn.Conv2d(
        in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, groups=groups, bias=False
    )
    layers = [conv, norm(out_channels)]
    return nn.Sequential(*layers) if activation is None else nn.Sequential(*layers, activation(inplace=True))


def _initialized(layers: Sequence[nn.Module], classifier: Sequence[nn.Linear]) -> nn.Sequential:
    """`layers` with torchvision's random weights; classifier: draws the random numbers that it does there."""
    network = nn.Sequential(*layers)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for linear in classifier:
        nn.init.normal_(linear.weight, 0, 0.01)
    return network
