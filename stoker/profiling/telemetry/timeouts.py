"""Questions that may never be answered (a driver that hangs, a storage that went away), asked in a thread of their own.

Who asks waits for so long and goes on without; the thread is a daemon, so it holds up no end of the process either.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class TimeoutWorker(Generic[Answer]):
    """A question that is asked again and again. `make` gives it: called once, in the thread too, since opening may
    hang as well. A question that is still open is not asked twice."""

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
        """The answer to a question that is asked now; None where it does not come in time: what comes later is
        dropped. Raises what the question raised."""
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
        """Lets the thread end; whether it did in time. One that hangs is left behind."""
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
            except Exception as exception:  # noqa: BLE001 (it travels to the thread that asks)
                error = exception
            with self._wake:
                self._answer, self._error, self._num_answers = answer, error, self._num_requests
                self._wake.notify_all()
