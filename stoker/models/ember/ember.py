"""Ember: a small, modern detector without anchors, after the literature alone.

A body of cross-stage-partial blocks, or an ImageNet-pretrained one; path aggregation over strides 8, 16 and 32
(`csp_pafpn.py`); for each level two towers, one for classes and one for boxes. A point predicts a logit per class and,
for each side of its box, a distribution over distances, whose mean is the distance (GFL, Li et al. 2020, arXiv
2006.04388). Which points have to find which box is decided by what the network predicts already
(`task_aligned_assigner.py`).

With `nms_free` there is a second pair of towers, which learns to find each box at one point alone (YOLOv10, Wang et al.
2024, arXiv 2405.14458): its boxes need no suppression. It learns from the features and does not change them.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stoker.config.settings import ModelSettings
from stoker.data.batch import Batch
from stoker.models.architecture import PRETRAINED, Build, Defaults
from stoker.models.backbones import NeckedBody, necked
from stoker.models.detector import ClassLayer, Detector
from stoker.models.ember.csp_pafpn import PathAggregation
from stoker.models.ember.task_aligned_assigner import assign
from stoker.models.fcos.fcos import FINEST, Points, PointsOf, decode
from stoker.models.layers.boxes import giou
from stoker.models.layers.convolutions import convolution, separable
from stoker.models.layers.losses import at_least_fp32, soft_cross_entropy
from stoker.models.layers.norms import NORMS, Norm, trained
from stoker.models.layers.postprocess import CANDIDATES, Candidates, best_of_levels, candidates_in
from stoker.models.retinanet.retinanet import PRIOR

BINS = 16
"""Distances of a distribution: 0 … 15 strides, up to 480 pixels from the point at stride 32."""
LONGEST = 2 * (BINS - 1) * 32
"""Pixels of the canvas: the longest side of a box that it can predict."""
CANDIDATES_OF_A_BOX = 10
"""Points that learn to find a box, at most. TOOD: 13, on five levels; here on three."""
IOU_THRESHOLD = 0.7
"""Of the suppression: two objects of a class may overlap by more than the usual 0.5."""
CLASSES = 2
"""Place of the last layer in a tower of classes."""
CLASS_WEIGHT, BOX_WEIGHT, DISTRIBUTION_WEIGHT = 2.0, 2.5, 0.5
"""Of the parts of the loss: PP-YOLOE's (arXiv 2203.16250, equation 3), with twice the weight of the classes; LOG.md,
"Ember", has what that brings."""


class Predicted(NamedTuple):
    """Of B pictures at A points, in the type the network computed in."""

    logits: Tensor
    """[B, A, C], one sigmoid logit per class."""
    sides: Tensor
    """[B, A, 4 · BINS], logits of the distances to the left, top, right and bottom of the box, in the level's unit."""


class Raw(NamedTuple):
    """What the network predicts. many: many points for each box; one: one for each. Either is None where it has no
    use: `one` without `nms_free`, `many` beside it outside of training."""

    many: Predicted | None
    one: Predicted | None
    points: Points
    levels: tuple[int, ...]
    """How many of the A points each level has, finest level first."""


class Towers(nn.Module):
    """For each level: two convolutions and the boxes' sides; two pairs of a depthwise and a 1 × 1 convolution and the
    classes. The classes' tower is the lighter one: what is there is easier to say than where it ends."""

    def __init__(self, channels: list[int], class_count: int, norm: Norm) -> None:
        super().__init__()
        box, kind = 4 * BINS, channels[0]  # whatever the number of classes: weights for one are a start for another
        self.sides = nn.ModuleList(
            nn.Sequential(convolution(width, box, norm), convolution(box, box, norm), nn.Conv2d(box, 4 * BINS, 1))
            for width in channels
        )
        self.classes = nn.ModuleList(
            nn.Sequential(separable(width, kind, norm), separable(kind, kind, norm), nn.Conv2d(kind, class_count, 1))
            for width in channels
        )
        for tower in self.classes:
            nn.init.constant_(tower.get_parameter(f"{CLASSES}.bias"), -math.log((1 - PRIOR) / PRIOR))

    def forward(self, levels: list[Tensor]) -> Predicted:
        """Levels, each [B, channels, h, w], finest first."""
        logits, sides = (
            # In channels-last memory the permutation and the flattening are views.
            torch.cat([tower(x).permute(0, 2, 3, 1).flatten(1, 2) for tower, x in zip(towers, levels, strict=True)], 1)
            for towers in (self.classes, self.sides)
        )
        return Predicted(logits, sides)


