"""Queries that may hang (a driver, a storage that is gone), run in a thread with a timeout.

The caller continues without an answer when the time is over. The thread is a daemon, so it does not delay process exit.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class TimeoutWorker(Generic[Answer]):
    """Repeats a query, each time in a thread. A query that is not answered yet is not started again."""

    def __init__(self, query: Callable[[], Answer], *, name: str) -> None:
        self._query = query
        self._name = name
        self._thread: threading.Thread | None = None

    def call(self, timeout_s: float) -> Answer | None:
        """The answer of a query that starts now; None if it does not come in time: a late answer is dropped. Raises the
        exception of the query."""
        if self._thread is not None and self._thread.is_alive():
            return None
        answers: list[Answer] = []
        errors: list[Exception] = []

        def ask() -> None:
            try:
                answers.append(self._query())
            except Exception as error:  # noqa: BLE001 (raised in the calling thread)
                errors.append(error)

        self._thread = threading.Thread(target=ask, name=self._name, daemon=True)
        self._thread.start()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return None
        if errors:
            raise errors[0]
        return answers[0]

    def stop(self, timeout_s: float = 0.2) -> bool:
        """Whether no query is running any more. A thread that hangs is abandoned."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()
