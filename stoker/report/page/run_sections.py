"""The page's sections about the run itself: its time, the machine, the data, the settings, the environment, the events.

What was learnt is `results.py`.
"""

import time
from typing import Any

from stoker.report import format as fmt
from stoker.report.explain import PhaseTime
from stoker.report.explain_terminal import format_cost
from stoker.report.page import charts as draw
from stoker.report.page.charts import PHASE_COLORS, Charts
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
from stoker.report.run_report import RunReport
from stoker.runs.records import PHASES, WARNING_KINDS

MIN_LABEL_FRACTION = 0.09
"""Share of the bar from which a phase's name fits inside on a wide screen."""


def time_bar(report: RunReport) -> Markup | None:
    """All device time as one bar."""
    rows = report.explanation.phases
    if not rows:
        return None
    ordered = sorted(rows, key=lambda row: PHASES.index(row.phase) if row.phase in PHASES else len(PHASES))
    segments = [
        tag(
            "span",
            _bar_label(row) if row.fraction >= MIN_LABEL_FRACTION else None,
            style=f"flex-grow:{row.fraction:.5f};background:{PHASE_COLORS.get(row.phase, 'var(--c8)')}",
            title=f"{_phase_name(row.phase)}: {fmt.duration(row.device_s)}, {fmt.percentage(row.fraction)}",
        )
        for row in ordered
    ]
    description = ", ".join(f"{_phase_name(row.phase)} {fmt.percentage(row.fraction)}" for row in rows)
    legend = [
        tag(
            "li",
            tag("span", class_="key", style=f"background:{PHASE_COLORS.get(row.phase, 'var(--c8)')}"),
            f"{_phase_name(row.phase)} {fmt.percentage(row.fraction)}",
        )
        for row in rows[:6]
    ]
    bar = tag("div", segments, class_="timebar", role="img", aria_label=f"Where the device's time went: {description}")
    return tag("div", tag("h3", "Where the time went"), bar, tag("ul", legend, class_="keys", aria_hidden="true"))


def _bar_label(row: PhaseTime) -> Markup:
    """The name inside the bar; one that is wide enough on a wide screen only is marked."""
    small = "small" if row.fraction < 3 * MIN_LABEL_FRACTION else None
    return tag("span", f"{_phase_name(row.phase)} {fmt.percentage(row.fraction)}", class_=small)


def _phase_name(phase: str) -> str:
    return phase.replace("_", " ")


def times(report: RunReport, charts: Charts) -> Markup:
    """The ledger, whole and over time."""
    explanation = report.explanation
    if not explanation.phases:
        return section(
            "time", "Time", tag("p", "No time is recorded: the run did not come to its first window.", class_="absent")
        )
    has_price = explanation.price_range is not None
    rows: list[list[Child]] = []
    for name, row in explanation.rows():
        color = PHASE_COLORS.get(row.phase, "var(--c8)")
        swatch = tag("span", class_="key", style=f"background:{color}", aria_hidden="true")
        rows.append(
            [
                f"of this {name.strip()}"
                if name.startswith(" ")
                else tag("span", swatch, _phase_name(name), class_="nobr"),
                fmt.duration(row.device_s),
                fmt.percentage(row.fraction),
                *([format_cost(explanation.cost(row.device_s))] if has_price else []),
                row.meaning,
            ]
        )
    rows.append(
        [
            "total",
            fmt.duration(explanation.device_s),
            "100 %",
            *([format_cost(explanation.cost(explanation.device_s))] if has_price else []),
            "",
        ]
    )
    heads = ("phase", "device time", "share", *(["cost"] if has_price else []), "meaning")
    lost = (
        f" {fmt.plural(explanation.lost_steps, 'step')} were lost by restarts and done again."
        if explanation.lost_steps
        else ""
    )
    description = (
        f"{fmt.duration(explanation.wall_s)} on {fmt.plural(explanation.devices, 'device')}, {fmt.plural(explanation.attempts, 'attempt')}, "
        f"{fmt.plural(explanation.steps, 'step')}, {fmt.plural(explanation.num_images, 'picture')}.{lost} The phases add up to all of "
        "the time; compute is productive, the rest are losses."
    )
    if explanation.price_range is not None and explanation.price_range.currency:
        description += f" Cost: {format_cost((explanation.price_range.low, explanation.price_range.high))} {explanation.price_range.currency} per device-hour, {explanation.price_range.source}."
    ledger = table(
        "Where the device's time went, all attempts together",
        heads,
        rows,
        right=range(1, 4 if has_price else 3),
        wide=(len(heads) - 1,),
    )
    return section(
        "time", "Time", tag("p", description), ledger, timeline(charts, report), findings(report), experiments(report)
    )


