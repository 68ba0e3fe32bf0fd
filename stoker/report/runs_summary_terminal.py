"""What `stoker why --all FOLDER` prints. What it says is `fleet.py`'s."""

from collections.abc import Iterator
from typing import TextIO

from rich.console import RenderableType
from rich.text import Text

from stoker.hardware.prices import CURRENCY
from stoker.report import format as fmt
from stoker.report.console import plain_text, print_renderables, table
from stoker.report.explain_terminal import format_cost
from stoker.report.runs_summary import Aggregate, Cost, RunsSummary

MAX_HOSTS, MAX_MONTHS, MAX_FINDINGS, MAX_UNREADABLE = 10, 24, 10, 10
"""Of long lists; the rest is counted, and in the JSON."""


def print_runs_summary(runs_summary: RunsSummary, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Sums, then tables: causes, findings, months, hosts, the worst runs, how runs ended, what could not be read."""
    renderables = [_facts(runs_summary), *_phases(runs_summary), *_findings(runs_summary), *_months(runs_summary), *_hosts(runs_summary), *_worst(runs_summary),
             *_failures(runs_summary), *_unreadable(runs_summary)]  # fmt: skip
    print_renderables(renderables, file, width=width)


def format_device_hours(device_s: float) -> str:
    """Device-hours: 0.31, 12.5, 3,210."""
    return fmt.number(device_s / 3600)


def format_total_cost(total: Cost) -> str:
    """Of the runs whose price is known; `n/a` where none is."""
    return format_cost((total.low, total.high) if total.runs else None)


def summary_rows(runs_summary: RunsSummary) -> Iterator[tuple[str, str]]:
    """What it is about, in rows: name, text."""
    yield "folder", runs_summary.folder
    states = ", ".join(f"{count:,} {state}" for state, count in sorted(runs_summary.states.items()))
    unread = (
        f"; {fmt.plural(runs_summary.num_unreadable, 'run')} could not be read" if runs_summary.num_unreadable else ""
    )
    yield "runs", f"{runs_summary.runs:,}" + (f": {states}" if states else "") + unread
    yield "time", f"{format_device_hours(runs_summary.device_s)} device-hours"
    if runs_summary.cost.runs:
        by_list = (
            f", {runs_summary.list_priced_runs:,} of them by the list prices of their machines"
            if runs_summary.list_priced_runs
            else ""
        )
        currency = f" {CURRENCY}" if runs_summary.list_priced_runs == runs_summary.cost.runs else ""
        yield (
            "cost",
            f"{format_total_cost(runs_summary.cost)}{currency}, of {fmt.plural(runs_summary.cost.runs, 'run')} with a price{by_list}",
        )
    if runs_summary.productive_fraction is None:
        yield "trained", "not known: no clock was inside these jobs"
        return
    outside_s = runs_summary.device_s - runs_summary.measured_s
    external_note = (
        f"; {format_device_hours(outside_s)} device-hours more were watched from outside" if outside_s > 0 else ""
    )
    yield (
        "trained",
        f"{fmt.percentage(runs_summary.productive_fraction)} of {format_device_hours(runs_summary.measured_s)} device-hours{external_note}",
    )
    trend = [month for month in runs_summary.months if month.productive_fraction is not None]
    if len(trend) > 1:
        first, last = trend[0], trend[-1]
        trend_text = (
            f"{fmt.percentage(first.productive_fraction)} in {first.name} → {fmt.percentage(last.productive_fraction)}"
        )
        yield "trend", f"{trend_text} in {last.name}"


def _facts(runs_summary: RunsSummary) -> RenderableType:
    rendered = table("", "", header=False)
    for name, value in summary_rows(runs_summary):
        rendered.add_row(name, plain_text(value))
    return rendered


def _phases(runs_summary: RunsSummary) -> Iterator[RenderableType]:
    if not runs_summary.phases:
        return
    yield ""
    rendered = table("phase", "device-hours", "share", "cost", "runs", "", right=(1, 2, 3, 4))
    for row in runs_summary.phases:
        rendered.add_row(plain_text(row.name), *_numbers(row, runs_summary.measured_s), plain_text(row.meaning, "dim"))
    rendered.add_row("total", format_device_hours(runs_summary.measured_s), "100 %", "", "", "")
    yield rendered


def _findings(runs_summary: RunsSummary) -> Iterator[RenderableType]:
    if not runs_summary.findings:
        return
    yield ""
    yield Text("findings (they overlap with the phases and each other)", "bold")
    rendered = table("cause", "device-hours", "share", "cost", "runs", "", right=(1, 2, 3, 4))
    for row in runs_summary.findings[:MAX_FINDINGS]:
        rendered.add_row(plain_text(row.name), *_numbers(row, runs_summary.device_s), plain_text(row.meaning, "dim"))
    yield rendered
    yield from _more(len(runs_summary.findings) - MAX_FINDINGS, "cause")


def _numbers(row: Aggregate, total_s: float) -> tuple[str, str, str, str]:
    if row.device_s <= 0:  # a finding that is not about time
        return "", "", "", fmt.count(row.runs)
    fraction = fmt.percentage(row.device_s / total_s if total_s > 0 else None)
    return format_device_hours(row.device_s), fraction, format_total_cost(row.cost), fmt.count(row.runs)


def _months(runs_summary: RunsSummary) -> Iterator[RenderableType]:
    yield from _aggregate_table("month", runs_summary.months[-MAX_MONTHS:])
    yield from _more(len(runs_summary.months) - MAX_MONTHS, "earlier month")


def _hosts(runs_summary: RunsSummary) -> Iterator[RenderableType]:
    yield from _aggregate_table("host", runs_summary.hosts[:MAX_HOSTS])
    yield from _more(len(runs_summary.hosts) - MAX_HOSTS, "host")


def _aggregate_table(name: str, rows: list[Aggregate]) -> Iterator[RenderableType]:
    if not rows:
        return
    yield ""
    rendered = table(name, "device-hours", "trained", "cost", "runs", right=(1, 2, 3, 4))
    for row in rows:
        trained = fmt.percentage(row.productive_fraction)
        rendered.add_row(
            plain_text(row.name),
            format_device_hours(row.device_s),
            trained,
            format_total_cost(row.cost),
            fmt.count(row.runs),
        )
    yield rendered


def _worst(runs_summary: RunsSummary) -> Iterator[RenderableType]:
    if not runs_summary.worst_runs:
        return
    yield ""
    yield Text("most device time lost", "bold")
    rendered = table("run", "lost hours", "of", "cost", "largest loss", "", right=(1, 2, 3))
    for row in runs_summary.worst_runs:
        numbers = (format_device_hours(row.lost_s), format_device_hours(row.device_s), format_total_cost(row.lost_cost))
        rendered.add_row(plain_text(row.run), *numbers, plain_text(row.largest_loss), plain_text(row.finding, "dim"))
    yield rendered


def _failures(runs_summary: RunsSummary) -> Iterator[RenderableType]:
    if not runs_summary.failures:
        return
    yield ""
    yield Text("ended before their time", "bold")
    rendered = table("cause", "runs", "", "", right=(1,))
    for row in runs_summary.failures:
        rendered.add_row(
            plain_text(row.cause), fmt.count(row.runs), row.title, plain_text(", ".join(row.examples), "dim")
        )
    yield rendered


def _unreadable(runs_summary: RunsSummary) -> Iterator[RenderableType]:
    if not runs_summary.num_unreadable:
        return
    yield ""
    yield Text("could not be read", "bold")
    for entry in runs_summary.unreadable[:MAX_UNREADABLE]:
        yield plain_text(f"{entry.run}: {entry.error}")
    yield from _more(runs_summary.num_unreadable - MAX_UNREADABLE, "run")


def _more(count: int, noun: str) -> Iterator[RenderableType]:
    if count > 0:
        yield plain_text(f"{fmt.plural(count, noun)} more: --json", "dim")
