"""Python API of a trained detector: `load` it, then `predict` on images and `evaluate` on a data set.

`stoker.load` is `load`; the commands `eval` and `predict` call these methods; `export/write.py` exports a model.
"""

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from glob import has_magic
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from stoker.config.settings import Config, DataSettings, from_fields, from_toml
from stoker.data.images import decode
from stoker.data.images.source import display_path
from stoker.data.index import open_index_of, require_images
from stoker.data.validation.problems import DEFAULT_MAX_BAD_FRACTION
from stoker.evaluation.evaluate import compute_metrics, detect, evaluation_loader, ground_truth, require_boxes
from stoker.hardware.device import Device
from stoker.hardware.selection import select_device
from stoker.inference.image_batches import MERGE_IOU, TILE_OVERLAP, ImageSource, Tiling, merge_detections
from stoker.inference.predict import (
    DEFAULT_BATCH_SIZE,
    IMAGE_SUFFIXES,
    INPUT_SUFFIXES,
    find_images,
    local_path,
    predict_images,
    predict_to_dir,
)
from stoker.inference.prediction import Prediction
from stoker.inference.runtime import RUNTIMES
from stoker.inference.video import is_video, read_frames
from stoker.models import MODELS
from stoker.models.layers.postprocess import PRE_NMS_TOP_N, DetectorProtocol
from stoker.models.weights import model_file
from stoker_watch.errors import DataError, UsageError, WeightsError, did_you_mean, make_error, nearest
from stoker_watch.hardware.cgroup import host_cores
from stoker_watch.report.format import plural
from stoker_watch.runs.evaluation import Metrics
from stoker_watch.runs.records import CONFIG

Image_ = str | os.PathLike[str] | NDArray[np.uint8] | Image.Image | Tensor
ImageInput = Image_ | Iterable[Image_]
"""A file, folder, pattern, URI or URL; pixels as uint8 [h, w, 3], [h, w, 4] (alpha is dropped), [h, w, 1] or [h, w]
(gray), RGB, or a batch of them [b, h, w, c]; a tensor [c, h, w] or [b, c, h, w] of uint8, or of floats 0 … 1; a Pillow
image; or several of these. With `stream=True` also a video or a camera ("0", or /dev/video0)."""
DEFAULT_CONF = 0.3
"""Default minimum score of a detection, of weights that were never evaluated."""


