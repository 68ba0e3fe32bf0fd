"""Multi-scale deformable attention (Deformable DETR, Zhu et al. 2020, arXiv 2010.04159) on maps of fixed shapes.

A query looks at a few points of each map, at predicted offsets from its reference box. Offsets, locations and sampling
are fp32 in any case: fp16 has no more than 11 bits for a location. Shapes are numbers of the host: nothing waits.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.hardware.xla import XLA_KINDS
from stoker.models.layers.boxes import GridSize
from stoker.models.layers.losses import at_least_fp32


def sample_levels(
    value: Tensor, grids: Sequence[GridSize], locations: Tensor, weights: Tensor, num_points: Sequence[int]
) -> Tensor:
    """Weighted sums of bilinear samples: [B, Q, heads · c], at least fp32.

    value: [B, S, heads, c], the maps of `grids` (height, width) one after the other, by row; locations: [B, Q, heads,
    P, 2], x and y as fractions of the map (0 outside); weights: [B, Q, heads, P]; num_points: in each map, sums to P.
    """
    batch_size, _, num_heads, channels = value.shape
    with torch.autocast(value.device.type, enabled=False):
        by_head = at_least_fp32(value).permute(0, 2, 3, 1).flatten(0, 1)
        points = (2 * at_least_fp32(locations) - 1).transpose(1, 2).flatten(0, 1)  # -1 … 1, for grid_sample
        sample: Callable[[Tensor, Tensor], Tensor] = partial(functional.grid_sample, align_corners=False)
        if value.device.type in XLA_KINDS:
            sample = _sample_by_gathers
        by_level = by_head.split([height * width for height, width in grids], 2), points.split(list(num_points), 2)
        sampled = [sample(level.unflatten(2, grid), at) for grid, level, at in zip(grids, *by_level, strict=True)]
        # each [B · heads, c, Q, points]
        by_point = at_least_fp32(weights).transpose(1, 2).flatten(0, 1)[:, None]
        summed = (torch.cat(sampled, dim=3) * by_point).sum(3)
        return summed.view(batch_size, num_heads * channels, -1).transpose(1, 2)


def _sample_by_gathers(maps: Tensor, at: Tensor) -> Tensor:
    """`grid_sample` of maps [N, c, h, w] at [N, Q, P, 2] → [N, c, Q, P], by gathers: XLA has no `grid_sample`."""
    height, width = maps.shape[2:]
    x, y = ((at[..., axis] + 1) * (size / 2) - 0.5 for axis, size in enumerate((width, height)))
    left, top = x.floor().detach(), y.floor().detach()
    by_cell, sampled = maps.flatten(2), torch.zeros((), dtype=maps.dtype, device=maps.device)
    for column, x_weight in ((left, 1 - (x - left)), (left + 1, x - left)):
        for row, y_weight in ((top, 1 - (y - top)), (top + 1, y - top)):
            inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
            cell = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).long().flatten(1)
            values = by_cell.gather(2, cell[:, None].expand(-1, maps.shape[1], -1)).unflatten(2, x.shape[1:])
            sampled = sampled + values * torch.where(inside, x_weight * y_weight, 0.0)[:, None]
    return sampled


OFFSET_SCALE = 0.5
"""Largest offset at the start of training, in sizes of the reference box."""


class DeformableAttention(nn.Module):
    """Cross-attention of queries with maps, as D-FINE has it: neither values nor outputs are projected.

    num_points: in each map.
    """

    def __init__(self, channels: int, num_heads: int, num_points: Sequence[int]) -> None:
        super().__init__()
        self.num_heads, self.num_points = num_heads, tuple(num_points)
        total = num_heads * sum(num_points)
        self.sampling_offsets, self.attention_weights = nn.Linear(channels, 2 * total), nn.Linear(channels, total)
        for layer in (self.sampling_offsets, self.attention_weights):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        # A head looks into its own direction, and the points of a map at growing distances.
        # Not by torch: on the meta device it would import its compiler.
        angles = [2 * math.pi * head / num_heads for head in range(num_heads)]
        limits = [max(abs(math.cos(angle)), abs(math.sin(angle))) for angle in angles]
        offsets = [
            part / limit * point
            for angle, limit in zip(angles, limits, strict=True)
            for count in num_points
            for point in range(1, count + 1)
            for part in (math.cos(angle), math.sin(angle))
        ]
        with torch.no_grad():
            self.sampling_offsets.bias.copy_(torch.tensor(offsets))
        fractions = torch.tensor([1 / count for count in num_points for _ in range(count)])
        self.register_buffer("point_scale", fractions[:, None], persistent=False)

    point_scale: Tensor

    def forward(self, queries: Tensor, reference: Tensor, value: Tensor, grids: Sequence[GridSize]) -> Tensor:
        """queries: [B, Q, channels]; reference: boxes [B, Q, 4], center and size as fractions of the image; value: [B,
        S, channels], as in `sample_levels`. Returns [B, Q, channels], at least fp32."""
        shape = (*queries.shape[:2], self.num_heads, -1)
        offsets = at_least_fp32(self.sampling_offsets(queries)).reshape(*shape, 2)
        weights = at_least_fp32(self.attention_weights(queries)).reshape(shape).softmax(-1)
        with torch.autocast(queries.device.type, enabled=False):
            center, size = reference[:, :, None, None].split(2, dim=-1)
            locations = center + offsets * self.point_scale * size * OFFSET_SCALE
        by_head = value.unflatten(2, (self.num_heads, -1))
        return sample_levels(by_head, grids, locations, weights, self.num_points)
