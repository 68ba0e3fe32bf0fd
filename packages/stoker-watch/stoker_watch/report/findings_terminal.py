"""Prints findings: the one way for `why`, `check` and `data check`.

warning  /dev/shm has 64 MiB [/dev/shm]
         statvfs
         fix: --shm-size 8g
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from stoker_watch.findings.finding import SEVERITIES, Finding, Severity
from stoker_watch.report import format as fmt
from stoker_watch.report.console import facts, plain_text, print_renderables

if TYPE_CHECKING:
    from stoker_watch.diagnosis.reference import Entry

STYLES: dict[Severity, str] = {
    "blocker": "bold red", "critical": "bold red", "warning": "bold yellow", "info": "bold", "unknown": "bold",
    "ok": "green",
}  # fmt: skip
INDENT = 9
"""Columns of the severity, and of what is below a title."""


def print_findings(
    findings: Sequence[Finding], *, seconds: float, show_all: bool = False, file: TextIO | None = None
) -> None:
    """Prints the findings of `stoker check`, worst first, and their number. show_all: also what is in order, with its
    evidence; else it is one line."""
    renderables: list[RenderableType] = []
    for finding in findings:
        if show_all or finding.severity != "ok":
            renderables += finding_lines(finding)
    in_order = [finding for finding in findings if finding.severity == "ok"]
    if in_order and not show_all:
        names = ", ".join(dict.fromkeys(finding.id.replace("_", " ") for finding in in_order))
        renderables.append(_head("ok", plain_text(names)))
    counts = [(sum(finding.severity == severity for finding in findings), severity) for severity in SEVERITIES]
    summary = ", ".join(
        fmt.plural(count, severity) if severity in ("blocker", "warning") else f"{count} {severity}"
        for count, severity in counts
        if count
    )
    renderables += [f"{summary or 'nothing found'}, in {fmt.duration(seconds)}", *explain_line(findings)]
    print_renderables(renderables, file)


def finding_lines(finding: Finding, cost_range: tuple[float, float] | None = None) -> Iterator[RenderableType]:
    """A finding: title, what it cost, evidence with its sources, fix, confidence."""
    cost_text = f", cost {fmt.cost_range(cost_range)}" if cost_range is not None else ""
    lost = f" ({fmt.duration(finding.lost_device_s)} lost{cost_text})" if finding.lost_device_s is not None else ""
    place = plain_text(f" [{finding.place}]", "dim") if finding.place else ""
    yield _head(finding.severity, plain_text(finding.title), lost, place)
    for evidence in finding.evidence:
        yield indented(evidence.text + (f"  [{evidence.source}]" if evidence.source else ""))
    command = finding.extra_command
    if finding.fix:
        yield indented(f"fix: {finding.fix}" + (f" ({command})" if command else ""))
    elif command:
        yield indented(command)
    if finding.confidence is not None:
        yield indented(f"confidence: {fmt.percentage(finding.confidence)}")
    if finding.probe_result:
        yield indented(f"verified: {finding.probe_result}")


def explain_line(findings: Iterable[Finding]) -> list[Text]:
    """The ids of the findings above "ok", with the command that explains them; nothing if there are none."""
    ids = ", ".join(dict.fromkeys(finding.id for finding in findings if finding.severity != "ok"))
    return [plain_text(f"`stoker why --explain ID` explains: {ids}", "dim")] if ids else []


def print_entries(entries: "Iterable[Entry]", file: TextIO | None = None) -> None:
    for entry in entries:
        title = plain_text(f"{entry.id}: {entry.title}", "bold")
        print_renderables([title, plain_text(entry.section, "dim"), facts(entry.rows)], file)


def indented(text: str) -> RenderableType:
    """A text below a title, also its wrapped lines."""
    return Padding(plain_text(text, newlines=True), (0, 0, 0, INDENT), expand=False)


def _head(severity: Severity, *parts: Text | str) -> Text:
    return Text.assemble((f"{severity:<{INDENT}}", STYLES[severity]), *parts)