class PredictOptions(TypedDict, total=False):
    """Keyword arguments of `Model.predict` and `Model.predict_to_dir`."""

    conf: float | None
    """Minimum score, 0 … 1; None: `Model.conf`."""
    iou: float | None
    """NMS threshold; None: the architecture's own."""
    classes: Sequence[str | int] | None
    """Names or labels of the classes to detect; None: all."""
    max_det: int | None
    """Maximum number of detections in an image; None: 100, more with `classes`, `agnostic_nms` or `tile`."""
    agnostic_nms: bool
    """Whether NMS also removes boxes of different classes."""
    tile: int | None
    """Images with a longer side are also processed in tiles of this side, to detect small objects in large images."""
    tile_overlap: float | None
    """Minimum overlap of neighboring tiles as a fraction of their side; None: 0.2."""
    batch_size: int
    """Images per forward pass, default 8."""


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
    conf: float
    """Default minimum score of a detection."""
    conf_origin: str
    """Why `conf` has its value: the best F1 of the evaluation, or DEFAULT_CONF without one."""
    _metadata: model_file.ModelMetadata = dataclasses.field(repr=False)
    _detector: DetectorProtocol = dataclasses.field(repr=False)
    _device: Device = dataclasses.field(repr=False)
    _precision: str = dataclasses.field(repr=False)

    @property
    def names(self) -> dict[int, str]:
        """Label → class name."""
        return dict(enumerate(self.class_names))

    @overload
    def predict(
        self,
        images: ImageInput | None = ...,
        *,
        source: ImageInput | None = ...,
        bgr: bool = ...,
        stream: Literal[False] = ...,
        **options: Unpack[PredictOptions],
    ) -> list[Prediction]: ...
    @overload
    def predict(
        self,
        images: ImageInput | None = ...,
        *,
        source: ImageInput | None = ...,
        bgr: bool = ...,
        stream: Literal[True],
        **options: Unpack[PredictOptions],
    ) -> Iterator[Prediction]: ...
    def predict(
        self,
        images: ImageInput | None = None,
        *,
        source: ImageInput | None = None,
        bgr: bool = False,
        stream: bool = False,
        **options: Unpack[PredictOptions],
    ) -> list[Prediction] | Iterator[Prediction]:
        """The detections in each image, in order; a single image gives a list of one. `model(images)` is the same.

        source: another name of `images`. bgr: arrays and tensors are BGR, as OpenCV reads images. stream: give an
        iterator, for inputs that do not fit into memory together and for videos, of which each frame is an image; it
        reads some 4 batches ahead.

        Raises DataError for an image that cannot be read, UsageError for what is no image or a number out of range.
        """
        given = source if images is None else images
        if given is None or (images is not None and source is not None):
            raise UsageError("predict() takes images.", fix='model.predict("street.jpg"), or source="street.jpg"')
        sources = _iter_sources(given, bgr=bgr, stream=stream)
        predictions = self._detect(options, sources if stream else list(sources), raise_errors=True)
        return predictions if stream else list(predictions)

    __call__ = predict

    def predict_to_dir(
        self,
        images: Sequence[str],
        out: Path,
        *,
        save_txt: bool = False,
        save_crop: bool = False,
        **options: Unpack[PredictOptions],
    ) -> Iterator[str]:
        """Detects objects in files, folders, patterns, URLs, videos and cameras; writes the images and videos with
        boxes and predictions.json into `out`; save_txt, save_crop: also YOLO label files, the objects as images.

        Yields a line for each image, also for an unreadable one, which raises DataError at the end.
        """
        detect = functools.partial(self._detect, options)
        yield from predict_to_dir(detect, images, out, save_txt=save_txt, save_crop=save_crop)

    def _detect(
        self, options: PredictOptions, sources: Iterable[ImageSource], *, raise_errors: bool = False
    ) -> Iterator[Prediction]:
        """The detections in each image. Raises UsageError for an option that there is not, or one out of range."""
        known = PredictOptions.__annotations__
        if unknown := [name for name in options if name not in known]:
            what = f"predict() has no option {unknown[0]!r}"
            raise UsageError(did_you_mean(what, unknown[0], known), choices=sorted(known))
        batch_size, max_det = options.get("batch_size", DEFAULT_BATCH_SIZE), options.get("max_det")
        iou, classes, is_agnostic = options.get("iou"), options.get("classes"), options.get("agnostic_nms", False)
        conf = self.conf if (given := options.get("conf")) is None else given
        tiling = _make_tiling(conf, iou, options.get("tile"), options.get("tile_overlap"))
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size} is out of range.", choices=["1 or more"])
        if max_det is not None and not 0 < max_det <= PRE_NMS_TOP_N:
            raise UsageError(f"--max-det {max_det} is out of range.", choices=[f"1 … {PRE_NMS_TOP_N:,}"])
        labels = None if classes is None else [_find_label(name, self.class_names) for name in classes]
        is_choosing = is_agnostic or (max_det, classes) != (None, None)
        for found in predict_images(
            self._detector,
            sources,
            self._device,
            image_size=self._metadata.image_size,
            resize=self._metadata.resize,
            score_threshold=conf,
            iou_threshold=iou,
            precision=self._precision,
            # no more than there are images, unless these are cut into tiles
            batch_size=max(1, min(batch_size, len(sources)))
            if isinstance(sources, Sequence) and tiling is None
            else batch_size,
            tiling=tiling,
            max_detections=PRE_NMS_TOP_N if is_choosing else None,  # enough to choose from
            class_names=self.class_names,
        ):
            if raise_errors and found.error is not None:
                raise found.error
            if labels is not None:
                found = found[np.isin(found.labels, labels)]
            if is_agnostic:
                same, cut = np.zeros_like(found.labels), np.zeros(len(found), bool)
                threshold = min(self._detector.iou_threshold if iou is None else iou, MERGE_IOU)
                found = found[merge_detections(found.boxes, found.scores, same, cut, iou_threshold=threshold)]
            yield found[:max_det]

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
        run_data = from_toml(self.source / CONFIG)[0].data if is_run else DataSettings()
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
        if index.class_names != self.class_names:
            names, wanted = ", ".join(index.class_names), ", ".join(self.class_names)
            raise make_error(
                DataError, "data-has-other-classes", index.source, data=names, weights=self.weights, model=wanted
            )
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


def load(run: str | os.PathLike[str], *, device: str | None = None, trust_file: bool = False) -> Model:
    """A trained detector from a run folder (its best weights), a .safetensors file or an exported file (.onnx,
    .tflite, .pt2) that stoker saved, local or in a bucket (gs://, s3://), or a local .xml; or the name of a model with
    COCO weights, as retinanet_resnet50_fpn.

    device: cpu, cuda …; default: an NVIDIA GPU, else the CPU. An exported file runs on the CPU.
    trust_file: also load a .pt2 file, which can run any code; for a file that you exported yourself.

    Raises UsageError if there is no such run, WeightsError for a file that stoker did not save.
    """
    source = model_file.local_path(run)
    is_name = os.fspath(run) in MODELS and not source.exists()
    weights = source if is_name else model_file.find_weights(source)
    if weights.suffix in RUNTIMES:
        if device not in (None, "cpu"):
            raise make_error(UsageError, "exported-files-run-on-cpu", choices=["cpu"], device=device)
        runtime = RUNTIMES[weights.suffix]
        if runtime.runs_code and not trust_file:
            raise make_error(WeightsError, "file-can-run-code", weights, suffix=weights.suffix)
        exported = runtime(weights, num_threads=host_cores(), trust_file=trust_file)
        detector: DetectorProtocol = exported
        metadata, target_device, precision = exported.metadata, select_device("cpu"), "fp32"
    else:
        target_device = select_device(device)
        model, metadata = (model_file.load_pretrained if is_name else model_file.load_model)(weights)
        detector, precision = model.to(target_device.torch_device), target_device.best_precision()[0]
    conf, origin = DEFAULT_CONF, "the default: the weights have no evaluation"
    if metadata.ap is not None:
        origin = (
            f"the default: AP is {metadata.ap:.3g} after {plural(metadata.step or 0, 'step')}, and no score is best"
        )
    if metadata.threshold is not None:  # scores must be above the minimum, and this is itself that of a detection
        conf, origin = max(0.0, math.ceil(metadata.threshold * 1e4 - 1) / 1e4), "the best F1 in the evaluation"
    names, size = metadata.class_names, metadata.image_size
    return Model(source, weights, names, size, conf, origin, metadata, detector, target_device, precision)


