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

from stoker.errors import ConfigError, PreflightError, WeightsError
from stoker.models.layers.postprocess import Detections, to_original
from stoker.models.weights.model_file import KEY, Card

SUFFIX = ".onnx"
INSTALL = "pip install 'stoker[onnx]'"


OUTPUTS = ("boxes", "scores", "labels", "count")


@dataclasses.dataclass(frozen=True)
class InSlots:
    """What the file answers for B pictures, K slots each, best first."""

    boxes: NDArray[np.float32]
    """[B, K, 4], xyxy in pixels of the canvas; zeros beyond `count`."""
    scores: NDArray[np.float32]
    """[B, K]; zero beyond `count`."""
    labels: NDArray[np.int64]
    """[B, K]; -1 beyond `count`."""
    count: NDArray[np.int64]
    """[B]."""


class OnnxModel(nn.Module):
    """The file as a model. `card`: what it is and how pictures are brought to it.

    Raises PreflightError without onnxruntime, WeightsError for a file that is not an export of stoker's.
    """

    def __init__(self, path: Path, *, threads: int) -> None:
        super().__init__()
        runtime = require("onnxruntime", f"{path} cannot be run")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        # Threads that wait do not spin: the cores are shared with those that decode. Not slower, measured.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Its errors come as exceptions too, and it warns that an input that may be given is no constant.
        options.log_severity_level = 4
        try:
            self._session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's own exceptions have no common base but this one
            cause = str(error).strip().splitlines()[0]
            raise WeightsError("The ONNX file cannot be read.", place=path, cause=cause) from error
        meta = self._session.get_modelmeta().custom_metadata_map
        if KEY not in meta:
            raise WeightsError(
                "The ONNX file is not an export of stoker's.",
                place=path,
                cause=f"its metadata has no {KEY!r}: which classes it has and how it wants its pictures is unknown",
                fix="stoker export RUN --onnx",
            )
        try:
            self.card = msgspec.json.decode(meta[KEY], type=Card)
        except msgspec.DecodeError as error:
            raise WeightsError("The ONNX file's card cannot be read.", place=path, cause=str(error)) from error
        self.iou_threshold = float(meta.get("iou_threshold", 0.5))
        """The file's own limit of suppression; files from before it was written down have 0.5."""
        batch = self._session.get_inputs()[0].shape[0]
        self._suppresses = any(given.name == "iou_threshold" for given in self._session.get_overridable_initializers())
        self.batch: int | None = batch if isinstance(batch, int) else None
        """Pictures per call where the file was exported for a fixed number."""

    def forward(self, images: Tensor) -> Tensor:
        """images: uint8 [B, 3, H, W], on the CPU. Handed on as they are: the file's one graph does all, in `decode`."""
        return images

    def decode(
        self,
        raw: Tensor,
        content: Tensor,
        scale: Tensor,
        size: Tensor,
        *,
        score_threshold: float,
        iou_threshold: float | None,
    ) -> Detections:
        """As the detector's: the boxes of each picture in pixels of the original."""
        found = self.run(raw.numpy(), content.numpy(), score_threshold=score_threshold, iou_threshold=iou_threshold)
        valid = torch.arange(found.scores.shape[1]) < torch.from_numpy(found.count)[:, None]
        inside = Detections(
            torch.from_numpy(found.boxes), torch.from_numpy(found.scores),
            torch.from_numpy(found.labels).clamp(min=0), valid,
        )  # fmt: skip
        return to_original(inside, scale, size)

    def run(
        self,
        images: NDArray[np.uint8],
        content: NDArray[np.int32],
        *,
        score_threshold: float | None = None,
        iou_threshold: float | None = None,
    ) -> InSlots:
        """images: [B, 3, H, W], RGB in the canvas; content: [B, 2]. A threshold that is None is the file's own. Raises
        ConfigError for another canvas, and for a limit of overlaps where the file has no suppression.

        A file of a fixed batch is run as often as needed, the last time with its last picture repeated.
        """
        canvas = tuple(images.shape[2:])
        if canvas != tuple(self.card.canvas):
            raise ConfigError(f"The model's canvas is {self.card.canvas}, the pictures lie in one of {canvas}.")
        given = {"score_threshold": score_threshold}
        if self._suppresses:
            given["iou_threshold"] = iou_threshold
        elif iou_threshold is not None and iou_threshold < 1:
            fix = "leave --iou out, or export with the --iou that is wanted"
            raise ConfigError("The ONNX file suppresses nothing: it was exported so.", fix=fix)
        thresholds = {name: np.array(value, np.float32) for name, value in given.items() if value is not None}
        parts = []
        for start in range(0, len(images), self.batch or len(images)):
            rows = np.arange(start, start + (self.batch or len(images))).clip(max=len(images) - 1)
            feed = {"images": np.ascontiguousarray(images[rows]), "content": content[rows].astype(np.int32)}
            parts.append(self._session.run(OUTPUTS, feed | thresholds))
        return InSlots(*(np.concatenate(column)[: len(images)] for column in zip(*parts, strict=True)))


def require(name: str, what: str) -> Any:
    """The module of an optional package. Raises PreflightError that says what cannot be done without it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PreflightError(f"{what}: the Python package {name} is missing.", cause=str(error), fix=INSTALL) from error
