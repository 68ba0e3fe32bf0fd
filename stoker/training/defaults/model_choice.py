"""Which model is trained where the user does not say: the one that measured best on such a device, for such data.

What was measured, and what was not, is docs/which-model.md.
"""

import math
from typing import Any

import numpy as np

from stoker.data.anchor_fit import best_canvas, box_sides
from stoker.data.index import Index
from stoker.hardware.device import Device, host_cores
from stoker.models import MODELS, Architecture
from stoker.models.weights.load import NAMED, architecture_of

SMALL_SIDE = 160
"""Pictures whose median has no more than the square of so many pixels are learnt soonest by `retinanet_tiny_fpn`."""
CPU_SIDE = 320
"""Side of the square whose area ember's canvas has at most, and a tenth, on a CPU: on BCCD, 640 × 480, it finds more on
a quarter of the pixels for the processor time (LOG.md, "Ember")."""
SMALLEST = 8.0
"""Pixels of that canvas that nine of ten boxes have to have as root of their area: a place of the finest map."""
OFTEN = 80.0
"""Times that each picture is seen from which ember's are varied more."""
VARIED: dict[str, Any] = {"crop": 0.8, "zoom": (0.5, 2.0)}
"""What then: of BCCD 32 pictures, seen 100 times: AP 0.508 without, 0.537 with it, 0.521 with mosaics instead, 0.511
with both. 292 that are seen 119 times are known by heart without it, AP 0.586, and not with it, 0.616 after 135 to 156
times (LOG.md, "Ember")."""
BODY_RATE = 0.3
"""Of the rate, for a pretrained body under an ember's neck. With frozen norms nothing holds a body's features: at the
full rate they grow for as long as they are trained, until ReLU6 cuts nearly all of them and the neck's norms enlarge
what bf16 rounds off (LOG.md, "Ember")."""
GFLOP_A_SECOND = 160.0
"""1e9 operations that a core trains with: ember_n in bf16 (LOG.md, "Ember"), which is near enough to tell whether a
length in minutes is a long one."""


def model_for(index: Index, device: Device, weights: str | None) -> tuple[str, str]:
    """A name in MODELS and why. weights: where training is to start, as `--weights` has it; None: not said.

    Raises WeightsError when the file is missing or cannot be read.
    """
    if weights not in (None, "none", *NAMED):
        found = architecture_of(weights)
        if found is not None:
            return found, "the weights file is of that architecture, or of its body"
    if not device.is_cpu:
        return "retinanet_resnet50_fpn", "the reference of the field; no model has been measured on a GPU yet"
    if weights == "coco":
        least = min((row.parameters, name) for name, row in MODELS.items() if weights in row.urls)[1]
        return least, f"the smallest model with {weights} weights"
    if weights == "imagenet":
        return "ember_mobilenet_v2", f"the most accuracy for its time on a CPU, of those with {weights} weights"
    sizes = index.size[index.rows("train")]
    known = sizes[(sizes > 0).all(1)].astype(np.float64)
    side = math.sqrt(float(np.median(known.prod(1)))) if len(known) else math.inf
    if side <= SMALL_SIDE:
        return "retinanet_tiny_fpn", f"the soonest to learn small pictures on a CPU (here {side:.0f}² pixels)"
    return "ember_n", "the most accuracy for its time on a CPU; classes that look alike may want --weights imagenet"


def is_ember(row: Architecture) -> bool:
    """What ember was measured with is not said of others."""
    return "nms_free" in row.defaults


def pictures_a_second(row: Architecture, canvas: tuple[int, int]) -> float:
    """That a CPU trains on, about."""
    gflop = row.cost.training_gflop * math.prod(canvas) / row.canvas_side**2
    return host_cores() * GFLOP_A_SECOND / gflop


def side_for(row: Architecture, index: Index, device: Device, resize: str) -> int:
    """Side of the square whose area the canvas has at most, pixels."""
    if not device.is_cpu or not is_ember(row) or row.canvas_side <= CPU_SIDE:
        return row.canvas_side
    rows = index.rows("train")
    canvas, _ = best_canvas(index.size[rows], CPU_SIDE, row.canvas_multiple)
    boxes = box_sides(index, rows, canvas, resize).canvas
    small = len(boxes) > 0 and np.percentile(np.sqrt(boxes.prod(1)), 10) < SMALLEST
    return row.canvas_side if small else CPU_SIDE
