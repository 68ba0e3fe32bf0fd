"""Augmentation of whole batches on the device: flip, color jitter, mixup, mosaic.

Fixed shapes, no host wait, uint8 channels last in and out. All randomness comes from `Batch.rand`. What is off costs
nothing, because strengths and probabilities are numbers of the settings, not tensors. Crop and scale are applied
earlier, on the host: `geometry.py`.

On a CPU a few images are processed at a time (`at_once`), so that they fit its cache. On accelerators it is the whole
batch: the number of kernels does not grow with it, and torch.compile makes one graph of them.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from stoker.config.settings import DataSettings
from stoker.data.batch import PAD_COLOR, Batch, RandSlot
from stoker.data.geometry import MIN_AREA_FRACTION, MIN_SIDE_PIXELS
from stoker_watch.errors import ConfigError

MOSAIC_GROUP_SIZE = 4
"""Images of a mosaic: positions 4g … 4g+3 of the stream, whatever the batch size."""
MOSAIC_END_FRACTION = 0.9
"""Fraction of the training after which no mosaics are made, so that the last images look like those at inference. YOLOX
(Ge et al. 2021, section 2) stops strong augmentation for the last 15 of 300 epochs; trainings here are shorter, and
their learning rate falls late."""
MIXUP_END_FRACTION = 0.5
"""The same of mixup: DEIM (Huang et al. 2024, arXiv 2412.04234) has it until epoch 29 of 58."""
MIXUP_WEIGHT_RANGE = (0.45, 0.55)
"""Weight of the other image; as in DEIM's code."""
MOSAIC_CENTER_RANGE = (0.3, 0.7)
"""Where the four tiles of a mosaic meet, as a fraction of height and width."""
MOSAIC_SCALE_RANGE = (0.5, 0.8)
"""Scale of a tile relative to its image in the batch. Down to 1/2, bilinear sampling covers every pixel."""

RGB_TO_YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))
"""RGB to luma and two axes of chroma (NTSC 1953; Y is that of ITU-R BT.601)."""
LUMA_WEIGHTS = RGB_TO_YIQ[0]
HUE_ROTATION: list[list[float]] = (np.linalg.inv(RGB_TO_YIQ) @ ((0, 0, 0), (0, 0, -1), (0, 1, 0)) @ RGB_TO_YIQ).tolist()
"""A hue rotation by 90° as a matrix on RGB: (I, Q) becomes (-Q, I), and Y is dropped."""

MakeTensor = TypeVar("MakeTensor", bound=Callable[..., Any])
_caches: list[dict[tuple[Any, ...], Any]] = []


class AtOnce(NamedTuple):
    """What is processed at a time."""

    images: int
    """A multiple of MOSAIC_GROUP_SIZE, or the whole batch."""
    channels: int
    """1 or 3."""


def default_at_once(images: Tensor) -> AtOnce:
    """Returns as much as fits the cache of a CPU, or all images [B, 3, H, W] on an accelerator."""
    return AtOnce(MOSAIC_GROUP_SIZE, 1) if images.device.type == "cpu" else AtOnce(len(images), 3)


def augment_batch(batch: Batch, settings: DataSettings, progress: float, at_once: AtOnce | None = None) -> Batch:
    """Applies the settings in the order flip, color, mixup, mosaic: a tile has its image's own flip and color.

    progress: fraction of the training that is done, 0 … 1; at_once: default `default_at_once`. Raises ConfigError for
    a mosaic with a batch size that is not a multiple of 4.
    """
    return apply_augmentations(batch, settings, *strong_augmentations(settings, progress), at_once)


def apply_augmentations(
    batch: Batch, settings: DataSettings, mixes: bool, makes: bool, at_once: AtOnce | None = None
) -> Batch:
    """Does the same as `augment_batch`, without numbers that change from step to step. mixes, makes: those of
    `strong_augmentations`."""
    if settings.hflip > 0:
        batch = horizontal_flip(batch, settings.hflip)
    strengths = settings.brightness, settings.contrast, settings.saturation, settings.hue
    if max(strengths) > 0:
        batch = color_jitter(batch, *strengths, at_once=at_once)
    if mixes:
        batch = mixup(batch, settings.mixup)
    if makes:
        batch = mosaic(batch, settings.mosaic, at_once)
    return batch


