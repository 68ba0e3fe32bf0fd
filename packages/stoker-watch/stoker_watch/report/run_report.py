"""All data of a run report: `stoker report` renders it as a page or prints it as JSON.

`collect` reads a run in any state and lists in `missing` what is not available. Time, cost and findings come from
`explain.py`, metrics from events.jsonl and evaluation.json. `advise` says what to do next, the most urgent first: how
the run ended, the findings, the error types of the model, and the size of the machine. The page is made by `html.py`.
"""

import shlex
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stoker_watch.diagnosis.endings import UNEXPLAINED
from stoker_watch.errors import UsageError, make_error
from stoker_watch.findings.finding import Evidence, Finding, Severity
from stoker_watch.report import format as fmt
from stoker_watch.report.explain import ERROR_TYPE_ADVICE, RunExplanation, explain_run, open_records
from stoker_watch.report.series import FractionSeries, RunCurves, Series
from stoker_watch.report.sizing import read_environment
from stoker_watch.runs import records
from stoker_watch.runs.evaluation import Evaluation, Metrics, read_evaluation
from stoker_watch.runs.schemas import Event, Quarantined
from stoker_watch.secrets import mask_secrets
from stoker_watch.storage.uri import display_path

MAX_EVENTS, MAX_QUARANTINED = 300, 100
"""Longer lists are truncated in the middle; the number of omitted items is kept."""
Item = TypeVar("Item")


class Setting(msgspec.Struct, kw_only=True):
    """A setting of the run."""

    section: str
    name: str
    value: str
    reason: str | None


class EvalResult(msgspec.Struct, kw_only=True):
    step: int
    t: float
    metrics: Metrics


class Restart(msgspec.Struct, kw_only=True):
    """A later attempt of the run."""

    attempt: int
    step: int
    t: float
    after_s: float
    previous_end: str


class RunReport(msgspec.Struct, kw_only=True):
    """The report. x is seconds since `start_t` in `machine` and `phases`, and steps in `curves`."""

    stoker_version: str
    generated_t: float
    run: str
    is_native_run: bool
    model: str | None
    data: str | None
    start_t: float | None
    explanation: RunExplanation
    missing: list[str]
    advice: list[Finding]
    eval_history: list[EvalResult]
    evaluation: Evaluation | None
    restarts: list[Restart]
    curves: dict[str, Series]
    phases: FractionSeries
    machine: dict[str, Series]
    settings: list[Setting]
    environment: dict[str, Any]
    events: list[Event]
    events_omitted: int
    warnings: list[str]
    quarantined: list[Quarantined]
    quarantined_omitted: int

    @property
    def best(self) -> EvalResult | None:
        """The first evaluation with the highest AP: `eval`, `predict` and `export` use its weights."""
        return max(self.eval_history, key=lambda result: result.metrics.ap or 0.0, default=None)


def collect(run: str | Path, price_per_device_hour: float | None = None) -> RunReport:
    """Reads a run. price_per_device_hour: as for `explain_run`. Raises UsageError if it is not a run."""
    path = open_records(run)
    read = RunCurves()
    explanation = explain_run(path, price_per_device_hour, observers=[read])
    missing: list[str] = []
    events, start_t = read.events, read.start_t
    settings = read_settings_rows(path)
    is_native_run = not any("coverage" in event.data or "measured" in event.data for event in events)
    if is_native_run and not (path / records.CONFIG).exists():
        missing.append(f"The settings are not known: {records.CONFIG} is missing.")
    values = {entry.name: entry.value for entry in settings}
    eval_history = _read_eval_history(events, path)
    evaluation = _read_final_evaluation(path, missing, bool(eval_history)) if is_native_run else None
    quarantined = list(records.read_lines(path, records.QUARANTINE, Quarantined))
    curves, phases, machine = read.steps(), read.phases(), read.machine()
    if not curves:
        missing.append("No training curves: no optimizer step is recorded.")
    if not machine:
        missing.append(f"No telemetry of GPUs and host: {records.DEVICES} has no lines.")
    environment = read_environment(path)
    if not environment:
        reason = "is damaged" if (path / records.ENVIRONMENT).exists() else "is missing"
        missing.append(f"Hardware and versions are not known: {records.ENVIRONMENT} {reason}.")
    missing += [
        f"Not recorded: {tier}, {status}." for tier, status in explanation.coverage.items() if status.startswith("not ")
    ]
    kept_events, events_omitted = _cut_middle([event for event in events if event.kind != "evaluated"], MAX_EVENTS)
    kept_quarantined, quarantined_omitted = _cut_middle(quarantined, MAX_QUARANTINED)
    return RunReport(
        warnings=[event.text for event in events if event.kind in records.WARNING_KINDS],
        stoker_version=metadata.version("stoker-watch"),
        generated_t=time.time(),
        run=display_path(path),
        is_native_run=is_native_run,
        model=values.get("model"),
        data=Path(values["data"]).name if "data" in values else None,
        start_t=start_t,
        explanation=explanation,
        missing=missing,
        advice=advise(explanation, evaluation, events),
        eval_history=eval_history,
        evaluation=evaluation,
        restarts=_restarts(events, start_t or 0.0),
        curves=curves,
        phases=phases,
        machine=machine,
        settings=settings,
        environment=environment,
        events=kept_events,
        events_omitted=events_omitted,
        quarantined=kept_quarantined,
        quarantined_omitted=quarantined_omitted,
    )