class Ember(Detector):
    """The detector. `channels`: of the three levels; `depth`: of the neck's blocks."""

    per_level = CANDIDATES
    """Boxes of a level that go into suppression."""

    distance: Tensor

    def __init__(self, backbone: NeckedBody, settings: ModelSettings, class_count: int, channels: list[int]) -> None:
        super().__init__(settings, class_count)
        self.iou_threshold = 1.0 if settings.nms_free else IOU_THRESHOLD
        self.backbone = backbone
        self.levels = len(channels)
        norm = NORMS[trained(settings.norm)]
        self.head = nn.ModuleDict({"many": Towers(channels, class_count, norm)})
        if settings.nms_free:
            self.head["one"] = Towers(channels, class_count, norm)
        self.points = PointsOf(shift=0.5)
        self.register_buffer("distance", torch.arange(BINS, dtype=torch.float32), persistent=False)

    def forward(self, images: Tensor) -> Raw:
        """images: uint8 [B, 3, H, W], RGB, H and W multiples of 32."""
        levels = self.backbone(self.pixels(images))
        grids = [(level.shape[2], level.shape[3]) for level in levels]
        points = self.points((images.shape[2], images.shape[3]), grids, images.device)
        alone = self.settings.nms_free
        many = self.head["many"](levels) if self.training or not alone else None
        one = self.head["one"]([level.detach() for level in levels]) if alone else None
        return Raw(many, one, points, tuple(height * width for height, width in grids))

    def boxes(self, sides: Tensor, centre: Tensor, unit: Tensor) -> Tensor:
        """Boxes xyxy, float32 [..., 4], of distributions [..., 4 · BINS] at points `centre` [..., 2]."""
        shares = at_least_fp32(sides).reshape(*sides.shape[:-1], 4, BINS).softmax(-1)
        # By a column: onnxruntime multiplies a vector place by place, which took 8 % of a picture's time.
        return decode((shares @ self.distance.to(shares.dtype)[:, None]).squeeze(-1), centre, unit)

    def loss(self, raw: Raw, batch: Batch) -> dict[str, Tensor]:
        """`classification` (cross-entropy with the quality), `bbox_regression` (1 - GIoU) and `bbox_distribution`
        (cross-entropy of the two distances around the true one), fp32 scalars; with `nms_free` the same with `one_`.

        The last two are sums over the points with a box. (TOOD weighs them by quality, so that boxes which are found
        badly, the small ones above all, hardly learn: LOG.md, "Ember".) All are divided by the sum of the quality over
        the batch, at least 1: the parts of a batch that is accumulated or spread over devices weigh the same, however
        many boxes each has.
        """
        assert raw.many is not None
        losses = self._loss(raw.many, raw.points, batch, CANDIDATES_OF_A_BOX)
        if raw.one is not None:
            alone = self._loss(raw.one, raw.points, batch, 1)
            losses |= {f"one_{name}": value for name, value in alone.items()}
        return losses

    def _loss(self, predicted: Predicted, points: Points, batch: Batch, most: int) -> dict[str, Tensor]:
        logits, sides = predicted
        with torch.autocast(logits.device.type, enabled=False):
            with torch.no_grad():
                found = assign(
                    logits, self.boxes(sides, points.centre, points.unit), points.centre,
                    batch.boxes, batch.labels, batch.valid, reach=FINEST / 2, most=most,
                )  # fmt: skip
            total = found.quality.sum().clamp(min=1)
            label = batch.labels.gather(1, found.slot.clamp(min=0))
            classes = soft_cross_entropy(logits, label, found.quality)
            # At most so many points have a box: what follows is computed for them alone, and stays of a fixed shape.
            slot, place = found.slot.topk(min(found.slot.shape[1], most * batch.valid.shape[1]), dim=1)
            positive = slot >= 0
            centre, unit = points.centre[place], points.unit[place]
            # Points without a box get one of two units around themselves: what is masked out stays finite.
            around = decode(torch.ones_like(centre).repeat(1, 1, 2), centre, unit)
            wanted = batch.boxes.gather(1, slot.clamp(min=0)[..., None].expand(-1, -1, 4))
            wanted = torch.where(positive[..., None], wanted, around)
            chosen = sides.gather(1, place[..., None].expand(-1, -1, sides.shape[2]))
            overlap = giou(self.boxes(chosen, centre, unit), wanted)
            spread = distribution_loss(chosen, distances_of(wanted, centre, unit))
            return {
                "classification": CLASS_WEIGHT * classes.sum() / total,
                "bbox_regression": BOX_WEIGHT * torch.where(positive, 1 - overlap, 0.0).sum() / total,
                "bbox_distribution": DISTRIBUTION_WEIGHT * torch.where(positive, spread, 0.0).sum() / total,
            }

    def candidates(self, raw: Raw, content: Tensor, *, score_threshold: float | Tensor) -> Candidates:
        """The `per_level` best of each level; with `nms_free` those of the towers that find each box once."""
        predicted = raw.many if raw.one is None else raw.one
        assert predicted is not None
        with torch.autocast(predicted.logits.device.type, enabled=False):
            logits, place, label = best_of_levels(predicted.logits, raw.levels, self.per_level)
            sides = predicted.sides.gather(1, place[..., None].expand(-1, -1, predicted.sides.shape[2]))
            centre = raw.points.centre.index_select(0, place.flatten()).view(*place.shape, 2)
            unit = raw.points.unit.index_select(0, place.flatten()).view(place.shape)
            scores = at_least_fp32(logits).sigmoid()
            boxes = self.boxes(sides, centre, unit)
            return candidates_in(content, boxes, scores, label, score_threshold=score_threshold)

    def class_layers(self) -> tuple[ClassLayer, ...]:
        return tuple(
            ClassLayer(f"head.{name}.classes.{level}.{CLASSES}") for name in self.head for level in range(self.levels)
        )


