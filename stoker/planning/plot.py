"""Draws cost against time: in the terminal as text, and as SVG or HTML in a file.

Both axes are logarithmic. A machine without a price, or on which the training is impossible, is not drawn.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from stoker.errors import writing
from stoker.planning.duration import MachinePlan
from stoker.planning.plan import Plan
from stoker.planning.recommend import compact_duration, describe_cost, describe_duration, money
from stoker.report.page.markup import Markup, join, table, tag
from stoker.storage.local_files import write_atomic

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXT_WIDTH, TEXT_HEIGHT = 64, 12
WIDTH, HEIGHT, MARGIN = 760, 440, 64
_TIME_TICKS = (10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 4 * 3600, 8 * 3600, 86400, 2 * 86400, 4 * 86400,
               7 * 86400, 14 * 86400, 30 * 86400, 90 * 86400, 365 * 86400)  # fmt: skip
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}th,td{padding:.25rem .6rem;text-align:left;border-bottom:1px solid #ddd}"
    ".n{text-align:right}svg{max-width:100%;height:auto}.hidden{position:absolute;left:-999rem}"
)


class _Axis:
    """A logarithmic axis from 0 to 1."""

    def __init__(self, values: Sequence[float]) -> None:
        positive = [value for value in values if value > 0] or [1.0]
        low, high = math.log(min(positive)), math.log(max(positive))
        margin = max(0.08 * (high - low), 0.05)
        self.low, self.high = low - margin, high + margin

    def position(self, value: float) -> float:
        return (math.log(max(value, 1e-9)) - self.low) / (self.high - self.low)

    def ticks(self, candidates: Sequence[float], count: int = 6) -> list[float]:
        inside = [value for value in candidates if self.low <= math.log(value) <= self.high]
        return inside[:: max(1, math.ceil(len(inside) / count))] or [math.exp((self.low + self.high) / 2)]


def _money_ticks() -> list[float]:
    return [digit * 10.0**power for power in range(-5, 7) for digit in (1, 2, 5)]


def drawn(plan: Plan, rows: Sequence[int]) -> list[int]:
    """Those of the rows that have a place in the drawing."""
    return [
        k for k in rows if (cost := plan.rows[k].cost) is not None and cost.expected > 0 and not plan.rows[k].problem
    ]


def text_plot(plan: Plan, letters: dict[int, str]) -> list[str]:
    """Lines of a plot with the letters of the rows; the limits are lines. Empty with fewer than two points.

    letters: row → letter. The recommended row is drawn last, so that no other hides it.
    """
    rows = drawn(plan, list(letters))
    if len(rows) < 2:
        return []
    limits = plan.limits
    times = [plan.rows[k].duration_s.expected for k in rows]
    costs = [cost.expected for k in rows if (cost := plan.rows[k].cost) is not None]
    x_axis = _Axis([*times, *([limits.by_s] if limits.by_s else [])])
    y_axis = _Axis([*costs, *([limits.budget] if limits.budget else [])])
    cells = [[" "] * TEXT_WIDTH for _ in range(TEXT_HEIGHT)]

    def column(seconds: float) -> int:
        return min(TEXT_WIDTH - 1, max(0, round(x_axis.position(seconds) * (TEXT_WIDTH - 1))))

    def line(cost: float) -> int:
        return min(TEXT_HEIGHT - 1, max(0, round((1 - y_axis.position(cost)) * (TEXT_HEIGHT - 1))))

    if limits.budget:
        cells[line(limits.budget)] = ["-"] * TEXT_WIDTH
    if limits.by_s:
        for row in cells:
            row[column(limits.by_s)] = "|"
    places = {k: (line(dollars), column(seconds)) for k, seconds, dollars in zip(rows, times, costs, strict=True)}
    for k in sorted(places, key=lambda k: k == plan.recommendation.choice):
        cells[places[k][0]][places[k][1]] = letters[k]
    labels = {line(tick): money(tick) for tick in y_axis.ticks(_money_ticks(), 4)}
    width = max(map(len, labels.values()))
    lines = [
        f"{labels.get(n, ''):>{width}} {'+' if n in labels else '|'}{''.join(row).rstrip()}"
        for n, row in enumerate(cells)
    ]
    ruler, names = ["-"] * TEXT_WIDTH, [" "] * (TEXT_WIDTH + 10)
    for tick in x_axis.ticks(_TIME_TICKS):
        ruler[column(tick)] = "+"
        text = compact_duration(tick)
        start = column(tick)
        if all(cell == " " for cell in names[max(0, start - 1) : start + len(text) + 1]):
            names[start : start + len(text)] = text
    marks = [f"|: --by {compact_duration(limits.by_s)}"] if limits.by_s else []
    marks += [f"-: --budget {money(limits.budget)}"] if limits.budget else []
    return [
        "cost against time" + (f" ({', '.join(marks)})" if marks else ""),
        *lines,
        " " * width + " +" + "".join(ruler),
        (" " * (width + 2) + "".join(names)).rstrip(),
    ]


def svg(plan: Plan) -> Markup:
    """The drawing of all rows, each with its band; the recommended one is blue."""
    rows = drawn(plan, range(len(plan.rows)))
    bands = [(plan.rows[k], cost) for k in rows if (cost := plan.rows[k].cost) is not None]
    limits = plan.limits
    x_axis = _Axis(
        [v for row, _ in bands for v in (row.duration_s.low, row.duration_s.high)]
        + ([limits.by_s] if limits.by_s else [])
    )
    y_axis = _Axis([v for _, cost in bands for v in (cost.low, cost.high)] + ([limits.budget] if limits.budget else []))

    def x(seconds: float) -> float:
        return round(MARGIN + x_axis.position(seconds) * (WIDTH - 2 * MARGIN), 1)

    def y(cost: float) -> float:
        return round(HEIGHT - MARGIN - y_axis.position(cost) * (HEIGHT - 2 * MARGIN), 1)

    def segment(x1: float, y1: float, x2: float, y2: float, color: str, dash: str | None = None) -> Markup:
        return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=color, stroke_dasharray=dash)

    def text(content: str, at_x: float, at_y: float, anchor: str = "middle", color: str = "#444") -> Markup:
        return tag("text", content, x=at_x, y=at_y, text_anchor=anchor, fill=color, font_size=11)

    parts = [tag("rect", width=WIDTH, height=HEIGHT, fill="#fff")]
    for tick in x_axis.ticks(_TIME_TICKS, 8):
        parts += [segment(x(tick), MARGIN, x(tick), HEIGHT - MARGIN, "#e5e7eb"),
                  text(compact_duration(tick), x(tick), HEIGHT - MARGIN + 18)]  # fmt: skip
    for tick in y_axis.ticks(_money_ticks(), 8):
        parts += [
            segment(MARGIN, y(tick), WIDTH - MARGIN, y(tick), "#e5e7eb"),
            text(money(tick), MARGIN - 6, y(tick) + 4, "end"),
        ]
    if limits.by_s:
        parts += [segment(x(limits.by_s), MARGIN, x(limits.by_s), HEIGHT - MARGIN, "#c2410c", "5 4"),
                  text(f"by {compact_duration(limits.by_s)}", x(limits.by_s), MARGIN - 8, color="#c2410c")]  # fmt: skip
    if limits.budget:
        parts += [segment(MARGIN, y(limits.budget), WIDTH - MARGIN, y(limits.budget), "#c2410c", "5 4"),
                  text(f"budget {money(limits.budget)}", WIDTH - MARGIN, y(limits.budget) - 6, "end", "#c2410c"),
        ]  # fmt: skip
    choice = plan.recommendation.choice
    for k, (row, cost) in zip(rows, bands, strict=True):
        color = "#2563eb" if k == choice else "#6b7280"
        seconds = row.duration_s
        title = tag("title", f"{row.label}: {describe_duration(seconds)}, {describe_cost(cost)}")
        at_x, at_y = x(seconds.expected), y(cost.expected)
        parts.append(
            tag(
                "g",
                title,
                segment(x(seconds.low), at_y, x(seconds.high), at_y, color),
                segment(at_x, y(cost.low), at_x, y(cost.high), color),
                tag("circle", cx=at_x, cy=at_y, r=6 if k == choice else 4, fill=color),
                text(row.label, at_x + 8, at_y - 6, "start", color) if len(rows) <= 24 or k == choice else None,
            )
        )
    parts += [
        text("time, with its band", WIDTH / 2, HEIGHT - 16),
        text("cost, US dollars", MARGIN, MARGIN - 28),
    ]
    return tag("svg", *parts, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", width=WIDTH,
               height=HEIGHT, role="img", aria_label="Cost against time", font_family="sans-serif")  # fmt: skip


def html(plan: Plan) -> str:
    """A page without scripts: the recommendation, the drawing, a table of all machines."""
    head = ("machine", "img/s", "busy", "limited by", "--sync", "time", "cost", "why")
    recommendation = plan.recommendation
    body = join(
        tag("h1", f"Plan: {plan.data}"),
        [tag("p", sentence) for sentence in plan.job],
        tag(
            "p",
            tag(
                "b",
                f"Recommended: {recommendation.summary}"
                if recommendation.choice is not None
                else recommendation.summary,
            ),
        ),
        tag("ul", [tag("li", sentence) for sentence in (*recommendation.reasons, *recommendation.changes)]),
        svg(plan),
        table(
            "Machines",
            head,
            [_cells(row, verdict.reason) for row, verdict in zip(plan.rows, recommendation.verdicts, strict=True)],
            right=(1, 2),
            hidden=True,
        ),
        tag("p", tag("code", plan.command)),
        tag("p", f"Prices: {plan.prices}."),
    )
    title = tag("title", f"{plan.data} · stoker plan")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{title}\n<style>{_STYLE}</style>\n'
        f"</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _cells(row: MachinePlan, reason: str) -> list[str]:
    return [
        row.label,
        f"{row.img_per_s.expected:,.0f}",
        f"{100 * row.utilization.expected:.0f} %",
        row.limited_by,
        row.sync or "",
        describe_duration(row.duration_s),
        describe_cost(row.cost),
        reason,
    ]


def write_drawing(plan: Plan, path: Path, *, as_html: bool) -> None:
    """Writes the page or the drawing. Raises StorageError."""
    content = html(plan) if as_html else f'<?xml version="1.0" encoding="UTF-8"?>\n{svg(plan)}\n'
    with writing("The drawing cannot be written.", path, fix="choose another file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content.encode())
