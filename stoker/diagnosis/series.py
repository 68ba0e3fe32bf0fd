"""Numbers that come one after the other, kept in bounded memory: means, and courses that can be judged as a whole.

Plain arithmetic. `run_data.py` is made of these.
"""

import dataclasses
import math
from statistics import median


@dataclasses.dataclass(kw_only=True)
class Mean:
    """A mean, and the extremes, of the values that exist; all None without any."""

    total: float = 0.0
    count: int = 0
    least: float | None = None
    most: float | None = None

    def add(self, value: float | None) -> None:
        if value is None:
            return
        self.total += value
        self.count += 1
        self.least = value if self.least is None else min(self.least, value)
        self.most = value if self.most is None else max(self.most, value)

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


POINTS = 256
"""Of a course, at most: when there are more, neighbours become their mean, so a run of weeks has as many."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A straight line through some points. slope: per second; straight: the share of the variance that it explains."""

    slope: float
    straight: float


class Course:
    """Values over time, at most POINTS of them, each the mean of equally many in a row."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._each = 1
        self._open: list[tuple[float, float]] = []

    def add(self, t: float, value: float | None) -> None:
        """Passes over what is absent or not finite."""
        if value is None or not math.isfinite(value):
            return
        self._open.append((t, float(value)))
        if len(self._open) < self._each:
            return
        self._points.append(_middle(self._open))
        self._open = []
        if len(self._points) >= POINTS:
            self._points = [_middle(self._points[n : n + 2]) for n in range(0, POINTS, 2)]
            self._each *= 2

    @property
    def points(self) -> list[tuple[float, float]]:
        """(t, value), in the order in which they came."""
        return self._points + ([_middle(self._open)] if self._open else [])

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

    def line(self, first: float = 0.0, last: float = 1.0) -> Line | None:
        """Least squares through the part from `first` to `last` (shares of the points); None where that is no line."""
        points = self.points
        some = points[int(first * len(points)) : math.ceil(last * len(points))]
        if len(some) < 3:
            return None
        t_mean, v_mean = _middle(some)
        tt = sum((t - t_mean) ** 2 for t, _ in some)
        vv = sum((v - v_mean) ** 2 for _, v in some)
        tv = sum((t - t_mean) * (v - v_mean) for t, v in some)
        if tt <= 0:
            return None
        return Line(tv / tt, tv * tv / (tt * vv) if vv > 0 else 0.0)

    def grows_steadily(
        self, *, straight: float, goes_on: float, least_span_s: float, least_points: float
    ) -> Line | None:
        """The line of growth that is straight and does not slow down; None where there is no such growth."""
        if self.span_s < least_span_s or len(self.points) < least_points:
            return None
        whole, early, late = self.line(), self.line(0.0, 0.5), self.line(0.5, 1.0)
        if whole is None or early is None or late is None or whole.slope <= 0 or whole.straight < straight:
            return None
        return late if late.slope > 0 and late.slope >= goes_on * early.slope else None

    def medians(self, group: int) -> list[float]:
        """Running medians of `group` values in a row; empty where there are fewer."""
        values = self.values
        return [median(values[n : n + group]) for n in range(len(values) - group + 1)]


def _middle(points: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(t for t, _ in points) / len(points), sum(v for _, v in points) / len(points)
