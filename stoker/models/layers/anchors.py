"""Anchors of an input size, computed on the device once and then cached: computing them takes dozens of kernels.

The anchors of one position are from `boxes.cell_anchors`, or SSD's own; `matching.py` assigns boxes to anchors.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from stoker.models.layers.boxes import grid_anchors

GridSize = tuple[int, int]
"""Height and width of a feature map."""


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
        """All anchors of an input size (height, width) with feature maps `grids`: float32 [A, 4], by map, then by
        row."""
        first_base = self._base_anchors(0)
        key = (image_size, first_base.device, first_base.dtype)
        if key not in self._cache:
            with torch.inference_mode(False):  # a tensor made in inference mode cannot be saved for backward later
                levels = [self.level_anchors(n, image_size, grid) for n, grid in enumerate(grids)]
                self._cache[key] = torch.cat(levels)
        return self._cache[key]

    def num_anchors_per_level(self, grids: list[GridSize]) -> tuple[int, ...]:
        """Number of anchors of each map."""
        return tuple(height * width * self._base_anchors(n).shape[0] for n, (height, width) in enumerate(grids))

    def level_anchors(self, level: int, image_size: tuple[int, int], grid: GridSize) -> Tensor:
        """The anchors of one map, [height · width · n, 4]; here the first position is the input's corner."""
        return grid_anchors(self._base_anchors(level), grid, (image_size[0] // grid[0], image_size[1] // grid[1]))

    def _base_anchors(self, level: int) -> Tensor:
        return self.get_buffer(f"cells_{level}")
