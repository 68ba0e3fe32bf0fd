"""Detectors: one table (`MODELS`, in `table.py`), `build`, `load_weights`.

A detector (`detector.py`) is an nn.Module with three methods: `forward(images) -> raw`, `loss(raw, batch) -> dict of
scalars`, `decode(raw, content, scale, size) -> Detections`. Nothing in it makes the host wait for the device but the
suppression in `decode` (`waits.allow_host_wait("nms")`). How it is trained is `training/`; how it is scored is
`evaluate.py`; how one is added: docs/add-a-model.md.
"""

from stoker.models.architecture import Architecture
from stoker.models.detector import Detector
from stoker.models.layers.postprocess import Detections
from stoker.models.table import MODELS, architecture, build, open_fields
from stoker.models.weights.load import architecture_of, load_weights

__all__ = [
    "MODELS",
    "Architecture",
    "Detections",
    "Detector",
    "architecture",
    "architecture_of",
    "build",
    "load_weights",
    "open_fields",
]
