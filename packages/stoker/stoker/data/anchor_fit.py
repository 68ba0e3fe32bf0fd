"""Image size and anchors from the sizes of images and boxes: the best image size, anchor sizes, coverage of the boxes.

Arithmetic on the index, used for the defaults of a training (`training/defaults/derive.py`) and by `stoker data stats`
(`validation/stats.py`). Anchors are shapes here, width and height, centered on a box. The offset of a level's grid
(at most half a stride) is ignored, so the coverage is an upper bound. Not here: the anchors of a model
(`models/layers/boxes.py`, a test compares them) and matching (`models/layers/matching.py`).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.data.index import Index, boxes_of

FloatArray = NDArray[np.float64]

_BOXES_PER_BLOCK = 1 << 16
"""Boxes that are compared with all anchors at once: 64 MB for 45 anchors."""
_MAX_SAMPLED_BOXES = 4_000
"""Boxes on which anchor sizes are tried; a fraction has an error of at most 1.6 points (two standard errors)."""
_MIN_GAIN = 0.02
"""Gain in coverage, as a fraction of the boxes, above which other anchor sizes are recommended."""


def best_image_size(
    sizes: NDArray[np.int32], side: int, multiple: int = 32, *, context: str = ""
) -> tuple[tuple[int, int], str]:
    """Returns (height, width) of the model input at which letterboxed images are largest, and the reason for it. At
    most 1.1 × side² pixels, and no more than the median image; both are multiples of `multiple` and at least 32.

    sizes: int32 [N, 2], height and width, 0 where unknown. context: put before `side` in the reason.
    """
    known_sizes = sizes[(sizes > 0).all(1)].astype(np.float64)
    if len(known_sizes) == 0:
        rounded_side = round(side / multiple) * multiple
        return (rounded_side, rounded_side), "the image sizes are not known beforehand"
    median_area = float(np.median(known_sizes.prod(1)))
    min_side = math.ceil(32 / multiple) * multiple
    max_pixels = min(1.1 * side**2, max(min_side, math.ceil(math.sqrt(median_area) / multiple) * multiple) ** 2)
    unique_sizes, counts = np.unique(known_sizes, axis=0, return_counts=True)
    best, best_score = (min_side, min_side), -1.0
    for height in range(min_side, int(4 * side) + 1, multiple):
        for width in range(min_side, int(4 * side) + 1, multiple):
            if height * width > max_pixels:
                break
            fit_scale = np.minimum(np.minimum(height / unique_sizes[:, 0], width / unique_sizes[:, 1]), 1.0)
            resized_pixels = unique_sizes.prod(1) * fit_scale**2
            # The largest images; among equals the least padding.
            score = float((resized_pixels * counts).sum() / counts.sum()) - 1e-3 * height * width
            if score > best_score:
                best, best_score = (height, width), score
    most_common = unique_sizes[counts.argmax()].astype(int)
    limit_text = f"{context}{side}² pixels" if median_area >= side**2 else "no more pixels than the median image"
    aspect_text = f"aspect ratio of the data ({most_common[1]}x{most_common[0]} is the most common)"
    return best, f"{limit_text}, {aspect_text}, multiples of {multiple}"


class BoxDimensions(NamedTuple):
    """The boxes of some images as shapes, without crowd boxes and boxes of images of unknown size."""

    box_index: NDArray[np.int64]
    """[K], positions in the index."""
    image_index: NDArray[np.int64]
    """[K], the image of each."""
    original_wh: FloatArray
    """[K, 2], width and height in pixels of the image."""
    resized_wh: FloatArray
    """[K, 2], in pixels of the model input."""


def box_dimensions(
    index: Index,
    image_indices: NDArray[np.int64],
    image_size: tuple[int, int],
    resize: str,
    original_sizes: NDArray[np.int32] | None = None,
) -> BoxDimensions:
    """The shapes of the boxes of some images, in the image and in a model input of `image_size` (height, width).

    original_sizes: int32 [R, 2] of all images; used instead of the index's.
    """
    box_index, place = boxes_of(index, image_indices)
    image_index = image_indices[place]
    sizes = index.original_size if original_sizes is None else original_sizes
    height, width = sizes[image_index].T.astype(np.float64)
    keep = (height > 0) & (width > 0) & ~index.crowd[box_index]
    box_index, image_index, height, width = box_index[keep], image_index[keep], height[keep], width[keep]
    xyxy = np.clip(index.boxes[box_index].astype(np.float64), 0, np.stack([width, height] * 2, 1))
    original_wh = xyxy[:, 2:] - xyxy[:, :2]
    scales = np.stack([image_size[1] / width, image_size[0] / height], 1)
    if resize == "letterbox":
        scales[:] = scales.min(1, keepdims=True)
    return BoxDimensions(box_index, image_index, original_wh, original_wh * scales)


def percentile_anchor_sizes(
    box_wh: FloatArray, image_size: tuple[int, int], num_levels: int
) -> tuple[tuple[float, ...], str]:
    """One base size per level, evenly spaced on a log scale between the 10th and the 90th percentile of the box sizes
    (square root of the area); and the reason. box_wh: [K, 2] in pixels of the model input."""
    if len(box_wh) == 0:
        mean_side = math.sqrt(image_size[0] * image_size[1])
        sizes = np.geomspace(0.1, 0.5, num_levels) * mean_side
        return tuple(float(round(size)) for size in sizes), "a tenth to a half of the image size; there are no boxes"
    low, high = np.percentile(np.sqrt(box_wh.prod(1)), [10, 90])
    sizes = np.geomspace(max(4.0, low), max(8.0, high), num_levels)
    return tuple(float(round(size)) for size in sizes), "from the 10th to the 90th percentile of the box sizes"


class AnchorConfig(NamedTuple):
    """Shapes of anchors, as in the settings `--anchor-sizes`, `--anchor-scales`, `--aspect-ratios`."""

    sizes: tuple[float, ...]
    """A base size per pyramid level, in pixels of the model input."""
    scales: tuple[float, ...]
    ratios: tuple[float, ...]
    """Height over width."""

    def anchor_wh(self) -> FloatArray:
        """[levels · ratios · scales, 2], width and height in pixels, as of `models.layers.boxes.cell_anchors`."""
        side_lengths = np.array([max(1, int(size * scale)) for size in self.sizes for scale in self.scales], np.float32)
        sqrt_ratios = np.sqrt(np.array(self.ratios, np.float32))[:, None]
        wh = np.stack([((1 / sqrt_ratios) * side_lengths).ravel(), (sqrt_ratios * side_lengths).ravel()], 1)
        return 2 * np.round(wh / 2).astype(np.float64)


def best_iou(box_wh: FloatArray, anchor_wh: FloatArray) -> FloatArray:
    """Returns [K], the best IoU of each box [K, 2] with any of the shapes [A, 2] centered on it."""
    ious = np.zeros(len(box_wh))
    area = anchor_wh.prod(1)
    for start in range(0, len(box_wh), _BOXES_PER_BLOCK):
        block = box_wh[start : start + _BOXES_PER_BLOCK, None, :]
        intersection = np.minimum(block[..., 0], anchor_wh[:, 0]) * np.minimum(block[..., 1], anchor_wh[:, 1])
        union = block.prod(2) + area - intersection
        ious[start : start + _BOXES_PER_BLOCK] = (intersection / np.maximum(union, 1e-9)).max(1, initial=0.0)
    return ious


def recommend_anchors(
    box_wh: FloatArray, image_size: tuple[int, int], default: AnchorConfig, *, iou_threshold: float
) -> tuple[AnchorConfig, str]:
    """Returns anchors that cover more boxes at `iou_threshold`, as many as `default` has; and the reason.

    Starts: the default; the percentiles of the box sizes; geometric series with k-means of the box shapes, by IoU, for
    size and ratio (YOLOv2, arXiv 1612.08242, section 2). The best start is refined: each size and ratio is moved by
    factors as long as the best possible recall grows. The default, which pretrained heads expect, is kept if that
    covers no 2 % more boxes.
    """
    if len(box_wh) == 0:
        return default, "there are no boxes"
    box_wh = box_wh[(box_wh > 0).all(1)]
    if len(box_wh) > _MAX_SAMPLED_BOXES:
        box_wh = box_wh[np.linspace(0, len(box_wh) - 1, _MAX_SAMPLED_BOXES).astype(np.int64)]

    def score(anchors: AnchorConfig) -> float:
        """Returns the best possible recall; the mean IoU decides between equals."""
        ious = best_iou(box_wh, anchors.anchor_wh())
        return float((ious >= iou_threshold).mean() + 1e-3 * ious.mean())

    num_levels, num_ratios = len(default.sizes), len(default.ratios)
    side = np.sqrt(box_wh.prod(1, keepdims=True))
    mean_scale = float(np.exp(np.log(default.scales).mean()))
    sizes = np.sqrt(kmeans_iou(np.repeat(side, 2, 1), num_levels).prod(1)) / mean_scale
    shapes = kmeans_iou(box_wh / side, num_ratios)
    ratios = default.ratios if num_ratios == 1 else tuple(sorted((shapes[:, 1] / shapes[:, 0]).tolist()))
    percentile_sizes, _ = percentile_anchor_sizes(box_wh, image_size, num_levels)
    size_starts = [default.sizes, percentile_sizes, tuple(sorted(sizes.tolist()))]
    starts = [AnchorConfig(s, default.scales, r) for s in size_starts for r in {default.ratios, ratios}]
    best = _refine(max(starts, key=score), score, refine_ratios=num_ratios > 1)
    before, after = (float((best_iou(box_wh, a.anchor_wh()) >= iou_threshold).mean()) for a in (default, best))
    if after <= before + _MIN_GAIN:
        return default, f"no other anchors cover {_MIN_GAIN * 100:g} % more of the boxes"
    return best, (
        f"k-means by IoU, then refined: the best possible recall at an IoU of {iou_threshold:g} grows from"
        f" {before:.3f} to {after:.3f}; a pretrained head was trained with other anchors and has to adapt"
    )


def kmeans_iou(box_wh: FloatArray, count: int, iterations: int = 30) -> FloatArray:
    """Returns [count, 2]: k-means of shapes with the distance 1 - IoU, from the quantiles of their areas."""
    order = np.argsort(box_wh.prod(1), kind="stable")
    centers = box_wh[order[((np.arange(count) + 0.5) / count * len(order)).astype(np.int64)]].copy()
    for _ in range(iterations):
        nearest = np.argmax(np.stack([best_iou(box_wh, center[None]) for center in centers]), axis=0)
        moved = np.stack(
            [np.median(box_wh[nearest == n], axis=0) if (nearest == n).any() else centers[n] for n in range(count)]
        )
        if np.array_equal(moved, centers):
            break
        centers = moved
    return centers


def _refine(start: AnchorConfig, score: Callable[[AnchorConfig], float], *, refine_ratios: bool) -> AnchorConfig:
    """Changes one size or ratio at a time by a factor, smaller in each round (coordinate descent)."""
    rounded = start._replace(
        sizes=tuple(float(round(max(4.0, size))) for size in start.sizes),
        ratios=tuple(float(f"{ratio:.2g}") for ratio in start.ratios),
    )
    best, best_score = max(((a, score(a)) for a in (start, rounded)), key=lambda row: row[1])
    for factor in (1.5, 1.25, 1.12):
        for field, digits in (("sizes", 3), ("ratios", 2)) if refine_ratios else (("sizes", 3),):
            for n in range(len(getattr(best, field))):
                for step in (factor, 1 / factor):
                    values = list(getattr(best, field))
                    values[n] = float(f"{values[n] * step:.{digits}g}")
                    candidate = best._replace(**{field: tuple(sorted(values))})
                    if (candidate_score := score(candidate)) > best_score:
                        best, best_score = candidate, candidate_score
    return best
