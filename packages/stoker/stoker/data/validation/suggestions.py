"""What the boxes of a data set suggest: settings that may give a higher AP, each with the numbers that it follows from.

None of them is a claim: `stoker tune --allow accuracy` trains with and without each, and keeps it only if AP is higher
with an interval above 0. The statistics themselves are in `stats.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from stoker.data.anchor_fit import AnchorConfig, FloatArray, best_iou, box_dimensions, recommend_anchors
from stoker.data.index import Index
from stoker.data.loading.repeat_factors import class_fractions

IMBALANCE = 1000.0
"""Background anchors per positive one for which the focal loss was made (RetinaNet, arXiv 1708.02002, section 1)."""
ALPHA_OF_GAMMA = {0.5: 0.5, 1.0: 0.25, 2.0: 0.25, 5.0: 0.25}
"""The best alpha for each gamma (the same, table 1b)."""
COVERED = 0.95
"""Fraction of the boxes that some anchor should match; less, and the threshold of the matcher is too high for them (an
assumption: RetinaNet's anchors match more of COCO's)."""
LEAST_IOU = 0.35
"""Below it an anchor shows more of the background than of the box (an assumption)."""
REPEATS = 2.0
"""Factor of the rarest class from which repeats are suggested."""
MIN_BOX_PX, SMALL_FRACTION = 8.0, 0.1
"""A tenth of the boxes smaller than the finest stride (`tuning.min_box_px` of models.toml): a larger input."""
SCALES = (0.5, 0.625, 0.75, 1.0, 1.25, 1.5, 2.0)


class Suggestion(msgspec.Struct, kw_only=True):
    lever: str
    """Of `stoker tune`."""
    changes: dict[str, Any]
    evidence: str
    before: float
    """The number that it is to improve, of the present settings, and what it is with the changes."""
    after: float


def suggest(
    index: Index,
    settings: Mapping[str, Any],
    *,
    multiple: int,
    latency_ms: Callable[[tuple[int, int]], float] | None = None,
    max_latency_ms: float | None = None,
) -> list[Suggestion]:
    """Suggests from the training split. settings: of the model and its input, by name; those that the model does not
    have are absent or None. latency_ms: measures one prediction at an image size (height, width)."""
    images = index.image_indices("train")
    image_size = settings["image_size"]
    boxes = box_dimensions(index, images, image_size, settings["resize"])
    wh = boxes.resized_wh[(boxes.resized_wh > 0).all(1)]
    if not len(wh):
        return []
    found = [_image_size(boxes.original_wh, wh, image_size, multiple, latency_ms, max_latency_ms)]
    found.append(_repeats(index, settings))
    if all(settings.get(name) for name in ("anchor_sizes", "anchor_scales", "aspect_ratios", "fg_iou_thresh")):
        anchors = AnchorConfig(*(tuple(settings[name]) for name in ("anchor_sizes", "anchor_scales", "aspect_ratios")))
        found += [_anchors(wh, image_size, anchors, settings), _thresholds(wh, anchors, settings)]
        if settings.get("focal_gamma") is not None:
            found.append(_focal(wh, image_size, len(images), anchors, settings))
    return [suggestion for suggestion in found if suggestion is not None]


def _anchors(
    wh: FloatArray, image_size: tuple[int, int], anchors: AnchorConfig, settings: Mapping[str, Any]
) -> Suggestion | None:
    threshold = settings["fg_iou_thresh"]
    best, reason = recommend_anchors(wh, image_size, anchors, iou_threshold=threshold)
    if best == anchors:
        return None
    before, after = (float((best_iou(wh, a.anchor_wh()) >= threshold).mean()) for a in (anchors, best))
    changes = {"anchor_sizes": best.sizes} | ({"aspect_ratios": best.ratios} if best.ratios != anchors.ratios else {})
    return Suggestion(lever="anchors", changes=changes, evidence=reason, before=before, after=after)


def _thresholds(wh: FloatArray, anchors: AnchorConfig, settings: Mapping[str, Any]) -> Suggestion | None:
    now, low = settings["fg_iou_thresh"], settings["bg_iou_thresh"]
    ious = best_iou(wh, anchors.anchor_wh())
    before = float((ious >= now).mean())
    best = max(LEAST_IOU, np.floor(float(np.quantile(ious, 1 - COVERED)) * 20) / 20)
    if before >= COVERED or best >= now:
        return None
    after = float((ious >= best).mean())
    text = f"{before:.3f} of the boxes have an anchor with an IoU of {now:g}, {after:.3f} with one of {best:g}"
    changes = {"fg_iou_thresh": round(float(best), 2), "bg_iou_thresh": round(max(0.2, float(best) - (now - low)), 2)}
    return Suggestion(lever="matcher", changes=changes, evidence=text, before=before, after=after)


def _focal(
    wh: FloatArray, image_size: tuple[int, int], num_images: int, anchors: AnchorConfig, settings: Mapping[str, Any]
) -> Suggestion | None:
    """Suggests a gamma that grows with the logarithm of the imbalance: 2 where it is the paper's."""
    positives, total = 0.0, 0.0
    per_level = len(anchors.scales) * len(anchors.ratios)
    shapes = anchors.anchor_wh()
    sample = wh[np.linspace(0, len(wh) - 1, min(len(wh), 500)).astype(np.int64)]
    for level in range(len(anchors.sizes)):
        stride = 8 * 2**level
        total += per_level * np.ceil(image_size[0] / stride) * np.ceil(image_size[1] / stride)
        own = shapes[level * per_level : (level + 1) * per_level]
        positives += _num_matched(sample, own, stride, settings["fg_iou_thresh"]) * len(wh) / len(sample) / num_images
    # The matcher gives every box its best anchor at the least.
    positives = max(positives, len(wh) / num_images)
    imbalance = max(2.0, total / positives)
    wanted = 2.0 * np.log(imbalance) / np.log(IMBALANCE)
    gamma = min(ALPHA_OF_GAMMA, key=lambda value: abs(value - wanted))
    changes = {"focal_gamma": gamma, "focal_alpha": ALPHA_OF_GAMMA[gamma]}
    if all(settings[name] == value for name, value in changes.items()):
        return None
    text = (
        f"{positives:.1f} of {total:.0f} anchors per image are positive: 1 to {imbalance:.0f}, not 1 to {IMBALANCE:.0f}"
    )
    return Suggestion(lever="focal", changes=changes, evidence=text, before=settings["focal_gamma"], after=gamma)


