"""Shows in the terminal what `stoker plan` found."""

import math
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import RenderableType
from rich.text import Text

from stoker.planning.machines import THIS_MACHINE
from stoker.planning.plan import Plan
from stoker.planning.recommend import describe_cost, describe_duration
from stoker_watch.report import console
from stoker_watch.report import format as fmt
from stoker_watch.report.console import plain_text, print_renderables

_LIMITS = {"memory": "memory bandwidth", "launches": "kernel launches"}
MAX_NAMED, MAX_ROWS = 12, 5
"""So many machines are all printed, as they were named; of more, those between which a choice is. `--json` has all."""


def print_plan(plan: Plan, file: TextIO | None = None, *, width: int | None = None) -> None:
    print_renderables(_lines(plan), file, width=width)


def choose_rows(plan: Plan) -> list[int]:
    """The rows that are printed, by cost: of many, the choice, this machine, those that none beats in cost and time,
    and the cheapest of each other GPU, as its band may hide a better one."""
    rows = plan.rows
    order = sorted(range(len(rows)), key=lambda k: (bool(rows[k].problem), getattr(rows[k].cost, "expected", math.inf)))
    if len(rows) <= MAX_NAMED:
        return order
    first = [k for k in order if k == plan.recommendation.choice or rows[k].machine == THIS_MACHINE]
    fastest_s = math.inf
    for k in order:
        if not rows[k].problem and rows[k].cost is not None and rows[k].duration_s.expected < fastest_s:
            fastest_s = rows[k].duration_s.expected
            first.append(k)
    kinds = {rows[k].accelerator: k for k in reversed(order) if not rows[k].problem}
    others = [
        k for k in order if k in kinds.values() and rows[k].accelerator not in {rows[n].accelerator for n in first}
    ]
    chosen = list(dict.fromkeys([*first, *others]))[:MAX_ROWS]
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
        yield plain_text(f"{fmt.plural(len(plan.rows) - len(shown), 'other machine')}: --json has all")
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
