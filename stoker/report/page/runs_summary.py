"""The page of many runs, `stoker report --all FOLDER`: sums, trend, causes, hosts, the worst runs. Its numbers are
those of `stoker why --all`; the frame around it is `html.py`'s."""

from typing import Any

from stoker.report import format as fmt
from stoker.report.page.charts import PHASE_COLORS, Charts, escape_name
from stoker.report.page.markup import (
    Child,
    Markup,
    bar,
    section,
    table,
    tag,
)
from stoker.report.runs_summary import Aggregate, RunsSummary
from stoker.report.runs_summary_terminal import format_device_hours, format_total_cost, summary_rows

SECTIONS = (
    ("summary", "Summary"),
    ("causes", "Causes"),
    ("months", "Months"),
    ("hosts", "Hosts"),
    ("worst", "Worst runs"),
    ("ends", "Ends"),
    ("unread", "Unread"),
)
MAX_HOSTS, MAX_UNREADABLE = 40, 50


def main(runs_summary: RunsSummary, charts: Charts) -> list[Markup]:
    """The sections of the page."""
    return [
        tag(
            "header",
            tag("h1", runs_summary.folder),
            tag("p", f"{fmt.plural(runs_summary.runs, 'run')} added up", class_="what"),
        ),
        _summary(runs_summary),
        _causes(runs_summary, charts),
        _months(runs_summary, charts),
        _hosts(runs_summary),
        _worst(runs_summary),
        _failures(runs_summary),
        _unreadable(runs_summary),
    ]


def _summary(runs_summary: RunsSummary) -> Markup:
    rows: list[list[Child]] = [[name, value] for name, value in summary_rows(runs_summary)]
    return section("summary", "Summary", table("All runs together", ("what", "value"), rows, wide=(1,), hidden=True))


def _causes(runs_summary: RunsSummary, charts: Charts) -> Markup:
    if not runs_summary.phases and not runs_summary.findings:
        return section("causes", "Causes", tag("p", "No time is recorded.", class_="absent"))
    losses = [row for row in runs_summary.phases if row.name != "compute"]
    chart = charts.add(
        "Device-hours lost",
        "by phase, of the runs whose compute is known",
        [_bars(losses)] if losses else [],
        height=max(200, 60 + 30 * len(losses)),
        x="device-hours",
        showlegend=False,
        yaxis={"automargin": True, "autorange": "reversed"},
    )
    heads = ("phase", "device-hours", "share", "cost", "runs", "meaning")
    phases = [[row.name, *_numbers(row, runs_summary.measured_s), row.meaning] for row in runs_summary.phases]
    findings = [[row.name, *_numbers(row, runs_summary.device_s), row.meaning] for row in runs_summary.findings]
    tables = [
        table("Where the device's time went", heads, phases, right=range(1, 5), wide=(5,)) if phases else None,
        table("Findings; they overlap with the phases and each other", ("cause", *heads[1:]), findings,
              right=range(1, 5), wide=(5,)) if findings else None,
    ]  # fmt: skip
    return section("causes", "Causes", chart, *tables)


def _bars(rows: list[Aggregate]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "x": [round(row.device_s / 3600, 4) for row in rows],
        "y": [escape_name(row.name.replace("_", " ")) for row in rows],
        "marker": {"color": [PHASE_COLORS.get(row.name, "var(--c8)") for row in rows]},
    }


def _numbers(row: Aggregate, total_s: float) -> list[Child]:
    if row.device_s <= 0:
        return ["", "", "", fmt.count(row.runs)]
    fraction = row.device_s / total_s if total_s > 0 else None
    return [
        format_device_hours(row.device_s),
        fmt.percentage(fraction),
        format_total_cost(row.cost),
        fmt.count(row.runs),
    ]


