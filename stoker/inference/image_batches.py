"""Batches of images without annotations, from files or pixels, for prediction.

An entry of a batch is a window: a whole image, or a tile of a large one (`tiles.py`). Threads decode, resize and pad
windows ahead of the device, as in an evaluation (`data/images/decode.py`, `data/augment/geometry.py`), upright by EXIF.
`predict.py` runs the model. Annotated images are loaded by `data/loading/loader.py`.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from stoker.data.augment import geometry
from stoker.data.batch import Batch
from stoker.data.images import decode
from stoker.data.images import source as places
from stoker.data.images.headers import parse_header, read_header
from stoker.data.loading.buffers import HostBatchBuffer, as_batch
from stoker.errors import DataError
from stoker.hardware.cgroup import host_cores
from stoker.hardware.device import Device
from stoker.inference.tiles import Region, Tiling

PREFETCH_BATCHES = 3
"""Batches that are decoded ahead of the device."""

ImageSource = Path | decode.Pixels
"""An image file, or pixels: uint8 [h, w, 3], RGB, upright."""


class InputImage:
    """An image. A tiled file is decoded for its first window and freed after its last one.

    So memory holds only a few batches of windows and their images, for any number of files.
    """

    def __init__(self, image_index: int, source: ImageSource) -> None:
        self.image_index = image_index
        self.path = source if isinstance(source, Path) else None
        self._pixels = None if isinstance(source, Path) else source
        self.size: tuple[int, int] = (0, 0) if self._pixels is None else self._pixels.shape[:2]
        """Height and width, upright; zeros until it is read."""
        self.error: DataError | None = None
        """The error of reading it."""
        self.pending_windows = 1
        """Number of windows that are not read yet."""
        self._lock = threading.Lock()

    def read(self, buffer: HostBatchBuffer, k: int, region: Region | None, resize: str) -> None:
        """Writes a window into entry k of the buffer; region None: the whole image, decoded at a reduced size.

        Raises DataError, the same for every window of an image. Thread-safe.
        """
        try:
            if region is None and self.path is not None:
                self.size = decode_into_buffer(buffer, k, read_image(self.path), self.path, resize)
            else:
                x0, y0, x1, y1 = region or (0, 0, self.size[1], self.size[0])
                pixels = self._decode_once()[y0:y1, x0:x1]
                decode.resize_into(pixels, _resize_view(buffer, k, (y1 - y0, x1 - x0), resize)[0])
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
                try:
                    self._pixels = decode.decode(read_image(self.path), self.path)
                except DataError as error:
                    self.error = error
                    raise
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


def iter_windows(sources: Sequence[ImageSource], tiling: Tiling | None) -> Iterator[InferenceWindow]:
    """The windows of images, in order; an image larger than a tile has itself and then its tiles as windows."""
    window_index = 0
    for image_index, source in enumerate(sources):
        image = InputImage(image_index, source)
        regions: list[Region | None] = [None]
        tile_regions = [] if tiling is None else _tile_regions(image, tiling)
        if tile_regions:
            height, width = image.size
            regions = [(0, 0, width, height), *tile_regions]
        image.pending_windows = len(regions)
        for n, region in enumerate(regions):
            yield InferenceWindow(window_index, image, region, n == len(regions) - 1)
            window_index += 1


def _tile_regions(image: InputImage, tiling: Tiling) -> list[Region]:
    if image.path is not None:
        try:
            image.size = read_header(image.path).size
        except DataError:
            return []  # reading the image later raises the same error
    return tiling.regions(image.size)


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

    The windows of each batch are appended to `issued_windows` before it is yielded. Unreadable windows and padding have
    image_index -1.
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

    with ThreadPoolExecutor(workers, "stoker-predict") as pool:
        while batch_windows := list(islice(windows, batch_size)):
            buffer = HostBatchBuffer(device, batch_size, image_size, 1)
            pending.append(
                (
                    buffer,
                    batch_windows,
                    [pool.submit(_read_window, buffer, k, window, resize) for k, window in enumerate(batch_windows)],
                )
            )
            if len(pending) > PREFETCH_BATCHES:
                yield finish(*pending.popleft())
        while pending:
            yield finish(*pending.popleft())


def num_decode_workers(sources: Sequence[ImageSource], batch_size: int) -> int:
    """One per core; for images in a bucket, whose threads mostly wait, one per prefetched image."""
    is_remote = any(isinstance(source, Path) and places.path_to_uri(source) is not None for source in sources)
    return max(host_cores(), (PREFETCH_BATCHES + 1) * batch_size if is_remote else 0)


def _read_window(buffer: HostBatchBuffer, k: int, window: InferenceWindow, resize: str) -> None:
    window.image.read(buffer, k, window.region, resize)
    buffer.image_index[k] = window.window_index


def read_image(path: Path) -> bytes:
    """The encoded bytes of an image file or stub file. Raises DataError; StorageError if a bucket cannot be read."""
    try:
        return places.read(path)
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
    buffer.resized_size[k], buffer.scale[k], buffer.original_size[k] = (
        resize_geometry.resized_size,
        resize_geometry.scale,
        size,
    )
    return buffer.pixels[k, :height, :width], resize_geometry.region