def _num_matched(wh: FloatArray, anchors: FloatArray, stride: int, threshold: float) -> float:
    """Anchors of a level that overlap some box [K, 2] enough: the area of the offsets at which they do, in cells."""
    offsets = (np.arange(12) + 0.5) / 12
    total = 0.0
    for anchor in anchors:
        half = (wh + anchor) / 2
        overlap = np.minimum(half[:, None] - offsets[None, :, None] * half[:, None], np.minimum(wh, anchor)[:, None])
        shared = overlap[:, :, None, 0] * overlap[:, None, :, 1]
        iou = shared / (wh.prod(1)[:, None, None] + anchor.prod() - shared)
        total += float((4 * (iou >= threshold).mean((1, 2)) * half.prod(1)).sum()) / stride**2
    return total


def _repeats(index: Index, settings: Mapping[str, Any]) -> Suggestion | None:
    fractions = class_fractions(index, index.image_indices("train"))
    present = np.sort(fractions[fractions > 0])
    if settings.get("shuffle_buffer") or len(present) < 2:
        return None
    thresh = float(f"{np.median(present):.2g}")
    factor = float(np.sqrt(thresh / present[0]))
    if factor < REPEATS:
        return None
    text = (
        f"the rarest class is in {present[0]:.2%} of the images, the median class in {thresh:.2%}: factor {factor:.1f}"
    )
    before = settings.get("repeat_thresh") or 0.0
    return Suggestion(
        lever="repeat_thresh", changes={"repeat_thresh": thresh}, evidence=text, before=before, after=thresh
    )  # fmt: skip


def _image_size(
    original_wh: FloatArray,
    wh: FloatArray,
    image_size: tuple[int, int],
    multiple: int,
    latency_ms: Callable[[tuple[int, int]], float] | None,
    max_latency_ms: float | None,
) -> Suggestion | None:
    """Suggests a larger input where many boxes are smaller than the finest stride, up to the size of the images, within
    the limit of the latency."""
    sides = np.sqrt(wh.prod(1))
    room = max(1.0, float(np.sqrt(original_wh.prod(1).sum() / wh.prod(1).sum())))
    before = float((sides < MIN_BOX_PX).mean())
    chosen, small, time_ms = image_size, before, None
    for scale in SCALES:
        height, width = (max(multiple, round(side * scale / multiple) * multiple) for side in image_size)
        if min(height, width) < 32 or scale > 1.05 * room or (scale < 1 and max_latency_ms is None):
            continue
        if scale > 1 and small <= SMALL_FRACTION:
            break
        now_ms = None if latency_ms is None or max_latency_ms is None else latency_ms((height, width))
        if now_ms is not None and max_latency_ms is not None and now_ms > max_latency_ms:
            break
        chosen, time_ms = (height, width), now_ms
        small = float((sides * (height / image_size[0]) < MIN_BOX_PX).mean())
    if chosen == tuple(image_size):
        return None
    text = f"{before:.3f} of the boxes are smaller than {MIN_BOX_PX:g} pixels in the input, {small:.3f} with this"
    text += "" if time_ms is None else f"; {time_ms:.1f} ms a prediction, limit {max_latency_ms:g}"
    return Suggestion(lever="box_image_size", changes={"image_size": chosen}, evidence=text, before=before, after=small)
