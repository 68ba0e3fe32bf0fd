"""`stoker why A --compare B`: what changed from one run to another, as data: settings, machine, time, findings, AP.

`compare` reads both as `stoker why` does; `compare_terminal.py` prints it. Which change caused which is not said: two
runs prove no cause. The statement names the largest difference first."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stoker.report import format as fmt
from stoker.report.explain import Why, gather, open_records, read_environment
from stoker.report.run_report import settings_of
from stoker.runs import records
from stoker.runs.schemas import Event

SAME = 0.01
"""Difference of a time, share of the whole, below which it is called the same. Our judgment: repeated runs differ by
more than this, so what is below says nothing."""
NOT_COMPARED = frozenset({"argv", "cwd"})
OF_THE_RUN = frozenset({"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "SLURM_JOB_ID"})
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
    before_share: float
    after_share: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What changed from `before` to `after`."""

    before: str
    after: str
    statement: list[str]
    """Sentences, the largest difference first."""
    per: str
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
    gone: list[str]
    """Causes of findings that only the first has."""
    new: list[str]
    """Causes of findings that only the second has."""
    states: tuple[str, str]
    prices: tuple[float | None, float | None]
    """Money that all of it took, where a price is known."""


def compare(before: str | Path, after: str | Path, price: float | None = None) -> Comparison:
    """Reads both runs. price: as for `why.gather`, for both. Raises UsageError where one is no run."""
    first, second = gather(before, price), gather(after, price)
    folders = open_records(before), open_records(after)
    per, totals_s, phases = _times(first, second)
    both = [_settings(folder) for folder in folders]
    settings = _changes(*both) if all(both) else []  # of one alone, that there are none is said
    environment = _changes(*(flat(read_environment(folder)) for folder in folders))
    causes = [[finding.cause for finding in one.findings] for one in (first, second)]
    aps = _last_ap(folders[0]), _last_ap(folders[1])
    return Comparison(
        before=first.run,
        after=second.run,
        statement=_statement(first, second, per, totals_s, phases, settings, environment, causes, aps)
        + _without_settings(*both),
        per=per,
        total_s=totals_s,
        phases=phases,
        img_per_s=(first.img_per_s, second.img_per_s),
        ap=aps,
        settings=settings,
        environment=environment,
        gone=[cause for cause in causes[0] if cause not in causes[1]],
        new=[cause for cause in causes[1] if cause not in causes[0]],
        states=(first.state, second.state),
        prices=(_paid(first), _paid(second)),
    )


def _paid(why: Why) -> float | None:
    return why.device_s * why.price / 3600 if why.price > 0 else None


def _times(first: Why, second: Why) -> tuple[str, tuple[float | None, float | None], list[PhaseChange]]:
    """(unit, all of the time per unit, the phases per unit)."""
    batches = [why.pictures / _steps(why) if _steps(why) and why.pictures else None for why in (first, second)]
    known = [size for size in batches if size is not None]
    by_pictures = len(known) == 2 and abs(known[0] - known[1]) > SAME * max(known)
    units = [why.pictures / 1000 if by_pictures else _steps(why) * max(1, why.devices) for why in (first, second)]
    whole = tuple(why.device_s / unit if unit else None for why, unit in zip((first, second), units, strict=True))
    made = []
    if all(units):
        shares = [{row.phase: row for row in why.phases} for why in (first, second)]
        for name in dict.fromkeys([*shares[0], *shares[1]]):
            rows = [one.get(name) for one in shares]
            took = [row.device_s if row else 0.0 for row in rows]
            made.append(
                PhaseChange(
                    phase=name,
                    before_s=took[0] / units[0],
                    after_s=took[1] / units[1],
                    before_share=rows[0].share if rows[0] else 0.0,
                    after_share=rows[1].share if rows[1] else 0.0,
                )
            )
    # of two that differ alike, the loss: it is what can be changed
    ordered = sorted(made, key=lambda row: (-round(abs(row.after_s - row.before_s), 9), row.phase == "compute"))
    return "1,000 pictures" if by_pictures else "step", (whole[0], whole[1]), ordered


def _steps(why: Why) -> int:
    return why.steps + why.steps_lost


def _settings(folder: Path) -> dict[str, str]:
    return {one.name: one.value for one in settings_of(folder)}


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[Change]:
    return [
        Change(name=name, before=before.get(name), after=after.get(name))
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]


