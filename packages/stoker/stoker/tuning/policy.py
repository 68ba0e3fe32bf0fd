"""What `stoker tune` does next, and what a measurement means: pure functions of the lines of probes.jsonl.

No files, no clock, no processes: those are in `runner.py`. So a killed tuning continues by asking again with the lines
that it wrote. A trial that pays changes the settings that the next one starts from (`Situation`).
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from stoker.tuning.levers import Changes, Facts, Lever, interval_images, values, why_unavailable
from stoker_watch.runs.schemas import Probe

LOOKS = {4: 4.857, 8: 3.128, 16: 2.694}
"""Number of pairs after which a trial is judged → quantile of Student's t, one degree of freedom less. Each interval
has 98.3 %, so that all three together hold with 95 % (Bonferroni)."""
MIN_RATIO = 1.01
"""Low end of the interval from which a change is kept. Two processes with equal settings differ by up to a percent, by
the places of their memory (an assumption)."""
MIN_EXPECTED = 0.03
"""Fraction of the time that a trial is expected to save, from which it is begun."""
GROWTH = 2.0
"""A value that did not pay is tried again once its loss is so many times as large a part of the time."""
FIRST_TRIAL_S = 25.0
"""Seconds that a trial takes, until one was measured (an assumption)."""
MIN_BUDGET_S = 90
"""Seconds for the bounds, one trial and the confirmation, with an accelerator's or a small model's steps."""
AP_SEEDS = 3
AP_QUANTILE = 4.303
"""Student's t for a 95 % interval of three pairs."""
AP_SHARE = 0.25
"""Fraction of the budget for the six trainings that measure what one change does to AP."""
MEAN_TOLERANCE = 0.01
"""Tolerance of a lever from which losses are compared as means over images, not one by one."""
MIN_GROUPS = 8
"""Groups of images whose standard error says what a mean is worth."""
LOSS_BATCHES, MEAN_BATCHES, COMPARE_S = 2, 8, 20.0
"""Batches of the largest size whose losses are compared one by one; the most that are compared as means, and
their seconds at most. In bfloat16, means of 8 groups of two images differed by up to 4 ± 6 %, of 32 by 2 ± 2 %."""
BOUNDS, CONFIRM, DONE = "bounds", "confirm", "done"


class Interval(NamedTuple):
    """Images per second after, divided by before, with its 95 % interval."""

    ratio: float
    low: float
    high: float


