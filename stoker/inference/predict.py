"""Finds objects in pictures that have no annotations: files, folders, patterns in; boxes, drawn pictures, JSON out.

`predict_pictures` is the iterator, `predict_to_folder` the command. How pictures become batches, whole or in tiles, is
`image_batches.py`; they are run as in an evaluation (`evaluate.detect_batches`). The originals are never touched.
"""

import contextlib
import dataclasses
import glob
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from PIL import Image

from stoker.data.images import decode
from stoker.data.images.source import shown
from stoker.data.remote.bucket import pictures_at
from stoker.errors import DataError, UsageError, writing
from stoker.evaluation.evaluate import detect_batches
from stoker.evaluation.metrics import Detections, no_detections
from stoker.hardware.device import Device, host_cores
from stoker.inference.draw import draw_boxes
from stoker.inference.image_batches import (
    Source,
    Window,
    batches,
    read_picture,
    threads_for,
    windows_of,
)
from stoker.inference.tiles import SAME, Tiling, is_cut, merge
from stoker.models.layers.postprocess import Finder
from stoker.models.weights.model_file import Card
from stoker.storage.local_files import write_whole
from stoker.storage.uri import expand, is_address, parse

WRITTEN = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
"""Endings that a result may have; a picture of another one gets `.jpg` behind it."""
KINDS = (*WRITTEN, ".gif", ".jp2", ".pgm", ".ppm")
"""Endings by which pictures are found in folders; a file that is named is tried whatever it is called."""
RESULTS = "predictions.json"
BATCH = 8


class Predicted(NamedTuple):
    """What was found in a picture."""

    path: Path | None
    """None for pixels."""
    size: tuple[int, int]
    """Height and width of the picture, upright, pixels; zeros where it could not be read."""
    found: Detections
    """Best score first; boxes in pixels of the upright picture."""
    error: DataError | None
    """Why it could not be read; nothing is found then."""


def find_pictures(places: Iterable[str | Path], *, beside: Path | None = None) -> list[Path]:
    """The pictures of files, folders (with those inside), patterns and addresses of these, each once, in order. Those
    in `beside` are not. Of a picture in a bucket it is its placeholder (`data/images/source.py`).

    Raises UsageError that names what was not found, DataError and StorageError of an address.
    """
    hidden = None if beside is None else beside.resolve()
    found: dict[Path, Path] = {}
    for place in places:
        path = local_path(place)
        if path.is_dir():
            pictures = sorted(p for p in path.rglob("*") if p.suffix.lower() in KINDS and p.is_file())
        elif path.exists():
            pictures = [path]
        else:
            matched = (Path(name) for name in glob.glob(str(path), recursive=True))
            pictures = sorted(p for p in matched if p.suffix.lower() in KINDS and p.is_file())
        seen = [p for p in pictures if hidden is None or hidden not in p.resolve().parents]
        if pictures and not seen:
            what = f"The pictures of {str(path)!r} lie in the folder of the results, which are not predicted on."
            raise UsageError(what, place=beside, fix="name another folder with --out")
        if not pictures:
            raise UsageError(_not_found(path), place=shown(Path.cwd() / path), choices=KINDS,
                             fix="name picture files, a folder with such files, or a pattern in quotes")  # fmt: skip
        for picture in seen:
            found.setdefault(picture.resolve(), picture)
    return list(found.values())


def local_path(place: str | os.PathLike[str]) -> Path:
    """The path of a place, variables in it replaced; the mirror's, of an address."""
    text = expand(os.fspath(place))
    return pictures_at(parse(text)) if is_address(text) else Path(text)


def _not_found(path: Path) -> str:
    name = repr(shown(path))
    if path.is_dir():
        return f"There are no pictures in the folder {name}."
    if glob.has_magic(str(path)):
        return f"No picture matches the pattern {name}."
    return f"There is no file or folder {name}."


def predict_pictures(
    model: Finder,
    sources: Sequence[Source],
    device: Device,
    *,
    canvas: tuple[int, int],
    resize: str,
    score_threshold: float = 0.3,
    iou_threshold: float | None = None,
    precision: str = "fp32",
    batch: int = BATCH,
    tiling: Tiling | None = None,
) -> Iterator[Predicted]:
    """Runs the model, which lies on `device`, over pictures, in order. canvas, resize: as it was trained.

    tiling: a picture that does not fit in a tile is shown whole and in tiles, and what was found is merged; any other
    is shown as without. A picture that cannot be read is yielded with its error; the others go on.
    """
    limit = model.iou_threshold if iou_threshold is None else iou_threshold
    issued: deque[list[Window]] = deque()
    parts = detect_batches(
        model,
        batches(
            windows_of(sources, tiling), issued, device, canvas, resize, batch, threads=threads_for(sources, batch)
        ),
        device,
        precision=precision,
        score_threshold=score_threshold,
        iou_threshold=limit,
    )
    shown: list[tuple[Window, Detections]] = []
    for found in parts:
        for window in issued.popleft():
            shown.append((window, found.of(window.number)))
            if window.last:
                yield _answer(shown, limit if limit < 1 else SAME)
                shown = []


def _answer(shown: list[tuple[Window, Detections]], iou_threshold: float) -> Predicted:
    """What was found in all windows of a picture, as one; boxes in pixels of the picture."""
    picture = shown[0][0].picture
    found, cut = [], []
    for window, some in shown:
        x0, y0, x1, y1 = window.region or (0, 0, picture.size[1], picture.size[0])
        boxes = some.boxes + np.array([x0, y0, x0, y0], np.float32)
        found.append(dataclasses.replace(some, boxes=boxes))
        cut.append(is_cut(boxes, (x0, y0, x1, y1), picture.size))
    together = dataclasses.replace(Detections.concatenate(found), pictures=np.array([picture.place]))
    together = dataclasses.replace(together, row=np.full(len(together), picture.place))
    if picture.error is not None:
        return Predicted(picture.path, (0, 0), no_detections([picture.place]), picture.error)
    if len(shown) > 1:
        keep = merge(together.boxes, together.score, together.label, np.concatenate(cut), iou_threshold=iou_threshold)
        together = together.where(keep)
    return Predicted(picture.path, picture.size, together, None)


