"""`stoker export`: writes a trained detector as an ONNX file, if its detections equal those of the model.

`graph.py` builds the file. It is written under a temporary name, compared with the model on real images (`parity.py`),
and gets its name only if they agree. docs/onnx.md describes the file.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.config.settings import from_run
from stoker.data.batch import PAD_COLOR
from stoker.data.index import open_index_of
from stoker.data.loading.buffers import HostBatchBuffer
from stoker.errors import (
    DataError,
    StokerError,
    StorageError,
    UsageError,
    WeightsError,
    writing,
)
from stoker.evaluation.evaluate import SCORE_THRESHOLD
from stoker.export import graph, parity
from stoker.hardware.cgroup import host_cores
from stoker.hardware.device import Device
from stoker.inference.image_batches import decode_into_buffer, read_image
from stoker.inference.predict import find_images
from stoker.inference.runtime import ONNX_SUFFIX, OnnxModel, require_package
from stoker.models.detector import Detector
from stoker.models.layers.postprocess import MAX_DETECTIONS
from stoker.models.weights import model_file
from stoker.runs.records import CONFIG
from stoker.storage.local_files import fsync_folder
from stoker.storage.uri import expand_variables, is_uri, parse_uri

NUM_PARITY_IMAGES = 32
"""Number of images on which file and model are compared."""


class ParityInputs(NamedTuple):
    """Preprocessed images."""

    images: NDArray[np.uint8]
    """[P, 3, H, W], RGB, resized and padded."""
    resized_size: NDArray[np.int32]
    """[P, 2], height and width of each image without the padding."""
    names: list[str]


def export_onnx(
    run: str | Path,
    *,
    out: Path | None = None,
    batch_size: int | None = None,
    conf: float = SCORE_THRESHOLD,
    iou: float | None = None,
    max_detections: int = MAX_DETECTIONS,
    opset: int = graph.OPSETS[0],
    images: Sequence[str] = (),
) -> Iterator[str]:
    """Writes a run's best weights (or a .safetensors file) as ONNX; yields lines about it, the file's name first.

    out: default next to the weights; for a run in a bucket, in the current folder. images: for the comparison, default
    the run's validation split. conf, iou: default thresholds of the file; callers of the file can override them.

    Raises ParityError if the file's detections differ from the model's, PreflightError if a package is missing,
    UsageError if there are no images for the comparison or `out` is not an export of stoker, StorageError.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require_package(package, "Nothing can be exported")
    source = model_file.local_path(run)
    weights = model_file.find_weights(source)
    if weights.suffix == ONNX_SUFFIX:
        raise UsageError(f"{str(weights)!r} is exported already.", fix="name a run folder or a .safetensors file")
    model, metadata = model_file.load_model(weights)
    nms_threshold = model.iou_threshold if iou is None else iou
    out_path = out or _default_out(run, weights, source)
    _require_own_export(out_path)
    inputs = _load_images(source, weights, metadata, images)
    onnx_bytes = graph.build_onnx(
        model,
        metadata,
        score_threshold=conf,
        iou_threshold=nms_threshold,
        max_detections=max_detections,
        opset=opset,
        batch_size=batch_size,
        metadata=_metadata(metadata, weights),
    )

    temp_path = out_path.with_name(f".{out_path.name}.{os.getpid()}.tmp")
    try:
        temp_path.unlink(missing_ok=True)  # it may be a link
        with writing("The exported file cannot be written.", out_path, fix="--out FILE"), temp_path.open("xb") as file:
            file.write(onnx_bytes)
            file.flush()
            os.fsync(file.fileno())
        summary = _check_parity(model, temp_path, out_path, inputs, conf, nms_threshold, max_detections)
        with writing("The exported file cannot be written.", out_path, fix="--out FILE"):
            temp_path.replace(out_path)
            fsync_folder(out_path.parent)
    finally:
        temp_path.unlink(missing_ok=True)
    yield f"{out_path} ({len(onnx_bytes) / 1e6:.1f} MB, opset {opset}, from {weights})"
    yield summary


def _check_parity(
    model: Detector, temp_path: Path, out_path: Path, inputs: ParityInputs, conf: float, iou: float, max_detections: int
) -> str:
    """A line about the comparison. Raises ParityError."""
    threads = host_cores()
    file = OnnxModel(temp_path, num_threads=threads)
    compare = partial(parity.compare_outputs, model, file, *inputs, iou_threshold=iou, max_detections=max_detections)
    result, duration_s = compare(score_threshold=conf)
    is_too_few = result.num_boxes < len(inputs.names)
    if is_too_few:
        result = result.merge(compare(score_threshold=0.0)[0]._replace(num_images=0))
    parity.require_parity(result, out_path)
    note = " (of any score: few are above the threshold)" if is_too_few else ""
    ties = f", {result.num_ties} boxes in only one of the two, at a threshold or tie" if result.num_ties else ""
    return (
        f"parity on {result.num_images} images, {result.num_boxes:,} boxes{note}: "
        f"boxes within {result.max_box_diff_px:.2g} px, scores within {result.max_score_diff:.1g}"
        f"{ties}; {1e3 * duration_s:.3g} ms/image in onnxruntime ({threads} threads)"
    )


def _default_out(run: str | Path, weights: Path, source: Path) -> Path:
    """RUN/best.onnx, or RUN/step-00001200.onnx for a run with only checkpoints, whose folders stay unchanged; for a URI
    its name, in the current folder."""
    text = expand_variables(run) if isinstance(run, str) else str(run)
    if is_uri(text):
        return Path(parse_uri(text).name.removesuffix(".safetensors") + ONNX_SUFFIX)
    if not source.is_dir():
        return weights.with_suffix(ONNX_SUFFIX)
    return source / f"{weights.stem if weights.parent == source else weights.parent.name}{ONNX_SUFFIX}"


def _require_own_export(target: Path) -> None:
    """Raises UsageError for an existing file that stoker did not export, StorageError if the folder is missing."""
    if target.suffix != ONNX_SUFFIX:
        fix = f"--out {target.with_suffix(ONNX_SUFFIX)}"
        raise UsageError(f"--out {str(target)!r} is not the name of an ONNX file.", fix=fix)
    if not target.parent.is_dir():
        raise StorageError(
            "The folder for the exported file is missing.", location=target.parent, fix="make it, or --out"
        )
    if target.exists():
        try:
            OnnxModel(target, num_threads=1)
        except WeightsError as error:
            cause = "a file with this name exists that stoker did not export"
            raise UsageError(
                "The exported file would replace another.",
                location=target,
                cause=cause,
                fix="another --out, or remove it",
            ) from error


def _metadata(metadata: model_file.ModelMetadata, weights: Path) -> dict[str, str]:
    """Metadata of the file for other programs; docs/onnx.md."""
    return {
        "class_names": json.dumps(list(metadata.class_names), ensure_ascii=False),
        "image_size": json.dumps(list(metadata.image_size)),
        "resize": metadata.resize,
        "padding": json.dumps(list(PAD_COLOR)),
        "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
    }


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
        data = from_run(folder / CONFIG)[0].data
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
        raise UsageError(
            "None of the images to compare on can be read.",
            location=sources[0][0],
            cause=str(last_error),
            fix=fix,
        ) from last_error
    return ParityInputs(buffer.pixels[: len(names)].transpose(0, 3, 1, 2), buffer.resized_size[: len(names)], names)
