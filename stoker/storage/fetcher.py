"""Many reads at once: one thread with an event loop, on which obstore's requests run.

A read is one asyncio task, and one more where the first is late (`flow.Tail`); the first whole answer wins. Retries and
checks are inside, in `store.Store.read_async`. The thread knows nothing of the `Fetcher` that the caller holds: one
that is forgotten is collected and its thread ends, as it does at the interpreter's end.
"""

import asyncio
import os
import sys
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from stoker.errors import StorageError
from stoker.storage.concurrency import ConcurrencyController, HedgingPolicy
from stoker.storage.store import Store

MAX_IN_FLIGHT = 256
BUDGET_BYTES = 512 * 2**20
"""Under way at once, by default; some requests are always let through, one that is larger than all of it too."""
TYPICAL_BYTES = 128 * 1024
"""What an object of unknown length is taken for until the first came; then, the mean of those that did."""
JOIN_TIMEOUT_S = 10.0
RELEASE_TIMEOUT_S, CANCEL_GRACE_S = 1.0, 0.05
"""For obstore's threads to leave Python: those that hand over an answer, at most; those of a read that is cancelled."""


@dataclass(frozen=True)
class FetchStats:
    """Sums since the start. latency_s: mean of the reads that ended, from the first request to the last byte."""

    finished: int
    failed: int
    read_bytes: int
    hedged: int
    """Reads that were asked for a second time because the first was late."""
    hedges_won: int
    in_flight: int
    queued: int
    """Submitted, and not begun: `limit` or the memory budget is reached."""
    peak_in_flight: int
    latency_s: float


class Fetcher:
    """limit: requests under way; budget_bytes: bytes of them. From any thread; `with` closes it."""

    def __init__(
        self, max_in_flight: int = MAX_IN_FLIGHT, *, budget_bytes: int = BUDGET_BYTES, hedge: bool = True
    ) -> None:
        self._engine = _Engine(max_in_flight, budget_bytes, hedge)
        self._finalizer = weakref.finalize(self, self._engine.stop)

    def submit(self, store: Store, key: str, *, start: int = 0, length: int | None = None) -> "Future[bytes]":
        """The object's bytes, or `length` of them from `start`: as `Store.read`, with its errors.

        Callbacks of the future run on the event loop's thread: be quick. It can be cancelled until it has begun.
        """
        future: Future[bytes] = Future()
        self._engine.submit(_ReadRequest(store, key, start, length, future))
        return future

    def report_demand(self, demand_per_s: float, starved: bool) -> None:
        """What the consumer takes, in objects a second, and whether it has waited for one since the last note."""
        self._engine.report_demand(demand_per_s, starved)

    @property
    def target_in_flight(self) -> int:
        """How many objects the caller should have under way."""
        return max(1, min(self._engine.concurrency.value, self._engine.max_affordable()))

    def stats(self) -> FetchStats:
        return self._engine.stats()

    def close(self) -> None:
        """Ends all reads: their futures fail. Waits for the thread."""
        self._finalizer()

    def __enter__(self) -> "Fetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _ReadRequest:
    """One read, and the tasks that are on it."""

    __slots__ = ("started_s", "future", "key", "length", "size_bytes", "start", "store", "tasks", "timer")

    def __init__(self, store: Store, key: str, start: int, length: int | None, future: "Future[bytes]") -> None:
        self.store, self.key, self.start, self.length, self.future = store, key, start, length, future
        self.tasks: list[asyncio.Task[None]] = []
        self.timer: asyncio.TimerHandle | None = None
        self.started_s = 0.0
        self.size_bytes = 0
        """What it counts for while it is under way."""