def _months(runs_summary: RunsSummary, charts: Charts) -> Markup:
    known = [row for row in runs_summary.months if row.measured_s > 0]
    stacked = (
        ("trained", "compute", [row.compute_s for row in known]),
        ("lost", "input_wait", [row.measured_s - row.compute_s for row in known]),
    )
    traces = [
        {
            "type": "bar",
            "x": [row.name for row in known],
            "y": [round(duration_s / 3600, 4) for duration_s in seconds],
            "name": name,
            "marker": {"color": PHASE_COLORS[phase]},
        }
        for name, phase, seconds in stacked
    ]
    chart = charts.add(
        "Device-hours by month",
        "of the runs whose compute is known",
        traces if known else [],
        y="device-hours",
        barmode="stack",
        xaxis={"type": "category"},
    )
    trend_chart = charts.add(
        "Share of the time that trained, by month",
        "the trend",
        [
            {
                "x": [row.name for row in known],
                "y": [round(row.productive_fraction or 0.0, 4) for row in known],
                "name": "trained",
                "mode": "lines+markers",
                "line": {"color": "var(--c0)", "width": 2},
            }
        ] if known else [],
        height=200,
        showlegend=False,
        xaxis={"type": "category"},
        yaxis={"range": [0, 1], "tickformat": ".0%"},
    )  # fmt: skip
    return section(
        "months", "Months", chart, trend_chart, _aggregate_table("By month, UTC", "month", runs_summary.months)
    )


def _aggregate_table(caption: str, name: str, rows: list[Aggregate]) -> Markup:
    body: list[list[Child]] = [
        [
            row.name,
            format_device_hours(row.device_s),
            [bar(row.productive_fraction or 0.0), " ", fmt.percentage(row.productive_fraction)],
            format_total_cost(row.cost),
            fmt.count(row.runs),
        ]
        for row in rows
    ]
    return table(caption, (name, "device-hours", "trained", "cost", "runs"), body, right=range(1, 5))


def _hosts(runs_summary: RunsSummary) -> Markup:
    more = len(runs_summary.hosts) - MAX_HOSTS
    note = tag("p", f"{fmt.plural(more, 'host')} more are in the JSON.", class_="note") if more > 0 else None
    return section("hosts", "Hosts", _aggregate_table("By host", "host", runs_summary.hosts[:MAX_HOSTS]), note)


def _worst(runs_summary: RunsSummary) -> Markup:
    rows: list[list[Child]] = [
        [
            row.run,
            format_device_hours(row.lost_s),
            format_device_hours(row.device_s),
            format_total_cost(row.lost_cost),
            row.largest_loss,
            row.finding,
        ]
        for row in runs_summary.worst_runs
    ]
    if not rows:
        return section("worst", "Worst runs", tag("p", "None lost any time.", class_="absent"))
    heads = ("run", "hours lost", "of", "cost", "largest loss", "first finding")
    return section("worst", "Worst runs", table("Most device time lost", heads, rows, right=(1, 2, 3), wide=(5,)))


def _failures(runs_summary: RunsSummary) -> Markup:
    rows: list[list[Child]] = [
        [row.cause, fmt.count(row.runs), row.title, ", ".join(row.examples)] for row in runs_summary.failures
    ]
    if not rows:
        return section("ends", "Ends", tag("p", "No run ended before its time.", class_="absent"))
    heads = ("cause", "runs", "what", "for example")
    return section("ends", "Ends", table("Runs that ended before their time", heads, rows, right=(1,), wide=(2, 3)))


def _unreadable(runs_summary: RunsSummary) -> Markup:
    if not runs_summary.num_unreadable:
        return section("unread", "Unread", tag("p", "Every run could be read."))
    rows: list[list[Child]] = [[entry.run, entry.error] for entry in runs_summary.unreadable[:MAX_UNREADABLE]]
    caption = f"{fmt.plural(runs_summary.num_unreadable, 'run')} could not be read"
    return section("unread", "Unread", table(caption, ("run", "why"), rows, wide=(1,)))
