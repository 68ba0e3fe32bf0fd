"""Curves of a run for the report: any number of values in, a bounded number of points out, in one pass and bounded
memory.

A point is a bin with its mean, minimum and maximum. The bin width doubles when there are too many bins, so the page of
a run of weeks is as large as that of an hour. `run_report.py` decides which curves there are; `page/charts.py` draws
them.
"""

from collections.abc import Mapping

import msgspec

MAX_POINTS = 2000
"""Points of a curve: more than the pixel columns of a screen."""
MAX_BARS = 1000
"""Bars of the phases over time."""


class Series(msgspec.Struct, kw_only=True):
    """A curve of N points, ascending in x. A gap is a point whose values are null."""

    x: list[float]
    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]

    def last(self) -> float | None:
        return self.mean[-1] if self.mean else None


class Bins:
    """Collects the values of one curve, at x ≥ 0 in any order."""

    def __init__(self, width: float = 1.0, max_bins: int = MAX_POINTS) -> None:
        self._width = width
        self._max_bins = max_bins
        self._bins: dict[int, tuple[int, float, float, float, float]] = {}
        """Bin → count, sum of values, sum of x, minimum, maximum."""

    def add(self, x: float, value: float) -> None:
        _add_point(self._bins, int(x // self._width), (1, value, x, value, value))
        while len(self._bins) > self._max_bins:
            self._width *= 2
            merged: dict[int, tuple[int, float, float, float, float]] = {}
            for key, stats in self._bins.items():
                _add_point(merged, key // 2, stats)
            self._bins = merged

    def series(self, *, max_gap: float | None = None) -> Series:
        """The curve. It has a gap where there is no value for more than `max_gap` and three bins; None: no gaps."""
        result = Series(x=[], mean=[], low=[], high=[])
        previous_x = None
        for key in sorted(self._bins):
            count, total, x_sum, low, high = self._bins[key]
            x = x_sum / count
            if max_gap is not None and previous_x is not None and x - previous_x > max(max_gap, 3 * self._width):
                _append(result, (previous_x + x) / 2, None, None, None)
            _append(result, x, total / count, low, high)
            previous_x = x
        return result


def _add_point(
    bins: dict[int, tuple[int, float, float, float, float]], key: int, point: tuple[int, float, float, float, float]
) -> None:
    stats = bins.get(key)
    if stats is not None:
        point = (
            stats[0] + point[0],
            stats[1] + point[1],
            stats[2] + point[2],
            min(stats[3], point[3]),
            max(stats[4], point[4]),
        )
    bins[key] = point


def _append(series: Series, x: float, mean: float | None, low: float | None, high: float | None) -> None:
    series.x.append(_round_significant(x))
    for values, value in ((series.mean, mean), (series.low, low), (series.high, high)):
        values.append(None if value is None else _round_significant(value))


def _round_significant(value: float) -> float:
    """Six significant digits: more than a screen shows, in half the bytes."""
    return float(f"{value:.6g}")


class FractionSeries(msgspec.Struct, kw_only=True):
    """Composition of the time, per bar. x: start of each bar, ascending; width: of a bar; fractions: name → fraction of
    the time recorded in the bar, 0 … 1, a list as long as x."""

    x: list[float]
    width: float
    fractions: dict[str, list[float]]


class FractionBins:
    """Spreads amounts over the time span in which they were measured, at x ≥ 0."""

    def __init__(self, width: float = 1.0, max_bins: int = MAX_BARS) -> None:
        self._width = width
        self._max_bins = max_bins
        self._bins: dict[int, dict[str, float]] = {}

    def add(self, start: float, stop: float, amounts: Mapping[str, float]) -> None:
        """Adds amounts by name, evenly distributed between start and stop."""
        start, stop = max(0.0, start), max(0.0, stop)
        while (stop - start) / self._width > self._max_bins:
            self._merge_bins()
        first, last = int(start // self._width), int(stop // self._width)
        for key in range(first, last + 1):
            overlap = min(stop, (key + 1) * self._width) - max(start, key * self._width)
            fraction = overlap / (stop - start) if stop > start else 1.0
            if fraction > 0:
                _add_amounts(self._bins.setdefault(key, {}), amounts, fraction)
        while len(self._bins) > self._max_bins:
            self._merge_bins()

    def _merge_bins(self) -> None:
        self._width *= 2
        merged: dict[int, dict[str, float]] = {}
        for key, amounts in self._bins.items():
            _add_amounts(merged.setdefault(key // 2, {}), amounts)
        self._bins = merged

    def fraction_series(self) -> FractionSeries:
        keys = sorted(self._bins)
        names = sorted({name for amounts in self._bins.values() for name in amounts})
        totals = [sum(self._bins[key].values()) or 1.0 for key in keys]
        fractions = {
            name: [round(self._bins[key].get(name, 0.0) / total, 4) for key, total in zip(keys, totals, strict=True)]
            for name in names
        }
        return FractionSeries(
            x=[_round_significant(key * self._width) for key in keys], width=self._width, fractions=fractions
        )


def _add_amounts(sums: dict[str, float], amounts: Mapping[str, float], factor: float = 1.0) -> None:
    for name, amount in amounts.items():
        sums[name] = sums.get(name, 0.0) + amount * factor
