"""How the report of `stoker data check` looks on a terminal or in a file. What it says is
`stoker/data/validation/check.py`'s."""

from typing import TextIO

from rich.console import RenderableType
from rich.text import Text

from stoker.data.validation.check import Item, Report
from stoker.report.console import plain_text, print_parts, table
from stoker.report.format import count, plural

SHOWN = 3
"""Places of a kind that the table shows; `--json` has all."""
STYLES = {"refused": "bold red", "skipped": "yellow", "fixed": "cyan", "kept": "dim"}
UNREADABLE = "unreadable-set"
"""The kind whose place is the error itself, printed as it is."""
PLURALS = {"box": "boxes", "class": "classes"}


def print_check(report: Report, file: TextIO | None = None) -> None:
    """Prints the table of what was found and the verdict."""
    print_parts(_parts(report), file)


def _parts(report: Report) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if report.root is not None:
        parts += [plain_text(line) for line in _head(report)]
    for action in STYLES:
        items = [item for item in report.items if item.action == action and item.kind != UNREADABLE]
        if items:
            parts += [Text(""), _table(action, items)]
    if not report.items:
        parts += [Text(""), Text("nothing is wrong", style="green")]
    return [*parts, *([Text("")] if parts else []), *_verdict(report)]


def _head(report: Report) -> list[str]:
    splits = ", ".join(f"{name} {count(split.pictures)}" for name, split in report.splits.items())
    lines = [
        f"{report.data}: {plural(report.pictures, 'picture')} ({splits}), {plural(report.boxes, 'box', 'boxes')},"
        f" {plural(len(report.classes), 'class', 'classes')}",
        *report.notes,
    ]
    if not report.decoded:
        lines.append("the pictures were not opened (--no-pictures)")
    return lines


def _table(action: str, items: list[Item]) -> RenderableType:
    made = table("", action, "", right=(0,))
    for item in items:
        unit = item.unit if item.count == 1 else PLURALS.get(item.unit, item.unit + "s")
        places = [plain_text(place) for place in item.places[:SHOWN]]
        if item.count > len(places):
            places.append(Text(f"… and {item.count - len(places):,} more", style="dim"))
        made.add_row(
            count(item.count),
            Text(f"{unit}: {item.title}", style=STYLES[action]),
            Text("\n").join(
                [*places, Text(f"→ {item.does}; to mend: {item.fix}" if item.fix != "nothing" else f"→ {item.does}")]
            ),
        )
    return made


def _verdict(report: Report) -> list[Text]:
    unreadable = [place for item in report.items if item.kind == UNREADABLE for place in item.places]
    if unreadable:
        return [Text("training would refuse this data set:", style="bold red"), *map(plain_text, unreadable)]
    used = (
        f"{count(report.usable_pictures)} of {plural(report.pictures, 'picture')},"
        f" {count(report.usable_boxes)} of {plural(report.boxes, 'box', 'boxes')}"
    )
    if not report.refusals:
        return [Text(f"training would use {used}", style="bold green")]
    refused = plain_text(f"training would refuse this data set: {'; '.join(report.refusals)}", "bold red")
    return [Text(f"usable: {used}"), refused]
