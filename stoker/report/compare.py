"""`stoker why A --compare B`: what changed from one run to another, as data: settings, machine, time, findings, AP.

`compare` reads both as `stoker why` does; `compare_terminal.py` prints it. Which change caused which is not said: two
runs prove no cause. The statement names the largest difference first."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stoker.report import format as fmt
from stoker.report.explain import RunExplanation, explain_run, open_records, read_environment
from stoker.report.run_report import read_settings_rows
from stoker.runs import records
from stoker.runs.schemas import Event

SAME_TOLERANCE = 0.01
"""Difference of a time, share of the whole, below which it is called the same. Our judgment: repeated runs differ by
more than this, so what is below says nothing."""
NOT_COMPARED = frozenset({"argv", "cwd"})
PER_RUN_VARIABLES = frozenset({"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "SLURM_JOB_ID"})
"""Variables that are others in every run."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Something that differs. None: it is not recorded there."""

    name: str
    before: str | None
    after: str | None


class PhaseChange(msgspec.Struct, frozen=True, kw_only=True):
    """A phase in both runs, in seconds per `Comparison.per`, and as share of all device time."""

    phase: str
    before_s: float
    after_s: float
    before_fraction: float
    after_fraction: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What changed from `before` to `after`."""

    before: str
    after: str
    statement: list[str]
    """Sentences, the largest difference first."""
    unit: str
    """`step`: seconds of each device per optimizer step; `1,000 pictures`, where the batch differs: device-seconds."""
    total_s: tuple[float | None, float | None]
    """Of all phases, per the same. None: no step was done."""
    phases: list[PhaseChange]
    """The largest difference first; of runs that both did a step."""
    img_per_s: tuple[float | None, float | None]
    """Over all of the time."""
    ap: tuple[float | None, float | None]
    """Of the last evaluation."""
    settings: list[Change]
    """Where both have some: jobs of others have none."""
    environment: list[Change]
    removed_causes: list[str]
    """Causes of findings that only the first has."""
    added_causes: list[str]
    """Causes of findings that only the second has."""
    states: tuple[str, str]
    costs: tuple[float | None, float | None]
    """Money that all of it took, where a price is known."""


def compare(before: str | Path, after: str | Path, price_per_device_hour: float | None = None) -> Comparison:
    """Reads both runs. price: as for `why.gather`, for both. Raises UsageError where one is no run."""
    first, second = explain_run(before, price_per_device_hour), explain_run(after, price_per_device_hour)
    folders = open_records(before), open_records(after)
    unit, totals_s, phases = _times(first, second)
    both = [_settings(folder) for folder in folders]
    settings = _changes(*both) if all(both) else []  # of one alone, that there are none is said
    environment = _changes(*(flatten_environment(read_environment(folder)) for folder in folders))
    causes = [[finding.cause for finding in explanation.findings] for explanation in (first, second)]
    aps = _last_ap(folders[0]), _last_ap(folders[1])
    return Comparison(
        before=first.run,
        after=second.run,
        statement=_statement(first, second, unit, totals_s, phases, settings, environment, causes, aps)
        + _missing_settings_note(*both),
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
        costs=(_total_cost(first), _total_cost(second)),
    )


def _total_cost(explanation: RunExplanation) -> float | None:
    return (
        explanation.device_s * explanation.price_per_device_hour / 3600
        if explanation.price_per_device_hour > 0
        else None
    )


def _times(
    first: RunExplanation, second: RunExplanation
) -> tuple[str, tuple[float | None, float | None], list[PhaseChange]]:
    """(unit, all of the time per unit, the phases per unit)."""
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
    # of two that differ alike, the loss: it is what can be changed
    ordered = sorted(changes, key=lambda row: (-round(abs(row.after_s - row.before_s), 9), row.phase == "compute"))
    return "1,000 pictures" if by_images else "step", (totals_s[0], totals_s[1]), ordered


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


def flatten_environment(environment: Mapping[str, Any]) -> dict[str, str]:
    """environment.json as name → text, without what is another in every run: `packages.torch` → `2.15.0`."""
    flattened: dict[str, str] = {}
    for name, value in environment.items():
        if name in NOT_COMPARED or value is None:
            continue
        if name == "gpu" and isinstance(value, dict):
            flattened |= _flatten_gpu(value)
        elif isinstance(value, dict):
            inner = flatten_environment(
                {key: inner_value for key, inner_value in value.items() if key not in PER_RUN_VARIABLES}
            )
            flattened |= {f"{name}.{key}": inner_value for key, inner_value in inner.items()}
        elif name.endswith("_bytes") and isinstance(value, int):
            flattened[name] = fmt.size(value)
        else:
            flattened[name] = str(value)
    return flattened


def _flatten_gpu(gpu: Mapping[str, Any]) -> dict[str, str]:
    """Which and how many, not the single ones: another machine has other serial numbers."""
    flattened = {f"gpu.{key}": str(value) for key, value in gpu.items() if key != "gpus" and value is not None}
    gpus = gpu.get("gpus")
    if isinstance(gpus, list) and gpus:
        names = [str(entry.get("name") or "unnamed") if isinstance(entry, dict) else "unnamed" for entry in gpus]
        flattened["gpu"] = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    return flattened


def _last_ap(folder: Path) -> float | None:
    """AP of the last evaluation that the events tell."""
    last = None
    for event in records.read_lines(folder, records.EVENTS, Event):
        metrics = event.data.get("metrics") if event.kind == "evaluated" else None
        if isinstance(metrics, dict) and isinstance(metrics.get("ap"), int | float):
            last = float(metrics["ap"])
    return last


def _statement(
    first: RunExplanation,
    second: RunExplanation,
    unit: str,
    totals_s: tuple[float | None, float | None],
    phases: list[PhaseChange],
    settings: list[Change],
    environment: list[Change],
    causes: list[list[str]],
    aps: tuple[float | None, float | None],
) -> list[str]:
    """Sentences. How long it took comes first, unless it took the same."""
    sentences, unchanged = [], []
    before_s, after_s = totals_s
    if before_s and after_s:
        if abs(after_s - before_s) > SAME_TOLERANCE * before_s:
            change = after_s / before_s
            relative = f"{fmt.percentage(1 - change)} less" if change < 1 else f"{fmt.number(change)} times as much"
            sentences.append(
                f"The second took {relative} time per {unit}: {_format_seconds(before_s)} → {_format_seconds(after_s)}."
            )
        elif phases and abs(phases[0].after_s - phases[0].before_s) > SAME_TOLERANCE * before_s:
            sentences.append(f"Both took the same time per {unit}, {_format_seconds(before_s)}, spent differently.")
        elif (first.device_s, first.steps) != (second.device_s, second.steps):
            unchanged.append(
                f"Both took the same time per {unit}, within {fmt.percentage(SAME_TOLERANCE)}: {_format_seconds(after_s)}."
            )
        if sentences:
            largest = phases[0]
            sentences.append(
                f"The largest difference is {largest.phase}: {_format_seconds(largest.before_s)} → {_format_seconds(largest.after_s)} per {unit}."
            )
    elif before_s or after_s:
        sentences.append(f"Only the {'first' if before_s else 'second'} did a step, so times cannot be compared.")
    if aps[0] != aps[1]:
        sentences.append(f"AP {fmt.metric(aps[0])} → {fmt.metric(aps[1])}.")
    if first.state != second.state:
        sentences.append(f"The first is {first.state}, the second {second.state}.")
    if causes[0] != causes[1]:
        removed, added = (sorted(set(a) - set(b)) for a, b in (causes, reversed(causes)))
        finding_changes = [
            f"Findings that are {label}: {', '.join(names)}."
            for label, names in (("gone", removed), ("new", added))
            if names
        ]
        sentences += finding_changes or ["Findings are the same in another order."]
    for label, changes in (("settings", settings), ("machine and versions", environment)):
        if changes:
            sentences.append(f"Of {label}, {fmt.plural(len(changes), 'value')} changed: {_names(changes)}.")
    return [*sentences, *unchanged] or ["Nothing that is recorded differs."]


def _missing_settings_note(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """A sentence where only one of them has settings."""
    if bool(first) == bool(second):
        return []
    return [f"The {'second' if first else 'first'} has no settings of stoker's: they are not compared."]


def _names(changes: list[Change]) -> str:
    more = f" and {len(changes) - 5} more" if len(changes) > 5 else ""
    return ", ".join(change.name for change in changes[:5]) + more


def _format_seconds(seconds: float) -> str:
    return f"{fmt.number(seconds)} s"
