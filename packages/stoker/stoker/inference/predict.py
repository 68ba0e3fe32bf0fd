"""Prediction on images without annotations: from files, folders and patterns to boxes, annotated images and JSON.

`predict_images` is the iterator, `predict_to_dir` the command. `image_batches.py` makes batches of images or tiles,
`evaluate.detect_batches` runs them, `video.py` reads and writes videos. The originals are not changed.
"""

import contextlib
import dataclasses
import glob
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stoker.data.images.source import display_path
from stoker.data.remote import download_image, resolve_images
from stoker.evaluation.detections import Detections, empty_detections
from stoker.evaluation.draw import IMAGE_SUFFIXES as OUTPUT_SUFFIXES
from stoker.evaluation.draw import save_image
from stoker.evaluation.evaluate import detect_batches
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
)
from stoker.inference.prediction import Prediction
from stoker.inference.video import (
    CAMERA_PREFIX,
    VIDEO_SUFFIXES,
    import_av,
    is_camera,
    is_video,
    read_frames,
    video_writer,
)
from stoker.models.layers.postprocess import DetectorProtocol
from stoker_watch.errors import DataError, UsageError, make_error, writing
from stoker_watch.hardware.cgroup import host_cores
from stoker_watch.printable import encode_json
from stoker_watch.storage.local_files import safe_name, write_atomic
from stoker_watch.storage.uri import expand_variables, is_uri, parse_uri

IMAGE_SUFFIXES = (*OUTPUT_SUFFIXES, ".gif", ".jp2", ".pgm", ".ppm")
"""Suffixes of images in folders; a file that is given by name may have any suffix."""
INPUT_SUFFIXES = (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES)
RESULTS_NAME = "predictions.json"
DEFAULT_BATCH_SIZE = 8
WRITE_FIX = "make room, or name another folder with --out"


Detect = Callable[[Iterable[ImageSource]], Iterator[Prediction]]


def find_images(
    inputs: Iterable[str | Path], *, exclude_dir: Path | None = None, suffixes: Sequence[str] = IMAGE_SUFFIXES
) -> list[Path]:
    """The images of files, folders (recursive), patterns and URIs, each once, in order, without those in `exclude_dir`.
    For an image in a bucket, its stub file (`data/images/source.py`). suffixes: of files in folders and patterns.

    Raises UsageError for an input without images, DataError and StorageError for a URI.
    """
    excluded = None if exclude_dir is None else exclude_dir.resolve()
    unique_paths: dict[Path, Path] = {}
    for location in inputs:
        path = local_path(location)
        if is_camera(path) or (path.exists() and not path.is_dir()):
            image_paths = [path]
        else:
            matched = path.rglob("*") if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))
            image_paths = sorted(p for p in matched if p.suffix.lower() in suffixes and p.is_file())
        included = [p for p in image_paths if excluded is None or excluded not in p.resolve().parents]
        if image_paths and not included:
            message = f"The images of {str(path)!r} are in the output folder, whose images are not used as input."
            raise UsageError(message, location=exclude_dir, fix="name another folder with --out")
        if not image_paths:
            what, full_path = f"There are no images at {display_path(path)!r}.", display_path(Path.cwd() / path)
            if not path.exists() and not glob.has_magic(str(path)):
                raise UsageError(f"There is no file or folder {display_path(path)!r}.", location=full_path)
            fix = "name image files, a folder with such files, or a pattern in quotes"
            raise UsageError(what, location=full_path, choices=suffixes, fix=fix)
        for image_path in included:
            unique_paths.setdefault(image_path.resolve(), image_path)
    return list(unique_paths.values())


def local_path(location: str | os.PathLike[str]) -> Path:
    """The path of `location` with variables expanded; for a URI, the path in its local mirror; for a URL, that of the
    downloaded file; for a number, if there is no such file, that of the camera."""
    if os.fspath(location).lower().startswith(("https://", "http://")):
        return download_image(os.fspath(location))
    expanded = expand_variables(os.fspath(location))
    if is_uri(expanded):
        return resolve_images(parse_uri(expanded))
    is_number = expanded.isdecimal() and not os.path.exists(expanded)
    return Path(f"{CAMERA_PREFIX}{expanded}" if is_number else expanded)


def predict_images(
    model: DetectorProtocol,
    sources: Iterable[ImageSource],
    device: Device,
    *,
    image_size: tuple[int, int],
    resize: str,
    iou_threshold: float | None = None,
    batch_size: int = DEFAULT_BATCH_SIZE,
    tiling: Tiling | None = None,
    class_names: Sequence[str] = (),
    **options: Any,
) -> Iterator[Prediction]:
    """Runs the model, which is on `device`, over images, in order; image_size, resize: as in training.

    tiling: an image larger than a tile is processed whole and in tiles. An unreadable one is yielded with its error.
    options: further ones of `detect_batches`.
    """
    nms_threshold = model.iou_threshold if iou_threshold is None else iou_threshold
    issued_windows: deque[list[InferenceWindow]] = deque()
    workers, windows = (num_decode_workers(sources, batch_size), iter_windows(sources, tiling))
    batches = iter_batches(windows, issued_windows, device, image_size, resize, batch_size, workers=workers)
    window_detections: list[tuple[InferenceWindow, Detections]] = []
    for detections in detect_batches(model, batches, device, iou_threshold=nms_threshold, **options):
        for window in issued_windows.popleft():
            window_detections.append((window, detections.of_image(window.window_index)))
            if window.is_last:
                yield _merge_windows(window_detections, nms_threshold if nms_threshold < 1 else MERGE_IOU, class_names)
                window_detections = []


