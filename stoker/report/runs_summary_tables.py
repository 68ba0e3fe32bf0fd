"""The tables of many runs as text, for both the terminal (`runs_summary_terminal.py`) and the page
(`page/runs_summary.py`).

The numbers come from `runs_summary.py`.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from stoker.hardware.prices import CURRENCY
from stoker.report import format as fmt
from stoker.report.findings_terminal import format_cost
from stoker.report.runs_summary import Aggregate, Cost, RunsSummary


@dataclasses.dataclass(frozen=True, kw_only=True)
class SummaryTable:
    """A table whose first column is a name. Columns of `right` are numbers; the last column may be a sentence."""

    title: str
    heads: Sequence[str]
    rows: list[list[str]]
    right: Sequence[int] = ()
    noun: str = ""
    """What a row is about."""
    total: int = 0
    """Number of rows, if some are left out already."""


def summary_rows(summary: RunsSummary) -> Iterator[tuple[str, str]]:
    """The totals as rows: name, text."""
    yield "folder", summary.folder
    states = ", ".join(f"{count:,} {state}" for state, count in sorted(summary.states.items()))
    unread = f"; {fmt.plural(summary.num_unreadable, 'run')} could not be read" if summary.num_unreadable else ""
    yield "runs", f"{summary.runs:,}" + (f": {states}" if states else "") + unread
    yield "time", f"{_hours(summary.device_s)} device-hours"
    if summary.cost.runs:
        listed = f", {summary.list_priced_runs:,} of them with a list price" if summary.list_priced_runs else ""
        currency = f" {CURRENCY}" if summary.list_priced_runs == summary.cost.runs else ""
        priced_runs = fmt.plural(summary.cost.runs, "run")
        yield "cost", f"{_cost(summary.cost)}{currency}, of {priced_runs} with a price{listed}"
    if summary.productive_fraction is None:
        yield "trained", "not known: no job was timed from inside"
        return
    external_s = summary.device_s - summary.measured_s
    external = f"; {_hours(external_s)} more device-hours were not timed from inside" if external_s > 0 else ""
    trained = fmt.percentage(summary.productive_fraction)
    yield "trained", f"{trained} of {_hours(summary.measured_s)} device-hours{external}"
    months = [month for month in summary.months if month.productive_fraction is not None]
    if len(months) > 1:
        first, last = (f"{fmt.percentage(m.productive_fraction)} in {m.name}" for m in (months[0], months[-1]))
        yield "trend", f"{first} → {last}"


def phase_table(summary: RunsSummary) -> SummaryTable:
    """Device time by phase, of the runs whose compute is known."""
    rows = _time_rows(summary.phases, summary.measured_s)
    rows += [["total", _hours(summary.measured_s), "100 %", "", "", ""]] if rows else []
    return SummaryTable(title="device time by phase", heads=_time_heads("phase"), rows=rows, right=range(1, 5))


def finding_table(summary: RunsSummary) -> SummaryTable:
    """Device time lost by cause."""
    return SummaryTable(
        title="findings (they overlap with the phases and with each other)",
        heads=_time_heads("cause"),
        rows=_time_rows(summary.findings, summary.device_s),
        right=range(1, 5),
        noun="cause",
    )


def month_table(summary: RunsSummary) -> SummaryTable:
    return _aggregate_table("by month, UTC", "month", summary.months)


def host_table(summary: RunsSummary) -> SummaryTable:
    return _aggregate_table("by host", "host", summary.hosts)


def worst_table(summary: RunsSummary) -> SummaryTable:
    """The runs that lost most device time."""
    rows = [
        [run.run, _hours(run.lost_s), _hours(run.device_s), _cost(run.lost_cost), run.largest_loss, run.finding]
        for run in summary.worst_runs
    ]
    heads = ("run", "lost hours", "of", "cost", "largest loss", "first finding")
    return SummaryTable(title="most device time lost", heads=heads, rows=rows, right=(1, 2, 3))


def failure_table(summary: RunsSummary) -> SummaryTable:
    """How runs ended before their planned end."""
    rows = [[row.cause, fmt.count(row.runs), row.title, ", ".join(row.examples)] for row in summary.failures]
    return SummaryTable(title="ended early", heads=("cause", "runs", "what", "for example"), rows=rows, right=(1,))


def unreadable_table(summary: RunsSummary) -> SummaryTable:
    rows = [[row.run, row.error] for row in summary.unreadable]
    return SummaryTable(
        title="could not be read", heads=("run", "error"), rows=rows, noun="run", total=summary.num_unreadable
    )


def _time_heads(name: str) -> tuple[str, ...]:
    return name, "device-hours", "fraction", "cost", "runs", "meaning"


def _time_rows(aggregates: list[Aggregate], total_s: float) -> list[list[str]]:
    return [
        [row.name, "", "", "", fmt.count(row.runs), row.meaning]  # a finding that is not about time
        if row.device_s <= 0
        else [
            row.name,
            _hours(row.device_s),
            fmt.percentage(row.device_s / total_s if total_s > 0 else None),
            _cost(row.cost),
            fmt.count(row.runs),
            row.meaning,
        ]
        for row in aggregates
    ]


def _aggregate_table(title: str, noun: str, aggregates: list[Aggregate]) -> SummaryTable:
    rows = [
        [row.name, _hours(row.device_s), fmt.percentage(row.productive_fraction), _cost(row.cost), fmt.count(row.runs)]
        for row in aggregates
    ]
    heads = (noun, "device-hours", "trained", "cost", "runs")
    return SummaryTable(title=title, heads=heads, rows=rows, right=range(1, 5), noun=noun)


def _hours(device_s: float) -> str:
    """Device-hours: 0.31, 12.5, 3,210."""
    return fmt.number(device_s / 3600)


def _cost(total: Cost) -> str:
    """Cost of the runs with a known price; `n/a` if there are none."""
    return format_cost((total.low, total.high) if total.runs else None)
