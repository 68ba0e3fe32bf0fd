"""Prints the report of `stoker data check`. The checks are in `stoker/data/validation/check.py`."""

from typing import TextIO

from rich.console import RenderableType
from rich.text import Text

from stoker.data.validation.check import CheckItem, CheckReport
from stoker.report.console import plain_text, print_renderables, table
from stoker.report.format import count, plural

MAX_EXAMPLES = 3
"""Locations per kind of problem; `--json` has all."""
STYLES = {"refused": "bold red", "skipped": "yellow", "fixed": "cyan", "kept": "dim"}
UNREADABLE = "unreadable-set"
"""The kind of problem whose location is the error message."""
PLURALS = {"box": "boxes", "class": "classes"}


def print_check(report: CheckReport, file: TextIO | None = None) -> None:
    """Prints the problems and the conclusion."""
    print_renderables(_renderables(report), file)


def _renderables(report: CheckReport) -> list[RenderableType]:
    renderables: list[RenderableType] = []
    if report.root is not None:
        renderables += [plain_text(line) for line in _header_lines(report)]
    for action in STYLES:
        items = [item for item in report.items if item.action == action and item.kind != UNREADABLE]
        if items:
            renderables += [Text(""), _table(action, items)]
    if not report.items:
        renderables += [Text(""), Text("no problems found", style="green")]
    return [*renderables, *([Text("")] if renderables else []), *_verdict(report)]


def _header_lines(report: CheckReport) -> list[str]:
    splits = ", ".join(f"{name} {count(split.num_images)}" for name, split in report.splits.items())
    lines = [
        f"{report.data}: {plural(report.num_images, 'image')} ({splits}), {plural(report.num_boxes, 'box', 'boxes')},"
        f" {plural(len(report.classes), 'class', 'classes')}",
        *report.notes,
    ]
    if not report.decoded:
        lines.append("images were not decoded (--annotations-only)")
    return lines


def _table(action: str, items: list[CheckItem]) -> RenderableType:
    rendered = table("", action, "", right=(0,))
    for item in items:
        unit = item.unit if item.count == 1 else PLURALS.get(item.unit, item.unit + "s")
        locations = [plain_text(location) for location in item.locations[:MAX_EXAMPLES]]
        if item.count > len(locations):
            locations.append(Text(f"… and {item.count - len(locations):,} more", style="dim"))
        rendered.add_row(
            count(item.count),
            Text(f"{unit}: {item.title}", style=STYLES[action]),
            Text("\n").join(
                [
                    *locations,
                    Text(f"→ {item.effect}; fix: {item.fix}" if item.fix != "nothing" else f"→ {item.effect}"),
                ]
            ),
        )
    return rendered


def _verdict(report: CheckReport) -> list[Text]:
    unreadable = [location for item in report.items if item.kind == UNREADABLE for location in item.locations]
    if unreadable:
        return [
            Text("training would refuse this dataset:", style="bold red"),
            *(plain_text(text, newlines=True) for text in unreadable),
        ]
    used = (
        f"{count(report.num_usable_images)} of {plural(report.num_images, 'image')},"
        f" {count(report.num_usable_boxes)} of {plural(report.num_boxes, 'box', 'boxes')}"
    )
    if not report.refusals:
        return [Text(f"training would use {used}", style="bold green")]
    refused = plain_text(f"training would refuse this dataset: {'; '.join(report.refusals)}", "bold red")
    return [Text(f"usable: {used}"), refused]
