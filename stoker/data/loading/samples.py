"""The samples of the stream: which image belongs to a position, and how it is written into its place of a host batch.

Position p of the endless training stream is (epoch, index) = divmod(p, N); its image is the index-th of the epoch's
order, which is random, or for shards that of `shard_order.py`. Everything about a sample is a pure function of (seed,
epoch, index) and of the quarantine: the images that cannot be used, each with the position from which on it is
replaced. Threads, batches and the device: `loader.py`.

While Python runs, the other threads do not (the GIL), so what can be done for a whole batch is: `prepare` draws its
random numbers and plans its images from their annotated sizes, `load_steps` loads one image, `write_annotations` writes
the boxes of all. `benchmarks/gil.py` measures it.
"""

import copy
import errno
import functools
import itertools
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from stoker.data.augment import geometry
from stoker.data.batch import NUM_RAND, Batch
from stoker.data.images import decode
from stoker.data.images.headers import Header, parse_header
from stoker.data.loading.shard_order import EpochOrder, ShardOrder
from stoker.data.loading.spec import LoaderSpec
from stoker.data.loading.stats import Counters
from stoker.data.loading.wait_breakdown import DECODING, QUEUED, READ, Transitions
from stoker.errors import DataError, ObjectMissing, OutOfMemoryError, StorageError

if TYPE_CHECKING:  # worker processes do without torch
    from torch import Tensor

    from stoker.data.images.decode_device import EncodedImage
    from stoker.data.images.pixel_cache import PixelCache
    from stoker.data.index import Index
    from stoker.hardware.device import Device

PAD_COLOR = (124, 116, 104)
"""RGB of the padding: the ImageNet mean, which becomes about 0 after normalization."""
MAX_REPLACEMENTS = 64
"""Replacements that are drawn for an image. If all of them are bad too, the data set is gone."""
MAX_CACHED_ORDERS = 2
"""Orders of epochs that are kept: at the end of an epoch some positions belong to the next."""
MIN_READ_TOGETHER = 64
"""Images of shards in a bucket that an evaluation on one rank reads at once, if its batches are not larger."""
MAX_CACHED_GEOMETRIES = 4096
"""Sizes of images whose geometry without crops is kept: most images of a data set have one of a few sizes."""
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
    future: "Future[bytes] | Future[memoryview]"
    """memoryview: a part of what was read together, which stays in memory until all of it is used."""


class _Plan(NamedTuple):
    """What to do with an image of a known size."""

    image_index: int
    original_size: tuple[int, int]
    is_cached: bool
    """The sample is made from the cached form, which is made first where it was not in the cache."""
    geom: geometry.ResizeGeometry


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


class Placement(NamedTuple):
    """Which image is in a place of a batch, and where. Numbers only, so that those of a batch become an array."""

    image_index: int
    original_height: int
    original_width: int
    source_height: int
    """Of the pixels that `x0` … `y1` refer to: those of the image, or of its cached form."""
    source_width: int
    x0: int
    """… y1: the region that is shown."""
    y0: int
    x1: int
    y1: int
    resized_height: int
    resized_width: int


def batch_arrays(image_size: tuple[int, int], max_boxes: int) -> list[tuple[tuple[int, ...], DTypeLike]]:
    """Shape and type of each array of a batch, per image, in the order of Batch; the images are [H, W, 3]."""
    return [
        ((*image_size, 3), np.uint8),
        ((max_boxes, 4), np.float32),
        ((max_boxes,), np.int64),
        ((max_boxes,), np.bool_),
        ((2,), np.int32),
        ((2,), np.float32),
        ((2,), np.int32),
        ((), np.int64),
        ((NUM_RAND,), np.float32),
    ]


