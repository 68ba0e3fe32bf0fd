"""The charts of the page as data for plotly: training curves, time, machine, precision and recall, scores.

The script of the page (`page.js`) adds axes, fonts and colors for light mode, dark mode and print. Colors are CSS
variables of the page, `var(--c0)` and so on. Each chart has a caption in words, and tables contain the important
numbers too.
"""

import html
from typing import Any

from stoker.evaluation.document import HISTOGRAM_BINS, NUM_RECALL_POINTS, Evaluation
from stoker.report import format as fmt
from stoker.report.page.markup import Markup, tag
from stoker.report.run_report import RunReport
from stoker.report.series import Series

NUM_COLORS = 10
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
MAX_CLASSES = 10
"""Curves of classes in a chart; more are not distinguishable."""
PHASE_COLORS = {
    "compute": "var(--c0)",
    "startup": "var(--c4)",
    "compile": "var(--c6)",
    "input_wait": "var(--c2)",
    "h2d": "var(--c7)",
    "host": "var(--c3)",
    "sync": "var(--c9)",
    "comm": "var(--c6)",
    "straggler": "var(--c7)",
    "eval": "var(--c5)",
    "checkpoint": "var(--c1)",
    "recovery": "var(--c3)",
    "idle": "var(--c9)",
    "unattributed": "var(--c8)",
}


class Charts:
    """Collects the charts of a page; its script draws `data`."""

    def __init__(self) -> None:
        self.data: list[dict[str, Any]] = []

    def add(
        self,
        title: str,
        description: str,
        traces: list[dict[str, Any]],
        *,
        height: int = 260,
        x: str = "",
        y: str = "",
        **layout: Any,
    ) -> Markup | None:
        """Adds a chart and returns its element; None without traces. x, y: titles of the axes."""
        if not traces:
            return None
        name = f"chart-{len(self.data)}"
        axes: dict[str, Any] = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
        for key, value in layout.items():
            axes[key] = axes[key] | value if key in axes else value
        self.data.append({"id": name, "height": height, "data": traces, "layout": axes})
        chart_div = tag(
            "div",
            id=name,
            class_="chart",
            style=f"min-height:{height}px",
            role="img",
            aria_label=f"Chart: {title}. {description}",
        )
        return tag(
            "figure", tag("figcaption", tag("b", title), " ", tag("span", description)), chart_div, class_="plot"
        )


def _line_style(index: int) -> dict[str, Any]:
    return {"color": f"var(--c{index % NUM_COLORS})", "width": 2, "dash": _DASHES[index % len(_DASHES)]}


def escape_name(name: str) -> str:
    """A name for plotly, which interprets some HTML in texts."""
    return html.escape(name, quote=False)


