"""What is in a data set, in numbers: pictures, classes, sizes, places, and how canvas and anchors fit them.

`gather` makes a `Stats`, the JSON of `stoker data stats`. What is wrong with a data set is `check.py`'s; canvas and
anchors are judged by `anchor_fit.py`; text and drawing of this are `report/data_stats.py` and `report/data_plot.py`.
Sizes come from the annotations, where those are silent from the pictures' headers.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
from numpy.typing import NDArray

from stoker.data.anchor_fit import (
    Anchors,
    Floats,
    Sides,
    best_canvas,
    best_iou,
    box_sides,
    recommend,
)
from stoker.data.formats.image_sizes import REMOTE_THREADS
from stoker.data.images import source as places
from stoker.data.images.headers import header_of, read_header
from stoker.data.index import Index
from stoker.errors import DataError

SMALL, LARGE = 32, 96
"""COCO's limits of small, medium and large objects: the root of their area in pixels (cocodataset.org, evaluation)."""
BANDS = ("small", "medium", "large")
GRID = 32
"""Cells of the map of places along each side of the picture."""
IOUS = (0.5, 0.4)
"""RetinaNet's: an anchor from 0.5 is matched, below 0.4 it is background (arXiv 1708.02002, section 4)."""
MOST_SIZES = 12
"""Sizes of pictures that are listed."""


class Distribution(msgspec.Struct, kw_only=True):
    """A histogram with its landmarks; every number is absent where nothing was counted."""

    count: int
    least: float | None
    p10: float | None
    median: float | None
    p90: float | None
    most: float | None
    mean: float | None
    edges: list[float]
    """n + 1, ascending; the first and the last bin also hold what lies beyond."""
    counts: list[int]
    """n."""


class SplitStats(msgspec.Struct, kw_only=True):
    split: str
    pictures: int
    without_boxes: int
    boxes: int
    """Crowd boxes apart."""
    crowd: int


class ClassStats(msgspec.Struct, kw_only=True):
    name: str
    boxes: int
    share: float
    """Of all boxes, 0 … 1."""
    pictures: int
    """That have at least one."""
    by_split: dict[str, int]


class SizeCount(msgspec.Struct, kw_only=True):
    height: int
    width: int
    pictures: int


class Coverage(msgspec.Struct, kw_only=True):
    """How well anchors fit: shares of boxes, 0 … 1, whose best IoU with a shape laid on their centre is at least so."""

    what: str
    """Whose anchors."""
    why: str
    sizes: list[float]
    scales: list[float]
    ratios: list[float]
    all: dict[str, float]
    """By IoU, "0.5" and "0.4"."""
    by_size: dict[str, dict[str, float]]
    """The same by size on the canvas, small, medium, large; only those that there are."""


class Stats(msgspec.Struct, kw_only=True):
    """The numbers of a data set, or of one split."""

    data: str
    format: str
    splits: list[SplitStats]
    classes: list[ClassStats]
    """In the data set's order."""
    picture_sizes: list[SizeCount]
    """The most common ones, the most common first."""
    sizes_in_all: int
    """How many different ones there are."""
    sizes_unknown: int
    """Pictures whose size is neither in the annotations nor to be read."""
    picture_sides: Distribution
    """Root of the area of the pictures, pixels."""
    boxes_per_picture: Distribution
    box_sides: Distribution
    """Root of the area of the boxes, pixels of the picture."""
    box_sides_on_canvas: Distribution
    by_size: dict[str, float]
    """Shares of the boxes that are small, medium, large in the picture, by COCO's limits."""
    by_size_on_canvas: dict[str, float]
    aspects: Distribution
    """Height over width of the boxes."""
    places: list[list[float]]
    """[GRID][GRID], rows from the top: the share of the boxes that cover this part of their picture."""
    resize: str
    canvas: tuple[int, int]
    """Height and width."""
    canvas_why: str
    anchors: list[Coverage]
    """The model's own first, then the recommended ones where they differ."""
    anchors_note: str
    flags: str
    """What to give `stoker train`; empty where nothing is to be changed."""


