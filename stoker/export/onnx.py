"""`stoker export`: a trained detector as an ONNX file, kept only when it finds what the model finds.

The file is made by `graph.py`, written under another name, compared with the model on real pictures (`parity.py`)
and only then given its name. What is in it: docs/onnx.md.
"""

import contextlib
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

from stoker.config.settings import from_toml
from stoker.data.index import open_index
from stoker.data.loading.samples import PADDING, Slot
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
from stoker.export.runtime import SUFFIX, OnnxModel, require
from stoker.hardware.device import Device, host_cores
from stoker.inference.image_batches import fill, read_picture
from stoker.inference.predict import find_pictures
from stoker.models.layers.postprocess import DETECTIONS
from stoker.models.weights import model_file
from stoker.runs.records import CONFIG
from stoker.storage.local_files import sync_folder
from stoker.storage.uri import expand, is_address, parse

PICTURES = 32
"""How many pictures the file is compared with the model on."""


class Stored(NamedTuple):
    """A picture, and how its bytes are had: some lie inside larger files."""

    path: Path
    read: Callable[[], bytes]


class Given(NamedTuple):
    """Pictures as the model is given them."""

    names: list[str]
    images: NDArray[np.uint8]
    """[P, 3, H, W], RGB in the canvas."""
    content: NDArray[np.int32]
    """[P, 2], height and width of each picture inside the canvas."""


