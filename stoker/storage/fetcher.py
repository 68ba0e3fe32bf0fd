"""Many concurrent reads: one thread with an event loop, on which obstore's requests run.

A read is one asyncio task, and a second one if the first is late (`concurrency.HedgingPolicy`); the first complete
response is used. Retries and checks are in `store.Store.read_async`. The thread has no reference to the `Fetcher` of
the caller, so an unused `Fetcher` is garbage collected and its thread ends, as at the end of the interpreter.
"""

import asyncio
import os
import sys
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, replace

from stoker.errors import StorageError
from stoker.storage.concurrency import ConcurrencyController, HedgingPolicy
from stoker.storage.store import Store

MAX_IN_FLIGHT = 256
BUDGET_BYTES = 512 * 2**20
"""Default for the bytes in flight. One request is always allowed, even if it is larger."""
TYPICAL_BYTES = 128 * 1024
"""Assumed size of an object of unknown length; later, the mean of the finished reads."""
JOIN_TIMEOUT_S = 10.0
RELEASE_TIMEOUT_S, CANCEL_GRACE_S = 1.0, 0.05
"""Time for obstore's threads to leave Python: maximum for those with a response; for those of a cancelled read."""


@dataclass
class FetchStats:
    """Totals since the start."""

    finished: int = 0
    failed: int = 0
    read_bytes: int = 0
    hedged: int = 0
    """Reads with a second request because the first was late."""
    hedges_won: int = 0
    peak_in_flight: int = 0


class Fetcher:
    """max_in_flight: reads in flight; budget_bytes: their bytes. Thread-safe; `with` closes it."""

    def __init__(
        self, max_in_flight: int = MAX_IN_FLIGHT, *, budget_bytes: int = BUDGET_BYTES, hedge: bool = True
    ) -> None:
        self._engine = _Engine(max_in_flight, budget_bytes, hedge)
        self._finalizer = weakref.finalize(self, self._engine.stop)

    def submit(self, store: Store, key: str, *, start: int = 0, length: int | None = None) -> "Future[bytes]":
        """The object's bytes, or `length` of them from `start`: as `Store.read`, with its errors.

        Callbacks of the future run on the thread of the event loop and must be fast. The future can be cancelled until
        its read has started.
        """
        future: Future[bytes] = Future()
        self._engine.submit(_ReadRequest(store, key, start, length, future))
        return future

    def report_demand(self, demand_per_s: float, starved: bool) -> None:
        """The objects per second that the consumer takes, and whether it has waited for one since the last report."""
        self._engine.report_demand(demand_per_s, starved)

    @property
    def target_in_flight(self) -> int:
        """How many objects the caller should keep in flight."""
        return max(1, min(self._engine.concurrency.value, self._engine.max_affordable()))

    def stats(self) -> FetchStats:
        return replace(self._engine.stats)

    def close(self) -> None:
        """Cancels all reads: their futures fail. Waits for the thread."""
        self._finalizer()

    def __enter__(self) -> "Fetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _ReadRequest:
    """One read and its tasks."""

    __slots__ = ("future", "key", "length", "size_bytes", "start", "started_s", "store", "tasks", "timer")

    def __init__(self, store: Store, key: str, start: int, length: int | None, future: "Future[bytes]") -> None:
        self.store, self.key, self.start, self.length, self.future = store, key, start, length, future
        self.tasks: list[asyncio.Task[None]] = []
        self.timer: asyncio.TimerHandle | None = None
        self.started_s = 0.0
        self.size_bytes = 0
        """Counts against the byte budget while it is in flight."""


