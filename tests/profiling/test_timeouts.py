"""Questions that may never be answered."""

import threading

import pytest

from stoker.profiling.telemetry.timeouts import TimeoutWorker


def test_answers_come_until_one_hangs_and_again_after_it() -> None:
    """The second question hangs until it is let go; meanwhile nobody asks a third."""
    asked: list[int] = []
    go = threading.Event()

    def question() -> int:
        asked.append(len(asked))
        if len(asked) == 2:
            go.wait()
        return len(asked)

    beside = TimeoutWorker(lambda: question, name="test")
    assert beside.call(60) == 1
    assert beside.call(0.001) is None
    assert beside.call(0.001) is None
    assert len(asked) == 2
    assert not beside.stop(0.001), "a thread that hangs is left behind"
    go.set()
    assert beside.stop(60)


def test_a_late_answer_is_not_taken_for_a_new_one() -> None:
    go, late = threading.Event(), threading.Event()
    answers = iter(["late", "new"])

    def question() -> str:
        go.wait()
        return next(answers)

    beside = TimeoutWorker(lambda: question, name="test")
    assert beside.call(0.001) is None
    go.set()
    while (answer := beside.call(60)) is None:
        late.wait(0.001)
    assert answer == "new"
    assert beside.stop(60)


def test_what_it_raises_travels() -> None:
    def make() -> None:
        raise ZeroDivisionError("no driver")

    beside = TimeoutWorker(make, name="test")  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError, match="no driver"):
        beside.call(60)
    assert beside.stop(60)