def strong_augmentations(settings: DataSettings, progress: float) -> tuple[bool, bool]:
    """Returns whether `augment_batch` mixes images and makes mosaics at this fraction of the training: all of it that
    depends on `progress`. Without mosaics nothing is mixed: there is room for the boxes of one image only."""
    makes_mosaics = settings.mosaic > 0 and progress < MOSAIC_END_FRACTION
    return makes_mosaics and bool(settings.mixup) and progress < MIXUP_END_FRACTION, makes_mosaics


def mixup(batch: Batch, probability: float) -> Batch:
    """Blends images whose random number is below `probability` with the other one of their pair (positions 2n and
    2n + 1 of the stream), which may be blended too. They get the boxes of both (Zhang et al. 2018, arXiv 1710.09412;
    without weights of the losses, as DEIM has it), unless max_boxes is too small for them. Of an odd number of images,
    the last one is left as it is.
    """
    count, max_boxes = batch.valid.shape
    other = (_indices(count, batch.rand.device) ^ 1).clamp(max=count - 1)
    draw = batch.rand[:, RandSlot.MIXUP]
    valid = torch.cat((batch.valid, batch.valid[other]), 1)
    chosen = (draw < probability) & (valid.sum(1) <= max_boxes) & (other != _indices(count, draw.device))
    order = valid.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :max_boxes]
    boxes = torch.cat((batch.boxes, batch.boxes[other]), 1).gather(1, order[:, :, None].expand(-1, -1, 4))
    labels = torch.cat((batch.labels, batch.labels[other]), 1).gather(1, order)
    low, high = MIXUP_WEIGHT_RANGE
    weight = torch.where(chosen, low + (high - low) / probability * draw, 0.0)[:, None, None, None]
    pixels = batch.images.permute(0, 2, 3, 1)
    mixed = torch.lerp(pixels.float(), pixels[other].float(), weight).round_().to(torch.uint8)
    row = chosen[:, None]
    return batch._replace(
        images=mixed.permute(0, 3, 1, 2),
        boxes=torch.where(row[:, :, None], boxes, batch.boxes),
        labels=torch.where(row, labels, batch.labels),
        valid=torch.where(row, valid.gather(1, order), batch.valid),
        resized_size=torch.where(row, batch.resized_size.maximum(batch.resized_size[other]), batch.resized_size),
    )


def horizontal_flip(batch: Batch, probability: float) -> Batch:
    """Flips images whose random number is below `probability` left to right, within `resized_size`.

    Padding stays at the right. Implemented as a gather along pixel rows: 1.5 ms for 16 × 3 × 320 × 320 on two cores;
    torch.flip with torch.where takes 2.4 ms and would move the padding.
    """
    chosen = (batch.rand[:, RandSlot.FLIP] < probability)[:, None]
    pixels = batch.images.permute(0, 2, 3, 1)
    count, height, width, channels = pixels.shape
    resized_width = batch.resized_size[:, 1:]

    column = _indices(width, pixels.device)
    mirrored_column = resized_width - _indices(width + 1, pixels.device)[1:]
    source_column = torch.where(chosen & (mirrored_column >= 0), mirrored_column, column)
    channel = _indices(channels, pixels.device)
    source_column = (source_column[:, :, None] * channels + channel).view(count, 1, width * channels)
    pixel_rows = pixels.reshape(count, height, width * channels)
    images = (
        pixel_rows.gather(2, source_column.expand(count, height, width * channels))
        .view(pixels.shape)
        .permute(0, 3, 1, 2)
    )

    right_edge = resized_width[:, :, None]
    x0, y0, x1, y1 = torch.split(batch.boxes, 1, dim=2)
    flipped = torch.cat((right_edge - x1, y0, right_edge - x0, y1), dim=2)
    boxes = torch.where((chosen & batch.valid)[:, :, None], flipped, batch.boxes)
    return batch._replace(images=images, boxes=boxes)


