"""A sheet of images as the model gets them: each without and with augmentation, side by side, with the training boxes.

It shows the pixels and boxes of the loader's batches after `augment_batch`. The command is `stoker data preview`; the
settings are derived as for training, in `training/defaults/derive.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from stoker.config.settings import DataSettings
from stoker.data.augment import MOSAIC_GROUP_SIZE, augment_batch
from stoker.data.batch import Batch
from stoker.data.loading.loader import Loader, LoaderSpec, QuarantinedImage, compute_max_boxes
from stoker.evaluation.detections import boxes_in_image
from stoker.evaluation.draw import draw_boxes, fit_text
from stoker.hardware.device import Device
from stoker_watch.errors import UsageError

if TYPE_CHECKING:
    from stoker.data.index import Index

NO_LABELS = "no labels: used as background"
"""After the name of an image without boxes, which also has a frame."""
_FRAME_COLOR, _FRAME_WIDTH = (214, 69, 65), 4
CELL_SIZE = 320
"""Longer side of an image on the sheet, pixels."""
PAIRS_PER_ROW = 3
"""Images in a row, each shown twice."""
MAX_IMAGES = 400
"""Images on a sheet: a JPEG has at most 65,535 rows of pixels."""
_GAP, _FONT_SIZE = 8, 11


def make_preview(
    index: "Index",
    image_indices: NDArray[np.int64],
    settings: DataSettings,
    *,
    seed: int,
    num_images: int,
    workers: int,
    on_quarantine: Callable[[QuarantinedImage], None] | None = None,
) -> Image.Image:
    """A sheet of the first `num_images` images of a training on `image_indices`. All fields of `settings` are set.

    Raises UsageError for an invalid number, DataError when too many images cannot be used.
    """
    if not 1 <= num_images <= MAX_IMAGES:
        raise UsageError(f"--count {num_images} is out of range.", choices=[f"1 … {MAX_IMAGES}"])
    spec = LoaderSpec(
        device=Device(torch.device("cpu")),
        batch_size=MOSAIC_GROUP_SIZE,
        image_size=settings.image_size,
        resize=settings.resize,
        scale_jitter_prob=settings.scale_jitter_prob,
        scale_range=settings.scale_range,
        min_object_covered=settings.min_object_covered,
        max_boxes=compute_max_boxes(index, image_indices, mosaic=settings.mosaic),
        seed=seed,
        workers=workers,
        max_bad_fraction=settings.max_bad_fraction,
    )
    pairs: list[Image.Image] = []
    with (
        Loader(index, image_indices, dataclasses.replace(spec, scale_jitter_prob=0.0)) as plain_loader,
        Loader(index, image_indices, spec, on_quarantine=on_quarantine) as augmented_loader,
    ):
        while len(pairs) < num_images:
            batches = next(plain_loader), augment_batch(next(augmented_loader), settings, 0.0)
            for k in range(min(MOSAIC_GROUP_SIZE, num_images - len(pairs))):
                image_index = int(batches[0].image_index[k])
                has_labels = bool(index.offsets[image_index + 1] > index.offsets[image_index])
                images = [_render_image(batch, k, index.class_names) for batch in batches]
                pairs.append(_make_pair(images, index.path(image_index).name, has_labels=has_labels))
    return _make_sheet(pairs)


def _make_pair(images: list[Image.Image], name: str, *, has_labels: bool) -> Image.Image:
    """An image without and with augmentation, side by side, its name below; framed if it has no labels."""
    width, height = images[0].size
    pair = Image.new("RGB", (2 * width + 2, height + _FONT_SIZE + 4), "white")
    draw, font = ImageDraw.Draw(pair), ImageFont.load_default(size=_FONT_SIZE)
    for x, image in ((0, images[0]), (width + 2, images[1])):
        pair.paste(image, (x, 0))
        if not has_labels:
            draw.rectangle((x, 0, x + width - 1, height - 1), outline=_FRAME_COLOR, width=_FRAME_WIDTH)
    text = name if has_labels else f"{name}: {NO_LABELS}"
    draw.text((1, height + 1), fit_text(text, font, 2 * width), fill="black", font=font)
    return pair


def _render_image(batch: Batch, k: int, class_names: tuple[str, ...]) -> Image.Image:
    """Image k of a batch with its boxes, including the padding, resized to CELL_SIZE pixels on its longer side."""
    image = Image.fromarray(batch.images[k].permute(1, 2, 0).contiguous().numpy())
    scale = CELL_SIZE / max(image.size)
    resized = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    xyxy_scale = torch.tensor([resized[0] / image.width, resized[1] / image.height] * 2)
    valid = batch.valid[k]
    detections = boxes_in_image((batch.boxes[k][valid] * xyxy_scale).numpy(), batch.labels[k][valid].numpy())
    resample = Image.Resampling.NEAREST if scale >= 2 else Image.Resampling.BILINEAR
    return draw_boxes(image.resize(resized, resample), detections, class_names, scores=False)


def _make_sheet(pairs: list[Image.Image]) -> Image.Image:
    """All pairs, PAIRS_PER_ROW in a row, on white."""
    width, height = pairs[0].width + _GAP, pairs[0].height + _GAP
    columns = min(PAIRS_PER_ROW, len(pairs))
    sheet = Image.new("RGB", (columns * width + _GAP, -(-len(pairs) // columns) * height + _GAP), "white")
    for n, pair in enumerate(pairs):
        sheet.paste(pair, (_GAP + n % columns * width, _GAP + n // columns * height))
    return sheet
