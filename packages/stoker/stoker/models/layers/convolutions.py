"""Convolutions of backbones, necks and heads: blocks, padded ones for images, and one operator with bias and ReLU.

Padded: tensor cores multiply whole groups of channels. NVIDIA's "Convolutional Layers User's Guide" (QuickStart
Checklist) asks for a multiple of 8 input channels in 16 bits, and says that 4 are sufficient for images and a stride of
2. Zeros change neither the result nor the gradient, and the weights keep their three channels, so checkpoints do too.
On CPUs oneDNN has its own layout for three channels, and nothing is padded.

Folded: a frozen norm multiplies by and adds constants, so the convolution before it can do both with scaled weights and
a bias. That saves two passes over the activations forward and one backward. `state_dict` keeps the names and values of
the two modules.

Fused (`conv_relu`): convolution, bias, residual and ReLU as one operator (cuDNN's fused epilogue), for training on
NVIDIA GPUs. Without it each of them reads and writes the whole map: four passes in eager mode, one of them left by a
compiler. The backward pass is that of the separate operators. `use_fused_convs` switches it;
`training/make_step.py` decides by measurement. On a CPU the operator computes the separate ones, which is
how its gradients are tested.
"""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.hardware.xla import XLA_KINDS
from stoker.models.layers.norms import FrozenBatchNorm2d, Norm


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


def conv_norm(
    in_channels: int,
    out_channels: int,
    norm: Norm | None,
    *,
    kernel_size: int = 3,
    stride: int = 1,
    groups: int = 1,
    activation: type[nn.ReLU | nn.ReLU6 | nn.Hardswish | nn.SiLU] | None = nn.ReLU,
) -> nn.Sequential:
    """Convolution, norm (None: a bias), activation (None: none): [B, in, H, W] → [B, out, H / stride, W / stride]."""
    bias = norm is None
    if (kernel_size, stride) == (3, 2):
        conv: nn.Conv2d = StridedConv2d(in_channels, out_channels, groups=groups, bias=bias)
    else:
        padding = kernel_size // 2
        conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, groups=groups, bias=bias)
    layers = [conv] if norm is None else [conv, norm(out_channels)]
    return nn.Sequential(*layers) if activation is None else nn.Sequential(*layers, activation(inplace=True))


def flatten_map(x: Tensor, outputs: int) -> Tensor:
    """Predictions [B, anchors · outputs, h, w] → [B, h · w · anchors, outputs]: a view in channels-last memory."""
    return x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, outputs)


def separable_conv_norm(in_channels: int, out_channels: int, norm: Norm, *, stride: int = 1) -> nn.Sequential:
    """Depthwise 3 × 3, then 1 × 1, each with norm and ReLU (MobileNets, arXiv 1704.04861)."""
    return nn.Sequential(
        conv_norm(in_channels, in_channels, norm, stride=stride, groups=in_channels),
        conv_norm(in_channels, out_channels, norm, kernel_size=1),
    )


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
        return super()._conv_forward(input, weight, bias)


def is_on_accelerator(x: Tensor) -> bool:
    """Whether the code for accelerators applies."""
    return x.device.type != "cpu"


def upsample_2x(x: Tensor) -> Tensor:
    """Each cell of x [B, C, h, w] four times: [B, C, 2 h, 2 w], of the same dtype."""
    if (
        x.device.type in XLA_KINDS
    ):  # has no backward pass of `interpolate`; a CPU takes nine times as long so: LOG.md, "XLA"
        b, c, h, w = x.shape
        return x[:, :, :, None, :, None].expand(b, c, h, 2, w, 2).reshape(b, c, 2 * h, 2 * w)
    with torch.autocast(x.device.type, enabled=False):  # autocast upsamples in fp32
        return functional.interpolate(x, scale_factor=2.0, mode="nearest")


def pad_and_fold(network: nn.Module) -> None:
    """Replaces, in place, the convolutions of `network` that take images by padded ones, and folds its frozen norms."""
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Conv2d) and child.in_channels == IMAGE_CHANNELS:
                setattr(parent, name, PaddedConv2d(child))
    fold_frozen_norms(network)


