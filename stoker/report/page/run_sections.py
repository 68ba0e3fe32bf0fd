"""The sections about the run: time, machine, warnings, settings, environment, events.

The sections about the model are in `results.py`.
"""

import time
from typing import Any

from stoker.report import format as fmt
from stoker.report.environment import flatten
from stoker.report.explain import PhaseTime
from stoker.report.findings_terminal import format_cost
from stoker.report.page import charts as page_charts
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
"""Minimum fraction of the bar for a label inside it, on a wide screen."""


def time_bar(report: RunReport) -> Markup | None:
    """All device time as one bar, by phase."""
    rows = report.explanation.phases
    if not rows:
        return None
    ordered = sorted(rows, key=lambda row: PHASES.index(row.phase) if row.phase in PHASES else len(PHASES))
    segments = [
        tag(
            "span",
            _bar_label(row) if row.fraction >= MIN_LABEL_FRACTION else None,
            style=f"flex-grow:{row.fraction:.5f};background:{_color(row.phase)}",
            title=f"{_phase_name(row.phase)}: {fmt.duration(row.device_s)}, {fmt.percentage(row.fraction)}",
        )
        for row in ordered
    ]
    description = ", ".join(f"{_phase_name(row.phase)} {fmt.percentage(row.fraction)}" for row in rows)
    legend = [
        tag(
            "li",
            tag("span", class_="key", style=f"background:{_color(row.phase)}"),
            f"{_phase_name(row.phase)} {fmt.percentage(row.fraction)}",
        )
        for row in rows[:6]
    ]
    bar = tag("div", segments, class_="timebar", role="img", aria_label=f"Device time by phase: {description}")
    return tag("div", tag("h3", "Time by phase"), bar, tag("ul", legend, class_="keys", aria_hidden="true"))


def _bar_label(row: PhaseTime) -> Markup:
    """A label inside the bar; with class `small` if it only fits on a wide screen."""
    small = "small" if row.fraction < 3 * MIN_LABEL_FRACTION else None
    return tag("span", f"{_phase_name(row.phase)} {fmt.percentage(row.fraction)}", class_=small)


def _color(phase: str) -> str:
    return PHASE_COLORS.get(phase, "var(--c8)")


def _phase_name(phase: str) -> str:
    return phase.replace("_", " ")


def times(report: RunReport, charts: Charts) -> Markup:
    """The ledger, in total and over time; findings, experiments."""
    explanation = report.explanation
    if not explanation.phases:
        return section("time", "Time", tag("p", "No time is recorded: the run ended too early.", class_="absent"))
    has_price = explanation.price_range is not None
    rows: list[list[Child]] = []
    for name, row in explanation.rows():
        swatch = tag("span", class_="key", style=f"background:{_color(row.phase)}", aria_hidden="true")
        is_part = name.startswith(" ")
        label = f"of this {name.strip()}" if is_part else tag("span", swatch, _phase_name(name), class_="nobr")
        rows.append([label, *_time_cells(report, row.device_s, fmt.percentage(row.fraction)), row.meaning])
    rows.append(["total", *_time_cells(report, explanation.device_s, "100 %"), ""])
    heads = ("phase", "device time", "fraction", *(["cost"] if has_price else []), "meaning")
    counts = [
        f"{fmt.duration(explanation.wall_s)} on {fmt.plural(explanation.devices, 'device')}",
        fmt.plural(explanation.attempts, "attempt"),
        fmt.plural(explanation.steps, "step"),
        fmt.plural(explanation.num_images, "image"),
    ]
    description = f"{', '.join(counts)}."
    if explanation.lost_steps:
        description += f" {fmt.plural(explanation.lost_steps, 'step')} were lost at restarts and repeated."
    description += " The phases add up to the total time; compute is productive, the others are losses."
    price = explanation.price_range
    if price is not None and price.currency:
        description += (
            f" Cost: {format_cost((price.low, price.high))} {price.currency} per device-hour, {price.source}."
        )
    caption = "Device time by phase, all attempts"
    ledger = table(caption, heads, rows, right=range(1, 4 if has_price else 3), wide=(len(heads) - 1,))
    return section(
        "time", "Time", tag("p", description), ledger, timeline(charts, report), findings(report), experiments(report)
    )


def _time_cells(report: RunReport, device_s: float, fraction: str) -> list[str]:
    """Time, fraction and, with a price, cost."""
    explanation = report.explanation
    cost = [format_cost(explanation.cost(device_s))] if explanation.price_range is not None else []
    return [fmt.duration(device_s), fraction, *cost]


