"""How often to save where the user did not say: from what a save costs and how often the run fails. And whether a save
fits the notice that a cloud gives.

Young's optimum: saving every √(2 C M) seconds costs least, with C the seconds that training loses per save and M the
mean time between failures (Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly 2006
refines it for C near M). The fraction of time lost is C/T for saves and T/2M for steps that a failure repeats. Two
minutes, the default, stay where the optimum would gain less than MIN_GAIN.
"""

import dataclasses
import math
import statistics
from pathlib import Path

from stoker.runs.records import EVENTS, STEPS, read_lines
from stoker.runs.schemas import Event, StepWindow

PRIOR_MTBF_S, PRIOR_FAILURES = 86_400.0, 0.1
"""A failure without notice a day, with the weight of a tenth of an observed failure. Heuristic: spot machines live for
hours and mostly give notice; Llama 3's 16,384 GPUs failed every three hours, so a GPU every five years."""
MIN_GAIN = 0.001
"""Fraction of the time."""
MIN_INTERVAL_S, MAX_INTERVAL_S = 10.0, 1800.0
GRACE_FRACTION = 0.5
"""Of the notice, for the write; the rest is for the end of a step, and for an upload."""
MIN_TIME_LIMIT_MARGIN_S = 60.0
"""As in the signal that batch scripts usually ask Slurm for."""
WRITE_FACTOR = 2.0
"""The interval is at least so many times as long as a write in the background."""
KEPT_SAVES = 5


def mean_time_between_failures_s(run: Path) -> float:
    """Estimate from the run's attempts: those that ended neither by a signal, which saves, nor at their end failed."""
    attempts: set[int] = set()
    saved_ends: set[int] = set()
    for event in read_lines(run, EVENTS, Event):
        attempts.add(event.attempt)
        if event.kind in ("preempted", "finished"):
            saved_ends.add(event.attempt)
    failures = len(attempts - saved_ends - {max(attempts, default=0)})  # the last one is running
    trained_s = sum(window.wall_s for window in read_lines(run, STEPS, StepWindow))
    return (trained_s + PRIOR_FAILURES * PRIOR_MTBF_S) / (failures + PRIOR_FAILURES)


def lost_fraction(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Fraction of the time that saves and repeated steps cost."""
    return cost_s / interval_s + interval_s / (2 * mtbf_s)


def best_interval_s(cost_s: float, write_s: float, mtbf_s: float) -> float:
    """Young's optimum within the limits. cost_s: of training, per save; write_s: of the write in the background."""
    low = max(MIN_INTERVAL_S, WRITE_FACTOR * write_s)
    return min(max(math.sqrt(2 * cost_s * mtbf_s), low), max(low, MAX_INTERVAL_S))


@dataclasses.dataclass
class SaveTimes:
    """What saves of a run took, and what follows."""

    interval_s: float | None
    """The present interval; None: the user set one, which stays."""
    mtbf_s: float
    grace_s: float | None = None
    """The shortest notice before the machine goes; None: unknown."""
    costs_s: list[float] = dataclasses.field(default_factory=list)
    longest_write_s: float = 0.0

    @property
    def time_limit_margin_s(self) -> float:
        """How long before a time limit to begin the last save."""
        return max(MIN_TIME_LIMIT_MARGIN_S, 3 * self.longest_write_s)

    def update(self, cost_s: float, write_s: float) -> list[tuple[str, str]]:
        """Takes a save into account. Returns events: ("info", a new interval and its reason), ("warning", a save takes
        too long for the notice, once)."""
        messages = []
        if self.grace_s is not None and self.longest_write_s <= GRACE_FRACTION * self.grace_s < write_s:
            text = f"a checkpoint takes {write_s:.3g} s to write; the machine gives {self.grace_s:.0f} s of notice"
            messages.append(("warning", f"{text}: a preemption may lose the steps since the last checkpoint"))
        self.longest_write_s = max(self.longest_write_s, write_s)
        if self.interval_s is not None and (reason := self._adjust(self.interval_s, cost_s, write_s)) is not None:
            messages.append(("info", reason))
        return messages

    def _adjust(self, old_s: float, cost_s: float, write_s: float) -> str | None:
        self.costs_s = [*self.costs_s, cost_s][-KEPT_SAVES:]
        cost_s = statistics.median(self.costs_s)
        best_s = best_interval_s(cost_s, write_s, self.mtbf_s)
        before, after = (lost_fraction(seconds, cost_s, self.mtbf_s) for seconds in (old_s, best_s))
        if before - after < MIN_GAIN:
            return None
        self.interval_s = best_s
        return (
            f"checkpoint-every: {old_s:.0f} s → {best_s:.0f} s: a save costs {cost_s:.2g} s of training and is written "
            f"in {write_s:.2g} s, a failure is expected every {self.mtbf_s / 3600:.2g} h (Young 1974); "
            f"{100 * before:.2g} % → {100 * after:.2g} % of the time for saves and repeated steps"
        )