class FoldedConv2d(PaddedConv2d):
    """A convolution without bias that also computes the frozen norm after it. It shares the norm's constants and the
    original's weights, which are trained as without folding."""

    def __init__(self, original: nn.Conv2d, norm: FrozenBatchNorm2d) -> None:
        super().__init__(original)
        self._norm = (norm,)  # in a tuple, so that it is not registered as a child a second time
        norm.folded = True
        self.cast: tuple[Tensor, Tensor] | None = None
        """What `fold` returns, cast by `weight_casts`."""

    def fold(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of the convolution that computes both."""
        (norm,) = self._norm
        return self.weight * norm.scale[:, None, None, None], norm.shift

    def weights(self) -> tuple[Tensor, Tensor]:
        """The same, cast where `weight_casts` did so."""
        return self.fold() if self.cast is None else self.cast

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, in, H, W] → the norm's output [B, out, h, w]."""
        return self._conv_forward(x, *self.weights())


def fold_frozen_norms(module: nn.Module) -> None:
    """Replaces, in place, every convolution that is registered directly before a frozen norm of its width."""
    children = list(module.named_children())
    for (name, first), (_, second) in itertools.pairwise(children):
        if (
            isinstance(first, nn.Conv2d)
            and isinstance(second, FrozenBatchNorm2d)
            and first.bias is None
            and first.out_channels == second.scale.shape[0]
        ):
            setattr(module, name, FoldedConv2d(first, second))
    for _, child in children:
        fold_frozen_norms(child)


aten = torch.ops.aten

_library = torch.library.Library("stoker", "FRAGMENT")
_library.define(
    "conv_relu(Tensor x, Tensor weight, Tensor bias, Tensor? residual, SymInt[] stride, SymInt[] padding,"
    " SymInt[] dilation, SymInt groups) -> Tensor"
)


def conv_relu(conv: nn.Conv2d, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """relu(conv(x) + residual), with the frozen norm of a folded convolution: [B, in, H, W] → [B, out, h, w].

    conv: with a bias or folded, padded by zeros; residual: [B, out, h, w]. Computes in the dtype of autocast.
    """
    weight, bias = conv.weights() if isinstance(conv, FoldedConv2d) else (conv.weight, conv.bias)
    tensors = [x, weight, bias, residual]
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        tensors = [None if tensor is None else tensor.to(dtype) for tensor in tensors]
    return torch.ops.stoker.conv_relu(*tensors, conv.stride, conv.padding, conv.dilation, conv.groups)


def use_fused_convs(model: nn.Module, enabled: bool) -> None:
    """Makes the blocks of `model` that can do so compute with `conv_relu`, or with separate operators again."""
    for module in model.modules():
        if hasattr(module, "fused_convs"):
            module.fused_convs = enabled  # type: ignore[assignment]


class ConvReLU(nn.Sequential):
    """A convolution with bias, and a ReLU: [B, in, H, W] → [B, out, h, w]."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__(conv, nn.ReLU(inplace=True))
        self.fused_convs = False

    def forward(self, x: Tensor) -> Tensor:
        conv = self[0]
        assert isinstance(conv, nn.Conv2d)
        return conv_relu(conv, x) if self.fused_convs else super().forward(x)


def _cudnn(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, *geometry: Any) -> Tensor:
    if residual is None:
        return torch.cudnn_convolution_relu(x, weight, bias, *geometry)
    return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, *geometry)


def separate_conv_relu(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, *geometry: Any) -> Tensor:
    """What `conv_relu` computes, operator by operator."""
    output = functional.conv2d(x, weight, bias, *geometry)
    if residual is not None:
        output += residual
    return output.relu_()


def _without_values(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, *geometry: Any) -> Tensor:  # noqa: ARG001
    *of_window, groups = geometry
    return aten.convolution(x, weight, None, *of_window, False, [0, 0], groups)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, _, *ctx.geometry = inputs
    ctx.num_channels = bias.shape[0]
    ctx.save_for_backward(x, weight, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, output = ctx.saved_tensors
    *of_window, groups = ctx.geometry
    grad = aten.threshold_backward(grad, output, 0)
    wanted, residual_wanted = list(ctx.needs_input_grad[:3]), ctx.needs_input_grad[3]
    grads: list[Tensor | None] = [None, None, None]
    if any(wanted):
        grads = list(
            aten.convolution_backward(grad, x, weight, [ctx.num_channels], *of_window, False, [0, 0], groups, wanted)
        )
    return *grads, grad if residual_wanted else None, None, None, None, None


_library.impl("conv_relu", _cudnn, "CUDA")
_library.impl("conv_relu", separate_conv_relu, "CPU")
torch.library.register_fake("stoker::conv_relu", _without_values, lib=_library)
torch.library.register_autograd("stoker::conv_relu", _backward, setup_context=_save, lib=_library)
