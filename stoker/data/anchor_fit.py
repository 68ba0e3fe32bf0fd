"""What shapes of pictures and boxes ask for: the canvas, the sizes of anchors, and how well anchors cover boxes.

Arithmetic on what the index says, shared by the defaults of a training (`training/defaults/derive.py`) and by `stoker
data stats` (`stats.py`). Anchors are shapes here, width and height, laid on the centre of a box: where a level's grid
puts them (half a stride away at most) is left out, so the coverage found is the most that is possible. Not here: the
anchors that a model uses (`models/layers/boxes.py`, equal in the tests), matching (`models/layers/matching.py`).
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.data.index import Index

Floats = NDArray[np.float64]

_BLOCK = 1 << 16
"""Boxes that are compared with all anchors at once: 64 MB of numbers for 45 anchors."""
_SAMPLE = 4_000
"""Boxes on which anchor sizes are tried out; a share of them is known to 1.6 points (two standard errors) at worst."""
_WORTH_IT = 0.02
"""Gain in coverage, as a share of the boxes, above which other anchor sizes are proposed."""


def best_canvas(
    sizes: NDArray[np.int32], side: int, multiple: int = 32, *, where: str = ""
) -> tuple[tuple[int, int], str]:
    """The canvas, sides multiples of `multiple` and at least 32, of at most 1.1 × side² pixels, on which letterboxed
    pictures are largest; and why.

    sizes: int32 [N, 2], height and width, 0 where unknown. where: what `side` holds for, said before it. Pictures are
    not enlarged beyond the median of their size.
    """
    known = sizes[(sizes > 0).all(1)].astype(np.float64)
    if len(known) == 0:
        square = round(side / multiple) * multiple
        return (square, square), "the sizes of the pictures are not known beforehand"
    area = float(np.median(known.prod(1)))
    least = math.ceil(32 / multiple) * multiple
    budget = min(1.1 * side**2, max(least, math.ceil(math.sqrt(area) / multiple) * multiple) ** 2)
    kinds, counts = np.unique(known, axis=0, return_counts=True)
    best, best_score = (least, least), -1.0
    for height in range(least, int(4 * side) + 1, multiple):
        for width in range(least, int(4 * side) + 1, multiple):
            if height * width > budget:
                break
            fit_scale = np.minimum(np.minimum(height / kinds[:, 0], width / kinds[:, 1]), 1.0)
            shown = kinds.prod(1) * fit_scale**2
            # The most picture; among equals the least padding.
            score = float((shown * counts).sum() / counts.sum()) - 1e-3 * height * width
            if score > best_score:
                best, best_score = (height, width), score
    common = kinds[counts.argmax()].astype(int)
    limit = f"{where}{side}² pixels" if area >= side**2 else "no more pixels than the median picture has"
    aspect = f"in the aspect of the data ({common[1]}x{common[0]} is the most common)"
    return best, f"{limit}, {aspect}, multiples of {multiple}"


class Sides(NamedTuple):
    """The boxes of some pictures as shapes; crowd boxes, and those of pictures of unknown size, are not among them."""

    box: NDArray[np.int64]
    """[K], which boxes of the index."""
    row: NDArray[np.int64]
    """[K], the picture of each."""
    original: Floats
    """[K, 2], width and height in pixels of the picture."""
    canvas: Floats
    """[K, 2], in pixels of the canvas."""


def box_sides(
    index: Index,
    rows: NDArray[np.int64],
    canvas: tuple[int, int],
    resize: str,
    sizes: NDArray[np.int32] | None = None,
) -> Sides:
    """The shapes of the boxes of some rows, on their pictures and on the canvas (height, width).

    sizes: int32 [R, 2] of all pictures, where they are known better than the index does.
    """
    counts = index.offsets[rows + 1] - index.offsets[rows]
    box = np.repeat(index.offsets[rows] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    row = np.repeat(rows, counts)
    height, width = (index.size if sizes is None else sizes)[row].T.astype(np.float64)
    use = (height > 0) & (width > 0) & ~index.crowd[box]
    box, row, height, width = box[use], row[use], height[use], width[use]
    corners = np.clip(index.boxes[box].astype(np.float64), 0, np.stack([width, height] * 2, 1))
    original = corners[:, 2:] - corners[:, :2]
    scales = np.stack([canvas[1] / width, canvas[0] / height], 1)
    if resize == "letterbox":
        scales[:] = scales.min(1, keepdims=True)
    return Sides(box, row, original, original * scales)


def spread_sizes(sides: Floats, canvas: tuple[int, int], levels: int) -> tuple[tuple[float, ...], str]:
    """One base size per level, evenly on a log scale between the 10th and the 90th percentile of the boxes' sizes; and
    why. sides: [K, 2] in pixels of the canvas; a box's size is the root of its area."""
    if len(sides) == 0:
        square = math.sqrt(canvas[0] * canvas[1])
        sizes = np.geomspace(0.1, 0.5, levels) * square
        return tuple(float(round(size)) for size in sizes), "a tenth to a half of the canvas; no box says otherwise"
    low, high = np.percentile(np.sqrt(sides.prod(1)), [10, 90])
    sizes = np.geomspace(max(4.0, low), max(8.0, high), levels)
    return tuple(float(round(size)) for size in sizes), "from the 10th to the 90th percentile of the boxes' sizes"


