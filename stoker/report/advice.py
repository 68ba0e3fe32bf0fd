"""What to do next about a run, the most urgent first, from what the records prove. `facts.py` calls it.

The causes of lost time and their fixes are the diagnosis' (`diagnose/`); here come the run's end before them, the
model's mistakes behind them, and last the size of the machine (`sizing.py`). Where nothing is proved, nothing is said.
"""

from typing import Literal

import msgspec

from stoker.diagnosis.failure_signatures import UNEXPLAINED
from stoker.evaluation.document import Evaluation
from stoker.report import format as fmt
from stoker.report.explain import Why
from stoker.report.explain_terminal import unsaid_command
from stoker.runs.records import CHECKPOINTS, CONFIG
from stoker.runs.schemas import Event

MISTAKES_FROM = 0.15
"""Share of the true boxes that a kind of mistake must reach to be worth a word. Our judgment."""

KINDS: dict[str, tuple[str, str]] = {
    "localisation": (
        "the right class, but the box is off",
        "look at whether the true boxes are drawn alike; a larger --canvas where objects are small",
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
        "look at the worst pictures: small objects want a larger --canvas, rare ones more pictures",
    ),
}
"""Mistake → what it is, and what to look at."""


SAID_BY_THE_END = UNEXPLAINED | {"preempted", "interrupted"}
"""Findings that know no more of a run's end than its last event, which comes first."""


Severity = Literal["critical", "warning", "info"]


class Advice(msgspec.Struct, kw_only=True):
    """Something to do."""

    severity: Severity
    title: str
    because: str
    fix: str
    command: str | None = None


_SEVERITIES: dict[str, Severity] = {"critical": "critical", "warning": "warning"}


def advise(why: Why, aps: list[float | None], evaluation: Evaluation | None, events: list[Event]) -> list[Advice]:
    """aps: AP of each evaluation, by step."""
    advice = _end(why, events)
    advice += [
        Advice(
            severity=_SEVERITIES.get(finding.severity, "info"),
            title=finding.title,
            because="; ".join(evidence.text for evidence in finding.evidence),
            fix=finding.fix,
            command=unsaid_command(finding),
        )
        for finding in why.findings
        if finding.cause not in SAID_BY_THE_END
    ]
    if evaluation is not None:
        advice += _mistakes(evaluation)
    if why.state == "finished":
        advice += _still_rising(aps)
    return advice + [
        Advice(severity="info", title=one.title, because="; ".join(said.text for said in one.evidence), fix=one.fix)
        for one in why.advice
    ]


def _end(why: Why, events: list[Event]) -> list[Advice]:
    """What an unfinished run needs."""
    resume = f"stoker train --resume {why.run}"
    if why.state == "failed":
        said = next((event.text for event in reversed(events) if event.kind == "failed"), "")
        what, _, rest = said.partition("\n")
        lines = [line.strip() for line in rest.splitlines()]
        fix = next((line.removeprefix("fix:").strip() for line in lines if line.startswith("fix:")), "")
        because = " · ".join(" ".join(line.split()) for line in lines if not line.startswith("fix:"))
        return [
            Advice(
                severity="critical",
                title=f"The run failed: {what}",
                because=because,
                fix=fix or "set right what the message names, then continue it",
                command=resume,
            )
        ]
    if why.state == "dead":
        return [
            Advice(
                severity="critical",
                title="The run died without a word",
                because=why.state_text,
                fix="continue it from its last checkpoint" if CHECKPOINTS in why.places else "start it again",
                command=resume if CONFIG in why.places else None,
            )
        ]
    if why.state == "preempted":
        return [
            Advice(
                severity="warning",
                title="The run was stopped by a signal",
                because="its state is saved",
                fix="continue it exactly where it was",
                command=resume,
            )
        ]
    return []


def _mistakes(evaluation: Evaluation) -> list[Advice]:
    """The most frequent kind of mistake, where it is frequent."""
    counts = mistake_counts(evaluation)
    boxes = evaluation.metrics.boxes
    kind = max(counts, key=lambda name: counts[name], default=None)
    if kind is None or not boxes or counts[kind] < MISTAKES_FROM * boxes:
        return []
    meaning, fix = KINDS[kind]
    because = f"{counts[kind]:,} of them, at {boxes:,} true boxes: {meaning}"
    return [Advice(severity="info", title=f"The most frequent mistake: {kind}", because=because, fix=fix)]


def mistake_counts(evaluation: Evaluation) -> dict[str, int]:
    """Kind → count over all classes, of the kinds that occur."""
    counts: dict[str, int] = {}
    for of in evaluation.classes:
        for kind, count in of.mistakes.items():
            counts[kind] = counts.get(kind, 0) + count
    return counts


RISING = 0.01
"""Gain of AP between the last two evaluations from which on more training is worth a try. Our judgment."""


def _still_rising(aps: list[float | None]) -> list[Advice]:
    known = [value for value in aps if value is not None]
    if len(known) < 2 or known[-1] - known[-2] < RISING:
        return []
    because = f"AP went from {fmt.metric(known[-2])} to {fmt.metric(known[-1])} between the last two evaluations"
    return [
        Advice(
            severity="info",
            title="AP was still rising at the end",
            because=because,
            fix="a new run that is longer",
            command="--for",
        )
    ]
