"""`Batch`: the tensors that the loader hands to augmentation, models and evaluation.

All shapes are fixed, so that memory use is decided once and nothing waits for the host. B images, tensors of H × W
pixels, M boxes per image, P uniform random numbers. An image lies in the top left corner of its tensor.
"""

import enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # worker processes do without torch
    from torch import Tensor

PAD_COLOR = (124, 116, 104)
"""RGB of the padding: the ImageNet mean, which becomes about 0 after normalization."""
NUM_RAND = 16
"""P, the uniform numbers of an image for augmentation on the device. Some are spare, so that a new use moves none."""


class RandSlot(enum.IntEnum):
    """Which of the P numbers decides what, in `data/augment.py` unless it says otherwise. The rest are spare."""

    FLIP = 0
    BRIGHTNESS = 1
    CONTRAST = 2
    SATURATION = 3
    HUE = 4
    MOSAIC = 5
    """Whether a mosaic is made of the image and its group."""
    CENTER_Y = 6
    CENTER_X = 7
    TILE_SCALES = 8
    """8 … 11: the scales of the four tiles of a mosaic, row by row."""
    SAMPLE = 12
    """Which anchors and RoIs the losses of a two-stage detector sample (`models/layers/matching.py`)."""
    DENOISING = 13
    """The noise of denoising queries (`models/layers/denoising.py`)."""
    MIXUP = 14
    """Whether an image is blended with another one, and how much."""


class Batch(NamedTuple):
    """B images with their boxes. On the host in pinned memory, or on the device."""

    images: "Tensor"
    """uint8 [B, 3, H, W], RGB, stored channels last."""
    boxes: "Tensor"
    """float32 [B, M, 4], xyxy in pixels of the model input, inside `resized_size`; zeros where not valid."""
    labels: "Tensor"
    """int64 [B, M], 0 … C-1; zero where not valid."""
    valid: "Tensor"
    """bool [B, M]; false for padding and for crowd boxes."""
    resized_size: "Tensor"
    """int32 [B, 2], height and width of the image without its padding."""
    scale: "Tensor"
    """float32 [B, 2], pixels of the model input per original pixel, y and x."""
    original_size: "Tensor"
    """int32 [B, 2], original height and width in pixels."""
    image_index: "Tensor"
    """int64 [B], the number of the image in its index; -1 for a filler in the last batch of an evaluation."""
    rand: "Tensor"
    """float32 [B, P], uniform in [0, 1): a pure function of (seed, epoch, index in the epoch)."""