def distances_of(boxes: Tensor, centre: Tensor, unit: Tensor) -> Tensor:
    """From points [..., 2] to the left, top, right and bottom of boxes [..., 4], in `unit` pixels [...]: [..., 4]; the
    inverse of `decode`."""
    return torch.cat((centre - boxes[..., :2], boxes[..., 2:] - centre), dim=-1) / unit[..., None]


def distribution_loss(sides: Tensor, distances: Tensor) -> Tensor:
    """Cross-entropy of the two whole distances around the true one, weighed by how near they are: [...], the mean of
    the four sides (distribution focal loss, GFL, equation 6).

    sides: [..., 4 · BINS], logits; distances: [..., 4]; what does not fit between the first and the last bin is cut.
    """
    log_shares = at_least_fp32(sides).reshape(*sides.shape[:-1], 4, BINS).log_softmax(-1)
    distances = distances.to(log_shares.dtype).clamp(0, BINS - 1.01)
    below = distances.floor()
    above_share, index = distances - below, below.to(torch.int64)[..., None]
    either = log_shares.gather(-1, index)[..., 0], log_shares.gather(-1, index + 1)[..., 0]
    return -torch.lerp(*either, above_share).mean(-1)


def options_of(tensors: Mapping[str, Tensor]) -> dict[str, bool]:
    """`nms_free` and `depthwise` of the ember whose weights these are; nothing where they are of something else."""
    if not any(name.startswith("head.many.") for name in tensors):
        return {}
    return {
        "nms_free": any(name.startswith("head.one.") for name in tensors),
        "depthwise": "backbone.neck.down.0.blocks.0.first.0.0.weight" in tensors,
    }


EMBER: Defaults = {
    "norm": ("train", "as its weights were trained"),
    "trainable_stages": (5, "as its weights were trained"),
    "nms_free": (False, "one pair of towers less; ember_n on BCCD has AP 0.595 so, and 0.574 with them"),
    "depthwise": (False, "no faster on a CPU; ember_n on BCCD has AP 0.595 so, and 0.584 with it"),
}
"""Of those with a body of their own."""
EMBER_ON: Defaults = {**PRETRAINED, "nms_free": EMBER["nms_free"], "depthwise": EMBER["depthwise"]}
"""Of those on a classifier's body."""


def ember_on(body: str, *, channels: tuple[int, int, int], depth: int) -> Build:
    """Builds ember on a body of BODIES: `channels` at strides 8, 16 and 32; `depth`: of the neck's blocks."""

    def build(settings: ModelSettings, class_count: int) -> Ember:
        norm = NORMS[trained(settings.norm)]
        neck = partial(PathAggregation, channels=channels, depth=depth, norm=norm, depthwise=settings.depthwise)
        backbone = necked(body, neck, norm=settings.norm, trainable_stages=settings.trainable_stages)
        return Ember(backbone, settings, class_count, list(channels))

    return build
