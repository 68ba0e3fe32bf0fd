"""Curves of a run for a page: any number of lines in, a bounded number of points out, read once, in bounded memory.

A point is a bin with its mean, least and greatest value; bins double in width when there would be too many, so a run of
weeks makes as large a page as one of an hour. Which curves a run has: `facts.py`; how they look: `page/charts.py`.
"""

from collections.abc import Mapping

import msgspec

MOST_POINTS = 2000
"""Points of a curve: more than a screen has columns."""
MOST_PARTS = 1000
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

    def __init__(self, width: float = 1.0, most: int = MOST_POINTS) -> None:
        self._width = width
        self._most = most
        self._bins: dict[int, list[float]] = {}
        """Bin → number of values, sum, sum of places, least, greatest."""

    def add(self, x: float, value: float) -> None:
        key = int(x // self._width)
        mine = self._bins.get(key)
        if mine is not None:
            mine[0] += 1
            mine[1] += value
            mine[2] += x
            mine[3] = min(mine[3], value)
            mine[4] = max(mine[4], value)
            return
        self._bins[key] = [1, value, x, value, value]
        while len(self._bins) > self._most:
            self._fold()

    def _fold(self) -> None:
        self._width *= 2
        folded: dict[int, list[float]] = {}
        for key, (count, total, places, low, high) in self._bins.items():
            mine = folded.setdefault(key // 2, [0, 0.0, 0.0, low, high])
            mine[0] += count
            mine[1] += total
            mine[2] += places
            mine[3] = min(mine[3], low)
            mine[4] = max(mine[4], high)
        self._bins = folded

    def series(self, *, gap: float | None = None) -> Series:
        """The curve. Where no value lies for more than `gap` and three bins it has a gap; None: it has none."""
        made = Series(x=[], mean=[], low=[], high=[])
        before = None
        for key in sorted(self._bins):
            count, total, places, low, high = self._bins[key]
            x = places / count
            if gap is not None and before is not None and x - before > max(gap, 3 * self._width):
                _append(made, (before + x) / 2, None, None, None)
            _append(made, x, total / count, low, high)
            before = x
        return made


def _append(series: Series, x: float, mean: float | None, low: float | None, high: float | None) -> None:
    series.x.append(_short(x))
    series.mean.append(None if mean is None else _short(mean))
    series.low.append(None if low is None else _short(low))
    series.high.append(None if high is None else _short(high))


def _short(value: float) -> float:
    """Six significant digits are more than a screen shows, and half the bytes."""
    return float(f"{value:.6g}")


class Shares(msgspec.Struct, kw_only=True):
    """What time was made of, bar by bar. x: the bars' beginnings, ascending; width: of each; parts: name → share of
    what was recorded inside the bar, 0 … 1, a list as long as x."""

    x: list[float]
    width: float
    parts: dict[str, list[float]]


class ShareBins:
    """Spreads amounts over the time in which they fell, at places x ≥ 0."""

    def __init__(self, width: float = 1.0, most: int = MOST_PARTS) -> None:
        self._width = width
        self._most = most
        self._bins: dict[int, dict[str, float]] = {}

    def add(self, start: float, stop: float, amounts: Mapping[str, float]) -> None:
        """Amounts by name that fell evenly between two places."""
        start, stop = max(0.0, start), max(0.0, stop)
        while (stop - start) / self._width > self._most:
            self._fold()
        first, last = int(start // self._width), int(stop // self._width)
        for key in range(first, last + 1):
            inside = min(stop, (key + 1) * self._width) - max(start, key * self._width)
            share = inside / (stop - start) if stop > start else 1.0
            if share <= 0:
                continue
            mine = self._bins.setdefault(key, {})
            for name, amount in amounts.items():
                mine[name] = mine.get(name, 0.0) + amount * share
        while len(self._bins) > self._most:
            self._fold()

    def _fold(self) -> None:
        self._width *= 2
        folded: dict[int, dict[str, float]] = {}
        for key, amounts in self._bins.items():
            mine = folded.setdefault(key // 2, {})
            for name, amount in amounts.items():
                mine[name] = mine.get(name, 0.0) + amount
        self._bins = folded

    def shares(self) -> Shares:
        keys = sorted(self._bins)
        names = sorted({name for amounts in self._bins.values() for name in amounts})
        totals = [sum(self._bins[key].values()) or 1.0 for key in keys]
        parts = {
            name: [round(self._bins[key].get(name, 0.0) / total, 4) for key, total in zip(keys, totals, strict=True)]
            for name in names
        }
        return Shares(x=[_short(key * self._width) for key in keys], width=self._width, parts=parts)
