"""Time series: bounded, and true to their values."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_watch.diagnosis.causes.memory import fit_stairs, fit_steady_growth
from stoker_watch.diagnosis.run_data import MAX_POINTS, Mean, TimeSeries


def make_series(values: list[float]) -> TimeSeries:
    series = TimeSeries()
    for t, value in enumerate(values):
        series.add(float(t), value)
    return series


@settings(max_examples=40)
@given(st.integers(1, 2000), st.floats(-100, 100), st.floats(-5, 5))
def test_a_straight_line_is_found_however_long_it_is(count: int, first: float, slope: float) -> None:
    series = make_series([first + slope * t for t in range(count)])
    assert len(series.points) <= MAX_POINTS
    line = series.fit_line()
    assert (line is None) == (len(series.points) < 3)
    if line is not None:
        assert math.isclose(line.slope, slope, rel_tol=1e-6, abs_tol=1e-6)


@settings(max_examples=40)
@given(st.lists(st.one_of(st.none(), st.floats(allow_nan=True)), max_size=400))
def test_only_finite_values_count(values: list[float | None]) -> None:
    series = TimeSeries()
    for t, value in enumerate(values):
        series.add(float(t), value)
    assert all(math.isfinite(value) for value in series.values)
    assert bool(series.points) == any(v is not None and math.isfinite(v) for v in values)


def test_steady_growth_is_a_leak_and_growth_that_slows_down_is_not() -> None:
    leak = make_series([100.0 + 2 * t for t in range(60)])
    line = fit_steady_growth(leak)
    assert line is not None
    assert math.isclose(line.slope, 2)
    for values in (
        [100.0 + 120 * (1 - 0.9**t) for t in range(60)],  # an allocator warms up
        [100.0 + min(t, 20) for t in range(60)],  # a cache is full
        [100.0 + 10 * (t % 7) for t in range(60)],  # a sawtooth
        [100.0] * 60,
        [100.0 - t for t in range(60)],
        [100.0, 200.0],
    ):
        assert fit_steady_growth(make_series(values)) is None


def test_stairs_of_epochs_are_a_leak_and_stairs_that_end_are_not() -> None:
    stairs = fit_stairs(make_series([100.0 + 30 * (t // 15) + 50 * (t % 15 == 7) for t in range(60)]))
    assert stairs is not None  # although an evaluation in each epoch needs 50 for a moment
    assert (round(stairs.size), round(stairs.interval_s)) == (30, 15)
    for values in (
        [100.0 + 2 * t for t in range(60)],  # a line
        [100.0 + 120 * (t > 15) for t in range(60)],  # a cache is full after the first epoch
        [100.0 + 30 * min(t // 8, 3) for t in range(60)],  # it has stopped
        [100.0 + 60 * (1 - 0.4 ** (t // 10)) for t in range(60)],  # an allocator warms up
        [100.0 + 10 * (t % 7) for t in range(60)],  # a sawtooth
        [100.0 + 50 * (t % 15 > 10) for t in range(60)],  # what an evaluation needs is free after it
        [100.0 + 30 * (t // 4) for t in range(13)],  # seen for too short a time
        [100.0] * 60,
        [],
    ):
        assert fit_stairs(make_series(values)) is None, values


def test_a_mean_of_nothing_is_none() -> None:
    mean = Mean()
    mean.add(None)
    assert mean.value is mean.max_value is mean.min_value is None
    mean.add(2.0)
    mean.add(4.0)
    assert (mean.value, mean.min_value, mean.max_value) == (3.0, 2.0, 4.0)


def test_noise_is_no_stairs() -> None:
    """Two ranks with loader workers, which come and go; a second each, recorded (MiB)."""
    values = [3618, 3574, 3636, 3649, 3643, 3667, 3652, 3657, 3658, 3670, 3714, 3669, 3670, 3653, 3581, 3676,
              3594, 3680, 4207, 4208, 4202, 4251, 4167, 4254, 4270, 4212, 4257, 4194, 4240, 4204, 4240, 4240,
              4254, 4249, 4241, 4245, 4278, 4282]  # fmt: skip
    assert fit_stairs(make_series(list(map(float, values)))) is None


def test_memory_that_was_given_back_once_does_not_end_a_leak() -> None:
    """A pipeline of TensorFlow whose cache grew by 30 MB a second; the second half has a fall."""
    megabytes = [966, 1004, 1034, 1059, 1090, 1128, 1169, 1204, 1238, 1273, 1307, 1338, 1365, 1399, 1431, 1462, 1495,
                 1524, 1557, 1589, 1644, 1674, 1699, 1731, 1657, 1689, 1718, 1751, 1782, 1806]  # fmt: skip
    fit = fit_steady_growth(make_series([1e6 * value for value in megabytes]))
    assert fit is not None
    assert 25e6 < fit.slope < 35e6
    often = [value + 100 * (second % 4) for second, value in enumerate(range(0, 1500, 50))]  # of a garbage collector
    assert make_series(often).without_releases(0.15).values == often
    assert TimeSeries().without_releases(0.15).values == []
