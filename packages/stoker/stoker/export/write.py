"""`stoker export`: writes a trained detector as a file of another runtime, if its detections equal those of the model.

`graph.py` and `programs.py` build the file. It is written into a temporary folder, compared with the model on real
images (`parity.py`), and gets its place only if they agree. docs/export.md describes the formats.
"""

import copy
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.config.settings import from_toml
from stoker.data.batch import PAD_COLOR
from stoker.data.index import open_index_of
from stoker.data.loading.buffers import HostBatchBuffer
from stoker.evaluation.evaluate import SCORE_THRESHOLD
from stoker.export import graph, parity, programs
from stoker.hardware.device import Device
from stoker.inference.image_batches import decode_into_buffer, read_image
from stoker.inference.predict import find_images
from stoker.inference.runtime import RUNTIMES, require_package
from stoker.knowledge import read_toml
from stoker.models.detector import Detector
from stoker.models.layers.postprocess import MAX_DETECTIONS
from stoker.models.weights import model_file
from stoker_watch.errors import DataError, StokerError, StorageError, UsageError, WeightsError, make_error, writing
from stoker_watch.hardware.cgroup import host_cores
from stoker_watch.runs.records import CONFIG
from stoker_watch.storage.local_files import fsync_folder
from stoker_watch.storage.uri import expand_variables, is_uri, parse_uri

NUM_PARITY_IMAGES = 32
"""Number of images on which file and model are compared."""


class ParityInputs(NamedTuple):
    images: NDArray[np.uint8]
    """[P, 3, H, W], RGB, resized and padded."""
    resized_size: NDArray[np.int32]
    """[P, 2], height and width of each image without the padding."""
    names: list[str]


class ExportFormat(NamedTuple):
    suffix: str
    extra: str
    """The extra of stoker that installs the packages."""
    packages: tuple[str, ...]
    write: Callable[[Path, graph.Spec], None]


FORMATS = {
    "onnx": ExportFormat(".onnx", "onnx", ("onnx", "onnxscript", "onnxruntime"), programs.write_onnx),
    "openvino": ExportFormat(".xml", "openvino", ("openvino", "onnx", "onnxscript"), programs.write_openvino),
    "litert": ExportFormat(".tflite", "litert", ("litert_torch", "ai_edge_litert"), programs.write_litert),
    "torch": ExportFormat(".pt2", "", (), programs.write_torch),
}


def find_format(name: str) -> ExportFormat:
    """Raises UsageError for a format that stoker does not write, with the command of those made from its files."""
    if name in FORMATS:
        return FORMATS[name]
    for other in read_toml("export_formats.toml").values():
        if name in other["names"]:
            raise UsageError(other["what"], cause=other["limits"], choices=list(FORMATS), fix=other["fix"])
    raise UsageError(f"--format {name!r} is not a format of stoker export.", choices=list(FORMATS))


