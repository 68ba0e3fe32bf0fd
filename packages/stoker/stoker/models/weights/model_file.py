"""A model as a file: safetensors with the model's metadata in the header, so that the file can be used alone.

Not here: weights from other sources (`load.py`) and checkpoints for resuming (`training/checkpoint.py`).
"""

import os
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from stoker import models
from stoker.config.settings import ModelSettings
from stoker.models.table import MODELS
from stoker.models.weights import hub
from stoker.models.weights.load import COCO_CLASSES, shapes_only
from stoker_watch import regular_files
from stoker_watch.errors import StokerError, WeightsError
from stoker_watch.runs.records import fetch_run
from stoker_watch.storage.uri import expand_variables, is_uri, parse_uri

METADATA_KEY = "stoker"
PRETRAINED = [name for name, architecture in MODELS.items() if "coco" in architecture.urls]
"""The architectures that `load_pretrained` has."""
MAX_IMAGE_PIXELS = 1 << 26
"""The model input has at most 8,192 × 8,192: a batch of 8 takes 1.6 GB as bytes."""
MAX_CLASSES = 100_000
MAX_ANCHOR_VALUES = 64
"""Sizes, scales or aspect ratios of anchors; the models here have at most 6."""
MAX_UNCHECKED_OUTPUTS = 20_000
"""Classes times anchors up to which a model is built at once: its class head takes at most 200 MB, LVIS's 100 MB. More
are built without memory first, which imports 3 CPU-seconds of torch."""


class ModelMetadata(msgspec.Struct, kw_only=True):
    """Architecture and classes of a model, and the resizing of its input images."""

    settings: ModelSettings
    class_names: tuple[str, ...]
    image_size: tuple[int, int]
    """Height and width in pixels."""
    resize: str
    step: int = 0
    ap: float | None = None
    """AP of these weights on the validation split, if it was measured."""
    threshold: float | None = None
    """Score threshold with their best F1 on that split: the default of predictions."""

    def header(self) -> dict[str, str]:
        """The safetensors header: a single key, as several have no fixed order: equal models are equal files."""
        fields = msgspec.to_builtins(self)
        fields["settings"] = {name: value for name, value in fields["settings"].items() if value is not None}
        return {METADATA_KEY: msgspec.json.encode(fields).decode()}


def read_metadata(text: str, path: Path) -> ModelMetadata:
    """The metadata in the header of a model file or ONNX file. Raises WeightsError if stoker cannot have written it."""
    try:
        metadata = msgspec.json.decode(text.encode(), type=ModelMetadata)
    except (msgspec.DecodeError, UnicodeError, RecursionError, TypeError) as error:
        raise WeightsError("The metadata of the model cannot be read.", location=path, cause=str(error)) from error
    height, width = metadata.image_size
    anchors = (metadata.settings.anchor_sizes, metadata.settings.anchor_scales, metadata.settings.aspect_ratios)
    wrong = {
        f"an image size of {height} × {width}": min(height, width) < 1 or height * width > MAX_IMAGE_PIXELS,
        f"{len(metadata.class_names):,} classes": not 0 < len(metadata.class_names) <= MAX_CLASSES,
        "no model": metadata.settings.model is None,
        f"resizing by {metadata.resize[:60]!r}": metadata.resize not in ("letterbox", "squash"),
        f"a score threshold of {metadata.threshold}": not 0 <= (metadata.threshold or 0) <= 1,
        f"more than {MAX_ANCHOR_VALUES} anchors": any(len(values or ()) > MAX_ANCHOR_VALUES for values in anchors),
    }
    for text, is_wrong in wrong.items():
        if is_wrong:
            raise WeightsError("The metadata of the model is damaged.", location=path, cause=f"it has {text}")
    return metadata


