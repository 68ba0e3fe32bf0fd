"""Prints the report of `stoker data check`. The checks are in `stoker/data/validation/check.py`."""

from typing import TextIO

from rich.console import RenderableType
from rich.text import Text

from stoker.data.validation.check import CheckReport
from stoker.report.console import plain_text, print_renderables
from stoker.report.findings_terminal import explain_line, finding_lines
from stoker.report.format import count, plural

UNREADABLE = "unreadable-set"
"""The kind of problem whose location is the error message."""


def print_check(report: CheckReport, file: TextIO | None = None) -> None:
    """Prints the problems and the conclusion."""
    print_renderables(_renderables(report), file)


def _renderables(report: CheckReport) -> list[RenderableType]:
    renderables: list[RenderableType] = []
    if report.root is not None:
        renderables += [plain_text(line) for line in _header_lines(report)]
    findings = [finding for finding in report.findings if finding.id != UNREADABLE]
    for finding in findings:
        renderables += [Text(""), *finding_lines(finding)]
    if not report.items:
        renderables += [Text(""), Text("no problems found", style="green")]
    return [*renderables, *([Text("")] if renderables else []), *_verdict(report), *explain_line(findings)]


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


def _verdict(report: CheckReport) -> list[Text]:
    unreadable = [location for item in report.items if item.kind == UNREADABLE for location in item.examples]
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
