"""The page of many runs, `stoker report --all FOLDER`: sums, trend, causes, hosts, the worst runs. Its numbers are
those of `stoker why --all`; the frame around it is `html.py`'s."""

from typing import Any

from stoker.report import format as fmt
from stoker.report.page.charts import PHASE_COLOURS, Charts, plain
from stoker.report.page.markup import (
    Child,
    Markup,
    bar,
    section,
    table,
    tag,
)
from stoker.report.runs_summary import Fleet, Sum
from stoker.report.runs_summary_terminal import hours, paid, summary

SECTIONS = (
    ("summary", "Summary"),
    ("causes", "Causes"),
    ("months", "Months"),
    ("hosts", "Hosts"),
    ("worst", "Worst runs"),
    ("ends", "Ends"),
    ("unread", "Unread"),
)
HOSTS_SHOWN, DAMAGED_SHOWN = 40, 50


def main(fleet: Fleet, charts: Charts) -> list[Markup]:
    """The sections of the page."""
    return [
        tag("header", tag("h1", fleet.folder), tag("p", f"{fmt.plural(fleet.runs, 'run')} added up", class_="what")),
        _summary(fleet),
        _causes(fleet, charts),
        _months(fleet, charts),
        _hosts(fleet),
        _worst(fleet),
        _ends(fleet),
        _unread(fleet),
    ]


def _summary(fleet: Fleet) -> Markup:
    rows: list[list[Child]] = [[name, said] for name, said in summary(fleet)]
    return section("summary", "Summary", table("All runs together", ("what", "value"), rows, wide=(1,), hidden=True))


def _causes(fleet: Fleet, charts: Charts) -> Markup:
    if not fleet.phases and not fleet.findings:
        return section("causes", "Causes", tag("p", "No time is recorded.", class_="absent"))
    losses = [row for row in fleet.phases if row.name != "compute"]
    drawn = charts.add(
        "Device-hours lost",
        "by phase, of the runs whose compute is known",
        [_bars(losses)] if losses else [],
        height=max(200, 60 + 30 * len(losses)),
        x="device-hours",
        showlegend=False,
        yaxis={"automargin": True, "autorange": "reversed"},
    )
    heads = ("phase", "device-hours", "share", "cost", "runs", "meaning")
    phases = [[row.name, *_numbers(row, fleet.measured_s), row.meaning] for row in fleet.phases]
    findings = [[row.name, *_numbers(row, fleet.device_s), row.meaning] for row in fleet.findings]
    both = [
        table("Where the device's time went", heads, phases, right=range(1, 5), wide=(5,)) if phases else None,
        table("Findings; they overlap with the phases and each other", ("cause", *heads[1:]), findings,
              right=range(1, 5), wide=(5,)) if findings else None,
    ]  # fmt: skip
    return section("causes", "Causes", drawn, *both)


def _bars(rows: list[Sum]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "x": [round(row.device_s / 3600, 4) for row in rows],
        "y": [plain(row.name.replace("_", " ")) for row in rows],
        "marker": {"color": [PHASE_COLOURS.get(row.name, "var(--c8)") for row in rows]},
    }


def _numbers(row: Sum, whole_s: float) -> list[Child]:
    if row.device_s <= 0:
        return ["", "", "", fmt.count(row.runs)]
    share = row.device_s / whole_s if whole_s > 0 else None
    return [hours(row.device_s), fmt.share(share), paid(row.money), fmt.count(row.runs)]


def _months(fleet: Fleet, charts: Charts) -> Markup:
    known = [row for row in fleet.months if row.measured_s > 0]
    stacked = (
        ("trained", "compute", [row.compute_s for row in known]),
        ("lost", "input_wait", [row.measured_s - row.compute_s for row in known]),
    )
    traces = [
        {
            "type": "bar",
            "x": [row.name for row in known],
            "y": [round(took_s / 3600, 4) for took_s in seconds],
            "name": name,
            "marker": {"color": PHASE_COLOURS[colour]},
        }
        for name, colour, seconds in stacked
    ]
    drawn = charts.add(
        "Device-hours by month",
        "of the runs whose compute is known",
        traces if known else [],
        y="device-hours",
        barmode="stack",
        xaxis={"type": "category"},
    )
    shares = charts.add(
        "Share of the time that trained, by month",
        "the trend",
        [
            {
                "x": [row.name for row in known],
                "y": [round(row.productive_share or 0.0, 4) for row in known],
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
    return section("months", "Months", drawn, shares, _rows("By month, UTC", "month", fleet.months))


def _rows(caption: str, name: str, rows: list[Sum]) -> Markup:
    body: list[list[Child]] = [
        [
            row.name,
            hours(row.device_s),
            [bar(row.productive_share or 0.0), " ", fmt.share(row.productive_share)],
            paid(row.money),
            fmt.count(row.runs),
        ]
        for row in rows
    ]
    return table(caption, (name, "device-hours", "trained", "cost", "runs"), body, right=range(1, 5))


def _hosts(fleet: Fleet) -> Markup:
    more = len(fleet.hosts) - HOSTS_SHOWN
    note = tag("p", f"{fmt.plural(more, 'host')} more are in the JSON.", class_="note") if more > 0 else None
    return section("hosts", "Hosts", _rows("By host", "host", fleet.hosts[:HOSTS_SHOWN]), note)


def _worst(fleet: Fleet) -> Markup:
    rows: list[list[Child]] = [
        [row.run, hours(row.lost_s), hours(row.device_s), paid(row.money_lost), row.largest_loss, row.finding]
        for row in fleet.worst
    ]
    if not rows:
        return section("worst", "Worst runs", tag("p", "None lost any time.", class_="absent"))
    heads = ("run", "hours lost", "of", "cost", "largest loss", "first finding")
    return section("worst", "Worst runs", table("Most device time lost", heads, rows, right=(1, 2, 3), wide=(5,)))


def _ends(fleet: Fleet) -> Markup:
    rows: list[list[Child]] = [
        [row.cause, fmt.count(row.runs), row.title, ", ".join(row.examples)] for row in fleet.died
    ]
    if not rows:
        return section("ends", "Ends", tag("p", "No run ended before its time.", class_="absent"))
    heads = ("cause", "runs", "what", "for example")
    return section("ends", "Ends", table("Runs that ended before their time", heads, rows, right=(1,), wide=(2, 3)))


def _unread(fleet: Fleet) -> Markup:
    if not fleet.damaged_runs:
        return section("unread", "Unread", tag("p", "Every run could be read."))
    rows: list[list[Child]] = [[one.run, one.error] for one in fleet.damaged[:DAMAGED_SHOWN]]
    caption = f"{fmt.plural(fleet.damaged_runs, 'run')} could not be read"
    return section("unread", "Unread", table(caption, ("run", "why"), rows, wide=(1,)))
