"""Which model is trained if the user does not choose: the one that measured best on such a device, for such data.

What was measured, and what was not, is in docs/which-model.md.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from stoker.config.architectures import PRETRAINED_NAMES
from stoker.data.anchor_fit import best_image_size, box_dimensions
from stoker.data.index import Index
from stoker.errors import WeightsError
from stoker.hardware.cgroup import host_cores
from stoker.hardware.device import Device
from stoker.models import MODELS, Architecture
from stoker.models.weights.load import detect_architecture

SMALL_IMAGE_SIDE = 160
"""Images whose median area is at most the square of this side are learned fastest by `retinanet_tiny_fpn`."""
PRETRAINED, FROM_SCRATCH = "ember_mobilenet_v2", "ember_n"
"""The models for a CPU, with and without ImageNet weights."""
ON_GPU = "retinanet_resnet50_fpn"
COST_OF_RANDOM_WEIGHTS = (
    "after the same time ember_n had AP 0.53 on 270 photos of cars, ember_mobilenet_v2 from ImageNet weights 0.66 (on "
    "blood cells less than ember_n; docs/which-model.md)"
)
GFLOP_PER_CORE_SECOND = 160.0
"""1e9 operations per second that a core trains with, roughly: ember_n in bf16 (LOG.md, "Ember")."""
STEP_OVERHEAD_S = 0.12
"""Seconds of a step on a CPU that do not depend on its images, roughly: ember_n at 32 × 32, two cores (LOG.md)."""


Fetch = Callable[[str], tuple[Path, str]]
"""`hub.fetch_weights`."""
NOT_DOWNLOADED = f"the pretrained weights of {PRETRAINED} could not be downloaded, and random ones cost accuracy"
"""Begins the reason for a model with random weights that was chosen instead."""


def choose_model(index: Index, device: Device, weights: str | None, *, fetch: Fetch | None = None) -> tuple[str, str]:
    """A name in MODELS and the reason. weights: the setting, None if not set. fetch: downloads the file at a URL, or
    raises WeightsError; None: nothing is downloaded, and the weights are expected to be there when training starts.
    Raises WeightsError if a weights file of the user is missing or cannot be read."""
    if weights not in (None, "none", *PRETRAINED_NAMES):
        detected = detect_architecture(weights)
        if detected is not None:
            return detected, "the weights file is of that architecture, or of its backbone"
    if not device.computes_on_host and weights in (None, "none", *MODELS[ON_GPU].urls):
        return ON_GPU, "the reference of the field; no model has been measured on a GPU yet"
    having = [(arch.num_params, name) for name, arch in MODELS.items() if weights in arch.urls]
    if having and weights != "imagenet":
        return min(having)[1], f"the smallest model with {weights} weights"
    if weights == "imagenet":
        return PRETRAINED, f"the highest accuracy per CPU time of the models with {weights} weights"
    sizes = index.original_size[index.image_indices("train")]
    known = sizes[(sizes > 0).all(1)].astype(np.float64)
    median_side = math.sqrt(float(np.median(known.prod(1)))) if len(known) else math.inf
    if median_side <= SMALL_IMAGE_SIDE:
        return "retinanet_tiny_fpn", f"the fastest to learn small images on a CPU (here {median_side:.0f}² pixels)"
    if weights == "none":
        return FROM_SCRATCH, "the highest accuracy per CPU time from random weights"
    try:
        if fetch is not None:
            fetch(MODELS[PRETRAINED].urls["imagenet"])
    except WeightsError as error:
        return FROM_SCRATCH, f"{NOT_DOWNLOADED} ({error.cause}): {COST_OF_RANDOM_WEIGHTS}"
    return PRETRAINED, "from ImageNet weights, the highest accuracy per CPU time on most data sets"


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
