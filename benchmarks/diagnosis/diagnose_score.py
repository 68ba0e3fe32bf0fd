"""What `diagnose.py` counts: the first finding, how often it is correct, and the error of its lost time."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

NONE, NO_ANSWER = "nothing", "no answer"
Z95 = 1.96


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run. named: the first finding above info, or `nothing`; None if the run could not be made (see reason)."""

    cause: str
    strength: str
    kind: str
    run: int
    level: float
    named: str | None
    accepts: tuple[str, ...]
    reason: str = ""
    injected_s: float | None = None
    named_s: float | None = None
    exit_code: int | None = None
    others: tuple[str, ...] = ()
    """The findings that follow."""
    facts: dict[str, float] = field(default_factory=dict)
    took_s: float = 0.0

    @property
    def correct(self) -> bool:
        return self.named == NONE if self.cause == "healthy" else self.named in self.accepts

    @property
    def loss_error(self) -> float | None:
        """Relative error of the lost time: 0.1 is 10 % too much. None if one of the two is not known, or another cause
        was found."""
        if not self.correct or self.injected_s is None or self.named_s is None or self.injected_s <= 0:
            return None
        return self.named_s / self.injected_s - 1

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def wilson(right: int, count: int) -> tuple[float, float]:
    """95 % interval of a fraction (Wilson 1927); (0, 1) without samples."""
    if not count:
        return 0.0, 1.0
    share, z2 = right / count, Z95**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def fraction_correct(outcomes: Iterable[Outcome]) -> tuple[int, int]:
    """(correct, all) of the runs that could be made."""
    made = [outcome for outcome in outcomes if outcome.named is not None]
    return sum(outcome.correct for outcome in made), len(made)


def cells(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """A row for each cause and strength over all kinds of jobs; healthy jobs have a row for each kind."""
    rows = []
    for key in dict.fromkeys(_cell(o) for o in outcomes):
        of_cell = [o for o in outcomes if _cell(o) == key]
        right, count = fraction_correct(of_cell)
        wrong = Counter(f"{o.named} ({o.kind})" for o in of_cell if o.named is not None and not o.correct)
        offs = [o.loss_error for o in of_cell if o.loss_error is not None]
        reasons = sorted({o.reason for o in of_cell if o.named is None})
        row: dict[str, Any] = {"what": ", ".join(key)}
        row |= {"kinds": " ".join(dict.fromkeys(o.kind for o in of_cell))}
        row |= {"right": f"{right} of {count}" if count else None}
        row |= {"named instead": ", ".join(f"{n} × {name}" for name, n in wrong.items()) or "-"}
        injected = [o.injected_s for o in of_cell if o.injected_s is not None]
        if injected:
            row["injected s"] = statistics.median(injected)
        if offs:
            row["loss named, off by"] = statistics.median(offs)
        if reasons:
            row["n/a"] = "; ".join(reasons)
        rows.append(row)
    return rows


def _cell(outcome: Outcome) -> tuple[str, str]:
    return (outcome.cause, outcome.strength or outcome.kind)


def confusion(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """A row for each injected cause: which causes were found first, and how often."""
    rows = []
    for cause in dict.fromkeys(o.cause for o in outcomes):
        of_cause = [o for o in outcomes if o.cause == cause and o.named is not None]
        if not of_cause:
            continue
        right, count = fraction_correct(of_cause)
        low, high = wilson(right, count)
        named = Counter(str(o.named) for o in of_cause).most_common()
        rows.append({
            "what": f"injected: {cause}", "right": f"{right} of {count}", "share": right / count,
            "95 % from": low, "to": high, "named": ", ".join(f"{name} {n}" for name, n in named),
        })  # fmt: skip
    return rows
