"""Which machine to take: the cheapest that is done in time, or the fastest within the budget; why not the others, and
what to change if there is none.

Works on the predictions of `duration.py` only: nothing is measured or predicted here.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from stoker.planning.duration import MachinePlan
from stoker.planning.estimate import Estimate
from stoker.planning.machines import THIS_MACHINE
from stoker.report import format as fmt

Certainty = Literal["sure", "likely", "possible", "no"]
CERTAINTIES: tuple[Certainty, ...] = ("no", "possible", "likely", "sure")
"""Least first. sure: a limit holds at the bad end of the band, too; likely: as expected; possible: at the good end."""
MIN_SHORTENED = 0.2
"""A training is not proposed to be shortened to less than this fraction."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asks for. None: no limit."""

    by_s: float | None = None
    """Seconds."""
    budget: float | None = None
    """US dollars."""

    def __str__(self) -> str:
        by = None if self.by_s is None else f"within {compact_duration(self.by_s)}"
        budget = None if self.budget is None else f"for at most {money(self.budget)}"
        return " ".join(filter(None, (by, budget)))

    @property
    def are_set(self) -> bool:
        return self.by_s is not None or self.budget is not None


class Suitability(msgspec.Struct, frozen=True, kw_only=True):
    """Whether one machine meets the limits, and why it is or is not the choice."""

    machine: str
    """As in its row: `2 × g2-standard-8 spot`."""
    meets: Certainty
    reason: str
    """Why it is or is not the choice; a clause."""


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """The choice, and the reasons."""

    choice: int | None
    """Position of the row; None: none meets the limits."""
    summary: str
    reasons: list[str]
    """Sentences about the choice."""
    verdicts: list[Suitability]
    """One for each row, in their order."""
    changes: list[str]
    """What to change if none meets the limits, each with its effect."""


def recommend(
    rows: Sequence[MachinePlan], limits: Limits, *, epochs: float, asked_spot: bool = False
) -> Recommendation:
    """The recommendation among these predictions. epochs: of the training; asked_spot: whether spot machines are in."""
    possible = [k for k, row in enumerate(rows) if not row.problem and row.cost is not None]
    levels = {k: meets(rows[k], limits) for k in possible}
    choice = None
    for level in ("sure", "likely"):
        fitting = [k for k in possible if levels[k] == level or (level == "likely" and levels[k] == "sure")]
        if fitting:
            choice = min(fitting, key=lambda k: _rank(rows[k], limits))
            break
    verdicts = [
        Suitability(
            machine=row.label,
            meets="no" if row.problem else meets(row, limits),
            reason=_reason(row, None if choice is None else rows[choice], limits, is_choice=k == choice),
        )
        for k, row in enumerate(rows)
    ]
    own = next((row for row in rows if row.machine == THIS_MACHINE and row.cost is None and not row.problem), None)
    if choice is None:
        changes = _changes(rows, limits, epochs=epochs, asked_spot=asked_spot)
        if own is not None and meets(own, limits) in ("sure", "likely"):
            summary = f"this machine: {describe_duration(own.duration_s)}, without rent"
            return Recommendation(choice=rows.index(own), summary=summary, reasons=_reasons(own, limits),
                                  verdicts=verdicts, changes=[])  # fmt: skip
        asked = f" {limits}" if limits.are_set else ""
        return Recommendation(
            choice=None, summary=f"no machine trains this{asked}", reasons=[], verdicts=verdicts, changes=changes
        )
    row = rows[choice]
    criterion = "the fastest" if limits.by_s is None and limits.budget is not None else "the cheapest"
    count = sum(levels[k] in ("sure", "likely") for k in possible)
    among = f" of {fmt.plural(count, 'possible machine')}"
    if limits.are_set:
        among = f" of {fmt.plural(count, 'machine')} that can train this {limits}"
    cost = "" if row.cost is None else f", {describe_cost(row.cost)}"
    reasons = _reasons(row, limits)
    if not limits.are_set:
        reasons += _faster(rows, possible, row)
    if own is not None and limits.are_set and meets(own, limits) in ("sure", "likely"):
        reasons.append(f"This machine meets it, too: {describe_duration(own.duration_s)}, without rent.")
    return Recommendation(
        choice=choice,
        summary=f"{row.label}: {describe_duration(row.duration_s)}{cost}; {criterion}{among}",
        reasons=reasons,
        verdicts=verdicts,
        changes=[],
    )


def meets(row: MachinePlan, limits: Limits) -> Certainty:
    """How surely a row keeps all limits."""
    levels = [_certainty(row.duration_s, limits.by_s)]
    if limits.budget is not None and row.cost is not None:
        levels.append(_certainty(row.cost, limits.budget))
    return min(levels, key=CERTAINTIES.index)


