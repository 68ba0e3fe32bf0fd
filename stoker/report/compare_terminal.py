"""What `stoker why A --compare B` prints. What it says is `compare.py`'s."""

from collections.abc import Iterator
from typing import TextIO

from rich.console import RenderableType
from rich.text import Text

from stoker.report import format as fmt
from stoker.report.compare import Change, Comparison
from stoker.report.console import plain_text, print_parts, table


def print_comparison(found: Comparison, file: TextIO | None = None, *, width: int | None = None) -> None:
    """The statement, then tables of the times, the settings, and what they ran on."""
    head = table("", "", header=False)
    head.add_row("first", plain_text(found.before))
    head.add_row("second", plain_text(found.after))
    parts: list[RenderableType] = [head, "", *(plain_text(sentence) for sentence in found.statement)]
    parts += [
        *_times(found),
        *_changes("settings", found.settings),
        *_changes("machine and versions", found.environment),
    ]
    print_parts(parts, file, width=width)


def _times(found: Comparison) -> Iterator[RenderableType]:
    if not found.phases:
        return
    yield ""
    unit = "s per step" if found.per == "step" else "device-seconds per 1,000 pictures"
    made = table("phase", "first", "second", "change", "share, first", "second", right=(1, 2, 3, 4, 5))
    for row in found.phases:
        change = row.after_s - row.before_s
        shares = fmt.share(row.before_share), fmt.share(row.after_share)
        made.add_row(plain_text(row.phase), fmt.number(row.before_s), fmt.number(row.after_s), _signed(change), *shares)
    first, second = found.total_s
    if first is not None and second is not None:
        made.add_row("total", fmt.number(first), fmt.number(second), _signed(second - first), "100 %", "100 %")
    made.add_row("img/s", *(fmt.number(value) for value in found.img_per_s), "", "", "")
    made.add_row("AP", *(fmt.metric(value) for value in found.ap), "", "", "")
    yield Text(f"time, {unit}", "bold")
    yield made


def _signed(value: float) -> str:
    return "0" if value == 0 else f"{'+' if value > 0 else '−'}{fmt.number(abs(value))}"


def _changes(title: str, changes: list[Change]) -> Iterator[RenderableType]:
    if not changes:
        return
    yield ""
    yield Text(title, "bold")
    made = table("", "first", "second", header=False)
    for one in changes:
        values = (fmt.MISSING if value is None else value for value in (one.before, one.after))
        made.add_row(plain_text(one.name), *map(plain_text, values))
    yield made