def _merge_windows(
    window_detections: list[tuple[InferenceWindow, Detections]], iou_threshold: float, class_names: Sequence[str]
) -> Prediction:
    """Merges the detections in all windows of an image; boxes in pixels of the image."""
    image = window_detections[0][0].image
    shifted, cut = [], []
    for window, detections in window_detections:
        x0, y0, x1, y1 = window.region or (0, 0, image.size[1], image.size[0])
        boxes = detections.boxes + np.array([x0, y0, x0, y0], np.float32)
        shifted.append(dataclasses.replace(detections, boxes=boxes))
        cut.append(is_cut(boxes, (x0, y0, x1, y1), image.size))
    merged = Detections.concatenate(shifted) if image.error is None else empty_detections()
    if len(window_detections) > 1 and image.error is None:
        columns = merged.boxes, merged.score, merged.label, np.concatenate(cut)
        merged = merged.select(merge_detections(*columns, iou_threshold=iou_threshold))
    return Prediction(
        original_size=image.size if image.error is None else (0, 0),
        boxes=merged.boxes,
        scores=merged.score,
        labels=merged.label,
        error=image.error,
        _source=image.source,
        _class_names=class_names,
    )


def predict_to_dir(
    detect: Detect, inputs: Sequence[str | Path], out: Path, *, save_txt: bool = False, save_crop: bool = False
) -> Iterator[str]:
    """Writes every image and video with its boxes, and predictions.json, into `out`; yields a line for each.

    The frames of a video are lines of VIDEO.jsonl. save_txt: also a YOLO label file, `labels/IMAGE.txt` or
    `labels/VIDEO-FRAME.txt`; save_crop: also each object, `crops/CLASS/IMAGE-N.jpg` or `crops/CLASS/VIDEO-FRAME-N.jpg`.

    Raises UsageError for inputs without images and for an `out` with other files; DataError at the end if some images
    could not be read.
    """
    paths = find_images(inputs, exclude_dir=out, suffixes=INPUT_SUFFIXES)
    images, videos = ([path for path in paths if is_video(path) == wanted] for wanted in (False, True))
    if videos:
        import_av()
    _require_output_dir(out)
    if (out / RESULTS_NAME).exists():
        yield f"{out} has results of an earlier prediction: its images stay, {RESULTS_NAME} is replaced"
    folder = _OutputFolder(out, paths, save_txt=save_txt, save_crop=save_crop)
    folder.write_results()  # marks the folder as an output folder, also if this run is interrupted
    try:
        yield from folder.write_images(detect, images)
        for path in videos:
            yield from folder.write_video(detect, path)
    finally:
        folder.write_results()  # also after an interruption
    failed, num_done = folder.failed, len(folder.results) - len(folder.failed)
    kind = "file" if videos else "image"
    yield f"{num_done:,} {kind}{'' if num_done == 1 else 's'} with boxes and {RESULTS_NAME} written to {out}"
    if failed:
        what = f"{len(failed):,} of {len(paths):,} {kind}s could not be read; the others were processed."
        cause, fix = failed[0].cause or failed[0].what, f"all of them have an `error` in {out / RESULTS_NAME}"
        raise DataError(what, location=failed[0].location, cause=cause, fix=fix)


