"""Statistics of a data set: images, classes, sizes, box positions, and how well image size and anchors fit.

`compute_stats` returns a `DatasetStats`, the JSON of `stoker data stats`. Image sizes come from the annotations, else
from the image headers. Not here: problems of a data set (`check.py`), the choice of image size and anchors
(`anchor_fit.py`), text (`report/dataset.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stoker.data.anchor_fit import (
    AnchorConfig,
    BoxDimensions,
    FloatArray,
    best_image_size,
    best_iou,
    box_dimensions,
    recommend_anchors,
)
from stoker.data.formats.images import read_sizes
from stoker.data.index import Index, boxes_of
from stoker.data.validation.suggestions import Suggestion, suggest

SMALL, LARGE = 32, 96
"""COCO's limits of small, medium and large objects: square root of the area in pixels (cocodataset.org, evaluation)."""
AREA_RANGES = ("small", "medium", "large")
GRID_SIZE = 32
"""Cells of the box heatmap along each side of the image."""
IOU_THRESHOLDS = (0.5, 0.4)
"""RetinaNet's: an anchor with an IoU of at least 0.5 is matched, below 0.4 it is background (arXiv 1708.02002, 4)."""
MAX_SIZES = 12
"""Image sizes that are listed."""


class Distribution(msgspec.Struct, kw_only=True):
    """A histogram and percentiles; None when nothing was counted."""

    count: int
    min: float | None
    p10: float | None
    median: float | None
    p90: float | None
    max: float | None
    mean: float | None
    edges: list[float]
    """n + 1, ascending; the first and the last bin include values outside of the edges."""
    counts: list[int]


class SplitStats(msgspec.Struct, kw_only=True):
    split: str
    num_images: int
    num_images_without_boxes: int
    num_boxes: int
    """Without crowd boxes."""
    num_crowd_boxes: int


class ClassCounts(msgspec.Struct, kw_only=True):
    name: str
    num_boxes: int
    box_fraction: float
    """Fraction of all boxes, 0 … 1."""
    num_images: int
    """Images that have at least one."""
    by_split: dict[str, int]


class ImageSizeCount(msgspec.Struct, kw_only=True):
    height: int
    width: int
    num_images: int


class AnchorCoverage(msgspec.Struct, kw_only=True):
    """How well anchors fit: the fraction of boxes whose best IoU with an anchor shape centered on them is at least the
    threshold."""

    name: str
    """"recommended", or the model of which they are the default."""
    reason: str
    sizes: list[float]
    scales: list[float]
    ratios: list[float]
    all: dict[str, float]
    """Fraction by IoU threshold, "0.5" and "0.4"."""
    by_size: dict[str, dict[str, float]]
    """The same by size in the model input: small, medium, large; only sizes that occur."""