def _certainty(value: Estimate, limit: float | None) -> Certainty:
    if limit is None or value.high <= limit:
        return "sure"
    if value.expected <= limit:
        return "likely"
    return "possible" if value.low <= limit else "no"


def _rank(row: MachinePlan, limits: Limits) -> tuple[float, float]:
    cost = math.inf if row.cost is None else row.cost.expected
    if limits.by_s is None and limits.budget is not None:
        return row.duration_s.expected, cost
    return cost, row.duration_s.expected


def _reasons(row: MachinePlan, limits: Limits) -> list[str]:
    reasons = []
    if limits.by_s is not None:
        reasons.append(
            "In time at the slow end of its band, too."
            if row.duration_s.high <= limits.by_s
            else f"In time as expected; at the slow end of its band it takes {compact_duration(row.duration_s.high)}."
        )
    if limits.budget is not None and row.cost is not None:
        reasons.append(
            "Within the budget at the dear end of its band, too."
            if row.cost.high <= limits.budget
            else f"Within the budget as expected; at the dear end of its band it costs {money(row.cost.high)}."
        )
    reasons.append(_bottleneck(row))
    if row.gpus > 1:
        reasons.append("Training on several GPUs was tested on CPUs only (docs/devices.md).")
    if row.fits == "perhaps":
        reasons.append("The batch perhaps does not fit the memory; stoker then trains in more micro-batches.")
    if row.preemptions is not None and row.preemptions.expected < 0.1:
        probability = fmt.percentage(1 - math.exp(-row.preemptions.expected))
        reasons.append(f"The probability of a preemption is {probability}.")
    elif row.preemptions is not None:
        reasons.append(
            f"{row.preemptions.expected:.2g} preemptions are expected; they cost "
            f"{compact_duration(row.parts_s['rework'].expected)} of rework and "
            f"{compact_duration(row.parts_s['wait'].expected)} of waiting for another machine. Checkpoints cost least "
            f"every {compact_duration(row.best_checkpoint_every_s or 0)} (--checkpoint-every; Young 1974)."
        )
    return reasons


def _bottleneck(row: MachinePlan) -> str:
    device = "CPU" if row.accelerator == "cpu" else "GPU"
    startup_s = row.parts_s["startup"].expected
    if startup_s > row.duration_s.expected / 2:
        return f"Most of the time is startup of machine and training: {compact_duration(startup_s)}."
    busy = f"The {device} computes {fmt.percentage(row.utilization.expected)} of the time"
    if row.limited_by == "decoding":
        return f"{busy}: decoding limits; {math.ceil(row.required_vcpus)} vCPUs would keep it busy."
    if row.limited_by in ("bucket", "disk"):
        return f"{busy}: reading from the {row.limited_by} limits; it needs {fmt.number(row.required_mb_per_s)} MB/s."
    if row.limited_by == "communication":
        return f"{busy}: the exchange of gradients limits."
    what = {"compute": "its arithmetic", "memory": "its memory bandwidth", "launches": "the launch of kernels"}
    return f"{busy}; {what.get(row.limited_by, row.limited_by)} limits."


def _faster(rows: Sequence[MachinePlan], possible: Iterable[int], choice: MachinePlan) -> list[str]:
    """The fastest machine, if it saves much time, with the price of an hour saved."""
    fastest = min((rows[k] for k in possible), key=lambda row: row.duration_s.expected)
    saved_s = choice.duration_s.expected - fastest.duration_s.expected
    if saved_s < 0.2 * choice.duration_s.expected or fastest.cost is None or choice.cost is None:
        return []
    extra = fastest.cost.expected - choice.cost.expected
    return [
        f"The fastest is {fastest.label}: {describe_duration(fastest.duration_s)}, {describe_cost(fastest.cost)}; "
        f"each hour saved costs {money(extra / saved_s * 3600)}."
    ]


