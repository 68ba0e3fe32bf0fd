"""The stream of batches: threads decode into a ring of host batches, copies run beside the step, the state is exact.

Stages: fetch, decode (with crop and resize, into the ring), copy. Local files are read by the thread that decodes them;
pictures of a bucket are asked for ahead (`prefetch.py`) and come to the threads when their bytes are there. Any number
of threads takes samples in the order of the stream (`worker_pool.py`). The thread that asks for batches does everything
else, in that order too: it hands out tasks when a slot of the ring is free, commits what came of them (`finalize.py`),
starts copies, and once a second looks whether other numbers of threads and slots would do better (`autotune.py`). So
nothing that a run sees depends on how many threads there are or which was first. What one sample is: `samples.py`;
where a wait went: `timeline.py`.
"""

import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stoker.data.batch import Batch
from stoker.data.loading.autotune import INPUT_BOUND_FRACTION, POLL_INTERVAL_S, LoaderRateMeter, make_autotuner
from stoker.data.loading.counters import Counters
from stoker.data.loading.device_batches import DeviceBatchDecoder
from stoker.data.loading.finalize import BatchFinalizer
from stoker.data.loading.prefetch import PrefetchCounters, Prefetcher, iter_rank_positions
from stoker.data.loading.samples import HostBatchBuffer, QuarantinedImage, SampleStream, as_batch, compute_max_boxes
from stoker.data.loading.stages import LoaderStats, collect_loader_stats
from stoker.data.loading.wait_breakdown import COPY, QUEUE, Intervals, WaitBreakdown, split_wait
from stoker.data.loading.worker_pool import BatchTask, SampleTask, WorkerPool
from stoker.data.validation.problems import DEFAULT_MAX_BAD_FRACTION
from stoker.errors import CheckpointError, DataError
from stoker.hardware.device import Device, ReadyEvent

if TYPE_CHECKING:
    from stoker.data.images.pixel_cache import PixelCache
    from stoker.data.index import Index
    from stoker.storage.fetcher import Fetcher

__all__ = ["PREFETCH_DEPTH", "Loader", "LoaderStats", "QuarantinedImage", "compute_max_boxes"]

PREFETCH_DEPTH = 3
"""Batches ahead of training, to begin with: one ready, one being finished, one begun by the threads that are free."""
BUFFERS_IN_USE = 2
"""Slots beside them: that of the batch in work, and of the one before (CPU) or of the next one's copy (device)."""


