"""The sections of findings, with their evidence, and of experiments. The timeline refers to the numbers of the
findings.

The advice in the summary is in `results.py`.
"""

from stoker.findings.finding import Finding
from stoker.report import format as fmt
from stoker.report.explain_terminal import probe_rows
from stoker.report.findings_terminal import format_cost
from stoker.report.page.markup import Child, Markup, code, table, tag
from stoker.report.run_report import RunReport


def findings(report: RunReport) -> list[Markup]:
    """Each finding: cost, evidence, fix, confidence; then the notes."""
    articles = [
        _finding(report, number, finding) for number, finding in enumerate(report.explanation.findings, start=1)
    ]
    notes = [tag("li", note.title, _source(note.place)) for note in report.explanation.notes]
    return [
        *([tag("h3", "Findings"), *articles] if articles else []),
        *([tag("h3", "Notes"), tag("ul", notes)] if notes else []),
    ]


def _finding(report: RunReport, number: int, finding: Finding) -> Markup:
    lost = f"{fmt.duration(finding.lost_device_s)} lost" if finding.lost_device_s is not None else ""
    cost_range = report.explanation.cost(finding.lost_device_s)
    cost_text = f", cost {format_cost(cost_range)}" if cost_range is not None else ""
    evidence = [tag("li", item.text, _source(item.source)) for item in finding.evidence]
    command = finding.extra_command
    confidence = f"Confidence: {fmt.percentage(finding.confidence)}" if finding.confidence is not None else ""
    return tag(
        "article",
        tag("h4", f"{number}. {finding.severity}: {finding.title}"),
        tag("p", f"{lost}{cost_text}") if lost else None,
        tag("ul", evidence),
        tag("p", tag("b", "Fix: "), finding.fix, [" ", code(command)] if command else None),
        tag("p", confidence, f"; {finding.probe_result}" if finding.probe_result else "", class_="note")
        if confidence
        else None,
        class_=f"finding {finding.severity}",
    )


def _source(source: str) -> Markup | None:
    return tag("span", f" {source}", class_="source") if source else None


def experiments(report: RunReport) -> list[Markup]:
    """What was changed for a few dozen steps, and its effect on the speed."""
    if not report.explanation.probes:
        return []
    heads = ("changed", "img/s before", "after", "ratio", "90 % interval")
    rows: list[list[Child]] = [list(row) for row in probe_rows(report.explanation.probes)]
    note = "One thing was changed for a few dozen steps; before and after were measured alternately."
    rendered = table("Experiments", heads, rows, right=(1, 2, 3), wide=(4,), hidden=True)
    return [tag("h3", "Experiments"), tag("p", note, class_="note"), rendered]
