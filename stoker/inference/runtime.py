"""Runs an exported detector, a file of `stoker export`, by onnxruntime on the CPU.

`OnnxModel` is a `postprocess.DetectorProtocol`: evaluation and prediction run it as they run the original model, and
get the same boxes. docs/onnx.md describes the file's inputs, outputs and metadata, and how to run it without stoker;
`onnx.py` writes it. Needs onnxruntime, but not onnx or the detector's code.
"""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stoker.errors import ConfigError, PreflightError, WeightsError
from stoker.models.layers.postprocess import MAX_DETECTIONS, BatchDetections, rescale_to_original
from stoker.models.weights.model_file import METADATA_KEY, read_metadata

ONNX_SUFFIX = ".onnx"
INSTALL_COMMAND = "pip install 'stoker[onnx]'"


OUTPUTS = ("boxes", "scores", "labels", "count")


@dataclasses.dataclass(frozen=True)
class OnnxDetections:
    """Outputs of the file for B images, K boxes each, best first."""

    boxes: NDArray[np.float32]
    """[B, K, 4], xyxy in pixels of the model input; zeros beyond `count`."""
    scores: NDArray[np.float32]
    """[B, K]; zero beyond `count`."""
    labels: NDArray[np.int64]
    """[B, K]; -1 beyond `count`."""
    count: NDArray[np.int64]
    """[B]."""


class OnnxModel(nn.Module):
    """The file as a model, with its `metadata`.

    Raises PreflightError without onnxruntime, WeightsError for a file that stoker did not export.
    """

    def __init__(self, path: Path, *, num_threads: int) -> None:
        super().__init__()
        runtime = require_package("onnxruntime", f"{path} cannot be run")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = num_threads
        # Waiting threads do not spin: the cores are shared with image decoding. Measured: not slower.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Errors are raised as exceptions as well, and warnings about optional inputs do not apply.
        options.log_severity_level = 4
        try:
            self._session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exceptions have no other common base
            cause = str(error).strip().splitlines()[0]
            raise WeightsError("The ONNX file cannot be read.", location=path, cause=cause) from error
        meta = self._session.get_modelmeta().custom_metadata_map
        if METADATA_KEY not in meta:
            raise WeightsError(
                "The ONNX file was not exported by stoker.",
                location=path,
                cause=f"its metadata has no {METADATA_KEY!r}, so its classes and image size are unknown",
                fix="stoker export RUN",
            )
        self.metadata = read_metadata(meta[METADATA_KEY], path)
        self.iou_threshold = float(meta.get("iou_threshold", 0.5))
        """The file's default NMS threshold; old files without this metadata have 0.5."""
        batch_size = self._session.get_inputs()[0].shape[0]
        self._has_nms = any(
            graph_input.name == "iou_threshold" for graph_input in self._session.get_overridable_initializers()
        )
        self.batch_size: int | None = batch_size if isinstance(batch_size, int) else None
        """Images per call, if the file was exported for a fixed number."""

    def forward(self, images: Tensor) -> Tensor:
        """images: uint8 [B, 3, H, W], on the CPU. Returned unchanged: `decode` runs the whole graph."""
        return images

    def decode(
        self,
        outputs: Tensor,
        resized_size: Tensor,
        scale: Tensor,
        original_size: Tensor,
        *,
        score_threshold: float,
        iou_threshold: float | None,
        max_detections: int = MAX_DETECTIONS,  # noqa: ARG002  # the file has its own
    ) -> BatchDetections:
        """As `Detector.decode`: the boxes of each image in pixels of the original image."""
        result = self.run(
            outputs.numpy(), resized_size.numpy(), score_threshold=score_threshold, iou_threshold=iou_threshold
        )
        valid = torch.arange(result.scores.shape[1]) < torch.from_numpy(result.count)[:, None]
        detections = BatchDetections(
            torch.from_numpy(result.boxes),
            torch.from_numpy(result.scores),
            torch.from_numpy(result.labels).clamp(min=0),
            valid,
        )
        return rescale_to_original(detections, scale, original_size)

    def run(
        self,
        images: NDArray[np.uint8],
        resized_size: NDArray[np.int32],
        *,
        score_threshold: float | None = None,
        iou_threshold: float | None = None,
    ) -> OnnxDetections:
        """images: [B, 3, H, W], RGB, resized and padded; resized_size: [B, 2]. Thresholds default to those of the file.
        Raises ConfigError for another image size, and for an IoU threshold if the file has no NMS.

        A file with a fixed batch size runs as often as needed; the last batch is filled with the last image.
        """
        image_size = tuple(images.shape[2:])
        if image_size != tuple(self.metadata.image_size):
            raise ConfigError(f"The model's image size is {self.metadata.image_size}, that of the batch {image_size}.")
        thresholds_by_name = {"score_threshold": score_threshold}
        if self._has_nms:
            thresholds_by_name["iou_threshold"] = iou_threshold
        elif iou_threshold is not None and iou_threshold < 1:
            fix = "leave out --iou, or export again with --iou below 1"
            raise ConfigError("The ONNX file was exported without NMS.", fix=fix)
        thresholds = {
            name: np.array(value, np.float32) for name, value in thresholds_by_name.items() if value is not None
        }
        results = []
        for start in range(0, len(images), self.batch_size or len(images)):
            indices = np.arange(start, start + (self.batch_size or len(images))).clip(max=len(images) - 1)
            feed = {"images": np.ascontiguousarray(images[indices]), "content": resized_size[indices].astype(np.int32)}
            results.append(self._session.run(OUTPUTS, feed | thresholds))
        return OnnxDetections(*(np.concatenate(column)[: len(images)] for column in zip(*results, strict=True)))


def require_package(name: str, consequence: str) -> Any:
    """The module of an optional package. Raises PreflightError with `consequence` if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PreflightError(
            f"{consequence}: the Python package {name} is missing.", cause=str(error), fix=INSTALL_COMMAND
        ) from error
