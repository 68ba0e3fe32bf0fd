"""Augmentation of whole batches on the device: flip, color jitter, mosaic.

Fixed shapes, no host wait, uint8 channels last in and out. All randomness comes from `Batch.rand`. What is off costs
nothing, because strengths and probabilities are numbers of the settings, not tensors. Crop and scale are applied
earlier, on the host: `geometry.py`.
"""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from stoker.config.settings import DataSettings
from stoker.data.augment.geometry import MIN_AREA_FRACTION, MIN_SIDE_PIXELS
from stoker.data.batch import Batch, RandSlot
from stoker.data.loading.samples import PAD_COLOR
from stoker.errors import ConfigError

MOSAIC_GROUP_SIZE = 4
"""Images of a mosaic: positions 4g … 4g+3 of the stream, whatever the batch size."""
MOSAIC_END_FRACTION = 0.9
"""Fraction of the training after which no mosaics are made, so that the last images look like those at inference. YOLOX
(Ge et al. 2021, section 2) stops strong augmentation for the last 15 of 300 epochs; trainings here are shorter, and
their learning rate falls late."""
MOSAIC_CENTER_RANGE = (0.3, 0.7)
"""Where the four tiles of a mosaic meet, as a fraction of height and width."""
MOSAIC_SCALE_RANGE = (0.5, 0.8)
"""Scale of a tile relative to its image in the batch. Down to 1/2, bilinear sampling covers every pixel."""

RGB_TO_YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))
"""RGB to luma and two axes of chroma (NTSC 1953; Y is that of ITU-R BT.601)."""
LUMA_WEIGHTS = RGB_TO_YIQ[0]
HUE_ROTATION: list[list[float]] = (np.linalg.inv(RGB_TO_YIQ) @ ((0, 0, 0), (0, 0, -1), (0, 1, 0)) @ RGB_TO_YIQ).tolist()
"""A hue rotation by 90° as a matrix on RGB: (I, Q) becomes (-Q, I), and Y is dropped."""


def augment_batch(batch: Batch, settings: DataSettings, progress: float) -> Batch:
    """Applies the settings in the order flip, color, mosaic: a tile has its image's own flip and color.

    progress: fraction of the training that is done, 0 … 1. Raises ConfigError for a mosaic with a batch size that is
    not a multiple of 4.
    """
    if settings.hflip > 0:
        batch = horizontal_flip(batch, settings.hflip)
    strengths = settings.brightness, settings.contrast, settings.saturation, settings.hue
    if max(strengths) > 0:
        batch = color_jitter(batch, *strengths)
    if settings.mosaic > 0 and progress < MOSAIC_END_FRACTION:
        batch = mosaic(batch, settings.mosaic)
    return batch


def horizontal_flip(batch: Batch, probability: float) -> Batch:
    """Flips images whose random number is below `probability` left to right, within `resized_size`.

    Padding stays at the right. Implemented as a gather along pixel rows: 1.5 ms for 16 × 3 × 320 × 320 on two cores;
    torch.flip with torch.where takes 2.4 ms and would move the padding.
    """
    chosen = (batch.rand[:, RandSlot.FLIP] < probability)[:, None]
    pixels = batch.images.permute(0, 2, 3, 1)
    count, height, width, channels = pixels.shape
    resized_width = batch.resized_size[:, 1:].to(torch.int64)

    column = torch.arange(width, device=pixels.device)
    mirrored_column = resized_width - 1 - column
    source_column = torch.where(chosen & (mirrored_column >= 0), mirrored_column, column)
    channel = torch.arange(channels, device=pixels.device)
    source_column = (source_column[:, :, None] * channels + channel).view(count, 1, width * channels)
    pixel_rows = pixels.reshape(count, height, width * channels)
    images = (
        pixel_rows.gather(2, source_column.expand(count, height, width * channels))
        .view(pixels.shape)
        .permute(0, 3, 1, 2)
    )

    right_edge = resized_width.to(batch.boxes.dtype)[:, :, None]
    x0, y0, x1, y1 = torch.split(batch.boxes, 1, dim=2)
    flipped = torch.cat((right_edge - x1, y0, right_edge - x0, y1), dim=2)
    boxes = torch.where((chosen & batch.valid)[:, :, None], flipped, batch.boxes)
    return batch._replace(images=images, boxes=boxes)


