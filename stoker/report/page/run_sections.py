"""The page's sections about the run itself: its time, the machine, the data, the settings, the environment, the events.

What was learnt is `results.py`.
"""

import time
from typing import Any

from stoker.report import format as fmt
from stoker.report.explain import PhaseShare
from stoker.report.explain_terminal import cost
from stoker.report.page import charts as draw
from stoker.report.page.charts import PHASE_COLOURS, Charts
from stoker.report.page.findings import experiments, findings
from stoker.report.page.markup import (
    Child,
    Markup,
    code,
    section,
    table,
    tag,
)
from stoker.report.page.timeline import timeline
from stoker.report.run_report import Report
from stoker.runs.records import PHASES, WARNING_KINDS

NAMED_FROM = 0.09
"""Share of the bar from which a phase's name fits inside on a wide screen."""


def time_bar(report: Report) -> Markup | None:
    """All device time as one bar."""
    rows = report.why.phases
    if not rows:
        return None
    ordered = sorted(rows, key=lambda row: PHASES.index(row.phase) if row.phase in PHASES else len(PHASES))
    parts = [
        tag(
            "span",
            _inside(row) if row.share >= NAMED_FROM else None,
            style=f"flex-grow:{row.share:.5f};background:{PHASE_COLOURS.get(row.phase, 'var(--c8)')}",
            title=f"{_name(row.phase)}: {fmt.duration(row.device_s)}, {fmt.share(row.share)}",
        )
        for row in ordered
    ]
    words = ", ".join(f"{_name(row.phase)} {fmt.share(row.share)}" for row in rows)
    keys = [
        tag(
            "li",
            tag("span", class_="key", style=f"background:{PHASE_COLOURS.get(row.phase, 'var(--c8)')}"),
            f"{_name(row.phase)} {fmt.share(row.share)}",
        )
        for row in rows[:6]
    ]
    bar = tag("div", parts, class_="timebar", role="img", aria_label=f"Where the device's time went: {words}")
    return tag("div", tag("h3", "Where the time went"), bar, tag("ul", keys, class_="keys", aria_hidden="true"))


def _inside(row: PhaseShare) -> Markup:
    """The name inside the bar; one that is wide enough on a wide screen only is marked."""
    small = "small" if row.share < 3 * NAMED_FROM else None
    return tag("span", f"{_name(row.phase)} {fmt.share(row.share)}", class_=small)


def _name(phase: str) -> str:
    return phase.replace("_", " ")


def times(report: Report, charts: Charts) -> Markup:
    """The ledger, whole and over time."""
    why = report.why
    if not why.phases:
        return section(
            "time", "Time", tag("p", "No time is recorded: the run did not come to its first window.", class_="absent")
        )
    money = why.rate is not None
    rows: list[list[Child]] = []
    for name, row in why.lines():
        colour = PHASE_COLOURS.get(row.phase, "var(--c8)")
        swatch = tag("span", class_="key", style=f"background:{colour}", aria_hidden="true")
        rows.append(
            [
                f"of this {name.strip()}" if name.startswith(" ") else tag("span", swatch, _name(name), class_="nobr"),
                fmt.duration(row.device_s),
                fmt.share(row.share),
                *([cost(why.cost(row.device_s))] if money else []),
                row.meaning,
            ]
        )
    rows.append(
        [
            "total",
            fmt.duration(why.device_s),
            "100 %",
            *([cost(why.cost(why.device_s))] if money else []),
            "",
        ]
    )
    heads = ("phase", "device time", "share", *(["cost"] if money else []), "meaning")
    lost = f" {fmt.plural(why.steps_lost, 'step')} were lost by restarts and done again." if why.steps_lost else ""
    says = (
        f"{fmt.duration(why.wall_s)} on {fmt.plural(why.devices, 'device')}, {fmt.plural(why.attempts, 'attempt')}, "
        f"{fmt.plural(why.steps, 'step')}, {fmt.plural(why.pictures, 'picture')}.{lost} The phases add up to all of "
        "the time; compute is productive, the rest are losses."
    )
    if why.rate is not None and why.rate.currency:
        says += f" Cost: {cost((why.rate.low, why.rate.high))} {why.rate.currency} per device-hour, {why.rate.source}."
    ledger = table(
        "Where the device's time went, all attempts together",
        heads,
        rows,
        right=range(1, 4 if money else 3),
        wide=(len(heads) - 1,),
    )
    return section(
        "time", "Time", tag("p", says), ledger, timeline(charts, report), findings(report), experiments(report)
    )


