"""Detectors: one table (`MODELS`, in `table.py`), `build`, `load_weights`.

A detector (`detector.py`) is an nn.Module with three methods: `forward(images) -> raw`, `loss(raw, batch) -> dict of
scalars`, `decode(raw, content, scale, size) -> Detections`. Nothing in it makes the host wait for the device but the
suppression in `decode` (`waits.allow_host_wait("nms")`). How it is trained is `training/`; how it is scored is
`evaluate.py`; how one is added: docs/add-a-model.md.
"""

from stoker.models.architecture import Architecture
from stoker.models.detector import Detector
from stoker.models.layers.postprocess import BatchDetections
from stoker.models.table import MODELS, build, get_architecture, unset_fields
from stoker.models.weights.load import detect_architecture, load_weights

__all__ = [
    "MODELS",
    "Architecture",
    "BatchDetections",
    "Detector",
    "build",
    "detect_architecture",
    "get_architecture",
    "load_weights",
    "unset_fields",
]
