"""The page's findings with their evidence, and the experiments that were made. The numbers on its time line are theirs.

What to do first, in short, is the summary's (`results.py`).
"""

from stoker.report import format as fmt
from stoker.report.explain_terminal import cost, unsaid_command
from stoker.report.explain_terminal import experiments as rows_of
from stoker.report.page.markup import Child, Markup, code, table, tag
from stoker.report.run_report import Report
from stoker.runs.schemas import Finding


def findings(report: Report) -> list[Markup]:
    """Each finding of the diagnosis: what it cost, what it rests on, what to do, how sure it is."""
    made = [_finding(report, number, one) for number, one in enumerate(report.why.findings, start=1)]
    return [tag("h3", "Findings"), *made] if made else []


def _finding(report: Report, number: int, finding: Finding) -> Markup:
    lost = f"{fmt.duration(finding.lost_device_s)} lost" if finding.lost_device_s is not None else ""
    money = report.why.cost(finding.lost_device_s)
    paid = f", cost {cost(money)}" if money is not None else ""
    evidence = [
        tag("li", one.text, tag("span", f" {one.place}", class_="place") if one.place else None)
        for one in finding.evidence
    ]
    command = unsaid_command(finding)
    sure = f"Confidence: {fmt.share(finding.confidence)}" if finding.confidence is not None else ""
    return tag(
        "article",
        tag("h4", f"{number}. {finding.severity}: {finding.title}"),
        tag("p", f"{lost}{paid}") if lost else None,
        tag("ul", evidence),
        tag("p", tag("b", "Fix: "), finding.fix, [" ", code(command)] if command else None),
        tag("p", sure, f"; {finding.verified}" if finding.verified else "", class_="note") if sure else None,
        class_=f"finding {finding.severity}",
    )


def experiments(report: Report) -> list[Markup]:
    """What was changed for a few dozen steps, and what that did to the speed."""
    if not report.why.probes:
        return []
    heads = ("changed", "img/s before", "after", "ratio", "90 % interval")
    rows: list[list[Child]] = [list(row) for row in rows_of(report.why.probes)]
    said = "One thing was changed for a few dozen steps; before and after were measured in turn."
    shown = table("Experiments", heads, rows, right=(1, 2, 3), wide=(4,), hidden=True)
    return [tag("h3", "Experiments"), tag("p", said, class_="note"), shown]
