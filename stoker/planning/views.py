"""Shows what `stoker plan` found: in the terminal, and cost against time as SVG and in an HTML page.

Both axes of the drawing are logarithmic. A machine without a price, or on which the training is impossible, is not
drawn.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import RenderableType
from rich.text import Text

from stoker.errors import writing
from stoker.planning.machines import THIS_MACHINE, Estimate
from stoker.planning.plan import Plan
from stoker.planning.recommend import compact_duration, describe_cost, describe_duration, money
from stoker.report import console
from stoker.report import format as fmt
from stoker.report.console import plain_text, print_renderables
from stoker.report.page.markup import Markup, join, table, tag
from stoker.storage.local_files import write_atomic

_LIMITS = {"memory": "memory bandwidth", "launches": "kernel launches"}
MAX_ROWS = 12
"""Machines that are printed; `--json` and `--html` have all."""
WIDTH, HEIGHT, MARGIN = 760, 440, 64
MAX_LABELS = 24
MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
TIMES = (10, 30, MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 20 * MINUTE, 30 * MINUTE, HOUR, 2 * HOUR, 4 * HOUR,
         8 * HOUR, DAY, 2 * DAY, 4 * DAY, 7 * DAY, 14 * DAY, 30 * DAY, 90 * DAY, 365 * DAY)  # fmt: skip
MONEY = tuple(digit * 10.0**power for power in range(-5, 7) for digit in (1, 2, 5))
GRAY, BLUE, ORANGE = "#6b7280", "#2563eb", "#c2410c"
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}th,td{padding:.25rem .6rem;text-align:left;border-bottom:1px solid #ddd}"
    ".n{text-align:right}svg{max-width:100%;height:auto}.hidden{position:absolute;left:-999rem}"
)


def print_plan(plan: Plan, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints the plan."""
    print_renderables(_lines(plan), file, width=width)


def choose_rows(plan: Plan) -> list[int]:
    """The rows that are printed, in order of cost: the choice, this machine, those that no other beats in time and
    cost, and the cheapest others."""
    rows = plan.rows
    order = sorted(range(len(rows)), key=lambda k: (bool(rows[k].problem), getattr(rows[k].cost, "expected", math.inf)))
    first = [k for k in order if k == plan.recommendation.choice or rows[k].machine == THIS_MACHINE]
    fastest_s = math.inf
    for k in order:
        if not rows[k].problem and rows[k].cost is not None and rows[k].duration_s.expected < fastest_s:
            fastest_s = rows[k].duration_s.expected
            first.append(k)
    chosen = list(dict.fromkeys([*first, *order]))[:MAX_ROWS]
    return [k for k in order if k in chosen]


def _lines(plan: Plan) -> Iterator[RenderableType]:
    yield from map(plain_text, plan.job)
    yield ""
    shown = choose_rows(plan)
    yield _table(plan, shown)
    if len(shown) < len(plan.rows):
        yield plain_text(f"{fmt.plural(len(plan.rows) - len(shown), 'other machine')}: --json or --html FILE has all")
    yield ""
    yield from _recommendation(plan, shown)
    yield ""
    yield plain_text(plan.command)
    band = "a band is from the good to the bad end of all that is uncertain; docs/plan.md"
    for note in (*plan.notes, f"prices: {plan.prices}", band):
        yield plain_text(f"- {note}")


def _table(plan: Plan, shown: Sequence[int]) -> RenderableType:
    sync = ("--sync",) if plan.has_sync else ()
    columns = ("", "machine", "$/h", "memory", "img/s", "busy", "limited by", *sync, "vCPUs needed", "MB/s", "time")
    numbers = [
        n for n, name in enumerate(columns) if name in ("$/h", "memory", "img/s", "busy", "vCPUs needed", "MB/s")
    ]
    rendered = console.table(*columns, "cost", right=numbers)
    for k in shown:
        row = plan.rows[k]
        gpus = f", {row.gpus} GPUs" if row.gpus > 1 else ""
        price = fmt.MISSING if row.price_per_hour is None else fmt.cost(row.price_per_hour.expected)
        memory = fmt.memory(row.peak_bytes.expected, row.memory_bytes)
        cells = ["→" if k == plan.recommendation.choice else " ", f"{row.label}{gpus}", price, memory]
        if row.fits == "no":
            cells += ["", "", "does not fit"]
        else:
            cells += [
                fmt.number(row.img_per_s.expected), fmt.percentage(row.utilization.expected),
                _LIMITS.get(row.limited_by, row.limited_by), *([row.sync or ""] if plan.has_sync else []),
                f"{row.required_vcpus:.1f} of {row.vcpus:g}", fmt.number(row.required_mb_per_s),
                describe_duration(row.duration_s), describe_cost(row.cost),
            ]  # fmt: skip
        rendered.add_row(*map(plain_text, cells))
    return rendered


def _recommendation(plan: Plan, shown: Sequence[int]) -> Iterator[RenderableType]:
    recommendation = plan.recommendation
    is_found = recommendation.choice is not None
    yield Text("recommended: " if is_found else "", "bold") + plain_text(recommendation.summary)
    for sentence in recommendation.reasons:
        yield plain_text(f"  {sentence}")
    if recommendation.changes:
        yield plain_text("what would change that:")
        for change in recommendation.changes:
            yield plain_text(f"  {change}")
    others = [k for k in shown if k != recommendation.choice]
    if others:
        yield plain_text("why not:" if is_found else "machines:")
        rendered = console.table("", "", header=False)
        for k in others:
            verdict = recommendation.verdicts[k]
            rendered.add_row(plain_text(f"  {verdict.machine}"), plain_text(verdict.reason))
        yield rendered


