"""The anchors of a canvas: made on the device once, then kept, since their making would be dozens of kernels a step.

How one place's anchors look is `boxes.cell_anchors`, or SSD's own; what belongs to an anchor is `matching.py`.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from stoker.models.layers.boxes import grid_anchors

Grid = tuple[int, int]
"""Height and width of a map, in places."""


class Anchors(nn.Module):
    """Anchors of maps whose places lie at the multiples of a stride.

    cells: of each map, finest first, the anchors of a place as `level` wants them, here [n, 4].
    """

    def __init__(self, cells: Iterable[Tensor]) -> None:
        super().__init__()
        for level, some in enumerate(cells):
            self.register_buffer(f"cells_{level}", some, persistent=False)
        self._made: dict[tuple[tuple[int, int], torch.device, torch.dtype], Tensor] = {}

    def forward(self, canvas: tuple[int, int], grids: list[Grid]) -> Tensor:
        """All anchors of a canvas (height, width), whose maps are `grids`: float32 [A, 4], map by map, row by row."""
        first = self._cells(0)
        key = (canvas, first.device, first.dtype)
        if key not in self._made:
            with torch.inference_mode(False):  # a tensor of inference mode could not be saved for backward later
                levels = [self.level(n, canvas, grid) for n, grid in enumerate(grids)]
                self._made[key] = torch.cat(levels)
        return self._made[key]

    def counts(self, grids: list[Grid]) -> tuple[int, ...]:
        """How many of the anchors each map has."""
        return tuple(height * width * self._cells(n).shape[0] for n, (height, width) in enumerate(grids))

    def level(self, level: int, canvas: tuple[int, int], grid: Grid) -> Tensor:
        """The anchors of one map, [height · width · n, 4]; here the first place is at the canvas's corner."""
        return grid_anchors(self._cells(level), grid, (canvas[0] // grid[0], canvas[1] // grid[1]))

    def _cells(self, level: int) -> Tensor:
        return self.get_buffer(f"cells_{level}")