class DatasetStats(msgspec.Struct, kw_only=True):
    """Statistics of a data set, or of one split."""

    data: str
    format: str
    splits: list[SplitStats]
    classes: list[ClassCounts]
    image_sizes: list[ImageSizeCount]
    """The most common ones, the most common first."""
    num_image_sizes: int
    num_unknown_sizes: int
    """Images whose size is neither in the annotations nor in a readable header."""
    sqrt_image_area: Distribution
    """Square root of the image area, pixels."""
    boxes_per_image: Distribution
    sqrt_box_area: Distribution
    """Square root of the box area, pixels of the image."""
    sqrt_box_area_resized: Distribution
    """The same in pixels of the model input."""
    fraction_by_area: dict[str, float]
    """Fractions of the boxes that are small, medium, large in the image, by COCO's limits."""
    fraction_by_area_resized: dict[str, float]
    aspect_ratios: Distribution
    """Height over width of the boxes."""
    box_heatmap: list[list[float]]
    """[GRID_SIZE][GRID_SIZE], rows from the top: the fraction of the boxes that cover this part of their image."""
    resize: str
    image_size: tuple[int, int]
    """Height and width."""
    image_size_reason: str
    model: str
    anchors: list[AnchorCoverage]
    """The model's default first, then the recommended anchors if they differ; empty for a model without anchors."""
    anchors_note: str
    flags: str
    """Recommended flags of `stoker train`; empty when the defaults are best."""
    suggestions: list[Suggestion] = []
    """What `stoker tune --allow accuracy` can try."""
    refusals: tuple[str, ...] = ()
    """Reasons why training would refuse the data set; empty: it would not."""


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """The model whose input the boxes are compared with, as training would derive it."""

    model: str
    anchors: AnchorConfig | None
    """None: it has no anchors, or their shapes differ between levels."""
    image_size: tuple[int, int]
    """Height and width."""
    image_size_reason: str
    resize: str = "letterbox"
    side: int
    """With image sizes that only the image files tell, the input has at most about side² pixels."""
    multiple: int = 32
    """Its sides are multiples of this."""
    set_flags: tuple[str, ...] = ()
    """Flags of `stoker train` for what the user set."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Those of the model and its input, by name, for suggestions; empty: none are made."""
    latency_ms: Callable[[tuple[int, int]], float] | None = None
    """Measures one prediction at an image size."""
    max_latency_ms: float | None = None


def compute_stats(index: Index, model_input: ModelInput, *, data: str, split: str | None = None) -> DatasetStats:
    """Returns the statistics of an index, or of one of its splits. Raises DataError when there is no such split."""
    splits = index.splits if split is None else (split,)
    image_indices = np.concatenate([index.image_indices(name) for name in splits])
    sizes = _original_sizes(index, image_indices)
    known_sizes = sizes[image_indices][(sizes[image_indices] > 0).all(1)]
    image_size, image_size_reason = model_input.image_size, model_input.image_size_reason
    flags = list(model_input.set_flags)
    is_set = any(flag.startswith("--image-size") for flag in flags)
    if sizes is not index.original_size and not is_set:
        # training does not read the images first; it chooses from the training images too
        train_indices = index.image_indices("train") if "train" in splits else image_indices
        image_size, image_size_reason = best_image_size(sizes[train_indices], model_input.side, model_input.multiple)
        flags.append(f"--image-size {image_size[0]} {image_size[1]}")
    resize, anchors = model_input.resize, model_input.anchors
    dims = box_dimensions(index, image_indices, image_size, resize, sizes)
    sqrt_areas, resized_sqrt_areas = np.sqrt(dims.original_wh.prod(1)), np.sqrt(dims.resized_wh.prod(1))
    boxes_per_image = np.diff(index.offsets)[image_indices]
    unique_sizes, size_counts = np.unique(known_sizes, axis=0, return_counts=True)
    order = np.argsort(-size_counts, kind="stable")[:MAX_SIZES]
    has_area = (dims.original_wh > 0).all(1)
    coverages = []
    if anchors is not None:
        name = f"{model_input.model}'s default"
        coverages.append(_anchor_coverage(name, "as training takes them", anchors, dims.resized_wh, resized_sqrt_areas))
        best, best_reason = recommend_anchors(dims.resized_wh, image_size, anchors, iou_threshold=IOU_THRESHOLDS[0])
        if best != anchors:
            coverages.append(_anchor_coverage("recommended", best_reason, best, dims.resized_wh, resized_sqrt_areas))
            flags.append("--anchor-sizes " + " ".join(f"{size:g}" for size in best.sizes))
            if best.ratios != anchors.ratios:
                flags.append("--aspect-ratios " + " ".join(f"{ratio:g}" for ratio in best.ratios))
    return DatasetStats(
        data=data,
        format=index.format,
        splits=[_split_stats(index, name) for name in splits],
        classes=_class_stats(index, splits),
        image_sizes=[
            ImageSizeCount(height=height, width=width, num_images=count)
            for (height, width), count in zip(unique_sizes[order].tolist(), size_counts[order].tolist(), strict=True)
        ],
        num_image_sizes=len(unique_sizes),
        num_unknown_sizes=len(image_indices) - len(known_sizes),
        sqrt_image_area=_make_distribution(np.sqrt(known_sizes.astype(np.float64).prod(1)), _log_bins(32, 8192)),
        boxes_per_image=_make_distribution(boxes_per_image.astype(np.float64), _count_bins(boxes_per_image)),
        sqrt_box_area=_make_distribution(sqrt_areas, _log_bins(2, 2048)),
        sqrt_box_area_resized=_make_distribution(resized_sqrt_areas, _log_bins(2, 2048)),
        fraction_by_area=_fraction_by_area(sqrt_areas),
        fraction_by_area_resized=_fraction_by_area(resized_sqrt_areas),
        # Squares are in the middle of a bin.
        aspect_ratios=_make_distribution(
            dims.original_wh[has_area, 1] / dims.original_wh[has_area, 0], _log_bins(2**-4.125, 2**4.125)
        ),
        box_heatmap=_box_heatmap(index, dims, sizes),
        resize=resize,
        image_size=image_size,
        image_size_reason=image_size_reason,
        model=model_input.model,
        anchors=coverages,
        anchors_note="an anchor is centered on each box; on a model's grid it is up to half a stride away"
        if coverages
        else f"{model_input.model} has no anchors that can be compared with the boxes",
        flags=" ".join(flags),
        suggestions=suggest(
            index, {**model_input.settings, "image_size": image_size, "resize": resize}, multiple=model_input.multiple,
            latency_ms=model_input.latency_ms, max_latency_ms=model_input.max_latency_ms,
        ) if model_input.settings else [],
    )  # fmt: skip


