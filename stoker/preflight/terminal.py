"""Prints what `stoker check` found: the worst first, what is in order in one line."""

from collections.abc import Sequence
from typing import TextIO

from rich.console import RenderableType
from rich.text import Text

from stoker.preflight.findings import SEVERITIES, CheckFinding
from stoker.report import format as fmt
from stoker.report.console import plain_text, print_renderables

STYLES = {"blocker": "bold red", "warning": "bold yellow", "unknown": "bold", "ok": "green"}


def print_findings(
    findings: Sequence[CheckFinding],
    *,
    seconds: float,
    show_all: bool = False,
    file: TextIO | None = None,
    width: int | None = None,
) -> None:
    """findings: worst first. show_all: also what is in order, with its evidence."""
    renderables: list[RenderableType] = []
    in_order = [finding for finding in findings if finding.severity == "ok"]
    for finding in findings:
        if show_all or finding.severity != "ok":
            renderables += _lines(finding)
    if in_order and not show_all:
        names = ", ".join(dict.fromkeys(finding.id.replace("_", " ") for finding in in_order))
        renderables.append(Text.assemble(("ok       ", STYLES["ok"]), plain_text(names)))
    counts = [(sum(finding.severity == severity for finding in findings), severity) for severity in SEVERITIES]
    summary = ", ".join(
        f"{count} {severity}" if severity in ("ok", "unknown") else fmt.plural(count, severity)
        for count, severity in counts
        if count
    )
    print_renderables(
        [*renderables, f"{summary or 'nothing was checked'}, in {fmt.duration(seconds)}"], file, width=width
    )


def _lines(finding: CheckFinding) -> list[RenderableType]:
    place = f" [{finding.place}]" if finding.place else ""
    head = Text.assemble(
        (f"{finding.severity:<9}", STYLES[finding.severity]),
        plain_text(finding.title),
        (plain_text(place).plain, "dim"),
    )
    lines: list[RenderableType] = [head]
    if finding.evidence:
        lines.append(plain_text(f"         {finding.evidence}", newlines=True))
    if finding.fix:
        lines.append(Text.assemble("         fix: ", plain_text(finding.fix, newlines=True)))
    return lines
