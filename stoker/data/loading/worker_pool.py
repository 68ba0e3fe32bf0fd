"""The worker threads of a loader and the queue they work from. They end with the loader and never block exit.

Workers take the earliest sample of the stream first, so that a sample whose bytes arrive late does not wait behind
samples that are needed later. Where the queue is long they read several before they decode them, which holds the GIL
for a shorter time (`SampleStream.load`). Their number can change while they work. `samples.py` fills one place of a
batch, `loader.py` schedules batches and hands them out.
"""

import atexit
import heapq
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import NamedTuple

from stoker.data.loading.prefetch import Prefetcher
from stoker.data.loading.samples import BatchTask, PendingRead, SampleStream
from stoker.data.loading.stats import Counters, sum_counters

JOIN_TIMEOUT_S = 10.0
"""How long `close`, or exit, waits for threads whose file system does not respond."""
MAX_READ_AHEAD = 4
"""Samples that a worker reads before it decodes them. With 1, the GIL was held for 0.69 ms per sample of the default
recipe instead of 0.50 (LOG.md, "The GIL of the loader")."""


class SampleTask(NamedTuple):
    """A sample to load. Ordered by its position, which no other task of the queue has."""

    position: int
    batch_task: BatchTask
    k: int
    """Its place in the batch."""
    pending_read: PendingRead | None


class WorkerPool:
    """The worker threads and their queue. Holds no loader, so that an abandoned loader can be garbage-collected."""

    def __init__(
        self,
        samples: SampleStream,
        workers: int,
        decode_on_device: Callable[[BatchTask, Counters], None] | None = None,
        on_batch_loaded: Callable[[BatchTask], None] | None = None,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        """decode_on_device: decodes what the workers leave to the device, on one more thread. on_batch_loaded: called
        by the worker that has loaded the last sample of a batch. prefetcher: of images in a bucket."""
        self.batch_done = threading.Condition()
        self.stopped = False
        self._samples, self._on_batch_loaded, self._prefetcher = samples, on_batch_loaded, prefetcher
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
        """The sum over all workers, also over those that have exited."""
        with self._tasks_changed:
            per_worker = [self._exited_counters, self._device_counters, *self._threads.values()]
        return sum_counters(per_worker)

    def collect(self) -> None:
        """Nothing: the workers write their results into the tasks themselves."""

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
                self._threads[thread] = counters
                thread.start()
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
        """One more task for a worker that has some, where the queue is long enough for the other workers."""
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
        """Takes a step of a sample. Whether it was the last."""
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
        if self._on_batch_loaded is not None:
            self._on_batch_loaded(batch_task)

    def _run_device_decoder(self, decode_on_device: Callable[[BatchTask, Counters], None]) -> None:
        """The thread of the device decoder: one batch after the other, once its samples are loaded."""
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
    """A thread that returns from OpenCV while the interpreter shuts down would abort the process."""
    pools = list(_POOLS)
    for pool in pools:
        pool.stop()
    for pool in pools:
        pool.join()
