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
from stoker.data.loading.samples import Fetch, Outcome, Samples, Slot
from stoker.data.loading.wait_breakdown import DONE, Marks

if TYPE_CHECKING:
    from stoker.data.loading.device_batches import DeviceBatches, Made

JOIN_TIMEOUT_S = 10.0
"""How long `close`, or the end of the interpreter, waits for threads whose file system does not answer."""


class Work:
    """A batch on its way: where in the stream it begins, its slot, and what came of each of its samples."""

    def __init__(self, base: int, start: int, slot: Slot, count: int) -> None:
        self.base, self.start, self.slot = base, start, slot
        self.outcomes: list[Outcome | BaseException | None] = [None] * count
        self.marks: list[Marks] = [[] for _ in range(count)]
        self.left = count
        """Samples that are still to come, and the whole where the device decodes it."""
        self.again: list[int] = []
        """Places that were loaded anew, after the device had its turn."""
        self.made: Made | None = None
        """The pictures, where the device decodes."""


class Task(NamedTuple):
    """A sample to load. Ordered by its position, which no other task of the queue has."""

    position: int
    work: Work
    k: int
    fetch: Fetch | None


class Crew:
    """The threads, and the queue they work from. Holds no loader, so that a forgotten loader can be collected."""

    def __init__(self, samples: Samples, threads: int, device_batches: "DeviceBatches | None" = None) -> None:
        """device_batches: has the device decode what the threads leave to it, on one more thread."""
        self.done = threading.Condition()
        self.stopped = False
        self._samples = samples if device_batches is None else samples.deferring()
        self._tasks: list[Task] = []
        self._work = threading.Condition()
        self._wanted = 0
        self._threads: dict[threading.Thread, Counters] = {}
        self._ended = Counters()
        self._batches: deque[Work] = deque()
        self._last: threading.Thread | None = None
        self._device_counters = Counters()
        self.resize(threads)
        if device_batches is not None:
            self._last = threading.Thread(
                target=self._finish, args=(device_batches,), name="stoker-loader-device", daemon=True
            )
            self._last.start()
        _CREWS.add(self)

    @property
    def waiting(self) -> int:
        """Samples that wait for a thread."""
        return len(self._tasks)

    def counters(self) -> list[Counters]:
        """Of each thread, and the sum of those that have left."""
        with self._work:
            return [self._ended, self._device_counters, *self._threads.values()]

    def resize(self, threads: int) -> None:
        """More threads at once; fewer as soon as some have ended the sample they are at."""
        with self._work:
            if self.stopped:
                return
            self._wanted = threads
            for _ in range(threads - len(self._threads)):
                counters = Counters()
                thread = threading.Thread(target=self._run, args=(counters,), name="stoker-loader", daemon=True)
                self._threads[thread] = counters
                thread.start()
            self._work.notify_all()

    def expect(self, work: Work) -> None:
        """The batches in their order, each before its samples: those that one more thread has to finish."""
        if self._last is not None:
            work.left += 1
            self._batches.append(work)

    def give(self, *tasks: Task) -> None:
        with self._work:
            for task in tasks:
                heapq.heappush(self._tasks, task)
            self._work.notify(len(tasks))

    def give_when_fetched(self, task: Task, fetch: Fetch) -> None:
        fetch.future.add_done_callback(lambda _: self.give(task))

    def _take(self, counters: Counters) -> Task | None:
        """The next task; None: leave, which is settled under the same lock, so that just as many leave as have to."""
        began_s = time.perf_counter()
        with self._work:
            while not self._tasks and not self.stopped and len(self._threads) <= self._wanted:
                self._work.wait()
            counters.idle_s += time.perf_counter() - began_s
            if self.stopped:
                return None
            if len(self._threads) > self._wanted:
                self._ended.add(self._threads.pop(threading.current_thread()))
                self._work.notify()  # a task that woke this one needs another
                return None
            return heapq.heappop(self._tasks)

    def _run(self, counters: Counters) -> None:
        while (task := self._take(counters)) is not None:
            _, work, k, fetch = task
            outcome: Outcome | BaseException
            try:
                outcome = self._samples.load(work.slot, k, task.position, counters, work.marks[k], fetch)
            except BaseException as error:  # noqa: BLE001  (it travels: `Loader` raises it when it comes to the sample)
                outcome = error
            work.marks[k].append((time.perf_counter(), DONE))
            with self.done:
                work.outcomes[k] = outcome
                work.left -= 1
                if work.left <= 1:
                    self.done.notify_all()

    def _finish(self, device_batches: "DeviceBatches") -> None:
        """What the thread of the device does: one batch after the other, once its samples are there."""
        while True:
            with self.done:
                self.done.wait_for(lambda: self.stopped or (self._batches and self._batches[0].left == 1))
                if self.stopped:
                    return
                work = self._batches.popleft()
            try:
                device_batches.make(work, self._device_counters)
            except BaseException as error:  # noqa: BLE001  (it travels, as above)
                work.outcomes[0] = error
            with self.done:
                work.left = 0
                self.done.notify_all()

    def stop(self) -> None:
        """Asks the threads to end after the sample they are at. Does not wait."""
        self.stopped = True
        with self._work:
            self._work.notify_all()
        with self.done:
            self.done.notify_all()

    def join(self) -> None:
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        for thread in [*self._threads, *([] if self._last is None else [self._last])]:
            thread.join(max(0.0, deadline - time.monotonic()))


_CREWS: weakref.WeakSet[Crew] = weakref.WeakSet()


@atexit.register
def _end_crews() -> None:
    """A thread that comes back from OpenCV into an interpreter that is going down would abort the process."""
    crews = list(_CREWS)
    for crew in crews:
        crew.stop()
    for crew in crews:
        crew.join()