def _original_sizes(index: Index, image_indices: NDArray[np.int64]) -> NDArray[np.int32]:
    """Returns int32 [R, 2], height and width as displayed; read from the image headers where the annotations have none,
    0 where these cannot be read: `data check` reports the problem."""
    unknown = image_indices[(index.original_size[image_indices] <= 0).any(1)]
    if not len(unknown):
        return index.original_size
    sizes = np.array(index.original_size)
    sizes[unknown] = read_sizes([index.path(image_index) for image_index in unknown.tolist()])[0]
    return sizes


def _split_stats(index: Index, name: str) -> SplitStats:
    image_indices = index.image_indices(name)
    box_index, _ = boxes_of(index, image_indices)
    crowd = int(index.crowd[box_index].sum())
    return SplitStats(
        split=name,
        num_images=len(image_indices),
        num_images_without_boxes=int((np.diff(index.offsets)[image_indices] == 0).sum()),
        num_boxes=len(box_index) - crowd,
        num_crowd_boxes=crowd,
    )


def _class_stats(index: Index, splits: Sequence[str]) -> list[ClassCounts]:
    num_classes = len(index.class_names)
    box_counts, image_counts = np.zeros((len(splits), num_classes), np.int64), np.zeros(num_classes, np.int64)
    for n, name in enumerate(splits):
        box_index, place = boxes_of(index, index.image_indices(name))
        is_counted = ~index.crowd[box_index]
        labels = index.labels[box_index[is_counted]]
        box_counts[n] = np.bincount(labels, minlength=num_classes)
        image_class_pairs = np.unique(place[is_counted] * num_classes + labels)
        image_counts += np.bincount(image_class_pairs % num_classes, minlength=num_classes)
    total = max(1, int(box_counts.sum()))
    return [
        ClassCounts(
            name=name,
            num_boxes=int(box_counts[:, label].sum()),
            box_fraction=float(box_counts[:, label].sum() / total),
            num_images=int(image_counts[label]),
            by_split={split: int(box_counts[n, label]) for n, split in enumerate(splits)},
        )
        for label, name in enumerate(index.class_names)
    ]


