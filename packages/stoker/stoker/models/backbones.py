"""Backbones with a feature pyramid: a classification network, and an FPN or another neck on top of it.

The table `BACKBONES` has ResNets and MobileNets, ember's networks and `TinyBackbone`. Parameters have the names of
torchvision's detectors (`body.`, `fpn.`). Every backbone has five stages, each at half the resolution of the one before
it; stages are frozen by their number. SSD's backbones are in `ssd.py`; `weights/load.py` loads weights.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from stoker.models.layers.convolutions import StridedConv2d, conv_norm, pad_and_fold, upsample_2x
from stoker.models.layers.norms import NORMS, Norm, NormKind
from stoker.models.networks import (
    BasicBlock,
    Bottleneck,
    CSPBackbone,
    Residual,
    ResidualBlock,
    mobilenet_v2,
    mobilenet_v3_large,
    resnet,
)

ExtraBlocks = Literal["p6p7", "pool"] | None
"""Levels above the FPN: two convolutions (RetinaNet), a subsampled copy (Faster R-CNN), or none."""


class IntermediateLayerGetter(nn.Module):
    """The feature maps of the children `return_layers` of a backbone: images [B, 3, H, W] → maps, each [B, C, h, w].

    In training on a CPU, the leading frozen children process one image at a time: their maps, the largest, then fit in
    its cache, which reduces the time of MobileNetV2's first two stages to a third (LOG.md, "Frozen stages on a CPU").
    """

    def __init__(self, backbone: nn.Module, return_layers: Iterable[str]) -> None:
        super().__init__()
        self.return_layers = frozenset(return_layers)
        children = list(backbone.named_children())
        last = max(i for i, (name, _) in enumerate(children) if name in self.return_layers)
        for name, child in children[: last + 1]:  # not an nn.ModuleDict, which torch 2.11 cannot shard
            self.add_module(name, child)

    def forward(self, x: Tensor) -> list[Tensor]:
        children, maps = list(self.named_children()), []
        if self.training and x.device.type == "cpu" and not x.requires_grad and not torch.compiler.is_compiling():
            frozen = self._leading_frozen(children)
            if len(frozen) > 1 and len(x) > 1:
                first = nn.Sequential(*(module for _, module in frozen))
                x = torch.cat([first(image) for image in torch.split(x, 1)])
                children = children[len(frozen) :]
                if frozen[-1][0] in self.return_layers:
                    maps.append(x)
        for name, child in children:
            x = child(x)
            if name in self.return_layers:
                maps.append(x)
        return maps

    def _leading_frozen(self, children: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
        """The leading children without trainable parameters and batch statistics, up to the first returned one."""
        frozen = []
        for name, module in children:
            is_trainable = any(parameter.requires_grad for parameter in module.parameters())
            if is_trainable or any(isinstance(submodule, _BatchNorm) for submodule in module.modules()):
                break
            frozen.append((name, module))
            if name in self.return_layers:
                break
        return frozen


class BackboneWithNeck(nn.Module):
    """Images [B, 3, H, W] → `neck(maps of return_layers)`, finest first. neck_name: its name in `state_dict`."""

    body: IntermediateLayerGetter

    def __init__(self, backbone: nn.Module, return_layers: Iterable[str], neck: nn.Module, neck_name: str) -> None:
        super().__init__()
        self.neck_name = neck_name
        self.body = IntermediateLayerGetter(backbone, return_layers)
        self.add_module(neck_name, neck)

    def forward(self, images: Tensor) -> list[Tensor]:
        return self.get_submodule(self.neck_name)(self.body(images))


class FeaturePyramidNetwork(nn.Module):
    """FPN (arXiv 1612.03144) with torchvision's parameter names: maps of `in_channels` → levels of `channels`.

    extra_blocks: levels added at the end; norm: after each convolution, None for none; lite: separable 3 × 3
    convolutions, with the norm only after these. Not torchvision's module, which upsamples in fp32 under autocast.
    """

    def __init__(
        self, in_channels: list[int], channels: int, *, extra_blocks: ExtraBlocks, norm: Norm | None, lite: bool = False
    ) -> None:
        super().__init__()
        lite_norm = norm if lite else None
        self.inner_blocks = nn.ModuleList(
            conv_norm(width, channels, None if lite else norm, kernel_size=1, activation=None) for width in in_channels
        )
        self.layer_blocks = nn.ModuleList(
            conv_norm(channels, channels, norm, activation=None)
            if lite_norm is None
            else _separable_conv_norm_relu6(channels, lite_norm)
            for _ in in_channels
        )
        self.extra_blocks: nn.ModuleDict | None = None
        self.adds_pool_level = extra_blocks == "pool"
        if extra_blocks == "p6p7":
            extra_convs: dict[str, nn.Module] = {
                name: StridedConv2d(channels, channels)
                if lite_norm is None
                else _separable_conv_norm_relu6(channels, lite_norm, stride=2)
                for name in ("p6", "p7")
            }
            self.extra_blocks = nn.ModuleDict(extra_convs)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_uniform_(module.weight, a=1)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """maps: finest first, each [B, C, h, w], of the same or half the size of the one before it."""
        merged = [inner(feature) for inner, feature in zip(self.inner_blocks, maps, strict=True)]
        for level in reversed(range(len(merged) - 1)):
            coarser = merged[level + 1]
            if coarser.shape[2:] != merged[level].shape[2:]:
                coarser = upsample_2x(coarser)
            merged[level] = merged[level] + coarser
        levels = [layer(feature) for layer, feature in zip(self.layer_blocks, merged, strict=True)]
        if self.extra_blocks is not None:
            levels.append(self.extra_blocks["p6"](levels[-1]))
            levels.append(self.extra_blocks["p7"](functional.relu(levels[-1])))
        if self.adds_pool_level:
            levels.append(levels[-1][:, :, ::2, ::2])
        return levels


def separable_conv(channels: int, *, stride: int = 1) -> nn.Sequential:
    """A depthwise 3 × 3 and a pointwise convolution without norm, activation or bias (Keras's SeparableConv2D;
    MobileNet, arXiv 1704.04861): a tenth of the FLOPs of a 3 × 3 convolution."""
    return nn.Sequential(depthwise_conv(channels, stride=stride), nn.Conv2d(channels, channels, 1, bias=False))


def depthwise_conv(channels: int, *, stride: int = 1) -> nn.Conv2d:
    """The first part of `separable_conv`."""
    if stride == 2:
        return StridedConv2d(channels, channels, groups=channels, bias=False)
    return nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)


def _separable_conv_norm_relu6(channels: int, norm: Norm, *, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(separable_conv(channels, stride=stride), norm(channels), nn.ReLU6(inplace=True))


class BackboneSpec(NamedTuple):
    build: Callable[[Norm], nn.Module]
    stage_outputs: Sequence[tuple[str, int]]
    """(last child, its channels) of each of the five stages: of the maps C1 … C5, at strides 2, 4, 8, 16, 32."""


STAGES = ("stem", "layer1", "layer2", "layer3", "layer4")


def _resnet(block: Callable[..., ResidualBlock], num_blocks: tuple[int, ...]) -> BackboneSpec:
    expansion = 1 if block is BasicBlock else 4
    stage_outputs = [("relu", 64), *((name, 64 * 2**n * expansion) for n, name in enumerate(STAGES[1:]))]
    return BackboneSpec(partial(resnet, block=block, num_blocks=num_blocks), stage_outputs)


def _csp(width: int, depths: tuple[int, ...]) -> BackboneSpec:
    outputs = [(name, width * 2**n) for n, name in enumerate(STAGES)]
    return BackboneSpec(lambda norm: CSPBackbone(width, depths, norm), outputs)


BACKBONES: dict[str, BackboneSpec] = {
    "resnet18": _resnet(BasicBlock, (2, 2, 2, 2)),
    "resnet34": _resnet(BasicBlock, (3, 4, 6, 3)),
    "resnet50": _resnet(Bottleneck, (3, 4, 6, 3)),
    "resnet101": _resnet(Bottleneck, (3, 4, 23, 3)),
    "resnext50_32x4d": _resnet(partial(Bottleneck, groups=32, group_width=4), (3, 4, 6, 3)),
    "mobilenet_v2": BackboneSpec(mobilenet_v2, [("1", 16), ("3", 24), ("6", 32), ("13", 96), ("18", 1280)]),
    "mobilenet_v3_large": BackboneSpec(mobilenet_v3_large, [("1", 16), ("3", 24), ("6", 40), ("12", 112), ("16", 960)]),
    "csp16": _csp(16, (1, 1, 1, 1)),
    "csp32": _csp(32, (1, 1, 1, 1)),
    "csp48": _csp(48, (1, 2, 2, 1)),
    "tiny": BackboneSpec(
        lambda norm: TinyBackbone(width=16, norm=norm), list(zip(STAGES, (16, 32, 48, 64, 96), strict=True))
    ),
}
"""Every backbone by its name; those of torchvision have torchvision's names."""


