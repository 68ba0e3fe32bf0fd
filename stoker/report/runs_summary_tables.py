"""The tables of many runs as text, for both the terminal (`print_runs_summary`, `stoker why --all FOLDER`) and the page
(`page/runs_summary.py`).

The numbers come from `runs_summary.py`.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import RenderableType

from stoker.hardware.prices import CURRENCY
from stoker.report import format as fmt
from stoker.report.console import facts, plain_text, print_renderables, table
from stoker.report.runs_summary import Aggregate, Cost, RunsSummary

MAX_ROWS = 10
"""Rows of a table on the terminal; `--json` has all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SummaryTable:
    """A table whose first column is a name. Columns of `right` are numbers; the last column may be a sentence."""

    title: str
    heads: Sequence[str]
    rows: list[list[str]]
    right: Sequence[int] = ()
    noun: str = "row"
    """What a row is about."""
    total: int = 0
    """Number of rows, if some are left out already."""

    def cut(self, max_rows: int) -> tuple[list[list[str]], str]:
        """(the first rows, how many more there are in words; empty if there are no more)."""
        more = max(self.total, len(self.rows)) - max_rows
        return self.rows[:max_rows], f"{fmt.plural(more, self.noun)} more" if more > 0 else ""


def print_runs_summary(summary: RunsSummary, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints totals, then tables: phases, findings, months, hosts, the worst runs, failures, unreadable runs."""
    renderables: list[RenderableType] = [facts(summary_rows(summary))]
    tables = make_tables(summary)
    for name, summary_table in tables.items():
        is_long = name in ("findings", "hosts", "unreadable")
        rows, more = summary_table.cut(MAX_ROWS if is_long else len(summary_table.rows))
        if rows:
            cells: list[list[RenderableType]] = [[*others, plain_text(last, "dim")] for *others, last in rows]
            renderables += ["", plain_text(summary_table.title, "bold")]
            renderables.append(table(*summary_table.heads, right=summary_table.right, rows=cells))
        if more:
            renderables.append(plain_text(f"{more}: --json", "dim"))
    print_renderables(renderables, file, width=width)


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


def make_tables(summary: RunsSummary) -> dict[str, SummaryTable]:
    """The tables by name, in order; some may be empty. The phases are those of the runs whose compute is known."""
    phases = _time_table("phase", "device time by phase", summary.phases, summary.measured_s)
    if phases.rows:
        phases.rows.append(["total", _hours(summary.measured_s), "100 %", "", "", ""])
    overlap = "findings (they overlap with the phases and with each other)"
    worst = [
        [run.run, _hours(run.lost_s), _hours(run.device_s), _cost(run.lost_cost), run.largest_loss, run.finding]
        for run in summary.worst_runs
    ]
    worst_heads = ("run", "lost hours", "of", "cost", "largest loss", "first finding")
    failures = [[row.cause, fmt.count(row.runs), row.title, ", ".join(row.examples)] for row in summary.failures]
    unreadable = [[row.run, row.error] for row in summary.unreadable]
    return {
        "phases": phases,
        "findings": _time_table("cause", overlap, summary.findings, summary.device_s),
        "months": _aggregate_table("by month, UTC", "month", summary.months),
        "hosts": _aggregate_table("by host", "host", summary.hosts),
        "worst": SummaryTable(title="most device time lost", heads=worst_heads, rows=worst, right=(1, 2, 3)),
        "failures": SummaryTable(
            title="ended early", heads=("cause", "runs", "what", "for example"), rows=failures, right=(1,)
        ),
        "unreadable": SummaryTable(
            title="could not be read",
            heads=("run", "error"),
            rows=unreadable,
            noun="run",
            total=summary.num_unreadable,
        ),
    }


def _time_table(noun: str, title: str, aggregates: list[Aggregate], total_s: float) -> SummaryTable:
    """A finding that is not about time has no numbers besides its runs."""
    rows = []
    for row in aggregates:
        fraction = fmt.percentage(row.device_s / total_s if total_s > 0 else None)
        times = [_hours(row.device_s), fraction, _cost(row.cost)] if row.device_s > 0 else ["", "", ""]
        rows.append([row.name, *times, fmt.count(row.runs), row.meaning])
    heads = (noun, "device-hours", "fraction", "cost", "runs", "meaning")
    return SummaryTable(title=title, heads=heads, rows=rows, right=range(1, 5), noun=noun)


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
    return fmt.cost_range((total.low, total.high) if total.runs else None)