def jitter_factor(u: Tensor, strength: float | Tensor) -> Tensor:
    """Uniform numbers in [0, 1) → factors in [1 - strength, 1 + strength), at least 0; exactly 1 at strength 0."""
    return (1.0 + strength * (2.0 * u - 1.0)).clamp(min=0.0)


def color_jitter(
    batch: Batch, brightness: float, contrast: float, saturation: float, hue: float, *, at_once: AtOnce | None = None
) -> Batch:
    """Changes the colors of every image within `resized_size` by factors around 1 of these strengths; 0 is off.

    brightness scales the pixels; contrast scales the distance from the image's mean gray; saturation scales the
    distance of a pixel from its own gray; hue rotates it around the gray axis of YIQ by up to ± that fraction of a
    circle, which keeps its luma (torchvision's ColorJitter rotates in HSV, which does not). As in SSD's photometric
    distortion the factors are drawn per image. All four in this order are one affine map of RGB, A p + o, clamped to
    0 … 255 once at the end. With L the matrix from a color to its gray, A is
    b c (L + s cos t (1 - L) + s sin t HUE_ROTATION).

    The mean gray is that of every fourth row and column. 12 ms for 16 × 3 × 320 × 320 on one core.
    """
    rand, images = batch.rand, batch.images
    count, _, height, width = images.shape
    strengths = _constants((brightness, contrast, saturation), rand.dtype, rand.device)
    b, c, s = jitter_factor(rand[:, RandSlot.BRIGHTNESS : RandSlot.SATURATION + 1], strengths).unbind(1)
    angle = 2.0 * math.pi * hue * (2.0 * rand[:, RandSlot.HUE] - 1.0)
    in_rows, in_columns = _resized_area(batch.resized_size, height, width)
    mean_gray = _mean_gray(images[:, :, ::4, ::4], in_rows[:, ::4] & in_columns[:, :, ::4])
    offset = ((1.0 - c) * b * mean_gray)[:, None, None]
    scale = c * b
    chroma_scale = scale * s
    cos_term, sin_term = chroma_scale * torch.cos(angle), chroma_scale * torch.sin(angle)
    luma = _constants(LUMA_WEIGHTS, rand.dtype, rand.device)
    hue_rotation = tuple(itertools.chain.from_iterable(HUE_ROTATION))
    rotation = _constants(hue_rotation, rand.dtype, rand.device).view(3, 3, 1)
    identity = _constants((1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0), rand.dtype, rand.device).view(3, 3, 1)
    matrix = (scale - cos_term) * luma[:, None] + sin_term * rotation + cos_term * identity
    matrix = matrix[:, :, :, None, None]

    images_at_once, channels_at_once = at_once or default_at_once(images)
    out = torch.empty((count, height, width, 3), dtype=torch.uint8, device=images.device)
    out_planes = out.permute(3, 0, 1, 2)
    for first_image in range(0, count, images_at_once):
        group = slice(first_image, first_image + images_at_once)
        planes = images[group].permute(1, 0, 2, 3).to(torch.float32, memory_format=torch.contiguous_format)
        mask = in_rows[group] & in_columns[group]
        for first_channel in range(0, 3, channels_at_once):
            channels = slice(first_channel, first_channel + channels_at_once)
            weights = matrix[channels, :, group]
            mixed = torch.addcmul(offset[group], planes[0], weights[:, 0])
            mixed.addcmul_(planes[1], weights[:, 1]).addcmul_(planes[2], weights[:, 2])
            mixed.add_(0.5).clamp_(0.0, 255.0)
            out_planes[channels, group] = torch.where(mask, mixed, planes[channels])
    return batch._replace(images=out.permute(0, 3, 1, 2))


