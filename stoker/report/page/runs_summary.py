"""The page of many runs, `stoker report --all FOLDER`: totals, trend, causes, hosts, the worst runs.

The rows come from `report/runs_summary_tables.py`, as for the terminal; the frame around the page is in
`report/html.py`.
"""

from typing import Any

from stoker.report import format as fmt
from stoker.report import runs_summary_tables as tables
from stoker.report.page.charts import PHASE_COLORS, Charts, escape_name
from stoker.report.page.markup import Child, Markup, section, table, tag
from stoker.report.runs_summary import Aggregate, RunsSummary
from stoker.report.runs_summary_tables import SummaryTable

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
    runs = tag("p", fmt.plural(summary.runs, "run"), class_="what")
    totals = table("All runs together", ("what", "value"), list(tables.summary_rows(summary)), wide=(1,), hidden=True)
    phases, findings = tables.phase_table(summary), tables.finding_table(summary)
    if not phases.rows and not findings.rows:
        causes: Child = tag("p", "No time is recorded.", class_="absent")
    else:
        causes = [_losses(summary, charts), _table(phases), _table(findings)]
    bodies: tuple[Child, ...] = (
        totals,
        causes,
        [*_months(summary, charts), _table(tables.month_table(summary))],
        _table(tables.host_table(summary)),
        _table(tables.worst_table(summary), "No run lost any time."),
        _table(tables.failure_table(summary), "No run ended early."),
        _table(tables.unreadable_table(summary), "All runs could be read."),
    )
    sections = [section(name, title, body) for (name, title), body in zip(SECTIONS, bodies, strict=True)]
    return [tag("header", tag("h1", summary.folder), runs), *sections]


def _table(summary_table: SummaryTable, empty: str = "") -> list[Markup]:
    """A table, or a sentence if it is empty."""
    if not summary_table.rows:
        return [tag("p", empty, class_="absent")] if empty else []
    rows, last = summary_table.rows[:MAX_ROWS], len(summary_table.heads) - 1
    wide = () if last in summary_table.right else (last,)
    title = summary_table.title[0].upper() + summary_table.title[1:]
    more = max(summary_table.total, len(summary_table.rows)) - len(rows)
    note = [tag("p", f"{fmt.plural(more, summary_table.noun)} more in the JSON.", class_="note")] if more > 0 else []
    return [table(title, summary_table.heads, rows, right=summary_table.right, wide=wide), *note]


def _losses(summary: RunsSummary, charts: Charts) -> Markup | None:
    losses = [row for row in summary.phases if row.name != "compute"]
    return charts.add(
        "Device-hours lost",
        "by phase, of the runs whose compute is known",
        [_bars(losses)] if losses else [],
        height=max(200, 60 + 30 * len(losses)),
        x="device-hours",
        showlegend=False,
        yaxis={"automargin": True, "autorange": "reversed"},
    )


def _bars(rows: list[Aggregate]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "x": [round(row.device_s / 3600, 4) for row in rows],
        "y": [escape_name(row.name.replace("_", " ")) for row in rows],
        "marker": {"color": [PHASE_COLORS.get(row.name, "var(--c8)") for row in rows]},
    }


def _months(summary: RunsSummary, charts: Charts) -> list[Markup | None]:
    known = [row for row in summary.months if row.measured_s > 0]
    names = [row.name for row in known]
    stacked = (
        ("trained", "compute", [row.compute_s for row in known]),
        ("lost", "input_wait", [row.measured_s - row.compute_s for row in known]),
    )
    hours: list[dict[str, Any]] = [
        {
            "type": "bar",
            "x": names,
            "y": [round(device_s / 3600, 4) for device_s in seconds],
            "name": name,
            "marker": {"color": PHASE_COLORS[phase]},
        }
        for name, phase, seconds in stacked
    ]
    trained: dict[str, Any] = {
        "x": names,
        "y": [round(row.productive_fraction or 0.0, 4) for row in known],
        "name": "trained",
        "mode": "lines+markers",
        "line": {"color": "var(--c0)", "width": 2},
    }
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
            [trained] if known else [],
            height=200,
            showlegend=False,
            xaxis={"type": "category"},
            yaxis={"range": [0, 1], "tickformat": ".0%"},
        ),
    ]
