"""SSD (arXiv 1512.02325): six maps of falling size, a convolution over each, a box per anchor, softmax over classes.

Two of them: SSD300 on VGG-16, and SSDlite on MobileNetV3 (arXiv 1801.04381, section 6.2), whose convolutions are
separable. With the same weights, losses and detections are those of torchvision's, and so are the names in
`state_dict`. Class 0 is the background, our label is the class less one. Bodies: `backbones.py`; which anchors are
learned from: `loss.py`.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.config.settings import ModelSettings
from stoker.data.batch import Batch
from stoker.models.detector import ClassLayer, Detector
from stoker.models.layers.anchors import Anchors, Grid
from stoker.models.layers.boxes import decode, encode, grid_anchors
from stoker.models.layers.losses import at_least_fp32
from stoker.models.layers.norms import slow_norm, trained
from stoker.models.layers.postprocess import Candidates, candidates_in
from stoker.models.ssd.backbones import (
    VGG,
    MobileNet,
    Predictions,
    mobilenet_name,
    plain,
    separable,
    start_narrow,
    vgg_name,
)
from stoker.models.ssd.loss import match_each, mined_cross_entropy

CODE = (10.0, 10.0, 5.0, 5.0)
"""Factors of the encoded offsets: one over the "variances" of the original's prior boxes; torchvision's BoxCoder."""


class Raw(NamedTuple):
    """What the network predicts for B pictures at A anchors, in the type it computed in."""

    logits: Tensor
    """[B, A, 1 + C], softmax logits, the background's first."""
    deltas: Tensor
    """[B, A, 4], CODE times the boxes encoded relative to their anchors."""
    anchors: Tensor
    """float32 [A, 4], xyxy in pixels of the canvas."""


class SSDAnchors(Anchors):
    """Anchors whose centres are half a step from the canvas's top and left edge, then a step apart.

    shapes: of each map, finest first, [n, 2] widths and heights in pixels, the same on every canvas, but cut to it;
    steps: as in `SSD`. On the canvas that torchvision has (300 × 300, 320 × 320) these are the anchors of its
    `DefaultBoxGenerator`.
    """

    def __init__(self, shapes: Iterable[Tensor], steps: Sequence[int | None]) -> None:
        super().__init__(shapes)
        self.steps = steps

    def level(self, level: int, canvas: tuple[int, int], grid: Grid) -> Tensor:
        step = self.steps[level]
        step_y, step_x = (step, step) if step is not None else (canvas[0] / grid[0], canvas[1] / grid[1])
        width, height = self._cells(level).unbind(1)
        half_w, half_h = width.clamp(max=canvas[1]) / 2, height.clamp(max=canvas[0]) / 2
        x, y = step_x / 2, step_y / 2
        around = torch.stack((x - half_w, y - half_h, x + half_w, y + half_h), dim=1)
        return grid_anchors(around, grid, (step_y, step_x))


