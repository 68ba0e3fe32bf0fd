"""One sample of the stream: which image belongs to a position, and how it is written into its place of a host batch.

Position p of the endless training stream is (epoch, index) = divmod(p, N); its image is the index-th of the epoch's
order. Everything about a sample is a pure function of (seed, epoch, index) and of the quarantine: the images that
cannot be used, each with the position from which on it is replaced. Threads, batches and the device: `loader.py`.
"""

import contextlib
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
from stoker.data.batch import NUM_RAND, Batch
from stoker.data.images import decode
from stoker.data.images.decode_device import EncodedImage, is_device_decodable
from stoker.data.images.headers import Header, parse_header
from stoker.data.loading.spec import LoaderSpec
from stoker.data.loading.stats import Counters
from stoker.data.loading.wait_breakdown import DECODING, READ, Transitions
from stoker.errors import DataError, ObjectMissing, OutOfMemoryError, StorageError
from stoker.hardware.device import Device

if TYPE_CHECKING:
    from stoker.data.images.pixel_cache import PixelCache
    from stoker.data.index import Index

PAD_COLOR = (124, 116, 104)
"""RGB of the padding: the ImageNet mean, which becomes about 0 after normalization."""
MAX_REPLACEMENTS = 64
"""Replacements that are drawn for an image. If all of them are bad too, the data set is gone."""
MAX_CACHED_ORDERS = 2
"""Orders of epochs that are kept: at the end of an epoch some positions belong to the next."""
RESOURCE_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Read errors that say nothing about the file."""


class QuarantinedImage(NamedTuple):
    """An image that could not be used, and its replacement: the content of a `schemas.Quarantined`."""

    image_index: int
    source: str
    """Path or URI of the image."""
    error: str
    sample_position: int
    """Position in the stream from which on the image is not used."""
    replaced_by: int
    """Index of the image used there instead; -1 in an evaluation, which leaves it out."""


class PendingRead(NamedTuple):
    """The bytes of an image, requested and on their way."""

    image_index: int
    future: "Future[bytes]"


class SampleResult(NamedTuple):
    """Result of a position: the image that was used (-1: none), and those that failed before it."""

    image_index: int
    failures: list[tuple[int, Exception]]


def compute_max_boxes(index: "Index", image_indices: NDArray[np.int64], *, mosaic: float = 0.0) -> int:
    """M: the largest number of boxes of an image (with crowd boxes), at least 1, rounded up to a multiple of 8.

    With mosaics twice as many, because a mosaic shows a good half of each of four images. On BCCD a mosaic has up to 36
    boxes where an image has 14. All mosaics fit then; with room for the boxes of one image only 37 % would.
    """
    counts = index.offsets[image_indices + 1] - index.offsets[image_indices]
    max_count = max(1, int(counts.max(initial=0))) * (2 if mosaic > 0 else 1)
    return -(-max_count // 8) * 8


class HostBatchBuffer:
    """Host memory of one batch, written by many threads, each its own places. Page-locked where there is a device."""

    def __init__(self, device: Device, batch_size: int, image_size: tuple[int, int], max_boxes: int) -> None:
        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return device.empty_host((batch_size, *shape), dtype)

        self.image_size = image_size
        self.tensors = [
            empty((*image_size, 3), torch.uint8),
            empty((max_boxes, 4), torch.float32),
            empty((max_boxes,), torch.int64),
            empty((max_boxes,), torch.bool),
            empty((2,), torch.int32),
            empty((2,), torch.float32),
            empty((2,), torch.int32),
            empty((), torch.int64),
            empty((NUM_RAND,), torch.float32),
        ]
        """In the order of Batch; the images are [B, H, W, 3]."""
        (
            self.pixels,
            self.boxes,
            self.labels,
            self.valid,
            self.resized_size,
            self.scale,
            self.original_size,
            self.image_index,
            self.rand,
        ) = (tensor.numpy() for tensor in self.tensors)
        self.encoded: list[EncodedImage | None] = [None] * batch_size
        """What the device is to decode; its place in `pixels` is not written."""
        self._padding = np.empty((*image_size, 3), np.uint8)
        self._padding[:] = PAD_COLOR

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def pad(self, k: int, resized_size: tuple[int, int]) -> None:
        """Pads image k outside `resized_size` (height, width). Copies, as NumPy repeats 3 bytes 60 × slower."""
        height, width = resized_size
        self.pixels[k, height:] = self._padding[height:]
        self.pixels[k, :height, width:] = self._padding[:height, width:]

    def write_filler(self, k: int) -> None:
        """Makes place k a filler of the batch: padding without boxes, image_index -1."""
        self.pad(k, (0, 0))
        self.boxes[k], self.labels[k], self.valid[k], self.rand[k] = 0, 0, False, 0
        self.resized_size[k] = self.original_size[k] = self.image_size
        self.scale[k], self.image_index[k] = 1, -1


def as_batch(tensors: list[Tensor]) -> Batch:
    """Tensors in the order of `HostBatchBuffer.tensors` → Batch; the images become a view [B, 3, H, W]."""
    return Batch(tensors[0].permute(0, 3, 1, 2), *tensors[1:])


class SampleStream:
    """The stream. Many threads call `load` at once; only the caller of the loader writes `quarantined`."""

    def __init__(
        self,
        index: "Index",
        image_indices: NDArray[np.int64],
        spec: LoaderSpec,
        cache: "PixelCache | None" = None,
    ) -> None:
        """cache: of decoded images, of this index and for this image size and resize."""
        self.index, self.image_indices, self.train = index, np.asarray(image_indices, np.int64), spec.train
        self.seed = spec.seed
        self.quarantined: dict[int, int] = {}
        """Image index → position from which on it is not used."""
        self._spec, self._cache, self._defers_decode = spec, cache, False
        self._epoch_orders: dict[int, NDArray[np.int64]] = {}
        self._order_lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.image_indices)

    def with_deferred_decode(self) -> "SampleStream":
        """The same stream, which leaves JPEGs that the device can decode in `HostBatchBuffer.encoded`."""
        other = copy.copy(self)
        other._defers_decode = True
        return other

    @property
    def is_remote(self) -> bool:
        """Whether the images are in a bucket."""
        return self.index.remote_object(int(self.image_indices[0])) is not None

    def is_usable(self, image_index: int, position: int) -> bool:
        return self.quarantined.get(image_index, position + 1) > position

    def candidate_images(self, position: int) -> Iterator[int]:
        """The image at a position, then its replacements in the order in which they are tried."""
        epoch, index_in_epoch = divmod(position, len(self.image_indices))
        if not self.train:
            yield int(self.image_indices[index_in_epoch])
            return
        yield int(self._epoch_order(epoch)[index_in_epoch])
        rand = geometry.random_uniform(
            self.seed, epoch, index_in_epoch, geometry.RandomStream.REPLACEMENT, MAX_REPLACEMENTS
        )
        for u in rand:
            yield int(self.image_indices[int(u * len(self.image_indices))])

    def image_index_at(self, position: int) -> int:
        """The image that is used at a position, as far as the quarantine knows; -1 for none."""
        if not self.train and position >= len(self.image_indices):
            return -1
        return next((k for k in self.candidate_images(position) if self.is_usable(k, position)), -1)

    def is_cached(self, image_index: int) -> bool:
        """Whether an image most likely comes from the cache, so that nothing need be fetched for it."""
        return self._cache is not None and self._cache.contains(image_index)

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        with self._order_lock:  # the first thread in an epoch sorts for all
            if epoch not in self._epoch_orders:
                for old in sorted(self._epoch_orders)[: 1 - MAX_CACHED_ORDERS]:
                    del self._epoch_orders[old]
                order = geometry.epoch_order(self.seed, epoch, len(self.image_indices))
                self._epoch_orders[epoch] = self.image_indices[order]
            return self._epoch_orders[epoch]

    def load(
        self,
        buffer: HostBatchBuffer,
        k: int,
        position: int,
        counters: Counters,
        transitions: Transitions,
        pending_read: PendingRead | None = None,
    ) -> SampleResult:
        """Writes the sample of `position` into place k. Failures of images are in the result.

        pending_read: prefetched bytes that have arrived; used where they are of the image that is loaded. Any error
        that is not the image's is raised with its location: OutOfMemoryError, StorageError, or RuntimeError from the
        exception itself.
        """
        failures: list[tuple[int, Exception]] = []
        buffer.encoded[k] = None
        if self.train or position < len(self.image_indices):
            failed: set[int] = set()
            for image_index in self.candidate_images(position):
                if image_index in failed or not self.is_usable(image_index, position):
                    continue
                try:
                    data = self._read(image_index, counters, transitions, pending_read)
                    with _stage(counters, transitions, DECODING):
                        self._write_sample(buffer, k, position, image_index, data, counters)
                        counters.num_images += 1
                    return SampleResult(image_index, failures)
                except (DataError, ObjectMissing) as error:
                    failures.append((image_index, error))
                except OSError as error:
                    if error.errno in RESOURCE_ERRNOS:
                        name = self.index.display_source(image_index)
                        raise RuntimeError(f"reading {name} failed: {error}") from error
                    failures.append((image_index, error))
                except StorageError:  # a bucket that cannot be read says nothing about the image
                    raise
                except MemoryError as error:
                    location = self.index.display_source(image_index)
                    raise OutOfMemoryError("Out of host memory while loading an image.", location=location) from error
                except Exception as error:
                    location = self.index.display_source(image_index)
                    raise RuntimeError(f"loading {location} failed: {type(error).__name__}: {error}") from error
                failed.add(image_index)
        buffer.write_filler(k)
        return SampleResult(-1, failures)

    def _read(
        self, image_index: int, counters: Counters, transitions: Transitions, pending_read: PendingRead | None
    ) -> bytes | decode.Pixels:
        """The encoded image, or the decoded one that the cache has."""
        if pending_read is not None and pending_read.image_index == image_index:
            return pending_read.future.result()
        with _stage(counters, transitions, READ):
            pixels = None if self._cache is None else self._cache.get(image_index)
            data = self.index.read(image_index) if pixels is None else b""
        counters.num_reads += 1
        if pixels is not None:
            counters.cache_hits += 1
            counters.cache_hit_bytes += pixels.nbytes
            return pixels
        counters.read_bytes += len(data)
        return data

    def _write_sample(
        self,
        buffer: HostBatchBuffer,
        k: int,
        position: int,
        image_index: int,
        data: bytes | decode.Pixels,
        counters: Counters,
    ) -> None:
        """data: the encoded image, or the pixels that the cache keeps; both give the same sample.

        With a cache the sample is made from the cached form: regions are of its pixels, and boxes are scaled to it.
        """
        index, spec, path = self.index, self._spec, self.index.path(image_index)
        annotated_size = (int(index.original_size[image_index, 0]), int(index.original_size[image_index, 1]))
        original_size = annotated_size
        cached_pixels: decode.Pixels | None = None
        header: Header | None = None
        if isinstance(data, bytes):
            header = parse_header(data, path).as_annotated(annotated_size)
            original_size = header.size
            _check_size(original_size, annotated_size, path)
            if self._cache is not None and self._cache.shape(image_index) is not None:
                cached_pixels = self._cache.decode(image_index, data, path, header)
                self._cache.put(image_index, cached_pixels)
                counters.cache_misses += 1
        else:
            cached_pixels = data
        source_size = original_size if cached_pixels is None else (cached_pixels.shape[0], cached_pixels.shape[1])
        cache_scale = np.array((source_size[0] / original_size[0], source_size[1] / original_size[1]))
        epoch, index_in_epoch = divmod(position, len(self.image_indices))
        box_slice = slice(int(index.offsets[image_index]), int(index.offsets[image_index + 1]))
        boxes = index.boxes[box_slice] * cache_scale[[1, 0, 1, 0]]
        if self.train and spec.scale_jitter_prob > 0:
            geom = geometry.sample_resize_geometry(
                source_size,
                spec.image_size,
                spec.resize,
                scale_jitter_prob=spec.scale_jitter_prob,
                scale_range=spec.scale_range,
                min_object_covered=spec.min_object_covered,
                boxes=boxes[~index.crowd[box_slice]],
                u=geometry.resize_geometry_rand(self.seed, epoch, index_in_epoch),
            )
        else:
            geom = geometry.compute_resize_geometry(source_size, spec.image_size, spec.resize)
        height, width = geom.resized_size
        out = buffer.pixels[k, :height, :width]
        if self._defers_decode and isinstance(data, bytes) and header is not None and is_device_decodable(data, header):
            buffer.encoded[k] = EncodedImage(data, header, geom.region, geom.resized_size)
        elif cached_pixels is not None:
            x0, y0, x1, y1 = geom.region
            decode.resize_into(cached_pixels[y0:y1, x0:x1], out)
        elif isinstance(data, bytes):
            decode.decode_into(data, path, region=geom.region, out=out, header=header)
        if buffer.encoded[k] is None:
            buffer.pad(k, geom.resized_size)
        buffer.boxes[k], buffer.labels[k], buffer.valid[k] = geometry.transform_boxes(
            boxes, index.labels[box_slice], index.crowd[box_slice], geom, spec.max_boxes
        )
        buffer.resized_size[k] = geom.resized_size
        buffer.scale[k] = geom.scale * cache_scale
        buffer.original_size[k] = original_size
        buffer.image_index[k] = image_index
        buffer.rand[k] = geometry.device_rand(self.seed, epoch, index_in_epoch, NUM_RAND)


@contextlib.contextmanager
def _stage(counters: Counters, transitions: Transitions, stage: str) -> Iterator[None]:
    """Counts the time inside as READ or DECODING of a sample."""
    start_s = time.perf_counter()
    counters.current_stage = stage, start_s
    transitions.append((start_s, stage))
    try:
        yield
    finally:
        duration_s = time.perf_counter() - start_s
        if stage == READ:
            counters.read_s += duration_s
        else:
            counters.decode_s += duration_s
        counters.current_stage = None


def _check_size(header_size: tuple[int, int], annotated_size: tuple[int, int], path: Path) -> None:
    if 0 in annotated_size or header_size == annotated_size:
        return
    cause = (
        f"the annotations say {annotated_size[1]} × {annotated_size[0]} pixels, "
        f"the file has {header_size[1]} × {header_size[0]}"
    )
    if header_size == annotated_size[::-1]:
        cause += ": it was rotated after it was annotated, or its EXIF orientation was lost"
    fix = "restore the image that was annotated, or annotate this one"
    raise DataError("The image has another size than its annotations say.", location=path, cause=cause, fix=fix)
