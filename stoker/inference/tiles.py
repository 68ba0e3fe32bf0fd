"""Tiled prediction on large images: positions of the tiles, and merging of their detections.

An object of 20 pixels in an image of 4,000 has 3 pixels in a model input of 640, too few to be detected. So the image
is also processed in overlapping tiles, which contain every object smaller than the overlap completely at least once.
The whole image has the larger objects. `merge_detections` removes duplicates. `predict.py` runs the model. The idea is
SAHI's (arXiv 2202.06934).
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError

Region = tuple[int, int, int, int]
"""x0, y0, x1, y1 in pixels of the image; x1 and y1 are exclusive."""

TILE_OVERLAP = 0.2
"""Default overlap of neighboring tiles as a fraction of their side: SAHI's default."""
EDGE_MARGIN = 0.01
"""A box this near to a tile's inner edge, as a fraction of the tile's side, counts as cut off: detected boxes end a few
pixels off. An object that ends there by chance is complete in the next tile."""
MERGE_IOU = 0.7
"""IoU above which boxes from several tiles are one object, for a model without NMS."""
MIN_COVERED_FRACTION = 0.5
"""A cut-off box is removed if another box of its class covers this fraction of its area (SAHI's default)."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """`--tile` and `--tile-overlap`. Raises ConfigError for a number out of range."""

    side: int
    """Height and width of a tile in pixels of the image."""
    overlap: float = TILE_OVERLAP
    """Minimum overlap of neighboring tiles as a fraction of the side."""

    def __post_init__(self) -> None:
        if self.side < 32:
            raise ConfigError(f"--tile {self.side} is out of range.", choices=["32 or more, in pixels of the image"])
        if not 0 <= self.overlap <= 0.9:
            raise ConfigError(f"--tile-overlap {self.overlap} is out of range.", choices=["0 … 0.9"])

    def regions(self, size: tuple[int, int]) -> list[Region]:
        """The tiles of an image of `size` (height, width), row by row; none if the image fits in one tile.

        They cover the image, lie inside, and have equal sizes (the image's own along an axis shorter than the tile).
        Neighbors overlap by at least `overlap`, and by more rather than having a smaller tile at the edge.
        """
        if max(size) <= self.side:
            return []
        (ys, height), (xs, width) = self._tile_starts(size[0]), self._tile_starts(size[1])
        return [(x, y, x + width, y + height) for y in ys for x in xs]

    def _tile_starts(self, length: int) -> tuple[list[int], int]:
        """(start positions of the tiles along one axis, their length)."""
        if length <= self.side:
            return [0], length
        step = max(1, int(self.side * (1 - self.overlap)))
        last = length - self.side
        count = -(-last // step)
        return [n * last // count for n in range(count + 1)], self.side


def is_cut(boxes: NDArray[np.float32], region: Region, size: tuple[int, int]) -> NDArray[np.bool_]:
    """[N]: which of `boxes` [N, 4], detected in a `region` of an image of `size` (height, width), touch an inner edge.

    An inner edge is one that is not an edge of the image. Boxes are in pixels of the image.
    """
    x0, y0, x1, y1 = region
    near_x, near_y = EDGE_MARGIN * (x1 - x0), EDGE_MARGIN * (y1 - y0)
    edges = (
        (boxes[:, 0] <= x0 + near_x, x0 > 0),
        (boxes[:, 1] <= y0 + near_y, y0 > 0),
        (boxes[:, 2] >= x1 - near_x, x1 < size[1]),
        (boxes[:, 3] >= y1 - near_y, y1 < size[0]),
    )
    touches: NDArray[np.bool_] = np.any([near_edge & inner for near_edge, inner in edges], axis=0)
    return touches


def merge_detections(
    boxes: NDArray[np.float32],
    scores: NDArray[np.float32],
    labels: NDArray[np.int64],
    is_cut_off: NDArray[np.bool_],
    *,
    iou_threshold: float,
) -> NDArray[np.int64]:
    """Indices of the boxes of an image that are kept, best score first; boxes: [N, 4]; is_cut_off: [N], see `is_cut`.

    Within each class, complete boxes are ranked before cut-off ones, then by score. A kept box removes lower-ranked
    boxes with an IoU above `iou_threshold`, and cut-off boxes of which it covers more than MIN_COVERED_FRACTION: a part
    of an object may have a higher score than the whole object.
    """
    keep: list[int] = []
    for label in np.unique(labels):
        class_indices = np.flatnonzero(labels == label)
        class_indices = class_indices[np.lexsort((-scores[class_indices], is_cut_off[class_indices]))]
        xyxy, is_cut_box = boxes[class_indices].astype(np.float64), is_cut_off[class_indices]
        areas = (xyxy[:, 2] - xyxy[:, 0]) * (xyxy[:, 3] - xyxy[:, 1])
        # Only boxes with common columns can overlap: 20,000 boxes take 0.3 s instead of 12 s.
        by_left = np.argsort(xyxy[:, 0])
        lefts, widest = xyxy[by_left, 0], (xyxy[:, 2] - xyxy[:, 0]).max()
        first = np.searchsorted(lefts, xyxy[:, 0] - widest, "left").tolist()
        last = np.searchsorted(lefts, xyxy[:, 2], "right").tolist()
        is_alive = np.ones(len(class_indices), bool)
        for n in range(len(class_indices)):
            if not is_alive[n]:
                continue
            keep.append(int(class_indices[n]))
            neighbors = by_left[first[n] : last[n]]
            rest = neighbors[(neighbors > n) & is_alive[neighbors]]
            intersection = (
                (np.minimum(xyxy[n, 2:], xyxy[rest, 2:]) - np.maximum(xyxy[n, :2], xyxy[rest, :2]))
                .clip(min=0)
                .prod(axis=1)
            )
            is_duplicate = intersection > iou_threshold * (areas[n] + areas[rest] - intersection)
            is_covered = is_cut_box[rest] & (intersection > MIN_COVERED_FRACTION * areas[rest])
            is_alive[rest[is_duplicate | is_covered]] = False
    order = np.array(keep, np.int64)
    return order[np.argsort(-scores[order], kind="stable")]