class HostBatchBuffer:
    """Host memory of one batch, written by many threads, each its own places. Page-locked where there is a device."""

    def __init__(
        self,
        device: "Device | None",
        batch_size: int,
        image_size: tuple[int, int],
        max_boxes: int,
        arrays: Sequence[NDArray[Any]] | None = None,
    ) -> None:
        """arrays: existing memory, as described by `batch_arrays`; None: new memory of torch. device: None in a worker
        process, which has no tensors."""
        self.image_size = image_size
        self.tensors: list[Tensor] = []
        """In the order of Batch; the images are [B, H, W, 3]."""
        if device is not None:
            import torch

            self.tensors = (
                [
                    device.empty_host((batch_size, *shape), getattr(torch, np.dtype(dtype).name))
                    for shape, dtype in batch_arrays(image_size, max_boxes)
                ]
                if arrays is None
                else [torch.from_numpy(array) for array in arrays]
            )
        if arrays is None:
            arrays = [tensor.numpy() for tensor in self.tensors]
            self._is_torch_pinned = device is not None and not device.is_cpu
        else:
            self._is_torch_pinned = False
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
        ) = arrays
        self.encoded: list[EncodedImage | None] = [None] * batch_size
        """What the device is to decode; its place in `pixels` is not written."""
        self.placements: list[Placement | None] = [None] * batch_size
        """Those of the images that were loaded; None: a filler."""
        self.geometry_rand: list[list[float]] = [[]] * batch_size
        """See `geometry.resize_geometry_rand`; only where there are crops."""
        self.plans: list[_Plan | None] = [None] * batch_size
        """Those of the first image of each place, where its size is annotated."""
        self._padding = _padding(image_size)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the buffer takes from the host's memory."""
        if not self._is_torch_pinned:
            return self.nbytes
        from stoker.hardware.device import pinned_bytes

        return sum(pinned_bytes(tensor.nbytes) for tensor in self.tensors)

    def pad(self, k: int, resized_size: tuple[int, int]) -> None:
        """Pads image k outside `resized_size` (height, width). Copies, as NumPy repeats 3 bytes 60 × slower."""
        height, width = resized_size
        if height < self.image_size[0]:
            self.pixels[k, height:] = self._padding[height:]
        if width < self.image_size[1]:
            self.pixels[k, :height, width:] = self._padding[:height, width:]

    def write_filler(self, k: int) -> None:
        """Makes place k a filler of the batch: padding without boxes, image_index -1."""
        self.pad(k, (0, 0))
        self.boxes[k], self.labels[k], self.valid[k], self.rand[k] = 0, 0, False, 0
        self.resized_size[k] = self.original_size[k] = self.image_size
        self.scale[k], self.image_index[k] = 1, -1


@functools.lru_cache(2)
def _padding(image_size: tuple[int, int]) -> decode.Pixels:
    padding = np.empty((*image_size, 3), np.uint8)
    padding[:] = PAD_COLOR
    return padding


