"""Prints the report of `stoker import`. What became of each field is decided in `pipeline.py`."""

from collections.abc import Sequence
from typing import TextIO

from rich.console import RenderableType
from rich.text import Text

from stoker.migration.fields import FieldRow
from stoker.migration.pipeline import ImportReport
from stoker.report import format as fmt
from stoker.report.console import plain_text, print_renderables, table

TITLES = {
    "exact": ("carried over exactly", "green"),
    "substitute": ("carried over with a substitute", "yellow"),
    "not carried": ("not carried over", "red"),
}


def print_import(report: ImportReport, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints the fields by what became of them, and the traps."""
    renderables: list[RenderableType] = [
        plain_text(f"{report.source}: {report.architecture or 'no feature extractor'} becomes {report.model}")
    ]
    for status, (title, style) in TITLES.items():
        rows = [row for row in report.fields if row.status == status]
        renderables += [Text(""), Text(f"{title}: {fmt.plural(len(rows), 'field')}", style=style), _table(rows)]
    if report.traps:
        renderables += [Text(""), Text(f"known traps: {len(report.traps)}", style="bold")]
        renderables += [plain_text(f"  {trap.name}{_line(trap.line)}: {trap.text}") for trap in report.traps]
    print_renderables(renderables, file, width=width)


def _table(rows: Sequence[FieldRow]) -> RenderableType:
    rendered = table("line", "field", "value", "here", "", right=(0,))
    for row in rows:
        settings = ", ".join(f"{name} {fmt.setting(value)}" for name, value in row.settings.items())
        line = "" if row.line is None else str(row.line)
        rendered.add_row(line, row.field, row.value, settings, row.note)
    return rendered


def _line(line: int | None) -> str:
    return "" if line is None else f" (line {line})"