def _cached(make: MakeTensor) -> MakeTensor:
    """Calls `make` once for the same arguments, not at every step. Nothing may change the tensors."""
    made: dict[tuple[Any, ...], Any] = {}
    _caches.append(made)

    @functools.wraps(make)
    def cached(*args: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiler makes constants of them itself
            return make(*args)
        if args not in made:
            with torch.inference_mode(False):
                made[args] = make(*args)
        return made[args]

    return cast("MakeTensor", cached)


def clear_cached_constants() -> None:
    """Forgets the constants of all devices and shapes."""
    for made in _caches:
        made.clear()


@_cached
def _constants(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor [n], made without a copy from the host."""
    return torch.stack([torch.full((), value, dtype=dtype, device=device) for value in values])


@_cached
def _indices(count: int, device: torch.device) -> Tensor:
    """Returns int64 [count]: 0, 1, 2 …"""
    return torch.arange(count, device=device)


@_cached
def _tile_members(count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `member` and `source_index` of `_MosaicTiles` for the mosaics of `count` images; and bool [4, 2], whether
    a tile is below, and right of, the center."""
    image_index = torch.arange(count, device=device)[:, None]
    quadrant = torch.arange(MOSAIC_GROUP_SIZE, device=device)
    member = (image_index + quadrant) % MOSAIC_GROUP_SIZE
    source_index = image_index // MOSAIC_GROUP_SIZE * MOSAIC_GROUP_SIZE + member
    return member, source_index, torch.stack((quadrant >= 2, quadrant % 2 == 1), -1)


def _resized_area(resized_size: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns bool [B, height, 1] and [B, 1, width]: the rows and columns that belong to the image, not to padding."""
    rows = _indices(height, resized_size.device) < resized_size[:, :1]
    columns = _indices(width, resized_size.device) < resized_size[:, 1:]
    return rows[:, :, None], columns[:, None, :]


def _mean_gray(images: Tensor, mask: Tensor) -> Tensor:
    """Returns float32 [B], the mean luma of the pixels of images uint8 [B, 3, H, W] in a mask bool [B, H, W]."""
    pixels = images.to(torch.float32)
    gray = LUMA_WEIGHTS[0] * pixels[:, 0] + LUMA_WEIGHTS[1] * pixels[:, 1] + LUMA_WEIGHTS[2] * pixels[:, 2]
    return (gray * mask).sum((1, 2)) / mask.sum((1, 2))


def mosaic(batch: Batch, probability: float, at_once: AtOnce | None = None) -> Batch:
    """Replaces an image whose random number is below `probability` by a 2 × 2 mosaic of the four images of its group.

    Each of the four is scaled down by its own factor, placed with a corner at a random center, and cut at the quadrant
    and the edge (Bochkovskiy et al. 2020, YOLOv4, section 3.3). `resized_size` becomes the full height and width;
    `scale`, `original_size` and `image_index` stay those of the image. Boxes follow; those cut too much are dropped by
    the rule of `geometry.transform_boxes`. A mosaic with more boxes than max_boxes is not made, so that none is lost.

    Groups are positions 4g … 4g+3 of the stream, so the result does not depend on the batch size. 29 ms for
    16 × 3 × 320 × 320 on one core. Raises ConfigError for a batch size that is not a multiple of 4.
    """
    count, _, height, width = batch.images.shape
    if count % MOSAIC_GROUP_SIZE:
        raise ConfigError(
            f"--mosaic needs a multiple of {MOSAIC_GROUP_SIZE} images per device, not {count}.",
            fix=f"--batch-size {max(MOSAIC_GROUP_SIZE, count // MOSAIC_GROUP_SIZE * MOSAIC_GROUP_SIZE)} per device,"
            " or --mosaic 0",
        )
    tiles = _MosaicTiles(batch)
    boxes, labels, valid, fits = tiles.boxes(batch)
    is_mosaic = fits & (batch.rand[:, RandSlot.MOSAIC] < probability)
    plain_and_mosaic = torch.empty((2 * count, height, width, 3), dtype=torch.uint8, device=is_mosaic.device)
    plain_and_mosaic[:count] = batch.images.permute(0, 2, 3, 1)
    images_at_once = (at_once or default_at_once(batch.images)).images
    for first_image in range(0, count, images_at_once):
        group = slice(first_image, first_image + images_at_once)
        tiles.render(batch, group, plain_and_mosaic[count:][group])
    # Selecting whole images is faster than torch.where on bytes.
    pixels = plain_and_mosaic.index_select(0, _indices(count, is_mosaic.device) + count * is_mosaic)
    is_mosaic = is_mosaic[:, None]
    return batch._replace(
        images=pixels.permute(0, 3, 1, 2),
        boxes=torch.where(is_mosaic[:, :, None], boxes, batch.boxes),
        labels=torch.where(is_mosaic, labels, batch.labels),
        valid=torch.where(is_mosaic, valid, batch.valid),
        resized_size=torch.where(
            is_mosaic, _constants((height, width), torch.int32, is_mosaic.device), batch.resized_size
        ),
    )


class _MosaicTiles:
    """Geometry of the tiles of each mosaic: quadrants 0 … 3 row by row, tile q of mosaic b is [b, q]. The last
    dimension is height and width, or y and x."""

    def __init__(self, batch: Batch) -> None:
        rand = batch.rand
        count, _, height, width = batch.images.shape
        self.member, self.source_index, is_second_half = _tile_members(count, rand.device)
        """int64 [B, 4], of the image that a tile shows (quadrant 0: image b itself), in its group and in the batch."""
        self.image_size = _constants((height, width), rand.dtype, rand.device)
        scale = (
            MOSAIC_SCALE_RANGE[0]
            + (MOSAIC_SCALE_RANGE[1] - MOSAIC_SCALE_RANGE[0])
            * rand[:, RandSlot.TILE_SCALES : RandSlot.TILE_SCALES + MOSAIC_GROUP_SIZE]
        )
        self.source_size = batch.resized_size[self.source_index]
        """int32 [B, 4, 2], of the image that a tile shows."""
        self.tile_size = (self.source_size * scale[:, :, None]).round().clamp(min=1.0)
        """[B, 4, 2], of the whole tile, in whole pixels."""
        u = rand[:, None, RandSlot.CENTER_Y : RandSlot.CENTER_X + 1]
        self.center = (
            self.image_size * (MOSAIC_CENTER_RANGE[0] + (MOSAIC_CENTER_RANGE[1] - MOSAIC_CENTER_RANGE[0]) * u)
        ).round()
        """[B, 1, 2]"""
        self.start = torch.where(is_second_half, self.center, self.center - self.tile_size)
        """[B, 4, 2], the top left corner of the whole tile in pixels of the mosaic."""
        self.visible_min = self.start.clamp(min=0.0)
        """[B, 4, 2] and the next: corners of its visible part."""
        self.visible_max = torch.where(
            is_second_half, torch.minimum(self.start + self.tile_size, self.image_size), self.center
        )

    def boxes(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns boxes [B, M, 4], labels, valid of the mosaics, the valid ones first; and whether M suffices, [B]."""
        count, max_boxes = batch.valid.shape
        # [B, 4, 1, 1, 2] in the order x, y, for boxes as [B, 4, M, 2, 2].
        scale, start, visible_min, visible_max = (
            torch.stack((self.tile_size / self.source_size, self.start, self.visible_min, self.visible_max))
            .flip(-1)[:, :, :, None, None]
            .unbind()
        )
        corners = batch.boxes[self.source_index].view(count, MOSAIC_GROUP_SIZE, max_boxes, 2, 2)
        transformed = corners * scale + start
        clipped = torch.minimum(torch.maximum(transformed, visible_min), visible_max)
        full_wh, wh = transformed.diff(dim=-2).squeeze(-2), clipped.diff(dim=-2).squeeze(-2)
        is_uncut = (wh >= 0.999 * full_wh).all(-1)
        is_large_enough = (wh.prod(-1) >= MIN_AREA_FRACTION * full_wh.prod(-1)) & (wh >= MIN_SIDE_PIXELS).all(-1)
        keep = batch.valid[self.source_index] & (wh > 0).all(-1) & (is_uncut | is_large_enough)

        keep = keep.view(count, MOSAIC_GROUP_SIZE * max_boxes)
        order = keep.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :max_boxes]
        valid = keep.gather(1, order)
        labels = batch.labels[self.source_index].view(count, -1).gather(1, order)
        boxes = clipped.reshape(count, -1, 4).gather(1, order[:, :, None].expand(count, max_boxes, 4))
        unused = valid.logical_not()
        boxes, labels = boxes.masked_fill_(unused[:, :, None], 0.0), labels.masked_fill_(unused, 0)
        return boxes, labels, valid, keep.sum(1) <= max_boxes

    def render(self, batch: Batch, group: slice, out: Tensor) -> None:
        """Writes the mosaics of the images `group`, whole groups of four: out, uint8 [n, H, W, 3].

        The four images of a group are stacked vertically, so that one bilinear sampling reads all of them.
        """
        count, height, width, _ = out.shape
        quads = count // MOSAIC_GROUP_SIZE
        images = batch.images[group].view(quads, MOSAIC_GROUP_SIZE, 3, height, width).transpose(1, 2)
        images = images.to(torch.float32, memory_format=torch.contiguous_format)
        row, column = (_indices(size, images.device)[None, :, None] for size in (height, width))
        # Source coordinates by row for the tiles left and right of the center, by column for those above and below.
        below, right = row >= self.center[group, :, 0, None], column >= self.center[group, :, 1, None]
        y, inside_y = self._source_coords(0, group, row)
        x, inside_x = self._source_coords(1, group, column)
        # From pixels to the sampler's coordinates: -1 … 1 from edge to edge.
        y = (y + height * self.member[group, None] + 0.5) * (2.0 / (MOSAIC_GROUP_SIZE * height)) - 1.0
        x = (x + 0.5) * (2.0 / width) - 1.0
        y, inside_y = (torch.where(below, tile[:, :, 2:], tile[:, :, :2])[:, :, None] for tile in (y, inside_y))
        x, inside_x = (torch.where(right, tile[:, :, 1::2], tile[:, :, ::2])[:, None] for tile in (x, inside_x))

        right, below = right[:, None, :, 0], below[:, :, None, 0]
        y, inside_y = (torch.where(right, tile[..., 1], tile[..., 0]) for tile in (y, inside_y))
        x, inside_x = (torch.where(below, tile[..., 1], tile[..., 0]) for tile in (x, inside_x))
        sampled = functional.grid_sample(
            images.view(quads, 3, MOSAIC_GROUP_SIZE * height, width),
            torch.stack((x, y), -1).view(quads, MOSAIC_GROUP_SIZE * height, width, 2),
            padding_mode="border",
            align_corners=False,
        )
        sampled = sampled.view(quads, 3, MOSAIC_GROUP_SIZE, height, width).add_(0.5)
        outside = (inside_y & inside_x).logical_not_().view(quads, MOSAIC_GROUP_SIZE, height, width)
        padding = _constants(tuple(map(float, PAD_COLOR)), sampled.dtype, sampled.device).view(3, 1, 1, 1)
        sampled = torch.where(outside[:, None], padding, sampled)
        out.view(quads, MOSAIC_GROUP_SIZE, height, width, 3).copy_(sampled.permute(0, 2, 3, 4, 1))

    def _source_coords(self, axis: int, group: slice, pixel_coords: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels of the mosaic [1, n, 1] → coordinates in each tile's image [B, n, 4], and whether inside the tile:
        there between the centers of the first and the last pixel, as no tile is enlarged, so no padding bleeds in."""
        start, length, source_length = (
            size[group, None, :, axis] for size in (self.start, self.tile_size, self.source_size)
        )
        offset = pixel_coords - start
        coords = (offset + 0.5) * (source_length / length) - 0.5
        return coords, (offset >= 0) & (offset < length)
