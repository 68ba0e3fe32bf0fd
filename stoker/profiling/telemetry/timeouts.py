"""Questions that may never be answered (a driver that hangs, a storage that went away), asked in a thread of their own.

Who asks waits for so long and goes on without; the thread is a daemon, so it holds up no end of the process either.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class Beside(Generic[Answer]):
    """A question that is asked again and again. `make` gives it: called once, in the thread too, since opening may
    hang as well. A question that is still open is not asked twice."""

    def __init__(self, make: Callable[[], Callable[[], Answer]], *, name: str) -> None:
        self._make = make
        self._wake = threading.Condition()
        self._asked = self._answered = 0
        self._ended = False
        self._answer: Answer | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def ask(self, within_s: float) -> Answer | None:
        """The answer to a question that is asked now; None where it does not come in time: what comes later is
        dropped. Raises what the question raised."""
        with self._wake:
            if self._answered == self._asked:
                self._asked += 1
                self._answer = self._error = None
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._answered == self._asked, within_s)
            if self._error is not None:
                raise self._error
            return self._answer if self._answered == self._asked else None

    def end(self, within_s: float = 0.2) -> bool:
        """Lets the thread end; whether it did in time. One that hangs is left behind."""
        with self._wake:
            self._ended = True
            self._wake.notify_all()
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        question: Callable[[], Answer] | None = None
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._ended or self._asked > self._answered)
                if self._ended:
                    return
            answer, error = None, None
            try:
                question = question or self._make()
                answer = question()
            except Exception as raised:  # noqa: BLE001 (it travels to the thread that asks)
                error = raised
            with self._wake:
                self._answer, self._error, self._answered = answer, error, self._asked
                self._wake.notify_all()
