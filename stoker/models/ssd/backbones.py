"""What SSDs look at pictures with: VGG-16 and MobileNetV3, cut where their maps are wanted, and layers that shrink on.

Both give six maps, finest first, and have the names of torchvision's (`SSDFeatureExtractorVGG`,
`SSDLiteFeatureExtractorMobileNet`), so its weights fit. What is predicted from the maps: `ssd.py`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import mobilenet_v3_large

from stoker.models.backbones import BODIES, freeze_first
from stoker.models.layers.convolutions import Halving
from stoker.models.layers.losses import at_least_fp32
from stoker.models.layers.norms import Norm, NormKind, fold_frozen_norms, slow_norm, trained

Tail = Literal["half", "full"]

VGG_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Channels of VGG-16's convolutions (arXiv 1409.1556, table 1, D); a pooling stands between two stages."""
VGG_CUT = 23
"""Number of the last of those poolings among the layers."""
PIXEL_SPREAD = 58.0
"""Standard deviation of ImageNet's pixels, 0 … 255 (0.229 · 255)."""


class VGG(nn.Module):
    """VGG-16 to conv4_3 (scaled to a length of 20 per place), then conv5 and fc6, fc7 as convolutions, then four layers
    that shrink (SSD, arXiv 1512.02325, figure 2). Images [B, 3, H, W], no side below 32, → six maps."""

    channels = (512, 1024, 512, 256, 256, 256)

    def __init__(self, trainable_stages: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        stages: list[list[str]] = []
        inputs = 3
        for stage, widths in enumerate(VGG_STAGES):
            first = len(layers)
            if stage:
                # The third rounds up: 300 pixels are 38 places at a stride of 8, as in the paper.
                layers.append(nn.MaxPool2d(2, ceil_mode=stage == 3))
            for width in widths:
                layers += [_convolution(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
                inputs = width
            stages.append([str(n) for n in range(first, len(layers))])
        whole = nn.Sequential(*layers)
        freeze_first(whole, stages, trainable_stages)
        with torch.no_grad():  # random weights should see pixels of about 1, though VGG's own want 0 … 255
            whole.get_parameter("0.weight").div_(PIXEL_SPREAD)
        fully_connected = nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1),
            _convolution(512, 1024, 3, padding=6, dilation=6),
            nn.ReLU(inplace=True),
            _convolution(1024, 1024, 1),
            nn.ReLU(inplace=True),
        )
        self.scale_weight = nn.Parameter(torch.full((512,), 20.0))
        self.features = nn.Sequential(*layers[:VGG_CUT])
        self.extra = nn.ModuleList(
            [
                nn.Sequential(*layers[VGG_CUT:], fully_connected),
                _shrinking(1024, 256, Halving(256, 512)),
                _shrinking(512, 128, Halving(128, 256)),
                _shrinking(256, 128, _Inner(128, 256, 3)),
                _shrinking(256, 128, _Inner(128, 256, 3)),
            ]
        )

    def forward(self, images: Tensor) -> list[Tensor]:
        x = self.features(images)
        with torch.autocast(x.device.type, enabled=False):  # squares of activations of hundreds are too large for fp16
            unit = functional.normalize(at_least_fp32(x))
            maps = [(self.scale_weight[:, None, None] * unit).to(x.dtype)]
        for layer in self.extra:
            x = layer(x)
            maps.append(x)
        return maps


def vgg_name(name: str) -> str:
    """Where the tensor `name` of torchvision's VGG-16 classifier is in a `VGG`."""
    found = re.match(r"features\.(\d+)\.(\w+)$", name)
    if found is None:
        return name
    layer = int(found[1])
    return name if layer < VGG_CUT else f"extra.0.{layer - VGG_CUT}.{found[2]}"


def _convolution(inputs: int, outputs: int, kernel: int, *, padding: int = 0, dilation: int = 1) -> nn.Conv2d:
    convolution = nn.Conv2d(inputs, outputs, kernel, padding=padding, dilation=dilation)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return _no_bias_yet(convolution)


def _no_bias_yet(convolution: nn.Conv2d) -> nn.Conv2d:
    """The same, its biases 0."""
    if convolution.bias is not None:
        nn.init.zeros_(convolution.bias)
    return convolution


class _Inner(nn.Conv2d):
    """A 3 × 3 convolution at the places that have neighbours on all sides: 5 × 5 → 3 × 3 → 1 × 1. A side of fewer than
    3 places stays as it is, so that canvases of less than 268 pixels have six maps, too."""

    def forward(self, x: Tensor) -> Tensor:
        missing = [int(side < 3) for side in x.shape[2:]]
        return super().forward(
            functional.pad(x, (missing[1], missing[1], missing[0], missing[0])) if any(missing) else x
        )


def _shrinking(inputs: int, inner: int, second: nn.Conv2d) -> nn.Sequential:
    first = nn.Conv2d(inputs, inner, 1)
    for convolution in (first, second):
        nn.init.xavier_uniform_(convolution.weight)
        _no_bias_yet(convolution)
    return nn.Sequential(first, nn.ReLU(inplace=True), second, nn.ReLU(inplace=True))


class MobileNet(nn.Module):
    """MobileNetV3-large to the expansion of its 13th block, its rest, then four shrinking layers (arXiv 1905.02244,
    section 6.3). Images [B, 3, H, W], no side below 32, → six maps.

    tail: `half` gives the blocks at stride 32 half the channels, as table 6 does and the COCO weights have; `full`
    is what ImageNet's weights have.
    """

    def __init__(self, norm: NormKind, trainable_stages: int, tail: Tail) -> None:
        super().__init__()
        whole = mobilenet_v3_large(weights=None, norm_layer=slow_norm(norm), reduced_tail=tail == "half")
        network = whole.get_submodule("features")
        if norm == "frozen":
            fold_frozen_norms(network)
        freeze_first(network, BODIES["mobilenet_v3_large"].stages, trainable_stages)
        blocks = list(network.children())
        cut = network.get_submodule("13.block")
        assert isinstance(cut, nn.Sequential)
        # Not nn.Sequential: its two children are called one by one.
        self.features = nn.ModuleList(
            [nn.Sequential(*blocks[:13], cut[0]), nn.Sequential(cut[1:], *blocks[14:])],
        )
        width = LAST[tail]
        extra_norm = slow_norm(trained(norm))
        self.extra = nn.ModuleList(
            _separable_shrinking(inputs, outputs, extra_norm)
            for inputs, outputs in ((width, 512), (512, 256), (256, 256), (256, 128))
        )
        self.channels = (672, width, 512, 256, 256, 128)

    def forward(self, images: Tensor) -> list[Tensor]:
        x, maps = images, []
        for layer in (*self.features, *self.extra):
            x = layer(x)
            maps.append(x)
        return maps


LAST = {"half": 480, "full": 960}
"""Channels of the last map of MobileNetV3 itself."""


def tail_of(tensors: Mapping[str, Tensor]) -> Tail:
    """The tail of an SSDlite, or of a MobileNetV3-large classifier, whose weights `tensors` are."""
    for name in ("backbone.features.1.3.0.weight", "features.16.0.weight"):
        if name in tensors and tensors[name].shape[0] == LAST["full"]:
            return "full"
    return "half"


def mobilenet_name(name: str) -> str:
    """Where the tensor `name` of torchvision's MobileNetV3-large classifier is in a `MobileNet`."""
    found = re.match(r"features\.(\d+)\.(.+)$", name)
    if found is None:
        return name
    block, rest = int(found[1]), found[2]
    if block < 13:
        return f"features.0.{block}.{rest}"
    if block > 13:
        return f"features.1.{block - 13}.{rest}"
    expansion, other = "block.0.", "block."
    if rest.startswith(expansion):
        return f"features.0.13.{rest.removeprefix(expansion)}"
    return f"features.1.0.{rest.removeprefix(other)}"


def _separable_shrinking(inputs: int, outputs: int, norm: Norm) -> nn.Sequential:
    inner = outputs // 2
    return nn.Sequential(
        _block(nn.Conv2d(inputs, inner, 1, bias=False), norm),
        _block(Halving(inner, inner, groups=inner, bias=False), norm),
        _block(nn.Conv2d(inner, outputs, 1, bias=False), norm),
    )


def _block(convolution: nn.Conv2d, norm: Norm) -> nn.Sequential:
    return nn.Sequential(convolution, norm(convolution.out_channels), nn.ReLU6(inplace=True))


def separable(inputs: int, outputs: int, norm: Norm) -> nn.Sequential:
    """SSDlite's prediction: a 3 × 3 convolution of each channel by itself, then one of 1 × 1 to `outputs`."""
    return nn.Sequential(
        _block(nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs, bias=False), norm),
        nn.Conv2d(inputs, outputs, 1),
    )


def plain(inputs: int, outputs: int) -> nn.Conv2d:
    """SSD's prediction: a 3 × 3 convolution."""
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
    nn.init.xavier_uniform_(convolution.weight)
    return _no_bias_yet(convolution)


def start_narrow(network: nn.Module) -> None:
    """Random weights as torchvision's SSDlite begins with: every convolution normal with a deviation of 0.03."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.normal_(layer.weight, std=0.03)
            _no_bias_yet(layer)


class Predictions(nn.Module):
    """One layer of `layers` for each map, [B, inputs, h, w] each → `outputs` numbers for every anchor, [B, A, outputs].

    The numbers of an anchor lie side by side in a layer's channels, the anchors of a place one after the other.
    """

    def __init__(self, layers: Iterable[nn.Module], outputs: int) -> None:
        super().__init__()
        self.module_list, self.outputs = nn.ModuleList(layers), outputs

    def forward(self, maps: list[Tensor]) -> Tensor:
        # In channels-last memory the permutation and the flattening are views.
        flat = [layer(x).permute(0, 2, 3, 1).flatten(1) for layer, x in zip(self.module_list, maps, strict=True)]
        joined = torch.cat(flat, dim=1)
        return joined.view(joined.shape[0], -1, self.outputs)