def export_model(
    run: str | Path,
    *,
    format: str = "onnx",
    out: Path | None = None,
    batch_size: int | None = None,
    conf: float = SCORE_THRESHOLD,
    iou: float | None = None,
    max_detections: int = MAX_DETECTIONS,
    opset: int = graph.OPSETS[0],
    images: Sequence[str] = (),
) -> Iterator[str]:
    """Writes a run's best weights (or a .safetensors file) in a format of FORMATS; yields lines about it, the file's
    name first.

    out: default next to the weights; for a run in a bucket, in the current folder. images: for the comparison, default
    the run's validation split. conf, iou: default thresholds of the file; docs/export.md says which its callers can
    override.

    Raises ParityError if the file's detections differ from the model's, PreflightError if a package is missing,
    UsageError if the format cannot take the model, there are no images for the comparison or `out` is not an export of
    stoker, StorageError.
    """
    target_format = find_format(format)
    for package in target_format.packages:
        require_package(package, "An export", target_format.extra)
    source = model_file.local_path(run)
    weights = model_file.find_weights(source)
    if weights.suffix in RUNTIMES:
        raise UsageError(f"{str(weights)!r} is exported already.", fix="name a run folder or a .safetensors file")
    model, metadata = model_file.load_model(weights)
    nms_threshold = model.iou_threshold if iou is None else iou
    out_path = out or _default_out(run, weights, source, target_format.suffix)
    _require_own_export(out_path, target_format.suffix)
    numbers = conf, nms_threshold, max_detections, opset, batch_size
    spec = graph.Spec(model, metadata, *numbers, texts=_metadata(metadata, weights))
    spec.check()
    if nms_threshold >= 1:
        spec = spec._replace(model=_without_spare_candidates(model, max_detections))
    inputs = _load_images(source, weights, metadata, images)
    with (
        writing("The exported file cannot be written.", out_path, fix="--out FILE"),
        tempfile.TemporaryDirectory(prefix=f".{out_path.name}.", dir=out_path.parent) as folder,
    ):
        temp_path = Path(folder) / out_path.name
        try:
            target_format.write(temp_path, spec)
        except (StokerError, OSError):
            raise
        except Exception as error:  # of the exporters, which have no common base
            lines = str(error).strip().splitlines() or [""]
            reason = next((line for line in lines if "not found" in line.lower()), lines[0])
            what, cause = f"{metadata.settings.model} cannot be exported as {format}.", f"{type(error).__name__}: "
            choices = [f"--format {other}" for other in FORMATS if other != format]
            raise UsageError(what, location=weights, cause=cause + reason[:300], choices=choices) from error
        summary = _check_parity(spec._replace(model=model), temp_path, out_path, inputs)
        files = sorted(Path(folder).iterdir(), key=lambda file: file.name == out_path.name)  # it is the last one
        size_bytes = sum(file.stat().st_size for file in files)
        for file in files:
            with file.open("rb") as written:
                os.fsync(written.fileno())
            file.replace(out_path.parent / file.name)
        fsync_folder(out_path.parent)
    opset_text = f", opset {opset}" if format in ("onnx", "openvino") else ""
    yield f"{out_path} ({size_bytes / 1e6:.1f} MB{opset_text}, from {weights})"
    yield summary


MIN_CANDIDATES = 300
"""Candidates of a level in a file without NMS, at least; YOLO26 has 300 of all levels."""


def _without_spare_candidates(model: Detector, max_detections: int) -> Detector:
    """A model for a file without NMS, whose detections are the best candidates: no more of a level are needed, and some
    in the padding, which are none. An ember takes 5 % less time so."""
    if not hasattr(model, "pre_nms_top_n"):
        return model
    limited: Any = copy.deepcopy(model)
    limited.pre_nms_top_n = min(limited.pre_nms_top_n, max(MIN_CANDIDATES, 2 * max_detections))
    found: Detector = limited
    return found


def _check_parity(spec: graph.Spec, temp_path: Path, out_path: Path, inputs: ParityInputs) -> str:
    """A line about the comparison. Raises ParityError."""
    threads = host_cores()
    file = RUNTIMES[temp_path.suffix](temp_path, num_threads=threads, trust_file=True)  # written just now
    limits: dict[str, Any] = {"iou_threshold": spec.iou_threshold, "max_detections": spec.max_detections}
    compare = partial(parity.compare_outputs, spec.model, file, *inputs, **limits)
    result, duration_s = compare(score_threshold=spec.score_threshold)
    is_too_few = result.num_boxes < len(inputs.names)
    if is_too_few:
        result = result.merge(compare(score_threshold=0.0)[0]._replace(num_images=0))
    parity.require_parity(result, out_path, file.title)
    note = " (of any score: few are above the threshold)" if is_too_few else ""
    ties = f", {result.num_ties} boxes in only one of the two, at a threshold or tie" if result.num_ties else ""
    return (
        f"parity on {result.num_images} images, {result.num_boxes:,} boxes{note}: "
        f"boxes within {result.max_box_diff_px:.2g} px, scores within {result.max_score_diff:.1g}"
        f"{ties}; {1e3 * duration_s:.3g} ms/image in {file.runtime} ({threads} threads)"
    )


