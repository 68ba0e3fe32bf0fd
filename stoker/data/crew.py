"""The threads of a loader and the queue they work from: they end with it, and never hold up the interpreter's end.

They know nothing of batches but their places: `samples.py` fills one, `loader.py` hands them out and takes them in.
"""

import atexit
import queue
import threading
import time
import weakref

from stoker.data.samples import Outcome, Samples, Slot, Stats

JOIN_TIMEOUT_S = 10.0
"""How long `close`, or the end of the interpreter, waits for threads whose file system does not answer."""


class Work:
    """A batch on its way: where in the stream it begins, its slot, and what came of each of its samples."""

    def __init__(self, base: int, start: int, slot: Slot, count: int) -> None:
        self.base, self.start, self.slot = base, start, slot
        self.outcomes: list[Outcome | BaseException | None] = [None] * count
        self.left = count


class Crew:
    """The threads, and the queue they work from. Holds no loader, so that a forgotten loader can be collected."""

    def __init__(self, samples: Samples, threads: int) -> None:
        self.done = threading.Condition()
        self.stats = [Stats() for _ in range(threads)]
        self._samples = samples
        self._tasks: queue.SimpleQueue[tuple[Work, int] | None] = queue.SimpleQueue()
        self.stopped = False
        self._threads = [
            threading.Thread(target=self._run, args=(stats,), name=f"stoker-loader-{n}", daemon=True)
            for n, stats in enumerate(self.stats)
        ]
        for thread in self._threads:
            thread.start()
        _CREWS.add(self)

    def give(self, work: Work) -> None:
        for k in range(work.left):
            self._tasks.put((work, k))

    def _run(self, stats: Stats) -> None:
        while True:
            asked = time.perf_counter()
            task = self._tasks.get()
            stats.idle_s += time.perf_counter() - asked
            if task is None or self.stopped:
                return
            work, k = task
            outcome: Outcome | BaseException
            try:
                outcome = self._samples.load(work.slot, k, work.start + k, stats)
            except BaseException as error:  # noqa: BLE001  (it travels: `Loader` raises it when it comes to the sample)
                outcome = error
            with self.done:
                work.outcomes[k] = outcome
                work.left -= 1
                if work.left == 0:
                    self.done.notify_all()

    def stop(self) -> None:
        """Asks the threads to end after the sample they are at. Does not wait."""
        self.stopped = True
        for _ in self._threads:
            self._tasks.put(None)
        with self.done:
            self.done.notify_all()

    def join(self) -> None:
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        for thread in self._threads:
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
