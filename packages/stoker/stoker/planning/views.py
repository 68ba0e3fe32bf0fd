"""Shows what `stoker plan` found: in the terminal, and in an HTML page with all machines and cost against time."""

import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import RenderableType
from rich.text import Text

from stoker.planning.machines import THIS_MACHINE, Estimate
from stoker.planning.plan import Plan
from stoker.planning.recommend import describe_cost, describe_duration
from stoker_watch.report import console
from stoker_watch.report import format as fmt
from stoker_watch.report import html as report_page
from stoker_watch.report.console import plain_text, print_renderables
from stoker_watch.report.page import charts as draw
from stoker_watch.report.page.markup import Markup

_LIMITS = {"memory": "memory bandwidth", "launches": "kernel launches"}
MAX_ROWS = 12
"""Machines that are printed; `--json` and `--html` have all."""


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
    """Writes the recommendation, the chart and a table of all machines. Raises StorageError."""
    report_page.write_page(html(plan), path, flag="--html")


def html(plan: Plan) -> str:
    cells = [
        (row.label, f"{row.img_per_s.expected:,.0f}", f"{100 * row.utilization.expected:.0f} %", row.limited_by,
         row.sync or "", describe_duration(row.duration_s), describe_cost(row.cost), verdict.reason)
        for row, verdict in zip(plan.rows, plan.recommendation.verdicts, strict=True)
    ]  # fmt: skip
    head = ("machine", "img/s", "busy", "limited by", "--sync", "time", "cost", "why")
    charts, template = draw.Charts(), Path(__file__).with_name("plan.html")
    values = {"plan": plan, "heads": head, "rows": cells, "drawing": _drawing(plan, charts)}
    json_command = f"stoker plan {shlex.quote(plan.data)} … --json"
    return report_page.render_template(template, plan.data, json_command, charts=charts, **values)


def _drawing(plan: Plan, charts: draw.Charts) -> Markup | None:
    """Cost against hours, with bands, of the machines that have a price and memory enough; the limits are lines."""
    rows = [(k, row, row.cost) for k, row in enumerate(plan.rows) if row.cost is not None and not row.problem]
    if not rows:
        return None
    hours, costs = [row.duration_s.scaled(1 / 3600) for _, row, _ in rows], [cost for *_, cost in rows]

    def band(values: Iterable[Estimate]) -> dict[str, Any]:
        high, low = zip(*((v.high - v.expected, v.expected - v.low) for v in values), strict=True)
        return {"type": "data", "symmetric": False, "array": high, "arrayminus": low, "thickness": 1}

    line = {"type": "line", "line": {"color": "#c2410c", "dash": "dash"}}
    shapes = []
    if plan.limits.by_s is not None:
        limit_h = plan.limits.by_s / 3600
        shapes.append(line | {"x0": limit_h, "x1": limit_h, "yref": "paper", "y0": 0, "y1": 1})
    if plan.limits.budget is not None:
        shapes.append(line | {"y0": plan.limits.budget, "y1": plan.limits.budget, "xref": "paper", "x0": 0, "x1": 1})
    machines = {
        "mode": "markers+text",
        "x": [value.expected for value in hours],
        "y": [value.expected for value in costs],
        "error_x": band(hours),
        "error_y": band(costs),
        "text": [draw.escape_name(row.label) for _, row, _ in rows],
        "textposition": "top right",
        "marker": {"color": [draw.color(k != plan.recommendation.choice) for k, *_ in rows], "size": 9},
    }
    log: dict[str, Any] = {"xaxis": {"type": "log"}, "yaxis": {"type": "log"}, "shapes": shapes}
    description = "with bands from the good to the bad end; the limits are dashed"
    return charts.add("Cost against time", description, [machines], height=520, x="hours", y="US dollars", **log)