class _OutputFolder:
    """What `predict_to_dir` writes of these files. Its generators yield lines about them."""

    def __init__(self, out: Path, paths: Sequence[Path], *, save_txt: bool, save_crop: bool) -> None:
        self.out, self.save_txt, self.save_crop = out, save_txt, save_crop
        self.results: list[dict[str, Any]] = []
        """Entries of predictions.json."""
        self.failed: list[DataError] = []
        self._names = dict(zip(paths, output_names(paths), strict=True))
        counts = Counter(Path(name).stem.lower() for name in self._names.values())
        self._stems = {
            path: name if counts[Path(name).stem.lower()] > 1 else Path(name).stem for path, name in self._names.items()
        }

    def write_results(self) -> None:
        with writing("The results cannot be written.", self.out, fix=WRITE_FIX):
            self.out.mkdir(parents=True, exist_ok=True)
            write_atomic(self.out / RESULTS_NAME, msgspec.json.format(encode_json(self.results), indent=1) + b"\n")

    def write_images(self, detect: Detect, paths: Sequence[Path]) -> Iterator[str]:
        pool = ThreadPoolExecutor(host_cores(), "stoker-draw")
        pending: deque[Future[None]] = deque()
        is_abandoned = False
        try:
            for prediction, path in zip(detect(paths), paths, strict=True):
                self.results.append(prediction.to_dict())
                if prediction.error is not None:
                    self.failed.append(prediction.error)
                    yield f"{display_path(path)}: not read: {prediction.error.cause or prediction.error.what}"
                    continue
                pending.append(pool.submit(self._write, prediction, path))
                while len(pending) > 2 * DEFAULT_BATCH_SIZE:
                    pending.popleft().result()
                yield f"{display_path(path)}: {prediction}"
        except GeneratorExit:
            is_abandoned = True
            raise
        finally:
            pool.shutdown(wait=not is_abandoned)  # why not: see `image_batches.iter_batches`
        for future in pending:
            future.result()

    def write_video(self, detect: Detect, path: Path) -> Iterator[str]:
        name = self._names[path]
        self.results.append({"path": display_path(path), "frames": 0, "results": f"{name}.jsonl"})
        entry = self.results[-1]
        try:
            for prediction in _save_video(detect(read_frames(path)), self.out / name, is_camera(path)):
                entry["frames"] += 1
                self._write(prediction, path)
        except DataError as error:
            entry["error"] = str(error)
            self.failed.append(error)
            yield f"{display_path(path)}: not read completely: {error.cause}"
        yield f"{display_path(path)}: {entry['frames']:,} frames"

    def _write(self, prediction: Prediction, path: Path) -> None:
        """Writes an image with boxes, and what else is wanted of an image or frame."""
        stem = self._stems[path]
        if prediction.frame is None:
            save_image(prediction.draw(), self.out / self._names[path], fix=WRITE_FIX)
        else:
            stem += f"-{prediction.frame:06d}"
        if self.save_txt:
            _save_labels(prediction, self.out / "labels" / f"{stem}.txt")
        if self.save_crop:
            _save_crops(prediction, self.out / "crops", stem)


def _save_video(predictions: Iterator[Prediction], target: Path, is_endless: bool) -> Iterator[Prediction]:
    """Writes a video with boxes, and a JSON line for each frame; Ctrl-C ends an endless one. Yields the frames."""
    rows = target.with_name(f"{target.name}.jsonl")
    with writing("The video cannot be written.", target, fix=WRITE_FIX), contextlib.ExitStack() as stack:
        rows.unlink(missing_ok=True)  # it may be a link
        lines, write_frame = stack.enter_context(rows.open("wb")), stack.enter_context(video_writer(target))
        if is_endless:
            stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        for prediction in predictions:
            if prediction.error is not None:
                raise prediction.error
            lines.write(encode_json(prediction.to_dict()) + b"\n")
            write_frame(prediction.draw(), prediction.time_s or 0.0)
            yield prediction


def _save_labels(prediction: Prediction, target: Path) -> None:
    """Writes a YOLO label file; also an empty one, which says that the image is background."""
    height, width = prediction.original_size
    boxes = prediction.boxes.astype(np.float64) / (width, height, width, height)
    centers, sizes = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    rows = zip(prediction.labels.tolist(), np.concatenate([centers, sizes], axis=1).tolist(), strict=True)
    text = "".join(f"{label} " + " ".join(f"{value:.6f}" for value in box) + "\n" for label, box in rows)
    with writing("The labels cannot be written.", target, fix=WRITE_FIX):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, text.encode(), durable=False)


def _save_crops(prediction: Prediction, folder: Path, stem: str) -> None:
    image = prediction.load_image()
    for n, found in enumerate(prediction, start=1):
        # Names of classes come from data sets: none may lead out of the folder.
        name = safe_name(found.name)[:60].strip(".") or str(found.label)
        box = (*np.floor(found.box[:2]).tolist(), *np.ceil(found.box[2:]).tolist())
        save_image(image.crop(box), folder / name / f"{stem}-{n}.jpg", fix=WRITE_FIX)


def output_names(paths: Sequence[Path]) -> list[str]:
    """An output file name for each image: its own, prefixed by its folders if two would be equal.

    Names are compared without case. `.jpg` is appended to suffixes that Pillow cannot write; videos become `.mp4`.
    """
    file_names = [
        f"{p.name.removesuffix('.mp4')}.mp4" if is_video(p)
        else p.name if p.suffix.lower() in OUTPUT_SUFFIXES
        else f"{p.name}.jpg"
        for p in paths
    ]  # fmt: skip
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
    """Raises UsageError if `out` has files of others, since images of the same name would be replaced."""
    if out.exists() and not out.is_dir():
        raise UsageError("The output folder is a file.", location=out, fix="--out FOLDER")
    if out.exists() and any(out.iterdir()) and not (out / RESULTS_NAME).exists():
        raise make_error(UsageError, "output-folder-has-other-files", out, results=RESULTS_NAME)
