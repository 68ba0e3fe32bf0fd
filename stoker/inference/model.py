"""Python API of a trained detector: `load` it, then `predict` on images and `evaluate` on a data set.

`stoker.load` is `load`; the commands `eval` and `predict` call these methods. `evaluation/evaluate.py` and `predict.py`
run the model; `export/write.py` exports it.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from stoker.config.settings import Config, DataSettings, from_fields, from_run
from stoker.data.images import decode
from stoker.data.index import Index, open_index_of, require_images
from stoker.data.validation.problems import DEFAULT_MAX_BAD_FRACTION
from stoker.errors import DataError, UsageError
from stoker.evaluation.draw import draw_boxes
from stoker.evaluation.evaluate import compute_metrics, detect, evaluation_loader, ground_truth, require_boxes
from stoker.evaluation.metrics import Metrics, boxes_in_image
from stoker.hardware.cgroup import host_cores
from stoker.hardware.device import Device, select_device
from stoker.inference.image_batches import TILE_OVERLAP, ImageSource, Tiling, read_image
from stoker.inference.predict import DEFAULT_BATCH_SIZE, ImageResult, local_path, predict_images, predict_to_dir
from stoker.inference.runtime import RUNTIMES
from stoker.models.layers.postprocess import DetectorProtocol
from stoker.models.weights import model_file
from stoker.runs.records import CONFIG

ImageInput = str | os.PathLike[str] | NDArray[np.uint8] | Image.Image
"""A file or its URI, RGB pixels as uint8 [h, w, 3], or a Pillow image."""
DEFAULT_CONF = 0.3
"""Default minimum score of a detection."""


@dataclasses.dataclass(frozen=True, eq=False)
class Prediction:
    """The n detections in an image, best score first."""

    path: Path | None
    """The image's file, or its stub file for an image in a bucket; None for pixels."""
    original_size: tuple[int, int]
    """Height and width of the image, upright by EXIF."""
    boxes: NDArray[np.float32]
    """[n, 4], xyxy in pixels of the upright image."""
    scores: NDArray[np.float32]
    """[n], 0 … 1."""
    labels: NDArray[np.int64]
    """[n], indices into the model's `class_names`."""
    names: list[str]
    """[n], class names."""
    _source: ImageSource = dataclasses.field(repr=False)
    _class_names: tuple[str, ...] = dataclasses.field(repr=False)

    def draw(self) -> Image.Image:
        """The image with boxes, RGB; small images are enlarged. Raises DataError if its file does not exist anymore."""
        pixels = self._source
        if isinstance(pixels, Path):
            pixels = decode.decode(read_image(pixels), pixels)
        detections = boxes_in_image(self.boxes, self.labels, self.scores)
        return draw_boxes(Image.fromarray(pixels), detections, self._class_names)


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A trained detector on its device, in evaluation mode; from `load`."""

    source: Path
    """The loaded run folder or file."""
    weights: Path
    """The file with the weights."""
    class_names: tuple[str, ...]
    """[C], by label."""
    image_size: tuple[int, int]
    """Height and width in pixels to which images are resized and padded."""
    _metadata: model_file.ModelMetadata = dataclasses.field(repr=False)
    _detector: DetectorProtocol = dataclasses.field(repr=False)
    _device: Device = dataclasses.field(repr=False)
    _precision: str = dataclasses.field(repr=False)

    def predict(
        self,
        images: ImageInput | Sequence[ImageInput],
        *,
        conf: float = DEFAULT_CONF,
        iou: float | None = None,
        tile: int | None = None,
        tile_overlap: float | None = None,
        batch_size: int = DEFAULT_BATCH_SIZE,
    ) -> list[Prediction]:
        """The detections in each image, in order; a single image gives a list of one.

        conf: minimum score, 0 … 1. iou: NMS threshold; default: the architecture's own. tile: images with a longer side
        than this are also processed in tiles of this side, to detect small objects in large images; tile_overlap:
        minimum overlap of neighboring tiles as a fraction of their side, default 0.2. batch_size: images per forward
        pass.

        Raises DataError for an image that cannot be read, UsageError for an input that is not an image or a number out
        of range.
        """
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size} is out of range.", choices=["1 or more"])
        inputs = images if isinstance(images, Sequence) and not isinstance(images, str | bytes) else [images]
        sources = [_to_source(image) for image in inputs]
        results = self._detect(sources, conf, iou, _make_tiling(conf, iou, tile, tile_overlap), batch_size)
        predictions = []
        for source, result in zip(sources, results, strict=True):
            if result.error is not None:
                raise result.error
            detections = result.detections
            names = [self.class_names[label] for label in detections.label.tolist()]
            columns = detections.boxes, detections.score, detections.label, names
            predictions.append(Prediction(result.path, result.original_size, *columns, source, self.class_names))
        return predictions

    def predict_to_dir(
        self,
        images: Sequence[str],
        out: Path,
        *,
        conf: float = DEFAULT_CONF,
        iou: float | None = None,
        tile: int | None = None,
        tile_overlap: float | None = None,
    ) -> Iterator[str]:
        """Detects objects in files, folders and patterns; writes the images with boxes and predictions.json into `out`.

        Yields a line for each image, also for an unreadable one, which raises DataError at the end.
        """
        tiling = _make_tiling(conf, iou, tile, tile_overlap)

        def detect_all(paths: Sequence[ImageSource]) -> Iterator[ImageResult]:
            return self._detect(paths, conf, iou, tiling, DEFAULT_BATCH_SIZE)

        yield from predict_to_dir(detect_all, images, self.class_names, out)

    def _detect(
        self, sources: Sequence[ImageSource], conf: float, iou: float | None, tiling: Tiling | None, batch_size: int
    ) -> Iterator[ImageResult]:
        return predict_images(
            self._detector,
            sources,
            self._device,
            image_size=self._metadata.image_size,
            resize=self._metadata.resize,
            score_threshold=conf,
            iou_threshold=iou,
            precision=self._precision,
            batch_size=max(1, min(batch_size, len(sources))),
            tiling=tiling,
        )

    def evaluate(
        self,
        data: str | os.PathLike[str] | None = None,
        *,
        split: str = "val",
        format: str | None = None,
        allow_outside: bool = False,
        batch_size: int = DEFAULT_BATCH_SIZE,
    ) -> Metrics:
        """The COCO metrics on a split of a data set, default the one of the training run, as it was read then.
        allow_outside: read images that another one names outside its folder.

        Raises UsageError if no data set is known, DataError if it has other classes or no such split.
        """
        if batch_size < 1:
            raise UsageError(f"--batch-size {batch_size} is out of range.", choices=["1 or more"])
        is_run = (self.source / CONFIG).exists()
        run_data = from_run(self.source / CONFIG)[0].data if is_run else DataSettings()
        if data is None:
            if not is_run:
                fix = f"stoker eval {self.source} DATA"
                raise UsageError("No data set to evaluate on was given.", location=self.source, fix=fix)
            changes = {"format": format or run_data.format, "allow_outside": allow_outside or run_data.allow_outside}
            settings = Config(data=run_data).replace(**changes).data
        else:
            fields = {"data": data, "format": format, "classes": run_data.classes, "allow_outside": allow_outside}
            settings = from_fields(fields).data
        index = open_index_of(settings)
        image_indices = index.image_indices(split)
        max_bad_fraction = DEFAULT_MAX_BAD_FRACTION if run_data.max_bad_fraction is None else run_data.max_bad_fraction
        require_images(index, (split,), max_bad_fraction=max_bad_fraction, max_bad_boxes=run_data.max_bad_boxes)
        _require_same_classes(index, self.class_names, self.weights)
        gt = ground_truth(index, image_indices)
        require_boxes(gt)  # before any work on the device
        batches = evaluation_loader(
            index,
            image_indices,
            self._device,
            batch_size=batch_size,
            image_size=self._metadata.image_size,
            resize=self._metadata.resize,
            workers=host_cores(),
            max_bad_fraction=max_bad_fraction,
        )
        with contextlib.closing(batches):
            return compute_metrics(gt, detect(self._detector, batches, self._device, precision=self._precision))


def load(run: str | os.PathLike[str], *, device: str | None = None) -> Model:
    """A trained detector from a run folder (its best weights) or a .safetensors or exported file (.onnx, .xml,
    .tflite, .pt2) of stoker, local or in a bucket (gs://, s3://).

    device: cpu, cuda …; default: the accelerator that torch finds, else the CPU. An exported file runs on the CPU.

    Raises UsageError if there is no such run, WeightsError for a file that stoker did not save.
    """
    source = model_file.local_path(run)
    weights = model_file.find_weights(source)
    if weights.suffix in RUNTIMES:
        if device not in (None, "cpu"):
            raise UsageError(
                f"--device {device}: stoker runs exported files on the CPU only.",
                choices=["cpu"],
                fix="name the run or the .safetensors file that it was exported from",
            )
        exported = RUNTIMES[weights.suffix](weights, num_threads=host_cores())
        detector: DetectorProtocol = exported
        metadata, target_device, precision = exported.metadata, select_device("cpu"), "fp32"
    else:
        target_device = select_device(device)
        model, metadata = model_file.load_model(weights)
        detector, precision = model.to(target_device.torch_device), target_device.best_precision()[0]
    return Model(
        source, weights, metadata.class_names, metadata.image_size, metadata, detector, target_device, precision
    )


def _to_source(image: object) -> ImageSource:
    if isinstance(image, Image.Image):
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
            raise UsageError(
                f"An array of {image.dtype} {list(image.shape)} is not an image.",
                choices=["uint8 [height, width, 3], RGB"],
                fix="from OpenCV: image[..., ::-1]; from a gray one: np.stack([image] * 3, -1)",
            )
        return np.ascontiguousarray(image)
    if isinstance(image, str | os.PathLike):
        path = local_path(image)
        if path.is_dir():
            raise UsageError(
                "A folder is not an image.", location=path, fix="give its files: sorted(folder.glob('*.jpg'))"
            )
        return path
    choices = ["a path", "a NumPy array uint8 [height, width, 3]", "a Pillow image"]
    raise UsageError(f"An object of type {type(image).__name__} is not an image.", choices=choices)


def _make_tiling(conf: float, iou: float | None, tile: int | None, tile_overlap: float | None) -> Tiling | None:
    """The requested tiling. Raises UsageError or ConfigError for numbers out of range."""
    for name, value in (("conf", conf), ("iou", iou)):
        if value is not None and not 0 <= value <= 1:
            raise UsageError(f"--{name} {value} is out of range.", choices=["0 … 1"])
    if tile_overlap is not None and tile is None:
        raise UsageError("--tile-overlap needs --tile.", fix="--tile 640, or leave out --tile-overlap")
    return None if tile is None else Tiling(tile, TILE_OVERLAP if tile_overlap is None else tile_overlap)


def _require_same_classes(index: Index, class_names: tuple[str, ...], weights: Path) -> None:
    if index.class_names != class_names:
        raise DataError(
            "The data set has other classes than the model was trained on.",
            location=index.source,
            cause=f"data: {', '.join(index.class_names)}; model ({weights}): {', '.join(class_names)}",
            fix="name a data set with the same classes in the same order",
        )
