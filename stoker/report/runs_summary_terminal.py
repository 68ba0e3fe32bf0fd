"""Prints `stoker why --all FOLDER`. The numbers come from `runs_summary.py`, the rows from `runs_summary_tables.py`."""

from collections.abc import Iterator
from typing import TextIO

from rich.console import RenderableType
from rich.text import Text

from stoker.report import format as fmt
from stoker.report import runs_summary_tables as tables
from stoker.report.console import plain_text, print_renderables, table
from stoker.report.runs_summary import RunsSummary
from stoker.report.runs_summary_tables import SummaryTable

MAX_ROWS = 10
"""Rows of long tables; `--json` has all."""


def print_runs_summary(summary: RunsSummary, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints totals, then tables: phases, findings, months, hosts, the worst runs, failures, unreadable runs."""
    totals = table("", "", header=False)
    for name, value in tables.summary_rows(summary):
        totals.add_row(name, plain_text(value))
    renderables: list[RenderableType] = [totals]
    for make_table, max_rows in (
        (tables.phase_table, None),
        (tables.finding_table, MAX_ROWS),
        (tables.month_table, None),
        (tables.host_table, MAX_ROWS),
        (tables.worst_table, None),
        (tables.failure_table, None),
        (tables.unreadable_table, MAX_ROWS),
    ):
        renderables += _render(make_table(summary), max_rows)
    print_renderables(renderables, file, width=width)


def _render(summary_table: SummaryTable, max_rows: int | None) -> Iterator[RenderableType]:
    rows = summary_table.rows[:max_rows]
    if not rows:
        return
    yield ""
    yield Text(summary_table.title, "bold")
    rendered = table(*summary_table.heads, right=summary_table.right)
    for *cells, last in rows:
        rendered.add_row(*map(plain_text, cells), plain_text(last, "dim"))
    yield rendered
    more = max(summary_table.total, len(summary_table.rows)) - len(rows)
    if more > 0:
        yield plain_text(f"{fmt.plural(more, summary_table.noun)} more: --json", "dim")
