"""What turns pictures into a pyramid of feature maps: a classification network (the body) and an FPN on top of it.

Bodies are torchvision's networks, or `TinyBody`; parameters have the names of torchvision's detectors (`body.`,
`fpn.`). Every body has five stages, each at half the resolution of the one before it; stages are frozen by their
number. Which weights fill them is `weights.py`.
"""

import itertools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torchvision.models import mobilenet_v2, resnet50
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

Norm = Callable[[int], nn.Module]


class FrozenNorm(nn.Module):
    """BatchNorm2d whose statistics and affine are constants, under the names that BatchNorm2d has.

    The whole norm is one multiply-add in the type of its input, so that mixed precision stays in bf16 (torchvision's
    promotes to fp32, which doubles the activations), and backward needs none of its input or output.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.eps = 1e-5
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, C, H, W] → the same shape and type."""
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return torch.addcmul(shift.to(x.dtype)[:, None, None], x, scale.to(x.dtype)[:, None, None])


def norm_of(kind: Literal["frozen", "train"]) -> Norm:
    return FrozenNorm if kind == "frozen" else nn.BatchNorm2d


class FeaturePyramid(nn.Module):
    """A body and its FPN: images [B, 3, H, W] → feature maps, finest first, each [B, channels, H / stride, W / stride].

    stages: children of `body` whose output goes to the FPN, with their channels; more: whether two coarser levels (P6,
    P7 of the RetinaNet paper) are added.
    """

    def __init__(
        self, body: nn.Module, stages: dict[str, int], channels: int, *, more: bool, norm: Norm | None = None
    ) -> None:
        super().__init__()
        self.body = IntermediateLayerGetter(body, {name: name for name in stages})
        extra = LastLevelP6P7(channels, channels) if more else None
        self.fpn = FeaturePyramidNetwork(list(stages.values()), channels, extra_blocks=extra, norm_layer=norm)

    def forward(self, images: Tensor) -> list[Tensor]:
        return list(self.fpn(self.body(images)).values())


def resnet50_pyramid(channels: int, norm: Literal["frozen", "train"], trainable_stages: int) -> FeaturePyramid:
    """ResNet-50, strides 8 … 128, as in torchvision's `retinanet_resnet50_fpn`."""
    body = resnet50(weights=None, norm_layer=norm_of(norm))
    stages = [["conv1", "bn1"], ["layer1"], ["layer2"], ["layer3"], ["layer4"]]
    freeze_first(body, stages, trainable_stages)
    return FeaturePyramid(body, {"layer2": 512, "layer3": 1024, "layer4": 2048}, channels, more=True)


def mobilenet_v2_pyramid(channels: int, norm: Literal["frozen", "train"], trainable_stages: int) -> FeaturePyramid:
    """MobileNetV2, strides 8 … 128: the last map of each resolution, the network's final 1,280 channels included."""
    body = mobilenet_v2(weights=None, norm_layer=norm_of(norm)).features
    first_of_stage = (0, 2, 4, 7, 14, 19)
    stages = [[str(i) for i in range(a, b)] for a, b in itertools.pairwise(first_of_stage)]
    freeze_first(body, stages, trainable_stages)
    return FeaturePyramid(body, {"6": 32, "13": 96, "18": 1280}, channels, more=True)


def tiny_pyramid(channels: int, norm: Literal["frozen", "train"], trainable_stages: int) -> FeaturePyramid:
    """`TinyBody`, strides 8, 16, 32; norms in the FPN too, always trained."""
    body = TinyBody(width=16, norm=norm_of(norm))
    freeze_first(body, [["stem"], ["layer1"], ["layer2"], ["layer3"], ["layer4"]], trainable_stages)
    stages = {"layer2": 48, "layer3": 64, "layer4": 96}
    return FeaturePyramid(body, stages, channels, more=False, norm=nn.BatchNorm2d)


def freeze_first(body: nn.Module, stages: list[list[str]], trainable: int) -> None:
    """Freezes all stages but the last `trainable` ones, 0 … 5. A stage is a list of names of children of `body`."""
    for stage in stages[: len(stages) - trainable]:
        for name in stage:
            body.get_submodule(name).requires_grad_(False)


class TinyBody(nn.Sequential):
    """A residual network small enough to learn on a CPU in minutes: five stages, `width` to 6 · `width` channels."""

    def __init__(self, width: int, norm: Norm) -> None:
        super().__init__()
        self.add_module("stem", _convolution(3, width, norm, stride=2))
        self.add_module("layer1", _stage(width, 2 * width, norm))
        self.add_module("layer2", _stage(2 * width, 3 * width, norm))
        self.add_module("layer3", _stage(3 * width, 4 * width, norm))
        self.add_module("layer4", _stage(4 * width, 6 * width, norm))


def _stage(inputs: int, outputs: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(_convolution(inputs, outputs, norm, stride=2), _Residual(outputs, norm))


def _convolution(inputs: int, outputs: int, norm: Norm, *, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(convolution, norm(outputs), nn.ReLU(inplace=True))


class _Residual(nn.Module):
    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.first = _convolution(channels, channels, norm)
        self.second = _convolution(channels, channels, norm)[:2]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(x + self.second(self.first(x)))
