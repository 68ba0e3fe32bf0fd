"""What `stoker why --all FOLDER` prints. What it says is `fleet.py`'s."""

from collections.abc import Iterator
from typing import TextIO

from rich.console import RenderableType
from rich.text import Text

from stoker.hardware.prices import CURRENCY
from stoker.report import format as fmt
from stoker.report.console import plain_text, print_parts, table
from stoker.report.explain_terminal import cost
from stoker.report.runs_summary import Fleet, Money, Sum

HOSTS_SHOWN, MONTHS_SHOWN, FINDINGS_SHOWN, DAMAGED_SHOWN = 10, 24, 10, 10
"""Of long lists; the rest is counted, and in the JSON."""


def print_fleet(fleet: Fleet, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Sums, then tables: causes, findings, months, hosts, the worst runs, how runs ended, what could not be read."""
    parts = [_facts(fleet), *_phases(fleet), *_findings(fleet), *_months(fleet), *_hosts(fleet), *_worst(fleet),
             *_died(fleet), *_damaged(fleet)]  # fmt: skip
    print_parts(parts, file, width=width)


def hours(device_s: float) -> str:
    """Device-hours: 0.31, 12.5, 3,210."""
    return fmt.number(device_s / 3600)


def paid(money: Money) -> str:
    """Of the runs whose price is known; `n/a` where none is."""
    return cost((money.low, money.high) if money.runs else None)


def summary(fleet: Fleet) -> Iterator[tuple[str, str]]:
    """What it is about, in rows: name, text."""
    yield "folder", fleet.folder
    states = ", ".join(f"{count:,} {state}" for state, count in sorted(fleet.states.items()))
    unread = f"; {fmt.plural(fleet.damaged_runs, 'run')} could not be read" if fleet.damaged_runs else ""
    yield "runs", f"{fleet.runs:,}" + (f": {states}" if states else "") + unread
    yield "time", f"{hours(fleet.device_s)} device-hours"
    if fleet.money.runs:
        by_list = f", {fleet.listed_runs:,} of them by the list prices of their machines" if fleet.listed_runs else ""
        currency = f" {CURRENCY}" if fleet.listed_runs == fleet.money.runs else ""
        yield "cost", f"{paid(fleet.money)}{currency}, of {fmt.plural(fleet.money.runs, 'run')} with a price{by_list}"
    if fleet.productive_share is None:
        yield "trained", "not known: no clock was inside these jobs"
        return
    outside_s = fleet.device_s - fleet.measured_s
    apart = f"; {hours(outside_s)} device-hours more were watched from outside" if outside_s > 0 else ""
    yield "trained", f"{fmt.share(fleet.productive_share)} of {hours(fleet.measured_s)} device-hours{apart}"
    trend = [month for month in fleet.months if month.productive_share is not None]
    if len(trend) > 1:
        first, last = trend[0], trend[-1]
        shares = f"{fmt.share(first.productive_share)} in {first.name} → {fmt.share(last.productive_share)}"
        yield "trend", f"{shares} in {last.name}"


def _facts(fleet: Fleet) -> RenderableType:
    made = table("", "", header=False)
    for name, said in summary(fleet):
        made.add_row(name, plain_text(said))
    return made


def _phases(fleet: Fleet) -> Iterator[RenderableType]:
    if not fleet.phases:
        return
    yield ""
    made = table("phase", "device-hours", "share", "cost", "runs", "", right=(1, 2, 3, 4))
    for row in fleet.phases:
        made.add_row(plain_text(row.name), *_numbers(row, fleet.measured_s), plain_text(row.meaning, "dim"))
    made.add_row("total", hours(fleet.measured_s), "100 %", "", "", "")
    yield made


def _findings(fleet: Fleet) -> Iterator[RenderableType]:
    if not fleet.findings:
        return
    yield ""
    yield Text("findings (they overlap with the phases and each other)", "bold")
    made = table("cause", "device-hours", "share", "cost", "runs", "", right=(1, 2, 3, 4))
    for row in fleet.findings[:FINDINGS_SHOWN]:
        made.add_row(plain_text(row.name), *_numbers(row, fleet.device_s), plain_text(row.meaning, "dim"))
    yield made
    yield from _more(len(fleet.findings) - FINDINGS_SHOWN, "cause")


def _numbers(row: Sum, whole_s: float) -> tuple[str, str, str, str]:
    if row.device_s <= 0:  # a finding that is not about time
        return "", "", "", fmt.count(row.runs)
    share = fmt.share(row.device_s / whole_s if whole_s > 0 else None)
    return hours(row.device_s), share, paid(row.money), fmt.count(row.runs)


def _months(fleet: Fleet) -> Iterator[RenderableType]:
    yield from _rows("month", fleet.months[-MONTHS_SHOWN:])
    yield from _more(len(fleet.months) - MONTHS_SHOWN, "earlier month")


def _hosts(fleet: Fleet) -> Iterator[RenderableType]:
    yield from _rows("host", fleet.hosts[:HOSTS_SHOWN])
    yield from _more(len(fleet.hosts) - HOSTS_SHOWN, "host")


def _rows(name: str, rows: list[Sum]) -> Iterator[RenderableType]:
    if not rows:
        return
    yield ""
    made = table(name, "device-hours", "trained", "cost", "runs", right=(1, 2, 3, 4))
    for row in rows:
        trained = fmt.share(row.productive_share)
        made.add_row(plain_text(row.name), hours(row.device_s), trained, paid(row.money), fmt.count(row.runs))
    yield made


def _worst(fleet: Fleet) -> Iterator[RenderableType]:
    if not fleet.worst:
        return
    yield ""
    yield Text("most device time lost", "bold")
    made = table("run", "lost hours", "of", "cost", "largest loss", "", right=(1, 2, 3))
    for row in fleet.worst:
        numbers = (hours(row.lost_s), hours(row.device_s), paid(row.money_lost))
        made.add_row(plain_text(row.run), *numbers, plain_text(row.largest_loss), plain_text(row.finding, "dim"))
    yield made


def _died(fleet: Fleet) -> Iterator[RenderableType]:
    if not fleet.died:
        return
    yield ""
    yield Text("ended before their time", "bold")
    made = table("cause", "runs", "", "", right=(1,))
    for row in fleet.died:
        made.add_row(plain_text(row.cause), fmt.count(row.runs), row.title, plain_text(", ".join(row.examples), "dim"))
    yield made


def _damaged(fleet: Fleet) -> Iterator[RenderableType]:
    if not fleet.damaged_runs:
        return
    yield ""
    yield Text("could not be read", "bold")
    for one in fleet.damaged[:DAMAGED_SHOWN]:
        yield plain_text(f"{one.run}: {one.error}")
    yield from _more(fleet.damaged_runs - DAMAGED_SHOWN, "run")


def _more(count: int, noun: str) -> Iterator[RenderableType]:
    if count > 0:
        yield plain_text(f"{fmt.plural(count, noun)} more: --json", "dim")
