"""Prediction on images without annotations: from files, folders and patterns to boxes, annotated images and JSON.

`predict_images` is the iterator, `predict_to_dir` the command. `image_batches.py` makes batches of images or tiles,
`evaluate.detect_batches` runs them. The originals are not changed.
"""

import dataclasses
import glob
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from PIL import Image

from stoker.data.images import decode
from stoker.data.images.source import display_path
from stoker.data.remote import resolve_images
from stoker.errors import DataError, UsageError, writing
from stoker.evaluation.draw import IMAGE_SUFFIXES as OUTPUT_SUFFIXES
from stoker.evaluation.draw import draw_boxes, save_image
from stoker.evaluation.evaluate import detect_batches
from stoker.evaluation.metrics import Detections, empty_detections
from stoker.hardware.cgroup import host_cores
from stoker.hardware.device import Device
from stoker.inference.image_batches import (
    MERGE_IOU,
    ImageSource,
    InferenceWindow,
    Tiling,
    is_cut,
    iter_batches,
    iter_windows,
    merge_detections,
    num_decode_workers,
    read_image,
)
from stoker.models.layers.postprocess import DetectorProtocol
from stoker.printable import encode_json
from stoker.storage.local_files import write_atomic
from stoker.storage.uri import expand_variables, is_uri, parse_uri

IMAGE_SUFFIXES = (*OUTPUT_SUFFIXES, ".gif", ".jp2", ".pgm", ".ppm")
"""Suffixes of images in folders; a file that is given by name may have any suffix."""
RESULTS_NAME = "predictions.json"
DEFAULT_BATCH_SIZE = 8
WRITE_FIX = "make room, or name another folder with --out"


class ImageResult(NamedTuple):
    """The detections in an image."""

    path: Path | None
    """None for pixels."""
    original_size: tuple[int, int]
    """Height and width of the upright image in pixels; zeros if it could not be read."""
    detections: Detections
    """Best score first; boxes in pixels of the upright image."""
    error: DataError | None
    """The error of reading it; then there are no detections."""


