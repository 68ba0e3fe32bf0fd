"""An exported detector at work: a file of `stoker export --onnx`, run by onnxruntime on the CPU.

`OnnxModel` is a `models.detections.Finder`: evaluation and prediction run it as they run the model it was made from,
and get the same boxes. What the file's inputs, outputs and metadata are is written in docs/onnx.md; `onnx.py` makes
it. Needs onnxruntime, neither onnx nor the detector's code; without stoker, docs/onnx.md shows how to run the file.
"""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stoker.config import old_names
from stoker.errors import ConfigError, PreflightError, WeightsError
from stoker.models.layers.postprocess import BatchDetections, rescale_to_original
from stoker.models.weights.model_file import METADATA_KEY, ModelMetadata

ONNX_SUFFIX = ".onnx"
INSTALL_COMMAND = "pip install 'stoker[onnx]'"


OUTPUTS = ("boxes", "scores", "labels", "count")


@dataclasses.dataclass(frozen=True)
class OnnxDetections:
    """What the file answers for B images, K slots each, best first."""

    boxes: NDArray[np.float32]
    """[B, K, 4], xyxy in pixels of the model input; zeros beyond `count`."""
    scores: NDArray[np.float32]
    """[B, K]; zero beyond `count`."""
    labels: NDArray[np.int64]
    """[B, K]; -1 beyond `count`."""
    count: NDArray[np.int64]
    """[B]."""


class OnnxModel(nn.Module):
    """The file as a model. `card`: what it is and how images are brought to it.

    Raises PreflightError without onnxruntime, WeightsError for a file that is not an export of stoker's.
    """

    def __init__(self, path: Path, *, num_threads: int) -> None:
        super().__init__()
        runtime = require_package("onnxruntime", f"{path} cannot be run")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = num_threads
        # Threads that wait do not spin: the cores are shared with those that decode. Not slower, measured.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Its errors come as exceptions too, and it warns that an input that may be given is no constant.
        options.log_severity_level = 4
        try:
            self._session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's own exceptions have no common base but this one
            cause = str(error).strip().splitlines()[0]
            raise WeightsError("The ONNX file cannot be read.", location=path, cause=cause) from error
        meta = self._session.get_modelmeta().custom_metadata_map
        if METADATA_KEY not in meta:
            raise WeightsError(
                "The ONNX file is not an export of stoker's.",
                location=path,
                cause=f"its metadata has no {METADATA_KEY!r}: which classes it has and how it wants its images is unknown",
                fix="stoker export RUN --onnx",
            )
        try:
            self.metadata = old_names.decode(meta[METADATA_KEY].encode(), ModelMetadata)
        except msgspec.DecodeError as error:
            raise WeightsError("The ONNX file's card cannot be read.", location=path, cause=str(error)) from error
        self.iou_threshold = float(meta.get("iou_threshold", 0.5))
        """The file's own limit of NMS; files from before it was written down have 0.5."""
        batch_size = self._session.get_inputs()[0].shape[0]
        self._has_nms = any(
            graph_input.name == "iou_threshold" for graph_input in self._session.get_overridable_initializers()
        )
        self.batch_size: int | None = batch_size if isinstance(batch_size, int) else None
        """Images per call where the file was exported for a fixed number."""

    def forward(self, images: Tensor) -> Tensor:
        """images: uint8 [B, 3, H, W], on the CPU. Handed on as they are: the file's one graph does all, in `decode`."""
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
    ) -> BatchDetections:
        """As the detector's: the boxes of each image in pixels of the original."""
        result = self.run(
            outputs.numpy(), resized_size.numpy(), score_threshold=score_threshold, iou_threshold=iou_threshold
        )
        valid = torch.arange(result.scores.shape[1]) < torch.from_numpy(result.count)[:, None]
        detections = BatchDetections(
            torch.from_numpy(result.boxes), torch.from_numpy(result.scores),
            torch.from_numpy(result.labels).clamp(min=0), valid,
        )  # fmt: skip
        return rescale_to_original(detections, scale, original_size)

    def run(
        self,
        images: NDArray[np.uint8],
        resized_size: NDArray[np.int32],
        *,
        score_threshold: float | None = None,
        iou_threshold: float | None = None,
    ) -> OnnxDetections:
        """images: [B, 3, H, W], RGB in the model input; resized_size: [B, 2]. A threshold that is None is the file's own. Raises
        ConfigError for another model input, and for a limit of overlaps where the file has no NMS.

        A file of a fixed batch is run as often as needed, the last time with its last image repeated.
        """
        image_size = tuple(images.shape[2:])
        if image_size != tuple(self.metadata.image_size):
            raise ConfigError(f"The model's model input is {self.metadata.image_size}, the images lie in one of {image_size}.")
        thresholds_by_name = {"score_threshold": score_threshold}
        if self._has_nms:
            thresholds_by_name["iou_threshold"] = iou_threshold
        elif iou_threshold is not None and iou_threshold < 1:
            fix = "leave --iou out, or export with the --iou that is wanted"
            raise ConfigError("The ONNX file suppresses nothing: it was exported so.", fix=fix)
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
    """The module of an optional package. Raises PreflightError that says what cannot be done without it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PreflightError(
            f"{consequence}: the Python package {name} is missing.", cause=str(error), fix=INSTALL_COMMAND
        ) from error
