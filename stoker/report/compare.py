"""`stoker why A --compare B` as data: differences in settings, machine, time, findings and AP.

`compare` reads both runs as `stoker why` does; `compare_terminal.py` prints the result. It names no causes: two runs do
not prove which change caused which."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from stoker.report import format as fmt
from stoker.report.environment import comparable, read_environment
from stoker.report.explain import RunExplanation, exact_cost, explain_run, open_records
from stoker.report.run_report import read_settings_rows
from stoker.runs import records
from stoker.runs.schemas import Event

SAME_TOLERANCE = 0.01
"""Relative difference of times below which they count as equal. Heuristic: repeated runs differ by more than this."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A value that differs. None: not recorded in that run."""

    name: str
    before: str | None
    after: str | None


class PhaseChange(msgspec.Struct, frozen=True, kw_only=True):
    """A phase in both runs: seconds per `Comparison.unit`, and fraction of all device time."""

    phase: str
    before_s: float
    after_s: float
    before_fraction: float
    after_fraction: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The differences between the runs `before` and `after`."""

    before: str
    after: str
    statement: list[str]
    """Sentences, the largest difference first."""
    unit: str
    """`step`: seconds of each device per optimizer step; if the batch size differs, `1,000 images`: device-seconds."""
    total_s: tuple[float | None, float | None]
    """All phases together, per unit. None: no step was done."""
    phases: list[PhaseChange]
    """The largest difference first; empty if a run did no step."""
    img_per_s: tuple[float | None, float | None]
    """Average over the run."""
    ap: tuple[float | None, float | None]
    """AP of the last evaluation."""
    settings: list[Change]
    """Empty if a run has no settings: external jobs have none."""
    environment: list[Change]
    removed_causes: list[str]
    """Causes of findings that only the first run has."""
    added_causes: list[str]
    """Causes of findings that only the second run has."""
    states: tuple[str, str]
    costs: tuple[float | None, float | None]
    """Cost of each run, if its price is known."""


def compare(before: str | Path, after: str | Path, price_per_device_hour: float | None = None) -> Comparison:
    """Reads both runs. price_per_device_hour: as for `explain_run`. Raises UsageError if one is not a run."""
    first, second = explain_run(before, price_per_device_hour), explain_run(after, price_per_device_hour)
    folders = open_records(before), open_records(after)
    unit, totals_s, phases = _times(first, second)
    both = [_settings(folder) for folder in folders]
    settings = _changes(*both) if all(both) else []
    environment = _changes(*(comparable(read_environment(folder)) for folder in folders))
    causes = [[finding.id for finding in explanation.findings] for explanation in (first, second)]
    aps = _last_ap(folders[0]), _last_ap(folders[1])
    comparison = Comparison(
        before=first.run,
        after=second.run,
        statement=[],
        unit=unit,
        total_s=totals_s,
        phases=phases,
        img_per_s=(first.img_per_s, second.img_per_s),
        ap=aps,
        settings=settings,
        environment=environment,
        removed_causes=[cause for cause in causes[0] if cause not in causes[1]],
        added_causes=[cause for cause in causes[1] if cause not in causes[0]],
        states=(first.state, second.state),
        costs=(
            exact_cost(first.device_s, first.price_per_device_hour),
            exact_cost(second.device_s, second.price_per_device_hour),
        ),
    )
    statement = _statement(comparison, first, second)
    if bool(both[0]) != bool(both[1]):
        statement.append(f"The {'second' if both[0] else 'first'} has no settings; they are not compared.")
    return msgspec.structs.replace(comparison, statement=statement)


def _times(
    first: RunExplanation, second: RunExplanation
) -> tuple[str, tuple[float | None, float | None], list[PhaseChange]]:
    """(unit, total time per unit, phases per unit)."""
    batches = [
        explanation.num_images / _executed_steps(explanation)
        if _executed_steps(explanation) and explanation.num_images
        else None
        for explanation in (first, second)
    ]
    known = [size for size in batches if size is not None]
    by_images = len(known) == 2 and abs(known[0] - known[1]) > SAME_TOLERANCE * max(known)
    units = [
        explanation.num_images / 1000 if by_images else _executed_steps(explanation) * max(1, explanation.devices)
        for explanation in (first, second)
    ]
    totals_s = tuple(
        explanation.device_s / unit if unit else None for explanation, unit in zip((first, second), units, strict=True)
    )
    changes = []
    if all(units):
        phase_rows = [{row.phase: row for row in explanation.phases} for explanation in (first, second)]
        for name in dict.fromkeys([*phase_rows[0], *phase_rows[1]]):
            rows = [by_phase.get(name) for by_phase in phase_rows]
            seconds = [row.device_s if row else 0.0 for row in rows]
            changes.append(
                PhaseChange(
                    phase=name,
                    before_s=seconds[0] / units[0],
                    after_s=seconds[1] / units[1],
                    before_fraction=rows[0].fraction if rows[0] else 0.0,
                    after_fraction=rows[1].fraction if rows[1] else 0.0,
                )
            )
    # of equal differences, `compute` last: lost time is what can be changed
    ordered = sorted(changes, key=lambda row: (-round(abs(row.after_s - row.before_s), 9), row.phase == "compute"))
    return "1,000 images" if by_images else "step", (totals_s[0], totals_s[1]), ordered


def _executed_steps(explanation: RunExplanation) -> int:
    return explanation.steps + explanation.lost_steps


def _settings(folder: Path) -> dict[str, str]:
    return {setting.name: setting.value for setting in read_settings_rows(folder)}


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[Change]:
    return [
        Change(name=name, before=before.get(name), after=after.get(name))
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]


def _last_ap(folder: Path) -> float | None:
    """AP of the last evaluation in events.jsonl."""
    last = None
    for event in records.read_lines(folder, records.EVENTS, Event):
        metrics = event.data.get("metrics") if event.kind == "evaluated" else None
        if isinstance(metrics, dict) and isinstance(metrics.get("ap"), int | float):
            last = float(metrics["ap"])
    return last


def _statement(comparison: Comparison, first: RunExplanation, second: RunExplanation) -> list[str]:
    """Sentences about the differences. Time comes first, unless it is equal."""
    sentences, unchanged = [], []
    unit, phases = comparison.unit, comparison.phases
    before_s, after_s = comparison.total_s
    if before_s and after_s:
        if abs(after_s - before_s) > SAME_TOLERANCE * before_s:
            change = after_s / before_s
            relative = f"{fmt.percentage(1 - change)} less" if change < 1 else f"{fmt.number(change)} times as much"
            sentences.append(f"The second took {relative} time per {unit}: {_seconds(before_s)} → {_seconds(after_s)}.")
        elif phases and abs(phases[0].after_s - phases[0].before_s) > SAME_TOLERANCE * before_s:
            sentences.append(f"Both took the same time per {unit}, {_seconds(before_s)}, but in different phases.")
        elif (first.device_s, first.steps) != (second.device_s, second.steps):
            tolerance = fmt.percentage(SAME_TOLERANCE)
            unchanged.append(f"Both took the same time per {unit}, within {tolerance}: {_seconds(after_s)}.")
        if sentences:
            largest = phases[0]
            change_text = f"{_seconds(largest.before_s)} → {_seconds(largest.after_s)} per {unit}"
            sentences.append(f"The largest difference is {largest.phase}: {change_text}.")
    elif before_s or after_s:
        sentences.append(f"Only the {'first' if before_s else 'second'} did a step; times cannot be compared.")
    ap_before, ap_after = comparison.ap
    if ap_before != ap_after:
        sentences.append(f"AP {fmt.metric(ap_before)} → {fmt.metric(ap_after)}.")
    if first.state != second.state:
        sentences.append(f"The first is {first.state}, the second {second.state}.")
    for label, causes in (("Removed", comparison.removed_causes), ("New", comparison.added_causes)):
        if causes:
            sentences.append(f"{label} findings: {', '.join(sorted(set(causes)))}.")
    for label, changes in (("Settings", comparison.settings), ("Machine and versions", comparison.environment)):
        if changes:
            sentences.append(f"{label}: {fmt.plural(len(changes), 'value')} changed: {_names(changes)}.")
    return [*sentences, *unchanged] or ["The records do not differ."]


def _names(changes: list[Change]) -> str:
    more = f" and {len(changes) - 5} more" if len(changes) > 5 else ""
    return ", ".join(change.name for change in changes[:5]) + more


def _seconds(seconds: float) -> str:
    return f"{fmt.number(seconds)} s"
