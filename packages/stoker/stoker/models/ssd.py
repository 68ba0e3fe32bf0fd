"""SSD (arXiv 1512.02325): six maps of decreasing size, a convolution over each, a box per anchor, softmax over classes.

There are two: SSD300 on VGG-16, and SSDlite on MobileNetV3 (arXiv 1801.04381, section 6.2) with separable
convolutions. The backbones are split where their maps are used, with additional downsampling layers; both give six
maps, finest first. With the same weights, losses and detections equal torchvision's, and so do the names in
`state_dict` (`SSDFeatureExtractorVGG`, `SSDLiteFeatureExtractorMobileNet`). Class 0 is the background, the user's class
c is c + 1. Anchor assignment and loss (section 2.2) have fixed shapes and need no host sync.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.config.settings import ModelSettings
from stoker.data.batch import Batch
from stoker.models.backbones import BACKBONES, freeze_stages
from stoker.models.detector import ClassHeadSpec, Detector
from stoker.models.layers.boxes import (
    AnchorGenerator,
    AnchorOutputs,
    GridSize,
    batched_gather,
    coder_weights_like,
    decode,
    encode,
    grid_anchors,
    rows_at,
)
from stoker.models.layers.convolutions import StridedConv2d, conv_norm, flatten_map, pad_and_fold
from stoker.models.layers.losses import at_least_fp32
from stoker.models.layers.matching import match_anchors
from stoker.models.layers.norms import Norm, NormKind, lite_norm, trainable_norm
from stoker.models.layers.postprocess import Candidates, clip_and_filter
from stoker.models.layers.rank_mean import loss_divisor
from stoker.models.networks import mobilenet_v3_large

VGG_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Channels of VGG-16's convolutions (arXiv 1409.1556, table 1, D), with a pooling between two stages."""
VGG_CUT = 23
"""Index of the last of these poolings among the layers."""
PIXEL_STD_255 = 58.0
"""Standard deviation of ImageNet pixels in 0 … 255 (0.229 · 255)."""