def machine(report: RunReport, charts: Charts) -> Markup:
    """What driver and kernel say meanwhile."""
    gpus = sorted({name.partition("/")[0] for name in report.machine if name.startswith("gpu")})
    percent_axis = {"range": [0, 1.02], "tickformat": ".0%"}
    gib = 1 / 2**30
    figures: list[Markup | None] = []
    for gpu in gpus[:8]:
        title = gpu.upper()
        figures += [
            draw.machine(
                charts,
                report,
                gpu,
                f"{title}: utilisation",
                "share of time in which a kernel ran",
                ("utilisation",),
                showlegend=False,
                yaxis=percent_axis,
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
    figures += [
        draw.machine(
            charts, report, "cpu", "Processor", "busy share of all cores", ("mean", "busiest core"), yaxis=percent_axis
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
    shown = [figure for figure in figures if figure is not None]
    no_gpu_note = (
        [] if gpus else [tag("p", "GPU: n/a. The machine has none, or its driver says nothing.", class_="note")]
    )
    more = [tag("p", f"{len(gpus) - 8} more GPUs are in the JSON.", class_="note")] if len(gpus) > 8 else []
    body = tag("div", shown, class_="two") if shown else tag("p", "Nothing was recorded.", class_="absent")
    return section("machine", "Machine", no_gpu_note, body, more)


def data(report: RunReport) -> Markup:
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
        rows = [
            [image.path, image.error.partition("\n")[0], fmt.count(image.image_index)] for image in report.quarantined
        ]
        omitted = f"; {report.quarantined_omitted:,} more are left out here" if report.quarantined_omitted else ""
        parts.append(
            table(f"Pictures that could not be used{omitted}", ("picture", "why", "row"), rows, right=(2,), wide=(1,))
        )
    else:
        parts.append(tag("p", "No picture is recorded as unusable."))
    return section("data", "Warnings and data", *parts)


def settings(report: RunReport) -> Markup:
    """Every setting with its reason."""
    if not report.settings:
        return section("settings", "Settings", tag("p", "Not known.", class_="absent"))
    parts: list[Child] = []
    user_settings = [setting for setting in report.settings if setting.reason is None]
    parts.append(
        tag(
            "p",
            "Set by you: ",
            tag("b", ", ".join(f"{setting.name} = {setting.value}" for setting in user_settings) or "nothing"),
            ". Everything else stoker chose, with the reason beside it.",
        )
    )
    for name in dict.fromkeys(setting.section for setting in report.settings):
        rows = [
            [setting.name, setting.value, setting.reason if setting.reason is not None else tag("b", "set by you")]
            for setting in report.settings
            if setting.section == name
        ]
        parts.append(
            tag(
                "details",
                tag("summary", f"{name} ({len(rows)})"),
                table(f"Settings of {name}", ("setting", "value", "why"), rows, wide=(2,), hidden=True),
            )
        )
    return section("settings", "Settings", *parts)


def environment(report: RunReport) -> Markup:
    """What it ran on."""
    if not report.environment:
        return section("environment", "Environment", tag("p", "Not known.", class_="absent"))
    rows = [[key, value] for key, value in _flatten(report.environment)]
    command = report.environment.get("argv")
    command_line = tag("p", code(" ".join(map(str, command)))) if isinstance(command, list) else None
    return section(
        "environment",
        "Environment",
        command_line,
        tag(
            "details",
            tag("summary", f"versions, machine, variables ({len(rows)})"),
            table("What the newest attempt ran on", ("what", "value"), rows, wide=(1,), hidden=True),
        ),
    )


def _flatten(value: Any, name: str = "") -> list[tuple[str, str]]:
    """A nested object as rows: `torch.cuda` → `13.2`."""
    if isinstance(value, dict) and value:
        return [row for key, inner in value.items() for row in _flatten(inner, f"{name}.{key}" if name else str(key))]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [row for n, inner in enumerate(value) for row in _flatten(inner, f"{name}[{n}]")]
    if isinstance(value, list):
        return [(name, " ".join(map(str, value)) or "none")]
    if name.endswith("_bytes") and isinstance(value, int):
        return [(name, fmt.size(value))]
    return [(name, fmt.MISSING if value is None or value == {} else str(value))]


def events(report: RunReport) -> Markup:
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
    omitted = f" {report.events_omitted:,} in the middle are left out here." if report.events_omitted else ""
    start = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(start_t))
    return section(
        "events",
        "Events",
        tag("p", f"Times are since {start}; evaluations are in the curves.{omitted}", class_="note"),
        tag(
            "details",
            tag("summary", f"{len(rows)} events"),
            table("Events", ("after", "what", "step", "said"), rows, right=(0, 2), wide=(3,), hidden=True),
        ),
    )
