"""Pictures without annotations, files or pixels, as batches: what prediction shows the model.

What is shown at once is a window: a whole picture, or a tile of a large one (`tiles.py`). Windows are decoded, placed
and padded as in an evaluation (`data/images/decode.py`, `data/augment/geometry.py`), pictures upright as EXIF says, in
threads ahead of the device. Training's stream of labelled samples is `data/loading/loader.py`; who runs the model is
`predict.py`.
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
from stoker.data.images.headers import header_of, read_header
from stoker.data.loading.samples import Slot, as_batch
from stoker.errors import DataError
from stoker.hardware.device import Device, host_cores
from stoker.inference.tiles import Region, Tiling

AHEAD = 3
"""Batches that are being decoded while the device works on one."""


Source = Path | decode.Pixels
"""A picture file, or pixels: uint8 [h, w, 3], RGB, upright."""


class Picture:
    """A picture. A file that is shown in tiles is decoded when the first of them is wanted and let go after the last.

    So what is in memory is a few batches of windows and the pictures they are from, however many files there are.
    """

    def __init__(self, place: int, source: Source) -> None:
        self.place = place
        self.path = source if isinstance(source, Path) else None
        self._pixels = None if isinstance(source, Path) else source
        self.size: tuple[int, int] = (0, 0) if self._pixels is None else self._pixels.shape[:2]
        """Height and width, upright; zeros until it was read."""
        self.error: DataError | None = None
        """Why it could not be read."""
        self.left = 1
        """Windows that are not read yet."""
        self._lock = threading.Lock()

    def read(self, slot: Slot, k: int, region: Region | None, resize: str) -> None:
        """Writes a window into place k of the slot; None: the whole picture, decoded at the size that is needed.

        Raises DataError, the same for every window of a picture. Runs in many threads at once.
        """
        try:
            if region is None and self.path is not None:
                self.size = fill(slot, k, read_picture(self.path), self.path, resize)
            else:
                x0, y0, x1, y1 = region or (0, 0, self.size[1], self.size[0])
                part = self._decoded()[y0:y1, x0:x1]
                decode.resize_into(part, _place(slot, k, (y1 - y0, x1 - x0), resize)[0])
        except DataError as error:
            self.error = error
            raise
        finally:
            with self._lock:
                self.left -= 1
                if not self.left:
                    self._pixels = None

    def _decoded(self) -> decode.Pixels:
        with self._lock:  # the first thread decodes, the others of this picture wait for it
            if self.error is not None:
                raise self.error
            if self._pixels is None:
                assert self.path is not None, "pixels that were given are there until their last window was read"
                try:
                    self._pixels = decode.decode(read_picture(self.path), self.path)
                except DataError as error:
                    self.error = error
                    raise
            return self._pixels


class Window(NamedTuple):
    """What is shown to the model at once."""

    number: int
    """Running number; `Batch.image_id` of it."""
    picture: Picture
    region: Region | None
    """The part of the picture; None: all of it, and this is its only window."""
    last: bool
    """Whether it is the last window of its picture."""


def windows_of(sources: Sequence[Source], tiling: Tiling | None) -> Iterator[Window]:
    """The windows of pictures, in order: of one that does not fit in a tile the whole of it, then the tiles."""
    number = 0
    for place, source in enumerate(sources):
        picture = Picture(place, source)
        regions: list[Region | None] = [None]
        tiles = [] if tiling is None else _tiles(picture, tiling)
        if tiles:
            height, width = picture.size
            regions = [(0, 0, width, height), *tiles]
        picture.left = len(regions)
        for n, region in enumerate(regions):
            yield Window(number, picture, region, n == len(regions) - 1)
            number += 1


def _tiles(picture: Picture, tiling: Tiling) -> list[Region]:
    if picture.path is not None:
        try:
            picture.size = read_header(picture.path).size
        except DataError:
            return []  # reading it as one window says the same of it, in its turn
    return tiling.regions(picture.size)


def batches(
    windows: Iterator[Window], issued: deque[list[Window]], device: Device, canvas: tuple[int, int], resize: str,
    batch: int, *, threads: int,
) -> Iterator[Batch]:  # fmt: skip
    """Batches on the device, `AHEAD` of them being read and decoded in threads; the last one is filled up.

    The windows of each batch are appended to `issued` when it is handed out. What cannot be read has image_id -1.
    """
    stream = device.make_stream()
    begun: deque[tuple[Slot, list[Window], list[Future[None]]]] = deque()

    def finish(slot: Slot, some: list[Window], jobs: list[Future[None]]) -> Batch:
        for k in range(batch):
            try:
                if k < len(jobs):
                    jobs[k].result()
                else:
                    slot.blank(k)
            except DataError:
                slot.blank(k)
        issued.append(some)
        tensors, ready = stream.to_device(slot.tensors)
        ready.block_device()
        return as_batch(tensors)

    with ThreadPoolExecutor(threads, "stoker-predict") as pool:
        while some := list(islice(windows, batch)):
            slot = Slot(device, batch, canvas, 1)
            begun.append((slot, some, [pool.submit(_read, slot, k, one, resize) for k, one in enumerate(some)]))
            if len(begun) > AHEAD:
                yield finish(*begun.popleft())
        while begun:
            yield finish(*begun.popleft())


def threads_for(sources: Sequence[Source], batch: int) -> int:
    """A thread a core; for pictures in a bucket, which are mostly waited for, one for each that is under way."""
    in_bucket = any(isinstance(source, Path) and places.address_of(source) is not None for source in sources)
    return max(host_cores(), (AHEAD + 1) * batch if in_bucket else 0)


def _read(slot: Slot, k: int, window: Window, resize: str) -> None:
    window.picture.read(slot, k, window.region, resize)
    slot.image_id[k] = window.number


def read_picture(path: Path) -> bytes:
    """The encoded picture, of a file or of a placeholder. Raises DataError; StorageError where a bucket cannot be
    read."""
    try:
        return places.read(path)
    except OSError as error:
        cause = error.strerror or str(error)
        raise DataError("The picture cannot be read.", place=places.shown(path), cause=cause) from error


def fill(slot: Slot, k: int, data: bytes, path: Path, resize: str) -> tuple[int, int]:
    """Decodes a picture into place k of the slot, upright. Returns its height and width; raises DataError."""
    header = header_of(data, path)
    out, region = _place(slot, k, header.size, resize)
    decode.decode_into(data, path, region=region, out=out, header=header)
    return header.size


def _place(slot: Slot, k: int, size: tuple[int, int], resize: str) -> tuple[decode.Pixels, Region]:
    """Prepares place k for a window of `size` (height, width): (where its pixels go, what of it is shown: all)."""
    placement = geometry.place(size, slot.canvas, resize)
    height, width = placement.content
    slot.blank(k)
    slot.content[k], slot.scale[k], slot.size[k] = placement.content, placement.scale, size
    return slot.pixels[k, :height, :width], placement.region
