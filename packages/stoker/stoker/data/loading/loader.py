"""`Loader`: the stream of batches. Threads decode into host buffers, copies run in the background, the state is exact.

Stages: fetch, decode (with crop and resize, into a buffer), copy to the device. Local files are read by the worker that
decodes them; images of a bucket are requested earlier (`Prefetcher`) and reach a worker when their bytes have arrived.
Any number of workers takes samples in the order of the stream: threads (`worker_pool.py`), which may be spread over
processes (`processes.py`). The thread that asks for batches does everything else, in that order too: it schedules tasks
when a buffer is free, finalizes their results (`BatchFinalizer`), starts copies, and once a second considers another
number of workers (`stats.py`, also where waiting time went). So nothing that a run sees depends on the number of
workers or on their speed. One sample, and the options: `samples.py`.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stoker.data.batch import Batch
from stoker.data.loading.buffers import HostBatchBuffer, as_batch
from stoker.data.loading.device_decoder import DeviceBatchDecoder
from stoker.data.loading.processes import ProcessPool, WorkerProcesses
from stoker.data.loading.samples import BatchTask, LoaderSpec, SampleResult, SampleStream, compute_max_boxes
from stoker.data.loading.stats import (
    COPY,
    POLL_INTERVAL_S,
    QUEUE,
    Counters,
    Intervals,
    LoaderAutotuner,
    LoaderRateMeter,
    LoaderStats,
    default_num_workers,
    split_wait,
)
from stoker.data.loading.worker_pool import MAX_READ_AHEAD, Prefetcher, WorkerPool, iter_rank_positions
from stoker.data.validation.problems import max_bad_images
from stoker.hardware.device import ReadyEvent
from stoker_watch.errors import CheckpointError, DataError, StorageError, make_error
from stoker_watch.hardware.cgroup import host_cores

if TYPE_CHECKING:
    from stoker.data.images.pixel_cache import PixelCache
    from stoker.data.index import Index
    from stoker_watch.storage.fetcher import Fetcher

__all__ = ["Loader", "LoaderSpec", "LoaderStats", "QuarantinedImage", "compute_max_boxes"]

MIN_PREFETCH_DEPTH, MAX_PREFETCH_DEPTH = 3, 16
"""Batches ahead of training. At least one complete, one nearly complete, one begun by the free workers; more of small
batches, so that each worker has samples to read ahead."""
BUFFERS_IN_USE = 2
"""Further buffers: that of the batch in use, and of the one before it (CPU) or of the next one's copy (device)."""


class QuarantinedImage(NamedTuple):
    """An image that could not be used, and its replacement: the content of a `schemas.Quarantined`."""

    image_index: int
    source: str
    error: str
    sample_position: int
    """Position in the stream from which on the image is not used."""
    replaced_by: int
    """Index of the image used there instead; -1 in an evaluation, which leaves it out."""


