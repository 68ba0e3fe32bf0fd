"""Shows what `stoker plan` found: in the terminal, and in an HTML page with all machines and cost against time."""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import RenderableType
from rich.text import Text

from stoker.planning.machines import THIS_MACHINE, Estimate
from stoker.planning.plan import Plan
from stoker.planning.recommend import describe_cost, describe_duration
from stoker_watch.errors import needs_package, writing
from stoker_watch.report import console
from stoker_watch.report import format as fmt
from stoker_watch.report.console import plain_text, print_renderables
from stoker_watch.report.page.markup import Markup, escape, join, table, tag
from stoker_watch.storage.local_files import write_atomic

_LIMITS = {"memory": "memory bandwidth", "launches": "kernel launches"}
MAX_ROWS = 12
"""Machines that are printed; `--json` and `--html` have all."""
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}th,td{padding:.25rem .6rem;text-align:left;border-bottom:1px solid #ddd}"
    ".n{text-align:right}.hidden{position:absolute;left:-999rem}"
)


def print_plan(plan: Plan, file: TextIO | None = None, *, width: int | None = None) -> None:
    print_renderables(_lines(plan), file, width=width)


def choose_rows(plan: Plan) -> list[int]:
    """The rows that are printed, by cost: the choice, this machine, those that no other beats, the cheapest others."""
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
    measured = list(dict.fromkeys(row.accelerator for row in plan.rows if row.is_measured))
    yield plain_text(
        f"a plan from measured steps on {', '.join(measured)}"
        if measured
        else "a guess: no step was measured on any of these devices; --on this --measure there makes it a plan",
        "bold",
    )
    yield ""
    shown = choose_rows(plan)
    yield _table(plan, shown)
    if len(shown) < len(plan.rows):
        yield plain_text(f"{fmt.plural(len(plan.rows) - len(shown), 'other machine')}: --json or --html FILE has all")
    yield ""
    yield from _recommendation(plan, shown)
    yield ""
    if plan.command is not None:
        yield plain_text(plan.command)
    band = "a band is from the good to the bad end of all that is uncertain; docs/plan.md"
    for note in (*plan.notes, f"prices: {plan.prices}", band):
        yield plain_text(f"- {note}")


def _table(plan: Plan, shown: Sequence[int]) -> RenderableType:
    columns = ("", "machine", "$/h", "memory", "a step", "img/s", "busy", "limited by", "vCPUs needed", "MB/s", "time")
    numbers = map(columns.index, ("$/h", "memory", "img/s", "busy", "vCPUs needed", "MB/s"))
    rendered = console.table(*columns, "cost", right=tuple(numbers))
    for k in shown:
        row = plan.rows[k]
        gpus = f", {row.gpus} GPUs" if row.gpus > 1 else ""
        price = fmt.MISSING if row.price_per_hour is None else fmt.cost(row.price_per_hour.expected)
        memory = fmt.memory(row.peak_bytes.expected, row.memory_bytes)
        cells = ["→" if k == plan.recommendation.choice else " ", f"{row.label}{gpus}", price, memory]
        if row.fits == "no":
            cells += ["", "", "", "does not fit"]
        else:
            cells += [
                f"{'measured' if row.is_measured else 'guessed'} ×÷ {1 + row.step_error:.2g}",
                fmt.number(row.img_per_s.expected), fmt.percentage(row.utilization.expected),
                _LIMITS.get(row.limited_by, row.limited_by),
                f"{row.required_vcpus:.1f} of {row.vcpus:g}", fmt.number(row.required_mb_per_s),
                describe_duration(row.duration_s), describe_cost(row.cost),
            ]  # fmt: skip
        rendered.add_row(*map(plain_text, cells))
    for tpu in plan.tpus:
        price, hbm = fmt.cost(tpu.price), f"{tpu.hbm_gib:g} GiB a chip"
        cells = ["", f"{tpu.name} ({tpu.machine_type})", price, hbm, "not predicted", *[""] * 7]
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


# The page


def write_page(plan: Plan, path: Path) -> None:
    """Writes the recommendation, the drawing and a table of all machines. Raises StorageError."""
    with writing("The page cannot be written.", path, fix="choose another file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, html(plan).encode())


def html(plan: Plan) -> str:
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
        _drawing(plan),
        table("Machines", head, cells, right=(1, 2), hidden=True),
        [] if plan.command is None else tag("p", tag("code", plan.command)),
        tag("p", f"Prices: {plan.prices}."),
    )
    title = tag("title", f"{plan.data} · stoker plan")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{title}\n<style>{_STYLE}</style>\n'
        f"</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _drawing(plan: Plan) -> Markup:
    """Cost against hours, with bands, of the machines that have a price and memory enough; the limits are lines."""
    with needs_package("plotly", "--html"):
        from plotly.offline import plot
    rows = [(k, row, row.cost) for k, row in enumerate(plan.rows) if row.cost is not None and not row.problem]
    hours, costs = [row.duration_s.scaled(1 / 3600) for _, row, _ in rows], [cost for *_, cost in rows]

    def band(values: Iterable[Estimate]) -> dict[str, Any]:
        high, low = zip(*((v.high - v.expected, v.expected - v.low) for v in values), strict=True) if rows else ((), ())
        return {"type": "data", "symmetric": False, "array": high, "arrayminus": low, "thickness": 1}

    machines = {
        "mode": "markers+text",
        "x": [value.expected for value in hours],
        "y": [value.expected for value in costs],
        "error_x": band(hours),
        "error_y": band(costs),
        "text": [str(escape(row.label)) for _, row, _ in rows],
        "textposition": "top right",
        "marker": {"color": ["#2563eb" if k == plan.recommendation.choice else "#6b7280" for k, *_ in rows], "size": 9},
    }
    line = {"type": "line", "line": {"color": "#c2410c", "dash": "dash"}}
    shapes = []
    if plan.limits.by_s is not None:
        limit_h = plan.limits.by_s / 3600
        shapes.append(line | {"x0": limit_h, "x1": limit_h, "yref": "paper", "y0": 0, "y1": 1})
    if plan.limits.budget is not None:
        shapes.append(line | {"y0": plan.limits.budget, "y1": plan.limits.budget, "xref": "paper", "x0": 0, "x1": 1})
    axes = {"xaxis": {"type": "log", "title": "hours"}, "yaxis": {"type": "log", "title": "cost, US dollars"}}
    layout = axes | {"shapes": shapes, "height": 520}
    return Markup(plot({"data": [machines], "layout": layout}, output_type="div"))