class _Engine:
    """All but `give`, `note`, `affordable`, `stats` and `end` runs on the loop's thread."""

    def __init__(self, max_in_flight: int, budget_bytes: int, hedge: bool) -> None:
        self.concurrency = ConcurrencyController(max_in_flight)
        self._hedging = HedgingPolicy() if hedge else None
        self._max_in_flight, self._budget_bytes = max_in_flight, budget_bytes
        self._submitted: deque[_ReadRequest] = deque()
        self._queued: deque[_ReadRequest] = deque()
        self._in_flight: set[_ReadRequest] = set()
        self._bytes_in_flight = 0
        self._finished = self._failed = self._read_bytes = self._hedged = self._hedges_won = self._peak_in_flight = 0
        self._latency_sum_s = 0.0
        self._wakeup_pending = self._closed = False
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="stoker-fetcher", daemon=True)
        self._thread.start()

    def submit(self, read: _ReadRequest) -> None:
        if os.getpid() != self._pid:
            raise StorageError("This fetcher belongs to the process that this one was forked from.",
                               fix="Make a Fetcher after the fork; better, start processes by spawn.")  # fmt: skip
        with self._lock:
            if self._closed:
                raise _closed_error(read)
            self._submitted.append(read)
            if self._wakeup_pending:
                return
            self._wakeup_pending = True  # one wake-up for all that come until the loop looks
            self._loop.call_soon_threadsafe(self._drain_submitted)

    def report_demand(self, demand_per_s: float, starved: bool) -> None:
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(
                    lambda: self.concurrency.update(demand_per_s, starved, self._loop.time())
                )

    def max_affordable(self) -> int:
        """Objects of the usual size that the memory budget holds."""
        return max(1, self._budget_bytes // self._mean_bytes())

    def stats(self) -> FetchStats:
        return FetchStats(
            finished=self._finished,
            failed=self._failed,
            read_bytes=self._read_bytes,
            hedged=self._hedged,
            hedges_won=self._hedges_won,
            in_flight=len(self._in_flight),
            queued=len(self._queued) + len(self._submitted),
            peak_in_flight=self._peak_in_flight,
            latency_s=self._latency_sum_s / self._finished if self._finished else 0.0,
        )

    def stop(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if os.getpid() != self._pid:
            return  # the thread is in the other process
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:  # the collector runs on any thread
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
        return max(1, self._read_bytes // self._finished) if self._finished else TYPICAL_BYTES

    def _drain_submitted(self) -> None:
        with self._lock:
            self._wakeup_pending = False
            submitted, self._submitted = self._submitted, deque()
        self._queued.extend(submitted)
        self._start_queued()

    def _start_queued(self) -> None:
        """Begins what may begin, in the order in which it was submitted."""
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
        self._peak_in_flight = max(self._peak_in_flight, len(self._in_flight))
        read.tasks.append(self._loop.create_task(self._fetch(read)))
        if self._hedging is not None:
            self._hedging.record_request()
            delay_s = self._hedging.hedge_delay_s(size_bytes)
            if delay_s is not None:
                read.timer = self._loop.call_later(delay_s, self._hedge, read)

    def _hedge(self, read: _ReadRequest) -> None:
        if self._hedging is not None and self._hedging.try_spend():
            self._hedged += 1
            read.tasks.append(self._loop.create_task(self._fetch(read)))

    async def _fetch(self, read: _ReadRequest) -> None:
        task_number = len(read.tasks)  # this task is in the list when it first runs: 1, or 2 for the hedge
        try:
            data = await read.store.read_async(read.key, start=read.start, length=read.length)
        except Exception as error:  # noqa: BLE001  (it travels in the future)
            if read in self._in_flight and all(
                task.done() or task is read.tasks[task_number - 1] for task in read.tasks
            ):
                self._finish_read(read)
                self._failed += 1
                read.future.set_exception(error)
            return
        if read not in self._in_flight:
            return
        self._finish_read(read)
        latency_s = self._loop.time() - read.started_s
        self._finished += 1
        self._read_bytes += len(data)
        self._latency_sum_s += latency_s
        self._hedges_won += task_number > 1
        self.concurrency.record_response(latency_s, len(data))
        if self._hedging is not None:
            self._hedging.record_response(latency_s, len(data))
        for other_number, task in enumerate(read.tasks, 1):
            if other_number != task_number:
                task.cancel()
        read.future.set_result(data)

    def _finish_read(self, read: _ReadRequest) -> None:
        self._in_flight.discard(read)
        self._bytes_in_flight -= read.size_bytes
        if read.timer is not None:
            read.timer.cancel()
        self._start_queued()


def _wait_for_obstore_threads(*, cancelled: bool) -> None:
    """Waits for the threads of obstore's own, on which it calls Python with its answers. The interpreter's end aborts a
    process in which one of them waits for its turn: seen at the end of one in eight that exit right after a read."""
    if cancelled:
        time.sleep(CANCEL_GRACE_S)  # these cannot be seen; they take microseconds
    end_s = time.monotonic() + RELEASE_TIMEOUT_S
    while time.monotonic() < end_s:
        python_threads = {thread.ident for thread in threading.enumerate()}
        if not sys._current_frames().keys() - python_threads:
            return
        time.sleep(0.001)


def _closed_error(read: _ReadRequest) -> StorageError:
    return StorageError("Reading was stopped before this object came: its fetcher is closed.",
                        location=read.store.uri.child(read.key))  # fmt: skip
