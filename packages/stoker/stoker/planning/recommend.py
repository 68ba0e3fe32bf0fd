"""Which machine to take: the cheapest that is done in time, or the fastest within the budget; why not the others, and
what to change if there is none.

Works on the predictions of `duration.py` only: nothing is measured or predicted here.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from stoker.planning.duration import MachinePlan
from stoker.planning.machines import THIS_MACHINE, Estimate
from stoker_watch.report import format as fmt

Certainty = Literal["no", "likely", "sure"]
CERTAINTIES: tuple[Certainty, ...] = ("no", "likely", "sure")
"""Least first. sure: a limit holds at the bad end of the band, too; likely: as expected."""


MAX_NAMED = 3
"""Machines that are named as perhaps better than the choice."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asks for. None: no limit."""

    by_s: float | None = None
    budget: float | None = None
    """US dollars."""

    def __str__(self) -> str:
        by = None if self.by_s is None else f"within {compact_duration(self.by_s)}"
        budget = None if self.budget is None else f"for at most {money(self.budget)}"
        return " ".join(filter(None, (by, budget)))


class Suitability(msgspec.Struct, frozen=True, kw_only=True):
    """Whether one machine meets the limits, and why it is or is not the choice."""

    machine: str
    """As in its row: `2 × g2-standard-8 spot`."""
    meets: Certainty
    reason: str
    """Why it is or is not the choice; a clause."""


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    choice: int | None
    """Position of the row; None: none meets the limits."""
    summary: str
    reasons: list[str]
    verdicts: list[Suitability]
    """One for each row, in their order."""
    changes: list[str]
    """What to change if none meets the limits, each with its effect."""


def recommend(rows: Sequence[MachinePlan], limits: Limits) -> Recommendation:
    possible = [row for row in rows if not row.problem and row.cost is not None]
    own = next((row for row in rows if row.machine == THIS_MACHINE and row.cost is None and not row.problem), None)
    own_is_enough = own is not None and meets(own, limits) != "no"
    likely = [row for row in possible if meets(row, limits) != "no"]
    sure = [row for row in likely if meets(row, limits) == "sure"]
    by_time = limits.by_s is None and limits.budget is not None
    choice = min(sure or likely, key=lambda row: _rank(row, by_time=by_time), default=None)
    reasons, changes = [], []
    if choice is not None:
        among = f"{fmt.plural(len(likely), 'machine')} that can train this {limits}".rstrip()
        summary = f"{choice.label}: {describe_duration(choice.duration_s)}, {describe_cost(choice.cost)}; "
        summary += f"as expected the {'fastest' if by_time else 'cheapest'} of {among}"
        reasons = _undecided(choice, likely, by_time=by_time) + _reasons(choice, limits)
        if own is not None and own_is_enough and str(limits):
            reasons.append(f"This machine meets it, too: {describe_duration(own.duration_s)}, without rent.")
    elif own is not None and own_is_enough:
        choice, reasons = own, _reasons(own, limits)
        summary = f"this machine: {describe_duration(own.duration_s)}, without rent"
    else:
        summary = f"no machine trains this {limits}".rstrip()
        changes = _changes(possible, limits)
    verdicts = [
        Suitability(
            machine=row.label,
            meets="no" if row.problem else meets(row, limits),
            reason="recommended" if row is choice else _reason(row, choice, limits),
        )
        for row in rows
    ]
    position = next((k for k, row in enumerate(rows) if row is choice), None)
    return Recommendation(choice=position, summary=summary, reasons=reasons, verdicts=verdicts, changes=changes)


def meets(row: MachinePlan, limits: Limits) -> Certainty:
    """How surely a row keeps all limits."""
    levels = (_certainty(row.duration_s, limits.by_s), _certainty(row.cost, limits.budget))
    return min(levels, key=CERTAINTIES.index)


def _certainty(value: Estimate | None, limit: float | None) -> Certainty:
    if limit is None or value is None or value.high <= limit:
        return "sure"
    return "likely" if value.expected <= limit else "no"


def _rank(row: MachinePlan, *, by_time: bool) -> tuple[float, float]:
    cost = math.inf if row.cost is None else row.cost.expected
    return (row.duration_s.expected, cost) if by_time else (cost, row.duration_s.expected)


def _undecided(choice: MachinePlan, rows: Sequence[MachinePlan], *, by_time: bool) -> list[str]:
    """A sentence about the machines that may be better than the choice: the bands overlap."""

    def band(row: MachinePlan) -> Estimate:
        return row.duration_s if by_time or row.cost is None else row.cost

    better = [row for row in rows if row is not choice and band(row).low < band(choice).high]
    if not better:
        return []
    named = ", ".join(row.label for row in sorted(better, key=lambda row: band(row).expected)[:MAX_NAMED])
    more = f" and {len(better) - MAX_NAMED} more" if len(better) > MAX_NAMED else ""
    word = "faster" if by_time else "cheaper"
    advice = f"which may be {word}; steps measured there tell (--on this --measure)."
    return [f"Not decided: its band overlaps with {named}{more}, {advice}"]


