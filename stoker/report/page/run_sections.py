"""The sections about the run: time, machine, warnings, settings, environment, events.

The sections about the model are in `results.py`.
"""

import time
from typing import Any

from stoker.findings.finding import Finding
from stoker.report import format as fmt
from stoker.report.environment import flatten
from stoker.report.explain_terminal import PROBE_HEADS, probe_rows
from stoker.report.page import charts as page_charts
from stoker.report.page.charts import FRACTIONS, FROM_ZERO, MAX_DEVICES, Charts, timeline
from stoker.report.page.markup import (
    Child,
    Markup,
    absent,
    bullets,
    code,
    details,
    note,
    section,
    table,
    tag,
)
from stoker.report.run_report import RunReport
from stoker.report.words import PHASE_COLORS
from stoker.runs.records import PHASES, WARNING_KINDS

MAX_WARNINGS = 50
"""Warnings that are listed."""
MIN_LABEL_FRACTION = 0.27
"""Minimum fraction of the bar for a label inside it, on a phone."""


def time_bar(report: RunReport) -> Markup | None:
    """All device time as one bar, by phase."""
    rows = report.explanation.phases
    if not rows:
        return None
    texts = {row.phase: f"{_phase_name(row.phase)} {fmt.percentage(row.fraction)}" for row in rows}
    ordered = sorted(rows, key=lambda row: PHASES.index(row.phase) if row.phase in PHASES else len(PHASES))
    segments = [
        tag(
            "span",
            tag("span", texts[row.phase]) if row.fraction >= MIN_LABEL_FRACTION else None,
            style=f"flex-grow:{row.fraction:.5f};background:{_color(row.phase)}",
            title=f"{_phase_name(row.phase)}: {fmt.duration(row.device_s)}, {fmt.percentage(row.fraction)}",
        )
        for row in ordered
    ]
    legend = [
        tag("li", tag("span", class_="key", style=f"background:{_color(row.phase)}"), texts[row.phase])
        for row in rows[:6]
    ]
    label = f"Device time by phase: {', '.join(texts.values())}"
    bar = tag("div", segments, class_="timebar", role="img", aria_label=label)
    return tag("div", tag("h3", "Time by phase"), bar, tag("ul", legend, class_="keys", aria_hidden="true"))


def _color(phase: str) -> str:
    return PHASE_COLORS.get(phase, "var(--c8)")


def _phase_name(phase: str) -> str:
    return phase.replace("_", " ")


def times(report: RunReport, charts: Charts) -> Markup:
    """The ledger, in total and over time; findings, experiments."""
    explanation = report.explanation
    if not explanation.phases:
        return section("time", "Time", absent("No time is recorded: the run ended too early."))
    price = explanation.price_range
    rows: list[list[Child]] = []
    for name, row in explanation.rows():
        swatch = tag("span", class_="key", style=f"background:{_color(row.phase)}", aria_hidden="true")
        is_part = name.startswith(" ")
        label = f"of this {name.strip()}" if is_part else tag("span", swatch, _phase_name(name), class_="nobr")
        rows.append([label, *explanation.time_cells(row.device_s, row.fraction), row.meaning])
    rows.append(["total", *explanation.time_cells(explanation.device_s, 1.0), ""])
    heads = ("phase", "device time", "fraction", *([] if price is None else ["cost"]), "meaning")
    devices = f"{fmt.duration(explanation.wall_s)} on {fmt.plural(explanation.devices, 'device')}"
    counts = (("attempt", explanation.attempts), ("step", explanation.steps), ("image", explanation.num_images))
    description = f"{', '.join([devices, *(fmt.plural(number, noun) for noun, number in counts)])}."
    if explanation.lost_steps:
        description += f" {fmt.plural(explanation.lost_steps, 'step')} were lost at restarts and repeated."
    description += " The phases add up to the total time; compute is productive, the others are losses."
    if price is not None and price.currency:
        cost = fmt.cost_range((price.low, price.high))
        description += f" Cost: {cost} {price.currency} per device-hour, {price.source}."
    caption, last = "Device time by phase, all attempts", len(heads) - 1
    ledger = table(caption, heads, rows, right=range(1, last), wide=(last,))
    parts = [ledger, timeline(charts, report), _findings(report), _experiments(report)]
    return section("time", "Time", tag("p", description), *parts)


def _findings(report: RunReport) -> list[Markup | None]:
    """Each finding: cost, evidence, fix, confidence; then the notes. The timeline refers to their numbers."""
    articles = [_finding(report, number, item) for number, item in enumerate(report.explanation.findings, start=1)]
    notes = bullets([item.title, _source(item.place)] for item in report.explanation.notes)
    return [tag("h3", "Findings") if articles else None, *articles, tag("h3", "Notes") if notes else None, notes]


def _finding(report: RunReport, number: int, finding: Finding) -> Markup:
    lost = ""
    if finding.lost_device_s is not None:
        lost = f"{fmt.duration(finding.lost_device_s)} lost{report.explanation.cost_text(finding.lost_device_s)}"
    command = [" ", code(finding.extra_command)] if finding.extra_command else None
    confidence = ""
    if finding.confidence is not None:
        result = f"; {finding.probe_result}" if finding.probe_result else ""
        confidence = f"Confidence: {fmt.percentage(finding.confidence)}{result}"
    return tag(
        "article",
        tag("h4", f"{number}. {finding.severity}: {finding.title}"),
        tag("p", lost) if lost else None,
        bullets([item.text, _source(item.source)] for item in finding.evidence),
        tag("p", tag("b", "Fix: "), finding.fix, command),
        note(confidence) if confidence else None,
        class_=f"finding {finding.severity}",
    )