def gather(
    index: Index,
    *,
    data: str,
    split: str | None = None,
    canvas: tuple[int, int] | None = None,
    side: int,
    resize: str = "letterbox",
    anchors: Anchors,
    model: str,
) -> Stats:
    """The numbers of an index, or of one of its splits.

    canvas: height and width; default: the best one of about `side`². anchors: those of `model`, which names them.
    Raises DataError when there is no such split.
    """
    splits = index.splits if split is None else (split,)
    rows = np.concatenate([index.rows(name) for name in splits])
    sizes = _sizes(index, rows)
    known = sizes[rows][(sizes[rows] > 0).all(1)]
    asked = canvas is not None
    # As a training chooses it: from the pictures that it trains on.
    trained = index.rows("train") if "train" in splits else rows
    canvas, why = (canvas, "asked for") if canvas is not None else best_canvas(sizes[trained], side)
    sides = box_sides(index, rows, canvas, resize, sizes)
    roots, canvas_roots = np.sqrt(sides.original.prod(1)), np.sqrt(sides.canvas.prod(1))
    counts = np.diff(index.offsets)[rows]
    kinds, pictures = np.unique(known, axis=0, return_counts=True)
    order = np.argsort(-pictures, kind="stable")[:MOST_SIZES]
    usable = (sides.original > 0).all(1)
    best, best_why = recommend(sides.canvas, canvas, anchors, iou=IOUS[0])
    judged = [_coverage(f"{model}'s own", "its paper's", anchors, sides.canvas, canvas_roots)]
    if best != anchors:
        judged.append(_coverage("recommended", best_why, best, sides.canvas, canvas_roots))
    return Stats(
        data=data,
        format=index.format,
        splits=[_split(index, name) for name in splits],
        classes=_classes(index, splits),
        picture_sizes=[
            SizeCount(height=int(kinds[n, 0]), width=int(kinds[n, 1]), pictures=int(pictures[n])) for n in order
        ],
        sizes_in_all=len(kinds),
        sizes_unknown=len(rows) - len(known),
        picture_sides=_distribution(np.sqrt(known.astype(np.float64).prod(1)), _octaves(32, 8192, 4)),
        boxes_per_picture=_distribution(counts.astype(np.float64), _counting(counts)),
        box_sides=_distribution(roots, _octaves(2, 2048, 4)),
        box_sides_on_canvas=_distribution(canvas_roots, _octaves(2, 2048, 4)),
        by_size=_bands(roots),
        by_size_on_canvas=_bands(canvas_roots),
        # Squares in the middle of a bin.
        aspects=_distribution(sides.original[usable, 1] / sides.original[usable, 0], _octaves(2**-4.125, 2**4.125, 4)),
        places=_places(index, sides, sizes),
        resize=resize,
        canvas=canvas,
        canvas_why=why,
        anchors=judged,
        anchors_note="an anchor is laid on the centre of each box; on a model's grid it is up to half a stride away",
        flags=_flags(canvas if asked or sizes is not index.size else None, best if best != anchors else None, anchors),
    )


def _sizes(index: Index, rows: NDArray[np.int64]) -> NDArray[np.int32]:
    """int32 [R, 2], height and width as shown; read from the pictures where the annotations are silent."""
    silent = rows[(index.size[rows] <= 0).any(1)].tolist()
    if not silent:
        return index.size
    sizes = np.array(index.size)

    def look(row: int) -> tuple[int, int]:
        try:
            if index.span(row) is None:
                return read_header(index.path(row)).size
            return header_of(index.read(row), index.path(row)).size
        except (DataError, OSError):  # counted as unknown; `data check` says what is wrong
            return 0, 0

    threads = 8 if places.address_of(index.root) is None else REMOTE_THREADS  # they wait, mostly
    with ThreadPoolExecutor(threads, "stoker-stats") as pool:
        for row, size in zip(silent, pool.map(look, silent), strict=True):
            sizes[row] = size
    return sizes


def _split(index: Index, name: str) -> SplitStats:
    rows = index.rows(name)
    box = _boxes_of(index, rows)
    crowd = int(index.crowd[box].sum())
    return SplitStats(
        split=name,
        pictures=len(rows),
        without_boxes=int((np.diff(index.offsets)[rows] == 0).sum()),
        boxes=len(box) - crowd,
        crowd=crowd,
    )


def _classes(index: Index, splits: Sequence[str]) -> list[ClassStats]:
    number = len(index.class_names)
    boxes, pictures = np.zeros((len(splits), number), np.int64), np.zeros(number, np.int64)
    row_of_box = np.repeat(np.arange(len(index)), np.diff(index.offsets))
    for n, name in enumerate(splits):
        box = _boxes_of(index, index.rows(name))
        box = box[~index.crowd[box]]
        boxes[n] = np.bincount(index.labels[box], minlength=number)
        pairs = np.unique(row_of_box[box] * number + index.labels[box])
        pictures += np.bincount(pairs % number, minlength=number)
    total = max(1, int(boxes.sum()))
    return [
        ClassStats(
            name=name,
            boxes=int(boxes[:, label].sum()),
            share=float(boxes[:, label].sum() / total),
            pictures=int(pictures[label]),
            by_split={split: int(boxes[n, label]) for n, split in enumerate(splits)},
        )
        for label, name in enumerate(index.class_names)
    ]


