"""Which model is trained where the user does not say: the one that measured best on such a device, for such data.

What was measured, and what was not, is docs/which-model.md.
"""

import math
from typing import Any

import numpy as np

from stoker.data.anchor_fit import best_image_size, box_dimensions
from stoker.data.index import Index
from stoker.hardware.device import Device, host_cores
from stoker.models import MODELS, Architecture
from stoker.models.weights.load import PRETRAINED_NAMES, detect_architecture

SMALL_IMAGE_SIDE = 160
"""Pictures whose median has no more than the square of so many pixels are learnt soonest by `retinanet_tiny_fpn`."""
CPU_IMAGE_SIDE = 320
"""Side of the square whose area ember's canvas has at most, and a tenth, on a CPU: on BCCD, 640 × 480, it finds more on
a quarter of the pixels for the processor time (LOG.md, "Ember")."""
MIN_BOX_SIDE = 8.0
"""Pixels of that canvas that nine of ten boxes have to have as root of their area: a place of the finest map."""
MANY_VIEWS = 80.0
"""Times that each picture is seen from which ember's are varied more."""
STRONG_AUGMENTATION: dict[str, Any] = {"scale_jitter_prob": 0.8, "scale_range": (0.5, 2.0)}
"""What then: of BCCD 32 pictures, seen 100 times: AP 0.508 without, 0.537 with it, 0.521 with mosaics instead, 0.511
with both. 292 that are seen 119 times are known by heart without it, AP 0.586, and not with it, 0.616 after 135 to 156
times (LOG.md, "Ember")."""
BACKBONE_LR_MULT = 0.3
"""Of the rate, for a pretrained body under an ember's neck. With frozen norms nothing holds a body's features: at the
full rate they grow for as long as they are trained, until ReLU6 cuts nearly all of them and the neck's norms enlarge
what bf16 rounds off (LOG.md, "Ember")."""
GFLOP_PER_CORE_SECOND = 160.0
"""1e9 operations that a core trains with: ember_n in bf16 (LOG.md, "Ember"), which is near enough to tell whether a
length in minutes is a long one."""


def choose_model(index: Index, device: Device, weights: str | None) -> tuple[str, str]:
    """A name in MODELS and why. weights: where training is to start, as `--weights` has it; None: not said.

    Raises WeightsError when the file is missing or cannot be read.
    """
    if weights not in (None, "none", *PRETRAINED_NAMES):
        detected = detect_architecture(weights)
        if detected is not None:
            return detected, "the weights file is of that architecture, or of its body"
    if not device.is_cpu:
        return "retinanet_resnet50_fpn", "the reference of the field; no model has been measured on a GPU yet"
    if weights == "coco":
        smallest = min((arch.num_params, name) for name, arch in MODELS.items() if weights in arch.urls)[1]
        return smallest, f"the smallest model with {weights} weights"
    if weights == "imagenet":
        return "ember_mobilenet_v2", f"the most accuracy for its time on a CPU, of those with {weights} weights"
    sizes = index.original_size[index.image_indices("train")]
    known = sizes[(sizes > 0).all(1)].astype(np.float64)
    median_side = math.sqrt(float(np.median(known.prod(1)))) if len(known) else math.inf
    if median_side <= SMALL_IMAGE_SIDE:
        return "retinanet_tiny_fpn", f"the soonest to learn small pictures on a CPU (here {median_side:.0f}² pixels)"
    return "ember_n", "the most accuracy for its time on a CPU; classes that look alike may want --weights imagenet"


def is_ember(arch: Architecture) -> bool:
    """What ember was measured with is not said of others."""
    return "nms_free" in arch.defaults


def estimate_images_per_second(arch: Architecture, image_size: tuple[int, int]) -> float:
    """That a CPU trains on, about."""
    gflop = arch.cost.training_gflop * math.prod(image_size) / arch.default_image_size**2
    return host_cores() * GFLOP_PER_CORE_SECOND / gflop


def choose_image_side(arch: Architecture, index: Index, device: Device, resize: str) -> int:
    """Side of the square whose area the canvas has at most, pixels."""
    if not device.is_cpu or not is_ember(arch) or arch.default_image_size <= CPU_IMAGE_SIDE:
        return arch.default_image_size
    train_indices = index.image_indices("train")
    image_size, _ = best_image_size(index.original_size[train_indices], CPU_IMAGE_SIDE, arch.size_divisor)
    boxes = box_dimensions(index, train_indices, image_size, resize).resized_wh
    has_small_boxes = len(boxes) > 0 and np.percentile(np.sqrt(boxes.prod(1)), 10) < MIN_BOX_SIDE
    return arch.default_image_size if has_small_boxes else CPU_IMAGE_SIDE
