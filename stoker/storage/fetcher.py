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
from stoker.storage.concurrency import Depth, Tail
from stoker.storage.store import Store

LIMIT = 256
BUDGET_BYTES = 512 * 2**20
"""Under way at once, by default; some requests are always let through, one that is larger than all of it too."""
TYPICAL_BYTES = 128 * 1024
"""What an object of unknown length is taken for until the first came; then, the mean of those that did."""
JOIN_TIMEOUT_S = 10.0
LET_GO_S, CANCELLED_S = 1.0, 0.05
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
    under_way: int
    waiting: int
    """Submitted, and not begun: `limit` or the memory budget is reached."""
    most_under_way: int
    latency_s: float


class Fetcher:
    """limit: requests under way; budget_bytes: bytes of them. From any thread; `with` closes it."""

    def __init__(self, limit: int = LIMIT, *, budget_bytes: int = BUDGET_BYTES, hedge: bool = True) -> None:
        self._engine = _Engine(limit, budget_bytes, hedge)
        self._end = weakref.finalize(self, self._engine.end)

    def submit(self, store: Store, key: str, *, start: int = 0, length: int | None = None) -> "Future[bytes]":
        """The object's bytes, or `length` of them from `start`: as `Store.read`, with its errors.

        Callbacks of the future run on the event loop's thread: be quick. It can be cancelled until it has begun.
        """
        future: Future[bytes] = Future()
        self._engine.give(_Read(store, key, start, length, future))
        return future

    def note(self, demand_per_s: float, starved: bool) -> None:
        """What the consumer takes, in objects a second, and whether it has waited for one since the last note."""
        self._engine.note(demand_per_s, starved)

    @property
    def ahead(self) -> int:
        """How many objects the caller should have under way."""
        return max(1, min(self._engine.depth.value, self._engine.affordable()))

    def stats(self) -> FetchStats:
        return self._engine.stats()

    def close(self) -> None:
        """Ends all reads: their futures fail. Waits for the thread."""
        self._end()

    def __enter__(self) -> "Fetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Read:
    """One read, and the tasks that are on it."""

    __slots__ = ("began_s", "future", "key", "length", "size_bytes", "start", "store", "tasks", "timer")

    def __init__(self, store: Store, key: str, start: int, length: int | None, future: "Future[bytes]") -> None:
        self.store, self.key, self.start, self.length, self.future = store, key, start, length, future
        self.tasks: list[asyncio.Task[None]] = []
        self.timer: asyncio.TimerHandle | None = None
        self.began_s = 0.0
        self.size_bytes = 0
        """What it counts for while it is under way."""


