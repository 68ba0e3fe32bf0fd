"""Questions that may never be answered."""

import signal
import threading

import pytest

from stoker_watch.recording.telemetry.machine import TimeoutWorker


def test_answers_come_until_one_hangs_and_again_after_it() -> None:
    """The second query hangs until it is released; meanwhile there is no third one."""
    queries: list[int] = []
    release = threading.Event()

    def query() -> int:
        queries.append(len(queries))
        if len(queries) == 2:
            release.wait()
        return len(queries)

    worker = TimeoutWorker(query, name="test")
    assert worker.call(60) == 1
    assert worker.call(0.001) is None
    assert worker.call(0.001) is None
    assert len(queries) == 2
    assert not worker.stop(0.001), "a thread that hangs is left behind"
    release.set()
    assert worker.stop(60)


def test_a_late_answer_is_not_taken_for_a_new_one() -> None:
    release, late = threading.Event(), threading.Event()
    answers = iter(["late", "new"])

    def query() -> str:
        release.wait()
        return next(answers)

    worker = TimeoutWorker(query, name="test")
    assert worker.call(0.001) is None
    release.set()
    while (answer := worker.call(60)) is None:
        late.wait(0.001)
    assert answer == "new"
    assert worker.stop(60)


def test_what_it_raises_travels() -> None:
    def query() -> None:
        raise ZeroDivisionError("no driver")

    worker = TimeoutWorker(query, name="test")
    with pytest.raises(ZeroDivisionError, match="no driver"):
        worker.call(60)
    assert worker.stop(60)


def test_a_query_that_hangs_takes_no_signals() -> None:
    """They are for the main thread, which sends them on to the job; the default action would end the process."""
    worker = TimeoutWorker(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()), name="test")
    blocked = worker.call(60)
    assert blocked is not None
    assert {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1} <= blocked
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
