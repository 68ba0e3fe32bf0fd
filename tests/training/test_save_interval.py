"""A save too long for the notice of a machine, or for a time limit."""

from types import SimpleNamespace
from typing import Any

from stoker.training import stopper
from stoker.training.loop import Saver


def test_a_save_that_is_too_long_for_the_notice_is_a_warning_once() -> None:
    events: list[tuple[str, str]] = []
    made: Any = object.__new__(Saver)
    made._grace_s, made._is_warned = 30.0, False
    made._log_event = lambda kind, text: events.append((kind, text))
    for write_s in (14.0, 41.0, 41.0):
        made._warn_of_short_notice(write_s)
    ((kind, text),) = events
    assert kind == "warning"
    assert "41 s" in text
    assert "30 s of notice" in text


def test_the_margin_before_a_time_limit_covers_a_long_save() -> None:
    made: Any = object.__new__(stopper.Stopper)
    requests: list[float] = []
    made.request = SimpleNamespace(
        request=lambda _, grace_s: requests.append(grace_s), trace_requested=False, requested_by=None
    )
    made._hang_detector, made._memory_guard = SimpleNamespace(report=lambda: None), SimpleNamespace(poll=lambda: None)
    made._time_limit_at_s = -1.0
    for longest_s in (1.0, 41.0):
        made._writer = SimpleNamespace(longest_write_s=longest_s)
        made._look_at_requests()
    assert requests == [60.0, 123.0]
