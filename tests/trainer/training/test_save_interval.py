"""The interval of checkpoints: two minutes, longer where a save costs much."""

from collections import deque
from pathlib import Path
from typing import Any

import pytest

from stoker.training import loop
from stoker.training.local_ranks import TrainOptions
from stoker.training.loop import MAX_INTERVAL_S, Saver
from stoker.training.run import train
from stoker.training.state import IntervalTrigger
from stoker_watch.durations import Duration
from stoker_watch.runs.records import EVENTS, read_lines
from stoker_watch.runs.schemas import Event
from tests.drawn import draw
from tests.fixtures.training_out_of_memory import settings


def make_saver(*, adapts_interval: bool = True) -> tuple[Saver, list[str]]:
    """A saver with an interval of two minutes, and its events."""
    events: list[str] = []
    made: Any = object.__new__(Saver)
    made._adapts_interval, made._costs = adapts_interval, deque(maxlen=loop.KEPT_SAVES)
    made._log_event = lambda _, text: events.append(text)
    made.trigger = IntervalTrigger(Duration(2, "minutes"), 10, 1)
    made._shortest_s = made.trigger.interval_s
    return made, events


@pytest.mark.parametrize(
    ("pause_s", "write_s", "expected_s"),
    [
        (0.05, 0.5, 120.0),
        (1.25, 1.0, 120.0),  # hardly more than the cost that is allowed
        (5.0, 20.0, 500.0),  # a large model
        (0.1, 100.0, 200.0),  # a slow disk
        (60.0, 60.0, MAX_INTERVAL_S),
    ],
)
def test_two_minutes_stay_unless_saves_cost_too_much(pause_s: float, write_s: float, expected_s: float) -> None:
    made, events = make_saver()
    made._follow_cost(pause_s, write_s)
    assert made.trigger.interval_s == pytest.approx(expected_s)
    assert len(events) == (expected_s != 120)
    made._follow_cost(pause_s, write_s)
    assert len(events) <= 1, "it settles"
    by_user, events = make_saver(adapts_interval=False)
    by_user._follow_cost(pause_s, write_s)
    assert (by_user.trigger.interval_s, events) == (120.0, [])


def test_a_disk_that_hangs_once_changes_the_interval_for_no_longer_than_it_must() -> None:
    made, events = make_saver()
    for pause_s in (0.05, 0.05, 12.0, 0.05, 0.05):
        made._follow_cost(pause_s, 1.0)
    assert (made.trigger.interval_s, events) == (120.0, [])
    first_is_slow, _ = make_saver()
    for pause_s in (12.0, 0.05, 0.05):
        first_is_slow._follow_cost(pause_s, 1.0)
    assert first_is_slow.trigger.interval_s == 120.0


@pytest.mark.parametrize("is_set_by_user", [False, True])
def test_a_run_changes_its_own_interval_only_if_the_user_set_none(
    is_set_by_user: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "MAX_COST", 1e-6)
    monkeypatch.setattr(loop, "parse_duration", lambda *_: Duration(1e-4, "minutes"))
    changes = {"checkpoint_every": "2min"} if is_set_by_user else {}
    run = train(
        settings(draw(tmp_path / "data"), max_duration="12", **changes), TrainOptions(run_dir=str(tmp_path / "run"))
    ).run
    texts = [event.text for event in read_lines(run, EVENTS, Event) if event.text.startswith("checkpoint-every:")]
    assert len(texts) == (0 if is_set_by_user else 1)
