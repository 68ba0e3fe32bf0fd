"""A detector as the bytes of one ONNX file that runs without stoker: it includes normalization, decoding and NMS.

`torch.onnx` exports the network up to the candidate boxes (`Detector.candidates`). NMS is written here in ONNX's text
format, because its result has no fixed size and torch's exporter has no operator for it. docs/export.md describes the
file's inputs, outputs and metadata. `write.py` writes the file; `runtime.py` runs it.
"""

import contextlib
import importlib.metadata
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from stoker import models
from stoker.inference.runtime import require_package
from stoker.models.layers.postprocess import MAX_DETECTIONS
from stoker.models.weights import model_file
from stoker_watch.errors import ConfigError

OPSETS = (18, 21)
"""First and last supported operator set: the minimum of torch's exporter, the maximum of onnxruntime 1.20."""
IR_VERSION = 10
"""The newest that onnxruntime 1.20 reads."""
CANDIDATE_OUTPUTS = ("nms_boxes", "nms_scores", "nms_labels")
"""Outputs of the exported network, and inputs of NMS."""

NMS_GRAPH, NMS_NODES = (
    Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("nms.onnxtxt", "nms_nodes.onnxtxt")
)
"""The best `max_detections` boxes after NMS, as `postprocess.topk_detections`, and in it `postprocess.nms_per_class`
without a loop: the scores are expanded to one row per class, so the operator works within classes and exactly (the
usual trick, an offset per class, costs the last digits of the coordinates). The scores of the kept boxes are scattered
back to their candidates. No class needs more than `max_detections` boxes, the operator's limit per class."""
NO_NMS_NODES = "    nms_left = Identity (nms_scores)\n"
"""For a threshold of 1: no NMS."""


class CandidateModel(nn.Module):
    """A detector up to the candidates before NMS, for torch's exporter."""

    def __init__(self, model: "models.Detector") -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, resized_size: Tensor, score_threshold: Tensor) -> tuple[Tensor, ...]:
        """images: uint8 [B, 3, H, W]; resized_size: int32 [1, 2] or [B, 2]; score_threshold: []."""
        resized_sizes = resized_size.expand(images.shape[0], 2)
        return tuple(self.model.candidates(self.model(images), resized_sizes, score_threshold=score_threshold))


class Spec(NamedTuple):
    model: "models.Detector"
    """On the CPU."""
    metadata: model_file.ModelMetadata
    score_threshold: float
    iou_threshold: float
    """1: no NMS, and no input for its threshold."""
    max_detections: int = MAX_DETECTIONS
    opset: int = OPSETS[0]
    batch_size: int | None = None
    """Images per call; None for any number, which is one in LiteRT."""
    texts: Mapping[str, str] = {}
    """Further metadata of the file."""

    def check(self) -> None:
        """Raises ConfigError for a number out of range; the flag is named."""
        for name, value, is_valid, choices in (
            ("conf", self.score_threshold, 0 <= self.score_threshold <= 1, "0 … 1"),
            ("iou", self.iou_threshold, 0 <= self.iou_threshold <= 1, "0 … 1"),
            ("max-detections", self.max_detections, self.max_detections >= 1, "1 or more"),
            ("opset", self.opset, OPSETS[0] <= self.opset <= OPSETS[1], f"{OPSETS[0]} … {OPSETS[1]}"),
            ("batch-size", self.batch_size, self.batch_size is None or self.batch_size >= 1, "dynamic, 1 or more"),
        ):
            if not is_valid:
                raise ConfigError(f"--{name} {value} is out of range.", choices=choices.split(", "))


def build_onnx(spec: Spec) -> bytes:
    """The ONNX file. Raises PreflightError if a package is missing, ConfigError for a number out of range."""
    spec.check()
    onnx = require_package("onnx", "An export")
    require_package("onnxscript", "An export")
    numpy_helper = importlib.import_module("onnx.numpy_helper")
    network = export_network(spec.model, spec.metadata.image_size, spec.opset)
    graph = network.graph
    candidates = graph.output[0].type.tensor_type.shape.dim[1].dim_value
    has_nms = spec.iou_threshold < 1
    graph_text = NMS_GRAPH.format(
        num_candidates=candidates,
        max_detections=min(spec.max_detections, candidates),
        nms_nodes=NMS_NODES if has_nms else NO_NMS_NODES,
        threshold_input=", float iou_threshold" if has_nms else "",
    )
    nms_graph = onnx.parser.parse_graph(graph_text)
    constants: dict[str, Any] = {
        "content": np.array([spec.metadata.image_size], np.int32),
        "score_threshold": np.array(spec.score_threshold, np.float32),
    }
    if has_nms:
        constants["iou_threshold"] = np.array(spec.iou_threshold, np.float32)
        constants["nms_classes"] = np.arange(len(spec.metadata.class_names), dtype=np.int64)[None, :, None]
    for name, value in constants.items():
        graph.initializer.append(numpy_helper.from_array(value, name))
    graph.node.extend(nms_graph.node)
    del graph.output[:], graph.value_info[:]
    graph.output.extend(nms_graph.output)
    graph.input.extend(graph_input for graph_input in nms_graph.input if graph_input.name == "iou_threshold")
    for value in (*graph.input, *graph.output):
        dims = value.type.tensor_type.shape.dim
        if value.name == "content":
            dims[0].dim_param = "batch or 1"
        elif dims and spec.batch_size is not None:
            dims[0].dim_value = spec.batch_size
        elif dims:
            dims[0].dim_param = "batch"
    _strip(network)
    for key, text in {**spec.metadata.header(), "iou_threshold": str(spec.iou_threshold), **spec.texts}.items():
        network.metadata_props.add(key=key, value=text)
    network.producer_name, network.producer_version = "stoker", importlib.metadata.version("stoker")
    network.ir_version = IR_VERSION
    onnx.checker.check_model(network, full_check=True)
    return bytes(network.SerializeToString())


def export_network(model: "models.Detector", image_size: tuple[int, int], opset: int) -> Any:
    """The onnx.ModelProto from the inputs to the candidates."""
    # Two images: torch treats a size of one as a constant.
    images = torch.zeros(2, 3, *image_size, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    resized_size, threshold = torch.tensor([image_size], dtype=torch.int32), torch.tensor(0.5)
    candidate_model = CandidateModel(model).eval()
    importlib.import_module("torchvision")  # the operators of two-stage detectors, before the exporter looks for them
    with quiet(), torch.no_grad():
        candidate_model(images, resized_size, threshold)  # caches the anchors, which become constants of the file
        program = torch.onnx.export(
            candidate_model,
            (images, resized_size, threshold),
            opset_version=opset,
            input_names=["images", "content", "score_threshold"],
            output_names=list(CANDIDATE_OUTPUTS),
            dynamic_shapes=({0: torch.export.Dim("batch")}, None, None),
            verbose=False,
        )
    assert program is not None
    return program.model_proto


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences the exporters; the file itself is checked afterwards."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _strip(network: Any) -> None:
    """Removes the exporter's debug information: 200 kB of stack traces with paths of this machine."""
    graph = network.graph
    for item in (*graph.node, *graph.initializer, *graph.input, *graph.output, graph, network):
        del item.metadata_props[:]
        item.doc_string = ""
    graph.name = "detector"