class SSD(Detector):
    """The detector on a `backbone` of six maps of `backbone.channels`; `layer(channels, outputs)` predicts from one."""

    ratios: ClassVar[tuple[tuple[float, ...], ...]]
    """Long over short side of each map's anchors that are no squares; each of them lies and stands."""
    steps: ClassVar[tuple[int | None, ...]]
    """Distance of neighbouring anchors in pixels; None: the map's places are spread evenly over the canvas."""
    per_class: ClassVar[int]
    """Boxes of a class that go into suppression."""
    class_layer: ClassVar[str] = "head.classification_head.module_list.{}"

    code: Tensor

    def __init__(
        self,
        backbone: VGG | MobileNet,
        settings: ModelSettings,
        class_count: int,
        *,
        layer: Callable[[int, int], nn.Module],
        mean: tuple[float, ...],
        std: tuple[float, ...],
    ) -> None:
        super().__init__(settings, class_count, mean=mean, std=std)
        self.backbone = backbone
        pairs = itertools.pairwise(settings.anchor_sizes)
        shapes = [_shapes(*sizes, ratios) for sizes, ratios in zip(pairs, self.ratios, strict=True)]
        heads = {"classification_head": 1 + class_count, "regression_head": 4}
        self.head = nn.ModuleDict(
            {
                name: Predictions(
                    [layer(n, len(some) * outputs) for n, some in zip(backbone.channels, shapes, strict=True)], outputs
                )
                for name, outputs in heads.items()
            }
        )
        self.register_buffer("code", torch.tensor(CODE), persistent=False)
        self.anchors = SSDAnchors((torch.tensor(some) for some in shapes), self.steps)

    def forward(self, images: Tensor) -> Raw:
        """images: uint8 [B, 3, H, W], RGB, of a canvas that the row of MODELS allows."""
        maps = self.backbone(self.pixels(images))
        anchors = self.anchors((images.shape[2], images.shape[3]), [(x.shape[2], x.shape[3]) for x in maps])
        return Raw(self.head["classification_head"](maps), self.head["regression_head"](maps), anchors)

    def loss(self, raw: Raw, batch: Batch) -> dict[str, Tensor]:
        """`classification` (cross entropy, hard negatives 3:1 in each picture) and `bbox_regression` (smooth L1), fp32
        scalars, both divided by the positive anchors of the whole batch given (at least 1), as torchvision does. So
        the losses of two half batches average to that of the whole only when both have as many positives."""
        with torch.autocast(raw.logits.device.type, enabled=False):
            slot = match_each(batch.boxes, batch.valid, raw.anchors, foreground_iou=self.settings.foreground_iou)
            positive, index = slot >= 0, slot.clamp(min=0)
            count = positive.sum().clamp(min=1)
            target = torch.where(positive, batch.labels.gather(1, index) + 1, 0)
            boxes = batch.boxes.gather(1, index[..., None].expand(-1, -1, 4))
            # Before the arithmetic, not a factor of zero after it: the logarithm of an empty slot's side is infinite.
            wanted = torch.where(positive[..., None], encode(boxes, raw.anchors) * self.code, 0.0)
            deltas = torch.where(positive[..., None], at_least_fp32(raw.deltas), 0.0)
            offsets = functional.smooth_l1_loss(deltas, wanted, reduction="sum")
            classes = mined_cross_entropy(at_least_fp32(raw.logits), target)
            return {"classification": classes / count, "bbox_regression": offsets / count}

    def candidates(self, raw: Raw, content: Tensor, *, score_threshold: float | Tensor) -> Candidates:
        """The `per_class` best of each class."""
        with torch.autocast(raw.logits.device.type, enabled=False):
            scores = at_least_fp32(raw.logits).softmax(-1)[..., 1:].transpose(1, 2)
            best, place = scores.topk(min(self.per_class, scores.shape[2]), dim=2)
            labels = torch.arange(self.class_count, device=place.device)[:, None].expand_as(place).flatten(1)
            place = place.flatten(1)
            deltas = at_least_fp32(raw.deltas.gather(1, place[..., None].expand(-1, -1, 4))) / self.code
            anchors = raw.anchors.index_select(0, place.flatten()).view(*place.shape, 4)
            return candidates_in(
                content, decode(deltas, anchors), best.flatten(1), labels, score_threshold=score_threshold
            )

    def class_layers(self) -> tuple[ClassLayer, ...]:
        return tuple(
            ClassLayer(self.class_layer.format(level), 2 + 2 * len(ratios), background=True)
            for level, ratios in enumerate(self.ratios)
        )


def _shapes(size: float, next_size: float, ratios: tuple[float, ...]) -> list[tuple[float, float]]:
    """Widths and heights of a map's anchors in pixels: squares of `size` and of the geometric mean of it and the next
    map's, then of the area of the first those of each ratio, lying and standing (section 2.2)."""
    between = math.sqrt(size * next_size)
    shapes = [(size, size), (between, between)]
    for ratio in ratios:
        long, short = size * math.sqrt(ratio), size / math.sqrt(ratio)
        shapes += [(long, short), (short, long)]
    return shapes


class SSD300(SSD):
    """On VGG-16 as its ImageNet weights want it: pixels of 0 … 255 less their mean."""

    iou_threshold = 0.45
    body = ("backbone.features.", "backbone.extra.0.1.", "backbone.extra.0.3.", "backbone.extra.0.5.")
    ratios = ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,))
    # The last two maps have no padding, so their places are not at multiples of a stride; on 300 pixels these are
    # torchvision's 100 and 300.
    steps = (8, 16, 32, 64, None, None)
    per_class = 400

    def __init__(self, settings: ModelSettings, class_count: int) -> None:
        backbone = VGG(settings.trainable_stages)
        mean, std = (0.48235, 0.45882, 0.40784), (1 / 255, 1 / 255, 1 / 255)
        super().__init__(backbone, settings, class_count, layer=plain, mean=mean, std=std)

    def body_name(self, name: str) -> str:
        return "backbone." + vgg_name(name)


class SSDLite(SSD):
    """On MobileNetV3, with separable convolutions in the heads."""

    iou_threshold = 0.55
    body = ("backbone.features.",)
    ratios = ((2, 3),) * 6
    steps = (None,) * 6
    per_class = 300
    class_layer = "head.classification_head.module_list.{}.1"

    def __init__(self, settings: ModelSettings, class_count: int) -> None:
        backbone = MobileNet(settings.norm, settings.trainable_stages, settings.tail)
        norm = slow_norm(trained(settings.norm))

        def layer(inputs: int, outputs: int) -> nn.Sequential:
            return separable(inputs, outputs, norm)

        half = (0.5, 0.5, 0.5)
        super().__init__(backbone, settings, class_count, layer=layer, mean=half, std=half)
        start_narrow(self)

    def body_name(self, name: str) -> str:
        return "backbone." + mobilenet_name(name)