def line(
    name: str, series: Series, color_index: int, *, band: bool = False, scale: float = 1.0, x_scale: float = 1.0
) -> list[dict[str, Any]]:
    """Traces of a curve; with `band` also the range between minimum and maximum, if points are means."""

    def scaled(values: list[float | None]) -> list[float | None]:
        return values if scale == 1.0 else [None if value is None else round(value * scale, 6) for value in values]

    color = f"var(--c{color_index % NUM_COLORS})"
    x = [float(f"{value * x_scale:.6g}") for value in series.x]
    traces: list[dict[str, Any]] = []
    if band and series.low != series.high:
        common = {"x": x, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
        traces += [
            common | {"y": scaled(series.low)},
            common | {"y": scaled(series.high), "fill": "tonexty", "fillcolor": color, "opacity": 0.25, "faint": True},
        ]
    show_markers = len(series.x) < 3
    traces.append(
        {
            "x": x,
            "y": scaled(series.mean),
            "name": escape_name(name),
            "mode": "lines+markers" if show_markers else "lines",
            "line": _line_style(color_index),
        }
    )
    return traces


def loss(charts: Charts, report: RunReport) -> Markup | None:
    curves = {name.removeprefix("loss/"): series for name, series in report.curves.items() if name.startswith("loss/")}
    names = sorted(curves, key=lambda name: (name != "total", name))
    if len(names) == 2:
        names = [name for name in names if name != "total"] if "total" in curves else names
    traces = [trace for n, name in enumerate(names) for trace in line(name, curves[name], n, band=n == 0)]
    total = curves.get("total")
    first, last = (total.mean[0], total.last()) if total is not None and total.mean else (None, None)
    return charts.add(
        "Loss",
        f"total: {fmt.number(first)} at the start, {fmt.number(last)} at the end",
        traces,
        x="step",
        **_restarts(report),
    )


def scores(charts: Charts, report: RunReport) -> Markup | None:
    steps = [result.step for result in report.eval_history]
    traces = []
    for n, (title, name) in enumerate((("AP50", "ap50"), ("AP", "ap"), ("AP75", "ap75"))):
        values = [getattr(result.metrics, name) for result in report.eval_history]
        if any(value is not None for value in values):
            traces.append(
                {
                    "x": steps,
                    "y": [None if v is None else round(v, 4) for v in values],
                    "name": title,
                    "mode": "lines+markers",
                    "marker": {"symbol": ("circle", "square", "diamond")[n], "size": 7},
                    "line": _line_style(n),
                }
            )
    best = report.best
    description = "" if best is None else f"best AP {fmt.metric(best.metrics.ap)} at step {best.step:,}"
    return charts.add(
        "AP on the validation split",
        description,
        traces,
        x="step",
        yaxis={"rangemode": "tozero"},
        **_restarts(report),
    )


def step_curve(
    charts: Charts, report: RunReport, name: str, title: str, description: str, *, scale: float = 1.0, **layout: Any
) -> Markup | None:
    """A chart of one curve by steps; None if it was not recorded."""
    series = report.curves.get(name)
    if series is None:
        return None
    return charts.add(
        title,
        description,
        line(title, series, 0, band=True, scale=scale),
        height=200,
        x="step",
        showlegend=False,
        **layout,
        **_restarts(report),
    )


def _restarts(report: RunReport) -> dict[str, Any]:
    """Layout: vertical lines at the steps at which the run resumed."""
    restarts = report.restarts[-30:]
    return vertical_lines([(restart.step, f"attempt {restart.attempt}") for restart in restarts])


def vertical_lines(positions: list[tuple[float, str]]) -> dict[str, Any]:
    """Layout: vertical lines with texts at positions of the x axis."""
    if not positions:
        return {}
    full_height = {"type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": 1}
    dashed = {"color": "var(--muted)", "width": 1, "dash": "dash"}
    at_top = {"y": 1, "xref": "x", "yref": "paper", "showarrow": False, "xanchor": "left", "yanchor": "top"}
    font = {"size": 10, "color": "var(--muted)"}
    return {
        "shapes": [full_height | {"x0": x, "x1": x, "line": dashed} for x, _ in positions],
        "annotations": [at_top | {"x": x, "text": text, "font": font} for x, text in positions[:6]],
    }


def time_unit(span_s: float) -> tuple[str, float]:
    """(unit for a time span, seconds per unit)."""
    for name, seconds in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if span_s > 3 * seconds:
            return name, seconds
    return "seconds", 1.0


def recorded_duration_s(report: RunReport) -> float:
    """Seconds from the start of the run to its last window or sample."""
    ends = [series.x[-1] for series in report.machine.values() if series.x]
    if report.phases.x:
        ends.append(report.phases.x[-1] + report.phases.width)
    return max(ends, default=0.0)


def machine(
    charts: Charts,
    report: RunReport,
    prefix: str,
    title: str,
    description: str,
    names: tuple[str, ...],
    *,
    scale: float = 1.0,
    **layout: Any,
) -> Markup | None:
    """A chart of the curves `prefix/name` of devices.jsonl that were recorded."""
    unit, seconds = time_unit(recorded_duration_s(report))
    traces = [
        trace
        for n, name in enumerate(names)
        if (series := report.machine.get(f"{prefix}/{name}")) is not None
        for trace in line(name, series, n, band=n == 0, scale=scale, x_scale=1 / seconds)
    ]
    return charts.add(title, description, traces, height=200, x=f"{unit} since the start", **layout)


def precision_recall(charts: Charts, evaluation: Evaluation) -> Markup | None:
    recalls = [n / (NUM_RECALL_POINTS - 1) for n in range(NUM_RECALL_POINTS)]
    means = (
        ("IoU 0.50", evaluation.curves.iou50),
        ("IoU 0.75", evaluation.curves.iou75),
        ("mean", evaluation.curves.mean),
    )
    traces = [_curve(recalls, values, name, n) for n, (name, values) in enumerate(means) if values]
    return charts.add(
        "Precision–recall curves, mean over the classes",
        "mean: over IoU 0.50 … 0.95; its area is AP",
        traces,
        x="recall",
        y="precision",
        **_UNIT_AXES,
    )


def precision_recall_by_class(charts: Charts, evaluation: Evaluation) -> Markup | None:
    recalls = [n / (NUM_RECALL_POINTS - 1) for n in range(NUM_RECALL_POINTS)]
    selected = [
        class_eval for class_eval in evaluation.classes if class_eval.curves is not None and class_eval.curves.iou50
    ]
    selected = sorted(selected, key=lambda class_eval: -class_eval.boxes)[:MAX_CLASSES]
    traces = [
        _curve(recalls, class_eval.curves.iou50, class_eval.name, n)
        for n, class_eval in enumerate(selected)
        if class_eval.curves is not None
    ]
    truncated = len(evaluation.classes) > len(selected)
    description = "at IoU 0.50" + (f", the {len(selected)} most frequent classes" if truncated else "")
    return charts.add("Precision–recall curves by class", description, traces, x="recall", y="precision", **_UNIT_AXES)


_UNIT_AXES: dict[str, Any] = {"xaxis": {"range": [0, 1]}, "yaxis": {"range": [0, 1.02]}}


def _curve(x: list[float], y: list[float], name: str, color_index: int) -> dict[str, Any]:
    return {
        "x": x,
        "y": y,
        "name": escape_name(name),
        "mode": "lines",
        "line": _line_style(color_index),
    }


def score_histogram(charts: Charts, evaluation: Evaluation) -> Markup | None:
    tp = [sum(class_eval.tp_scores[n] for class_eval in evaluation.classes) for n in range(HISTOGRAM_BINS)]
    fp = [sum(class_eval.fp_scores[n] for class_eval in evaluation.classes) for n in range(HISTOGRAM_BINS)]
    bin_centers = [(n + 0.5) / HISTOGRAM_BINS for n in range(HISTOGRAM_BINS)]
    traces = [
        {"type": "bar", "x": bin_centers, "y": tp, "name": "TP", "marker": {"color": "var(--c0)"}},
        {
            "type": "bar",
            "x": bin_centers,
            "y": fp,
            "name": "FP",
            "marker": {"color": "rgba(0,0,0,0)", "line": {"color": "var(--c3)", "width": 2}},
        },
    ]
    description = "of detections with score ≥ 0.05, at IoU 0.50; a good detector has its false positives at low scores"
    return charts.add(
        "Scores of true and false positives",
        description,
        traces,
        x="score",
        y="detections (log)",
        barmode="group",
        bargap=0.08,
        xaxis={"range": [0, 1]},
        yaxis={"type": "log"},
    )