def _reason(row: MachinePlan, choice: MachinePlan | None, limits: Limits, *, is_choice: bool) -> str:
    """Why a row is or is not the choice."""
    if is_choice:
        return "recommended"
    if row.problem:
        return row.problem
    loader = ""
    if row.limited_by in ("decoding", "bucket", "disk"):
        device = f"{fmt.number(row.device_img_per_s.expected)} img/s"
        delivered = f"{fmt.number(row.loader_img_per_s.expected)}"
        loader = f"; its {row.limited_by} delivers {delivered} of the {device} that it can train on"
    level = meets(row, limits)
    if limits.by_s is not None and _certainty(row.duration_s, limits.by_s) in ("no", "possible"):
        surely = "" if level == "possible" else ", also at the fast end of its band"
        return f"too slow{surely}{loader}"
    if limits.budget is not None and row.cost is not None and _certainty(row.cost, limits.budget) in ("no", "possible"):
        return f"over the budget{loader}"
    if row.cost is None:
        return "yours already: no rent known" if row.machine == THIS_MACHINE else "its price is unknown"
    if choice is None or choice.cost is None:
        return loader.removeprefix("; ") or "possible"
    slower = row.duration_s.expected >= choice.duration_s.expected
    dearer = row.cost.expected >= choice.cost.expected
    if level == "likely" and meets(choice, limits) == "sure" and not dearer:
        if limits.by_s is not None and row.duration_s.high > limits.by_s:
            return f"cheaper, but it takes {compact_duration(row.duration_s.high)} at the slow end of its band{loader}"
        return f"cheaper, but it costs {money(row.cost.high)} at the dear end of its band{loader}"
    words = ("slower" if slower else "faster") + (" and " if slower == dearer else ", but ")
    return f"{words}{'dearer' if dearer else 'cheaper'}{loader}"


def _changes(rows: Sequence[MachinePlan], limits: Limits, *, epochs: float, asked_spot: bool) -> list[str]:
    """What would make one of the rows meet the limits."""
    priced = [row for row in rows if row.cost is not None]
    possible = [row for row in priced if not row.problem]
    changes = []
    if not possible:
        if any(row.fits == "no" for row in rows):
            changes.append("a smaller --image-size or --model, or --activation-checkpointing: the memory is too small")
        return changes
    if limits.by_s is not None:
        affordable = [row for row in possible if _certainty(row.cost, limits.budget) in ("sure", "likely")]  # type: ignore[arg-type]
        fastest = min(affordable or possible, key=lambda row: row.duration_s.expected)
        longer = math.ceil(fastest.duration_s.expected / 60)
        if longer * 60 > limits.by_s:
            changes.append(f"--by {longer}min: {fastest.label} is then in time, as expected")
            fixed_s = fastest.parts_s["startup"].expected
            fraction = (limits.by_s - fixed_s) / max(1e-9, fastest.duration_s.expected - fixed_s)
            if MIN_SHORTENED <= fraction < 1:
                changes.append(f"--epochs {_floor(epochs * fraction)}: so many fit on {fastest.label}, as expected")
        if fastest.limited_by in ("decoding", "bucket", "disk"):
            changes.append(f"a smaller --image-size, or --cache disk: {_bottleneck(fastest)}")
        else:
            changes.append("a smaller --image-size or --model: the GPU itself is the limit")
        if all(row.gpus == 1 for row in rows):
            changes.append("--gpus 2 4 8: machines with several GPUs")
    if limits.budget is not None:
        in_time = [row for row in possible if _certainty(row.duration_s, limits.by_s) in ("sure", "likely")]
        cheapest = min(in_time or possible, key=lambda row: row.cost.expected if row.cost else math.inf)
        assert cheapest.cost is not None
        if cheapest.cost.expected > limits.budget:
            needed = math.ceil(100 * cheapest.cost.expected) / 100
            changes.append(f"--budget {needed:.2f}: enough for {cheapest.label}, as expected")
            fraction = limits.budget / cheapest.cost.expected
            if MIN_SHORTENED <= fraction < 1:
                changes.append(f"--epochs {_floor(epochs * fraction)}: so many the budget pays on {cheapest.label}")
            if not asked_spot:
                changes.append("--spot: spot machines cost 60 to 91 % less (GCP's range), with preemptions")
    return changes


def _floor(epochs: float) -> str:
    return f"{math.floor(epochs) if epochs >= 3 else math.floor(10 * epochs) / 10:g}"


# Texts


def money(value: float) -> str:
    """US dollars: $0.42, $1,240, $0.0042."""
    return f"${value:,.0f}" if value >= 99.5 else f"${fmt.cost(value)}"


def _unit(seconds: float) -> tuple[float, str]:
    for limit, unit_s, name in ((100, 1, "s"), (2 * 3600, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return unit_s, name
    return 86400, "d"


def compact_duration(seconds: float) -> str:
    """45 s, 27 min, 3.4 h, 2.1 d."""
    unit_s, name = _unit(seconds)
    return f"{_short(seconds / unit_s)} {name}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2g}"


def describe_duration(value: Estimate) -> str:
    """27 min (22–41)."""
    unit_s, name = _unit(value.expected)
    low, expected, high = (_short(v / unit_s) for v in (value.low, value.expected, value.high))
    return f"{expected} {name} ({low}–{high})"


def describe_cost(value: Estimate | None) -> str:
    """$0.42 (0.35–0.61)."""
    if value is None:
        return fmt.MISSING
    low, high = (money(v).removeprefix("$") for v in (value.low, value.high))
    return f"{money(value.expected)} ({low}–{high})"
