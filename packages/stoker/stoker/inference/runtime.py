"""Runs exported detectors, the files of `stoker export`, on the CPU: ONNX, OpenVINO, LiteRT and torch.export.

Each class is a `postprocess.DetectorProtocol`: evaluation and prediction run it as they run the original model, and get
the same boxes. docs/export.md describes the files' inputs, outputs and metadata, and how to run them
without stoker; the package `export` writes them. Needs the format's runtime, but not the detector's code.
"""

import importlib
import math
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stoker.models.layers.postprocess import MAX_DETECTIONS, BatchDetections, rescale_to_original
from stoker.models.weights.model_file import METADATA_KEY, read_metadata
from stoker_watch import regular_files
from stoker_watch.errors import ConfigError, PreflightError, WeightsError, make_error, needs_package

METADATA_FILE = "metadata.json"
"""Name in the archive of a .pt2 file, and in the one at the end of a .tflite file."""
MAX_METADATA_BYTES = 1 << 24
"""Most of it are the names of classes: 100,000 of them, twice."""
MAX_BATCH_PIXELS = 1 << 28
"""A file with a fixed batch size takes at most 655 images of 640 × 640, 0.8 GB."""
MAX_BOXES = 20_000
"""An image has at most as many; the models here have at most 1,000 candidates of each of a few levels."""
INPUTS = ("images", "content", "score_threshold")
"""All formats have these; ONNX files have `iou_threshold`, too."""
OUTPUTS = ("boxes", "scores", "labels", "count")


class FileSettings(msgspec.Struct):
    """What is read of a file's metadata besides METADATA_KEY."""

    iou_threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    """The default NMS threshold; old files without this metadata have 0.5."""