def _reasons(row: MachinePlan, limits: Limits) -> list[str]:
    reasons = []
    for met, end, takes, value, limit, show in (
        ("In time", "the slow end of its band", "takes", row.duration_s, limits.by_s, compact_duration),
        ("Within the budget", "the dear end of its band", "costs", row.cost, limits.budget, money),
    ):
        if limit is not None and value is not None and value.high <= limit:
            reasons.append(f"{met} at {end}, too.")
        elif limit is not None and value is not None:
            reasons.append(f"{met} as expected; at {end} it {takes} {show(value.high)}.")
    reasons.append(_bottleneck(row))
    if row.gpus > 1:
        reasons.append("Training on several GPUs was tested on CPUs only (docs/devices.md).")
    if row.fits == "perhaps":
        reasons.append("The batch perhaps does not fit the memory; stoker then trains in more micro-batches.")
    if row.preemptions is not None:
        reasons.append(
            f"{row.preemptions.expected:.2g} preemptions are expected; they cost "
            f"{compact_duration(row.parts_s['rework'].expected)} of rework and "
            f"{compact_duration(row.parts_s['wait'].expected)} of waiting for another machine."
        )
    return reasons


def _bottleneck(row: MachinePlan) -> str:
    startup_s = row.parts_s["startup"].expected
    if startup_s > row.duration_s.expected / 2:
        return f"Most of the time is startup of machine and training: {compact_duration(startup_s)}."
    device = "CPU" if row.accelerator == "cpu" else "GPU"
    reading = f"reading from the {row.limited_by} limits; it needs {fmt.number(row.required_mb_per_s)} MB/s"
    limits = {
        "decoding": f"decoding limits; {math.ceil(row.required_vcpus)} vCPUs would keep it busy",
        "bucket": reading,
        "disk": reading,
        "communication": "the exchange of gradients limits",
        "compute": "its arithmetic limits",
        "memory": "its memory bandwidth limits",
        "launches": "the launch of kernels limits",
    }
    return f"The {device} computes {fmt.percentage(row.utilization.expected)} of the time: {limits[row.limited_by]}."


def _reason(row: MachinePlan, choice: MachinePlan | None, limits: Limits) -> str:
    """Why a row is not the choice."""
    if row.problem:
        return row.problem
    loader = ""
    if row.limited_by in ("decoding", "bucket", "disk"):
        trained, loaded = (fmt.number(rate.expected) for rate in (row.device_img_per_s, row.loader_img_per_s))
        loader = f"; its {row.limited_by} delivers {loaded} of the {trained} img/s that it can train on"
    if _certainty(row.duration_s, limits.by_s) == "no":
        return f"too slow{loader}"
    if _certainty(row.cost, limits.budget) == "no":
        return f"over the budget{loader}"
    if row.cost is None:
        return "yours already: no rent known" if row.machine == THIS_MACHINE else "its price is unknown"
    if choice is None or choice.cost is None:
        return loader.removeprefix("; ") or "possible"
    slower = row.duration_s.expected >= choice.duration_s.expected
    dearer = row.cost.expected >= choice.cost.expected
    if not dearer and meets(row, limits) == "likely":
        bad_end = f"{compact_duration(row.duration_s.high)} and {money(row.cost.high)}"
        return f"cheaper, but it takes up to {bad_end} at the bad end of its band{loader}"
    words = ("slower" if slower else "faster") + (" and " if slower == dearer else ", but ")
    return f"{words}{'dearer' if dearer else 'cheaper'}{loader}"


def _changes(possible: Sequence[MachinePlan], limits: Limits) -> list[str]:
    """What would make one of the rows meet the limits."""
    smaller = "a smaller --image-size or --model"
    if not possible:
        return [f"{smaller}, or --activation-checkpointing, if the memory is too small"]
    changes = []
    in_time, affordable = (
        [row for row in possible if meets(row, one) != "no"]
        for one in (Limits(by_s=limits.by_s), Limits(budget=limits.budget))
    )
    fastest = min(affordable or possible, key=lambda row: _rank(row, by_time=True))
    cheapest = min(in_time or possible, key=lambda row: _rank(row, by_time=False))
    if limits.by_s is not None and fastest.duration_s.expected > limits.by_s:
        minutes = math.ceil(fastest.duration_s.expected / 60)
        changes.append(f"--by {minutes}min: {fastest.label} is then in time, as expected")
        changes.append(f"{smaller}, fewer --epochs, or --gpus 2 4 8: {_bottleneck(fastest)}")
    if limits.budget is not None and cheapest.cost is not None and cheapest.cost.expected > limits.budget:
        cents = math.ceil(100 * cheapest.cost.expected)
        changes.append(f"--budget {cents / 100:.2f}: enough for {cheapest.label}, as expected")
        changes.append("--spot: spot machines cost 60 to 91 % less (GCP's range), with preemptions")
    return changes


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
