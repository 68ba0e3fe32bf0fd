"""Queries that may hang (a driver, a storage that is gone), run in a thread with a timeout.

The caller continues without an answer when the time is over. The thread is a daemon, so it does not delay process exit.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class TimeoutWorker(Generic[Answer]):
    """Repeats a query in a thread. make_query: returns the query; called once, also in the thread, because opening may
    hang too. A query that is not answered yet is not started again."""

    def __init__(self, make_query: Callable[[], Callable[[], Answer]], *, name: str) -> None:
        self._make_query = make_query
        self._wake = threading.Condition()
        self._num_requests = self._num_answers = 0
        self._stopped = False
        self._answer: Answer | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._thread_main, name=name, daemon=True)
        self._thread.start()

    def call(self, timeout_s: float) -> Answer | None:
        """The answer of a query that starts now; None if it does not come in time: a late answer is dropped. Raises the
        exception of the query."""
        with self._wake:
            if self._num_answers == self._num_requests:
                self._num_requests += 1
                self._answer = self._error = None
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._num_answers == self._num_requests, timeout_s)
            if self._error is not None:
                raise self._error
            return self._answer if self._num_answers == self._num_requests else None

    def stop(self, timeout_s: float = 0.2) -> bool:
        """Ends the thread; whether it ended in time. A thread that hangs is abandoned."""
        with self._wake:
            self._stopped = True
            self._wake.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _thread_main(self) -> None:
        query: Callable[[], Answer] | None = None
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopped or self._num_requests > self._num_answers)
                if self._stopped:
                    return
            answer, error = None, None
            try:
                query = query or self._make_query()
                answer = query()
            except Exception as exception:  # noqa: BLE001 (raised in the calling thread)
                error = exception
            with self._wake:
                self._answer, self._error, self._num_answers = answer, error, self._num_requests
                self._wake.notify_all()