class Loader:
    """An iterator of device-ready batches: endless over `rows` in training, one pass in order in evaluation.

    rows: int64 [N], rows of the index. batch: B, pictures per batch of this rank; canvas: height and width; boxes: M,
    see `box_slots`; resize, crop, zoom, overlap: see `augment.draw_placement` (the last three in training only).
    threads: how many read and decode; 0: tuned while it runs, from `begin` on or the usual number. depth: batches
    decoded ahead; None: tuned. Host memory is (depth + 2) · B · H · W · 3 bytes. on_tuned is told of each change.
    max_bad: share of the pictures that may be in quarantine before the loader raises.

    ranks: a global batch is B · ranks positions of the stream, of which rank r takes the r-th B. Each rank knows its
    own failures; as what stands in for a picture is drawn by position, ranks agree on lasting ones without talking.

    on_quarantine is called by `__next__`, in the order of the stream, when a picture is taken out of use.

    In evaluation the last batch is filled with rows of image_id -1, and a picture that fails becomes one.
    `iter` starts a pass from its beginning.

    cache: pictures are made from what it keeps; a run has one from its beginning to its end, or none.
    decoder: nvjpeg has the device decode the JPEGs that it takes, host none; not together with a cache.
    """

    def __init__(
        self,
        index: "Index",
        image_indices: NDArray[np.int64],
        *,
        device: Device,
        batch_size: int,
        image_size: tuple[int, int],
        resize: str,
        scale_jitter_prob: float = 0.0,
        scale_range: tuple[float, float] = (1.0, 1.0),
        min_object_covered: float = 0.0,
        max_boxes: int,
        seed: int,
        workers: int,
        initial_workers: int = 0,
        train: bool = True,
        prefetch_depth: int | None = None,
        max_bad_fraction: float = DEFAULT_MAX_BAD_FRACTION,
        rank: int = 0,
        world_size: int = 1,
        on_quarantine: Callable[[QuarantinedImage], None] | None = None,
        on_tuned: Callable[[str], None] | None = None,
        cache: "PixelCache | None" = None,
        jpeg_decoder: Literal["cpu", "nvjpeg"] = "cpu",
    ) -> None:
        if not len(image_indices):
            raise DataError("There is no picture to load.", location=index.source)
        self._samples = SampleStream(
            index,
            image_indices,
            image_size=image_size,
            resize=resize,
            scale_jitter_prob=scale_jitter_prob,
            scale_range=scale_range,
            min_object_covered=min_object_covered,
            max_boxes=max_boxes,
            seed=seed,
            train=train,
            cache=cache,
        )
        self._device, self._batch_size, self._rank, self._world_size = device, batch_size, rank, world_size
        self._copy_stream = device.make_stream()
        self._device_decoder = DeviceBatchDecoder(self._samples, device, on_tuned) if jpeg_decoder == "nvjpeg" else None
        self._make_buffer = functools.partial(HostBatchBuffer, device, batch_size, image_size, max_boxes)
        tunes_depth, prefetch_depth = (
            prefetch_depth is None,
            PREFETCH_DEPTH if prefetch_depth is None else prefetch_depth,
        )
        self._buffers = [self._make_buffer() for _ in range(prefetch_depth + BUFFERS_IN_USE)]
        self._autotuner = make_autotuner(
            workers,
            initial_workers,
            prefetch_depth,
            self._buffers[0].nbytes,
            is_cpu=device.is_cpu,
            tunes_depth=tunes_depth,
        )
        self._on_tuned = on_tuned
        self.on_copy_awaited: Callable[[], None] | None = None
        """Called in `__next__` where the device that trains has to wait for the batch's copy, before it is told to."""
        self._rate_meter: LoaderRateMeter | None = None
        self._counters, self._prefetch_counters, self._wait_breakdown = Counters(), PrefetchCounters(), WaitBreakdown()
        self._wait_s, self._batches_copied = 0.0, 0
        self._batch_finalizer = BatchFinalizer(
            index,
            self._samples,
            max_bad_fraction=max_bad_fraction,
            on_quarantine=on_quarantine,
            counters=self._counters,
        )
        self._pool: WorkerPool | None = None
        self._prefetcher: Prefetcher | None = None
        self._fetcher: Fetcher | None = None
        self._gc_finalizer: weakref.finalize[..., Loader] | None = None
        self._failure: Exception | None = None
        self._closed = False
        self._pending_batches: deque[BatchTask] = deque()
        self._copied_batch: tuple[BatchTask, list[Tensor], ReadyEvent] | None = None
        self._handed_out: deque[tuple[HostBatchBuffer, ReadyEvent]] = deque()
        self._seek(0)

    # What a run asks.

    @property
    def position(self) -> int:
        """Samples handed out so far, by all ranks together: where in the stream the next batch begins."""
        return self._position

    @property
    def last_wait(self) -> Intervals:
        """What the newest `__next__` spent its time on: (end in seconds of `time.perf_counter`, stage), ascending; the
        first interval begins with the call. Nearly all of it where the loader is the slower one."""
        return self._wait_breakdown.last

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch handed out. What was decoded ahead is not part of it."""
        return {
            "position": self._position,
            "quarantined": dict(self._samples.quarantined),
            "count": len(self._samples),
            "seed": self._samples.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state: the same batches follow, bit for bit, whatever the number of threads.

        `quarantined` may name positions that are still to come (from quarantine.jsonl of a run that went further before
        it was killed): the picture is used up to there. Raises CheckpointError when the state is of another stream.
        """
        for name, expected in (("count", len(self._samples)), ("seed", self._samples.seed)):
            if state.get(name, expected) != expected:
                description = {"count": "number of training pictures", "seed": "seed"}[name]
                raise CheckpointError(
                    f"The {description} is {expected}, the saved state was made with {state[name]}.",
                    cause="the saved position means other pictures now",
                    fix="restore the data set or the setting, or start a new run",
                )
        self._seek(int(state["position"]))
        self._samples.quarantined.clear()
        self._samples.quarantined.update(
            {int(image_index): int(position) for image_index, position in state["quarantined"].items()}
        )

    def image_indices_at(self, position: int, count: int) -> list[int]:
        """The rows that `count` positions from `position` on are made of, with replacements; -1 for none."""
        return [self._samples.image_index_at(p) for p in range(position, position + count)]

    def stats(self) -> LoaderStats:
        """What was done so far and what is being done; a snapshot."""
        pending_batches = list(self._pending_batches)  # the thread that asks for batches may be adding to it
        num_missing = sum(min(batch_task.num_missing, self._batch_size) for batch_task in pending_batches)
        return collect_loader_stats(
            [self._counters, *(self._pool.counters() if self._pool else ())],
            self._prefetch_counters,
            self._wait_breakdown,
            self._buffers[0],
            batches_copied=self._batches_copied,
            batches_copying=sum(not ready.done() for _, ready in list(self._handed_out)),
            wait_s=self._wait_s,
            queued=self._pool.num_queued if self._pool else 0,
            ready=self._batch_size * (len(pending_batches) + (self._copied_batch is not None)) - num_missing,
            workers=self._autotuner.workers,
            prefetch_depth=self._autotuner.prefetch_depth,
            max_in_flight=self._prefetcher.max_in_flight if self._prefetcher else 0,
        )

    def close(self) -> None:
        """Ends the threads. May be called twice, in the middle of an epoch, after an error, from another thread."""
        self._closed = True
        self._stop_pool()
        if self._fetcher is not None:
            self._fetcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        if not self._samples.train and self._position:
            self._seek(0)
        return self

    def __next__(self) -> Batch:
        """The next batch, on the device.

        On a CPU its tensors are the ring's own memory: they stay as they are until the next call but one.
        Raises DataError when too many pictures cannot be used; StorageError when a bucket cannot be read; RuntimeError
        with the picture's path for a bug.
        """
        if self._failure is not None:
            raise self._failure
        try:
            return self._hand_out()
        except StopIteration:
            raise
        except Exception as error:
            self._failure = error
            raise

    # How it comes about; all of this runs in the caller's thread.

    def _seek(self, position: int) -> None:
        self._stop_pool()
        if self._copied_batch is not None:
            batch_task, _, ready = self._copied_batch
            self._handed_out.append((batch_task.buffer, ready))
        self._copied_batch = None
        self._pending_batches.clear()
        in_use = {id(buffer) for buffer, _ in self._handed_out}
        self._free_buffers = deque(buffer for buffer in self._buffers if id(buffer) not in in_use)
        self._position = self._scheduled_position = position

    def _start_pool(self) -> WorkerPool:
        """The threads, and what is fetched ahead of them, from the place of the stream that comes next."""
        pool = self._pool = WorkerPool(self._samples, self._autotuner.workers, self._device_decoder)
        self._gc_finalizer = weakref.finalize(self, pool.stop)
        self._gc_finalizer.atexit = False  # `worker_pool.py` stops and joins at exit
        if self._samples.is_remote:
            if self._fetcher is None:
                from stoker.storage.fetcher import Fetcher  # obstore is needed for buckets only

                self._fetcher = Fetcher()
                weakref.finalize(self, self._fetcher.close)
            first = self._scheduled_position + self._rank * self._batch_size
            sample_positions = iter_rank_positions(first, self._batch_size, self._batch_size * self._world_size)
            self._prefetcher = Prefetcher(self._samples, self._fetcher, self._prefetch_counters, sample_positions)
        return pool

    def _stop_pool(self) -> None:
        pool, self._pool, self._prefetcher, self._rate_meter = self._pool, None, None, None
        if pool is None:
            return
        if self._gc_finalizer is not None:
            self._gc_finalizer.detach()
        pool.stop()
        pool.join()
        for counters in pool.counters():
            self._counters.add(counters)

    def _hand_out(self) -> Batch:
        if self._closed:
            raise RuntimeError("this loader is closed")
        self._wait_breakdown.start()
        pool = self._pool or self._start_pool()
        self._reclaim_buffers()
        self._schedule(pool)
        if self._copied_batch is None:
            self._wait_breakdown.attribute_elapsed(QUEUE)
            batch_task = self._wait_for_next(pool)
            self._batch_finalizer.finalize(batch_task)
            self._copied_batch = self._copy_to_device(batch_task)
        batch_task, tensors, ready = self._copied_batch
        self._copied_batch = None
        self._handed_out.append((batch_task.buffer, ready))
        self._position = batch_task.global_start + self._batch_size * self._world_size
        if not self._samples.train:
            self._position = min(self._position, len(self._samples))
        # What follows is copied while the device works on this one: if it is decoded and needs no say of ours.
        if (
            not self._device.is_cpu
            and self._pending_batches
            and self._pending_batches[0].num_missing == 0
            and self._batch_finalizer.is_noop(self._pending_batches[0])
        ):
            self._copied_batch = self._copy_to_device(self._pending_batches.popleft())
        self._autotune(pool)
        self._wait_breakdown.attribute_elapsed(QUEUE)
        if self.on_copy_awaited is not None and not ready.done():
            self.on_copy_awaited()
        ready.block_main_stream()
        return as_batch(tensors)

    def _reclaim_buffers(self) -> None:
        """Frees the slots that nobody reads any more; gives up those that the ring is too deep by."""
        if self._device.is_cpu:
            while len(self._handed_out) > 1:
                self._free_buffers.append(self._handed_out.popleft()[0])
        while self._handed_out and not self._device.is_cpu and self._handed_out[0][1].done():
            self._free_buffers.append(self._handed_out.popleft()[0])
        while len(self._buffers) > self._autotuner.prefetch_depth + BUFFERS_IN_USE and self._free_buffers:
            self._buffers.remove(self._free_buffers.popleft())

    def _schedule(self, pool: WorkerPool) -> None:
        """Gives the samples of the next batches to the threads, as far as there are free slots."""
        while self._free_buffers and (self._samples.train or self._scheduled_position < len(self._samples)):
            batch_task = BatchTask(
                self._scheduled_position,
                self._scheduled_position + self._rank * self._batch_size,
                self._free_buffers.popleft(),
                self._batch_size,
            )
            self._scheduled_position += self._batch_size * self._world_size
            self._pending_batches.append(batch_task)
            pool.register_batch(batch_task)
            self._submit(pool, batch_task)
        if self._prefetcher is not None:
            self._prefetcher.top_up()

    def _submit(self, pool: WorkerPool, batch_task: BatchTask) -> None:
        ready_tasks = []
        for k in range(self._batch_size):
            position = batch_task.start + k
            prefetched = None if self._prefetcher is None else self._prefetcher.take(position)
            if prefetched is None:
                ready_tasks.append(SampleTask(position, batch_task, k, None))
                continue
            pending_read, batch_task.transitions[k] = prefetched
            pool.submit_when_fetched(
                SampleTask(position, batch_task, k, pending_read), pending_read
            )  # so a slow object holds up no thread
        pool.submit(*ready_tasks)

    def _wait_for_next(self, pool: WorkerPool) -> BatchTask:
        """The next batch of the stream, once all its samples are there. Raises StopIteration after the last."""
        start_s = time.perf_counter()
        try:
            if not self._pending_batches:
                if not self._samples.train and self._scheduled_position >= len(self._samples):
                    raise StopIteration
                self._handed_out[0][1].synchronize()  # every slot is still being copied from
                self._wait_breakdown.attribute_elapsed(COPY)
                self._reclaim_buffers()
                self._schedule(pool)
                self._wait_breakdown.attribute_elapsed(QUEUE)
            wait_start_s = time.perf_counter()
            with pool.batch_done:
                pool.batch_done.wait_for(lambda: self._pending_batches[0].num_missing == 0 or pool.stopped)
            if pool.stopped:
                raise RuntimeError("the loader was closed while a batch was waited for")
            batch_task = self._pending_batches.popleft()
            other_transitions = [transitions for later in self._pending_batches for transitions in later.transitions]
            self._wait_breakdown.add(
                split_wait(wait_start_s, time.perf_counter(), batch_task.transitions, other_transitions)
            )
            return batch_task
        finally:
            self._wait_s += time.perf_counter() - start_s

    def _copy_to_device(self, batch_task: BatchTask) -> tuple[BatchTask, list[Tensor], ReadyEvent]:
        self._wait_breakdown.attribute_elapsed(QUEUE)
        if batch_task.device_batch is None:
            tensors, ready = self._copy_stream.to_device(batch_task.buffer.tensors)
        else:
            tensors, ready = batch_task.device_batch.hand_over(batch_task, self._copy_stream)
        self._batches_copied += 1
        self._wait_breakdown.attribute_elapsed(COPY)
        return batch_task, tensors, ready

    def _autotune(self, pool: WorkerPool) -> None:
        """Once a second of training: measures, and follows what `Tuner` decides."""
        if self._rate_meter is None:
            self._rate_meter = LoaderRateMeter(self.stats())  # from here on: the start says nothing
            return
        if time.perf_counter() - self._rate_meter.last_poll_s < POLL_INTERVAL_S:
            return
        rates = self._rate_meter.poll(self.stats())
        if self._fetcher is not None:
            self._fetcher.report_demand(
                rates.consumed_per_s, rates.wait_fraction * rates.in_flight_fraction >= INPUT_BOUND_FRACTION
            )
        for message in self._autotuner.update(rates):
            if self._on_tuned is not None:
                self._on_tuned(f"loader: {message}")
        pool.resize(self._autotuner.workers)
        while len(self._buffers) < self._autotuner.prefetch_depth + BUFFERS_IN_USE:
            buffer = self._make_buffer()
            self._buffers.append(buffer)
            self._free_buffers.append(buffer)
