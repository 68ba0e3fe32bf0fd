"""What a loader loads (`LoaderSpec`), and what happens to sample p of its stream: `plan` → `read` → `decode` →
`annotate`, in `SampleStream`.

Position p of the endless training stream is (epoch, index) = divmod(p, N); its image is the index-th of the epoch's
order, which is random, or for shards that of `shard_order.py`. Everything about a sample is a pure function of (seed,
epoch, index) and of the quarantine: the images that cannot be used, each with the position from which on it is
replaced. `load` takes a sample from its plan to its pixels, and tries replacements where an image is bad. Batches and
the device: `loader.py`.

While Python runs, the other threads do not (the GIL), so `plan` and `annotate` do for many samples at once what can be
done so. `benchmarks/loading/gil.py` measures it.
"""

import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.data import geometry
from stoker.data.batch import NUM_RAND
from stoker.data.images import decode
from stoker.data.images.headers import Header, parse_header
from stoker.data.index import Index, boxes_of
from stoker.data.loading.buffers import HostBatchBuffer
from stoker.data.loading.repeat_factors import repeat_factors, repeated_order
from stoker.data.loading.shard_order import EpochOrder, ShardOrder
from stoker.data.loading.stats import DECODING, READ, Counters
from stoker.data.validation.problems import DEFAULT_MAX_BAD_FRACTION
from stoker_watch.errors import DataError, ObjectMissing, OutOfMemoryError, StokerError, make_error, system_limit

if TYPE_CHECKING:  # worker processes do without torch
    from torch import Tensor

    from stoker.data.images.pixel_cache import PixelCache
    from stoker.hardware.device import Device, ReadyEvent, SideStream