class BatchFinalizer:
    """Applies the results of the workers in the order of the stream: failures, quarantine, replacements. Runs in the
    thread that asks for batches, so nothing depends on which worker was first.

    max_bad_fraction: fraction of the images that may be in quarantine; on_quarantine is called for each new one."""

    def __init__(
        self,
        samples: SampleStream,
        max_bad_fraction: float,
        on_quarantine: Callable[[QuarantinedImage], None] | None,
        counters: Counters,
    ) -> None:
        self._index, self._samples, self._max_bad_fraction = samples.index, samples, max_bad_fraction
        self._on_quarantine, self._counters = on_quarantine, counters
        self._errors: dict[int, str] = {}

    def is_noop(self, batch_task: BatchTask) -> bool:
        """Returns whether `finalize` would change nothing. All samples of the batch are loaded."""
        return all(
            isinstance(result, SampleResult)
            and not result.failures
            and (
                self._samples.is_usable(result.image_index, batch_task.start + k)
                if result.image_index >= 0
                else not self._samples.train
            )
            for k, result in enumerate(batch_task.results)
        )

    def finalize(self, batch_task: BatchTask) -> None:
        """Applies the results of a batch whose samples are all loaded.

        Workers run ahead, so one may have used an image that an earlier position has put into quarantine meanwhile (it
        failed once, then not again). That sample is loaded again here. So the stream is the one that a single worker
        would have made. Raises what a worker raised, and DataError when too many images cannot be used.
        """
        samples = self._samples
        for k, result in enumerate(batch_task.results):
            position = batch_task.start + k
            if isinstance(result, BaseException):
                raise result
            assert result is not None
            if result.image_index >= 0 and not samples.is_usable(result.image_index, position):
                samples.reload(batch_task, k, self._counters)
                batch_task.reloaded.append(k)
                result = batch_task.results[k]
                assert isinstance(result, SampleResult)
            for image_index, error in result.failures:
                if samples.is_usable(image_index, position):
                    self._quarantine(image_index, error, position, result.image_index)
            if samples.train and result.image_index < 0:
                raise self._make_data_error(f"None of the {len(samples.quarantined):,} images tried can be used.")
            self.check_limit(samples.quarantined)

    def check_limit(self, quarantined: Collection[int]) -> None:
        """Raises DataError if there are too many of these images."""
        samples = self._samples
        if len(quarantined) > max_bad_images(self._max_bad_fraction, len(samples)):
            raise self._make_data_error(
                f"{len(quarantined):,} of {len(samples):,} images cannot be used; "
                f"up to {100 * self._max_bad_fraction:.3g} % of them may be bad.",
                quarantined,
            )

    def _quarantine(self, image_index: int, error: Exception, position: int, replaced_by: int) -> None:
        message = _one_line_message(error)
        self._samples.quarantined[image_index] = position
        self._errors[image_index] = message
        if self._on_quarantine is not None:
            self._on_quarantine(
                QuarantinedImage(image_index, self._index.display_source(image_index), message, position, replaced_by)
            )

    def _make_data_error(self, message: str, quarantined: Collection[int] = ()) -> DataError:
        bad_indices = list(quarantined or self._samples.quarantined)
        examples = [
            f"{self._index.display_source(k)}: {self._errors.get(k, 'failed in an earlier attempt')}"
            for k in bad_indices[:5]
        ]
        more = [f"and {len(bad_indices) - len(examples):,} more"] if len(bad_indices) > len(examples) else []
        place, cause = self._index.source, "\n          ".join(examples + more)
        return make_error(DataError, "unusable-images", place, cause=cause, message=message, data=place)


def _one_line_message(error: Exception) -> str:
    if isinstance(error, DataError | StorageError):
        return error.what if error.cause is None else f"{error.what} {error.cause}"
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


