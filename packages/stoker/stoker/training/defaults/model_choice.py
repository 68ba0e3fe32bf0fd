"""Which model is trained if the user does not choose: on a CPU the one that measured best for such data, on others by
published figures.

What was measured, and what was not, is in docs/models.md.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from stoker.config.architectures import PRETRAINED_NAMES
from stoker.data.anchor_fit import best_image_size, box_dimensions
from stoker.data.index import Index
from stoker.hardware.device import Device
from stoker.models import MODELS, Architecture
from stoker.models.weights.load import detect_architecture
from stoker_watch.errors import WeightsError
from stoker_watch.hardware.cgroup import host_cores

SMALL_IMAGE_SIDE = 160
"""Images whose median area is at most the square of this side are learned fastest on a CPU by `retinanet_tiny_fpn`."""
PRETRAINED, FROM_SCRATCH = "ember_mobilenet_v2", "ember_n"
"""With ImageNet weights, for a CPU; with random ones, for all devices, as no other model was measured with them."""
ON_GPU, CROWDED = "dfine_s", "fcos_resnet50_fpn"
"""For a GPU; for images with more boxes than ON_GPU has queries. Not `dfine_n`: it saves 1.6 GiB of 4.1 (640², 8
images), where rented GPUs have 15 and more, and has no map of stride 8, which small images need."""
WHY_ON_GPU = (
    "D-FINE-S has 60.3 AP fine-tuned on the hundred data sets of RF100-VL, presumably from objects365+coco weights, by "
    "Roboflow's table of RF-DETR (RF-DETR-S 60.2 with three times the parameters, YOLO11-S 56.2); not measured here"
)
MOST_LOST_BOXES = 0.2
"""ON_GPU is chosen up to this fraction of boxes that are too many for its queries: the AP of CROWDED on COCO is so much
lower (39.2 and 48.5, by their publishers)."""
COST_OF_RANDOM_WEIGHTS = (
    "after the same time ember_n had AP 0.53 on 270 photos of cars, ember_mobilenet_v2 from ImageNet weights 0.66 (on "
    "blood cells less than ember_n; docs/models.md)"
)
GFLOP_PER_CORE_SECOND = 160.0
"""1e9 operations per second that a core trains with, roughly: ember_n in bf16 (LOG.md, "Ember")."""
STEP_OVERHEAD_S = 0.12
"""Seconds of a step on a CPU that do not depend on its images, roughly: ember_n at 32 × 32, two cores (LOG.md)."""


Fetch = Callable[[str], tuple[Path, str]]
"""`hub.fetch_weights`."""
NOT_DOWNLOADED = "its weights could not be downloaded, and random ones cost accuracy"
"""Follows the name of a model in the reason for one with random weights that was chosen instead."""


def choose_model(
    index: Index, device: Device, weights: str | None, *, queries: int | None = None, fetch: Fetch | None = None
) -> tuple[str, str]:
    """A name in MODELS and the reason. weights, queries: the settings, None if not set. fetch: downloads the file at a
    URL, or raises WeightsError; None: nothing is downloaded, and the weights are expected to be there when training
    starts. Raises WeightsError if a weights file of the user is missing or cannot be read."""
    if weights not in (None, "none", *PRETRAINED_NAMES):
        detected = detect_architecture(weights)
        if detected is not None:
            return detected, "the weights file is of that architecture, or of its backbone"
    images = index.image_indices("train")
    chosen, reason = PRETRAINED, "from ImageNet weights, the highest accuracy per CPU time on most data sets"
    if not device.computes_on_host and weights != "imagenet":
        chosen, reason = ON_GPU, WHY_ON_GPU
        counts, queries = np.diff(index.offsets)[images], queries or MODELS[ON_GPU].defaults["queries"]
        lost = (counts - queries).clip(0).sum() / max(1, counts.sum())
        if lost > MOST_LOST_BOXES:
            chosen = CROWDED
            reason = f"{lost:.0%} of the boxes are too many for the {queries} queries that {ON_GPU} has for an image"
    if weights in MODELS[chosen].urls:
        return chosen, reason
    if having := [(arch.num_params, name) for name, arch in MODELS.items() if weights in arch.urls]:
        return min(having)[1], f"the smallest model with {weights} weights"
    sizes = index.original_size[images]
    known = sizes[(sizes > 0).all(1)].astype(np.float64)
    median_side = math.sqrt(float(np.median(known.prod(1)))) if len(known) else math.inf
    if device.computes_on_host and median_side <= SMALL_IMAGE_SIDE:
        return "retinanet_tiny_fpn", f"the fastest to learn small images on a CPU (here {median_side:.0f}² pixels)"
    if weights == "none":
        return FROM_SCRATCH, "the highest accuracy per CPU time from random weights; no other was measured with them"
    try:
        if fetch is not None:
            fetch(next(iter(MODELS[chosen].urls.values())))
    except WeightsError as error:
        return FROM_SCRATCH, f"instead of {chosen}: {NOT_DOWNLOADED} ({error.cause}): {COST_OF_RANDOM_WEIGHTS}"
    return chosen, reason


def estimate_images_per_second(arch: Architecture, image_size: tuple[int, int]) -> float:
    """A rough estimate of the training speed on this CPU."""
    gflop = arch.cost.training_gflop * math.prod(image_size) / arch.default_image_size**2
    return host_cores() * GFLOP_PER_CORE_SECOND / gflop


def choose_image_side(arch: Architecture, index: Index, device: Device, resize: str) -> int:
    """Side in pixels of the square whose area the model input has at most."""
    tuning = arch.tuning
    if not device.computes_on_host or tuning is None or arch.default_image_size <= tuning.cpu_image_size:
        return arch.default_image_size
    train_indices = index.image_indices("train")
    image_size, _ = best_image_size(index.original_size[train_indices], tuning.cpu_image_size, arch.size_divisor)
    boxes = box_dimensions(index, train_indices, image_size, resize).resized_wh
    has_small_boxes = len(boxes) > 0 and np.percentile(np.sqrt(boxes.prod(1)), 10) < tuning.min_box_px
    return arch.default_image_size if has_small_boxes else tuning.cpu_image_size
