"""Resize geometry: where an image's pixels and boxes go in the model input. Random numbers of all augmentation.

Crop and scale are drawn here, on the host, as a `ResizeGeometry` for the single resize of the loader. Flip, color and
mosaic are applied on the device to whole batches: `device.py`. Every random number is a pure function of (seed, epoch,
index in the epoch, stream), not of threads, ranks or devices.
"""

import dataclasses
import enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.data.images.decode import Region, choose_dct_divisor

MIN_AREA_FRACTION = 0.3
"""A box that keeps less than this fraction of its area in a crop is dropped (overlap_thresh of TF's random_crop_image,
object_detection/core/preprocessor.py)."""
MIN_SIDE_PIXELS = 2.0
"""So is a cropped box with a side shorter than this many pixels of the model input: a sliver shows nothing."""
MAX_CROP_TRIES = 10
"""Windows that are drawn for an image at most, until one shows enough of an object."""


class RandomStream(enum.IntEnum):
    """What a random number is for. A new use gets a new number; existing ones keep theirs."""

    ORDER = 0
    DEVICE = 1
    SCALE_JITTER = 2
    REPLACEMENT = 3


def _generator(seed: int, epoch: int, index_in_epoch: int, stream: RandomStream) -> np.random.Philox:
    # The counter's lowest word counts blocks of one stream's output, so no two streams overlap.
    key = np.array((seed, stream), np.uint64)
    return np.random.Philox(key=key, counter=np.array((0, index_in_epoch, epoch, 0), np.uint64))


