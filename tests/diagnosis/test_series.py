"""Courses: bounded, and true to what was put in."""

import math

from hypothesis import given
from hypothesis import strategies as st

from stoker.diagnosis.series import MAX_POINTS, Mean, TimeSeries

LEAK = {"min_r_squared": 0.9, "min_slope_ratio": 0.5, "min_span_s": 5.0, "min_points": 6}


def course(values: list[float]) -> TimeSeries:
    made = TimeSeries()
    for t, value in enumerate(values):
        made.add(float(t), value)
    return made


@given(st.integers(1, 5000), st.floats(-100, 100), st.floats(-5, 5))
def test_a_straight_line_is_found_however_long_it_is(count: int, first: float, slope: float) -> None:
    made = course([first + slope * t for t in range(count)])
    assert len(made.points) <= MAX_POINTS
    line = made.fit_line()
    assert (line is None) == (len(made.points) < 3)
    if line is not None:
        assert math.isclose(line.slope, slope, rel_tol=1e-6, abs_tol=1e-6)


@given(st.lists(st.one_of(st.none(), st.floats(allow_nan=True)), max_size=600))
def test_only_finite_values_count(values: list[float | None]) -> None:
    made = TimeSeries()
    for t, value in enumerate(values):
        made.add(float(t), value)
    assert all(math.isfinite(value) for value in made.values)
    assert bool(made.points) == any(v is not None and math.isfinite(v) for v in values)


def test_what_grows_on_is_a_leak_and_what_fills_up_is_none() -> None:
    leak = course([100.0 + 2 * t for t in range(60)])
    line = leak.fit_steady_growth(**LEAK)
    assert line is not None
    assert math.isclose(line.slope, 2)
    for values in (
        [100.0 + 120 * (1 - 0.9**t) for t in range(60)],  # an allocator warms up
        [100.0 + min(t, 20) for t in range(60)],  # a cache is full
        [100.0 + 10 * (t % 7) for t in range(60)],  # a saw
        [100.0] * 60,
        [100.0 - t for t in range(60)],
        [100.0, 200.0],
    ):
        assert course(values).fit_steady_growth(**LEAK) is None


def test_a_mean_of_nothing_is_none() -> None:
    mean = Mean()
    mean.add(None)
    assert mean.value is mean.max_value is mean.min_value is None
    mean.add(2.0)
    mean.add(4.0)
    assert (mean.value, mean.min_value, mean.max_value) == (3.0, 2.0, 4.0)
