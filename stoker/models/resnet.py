"""ResNet and ResNeXt (arXiv 1512.03385, 1611.05431) without the classifier: names and weights as in torchvision.

They are not torchvision's modules, because importing torchvision takes longer than building the model: its operators
import torch's compiler (LOG.md, "Start-up"). The same seed gives the same weights. `mobilenet.py` has the other
classification networks, `backbones.py` the table of all backbones.
"""

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor, nn

from stoker.models.layers.fused_conv import conv_relu
from stoker.models.layers.norms import FoldedConv2d, Norm

NUM_IMAGENET_CLASSES = 1000


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions and a shortcut: [B, in, H, W] → [B, channels, H / stride, W / stride]."""

    def __init__(self, in_channels: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.out_channels = channels
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = norm(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = norm(channels)
        self.downsample = _projection(in_channels, channels, stride, norm)
        self.fused_convs = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fused_convs and isinstance(self.conv1, FoldedConv2d):
            shortcut = x if self.downsample is None else self.downsample(x)
            return conv_relu(self.conv2, conv_relu(self.conv1, x), shortcut)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        activated: Tensor = self.relu(out)
        return activated


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 (with the stride, as in torchvision) and 1 × 1 convolutions, and a shortcut:
    [B, in, H, W] → [B, 4 · channels, H / stride, W / stride].

    groups, group_width: of the 3 × 3 convolution in ResNeXt; the width of a group is that for 64 channels.
    """

    def __init__(
        self, in_channels: int, channels: int, stride: int, norm: Norm, *, groups: int = 1, group_width: int = 64
    ) -> None:
        super().__init__()
        self.out_channels = out_channels = 4 * channels
        width = channels * group_width // 64 * groups
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, groups=groups, bias=False)
        self.bn2 = norm(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = norm(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _projection(in_channels, out_channels, stride, norm)
        self.fused_convs = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fused_convs and isinstance(self.conv1, FoldedConv2d):
            shortcut = x if self.downsample is None else self.downsample(x)
            return conv_relu(self.conv3, conv_relu(self.conv2, conv_relu(self.conv1, x)), shortcut)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        activated: Tensor = self.relu(out)
        return activated


def _projection(in_channels: int, out_channels: int, stride: int, norm: Norm) -> nn.Sequential | None:
    """The shortcut of a block that changes the shape, None for one that does not."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), norm(out_channels))


def resnet(
    norm: Norm, *, block: Callable[[int, int, int, Norm], BasicBlock | Bottleneck], num_blocks: tuple[int, ...]
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
    network = nn.Sequential(children)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network
