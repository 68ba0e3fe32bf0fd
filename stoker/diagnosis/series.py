"""Values that arrive one after the other, kept in bounded memory: means, and time series.

Plain arithmetic without numpy, so that `stoker why` starts fast. `run_data.py` uses them.
"""

import dataclasses
import math
from statistics import median


@dataclasses.dataclass(kw_only=True)
class Mean:
    """The mean and the extremes of the values that are not None; all None if there are none."""

    total: float = 0.0
    count: int = 0
    min_value: float | None = None
    max_value: float | None = None

    def add(self, value: float | None) -> None:
        if value is None:
            return
        self.total += value
        self.count += 1
        self.min_value = value if self.min_value is None else min(self.min_value, value)
        self.max_value = value if self.max_value is None else max(self.max_value, value)

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


MAX_POINTS = 256
"""Of a time series, at most: when there are more, neighboring points are averaged, so a run of weeks has as many."""


@dataclasses.dataclass(frozen=True)
class LinearFit:
    """A straight line through some points. slope: per second; r_squared: the fraction of the variance that it
    explains."""

    slope: float
    r_squared: float


class TimeSeries:
    """Values over time, at most MAX_POINTS, each the mean of the same number of consecutive values."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._points_per_bin = 1
        self._pending: list[tuple[float, float]] = []

    def add(self, t: float, value: float | None) -> None:
        """Ignores None and values that are not finite."""
        if value is None or not math.isfinite(value):
            return
        self._pending.append((t, float(value)))
        if len(self._pending) < self._points_per_bin:
            return
        self._points.append(_centroid(self._pending))
        self._pending = []
        if len(self._points) >= MAX_POINTS:
            self._points = [_centroid(self._points[n : n + 2]) for n in range(0, MAX_POINTS, 2)]
            self._points_per_bin *= 2

    @property
    def points(self) -> list[tuple[float, float]]:
        """(t, value), in the order in which they were added."""
        return self._points + ([_centroid(self._pending)] if self._pending else [])

    @property
    def values(self) -> list[float]:
        return [value for _, value in self.points]

    @property
    def span_s(self) -> float:
        points = self.points
        return points[-1][0] - points[0][0] if points else 0.0

    @property
    def growth(self) -> float:
        values = self.values
        return values[-1] - values[0] if values else 0.0

    def fit_line(self, start_fraction: float = 0.0, end_fraction: float = 1.0) -> LinearFit | None:
        """Least squares through a part of the points, given as fractions of them; None with fewer than three."""
        points = self.points
        selected = points[int(start_fraction * len(points)) : math.ceil(end_fraction * len(points))]
        if len(selected) < 3:
            return None
        t_mean, v_mean = _centroid(selected)
        tt = sum((t - t_mean) ** 2 for t, _ in selected)
        vv = sum((v - v_mean) ** 2 for _, v in selected)
        tv = sum((t - t_mean) * (v - v_mean) for t, v in selected)
        if tt <= 0:
            return None
        return LinearFit(tv / tt, tv * tv / (tt * vv) if vv > 0 else 0.0)

    def fit_steady_growth(
        self, *, min_r_squared: float, min_slope_ratio: float, min_span_s: float, min_points: float
    ) -> LinearFit | None:
        """The line of growth that is straight and does not slow down; None if there is no such growth."""
        if self.span_s < min_span_s or len(self.points) < min_points:
            return None
        whole, early, late = self.fit_line(), self.fit_line(0.0, 0.5), self.fit_line(0.5, 1.0)
        if whole is None or early is None or late is None or whole.slope <= 0 or whole.r_squared < min_r_squared:
            return None
        return late if late.slope > 0 and late.slope >= min_slope_ratio * early.slope else None

    def running_medians(self, window_size: int) -> list[float]:
        """Medians of `window_size` consecutive values; empty if there are fewer."""
        values = self.values
        return [median(values[n : n + window_size]) for n in range(len(values) - window_size + 1)]


def _centroid(points: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(t for t, _ in points) / len(points), sum(v for _, v in points) / len(points)
