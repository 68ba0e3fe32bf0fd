"""Where a picture's pixels and boxes go in the canvas, and the randomness of all augmentation.

Crop and zoom are drawn here, on the host, as a `Placement` for the one resize of the loader. What is done on the
device to whole batches (flip, colour, mosaic) is `device.py`. Every random number is a pure function of (seed,
epoch, index in the epoch, stream): not of threads, ranks or devices.
"""

import dataclasses
import enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.data.images.decode import Region, shrink_for

MIN_SHARE = 0.3
"""A box that keeps less than this share of its area in a crop is not trained on (overlap_thresh of TF's
random_crop_image, object_detection/core/preprocessor.py)."""
MIN_SIDE = 2.0
"""Nor is one with a side below this many canvas pixels after the cut: a sliver at the edge shows nothing."""
TRIES = 10
"""Windows that are drawn for one picture at most, until one shows enough of an object."""


class Stream(enum.IntEnum):
    """What a random number is for. A new use takes a new number; the old ones keep theirs."""

    ORDER = 0
    DEVICE = 1
    ZOOM = 2
    REPLACEMENT = 3


def _generator(seed: int, epoch: int, index: int, stream: Stream) -> np.random.Philox:
    # The counter's lowest word counts blocks of one stream's output, so no two streams overlap.
    key = np.array((seed, stream), np.uint64)
    return np.random.Philox(key=key, counter=np.array((0, index, epoch, 0), np.uint64))


