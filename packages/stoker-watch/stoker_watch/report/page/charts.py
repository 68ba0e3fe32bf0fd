"""The charts of the page of a run as data for plotly.

The script of the page (`page.js`) adds axes, fonts and colors for light mode, dark mode and print. Colors are CSS
variables of the page, `var(--c0)` and so on. Each chart has a caption; tables have the important numbers too.
"""

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stoker_watch.report import format as fmt
from stoker_watch.report.explain import PHASE_COLORS
from stoker_watch.report.page.markup import Markup, clean, tag
from stoker_watch.report.run_report import RunReport
from stoker_watch.report.series import CURVES, Chart, Series
from stoker_watch.runs.evaluation import HISTOGRAM_BINS, NUM_RECALL_POINTS, Evaluation
from stoker_watch.runs.records import PHASES, WARNING_KINDS

Trace = dict[str, Any]
"""A curve or bars, as plotly takes it."""
NUM_COLORS = 10
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
MAX_CLASSES = 10
"""Curves of classes in a chart; more are not distinguishable."""
MAX_RESTARTS = 30
"""Restarts that are marked, the newest."""
FRACTIONS: dict[str, Any] = {"range": [0, 1.02], "tickformat": ".0%"}
FROM_ZERO: dict[str, Any] = {"rangemode": "tozero"}
MAX_DEVICES = 8
"""GPUs that are drawn; the JSON has all."""
_RECALLS = [n / (NUM_RECALL_POINTS - 1) for n in range(NUM_RECALL_POINTS)]
_PRECISION_RECALL: dict[str, Any] = {
    "x": "recall", "y": "precision", "xaxis": {"range": [0, 1]}, "yaxis": {"range": [0, 1.02]},
}  # fmt: skip
_TIMELINE_KINDS = WARNING_KINDS | {"checkpoint_saved", "resumed", "preempted", "failed", "finished"}


