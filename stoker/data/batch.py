"""The batch: the one shape of data between the loader, the augmentations, the models and the evaluation.

Fixed shapes, so that memory is decided once and nothing waits for the host. B pictures, a canvas of H × W pixels, M box
slots, P uniform numbers. The picture lies in the canvas's top left corner; the rest is padding.
"""

import enum
from typing import NamedTuple

from torch import Tensor

NUM_RAND = 16
"""P, the uniform numbers a picture carries for augmentation on the device. Spare ones: a new use moves no old."""


class RandSlot(enum.IntEnum):
    """What each of the numbers decides, in `data/augment/device.py` unless it says otherwise; the rest are spare."""

    FLIP = 0
    BRIGHTNESS = 1
    CONTRAST = 2
    SATURATION = 3
    HUE = 4
    MOSAIC = 5
    """Whether a mosaic is made of the picture and its group."""
    CENTER_Y = 6
    CENTER_X = 7
    TILE_SCALES = 8
    """8 … 11: the scales of the mosaic's four tiles, in rows."""
    SAMPLE = 12
    """Which anchors and regions the loss of a two-stage detector looks at (`models/layers/sampling.py`)."""


class Batch(NamedTuple):
    """B pictures with their boxes. On the host in pinned memory, or on the device."""

    images: Tensor
    """uint8 [B, 3, H, W], RGB, stored channels last."""
    boxes: Tensor
    """float32 [B, M, 4], xyxy in pixels of the canvas, inside `content`; zeros where not valid."""
    labels: Tensor
    """int64 [B, M], 0 … C-1; zero where not valid."""
    valid: Tensor
    """bool [B, M]; false for padding and for crowd boxes."""
    resized_size: Tensor
    """int32 [B, 2], height and width of the picture inside the canvas."""
    scale: Tensor
    """float32 [B, 2], canvas pixels per original pixel, y and x."""
    original_size: Tensor
    """int32 [B, 2], original height and width in pixels."""
    image_index: Tensor
    """int64 [B], the row of the picture in its index; -1 for a row that only fills the last batch of an evaluation."""
    rand: Tensor
    """float32 [B, P], uniform in [0, 1): a pure function of (seed, epoch, index in the epoch)."""
