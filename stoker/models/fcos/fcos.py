"""FCOS (arXiv 2006.09214): a feature pyramid, two towers of convolutions, one box per point and no anchors.

A point predicts its distances to the four sides of a box, the classes, and how central it is in the box: "centerness",
which lowers the score of boxes seen from their rim. With the same weights, losses and detections are those of
torchvision's FCOS, and so are the names in `state_dict`. As there, points lie at the multiples of a level's stride (the
paper moves them by half a stride). Classes are as in `retinanet.py`.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.config.settings import ModelSettings
from stoker.data.batch import Batch
from stoker.models.architecture import PRETRAINED, Build, Defaults
from stoker.models.backbones import FeaturePyramid, pyramid
from stoker.models.detector import ClassLayer, Detector
from stoker.models.layers.boxes import area, giou
from stoker.models.layers.losses import at_least_fp32, focal_loss
from stoker.models.layers.matching import BACKGROUND, by_blocks
from stoker.models.layers.postprocess import CANDIDATES, Candidates, best_of_levels, candidates_in
from stoker.models.retinanet.retinanet import PRIOR

FINEST = 8
"""Unit of the finest level's distances in pixels: its stride. Each further level's is twice the one before it."""
RADIUS = 1.5
"""A point is positive at most this many units from the centre of its box, along x and y (section 2.2)."""
RANGE = (4, 8)
"""A level finds the boxes whose farthest side is so many units away from the point: 64 … 128 px at 16 (section 2.2).
The finest level has no lower bound, the coarsest no upper one."""
GROUPS = 32
"""Of channels that are normalised together, as in torchvision."""


class Points(NamedTuple):
    """The A places of all levels where a box can be found, float32, in pixels of the canvas."""

    centre: Tensor
    """[A, 2], x and y."""
    unit: Tensor
    """[A], of the distances that the level predicts."""
    least: Tensor
    """[A], the distance to the farthest side of a box is above it and …"""
    most: Tensor
    """[A], … below it."""


class Raw(NamedTuple):
    """What the network predicts for B pictures at A points, in the type it computed in."""

    logits: Tensor
    """[B, A, C], one sigmoid logit per class."""
    distances: Tensor
    """[B, A, 4], from the point to the left, top, right and bottom of its box in the level's unit; not negative."""
    centerness: Tensor
    """[B, A], a sigmoid logit."""
    points: Points
    levels: tuple[int, ...]
    """How many of the A points each pyramid level has, finest level first."""