_PERCENT: dict[str, Any] = {"yaxis": {"range": [0, 1.02], "tickformat": ".0%"}}
_FROM_ZERO: dict[str, Any] = {"yaxis": {"rangemode": "tozero"}}
_GIB: dict[str, Any] = {"scale": 2.0**-30, **_FROM_ZERO}
_GPU_CHARTS: tuple[tuple[str, str, tuple[str, ...], dict[str, Any]], ...] = (
    ("utilization", "fraction of time in which a kernel ran", ("utilization",), {"showlegend": False, **_PERCENT}),
    ("memory", "GiB", ("memory", "memory of the GPU"), _GIB),
    ("power", "watts", ("power, W", "power limit, W"), _FROM_ZERO),
    ("temperature", "°C", ("temperature, °C",), {"showlegend": False}),
)
"""Title, description, curves, options."""
_HOST_CHARTS: tuple[tuple[str, str, str, tuple[str, ...], dict[str, Any]], ...] = (
    ("cpu", "CPU", "utilization", ("mean", "busiest core"), _PERCENT),
    ("memory", "Host memory", "GiB", ("process", "used", "limit"), _GIB),
    (
        "pressure",
        "Pressure (PSI)",
        "fraction of time in which a task had to wait",
        ("cpu", "memory", "io"),
        {"yaxis": {"tickformat": ".0%", "rangemode": "tozero"}},
    ),
    (
        "pressure",
        "CPU throttling",
        "CPU-seconds per second, by the CPU quota",
        ("throttled, s",),
        {"showlegend": False, **_FROM_ZERO},
    ),
)
"""Prefix of the curves, title, description, curves, options."""


def machine(report: RunReport, charts: Charts) -> Markup:
    """Telemetry of GPUs and host."""
    gpus = sorted({name.partition("/")[0] for name in report.machine if name.startswith("gpu")})
    figures = [
        page_charts.machine(charts, report, gpu, f"{gpu.upper()}: {title}", description, names, **options)
        for gpu in gpus[:8]
        for title, description, names, options in _GPU_CHARTS
    ]
    figures += [
        page_charts.machine(charts, report, prefix, title, description, names, **options)
        for prefix, title, description, names, options in _HOST_CHARTS
    ]
    shown = [figure for figure in figures if figure is not None]
    no_gpu = [] if gpus else [tag("p", "GPU: n/a. There is none, or its driver gives no data.", class_="note")]
    more = [tag("p", f"{len(gpus) - 8} more GPUs are in the JSON.", class_="note")] if len(gpus) > 8 else []
    body = tag("div", shown, class_="two") if shown else tag("p", "Nothing was recorded.", class_="absent")
    return section("machine", "Machine", no_gpu, body, more)


def data(report: RunReport) -> Markup:
    """Warnings, and images that could not be read."""
    warnings = [event for event in report.events if event.kind in WARNING_KINDS]
    parts: list[Child] = [
        tag("ul", [tag("li", event.text) for event in warnings[:50]], class_="warnings")
        if warnings
        else tag("p", "No warnings.")
    ]
    if len(warnings) > 50:
        parts.append(tag("p", f"{len(warnings) - 50} more are in the events.", class_="note"))
    if report.quarantined:
        rows = [
            [image.path, image.error.partition("\n")[0], fmt.count(image.image_index)] for image in report.quarantined
        ]
        omitted = f"; {report.quarantined_omitted:,} more are in quarantine.jsonl" if report.quarantined_omitted else ""
        caption = f"Images in quarantine (unusable){omitted}"
        parts.append(table(caption, ("image", "error", "image index"), rows, right=(2,), wide=(1,)))
    else:
        parts.append(tag("p", "No unusable images are recorded."))
    return section("data", "Warnings and data", *parts)


def settings(report: RunReport) -> Markup:
    """All settings with their reasons."""
    if not report.settings:
        return section("settings", "Settings", tag("p", "Not known.", class_="absent"))
    parts: list[Child] = []
    user_settings = [setting for setting in report.settings if setting.reason is None]
    parts.append(
        tag(
            "p",
            "Set by you: ",
            tag("b", ", ".join(f"{setting.name} = {setting.value}" for setting in user_settings) or "nothing"),
            ". Stoker chose all others, for the given reasons.",
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
                table(f"Settings of {name}", ("setting", "value", "reason"), rows, wide=(2,), hidden=True),
            )
        )
    return section("settings", "Settings", *parts)


def environment(report: RunReport) -> Markup:
    """Hardware, versions and variables."""
    if not report.environment:
        return section("environment", "Environment", tag("p", "Not known.", class_="absent"))
    rows = list(flatten(report.environment))
    command = report.environment.get("argv")
    command_line = tag("p", code(" ".join(map(str, command)))) if isinstance(command, list) else None
    return section(
        "environment",
        "Environment",
        command_line,
        tag(
            "details",
            tag("summary", f"versions, machine, variables ({len(rows)})"),
            table("Environment of the newest attempt", ("name", "value"), rows, wide=(1,), hidden=True),
        ),
    )


def events(report: RunReport) -> Markup:
    """The events of the run."""
    start_t = report.start_t or 0.0
    rows = [
        [
            fmt.duration(max(0.0, event.t - start_t)),
            event.kind.replace("_", " "),
            fmt.count(event.step) if event.step is not None else "",
            tag("span", event.text, class_="message"),
        ]
        for event in report.events
    ]
    if not rows:
        return section("events", "Events", tag("p", "None.", class_="absent"))
    omitted = f" {report.events_omitted:,} in the middle are left out." if report.events_omitted else ""
    start = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(start_t))
    return section(
        "events",
        "Events",
        tag("p", f"Times are relative to {start}; evaluations are in the curves.{omitted}", class_="note"),
        tag(
            "details",
            tag("summary", f"{len(rows)} events"),
            table("Events", ("time", "event", "step", "message"), rows, right=(0, 2), wide=(3,), hidden=True),
        ),
    )
