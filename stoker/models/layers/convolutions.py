"""Convolutions as the bodies and necks here have them."""

from torch import Tensor, nn
from torch.nn import functional

from stoker.models.layers.norms import Norm


class Halving(nn.Conv2d):
    """A 3 × 3 convolution with stride 2 and padding 1 that writes the padding out for maps one place wide.

    Left to oneDNN (torch 2.15, bf16 on CPUs), the gradient of taps that see padding alone is whatever memory held.
    """

    def __init__(self, inputs: int, outputs: int, *, groups: int = 1, bias: bool = True) -> None:
        super().__init__(inputs, outputs, 3, stride=2, padding=1, groups=groups, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, inputs, H, W] → [B, outputs, ⌈H / 2⌉, ⌈W / 2⌉]."""
        if x.shape[3] > 1:
            return super().forward(x)
        padded = functional.pad(x, (1, 1, 1, 1))
        return functional.conv2d(padded, self.weight, self.bias, self.stride, groups=self.groups)


def convolution(
    inputs: int, outputs: int, norm: Norm, *, kernel: int = 3, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """A convolution without a bias, its norm and a ReLU: [B, inputs, H, W] → [B, outputs, H / stride, W / stride]."""
    if stride == 2:
        layer: nn.Conv2d = Halving(inputs, outputs, groups=groups, bias=False)
    else:
        layer = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, norm(outputs), nn.ReLU(inplace=True))


def separable(inputs: int, outputs: int, norm: Norm, *, stride: int = 1) -> nn.Sequential:
    """`convolution` in two: 3 × 3 of each channel apart, then 1 × 1 over all of them (MobileNets, arXiv 1704.04861)."""
    return nn.Sequential(
        convolution(inputs, inputs, norm, stride=stride, groups=inputs), convolution(inputs, outputs, norm, kernel=1)
    )