class Loader:
    """An iterator of device-ready batches: endless in training, one pass in order in evaluation.

    image_indices: int64 [N], images of the index. on_quarantine is called by `__next__`, in the order of the stream,
    for each image that is excluded. on_tuned is called with a sentence for each change of the number of workers.
    cache: samples are made from what it keeps; a run has one from its beginning to its end, or none.
    processes: load the samples, instead of threads of this process; not where `choose_worker_processes` forbids it.

    In evaluation an image that fails becomes a filler (image_index -1). `iter` starts a pass from its beginning.
    """

    def __init__(
        self,
        index: "Index",
        image_indices: NDArray[np.int64],
        spec: LoaderSpec,
        *,
        cache: "PixelCache | None" = None,
        processes: WorkerProcesses | None = None,
        on_quarantine: Callable[[QuarantinedImage], None] | None = None,
        on_tuned: Callable[[str], None] | None = None,
    ) -> None:
        if not len(image_indices):
            raise DataError("There is no image to load.", location=index.source)
        self._samples, self._cache = SampleStream(index, image_indices, spec, cache), cache
        self._spec, self._device = spec, spec.device
        self._batch_size, self._world_size = spec.batch_size, spec.world_size
        self._copy_stream = spec.device.make_stream()
        self._device_decoder = (
            DeviceBatchDecoder(self._samples, spec.device, on_tuned) if spec.jpeg_decoder == "nvjpeg" else None
        )
        cores, is_cpu = host_cores(), spec.device.is_cpu
        workers = max(default_num_workers(cores, is_cpu=is_cpu), spec.initial_workers)
        if spec.workers != "auto":
            workers = spec.workers
        if processes is not None:
            workers = max(workers, processes.count)
        depth = spec.prefetch_depth
        self._prefetch_depth = choose_prefetch_depth(spec.batch_size, workers) if depth is None else depth
        num_buffers = self._prefetch_depth + BUFFERS_IN_USE
        self._process_pool: ProcessPool | None = None
        if processes is None:
            self._buffers = [
                HostBatchBuffer(spec.device, spec.batch_size, spec.image_size, spec.max_boxes)
                for _ in range(num_buffers)
            ]
        else:
            if spec.jpeg_decoder != "cpu" or self._samples.is_remote:
                raise ValueError("worker processes load no images of a bucket and leave none to the device")
            self._process_pool = ProcessPool(processes, self._samples, spec, cache, num_buffers)
            self._buffers = list(self._process_pool.buffers)
            if processes.pin_failure is not None and on_tuned is not None:
                on_tuned(f"loader: batches are not in pinned memory: {processes.pin_failure}")
        self._autotuner = LoaderAutotuner(cores=cores, is_cpu=is_cpu, workers=workers, is_tuned=spec.workers == "auto")
        self._on_tuned = on_tuned
        self.on_copy_awaited: Callable[[], None] | None = None
        """Called in `__next__` where the training stream has to wait for the copy of the batch, before it waits."""
        self._rate_meter: LoaderRateMeter | None = None
        self._counters = Counters()
        self.last_wait: Intervals = []
        """What the newest `__next__` spent its time on: (end in seconds of `time.perf_counter`, stage), ascending; the
        first interval begins with the call. Nearly all of it is waiting where the loader is slower than training."""
        self._wait_s = 0.0
        self._batch_finalizer = BatchFinalizer(self._samples, spec.max_bad_fraction, on_quarantine, self._counters)
        self._pool: WorkerPool | ProcessPool | None = None
        self._prefetcher: Prefetcher | None = None
        self._fetcher: Fetcher | None = None
        self._gc_finalizer: weakref.finalize[..., Loader] | None = None
        self._elsewhere: dict[int, int] = {}
        """Images that other ranks could not use → position."""
        self._failure: Exception | None = None
        self._closed = False
        self._pending_batches: deque[BatchTask] = deque()
        self._copied_batch: tuple[BatchTask, list[Tensor], ReadyEvent] | None = None
        self._handed_out: deque[tuple[HostBatchBuffer, ReadyEvent]] = deque()
        self._seek(0)

    # The interface.

    @property
    def position(self) -> int:
        """Samples handed out so far by all ranks together: the position in the stream where the next batch begins."""
        return self._position

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the last batch handed out. Batches decoded ahead are not part of it."""
        return {
            "position": self._position,
            "quarantined": self._quarantined(),
            "count": len(self._samples),
            "seed": self._samples.seed,
            "shards": self._samples.shard_mixing,
            "repeat_thresh": self._spec.repeat_thresh,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state: the same batches follow, bit for bit, whatever the number of workers.

        `quarantined` may contain positions that are still to come (from quarantine.jsonl of a run that got further
        before it was killed): the image is used up to there. Raises CheckpointError for the state of another stream.
        """
        samples = self._samples
        for what, saved, expected in (
            ("number of training images", state.get("count", len(samples)), len(samples)),
            ("seed", state.get("seed", samples.seed), samples.seed),
            ("[--shuffle-buffer, --batch-size] of shards", state.get("shards"), samples.shard_mixing),
            ("--repeat-thresh", state.get("repeat_thresh", 0.0), self._spec.repeat_thresh),
        ):
            if saved != expected:
                raise make_error(CheckpointError, "other-loader-state", what=what, expected=expected, saved=saved)
        self._seek(int(state["position"]))
        self._samples.quarantined.clear()
        self._samples.quarantined.update(
            {int(image_index): int(position) for image_index, position in state["quarantined"].items()}
        )

    def quarantine_elsewhere(self, bad_image: QuarantinedImage) -> None:
        """Notes an image that another rank could not use. It counts, and is part of the state; this rank's own stream
        meets it by itself, at positions that do not depend on when this is called. Raises DataError above the limit."""
        known = self._elsewhere.get(bad_image.image_index, bad_image.sample_position)
        self._elsewhere[bad_image.image_index] = min(known, bad_image.sample_position)
        self._batch_finalizer.check_limit(self._quarantined())

    def _quarantined(self) -> dict[int, int]:
        """Returns image index → position, of all ranks as far as this one knows."""
        own, elsewhere = self._samples.quarantined, self._elsewhere
        return {k: min(known[k] for known in (own, elsewhere) if k in known) for k in elsewhere | own}

    def image_indices_at(self, position: int, count: int) -> list[int]:
        """Returns the images at `count` positions from `position` on, including replacements; -1 for none."""
        return [self._samples.image_index_at(p) for p in range(position, position + count)]

    def stats(self) -> LoaderStats:
        if self._pool is not None and self._failure is None:
            self._pool.collect()
        pending_batches = list(self._pending_batches)  # the thread that asks for batches may be adding to it
        num_missing = sum(min(batch_task.num_missing, self._batch_size) for batch_task in pending_batches)
        total = self._pool.total() if self._pool else Counters()
        total.add(self._counters)
        return LoaderStats(
            total=total,
            loading=num_missing,
            ready=self._batch_size * (len(pending_batches) + (self._copied_batch is not None)) - num_missing,
            workers=self._autotuner.workers,
            prefetch_depth=self._prefetch_depth,
            wait_s=self._wait_s,
            requested=self._prefetcher.num_requested if self._prefetcher else 0,
            fetched=self._prefetcher.num_fetched if self._prefetcher else 0,
            processes_cpu_s=self._process_pool.ring.cpu_s if self._process_pool else 0.0,
        )

    def release_batches(self) -> str | None:
        """Keeps only one batch ahead from now on. Returns a description; None if nothing changes."""
        before = self._prefetch_depth
        if before <= 1 or self._spec.prefetch_depth is not None or self._process_pool is not None:
            return None  # the user chose it, or the memory has a fixed size
        self._prefetch_depth = 1
        return f"loader: {before} → 1 batches ahead"

    def release_cache(self) -> str | None:
        """Frees a cache in memory, which is not filled again. Returns a description; None if there is none."""
        freed_bytes = 0 if self._cache is None else self._cache.release_memory()
        return f"{freed_bytes / 2**20:,.0f} MiB of decoded images dropped from the cache" if freed_bytes else None

    def close(self) -> None:
        """Ends the threads, or the work of the processes. May be called twice, at any time, from another thread."""
        self._closed = True
        self._stop_pool()
        if self._process_pool is not None:
            self._process_pool.close()
        if self._fetcher is not None:
            self._fetcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        if not self._samples.train and self._position:
            self._seek(0)
        return self

    def __next__(self) -> Batch:
        """The next batch, on the device. On a CPU its tensors are valid until the next call but one.

        Raises DataError when too many images cannot be used; StorageError when a bucket cannot be read; RuntimeError
        with the image's path for a bug.
        """
        if self._failure is not None:
            raise self._failure
        try:
            return self._hand_out()
        except Exception as error:
            self._failure = None if isinstance(error, StopIteration) else error
            raise

    # The implementation; all of it runs in the caller's thread.

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

    def _start_pool(self) -> WorkerPool | ProcessPool:
        """Starts the workers, and prefetching for a bucket, from the next position of the stream on."""
        if self._process_pool is not None:
            self._process_pool.start(self._autotuner.workers)
            self._pool = self._process_pool
            return self._pool
        if self._samples.is_remote:
            if self._fetcher is None:
                from stoker_watch.storage.fetcher import Fetcher  # obstore is needed for buckets only

                self._fetcher = Fetcher()
                weakref.finalize(self, self._fetcher.close)
            first = self._scheduled_position + self._spec.rank * self._batch_size
            sample_positions = iter_rank_positions(first, self._batch_size, self._batch_size * self._world_size)
            self._prefetcher = Prefetcher(self._samples, self._fetcher, sample_positions)
        pool = self._pool = WorkerPool(
            self._samples,
            self._autotuner.workers,
            None if self._device_decoder is None else self._device_decoder.decode,
            prefetcher=self._prefetcher,
        )
        self._gc_finalizer = weakref.finalize(self, pool.stop)
        self._gc_finalizer.atexit = False  # `worker_pool.py` stops and joins at exit
        return pool

    def _stop_pool(self) -> None:
        pool, self._pool, self._prefetcher, self._rate_meter = self._pool, None, None, None
        if pool is not None:
            if self._gc_finalizer is not None:
                self._gc_finalizer.detach()
            pool.stop()
            pool.join()
            self._counters.add(pool.total())

    def _hand_out(self) -> Batch:
        if self._closed:
            raise RuntimeError("this loader is closed")
        self.last_wait = []
        pool = self._pool or self._start_pool()
        pool.collect()
        self._reclaim_buffers()
        self._schedule(pool)
        if self._copied_batch is None:
            self._end_interval(QUEUE)
            batch_task = self._wait_for_next(pool)
            self._batch_finalizer.finalize(batch_task)
            self._copied_batch = self._copy_to_device(batch_task)
        batch_task, tensors, ready = self._copied_batch
        self._copied_batch = None
        self._handed_out.append((batch_task.buffer, ready))
        self._position = batch_task.global_start + self._batch_size * self._world_size
        if not self._samples.train:
            self._position = min(self._position, len(self._samples))
        # The next batch is copied while the device works on this one, if it is complete and needs no decision.
        if (
            not self._device.is_cpu
            and self._pending_batches
            and self._pending_batches[0].num_missing == 0
            and self._batch_finalizer.is_noop(self._pending_batches[0])
        ):
            self._copied_batch = self._copy_to_device(self._pending_batches.popleft())
        self._autotune(pool)
        self._end_interval(QUEUE)
        if self.on_copy_awaited is not None and not ready.done():
            self.on_copy_awaited()
        ready.block_main_stream()
        return as_batch(tensors)

    def _end_interval(self, stage: str) -> None:
        """Notes that what was done since the last interval was `stage`."""
        self.last_wait.append((time.perf_counter(), stage))

    def _reclaim_buffers(self) -> None:
        """Frees the buffers that are no longer read, and drops those beyond the prefetch depth."""
        if self._device.is_cpu:
            while len(self._handed_out) > 1:
                self._free_buffers.append(self._handed_out.popleft()[0])
        while self._handed_out and not self._device.is_cpu and self._handed_out[0][1].done():
            self._free_buffers.append(self._handed_out.popleft()[0])
        while len(self._buffers) > self._prefetch_depth + BUFFERS_IN_USE and self._free_buffers:
            self._buffers.remove(self._free_buffers.popleft())

    def _schedule(self, pool: WorkerPool | ProcessPool) -> None:
        """Gives the samples of the next batches to the workers, while there are free buffers."""
        while self._free_buffers and (self._samples.train or self._scheduled_position < len(self._samples)):
            batch_task = BatchTask(
                self._scheduled_position,
                self._scheduled_position + self._spec.rank * self._batch_size,
                self._free_buffers.popleft(),
                self._batch_size,
            )
            self._scheduled_position += self._batch_size * self._world_size
            self._pending_batches.append(batch_task)
            pool.submit_batch(batch_task)
        if self._prefetcher is not None:
            self._prefetcher.top_up()

    def _wait_for_next(self, pool: WorkerPool | ProcessPool) -> BatchTask:
        """The next batch of the stream, once all its samples are loaded. Raises StopIteration after the last."""
        start_s = time.perf_counter()
        try:
            while not self._pending_batches:  # every buffer is still being copied from, and some are to be dropped
                if not self._samples.train and self._scheduled_position >= len(self._samples):
                    raise StopIteration
                self._handed_out[0][1].synchronize()
                self._end_interval(COPY)
                self._reclaim_buffers()
                self._schedule(pool)
                self._end_interval(QUEUE)
            if (batch_task := self._pending_batches[0]).num_missing:
                wait_start_s, before = time.perf_counter(), pool.total()
                pool.wait(batch_task)
                wait_end_s, after = time.perf_counter(), pool.total()
                workers, is_remote = self._autotuner.workers, self._prefetcher is not None
                intervals = split_wait(wait_start_s, wait_end_s, before, after, workers=workers, is_remote=is_remote)
                self.last_wait += intervals
            if pool.stopped:
                raise RuntimeError("the loader was closed while a batch was waited for")
            return self._pending_batches.popleft()
        finally:
            self._wait_s += time.perf_counter() - start_s

    def _copy_to_device(self, batch_task: BatchTask) -> tuple[BatchTask, list[Tensor], ReadyEvent]:
        self._end_interval(QUEUE)
        tensors, ready = batch_task.to_device(self._copy_stream)
        self._end_interval(COPY)
        return batch_task, tensors, ready

    def _autotune(self, pool: WorkerPool | ProcessPool) -> None:
        """Measures once a second of training, and applies what the autotuner decides."""
        if self._rate_meter is None:
            self._rate_meter = LoaderRateMeter(self.stats())  # the first batches are not representative
            return
        if time.perf_counter() - self._rate_meter.last_poll_s < POLL_INTERVAL_S:
            return
        message = self._autotuner.update(self._rate_meter.poll(self.stats()))
        if message is not None and self._on_tuned is not None:
            self._on_tuned(f"loader: {message}")
        pool.resize(self._autotuner.workers)


def choose_prefetch_depth(batch_size: int, workers: int) -> int:
    """Returns how many batches ahead of training let `workers` read ahead."""
    return min(MAX_PREFETCH_DEPTH, max(MIN_PREFETCH_DEPTH, -(-(1 + MAX_READ_AHEAD) * workers // batch_size)))
