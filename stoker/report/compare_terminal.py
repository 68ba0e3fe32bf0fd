"""Prints `stoker why A --compare B`. The data comes from `compare.py`."""

from collections.abc import Iterator
from typing import TextIO

from rich.console import RenderableType
from rich.text import Text

from stoker.report import format as fmt
from stoker.report.compare import Change, Comparison
from stoker.report.console import plain_text, print_renderables, table


def print_comparison(comparison: Comparison, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints the statement, then tables of times, settings, machine and versions."""
    head = table("", "", header=False)
    head.add_row("first", plain_text(comparison.before))
    head.add_row("second", plain_text(comparison.after))
    renderables: list[RenderableType] = [head, "", *(plain_text(sentence) for sentence in comparison.statement)]
    renderables += [
        *_times(comparison),
        *_changes("settings", comparison.settings),
        *_changes("machine and versions", comparison.environment),
    ]
    print_renderables(renderables, file, width=width)


def _times(comparison: Comparison) -> Iterator[RenderableType]:
    if not comparison.phases:
        return
    yield ""
    unit = "s per step" if comparison.unit == "step" else "device-seconds per 1,000 images"
    rendered = table("phase", "first", "second", "change", "fraction, first", "second", right=(1, 2, 3, 4, 5))
    for row in comparison.phases:
        change = row.after_s - row.before_s
        fractions = fmt.percentage(row.before_fraction), fmt.percentage(row.after_fraction)
        rendered.add_row(
            plain_text(row.phase), fmt.number(row.before_s), fmt.number(row.after_s), _signed(change), *fractions
        )
    first, second = comparison.total_s
    if first is not None and second is not None:
        rendered.add_row("total", fmt.number(first), fmt.number(second), _signed(second - first), "100 %", "100 %")
    rendered.add_row("img/s", *(fmt.number(value) for value in comparison.img_per_s), "", "", "")
    rendered.add_row("AP", *(fmt.metric(value) for value in comparison.ap), "", "", "")
    yield Text(f"time, {unit}", "bold")
    yield rendered


def _signed(value: float) -> str:
    return "0" if value == 0 else f"{'+' if value > 0 else '−'}{fmt.number(abs(value))}"


def _changes(title: str, changes: list[Change]) -> Iterator[RenderableType]:
    if not changes:
        return
    yield ""
    yield Text(title, "bold")
    rendered = table("", "first", "second", header=False)
    for change in changes:
        values = (fmt.MISSING if value is None else value for value in (change.before, change.after))
        rendered.add_row(plain_text(change.name), *map(plain_text, values))
    yield rendered
