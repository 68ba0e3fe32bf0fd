"""One sample of the stream: which picture stands at a position, and how it gets into its place of a host batch.

Position p of the endless training stream is (epoch, index) = divmod(p, N), the picture there the index-th of the
epoch's order. Everything about it is a pure function of (seed, epoch, index) and of the quarantine: the pictures that
cannot be used, each with the position from which on it is replaced. Threads, batches and the device are `loader.py`.
"""

import copy
import errno
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.data.augment import geometry
from stoker.data.batch import DRAWS, Batch
from stoker.data.images import decode
from stoker.data.images.decode_device import Encoded, is_ordinary
from stoker.data.images.headers import Header, header_of
from stoker.data.loading.counters import Counters
from stoker.data.loading.wait_breakdown import DECODING, READ, Marks
from stoker.errors import DataError, ObjectMissing, OutOfMemoryError, StorageError
from stoker.hardware.device import Device

if TYPE_CHECKING:
    from stoker.data.images.pixel_cache import PixelCache
    from stoker.data.index import Index

PADDING = (124, 116, 104)
"""RGB of the canvas beside the picture: the ImageNet mean, which normalises to about 0."""
REPLACEMENTS = 64
"""How many stand-ins are drawn for a picture. All of them in quarantine, or failing too: the data set is gone."""
EPOCHS_KEPT = 2
"""Orders of epochs that are kept: where one ends, some positions belong to the next."""
NOT_THE_PICTURE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of reading that say nothing about the file."""


class Quarantine(NamedTuple):
    """A picture that could not be used, and what stood in for it: the substance of a `schemas.Quarantined`."""

    row: int
    place: str
    """Path or address of the picture."""
    error: str
    position: int
    """Place in the stream of samples from which on the picture is not used."""
    replaced_by: int
    """Row that took its place there; -1 in an evaluation, which leaves it out."""


class Fetch(NamedTuple):
    """The bytes of a row's picture, on their way."""

    row: int
    future: "Future[bytes]"


class Outcome(NamedTuple):
    """What came of a position: the row that was used (-1: none), and the rows that failed before it."""

    row: int
    failures: list[tuple[int, Exception]]