class LeanGroupNorm(nn.GroupNorm):
    """GroupNorm that stays in bf16 where its input is: under autocast it would be fp32, and with it the activations of
    the towers: 7.3 instead of 4.7 GiB for 16 pictures of 800 × 800 on ResNet-50. The kernel's own sums are fp32."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
            return functional.group_norm(x, self.num_groups, weight, bias, self.eps)


class Tower(nn.Module):
    """`depth` convolutions with norms, shared by all levels; then one convolution for each of `outputs`, name → numbers
    per point, whose names are those of the children. Levels, each [B, channels, h, w] → [B, A, numbers] per output."""

    def __init__(self, channels: int, depth: int, outputs: Mapping[str, int]) -> None:
        super().__init__()
        self.outputs = tuple(outputs)
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [_convolution(channels, channels), LeanGroupNorm(GROUPS, channels), nn.ReLU(inplace=True)]
        self.conv = nn.Sequential(*layers)
        for name, numbers in outputs.items():
            self.add_module(name, _convolution(channels, numbers))

    def forward(self, levels: list[Tensor]) -> list[Tensor]:
        shared = [self.conv(level) for level in levels]
        return [
            # In channels-last memory the permutation and the flattening are views.
            torch.cat([self.get_submodule(name)(some).permute(0, 2, 3, 1).flatten(1, 2) for some in shared], dim=1)
            for name in self.outputs
        ]


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
    nn.init.normal_(convolution.weight, std=0.01)
    assert convolution.bias is not None
    nn.init.zeros_(convolution.bias)
    return convolution


class FCOS(Detector):
    """The detector. `channels`: of FPN and towers, a multiple of GROUPS; `depth`: convolutions in each tower."""

    iou_threshold = 0.6
    per_level = CANDIDATES
    """Boxes of a pyramid level that go into suppression."""

    def __init__(
        self, backbone: FeaturePyramid, settings: ModelSettings, class_count: int, *, channels: int, depth: int
    ) -> None:
        super().__init__(settings, class_count)
        self.backbone = backbone
        classes = Tower(channels, depth, {"cls_logits": class_count})
        nn.init.constant_(classes.get_parameter("cls_logits.bias"), -math.log((1 - PRIOR) / PRIOR))
        boxes = Tower(channels, depth, {"bbox_reg": 4, "bbox_ctrness": 1})
        self.head = nn.ModuleDict({"classification_head": classes, "regression_head": boxes})
        self.points = PointsOf()

    def forward(self, images: Tensor) -> Raw:
        """images: uint8 [B, 3, H, W], RGB, H and W multiples of 32."""
        levels = self.backbone(self.pixels(images))
        (logits,) = self.head["classification_head"](levels)
        distances, centerness = self.head["regression_head"](levels)
        grids = [(level.shape[2], level.shape[3]) for level in levels]
        points = self.points((images.shape[2], images.shape[3]), grids, images.device)
        counts = tuple(height * width for height, width in grids)
        return Raw(logits, distances.relu(), centerness[..., 0], points, counts)

    def loss(self, raw: Raw, batch: Batch) -> dict[str, Tensor]:
        """`classification` (focal), `bbox_regression` (1 - GIoU) and `bbox_ctrness` (cross-entropy), fp32 scalars.

        Each is summed over the batch and divided by its positive points (at least 1), as in torchvision. So the parts
        of a batch that is accumulated or spread over devices weigh the same, however many positives each has; in one
        step on the whole batch they would weigh by their positives.
        """
        settings, points = self.settings, raw.points
        with torch.autocast(raw.logits.device.type, enabled=False):
            slot = assign(batch.boxes, batch.valid, points)
            positive, index = slot >= 0, slot.clamp(min=0)
            count = positive.sum().clamp(min=1)
            target = torch.where(positive, batch.labels.gather(1, index), BACKGROUND)
            classes = focal_loss(raw.logits, target, alpha=settings.focal_alpha, gamma=settings.focal_gamma)
            # Points without a box get one of two units around themselves: where they are masked out below, what is
            # masked is finite, backward too.
            somewhere = positive[..., None]
            distances = torch.where(somewhere, at_least_fp32(raw.distances), 1.0)
            boxes = batch.boxes.gather(1, index[..., None].expand(-1, -1, 4))
            around = decode(torch.ones_like(boxes), points.centre, points.unit)
            boxes = torch.where(somewhere, boxes, around)
            overlap = giou(decode(distances, points.centre, points.unit), boxes)
            centre = functional.binary_cross_entropy_with_logits(
                at_least_fp32(raw.centerness), centerness_of(boxes, points.centre), reduction="none"
            )
            return {
                "classification": classes.sum() / count,
                "bbox_regression": torch.where(positive, 1 - overlap, 0.0).sum() / count,
                "bbox_ctrness": torch.where(positive, centre, 0.0).sum() / count,
            }

    def candidates(self, raw: Raw, content: Tensor, *, score_threshold: float | Tensor) -> Candidates:
        """The `per_level` best of each pyramid level; a score is the geometric mean of class and centerness."""
        with torch.autocast(raw.logits.device.type, enabled=False):
            centerness = at_least_fp32(raw.centerness).sigmoid()[..., None]
            ranked = (at_least_fp32(raw.logits).sigmoid() * centerness).sqrt()
            scores, place, label = best_of_levels(ranked, raw.levels, self.per_level)
            distances = at_least_fp32(raw.distances.gather(1, place[..., None].expand(-1, -1, 4)))
            centre = raw.points.centre.index_select(0, place.flatten()).view(*place.shape, 2)
            unit = raw.points.unit.index_select(0, place.flatten()).view(place.shape)
            boxes = decode(distances, centre, unit)
            return candidates_in(content, boxes, scores, label, score_threshold=score_threshold)

    def class_layers(self) -> tuple[ClassLayer, ...]:
        return (ClassLayer("head.classification_head.cls_logits"),)


class PointsOf:
    """The points of each canvas as `points_of` makes them, made once: as anchors (`anchors.py`), they would be dozens
    of kernels a step."""

    def __init__(self, *, shift: float = 0.0) -> None:
        self.shift = shift
        self._made: dict[tuple[tuple[int, int], torch.device], Points] = {}

    def __call__(self, canvas: tuple[int, int], grids: list[tuple[int, int]], device: torch.device) -> Points:
        key = (canvas, device)
        if key not in self._made:
            with torch.inference_mode(False):  # tensors of inference mode could not be saved for backward later
                self._made[key] = points_of(canvas, grids, device, shift=self.shift)
        return self._made[key]


def points_of(
    canvas: tuple[int, int], grids: list[tuple[int, int]], device: torch.device, *, shift: float = 0.0
) -> Points:
    """The points of pyramid levels of `grids` (height, width), finest first, row by row; `shift` of a stride away from
    its multiples."""
    levels = []
    for level, (height, width) in enumerate(grids):
        y = (torch.arange(height, device=device, dtype=torch.float32) + shift) * (canvas[0] // height)
        x = (torch.arange(width, device=device, dtype=torch.float32) + shift) * (canvas[1] // width)
        centre = torch.stack((x[None, :].expand(height, width), y[:, None].expand(height, width)), dim=-1).flatten(0, 1)
        unit = FINEST * 2**level
        least = unit * RANGE[0] if level > 0 else 0.0
        most = unit * RANGE[1] if level + 1 < len(grids) else math.inf
        numbers = [torch.full_like(centre[:, 0], number) for number in (unit, least, most)]
        levels.append((centre, *numbers))
    centre, unit, least, most = (torch.cat(column) for column in zip(*levels, strict=True))
    return Points(centre, unit, least, most)


def assign(boxes: Tensor, valid: Tensor, points: Points, *, block: int | None = None) -> Tensor:
    """Slot of the box that each point has to find, or `BACKGROUND`: int64 [B, A].

    boxes: float [B, M, 4] xyxy; valid: bool [B, M]. A point may find a box that it lies inside of, whose centre is
    within RADIUS units and whose farthest side is in the level's range. Of several it finds the one of the smallest
    area; of several of that area the one in the lowest slot. (torchvision compares 1e8 - area, which in fp32 is a
    multiple of 8: areas less apart are equal there.) Pictures are taken together, and slots apart, as `block` allows.
    """

    def some(boxes: Tensor, valid: Tensor, rows: int) -> Tensor:
        return _assign(boxes, valid, points, rows)

    return by_blocks(some, boxes, valid, points.centre.shape[0], block)


def _assign(boxes: Tensor, valid: Tensor, points: Points, rows: int) -> Tensor:
    shape = (boxes.shape[0], points.centre.shape[0])
    smallest = boxes.new_full(shape, math.inf)
    best = torch.full(shape, BACKGROUND, dtype=torch.int64, device=boxes.device)
    x, y = points.centre.unbind(-1)
    for start in range(0, boxes.shape[1], rows):
        some = boxes[:, start : start + rows, :, None]
        x1, y1, x2, y2 = some.unbind(2)
        off = torch.maximum((x - (x1 + x2) / 2).abs(), (y - (y1 + y2) / 2).abs())
        fits = valid[:, start : start + rows, None] & (off < RADIUS * points.unit)
        left, top, right, bottom = x - x1, y - y1, x2 - x, y2 - y
        fits &= torch.minimum(torch.minimum(left, right), torch.minimum(top, bottom)) > 0
        farthest = torch.maximum(torch.maximum(left, right), torch.maximum(top, bottom))
        fits &= (farthest > points.least) & (farthest < points.most)
        value, slot = torch.where(fits, area(boxes[:, start : start + rows])[..., None], math.inf).min(dim=1)
        better = value < smallest  # strictly, so that the lowest slot keeps a point that equal boxes share
        best = torch.where(better, slot + start, best)
        smallest = torch.where(better, value, smallest)
    return best


def decode(distances: Tensor, centre: Tensor, unit: Tensor) -> Tensor:
    """Boxes xyxy [..., A, 4] from `distances` [..., A, 4] in `unit` pixels [..., A] from the points `centre`."""
    pixels = distances * unit[..., None]
    return torch.cat((centre - pixels[..., :2], centre + pixels[..., 2:]), dim=-1)


def centerness_of(boxes: Tensor, centre: Tensor) -> Tensor:
    """1 in the middle of a box, 0 at its rim (equation 3): [..., A] of `boxes` [..., A, 4] around points `centre`."""
    first, last = centre - boxes[..., :2], boxes[..., 2:] - centre
    return (torch.minimum(first, last) / torch.maximum(first, last)).prod(-1).sqrt()


FCOS_DEFAULTS: Defaults = {
    "focal_alpha": (0.25, "FCOS paper, section 2.1: as RetinaNet"),
    "focal_gamma": (2.0, "FCOS paper, section 2.1: as RetinaNet"),
    **PRETRAINED,
}


def fcos_on(body: str, *, channels: int = 256, depth: int = 4) -> Build:
    """Builds FCOS on a body of BODIES: FPN and towers of `channels`, towers of `depth` convolutions."""

    def build(settings: ModelSettings, class_count: int) -> FCOS:
        backbone = pyramid(body, channels, norm=settings.norm, trainable_stages=settings.trainable_stages)
        return FCOS(backbone, settings, class_count, channels=channels, depth=depth)

    return build
