"""The worker threads of a loader, the queue they work from, and the requests for images of a bucket ahead of them.

The threads end with the loader and never block exit. They take the earliest sample of the stream first, so that one
whose bytes arrive late does not wait behind samples that are needed later. Where the queue is long they read several
before they decode them (`SampleStream.load`). Their number can change while they work. `samples.py` fills one place of
a batch, `loader.py` schedules batches and hands them out.

Images of a bucket are requested before there is a batch buffer for them (`Prefetcher`): their bytes are few, their
latency is long. Images of shards that the order keeps near each other are requested together, as one range of the
object (`SampleStream.read_together`). Which image belongs to a position is predicted from the present quarantine; where
that turns out wrong, the right image is requested instead. So prefetching changes when bytes arrive, never what a run
sees. Retries and slow responses: `stoker_watch/storage/fetcher.py`.
"""

import atexit
import heapq
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, NamedTuple

from stoker.data.loading.samples import BatchTask, PendingRead, SampleStream
from stoker.data.loading.shard_order import MAX_BLOCK_BYTES, MAX_GAP_BYTES
from stoker.data.loading.stats import Counters, sum_counters
from stoker_watch.hardware.cgroup import host_memory

if TYPE_CHECKING:
    from stoker_watch.storage.fetcher import Fetcher
    from stoker_watch.storage.store import Store

JOIN_TIMEOUT_S = 10.0
"""How long `close`, or exit, waits for threads whose file system does not respond."""
MAX_READ_AHEAD = 4
"""Samples that a worker reads before it decodes them. With 1, the GIL was held for 0.69 ms per sample of the default
recipe instead of 0.50 (LOG.md, "The GIL of the loader")."""
MEMORY_FRACTION = 1 / 16
"""Fraction of the free host memory for bytes that arrive before a batch buffer is free."""
DEFAULT_IMAGE_BYTES = 2**18
"""Assumed size of an image until one has arrived."""


def iter_rank_positions(first: int, batch_size: int, stride: int) -> Iterator[int]:
    """Yields the positions of a rank's batches, which start at first, first + stride, …; endless."""
    return (base + k for base in itertools.count(first, stride) for k in range(batch_size))


class _ImageRead(NamedTuple):
    store: "Store"
    key: str
    start: int
    length: int | None
    """None: the whole object."""
    future: "Future[bytes] | Future[memoryview]"

    @property
    def end(self) -> int:
        return self.start + (self.length or 0)


class Prefetcher:
    """The requests of a loader from one position on. It holds no loader, because its callbacks may outlive one."""

    def __init__(self, samples: SampleStream, fetcher: "Fetcher", positions: Iterator[int]) -> None:
        """positions: those that this rank loads, in order, endless."""
        self._samples, self._fetcher, self._positions = samples, fetcher, positions
        self.num_fetched = 0
        """Samples whose request has ended."""
        self._fetched_bytes = 0
        self._next_position = next(positions)
        self._requests: dict[int, PendingRead | None] = {}
        """Position → its request; None where there is nothing to request."""
        self._in_flight: set[Future[bytes]] = set()
        """Requests for images of shards."""
        limit, used = host_memory()
        self._memory_budget_bytes = MEMORY_FRACTION * max(0, limit - used)

    def take(self, position: int) -> PendingRead | None:
        """Returns the request for a position's image; None where its bytes are local."""
        while self._next_position <= position:
            self._request_next()
        request = self._requests.pop(position, None)
        if request is not None and request.image_index != self._samples.image_index_at(position):
            self._request([position])
            request = self._requests.pop(position)
        return request

    @property
    def max_in_flight(self) -> int:
        """For how many samples beyond the batch buffers bytes should be requested."""
        mean_bytes = self._fetched_bytes / self.num_fetched if self._fetched_bytes else DEFAULT_IMAGE_BYTES
        affordable = int(self._memory_budget_bytes / mean_bytes)
        if not self._samples.reads_ranges:
            return min(self._fetcher.target_in_flight, affordable)
        if self._samples.train:
            return self._samples.buffer_images  # what the order needs, derived from the memory at the start of the run
        return affordable

    @property
    def num_requested(self) -> int:
        """Samples whose bytes were requested, or are there, and which no batch buffer has yet."""
        requests = list(self._requests.values())  # the thread that asks for batches may be adding to them
        return sum(request is not None for request in requests)

    def top_up(self) -> None:
        """Requests images until `max_in_flight` are under way."""
        limit, target = self.max_in_flight, self._fetcher.target_in_flight
        while (
            len(self._requests) < limit
            and len(self._in_flight) < target
            and (self._samples.train or self._next_position < len(self._samples))
        ):
            self._request_next()

    def _request_next(self) -> None:
        position = self._next_position
        if position not in self._requests:  # else it was requested with an earlier one
            self._request(self._samples.read_together(position))
        self._next_position = next(self._positions)

    def _request(self, positions: list[int]) -> None:
        """Requests the images of positions: in as few ranges as are near each other, if they are ranges of objects."""
        reads: list[_ImageRead] = []
        for position in positions:
            self._requests[position] = None
            image_index = self._samples.image_index_at(position)
            if image_index < 0 or self._samples.is_cached(image_index):
                continue
            location = self._samples.index.remote_object(image_index)
            if location is not None:
                read = _ImageRead(*location, Future())
                self._requests[position] = PendingRead(image_index, read.future)
                reads.append(read)
        for nearby in _merge_ranges(reads):
            self._request_range(nearby)

    def _request_range(self, reads: list[_ImageRead]) -> None:
        """Makes one request for all of `reads`, which are sorted and of one object."""
        first, is_range = reads[0].start, reads[0].length is not None

        def on_done(future: "Future[bytes]") -> None:
            self.num_fetched += len(reads)
            self._in_flight.discard(future)
            error = CancelledError() if future.cancelled() else future.exception()
            data = b"" if error is not None else future.result()
            for read in reads:
                if error is not None:
                    read.future.set_exception(error)
                    continue
                # Parts are copied when they are used: long-lived copies of many sizes would fragment the memory.
                part: Any = memoryview(data)[read.start - first : read.end - first] if is_range else data
                self._fetched_bytes += len(part)
                read.future.set_result(part)

        length = max(read.end for read in reads) - first if is_range else None
        future = self._fetcher.submit(reads[0].store, reads[0].key, start=first, length=length)
        if is_range:
            self._in_flight.add(future)
        future.add_done_callback(on_done)