def jitter_factor(u: Tensor, strength: float) -> Tensor:
    """Uniform numbers [B] in [0, 1) → factors in [1 - strength, 1 + strength), at least 0; exactly 1 at strength 0."""
    return (1.0 + strength * (2.0 * u - 1.0)).clamp(min=0.0)


def color_jitter(batch: Batch, brightness: float, contrast: float, saturation: float, hue: float) -> Batch:
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
    c = jitter_factor(rand[:, RandSlot.CONTRAST], contrast)
    scale = jitter_factor(rand[:, RandSlot.BRIGHTNESS], brightness)
    angle = 2.0 * math.pi * hue * (2.0 * rand[:, RandSlot.HUE] - 1.0)
    s = jitter_factor(rand[:, RandSlot.SATURATION], saturation)
    offset = (1.0 - c) * scale * _mean_gray(batch)
    scale = c * scale
    cos_term, sin_term = scale * s * torch.cos(angle), scale * s * torch.sin(angle)
    matrix = [
        [
            (scale - cos_term) * luma + sin_term * rotation
            for luma, rotation in zip(LUMA_WEIGHTS, coefficients, strict=True)
        ]
        for coefficients in HUE_ROTATION
    ]
    for channel in range(3):
        matrix[channel][channel] = matrix[channel][channel] + cos_term

    out = torch.empty((count, height, width, 3), dtype=torch.uint8, device=images.device)
    for group_start in range(0, count, MOSAIC_GROUP_SIZE):  # a few images at a time, so that they fit the CPU's cache
        group = slice(group_start, group_start + MOSAIC_GROUP_SIZE)
        planes = images[group].permute(1, 0, 2, 3).to(torch.float32, memory_format=torch.contiguous_format)
        mask = _resized_area_mask(batch.resized_size[group], height, width)
        for channel, coefficients in enumerate(matrix):
            weights = [weight[group, None, None] for weight in coefficients]
            mixed = torch.addcmul(offset[group, None, None], planes[0], weights[0])
            mixed.addcmul_(planes[1], weights[1]).addcmul_(planes[2], weights[2])
            out[group, :, :, channel] = torch.where(mask, mixed.add_(0.5).clamp_(0.0, 255.0), planes[channel])
    return batch._replace(images=out.permute(0, 3, 1, 2))


def _resized_area_mask(resized_size: Tensor, height: int, width: int) -> Tensor:
    """bool [B, height, width]: the pixels that belong to the image, not to padding."""
    rows = torch.arange(height, device=resized_size.device) < resized_size[:, :1]
    columns = torch.arange(width, device=resized_size.device) < resized_size[:, 1:]
    return rows[:, :, None] & columns[:, None, :]