class VGG(nn.Module):
    """VGG-16 up to conv4_3 (L2-normalized, scale 20), conv5, fc6 and fc7 as convolutions, four downsampling blocks
    (SSD, arXiv 1512.02325, figure 2). Images [B, 3, H, W], no side below 32, → six maps."""

    out_channels = (512, 1024, 512, 256, 256, 256)

    def __init__(self, trainable_stages: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        stage_ends: list[str] = []
        in_channels = 3
        for stage, widths in enumerate(VGG_STAGES):
            if stage:
                # The third rounds up: 300 pixels are 38 positions at stride 8, as in the paper.
                layers.append(nn.MaxPool2d(2, ceil_mode=stage == 3))
            for width in widths:
                layers += [_conv(in_channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                in_channels = width
            stage_ends.append(str(len(layers) - 1))
        network = nn.Sequential(*layers)
        pad_and_fold(network)
        layers = list(network)
        freeze_stages(network, stage_ends, trainable_stages)
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

    def forward(self, images: Tensor) -> list[Tensor]:
        x = self.features(images)
        with torch.autocast(x.device.type, enabled=False):  # squares of activations in the hundreds overflow fp16
            normalized = functional.normalize(at_least_fp32(x))
            maps = [(self.scale_weight[:, None, None] * normalized).to(x.dtype)]
        for block in self.extra:
            x = block(x)
            maps.append(x)
        return maps


def _conv(in_channels: int, out_channels: int, kernel_size: int, *, padding: int = 0, dilation: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, padding=padding, dilation=dilation)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return _zero_bias(conv)


def _zero_bias(conv: nn.Conv2d) -> nn.Conv2d:
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv


class _UnpaddedConv2d(nn.Conv2d):
    """A 3 × 3 convolution without padding: 5 × 5 → 3 × 3 → 1 × 1. Sides below 3 (of inputs below 268) are padded."""

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


class MobileNet(nn.Module):
    """MobileNetV3-large up to the expansion of its 13th block, the rest of it, four downsampling blocks (arXiv
    1905.02244, section 6.3). Images [B, 3, H, W], no side below 32, → six maps.

    reduced_tail: the blocks at stride 32 have half the channels, as in table 6 and the COCO (not ImageNet) weights.
    """

    def __init__(self, norm: NormKind, trainable_stages: int, reduced_tail: bool) -> None:
        super().__init__()
        network = mobilenet_v3_large(lite_norm(norm), reduced_tail=reduced_tail)
        pad_and_fold(network)
        stage_ends = [name for name, _ in BACKBONES["mobilenet_v3_large"].stage_outputs]
        freeze_stages(network, stage_ends, trainable_stages)
        blocks = list(network.children())
        split_block = network.get_submodule("13.block")
        assert isinstance(split_block, nn.Sequential)
        # Not nn.Sequential: forward calls the two children separately.
        self.features = nn.ModuleList(
            [nn.Sequential(*blocks[:13], split_block[0]), nn.Sequential(split_block[1:], *blocks[14:])]
        )
        width = LAST_CHANNELS[reduced_tail]
        extra_norm = lite_norm(trainable_norm(norm))
        self.extra = nn.ModuleList(
            _separable_downsampling_block(in_channels, out_channels, extra_norm)
            for in_channels, out_channels in ((width, 512), (512, 256), (256, 256), (256, 128))
        )
        self.out_channels = (672, width, 512, 256, 256, 128)

    def forward(self, images: Tensor) -> list[Tensor]:
        x, maps = images, []
        for layer in [*self.features, *self.extra]:
            x = layer(x)
            maps.append(x)
        return maps


LAST_CHANNELS = {True: 480, False: 960}
"""`reduced_tail` → channels of the last map of MobileNetV3."""


def detect_reduced_tail(tensors: Mapping[str, Tensor]) -> bool:
    """`reduced_tail` of the SSDlite or MobileNetV3-large classifier with these weights."""
    for name in ("backbone.features.1.3.0.weight", "features.16.0.weight"):
        if name in tensors and tensors[name].shape[0] == LAST_CHANNELS[False]:
            return False
    return True


def _separable_downsampling_block(in_channels: int, out_channels: int, norm: Norm) -> nn.Sequential:
    hidden_channels = out_channels // 2
    return nn.Sequential(
        conv_norm(in_channels, hidden_channels, norm, kernel_size=1, activation=nn.ReLU6),
        conv_norm(hidden_channels, hidden_channels, norm, stride=2, groups=hidden_channels, activation=nn.ReLU6),
        conv_norm(hidden_channels, out_channels, norm, kernel_size=1, activation=nn.ReLU6),
    )


def separable_predictor(in_channels: int, out_channels: int, norm: Norm) -> nn.Sequential:
    """SSDlite's predictor: a depthwise 3 × 3 convolution, then a 1 × 1 one."""
    return nn.Sequential(
        conv_norm(in_channels, in_channels, norm, groups=in_channels, activation=nn.ReLU6),
        nn.Conv2d(in_channels, out_channels, 1),
    )


def conv_predictor(in_channels: int, out_channels: int) -> nn.Conv2d:
    """SSD's predictor: a 3 × 3 convolution."""
    conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
    nn.init.xavier_uniform_(conv.weight)
    return _zero_bias(conv)


class SSDScoringHead(nn.Module):
    """One layer of `layers` per map: maps, each [B, in, h, w] → [B, A, out_channels].

    A layer's output channels are [anchors, out_channels], flattened.
    """

    def __init__(self, layers: Iterable[nn.Module], out_channels: int) -> None:
        super().__init__()
        self.module_list, self.outputs_per_anchor = nn.ModuleList(layers), out_channels

    def forward(self, maps: list[Tensor]) -> Tensor:
        flat = [flatten_map(layer(x), self.outputs_per_anchor) for layer, x in zip(self.module_list, maps, strict=True)]
        return torch.cat(flat, dim=1)


def hard_negative_cross_entropy(logits: Tensor, target: Tensor, *, neg_to_pos_ratio: int = 3) -> Tensor:
    """Cross-entropy summed over the positive anchors and, in each image, over the background anchors with the largest
    loss, `neg_to_pos_ratio` times as many: float [].

    logits: float [B, A, 1 + C]; target: int64 [B, A], 0 for background. Among equal losses, the first anchors are
    chosen. If an image has too few background anchors, all are used; torchvision then uses positive ones twice.
    """
    loss = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
    positive = target > 0
    # Positive anchors get a loss of 0 here, so they are ranked behind all negatives with a loss.
    ranked_negatives = torch.where(positive, 0.0, loss).sort(dim=1, descending=True, stable=True).values
    is_hard = torch.arange(target.shape[1], device=target.device) < neg_to_pos_ratio * positive.sum(1, keepdim=True)
    return torch.where(positive, loss, 0.0).sum() + torch.where(is_hard, ranked_negatives, 0.0).sum()


class SSDAnchorGenerator(AnchorGenerator):
    """Anchors whose first center is half a step from the input's top and left edge.

    shapes: of each map, finest first, [n, 2] widths and heights in pixels, limited to the input size; steps: as in
    `SSD`. For torchvision's input sizes (300 × 300, 320 × 320) the anchors equal those of its `DefaultBoxGenerator`.
    """

    def __init__(self, shapes: Iterable[Tensor], steps: Sequence[int | None]) -> None:
        super().__init__(shapes)
        self.steps = steps

    def level_anchors(self, level: int, image_size: tuple[int, int], grid: GridSize) -> Tensor:
        step = self.steps[level]
        step_y, step_x = (step, step) if step is not None else (image_size[0] / grid[0], image_size[1] / grid[1])
        width, height = self._base_anchors(level).unbind(1)
        half_w, half_h = width.clamp(max=image_size[1]) / 2, height.clamp(max=image_size[0]) / 2
        x, y = step_x / 2, step_y / 2
        base_anchors = torch.stack((x - half_w, y - half_h, x + half_w, y + half_h), dim=1)
        return grid_anchors(base_anchors, grid, (step_y, step_x))


class SSD(Detector):
    """The detector. backbone: gives six maps of `out_channels`; make_layer: (channels, outputs) → a map's predictor."""

    aspect_ratios: ClassVar[tuple[tuple[float, ...], ...]]
    """Aspect ratios above 1 of each map's anchors; each is used as width / height and as height / width."""
    steps: ClassVar[tuple[int | None, ...]]
    """Distance between neighboring anchors in pixels; None: the map's positions divide the input evenly."""
    pre_nms_top_n_per_class: ClassVar[int]
    """Boxes of a class before NMS."""
    class_layer_key: ClassVar[str] = "head.classification_head.module_list.{}"

    def __init__(
        self,
        backbone: VGG | MobileNet,
        settings: ModelSettings,
        num_classes: int,
        make_layer: Callable[[int, int], nn.Module],
    ) -> None:
        super().__init__(settings, num_classes)
        self.backbone = backbone
        pairs = itertools.pairwise(settings.anchor_sizes)
        shapes = [
            _anchor_shapes(*sizes, aspect_ratios)
            for sizes, aspect_ratios in zip(pairs, self.aspect_ratios, strict=True)
        ]
        self.head = nn.ModuleDict()
        for name, outputs in (("classification_head", 1 + num_classes), ("regression_head", 4)):
            widths = zip(backbone.out_channels, shapes, strict=True)
            layers = [make_layer(channels, len(map_shapes) * outputs) for channels, map_shapes in widths]
            self.head[name] = SSDScoringHead(layers, outputs)
        self.anchors = SSDAnchorGenerator((torch.tensor(map_shapes) for map_shapes in shapes), self.steps)

    def predict(self, levels: list[Tensor], image_size: tuple[int, int]) -> AnchorOutputs:
        grids = [(x.shape[2], x.shape[3]) for x in levels]
        logits, deltas = self.head["classification_head"](levels), self.head["regression_head"](levels)
        return AnchorOutputs(logits, deltas, self.anchors(image_size, grids), self.anchors.num_anchors_per_level(grids))

    def loss(self, outputs: AnchorOutputs, batch: Batch) -> dict[str, Tensor]:
        """`classification` (cross-entropy, hard negatives 3:1 in each image) and `bbox_regression` (smooth L1), fp32
        scalars, both divided by the number of positive anchors of the batch (at least 1), as in torchvision. So the
        losses of two half batches average to that of the whole batch only if both have equally many positives."""
        with torch.autocast(outputs.logits.device.type, enabled=False):
            thresh = self.settings.fg_iou_thresh
            gt_index = match_anchors(
                batch.boxes, batch.valid, outputs.anchors, fg_iou_thresh=thresh, bg_iou_thresh=thresh, single_best=True
            )
            positive, index = gt_index >= 0, gt_index.clamp(min=0)
            num_positive = loss_divisor(positive.sum())
            target = torch.where(positive, batch.labels.gather(1, index) + 1, 0)
            boxes = batched_gather(batch.boxes, index)
            # Masked before the arithmetic: the encoded box of a padding entry is infinite.
            offsets = encode(boxes, outputs.anchors) * coder_weights_like(boxes)
            target_deltas = torch.where(positive[..., None], offsets, 0.0)
            deltas = torch.where(positive[..., None], at_least_fp32(outputs.deltas), 0.0)
            offset_loss = functional.smooth_l1_loss(deltas, target_deltas, reduction="sum")
            class_loss = hard_negative_cross_entropy(at_least_fp32(outputs.logits), target)
            return {"classification": class_loss / num_positive, "bbox_regression": offset_loss / num_positive}

    def candidates(
        self, outputs: AnchorOutputs, resized_size: Tensor, *, score_threshold: float | Tensor
    ) -> Candidates:
        """The `pre_nms_top_n_per_class` best of each class."""
        with torch.autocast(outputs.logits.device.type, enabled=False):
            scores = at_least_fp32(outputs.logits).softmax(-1)[..., 1:].transpose(1, 2)
            best_scores, indices = scores.topk(min(self.pre_nms_top_n_per_class, scores.shape[2]), dim=2)
            labels = torch.arange(self.num_classes, device=indices.device)[:, None].expand_as(indices).flatten(1)
            indices = indices.flatten(1)
            deltas = at_least_fp32(batched_gather(outputs.deltas, indices))
            anchors = rows_at(outputs.anchors, indices)
            boxes = decode(deltas / coder_weights_like(anchors), anchors)
            return clip_and_filter(resized_size, boxes, best_scores.flatten(1), labels, score_threshold=score_threshold)

    def class_heads(self) -> tuple[ClassHeadSpec, ...]:
        return tuple(
            ClassHeadSpec(self.class_layer_key.format(level), 2 + 2 * len(aspect_ratios), has_background=True)
            for level, aspect_ratios in enumerate(self.aspect_ratios)
        )


def _anchor_shapes(size: float, next_size: float, aspect_ratios: tuple[float, ...]) -> list[tuple[float, float]]:
    """Widths and heights of a map's anchors in pixels: squares of `size` and of the geometric mean of `size` and
    `next_size`, then those with the area of the first for each ratio and its inverse (section 2.2)."""
    geometric_mean = math.sqrt(size * next_size)
    shapes = [(size, size), (geometric_mean, geometric_mean)]
    for aspect_ratio in aspect_ratios:
        long, short = size * math.sqrt(aspect_ratio), size / math.sqrt(aspect_ratio)
        shapes += [(long, short), (short, long)]
    return shapes


class SSD300(SSD):
    """On VGG-16, with the normalization of its ImageNet weights: pixels of 0 … 255 minus their mean."""

    iou_threshold = 0.45
    backbone_prefixes = ("backbone.features.", "backbone.extra.0.1.", "backbone.extra.0.3.", "backbone.extra.0.5.")
    aspect_ratios = ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,))
    # The last two maps have no padding, so their positions are not multiples of a stride; for 300 pixels these steps
    # are torchvision's 100 and 300.
    steps = (8, 16, 32, 64, None, None)
    pre_nms_top_n_per_class = 400
    mean, std = (0.48235, 0.45882, 0.40784), (1 / 255, 1 / 255, 1 / 255)

    def __init__(self, settings: ModelSettings, num_classes: int) -> None:
        super().__init__(VGG(settings.trainable_backbone_layers), settings, num_classes, conv_predictor)

    def backbone_key(self, name: str) -> str:
        match = re.match(r"features\.(\d+)\.(\w+)$", name)  # of VGG-16
        if match is None or int(match[1]) < VGG_CUT:
            return f"backbone.{name}"
        return f"backbone.extra.0.{int(match[1]) - VGG_CUT}.{match[2]}"


class SSDLite(SSD):
    """On MobileNetV3-large, with separable convolutions in the heads."""

    iou_threshold = 0.55
    backbone_prefixes = ("backbone.features.",)
    aspect_ratios = ((2, 3),) * 6
    steps = (None,) * 6
    pre_nms_top_n_per_class = 300
    mean = std = (0.5, 0.5, 0.5)
    class_layer_key = "head.classification_head.module_list.{}.1"

    def __init__(self, settings: ModelSettings, num_classes: int) -> None:
        backbone = MobileNet(settings.backbone_norm, settings.trainable_backbone_layers, settings.reduced_tail)
        make_layer = partial(separable_predictor, norm=lite_norm(trainable_norm(settings.backbone_norm)))
        super().__init__(backbone, settings, num_classes, make_layer)
        for layer in self.modules():  # as torchvision's SSDlite
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, std=0.03)
                _zero_bias(layer)

    def backbone_key(self, name: str) -> str:
        match = re.match(r"features\.(\d+)\.(.+)$", name)  # of MobileNetV3-large
        if match is None:
            return f"backbone.{name}"
        block, rest = int(match[1]), match[2]
        if block != 13:
            return f"backbone.features.0.{block}.{rest}" if block < 13 else f"backbone.features.1.{block - 13}.{rest}"
        expansion, other = "block.0.", "block."
        if rest.startswith(expansion):
            return f"backbone.features.0.13.{rest.removeprefix(expansion)}"
        return f"backbone.features.1.0.{rest.removeprefix(other)}"
