"""What to do next about a run, the most urgent first, based on its records. Called by `run_report.py`.

The causes of lost time and their fixes come from `stoker/diagnosis/`. This module adds how the run ended (first), the
error types of the model, and the size of the machine (`sizing.py`, last). Without evidence there is no advice.
"""

from collections import Counter

from stoker.diagnosis.endings import UNEXPLAINED
from stoker.evaluation.metrics import Evaluation
from stoker.findings.finding import Evidence, Finding, Severity
from stoker.report import format as fmt
from stoker.report.explain import RunExplanation
from stoker.report.words import ERROR_TYPE_ADVICE
from stoker.runs.records import CHECKPOINTS, CONFIG
from stoker.runs.schemas import Event

MIN_ERROR_FRACTION = 0.15
"""Number of errors of one type, relative to the ground truth boxes, that makes the type worth mentioning. Heuristic."""

REPORTED_BY_LAST_EVENT = UNEXPLAINED | {"preempted", "interrupted"}
"""Findings that repeat the last event of the run, which this module reports first."""


def advise(
    explanation: RunExplanation, aps: list[float | None], evaluation: Evaluation | None, events: list[Event]
) -> list[Finding]:
    """aps: AP of each evaluation, in order of steps."""
    advice = _termination_advice(explanation, events)
    advice += [finding for finding in explanation.findings if finding.id not in REPORTED_BY_LAST_EVENT]
    if evaluation is not None:
        advice += _error_type_advice(evaluation)
    if explanation.state == "finished":
        advice += _rising_ap_advice(aps)
    return advice + explanation.sizing_advice


def _termination_advice(explanation: RunExplanation, events: list[Event]) -> list[Finding]:
    """For a run that did not finish."""
    resume = f"stoker train --resume {explanation.run}"
    if explanation.state == "failed":
        message = next((event.text for event in reversed(events) if event.kind == "failed"), "")
        first_line, _, rest = message.partition("\n")
        lines = [line.strip() for line in rest.splitlines()]
        fix = next((line.removeprefix("fix:").strip() for line in lines if line.startswith("fix:")), "")
        reason = " · ".join(" ".join(line.split()) for line in lines if not line.startswith("fix:"))
        fix = fix or "fix the reported problem, then resume the run"
        return [_advice("run_failed", "critical", f"The run failed: {first_line}", reason, fix, resume)]
    if explanation.state == "killed":
        fix = "resume it from its last checkpoint" if CHECKPOINTS in explanation.evidence_paths else "start it again"
        command = resume if CONFIG in explanation.evidence_paths else None
        return [_advice("run_killed", "critical", "The run was killed", explanation.state_text, fix, command)]
    if explanation.state == "preempted":
        fix = "resume it exactly where it stopped"
        title = "The run was stopped by a signal"
        return [_advice("run_preempted", "warning", title, "its state was saved", fix, resume)]
    return []


def _advice(id: str, severity: Severity, title: str, reason: str, fix: str, command: str | None = None) -> Finding:
    evidence = [Evidence(text=reason)] if reason else []
    return Finding(id=id, severity=severity, title=title, evidence=evidence, fix=fix, command=command)


def _error_type_advice(evaluation: Evaluation) -> list[Finding]:
    """The most frequent error type, if it is frequent."""
    boxes = evaluation.metrics.boxes
    ((error_type, count),) = sum_error_types(evaluation).most_common(1) or [("", 0)]
    if not boxes or count < MIN_ERROR_FRACTION * boxes:
        return []
    meaning, fix = ERROR_TYPE_ADVICE[error_type]
    reason = f"{count:,}, with {boxes:,} ground truth boxes: {meaning}"
    return [_advice("frequent_error_type", "info", f"The most frequent error type: {error_type}", reason, fix)]


def sum_error_types(evaluation: Evaluation) -> Counter[str]:
    """Error type → count over all classes."""
    return sum((Counter(class_eval.error_types) for class_eval in evaluation.classes), Counter[str]())


MIN_AP_GAIN = 0.01
"""Minimum AP gain between the last two evaluations that suggests longer training. Heuristic."""


def _rising_ap_advice(aps: list[float | None]) -> list[Finding]:
    known = [value for value in aps if value is not None]
    if len(known) < 2 or known[-1] - known[-2] < MIN_AP_GAIN:
        return []
    reason = f"AP rose from {fmt.metric(known[-2])} to {fmt.metric(known[-1])} between the last two evaluations"
    return [_advice("ap_rising", "info", "AP was still rising at the end", reason, "train longer", "--epochs")]
