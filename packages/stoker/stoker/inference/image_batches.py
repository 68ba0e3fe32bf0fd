"""Batches of images without annotations, from files or pixels, for prediction; tiles of large images.

An entry of a batch is a window: a whole image, or a tile of a large one. Threads decode, resize and pad windows ahead
of the device, as in an evaluation (`data/images/decode.py`, `data/geometry.py`), upright by EXIF. `predict.py`
runs the model. Annotated images are loaded by `data/loading/loader.py`.

An object of 20 pixels in an image of 4,000 has 3 pixels in a model input of 640, too few to be detected. So the image
is also processed in overlapping tiles, which contain every object smaller than the overlap completely at least once.
The whole image has the larger objects. `merge_detections` removes duplicates. The idea is SAHI's (arXiv 2202.06934).
"""

import contextlib
import dataclasses
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.data import geometry
from stoker.data.batch import Batch
from stoker.data.images import decode
from stoker.data.images import source as places
from stoker.data.images.headers import parse_header, read_header
from stoker.data.loading.buffers import HostBatchBuffer, as_batch
from stoker.hardware.device import Device
from stoker.inference.video import VideoFrame
from stoker_watch.errors import ConfigError, DataError
from stoker_watch.hardware.cgroup import host_cores

PREFETCH_BATCHES = 3
"""Batches that are decoded ahead of the device."""
MAX_HELD_BYTES = 1 << 28
"""Given pixels and frames of videos take as much in a batch, and in all batches ahead: 8 frames of 3,840 × 2,160. Fewer
larger ones are read ahead, and in a batch."""

Region = tuple[int, int, int, int]
"""x0, y0, x1, y1 in pixels of the image; x1 and y1 are exclusive."""

TILE_OVERLAP = 0.2
"""Default overlap of neighboring tiles as a fraction of their side: SAHI's default."""
EDGE_MARGIN = 0.01
"""A box this near to a tile's inner edge, as a fraction of the tile's side, counts as cut off: detected boxes end a few
pixels off. An object that ends there by chance is complete in the next tile."""
MERGE_IOU = 0.7
"""IoU above which boxes from several tiles are one object, for a model without NMS."""
MIN_COVERED_FRACTION = 0.5
"""A cut-off box is removed if another box of its class covers this fraction of its area (SAHI's default)."""