def export_onnx(
    run: str | Path,
    *,
    out: Path | None = None,
    batch: int | None = None,
    conf: float = SCORE_THRESHOLD,
    iou: float | None = None,
    max_detections: int = DETECTIONS,
    opset: int = graph.OPSETS[0],
    pictures: Sequence[str] = (),
) -> Iterator[str]:
    """Writes a run's best weights (or a .safetensors file) as ONNX; yields lines about it, the file's name first.

    out: default beside the weights; of a run in a bucket, in the current folder. pictures: what the file is compared
    on, default pictures of the run's validation split. conf, iou: the thresholds that the file has by itself; whoever
    runs it can give others.

    Raises ParityError when the file does not find what the model finds, PreflightError when a package is missing,
    UsageError when there are no pictures to compare on or `out` is another's file, StorageError.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, "Nothing can be exported")
    source = model_file.local(run)
    weights = model_file.find(source)
    if weights.suffix == SUFFIX:
        raise UsageError(f"{str(weights)!r} is exported already.", fix="name a run folder or a .safetensors file")
    model, card = model_file.load(weights)
    limit = model.iou_threshold if iou is None else iou
    target = out or (_here(run) if isinstance(run, str) else None) or _beside(weights, source)
    _require_ours(target)
    given = _pictures(source, weights, card, pictures)
    content = graph.build(
        model, card, score_threshold=conf, iou_threshold=limit, slots=max_detections, opset=opset, batch=batch,
        metadata=_metadata(card, weights),
    )  # fmt: skip

    def compare(trial: Path) -> str:
        threads = host_cores()
        file, threshold, note = OnnxModel(trial, threads=threads), conf, ""
        found, took_s = parity.measure(model, file, *given[1:], given.names, score_threshold=threshold,
                                       iou_threshold=limit, slots=max_detections)  # fmt: skip
        if found.boxes < len(given.names):  # so few boxes would prove little
            threshold, note = 0.0, " (whatever their score: few are above the threshold)"
            more, _ = parity.measure(model, file, *given[1:], given.names, score_threshold=threshold,
                                     iou_threshold=limit, slots=max_detections)  # fmt: skip
            found = found.plus(more._replace(pictures=0))
        parity.require(found, target)
        return (
            f"parity on {found.pictures} pictures, {found.boxes:,} boxes{note}: boxes within {found.box_px:.2g} px, "
            f"scores within {found.score:.1g}{_at_edge(found.at_edge)}; {1e3 * took_s:.3g} ms/picture in onnxruntime "
            f"({threads} threads)"
        )

    said = _keep(content, target, compare)
    yield f"{target} ({len(content) / 1e6:.1f} MB, opset {opset}, from {weights})"
    yield said


def _here(run: str) -> Path | None:
    """Of what is in a bucket: its name, in the current folder. None: it is on this machine."""
    run = expand(run)
    return Path(parse(run).name.removesuffix(".safetensors") + SUFFIX) if is_address(run) else None


def _beside(weights: Path, run: Path) -> Path:
    """RUN/best.onnx, or RUN/step-00001200.onnx for a run that has only checkpoints, which nothing is added to."""
    if not run.is_dir():
        return weights.with_suffix(SUFFIX)
    return run / f"{weights.stem if weights.parent == run else weights.parent.name}{SUFFIX}"


def _at_edge(count: int) -> str:
    return f", {count} boxes of one only, at a threshold or tie" if count else ""


def _require_ours(target: Path) -> None:
    """Raises UsageError for a file that stoker did not export, StorageError where none can be written."""
    if target.suffix != SUFFIX:
        fix = f"--out {target.with_suffix(SUFFIX)}"
        raise UsageError(f"--out {str(target)!r} is no name of an ONNX file.", fix=fix)
    if not target.parent.is_dir():
        raise StorageError("The folder for the exported file is missing.", place=target.parent, fix="make it, or --out")
    if target.exists():
        try:
            OnnxModel(target, threads=1)
        except WeightsError as error:
            cause = "there is a file of that name that stoker did not export"
            raise UsageError("The exported file would replace another.", place=target, cause=cause,
                             fix="another --out, or remove it") from error  # fmt: skip


def _metadata(card: model_file.Card, weights: Path) -> dict[str, str]:
    """What the file says of itself to programs that are not stoker; docs/onnx.md."""
    return {
        "class_names": json.dumps(list(card.class_names), ensure_ascii=False),
        "canvas": json.dumps(list(card.canvas)),
        "resize": card.resize,
        "padding": json.dumps(list(PADDING)),
        "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
    }


def _pictures(run: Path, weights: Path, card: model_file.Card, places: Sequence[str]) -> Given:
    """Up to PICTURES of `places`, else of the run's validation split, spread over it. Those that cannot be read are
    left out. Raises UsageError when there are none."""
    sources = [Stored(path, partial(read_picture, path)) for path in find_pictures(places)] if places else []
    sources = sources or _validation(run if run.is_dir() else weights.parent)
    chosen = np.unique(np.linspace(0, len(sources) - 1, min(PICTURES, len(sources))).round().astype(np.int64))
    slot = Slot(Device(torch.device("cpu")), len(chosen), card.canvas, 1)
    names: list[str] = []
    last: Exception | None = None
    for source in (sources[n] for n in chosen.tolist()):
        try:
            fill(slot, len(names), source.read(), source.path, card.resize)
            names.append(str(source.path))
        except (DataError, OSError) as error:
            last = error
    if not names:
        raise UsageError("None of the pictures to compare on can be read.", place=sources[0].path, cause=str(last),
                         fix="--pictures with files, folders or patterns") from last  # fmt: skip
    return Given(names, slot.pixels[: len(names)].transpose(0, 3, 1, 2), slot.content[: len(names)])


def _validation(run: Path) -> list[Stored]:
    """The pictures of a run's validation split. Raises UsageError when it is not known, or gone."""
    fix = "--pictures with files, folders or patterns"
    what = "There are no pictures to compare the exported file with the model on."
    if not (run / CONFIG).exists():
        raise UsageError(what, place=run, cause=f"no {CONFIG} there names a data set", fix=fix)
    data = from_toml(run / CONFIG)[0].data
    try:
        index = open_index(data.data, format=data.format, val_fraction=data.val_fraction, classes=data.classes or ())
        rows = index.rows("val").tolist()
    except StokerError as error:
        cause = f"the run's data set cannot be opened: {error.what}"
        raise UsageError(what, place=data.data, cause=cause, fix=fix) from error
    return [Stored(index.path(row), partial(index.read, row)) for row in rows]


def _keep(content: bytes, target: Path, check: Callable[[Path], str]) -> str:
    """Writes the file under another name, runs `check` on it, and only then gives it its own. Returns what it says.

    Raises what `check` raises, and StorageError; the file is not there then, and one of that name is as it was.
    """
    trial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with _writing(target), trial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        said = check(trial)
        with _writing(target):
            trial.replace(target)
            sync_folder(target.parent)
        return said
    finally:
        trial.unlink(missing_ok=True)


def _writing(target: Path) -> contextlib.AbstractContextManager[None]:
    return writing("The exported file cannot be written.", target, fix="--out FILE")