class Anchors(NamedTuple):
    """Shapes of anchors, as settings give them: `--anchor-sizes`, `--anchor-scales`, `--anchor-ratios`."""

    sizes: tuple[float, ...]
    """A base size per pyramid level, pixels of the canvas."""
    scales: tuple[float, ...]
    ratios: tuple[float, ...]
    """Height over width."""

    def shapes(self) -> Floats:
        """[levels · ratios · scales, 2], width and height in whole pixels, as `models.boxes.cell_anchors` has them."""
        sides = np.array([max(1, int(size * scale)) for size in self.sizes for scale in self.scales], np.float64)
        stretch = np.sqrt(np.array(self.ratios, np.float64))[:, None]
        half = np.stack([(sides / stretch).ravel(), (sides * stretch).ravel()], 1) / 2
        return 2 * np.round(half.astype(np.float32)).astype(np.float64)


def best_iou(sides: Floats, shapes: Floats) -> Floats:
    """[K], the best IoU of each box [K, 2] with any of the shapes [A, 2] laid on its centre."""
    found = np.zeros(len(sides))
    area = shapes.prod(1)
    for start in range(0, len(sides), _BLOCK):
        some = sides[start : start + _BLOCK, None, :]
        shared = np.minimum(some[..., 0], shapes[:, 0]) * np.minimum(some[..., 1], shapes[:, 1])
        union = some.prod(2) + area - shared
        found[start : start + _BLOCK] = (shared / np.maximum(union, 1e-9)).max(1, initial=0.0)
    return found


def recommend(sides: Floats, canvas: tuple[int, int], default: Anchors, *, iou: float) -> tuple[Anchors, str]:
    """The anchors that cover most boxes at `iou`, of as many levels, scales and ratios as `default` has; and why.

    Base sizes grow by one factor from level to level, as the strides do. Tried: the default, the spread of the boxes'
    sizes, all geometric rows from 4 pixels to the canvas; each with the default's ratios and with those of the boxes.
    The default is kept where nothing gains a fiftieth of the boxes: pretrained heads know it.
    """
    if len(sides) == 0:
        return default, "no box says otherwise"
    sides = sides[(sides > 0).all(1)]
    if len(sides) > _SAMPLE:
        sides = sides[np.linspace(0, len(sides) - 1, _SAMPLE).astype(np.int64)]
    levels, longest = len(default.sizes), max(canvas)
    rows = [default.sizes, spread_sizes(sides, canvas, levels)[0]]
    for factor in (2.0, 1.8, 1.6, 1.4):
        first = 4.0
        while first * factor ** (levels - 1) <= longest:
            rows.append(tuple(float(round(first * factor**level)) for level in range(levels)))
            first *= 1.15
    ratios = [default.ratios]
    if len(default.ratios) > 1:
        slants = np.exp(np.percentile(np.log(sides[:, 1] / sides[:, 0]), np.linspace(10, 90, len(default.ratios))))
        ratios.append(tuple(float(f"{ratio:.2g}") for ratio in slants))
    best, best_share = default, float((best_iou(sides, default.shapes()) >= iou).mean()) + _WORTH_IT
    for some in ratios:
        for row in rows:
            tried = Anchors(row, default.scales, some)
            share = float((best_iou(sides, tried.shapes()) >= iou).mean())
            if share > best_share:
                best, best_share = tried, share
    if best == default:
        return default, f"no other row of sizes covers {_WORTH_IT * 100:g} % of the boxes more"
    return best, (
        f"of {len(ratios) * len(rows)} rows tried, they reach an IoU of {iou:g} with most boxes;"
        " a head that was pretrained with others learns them anew"
    )
