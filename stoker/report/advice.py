"""What to do next about a run, the most urgent first, based on its records. Called by `run_report.py`.

The causes of lost time and their fixes come from `stoker/diagnosis/`. This module adds how the run ended (first), the
error types of the model, and the size of the machine (`sizing.py`, last). Without evidence there is no advice.
"""

from typing import Literal

import msgspec

from stoker.diagnosis.endings import UNEXPLAINED
from stoker.evaluation.document import Evaluation
from stoker.report import format as fmt
from stoker.report.explain import RunExplanation
from stoker.report.explain_terminal import extra_command
from stoker.runs.records import CHECKPOINTS, CONFIG
from stoker.runs.schemas import Event

MIN_ERROR_FRACTION = 0.15
"""Number of errors of one type, relative to the ground truth boxes, that makes the type worth mentioning. Heuristic."""

ERROR_TYPE_ADVICE: dict[str, tuple[str, str]] = {
    "localization": (
        "correct class, inaccurate box",
        "check whether ground truth boxes are drawn consistently; a larger --image-size if objects are small",
    ),
    "class": (
        "accurate box, wrong class",
        "check the confused classes: wrong labels, or classes that need more images",
    ),
    "both": ("wrong class and inaccurate box", "check the worst images; rarely the first problem to fix"),
    "duplicate": (
        "a second box on a detected object",
        "a lower IoU threshold of NMS: `stoker predict --iou 0.4`",
    ),
    "background": (
        "a box without a ground truth object",
        "check the worst images: unlabeled objects, or too few training images without objects",
    ),
    "missed": (
        "an object without a detection",
        "check the worst images: small objects need a larger --image-size, rare ones more images",
    ),
}
"""TIDE error type → its meaning, and what to check."""


REPORTED_BY_LAST_EVENT = UNEXPLAINED | {"preempted", "interrupted"}
"""Findings that repeat the last event of the run, which this module reports first."""


Severity = Literal["critical", "warning", "info"]


class Advice(msgspec.Struct, kw_only=True):
    """A recommended action."""

    severity: Severity
    title: str
    reason: str
    fix: str
    command: str | None = None


_SEVERITIES: dict[str, Severity] = {"critical": "critical", "warning": "warning"}


def advise(
    explanation: RunExplanation, aps: list[float | None], evaluation: Evaluation | None, events: list[Event]
) -> list[Advice]:
    """aps: AP of each evaluation, in order of steps."""
    advice = _termination_advice(explanation, events)
    advice += [
        Advice(
            severity=_SEVERITIES.get(finding.severity, "info"),
            title=finding.title,
            reason="; ".join(evidence.text for evidence in finding.evidence),
            fix=finding.fix,
            command=extra_command(finding),
        )
        for finding in explanation.findings
        if finding.cause not in REPORTED_BY_LAST_EVENT
    ]
    if evaluation is not None:
        advice += _error_type_advice(evaluation)
    if explanation.state == "finished":
        advice += _rising_ap_advice(aps)
    return advice + [
        Advice(
            severity="info", title=sizing.title, reason="; ".join(item.text for item in sizing.evidence), fix=sizing.fix
        )
        for sizing in explanation.sizing_advice
    ]


def _termination_advice(explanation: RunExplanation, events: list[Event]) -> list[Advice]:
    """For a run that did not finish."""
    resume = f"stoker train --resume {explanation.run}"
    if explanation.state == "failed":
        message = next((event.text for event in reversed(events) if event.kind == "failed"), "")
        first_line, _, rest = message.partition("\n")
        lines = [line.strip() for line in rest.splitlines()]
        fix = next((line.removeprefix("fix:").strip() for line in lines if line.startswith("fix:")), "")
        reason = " · ".join(" ".join(line.split()) for line in lines if not line.startswith("fix:"))
        return [
            Advice(
                severity="critical",
                title=f"The run failed: {first_line}",
                reason=reason,
                fix=fix or "fix the reported problem, then resume the run",
                command=resume,
            )
        ]
    if explanation.state == "killed":
        return [
            Advice(
                severity="critical",
                title="The run was killed",
                reason=explanation.state_text,
                fix="resume it from its last checkpoint"
                if CHECKPOINTS in explanation.evidence_paths
                else "start it again",
                command=resume if CONFIG in explanation.evidence_paths else None,
            )
        ]
    if explanation.state == "preempted":
        return [
            Advice(
                severity="warning",
                title="The run was stopped by a signal",
                reason="its state was saved",
                fix="resume it exactly where it stopped",
                command=resume,
            )
        ]
    return []


def _error_type_advice(evaluation: Evaluation) -> list[Advice]:
    """The most frequent error type, if it is frequent."""
    counts = sum_error_types(evaluation)
    boxes = evaluation.metrics.boxes
    error_type = max(counts, key=lambda name: counts[name], default=None)
    if error_type is None or not boxes or counts[error_type] < MIN_ERROR_FRACTION * boxes:
        return []
    meaning, fix = ERROR_TYPE_ADVICE[error_type]
    reason = f"{counts[error_type]:,}, with {boxes:,} ground truth boxes: {meaning}"
    return [Advice(severity="info", title=f"The most frequent error type: {error_type}", reason=reason, fix=fix)]


def sum_error_types(evaluation: Evaluation) -> dict[str, int]:
    """Error type → count over all classes, without zeros."""
    counts: dict[str, int] = {}
    for class_eval in evaluation.classes:
        for error_type, count in class_eval.error_types.items():
            counts[error_type] = counts.get(error_type, 0) + count
    return counts


MIN_AP_GAIN = 0.01
"""Minimum AP gain between the last two evaluations that suggests longer training. Heuristic."""


def _rising_ap_advice(aps: list[float | None]) -> list[Advice]:
    known = [value for value in aps if value is not None]
    if len(known) < 2 or known[-1] - known[-2] < MIN_AP_GAIN:
        return []
    reason = f"AP rose from {fmt.metric(known[-2])} to {fmt.metric(known[-1])} between the last two evaluations"
    return [
        Advice(
            severity="info",
            title="AP was still rising at the end",
            reason=reason,
            fix="train longer",
            command="--epochs",
        )
    ]
