"""Finds objects in pictures that have no annotations: files, folders, patterns in; boxes, drawn pictures, JSON out.

`predict_pictures` is the iterator, `predict_to_folder` the command. Pictures are decoded, placed and run as in an
evaluation (`data/decode.py`, `data/augment.py`, `evaluate.detect_batches`). The originals are never touched.
"""

import glob
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from PIL import Image

from stoker import models
from stoker.batch import Batch
from stoker.data import augment, decode
from stoker.data.samples import Slot, as_batch
from stoker.device import Device, host_cores
from stoker.draw import draw_boxes
from stoker.errors import DataError, UsageError
from stoker.evaluate import detect_batches
from stoker.metrics import Detections
from stoker.models.saved import Card
from stoker.records import write_whole

KINDS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
"""Endings by which pictures are found in folders; a file that is named is tried whatever it is called."""
RESULTS = "predictions.json"
BATCH = 8
AHEAD = 3
"""Batches that are being decoded while the device works on one."""


class Predicted(NamedTuple):
    """What was found in a picture."""

    path: Path
    size: tuple[int, int]
    """Height and width of the stored picture, pixels; zeros where it could not be read."""
    found: Detections
    """Best score first; boxes in pixels of the stored picture."""
    error: DataError | None
    """Why it could not be read; nothing is found then."""


def find_pictures(places: Iterable[str | Path], *, beside: Path | None = None) -> list[Path]:
    """The pictures of files, folders (with those inside) and patterns, each once, in order. Those in `beside` are not.

    Raises UsageError that names what was not found.
    """
    hidden = None if beside is None else beside.resolve()
    found: dict[Path, Path] = {}
    for place in places:
        path = Path(place).expanduser()
        if path.is_dir():
            pictures = sorted(p for p in path.rglob("*") if p.suffix.lower() in KINDS and p.is_file())
        elif path.exists():
            pictures = [path]
        else:
            matched = (Path(name) for name in glob.glob(str(path), recursive=True))
            pictures = sorted(p for p in matched if p.suffix.lower() in KINDS and p.is_file())
        pictures = [p for p in pictures if hidden is None or hidden not in p.resolve().parents]
        if not pictures:
            raise UsageError(_not_found(path), place=Path.cwd() / path, choices=KINDS,
                             fix="name picture files, a folder with such files, or a pattern in quotes")  # fmt: skip
        for picture in pictures:
            found.setdefault(picture.resolve(), picture)
    return list(found.values())


def _not_found(path: Path) -> str:
    if path.is_dir():
        return f"There are no pictures in the folder {str(path)!r}."
    if path.exists():
        return f"The file {str(path)!r} lies in the folder of the results."
    if glob.has_magic(str(path)):
        return f"No picture matches the pattern {str(path)!r}."
    return f"There is no file or folder {str(path)!r}."


def predict_pictures(
    model: "models.Detector",
    paths: Sequence[Path],
    device: Device,
    *,
    canvas: tuple[int, int],
    resize: str,
    score_threshold: float = 0.3,
    iou_threshold: float = 0.5,
    precision: str = "fp32",
    batch: int = BATCH,
) -> Iterator[Predicted]:
    """Runs the model, which lies on `device`, over picture files, in order. canvas, resize: as it was trained.

    A picture that cannot be read is yielded with its error; the others go on.
    """
    sizes: dict[int, tuple[int, int]] = {}
    errors: dict[int, DataError] = {}
    batches = _batches(paths, device, canvas, resize, batch, sizes, errors)
    parts = detect_batches(
        model, batches, device, precision=precision, score_threshold=score_threshold, iou_threshold=iou_threshold
    )
    for start, found in zip(range(0, len(paths), batch), parts, strict=True):
        for place in range(start, min(start + batch, len(paths))):
            yield Predicted(paths[place], sizes.pop(place, (0, 0)), found.of(place), errors.pop(place, None))


