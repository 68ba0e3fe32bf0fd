"""Curves of bounded length."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_watch.report.series import Bins, FractionBins


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e3, 1e3)), max_size=60), st.integers(2, 20))
@settings(deadline=None, max_examples=40)
def test_bins_are_bounded_and_lose_no_value(values: list[tuple[float, float]], max_bins: int) -> None:
    bins = Bins(max_bins=max_bins)
    for x, value in values:
        bins.add(x, value)
    series = bins.series()
    assert len(series.x) <= max_bins
    assert series.x == sorted(series.x)
    if values:
        lows, highs = [v for v in series.low if v is not None], [v for v in series.high if v is not None]
        assert min(lows) == pytest.approx(min(value for _, value in values), rel=1e-5)
        assert max(highs) == pytest.approx(max(value for _, value in values), rel=1e-5)
        assert all(
            low <= mean * (1 + 1e-5 * (1 if mean > 0 else -1)) + 1e-9
            for low, mean in zip(lows, series.mean, strict=True)
            if mean is not None
        )


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0.01, 1e4)), min_size=1, max_size=30), st.integers(2, 20))
@settings(deadline=None, max_examples=40)
def test_fractions_add_up_in_every_bar(windows: list[tuple[float, float]], max_bins: int) -> None:
    bins = FractionBins(max_bins=max_bins)
    for start, length in windows:
        bins.add(start, start + length, {"compute": 0.75 * length, "eval": 0.25 * length})
    fractions = bins.fraction_series()
    assert 0 < len(fractions.x) <= max_bins
    for compute, rest in zip(fractions.fractions["compute"], fractions.fractions["eval"], strict=True):
        assert compute == pytest.approx(0.75, abs=1e-3)
        assert compute + rest == pytest.approx(1, abs=1e-3)


def test_a_window_is_spread_over_its_bars() -> None:
    bins = FractionBins(width=1.0)
    bins.add(0.5, 2.5, {"eval": 2.0})
    bins.add(2.5, 3.0, {"compute": 0.25, "idle": 0.25})
    fractions = bins.fraction_series()
    assert fractions.x == [0, 1, 2]
    assert fractions.fractions == {"compute": [0, 0, 0.25], "eval": [1, 1, 0.5], "idle": [0, 0, 0.25]}


def test_a_window_without_length_is_in_one_bar() -> None:
    bins = FractionBins(width=1.0)
    bins.add(1.5, 1.5, {"eval": 2.0})
    bins.add(-5.0, -3.0, {"compute": 1.0})  # clocks may be set back
    fractions = bins.fraction_series()
    assert fractions.x == [0, 1]
    assert fractions.fractions == {"compute": [1, 0], "eval": [0, 1]}


def test_a_gap_interrupts_the_curve() -> None:
    bins = Bins()
    for x in (1, 2, 3, 500, 501):
        bins.add(x, 1.0)
    assert bins.series(max_gap=10).mean == [1, 1, 1, None, 1, 1]