def box_slots(index: "Index", rows: NDArray[np.int64], *, mosaic: float = 0.0) -> int:
    """M: the most boxes a picture of `rows` has (crowd boxes counted), at least 1, rounded up to a multiple of 8.

    With mosaics twice as many: one shows a good half of each of four pictures. On BCCD it has 36 boxes where a picture
    has 14; all mosaics fit then, with the slots of one picture only 37 % would.
    """
    counts = index.offsets[rows + 1] - index.offsets[rows]
    most = max(1, int(counts.max(initial=0))) * (2 if mosaic > 0 else 1)
    return -(-most // 8) * 8


class Slot:
    """Host memory of one batch, written by many threads, each its own places. Page-locked where there is a device."""

    def __init__(self, device: Device, batch: int, canvas: tuple[int, int], boxes: int) -> None:
        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return device.empty_host((batch, *shape), dtype)

        self.canvas = canvas
        self.tensors = [
            empty((*canvas, 3), torch.uint8),
            empty((boxes, 4), torch.float32),
            empty((boxes,), torch.int64),
            empty((boxes,), torch.bool),
            empty((2,), torch.int32),
            empty((2,), torch.float32),
            empty((2,), torch.int32),
            empty((), torch.int64),
            empty((DRAWS,), torch.float32),
        ]
        """In the order of Batch, the images [B, H, W, 3]."""
        (
            self.pixels, self.boxes, self.labels, self.valid, self.content, self.scale, self.size, self.image_id,
            self.draw,
        ) = (tensor.numpy() for tensor in self.tensors)  # fmt: skip
        self.encoded: list[Encoded | None] = [None] * batch
        """What the device is to decode, where `pixels` has nothing."""
        self._padding = np.empty((*canvas, 3), np.uint8)
        self._padding[:] = PADDING

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def pad(self, k: int, content: tuple[int, int]) -> None:
        """Fills what `content` (height, width) leaves of picture k; by copying, NumPy repeats 3 bytes 60 × slower."""
        height, width = content
        self.pixels[k, height:] = self._padding[height:]
        self.pixels[k, :height, width:] = self._padding[:height, width:]

    def blank(self, k: int) -> None:
        """Makes row k one that only fills the batch: a canvas of padding without boxes, image_id -1."""
        self.pad(k, (0, 0))
        self.boxes[k], self.labels[k], self.valid[k], self.draw[k] = 0, 0, False, 0
        self.content[k], self.size[k], self.scale[k], self.image_id[k] = self.canvas, self.canvas, 1, -1


def as_batch(tensors: list[Tensor]) -> Batch:
    """Tensors in the order of `Slot.tensors` → Batch; the images become [B, 3, H, W] as a view, channels last."""
    return Batch(tensors[0].permute(0, 3, 1, 2), *tensors[1:])


class Samples:
    """The stream. `load` runs in many threads at once; only the caller of the loader writes `quarantined`."""

    def __init__(
        self,
        index: "Index",
        rows: NDArray[np.int64],
        *,
        canvas: tuple[int, int],
        resize: str,
        crop: float,
        zoom: tuple[float, float],
        overlap: float,
        boxes: int,
        seed: int,
        train: bool,
        cache: "PixelCache | None" = None,
    ) -> None:
        """cache: of decoded pictures, of this index and for this canvas and resize."""
        self.index, self.rows, self.train, self.seed = index, np.asarray(rows, np.int64), train, seed
        self.quarantined: dict[int, int] = {}
        """Row → position from which on it is not used."""
        self._canvas, self._resize, self._boxes = canvas, resize, boxes
        self._crop, self._zoom, self._overlap = crop, zoom, overlap
        self._cache, self._defers = cache, False
        self._orders: dict[int, NDArray[np.int64]] = {}
        self._order_lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.rows)

    def deferring(self) -> "Samples":
        """The same stream, which leaves the JPEGs that the device can take in `Slot.encoded`."""
        other = copy.copy(self)
        other._defers = True
        return other

    @property
    def is_remote(self) -> bool:
        """Whether pictures lie in a bucket."""
        return self.index.remote(int(self.rows[0])) is not None

    def usable(self, row: int, position: int) -> bool:
        return self.quarantined.get(row, position + 1) > position

    def candidates(self, position: int) -> Iterator[int]:
        """The row at a position, then those that stand in for it, in the order in which they are tried."""
        epoch, place = divmod(position, len(self.rows))
        if not self.train:
            yield int(self.rows[place])
            return
        yield int(self._epoch_rows(epoch)[place])
        draws = geometry.uniforms(self.seed, epoch, place, geometry.Stream.REPLACEMENT, REPLACEMENTS)
        for u in draws:
            yield int(self.rows[int(u * len(self.rows))])

    def row_at(self, position: int) -> int:
        """The row that is used at a position, as far as the quarantine knows; -1 for none."""
        if not self.train and position >= len(self.rows):
            return -1
        return next((row for row in self.candidates(position) if self.usable(row, position)), -1)

    def cached(self, row: int) -> bool:
        """Whether a row's picture most likely comes from the cache, so that nothing need be fetched for it."""
        return self._cache is not None and self._cache.holds(row)

    def _epoch_rows(self, epoch: int) -> NDArray[np.int64]:
        with self._order_lock:  # the one that comes first in an epoch sorts for all
            if epoch not in self._orders:
                for old in sorted(self._orders)[: 1 - EPOCHS_KEPT]:
                    del self._orders[old]
                self._orders[epoch] = self.rows[geometry.order(self.seed, epoch, len(self.rows))]
            return self._orders[epoch]

    def load(
        self, slot: Slot, k: int, position: int, counters: Counters, marks: Marks, fetch: Fetch | None = None
    ) -> Outcome:
        """Writes the sample of `position` into place k. What is wrong with a picture is in the outcome.

        fetch: bytes that were asked for ahead, which are there; used where they are of the row that it takes. Anything
        else than a wrong picture travels, with its place: OutOfMemoryError, StorageError, or RuntimeError from the
        exception itself.
        """
        failures: list[tuple[int, Exception]] = []
        slot.encoded[k] = None
        if self.train or position < len(self.rows):
            failed: set[int] = set()
            for row in self.candidates(position):
                if row in failed or not self.usable(row, position):
                    continue
                path = self.index.path(row)
                try:
                    self._load_row(slot, k, position, row, path, counters, marks, fetch)
                    return Outcome(row, failures)
                except (DataError, ObjectMissing) as error:
                    failures.append((row, error))
                except OSError as error:
                    if error.errno in NOT_THE_PICTURE:
                        raise RuntimeError(f"reading {self.index.place(row)} failed: {error}") from error
                    failures.append((row, error))
                except StorageError:  # a bucket that cannot be read says nothing about the picture
                    raise
                except MemoryError as error:
                    place = self.index.place(row)
                    raise OutOfMemoryError("Out of host memory while loading a picture.", place=place) from error
                except Exception as error:
                    place = self.index.place(row)
                    raise RuntimeError(f"loading {place} failed: {type(error).__name__}: {error}") from error
                failed.add(row)
        slot.blank(k)
        return Outcome(-1, failures)

    def _load_row(
        self,
        slot: Slot,
        k: int,
        position: int,
        row: int,
        path: Path,
        counters: Counters,
        marks: Marks,
        fetch: Fetch | None,
    ) -> None:
        try:
            future = None if fetch is None or fetch.row != row else fetch.future
            data = self._read(row, counters, marks) if future is None else future.result()
            began_s = time.perf_counter()
            counters.doing = DECODING, began_s
            marks.append((began_s, DECODING))
            try:
                self._place(slot, k, position, row, path, data, counters)
                counters.pictures += 1
            finally:
                counters.decode_s += time.perf_counter() - began_s
        finally:
            counters.doing = None

    def _read(self, row: int, counters: Counters, marks: Marks) -> bytes | decode.Pixels:
        """The picture as it is encoded, or decoded as the cache has it."""
        began_s = time.perf_counter()
        counters.doing = READ, began_s
        marks.append((began_s, READ))
        try:
            pixels = None if self._cache is None else self._cache.get(row)
            data = self.index.read(row) if pixels is None else b""
        finally:
            counters.read_s += time.perf_counter() - began_s
        counters.read += 1
        if pixels is not None:
            counters.hits += 1
            counters.hit_bytes += pixels.nbytes
            return pixels
        counters.read_bytes += len(data)
        return data

    def _place(
        self, slot: Slot, k: int, position: int, row: int, path: Path, data: bytes | decode.Pixels, counters: Counters
    ) -> None:
        """data: the encoded picture, or what the cache keeps of it: from there on all is the same for both.

        With a cache the picture in the form of the cache is the one that is shown: regions are of its pixels, and its
        boxes are moved to it.
        """
        index = self.index
        said = (int(index.size[row, 0]), int(index.size[row, 1]))
        size = said
        kept: decode.Pixels | None = None
        header: Header | None = None
        if isinstance(data, bytes):
            header = header_of(data, path).shown_for(said)
            size = header.size
            _check_size(size, said, path)
            if self._cache is not None and self._cache.shape(row) is not None:
                kept = self._cache.make(row, data, path, header)
                self._cache.put(row, kept)
                counters.misses += 1
        else:
            kept = data
        shown = size if kept is None else (kept.shape[0], kept.shape[1])
        ratio = np.array((shown[0] / size[0], shown[1] / size[1]))
        epoch, place = divmod(position, len(self.rows))
        of_row = slice(int(index.offsets[row]), int(index.offsets[row + 1]))
        boxes = index.boxes[of_row] * ratio[[1, 0, 1, 0]]
        if self.train and self._crop > 0:
            placement = geometry.draw_placement(
                shown,
                self._canvas,
                self._resize,
                crop=self._crop,
                zoom=self._zoom,
                overlap=self._overlap,
                boxes=boxes[~index.crowd[of_row]],
                u=geometry.placement_draws(self.seed, epoch, place),
            )
        else:
            placement = geometry.place(shown, self._canvas, self._resize)
        height, width = placement.content
        out = slot.pixels[k, :height, :width]
        if self._defers and isinstance(data, bytes) and header is not None and is_ordinary(data, header):
            slot.encoded[k] = Encoded(data, header, placement.region, placement.content)
        elif kept is not None:
            x0, y0, x1, y1 = placement.region
            decode.resize_into(kept[y0:y1, x0:x1], out)
        elif isinstance(data, bytes):
            decode.decode_into(data, path, region=placement.region, out=out, header=header)
        if slot.encoded[k] is None:
            slot.pad(k, placement.content)
        slot.boxes[k], slot.labels[k], slot.valid[k] = geometry.place_boxes(
            boxes, index.labels[of_row], index.crowd[of_row], placement, self._boxes
        )
        slot.content[k], slot.scale[k], slot.size[k] = placement.content, placement.scale * ratio, size
        slot.image_id[k] = row
        slot.draw[k] = geometry.device_draws(self.seed, epoch, place, DRAWS)


def _check_size(found: tuple[int, int], said: tuple[int, int], path: Path) -> None:
    if 0 in said or found == said:
        return
    cause = f"the annotations say {said[1]} × {said[0]} pixels, the file has {found[1]} × {found[0]}"
    if found == said[::-1]:
        cause += ": it was turned after it was annotated, or its EXIF, which says how to show it, was lost"
    fix = "put back the picture that was annotated, or annotate this one"
    raise DataError("The picture has another size than its annotations say.", place=path, cause=cause, fix=fix)