def _batches(
    paths: Sequence[Path],
    device: Device,
    canvas: tuple[int, int],
    resize: str,
    batch: int,
    sizes: dict[int, tuple[int, int]],
    errors: dict[int, DataError],
) -> Iterator[Batch]:
    """Batches on the device, `AHEAD` of them being decoded in threads; the last one is filled up."""
    stream = device.make_stream()
    begun: deque[tuple[int, Slot, list[Future[tuple[int, int]]]]] = deque()

    def finish(start: int, slot: Slot, jobs: list[Future[tuple[int, int]]]) -> Batch:
        for k in range(batch):
            try:
                if k >= len(jobs):
                    slot.blank(k)
                else:
                    sizes[start + k] = jobs[k].result()
            except DataError as error:
                errors[start + k] = error
                slot.blank(k)
        tensors, ready = stream.to_device(slot.tensors)
        ready.block_device()
        return as_batch(tensors)

    with ThreadPoolExecutor(host_cores(), "stoker-predict") as pool:
        for start in range(0, len(paths), batch):
            slot = Slot(device, batch, canvas, 1)
            some = enumerate(paths[start : start + batch])
            begun.append((start, slot, [pool.submit(_load, slot, k, start + k, p, canvas, resize) for k, p in some]))
            if len(begun) > AHEAD:
                yield finish(*begun.popleft())
        while begun:
            yield finish(*begun.popleft())


def _load(slot: Slot, k: int, place: int, path: Path, canvas: tuple[int, int], resize: str) -> tuple[int, int]:
    """Decodes a picture into place k of the slot. Returns its height and width; raises DataError."""
    data = _read(path)
    size = decode.picture_size(data, path)
    placement = augment.place(size, canvas, resize)
    height, width = placement.content
    slot.blank(k)
    decode.decode_into(data, path, region=placement.region, out=slot.pixels[k, :height, :width])
    slot.content[k], slot.scale[k], slot.size[k], slot.image_id[k] = placement.content, placement.scale, size, place
    return size


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError("The picture cannot be read.", place=path, cause=error.strerror or str(error)) from error


def predict_to_folder(
    model: "models.Detector",
    card: Card,
    places: Sequence[str | Path],
    device: Device,
    *,
    conf: float,
    iou: float,
    out: Path,
) -> Iterator[str]:
    """Writes every picture with its boxes, and predictions.json, into `out`; yields a line for each picture.

    Raises UsageError for places without pictures and for an `out` that holds other things; DataError at the end when
    some pictures could not be read.
    """
    paths = find_pictures(places, beside=out)
    _require_own_folder(out)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / RESULTS, b"[]\n")  # the folder is ours from here on, also when this run is cut off
    predicted = predict_pictures(
        model,
        paths,
        device,
        canvas=card.canvas,
        resize=card.resize,
        score_threshold=conf,
        iou_threshold=iou,
        precision=device.best_precision()[0],
    )
    results: list[dict[str, Any]] = []
    failed: list[DataError] = []
    with ThreadPoolExecutor(host_cores(), "stoker-draw") as pool:
        drawing: deque[Future[None]] = deque()
        for one, name in zip(predicted, output_names(paths), strict=True):
            results.append(as_json(one, card.class_names))
            if one.error is not None:
                failed.append(one.error)
                yield f"{one.path}: not read: {one.error.cause or one.error.what}"
                continue
            drawing.append(pool.submit(_save_drawn, one, card.class_names, out / name))
            while len(drawing) > 2 * BATCH:
                drawing.popleft().result()
            yield f"{one.path}: {_summary(one.found, card.class_names)}"
        for job in drawing:
            job.result()
    write_whole(out / RESULTS, msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    yield f"{len(results) - len(failed):,} pictures with boxes and {RESULTS} are in {out}"
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
        "path": str(one.path),
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
    plain = [p.name if p.suffix.lower() in KINDS else f"{p.name}.jpg" for p in paths]
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


def _save_drawn(one: Predicted, class_names: Sequence[str], target: Path) -> None:
    picture = Image.fromarray(decode.decode(_read(one.path), one.path))
    draw_boxes(picture, one.found, class_names).save(target, quality=90)


def _summary(found: Detections, class_names: Sequence[str]) -> str:
    """car 3, bus 1 — or nothing."""
    counts = Counter(class_names[label] for label in found.label.tolist())
    return ", ".join(f"{name} {count}" for name, count in counts.most_common()) or "nothing"