ImageSource = Path | decode.Pixels | VideoFrame
"""An image file, a frame of a video, or pixels: uint8 [h, w, 3], RGB, upright."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """`--tile` and `--tile-overlap`. Raises ConfigError for a number out of range."""

    side: int
    """Height and width of a tile in pixels of the image."""
    overlap: float = TILE_OVERLAP
    """Minimum overlap of neighboring tiles as a fraction of the side."""

    def __post_init__(self) -> None:
        if self.side < 32:
            raise ConfigError(f"--tile {self.side} is out of range.", choices=["32 or more, in pixels of the image"])
        if not 0 <= self.overlap <= 0.9:
            raise ConfigError(f"--tile-overlap {self.overlap} is out of range.", choices=["0 … 0.9"])

    def regions(self, size: tuple[int, int]) -> list[Region]:
        """The tiles of an image of `size` (height, width), row by row; none if the image fits in one tile.

        They cover the image, lie inside, and have equal sizes (the image's own along an axis shorter than the tile).
        Neighbors overlap by at least `overlap`, and by more rather than having a smaller tile at the edge.
        """
        if max(size) <= self.side:
            return []
        (ys, height), (xs, width) = self._tile_starts(size[0]), self._tile_starts(size[1])
        return [(x, y, x + width, y + height) for y in ys for x in xs]

    def _tile_starts(self, length: int) -> tuple[list[int], int]:
        """(start positions of the tiles along one axis, their length)."""
        if length <= self.side:
            return [0], length
        step = max(1, int(self.side * (1 - self.overlap)))
        last = length - self.side
        count = -(-last // step)
        return [n * last // count for n in range(count + 1)], self.side


def load_pixels(source: ImageSource) -> decode.Pixels:
    """The whole image, uint8 [h, w, 3] RGB, upright. Raises DataError."""
    if isinstance(source, Path):
        return decode.decode(read_image(source), source)
    return source.pixels if isinstance(source, VideoFrame) else source


class InputImage:
    """An image. A tiled file is decoded for its first window and freed after its last one.

    So memory holds only a few batches of windows and their images, for any number of files.
    """

    def __init__(self, source: ImageSource, error: DataError | None = None) -> None:
        self.source = source
        self.path = source if isinstance(source, Path) else None
        self._pixels = None if isinstance(source, Path) else load_pixels(source)
        self.size: tuple[int, int] = (0, 0) if self._pixels is None else self._pixels.shape[:2]
        """Height and width, upright; zeros until it is read."""
        self.held_bytes = 0 if self._pixels is None else self._pixels.nbytes
        self.error = error
        """The error of reading it."""
        self.pending_windows = 1
        """Number of windows that are not read yet."""
        self._lock = threading.Lock()

    def read(self, buffer: HostBatchBuffer, k: int, window: "InferenceWindow", resize: str) -> None:
        """Writes a window into entry k of the buffer; the whole image is decoded at a reduced size.

        Raises DataError, the same for every window of an image. Thread-safe.
        """
        region = window.region
        try:
            if region is None and self.path is not None and self.error is None:
                self.size = decode_into_buffer(buffer, k, read_image(self.path), self.path, resize)
            else:
                x0, y0, x1, y1 = region or (0, 0, self.size[1], self.size[0])
                pixels = self._decode_once()[y0:y1, x0:x1]
                decode.resize_into(pixels, _resize_view(buffer, k, (y1 - y0, x1 - x0), resize)[0])
            buffer.image_index[k] = window.window_index
        except DataError as error:
            self.error = error
            raise
        finally:
            with self._lock:
                self.pending_windows -= 1
                if not self.pending_windows:
                    self._pixels = None

    def _decode_once(self) -> decode.Pixels:
        with self._lock:  # the first thread decodes, the other ones wait
            if self.error is not None:
                raise self.error
            if self._pixels is None:
                assert self.path is not None, "given pixels are kept until the last window is read"
                self._pixels = load_pixels(self.path)
            return self._pixels


class InferenceWindow(NamedTuple):
    """An input of the model: an image or a part of it."""

    window_index: int
    """Running number; its `Batch.image_index`."""
    image: InputImage
    region: Region | None
    """The part of the image; None: the whole image, as its only window."""
    is_last: bool
    """Whether it is the last window of its image."""


def _iter_images(sources: Iterable[ImageSource]) -> Iterator[InputImage]:
    """The images; where a video is damaged, an unreadable one is the last: the frames before it are not lost."""
    try:
        yield from map(InputImage, sources)
    except DataError as error:
        yield InputImage(Path(error.location or ""), error)


def iter_windows(sources: Iterable[ImageSource], tiling: Tiling | None) -> Iterator[InferenceWindow]:
    """The windows of images, in order; an image larger than a tile has itself and then its tiles as windows."""
    window_index = 0
    for image in _iter_images(sources):
        regions: list[Region | None] = [None]
        if tiling is not None:
            if image.path is not None:
                with contextlib.suppress(DataError):  # reading the image later raises the same error
                    image.size = read_header(image.path).size
            if tile_regions := tiling.regions(image.size):
                regions = [(0, 0, image.size[1], image.size[0]), *tile_regions]
        image.pending_windows = len(regions)
        for n, region in enumerate(regions):
            yield InferenceWindow(window_index, image, region, n == len(regions) - 1)
            window_index += 1


def iter_batches(
    windows: Iterator[InferenceWindow],
    issued_windows: deque[list[InferenceWindow]],
    device: Device,
    image_size: tuple[int, int],
    resize: str,
    batch_size: int,
    *,
    workers: int,
) -> Iterator[Batch]:
    """Batches on the device, with PREFETCH_BATCHES decoded ahead in threads; the last batch is padded.

    The windows of a batch are appended to `issued_windows` first. Unreadable ones and padding have image_index -1.
    """
    stream = device.make_stream()
    pending: deque[tuple[HostBatchBuffer, list[InferenceWindow], list[Future[None]]]] = deque()

    def finish(buffer: HostBatchBuffer, batch_windows: list[InferenceWindow], futures: list[Future[None]]) -> Batch:
        for k in range(batch_size):
            try:
                if k < len(futures):
                    futures[k].result()
                else:
                    buffer.write_filler(k)
            except DataError:
                buffer.write_filler(k)
        issued_windows.append(batch_windows)
        tensors, ready = stream.to_device(buffer.tensors)
        ready.block_main_stream()
        return as_batch(tensors)

    def take_windows() -> list[InferenceWindow]:
        taken: list[InferenceWindow] = []
        for window in islice(windows, batch_size):
            taken.append(window)
            if held_bytes(taken) >= MAX_HELD_BYTES:
                break
        return taken

    pool = ThreadPoolExecutor(workers, "stoker-predict")
    try:
        while batch_windows := take_windows():
            buffer = HostBatchBuffer(device, batch_size, image_size, 1)
            futures = [
                pool.submit(window.image.read, buffer, k, window, resize) for k, window in enumerate(batch_windows)
            ]
            pending.append((buffer, batch_windows, futures))
            while len(pending) > PREFETCH_BATCHES or (
                pending and sum(held_bytes(ahead) for _, ahead, _ in pending) >= MAX_HELD_BYTES
            ):
                yield finish(*pending.popleft())
        while pending:
            yield finish(*pending.popleft())
    finally:
        # Without a wait: the garbage collector ends an abandoned generator, maybe in a thread that is just starting,
        # which holds the lock that an ending thread needs.
        pool.shutdown(wait=False, cancel_futures=True)


def held_bytes(windows: Iterable[InferenceWindow]) -> int:
    """Size of the pixels that the windows keep in memory."""
    return sum(window.image.held_bytes for window in windows if window.is_last)


def num_decode_workers(sources: Iterable[ImageSource], batch_size: int) -> int:
    """One per core; for a list of images in a bucket, whose threads mostly wait, one per prefetched image."""
    is_remote = isinstance(sources, Sequence) and any(
        isinstance(source, Path) and places.path_to_uri(source) is not None for source in sources
    )
    return max(host_cores(), (PREFETCH_BATCHES + 1) * batch_size if is_remote else 0)


def read_image(path: Path) -> bytes:
    """The encoded bytes of an image file or stub file. Raises DataError; StorageError if a bucket cannot be read."""
    try:
        return places.read_image_bytes(path)
    except OSError as error:
        cause = error.strerror or str(error)
        raise DataError("The image cannot be read.", location=places.display_path(path), cause=cause) from error


def decode_into_buffer(buffer: HostBatchBuffer, k: int, data: bytes, path: Path, resize: str) -> tuple[int, int]:
    """Decodes an image into entry k of the buffer, upright. Returns its height and width; raises DataError."""
    header = parse_header(data, path)
    out, region = _resize_view(buffer, k, header.size, resize)
    decode.decode_into(data, path, region=region, out=out, header=header)
    return header.size


def _resize_view(buffer: HostBatchBuffer, k: int, size: tuple[int, int], resize: str) -> tuple[decode.Pixels, Region]:
    """Prepares entry k for a window of `size` (height, width): (the view for its pixels, the region to decode: all)."""
    resize_geometry = geometry.compute_resize_geometry(size, buffer.image_size, resize)
    height, width = resize_geometry.resized_size
    buffer.write_filler(k)
    buffer.resized_size[k], buffer.original_size[k] = resize_geometry.resized_size, size
    buffer.scale[k] = resize_geometry.scale
    return buffer.pixels[k, :height, :width], resize_geometry.region


def is_cut(boxes: NDArray[np.float32], region: Region, size: tuple[int, int]) -> NDArray[np.bool_]:
    """[N]: which of `boxes` [N, 4], detected in a `region` of an image of `size` (height, width), touch an inner edge.

    An inner edge is one that is not an edge of the image. Boxes are in pixels of the image.
    """
    low, high = np.array(region[:2]), np.array(region[2:])
    margin = EDGE_MARGIN * (high - low)
    at_low = (boxes[:, :2] <= (low + margin).astype(np.float32)) & (low > 0)
    at_high = (boxes[:, 2:] >= (high - margin).astype(np.float32)) & (high < size[::-1])
    touches: NDArray[np.bool_] = (at_low | at_high).any(axis=1)
    return touches


def merge_detections(
    boxes: NDArray[np.float32],
    scores: NDArray[np.float32],
    labels: NDArray[np.int64],
    is_cut_off: NDArray[np.bool_],
    *,
    iou_threshold: float,
) -> NDArray[np.int64]:
    """Indices of the boxes of an image that are kept, best score first; boxes: [N, 4]; is_cut_off: [N], see `is_cut`.

    Within each class, complete boxes are ranked before cut-off ones, then by score. A kept box removes lower-ranked
    boxes with an IoU above `iou_threshold`, and cut-off boxes of which it covers more than MIN_COVERED_FRACTION: a part
    of an object may have a higher score than the whole object.
    """
    keep: list[int] = []
    for label in np.unique(labels):
        class_indices = np.flatnonzero(labels == label)
        class_indices = class_indices[np.lexsort((-scores[class_indices], is_cut_off[class_indices]))]
        xyxy, is_cut_box = boxes[class_indices].astype(np.float64), is_cut_off[class_indices]
        areas = (xyxy[:, 2] - xyxy[:, 0]) * (xyxy[:, 3] - xyxy[:, 1])
        # Only boxes with common columns can overlap: 20,000 boxes take 0.3 s instead of 12 s.
        by_left = np.argsort(xyxy[:, 0])
        lefts, widest = xyxy[by_left, 0], (xyxy[:, 2] - xyxy[:, 0]).max()
        first = np.searchsorted(lefts, xyxy[:, 0] - widest, "left").tolist()
        last = np.searchsorted(lefts, xyxy[:, 2], "right").tolist()
        is_alive = np.ones(len(class_indices), bool)
        for n in range(len(class_indices)):
            if not is_alive[n]:
                continue
            keep.append(int(class_indices[n]))
            neighbors = by_left[first[n] : last[n]]
            rest = neighbors[(neighbors > n) & is_alive[neighbors]]
            intersection = (
                (np.minimum(xyxy[n, 2:], xyxy[rest, 2:]) - np.maximum(xyxy[n, :2], xyxy[rest, :2]))
                .clip(min=0)
                .prod(axis=1)
            )
            is_duplicate = intersection > iou_threshold * (areas[n] + areas[rest] - intersection)
            is_covered = is_cut_box[rest] & (intersection > MIN_COVERED_FRACTION * areas[rest])
            is_alive[rest[is_duplicate | is_covered]] = False
    order = np.array(keep, np.int64)
    return order[np.argsort(-scores[order], kind="stable")]