def flat(environment: Mapping[str, Any]) -> dict[str, str]:
    """environment.json as name → text, without what is another in every run: `packages.torch` → `2.15.0`."""
    found: dict[str, str] = {}
    for name, value in environment.items():
        if name in NOT_COMPARED or value is None:
            continue
        if name == "gpu" and isinstance(value, dict):
            found |= _gpu(value)
        elif isinstance(value, dict):
            inner = flat({key: of for key, of in value.items() if key not in OF_THE_RUN})
            found |= {f"{name}.{key}": of for key, of in inner.items()}
        elif name.endswith("_bytes") and isinstance(value, int):
            found[name] = fmt.size(value)
        else:
            found[name] = str(value)
    return found


def _gpu(gpu: Mapping[str, Any]) -> dict[str, str]:
    """Which and how many, not the single ones: another machine has other serial numbers."""
    found = {f"gpu.{key}": str(value) for key, value in gpu.items() if key != "gpus" and value is not None}
    gpus = gpu.get("gpus")
    if isinstance(gpus, list) and gpus:
        names = [str(one.get("name") or "unnamed") if isinstance(one, dict) else "unnamed" for one in gpus]
        found["gpu"] = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    return found


def _last_ap(folder: Path) -> float | None:
    """AP of the last evaluation that the events tell."""
    last = None
    for event in records.read_lines(folder, records.EVENTS, Event):
        metrics = event.data.get("metrics") if event.kind == "evaluated" else None
        if isinstance(metrics, dict) and isinstance(metrics.get("ap"), int | float):
            last = float(metrics["ap"])
    return last


def _statement(
    first: Why,
    second: Why,
    per: str,
    totals_s: tuple[float | None, float | None],
    phases: list[PhaseChange],
    settings: list[Change],
    environment: list[Change],
    causes: list[list[str]],
    aps: tuple[float | None, float | None],
) -> list[str]:
    """Sentences. How long it took comes first, unless it took the same."""
    timed, same = [], []
    before_s, after_s = totals_s
    if before_s and after_s:
        if abs(after_s - before_s) > SAME * before_s:
            change = after_s / before_s
            words = f"{fmt.share(1 - change)} less" if change < 1 else f"{fmt.number(change)} times as much"
            timed.append(f"The second took {words} time per {per}: {_s(before_s)} → {_s(after_s)}.")
        elif phases and abs(phases[0].after_s - phases[0].before_s) > SAME * before_s:
            timed.append(f"Both took the same time per {per}, {_s(before_s)}, spent differently.")
        elif (first.device_s, first.steps) != (second.device_s, second.steps):
            same.append(f"Both took the same time per {per}, within {fmt.share(SAME)}: {_s(after_s)}.")
        if timed:
            most = phases[0]
            timed.append(f"The largest difference is {most.phase}: {_s(most.before_s)} → {_s(most.after_s)} per {per}.")
    elif before_s or after_s:
        timed.append(f"Only the {'first' if before_s else 'second'} did a step, so times cannot be compared.")
    if aps[0] != aps[1]:
        timed.append(f"AP {fmt.metric(aps[0])} → {fmt.metric(aps[1])}.")
    if first.state != second.state:
        timed.append(f"The first is {first.state}, the second {second.state}.")
    if causes[0] != causes[1]:
        gone, new = (sorted(set(a) - set(b)) for a, b in (causes, reversed(causes)))
        said = [
            f"Findings that are {what}: {', '.join(names)}." for what, names in (("gone", gone), ("new", new)) if names
        ]
        timed += said or ["Findings are the same in another order."]
    for what, changes in (("settings", settings), ("machine and versions", environment)):
        if changes:
            timed.append(f"Of {what}, {fmt.plural(len(changes), 'value')} changed: {_names(changes)}.")
    return [*timed, *same] or ["Nothing that is recorded differs."]


def _without_settings(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """A sentence where only one of them has settings."""
    if bool(first) == bool(second):
        return []
    return [f"The {'second' if first else 'first'} has no settings of stoker's: they are not compared."]


def _names(changes: list[Change]) -> str:
    more = f" and {len(changes) - 5} more" if len(changes) > 5 else ""
    return ", ".join(change.name for change in changes[:5]) + more


def _s(seconds: float) -> str:
    return f"{fmt.number(seconds)} s"