def machine(report: Report, charts: Charts) -> Markup:
    """What driver and kernel say meanwhile."""
    gpus = sorted({name.partition("/")[0] for name in report.machine if name.startswith("gpu")})
    share = {"range": [0, 1.02], "tickformat": ".0%"}
    gib = 1 / 2**30
    drawn: list[Markup | None] = []
    for gpu in gpus[:8]:
        title = gpu.upper()
        drawn += [
            draw.machine(
                charts,
                report,
                gpu,
                f"{title}: utilisation",
                "share of time in which a kernel ran",
                ("utilisation",),
                showlegend=False,
                yaxis=share,
            ),
            draw.machine(
                charts,
                report,
                gpu,
                f"{title}: memory",
                "GiB",
                ("memory", "memory of the GPU"),
                scale=gib,
                yaxis={"rangemode": "tozero"},
            ),
            draw.machine(
                charts,
                report,
                gpu,
                f"{title}: power",
                "watts",
                ("power, W", "power limit, W"),
                yaxis={"rangemode": "tozero"},
            ),
            draw.machine(charts, report, gpu, f"{title}: temperature", "°C", ("temperature, °C",), showlegend=False),
        ]
    drawn += [
        draw.machine(
            charts, report, "cpu", "Processor", "busy share of all cores", ("mean", "busiest core"), yaxis=share
        ),
        draw.machine(
            charts,
            report,
            "memory",
            "Memory of the host",
            "GiB",
            ("process", "used", "limit"),
            scale=gib,
            yaxis={"rangemode": "tozero"},
        ),
        draw.machine(
            charts,
            report,
            "pressure",
            "Pressure",
            "share of time in which some task had to wait",
            ("cpu", "memory", "io"),
            yaxis={"tickformat": ".0%", "rangemode": "tozero"},
        ),
        draw.machine(
            charts,
            report,
            "pressure",
            "Held back by the CPU quota",
            "processor-seconds per second",
            ("held back by the quota, s",),
            showlegend=False,
            yaxis={"rangemode": "tozero"},
        ),
    ]
    shown = [one for one in drawn if one is not None]
    absent = [] if gpus else [tag("p", "GPU: n/a. The machine has none, or its driver says nothing.", class_="note")]
    more = [tag("p", f"{len(gpus) - 8} more GPUs are in the JSON.", class_="note")] if len(gpus) > 8 else []
    body = tag("div", shown, class_="two") if shown else tag("p", "Nothing was recorded.", class_="absent")
    return section("machine", "Machine", absent, body, more)


def data(report: Report) -> Markup:
    """What was wrong with the data, and what could not be read."""
    warnings = [event for event in report.events if event.kind in WARNING_KINDS]
    parts: list[Child] = []
    if warnings:
        parts.append(tag("ul", [tag("li", event.text) for event in warnings[:50]], class_="warnings"))
        if len(warnings) > 50:
            parts.append(tag("p", f"{len(warnings) - 50} more are among the events.", class_="note"))
    else:
        parts.append(tag("p", "No warning was given."))
    if report.quarantined:
        rows = [[one.path, one.error.partition("\n")[0], fmt.count(one.row)] for one in report.quarantined]
        left = f"; {report.quarantined_left_out:,} more are left out here" if report.quarantined_left_out else ""
        parts.append(
            table(f"Pictures that could not be used{left}", ("picture", "why", "row"), rows, right=(2,), wide=(1,))
        )
    else:
        parts.append(tag("p", "No picture is recorded as unusable."))
    return section("data", "Warnings and data", *parts)


def settings(report: Report) -> Markup:
    """Every setting with its reason."""
    if not report.settings:
        return section("settings", "Settings", tag("p", "Not known.", class_="absent"))
    parts: list[Child] = []
    mine = [one for one in report.settings if one.reason is None]
    parts.append(
        tag(
            "p",
            "Set by you: ",
            tag("b", ", ".join(f"{one.name} = {one.value}" for one in mine) or "nothing"),
            ". Everything else stoker chose, with the reason beside it.",
        )
    )
    for name in dict.fromkeys(one.section for one in report.settings):
        rows = [
            [one.name, one.value, one.reason if one.reason is not None else tag("b", "set by you")]
            for one in report.settings
            if one.section == name
        ]
        parts.append(
            tag(
                "details",
                tag("summary", f"{name} ({len(rows)})"),
                table(f"Settings of {name}", ("setting", "value", "why"), rows, wide=(2,), hidden=True),
            )
        )
    return section("settings", "Settings", *parts)


def environment(report: Report) -> Markup:
    """What it ran on."""
    if not report.environment:
        return section("environment", "Environment", tag("p", "Not known.", class_="absent"))
    rows = [[key, value] for key, value in _flat(report.environment)]
    command = report.environment.get("argv")
    said = tag("p", code(" ".join(map(str, command)))) if isinstance(command, list) else None
    return section(
        "environment",
        "Environment",
        said,
        tag(
            "details",
            tag("summary", f"versions, machine, variables ({len(rows)})"),
            table("What the newest attempt ran on", ("what", "value"), rows, wide=(1,), hidden=True),
        ),
    )


def _flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    """A nested object as rows: `torch.cuda` → `13.2`."""
    if isinstance(value, dict) and value:
        return [row for key, inner in value.items() for row in _flat(inner, f"{name}.{key}" if name else str(key))]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [row for n, inner in enumerate(value) for row in _flat(inner, f"{name}[{n}]")]
    if isinstance(value, list):
        return [(name, " ".join(map(str, value)) or "none")]
    if name.endswith("_bytes") and isinstance(value, int):
        return [(name, fmt.size(value))]
    return [(name, fmt.MISSING if value is None or value == {} else str(value))]


def events(report: Report) -> Markup:
    """What happened."""
    start_t = report.start_t or 0.0
    rows = [
        [
            fmt.duration(max(0.0, event.t - start_t)),
            event.kind.replace("_", " "),
            fmt.count(event.step) if event.step is not None else "",
            tag("span", event.text, class_="said"),
        ]
        for event in report.events
    ]
    if not rows:
        return section("events", "Events", tag("p", "None.", class_="absent"))
    left = f" {report.events_left_out:,} in the middle are left out here." if report.events_left_out else ""
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(start_t))
    return section(
        "events",
        "Events",
        tag("p", f"Times are since {began}; evaluations are in the curves.{left}", class_="note"),
        tag(
            "details",
            tag("summary", f"{len(rows)} events"),
            table("Events", ("after", "what", "step", "said"), rows, right=(0, 2), wide=(3,), hidden=True),
        ),
    )
