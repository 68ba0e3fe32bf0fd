"""Many concurrent reads: one thread with an event loop, on which obstore's requests run.

A read is one asyncio task, and a second one if the first is late (`_Hedging`); the first complete response is used.
Retries and checks are in `store.Store.read_async`. The thread keeps its `Fetcher` alive, so a fetcher has to be closed.
"""

import asyncio
import atexit
import contextlib
import os
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from stoker_watch.errors import StorageError, make_error
from stoker_watch.storage.store import Store

MAX_IN_FLIGHT = 64
"""2,000 images/s at 30 ms latency; twice as many cost half as much CPU again on a thin link (benchmarks/loading)."""
BUDGET_BYTES = 512 * 2**20
"""Default for the bytes in flight. One request is always allowed, even if it is larger."""
TYPICAL_BYTES = 128 * 1024
"""Assumed size of an object of unknown length; later, the mean of the finished reads."""
JOIN_TIMEOUT_S = 10.0
RELEASE_TIMEOUT_S, CANCEL_GRACE_S = 1.0, 0.05
"""Time for obstore's threads to leave Python: maximum for those with a response; for those of a cancelled read."""

HEDGE_QUANTILE, HEDGE_FACTOR, HEDGE_MIN_S = 0.95, 1.5, 0.01
"""A read is late after this factor times this quantile of the recent latencies: when the network is the limit all
requests are equally late, and a second one adds load."""
HEDGE_FRACTION, HEDGE_BURST = 0.05, 4.0
HEDGE_MIN_SAMPLES, HEDGE_WINDOW = 32, 256
"""Responses that a quantile needs, and after which it is computed again; recent responses that count."""


class Fetcher(contextlib.AbstractContextManager["Fetcher"]):
    """max_in_flight: reads in flight; budget_bytes: their bytes. Thread-safe; `with` closes it. All methods run on the
    thread of the loop, except the public ones."""

    def __init__(
        self, max_in_flight: int = MAX_IN_FLIGHT, *, budget_bytes: int = BUDGET_BYTES, hedge: bool = True
    ) -> None:
        self._hedging = _Hedging() if hedge else None
        self._max_in_flight, self._budget_bytes = max_in_flight, budget_bytes
        self._queued: deque[_Read] = deque()
        """Other threads append, under the lock; only the loop takes."""
        self._in_flight: set[_Read] = set()
        self._bytes_in_flight = self._num_finished = self._finished_bytes = 0
        self._wakeup_pending = self._closed = False
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="stoker-fetcher", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(self, store: Store, key: str, *, start: int = 0, length: int | None = None) -> "Future[bytes]":
        """The object's bytes, or `length` of them from `start`: as `Store.read`, with its errors. Callbacks of the
        future run on the loop's thread and must be fast. It can be cancelled until its read starts."""
        if os.getpid() != self._pid:
            raise make_error(StorageError, "fetcher-of-the-parent")
        read = _Read(store, key, start, length)
        with self._lock:
            if self._closed:
                raise read.closed_error()
            self._queued.append(read)
            if not self._wakeup_pending:
                self._wakeup_pending = True  # one wake-up for all requests that come before the loop runs
                self._loop.call_soon_threadsafe(self._wake_up)
        return read.future

    @property
    def target_in_flight(self) -> int:
        """How many objects the caller should keep in flight."""
        return max(1, min(self._max_in_flight, self._budget_bytes // self._mean_bytes()))

    def close(self) -> None:
        """Cancels all reads: their futures fail. Waits for the thread."""
        if os.getpid() != self._pid:
            return  # the thread is in the parent process
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:  # garbage collection runs on any thread
            self._thread.join(JOIN_TIMEOUT_S)
            _wait_for_obstore_threads(cancelled=bool(self._in_flight))

    def __exit__(self, *_: object) -> None:
        self.close()

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
            for read in [*self._in_flight, *self._queued]:
                if not read.future.done():
                    read.future.set_exception(read.closed_error())
            self._loop.close()

    def _mean_bytes(self) -> int:
        return max(1, self._finished_bytes // self._num_finished) if self._num_finished else TYPICAL_BYTES

    def _wake_up(self) -> None:
        with self._lock:
            self._wakeup_pending = False
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

    def _start_read(self, read: "_Read", size_bytes: int) -> None:
        read.size_bytes, read.started_s = size_bytes, self._loop.time()
        self._in_flight.add(read)
        self._bytes_in_flight += size_bytes
        read.tasks.append(self._loop.create_task(self._fetch(read)))
        if self._hedging is not None and (delay_s := self._hedging.delay_s) is not None:
            self._hedging.record_request()
            read.timer = self._loop.call_later(delay_s, self._hedge, read)

    def _hedge(self, read: "_Read") -> None:
        if self._hedging is not None and self._hedging.try_spend():
            read.tasks.append(self._loop.create_task(self._fetch(read)))

    async def _fetch(self, read: "_Read") -> None:
        this_task = read.tasks[-1]  # when it first runs
        try:
            data = await read.store.read_async(read.key, start=read.start, length=read.length)
        except Exception as error:  # noqa: BLE001  (passed on in the future)
            if read in self._in_flight and all(task.done() or task is this_task for task in read.tasks):
                self._finish_read(read)
                read.future.set_exception(error)
            return
        if read not in self._in_flight:
            return
        self._num_finished += 1
        self._finished_bytes += len(data)
        self._finish_read(read)
        if self._hedging is not None:
            self._hedging.record_response(self._loop.time() - read.started_s)
        for task in read.tasks:
            if task is not this_task:
                task.cancel()
        read.future.set_result(data)

    def _finish_read(self, read: "_Read") -> None:
        self._in_flight.discard(read)
        self._bytes_in_flight -= read.size_bytes
        if read.timer is not None:
            read.timer.cancel()
        self._start_queued()


@dataclass(eq=False, slots=True)
class _Read:
    """One read and its tasks. size_bytes: counts against the byte budget while it is in flight."""

    store: Store
    key: str
    start: int
    length: int | None
    future: Future[bytes] = field(default_factory=Future)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    started_s: float = 0.0
    size_bytes: int = 0

    def closed_error(self) -> StorageError:
        location = self.store.uri.child(self.key)
        return StorageError("The object was not read: its fetcher is closed.", location=location)


class _Hedging:
    """When a request is late enough for a second one, and whether the budget allows it: the hedged request of Dean and
    Barroso, "The Tail at Scale" (CACM 56(2), 2013)."""

    def __init__(self) -> None:
        self.delay_s: float | None = None
        """How long to wait for the first response. None: too few responses yet."""
        self._latencies_s: deque[float] = deque(maxlen=HEDGE_WINDOW)
        self._responses, self._credit = 0, 1.0

    def record_request(self) -> None:
        self._credit = min(HEDGE_BURST, self._credit + HEDGE_FRACTION)

    def record_response(self, latency_s: float) -> None:
        self._latencies_s.append(latency_s)
        self._responses += 1
        if self._responses % HEDGE_MIN_SAMPLES == 0:  # sorting at each would cost more than the rest
            quantile_s = sorted(self._latencies_s)[int(HEDGE_QUANTILE * len(self._latencies_s))]
            self.delay_s = max(HEDGE_MIN_S, HEDGE_FACTOR * quantile_s)

    def try_spend(self) -> bool:
        """Whether a second request may be sent; if so, takes it from the budget."""
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True


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
