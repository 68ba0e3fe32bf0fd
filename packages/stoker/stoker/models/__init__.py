"""Detectors: one table (`MODELS`, in `table.py`), `build`, `load_weights`.

A detector (`detector.py`) is an nn.Module with three methods: `forward(images) -> outputs`, `loss(outputs, batch) ->
dict of scalars`, `decode(outputs, resized_size, scale, original_size) -> BatchDetections`. None of them makes the host
wait for an accelerator; images that NMS in rounds could not finish are repeated when the host reads their detections
(`allow_host_sync("nms")`). Training is in `training/`, evaluation in `evaluation/`; see docs/add-a-model.md.
"""

from stoker.config.architectures import Architecture
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