MAX_REPLACEMENTS = 64
"""Replacements that are drawn for an image. If all of them are bad too, the data set is gone."""
MAX_CACHED_ORDERS = 2
"""Orders of epochs that are kept: at the end of an epoch some positions belong to the next."""
MIN_READ_TOGETHER = 64
"""Images of shards in a bucket that an evaluation on one rank reads at once, if its batches are not larger."""
MAX_CACHED_GEOMETRIES = 4096
"""Sizes of images whose geometry without crops is kept: most images of a data set have one of a few sizes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderSpec:
    """The fixed choices of a `Loader`. Settings of the same names are described in `stoker/config/settings.py`."""

    device: "Device"
    batch_size: int
    """B, images per batch of this rank."""
    image_size: tuple[int, int]
    """Height and width of the model input."""
    resize: str
    """letterbox or squash; see `geometry.compute_resize_geometry`."""
    max_boxes: int
    """M; see `compute_max_boxes`."""
    seed: int
    train: bool = True
    """An endless shuffled stream; else one pass in order, whose last batch is filled up with image_index -1."""
    shuffle_buffer: int = 0
    """Images that all ranks together hold so that the images of shards are mixed (`shard_order.py`); 0: random order.
    In training only, as the next four."""
    repeat_thresh: float = 0.0
    """Fraction of the images below which a class is repeated (`repeat_factors.py`); 0: no image is."""
    scale_jitter_prob: float = 0.0
    """See `geometry.sample_resize_geometry`, also for the next two."""
    scale_range: tuple[float, float] = (1.0, 1.0)
    min_object_covered: float = 0.0
    workers: int | Literal["auto"] = "auto"
    """Threads that read and decode; "auto": tuned while the loader runs."""
    initial_workers: int = 0
    """With how many threads a tuned loader begins, where that is more than the usual number."""
    prefetch_depth: int | None = None
    """Batches decoded ahead, (prefetch_depth + 2) · B · H · W · 3 bytes; None: see `loader.choose_prefetch_depth`."""
    max_bad_fraction: float = DEFAULT_MAX_BAD_FRACTION
    """Fraction of the images that may be in quarantine before the loader raises DataError."""
    rank: int = 0
    world_size: int = 1
    """A global batch is B · world_size positions of the stream, of which rank r takes the r-th B. Each rank knows its
    own failures only. Replacements are drawn by position, so ranks agree on lasting failures without communication."""
    jpeg_decoder: Literal["cpu", "nvjpeg"] = "cpu"
    """nvjpeg: the device decodes the JPEGs that it supports. Not together with a cache."""


def compute_max_boxes(index: Index, image_indices: NDArray[np.int64], *, mosaic: float = 0.0) -> int:
    """Returns M: the largest number of boxes of an image (with crowd boxes), at least 1, rounded up to a multiple of 8.

    With mosaics twice as many, because a mosaic shows a good half of each of four images. On BCCD a mosaic has up to 36
    boxes where an image has 14. All mosaics fit then; with room for the boxes of one image only 37 % would.
    """
    counts = index.offsets[image_indices + 1] - index.offsets[image_indices]
    max_count = max(1, int(counts.max(initial=0))) * (2 if mosaic > 0 else 1)
    return -(-max_count // 8) * 8


UNKNOWN_GEOMETRY = geometry.ResizeGeometry((0, 0), (0, 0, 0, 0), (0, 0))


class SamplePlan(NamedTuple):
    """What a sample shows: an image, and which part of it is where in the model input."""

    image_index: int
    original_size: tuple[int, int]
    """Height and width in the annotations; zeros where they have none, until the image is read."""
    rand: NDArray[np.float32]
    """[P], `Batch.rand`."""
    crop_rand: list[float]
    """See `geometry.resize_geometry_rand`; empty where there are no crops."""
    geom: geometry.ResizeGeometry = UNKNOWN_GEOMETRY
    """Of the image, or of its cached form; UNKNOWN_GEOMETRY until the size is known."""
    is_cached: bool = False
    """The sample is made from the cached form, which is made first where it was not in the cache."""


class PendingRead(NamedTuple):
    """The bytes of an image, requested and on their way."""

    image_index: int
    future: "Future[bytes] | Future[memoryview]"
    """memoryview: a part of what was read together, which stays in memory until all of it is used."""


class ReadImage(NamedTuple):
    """An image that was read and is not decoded yet."""

    plan: SamplePlan
    """With its geometry."""
    data: bytes | decode.Pixels
    """The encoded image, or the decoded one that the cache has."""
    path: str
    header: Header | None
    """None for cached pixels."""


class SampleResult(NamedTuple):
    """Result of a position: the image that was used (-1: none), and those that failed before it."""

    image_index: int
    failures: list[tuple[int, Exception]]


class BatchTask:
    """A batch in progress: its place in the stream, its buffer, and what has become of each of its samples."""

    def __init__(self, global_start: int, start: int, buffer: HostBatchBuffer, batch_size: int) -> None:
        """global_start: first position of the batch over all ranks; start: first position of this rank."""
        self.global_start, self.start, self.buffer = global_start, start, buffer
        self.plans: list[SamplePlan | None] = [None] * batch_size
        """What is to be loaded; after `load`, what was loaded. None: a filler."""
        self.results: list[SampleResult | BaseException | None] = [None] * batch_size
        self.num_loading = batch_size
        """Samples whose pixels are not loaded yet."""
        self.num_missing = batch_size
        """The same, plus one while their annotations are written, plus one until the device decoder has finished."""
        self.encoded: dict[int, decode.EncodedImage] | None = None
        """What the device is to decode, whose pixels are not written; None: the host decodes all."""
        self.reloaded: list[int] = []
        """Places that were loaded again after the device decoder had finished."""
        self.on_loaded: Callable[[], None] | None = None
        """Called by the worker that has loaded the last sample."""
        self.device_images: tuple[Tensor, ReadyEvent] | None = None
        """uint8 [B, H, W, 3] on the device and when they are complete, where the device decodes."""

    def to_device(self, stream: "SideStream") -> "tuple[list[Tensor], ReadyEvent]":
        """Copies the batch to the device: tensors in the order of Batch, and when they are complete."""
        if self.device_images is None:
            return stream.to_device(self.buffer.tensors)
        images, images_ready = self.device_images
        pixels, *rest = self.buffer.tensors
        stream.join(images, images_ready, [(images[k], pixels[k]) for k in self.reloaded])
        tensors, ready = stream.to_device(rest)
        return [images, *tensors], ready


class SampleStream:
    """The samples of a loader, for many threads at once; only the caller of the loader writes `quarantined`."""

    def __init__(
        self,
        index: Index,
        image_indices: NDArray[np.int64],
        spec: LoaderSpec,
        cache: "PixelCache | None" = None,
    ) -> None:
        """cache: of decoded images, of this index and for this image size and resize."""
        self.index, self.image_indices, self.train = index, np.asarray(image_indices, np.int64), spec.train
        self.seed = spec.seed
        self.quarantined: dict[int, int] = {}
        """Image index → position from which on it is not used."""
        self._spec, self._cache = spec, cache
        self._epoch_orders: dict[int, tuple[NDArray[np.int64], EpochOrder | None]] = {}
        """The images of an epoch in their order; and, for shards, what is read together."""
        self._order_lock = threading.Lock()
        self._repeat_factors: NDArray[np.float64] | None = None
        if spec.train and spec.repeat_thresh:
            self._repeat_factors = repeat_factors(index, self.image_indices, spec.repeat_thresh)
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

    # One sample: plan, read, decode, annotate.

    def plan(self, start: int, count: int) -> list[SamplePlan | None]:
        """What `count` positions from `start` on show, if all can be used; None after the end of an evaluation."""
        plans: list[SamplePlan | None] = []
        while len(plans) < count:  # a batch may reach into the next epochs
            epoch, first = divmod(start + len(plans), len(self))
            if epoch and not self.train:
                return plans + [None] * (count - len(plans))
            indices = range(first, min(len(self), first + count - len(plans)))
            images = self._order_of(epoch)[0][first : indices.stop]
            crop_rand: list[list[float]] = [[]] * len(indices)
            if self.train and self._spec.scale_jitter_prob > 0:
                crop_rand = geometry.resize_geometry_rand(self.seed, epoch, indices).tolist()
            plans += map(
                self._plan_image,
                images.tolist(),
                map(tuple, self.index.original_size[images].tolist()),
                geometry.device_rand(self.seed, epoch, indices, NUM_RAND),
                crop_rand,
            )
        return plans

    def read(self, plan: SamplePlan, counters: Counters, pending_read: PendingRead | None = None) -> ReadImage:
        """Reads the planned image, or its pixels from the cache. pending_read: prefetched bytes that have arrived; used
        where they are of this image.

        Raises DataError, also where the image has another size than annotated; OSError, ObjectMissing, StorageError;
        ValueError for an image with more boxes than max_boxes.
        """
        image_index = plan.image_index
        data: bytes | decode.Pixels
        if pending_read is not None and pending_read.image_index == image_index:
            data = bytes(pending_read.future.result())  # bytes are not copied
        else:
            start_s = counters.begin(READ)
            try:
                pixels = None if self._cache is None else self._cache.get(image_index)
                data = self.index.read(image_index) if pixels is None else pixels
            finally:
                counters.read_s += time.perf_counter() - start_s
                counters.current_stage = None
            counters.cache_hits += pixels is not None
        path, header = self.index.path_text(image_index), None
        if isinstance(data, bytes):
            header = parse_header(data, path).as_annotated(plan.original_size)
            if header.size != plan.original_size:
                if 0 not in plan.original_size:
                    raise _other_size_error(header.size, plan.original_size, path)
                plan = plan._replace(original_size=header.size, geom=UNKNOWN_GEOMETRY)
        if plan.geom is UNKNOWN_GEOMETRY:
            plan = self._fit(image_index, plan.original_size, plan.rand, plan.crop_rand)
        return ReadImage(plan, data, path, header)

    def decode(self, image: ReadImage, out: decode.Pixels, counters: Counters) -> None:
        """Decodes the shown part of an image into `out`, which has its resized size. Raises DataError."""
        plan, data, path, header = image
        start_s = counters.begin(DECODING)
        try:
            if not plan.is_cached and isinstance(data, bytes):
                decode.decode_into(data, path, region=plan.geom.region, out=out, header=header)
            else:
                if isinstance(data, bytes):  # encoded and cached pixels give the same sample
                    assert self._cache is not None
                    assert header is not None
                    data = self._cache.decode(plan.image_index, data, path, header)
                    self._cache.put(plan.image_index, data)
                    counters.cache_misses += 1
                x0, y0, x1, y1 = plan.geom.region
                decode.resize_into(data[y0:y1, x0:x1], out)
        finally:
            counters.decode_s += time.perf_counter() - start_s
            counters.current_stage = None

    def annotate(self, task: BatchTask, places: Iterable[int]) -> None:
        """Writes all but the pixels of the samples that were loaded into `places`: boxes, sizes, random numbers."""
        index, buffer = self.index, task.buffer
        loaded = [(k, plan) for k in places if (plan := task.plans[k]) is not None]
        if not loaded:
            return
        at = np.array([k for k, _ in loaded])
        rows = np.array(
            [
                (image_index, *original_size, *geom.source_size, *geom.region, *geom.resized_size)
                for _, (image_index, original_size, _, _, geom, _) in loaded
            ],
            np.int64,
        )
        image_indices, original_size, source_size = rows[:, 0], rows[:, 1:3], rows[:, 3:5]
        region, resized_size = rows[:, 5:9], rows[:, 9:11]
        cache_scale = source_size / original_size

        box_rows, owner = boxes_of(index, image_indices)
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
        buffer.rand[at] = np.concatenate([plan.rand for _, plan in loaded]).reshape(-1, NUM_RAND)

    # All of it, with replacements for bad images.

    def load(
        self, task: BatchTask, k: int, counters: Counters, pending_read: PendingRead | None = None
    ) -> Iterator[None]:
        """Writes the pixels of place k of a batch, of which it has the plan; `annotate` does the rest. Failures of
        images are in the result, `task.results[k]`.

        Pauses when an image is read and before it is decoded: a worker reads several samples, then decodes them. Each
        decoding replaces the processor's caches, and Python code takes several times as long right after it. Any error
        that is not the image's is raised with its location: another StokerError, RuntimeError.
        """
        planned, task.plans[k] = task.plans[k], None
        failures: list[tuple[int, Exception]] = []
        for plan in () if planned is None else self._candidates(planned, task.start + k):
            image_index = plan.image_index
            try:
                image = self.read(plan, counters, pending_read)
                if task.encoded is None or not _leave_to_device(image, task.encoded, k):
                    height, width = image.plan.geom.resized_size
                    task.buffer.pad(k, (height, width))
                    out = task.buffer.pixels[k, :height, :width]
                    yield
                    self.decode(image, out, counters)
                counters.num_images += 1
                task.plans[k], task.results[k] = image.plan, SampleResult(image_index, failures)
                return
            except (DataError, ObjectMissing) as error:
                failures.append((image_index, error))
            except OSError as error:
                if (limit := system_limit(error, self.index.display_source(image_index))) is not None:
                    raise limit from error
                failures.append((image_index, error))
            except StokerError:  # a bucket that cannot be read, or a limit, says nothing about the image
                raise
            except MemoryError as error:
                location = self.index.display_source(image_index)
                raise OutOfMemoryError("Out of host memory while loading an image.", location=location) from error
            except Exception as error:
                location = self.index.display_source(image_index)
                raise RuntimeError(f"loading {location} failed: {type(error).__name__}: {error}") from error
        task.buffer.write_filler(k)
        task.results[k] = SampleResult(-1, failures)

    def reload(self, task: BatchTask, k: int, counters: Counters) -> None:
        """Loads place k of a batch once more, from its plan to its annotations. All samples are loaded."""
        [task.plans[k]] = self.plan(task.start + k, 1)
        for _ in self.load(task, k, counters):
            pass
        self.annotate(task, [k])

    def _candidates(self, plan: SamplePlan, position: int) -> Iterator[SamplePlan]:
        """Yields the plan of a position, then those of its replacements, as far as the quarantine allows them."""
        if self.is_usable(plan.image_index, position):
            yield plan
        tried = {plan.image_index}
        for image_index in self._replacements(position):
            if image_index not in tried and self.is_usable(image_index, position):
                tried.add(image_index)
                height, width = self.index.original_size[image_index].tolist()
                yield SamplePlan(image_index, (height, width), plan.rand, plan.crop_rand)

    def _plan_image(
        self, image_index: int, original_size: tuple[int, int], rand: NDArray[np.float32], crop_rand: list[float]
    ) -> SamplePlan:
        try:
            if 0 not in original_size:
                return self._fit(image_index, original_size, rand, crop_rand)
        except ValueError:  # raised again, with the name of the image, when it is read
            pass
        return SamplePlan(image_index, original_size, rand, crop_rand)

    def _fit(
        self, image_index: int, original_size: tuple[int, int], rand: NDArray[np.float32], u: list[float]
    ) -> SamplePlan:
        """Returns the plan for an image of a known size. With a cache the sample is made from the cached form: regions
        are of its pixels, and boxes are scaled to it. Raises ValueError for an image with more boxes than max_boxes."""
        index, spec = self.index, self._spec
        first, end = int(index.offsets[image_index]), int(index.offsets[image_index + 1])
        if end - first > spec.max_boxes:
            raise ValueError(f"the image has {end - first} boxes, but max_boxes is {spec.max_boxes}")
        cached_size = None if self._cache is None else self._cache.shape(image_index)
        source_size = cached_size or original_size
        if not u or u[0] >= spec.scale_jitter_prob:
            geom = _whole_image_geometry(source_size, spec.image_size, spec.resize)
        else:
            geom = geometry.sample_resize_geometry(
                source_size,
                spec.image_size,
                spec.resize,
                scale_jitter_prob=spec.scale_jitter_prob,
                scale_range=spec.scale_range,
                min_object_covered=spec.min_object_covered,
                boxes=self._boxes(first, end, original_size, source_size) if spec.min_object_covered > 0 else (),
                u=u,
            )
        return SamplePlan(image_index, original_size, rand, u, geom, cached_size is not None)

    def _boxes(
        self, first: int, end: int, original_size: tuple[int, int], source_size: tuple[int, int]
    ) -> list[list[float]]:
        """Returns rows first … end - 1 of the boxes without crowds, in pixels of the source."""
        boxes, crowd = self.index.boxes[first:end], self.index.crowd[first:end]
        if crowd.any():
            boxes = boxes[~crowd]
        if source_size != original_size:
            y_scale, x_scale = source_size[0] / original_size[0], source_size[1] / original_size[1]
            boxes = boxes * np.array((x_scale, y_scale, x_scale, y_scale))
        rows: list[list[float]] = boxes.tolist()
        return rows

    # Which image belongs to a position.

    def is_usable(self, image_index: int, position: int) -> bool:
        return self.quarantined.get(image_index, position + 1) > position

    def image_index_at(self, position: int) -> int:
        """Returns the image that is used at a position, as far as the quarantine knows; -1 for none."""
        epoch, index_in_epoch = divmod(position, len(self))
        if epoch and not self.train:
            return -1
        candidates = itertools.chain([int(self._order_of(epoch)[0][index_in_epoch])], self._replacements(position))
        return next((k for k in candidates if self.is_usable(k, position)), -1)

    def _replacements(self, position: int) -> Iterator[int]:
        """Yields images for a position whose own image cannot be used, in the order in which they are tried."""
        if not self.train:
            return
        epoch, index_in_epoch = divmod(position, len(self))
        stream = geometry.RandomStream.REPLACEMENT
        for u in geometry.random_uniform(self.seed, epoch, [index_in_epoch], stream, MAX_REPLACEMENTS)[0]:
            yield int(self.image_indices[int(u * len(self))])

    def is_cached(self, image_index: int) -> bool:
        """Returns whether an image most likely comes from the cache, so that nothing need be fetched for it."""
        return self._cache is not None and self._cache.contains(image_index)

    def _order_of(self, epoch: int) -> tuple[NDArray[np.int64], EpochOrder | None]:
        if not self.train:
            return self.image_indices, None
        if (known := self._epoch_orders.get(epoch)) is not None:
            return known
        with self._order_lock:  # the first thread in an epoch sorts for all
            if epoch not in self._epoch_orders:
                for old in sorted(self._epoch_orders)[: 1 - MAX_CACHED_ORDERS]:
                    del self._epoch_orders[old]
                of_shards = None if self._shard_order is None else self._shard_order.epoch(epoch)
                if of_shards is not None:
                    order = of_shards.order
                elif self._repeat_factors is not None:
                    order = repeated_order(self._repeat_factors, self.seed, epoch)
                else:
                    order = geometry.epoch_order(self.seed, epoch, len(self))
                self._epoch_orders[epoch] = self.image_indices[order], of_shards
            return self._epoch_orders[epoch]

    # What is best read together.

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
        """`LoaderSpec.shuffle_buffer` and the images per batch of all ranks; None where the order is random."""
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


_whole_image_geometry = functools.lru_cache(MAX_CACHED_GEOMETRIES)(geometry.compute_resize_geometry)


def _leave_to_device(image: ReadImage, encoded: "dict[int, decode.EncodedImage]", k: int) -> bool:
    """Leaves the image of place k to the device, if the device can decode it."""
    data, header, geom = image.data, image.header, image.plan.geom
    if header is None or not isinstance(data, bytes) or not decode.is_device_decodable(data, header):
        return False
    encoded[k] = decode.EncodedImage(data, header, geom.region, geom.resized_size)
    return True


def _other_size_error(header_size: tuple[int, int], annotated_size: tuple[int, int], path: str) -> DataError:
    cause = (
        f"the annotations say {annotated_size[1]} × {annotated_size[0]} pixels, "
        f"the file has {header_size[1]} × {header_size[0]}"
    )
    if header_size == annotated_size[::-1]:
        cause += ": it was rotated after it was annotated, or its EXIF orientation was lost"
    return make_error(DataError, "other-size-than-annotated", path, cause=cause)
