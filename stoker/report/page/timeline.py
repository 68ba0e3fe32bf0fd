"""The timeline of the page: findings, phases, and telemetry of device and host in one chart with a common time axis.

The positions of the marks come from `report/timeline.py`.
"""

from typing import Any

from stoker.report import format as fmt
from stoker.report.page.charts import (
    PHASE_COLORS,
    Charts,
    escape_name,
    recorded_duration_s,
    time_unit,
    vertical_lines,
)
from stoker.report.page.markup import Markup
from stoker.report.run_report import RunReport
from stoker.runs.records import PHASES

MAX_DEVICES = 8
"""Maximum number of GPUs in the timeline; the machine section has more."""
_SEVERITIES = {"critical": "var(--c3)", "warning": "var(--c2)", "info": "var(--c9)"}


def timeline(charts: Charts, report: RunReport) -> Markup | None:
    """The chart; None if no time is recorded."""
    if not report.phases.x:
        return None
    unit, seconds = time_unit(recorded_duration_s(report))
    traces = _phases(report, seconds) + _counters(report, seconds) + _marks(report, seconds)
    rows = max((mark.finding_number for mark in report.marks if mark.finding_number is not None), default=0)
    fraction_axis: dict[str, Any] = {"range": [0, 1.02], "tickformat": ".0%", "fixedrange": True, "nticks": 4}
    has_gpus = any(trace.get("yaxis") == "y2" for trace in traces)
    axes: dict[str, Any] = {
        "yaxis": fraction_axis
        | {"domain": [0.44 if has_gpus else 0.24, 0.80], "range": [0, 1], "title": {"text": "phases"}},
        **({"yaxis2": fraction_axis | {"domain": [0.22, 0.40], "title": {"text": "device"}}} if has_gpus else {}),
        "yaxis3": fraction_axis | {"domain": [0.0, 0.18], "title": {"text": "host"}},
        "yaxis4": {"domain": [0.84, 1.0], "range": [-0.7, rows + 0.7], "fixedrange": True, "zeroline": False,
                   "tickvals": list(range(rows + 1)), "ticktext": ["events", *map(str, range(1, rows + 1))]},
    }  # fmt: skip
    description = (
        f"drag to zoom, double-click to reset; a bar is {fmt.duration(report.phases.width)}; blank: no running process"
        + ("; 1, 2, … are the findings below" if rows else "")
    )
    restarts = [(restart.after_s / seconds, f"attempt {restart.attempt}") for restart in report.restarts[-30:]]
    return charts.add(
        "Timeline",
        description,
        traces,
        height=(560 if has_gpus else 460) + 12 * rows,
        legend={"traceorder": "normal"},
        barmode="stack",
        bargap=0,
        zooms=True,
        xaxis={"title": {"text": f"{unit} since the start"}, "anchor": "y3",
               "rangeslider": {"visible": True, "thickness": 0.05}},
        **axes,
        **vertical_lines(restarts),
    )  # fmt: skip


def _phases(report: RunReport, seconds: float) -> list[dict[str, Any]]:
    width = report.phases.width / seconds
    x = [float(f"{start / seconds + width / 2:.6g}") for start in report.phases.x]
    ordered = sorted(report.phases.fractions, key=lambda name: PHASES.index(name) if name in PHASES else len(PHASES))
    return [
        {
            "type": "bar",
            "x": x,
            "y": report.phases.fractions[name],
            "width": width,
            "name": escape_name(name.replace("_", " ")),
            "marker": {"color": PHASE_COLORS.get(name, "var(--c8)"), "line": {"width": 0}},
            "hovertemplate": "%{y:.0%}",
        }
        for name in ordered
    ]


def _counters(report: RunReport, seconds: float) -> list[dict[str, Any]]:
    traces = []
    gpus = sorted({name.partition("/")[0] for name in report.machine if name.startswith("gpu ")})[:MAX_DEVICES]
    for n, gpu in enumerate(gpus):
        for name, title, dash in (("utilization", "utilization", "solid"), ("SM active", "SM activity", "dot")):
            traces += _counter(report, seconds, f"{gpu}/{name}", f"{gpu.upper()} {title}", n, dash, axis="y2")
    for n, (name, title) in enumerate((("cpu/mean", "CPU utilization"), ("pressure/io", "I/O pressure"),
                                       ("pressure/memory", "memory pressure"))):  # fmt: skip
        traces += _counter(report, seconds, name, title, n, "dash" if n else "solid", axis="y3")
    return traces


def _counter(
    report: RunReport, seconds: float, name: str, title: str, color_index: int, dash: str, *, axis: str
) -> list[dict[str, Any]]:
    series = report.machine.get(name)
    if series is None:
        return []
    return [
        {
            "x": [float(f"{x / seconds:.6g}") for x in series.x],
            "y": series.mean,
            "name": escape_name(title),
            "mode": "lines",
            "yaxis": axis,
            "line": {"color": f"var(--c{color_index % 10})", "width": 1.5, "dash": dash},
            "hovertemplate": "%{y:.0%}",
        }
    ]


def _marks(report: RunReport, seconds: float) -> list[dict[str, Any]]:
    """Findings as bars, or as points if they have no duration; events as points below them."""
    traces: list[dict[str, Any]] = []
    severity = {n: finding.severity for n, finding in enumerate(report.explanation.findings, start=1)}
    titles = {n: finding.title for n, finding in enumerate(report.explanation.findings, start=1)}
    for number in sorted({mark.finding_number for mark in report.marks if mark.finding_number is not None}):
        finding_marks = [mark for mark in report.marks if mark.finding_number == number]
        color = _SEVERITIES.get(severity.get(number, "info"), "var(--c9)")
        xs: list[float | None] = []
        texts: list[str | None] = []
        for mark in finding_marks:
            xs += [round(mark.start_s / seconds, 6), round(mark.end_s / seconds, 6), None]
            texts += [escape_name(f"{number}. {titles.get(number, '')}: {mark.text}")] * 2 + [None]
        traces.append(
            {
                "x": xs,
                "y": [None if x is None else number for x in xs],
                "text": texts,
                "mode": "lines+markers",
                "line": {"color": color, "width": 7},
                "marker": {"color": color, "size": 8, "symbol": "diamond"},
                "yaxis": "y4",
                "showlegend": False,
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    events = [mark for mark in report.marks if mark.kind == "event"]
    if events:
        traces.append(
            {
                "x": [round(mark.start_s / seconds, 6) for mark in events],
                "y": [0] * len(events),
                "text": [escape_name(mark.text) for mark in events],
                "mode": "markers",
                "marker": {"color": "var(--muted)", "size": 6, "symbol": "line-ns-open"},
                "yaxis": "y4",
                "showlegend": False,
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    return traces
