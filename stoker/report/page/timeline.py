"""The page's time line: findings, phases, and the counters of device and host, one above the other, zoomed as one.

Where the marks lie is `report/timeline.py`.
"""

from typing import Any

from stoker.report import format as fmt
from stoker.report.page.charts import (
    PHASE_COLOURS,
    Charts,
    plain,
    span,
    time_unit,
    vertical_lines,
)
from stoker.report.page.markup import Markup
from stoker.report.run_report import Report
from stoker.runs.records import PHASES

MOST_DEVICES = 8
"""Curves of devices in it at most; the machine section has the others."""
_SEVERITIES = {"critical": "var(--c3)", "warning": "var(--c2)", "info": "var(--c9)"}


def timeline(charts: Charts, report: Report) -> Markup | None:
    """The chart; None where no time is recorded."""
    if not report.phases.x:
        return None
    unit, seconds = time_unit(span(report))
    traces = _phases(report, seconds) + _counters(report, seconds) + _marks(report, seconds)
    rows = max((mark.number for mark in report.marks if mark.number is not None), default=0)
    share: dict[str, Any] = {"range": [0, 1.02], "tickformat": ".0%", "fixedrange": True, "nticks": 4}
    has_gpus = any(trace.get("yaxis") == "y2" for trace in traces)
    axes: dict[str, Any] = {
        "yaxis": share | {"domain": [0.44 if has_gpus else 0.24, 0.80], "range": [0, 1], "title": {"text": "phases"}},
        **({"yaxis2": share | {"domain": [0.22, 0.40], "title": {"text": "device"}}} if has_gpus else {}),
        "yaxis3": share | {"domain": [0.0, 0.18], "title": {"text": "host"}},
        "yaxis4": {"domain": [0.84, 1.0], "range": [-0.7, rows + 0.7], "fixedrange": True, "zeroline": False,
                   "tickvals": list(range(rows + 1)), "ticktext": ["events", *map(str, range(1, rows + 1))]},
    }  # fmt: skip
    says = (
        f"drag to zoom, double click for all; a bar is {fmt.duration(report.phases.width)}; blank: no process trained"
        + ("; 1, 2, … are the findings below" if rows else "")
    )
    return charts.add(
        "What the device did, over time",
        says,
        traces,
        height=(560 if has_gpus else 460) + 12 * rows,
        legend={"traceorder": "normal"},
        barmode="stack",
        bargap=0,
        zooms=True,
        xaxis={"title": {"text": f"{unit} since the start"}, "anchor": "y3",
               "rangeslider": {"visible": True, "thickness": 0.05}},
        **axes,
        **vertical_lines([(one.after_s / seconds, f"attempt {one.attempt}") for one in report.restarts[-30:]]),
    )  # fmt: skip


def _phases(report: Report, seconds: float) -> list[dict[str, Any]]:
    width = report.phases.width / seconds
    x = [float(f"{start / seconds + width / 2:.6g}") for start in report.phases.x]
    ordered = sorted(report.phases.parts, key=lambda name: PHASES.index(name) if name in PHASES else len(PHASES))
    return [
        {
            "type": "bar",
            "x": x,
            "y": report.phases.parts[name],
            "width": width,
            "name": plain(name.replace("_", " ")),
            "marker": {"color": PHASE_COLOURS.get(name, "var(--c8)"), "line": {"width": 0}},
            "hovertemplate": "%{y:.0%}",
        }
        for name in ordered
    ]


def _counters(report: Report, seconds: float) -> list[dict[str, Any]]:
    traces = []
    gpus = sorted({name.partition("/")[0] for name in report.machine if name.startswith("gpu ")})[:MOST_DEVICES]
    for n, gpu in enumerate(gpus):
        for name, title, dash in (("utilisation", "busy", "solid"), ("SM active", "SMs active", "dot")):
            traces += _counter(report, seconds, f"{gpu}/{name}", f"{gpu.upper()} {title}", n, dash, axis="y2")
    for n, (name, title) in enumerate((("cpu/mean", "cores busy"), ("pressure/io", "waits for storage"),
                                       ("pressure/memory", "waits for memory"))):  # fmt: skip
        traces += _counter(report, seconds, name, title, n, "dash" if n else "solid", axis="y3")
    return traces


def _counter(
    report: Report, seconds: float, name: str, title: str, colour: int, dash: str, *, axis: str
) -> list[dict[str, Any]]:
    series = report.machine.get(name)
    if series is None:
        return []
    return [
        {
            "x": [float(f"{x / seconds:.6g}") for x in series.x],
            "y": series.mean,
            "name": plain(title),
            "mode": "lines",
            "yaxis": axis,
            "line": {"color": f"var(--c{colour % 10})", "width": 1.5, "dash": dash},
            "hovertemplate": "%{y:.0%}",
        }
    ]


def _marks(report: Report, seconds: float) -> list[dict[str, Any]]:
    """Findings as bars, or as points where they are moments; events as points below them."""
    traces: list[dict[str, Any]] = []
    severity = {n: one.severity for n, one in enumerate(report.why.findings, start=1)}
    titles = {n: one.title for n, one in enumerate(report.why.findings, start=1)}
    for number in sorted({mark.number for mark in report.marks if mark.number is not None}):
        mine = [mark for mark in report.marks if mark.number == number]
        colour = _SEVERITIES.get(severity.get(number, "info"), "var(--c9)")
        xs: list[float | None] = []
        texts: list[str | None] = []
        for mark in mine:
            xs += [round(mark.from_s / seconds, 6), round(mark.to_s / seconds, 6), None]
            texts += [plain(f"{number}. {titles.get(number, '')}: {mark.text}")] * 2 + [None]
        traces.append(
            {
                "x": xs,
                "y": [None if x is None else number for x in xs],
                "text": texts,
                "mode": "lines+markers",
                "line": {"color": colour, "width": 7},
                "marker": {"color": colour, "size": 8, "symbol": "diamond"},
                "yaxis": "y4",
                "showlegend": False,
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    events = [mark for mark in report.marks if mark.kind == "event"]
    if events:
        traces.append(
            {
                "x": [round(mark.from_s / seconds, 6) for mark in events],
                "y": [0] * len(events),
                "text": [plain(mark.text) for mark in events],
                "mode": "markers",
                "marker": {"color": "var(--muted)", "size": 6, "symbol": "line-ns-open"},
                "yaxis": "y4",
                "showlegend": False,
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    return traces
