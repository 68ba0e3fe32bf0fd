"""Facts about a run's data that the diagnosis needs and cannot measure afterwards: an event in events.jsonl.

Numbers of the index and arithmetic on them; takes milliseconds. Rules in `diagnosis/causes/` judge them.
"""

from typing import Any

import numpy as np

from stoker.config.settings import Config
from stoker.data.anchor_fit import AnchorConfig, best_iou, box_dimensions, recommend_anchors
from stoker.data.index import Index
from stoker.diagnosis.causes.recipe import ANCHORS_MISS_BOXES
from stoker.models import get_architecture

COVERED_IOU = 0.5
"""IoU from which an anchor covers a box: the lowest threshold for a positive anchor of all models (PASCAL VOC's)."""
MAX_BOXES = 4_000
"""Boxes that are compared with the anchors: a fraction of them is known to 1.6 points (two standard errors) at
worst."""


def collect_facts(config: Config, index: Index) -> tuple[str, dict[str, Any]]:
    """(a sentence, the facts by name): `num_images` and `boxes` of the training split; `median_pixels` of its images,
    if their sizes are known; `pretrained`: weights that exist for the model. For models with anchors `anchor_coverage`,
    the fraction of boxes that an anchor at their center covers with COVERED_IOU, and, if that is low, better
    `anchor_sizes`."""
    train_indices = index.image_indices("train")
    facts: dict[str, Any] = {
        "num_images": len(train_indices),
        "boxes": int((index.offsets[train_indices + 1] - index.offsets[train_indices]).sum()),
        "pretrained": sorted(get_architecture(config.model.model).urls),
    }
    areas = index.original_size[train_indices].astype(np.float64).prod(1)
    if (areas > 0).any():
        facts["median_pixels"] = float(np.median(areas[areas > 0]))
    text = f"data: {facts['num_images']:,} training images with {facts['boxes']:,} boxes"
    model = config.model
    if model.anchor_sizes and model.anchor_scales and model.aspect_ratios:
        box_sizes = box_dimensions(index, train_indices, config.data.image_size, config.data.resize).resized_wh
        box_sizes = box_sizes[(box_sizes > 0).all(1)]
        if len(box_sizes):
            box_sizes = box_sizes[np.linspace(0, len(box_sizes) - 1, min(len(box_sizes), MAX_BOXES)).astype(np.int64)]
            anchors = AnchorConfig(tuple(model.anchor_sizes), tuple(model.anchor_scales), tuple(model.aspect_ratios))
            coverage = float((best_iou(box_sizes, anchors.anchor_wh()) >= COVERED_IOU).mean())
            facts["anchor_coverage"] = coverage
            text += f"; anchors cover {100 * coverage:.0f} % of them"
            if ANCHORS_MISS_BOXES.severity(coverage) is not None:
                better = recommend_anchors(box_sizes, config.data.image_size, anchors, iou_threshold=COVERED_IOU)[0]
                facts["anchor_sizes"] = list(better.sizes)
    return text, facts


def warn_oversized_boxes(config: Config, index: Index) -> str | None:
    """A warning if boxes are longer than the model can predict, else None.

    The model then predicts a part of such a box, which counts as a miss from 1.05 times the longest length for IoU
    0.95, to twice for IoU 0.5.
    """
    tuning = get_architecture(config.model.model).tuning
    if tuning is None:
        return None
    box_sizes = box_dimensions(index, index.image_indices("train"), config.data.image_size, config.data.resize)
    longer_sides = box_sizes.resized_wh.max(1, initial=0.0)
    count = int((longer_sides > tuning.max_box_px).sum())
    if not count:
        return None
    height, width = config.data.image_size
    return (
        f"{count:,} of {len(longer_sides):,} boxes are longer than {tuning.max_box_px} pixels at the image size "
        f"{height}×{width} (up to {longer_sides.max():.0f}): {config.model.model} cannot predict them whole; take a "
        "smaller --image-size or another model"
    )
