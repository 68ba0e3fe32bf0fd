"""Writes a detector as an OpenVINO, LiteRT or torch.export file with the inputs and outputs of the ONNX file.

OpenVINO reads the ONNX file of `graph.py`, with its NMS. The other two are one program of torch.export, whose NMS has
fixed shapes: LiteRT has no operator for it. `inference/runtime.py` runs the files, docs/export.md describes them.
"""

import copy
import importlib
import io
import json
import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn

from stoker.export import graph
from stoker.export.graph import Spec
from stoker.inference.runtime import METADATA_FILE, OUTPUTS
from stoker.models.layers import postprocess
from stoker.models.layers.boxes import batched_gather
from stoker.models.weights.model_file import METADATA_KEY


class DetectionModel(nn.Module):
    """A detector with NMS in fixed shapes, for torch.export: the outputs of the file, by name."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.model, self.spec = copy.deepcopy(spec.model), spec

    def forward(self, images: Tensor, content: Tensor, score_threshold: Tensor) -> dict[str, Tensor]:
        """images: uint8 [B, 3, H, W]; content: int32 [B, 2]; score_threshold: []."""
        found = self.model.candidates(self.model(images), content, score_threshold=score_threshold)
        if self.spec.iou_threshold < 1:
            best = found.scores.topk(min(postprocess.MAX_NMS_BOXES, found.scores.shape[1]), dim=1).indices
            found = postprocess.Candidates(*(batched_gather(column, best) for column in found))
            keep, _ = postprocess.fixed_point_nms(
                found.boxes,
                found.scores > 0,
                iou_threshold=postprocess.largest_float32(self.spec.iou_threshold),
                labels=found.labels,
            )
            found = found._replace(scores=torch.where(keep, found.scores, 0.0))
        most = min(self.spec.max_detections, found.scores.shape[1])
        boxes, scores, labels, valid, _ = postprocess.topk_detections(found, most)
        return dict(zip(OUTPUTS, (boxes, scores, torch.where(valid, labels, -1), valid.sum(1)), strict=True))


def write_onnx(path: Path, spec: Spec) -> None:
    path.write_bytes(graph.build_onnx(spec))


def write_openvino(path: Path, spec: Spec) -> None:
    """Two files: the .xml and its .bin. OpenVINO has no optional inputs: `content` and `score_threshold` must be given,
    and the IoU threshold is a constant."""
    onnx, openvino = importlib.import_module("onnx"), importlib.import_module("openvino")
    network = onnx.load_from_string(graph.build_onnx(spec))
    inputs, constants = network.graph.input, network.graph.initializer
    for values, names in ((constants, ("content", "score_threshold")), (inputs, ("iou_threshold",))):
        for value in [value for value in values if value.name in names]:
            values.remove(value)
    converted = openvino.Core().read_model(io.BytesIO(network.SerializeToString()))
    converted.set_rt_info(_all_texts(spec), [METADATA_KEY])
    openvino.save_model(converted, path, compress_to_fp16=False)


def write_torch(path: Path, spec: Spec) -> None:
    count = spec.batch_size or 2  # torch treats a size of one as a constant
    batch = {0: torch.export.Dim("batch")} if spec.batch_size is None else None
    program, inputs = _example(spec, count)
    with graph.quiet(), torch.no_grad():
        exported = torch.export.export(program, inputs, dynamic_shapes=(batch, batch, None))
        torch.export.save(exported, path, extra_files={METADATA_FILE: _all_texts(spec)})


def write_litert(path: Path, spec: Spec) -> None:
    """The metadata is a zip archive behind the model, as TensorFlow Lite's "associated files"."""
    litert_torch = importlib.import_module("litert_torch")
    program, (images, content, threshold) = _example(spec, spec.batch_size or 1)
    for tensor in (*program.parameters(), *program.buffers()):
        # litert-torch 0.9 and 0.10 ignore strides: https://github.com/google-ai-edge/litert-torch/issues/1238
        tensor.data = tensor.data.contiguous()
    with graph.quiet(), torch.no_grad():
        inputs = {"images": images.contiguous(), "content": content, "score_threshold": threshold}
        litert_torch.convert(program, sample_kwargs=inputs).export(str(path))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(METADATA_FILE, _all_texts(spec))


def _example(spec: Spec, count: int) -> tuple[DetectionModel, tuple[Tensor, Tensor, Tensor]]:
    """The program, of a copy of the model, and inputs of `count` images."""
    program, size = DetectionModel(spec).eval(), spec.metadata.image_size
    images = torch.zeros(count, 3, *size, dtype=torch.uint8)
    inputs = images, torch.tensor([size] * count, dtype=torch.int32), torch.tensor(spec.score_threshold)
    importlib.import_module("torchvision")  # the operators of two-stage detectors, before an exporter looks for them
    with torch.no_grad():
        program(*inputs)  # caches the anchors, which become constants of the file
    return program, inputs


def _all_texts(spec: Spec) -> str:
    """The metadata as JSON."""
    numbers = {name: str(getattr(spec, name)) for name in ("score_threshold", "iou_threshold", "batch_size")}
    return json.dumps({**spec.metadata.header(), **spec.texts, **numbers})