# Files


def _axis(values: Iterable[float], start: float, end: float) -> Callable[[float], float]:
    """Maps values to positions from start to end, on a logarithmic scale."""
    logarithms = [math.log(value) for value in values if value > 0] or [0.0]
    low, high = min(logarithms) - 0.1, max(logarithms) + 0.1
    return lambda value: round(start + (math.log(max(value, 1e-9)) - low) / (high - low) * (end - start), 1)


def _line(x1: float, y1: float, x2: float, y2: float, color: str, dash: str | None = None) -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=color, stroke_dasharray=dash)


def _text(content: str, x: float, y: float, *, anchor: str = "middle", color: str = "#444") -> Markup:
    return tag("text", content, x=x, y=y, text_anchor=anchor, fill=color, font_size=11)


def svg(plan: Plan) -> Markup:
    """The drawing of all rows, each with its band; the recommended one is blue, the limits are dashed."""
    rows = [(k, row, row.cost) for k, row in enumerate(plan.rows) if row.cost is not None and not row.problem]
    limits, left, right, top, bottom = plan.limits, MARGIN, WIDTH - MARGIN, MARGIN, HEIGHT - MARGIN

    def ends(bands: Iterable[Estimate], limit: float | None) -> list[float]:
        return [end for band in bands for end in (band.low, band.high)] + ([] if limit is None else [limit])

    times, costs = ends((row.duration_s for _, row, _ in rows), limits.by_s), ends((c for *_, c in rows), limits.budget)
    x, y = _axis(times, left, right), _axis(costs, bottom, top)
    parts = [tag("rect", width=WIDTH, height=HEIGHT, fill="#fff")]
    for tick in (tick for tick in TIMES if left <= x(tick) <= right):
        parts += [_line(x(tick), top, x(tick), bottom, "#e5e7eb"), _text(compact_duration(tick), x(tick), bottom + 18)]
    for tick in (tick for tick in MONEY if top <= y(tick) <= bottom):
        parts += [_line(left, y(tick), right, y(tick), "#e5e7eb"), _text(money(tick), left - 6, y(tick), anchor="end")]
    if limits.by_s is not None:
        at = x(limits.by_s)
        parts += [_line(at, top, at, bottom, ORANGE, "5 4"), _text(f"by {compact_duration(limits.by_s)}", at, top - 8)]
    if limits.budget is not None:
        at = y(limits.budget)
        label = _text(f"budget {money(limits.budget)}", right, at - 6, anchor="end")
        parts += [_line(left, at, right, at, ORANGE, "5 4"), label]
    for k, row, cost in rows:
        is_choice, seconds = k == plan.recommendation.choice, row.duration_s
        color, at_x, at_y = BLUE if is_choice else GRAY, x(seconds.expected), y(cost.expected)
        parts += [
            _line(x(seconds.low), at_y, x(seconds.high), at_y, color),
            _line(at_x, y(cost.low), at_x, y(cost.high), color),
            tag("circle", tag("title", f"{row.label}: {describe_duration(seconds)}, {describe_cost(cost)}"),
                cx=at_x, cy=at_y, r=6 if is_choice else 4, fill=color),
        ]  # fmt: skip
        if is_choice or len(rows) <= MAX_LABELS:
            parts.append(_text(row.label, at_x + 8, at_y - 6, anchor="start", color=color))
    parts += [_text("time, with its band", WIDTH / 2, HEIGHT - 16), _text("cost, US dollars", left, top - 28)]
    return tag("svg", *parts, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", width=WIDTH,
               height=HEIGHT, role="img", aria_label="Cost against time", font_family="sans-serif")  # fmt: skip


def html(plan: Plan) -> str:
    """A page without scripts: the recommendation, the drawing, a table of all machines."""
    found = plan.recommendation
    cells = [
        (row.label, f"{row.img_per_s.expected:,.0f}", f"{100 * row.utilization.expected:.0f} %", row.limited_by,
         row.sync or "", describe_duration(row.duration_s), describe_cost(row.cost), verdict.reason)
        for row, verdict in zip(plan.rows, found.verdicts, strict=True)
    ]  # fmt: skip
    head = ("machine", "img/s", "busy", "limited by", "--sync", "time", "cost", "why")
    body = join(
        tag("h1", f"Plan: {plan.data}"),
        [tag("p", sentence) for sentence in plan.job],
        tag("p", tag("b", found.summary if found.choice is None else f"Recommended: {found.summary}")),
        tag("ul", [tag("li", sentence) for sentence in (*found.reasons, *found.changes)]),
        svg(plan),
        table("Machines", head, cells, right=(1, 2), hidden=True),
        tag("p", tag("code", plan.command)),
        tag("p", f"Prices: {plan.prices}."),
    )
    title = tag("title", f"{plan.data} · stoker plan")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{title}\n<style>{_STYLE}</style>\n'
        f"</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def write_drawing(plan: Plan, path: Path, *, as_html: bool) -> None:
    """Writes the page or the drawing. Raises StorageError."""
    content = html(plan) if as_html else f'<?xml version="1.0" encoding="UTF-8"?>\n{svg(plan)}\n'
    with writing("The drawing cannot be written.", path, fix="choose another file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content.encode())
