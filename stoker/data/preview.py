"""A contact sheet: pictures as the model gets them, each plain beside augmented, with the boxes that are trained on.

What is drawn are the pixels and boxes of the loader's batches after `augment_batch`, nothing that is made for show. The
command is `stoker data preview`; which settings apply is decided where training decides it,
`training/defaults/derive.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from stoker.config.settings import DataSettings
from stoker.data.augment.device import GROUP, augment_batch, factor
from stoker.data.batch import Batch, Draw
from stoker.data.loading.loader import Loader, Quarantine, box_slots
from stoker.errors import UsageError
from stoker.evaluation.metrics import Detections
from stoker.hardware.device import Device
from stoker.inference.draw import draw_boxes

if TYPE_CHECKING:
    from stoker.data.index import Index

CELL = 320
"""Longer side of a picture on the sheet, pixels."""
PAIRS = 3
"""Pictures in a row, each twice."""
MOST = 400
"""Pictures on a sheet at most: a JPEG has at most 65,535 rows of pixels."""
_GAP, _FONT = 8, 11


def preview(
    index: "Index",
    rows: NDArray[np.int64],
    settings: DataSettings,
    *,
    seed: int,
    count: int,
    threads: int,
    on_quarantine: Callable[[Quarantine], None] | None = None,
) -> Image.Image:
    """The first `count` pictures that a training over `rows` would see, as a sheet. `settings` has no open field.

    Raises UsageError for a count that cannot be, DataError when too many pictures cannot be used.
    """
    if not 1 <= count <= MOST:
        raise UsageError(f"--count {count} is out of range.", choices=[f"1 … {MOST}"])
    plain = dataclasses.replace(settings, crop=0.0)
    pairs: list[Image.Image] = []
    with (
        _loader(index, rows, plain, seed, threads, None) as before,
        _loader(index, rows, settings, seed, threads, on_quarantine) as after,
    ):
        while len(pairs) < count:
            batch, loaded = next(before), next(after)
            seen = augment_batch(loaded, settings, 0.0)
            single = augment_batch(loaded, dataclasses.replace(settings, mosaic=0.0), 0.0)
            changed = (seen.images != single.images).flatten(1).any(1)
            for k in range(min(GROUP, count - len(pairs))):
                name = index.path(int(batch.image_id[k])).name
                done = describe(batch, loaded, k, settings, mosaic=bool(changed[k]))
                pairs.append(_pair(batch, seen, k, index.class_names, [name], done))
    return _sheet(pairs)


def _loader(
    index: "Index", rows: NDArray[np.int64], settings: DataSettings, seed: int, threads: int,
    on_quarantine: Callable[[Quarantine], None] | None,
) -> Loader:  # fmt: skip
    return Loader(
        index,
        rows,
        device=Device(torch.device("cpu")),
        batch=GROUP,
        canvas=settings.canvas,
        resize=settings.resize,
        crop=settings.crop,
        zoom=settings.zoom,
        overlap=settings.overlap,
        boxes=box_slots(index, rows, mosaic=settings.mosaic),
        seed=seed,
        threads=threads,
        max_bad=settings.max_bad,
        on_quarantine=on_quarantine,
    )


def describe(plain: Batch, loaded: Batch, k: int, settings: DataSettings, *, mosaic: bool) -> list[str]:
    """What was drawn for picture k, in words: where things lie, and their colours.

    plain, loaded: the picture without and with crop and zoom, both before `augment_batch`.
    """
    draw = loaded.draw[k]
    moved = []
    if float(draw[Draw.FLIP]) < settings.flip:
        moved.append("flip")
    zoom = float(loaded.scale[k, 0] / plain.scale[k, 0])
    if abs(zoom - 1) > 0.01:
        moved.append(f"zoom {zoom:.2f}")
    if mosaic:
        moved.append("mosaic")
    colours = [
        f"{name} {float(factor(draw[entry], strength)):.2f}"
        for name, entry, strength in (
            ("brightness", Draw.BRIGHTNESS, settings.brightness),
            ("contrast", Draw.CONTRAST, settings.contrast),
            ("saturation", Draw.SATURATION, settings.saturation),
        )
        if strength > 0
    ]
    if settings.hue > 0:
        colours.append(f"hue {360 * settings.hue * (2 * float(draw[Draw.HUE]) - 1):+.0f}°")
    lines = [", ".join(words) for words in (moved, colours) if words]
    return lines or ["as it is"]


def _pair(
    plain: Batch, seen: Batch, k: int, class_names: tuple[str, ...], left: list[str], right: list[str]
) -> Image.Image:
    """Picture k without and with augmentation, side by side, each with up to two lines of text below."""
    pictures = [_picture(batch, k, class_names) for batch in (plain, seen)]
    width, height = pictures[0].size
    pair = Image.new("RGB", (2 * width + 2, height + 2 * (_FONT + 4)), "white")
    pen, font = ImageDraw.Draw(pair), ImageFont.load_default(size=_FONT)
    for x, picture, lines in ((0, pictures[0], left), (width + 2, pictures[1], right)):
        pair.paste(picture, (x, 0))
        for n, line in enumerate(lines):
            pen.text((x + 1, height + 1 + n * (_FONT + 3)), _fitting(line, width - 2, font), fill="black", font=font)
    return pair


def _fitting(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """The text, or as much of it as `width` pixels hold, with dots."""
    kept = text
    while kept and font.getlength(kept if kept == text else kept + "…") > width:
        kept = kept[:-1]
    return kept if kept == text else kept + "…"


def _picture(batch: Batch, k: int, class_names: tuple[str, ...]) -> Image.Image:
    """Picture k of a batch with its boxes, the whole canvas, its longer side CELL pixels."""
    image = Image.fromarray(batch.images[k].permute(1, 2, 0).contiguous().numpy())
    scale = CELL / max(image.size)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    per_side = torch.tensor([size[0] / image.width, size[1] / image.height] * 2)
    valid = batch.valid[k]
    boxes = _as_detections(batch.boxes[k][valid] * per_side, batch.labels[k][valid])
    how = Image.Resampling.NEAREST if scale >= 2 else Image.Resampling.BILINEAR
    return draw_boxes(image.resize(size, how), boxes, class_names, scores=False)


def _as_detections(boxes: Tensor, labels: Tensor) -> Detections:
    count = len(boxes)
    return Detections(
        row=np.zeros(count, np.int64),
        boxes=boxes.numpy(),
        score=np.ones(count, np.float32),
        label=labels.numpy(),
        pictures=np.zeros(1, np.int64),
    )


def _sheet(pairs: list[Image.Image]) -> Image.Image:
    """All pairs in rows of PAIRS, white between them."""
    width, height = pairs[0].width + _GAP, pairs[0].height + _GAP
    columns = min(PAIRS, len(pairs))
    sheet = Image.new("RGB", (columns * width + _GAP, -(-len(pairs) // columns) * height + _GAP), "white")
    for n, pair in enumerate(pairs):
        sheet.paste(pair, (_GAP + n % columns * width, _GAP + n // columns * height))
    return sheet
