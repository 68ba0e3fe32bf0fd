"""The convolution that takes the image: its three channels are padded with zeros on accelerators.

Tensor cores multiply whole groups of channels. NVIDIA's "Convolutional Layers User's Guide" (QuickStart Checklist) asks
for a multiple of 8 input channels in 16 bits, and says that 4 are sufficient for images and a stride of 2. Zeros change
neither the result nor the gradient, and the weights keep their three channels, so checkpoints do too. On CPUs oneDNN
has its own layout for three channels, and nothing is padded.
"""

from torch import Tensor, nn
from torch.nn import functional

IMAGE_CHANNELS = 3


class PaddedConv2d(nn.Conv2d):
    """A convolution with the parameters of `original` (not copies) that pads an image's channels on accelerators."""

    def __init__(self, original: nn.Conv2d) -> None:
        super().__init__(
            original.in_channels,
            original.out_channels,
            original.kernel_size,  # type: ignore[arg-type]  # pairs, as Conv2d has made them
            original.stride,  # type: ignore[arg-type]
            original.padding,  # type: ignore[arg-type]
            original.dilation,  # type: ignore[arg-type]
            original.groups,
            bias=original.bias is not None,
            device="meta",
        )
        self.weight, self.bias = original.weight, original.bias

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.in_channels == IMAGE_CHANNELS and is_on_accelerator(input):
            channels = 4 if self.stride == (2, 2) else 8
            padding = (0, 0, 0, 0, 0, channels - IMAGE_CHANNELS)
            input, weight = functional.pad(input, padding), functional.pad(weight, padding)
        output: Tensor = super()._conv_forward(input, weight, bias)
        return output


def is_on_accelerator(x: Tensor) -> bool:
    """Whether the code for accelerators applies."""
    return x.device.type != "cpu"


def pad_image_conv(network: nn.Module) -> None:
    """Replaces, in place, the convolutions of `network` that take images by padded ones."""
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Conv2d) and child.in_channels == IMAGE_CHANNELS:
                setattr(parent, name, PaddedConv2d(child))