def random_uniform(seed: int, epoch: int, index_in_epoch: int, stream: RandomStream, count: int) -> NDArray[np.float64]:
    """`count` numbers in [0, 1): Philox4x64-10 with key (seed, stream), counter (·, index, epoch, 0). About 10 µs.

    53 bits each, straight from the bit generator, whose output NumPy keeps the same in all versions (NEP 19).
    The first n numbers do not depend on `count`.
    """
    raw: NDArray[np.uint64] = _generator(seed, epoch, index_in_epoch, stream).random_raw(count)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def device_rand(seed: int, epoch: int, index_in_epoch: int, count: int) -> NDArray[np.float32]:
    """`Batch.rand` of one image: numbers in [0, 1) with 24 bits, so that float32 cannot round one up to 1."""
    raw: NDArray[np.uint64] = _generator(seed, epoch, index_in_epoch, RandomStream.DEVICE).random_raw(count)
    return (raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def epoch_order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """A permutation of 0 … count-1, int64 [count]: argsort of random keys. 8 ms for 118,287."""
    return np.argsort(_generator(seed, epoch, 0, RandomStream.ORDER).random_raw(count), kind="stable")


@dataclasses.dataclass(frozen=True, slots=True)
class ResizeGeometry:
    """Where an image is in the model input: `region` of it, resized to `resized_size`, at the top left."""

    source_size: tuple[int, int]
    """Height and width of the image, pixels."""
    region: Region
    """x0, y0, x1, y1 of the part that is shown, whole pixels of the image."""
    resized_size: tuple[int, int]
    """Height and width of that part in the model input, pixels."""

    @property
    def scale(self) -> tuple[float, float]:
        """Pixels of the model input per original pixel, y and x."""
        x0, y0, x1, y1 = self.region
        return self.resized_size[0] / (y1 - y0), self.resized_size[1] / (x1 - x0)

    @property
    def is_cropped(self) -> bool:
        return self.region != (0, 0, self.source_size[1], self.source_size[0])


def compute_resize_geometry(
    source_size: tuple[int, int],
    image_size: tuple[int, int],
    resize: str,
    *,
    scale_factor: float = 1.0,
    window_offset: tuple[float, float] = (0.0, 0.0),
) -> ResizeGeometry:
    """Fits an image of `source_size` into `image_size` (heights, widths) at `scale_factor` times the scale that fits.

    resize: letterbox has one scale for both axes, the largest that fits; squash one for each, so that the model input
    is filled. What does not fit is cropped to a window that fills the model input; `window_offset` (y, x in [0, 1))
    selects one of its possible positions. Where the DCT scaling of `images/decode.py` applies, a window begins and ends
    on whole decoded pixels (at most a pixel of the model input).
    """
    scales = image_size[0] / source_size[0], image_size[1] / source_size[1]
    if resize == "letterbox":
        scales = (min(scales), min(scales))
    scales = scales[0] * scale_factor, scales[1] * scale_factor
    step = choose_dct_divisor((1.0, 1.0), scales)
    y0, y1, height = _axis_window(source_size[0], scales[0], image_size[0], window_offset[0], step)
    x0, x1, width = _axis_window(source_size[1], scales[1], image_size[1], window_offset[1], step)
    return ResizeGeometry(source_size, (x0, y0, x1, y1), (height, width))


def _axis_window(
    source_length: int, scale: float, max_length: int, offset_fraction: float, step: int
) -> tuple[int, int, int]:
    """First pixel and end of the window along one axis, and its resized length."""
    if round(source_length * scale) <= max_length:
        return 0, source_length, max(1, round(source_length * scale))
    # Rounded down: the window must fit at the same scale as the other axis.
    length = max(step, int(max_length / scale) // step * step)
    start = int(offset_fraction * ((source_length - length) // step + 1)) * step
    return start, start + length, max(1, min(max_length, round(length * scale)))


def resize_geometry_rand(seed: int, epoch: int, index_in_epoch: int) -> NDArray[np.float64]:
    """The random numbers of `sample_resize_geometry`, [1 + 3 · MAX_CROP_TRIES]."""
    return random_uniform(seed, epoch, index_in_epoch, RandomStream.SCALE_JITTER, 1 + 3 * MAX_CROP_TRIES)


def sample_resize_geometry(
    source_size: tuple[int, int],
    image_size: tuple[int, int],
    resize: str,
    *,
    scale_jitter_prob: float,
    scale_range: tuple[float, float],
    u: NDArray[np.float64],
    min_object_covered: float = 0.0,
    boxes: NDArray[np.floating[Any]] | None = None,
) -> ResizeGeometry:
    """`compute_resize_geometry` with scale jitter: with probability `scale_jitter_prob` a scale factor is drawn, log-
    uniform in `scale_range`.

    Above 1 a random window fills the model input, below 1 the image is smaller. A window must show the fraction
    `min_object_covered` of the area of at least one of `boxes` (xyxy in pixels of the image [n, 4], without crowd
    boxes), else scale and position are drawn again. After as many tries as `u` has numbers for, the whole image is
    shown. For an image without boxes the first window is used. This is SSD's sampling of patches (Liu et al. 2016,
    section 2.2) as in the TF Object Detection API: min_object_covered of ssd_random_crop, core/preprocessor.py.

    u: uniform [1 + 3 n] in [0, 1): whether to jitter; then for each try the scale and the position (y, x).
    """
    if u[0] >= scale_jitter_prob:
        return compute_resize_geometry(source_size, image_size, resize)
    for exponent, *window_offset in u[1:].reshape(-1, 3).tolist():
        geom = compute_resize_geometry(
            source_size,
            image_size,
            resize,
            scale_factor=scale_range[0] * (scale_range[1] / scale_range[0]) ** exponent,
            window_offset=(window_offset[0], window_offset[1]),
        )
        if (
            min_object_covered <= 0
            or boxes is None
            or not geom.is_cropped
            or _covers_a_box(boxes, geom, min_object_covered)
        ):
            return geom
    return compute_resize_geometry(source_size, image_size, resize)


def _covers_a_box(boxes: NDArray[np.floating[Any]], geom: ResizeGeometry, min_object_covered: float) -> bool:
    """Whether a window shows enough of the area that some box has inside the image; true without boxes."""
    height, width = geom.source_size
    clipped = np.clip(boxes.astype(np.float64), 0.0, (width, height, width, height))
    areas = (clipped[:, 2:] - clipped[:, :2]).prod(1)
    if not (areas > 0).any():
        return True
    x0, y0, x1, y1 = geom.region
    visible = np.clip(clipped, (x0, y0, x0, y0), (x1, y1, x1, y1))
    return bool(((visible[:, 2:] - visible[:, :2]).prod(1)[areas > 0] >= min_object_covered * areas[areas > 0]).any())


def transform_boxes(
    boxes: NDArray[np.floating[Any]],
    labels: NDArray[np.int32],
    crowd: NDArray[np.bool_],
    geom: ResizeGeometry,
    max_boxes: int,
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]]:
    """Boxes xyxy in pixels of the image [n, 4] → pixels of the model input, clipped: boxes [max_boxes, 4], labels,
    valid.

    Boxes that are kept come first, in their order; the rest is zeros and not valid. Dropped are crowd boxes, boxes
    outside the window, and cut boxes that keep less than MIN_AREA_FRACTION of their area inside the image or have a
    side shorter than MIN_SIDE_PIXELS. Raises ValueError for more boxes than max_boxes, as none is dropped silently.
    """
    if len(boxes) > max_boxes:
        raise ValueError(f"the image has {len(boxes)} boxes, but max_boxes is {max_boxes}")
    y_scale, x_scale = geom.scale
    x0, y0, _, _ = geom.region
    height, width = geom.source_size
    inside = np.clip(boxes.astype(np.float64), 0.0, (width, height, width, height))
    transformed = (inside - (x0, y0, x0, y0)) * (x_scale, y_scale, x_scale, y_scale)
    bounds = (geom.resized_size[1], geom.resized_size[0]) * 2
    clipped = np.clip(transformed, 0.0, bounds).astype(np.float32)
    wh = clipped[:, 2:] - clipped[:, :2]
    keep = ~crowd & (wh > 0).all(1)
    if geom.is_cropped:
        full_wh = transformed[:, 2:] - transformed[:, :2]
        is_uncut = (wh >= 0.999 * full_wh).all(1)
        keep &= is_uncut | ((wh.prod(1) >= MIN_AREA_FRACTION * full_wh.prod(1)) & (wh >= MIN_SIDE_PIXELS).all(1))
    num_boxes = int(keep.sum())
    out_boxes, out_labels = np.zeros((max_boxes, 4), np.float32), np.zeros(max_boxes, np.int64)
    out_boxes[:num_boxes], out_labels[:num_boxes] = clipped[keep], labels[keep]
    return out_boxes, out_labels, np.arange(max_boxes) < num_boxes