def _make_distribution(values: FloatArray, edges: FloatArray) -> Distribution:
    """Leaves out empty bins at both ends."""
    counts = np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0]
    nonempty = np.flatnonzero(counts)
    first, last = (int(nonempty[0]), int(nonempty[-1])) if nonempty.size else (0, -1)
    percentiles = np.percentile(values, [0, 10, 50, 90, 100]).tolist() if values.size else [None] * 5
    return Distribution(
        **dict(zip(("min", "p10", "median", "p90", "max"), percentiles, strict=True)),
        count=values.size,
        mean=float(values.mean()) if values.size else None,
        edges=[float(edge) for edge in edges[first : last + 2]],
        counts=[int(count) for count in counts[first : last + 1]],
    )


def _log_bins(low: float, high: float) -> FloatArray:
    """Returns edges from low to high, four bins per factor of two."""
    return low * 2.0 ** (np.arange(round(np.log2(high / low)) * 4 + 1) / 4)


def _count_bins(counts: NDArray[np.int64]) -> FloatArray:
    """Edges of about 30 bins of one integer width from 0 to the 99th percentile; the last bin has the larger ones."""
    upper = int(np.percentile(counts, 99)) + 1 if counts.size else 1
    width = max(1, -(-upper // 30))
    edges: FloatArray = np.arange(0, upper + 1 + width, width).astype(np.float64) - 0.5
    return edges


def _fraction_by_area(sqrt_areas: FloatArray) -> dict[str, float]:
    fractions = np.bincount(np.digitize(sqrt_areas, (SMALL, LARGE)), minlength=3) / max(1, len(sqrt_areas))
    return dict(zip(AREA_RANGES, fractions.tolist(), strict=True))


def _box_heatmap(index: Index, dims: BoxDimensions, sizes: NDArray[np.int32]) -> list[list[float]]:
    """The fraction of boxes that cover each cell: adds ±1 at the corners of each box, then sums along both axes."""
    height, width = sizes[dims.image_index].T.astype(np.float64)
    grid_xyxy = index.boxes[dims.box_index].astype(np.float64) / np.stack([width, height] * 2, 1) * GRID_SIZE
    x0, y0 = np.clip(np.floor(grid_xyxy[:, :2]), 0, GRID_SIZE - 1).astype(np.int64).T
    x1, y1 = np.clip(np.ceil(grid_xyxy[:, 2:]), 1, GRID_SIZE).astype(np.int64).T
    deltas = np.zeros((GRID_SIZE + 1, GRID_SIZE + 1), np.int64)
    for y, x, sign in ((y0, x0, 1), (y0, x1, -1), (y1, x0, -1), (y1, x1, 1)):
        np.add.at(deltas, (y, x), sign)
    covered = deltas.cumsum(0).cumsum(1)[:GRID_SIZE, :GRID_SIZE] / max(1, len(dims.box_index))
    heatmap: list[list[float]] = covered.tolist()
    return heatmap


def _anchor_coverage(
    anchors_name: str, reason: str, anchors: AnchorConfig, box_wh: FloatArray, sqrt_areas: FloatArray
) -> AnchorCoverage:
    max_ious = best_iou(box_wh, anchors.anchor_wh())
    area_range = np.digitize(sqrt_areas, (SMALL, LARGE))

    def fraction_by_iou(ious: FloatArray) -> dict[str, float]:
        return {f"{iou:g}": float((ious >= iou).mean()) for iou in IOU_THRESHOLDS} if ious.size else {}

    return AnchorCoverage(
        name=anchors_name,
        reason=reason,
        sizes=list(anchors.sizes),
        scales=list(anchors.scales),
        ratios=list(anchors.ratios),
        all=fraction_by_iou(max_ious),
        by_size={
            range_name: fractions
            for n, range_name in enumerate(AREA_RANGES)
            if (fractions := fraction_by_iou(max_ious[area_range == n]))
        },
    )