def predict_to_folder(
    model: Finder,
    card: Card,
    places: Sequence[str | Path],
    device: Device,
    *,
    conf: float,
    iou: float | None,
    out: Path,
    tiling: Tiling | None = None,
    precision: str | None = None,
) -> Iterator[str]:
    """Writes every picture with its boxes, and predictions.json, into `out`; yields a line for each picture.

    Raises UsageError for places without pictures and for an `out` that holds other things; DataError at the end when
    some pictures could not be read.
    """
    paths = find_pictures(places, beside=out)
    _require_own_folder(out)
    _write_results(out, [])  # the folder is ours from here on, also when this run is cut off
    predicted = predict_pictures(
        model,
        paths,
        device,
        canvas=card.canvas,
        resize=card.resize,
        score_threshold=conf,
        iou_threshold=iou,
        precision=precision or device.best_precision()[0],
        tiling=tiling,
    )
    results: list[dict[str, Any]] = []
    failed: list[DataError] = []
    try:
        with ThreadPoolExecutor(host_cores(), "stoker-draw") as pool:
            drawing: deque[Future[None]] = deque()
            for one, path, name in zip(predicted, paths, output_names(paths), strict=True):
                results.append(as_json(one, card.class_names))
                if one.error is not None:
                    failed.append(one.error)
                    yield f"{shown(path)}: not read: {one.error.cause or one.error.what}"
                    continue
                drawing.append(pool.submit(_save_drawn, path, one.found, card.class_names, out / name))
                while len(drawing) > 2 * BATCH:
                    drawing.popleft().result()
                yield f"{shown(path)}: {_summary(one.found, card.class_names)}"
            for job in drawing:
                job.result()
    finally:
        _write_results(out, results)  # of an hour's work that is interrupted, too
    done = len(results) - len(failed)
    yield f"{done:,} picture{'' if done == 1 else 's'} with boxes and {RESULTS} are in {out}"
    if failed:
        raise DataError(
            f"{len(failed):,} of {len(paths):,} pictures could not be read; the others are done.",
            place=failed[0].place,
            cause=failed[0].cause or failed[0].what,
            fix=f"the entries with an error in {out / RESULTS} name them all",
        )


def as_json(one: Predicted, class_names: Sequence[str]) -> dict[str, Any]:
    """An entry of predictions.json: path, width, height, detections; `error` where the picture could not be read."""
    found = one.found
    columns = zip(found.label.tolist(), found.score.tolist(), found.boxes.tolist(), strict=True)
    entry: dict[str, Any] = {
        "path": None if one.path is None else shown(one.path),
        "width": one.size[1],
        "height": one.size[0],
        "detections": [
            {"label": label, "class": class_names[label], "score": round(score, 4), "box": [round(x, 2) for x in box]}
            for label, score, box in columns
        ],
    }
    return entry if one.error is None else entry | {"error": str(one.error)}


def output_names(paths: Sequence[Path]) -> list[str]:
    """A file name for each picture: its own, with the folders above it in front where two would be the same.

    Compared without case, since some file systems do not know it. An ending that Pillow cannot write gets `.jpg`.
    """
    plain = [p.name if p.suffix.lower() in WRITTEN else f"{p.name}.jpg" for p in paths]
    times = Counter(name.lower() for name in plain)
    absolute = [Path(os.path.abspath(p)) for p in paths]  # not resolved: names as the user knows them
    top = os.path.commonpath([p.parent for p in absolute]) if paths else ""
    names: list[str] = []
    used: set[str] = {RESULTS}
    for path, name in zip(absolute, plain, strict=True):
        if times[name.lower()] > 1:
            name = "_".join([*path.parent.relative_to(top).parts, name])
        unique, n = name, 2
        while unique.lower() in used:
            unique, n = f"{Path(name).stem}-{n}{Path(name).suffix}", n + 1
        used.add(unique.lower())
        names.append(unique)
    return names


def _require_own_folder(out: Path) -> None:
    """Results go where nothing else is: a picture of the user's with the same name must not be replaced."""
    if out.exists() and not out.is_dir():
        raise UsageError("The results need a folder.", place=out, cause="it is a file", fix="--out FOLDER")
    if out.exists() and any(out.iterdir()) and not (out / RESULTS).exists():
        raise UsageError(
            "The folder for the results holds other files.",
            place=out,
            cause=f"it has no {RESULTS}, so stoker did not write it",
            fix="name a new folder with --out",
        )


def _write_results(out: Path, results: list[dict[str, Any]]) -> None:
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / RESULTS, msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def _save_drawn(path: Path, found: Detections, class_names: Sequence[str], target: Path) -> None:
    drawn = draw_boxes(Image.fromarray(decode.decode(read_picture(path), path)), found, class_names)
    with _writing(target):
        drawn.save(target, quality=90)


def _writing(place: Path) -> contextlib.AbstractContextManager[None]:
    return writing("The results cannot be written.", place, fix="make room, or name another folder with --out")


def _summary(found: Detections, class_names: Sequence[str]) -> str:
    """car 3, bus 1 — or nothing."""
    counts = Counter(class_names[label] for label in found.label.tolist())
    return ", ".join(f"{name} {count}" for name, count in counts.most_common()) or "nothing"