def _read_eval_history(events: list[Event], path: Path) -> list[EvalResult]:
    """Ascending in step. If steps were lost and repeated, their new evaluations replace the old ones."""
    results: list[EvalResult] = []
    for event in events:
        if event.kind != "evaluated" or "metrics" not in event.data:
            continue
        try:
            metrics = msgspec.convert(event.data["metrics"], Metrics)
        except msgspec.ValidationError as error:
            location = f"{path / records.EVENTS}: evaluated at step {event.step}"
            raise make_error(UsageError, "metrics-of-another-version", location, cause=str(error)) from error
        result = EvalResult(step=event.step or 0, t=event.t, metrics=metrics)
        while results and results[-1].step >= result.step:
            results.pop()
        results.append(result)
    return results


def _read_final_evaluation(path: Path, missing: list[str], is_scored: bool) -> Evaluation | None:
    try:
        evaluation = read_evaluation(path)
    except UsageError as error:
        missing.append(f"{error.what} ({error.cause}) Curves, error types and images are left out.")
        return None
    if evaluation is None:
        reason = "although the model was evaluated" if is_scored else "because the model was not evaluated yet"
        what = "No precision-recall curves, error types and images"
        missing.append(f"{what}: {records.EVALUATION} is missing, {reason}.")
    return evaluation


def _restarts(events: list[Event], start_t: float) -> list[Restart]:
    """The later attempts. Each resumes at the step of the last checkpoint before it."""
    restarts: list[Restart] = []
    last_saved_step, previous_end = 0, "killed"
    for event in events:
        if event.kind == "resumed":
            after_s = event.t - start_t
            restart = Restart(
                attempt=event.attempt, step=last_saved_step, t=event.t, after_s=after_s, previous_end=previous_end
            )
            restarts.append(restart)
            previous_end = "killed"
        elif event.kind == "checkpoint_saved" and event.step is not None:
            last_saved_step = event.step
        elif event.kind in ("preempted", "failed", "finished"):
            previous_end = event.kind
    return restarts


def read_settings_rows(path: Path) -> list[Setting]:
    """Settings of a run; empty if it has none. Read without a schema: other versions have other settings."""
    sections = records.read_settings(path) or {}
    reasons = sections.pop("reasons", {})
    return [
        Setting(section=section, name=name, value=mask_secrets(fmt.setting(value)), reason=reasons.get(name))
        for section, values in sections.items()
        if isinstance(values, dict)
        for name, value in values.items()
    ]


def _cut_middle(items: list[Item], max_items: int) -> tuple[list[Item], int]:
    """(the first and the last items, number of those left out)."""
    if len(items) <= max_items:
        return items, 0
    return items[: max_items // 2] + items[-(max_items - max_items // 2) :], len(items) - max_items


# Advice

MIN_ERROR_FRACTION = 0.15
"""Number of errors of one type, relative to the ground truth boxes, that makes the type worth mentioning. Heuristic."""

REPORTED_BY_LAST_EVENT = UNEXPLAINED | {"preempted", "interrupted"}
"""Findings that repeat the last event of the run, which the advice begins with."""


def advise(explanation: RunExplanation, evaluation: Evaluation | None, events: list[Event]) -> list[Finding]:
    advice = _termination_advice(explanation, events)
    advice += [finding for finding in explanation.findings if finding.id not in REPORTED_BY_LAST_EVENT]
    if evaluation is not None:
        advice += _error_type_advice(evaluation)
    return advice + explanation.sizing_advice


def _termination_advice(explanation: RunExplanation, events: list[Event]) -> list[Finding]:
    """For a run that did not finish."""
    has_settings = records.CONFIG in explanation.evidence_paths  # of a run of stoker's own
    resume = f"stoker train --resume {shlex.quote(explanation.run)}" if has_settings else None
    if explanation.state == "failed":
        message = next((event.text for event in reversed(events) if event.kind == "failed"), "")
        first_line, _, rest = message.partition("\n")
        lines = [line.strip() for line in rest.splitlines()]
        fix = next((line.removeprefix("fix:").strip() for line in lines if line.startswith("fix:")), "")
        reason = " · ".join(" ".join(line.split()) for line in lines if not line.startswith("fix:"))
        fix = fix or f"fix the reported problem, then {'resume the run' if has_settings else 'start it again'}"
        return [_advice("run_failed", "critical", f"The run failed: {first_line}", reason, fix, resume)]
    if explanation.state == "killed":
        is_saved = records.CHECKPOINTS in explanation.evidence_paths
        fix = "resume it from its last checkpoint" if is_saved else "start it again"
        return [_advice("run_killed", "critical", "The run was killed", explanation.state_text, fix, resume)]
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
    return sum((Counter(class_eval.error_types) for class_eval in evaluation.classes), Counter[str]())