def find_images(inputs: Iterable[str | Path], *, exclude_dir: Path | None = None) -> list[Path]:
    """The images of files, folders (recursive), patterns and URIs of these, each once, in order, without those in
    `exclude_dir`. For an image in a bucket, its stub file (`data/images/source.py`).

    Raises UsageError for an input without images, DataError and StorageError for a URI.
    """
    excluded = None if exclude_dir is None else exclude_dir.resolve()
    unique_paths: dict[Path, Path] = {}
    for location in inputs:
        path = local_path(location)
        if path.is_dir():
            image_paths = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
        elif path.exists():
            image_paths = [path]
        else:
            matched = (Path(name) for name in glob.glob(str(path), recursive=True))
            image_paths = sorted(p for p in matched if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
        included = [p for p in image_paths if excluded is None or excluded not in p.resolve().parents]
        if image_paths and not included:
            message = f"The images of {str(path)!r} are in the output folder, whose images are not used as input."
            raise UsageError(message, location=exclude_dir, fix="name another folder with --out")
        if not image_paths:
            raise UsageError(
                f"There are no images at {display_path(path)!r}.",
                location=display_path(Path.cwd() / path),
                choices=IMAGE_SUFFIXES,
                fix="name image files, a folder with such files, or a pattern in quotes",
            )
        for image_path in included:
            unique_paths.setdefault(image_path.resolve(), image_path)
    return list(unique_paths.values())


def local_path(location: str | os.PathLike[str]) -> Path:
    """The path of `location` with variables expanded; for a URI, the path in its local mirror."""
    expanded = expand_variables(os.fspath(location))
    return resolve_images(parse_uri(expanded)) if is_uri(expanded) else Path(expanded)


def predict_images(
    model: DetectorProtocol,
    sources: Sequence[ImageSource],
    device: Device,
    *,
    image_size: tuple[int, int],
    resize: str,
    score_threshold: float = 0.3,
    iou_threshold: float | None = None,
    precision: str = "fp32",
    batch_size: int = DEFAULT_BATCH_SIZE,
    tiling: Tiling | None = None,
) -> Iterator[ImageResult]:
    """Runs the model, which is on `device`, over images, in order; image_size, resize: as in training.

    tiling: an image larger than a tile is processed whole and in tiles, and the detections are merged. An unreadable
    image is yielded with its error.
    """
    nms_threshold = model.iou_threshold if iou_threshold is None else iou_threshold
    issued_windows: deque[list[InferenceWindow]] = deque()
    batch_detections = detect_batches(
        model,
        iter_batches(
            iter_windows(sources, tiling),
            issued_windows,
            device,
            image_size,
            resize,
            batch_size,
            workers=num_decode_workers(sources, batch_size),
        ),
        device,
        precision=precision,
        score_threshold=score_threshold,
        iou_threshold=nms_threshold,
    )
    window_detections: list[tuple[InferenceWindow, Detections]] = []
    for detections in batch_detections:
        for window in issued_windows.popleft():
            window_detections.append((window, detections.of_image(window.window_index)))
            if window.is_last:
                yield _merge_windows(window_detections, nms_threshold if nms_threshold < 1 else MERGE_IOU)
                window_detections = []


def _merge_windows(window_detections: list[tuple[InferenceWindow, Detections]], iou_threshold: float) -> ImageResult:
    """Merges the detections in all windows of an image; boxes in pixels of the image."""
    image = window_detections[0][0].image
    shifted, cut = [], []
    for window, detections in window_detections:
        x0, y0, x1, y1 = window.region or (0, 0, image.size[1], image.size[0])
        boxes = detections.boxes + np.array([x0, y0, x0, y0], np.float32)
        shifted.append(dataclasses.replace(detections, boxes=boxes))
        cut.append(is_cut(boxes, (x0, y0, x1, y1), image.size))
    merged = dataclasses.replace(Detections.concatenate(shifted), image_indices=np.array([image.image_index]))
    merged = dataclasses.replace(merged, image_index=np.full(len(merged), image.image_index))
    if image.error is not None:
        return ImageResult(image.path, (0, 0), empty_detections([image.image_index]), image.error)
    if len(window_detections) > 1:
        keep = merge_detections(
            merged.boxes, merged.score, merged.label, np.concatenate(cut), iou_threshold=iou_threshold
        )
        merged = merged.select(keep)
    return ImageResult(image.path, image.size, merged, None)


def predict_to_dir(
    predict: Callable[[list[Path]], Iterator[ImageResult]],
    inputs: Sequence[str | Path],
    class_names: Sequence[str],
    out: Path,
) -> Iterator[str]:
    """Writes every image with its boxes, and predictions.json, into `out`; yields a line for each image.

    Raises UsageError for inputs without images and for an `out` with other files; DataError at the end if some images
    could not be read.
    """
    paths = find_images(inputs, exclude_dir=out)
    _require_output_dir(out)
    _write_results(out, [])  # marks the folder as an output folder, also if this run is interrupted
    results: list[dict[str, Any]] = []
    failed: list[DataError] = []
    try:
        with ThreadPoolExecutor(host_cores(), "stoker-draw") as pool:
            pending_draws: deque[Future[None]] = deque()
            for result, path, name in zip(predict(paths), paths, output_names(paths), strict=True):
                results.append(to_json_dict(result, class_names))
                if result.error is not None:
                    failed.append(result.error)
                    yield f"{display_path(path)}: not read: {result.error.cause or result.error.what}"
                    continue
                pending_draws.append(pool.submit(_save_annotated, path, result.detections, class_names, out / name))
                while len(pending_draws) > 2 * DEFAULT_BATCH_SIZE:
                    pending_draws.popleft().result()
                yield f"{display_path(path)}: {_summary(result.detections, class_names)}"
            for future in pending_draws:
                future.result()
    finally:
        _write_results(out, results)  # also after an interruption
    num_done = len(results) - len(failed)
    yield f"{num_done:,} image{'' if num_done == 1 else 's'} with boxes and {RESULTS_NAME} written to {out}"
    if failed:
        raise DataError(
            f"{len(failed):,} of {len(paths):,} images could not be read; the others were processed.",
            location=failed[0].location,
            cause=failed[0].cause or failed[0].what,
            fix=f"all of them have an `error` in {out / RESULTS_NAME}",
        )


def to_json_dict(result: ImageResult, class_names: Sequence[str]) -> dict[str, Any]:
    """An entry of predictions.json: path, width, height, detections; `error` if the image could not be read."""
    detections = result.detections
    columns = zip(detections.label.tolist(), detections.score.tolist(), detections.boxes.tolist(), strict=True)
    entry: dict[str, Any] = {
        "path": None if result.path is None else display_path(result.path),
        "width": result.original_size[1],
        "height": result.original_size[0],
        "detections": [
            {"label": label, "class": class_names[label], "score": round(score, 4), "box": [round(x, 2) for x in box]}
            for label, score, box in columns
        ],
    }
    return entry if result.error is None else entry | {"error": str(result.error)}


def output_names(paths: Sequence[Path]) -> list[str]:
    """An output file name for each image: its own, prefixed by its folders if two would be equal.

    Names are compared without case, as some file systems do. `.jpg` is appended to suffixes that Pillow cannot write.
    """
    file_names = [p.name if p.suffix.lower() in OUTPUT_SUFFIXES else f"{p.name}.jpg" for p in paths]
    name_counts = Counter(name.lower() for name in file_names)
    absolute = [Path(os.path.abspath(p)) for p in paths]  # not resolved: the user's own names
    top = os.path.commonpath([p.parent for p in absolute]) if paths else ""
    names: list[str] = []
    used: set[str] = {RESULTS_NAME}
    for path, name in zip(absolute, file_names, strict=True):
        if name_counts[name.lower()] > 1:
            name = "_".join([*path.parent.relative_to(top).parts, name])
        unique, n = name, 2
        while unique.lower() in used:
            unique, n = f"{Path(name).stem}-{n}{Path(name).suffix}", n + 1
        used.add(unique.lower())
        names.append(unique)
    return names


def _require_output_dir(out: Path) -> None:
    """Raises UsageError if `out` has files that stoker did not write, since images of the same name would be
    replaced."""
    if out.exists() and not out.is_dir():
        raise UsageError("The output folder is a file.", location=out, fix="--out FOLDER")
    if out.exists() and any(out.iterdir()) and not (out / RESULTS_NAME).exists():
        raise UsageError(
            "The output folder contains other files.",
            location=out,
            cause=f"it has no {RESULTS_NAME}, so stoker did not write it",
            fix="name a new folder with --out",
        )


def _write_results(out: Path, results: list[dict[str, Any]]) -> None:
    with writing("The results cannot be written.", out, fix=WRITE_FIX):
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / RESULTS_NAME, msgspec.json.format(encode_json(results), indent=1) + b"\n")


def _save_annotated(path: Path, detections: Detections, class_names: Sequence[str], target: Path) -> None:
    drawn = draw_boxes(Image.fromarray(decode.decode(read_image(path), path)), detections, class_names)
    save_image(drawn, target, fix=WRITE_FIX)


def _summary(detections: Detections, class_names: Sequence[str]) -> str:
    """For example "car 3, bus 1", or "nothing"."""
    counts = Counter(class_names[label] for label in detections.label.tolist())
    return ", ".join(f"{name} {count}" for name, count in counts.most_common()) or "nothing"