class ExportedModel(nn.Module):
    """A file as a model, with its `metadata`. trust_file: also open a file that can run code, of which otherwise only
    the metadata is read.

    Raises PreflightError without the format's runtime, WeightsError for a file that stoker did not export.
    """

    title: ClassVar[str]
    runtime: ClassVar[str]
    """The names of the format and of what runs it, in messages."""
    runs_code: ClassVar[bool] = False
    """Opening a file can run any code that its author put into it."""
    batch_size: int | None = None
    """Images per call, if the file was exported for a fixed number."""
    _has_iou_input = False

    def __init__(self, path: Path, *, num_threads: int, trust_file: bool = False) -> None:
        super().__init__()
        self._trust_file = trust_file
        self._path = path
        try:
            meta = self._open(path, num_threads)
            self.iou_threshold = msgspec.convert(meta, FileSettings, strict=False).iou_threshold
        except PreflightError:
            raise
        except Exception as error:  # the runtimes' exceptions have no other common base
            what = f"The {self.title} file cannot be read."
            raise WeightsError(what, location=path, cause=_first_line(error)) from error
        if METADATA_KEY not in meta:
            raise make_error(WeightsError, "not-exported-by-stoker", path, title=self.title, entry=METADATA_KEY)
        self.metadata = read_metadata(meta[METADATA_KEY], path)
        size, pixels = self.batch_size, math.prod(self.metadata.image_size)
        if size is not None and not (size > 0 and size * pixels <= MAX_BATCH_PIXELS):
            cause = (
                f"it is for {size:,} images of {pixels:,} pixels at once; at most {MAX_BATCH_PIXELS:,} pixels are read"
            )
            raise WeightsError(f"The batch of the {self.title} file is out of range.", location=path, cause=cause)

    def _open(self, path: Path, num_threads: int) -> dict[str, str]:
        """Opens the file; its metadata, which lacks METADATA_KEY if it is not stoker's. Raises anything."""
        raise NotImplementedError

    def _call(self, inputs: dict[str, NDArray[Any]]) -> Sequence[NDArray[Any]]:
        """The file's OUTPUTS for its inputs by name: images, content, thresholds; without `iou_threshold` its own."""
        raise NotImplementedError

    def _detect(self, inputs: dict[str, NDArray[Any]]) -> BatchDetections:
        """The boxes of a batch. Raises WeightsError for what does not fit the metadata: an author may write any."""
        try:
            columns = [np.asarray(column) for column in self._call(inputs)]
        except Exception as error:  # the runtimes' exceptions have no other common base
            what = f"The {self.title} file cannot be run."
            raise WeightsError(what, location=self._path, cause=_first_line(error)) from error
        batch, most = len(inputs["images"]), columns[1].shape[-1] if columns[1].ndim else 0
        shapes = [(batch, most, 4), (batch, most), (batch, most), (batch,)]
        cause = next(
            (
                f"{name} is {column.dtype}{list(column.shape)}, not numbers of the shape {list(shape)}"
                for name, column, shape in zip(OUTPUTS, columns, shapes, strict=True)
                if column.shape != shape or column.dtype.kind not in "fiu"
            ),
            f"it gives {most:,} boxes; at most {MAX_BOXES:,} are read" if most > MAX_BOXES else None,
        )
        if cause is None:
            boxes, scores, labels, count = columns
            valid = np.arange(most) < count[:, None]
            ranges = (
                ("count", count, most),
                ("scores", scores[valid], 1),
                ("labels", labels[valid], len(self.metadata.class_names) - 1),
            )
            wrong = [
                f"{name} outside 0 … {last}"
                for name, values, last in ranges
                if not ((values >= 0) & (values <= last)).all()  # NaN is outside, too
            ]
            wrong += [] if np.isfinite(boxes[valid]).all() else ["boxes that are not finite"]
            cause = f"it gives {wrong[0]}" if wrong else None
        if cause is not None:
            what = f"The outputs of the {self.title} file do not fit its metadata."
            raise WeightsError(what, location=self._path, cause=cause)
        return BatchDetections(
            torch.from_numpy(boxes.astype(np.float32)),
            torch.from_numpy(scores.astype(np.float32)),
            torch.from_numpy(np.where(valid, labels, 0).astype(np.int64)),
            torch.from_numpy(valid),
        )

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
        thresholds = {"score_threshold": score_threshold, "iou_threshold": iou_threshold}
        found = self.run(outputs.numpy(), resized_size.numpy(), **thresholds)  # type: ignore[arg-type]
        return rescale_to_original(found, scale, original_size)

    def run(
        self,
        images: NDArray[np.uint8],
        resized_size: NDArray[np.int32],
        *,
        score_threshold: float,
        iou_threshold: float | None = None,
    ) -> BatchDetections:
        """Boxes in pixels of the model input. images: [B, 3, H, W], RGB, resized and padded; resized_size: [B, 2];
        iou_threshold: default that of the file. Raises ConfigError for another image size, and for an IoU threshold if
        the file has no NMS.

        A file with a fixed batch size runs as often as needed; the last batch is filled with the last image.
        """
        image_size = tuple(images.shape[2:])
        if image_size != tuple(self.metadata.image_size):
            raise ConfigError(f"The model's image size is {self.metadata.image_size}, that of the batch {image_size}.")
        thresholds = {"score_threshold": np.array(score_threshold, np.float32)}
        if self._has_iou_input and iou_threshold is not None:
            thresholds["iou_threshold"] = np.array(iou_threshold, np.float32)
        elif iou_threshold is not None and min(iou_threshold, 1) != min(self.iou_threshold, 1):
            how = f"with --iou {self.iou_threshold:g}" if self.iou_threshold < 1 else "without NMS"
            fix = f"leave out --iou, or export again with --iou {iou_threshold:g}"
            raise ConfigError(f"The {self.title} file was exported {how}.", fix=fix)
        results = []
        for start in range(0, len(images), self.batch_size or len(images)):
            indices = np.arange(start, start + (self.batch_size or len(images))).clip(max=len(images) - 1)
            feed = {"images": np.ascontiguousarray(images[indices]), "content": resized_size[indices].astype(np.int32)}
            results.append(self._detect(feed | thresholds))
        columns = zip(*(result[:4] for result in results), strict=True)
        boxes, scores, labels, valid = (torch.cat(column)[: len(images)] for column in columns)
        return BatchDetections(boxes, scores, labels, valid)


class OnnxModel(ExportedModel):
    title, runtime = "ONNX", "onnxruntime"

    def _open(self, path: Path, num_threads: int) -> dict[str, str]:
        runtime = require_package("onnxruntime", f"Running {path}")
        regular_files.open_file(path).close()  # names what onnxruntime does not: a pointer of Git LFS
        options = runtime.SessionOptions()
        options.intra_op_num_threads = num_threads
        # Waiting threads do not spin: the cores are shared with image decoding. Measured: not slower.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Errors are raised as exceptions as well, and warnings about optional inputs do not apply.
        options.log_severity_level = 4
        self._session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        batch_size = self._session.get_inputs()[0].shape[0]
        self.batch_size = batch_size if isinstance(batch_size, int) else None
        optional_inputs = {value.name for value in self._session.get_overridable_initializers()}
        self._has_iou_input = "iou_threshold" in optional_inputs
        return dict(self._session.get_modelmeta().custom_metadata_map)

    def _call(self, inputs: dict[str, NDArray[Any]]) -> Sequence[NDArray[Any]]:
        outputs: Sequence[NDArray[Any]] = self._session.run(OUTPUTS, inputs)
        return outputs


