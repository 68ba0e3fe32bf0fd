"""Using a model that stoker trained: scoring it on a data set, finding objects in pictures.

The commands `eval` and `predict` are these functions with a screen. How a model is run: `evaluate.py`, `predict.py`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from stoker.config import DataSettings, from_toml
from stoker.data.index import Index, open_index, require_pictures
from stoker.data.loader import Loader, box_slots
from stoker.device import Device, host_cores, pick
from stoker.errors import DataError, UsageError
from stoker.evaluate import evaluate
from stoker.metrics import Metrics
from stoker.models import saved
from stoker.models.detections import Finder
from stoker.onnx_model import SUFFIX, OnnxModel
from stoker.predict import predict_to_folder
from stoker.records import CONFIG
from stoker.tiles import OVERLAP, Tiling


def evaluate_run(
    run: Path, data: str | None, *, split: str = "val", format: str | None = None, batch: int = 8,
    device: str | None = None,
) -> Metrics:  # fmt: skip
    """The metrics of a run's best weights on a split of a data set, default its own.

    run: a run folder, a .safetensors or an exported .onnx file.

    Raises UsageError when no data set is known, DataError when it has other classes or no such split.
    """
    if batch < 1:
        raise UsageError(f"--batch {batch} is out of range.", choices=["1 or more"])
    weights = saved.find(run)
    model, card, target, precision = _load(weights, device)
    own = from_toml(run / CONFIG)[0].data if (run / CONFIG).exists() else DataSettings()
    val_fraction = None
    if data is None:
        if own.data is None:
            raise UsageError("Which data set should it be scored on?", place=run, fix=f"stoker eval {run} DATA")
        data, val_fraction, format = own.data, own.val_fraction, format or own.format
    index = open_index(data, format=format, val_fraction=val_fraction, classes=own.classes or ())
    if split not in index.splits:
        raise DataError(
            f"The data set has no {split} split.", place=index.root, choices=index.splits, fix="--split NAME"
        )
    require_pictures(index, (split,))
    _require_same_classes(index, card.class_names, weights)
    rows = index.rows(split)
    batches = Loader(
        index,
        rows,
        device=target,
        batch=batch,
        canvas=card.canvas,
        resize=card.resize,
        boxes=box_slots(index, rows),
        seed=0,
        threads=host_cores(),
        train=False,
    )
    with contextlib.closing(batches):
        return evaluate(model, batches, index, rows, target, precision=precision)


def _load(weights: Path, device: str | None) -> tuple[Finder, saved.Card, Device, str]:
    """The model of a file on its device, and the precision it runs in. An exported one runs on the CPU, as it is."""
    if weights.suffix == SUFFIX:
        if device not in (None, "cpu"):
            raise UsageError(f"--device {device}: an ONNX file runs on the cpu here.", choices=["cpu"],
                             fix="name the run or the .safetensors file that it was exported from")  # fmt: skip
        exported = OnnxModel(weights, threads=host_cores())
        return exported, exported.card, pick("cpu"), "fp32"
    target = pick(device)
    model, card = saved.load(weights)
    return model.to(target.torch_device), card, target, target.best_precision()[0]


def _require_same_classes(index: Index, class_names: tuple[str, ...], weights: Path) -> None:
    if index.class_names != class_names:
        raise DataError(
            "The data set has other classes than the model was trained on.",
            place=index.root,
            cause=f"data: {', '.join(index.class_names)}; model ({weights}): {', '.join(class_names)}",
            fix="name a data set with the same classes in the same order",
        )


def predict_run(
    run: Path, pictures: Sequence[str], *, conf: float, iou: float, out: Path, device: str | None = None,
    tile: int | None = None, overlap: float | None = None,
) -> Iterator[str]:  # fmt: skip
    """Finds objects in pictures (files, folders, patterns), writes results into `out`, yields a line a picture.

    run: a run folder, a .safetensors or an exported .onnx file. tile, overlap: see `tiles.Tiling`.
    """
    for name, value in (("conf", conf), ("iou", iou)):
        if not 0 <= value <= 1:
            raise UsageError(f"--{name} {value} is out of range.", choices=["0 … 1"])
    if overlap is not None and tile is None:
        raise UsageError("--overlap is of tiles.", fix="--tile 640, or no --overlap")
    tiling = None if tile is None else Tiling(tile, OVERLAP if overlap is None else overlap)
    model, card, target, precision = _load(saved.find(run), device)
    yield from predict_to_folder(
        model, card, pictures, target, conf=conf, iou=iou, out=out, tiling=tiling, precision=precision
    )
