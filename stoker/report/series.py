"""Curves of a run for a page: any number of lines in, a bounded number of points out, read once, in bounded memory.

A point is a bin with its mean, least and greatest value; bins double in width when there would be too many, so a run of
weeks makes as large a page as one of an hour. Which curves a run has: `facts.py`; how they look: `page/charts.py`.
"""

from collections.abc import Mapping

import msgspec

MAX_POINTS = 2000
"""Points of a curve: more than a screen has columns."""
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
    """Collects the values of one curve, at places x ≥ 0 in any order."""

    def __init__(self, width: float = 1.0, max_bins: int = MAX_POINTS) -> None:
        self._width = width
        self._max_bins = max_bins
        self._bins: dict[int, list[float]] = {}
        """Bin → number of values, sum, sum of places, least, greatest."""

    def add(self, x: float, value: float) -> None:
        key = int(x // self._width)
        bin_stats = self._bins.get(key)
        if bin_stats is not None:
            bin_stats[0] += 1
            bin_stats[1] += value
            bin_stats[2] += x
            bin_stats[3] = min(bin_stats[3], value)
            bin_stats[4] = max(bin_stats[4], value)
            return
        self._bins[key] = [1, value, x, value, value]
        while len(self._bins) > self._max_bins:
            self._merge_bins()

    def _merge_bins(self) -> None:
        self._width *= 2
        folded: dict[int, list[float]] = {}
        for key, (count, total, x_sum, low, high) in self._bins.items():
            bin_stats = folded.setdefault(key // 2, [0, 0.0, 0.0, low, high])
            bin_stats[0] += count
            bin_stats[1] += total
            bin_stats[2] += x_sum
            bin_stats[3] = min(bin_stats[3], low)
            bin_stats[4] = max(bin_stats[4], high)
        self._bins = folded

    def series(self, *, max_gap: float | None = None) -> Series:
        """The curve. Where no value lies for more than `gap` and three bins it has a gap; None: it has none."""
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


def _append(series: Series, x: float, mean: float | None, low: float | None, high: float | None) -> None:
    series.x.append(_round_significant(x))
    series.mean.append(None if mean is None else _round_significant(mean))
    series.low.append(None if low is None else _round_significant(low))
    series.high.append(None if high is None else _round_significant(high))


def _round_significant(value: float) -> float:
    """Six significant digits are more than a screen shows, and half the bytes."""
    return float(f"{value:.6g}")


class FractionSeries(msgspec.Struct, kw_only=True):
    """What time was made of, bar by bar. x: the bars' beginnings, ascending; width: of each; parts: name → share of
    what was recorded inside the bar, 0 … 1, a list as long as x."""

    x: list[float]
    width: float
    fractions: dict[str, list[float]]


class FractionBins:
    """Spreads amounts over the time in which they fell, at places x ≥ 0."""

    def __init__(self, width: float = 1.0, max_bins: int = MAX_BARS) -> None:
        self._width = width
        self._max_bins = max_bins
        self._bins: dict[int, dict[str, float]] = {}

    def add(self, start: float, stop: float, amounts: Mapping[str, float]) -> None:
        """Amounts by name that fell evenly between two places."""
        start, stop = max(0.0, start), max(0.0, stop)
        while (stop - start) / self._width > self._max_bins:
            self._merge_bins()
        first, last = int(start // self._width), int(stop // self._width)
        for key in range(first, last + 1):
            overlap = min(stop, (key + 1) * self._width) - max(start, key * self._width)
            fraction = overlap / (stop - start) if stop > start else 1.0
            if fraction <= 0:
                continue
            bin_amounts = self._bins.setdefault(key, {})
            for name, amount in amounts.items():
                bin_amounts[name] = bin_amounts.get(name, 0.0) + amount * fraction
        while len(self._bins) > self._max_bins:
            self._merge_bins()

    def _merge_bins(self) -> None:
        self._width *= 2
        folded: dict[int, dict[str, float]] = {}
        for key, amounts in self._bins.items():
            bin_amounts = folded.setdefault(key // 2, {})
            for name, amount in amounts.items():
                bin_amounts[name] = bin_amounts.get(name, 0.0) + amount
        self._bins = folded

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
