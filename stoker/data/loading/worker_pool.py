"""The threads of a loader and the queue they work from: they end with it, and never hold up the interpreter's end.

They take the earliest sample of the stream first, so that one whose bytes come late waits behind none that is needed
later. Their number can change while they work. They know nothing of batches but their places: `samples.py` fills one,
`loader.py` hands them out and takes them in.
"""

import atexit
import heapq
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from stoker.data.loading.counters import Counters
from stoker.data.loading.samples import HostBatchBuffer, PendingRead, SampleResult, SampleStream
from stoker.data.loading.wait_breakdown import DONE, Transitions

if TYPE_CHECKING:
    from stoker.data.loading.device_batches import DeviceBatch, DeviceBatchDecoder

JOIN_TIMEOUT_S = 10.0
"""How long `close`, or the end of the interpreter, waits for threads whose file system does not answer."""


class BatchTask:
    """A batch on its way: where in the stream it begins, its slot, and what came of each of its samples."""

    def __init__(self, global_start: int, start: int, buffer: HostBatchBuffer, batch_size: int) -> None:
        self.global_start, self.start, self.buffer = global_start, start, buffer
        self.results: list[SampleResult | BaseException | None] = [None] * batch_size
        self.transitions: list[Transitions] = [[] for _ in range(batch_size)]
        self.num_missing = batch_size
        """Samples that are still to come, and the whole where the device decodes it."""
        self.reloaded: list[int] = []
        """Places that were loaded anew, after the device had its turn."""
        self.device_batch: DeviceBatch | None = None
        """The pictures, where the device decodes."""


class SampleTask(NamedTuple):
    """A sample to load. Ordered by its position, which no other task of the queue has."""

    position: int
    batch_task: BatchTask
    k: int
    pending_read: PendingRead | None


class WorkerPool:
    """The threads, and the queue they work from. Holds no loader, so that a forgotten loader can be collected."""

    def __init__(self, samples: SampleStream, workers: int, device_decoder: "DeviceBatchDecoder | None" = None) -> None:
        """device_batches: has the device decode what the threads leave to it, on one more thread."""
        self.batch_done = threading.Condition()
        self.stopped = False
        self._samples = samples if device_decoder is None else samples.with_deferred_decode()
        self._tasks: list[SampleTask] = []
        self._tasks_changed = threading.Condition()
        self._target_workers = 0
        self._threads: dict[threading.Thread, Counters] = {}
        self._exited_counters = Counters()
        self._device_queue: deque[BatchTask] = deque()
        self._device_thread: threading.Thread | None = None
        self._device_counters = Counters()
        self.resize(workers)
        if device_decoder is not None:
            self._device_thread = threading.Thread(
                target=self._run_device_decoder, args=(device_decoder,), name="stoker-loader-device", daemon=True
            )
            self._device_thread.start()
        _POOLS.add(self)

    @property
    def num_queued(self) -> int:
        """Samples that wait for a thread."""
        return len(self._tasks)

    def counters(self) -> list[Counters]:
        """Of each thread, and the sum of those that have left."""
        with self._tasks_changed:
            return [self._exited_counters, self._device_counters, *self._threads.values()]

    def resize(self, workers: int) -> None:
        """More threads at once; fewer as soon as some have ended the sample they are at."""
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

    def register_batch(self, batch_task: BatchTask) -> None:
        """The batches in their order, each before its samples: those that one more thread has to finish."""
        if self._device_thread is not None:
            batch_task.num_missing += 1
            self._device_queue.append(batch_task)

    def submit(self, *tasks: SampleTask) -> None:
        with self._tasks_changed:
            for task in tasks:
                heapq.heappush(self._tasks, task)
            self._tasks_changed.notify(len(tasks))

    def submit_when_fetched(self, task: SampleTask, pending_read: PendingRead) -> None:
        pending_read.future.add_done_callback(lambda _: self.submit(task))

    def _next_task(self, counters: Counters) -> SampleTask | None:
        """The next task; None: leave, which is settled under the same lock, so that just as many leave as have to."""
        start_s = time.perf_counter()
        with self._tasks_changed:
            while not self._tasks and not self.stopped and len(self._threads) <= self._target_workers:
                self._tasks_changed.wait()
            counters.idle_s += time.perf_counter() - start_s
            if self.stopped:
                return None
            if len(self._threads) > self._target_workers:
                self._exited_counters.add(self._threads.pop(threading.current_thread()))
                self._tasks_changed.notify()  # a task that woke this one needs another
                return None
            return heapq.heappop(self._tasks)

    def _run_worker(self, counters: Counters) -> None:
        while (task := self._next_task(counters)) is not None:
            _, batch_task, k, pending_read = task
            result: SampleResult | BaseException
            try:
                result = self._samples.load(
                    batch_task.buffer, k, task.position, counters, batch_task.transitions[k], pending_read
                )
            except BaseException as error:  # noqa: BLE001  (it travels: `Loader` raises it when it comes to the sample)
                result = error
            batch_task.transitions[k].append((time.perf_counter(), DONE))
            with self.batch_done:
                batch_task.results[k] = result
                batch_task.num_missing -= 1
                if batch_task.num_missing <= 1:
                    self.batch_done.notify_all()

    def _run_device_decoder(self, device_decoder: "DeviceBatchDecoder") -> None:
        """What the thread of the device does: one batch after the other, once its samples are there."""
        while True:
            with self.batch_done:
                self.batch_done.wait_for(
                    lambda: self.stopped or (self._device_queue and self._device_queue[0].num_missing == 1)
                )
                if self.stopped:
                    return
                batch_task = self._device_queue.popleft()
            try:
                device_decoder.decode(batch_task, self._device_counters)
            except BaseException as error:  # noqa: BLE001  (it travels, as above)
                batch_task.results[0] = error
            with self.batch_done:
                batch_task.num_missing = 0
                self.batch_done.notify_all()

    def stop(self) -> None:
        """Asks the threads to end after the sample they are at. Does not wait."""
        self.stopped = True
        with self._tasks_changed:
            self._tasks_changed.notify_all()
        with self.batch_done:
            self.batch_done.notify_all()

    def join(self) -> None:
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        for thread in [*self._threads, *([] if self._device_thread is None else [self._device_thread])]:
            thread.join(max(0.0, deadline - time.monotonic()))


_POOLS: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


@atexit.register
def _stop_pools() -> None:
    """A thread that comes back from OpenCV into an interpreter that is going down would abort the process."""
    pools = list(_POOLS)
    for pool in pools:
        pool.stop()
    for pool in pools:
        pool.join()