def _source(source: str) -> Markup | None:
    return tag("span", f" {source}", class_="source") if source else None


def _experiments(report: RunReport) -> list[Markup]:
    """What was changed for a few dozen steps, and its effect on the speed."""
    if not report.explanation.probes:
        return []
    rendered = table("Experiments", PROBE_HEADS, probe_rows(report.explanation.probes), right=(1, 2, 3), wide=(4,),
                     hidden=True)  # fmt: skip
    description = "One thing was changed for a few dozen steps; before and after were measured alternately."
    return [tag("h3", "Experiments"), note(description), rendered]


_GIB: dict[str, Any] = {"scale": 2.0**-30, "yaxis": FROM_ZERO}
_ONE_CURVE: dict[str, Any] = {"showlegend": False}
_GPU_CHARTS: tuple[tuple[str, str, tuple[str, ...], dict[str, Any]], ...] = (
    ("utilization", "fraction of time in which a kernel ran", ("utilization",), {"yaxis": FRACTIONS} | _ONE_CURVE),
    ("memory", "GiB", ("memory", "memory of the GPU"), _GIB),
    ("power", "watts", ("power, W", "power limit, W"), {"yaxis": FROM_ZERO}),
    ("temperature", "°C", ("temperature, °C",), _ONE_CURVE),
)
"""Title, description, curves, options."""
_PRESSURE, _THROTTLED = "fraction of time in which a task had to wait", "CPU-seconds per second, by the CPU quota"
_HOST_CHARTS: tuple[tuple[str, str, str, tuple[str, ...], dict[str, Any]], ...] = (
    ("cpu", "CPU", "utilization", ("mean", "busiest core"), {"yaxis": FRACTIONS}),
    ("memory", "Host memory", "GiB", ("process", "used", "limit"), _GIB),
    ("pressure", "Pressure (PSI)", _PRESSURE, ("cpu", "memory", "io"), {"yaxis": FROM_ZERO | {"tickformat": ".0%"}}),
    ("pressure", "CPU throttling", _THROTTLED, ("throttled, s",), {"yaxis": FROM_ZERO} | _ONE_CURVE),
)
"""Prefix of the curves, title, description, curves, options."""


def machine(report: RunReport, charts: Charts) -> Markup:
    """Telemetry of GPUs and host."""
    gpus = sorted({name.partition("/")[0] for name in report.machine if name.startswith("gpu")})
    specs = [
        (gpu, f"{gpu.upper()}: {title}", description, names, options)
        for gpu in gpus[:MAX_DEVICES]
        for title, description, names, options in _GPU_CHARTS
    ]
    figures = [
        page_charts.machine(charts, report, prefix, title, description, names, **options)
        for prefix, title, description, names, options in (*specs, *_HOST_CHARTS)
    ]
    shown = [figure for figure in figures if figure is not None]
    no_gpu = None if gpus else note("GPU: n/a. There is none, or its driver gives no data.")
    more = note(f"{len(gpus) - MAX_DEVICES} more GPUs are in the JSON.") if len(gpus) > MAX_DEVICES else None
    body = tag("div", shown, class_="two") if shown else absent("Nothing was recorded.")
    return section("machine", "Machine", no_gpu, body, more)


def data(report: RunReport) -> Markup:
    """Warnings, and images that could not be read."""
    warnings = [event.text for event in report.events if event.kind in WARNING_KINDS]
    parts: list[Child] = [bullets(warnings[:MAX_WARNINGS], class_="warnings") or tag("p", "No warnings.")]
    if len(warnings) > MAX_WARNINGS:
        parts.append(note(f"{len(warnings) - MAX_WARNINGS} more are in the events."))
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
        return section("settings", "Settings", absent("Not known."))
    user_settings = ", ".join(f"{row.name} = {row.value}" for row in report.settings if row.reason is None)
    set_by = ["Set by you: ", tag("b", user_settings or "nothing"), ". Stoker chose all others, for the given reasons."]
    parts: list[Child] = [tag("p", set_by)]
    for name in dict.fromkeys(setting.section for setting in report.settings):
        rows = [
            [setting.name, setting.value, setting.reason if setting.reason is not None else tag("b", "set by you")]
            for setting in report.settings
            if setting.section == name
        ]
        rendered = table(f"Settings of {name}", ("setting", "value", "reason"), rows, wide=(2,), hidden=True)
        parts.append(details(f"{name} ({len(rows)})", rendered))
    return section("settings", "Settings", *parts)


def environment(report: RunReport) -> Markup:
    """Hardware, versions and variables."""
    if not report.environment:
        return section("environment", "Environment", absent("Not known."))
    rows = list(flatten(report.environment))
    command = report.environment.get("argv")
    command_line = tag("p", code(" ".join(map(str, command)))) if isinstance(command, list) else None
    rendered = table("Environment of the newest attempt", ("name", "value"), rows, wide=(1,), hidden=True)
    collapsed = details(f"versions, machine, variables ({len(rows)})", rendered)
    return section("environment", "Environment", command_line, collapsed)


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
        return section("events", "Events", absent("None."))
    omitted = f" {report.events_omitted:,} in the middle are left out." if report.events_omitted else ""
    start = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(start_t))
    description = note(f"Times are relative to {start}; evaluations are in the curves.{omitted}")
    rendered = table("Events", ("time", "event", "step", "message"), rows, right=(0, 2), wide=(3,), hidden=True)
    return section("events", "Events", description, details(f"{len(rows)} events", rendered))
