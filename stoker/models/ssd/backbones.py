"""SSD's backbones: VGG-16 and MobileNetV3, split where their maps are used, with additional downsampling layers.

Both give six maps, finest first, and have torchvision's names (`SSDFeatureExtractorVGG`,
`SSDLiteFeatureExtractorMobileNet`), so its weights fit. `ssd.py` predicts from the maps.
"""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.models.backbones import BACKBONES, freeze_stages
from stoker.models.detector import Backbone, Part
from stoker.models.layers.convolutions import StridedConv2d
from stoker.models.layers.losses import at_least_fp32
from stoker.models.layers.norms import Norm, NormKind, fold_frozen_norms, lite_norm, trainable_norm
from stoker.models.layers.padded_conv import pad_image_conv
from stoker.models.mobilenet import mobilenet_v3_large

VGG_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Channels of VGG-16's convolutions (arXiv 1409.1556, table 1, D), with a pooling between two stages."""
VGG_CUT = 23
"""Index of the last of these poolings among the layers."""
PIXEL_STD_255 = 58.0
"""Standard deviation of ImageNet pixels in 0 … 255 (0.229 · 255)."""


class VGG(Backbone):
    """VGG-16 up to conv4_3 (L2-normalized, scale 20), conv5, fc6 and fc7 as convolutions, four downsampling blocks
    (SSD, arXiv 1512.02325, figure 2). Images [B, 3, H, W], no side below 32, → six maps."""

    out_channels = (512, 1024, 512, 256, 256, 256)

    def __init__(self, trainable_stages: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        stages: list[list[str]] = []
        in_channels = 3
        for stage, widths in enumerate(VGG_STAGES):
            first = len(layers)
            if stage:
                # The third rounds up: 300 pixels are 38 positions at stride 8, as in the paper.
                layers.append(nn.MaxPool2d(2, ceil_mode=stage == 3))
            for width in widths:
                layers += [_conv(in_channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                in_channels = width
            stages.append([str(n) for n in range(first, len(layers))])
        network = nn.Sequential(*layers)
        pad_image_conv(network)
        layers = list(network)
        freeze_stages(network, stages, trainable_stages)
        with torch.no_grad():  # so that random weights get pixels of about 1; the pretrained ones expect 0 … 255
            network.get_parameter("0.weight").div_(PIXEL_STD_255)
        fully_connected = nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1),
            _conv(512, 1024, 3, padding=6, dilation=6),
            nn.ReLU(inplace=True),
            _conv(1024, 1024, 1),
            nn.ReLU(inplace=True),
        )
        self.scale_weight = nn.Parameter(torch.full((512,), 20.0))
        self.features = nn.Sequential(*layers[:VGG_CUT])
        self.extra = nn.ModuleList(
            [
                nn.Sequential(*layers[VGG_CUT:], fully_connected),
                _downsampling_block(1024, 256, StridedConv2d(256, 512)),
                _downsampling_block(512, 128, StridedConv2d(128, 256)),
                _downsampling_block(256, 128, _UnpaddedConv2d(128, 256, 3)),
                _downsampling_block(256, 128, _UnpaddedConv2d(128, 256, 3)),
            ]
        )

    def parts(self) -> list[Part]:
        extra = [Part(f"extra.{n}", (f"extra.{n}.",)) for n in range(len(self.extra))]
        return [Part("features", ("features.", "scale_weight")), *extra]

    def run(self, flow: list[Tensor], start: int, stop: int) -> list[Tensor]:
        x = flow[-1]
        # Between the first two parts the flow is the normalized map and the features as they are.
        maps = flow[:-1] if start <= 1 else flow
        if not start:
            x = self.features(x)
            with torch.autocast(x.device.type, enabled=False):  # squares of activations in the hundreds overflow fp16
                normalized = functional.normalize(at_least_fp32(x))
                maps = [(self.scale_weight[:, None, None] * normalized).to(x.dtype)]
        for number in range(max(1, start), stop):
            x = self.extra[number - 1](x)
            maps = [*maps, x]
        return [*maps, x] if stop == 1 else maps


def vgg_key(name: str) -> str:
    """Name in a `VGG` of the tensor `name` of torchvision's VGG-16 classifier."""
    match = re.match(r"features\.(\d+)\.(\w+)$", name)
    if match is None:
        return name
    layer = int(match[1])
    return name if layer < VGG_CUT else f"extra.0.{layer - VGG_CUT}.{match[2]}"


def _conv(in_channels: int, out_channels: int, kernel_size: int, *, padding: int = 0, dilation: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, padding=padding, dilation=dilation)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return _zero_bias(conv)


def _zero_bias(conv: nn.Conv2d) -> nn.Conv2d:
    """`conv` with biases of 0."""
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv


class _UnpaddedConv2d(nn.Conv2d):
    """A 3 × 3 convolution without padding: 5 × 5 → 3 × 3 → 1 × 1. A side shorter than 3 is padded, so that there are
    six maps also for input sizes below 268 pixels."""

    def forward(self, x: Tensor) -> Tensor:
        padding = [int(side < 3) for side in x.shape[2:]]
        return super().forward(
            functional.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
        )


def _downsampling_block(in_channels: int, hidden_channels: int, second: nn.Conv2d) -> nn.Sequential:
    first = nn.Conv2d(in_channels, hidden_channels, 1)
    for conv in (first, second):
        nn.init.xavier_uniform_(conv.weight)
        _zero_bias(conv)
    return nn.Sequential(first, nn.ReLU(inplace=True), second, nn.ReLU(inplace=True))


class MobileNet(Backbone):
    """MobileNetV3-large up to the expansion of its 13th block, the rest of it, four downsampling blocks (arXiv
    1905.02244, section 6.3). Images [B, 3, H, W], no side below 32, → six maps.

    reduced_tail: the blocks at stride 32 have half the channels, as in table 6 and in the COCO weights; the ImageNet
    weights have full ones.
    """

    def __init__(self, norm: NormKind, trainable_stages: int, reduced_tail: bool) -> None:
        super().__init__()
        network = mobilenet_v3_large(lite_norm(norm), reduced_tail=reduced_tail)
        pad_image_conv(network)
        if norm == "frozen_bn":
            fold_frozen_norms(network)
        freeze_stages(network, BACKBONES["mobilenet_v3_large"].stages, trainable_stages)
        blocks = list(network.children())
        split_block = network.get_submodule("13.block")
        assert isinstance(split_block, nn.Sequential)
        # Not nn.Sequential: forward calls the two children separately.
        self.features = nn.ModuleList(
            [nn.Sequential(*blocks[:13], split_block[0]), nn.Sequential(split_block[1:], *blocks[14:])],
        )
        width = LAST_CHANNELS[reduced_tail]
        extra_norm = lite_norm(trainable_norm(norm))
        self.extra = nn.ModuleList(
            _separable_downsampling_block(in_channels, out_channels, extra_norm)
            for in_channels, out_channels in ((width, 512), (512, 256), (256, 256), (256, 128))
        )
        self.out_channels = (672, width, 512, 256, 256, 128)

    def parts(self) -> list[Part]:
        names = [f"{name}.{n}" for name in ("features", "extra") for n in range(len(self.get_submodule(name)))]  # type: ignore[arg-type]
        return [Part(name, (f"{name}.",)) for name in names]

    def run(self, flow: list[Tensor], start: int, stop: int) -> list[Tensor]:
        x, maps = flow[-1], flow if start else []
        for layer in [*self.features, *self.extra][start:stop]:
            x = layer(x)
            maps = [*maps, x]
        return maps


LAST_CHANNELS = {True: 480, False: 960}
"""`reduced_tail` → channels of the last map of MobileNetV3."""


def detect_reduced_tail(tensors: Mapping[str, Tensor]) -> bool:
    """`reduced_tail` of the SSDlite or MobileNetV3-large classifier with these weights."""
    for name in ("backbone.features.1.3.0.weight", "features.16.0.weight"):
        if name in tensors and tensors[name].shape[0] == LAST_CHANNELS[False]:
            return False
    return True


def mobilenet_key(name: str) -> str:
    """Name in a `MobileNet` of the tensor `name` of torchvision's MobileNetV3-large classifier."""
    match = re.match(r"features\.(\d+)\.(.+)$", name)
    if match is None:
        return name
    block, rest = int(match[1]), match[2]
    if block < 13:
        return f"features.0.{block}.{rest}"
    if block > 13:
        return f"features.1.{block - 13}.{rest}"
    expansion, other = "block.0.", "block."
    if rest.startswith(expansion):
        return f"features.0.13.{rest.removeprefix(expansion)}"
    return f"features.1.0.{rest.removeprefix(other)}"


def _separable_downsampling_block(in_channels: int, out_channels: int, norm: Norm) -> nn.Sequential:
    hidden_channels = out_channels // 2
    return nn.Sequential(
        _conv_norm_relu6(nn.Conv2d(in_channels, hidden_channels, 1, bias=False), norm),
        _conv_norm_relu6(StridedConv2d(hidden_channels, hidden_channels, groups=hidden_channels, bias=False), norm),
        _conv_norm_relu6(nn.Conv2d(hidden_channels, out_channels, 1, bias=False), norm),
    )


def _conv_norm_relu6(conv: nn.Conv2d, norm: Norm) -> nn.Sequential:
    return nn.Sequential(conv, norm(conv.out_channels), nn.ReLU6(inplace=True))


def separable_predictor(in_channels: int, out_channels: int, norm: Norm) -> nn.Sequential:
    """SSDlite's predictor: a depthwise 3 × 3 convolution, then a 1 × 1 one."""
    return nn.Sequential(
        _conv_norm_relu6(nn.Conv2d(in_channels, in_channels, 3, padding=1, groups=in_channels, bias=False), norm),
        nn.Conv2d(in_channels, out_channels, 1),
    )


def conv_predictor(in_channels: int, out_channels: int) -> nn.Conv2d:
    """SSD's predictor: a 3 × 3 convolution."""
    conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
    nn.init.xavier_uniform_(conv.weight)
    return _zero_bias(conv)


def init_weights(network: nn.Module) -> None:
    """torchvision's initialization of SSDlite: every convolution normal with a standard deviation of 0.03."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.normal_(layer.weight, std=0.03)
            _zero_bias(layer)


class SSDScoringHead(nn.Module):
    """One layer of `layers` per map: maps, each [B, in, h, w] → [B, A, out_channels].

    A layer's output channels are [anchors, out_channels], flattened.
    """

    def __init__(self, layers: Iterable[nn.Module], out_channels: int) -> None:
        super().__init__()
        self.module_list, self.outputs_per_anchor = nn.ModuleList(layers), out_channels

    def forward(self, maps: list[Tensor]) -> Tensor:
        # In channels-last memory the permutation and the flattening are views.
        flat = [layer(x).permute(0, 2, 3, 1).flatten(1) for layer, x in zip(self.module_list, maps, strict=True)]
        joined = torch.cat(flat, dim=1)
        return joined.view(joined.shape[0], -1, self.outputs_per_anchor)