class OpenVinoModel(ExportedModel):
    """An OpenVINO file (.xml, with its .bin) in fp32: by default, OpenVINO computes in bf16 where a CPU can."""

    title, runtime = "OpenVINO", "OpenVINO"

    def _open(self, path: Path, num_threads: int) -> dict[str, str]:
        openvino = require_package("openvino", f"Running {path}", "openvino")
        core = openvino.Core()
        regular_files.open_file(path.with_suffix(".bin")).close()  # OpenVINO would wait for a FIFO
        with regular_files.open_file(path) as file:
            if not file.read(100).lstrip().startswith(b"<"):  # OpenVINO reads other formats, whatever their suffix
                raise ValueError("it is no XML")
        model = core.read_model(path)
        if not model.has_rt_info([METADATA_KEY]):
            return {}
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": num_threads}
        self._compiled = core.compile_model(model, "CPU", settings)
        batch_dim = model.input("images").get_partial_shape()[0]
        self.batch_size = batch_dim.get_length() if batch_dim.is_static else None
        return msgspec.json.decode(model.get_rt_info([METADATA_KEY]).astype(str), type=dict[str, str])

    def _call(self, inputs: dict[str, NDArray[Any]]) -> Sequence[NDArray[Any]]:
        outputs = self._compiled(inputs)
        return [outputs[name].copy() for name in OUTPUTS]  # the next call writes into the same memory


class LiteRTModel(ExportedModel):
    title, runtime = "LiteRT", "LiteRT"

    def _open(self, path: Path, num_threads: int) -> dict[str, str]:
        interpreter = require_package("ai_edge_litert.interpreter", f"Running {path}", "litert")
        meta = _read_archive(path)
        if meta:
            self._interpreter = interpreter.Interpreter(str(path), num_threads=num_threads)
            self._run = self._interpreter.get_signature_runner()
            self.batch_size = int(self._run.get_input_details()["images"]["shape"][0])
        return meta

    def _call(self, inputs: dict[str, NDArray[Any]]) -> Sequence[NDArray[Any]]:
        outputs = self._run(**inputs)
        return [outputs[name].astype(np.int64 if name in OUTPUTS[2:] else np.float32) for name in OUTPUTS]


class TorchModel(ExportedModel):
    title, runtime = "torch.export", "torch"
    runs_code = True  # torch unpickles the example inputs, and evaluates the guards

    def _open(self, path: Path, num_threads: int) -> dict[str, str]:  # noqa: ARG002  # torch's threads are the process's
        meta = _read_archive(path)
        if meta and self._trust_file:
            importlib.import_module("torchvision")  # its operators, which two-stage detectors use
            # its method, because a program refuses to be a submodule in `eval`
            self._program: Callable[..., Any] = torch.export.load(path).module().__call__
            self.batch_size = int(size) if (size := meta.get("batch_size", "")).isdecimal() else None
        return meta

    def _call(self, inputs: dict[str, NDArray[Any]]) -> Sequence[NDArray[Any]]:
        with torch.no_grad():
            outputs = self._program(*(torch.from_numpy(inputs[name]) for name in INPUTS))
        return [outputs[name].numpy() for name in OUTPUTS]


RUNTIMES: dict[str, type[ExportedModel]] = {
    ".onnx": OnnxModel,
    ".xml": OpenVinoModel,
    ".tflite": LiteRTModel,
    ".pt2": TorchModel,
}
"""Suffix of an exported file → what runs it."""


def _read_archive(path: Path) -> dict[str, str]:
    """The metadata in a file that is, or ends with, a zip archive; empty if it has none. Raises anything."""
    with regular_files.open_file(path, max_bytes=regular_files.MAX_BYTES) as file:
        if not zipfile.is_zipfile(file):
            return {}
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.filename.rpartition("/")[2] == METADATA_FILE:
                    if entry.file_size > MAX_METADATA_BYTES or entry.compress_type != zipfile.ZIP_STORED:
                        raise ValueError(
                            f"{METADATA_FILE} is compressed, or has more than {MAX_METADATA_BYTES:,} bytes"
                        )
                    return msgspec.json.decode(archive.read(entry), type=dict[str, str])
    return {}


def _first_line(error: Exception) -> str:
    """What a runtime says; OpenVINO begins with lines of its own source."""
    lines = [line for line in str(error).strip().splitlines() if not line.startswith("Exception from ")]
    return lines[0] if lines else type(error).__name__


def require_package(name: str, what: str, extra: str = "onnx") -> Any:
    """The module `name` of an extra of stoker. Raises PreflightError if it is missing: `what` needs it."""
    with needs_package(f"'stoker[{extra}]'", what):
        return importlib.import_module(name)