def _default_out(run: str | Path, weights: Path, source: Path, suffix: str) -> Path:
    """RUN/best.onnx, or RUN/step-00001200.onnx for a run with only checkpoints; for a URI, in the current folder."""
    text = expand_variables(run) if isinstance(run, str) else str(run)
    if is_uri(text):
        return Path(parse_uri(text).name.removesuffix(".safetensors") + suffix)
    if not source.is_dir():
        return weights.with_suffix(suffix)
    return source / f"{weights.stem if weights.parent == source else weights.parent.name}{suffix}"


def _require_own_export(target: Path, suffix: str) -> None:
    """Raises UsageError for an existing file that stoker did not export, StorageError if the folder is missing."""
    if target.suffix != suffix:
        what = f"--out {str(target)!r} is not the name of such a file."
        raise UsageError(what, fix=f"--out {target.with_suffix(suffix)}")
    if not target.parent.is_dir():
        what = "The folder for the exported file is missing."
        raise StorageError(what, location=target.parent, fix="make it, or --out")
    weights_of_openvino = target.with_suffix(".bin")
    try:
        if target.exists():
            RUNTIMES[suffix](target, num_threads=1)
        elif suffix == ".xml" and weights_of_openvino.exists():
            raise WeightsError("It belongs to no .xml file.", location=weights_of_openvino)
    except WeightsError as error:
        raise make_error(UsageError, "export-replaces-a-file", error.location) from error


def _metadata(metadata: model_file.ModelMetadata, weights: Path) -> dict[str, str]:
    """Metadata of the file for other programs; docs/export.md."""
    texts = {
        "class_names": json.dumps(list(metadata.class_names), ensure_ascii=False),
        "image_size": json.dumps(list(metadata.image_size)),
        "resize": metadata.resize,
        "padding": json.dumps(list(PAD_COLOR)),
        "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
    }
    if metadata.threshold is not None:  # the largest number of four digits below it: a box at it counts as found
        texts["threshold"] = str(max(0.0, math.ceil(metadata.threshold * 1e4 - 1) / 1e4))
    return texts


def _load_images(
    run: Path, weights: Path, metadata: model_file.ModelMetadata, image_inputs: Sequence[str]
) -> ParityInputs:
    """Up to NUM_PARITY_IMAGES of `image_inputs`, else of the run's validation split, at equal intervals. Unreadable
    ones are skipped. Raises UsageError if there are none, or the data set is unknown or cannot be opened."""
    fix = "--images with files, folders or patterns"
    sources: list[tuple[Path, Callable[[], bytes]]] = [
        (path, partial(read_image, path)) for path in (find_images(image_inputs) if image_inputs else ())
    ]
    if not sources:
        folder = run if run.is_dir() else weights.parent
        message = "There are no images to compare the exported file with the model on."
        if not (folder / CONFIG).exists():
            raise UsageError(message, location=folder, cause=f"no {CONFIG} there names a data set", fix=fix)
        data = from_toml(folder / CONFIG)[0].data
        try:
            index = open_index_of(data)
            rows = index.image_indices("val").tolist()
        except StokerError as error:
            cause = f"the run's data set cannot be opened: {error.what}"
            raise UsageError(message, location=data.data, cause=cause, fix=fix) from error
        sources = [(index.path(row), partial(index.read, row)) for row in rows]
    count = min(NUM_PARITY_IMAGES, len(sources))
    chosen_indices = np.unique(np.linspace(0, len(sources) - 1, count).round().astype(np.int64))
    buffer = HostBatchBuffer(Device(torch.device("cpu")), len(chosen_indices), metadata.image_size, 1)
    names: list[str] = []
    last_error: Exception | None = None
    for path, read in (sources[n] for n in chosen_indices.tolist()):
        try:
            decode_into_buffer(buffer, len(names), read(), path, metadata.resize)
            names.append(str(path))
        except (DataError, OSError) as error:
            last_error = error
    if not names:
        raise make_error(
            UsageError, "no-image-for-parity", sources[0][0], cause=str(last_error), fix=fix
        ) from last_error
    return ParityInputs(buffer.pixels[: len(names)].transpose(0, 3, 1, 2), buffer.resized_size[: len(names)], names)