def _merge_ranges(reads: list[_ImageRead]) -> Iterator[list[_ImageRead]]:
    """Yields groups of ranges of the same object that are best read at once."""
    group: list[_ImageRead] = []
    for read in sorted(reads, key=lambda read: (read.key, read.start)):
        if group and (
            read.length is None
            or read.key != group[0].key
            or read.start - group[-1].end > MAX_GAP_BYTES
            or read.end - group[0].start > 2 * MAX_BLOCK_BYTES
        ):
            yield group
            group = []
        group.append(read)
    if group:
        yield group


class SampleTask(NamedTuple):
    """A sample to load. Ordered by its position, which no other task of the queue has."""

    position: int
    batch_task: BatchTask
    k: int
    pending_read: PendingRead | None


class WorkerPool:
    """The worker threads and their queue. Holds no loader, so that an abandoned loader can be garbage-collected."""

    def __init__(
        self,
        samples: SampleStream,
        workers: int,
        decode_on_device: Callable[[BatchTask, Counters], None] | None = None,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        """decode_on_device: decodes what the workers leave to the device, on one more thread. prefetcher: of images in
        a bucket."""
        self.batch_done = threading.Condition()
        self.stopped = False
        self._samples, self._prefetcher = samples, prefetcher
        self._results_lock = threading.Lock()
        self._tasks: list[SampleTask] = []
        self._tasks_lock = threading.Lock()
        self._tasks_changed = threading.Condition(self._tasks_lock)
        self._target_workers = 0
        self._threads: dict[threading.Thread, Counters] = {}
        self._exited_counters = Counters()
        self._device_queue: deque[BatchTask] = deque()
        self._device_thread: threading.Thread | None = None
        self._device_counters = Counters()
        self.resize(workers)
        if decode_on_device is not None:
            self._device_thread = threading.Thread(
                target=self._run_device_decoder, args=(decode_on_device,), name="stoker-loader-device", daemon=True
            )
            self._device_thread.start()
        _POOLS.add(self)

    def total(self) -> Counters:
        """Returns the sum over all workers, also over those that have exited."""
        with self._tasks_changed:
            per_worker = [self._exited_counters, self._device_counters, *self._threads.values()]
        return sum_counters(per_worker)

    def collect(self) -> None:
        """Does nothing: the workers write their results into the tasks themselves."""

    def wait(self, batch_task: BatchTask) -> None:
        """Returns when a batch is loaded or the pool was stopped."""
        with self.batch_done:
            self.batch_done.wait_for(lambda: batch_task.num_missing == 0 or self.stopped)

    def resize(self, workers: int) -> None:
        """Starts workers at once; lets workers exit when they have finished their sample."""
        with self._tasks_changed:
            if self.stopped:
                return
            self._target_workers = workers
            for _ in range(workers - len(self._threads)):
                counters = Counters()
                thread = threading.Thread(target=self._run_worker, args=(counters,), name="stoker-loader", daemon=True)
                thread.start()
                self._threads[thread] = counters
            self._tasks_changed.notify_all()

    def submit_batch(self, batch_task: BatchTask) -> None:
        """Plans the samples of a batch and queues them, in the order of the stream."""
        start, count = batch_task.start, len(batch_task.plans)
        batch_task.plans = self._samples.plan(start, count)
        if self._device_thread is not None:
            batch_task.encoded = {}
            batch_task.num_missing += 1
            self._device_queue.append(batch_task)
        ready_tasks = []
        for k in range(count):
            task = SampleTask(start + k, batch_task, k, None)
            pending_read = None if self._prefetcher is None else self._prefetcher.take(start + k)
            if pending_read is None:
                ready_tasks.append(task)
            else:
                # Submitted when its bytes have arrived, so that a slow object blocks no worker.
                self._submit_when_done(task, pending_read)
        self.submit(*ready_tasks)

    def submit(self, *tasks: SampleTask) -> None:
        with self._tasks_changed:
            for task in tasks:
                heapq.heappush(self._tasks, task)
            self._tasks_changed.notify(len(tasks))

    def _submit_when_done(self, task: SampleTask, pending_read: PendingRead) -> None:
        """task: without its pending_read. The callback of a future must not lead to that future: the bytes would stay
        in memory until the garbage collector finds the cycle."""
        image_index = pending_read.image_index

        def submit(future: "Future[bytes] | Future[memoryview]") -> None:
            self.submit(task._replace(pending_read=PendingRead(image_index, future)))

        pending_read.future.add_done_callback(submit)

    def _next_task(self) -> SampleTask | None:
        """The next task; None: exit. Both are decided under one lock, so that no more workers exit than should."""
        with self._tasks_changed:
            while not self._tasks and not self.stopped and len(self._threads) <= self._target_workers:
                self._tasks_changed.wait()
            if self.stopped:
                return None
            if len(self._threads) > self._target_workers:
                self._exited_counters.add(self._threads.pop(threading.current_thread()))
                self._tasks_changed.notify()  # a task that woke this worker needs another one
                return None
            return heapq.heappop(self._tasks)

    def _spare_task(self) -> SampleTask | None:
        """Returns one more task for a worker that has some, where the queue is long enough for the other workers."""
        with self._tasks_lock:  # not the condition, whose `with` is Python code
            if self.stopped or len(self._tasks) < len(self._threads):
                return None
            return heapq.heappop(self._tasks)

    def _run_worker(self, counters: Counters) -> None:
        while (task := self._next_task()) is not None:
            started: list[tuple[SampleTask, Iterator[None]]] = []
            while task is not None:
                _, batch_task, k, pending_read = task
                steps = self._samples.load(batch_task, k, counters, pending_read)
                if not self._advance(task, steps):
                    started.append((task, steps))
                task = self._spare_task() if len(started) < MAX_READ_AHEAD else None
            for task, steps in started:
                while not self._advance(task, steps):
                    pass

    def _advance(self, task: SampleTask, steps: Iterator[None]) -> bool:
        """Takes a step of a sample. Returns whether it was the last."""
        batch_task = task.batch_task
        try:
            next(steps)
            return False
        except StopIteration:
            pass
        except BaseException as error:  # noqa: BLE001  (`BatchFinalizer` raises it in the caller's thread)
            batch_task.results[task.k] = error
        with self._results_lock:
            batch_task.num_loading -= 1
            if batch_task.num_loading:
                batch_task.num_missing -= 1
                return True
        self._finish_batch(batch_task)  # this was its last sample
        return True

    def _finish_batch(self, batch_task: BatchTask) -> None:
        try:
            self._samples.annotate(batch_task, range(len(batch_task.results)))
        except BaseException as error:  # noqa: BLE001  (as above)
            batch_task.results[0] = error
        with self.batch_done:
            batch_task.num_missing -= 1
            self.batch_done.notify_all()
        if batch_task.on_loaded is not None:
            batch_task.on_loaded()

    def _run_device_decoder(self, decode_on_device: Callable[[BatchTask, Counters], None]) -> None:
        """Decodes one batch after the other on the device, in a thread, once its samples are loaded."""
        while True:
            with self.batch_done:
                self.batch_done.wait_for(
                    lambda: self.stopped or (self._device_queue and self._device_queue[0].num_missing == 1)
                )
                if self.stopped:
                    return
                batch_task = self._device_queue.popleft()
            try:
                decode_on_device(batch_task, self._device_counters)
            except BaseException as error:  # noqa: BLE001  (raised in the caller's thread, as above)
                batch_task.results[0] = error
            with self.batch_done:
                batch_task.num_missing = 0
                self.batch_done.notify_all()

    def stop(self) -> None:
        """Asks the threads to exit after their current sample. Does not wait."""
        self.stopped = True
        with self._tasks_changed:
            self._tasks_changed.notify_all()
        with self.batch_done:
            self.batch_done.notify_all()

    def join(self) -> None:
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        for thread in [*self._threads, *([] if self._device_thread is None else [self._device_thread])]:
            thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def is_idle(self) -> bool:
        """Whether all threads have ended. After `join`."""
        return not any(thread.is_alive() for thread in self._threads)


_POOLS: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


@atexit.register
def _stop_pools() -> None:
    """Ends the threads first: one that returns from OpenCV while the interpreter shuts down would abort the process."""
    pools = list(_POOLS)
    for pool in pools:
        pool.stop()
    for pool in pools:
        pool.join()
