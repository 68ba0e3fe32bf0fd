"""Prints what `stoker plan` found: the training, a table of machines, the recommendation, a drawing, the command."""

from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import RenderableType
from rich.text import Text

from stoker.planning.duration import MachinePlan
from stoker.planning.machines import THIS_MACHINE
from stoker.planning.plan import Plan
from stoker.planning.plot import LETTERS, text_plot
from stoker.planning.recommend import describe_cost, describe_duration
from stoker.report import format as fmt
from stoker.report.console import plain_text, print_renderables, table

_LIMITS = {"memory": "memory bandwidth", "launches": "kernel launches"}
MAX_ROWS = 12
"""Machines that are printed; `--json` and `--html` have all. At most as many as LETTERS."""


def print_plan(plan: Plan, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints the plan."""
    print_renderables(_lines(plan), file, width=width)


def choose_rows(plan: Plan) -> list[int]:
    """The rows that are printed, in order of cost: all, if they are few; else the choice, this machine, those that no
    other beats in time and cost, and the cheapest others."""
    rows = plan.rows
    order = sorted(range(len(rows)), key=lambda k: _sort_key(rows[k]))
    if len(rows) <= MAX_ROWS:
        return order
    first = [k for k in order if k == plan.recommendation.choice or rows[k].machine == THIS_MACHINE]
    possible = [k for k in order if not rows[k].problem and rows[k].cost is not None]
    best, unbeaten = float("inf"), []
    for k in possible:
        if rows[k].duration_s.expected < best:
            best = rows[k].duration_s.expected
            unbeaten.append(k)
    chosen = set(list(dict.fromkeys([*first, *unbeaten, *possible, *order]))[:MAX_ROWS])
    return [k for k in order if k in chosen]


def _sort_key(row: MachinePlan) -> tuple[bool, float]:
    return bool(row.problem), float("inf") if row.cost is None else row.cost.expected


def _lines(plan: Plan) -> Iterator[RenderableType]:
    for sentence in plan.job:
        yield plain_text(sentence)
    yield ""
    shown = choose_rows(plan)
    letters = dict(zip(shown, LETTERS, strict=False))
    yield _table(plan, shown, letters)
    if len(shown) < len(plan.rows):
        yield plain_text(f"{fmt.plural(len(plan.rows) - len(shown), 'other machine')}: --json or --html FILE has all")
    yield ""
    yield from _recommendation(plan, shown)
    drawing = text_plot(plan, letters)
    if drawing:
        yield ""
        yield from (Text(line) for line in drawing)
    yield ""
    yield plain_text(plan.command)
    for note in (
        *plan.notes,
        f"prices: {plan.prices}",
        "a band is from the good to the bad end of all that is uncertain; docs/plan.md",
    ):
        yield plain_text(f"- {note}")


def _table(plan: Plan, shown: Sequence[int], letters: dict[int, str]) -> RenderableType:
    rendered = table(
        "",
        "machine",
        "$/h",
        "memory",
        "img/s",
        "busy",
        "limited by",
        *(("--sync",) if plan.has_sync else ()),
        "vCPUs needed",
        "MB/s",
        "time",
        "cost",
        right=(2, 3, 4, 5, 8, 9) if plan.has_sync else (2, 3, 4, 5, 7, 8),
    )
    for k in shown:
        row = plan.rows[k]
        mark = "→" if k == plan.recommendation.choice else " "
        gpus = f", {row.gpus} GPUs" if row.gpus > 1 else ""
        price = fmt.MISSING if row.price_per_hour is None else fmt.cost(row.price_per_hour.expected)
        memory = fmt.memory(row.peak_bytes.expected, row.memory_bytes)
        cells = [f"{mark} {letters[k]}", f"{row.label}{gpus}", price, memory]
        if row.fits == "no":
            cells += ["", "", "does not fit", *([""] if plan.has_sync else []), "", "", "", ""]
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
        rendered = table("", "", header=False)
        for k in others:
            verdict = recommendation.verdicts[k]
            rendered.add_row(plain_text(f"  {verdict.machine}"), plain_text(verdict.reason))
        yield rendered
