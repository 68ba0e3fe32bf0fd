"""What the diagnosis wants to know of a run's data and cannot measure afterwards: a note in events.jsonl.

Numbers of the index and arithmetic on them, milliseconds. Who judges them: `diagnosis/rules/learning.py`.
"""

from typing import Any

import numpy as np

from stoker.config.settings import Config
from stoker.data.anchor_fit import Anchors, best_iou, box_sides, recommend
from stoker.data.index import Index
from stoker.diagnosis.catalogue import CATALOGUE
from stoker.models import architecture
from stoker.models.ember.ember import LONGEST
from stoker.training.defaults.model_choice import is_ember

COVERED_FROM = 0.5
"""IoU from which an anchor meets a box: the least that any of the models takes for a positive one (PASCAL VOC's)."""
MOST_BOXES = 4_000
"""That are compared with the anchors: a share of them is known to 1.6 points (two standard errors) at worst."""


def facts_of(config: Config, index: Index) -> tuple[str, dict[str, Any]]:
    """(a sentence, the facts by name): `pictures` and `boxes` of the training split; `pixels_median` of its pictures,
    where their sizes are known; `pretrained`: weights that exist for the model; of models with anchors
    `anchor_coverage`, the share of the boxes that one laid on their centre meets with COVERED_FROM, and, where that is
    little, `anchor_sizes` that meet more."""
    rows = index.rows("train")
    found: dict[str, Any] = {
        "pictures": len(rows),
        "boxes": int((index.offsets[rows + 1] - index.offsets[rows]).sum()),
        "pretrained": sorted(architecture(config.model.model).urls),
    }
    areas = index.size[rows].astype(np.float64).prod(1)
    if (areas > 0).any():
        found["pixels_median"] = float(np.median(areas[areas > 0]))
    text = f"data: {found['pictures']:,} training pictures with {found['boxes']:,} boxes"
    model = config.model
    if model.anchor_sizes and model.anchor_scales and model.anchor_ratios:
        sides = box_sides(index, rows, config.data.canvas, config.data.resize).canvas
        sides = sides[(sides > 0).all(1)]
        if len(sides):
            sides = sides[np.linspace(0, len(sides) - 1, min(len(sides), MOST_BOXES)).astype(np.int64)]
            anchors = Anchors(tuple(model.anchor_sizes), tuple(model.anchor_scales), tuple(model.anchor_ratios))
            share = float((best_iou(sides, anchors.shapes()) >= COVERED_FROM).mean())
            found["anchor_coverage"] = share
            text += f"; anchors meet {100 * share:.0f} % of them"
            if CATALOGUE["anchors_miss_boxes"].severity(share) is not None:
                better = recommend(sides, config.data.canvas, anchors, iou=COVERED_FROM)[0]
                found["anchor_sizes"] = list(better.sizes)
    return text, found


def too_long(config: Config, index: Index) -> str | None:
    """What to warn of where boxes are longer on the canvas than an ember predicts (it then finds a part of them, which
    counts as a miss from 1.05 times that length, for IoU 0.95, to twice, for 0.5); None where none are."""
    if not is_ember(architecture(config.model.model)):
        return None
    longest = box_sides(index, index.rows("train"), config.data.canvas, config.data.resize).canvas.max(1, initial=0.0)
    count = int((longest > LONGEST).sum())
    if not count:
        return None
    height, width = config.data.canvas
    return (
        f"{count:,} of {len(longest):,} boxes are longer than {LONGEST} pixels on the canvas of {height}×{width} "
        f"(up to {longest.max():.0f}): {config.model.model} ends them there; take a smaller --canvas or another model"
    )