def _mean_gray(batch: Batch) -> Tensor:
    """float32 [B]: the mean luma of every fourth row and column of the image."""
    pixels = batch.images[:, :, ::4, ::4].to(torch.float32)
    gray = LUMA_WEIGHTS[0] * pixels[:, 0] + LUMA_WEIGHTS[1] * pixels[:, 1] + LUMA_WEIGHTS[2] * pixels[:, 2]
    mask = _resized_area_mask((batch.resized_size + 3) // 4, gray.shape[1], gray.shape[2]).to(torch.float32)
    return (gray * mask).sum((1, 2)) / mask.sum((1, 2))


def mosaic(batch: Batch, probability: float) -> Batch:
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
    for group_start in range(0, count, MOSAIC_GROUP_SIZE):
        tiles.render_group(
            batch, group_start, plain_and_mosaic[count + group_start : count + group_start + MOSAIC_GROUP_SIZE]
        )
    # Selecting whole images is faster than torch.where on bytes.
    pixels = plain_and_mosaic.index_select(0, torch.arange(count, device=is_mosaic.device) + count * is_mosaic)
    image_size = torch.stack([torch.full_like(batch.resized_size[:, 0], side) for side in (height, width)], 1)
    return batch._replace(
        images=pixels.permute(0, 3, 1, 2),
        boxes=torch.where(is_mosaic[:, None, None], boxes, batch.boxes),
        labels=torch.where(is_mosaic[:, None], labels, batch.labels),
        valid=torch.where(is_mosaic[:, None], valid, batch.valid),
        resized_size=torch.where(is_mosaic[:, None], image_size, batch.resized_size),
    )


class _MosaicTiles:
    """Geometry of the tiles of each mosaic: quadrants 0 … 3 row by row, tile q of mosaic b is [b, q]."""

    def __init__(self, batch: Batch) -> None:
        count, _, *self.image_size = batch.images.shape
        image_index = torch.arange(count, device=batch.images.device)[:, None]
        quadrant = torch.arange(MOSAIC_GROUP_SIZE, device=batch.images.device)
        self.source_index = (
            image_index // MOSAIC_GROUP_SIZE * MOSAIC_GROUP_SIZE + (image_index + quadrant) % MOSAIC_GROUP_SIZE
        )
        """int64 [B, 4], the image of the batch that a tile shows; in quadrant 0 image b itself."""
        scale = (
            MOSAIC_SCALE_RANGE[0]
            + (MOSAIC_SCALE_RANGE[1] - MOSAIC_SCALE_RANGE[0])
            * batch.rand[:, RandSlot.TILE_SCALES : RandSlot.TILE_SCALES + MOSAIC_GROUP_SIZE]
        )
        self.source_size = batch.resized_size[self.source_index].to(torch.float32)
        """[B, 4, 2], height and width of the image that a tile shows."""
        self.tile_size = (self.source_size * scale[:, :, None]).round().clamp(min=1.0)
        """[B, 4, 2], height and width of the whole tile, in whole pixels."""
        self.start, self.center, visible = [], [], []
        for axis, side in enumerate(self.image_size):
            u = batch.rand[:, RandSlot.CENTER_Y + axis, None]
            center = (side * (MOSAIC_CENTER_RANGE[0] + (MOSAIC_CENTER_RANGE[1] - MOSAIC_CENTER_RANGE[0]) * u)).round()
            is_second_half = ((quadrant // 2, quadrant % 2)[axis] == 1)[None]
            start = torch.where(is_second_half, center, center - self.tile_size[..., axis])
            first = start.clamp(min=0.0)
            last = torch.where(is_second_half, (start + self.tile_size[..., axis]).clamp(max=float(side)), center)
            self.start.append(start)
            self.center.append(center)
            visible.append((first, last))
        (y0, y1), (x0, x1) = visible
        self.visible_min, self.visible_max = torch.stack((x0, y0) * 2, -1), torch.stack((x1, y1) * 2, -1)
        """[B, 4, 4], xyxy in pixels of the mosaic: the visible part of each tile."""

    def boxes(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Boxes [B, M, 4], labels, valid of the mosaics, the valid ones first; and whether M suffices, [B]."""
        count, max_boxes = batch.valid.shape
        scale = (self.tile_size / self.source_size).flip(2).repeat(1, 1, 2)[:, :, None]
        start = torch.stack((self.start[1], self.start[0]) * 2, -1)[:, :, None]
        transformed = batch.boxes[self.source_index] * scale + start
        clipped = torch.minimum(torch.maximum(transformed, self.visible_min[:, :, None]), self.visible_max[:, :, None])
        full_wh, wh = transformed[..., 2:] - transformed[..., :2], clipped[..., 2:] - clipped[..., :2]
        is_uncut = (wh >= 0.999 * full_wh).all(-1)
        is_large_enough = (wh.prod(-1) >= MIN_AREA_FRACTION * full_wh.prod(-1)) & (wh >= MIN_SIDE_PIXELS).all(-1)
        keep = batch.valid[self.source_index] & (wh > 0).all(-1) & (is_uncut | is_large_enough)

        keep = keep.view(count, MOSAIC_GROUP_SIZE * max_boxes)
        order = keep.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :max_boxes]
        valid = keep.gather(1, order)
        labels = batch.labels[self.source_index].view(count, -1).gather(1, order)
        boxes = clipped.reshape(count, -1, 4).gather(1, order[:, :, None].expand(count, max_boxes, 4))
        boxes = torch.where(valid[:, :, None], boxes, 0.0)
        return boxes, torch.where(valid, labels, 0), valid, keep.sum(1) <= max_boxes

    def render_group(self, batch: Batch, group_start: int, out: Tensor) -> None:
        """Writes the mosaics of the group that begins at image `group_start`: out, uint8 [4, H, W, 3].

        The four images are stacked vertically, so that one bilinear sampling reads all of them.
        """
        group = slice(group_start, group_start + MOSAIC_GROUP_SIZE)
        height, width = self.image_size
        images = batch.images[group].permute(1, 0, 2, 3).to(torch.float32, memory_format=torch.contiguous_format)
        row = torch.arange(height, device=images.device, dtype=torch.float32)[None, :, None]
        column = torch.arange(width, device=images.device, dtype=torch.float32)[None, :, None]
        # Source coordinates by row for the tiles left and right of the center, by column for those above and below.
        below = (row >= self.center[0][group, None]).expand(MOSAIC_GROUP_SIZE, height, 2)
        right = (column >= self.center[1][group, None]).expand(MOSAIC_GROUP_SIZE, width, 2)
        y, inside_y = self._source_coords(0, group, row)
        x, inside_x = self._source_coords(1, group, column)
        # From pixels to the sampler's coordinates: -1 … 1 from edge to edge.
        y = (y + height * (self.source_index[group, None] - group_start) + 0.5) * (
            2.0 / (MOSAIC_GROUP_SIZE * height)
        ) - 1.0
        x = (x + 0.5) * (2.0 / width) - 1.0
        by_row = [torch.where(below, tile_values[:, :, 2:], tile_values[:, :, :2]) for tile_values in (y, inside_y)]
        by_column = [
            torch.where(right, tile_values[:, :, 1::2], tile_values[:, :, ::2]) for tile_values in (x, inside_x)
        ]

        left_or_right = right[:, None, :, 0]
        above_or_below = below[:, :, None, 0]
        y, inside_y = (
            torch.where(left_or_right, tile_values[:, :, None, 1], tile_values[:, :, None, 0]) for tile_values in by_row
        )
        x, inside_x = (
            torch.where(above_or_below, tile_values[:, None, :, 1], tile_values[:, None, :, 0])
            for tile_values in by_column
        )
        sampled = functional.grid_sample(
            images.view(1, 3, MOSAIC_GROUP_SIZE * height, width),
            torch.stack((x, y), -1).view(1, MOSAIC_GROUP_SIZE * height, width, 2),
            padding_mode="border",
            align_corners=False,
        ).view(3, MOSAIC_GROUP_SIZE, height, width)
        inside = inside_y & inside_x
        for channel, padding in enumerate(PAD_COLOR):
            out[..., channel] = torch.where(inside, sampled[channel].add_(0.5), float(padding))

    def _source_coords(self, axis: int, group: slice, pixel_coords: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels of the mosaic [1, n, 1] → coordinates in each tile's image [4, n, 4], and whether inside the tile.

        Inside they are between the centers of the first and the last pixel, as tiles are never enlarged. So padding
        does not bleed in.
        """
        start, length = self.start[axis][group, None], self.tile_size[group, None, :, axis]
        offset = pixel_coords - start
        coords = (offset + 0.5) * (self.source_size[group, None, :, axis] / length) - 0.5
        return coords, (offset >= 0) & (offset < length)