def uniforms(seed: int, epoch: int, index: int, stream: Stream, count: int) -> NDArray[np.float64]:
    """`count` numbers in [0, 1): Philox4x64-10 with key (seed, stream), counter (·, index, epoch, 0). About 10 µs.

    53 bits each, straight from the bit generator, whose output NumPy keeps the same in all versions (NEP 19).
    The first n numbers do not depend on `count`.
    """
    raw: NDArray[np.uint64] = _generator(seed, epoch, index, stream).random_raw(count)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def device_draws(seed: int, epoch: int, index: int, count: int) -> NDArray[np.float32]:
    """`Batch.draw` of one picture: numbers in [0, 1) with 24 bits, so that float32 cannot round one up to 1."""
    raw: NDArray[np.uint64] = _generator(seed, epoch, index, Stream.DEVICE).random_raw(count)
    return (raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """A permutation of 0 … count-1, int64 [count]: the places of random keys when sorted. 8 ms for 118,287."""
    return np.argsort(_generator(seed, epoch, 0, Stream.ORDER).random_raw(count), kind="stable")


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where a picture lies in the canvas: `region` of it, resized to `content`, at the top left."""

    size: tuple[int, int]
    """Height and width of the stored picture, pixels."""
    region: Region
    """x0, y0, x1, y1 of the part that is shown, whole pixels of the stored picture."""
    content: tuple[int, int]
    """Height and width of that part in the canvas, pixels."""

    @property
    def scale(self) -> tuple[float, float]:
        """Canvas pixels per original pixel, y and x."""
        x0, y0, x1, y1 = self.region
        return self.content[0] / (y1 - y0), self.content[1] / (x1 - x0)

    @property
    def cropped(self) -> bool:
        return self.region != (0, 0, self.size[1], self.size[0])


def place(
    size: tuple[int, int],
    canvas: tuple[int, int],
    resize: str,
    *,
    zoom: float = 1.0,
    at: tuple[float, float] = (0.0, 0.0),
) -> Placement:
    """Puts a picture of `size` (height, width) into `canvas` (height, width) at `zoom` times the scale that fits.

    letterbox: one scale for both axes, the largest that fits; squash: one for each, so that the canvas is filled.
    What does not fit is cut: the window that fills the canvas, `at` (y, x in [0, 1)) of its possible places. Where
    the DCT scaling of `decode.py` applies, a window begins and ends on whole decoded pixels (at most a canvas pixel).
    """
    scales = canvas[0] / size[0], canvas[1] / size[1]
    if resize == "letterbox":
        scales = (min(scales), min(scales))
    scales = scales[0] * zoom, scales[1] * zoom
    step = shrink_for((1.0, 1.0), scales)
    y0, y1, height = _window(size[0], scales[0], canvas[0], at[0], step)
    x0, x1, width = _window(size[1], scales[1], canvas[1], at[1], step)
    return Placement(size, (x0, y0, x1, y1), (height, width))


def _window(side: int, scale: float, limit: int, at: float, step: int) -> tuple[int, int, int]:
    """First and last pixel of the window along one axis, and its length in the canvas."""
    if round(side * scale) <= limit:
        return 0, side, max(1, round(side * scale))
    # Rounded down: the window's content must fit the canvas at the same scale as the other axis.
    length = max(step, int(limit / scale) // step * step)
    start = int(at * ((side - length) // step + 1)) * step
    return start, start + length, max(1, min(limit, round(length * scale)))


def placement_draws(seed: int, epoch: int, index: int) -> NDArray[np.float64]:
    """The numbers that `draw_placement` takes, [1 + 3 · TRIES]."""
    return uniforms(seed, epoch, index, Stream.ZOOM, 1 + 3 * TRIES)


def draw_placement(
    size: tuple[int, int],
    canvas: tuple[int, int],
    resize: str,
    *,
    crop: float,
    zoom: tuple[float, float],
    u: NDArray[np.float64],
    overlap: float = 0.0,
    boxes: NDArray[np.floating[Any]] | None = None,
) -> Placement:
    """`place` with the augmentation: with probability `crop` a zoom drawn log-uniform between the two of `zoom`.

    Above 1 a random window fills the canvas, below 1 the picture is smaller. A window shows at least one of `boxes`
    (xyxy in pixels of the picture [n, 4], without crowd boxes) to `overlap` of its area, or else is drawn again, scale
    and place; after as many tries as `u` has numbers for, the whole picture is shown. A picture without boxes takes any
    window. From SSD's sampling of patches (Liu et al. 2016, section 2.2) as the TF Object Detection API has it:
    min_object_covered of ssd_random_crop, core/preprocessor.py.

    u: uniform [1 + 3 n] in [0, 1): whether; then for each try how far, and where (y, x).
    """
    if u[0] >= crop:
        return place(size, canvas, resize)
    for far, *at in u[1:].reshape(-1, 3).tolist():
        placement = place(size, canvas, resize, zoom=zoom[0] * (zoom[1] / zoom[0]) ** far, at=(at[0], at[1]))
        if overlap <= 0 or boxes is None or not placement.cropped or _shows_a_box(boxes, placement, overlap):
            return placement
    return place(size, canvas, resize)


def _shows_a_box(boxes: NDArray[np.floating[Any]], placement: Placement, overlap: float) -> bool:
    """Whether a window keeps `overlap` or more of the area that some box has inside the picture; true without boxes."""
    height, width = placement.size
    whole = np.clip(boxes.astype(np.float64), 0.0, (width, height, width, height))
    areas = (whole[:, 2:] - whole[:, :2]).prod(1)
    if not (areas > 0).any():
        return True
    x0, y0, x1, y1 = placement.region
    kept = np.clip(whole, (x0, y0, x0, y0), (x1, y1, x1, y1))
    return bool(((kept[:, 2:] - kept[:, :2]).prod(1)[areas > 0] >= overlap * areas[areas > 0]).any())


def place_boxes(
    boxes: NDArray[np.floating[Any]],
    labels: NDArray[np.int32],
    crowd: NDArray[np.bool_],
    placement: Placement,
    slots: int,
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]]:
    """Boxes xyxy in pixels of the picture [n, 4] → canvas, clipped to the content: boxes [slots, 4], labels, valid.

    Those that are used come first, in their order; the rest is zeros and not valid. Left out: crowd boxes; what lies
    outside; of the boxes that a crop cuts also those that keep less than MIN_SHARE of the area they have inside the
    picture, or a side of less than MIN_SIDE pixels. Raises ValueError for more boxes than slots: the caller counts them
    first, nothing is cut off.
    """
    if len(boxes) > slots:
        raise ValueError(f"{len(boxes)} boxes do not fit {slots} box slots: count them again")
    y_scale, x_scale = placement.scale
    x0, y0, _, _ = placement.region
    height, width = placement.size
    inside = np.clip(boxes.astype(np.float64), 0.0, (width, height, width, height))
    moved = (inside - (x0, y0, x0, y0)) * (x_scale, y_scale, x_scale, y_scale)
    limits = (placement.content[1], placement.content[0]) * 2
    cut = np.clip(moved, 0.0, limits).astype(np.float32)
    sides = cut[:, 2:] - cut[:, :2]
    use = ~crowd & (sides > 0).all(1)
    if placement.cropped:
        whole = moved[:, 2:] - moved[:, :2]
        uncut = (sides >= 0.999 * whole).all(1)
        use &= uncut | ((sides.prod(1) >= MIN_SHARE * whole.prod(1)) & (sides >= MIN_SIDE).all(1))
    count = int(use.sum())
    out_boxes, out_labels = np.zeros((slots, 4), np.float32), np.zeros(slots, np.int64)
    out_boxes[:count], out_labels[:count] = cut[use], labels[use]
    return out_boxes, out_labels, np.arange(slots) < count
