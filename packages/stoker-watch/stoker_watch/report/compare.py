"""`stoker why A --compare B` and `stoker compare A B`: differences in settings, machine, time, findings and AP.

`compare` reads both runs as `stoker why` does. It names no causes: two runs do not prove which change caused which."""

import math
import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

import msgspec
from rich.console import RenderableType

from stoker_watch.errors import UsageError, make_error
from stoker_watch.report import format as fmt
from stoker_watch.report.console import facts, plain_text, print_renderables, table
from stoker_watch.report.explain import PhaseTime, RunExplanation, explain_run, open_records
from stoker_watch.report.run_report import read_settings_rows
from stoker_watch.report.sizing import comparable, read_environment
from stoker_watch.runs.records import STEPS, read_lines
from stoker_watch.runs.schemas import StepWindow

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


class Comparison(msgspec.Struct, kw_only=True):
    """The differences between the runs `before` and `after`."""

    before: str
    after: str
    statement: list[str] = []
    unit: str
    total_s: tuple[float | None, float | None]
    phases: list[PhaseChange]
    img_per_s: tuple[float | None, float | None]
    ap: tuple[float | None, float | None]
    settings: list[Change]
    environment: list[Change]
    removed_causes: list[str]
    added_causes: list[str]
    states: tuple[str, str]
    speed: "SpeedRatio | None" = None


class SpeedRatio(msgspec.Struct, frozen=True, kw_only=True):
    """Images per second of the second run divided by those of the first, after their starts, with a 95 % interval; of
    jobs whose images are not counted, steps per second."""

    ratio: float
    low: float
    high: float
    blocks: tuple[int, int]
    threshold: float
    is_regression: bool
    unit: str = "images"


BLOCKS, MIN_BLOCKS = 12, 4
"""Parts of a run: neighboring windows depend on each other, long parts hardly do. Fewer are no measurement."""
T_QUANTILES = {3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 12: 2.179, 15: 2.131}
"""97.5 % of Student's t by degrees of freedom; between two, the fewer."""


def check_speed(before: str | Path, after: str | Path, threshold: float) -> SpeedRatio:
    """Whether the second run is slower. threshold: fraction of the images per second that may be lost, 0 … 1. Welch's
    t-interval of the logarithms of the images per second of BLOCKS parts of each run. Where the images of a run are not
    counted, as of many watched jobs, the steps count, of the same batch size in both. Raises UsageError."""
    if not 0 <= threshold < 1:
        raise UsageError(f"--threshold {threshold:g} is not a fraction.", choices=["0 … 1, such as 0.05"])
    folders = [open_records(run) for run in (before, after)]
    lines = [list(read_lines(folder, STEPS, StepWindow)) for folder in folders]
    unit = "images" if all(any(line.num_images for line in of_run) for of_run in lines) else "steps"
    logs = [_block_speeds(folder, of_run, unit) for folder, of_run in zip(folders, lines, strict=True)]
    means, variances = [statistics.fmean(log) for log in logs], [statistics.variance(log) / len(log) for log in logs]
    total = sum(variances)
    freedom = total**2 / sum(v**2 / (len(x) - 1) for v, x in zip(variances, logs, strict=True)) if total else 15.0
    quantile = T_QUANTILES[max(n for n in T_QUANTILES if n <= max(3, freedom + 1e-9))]
    difference, half = means[1] - means[0], quantile * math.sqrt(total)
    high = math.exp(difference + half)
    return SpeedRatio(
        ratio=math.exp(difference), low=math.exp(difference - half), high=high, blocks=(len(logs[0]), len(logs[1])),
        threshold=threshold, is_regression=high < 1 - threshold, unit=unit,
    )  # fmt: skip


