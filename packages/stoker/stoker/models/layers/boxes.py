"""Geometry of boxes: box encoding, IoU, clipping, and anchors.

Boxes are xyxy in pixels unless a name says otherwise. Every function has a fixed output shape and works on the device
of its arguments. The anchors of an input size are computed on the device once and then cached: computing them takes
dozens of kernels. `matching.py` assigns boxes to anchors; `losses.py` has the losses.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stoker.hardware.xla import device_of_constants

MAX_LOG_SCALE = math.log(1000 / 16)
"""Maximum of the predicted log sizes before exp, as in Detectron and torchvision: a box grows at most 62.5 times."""

BOX_CODER_WEIGHTS = (10.0, 10.0, 5.0, 5.0)
"""Factors of the encoded offsets x, y, log w, log h in SSD and in the second stage of Faster R-CNN: the inverse of
their usual standard deviation (torchvision's BoxCoder, Detectron), of the "variances" of SSD's prior boxes."""


def cell_anchors(size: float, scales: Sequence[float], aspect_ratios: Sequence[float]) -> Tensor:
    """Anchors of one pyramid level around the origin: float32 [len(ratios) · len(scales), 4], on the CPU.

    `size` · scale is the side of a square with the anchor's area, truncated to whole pixels; ratio is height over
    width; coordinates are rounded to pixels. The order is all scales of the first ratio, then of the next. This equals
    torchvision's `AnchorGenerator` with the sizes of its RetinaNet, so its weights fit.
    """
    sides = [max(1, int(size * scale)) for scale in scales]
    square_sides = torch.tensor(sides, dtype=torch.float32, device="cpu")
    sqrt_ratio = torch.tensor(list(aspect_ratios), dtype=torch.float32, device="cpu").sqrt()
    heights = (sqrt_ratio[:, None] * square_sides).flatten()
    widths = ((1 / sqrt_ratio)[:, None] * square_sides).flatten()
    return (torch.stack((-widths, -heights, widths, heights), dim=1) / 2).round()


def grid_anchors(base_anchors: Tensor, grid: tuple[int, int], stride: tuple[float, float]) -> Tensor:
    """`base_anchors` [n, 4] at every position of a `grid` (height, width): float32 [height · width · n, 4].

    Positions are `stride` (y, x) pixels apart; the first is the origin.
    """
    y = torch.arange(grid[0], dtype=base_anchors.dtype, device=base_anchors.device) * stride[0]
    x = torch.arange(grid[1], dtype=base_anchors.dtype, device=base_anchors.device) * stride[1]
    y, x = y[:, None].expand(grid), x[None, :].expand(grid)
    shifts = torch.stack((x, y, x, y), dim=2).reshape(-1, 1, 4)
    return (shifts + base_anchors).reshape(-1, 4)


MIN_ROW = 16
"""Values of a row from which it is gathered as a whole; for fewer, the operators that this needs cost more."""


def batched_gather(values: Tensor, index: Tensor) -> Tensor:
    """The rows `index` [B, S] of `values` [B, N] or [B, N, D]: [B, S] or [B, S, D]."""
    if values.dim() == 2:
        return values.gather(1, index)
    if values.shape[2] < MIN_ROW:
        return values.gather(1, index[..., None].expand(-1, -1, values.shape[2]))
    # Rows of one table, which are copied whole: 7 % less time of an ember in onnxruntime than an index for each value.
    first_row = torch.arange(values.shape[0], device=index.device) * values.shape[1]
    return rows_at(values.flatten(0, 1), index + first_row[:, None])


def rows_at(table: Tensor, index: Tensor) -> Tensor:
    """The rows `index` [B, S] of one table [A] or [A, D] for all images: [B, S] or [B, S, D]."""
    return table.index_select(0, index.flatten()).view(*index.shape, *table.shape[1:])


def coder_weights_like(boxes: Tensor) -> Tensor:
    """BOX_CODER_WEIGHTS [4], created on the device and with the dtype of `boxes`."""
    x, _, w, _ = BOX_CODER_WEIGHTS
    coordinate = torch.arange(4, device=boxes.device)
    return torch.where(coordinate < 2, x, w).to(boxes.dtype)


def encode(boxes: Tensor, anchors: Tensor) -> Tensor:
    """`boxes` [..., 4] relative to `anchors` [..., 4]: center offsets in units of the anchor's size, and logarithms of
    the size ratios, [..., 4] (Faster R-CNN, arXiv 1506.01497, equation 2)."""
    box_x, box_y, box_w, box_h = _to_cxcywh(boxes)
    anchor_x, anchor_y, anchor_w, anchor_h = _to_cxcywh(anchors)
    offsets = (box_x - anchor_x) / anchor_w, (box_y - anchor_y) / anchor_h
    return torch.stack((*offsets, (box_w / anchor_w).log(), (box_h / anchor_h).log()), dim=-1)


def decode(deltas: Tensor, anchors: Tensor) -> Tensor:
    """Boxes [..., 4] from predictions `deltas` [..., 4] at `anchors` [..., 4]; the inverse of `encode`."""
    anchor_x, anchor_y, anchor_w, anchor_h = _to_cxcywh(anchors)
    x, y, log_w, log_h = deltas.unbind(-1)
    center_x, center_y = x * anchor_w + anchor_x, y * anchor_h + anchor_y
    half_w = 0.5 * (log_w.clamp(max=MAX_LOG_SCALE).exp() * anchor_w)
    half_h = 0.5 * (log_h.clamp(max=MAX_LOG_SCALE).exp() * anchor_h)
    return torch.stack((center_x - half_w, center_y - half_h, center_x + half_w, center_y + half_h), dim=-1)


def _to_cxcywh(boxes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x1, y1, x2, y2 = boxes.unbind(-1)
    width, height = x2 - x1, y2 - y1
    return x1 + 0.5 * width, y1 + 0.5 * height, width, height


def area(boxes: Tensor) -> Tensor:
    """Area of `boxes` [..., 4] in square pixels: [...]."""
    width, height = (boxes[..., 2:] - boxes[..., :2]).unbind(-1)
    return width * height


def iou(boxes: Tensor, anchors: Tensor) -> Tensor:
    """IoU of each of `boxes` [..., M, 4] with each of `anchors`, [A, 4] or [..., A, 4]: [..., M, A], 0 … 1."""
    first, second = boxes[..., :, None, :], anchors[..., None, :, :]
    width = torch.minimum(first[..., 2], second[..., 2]).sub_(torch.maximum(first[..., 0], second[..., 0]))
    height = torch.minimum(first[..., 3], second[..., 3]).sub_(torch.maximum(first[..., 1], second[..., 1]))
    intersection = width.clamp_(min=0).mul_(height.clamp_(min=0))
    union = (area(boxes)[..., :, None] + area(anchors)[..., None, :]).sub_(intersection)
    return intersection.div_(union)


def giou(first: Tensor, second: Tensor) -> Tensor:
    """Generalized IoU (arXiv 1902.09630) of pairs of boxes, both [..., 4]: [...], -1 … 1."""
    return iou_and_giou(first, second)[1]


def iou_and_giou(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """IoU and generalized IoU of pairs of boxes, both [..., 4]: two [...]."""
    eps = 1e-7
    (first_min, first_max), (second_min, second_max) = torch.split(first, 2, dim=-1), torch.split(second, 2, dim=-1)
    first_size, second_size = first_max - first_min, second_max - second_min
    common_size = torch.minimum(first_max, second_max) - torch.maximum(first_min, second_min)
    # The larger of two numbers is their sum without the smaller one. Gradients of maxima take many operators.
    enclosing_size = first_size + second_size - common_size
    width, height = torch.stack((first_size, second_size, common_size, enclosing_size)).unbind(-1)
    first_area, second_area, common_area, enclosing_area = (width * height).unbind()
    intersection = common_area.masked_fill((common_size <= 0).any(-1), 0.0)
    union = first_area + second_area - intersection
    overlap = intersection / (union + eps)
    return overlap, overlap - (enclosing_area - union) / (enclosing_area + eps)


def cxcywh_to_xyxy(boxes: Tensor) -> Tensor:
    """Boxes [..., 4] given by center and size, as corners."""
    center, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat((center - half, center + half), dim=-1)


def xyxy_to_cxcywh(boxes: Tensor) -> Tensor:
    """Boxes [..., 4] given by corners, as center and size."""
    low, high = boxes[..., :2], boxes[..., 2:]
    return torch.cat(((low + high) / 2, high - low), dim=-1)


def xyxy_scale(image_size: tuple[int, int], like: Tensor) -> Tensor:
    """Width, height, width, height, made on the device of `like`: int64 [4]."""
    height, width = image_size
    return torch.where(torch.arange(4, device=like.device) % 2 == 0, width, height)


def clip(boxes: Tensor, size: Tensor) -> Tensor:
    """`boxes` [B, K, 4] clipped to `size` [B, 2], height and width of each image: [B, K, 4]."""
    height, width = size[:, None, 0], size[:, None, 1]
    x1, y1, x2, y2 = boxes.unbind(-1)
    zero = torch.zeros((), dtype=boxes.dtype, device=boxes.device)
    limits = ((x1, width), (y1, height), (x2, width), (y2, height))
    return torch.stack([coordinate.clamp(min=zero, max=limit.to(boxes.dtype)) for coordinate, limit in limits], dim=-1)


GridSize = tuple[int, int]
"""Height and width of a feature map."""


class AnchorOutputs(NamedTuple):
    """Predictions for B images at A anchors, in the dtype the network computed in."""

    logits: Any
    """[B, A, C], one logit per class, that of a background first if there is one; of a proposal network C is 1. In
    training with `RetinaNet.fused_loss`: a tuple of those of each level."""
    deltas: Tensor
    """[B, A, 4], boxes encoded relative to their anchors; in an SSD times BOX_CODER_WEIGHTS."""
    anchors: Tensor
    """float32 [A, 4], xyxy in pixels of the model input."""
    num_anchors_per_level: tuple[int, ...]
    """How many of the A anchors each map has, finest first."""


class AnchorGenerator(nn.Module):
    """Anchors of feature maps whose positions are multiples of a stride.

    base_anchors: of each map, finest first, the anchors of one position, [n, 4] around the origin.
    """

    def __init__(self, base_anchors: Iterable[Tensor]) -> None:
        super().__init__()
        for level, anchors in enumerate(base_anchors):
            self.register_buffer(f"cells_{level}", anchors, persistent=False)
        self._cache: dict[tuple[tuple[int, int], torch.device, torch.dtype], Tensor] = {}

    def forward(self, image_size: tuple[int, int], grids: list[GridSize]) -> Tensor:
        """All anchors of an input size (height, width) with feature maps `grids`: float32 [A, 4], by map, by row."""
        first_base = self.get_buffer("cells_0")
        key = (image_size, first_base.device, first_base.dtype)
        if key not in self._cache:
            with torch.inference_mode(False):  # a tensor made in inference mode cannot be saved for backward later
                levels = [self.level_anchors(n, image_size, grid) for n, grid in enumerate(grids)]
                self._cache[key] = torch.cat(levels).to(first_base.device)
        return self._cache[key]

    def num_anchors_per_level(self, grids: list[GridSize]) -> tuple[int, ...]:
        return tuple(height * width * self.get_buffer(f"cells_{n}").shape[0] for n, (height, width) in enumerate(grids))

    def level_anchors(self, level: int, image_size: tuple[int, int], grid: GridSize) -> Tensor:
        """The anchors of one map, [height · width · n, 4]; here the first position is the input's corner."""
        return grid_anchors(self._base_anchors(level), grid, (image_size[0] // grid[0], image_size[1] // grid[1]))

    def _base_anchors(self, level: int) -> Tensor:
        cells = self.get_buffer(f"cells_{level}")
        return cells.to(device_of_constants(cells.device))
