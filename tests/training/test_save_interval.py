"""The interval of checkpoints: Young's optimum against a simulation, and when the default stays."""

import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.config.durations import Duration, parse_duration
from stoker.runs.records import EVENTS, STEPS, RunFolder, read_lines
from stoker.runs.schemas import Event, StepWindow
from stoker.training.run import train
from stoker.training.save_interval import (
    MAX_INTERVAL_S,
    PRIOR_MTBF_S,
    SaveTimes,
    best_interval_s,
    lost_fraction,
    mean_time_between_failures_s,
)
from tests.drawn import draw
from tests.training.test_out_of_memory import settings


@given(st.floats(0.01, 20), st.floats(300, 1e6), st.floats(11, MAX_INTERVAL_S))
def test_no_other_interval_loses_less(cost_s: float, mtbf_s: float, other_s: float) -> None:
    best_s = best_interval_s(cost_s, 0.0, mtbf_s)
    assert lost_fraction(best_s, cost_s, mtbf_s) <= lost_fraction(other_s, cost_s, mtbf_s) * (1 + 1e-9)


def simulate(interval_s: float, cost_s: float, mtbf_s: float, work_s: float) -> float:
    """Fraction of the time that is lost, with failures at random and instant restarts."""
    rng, saved_s, clock_s = random.Random(0), 0.0, 0.0
    failure_s = rng.expovariate(1 / mtbf_s)
    while saved_s < work_s:
        if clock_s + interval_s + cost_s > failure_s:
            clock_s, failure_s = failure_s, failure_s + rng.expovariate(1 / mtbf_s)
        else:
            clock_s, saved_s = clock_s + interval_s + cost_s, saved_s + interval_s
    return 1 - saved_s / clock_s


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(5.0, 3600.0), (0.5, 1200.0)])
def test_the_formula_agrees_with_a_simulation(cost_s: float, mtbf_s: float) -> None:
    best_s = best_interval_s(cost_s, 0.0, mtbf_s)
    lost = {factor: simulate(factor * best_s, cost_s, mtbf_s, 4000 * mtbf_s) for factor in (0.3, 1.0, 3.0)}
    assert lost[1.0] < min(lost[0.3], lost[3.0])
    assert lost[1.0] == pytest.approx(lost_fraction(best_s, cost_s, mtbf_s), rel=0.1)


@pytest.mark.parametrize(
    ("cost_s", "write_s", "mtbf_s", "expected_s"),
    [
        (0.05, 0.5, PRIOR_MTBF_S, None),  # the default is nearly the optimum
        (5.0, 20.0, PRIOR_MTBF_S, math.sqrt(2 * 5 * PRIOR_MTBF_S)),  # a large model on a slow disk
        (0.1, 0.5, 3600.0, math.sqrt(2 * 0.1 * 3600)),  # a machine that is taken away every hour
        (0.1, 30.0, 3600.0, 60.0),  # as often as writes allow
        (60.0, 60.0, 1e6, MAX_INTERVAL_S),
    ],
)
def test_two_minutes_stay_unless_another_interval_gains(
    cost_s: float, write_s: float, mtbf_s: float, expected_s: float | None
) -> None:
    times = SaveTimes(120.0, mtbf_s)
    messages = times.update(cost_s, write_s)
    assert times.interval_s == pytest.approx(expected_s or 120.0)
    assert [kind for kind, _ in messages] == ([] if expected_s is None else ["info"])
    assert times.update(cost_s, write_s) == [], "it settles"
    user = SaveTimes(None, mtbf_s)
    assert user.update(cost_s, write_s) == []
    assert user.interval_s is None


def test_a_save_that_is_too_long_for_the_notice_is_a_warning_once() -> None:
    times = SaveTimes(None, PRIOR_MTBF_S, grace_s=30.0)
    assert times.update(0.1, 14.0) == []
    ((kind, text),) = times.update(0.1, 41.0)
    assert kind == "warning"
    assert "41 s" in text
    assert "30 s of notice" in text
    assert times.update(0.1, 41.0) == []
    assert times.time_limit_margin_s == 123


def test_failures_are_counted_from_the_run(tmp_path: Path) -> None:
    assert mean_time_between_failures_s(tmp_path) == pytest.approx(PRIOR_MTBF_S)
    for attempt, end in enumerate(("preempted", "failed", None, None), start=1):  # the last one is running
        folder = RunFolder(tmp_path, attempt)
        folder.event("started" if attempt == 1 else "resumed")
        folder.append(
            STEPS,
            StepWindow(
                t=0.0, attempt=attempt, step=1, window_steps=1, num_images=1, wall_s=900.0, devices=1, phases={}
            ),
        )
        if end is not None:
            folder.event(end)
        folder.close()
    assert mean_time_between_failures_s(tmp_path) == pytest.approx((3600 + 8640) / 2.1)


@pytest.mark.parametrize("is_set_by_user", [False, True])
def test_a_run_changes_its_own_interval_only_if_the_user_set_none(
    is_set_by_user: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prior of a failure a minute makes it save at the lower limit."""
    monkeypatch.setattr("stoker.training.save_interval.PRIOR_MTBF_S", 60.0)
    monkeypatch.setattr("stoker.training.save_interval.MIN_INTERVAL_S", 0.05)
    for module in ("loop", "saver"):
        monkeypatch.setattr(f"stoker.training.{module}.parse_duration", _in_milliseconds)
    changes = {"checkpoint_every": "2min"} if is_set_by_user else {}
    run = train(settings(draw(tmp_path / "data"), max_duration="12", **changes), run_dir=str(tmp_path / "run")).run
    texts = [event.text for event in read_lines(run, EVENTS, Event) if event.text.startswith("checkpoint-every:")]
    assert bool(texts) is not is_set_by_user
    assert all("Young" in text for text in texts)


def _in_milliseconds(text: str, flag: str = "max-duration") -> Duration:
    """Two minutes become 120 ms."""
    duration = parse_duration(text, flag)
    return Duration(duration.value / 1000, "minutes") if duration.unit == "minutes" else duration
