"""What the diagnosis wants to know of a run's data and cannot measure afterwards: a note in events.jsonl.

Numbers of the index and arithmetic on them, milliseconds. Who judges them: `diagnosis/rules/learning.py`.
"""

from typing import Any

import numpy as np

from stoker.config.settings import Config
from stoker.data.anchor_fit import AnchorConfig, best_iou, box_dimensions, recommend_anchors
from stoker.data.index import Index
from stoker.diagnosis.catalogue import CATALOG
from stoker.models import get_architecture
from stoker.models.ember.ember import MAX_BOX_PX
from stoker.training.defaults.model_choice import is_ember

COVERED_IOU = 0.5
"""IoU from which an anchor meets a box: the least that any of the models takes for a positive one (PASCAL VOC's)."""
MAX_BOXES = 4_000
"""That are compared with the anchors: a share of them is known to 1.6 points (two standard errors) at worst."""


def collect_facts(config: Config, index: Index) -> tuple[str, dict[str, Any]]:
    """(a sentence, the facts by name): `pictures` and `boxes` of the training split; `median_pixels` of its pictures,
    where their sizes are known; `pretrained`: weights that exist for the model; of models with anchors
    `anchor_coverage`, the share of the boxes that one laid on their centre meets with COVERED_FROM, and, where that is
    little, `anchor_sizes` that meet more."""
    train_indices = index.image_indices("train")
    facts: dict[str, Any] = {
        "pictures": len(train_indices),
        "boxes": int((index.offsets[train_indices + 1] - index.offsets[train_indices]).sum()),
        "pretrained": sorted(get_architecture(config.model.model).urls),
    }
    areas = index.original_size[train_indices].astype(np.float64).prod(1)
    if (areas > 0).any():
        facts["median_pixels"] = float(np.median(areas[areas > 0]))
    text = f"data: {facts['pictures']:,} training pictures with {facts['boxes']:,} boxes"
    model = config.model
    if model.anchor_sizes and model.anchor_scales and model.aspect_ratios:
        box_sizes = box_dimensions(index, train_indices, config.data.image_size, config.data.resize).resized_wh
        box_sizes = box_sizes[(box_sizes > 0).all(1)]
        if len(box_sizes):
            box_sizes = box_sizes[np.linspace(0, len(box_sizes) - 1, min(len(box_sizes), MAX_BOXES)).astype(np.int64)]
            anchors = AnchorConfig(tuple(model.anchor_sizes), tuple(model.anchor_scales), tuple(model.aspect_ratios))
            coverage = float((best_iou(box_sizes, anchors.anchor_wh()) >= COVERED_IOU).mean())
            facts["anchor_coverage"] = coverage
            text += f"; anchors meet {100 * coverage:.0f} % of them"
            if CATALOG["anchors_miss_boxes"].severity(coverage) is not None:
                better = recommend_anchors(box_sizes, config.data.image_size, anchors, iou_threshold=COVERED_IOU)[0]
                facts["anchor_sizes"] = list(better.sizes)
    return text, facts


def warn_oversized_boxes(config: Config, index: Index) -> str | None:
    """What to warn of where boxes are longer on the canvas than an ember predicts (it then finds a part of them, which
    counts as a miss from 1.05 times that length, for IoU 0.95, to twice, for 0.5); None where none are."""
    if not is_ember(get_architecture(config.model.model)):
        return None
    longer_sides = box_dimensions(
        index, index.image_indices("train"), config.data.image_size, config.data.resize
    ).resized_wh.max(1, initial=0.0)
    count = int((longer_sides > MAX_BOX_PX).sum())
    if not count:
        return None
    height, width = config.data.image_size
    return (
        f"{count:,} of {len(longer_sides):,} boxes are longer than {MAX_BOX_PX} pixels on the canvas of {height}×{width} "
        f"(up to {longer_sides.max():.0f}): {config.model.model} ends them there; take a smaller --image-size or another model"
    )