def _iter_sources(images: object, *, bgr: bool, stream: bool) -> Iterator[ImageSource]:
    """Each image of what `Model.predict` is given. Raises UsageError for what is none."""
    if isinstance(images, str | os.PathLike):
        given, suffixes = local_path(images), INPUT_SUFFIXES if stream else IMAGE_SUFFIXES
        is_many = given.is_dir() or (has_magic(str(given)) and not given.exists())
        for path in find_images([given], suffixes=suffixes) if is_many else [given]:
            if is_video(path) and not stream:
                fix = "for prediction in model.predict(…, stream=True), which does not keep all frames in memory"
                raise UsageError("A video needs stream=True.", location=display_path(path), fix=fix)
            yield from read_frames(path) if is_video(path) else [path]
    elif isinstance(images, Image.Image) and images.mode in ("I", "F"):
        what = f"A Pillow image of mode {images.mode!r} has no known range of values."
        raise UsageError(what, choices=["RGB", "L", "I;16"], fix="read the file by its path, or convert it first")
    elif isinstance(images, Image.Image):
        yield decode.pillow_to_rgb(ImageOps.exif_transpose(images))
    elif isinstance(images, np.ndarray | Tensor):
        yield from _to_pixels(images, bgr=bgr)
    elif isinstance(images, Iterable) and not isinstance(images, bytes):
        for image in images:
            yield from _iter_sources(image, bgr=bgr, stream=stream)
    else:
        choices = ["a path", "a NumPy array", "a tensor", "a Pillow image", "a list of them"]
        raise UsageError(f"An object of type {type(images).__name__} is not an image.", choices=choices)


def _to_pixels(array: NDArray[Any] | Tensor, *, bgr: bool) -> list[decode.Pixels]:
    """uint8 [h, w, 3] RGB of each image of an array or tensor; see `ImageInput`."""
    given = f"{array.dtype} {list(array.shape)}"
    if isinstance(array, Tensor):
        tensor = array.detach().cpu()
        if tensor.is_floating_point():
            in_range = tensor.numel() and tensor.min() >= 0 and tensor.max() <= 1
            tensor = (tensor.float() * 255).round().to(torch.uint8) if in_range else tensor.float()
        array = (tensor.movedim(-3, -1) if tensor.ndim >= 3 else tensor).numpy()
    pixels = array[..., None] if array.ndim == 2 else array
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or pixels.shape[-1] not in (1, 3, 4) or 0 in pixels.shape:
        raise UsageError(
            f"An array of {given} is not an image.",
            choices=["array: uint8 [h, w, 3], RGB or with bgr=True BGR; [h, w]; [b, h, w, 3]",
                     "tensor: uint8 or floats 0 … 1, [3, h, w] or [b, 3, h, w]"],
        )  # fmt: skip
    pixels = np.repeat(pixels, 3, -1) if pixels.shape[-1] == 1 else pixels[..., :3]
    return list(np.ascontiguousarray(pixels[..., ::-1] if bgr else pixels).reshape(-1, *pixels.shape[-3:]))


def _find_label(name: str | int, class_names: tuple[str, ...]) -> int:
    """The label of a class that is given by its name or its label. Raises UsageError."""
    if name in class_names:
        return class_names.index(str(name))
    if str(name).isdecimal() and int(name) < len(class_names):
        return int(name)
    fix = f"did you mean {near!r}?" if (near := nearest(str(name), class_names)) else None
    raise UsageError(f"The model has no class {str(name)!r}.", choices=class_names[:100], fix=fix)


def _make_tiling(conf: float, iou: float | None, tile: int | None, tile_overlap: float | None) -> Tiling | None:
    """The requested tiling. Raises UsageError or ConfigError for numbers out of range."""
    for name, value in (("conf", conf), ("iou", iou)):
        if value is not None and not 0 <= value <= 1:
            raise UsageError(f"--{name} {value} is out of range.", choices=["0 … 1"])
    if tile_overlap is not None and tile is None:
        raise UsageError("--tile-overlap needs --tile.", fix="--tile 640, or leave out --tile-overlap")
    return None if tile is None else Tiling(tile, TILE_OVERLAP if tile_overlap is None else tile_overlap)
