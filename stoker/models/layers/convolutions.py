"""Convolution blocks of the backbones and necks."""

from torch import Tensor, nn
from torch.nn import functional

from stoker.models.layers.norms import Norm


class StridedConv2d(nn.Conv2d):
    """A 3 × 3 convolution with stride 2 and padding 1 that pads maps of width 1 explicitly.

    In oneDNN (torch 2.15, bf16 on CPUs), the gradient of weights that see only padding is uninitialized memory.
    """

    def __init__(self, in_channels: int, out_channels: int, *, groups: int = 1, bias: bool = True) -> None:
        super().__init__(in_channels, out_channels, 3, stride=2, padding=1, groups=groups, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, in, H, W] → [B, out, ⌈H / 2⌉, ⌈W / 2⌉]."""
        if x.shape[3] > 1:
            return super().forward(x)
        padded = functional.pad(x, (1, 1, 1, 1))
        return functional.conv2d(padded, self.weight, self.bias, self.stride, groups=self.groups)


def conv_norm_relu(
    in_channels: int, out_channels: int, norm: Norm, *, kernel_size: int = 3, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Convolution without bias, norm, ReLU: [B, in, H, W] → [B, out, H / stride, W / stride]."""
    if stride == 2:
        layer: nn.Conv2d = StridedConv2d(in_channels, out_channels, groups=groups, bias=False)
    else:
        layer = nn.Conv2d(in_channels, out_channels, kernel_size, padding=kernel_size // 2, groups=groups, bias=False)
    return nn.Sequential(layer, norm(out_channels), nn.ReLU(inplace=True))


def separable_conv_norm_relu(in_channels: int, out_channels: int, norm: Norm, *, stride: int = 1) -> nn.Sequential:
    """Depthwise 3 × 3, then 1 × 1, each with norm and ReLU (MobileNets, arXiv 1704.04861)."""
    return nn.Sequential(
        conv_norm_relu(in_channels, in_channels, norm, stride=stride, groups=in_channels),
        conv_norm_relu(in_channels, out_channels, norm, kernel_size=1),
    )