def _boxes_of(index: Index, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    chosen = np.zeros(len(index), np.bool_)
    chosen[rows] = True
    return np.flatnonzero(np.repeat(chosen, np.diff(index.offsets)))


def _distribution(values: Floats, edges: Floats) -> Distribution:
    """Bins at both ends without a count are left out."""
    counts = np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0]
    filled = np.flatnonzero(counts)
    first, last = (int(filled[0]), int(filled[-1])) if filled.size else (0, -1)
    marks = [float(x) for x in np.percentile(values, [0, 10, 50, 90, 100])] if values.size else [None] * 5
    return Distribution(
        count=values.size,
        least=marks[0],
        p10=marks[1],
        median=marks[2],
        p90=marks[3],
        most=marks[4],
        mean=float(values.mean()) if values.size else None,
        edges=[float(edge) for edge in edges[first : last + 2]],
        counts=[int(count) for count in counts[first : last + 1]],
    )


def _octaves(low: float, high: float, steps: int) -> Floats:
    """Edges from low to high, `steps` to each doubling."""
    return low * 2.0 ** (np.arange(round(np.log2(high / low)) * steps + 1) / steps)


def _counting(counts: NDArray[np.int64]) -> Floats:
    """Edges of about 30 bins of one whole width from 0 to the 99th percentile; the last one holds what lies beyond."""
    top = int(np.percentile(counts, 99)) + 1 if counts.size else 1
    width = max(1, -(-top // 30))
    edges: Floats = np.arange(0, top + 1 + width, width).astype(np.float64) - 0.5
    return edges


def _bands(roots: Floats) -> dict[str, float]:
    found = np.bincount(np.digitize(roots, (SMALL, LARGE)), minlength=3) / max(1, len(roots))
    return dict(zip(BANDS, found.tolist(), strict=True))


def _places(index: Index, sides: Sides, sizes: NDArray[np.int32]) -> list[list[float]]:
    """Each box adds one to the cells that it covers: as four corners, summed up along both axes afterwards."""
    height, width = sizes[sides.row].T.astype(np.float64)
    corners = index.boxes[sides.box].astype(np.float64) / np.stack([width, height] * 2, 1) * GRID
    x0, y0 = np.clip(np.floor(corners[:, :2]), 0, GRID - 1).astype(np.int64).T
    x1, y1 = np.clip(np.ceil(corners[:, 2:]), 1, GRID).astype(np.int64).T
    change = np.zeros((GRID + 1, GRID + 1), np.int64)
    for y, x, sign in ((y0, x0, 1), (y0, x1, -1), (y1, x0, -1), (y1, x1, 1)):
        np.add.at(change, (y, x), sign)
    covered = change.cumsum(0).cumsum(1)[:GRID, :GRID] / max(1, len(sides.box))
    found: list[list[float]] = covered.tolist()
    return found


def _coverage(what: str, why: str, anchors: Anchors, sides: Floats, roots: Floats) -> Coverage:
    reached = best_iou(sides, anchors.shapes())
    band = np.digitize(roots, (SMALL, LARGE))

    def shares(some: Floats) -> dict[str, float]:
        return {f"{iou:g}": float((some >= iou).mean()) for iou in IOUS} if some.size else {}

    return Coverage(
        what=what,
        why=why,
        sizes=list(anchors.sizes),
        scales=list(anchors.scales),
        ratios=list(anchors.ratios),
        all=shares(reached),
        by_size={name: found for n, name in enumerate(BANDS) if (found := shares(reached[band == n]))},
    )


def _flags(canvas: tuple[int, int] | None, best: Anchors | None, default: Anchors) -> str:
    """Only what a training would not choose by itself: another canvas, or one whose pictures had to be looked at."""
    parts = [] if canvas is None else [f"--canvas {canvas[0]} {canvas[1]}"]
    if best is not None:
        parts.append("--anchor-sizes " + " ".join(f"{size:g}" for size in best.sizes))
        if best.ratios != default.ratios:
            parts.append("--anchor-ratios " + " ".join(f"{ratio:g}" for ratio in best.ratios))
    return " ".join(parts)
