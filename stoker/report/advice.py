"""What to do next about a run, the most urgent first, from what the records prove. `facts.py` calls it.

The causes of lost time and their fixes are the diagnosis' (`diagnose/`); here come the run's end before them, the
model's mistakes behind them, and last the size of the machine (`sizing.py`). Where nothing is proved, nothing is said.
"""

from typing import Literal

import msgspec

from stoker.diagnosis.failure_signatures import UNEXPLAINED
from stoker.evaluation.document import Evaluation
from stoker.report import format as fmt
from stoker.report.explain import RunExplanation
from stoker.report.explain_terminal import extra_command
from stoker.runs.records import CHECKPOINTS, CONFIG
from stoker.runs.schemas import Event

MIN_ERROR_FRACTION = 0.15
"""Share of the true boxes that a kind of mistake must reach to be worth a word. Our judgment."""

ERROR_TYPE_ADVICE: dict[str, tuple[str, str]] = {
    "localisation": (
        "the right class, but the box is off",
        "look at whether the true boxes are drawn alike; a larger --image-size where objects are small",
    ),
    "class": (
        "the right place, but another class",
        "look at the confused pairs: labels that are mixed up, or classes that need more pictures",
    ),
    "both": ("another class, and the box is off", "look at the worst pictures; it is seldom the first thing to mend"),
    "duplicate": (
        "a second box on an object that has one",
        "a lower IoU for suppressing doubles: `stoker predict --iou 0.4`",
    ),
    "background": (
        "a box where nothing is labelled",
        "look at the worst pictures: objects that nobody labelled, or pictures without objects that training lacks",
    ),
    "missed": (
        "an object that nothing is found about",
        "look at the worst pictures: small objects want a larger --image-size, rare ones more pictures",
    ),
}
"""Mistake → what it is, and what to look at."""


REPORTED_BY_LAST_EVENT = UNEXPLAINED | {"preempted", "interrupted"}
"""Findings that know no more of a run's end than its last event, which comes first."""


Severity = Literal["critical", "warning", "info"]


class Advice(msgspec.Struct, kw_only=True):
    """Something to do."""

    severity: Severity
    title: str
    reason: str
    fix: str
    command: str | None = None


_SEVERITIES: dict[str, Severity] = {"critical": "critical", "warning": "warning"}


def advise(
    explanation: RunExplanation, aps: list[float | None], evaluation: Evaluation | None, events: list[Event]
) -> list[Advice]:
    """aps: AP of each evaluation, by step."""
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
    """What an unfinished run needs."""
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
                fix=fix or "set right what the message names, then continue it",
                command=resume,
            )
        ]
    if explanation.state == "dead":
        return [
            Advice(
                severity="critical",
                title="The run died without a word",
                reason=explanation.state_text,
                fix="continue it from its last checkpoint"
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
                reason="its state is saved",
                fix="continue it exactly where it was",
                command=resume,
            )
        ]
    return []


def _error_type_advice(evaluation: Evaluation) -> list[Advice]:
    """The most frequent kind of mistake, where it is frequent."""
    counts = sum_error_types(evaluation)
    boxes = evaluation.metrics.boxes
    error_type = max(counts, key=lambda name: counts[name], default=None)
    if error_type is None or not boxes or counts[error_type] < MIN_ERROR_FRACTION * boxes:
        return []
    meaning, fix = ERROR_TYPE_ADVICE[error_type]
    reason = f"{counts[error_type]:,} of them, at {boxes:,} true boxes: {meaning}"
    return [Advice(severity="info", title=f"The most frequent mistake: {error_type}", reason=reason, fix=fix)]


def sum_error_types(evaluation: Evaluation) -> dict[str, int]:
    """Kind → count over all classes, of the kinds that occur."""
    counts: dict[str, int] = {}
    for class_eval in evaluation.classes:
        for error_type, count in class_eval.error_types.items():
            counts[error_type] = counts.get(error_type, 0) + count
    return counts


MIN_AP_GAIN = 0.01
"""Gain of AP between the last two evaluations from which on more training is worth a try. Our judgment."""


def _rising_ap_advice(aps: list[float | None]) -> list[Advice]:
    known = [value for value in aps if value is not None]
    if len(known) < 2 or known[-1] - known[-2] < MIN_AP_GAIN:
        return []
    reason = f"AP went from {fmt.metric(known[-2])} to {fmt.metric(known[-1])} between the last two evaluations"
    return [
        Advice(
            severity="info",
            title="AP was still rising at the end",
            reason=reason,
            fix="a new run that is longer",
            command="--max-duration",
        )
    ]