class Charts:
    """Collects the charts of a page; its script draws `data`."""

    def __init__(self) -> None:
        self.data: list[dict[str, Any]] = []

    def add(
        self,
        title: str,
        description: str,
        traces: list[Trace],
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
        label, style = f"Chart: {title}. {description}", f"min-height:{height}px"
        caption = tag("figcaption", tag("b", title), " ", tag("span", description))
        chart = tag("div", id=name, class_="chart", style=style, role="img", aria_label=label)
        return tag("figure", caption, chart, class_="plot")

    def as_json(self) -> Markup:
        """The data. Without < no text can end the script element that contains it."""
        text = json.dumps(self.data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
        return Markup(str(clean(text)).replace("<", "\\u003c"))


def escape_name(name: str) -> str:
    """A name for plotly, which interprets some HTML in texts, without control characters."""
    return html.escape(str(clean(name)), quote=False)


def color(index: int) -> str:
    """The n-th color of the page; they repeat."""
    return f"var(--c{index % NUM_COLORS})"


def curve(name: str, x: Sequence[Any], y: Sequence[float | None], index: int, **options: Any) -> Trace:
    """A line in the style of the index. Fewer than three points are marked."""
    style = {"color": color(index), "width": 2, "dash": _DASHES[index % len(_DASHES)]}
    mode = "lines+markers" if len(x) < 3 else "lines"
    return {"x": x, "y": y, "name": escape_name(name), "mode": mode, "line": style} | options


def bars(name: str, x: Sequence[Any], y: Sequence[Any], fill: str | list[str], **options: Any) -> Trace:
    """Bars in a color, or in one each."""
    return {"type": "bar", "x": x, "y": y, "name": escape_name(name), "marker": {"color": fill}} | options


def line(
    name: str, series: Series, index: int, *, band: bool = False, scale: float = 1.0, x_scale: float = 1.0
) -> list[Trace]:
    """Traces of a curve; with `band` also the range between minimum and maximum, if points are means."""

    def scaled(values: list[float | None]) -> list[float | None]:
        return values if scale == 1.0 else [None if value is None else round(value * scale, 6) for value in values]

    x = [float(f"{value * x_scale:.6g}") for value in series.x]
    traces: list[Trace] = []
    if band and series.low != series.high:
        common = {"x": x, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
        filled = {"fill": "tonexty", "fillcolor": color(index), "opacity": 0.25, "faint": True}
        traces += [common | {"y": scaled(series.low)}, common | {"y": scaled(series.high)} | filled]
    return [*traces, curve(name, x, scaled(series.mean), index)]


def training(charts: Charts, report: RunReport) -> list[Markup]:
    """AP, loss and the other curves by step that were recorded."""
    figures = [_scores(charts, report), _loss(charts, report)]
    figures += [_chart(charts, chart, report.curves, "step", **_restarts(report)) for chart in CURVES.charts["step"]]
    return [figure for figure in figures if figure is not None]


def _chart(
    charts: Charts, chart: Chart, curves: Mapping[str, Series], x: str, *, x_scale: float = 1.0, **layout: Any
) -> Markup | None:
    """The curves of a chart that were recorded; None if there is none."""
    prefix = f"{chart.prefix}/" if chart.prefix else ""
    traces = [
        trace
        for n, name in enumerate(chart.curves)
        if (series := curves.get(prefix + name)) is not None
        for trace in line(name, series, n, band=n == 0, scale=chart.scale, x_scale=x_scale)
    ]
    options: dict[str, Any] = {"yaxis": chart.axis, "showlegend": len(chart.curves) > 1} | layout
    return charts.add(chart.title, chart.description, traces, height=200, x=x, **options)


def _loss(charts: Charts, report: RunReport) -> Markup | None:
    curves = {name.removeprefix("loss/"): series for name, series in report.curves.items() if name.startswith("loss/")}
    names = sorted(curves, key=lambda name: (name != "total", name))
    if len(names) == 2 and "total" in names:  # the total is the only component
        names.remove("total")
    traces = [trace for n, name in enumerate(names) for trace in line(name, curves[name], n, band=n == 0)]
    total = curves.get("total")
    first, last = (total.mean[0], total.mean[-1]) if total is not None and total.mean else (None, None)
    description = f"total: {fmt.number(first)} at the start, {fmt.number(last)} at the end"
    return charts.add("Loss", description, traces, x="step", **_restarts(report))


def _scores(charts: Charts, report: RunReport) -> Markup | None:
    best = report.best
    if best is None:
        return None
    steps = [result.step for result in report.eval_history]
    traces = []
    for n, (title, name) in enumerate((("AP50", "ap50"), ("AP", "ap"), ("AP75", "ap75"))):
        values = [getattr(result.metrics, name) for result in report.eval_history]
        rounded = [None if value is None else round(value, 4) for value in values]
        marker = {"symbol": ("circle", "square", "diamond")[n], "size": 7}
        traces.append(curve(title, steps, rounded, n, mode="lines+markers", marker=marker))
    description = f"best AP {fmt.metric(best.metrics.ap)} at step {best.step:,}"
    title = "AP on the validation split"
    return charts.add(title, description, traces, x="step", yaxis=FROM_ZERO, **_restarts(report))


def _restarts(report: RunReport) -> dict[str, Any]:
    """Layout: vertical lines at the steps at which the run resumed."""
    return vertical_lines([(restart.step, f"attempt {restart.attempt}") for restart in report.restarts])


def vertical_lines(positions: list[tuple[float, str]]) -> dict[str, Any]:
    """Layout: vertical lines with texts at positions of the x axis, the last MAX_RESTARTS; the first six have texts."""
    if not positions:
        return {}
    positions = positions[-MAX_RESTARTS:]
    full_height = {"type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": 1}
    dashed = {"color": "var(--muted)", "width": 1, "dash": "dash"}
    at_top = {"y": 1, "xref": "x", "yref": "paper", "showarrow": False, "xanchor": "left", "yanchor": "top"}
    font = {"size": 10, "color": "var(--muted)"}
    return {
        "shapes": [full_height | {"x0": x, "x1": x, "line": dashed} for x, _ in positions],
        "annotations": [at_top | {"x": x, "text": text, "font": font} for x, text in positions[:6]],
    }


def time_unit(report: RunReport) -> tuple[str, float]:
    """(unit for the time from the start of the run to its last window or sample, seconds per unit)."""
    ends = [series.x[-1] for series in report.machine.values() if series.x]
    if report.phases.x:
        ends.append(report.phases.x[-1] + report.phases.width)
    for name, seconds in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if max(ends, default=0.0) > 3 * seconds:
            return name, seconds
    return "seconds", 1.0


def gpus(report: RunReport) -> list[str]:
    """Prefixes of the curves of GPUs: `gpu 0` and so on."""
    names = {name.partition("/")[0] for name in report.machine if name.startswith("gpu ")}
    return sorted(names, key=lambda name: int(name.removeprefix("gpu ")))


def machine(charts: Charts, report: RunReport) -> list[Markup]:
    """Telemetry of GPUs and host: the curves of devices.jsonl that were recorded."""
    unit, seconds = time_unit(report)
    shown = [
        msgspec.structs.replace(chart, prefix=gpu, title=f"{gpu.upper()}: {chart.title}")
        for gpu in gpus(report)[:MAX_DEVICES]
        for chart in CURVES.charts["gpu"]
    ]
    x, x_scale = f"{unit} since the start", 1 / seconds
    figures = [_chart(charts, chart, report.machine, x, x_scale=x_scale) for chart in (*shown, *CURVES.charts["host"])]
    return [figure for figure in figures if figure is not None]


def precision_recall(charts: Charts, evaluation: Evaluation) -> Markup | None:
    curves = evaluation.curves
    means = (("IoU 0.50", curves.iou50), ("IoU 0.75", curves.iou75), ("mean", curves.mean))
    traces = [curve(name, _RECALLS, values, n) for n, (name, values) in enumerate(means) if values]
    title, description = "Precision–recall curves, mean over the classes", "mean: over IoU 0.50 … 0.95; its area is AP"
    return charts.add(title, description, traces, **_PRECISION_RECALL)


def precision_recall_by_class(charts: Charts, evaluation: Evaluation) -> Markup | None:
    known = [(row.boxes, row.name, row.curves.iou50) for row in evaluation.classes if row.curves and row.curves.iou50]
    selected = sorted(known, key=lambda row: -row[0])[:MAX_CLASSES]
    traces = [curve(name, _RECALLS, values, n) for n, (_, name, values) in enumerate(selected)]
    truncated = f", the {len(selected)} most frequent classes" if len(evaluation.classes) > len(selected) else ""
    title, description = "Precision–recall curves by class", f"at IoU 0.50{truncated}"
    return charts.add(title, description, traces, **_PRECISION_RECALL)


def score_histogram(charts: Charts, evaluation: Evaluation) -> Markup | None:
    bin_centers = [(n + 0.5) / HISTOGRAM_BINS for n in range(HISTOGRAM_BINS)]
    tp = [sum(counts) for counts in zip(*(row.tp_scores for row in evaluation.classes), strict=True)]
    fp = [sum(counts) for counts in zip(*(row.fp_scores for row in evaluation.classes), strict=True)]
    outline = {"color": "rgba(0,0,0,0)", "line": {"color": color(3), "width": 2}}
    return charts.add(
        "Scores of true and false positives",
        "of detections with score ≥ 0.05, at IoU 0.50; a good detector has its false positives at low scores",
        [bars("TP", bin_centers, tp, color(0)), bars("FP", bin_centers, fp, "", marker=outline)],
        x="score",
        y="detections (log)",
        barmode="group",
        bargap=0.08,
        xaxis={"range": [0, 1]},
        yaxis={"type": "log"},
    )


def timeline(charts: Charts, report: RunReport) -> Markup | None:
    """The phases over time, with the events above them; None if no time is recorded."""
    if not report.phases.x:
        return None
    unit, seconds = time_unit(report)
    axis = {"fixedrange": True, "zeroline": False}
    return charts.add(
        "Timeline",
        f"drag to zoom, double-click to reset; a bar is {fmt.duration(report.phases.width)}; blank: no running process",
        _phases(report, seconds) + _events(report, seconds),
        height=360,
        legend={"traceorder": "normal"},
        barmode="stack",
        bargap=0,
        zooms=True,
        xaxis={"title": {"text": f"{unit} since the start"}, "rangeslider": {"visible": True, "thickness": 0.08}},
        yaxis=FRACTIONS | axis | {"domain": [0.0, 0.86], "range": [0, 1], "nticks": 4, "title": {"text": "phases"}},
        yaxis2=axis | {"domain": [0.9, 1.0], "tickvals": [0], "ticktext": ["events"]},
        **vertical_lines([(restart.after_s / seconds, f"attempt {restart.attempt}") for restart in report.restarts]),
    )


def _phases(report: RunReport, seconds: float) -> list[Trace]:
    width = report.phases.width / seconds
    x = [float(f"{start / seconds + width / 2:.6g}") for start in report.phases.x]
    ordered = sorted(report.phases.fractions, key=lambda name: PHASES.index(name) if name in PHASES else len(PHASES))
    return [
        bars(name.replace("_", " "), x, report.phases.fractions[name], PHASE_COLORS.get(name, "var(--c8)"), width=width)
        | {"hovertemplate": "%{y:.0%}"}
        for name in ordered
    ]


def _events(report: RunReport, seconds: float) -> list[Trace]:
    """Events as points; their texts appear below the cursor."""
    shown = [event for event in report.events if event.kind in _TIMELINE_KINDS]
    x = [round(max(0.0, event.t - (report.start_t or 0.0)) / seconds, 6) for event in shown]
    texts = [escape_name(f"{event.kind}: {event.text.partition(chr(10))[0]}"[:200]) for event in shown]
    style = {"mode": "markers", "marker": {"color": "var(--muted)", "size": 8, "symbol": "line-ns-open"}}
    hover = {"showlegend": False, "hovertemplate": "%{text}<extra></extra>"}
    return [{"x": x, "y": [0] * len(x), "text": texts, "yaxis": "y2"} | style | hover] if shown else []
