"""Curves of a run for the report, as data.

Any number of values in, a bounded number of points out, in one pass and bounded memory.

A point is a bin with its mean, minimum and maximum. The bin width doubles when there are too many bins, so the page of
a run of weeks is as large as that of an hour. `page/charts.py` draws the curves.
"""

import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from stoker_watch.diagnosis.reader import Observer
from stoker_watch.knowledge import read_toml
from stoker_watch.runs.schemas import DeviceSample, Event, StepWindow
from stoker_watch.runs.totals import split_by_interval

MAX_POINTS = 2000
"""Points of a curve: more than the pixel columns of a screen."""
MAX_BARS = 1000
"""Bars of the phases over time."""
MAX_SAMPLE_GAP_S = 10.0
"""A curve of telemetry has a gap where samples are further apart."""
Stats = tuple[int, float, float, float, float]
"""What is kept of the values in a bin: count, sum, sum of x, minimum, maximum."""


class Chart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A chart of the page; curves.toml explains the fields."""

    title: str
    description: str
    curves: tuple[str, ...]
    prefix: str = ""
    scale: float = 1.0
    axis: dict[str, Any] = {}


class _Curves(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: dict[str, str]
    gpu: dict[str, str]
    charts: dict[Literal["step", "gpu", "host"], list[Chart]]


CURVES = msgspec.convert(read_toml("curves.toml"), _Curves)
"""Which curves there are, and the charts of the page."""


class Series(msgspec.Struct, kw_only=True):
    """A curve of N points, ascending in x. A gap is a point whose values are null."""

    x: list[float]
    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]


class Bins:
    """Collects the values of one curve, at x ≥ 0 in any order."""

    def __init__(self, width: float = 1.0, max_bins: int = MAX_POINTS) -> None:
        self._width = width
        self._max_bins = max_bins
        self._bins: dict[int, Stats] = {}

    def add(self, x: float, value: float) -> None:
        _add_point(self._bins, int(x // self._width), (1, value, x, value, value))
        while len(self._bins) > self._max_bins:
            self._width *= 2
            merged: dict[int, Stats] = {}
            for key, stats in self._bins.items():
                _add_point(merged, key // 2, stats)
            self._bins = merged

    def series(self, *, max_gap: float | None = None) -> Series:
        """The curve. It has a gap where there is no value for more than `max_gap` and three bins; None: no gaps."""
        points: list[tuple[float, float | None, float | None, float | None]] = []
        for key in sorted(self._bins):
            count, total, x_sum, low, high = self._bins[key]
            x = x_sum / count
            if max_gap is not None and points and x - points[-1][0] > max(max_gap, 3 * self._width):
                points.append(((points[-1][0] + x) / 2, None, None, None))
            points.append((x, total / count, low, high))
        rounded = [[None if value is None else _round_significant(value) for value in point] for point in points]
        x_values, mean, low_values, high_values = zip(*rounded, strict=True) if rounded else ((), (), (), ())
        return Series(x=list(x_values), mean=list(mean), low=list(low_values), high=list(high_values))


def _add_point(bins: dict[int, Stats], key: int, point: Stats) -> None:
    known = bins.get(key)
    if known is not None:
        count, total, x_sum, low, high = known
        point = count + point[0], total + point[1], x_sum + point[2], min(low, point[3]), max(high, point[4])
    bins[key] = point


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
        self._bins: dict[int, Counter[str]] = {}

    def add(self, start: float, stop: float, amounts: Mapping[str, float]) -> None:
        """Adds amounts by name, evenly distributed between start and stop."""
        start, stop = max(0.0, start), max(0.0, stop)
        while (stop - start) / self._width > self._max_bins:
            self._merge_bins()
        whole = [(int(start // self._width), 1.0)]
        for key, fraction in split_by_interval(start, stop, self._width) if stop > start else whole:
            self._bins.setdefault(key, Counter()).update({n: amount * fraction for n, amount in amounts.items()})
        while len(self._bins) > self._max_bins:
            self._merge_bins()

    def _merge_bins(self) -> None:
        self._width *= 2
        merged: dict[int, Counter[str]] = {}
        for key, amounts in self._bins.items():
            merged.setdefault(key // 2, Counter()).update(amounts)
        self._bins = merged

    def fraction_series(self) -> FractionSeries:
        bins = sorted(self._bins.items())
        names = sorted({name for _, amounts in bins for name in amounts})
        fractions = {
            name: [round(amounts[name] / (amounts.total() or 1.0), 4) for _, amounts in bins] for name in names
        }
        x = [_round_significant(key * self._width) for key, _ in bins]
        return FractionSeries(x=x, width=self._width, fractions=fractions)


class RunCurves(Observer):
    """Collects the events and the curves of a run while it is read. By step: `loss/…`, `lr`, `grad_norm`, `img_per_s`,
    `memory_peak_bytes`; by seconds since `start_t`: all else."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.start_t: float | None = None
        """Unix time: the first window covers the start of the process, before the first event."""
        self._steps: dict[str, Bins] = {}
        self._machine: dict[str, Bins] = {}
        self._phases: FractionBins | None = None

    def event(self, event: Event) -> None:
        self.start_t = event.t if self.start_t is None else self.start_t
        self.events.append(event)

    def window(self, rank: int, window: StepWindow) -> None:
        if rank != 0:
            return
        begin_t = window.t - window.wall_s
        if self._phases is None:
            self._phases = FractionBins()
            self.start_t = begin_t if self.start_t is None else min(self.start_t, begin_t)
        start_t = self.start_t or 0.0
        self._phases.add(begin_t - start_t, window.t - start_t, window.phases)
        if not window.window_steps:
            return
        values: dict[str, float | None] = {f"loss/{name}": value for name, value in window.losses.items()}
        values |= {"lr": window.lr, "grad_norm": window.grad_norm, "memory_peak_bytes": window.memory_peak_bytes}
        if window.wall_s > 0 and window.num_images:  # 0 for an external job that does not report them
            values["img_per_s"] = window.num_images * window.ranks / window.wall_s
        _add_values(self._steps, window.step, values)

    def sample(self, sample: DeviceSample) -> None:
        cores = sample.cpu_core_utilization
        values: dict[str, float | None] = (
            {"cpu/mean": statistics.fmean(cores), "cpu/busiest core": max(cores)} if cores else {}
        )
        values |= {name: getattr(sample, field) for name, field in CURVES.host.items()}
        for gpu in sample.gpus:
            values |= {f"gpu {gpu.index}/{name}": getattr(gpu, field) for name, field in CURVES.gpu.items()}
        _add_values(self._machine, max(0.0, sample.t - (self.start_t or 0.0)), values)

    def steps(self) -> dict[str, Series]:
        return {name: bins.series() for name, bins in self._steps.items()}

    def machine(self) -> dict[str, Series]:
        return {name: bins.series(max_gap=MAX_SAMPLE_GAP_S) for name, bins in self._machine.items()}

    def phases(self) -> FractionSeries:
        return (self._phases or FractionBins()).fraction_series()


def _add_values(curves: dict[str, Bins], x: float, values: Mapping[str, float | None]) -> None:
    for name, value in values.items():
        if value is not None:
            curves.setdefault(name, Bins()).add(x, value)
