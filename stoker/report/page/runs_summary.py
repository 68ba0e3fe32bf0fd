"""The page of many runs, `stoker report --all FOLDER`: totals, trend, causes, hosts, the worst runs.

The rows come from `report/runs_summary_tables.py`, as for the terminal; the frame around the page is in
`report/html.py`.
"""

from stoker.report import format as fmt
from stoker.report.page.charts import Charts, bars, curve, escape_name
from stoker.report.page.markup import Child, Markup, absent, note, section, table, tag
from stoker.report.runs_summary import RunsSummary
from stoker.report.runs_summary_tables import SummaryTable, make_tables, summary_rows
from stoker.report.words import PHASE_COLORS

SECTIONS = (
    ("summary", "Summary"),
    ("causes", "Causes"),
    ("months", "Months"),
    ("hosts", "Hosts"),
    ("worst", "Worst runs"),
    ("ends", "Ended early"),
    ("unread", "Unreadable"),
)
MAX_ROWS = 50
"""Rows of a table; the JSON has all."""


def main(summary: RunsSummary, charts: Charts) -> list[Markup]:
    """The sections of the page."""
    tables = make_tables(summary)
    totals = table("All runs together", ("what", "value"), list(summary_rows(summary)), wide=(1,), hidden=True)
    causes: Child = [_losses(summary, charts), _table(tables["phases"]), _table(tables["findings"])]
    if not summary.phases and not summary.findings:
        causes = absent("No time is recorded.")
    bodies: tuple[Child, ...] = (
        totals,
        causes,
        [*_months(summary, charts), _table(tables["months"])],
        _table(tables["hosts"]),
        _table(tables["worst"]) or absent("No run lost any time."),
        _table(tables["failures"]) or absent("No run ended early."),
        _table(tables["unreadable"]) or absent("All runs could be read."),
    )
    header = tag("header", tag("h1", summary.folder), tag("p", fmt.plural(summary.runs, "run"), class_="what"))
    return [header, *(section(name, title, body) for (name, title), body in zip(SECTIONS, bodies, strict=True))]


def _table(summary_table: SummaryTable) -> list[Markup]:
    """A table and how many more rows there are; nothing if it is empty."""
    rows, more = summary_table.cut(MAX_ROWS)
    if not rows:
        return []
    last = len(summary_table.heads) - 1
    title = summary_table.title[0].upper() + summary_table.title[1:]
    wide = () if last in summary_table.right else (last,)
    rendered = table(title, summary_table.heads, rows, right=summary_table.right, wide=wide)
    return [rendered, *([note(f"{more} in the JSON.")] if more else [])]


def _losses(summary: RunsSummary, charts: Charts) -> Markup | None:
    losses = [row for row in summary.phases if row.name != "compute"]
    hours = [_hours(row.device_s) for row in losses]
    names = [escape_name(row.name.replace("_", " ")) for row in losses]
    colors = [PHASE_COLORS.get(row.name, "var(--c8)") for row in losses]
    return charts.add(
        "Device-hours lost",
        "by phase, of the runs whose compute is known",
        [bars("", hours, names, colors, orientation="h")] if losses else [],
        height=max(200, 60 + 30 * len(losses)),
        x="device-hours",
        showlegend=False,
        yaxis={"automargin": True, "autorange": "reversed"},
    )


def _months(summary: RunsSummary, charts: Charts) -> list[Markup | None]:
    known = [row for row in summary.months if row.measured_s > 0]

    names = [row.name for row in known]
    hours = [
        bars("trained", names, [_hours(row.compute_s) for row in known], PHASE_COLORS["compute"]),
        bars("lost", names, [_hours(row.measured_s - row.compute_s) for row in known], PHASE_COLORS["input_wait"]),
    ]
    fractions = [round(row.productive_fraction or 0.0, 4) for row in known]
    trend = curve("trained", names, fractions, 0, mode="lines+markers")
    return [
        charts.add(
            "Device-hours by month",
            "of the runs whose compute is known",
            hours if known else [],
            y="device-hours",
            barmode="stack",
            xaxis={"type": "category"},
        ),
        charts.add(
            "Fraction of the time that trained, by month",
            "the trend",
            [trend] if known else [],
            height=200,
            showlegend=False,
            xaxis={"type": "category"},
            yaxis={"range": [0, 1], "tickformat": ".0%"},
        ),
    ]


def _hours(device_s: float) -> float:
    return round(device_s / 3600, 4)