def measure_ratio(pairs: Sequence[tuple[float, float]]) -> Interval:
    """The geometric mean of the ratios of pairs (seconds per image before, after), by Student's t of their logarithms.
    Of more pairs than the last look, or between two, the first ones count. Raises ValueError below four."""
    count = max((look for look in LOOKS if look <= len(pairs)), default=0)
    if not count:
        raise ValueError(f"{len(pairs)} pairs are no measurement: {min(LOOKS)} at the least")
    logs = [math.log(before / after) for before, after in pairs[:count]]
    mean, half = statistics.fmean(logs), LOOKS[count] * statistics.stdev(logs) / math.sqrt(count)
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def summarize_speed(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The fields of a `Probe` about the speed before and after."""
    ratio, low, high = measure_ratio(pairs)
    before, after = (1 / statistics.median(side) for side in zip(*pairs, strict=True))
    return {"before_img_per_s": before, "after_img_per_s": after, "ratio": ratio, "ratio_low": low, "ratio_high": high}


def measure_gain(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The mean of (AP after - AP before) of three seeds, and its 95 % interval."""
    if len(pairs) != AP_SEEDS:
        raise ValueError(f"{len(pairs)} pairs, not {AP_SEEDS}")
    gains = [after - before for before, after in pairs]
    mean, half = statistics.fmean(gains), AP_QUANTILE * statistics.stdev(gains) / math.sqrt(AP_SEEDS)
    return mean, mean - half, mean + half


def judge(pairs: Sequence[tuple[float, float]]) -> Literal["more", "better", "not better"]:
    """Whether a trial needs more pairs, pays, or does not."""
    if len(pairs) not in LOOKS:
        return "more" if len(pairs) < max(LOOKS) else judge(pairs[: max(LOOKS)])
    found = measure_ratio(pairs)
    if found.low > MIN_RATIO:
        return "better"
    return "not better" if found.high < 1 + MIN_EXPECTED or len(pairs) == max(LOOKS) else "more"


def compares_means(lever: Lever) -> bool:
    """Whether the losses of a lever are compared as means: rounding to bfloat16 assigns a box to another anchor here
    and there, which changes the loss of a few images by more than that of all."""
    return lever.compare == "losses" and lever.tolerance is not None and lever.tolerance >= MEAN_TOLERANCE


def num_compared(lever: Lever, largest_batch: int, seconds_per_image: float) -> int:
    """Images whose losses are compared before updates, and again after some: a whole number of the largest batches."""
    batches = LOSS_BATCHES
    if compares_means(lever):
        batches = max(batches, min(MEAN_BATCHES, int(COMPARE_S / (2 * seconds_per_image * largest_batch))))
    return batches * largest_batch


def mean_difference(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """(mean difference of the losses of the same images, its standard error), both relative to the mean before."""
    size = max(abs(statistics.fmean(before)), 1e-6)
    apart = [(b - a) / size for a, b in zip(before, after, strict=True)]
    error = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0
    return statistics.fmean(apart), error


def why_another_training(lever: Lever, before: Sequence[float], after: Sequence[float]) -> str:
    """Empty: it is the same. before, after: of the same images, the first half before any update, finite ones only."""
    tolerance, what = lever.tolerance or 0.0, f"the {lever.compare} of the same images"
    if not before or len(before) != len(after):
        return f"another training: {what} are not finite"
    if not compares_means(lever):
        if same_training(before, after, tolerance):
            return ""
        apart = max(abs(a - b) / max(abs(a), 1e-6) for a, b in zip(before, after, strict=True))
        return f"another training: {what} differ by {apart:.2g} (allowed: {tolerance:g})"
    half = -(-len(before) // 2)
    for part in (slice(half), slice(half, None)):
        mean, error = mean_difference(before[part], after[part]) if before[part] else (0.0, 0.0)
        if error > tolerance:
            return f"{what} differ too much from each other to be compared: ± {error:.2g} (allowed: {tolerance:g})"
        if abs(mean) > tolerance + (2 * error if len(before[part]) >= MIN_GROUPS else 0.0):
            return f"another training: {what} differ by {mean:.2g} ± {error:.2g} on average (allowed: {tolerance:g})"
    return ""


def same_training(before: Sequence[float], after: Sequence[float], tolerance: float) -> bool:
    """Whether the losses of the same images are equal, relative to `before`. NaN is not."""
    return len(before) == len(after) and all(
        abs(a - b) <= tolerance * max(abs(a), 1e-6) for a, b in zip(before, after, strict=True)
    )


class Action(NamedTuple):
    kind: str
    """Name of a lever, BOUNDS, CONFIRM or DONE."""
    trial: int = 0
    changes: Changes = {}  # noqa: RUF012  # of a NamedTuple: never changed
    fraction: float = 0.0
    """Fraction of the time in the phase that the trial is to shorten."""
    reason: str = ""
    """The reason for an unavailable lever, or for the end."""


@dataclasses.dataclass(frozen=True)
class Context:
    """What does not change while a tuning goes on. settings: those that it began with, by name."""

    levers: tuple[Lever, ...]
    facts: Facts
    settings: Mapping[str, Any]
    budget_s: float

    def lever(self, name: str) -> Lever | None:
        return next((lever for lever in self.levers if lever.name == name), None)


def newest_lines(lines: Iterable[Probe], facts: Facts) -> list[Probe]:
    """The newest line of each trial on this machine and data, in the order of the trials."""
    own = (line for line in lines if line.trial and (line.machine, line.data) == (facts.machine, facts.data))
    return [line for _, line in sorted({line.trial: line for line in own}.items())]


class Situation(NamedTuple):
    settings: dict[str, Any]
    """The settings with all changes that were kept."""
    phases: dict[str, float]
    """Seconds per image by phase, with evaluations and checkpoints."""
    seconds: list[float]
    """Seconds per image of the newest windows with these settings, without evaluations and checkpoints."""
    bounds: Probe
    kept: list[Probe]
    spent_s: float
    trial_s: float
    """Expected seconds of the next trial."""
    confirm_s: float
    """Expected seconds of the confirmation: its windows are of the first settings, the longest that there are."""


def assess(trials: Sequence[Probe], context: Context) -> Situation | None:
    """What the trials have shown; None: the bounds are not measured. trials: as `newest_lines` returns them."""
    bounds = next((trial for trial in trials if trial.probe == BOUNDS and trial.state == "passed"), None)
    if bounds is None:
        return None
    kept = [trial for trial in trials if trial.kept and not is_suggestion(context.lever(trial.probe))]
    settings = dict(context.settings)
    windows, seconds = bounds.phases, [before for before, _ in bounds.pairs]
    for trial in kept:
        settings |= restore_types(trial.changes)
        if trial.phases:
            windows, seconds = trial.phases, [after for _, after in trial.pairs]
    trial_s, windows_s = FIRST_TRIAL_S, [0.0]
    for trial in trials:
        if trial.probe != BOUNDS and trial.steps and trial.pairs:
            # The next trial takes as many as this one, less where it made the windows shorter.
            trial_s = max(FIRST_TRIAL_S, trial.seconds / (max(1.0, trial.ratio) if trial.kept else 1.0))
            images = trial.steps * (trial.changes.get("batch_size") or settings["batch_size"])
            windows_s.append(images * statistics.fmean(before + after for before, after in trial.pairs))
    return Situation(
        settings,
        add_events(windows, settings, bounds, context.facts),
        seconds,
        bounds,
        kept,
        sum(trial.seconds for trial in trials),
        trial_s,
        FIRST_TRIAL_S + max(windows_s),
    )


def restore_types(changes: Changes) -> Changes:
    """Makes tuples of lists, as JSON has no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}


def add_events(
    phases: Mapping[str, float], settings: Mapping[str, Any], bounds: Probe, facts: Facts
) -> dict[str, float]:
    """The seconds per image of windows, with those of evaluations and checkpoints: one of them, over the images that
    are trained on until the next."""
    events = {
        name: bounds.bounds[name] / every
        for name in ("eval", "checkpoint")
        if (every := interval_images(settings, f"{name}_every", facts, phases)) and bounds.bounds.get(name)
    }
    return {**phases, **events}


def is_suggestion(lever: Lever | None) -> bool:
    """Whether the lever is what the data suggest, and is judged by AP alone."""
    return lever is not None and lever.loss == "ap"


def is_interval(lever: Lever) -> bool:
    """Whether the lever is judged by what evaluations or checkpoints cost per image, without a window."""
    return lever.loss in ("eval", "checkpoint")


def with_events(
    pairs: Iterable[tuple[float, float]],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    now: Situation,
    facts: Facts,
) -> list[tuple[float, float]]:
    """Windows of two settings (seconds per image) with what evaluations and checkpoints take: one of them takes the
    time that the bounds say, whatever the interval."""

    def total(seconds: float, settings: Mapping[str, Any]) -> float:
        return sum(add_events({"window": seconds}, settings, now.bounds, facts).values())

    return [(total(a, before), total(b, after)) for a, b in pairs]


def next_action(lines: Iterable[Probe], context: Context) -> Action:
    """The next trial: the one that a kill interrupted, the bounds, the value of a lever that is expected to save most,
    the confirmation; or the end, with its reason."""
    trials = newest_lines(lines, context.facts)
    for trial in trials:
        if trial.state in ("planned", "run"):
            return Action(trial.probe, trial.trial, trial.changes, trial.fraction)
    number = trials[-1].trial + 1 if trials else 1
    now = assess(trials, context)
    if now is None:
        failed = next((trial.reason for trial in trials if trial.probe == BOUNDS), None)
        return Action(BOUNDS, number) if failed is None else Action(DONE, reason=f"the first settings fail: {failed}")
    if any(trial.probe == CONFIRM for trial in trials):
        return _next_suggestion(trials, now, context, "the result was measured again")
    tried_names = {trial.probe for trial in trials}
    for lever in context.levers:
        reason = why_unavailable(lever, context.facts)
        if reason and lever.name not in tried_names:
            return Action(lever.name, number, reason=reason)
    end = Action(CONFIRM, number, _all_changes(now))
    if not now.kept:
        end = _next_suggestion(trials, now, context, "nothing pays")
    reserve_s = now.confirm_s if now.kept else 0.0
    candidates = _candidates(trials, now, context)
    has_time = now.spent_s + now.trial_s + reserve_s <= context.budget_s
    for expected, lever, changes, fraction in candidates:
        if expected >= MIN_EXPECTED and (has_time or is_interval(lever)):
            return Action(lever.name, number, changes, fraction)
    if not has_time and not now.kept and candidates and candidates[0][0] >= MIN_EXPECTED:
        return Action(DONE, reason="the budget is spent")
    return end


def _next_suggestion(trials: Sequence[Probe], now: Situation, context: Context, end: str) -> Action:
    """The next suggestion of the data to prove, after all that is about speed; else the end."""
    tried = {trial.probe for trial in trials}
    for lever in context.levers:
        if is_suggestion(lever) and lever.name not in tried and (changes := context.facts.suggestions.get(lever.name)):
            if now.spent_s + AP_SHARE * context.budget_s > context.budget_s:
                return Action(DONE, reason="the budget is spent")
            return Action(lever.name, trials[-1].trial + 1, changes)
    return Action(DONE, reason=end)


def _candidates(trials: Sequence[Probe], now: Situation, context: Context) -> list[tuple[float, Lever, Changes, float]]:
    """(fraction of the time that is expected to go, lever, changes, fraction of its loss), the largest first; of each
    lever its first value that is not tried."""
    total = sum(now.phases.values())
    tried: dict[tuple[str, bytes], float] = {}
    for trial in trials:
        tried[trial.probe, _key(trial.changes)] = math.inf if trial.state == "failed" else trial.fraction
    found = []
    for lever in context.levers:
        fraction = now.phases.get(lever.loss, 0.0) / total if total else 0.0
        if why_unavailable(lever, context.facts) or fraction <= 0:
            continue
        for changes in values(lever, now.settings, context.facts, now.phases):
            before = tried.get((lever.name, _key(changes)))
            if before is None or fraction >= GROWTH * before:
                found.append((fraction * lever.gain, lever, changes, fraction))
                break
    return sorted(found, key=lambda row: -row[0])


def _key(changes: Changes) -> bytes:
    return msgspec.json.encode(changes, order="sorted")


def _all_changes(now: Situation) -> Changes:
    return {name: value for trial in now.kept for name, value in trial.changes.items()}


def final_changes(lines: Iterable[Probe], context: Context) -> tuple[Changes, Probe | None]:
    """(the changes of the result, its confirmation). None about speed where the confirmation did not find them faster;
    those that raised AP were measured against what was confirmed."""
    trials = newest_lines(lines, context.facts)
    now = assess(trials, context)
    confirmation = next((trial for trial in trials if trial.probe == CONFIRM), None)
    changes: Changes = {}
    if now is not None and confirmation is not None and confirmation.state == "passed" and confirmation.steps:
        changes = _all_changes(now) if confirmation.ratio_low > 1 else {}
    for trial in trials:
        if trial.kept and is_suggestion(context.lever(trial.probe)):
            changes |= trial.changes
    return changes, confirmation
