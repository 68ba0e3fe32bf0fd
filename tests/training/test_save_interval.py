"""The interval of checkpoints: two minutes, longer where a save costs much; and a save too long for a notice."""

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.config.durations import Duration
from stoker.runs.records import EVENTS, read_lines
from stoker.runs.schemas import Event
from stoker.training import saver
from stoker.training.run import train
from stoker.training.saver import MAX_INTERVAL_S, Saver
from stoker.training.state import IntervalTrigger
from tests.drawn import draw
from tests.fixtures.training_out_of_memory import settings


def make_saver(*, is_interval_fixed: bool = False, grace_s: float | None = None) -> tuple[Saver, list[tuple[str, str]]]:
    """A saver that was given its interval, and its events."""
    events: list[tuple[str, str]] = []
    made: Any = object.__new__(Saver)
    made._is_interval_fixed, made._grace_s, made._is_warned = is_interval_fixed, grace_s, False
    made._costs = deque(maxlen=saver.KEPT_SAVES)
    made._log_event = lambda kind, text: events.append((kind, text))
    made.trigger = IntervalTrigger(Duration(2, "minutes"), 10, 1)
    made._shortest_s = made.trigger.interval_s
    return made, events


@pytest.mark.parametrize(
    ("cost_s", "write_s", "expected_s"),
    [
        (0.05, 0.5, 120.0),
        (1.25, 1.0, 120.0),  # hardly more than the cost that is allowed
        (5.0, 20.0, 500.0),  # a large model
        (0.1, 100.0, 200.0),  # a slow disk
        (60.0, 60.0, MAX_INTERVAL_S),
    ],
)
def test_two_minutes_stay_unless_saves_cost_too_much(cost_s: float, write_s: float, expected_s: float) -> None:
    made, events = make_saver()
    made._follow_cost(cost_s, write_s)
    assert made.trigger.interval_s == pytest.approx(expected_s)
    assert [kind for kind, _ in events] == ([] if expected_s == 120 else ["info"])
    made._follow_cost(cost_s, write_s)
    assert len(events) <= 1, "it settles"
    by_user, events = make_saver(is_interval_fixed=True)
    by_user._follow_cost(cost_s, write_s)
    assert (by_user.trigger.interval_s, events) == (120.0, [])


def test_a_disk_that_hangs_once_changes_the_interval_for_no_longer_than_it_must() -> None:
    made, events = make_saver()
    for cost_s in (0.05, 0.05, 12.0, 0.05, 0.05):
        made._follow_cost(cost_s, 1.0)
    assert (made.trigger.interval_s, events) == (120.0, [])
    first_is_slow, events = make_saver()
    for cost_s in (12.0, 0.05, 0.05):
        first_is_slow._follow_cost(cost_s, 1.0)
    assert first_is_slow.trigger.interval_s == 120.0
    assert [kind for kind, _ in events] == ["info"] * len(events) != []


def test_a_save_that_is_too_long_for_the_notice_is_a_warning_once() -> None:
    made, events = make_saver(is_interval_fixed=True, grace_s=30.0)
    for write_s in (14.0, 41.0, 41.0):
        made._follow_cost(0.1, write_s)
    ((kind, text),) = events
    assert kind == "warning"
    assert "41 s" in text
    assert "30 s of notice" in text


@pytest.mark.parametrize("is_set_by_user", [False, True])
def test_a_run_changes_its_own_interval_only_if_the_user_set_none(
    is_set_by_user: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "MAX_COST", 1e-6)
    monkeypatch.setattr(saver, "parse_duration", lambda *_: Duration(1e-4, "minutes"))
    changes = {"checkpoint_every": "2min"} if is_set_by_user else {}
    run = train(settings(draw(tmp_path / "data"), max_duration="12", **changes), run_dir=str(tmp_path / "run")).run
    texts = [event.text for event in read_lines(run, EVENTS, Event) if event.text.startswith("checkpoint-every:")]
    assert len(texts) == (0 if is_set_by_user else 1)


def test_the_margin_before_a_time_limit_covers_a_long_save() -> None:
    from stoker.training import stopper

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