class _Engine:
    """All but `give`, `note`, `affordable`, `stats` and `end` runs on the loop's thread."""

    def __init__(self, limit: int, budget_bytes: int, hedge: bool) -> None:
        self.depth = Depth(limit)
        self._tail = Tail() if hedge else None
        self._limit, self._budget_bytes = limit, budget_bytes
        self._given: deque[_Read] = deque()
        self._waiting: deque[_Read] = deque()
        self._under_way: set[_Read] = set()
        self._bytes_under_way = 0
        self._finished = self._failed = self._read_bytes = self._hedged = self._won = self._most = 0
        self._latency_s = 0.0
        self._woken = self._closed = False
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="stoker-fetcher", daemon=True)
        self._thread.start()

    def give(self, read: _Read) -> None:
        if os.getpid() != self._process:
            raise StorageError("This fetcher belongs to the process that this one was forked from.",
                               fix="Make a Fetcher after the fork; better, start processes by spawn.")  # fmt: skip
        with self._lock:
            if self._closed:
                raise _closed(read)
            self._given.append(read)
            if self._woken:
                return
            self._woken = True  # one wake-up for all that come until the loop looks
            self._loop.call_soon_threadsafe(self._take)

    def note(self, demand_per_s: float, starved: bool) -> None:
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(lambda: self.depth.note(demand_per_s, starved, self._loop.time()))

    def affordable(self) -> int:
        """Objects of the usual size that the memory budget holds."""
        return max(1, self._budget_bytes // self._usual_bytes())

    def stats(self) -> FetchStats:
        return FetchStats(
            finished=self._finished,
            failed=self._failed,
            read_bytes=self._read_bytes,
            hedged=self._hedged,
            hedges_won=self._won,
            under_way=len(self._under_way),
            waiting=len(self._waiting) + len(self._given),
            most_under_way=self._most,
            latency_s=self._latency_s / self._finished if self._finished else 0.0,
        )

    def end(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if os.getpid() != self._process:
            return  # the thread is in the other process
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:  # the collector runs on any thread
            self._thread.join(JOIN_TIMEOUT_S)
            _let_go(cancelled=bool(self._under_way))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            tasks = [task for read in self._under_way for task in read.tasks]
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            for read in [*self._under_way, *self._waiting, *self._given]:
                if not read.future.cancelled() and not read.future.done():
                    read.future.set_exception(_closed(read))
            self._loop.close()

    def _usual_bytes(self) -> int:
        return max(1, self._read_bytes // self._finished) if self._finished else TYPICAL_BYTES

    def _take(self) -> None:
        with self._lock:
            self._woken = False
            given, self._given = self._given, deque()
        self._waiting.extend(given)
        self._fill()

    def _fill(self) -> None:
        """Begins what may begin, in the order in which it was submitted."""
        while self._waiting and len(self._under_way) < self._limit:
            read = self._waiting[0]
            size = read.length if read.length is not None else self._usual_bytes()
            if self._under_way and self._bytes_under_way + size > self._budget_bytes:
                return
            self._waiting.popleft()
            if read.future.set_running_or_notify_cancel():
                self._begin(read, size)

    def _begin(self, read: _Read, size_bytes: int) -> None:
        read.size_bytes = size_bytes
        read.began_s = self._loop.time()
        self._under_way.add(read)
        self._bytes_under_way += size_bytes
        self._most = max(self._most, len(self._under_way))
        read.tasks.append(self._loop.create_task(self._fetch(read)))
        if self._tail is not None:
            self._tail.begun()
            delay_s = self._tail.delay_s(size_bytes)
            if delay_s is not None:
                read.timer = self._loop.call_later(delay_s, self._hedge, read)

    def _hedge(self, read: _Read) -> None:
        if self._tail is not None and self._tail.spend():
            self._hedged += 1
            read.tasks.append(self._loop.create_task(self._fetch(read)))

    async def _fetch(self, read: _Read) -> None:
        mine = len(read.tasks)  # this task is in the list when it first runs: 1, or 2 for the hedge
        try:
            data = await read.store.read_async(read.key, start=read.start, length=read.length)
        except Exception as error:  # noqa: BLE001  (it travels in the future)
            if read in self._under_way and all(task.done() or task is read.tasks[mine - 1] for task in read.tasks):
                self._leave(read)
                self._failed += 1
                read.future.set_exception(error)
            return
        if read not in self._under_way:
            return
        self._leave(read)
        latency_s = self._loop.time() - read.began_s
        self._finished += 1
        self._read_bytes += len(data)
        self._latency_s += latency_s
        self._won += mine > 1
        self.depth.finished(latency_s, len(data))
        if self._tail is not None:
            self._tail.finished(latency_s, len(data))
        for number, task in enumerate(read.tasks, 1):
            if number != mine:
                task.cancel()
        read.future.set_result(data)

    def _leave(self, read: _Read) -> None:
        self._under_way.discard(read)
        self._bytes_under_way -= read.size_bytes
        if read.timer is not None:
            read.timer.cancel()
        self._fill()


def _let_go(*, cancelled: bool) -> None:
    """Waits for the threads of obstore's own, on which it calls Python with its answers. The interpreter's end aborts a
    process in which one of them waits for its turn: seen at the end of one in eight that exit right after a read."""
    if cancelled:
        time.sleep(CANCELLED_S)  # these cannot be seen; they take microseconds
    end_s = time.monotonic() + LET_GO_S
    while time.monotonic() < end_s:
        ours = {thread.ident for thread in threading.enumerate()}
        if not sys._current_frames().keys() - ours:
            return
        time.sleep(0.001)


def _closed(read: _Read) -> StorageError:
    return StorageError("Reading was stopped before this object came: its fetcher is closed.",
                        place=read.store.address.child(read.key))  # fmt: skip