def load_model(path: Path) -> tuple["models.Detector", ModelMetadata]:
    """The model of a .safetensors file on the CPU, in evaluation mode. Raises WeightsError."""
    try:
        with regular_files.open_file(path), safe_open(path, "pt") as file:  # it opens a FIFO and waits
            header = file.metadata() or {}
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        if METADATA_KEY not in header:
            cause = "its header has no metadata of stoker; training can start from its weights with --weights"
            raise WeightsError("The file is not a model that stoker saved.", location=path, cause=cause)
        metadata = read_metadata(header[METADATA_KEY], path)
        model = _build(metadata, shapes, path)
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise WeightsError("The model file cannot be read.", location=path, cause=str(error)) from error
    model.load_state_dict(tensors)
    return model.eval(), metadata


def load_pretrained(name: str | os.PathLike[str]) -> tuple["models.Detector", ModelMetadata]:
    """An architecture of `MODELS` with its COCO weights, downloaded if need be. Raises WeightsError if it has none."""
    architecture = MODELS[str(name)]
    if "coco" not in architecture.urls:
        fix = f"stoker train DATA --model {name}"
        raise WeightsError(f"There are no COCO weights for {name}.", choices=PRETRAINED, fix=fix)
    options = {**architecture.defaults, **architecture.pretrained_options.get("coco", {})}
    settings = ModelSettings(**options, model=str(name), weights="coco")
    side = architecture.default_image_size
    # As they were trained: torchvision's detectors keep the aspect ratio, its SSDs and the transformers do not.
    resize = "letterbox" if architecture.family in ("retinanet", "fcos", "faster_rcnn") else "squash"
    metadata = ModelMetadata(settings=settings, class_names=COCO_CLASSES, image_size=(side, side), resize=resize)
    model = models.build(settings, len(COCO_CLASSES))
    models.load_weights(model, settings, class_names=COCO_CLASSES)
    return model.eval(), metadata


def _build(metadata: ModelMetadata, shapes: dict[str, tuple[int, ...]], path: Path) -> "models.Detector":
    """The model with random weights. Raises WeightsError, before it allocates much, unless it has these shapes."""
    settings, num_classes = metadata.settings, len(metadata.class_names)
    num_outputs = num_classes * len(settings.anchor_scales or (1,)) * len(settings.aspect_ratios or (1,))
    try:
        if num_outputs > MAX_UNCHECKED_OUTPUTS:
            with shapes_only():
                _check_shapes(models.build(settings, num_classes), shapes, path)
        model = models.build(settings, num_classes)
    except WeightsError:
        raise
    except StokerError as error:
        raise WeightsError("The model cannot be built.", location=path, cause=error.what, fix=error.fix) from error
    except Exception as error:  # settings that stoker never writes fail in many ways
        cause = f"its settings in the header are wrong: {type(error).__name__}: {str(error)[:200]}"
        raise WeightsError("The model cannot be built.", location=path, cause=cause) from error
    _check_shapes(model, shapes, path)
    return model


def _check_shapes(model: "models.Detector", shapes: dict[str, tuple[int, ...]], path: Path) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted(shapes.keys() | expected.keys()):
        if shapes.get(name) != expected.get(name):
            cause = (
                f"{name} is {shapes.get(name, 'absent')} in the file, and {expected.get(name, 'absent')} in its model"
            )
            raise WeightsError("The tensors of the file do not fit its metadata.", location=path, cause=cause)


def local_path(run: str | os.PathLike[str]) -> Path:
    """The path of a run folder or file, downloaded from a bucket. Raises UsageError (no such run), StorageError."""
    location = expand_variables(run) if isinstance(run, str) else os.fspath(run)
    if not is_uri(location):
        return Path(location)
    uri = parse_uri(location)
    if uri.name.endswith((".safetensors", ".onnx", ".tflite", ".pt2")):
        return hub.local_path(location)
    return fetch_run(uri, weights=True)


def find_weights(path: Path) -> Path:
    """The weights of a run (best, else final, else those of the newest checkpoint) or a file. Raises WeightsError."""
    if path.is_file():
        return path
    return hub.weights_of_run(path, choices=["a run folder", "a .safetensors or .onnx file", *PRETRAINED])
