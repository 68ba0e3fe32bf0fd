"""A model as a file: safetensors with the model's metadata in the header, so that the file can be used alone.

Not here: weights from other sources (`load.py`) and checkpoints for resuming (`training/checkpoint.py`).
"""

import os
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from stoker import models
from stoker.config import old_names
from stoker.config.settings import ModelSettings
from stoker.errors import WeightsError
from stoker.models.weights import hub
from stoker.runs.records import BEST, CHECKPOINTS, FINAL, fetch_run
from stoker.storage.uri import expand_variables, is_uri, parse_uri

METADATA_KEY = "stoker"


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

    def header(self) -> dict[str, str]:
        """The safetensors header. A single key, since several keys have no fixed order: equal models are equal
        files."""
        fields = msgspec.to_builtins(self)
        fields["settings"] = {name: value for name, value in fields["settings"].items() if value is not None}
        return {METADATA_KEY: msgspec.json.encode(fields).decode()}


def load_model(path: Path) -> tuple["models.Detector", ModelMetadata]:
    """The model of a .safetensors file on the CPU, in evaluation mode. Raises WeightsError."""
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
        if METADATA_KEY not in header:
            cause = "its header has no metadata of stoker; training can start from its weights with --weights"
            raise WeightsError("The file is not a model that stoker saved.", location=path, cause=cause)
        metadata = old_names.decode(header[METADATA_KEY].encode(), ModelMetadata)
        tensors = load_file(path)
    except (OSError, SafetensorError, msgspec.DecodeError) as error:
        raise WeightsError("The model file cannot be read.", location=path, cause=str(error)) from error
    model = models.build(metadata.settings, len(metadata.class_names))
    model.load_state_dict(tensors)
    return model.eval(), metadata


def local_path(run: str | os.PathLike[str]) -> Path:
    """The local path of a run folder or file; from a bucket, a run's settings and weights are downloaded. Raises
    UsageError if there is no such run, StorageError."""
    location = expand_variables(run) if isinstance(run, str) else os.fspath(run)
    if not is_uri(location):
        return Path(location)
    uri = parse_uri(location)
    if uri.name.endswith((".safetensors", ".onnx")):
        return hub.local_path(location)
    return fetch_run(uri, weights=True)


def find_weights(path: Path) -> Path:
    """The weights of a run (best, else final, else those of the newest checkpoint) or a file. Raises WeightsError."""
    if path.is_file():
        return path
    candidates = [path / BEST, path / FINAL, *sorted(path.glob(f"{CHECKPOINTS}/step-*/weights.safetensors"))[::-1]]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise WeightsError(
        "There is no model to use.",
        location=path,
        cause="neither best.safetensors nor final.safetensors nor a checkpoint" if path.is_dir() else "no such path",
        fix="name a run folder with at least one evaluation or checkpoint, or a .safetensors file",
    )