def as_batch(tensors: "list[Tensor]") -> Batch:
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
        self._epoch_orders: dict[int, tuple[NDArray[np.int64], EpochOrder | None]] = {}
        """The images of an epoch in their order; and, for shards, what is read together."""
        self._order_lock = threading.Lock()
        self._shard_order: ShardOrder | None = None
        self._total_batch_size = spec.batch_size * spec.world_size
        if spec.train and spec.shuffle_buffer:
            self._shard_order = ShardOrder(
                index.image_ranges(self.image_indices),
                seed=spec.seed,
                batch_size=self._total_batch_size,
                buffer=spec.shuffle_buffer,
            )

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

    @functools.cached_property
    def reads_ranges(self) -> bool:
        """Whether images that are near each other in the stream are near each other in an object of a bucket."""
        location = self.index.remote_object(int(self.image_indices[0]))
        return location is not None and location[3] is not None and (self._shard_order is not None or not self.train)

    @property
    def shard_mixing(self) -> list[int] | None:
        """What decides the order, besides the seed and the shards: `LoaderSpec.shuffle_buffer` and the images per batch
        of all ranks. None where the order is random."""
        return None if self._shard_order is None else [self._spec.shuffle_buffer, self._total_batch_size]

    @property
    def buffer_images(self) -> int:
        """The part of this rank in `LoaderSpec.shuffle_buffer`."""
        return self._spec.shuffle_buffer // self._spec.world_size

    def read_together(self, position: int) -> list[int]:
        """Positions of one rank, that one and later ones, whose images are best read with that of `position`."""
        if not self.reads_ranges:
            return [position]
        count, batch_size = len(self.image_indices), self._spec.batch_size
        if not self.train:
            group_size = batch_size if self._spec.world_size > 1 else max(batch_size, MIN_READ_TOGETHER)
            return list(range(position, min(count, (position // group_size + 1) * group_size)))
        epoch, index_in_epoch = divmod(position, count)
        _, shard_order = self._order_of(epoch)
        assert shard_order is not None
        indices = shard_order.read_together(index_in_epoch)
        positions: list[int] = (indices[indices >= index_in_epoch] + epoch * count).tolist()
        return positions

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
            self.seed, epoch, [index_in_epoch], geometry.RandomStream.REPLACEMENT, MAX_REPLACEMENTS
        )
        for u in rand[0]:
            yield int(self.image_indices[int(u * len(self.image_indices))])

    def _candidates(self, position: int, plan: _Plan | None) -> Iterator[int]:
        """`candidate_images`, of which `plan` is that of the first, if it has one."""
        if plan is not None:
            yield plan.image_index
        yield from itertools.islice(self.candidate_images(position), plan is not None, None)

    def image_index_at(self, position: int) -> int:
        """The image that is used at a position, as far as the quarantine knows; -1 for none."""
        if not self.train and position >= len(self.image_indices):
            return -1
        return next((k for k in self.candidate_images(position) if self.is_usable(k, position)), -1)

    def is_cached(self, image_index: int) -> bool:
        """Whether an image most likely comes from the cache, so that nothing need be fetched for it."""
        return self._cache is not None and self._cache.contains(image_index)

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        return self._order_of(epoch)[0]

    def _order_of(self, epoch: int) -> tuple[NDArray[np.int64], EpochOrder | None]:
        known = self._epoch_orders.get(epoch)
        if known is not None:
            return known
        with self._order_lock:  # the first thread in an epoch sorts for all
            if epoch not in self._epoch_orders:
                for old in sorted(self._epoch_orders)[: 1 - MAX_CACHED_ORDERS]:
                    del self._epoch_orders[old]
                of_shards = None if self._shard_order is None else self._shard_order.epoch(epoch)
                order = (
                    geometry.epoch_order(self.seed, epoch, len(self.image_indices))
                    if of_shards is None
                    else of_shards.order
                )
                self._epoch_orders[epoch] = self.image_indices[order], of_shards
            return self._epoch_orders[epoch]

    def prepare(self, buffer: HostBatchBuffer, start: int) -> None:
        """Draws the random numbers of all samples of a batch, whose first position is `start`. Before any `load`."""
        batch_size, count, k = len(buffer.placements), len(self.image_indices), 0
        while k < batch_size:  # a batch may reach into the next epochs
            epoch, first = divmod(start + k, count)
            indices = range(first, min(count, first + batch_size - k))
            places = slice(k, k + len(indices))
            buffer.rand[places] = geometry.device_rand(self.seed, epoch, indices, NUM_RAND)
            if self.train and self._spec.scale_jitter_prob > 0:
                buffer.geometry_rand[places] = geometry.resize_geometry_rand(self.seed, epoch, indices).tolist()
            if self.train or epoch == 0:
                order = self._epoch_order(epoch) if self.train else self.image_indices
                buffer.plans[places] = self._plan_all(order[first : first + len(indices)], buffer.geometry_rand[places])
            else:
                buffer.plans[places] = [None] * len(indices)
            k += len(indices)

    def _plan_all(self, image_indices: NDArray[np.int64], rand: list[list[float]]) -> list[_Plan | None]:
        """The plans of images; None where the size is not annotated, and for an image that cannot be used."""
        sizes = self.index.original_size[image_indices].tolist()
        plans: list[_Plan | None] = []
        for image_index, (height, width), u in zip(image_indices.tolist(), sizes, rand, strict=True):
            try:
                plans.append(self._plan(image_index, (height, width), u) if height and width else None)
            except ValueError:  # raised again, with the name of the image, when it is loaded
                plans.append(None)
        return plans

    def load(
        self, buffer: HostBatchBuffer, k: int, position: int, counters: Counters, transitions: Transitions
    ) -> SampleResult:
        """All of `load_steps`."""
        steps = self.load_steps(buffer, k, position, counters, transitions)
        while True:
            try:
                next(steps)
            except StopIteration as done:
                result: SampleResult = done.value
                return result

    def load_steps(
        self,
        buffer: HostBatchBuffer,
        k: int,
        position: int,
        counters: Counters,
        transitions: Transitions,
        pending_read: PendingRead | None = None,
    ) -> Generator[None, None, SampleResult]:
        """Writes the pixels of the sample of `position` into place k, after `prepare` and before `write_annotations`.
        Failures of images are in the result.

        Pauses when an image is read and before it is decoded: a worker reads several samples, then decodes them. Each
        decoding replaces the processor's caches, and Python code takes several times as long right after it.

        pending_read: prefetched bytes that have arrived; used where they are of the image that is loaded. Any error
        that is not the image's is raised with its location: OutOfMemoryError, StorageError, or RuntimeError from the
        exception itself.
        """
        failures: list[tuple[int, Exception]] = []
        buffer.encoded[k] = buffer.placements[k] = None
        if self.train or position < len(self.image_indices):
            failed: set[int] = set()
            for image_index in self._candidates(position, buffer.plans[k]):
                if image_index in failed or not self.is_usable(image_index, position):
                    continue
                try:
                    data = self._read(image_index, counters, transitions, pending_read)
                    path = self.index.path_text(image_index)
                    header, plan = self._check(image_index, data, path, buffer.plans[k], buffer.geometry_rand[k])
                    source_size, region, (height, width) = plan.geom
                    buffer.placements[k] = Placement(
                        image_index, *plan.original_size, *source_size, *region, height, width
                    )
                    result, out = SampleResult(image_index, failures), buffer.pixels[k, :height, :width]
                    has_choice = plan.is_cached or self._defers_decode
                    if not self._defers_decode:
                        buffer.pad(k, (height, width))
                    yield
                    start_s = time.perf_counter()
                    counters.current_stage = DECODING, start_s
                    transitions.append((start_s, DECODING))
                    try:
                        if isinstance(data, bytes) and not has_choice:
                            decode.decode_into(data, path, region=region, out=out, header=header)
                        else:
                            self._write_pixels(buffer, k, data, path, header, plan, out, counters)
                        counters.num_images += 1
                    finally:
                        counters.decode_s += time.perf_counter() - start_s
                        counters.current_stage = None
                    return result
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
        buffer.placements[k] = None
        buffer.write_filler(k)
        return SampleResult(-1, failures)

    def _read(
        self, image_index: int, counters: Counters, transitions: Transitions, pending_read: PendingRead | None
    ) -> bytes | decode.Pixels:
        """The encoded image, or the decoded one that the cache has."""
        if pending_read is not None and pending_read.image_index == image_index:
            return bytes(pending_read.future.result())  # bytes are not copied
        start_s = time.perf_counter()
        counters.current_stage = READ, start_s
        transitions.append((start_s, READ))
        try:
            pixels = None if self._cache is None else self._cache.get(image_index)
            data = self.index.read(image_index) if pixels is None else b""
        finally:
            end_s = time.perf_counter()
            counters.read_s += end_s - start_s
            transitions.append((end_s, QUEUED))
            counters.current_stage = None
        counters.num_reads += 1
        if pixels is not None:
            counters.cache_hits += 1
            counters.cache_hit_bytes += pixels.nbytes
            return pixels
        counters.read_bytes += len(data)
        return data

    def _check(
        self, image_index: int, data: bytes | decode.Pixels, path: str, plan: _Plan | None, u: list[float]
    ) -> tuple[Header | None, _Plan]:
        """The header of an image that was read (None for cached pixels), and its plan: `plan` where it is that of this
        image. Raises DataError where the image has another size than annotated."""
        is_planned = plan is not None and plan.image_index == image_index
        if plan is not None and is_planned:
            original_size = plan.original_size
        else:
            height, width = self.index.original_size[image_index].tolist()
            original_size = height, width
        header = None
        if isinstance(data, bytes):
            header = parse_header(data, path).as_annotated(original_size)
            if header.size != original_size:
                _check_size(header.size, original_size, path)
                original_size, is_planned = header.size, False
        if plan is not None and is_planned:
            return header, plan
        return header, self._plan(image_index, original_size, u)

    def _plan(self, image_index: int, original_size: tuple[int, int], u: list[float]) -> _Plan:
        """What to do with an image. With a cache the sample is made from the cached form: regions are of its pixels,
        and boxes are scaled to it. Encoded and cached pixels give the same sample."""
        cached_size = None if self._cache is None else self._cache.shape(image_index)
        source_size = cached_size or original_size
        geom = self._resize_geometry(image_index, original_size, source_size, u)
        return _Plan(image_index, original_size, cached_size is not None, geom)

    def _write_pixels(
        self,
        buffer: HostBatchBuffer,
        k: int,
        data: bytes | decode.Pixels,
        path: str,
        header: Header | None,
        plan: _Plan,
        out: decode.Pixels,
        counters: Counters,
    ) -> None:
        """Writes the pixels where there is a cache, or where the device may decode."""
        image_index, _, is_cached, (_, region, resized_size) = plan
        if is_cached and isinstance(data, bytes):
            assert self._cache is not None
            assert header is not None
            pixels = self._cache.decode(image_index, data, path, header)
            self._cache.put(image_index, pixels)
            data = pixels
            counters.cache_misses += 1
        if not isinstance(data, bytes):
            x0, y0, x1, y1 = region
            decode.resize_into(data[y0:y1, x0:x1], out)
        elif self._defers_decode and header is not None:
            from stoker.data.images.decode_device import EncodedImage, is_device_decodable

            if is_device_decodable(data, header):
                buffer.encoded[k] = EncodedImage(data, header, region, resized_size)
            else:
                decode.decode_into(data, path, region=region, out=out, header=header)
        else:
            decode.decode_into(data, path, region=region, out=out, header=header)
        if self._defers_decode and buffer.encoded[k] is None:
            buffer.pad(k, resized_size)

    def _resize_geometry(
        self, image_index: int, original_size: tuple[int, int], source_size: tuple[int, int], u: list[float]
    ) -> geometry.ResizeGeometry:
        """Raises ValueError for an image with more boxes than max_boxes, as none is dropped silently."""
        index, spec = self.index, self._spec
        first, end = int(index.offsets[image_index]), int(index.offsets[image_index + 1])
        if end - first > spec.max_boxes:
            raise ValueError(f"the image has {end - first} boxes, but max_boxes is {spec.max_boxes}")
        if not u or u[0] >= spec.scale_jitter_prob:
            return _whole_image_geometry(source_size, spec.image_size, spec.resize)
        boxes: list[list[float]] = []
        if spec.min_object_covered > 0:
            box_array, crowd = index.boxes[first:end], index.crowd[first:end]
            if crowd.any():
                box_array = box_array[~crowd]
            if source_size != original_size:
                y_scale, x_scale = source_size[0] / original_size[0], source_size[1] / original_size[1]
                box_array = box_array * np.array((x_scale, y_scale, x_scale, y_scale))
            boxes = box_array.tolist()
        return geometry.sample_resize_geometry(
            source_size,
            spec.image_size,
            spec.resize,
            scale_jitter_prob=spec.scale_jitter_prob,
            scale_range=spec.scale_range,
            min_object_covered=spec.min_object_covered,
            boxes=boxes,
            u=u,
        )

    def write_annotations(self, buffer: HostBatchBuffer, places: Iterable[int]) -> None:
        """Writes all but the pixels of the samples that were loaded into `places`: boxes, sizes, image indices."""
        index = self.index
        loaded = [(k, placement) for k in places if (placement := buffer.placements[k]) is not None]
        if not loaded:
            return
        at = np.array([k for k, _ in loaded])
        rows = np.array([placement for _, placement in loaded], np.int64)
        image_indices, original_size, source_size = rows[:, 0], rows[:, 1:3], rows[:, 3:5]
        region, resized_size = rows[:, 5:9], rows[:, 9:11]
        cache_scale = source_size / original_size

        starts, ends = index.offsets[image_indices], index.offsets[image_indices + 1]
        owner = np.repeat(np.arange(len(at)), ends - starts)
        box_rows = np.arange(len(owner)) + (ends - (ends - starts).cumsum())[owner]
        boxes, keep = geometry.transform_boxes(
            index.boxes[box_rows] * cache_scale[:, (1, 0, 1, 0)][owner],
            index.crowd[box_rows],
            owner,
            source_size,
            region,
            resized_size,
        )
        owner, box_rows = owner[keep], box_rows[keep]
        num_boxes = np.bincount(owner, minlength=len(at))
        column = np.arange(len(owner)) - (num_boxes.cumsum() - num_boxes)[owner]
        buffer.boxes[at], buffer.labels[at] = 0, 0
        buffer.boxes[at[owner], column] = boxes[keep]
        buffer.labels[at[owner], column] = index.labels[box_rows]
        buffer.valid[at] = np.arange(buffer.valid.shape[1]) < num_boxes[:, None]
        buffer.resized_size[at], buffer.original_size[at] = resized_size, original_size
        buffer.scale[at] = resized_size / (region[:, (3, 2)] - region[:, (1, 0)]) * cache_scale
        buffer.image_index[at] = image_indices


_whole_image_geometry = functools.lru_cache(MAX_CACHED_GEOMETRIES)(geometry.compute_resize_geometry)


def _check_size(header_size: tuple[int, int], annotated_size: tuple[int, int], path: str) -> None:
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