class _Engine:
    """Runs on the thread of the loop, except `submit`, `report_demand`, `max_affordable` and `stop`."""

    def __init__(self, max_in_flight: int, budget_bytes: int, hedge: bool) -> None:
        self.concurrency = ConcurrencyController(max_in_flight)
        self._hedging = HedgingPolicy() if hedge else None
        self._max_in_flight, self._budget_bytes = max_in_flight, budget_bytes
        self._submitted: deque[_ReadRequest] = deque()
        self._queued: deque[_ReadRequest] = deque()
        self._in_flight: set[_ReadRequest] = set()
        self._bytes_in_flight = 0
        self.stats = FetchStats()
        self._wakeup_pending = self._closed = False
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="stoker-fetcher", daemon=True)
        self._thread.start()

    def submit(self, read: _ReadRequest) -> None:
        if os.getpid() != self._pid:
            raise StorageError(
                "This fetcher belongs to the parent process.",
                fix="Make a Fetcher after the fork, or start processes with the method spawn.",
            )
        with self._lock:
            if self._closed:
                raise _closed_error(read)
            self._submitted.append(read)
            if self._wakeup_pending:
                return
            self._wakeup_pending = True  # one wake-up for all requests that come before the loop runs
            self._loop.call_soon_threadsafe(self._drain_submitted)

    def report_demand(self, demand_per_s: float, starved: bool) -> None:
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(
                    lambda: self.concurrency.update(demand_per_s, starved, self._loop.time())
                )

    def max_affordable(self) -> int:
        """Number of objects of the mean size that fit the byte budget."""
        return max(1, self._budget_bytes // self._mean_bytes())

    def stop(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if os.getpid() != self._pid:
            return  # the thread is in the other process
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:  # garbage collection runs on any thread
            self._thread.join(JOIN_TIMEOUT_S)
            _wait_for_obstore_threads(cancelled=bool(self._in_flight))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            tasks = [task for read in self._in_flight for task in read.tasks]
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            for read in [*self._in_flight, *self._queued, *self._submitted]:
                if not read.future.cancelled() and not read.future.done():
                    read.future.set_exception(_closed_error(read))
            self._loop.close()

    def _mean_bytes(self) -> int:
        return max(1, self.stats.read_bytes // self.stats.finished) if self.stats.finished else TYPICAL_BYTES

    def _drain_submitted(self) -> None:
        with self._lock:
            self._wakeup_pending = False
            submitted, self._submitted = self._submitted, deque()
        self._queued.extend(submitted)
        self._start_queued()

    def _start_queued(self) -> None:
        """Starts the reads that the limits allow, in the order in which they were submitted."""
        while self._queued and len(self._in_flight) < self._max_in_flight:
            read = self._queued[0]
            size_bytes = read.length if read.length is not None else self._mean_bytes()
            if self._in_flight and self._bytes_in_flight + size_bytes > self._budget_bytes:
                return
            self._queued.popleft()
            if read.future.set_running_or_notify_cancel():
                self._start_read(read, size_bytes)

    def _start_read(self, read: _ReadRequest, size_bytes: int) -> None:
        read.size_bytes = size_bytes
        read.started_s = self._loop.time()
        self._in_flight.add(read)
        self._bytes_in_flight += size_bytes
        self.stats.peak_in_flight = max(self.stats.peak_in_flight, len(self._in_flight))
        read.tasks.append(self._loop.create_task(self._fetch(read)))
        if self._hedging is not None:
            self._hedging.record_request()
            delay_s = self._hedging.hedge_delay_s(size_bytes)
            if delay_s is not None:
                read.timer = self._loop.call_later(delay_s, self._hedge, read)

    def _hedge(self, read: _ReadRequest) -> None:
        if self._hedging is not None and self._hedging.try_spend():
            self.stats.hedged += 1
            read.tasks.append(self._loop.create_task(self._fetch(read)))

    async def _fetch(self, read: _ReadRequest) -> None:
        task_number = len(read.tasks)  # this task is in the list when it first runs: 1, or 2 for the hedge
        this_task = read.tasks[task_number - 1]
        try:
            data = await read.store.read_async(read.key, start=read.start, length=read.length)
        except Exception as error:  # noqa: BLE001  (passed on in the future)
            if read in self._in_flight and all(task.done() or task is this_task for task in read.tasks):
                self._finish_read(read)
                self.stats.failed += 1
                read.future.set_exception(error)
            return
        if read not in self._in_flight:
            return
        self._finish_read(read)
        latency_s = self._loop.time() - read.started_s
        self.stats.finished += 1
        self.stats.read_bytes += len(data)
        self.stats.hedges_won += task_number > 1
        self.concurrency.record_response(latency_s, len(data))
        if self._hedging is not None:
            self._hedging.record_response(latency_s, len(data))
        for task in read.tasks:
            if task is not this_task:
                task.cancel()
        read.future.set_result(data)

    def _finish_read(self, read: _ReadRequest) -> None:
        self._in_flight.discard(read)
        self._bytes_in_flight -= read.size_bytes
        if read.timer is not None:
            read.timer.cancel()
        self._start_queued()


def _wait_for_obstore_threads(*, cancelled: bool) -> None:
    """Waits for obstore's own threads, which call Python with their responses. If one of them waits for the GIL when
    the interpreter exits, the process is aborted: seen in one of eight processes that exit right after a read."""
    if cancelled:
        time.sleep(CANCEL_GRACE_S)  # threads of cancelled reads cannot be detected; they take microseconds
    end_s = time.monotonic() + RELEASE_TIMEOUT_S
    while time.monotonic() < end_s:
        python_threads = {thread.ident for thread in threading.enumerate()}
        if not sys._current_frames().keys() - python_threads:
            return
        time.sleep(0.001)


def _closed_error(read: _ReadRequest) -> StorageError:
    return StorageError("The object was not read: its fetcher is closed.", location=read.store.uri.child(read.key))
