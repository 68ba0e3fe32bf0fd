"""Resize geometry: where an image's pixels and boxes go in the model input. Random numbers of all augmentation.

Crop and scale are drawn here, on the host, as a `ResizeGeometry` for the single resize of the loader. Flip, color and
mosaic are applied on the device to whole batches: `augment.py`. Every random number is a pure function of (seed, epoch,
index in the epoch, stream), not of threads, ranks or devices.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple

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
    SHIFT = 4
    REPEAT = 5


def _raw_rows(
    seed: int, epoch: int, indices_in_epoch: Sequence[int], stream: RandomStream, count: int
) -> NDArray[np.uint64]:
    # The counter's lowest word counts blocks of one stream's output, so no two streams overlap.
    key, counter = np.array((seed, stream), np.uint64), np.array((0, 0, epoch, 0), np.uint64)
    generator = np.random.Philox(key=key, counter=counter)
    state = generator.state
    rows = np.empty((len(indices_in_epoch), count), np.uint64)
    for row, index_in_epoch in enumerate(indices_in_epoch):
        state["state"]["counter"][1] = index_in_epoch
        generator.state = state  # takes a tenth of the time of making another generator
        rows[row] = generator.random_raw(count)
    return rows


def random_uniform(
    seed: int, epoch: int, indices_in_epoch: Sequence[int], stream: RandomStream, count: int
) -> NDArray[np.float64]:
    """Draws `count` numbers in [0, 1) for each index: [n, count]. Philox4x64-10 with key (seed, stream), counter (·,
    index, epoch, 0); 53 bits each, straight from the bit generator, whose output NumPy keeps the same in all versions
    (NEP 19). The first n numbers do not depend on `count`. About 3 µs for each index, and 20 µs."""
    raw = _raw_rows(seed, epoch, indices_in_epoch, stream, count)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def device_rand(seed: int, epoch: int, indices_in_epoch: Sequence[int], count: int) -> NDArray[np.float32]:
    """Draws `Batch.rand` of images [n, count]: numbers in [0, 1) with 24 bits, so that float32 cannot round one up to
    1."""
    raw = _raw_rows(seed, epoch, indices_in_epoch, RandomStream.DEVICE, count)
    return (raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def epoch_order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """Returns a permutation of 0 … count-1, int64 [count]: argsort of random keys. 8 ms for 118,287."""
    return np.argsort(_raw_rows(seed, epoch, [0], RandomStream.ORDER, count)[0], kind="stable")


class ResizeGeometry(NamedTuple):
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
    """Returns first pixel and end of the window along one axis, and its resized length."""
    if round(source_length * scale) <= max_length:
        return 0, source_length, max(1, round(source_length * scale))
    # Rounded down: the window must fit at the same scale as the other axis.
    length = max(step, int(max_length / scale) // step * step)
    start = int(offset_fraction * ((source_length - length) // step + 1)) * step
    return start, start + length, max(1, min(max_length, round(length * scale)))


def resize_geometry_rand(seed: int, epoch: int, indices_in_epoch: Sequence[int]) -> NDArray[np.float64]:
    """Returns the random numbers of `sample_resize_geometry` for images [n, 1 + 3 · MAX_CROP_TRIES]."""
    return random_uniform(seed, epoch, indices_in_epoch, RandomStream.SCALE_JITTER, 1 + 3 * MAX_CROP_TRIES)


def sample_resize_geometry(
    source_size: tuple[int, int],
    image_size: tuple[int, int],
    resize: str,
    *,
    scale_jitter_prob: float,
    scale_range: tuple[float, float],
    u: Sequence[float],
    min_object_covered: float = 0.0,
    boxes: Sequence[Sequence[float]] = (),
) -> ResizeGeometry:
    """`compute_resize_geometry` with scale jitter: with probability `scale_jitter_prob` a scale factor is drawn, log-
    uniform in `scale_range`.

    Above 1 a random window fills the model input, below 1 the image is smaller. A window must show the fraction
    `min_object_covered` of the area of at least one of `boxes` (xyxy in pixels of the image, without crowd boxes), else
    scale and position are drawn again. After as many tries as `u` has numbers for, the whole image is shown. For an
    image without boxes the first window is used. This is SSD's sampling of patches (Liu et al. 2016, section 2.2) as in
    the TF Object Detection API: min_object_covered of ssd_random_crop, core/preprocessor.py.

    u: uniform [1 + 3 n] in [0, 1): whether to jitter; then for each try the scale and the position (y, x).
    """
    if u[0] >= scale_jitter_prob:
        return compute_resize_geometry(source_size, image_size, resize)
    for n in range(1, len(u), 3):
        geom = compute_resize_geometry(
            source_size,
            image_size,
            resize,
            scale_factor=scale_range[0] * (scale_range[1] / scale_range[0]) ** u[n],
            window_offset=(u[n + 1], u[n + 2]),
        )
        if min_object_covered <= 0 or not geom.is_cropped or _covers_a_box(boxes, geom, min_object_covered):
            return geom
    return compute_resize_geometry(source_size, image_size, resize)


def _covers_a_box(boxes: Sequence[Sequence[float]], geom: ResizeGeometry, min_object_covered: float) -> bool:
    """Returns whether a window shows enough of the area that some box has inside the image; true without boxes. One of
    the first boxes decides mostly, so this is faster than NumPy."""
    height, width = geom.source_size
    left, top, right, bottom = geom.region
    has_area = False
    for box_x0, box_y0, box_x1, box_y1 in boxes:
        x0, y0, x1, y1 = max(box_x0, 0.0), max(box_y0, 0.0), min(box_x1, width), min(box_y1, height)
        if x1 <= x0 or y1 <= y0:
            continue
        has_area = True
        shown_width = max(0.0, min(x1, right) - max(x0, left))
        shown_height = max(0.0, min(y1, bottom) - max(y0, top))
        if shown_width * shown_height >= min_object_covered * ((x1 - x0) * (y1 - y0)):
            return True
    return not has_area


_XYXY = (1, 0, 1, 0)
"""Selects for each coordinate of a box its axis of a (height, width)."""


def transform_boxes(
    boxes: NDArray[np.float64],
    crowd: NDArray[np.bool_],
    owner: NDArray[np.int64],
    source_size: NDArray[np.int64],
    region: NDArray[np.int64],
    resized_size: NDArray[np.int64],
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Boxes xyxy in pixels of their images [n, 4] → in pixels of the model input, clipped [n, 4]; and which are kept.

    owner: [n], the image of each box: a row of `source_size` [B, 2], `region` [B, 4] and `resized_size` [B, 2], which
    are those of its `ResizeGeometry`. Dropped are crowd boxes, boxes outside the window, and cut boxes that keep less
    than MIN_AREA_FRACTION of their area inside the image or have a side shorter than MIN_SIDE_PIXELS.
    """
    sizes, bounds = source_size[:, _XYXY], resized_size[:, _XYXY]
    scales = bounds / np.tile(region[:, 2:] - region[:, :2], 2)
    is_cropped = (region[:, :2] != 0).any(1) | (region[:, 2:] != sizes[:, :2]).any(1)
    inside = np.clip(boxes, 0.0, sizes[owner])
    transformed = (inside - region[:, (0, 1, 0, 1)][owner]) * scales[owner]
    clipped = np.clip(transformed, 0.0, bounds[owner]).astype(np.float32)
    wh, full_wh = clipped[:, 2:] - clipped[:, :2], transformed[:, 2:] - transformed[:, :2]
    is_uncut = (wh >= 0.999 * full_wh).all(1) | ~is_cropped[owner]
    is_large = (wh.prod(1) >= MIN_AREA_FRACTION * full_wh.prod(1)) & (wh >= MIN_SIDE_PIXELS).all(1)
    return clipped, ~crowd & (wh > 0).all(1) & (is_uncut | is_large)