def _block_speeds(run: Path, lines: Iterable[StepWindow], unit: str) -> list[float]:
    """Logarithms of images or steps per second of consecutive parts, without the start and compiling. Raises
    UsageError."""
    rows: list[tuple[float, int]] = []
    seconds = 0.0
    for line in lines:
        started_s = sum(line.phases.get(name, 0.0) for name in ("startup", "compile", "recovery")) / line.devices
        seconds += max(0.0, line.wall_s - started_s)
        done = line.num_images * line.ranks if unit == "images" else line.window_steps
        if done and seconds:  # the time of a window without any, as of an evaluation, goes to the next
            rows.append((seconds, done))
            seconds = 0.0
    count = min(BLOCKS, len(rows) // 2)
    blocks = [rows[k * len(rows) // count : (k + 1) * len(rows) // count] for k in range(count)]
    speeds = [sum(done for _, done in block) / sum(seconds for seconds, _ in block) for block in blocks]
    if not rows:
        raise make_error(UsageError, "no-speed-to-compare", run)
    if len(speeds) < MIN_BLOCKS:
        raise make_error(UsageError, "too-short-to-compare", run, found=len(rows), unit=unit, needed=2 * MIN_BLOCKS)
    return [math.log(speed) for speed in speeds]


def compare(before: str | Path, after: str | Path, price_per_device_hour: float | None = None) -> Comparison:
    """Reads both runs. price_per_device_hour: as for `explain_run`. Raises UsageError if one is not a run."""
    first, second = (explain_run(run, price_per_device_hour) for run in (before, after))
    folders = [open_records(run) for run in (before, after)]
    settings = [{row.name: row.value for row in read_settings_rows(folder)} for folder in folders]
    descriptions = [read_environment(folder) for folder in folders]
    environments = list(map(comparable, descriptions))
    causes = [[finding.id for finding in run.findings] for run in (first, second)]
    unit, units = _unit(first, second)
    comparison = Comparison(
        before=first.run,
        after=second.run,
        unit=unit,
        total_s=(first.device_s / units[0] if units[0] else None, second.device_s / units[1] if units[1] else None),
        phases=_phase_changes(first, second, units) if all(units) else [],
        img_per_s=(first.img_per_s, second.img_per_s),
        ap=(first.ap, second.ap),
        settings=_changes(*settings) if all(settings) else [],
        environment=_changes(*environments),
        removed_causes=[cause for cause in causes[0] if cause not in causes[1]],
        added_causes=[cause for cause in causes[1] if cause not in causes[0]],
        states=(first.state, second.state),
    )
    comparison.statement = list(_sentences(comparison)) or ["The records do not differ."]
    argvs = [found.get("argv") for found in descriptions]
    commands = [shlex.join(map(str, argv)) if isinstance(argv, list) else "" for argv in argvs]
    if not any(settings) and all(commands) and commands[0] != commands[1]:
        comparison.statement.append(f"The commands differ: {commands[0]} → {commands[1]}")
    if bool(settings[0]) != bool(settings[1]):
        which = "second" if settings[0] else "first"
        comparison.statement.append(f"The {which} has no settings; they are not compared.")
    return comparison


def _unit(first: RunExplanation, second: RunExplanation) -> tuple[str, tuple[float, float]]:
    """(unit of the times, how many of them each run did)."""
    steps = [run.steps + run.lost_steps for run in (first, second)]
    if all(steps) and first.num_images and second.num_images:
        batches = first.num_images / steps[0], second.num_images / steps[1]
        if abs(batches[0] - batches[1]) > SAME_TOLERANCE * max(batches):
            return "1,000 images", (first.num_images / 1000, second.num_images / 1000)
    return "step", (steps[0] * max(1, first.devices), steps[1] * max(1, second.devices))


def _phase_changes(first: RunExplanation, second: RunExplanation, units: tuple[float, float]) -> list[PhaseChange]:
    before, after = ({row.phase: row for row in run.phases} for run in (first, second))
    no_time = PhaseTime(phase="", device_s=0.0, fraction=0.0, cost=None, meaning="")
    changes = [
        PhaseChange(
            phase=name,
            before_s=old.device_s / units[0],
            after_s=new.device_s / units[1],
            before_fraction=old.fraction,
            after_fraction=new.fraction,
        )
        for name in dict.fromkeys([*before, *after])
        for old, new in [(before.get(name, no_time), after.get(name, no_time))]
    ]
    # of equal differences, `compute` last: lost time is what can be changed
    return sorted(changes, key=lambda row: (-round(abs(row.after_s - row.before_s), 9), row.phase == "compute"))


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[Change]:
    return [
        Change(name=name, before=before.get(name), after=after.get(name))
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]


def _sentences(comparison: Comparison) -> Iterator[str]:
    unit, (before_s, after_s) = comparison.unit, comparison.total_s
    if before_s and after_s:
        change, largest = after_s / before_s, comparison.phases[0]
        if abs(change - 1) > SAME_TOLERANCE:
            relative = f"{fmt.percentage(1 - change)} less" if change < 1 else f"{fmt.number(change)} times as much"
            yield f"The second took {relative} time per {unit}: {_seconds(before_s)} → {_seconds(after_s)}."
        if abs(largest.after_s - largest.before_s) > SAME_TOLERANCE * before_s:
            seconds = f"{_seconds(largest.before_s)} → {_seconds(largest.after_s)} per {unit}"
            yield f"The largest difference is {largest.phase}: {seconds}."
    elif before_s or after_s:
        yield f"Only the {'first' if before_s else 'second'} did a step; times cannot be compared."
    if comparison.ap[0] != comparison.ap[1]:
        yield f"AP {fmt.metric(comparison.ap[0])} → {fmt.metric(comparison.ap[1])}."
    if comparison.states[0] != comparison.states[1]:
        yield f"The first is {comparison.states[0]}, the second {comparison.states[1]}."
    for label, causes in (("Removed", comparison.removed_causes), ("New", comparison.added_causes)):
        if causes:
            yield f"{label} findings: {', '.join(sorted(set(causes)))}."
    for label, changes in (("Settings", comparison.settings), ("Machine and versions", comparison.environment)):
        if changes:
            names = ", ".join(change.name for change in changes[:5])
            more = f" and {len(changes) - 5} more" if len(changes) > 5 else ""
            yield f"{label}: {fmt.plural(len(changes), 'value')} changed: {names}{more}."


def _seconds(seconds: float) -> str:
    return f"{fmt.number(seconds)} s"


def print_comparison(comparison: Comparison, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints the statement, then tables of times, settings, machine and versions, then the verdict on the speed."""
    runs = facts([("first", comparison.before), ("second", comparison.after)])
    renderables: list[RenderableType] = [runs, "", *comparison.statement, *_times(comparison)]
    for title, changes in (("settings", comparison.settings), ("machine and versions", comparison.environment)):
        if changes:
            rows = [(row.name, row.before or fmt.MISSING, row.after or fmt.MISSING) for row in changes]
            renderables += ["", plain_text(title, "bold"), table("", "", "", header=False, rows=rows)]
    if (speed := comparison.speed) is not None:
        limit = 1 - speed.threshold
        is_open = not speed.is_regression and speed.low < limit
        verdict = "a regression" if speed.is_regression else "no regression shown" if is_open else "no regression"
        interval = f"95 %: {speed.low:.3f} to {speed.high:.3f}"
        texts = [f"{verdict}: {speed.ratio:.3f} times the {speed.unit} per second after the starts ({interval}; a "
                 f"regression is below {limit:g} as a whole)"]  # fmt: skip
        if speed.unit == "steps":
            texts.append("images are not counted in both runs: the batch size must be the same in both")
        if is_open:
            texts.append("the interval reaches below that: longer runs, or quieter machines, would tell")
        renderables += ["", *texts]
    print_renderables(renderables, file, width=width)


def _times(comparison: Comparison) -> Iterator[RenderableType]:
    if not comparison.phases:
        return
    rows: list[tuple[str, ...]] = []
    for row in comparison.phases:
        times = fmt.number(row.before_s), fmt.number(row.after_s), _signed(row.after_s - row.before_s)
        rows.append((row.phase, *times, fmt.percentage(row.before_fraction), fmt.percentage(row.after_fraction)))
    first, second = comparison.total_s
    if first is not None and second is not None:
        total = ("total", fmt.number(first), fmt.number(second), _signed(second - first), "100 %", "100 %")
        rows.append(total)
    rows.append(("img/s", *map(fmt.number, comparison.img_per_s), "", "", ""))
    rows.append(("AP", *map(fmt.metric, comparison.ap), "", "", ""))
    unit = "s per step" if comparison.unit == "step" else "device-seconds per 1,000 images"
    heads = ("phase", "first", "second", "change", "fraction, first", "second")
    yield ""
    yield plain_text(f"time, {unit}", "bold")
    yield table(*heads, right=range(1, 6), rows=rows)


def _signed(value: float) -> str:
    return "0" if value == 0 else f"{'+' if value > 0 else '−'}{fmt.number(abs(value))}"