def build_backbone_with_fpn(
    backbone_name: str,
    channels: int,
    *,
    norm: NormKind,
    trainable_stages: int,
    min_level: int = 3,
    extra_blocks: ExtraBlocks = "p6p7",
    fpn_norm: Norm | None = None,
    lite: bool = False,
    return_layers: Mapping[str, int] | None = None,
) -> BackboneWithNeck:
    """A backbone of BACKBONES with its first stages frozen, and an FPN of `channels`.

    min_level: 2 … 5, the first C-level (stride 2^min_level) that goes into the FPN; return_layers: child → its
    channels, explicit inputs of the FPN instead; extra_blocks, fpn_norm, lite: as in `FeaturePyramidNetwork`.
    """
    neck = partial(FeaturePyramidNetwork, channels=channels, extra_blocks=extra_blocks, norm=fpn_norm, lite=lite)
    return build_backbone_with_neck(
        backbone_name, neck, norm=norm, trainable_stages=trainable_stages, min_level=min_level,
        return_layers=return_layers, neck_name="fpn",
    )  # fmt: skip


def build_backbone_with_neck(
    backbone: str, neck: Callable[[list[int]], nn.Module], *, norm: NormKind,
    trainable_stages: int, min_level: int = 3, return_layers: Mapping[str, int] | None = None, neck_name: str = "neck",
) -> BackboneWithNeck:  # fmt: skip
    """A backbone of BACKBONES with its first stages frozen, and `neck(channels
    of its maps)`. min_level, return_layers: as in `build_backbone_with_fpn`."""
    spec = BACKBONES[backbone]
    network = spec.build(NORMS[norm])
    pad_and_fold(network)
    freeze_stages(network, [name for name, _ in spec.stage_outputs], trainable_stages)
    layers = dict(spec.stage_outputs[min_level - 1 :]) if return_layers is None else return_layers
    return BackboneWithNeck(network, layers, neck(list(layers.values())), neck_name)


def freeze_stages(network: nn.Module, last_children: Sequence[str], trainable_stages: int) -> None:
    """Freezes all stages except the last `trainable_stages` (0 … 5). last_children: the name of each stage's last
    child."""
    num_frozen = len(last_children) - trainable_stages
    for name, child in network.named_children() if num_frozen > 0 else ():
        child.requires_grad_(False)
        if name == last_children[num_frozen - 1]:
            return


class TinyBackbone(nn.Sequential):
    """A residual network that trains on a CPU in minutes: five stages of `width` to 6 · `width` channels."""

    def __init__(self, width: int, norm: Norm) -> None:
        super().__init__()
        self.add_module("stem", conv_norm(3, width, norm, stride=2))
        for number, (narrow, wide) in enumerate(itertools.pairwise((1, 2, 3, 4, 6)), start=1):
            halve = conv_norm(narrow * width, wide * width, norm, stride=2)
            self.add_module(f"layer{number}", nn.Sequential(halve, Residual(wide * width, norm, relu_last=True)))
