"""Whether a training is stable and its rate right, judged from its windows: pure arithmetic, readings in, alarms out.

Nothing here acts: an alarm is a line for the person and for events.jsonl, with its numbers. What acts when gradients
stay non-finite is `recovery.py`; how `stoker why` puts it is `diagnosis/rules.py`.

All judgments are of logarithms of positive numbers, so a loss in other units is judged alike, and all of medians, so
that single windows decide nothing. A window is one reading: the mean over the steps of about a second, one step or
hundreds. So how noisy windows are differs by a factor of ten between models, and is measured, never assumed.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

from stoker.config.settings import OptimSettings
from stoker.runs.schemas import StepWindow

BEFORE, LEAST_BEFORE = 64, 16
"""Windows against which a spike is judged: about a minute; and the fewest that make a judgment."""
SPIKE_SIGMAS, SPIKE_RATIO = 8.0, 2.0
"""A spike is this many standard deviations of the log-loss above the median, and this many times the median. Eight,
since single batches of detection are far from normal; twice, since long windows hardly vary and 5 % are no spike then.
Our judgment."""
CALM = 16
"""Windows without a spike after which the next one is news."""

GROUP = 16
"""Windows whose median is one point of a course."""
RISE = 1.5
"""Growth of the loss above its lowest point that is too much: a healthy loss falls just after the warm-up."""
NORM_RISE = 10.0
"""The same of the gradient's norm, where it is clipped too; it may grow by itself while the heads are learnt."""
FIRST_PART = 0.3
"""Share of the length in which a rate that is too high shows: later it has fallen by itself (all schedules but one)."""
SKIPPED_SHARE, SKIPPED_LEAST = 0.10, 10
"""Share of skipped steps that is too much, and the fewest such steps; as `steps_skipped` of the diagnosis."""
STALL_SHARE, STALL_FALL, STALL_NORM = 0.2, 0.9, 3.0
"""After a fifth of the length a loss that learns has long been below nine tenths of its beginning; while the gradient
is still what it was, within a factor of three, the weights have hardly moved."""
NOISE_SIGMAS = 8.0
"""Two medians of a course must also differ by this many standard deviations of a median: the lowest of hundreds is
itself three or four below what is usual."""


class Alarm(NamedTuple):
    """kind: of the event; text: the line for a person; data: the numbers behind it."""

    kind: str
    text: str
    data: dict[str, Any]


def is_spike(loss: float, before: Sequence[float]) -> bool:
    """Whether `loss` is far above the losses of the windows before; all positive. False where those are too few."""
    if len(before) < LEAST_BEFORE:
        return False
    middle = median(before)
    deviation = 1.4826 * median(abs(math.log(value / middle)) for value in before)  # a normal one's, from the MAD
    return far_above(loss, middle, deviation)


def far_above(loss: float, usual: float, deviation: float) -> bool:
    """Whether it is a spike above what is `usual`; deviation: of the logarithm, from window to window."""
    return loss > SPIKE_RATIO * usual and math.log(loss / usual) > SPIKE_SIGMAS * deviation


def noise(values: Iterable[float]) -> float:
    """Standard deviation of the logarithm of a value from window to window, whatever the trend between them."""
    logs = [math.log(value) for value in values]
    steps = [abs(b - a) for a, b in itertools.pairwise(logs)]
    return 1.4826 * median(steps) / math.sqrt(2) if steps else 0.0


class Course:
    """The running median of a positive number over GROUP windows: its first value, its extremes and its newest."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=GROUP)
        self.first: float | None = None
        self.lowest: float | None = None
        self.highest: float | None = None
        self.now: float | None = None
        """All None until there are GROUP windows."""
        self.values = 0

    def add(self, value: float | None) -> None:
        """Values that are absent or not positive say nothing."""
        if value is None or not 0 < value < math.inf:
            return
        self._last.append(value)
        self.values += 1
        if len(self._last) == GROUP:
            self.now = median(self._last)
            self.first = self.now if self.first is None else self.first
            self.lowest = self.now if self.lowest is None else min(self.now, self.lowest)
            self.highest = self.now if self.highest is None else max(self.now, self.highest)

    def stays(self, share: float) -> bool:
        """Whether it was always within `share` of its first value, which is no longer among the newest values."""
        if self.first is None or self.lowest is None or self.highest is None or self.values < 2 * GROUP:
            return False
        return share * self.first < self.lowest and self.highest < self.first / share

    def has_risen(self, factor: float) -> bool:
        """Whether it is `factor` above its lowest point, and by more than noise."""
        if self.now is None or self.lowest is None or self.now <= factor * self.lowest:
            return False
        # The median of n normal values deviates by 1.25 times as much as their mean.
        return math.log(self.now / self.lowest) > NOISE_SIGMAS * 1.25 * noise(self._last) / math.sqrt(GROUP)


class Watch:
    """Looks at the windows of a training in their order. peak: the highest rate of this stretch of it.

    fp16: loss scaling finds its limit by overflowing, so a step skipped alone is no news. What needs the beginning
    abstains in a run that is continued behind its warm-up: its first windows are not the beginning.
    """

    def __init__(self, settings: OptimSettings, *, peak: float, fp16: bool = False) -> None:
        self._warmup, self._clip, self._peak = settings.warmup, settings.clip, peak
        self._alone = 1 if fp16 else 0
        self._before: deque[float] = deque(maxlen=BEFORE)
        self._calm = CALM
        self._loss, self._norm = Course(), Course()
        self._loss_from, self._loss_highest = 0.0, 0.0  # of the first window, and of the first GROUP; 0 before them
        self._counts: deque[tuple[int, int]] = deque(maxlen=GROUP)
        self._skipped, self._say_skipped_from = 0, 1
        self._from_start: bool | None = None
        self._said: set[str] = set()

    def see(self, window: StepWindow, done: float) -> list[Alarm]:
        """What the next window of the training is news of. done: the share of the length at its end, 0 … 1."""
        if not window.steps:
            return []
        if self._from_start is None:
            self._from_start = window.step - window.steps <= self._warmup
        loss = window.losses.get("total")
        self._loss.add(loss)
        if loss is not None and 0 < loss < math.inf:
            self._loss_from = self._loss_from or loss
            if self._loss.values <= GROUP:
                self._loss_highest = max(self._loss_highest, loss)
        self._norm.add(window.grad_norm)
        self._counts.append((window.steps, window.skipped))
        found = [self._skips(window), self._spike(window, loss), self._high(window, done), self._low(window, done)]
        return [alarm for alarm in found if alarm is not None]

    def _skips(self, window: StepWindow) -> Alarm | None:
        """Said when their number has doubled, so that a run that skips on and on fills no screen."""
        self._skipped += window.skipped
        if window.skipped <= self._alone or self._skipped < self._say_skipped_from:
            return None
        self._say_skipped_from = 2 * self._skipped
        text = f"{self._skipped:,} steps skipped so far: their gradients were not finite"
        return Alarm("warning", text, {"skipped": self._skipped})

    def _spike(self, window: StepWindow, loss: float | None) -> Alarm | None:
        if loss is None or not 0 < loss < math.inf:
            return None
        before = list(self._before)
        self._before.append(loss)
        if not is_spike(loss, before):
            self._calm += 1
            return None
        news, self._calm = self._calm >= CALM, 0
        if not news:
            return None
        usual = median(before)
        return Alarm(
            "loss_spike",
            f"the loss jumped to {loss:.3g} at step {window.step:,}, {loss / usual:.1f} times the {usual:.3g} that is "
            f"usual; where it does not come back by itself: {_flag(self._peak / 3)}",
            {"at": window.step, "loss": loss, "usual": usual, "windows": len(before), "try": _tidy(self._peak / 3)},
        )

    def _high(self, window: StepWindow, done: float) -> Alarm | None:
        if "rate_too_high" in self._said:
            return None
        seen: dict[str, Any] = {"at": window.step, "rate": window.rate, "try": _tidy(self._peak / 3)}
        steps, skipped = (sum(counts) for counts in zip(*self._counts, strict=True))
        loss, norm = self._loss, self._norm
        early = window.step > self._warmup and done <= FIRST_PART
        if skipped >= max(SKIPPED_LEAST, SKIPPED_SHARE * steps):
            what = f"{skipped:,} of the last {steps:,} steps were skipped"
            seen |= {"skipped": skipped, "steps": steps}
        elif early and loss.has_risen(RISE):
            what = f"the loss has risen from {loss.lowest:.3g} to {loss.now:.3g}"
            seen |= {"loss_from": loss.lowest, "loss": loss.now}
        elif early and self._clip and norm.now is not None and norm.now > self._clip and norm.has_risen(NORM_RISE):
            what = f"the gradient has grown from {norm.lowest:.3g} to {norm.now:.3g} and is cut at {self._clip:g}"
            seen |= {"norm_from": norm.lowest, "norm": norm.now, "clip": self._clip}
        elif early and loss.now is not None and self._is_above_its_beginning(loss.now):
            what = f"the loss is {loss.now:.3g} and was {self._loss_from:.3g} at the beginning"
            seen |= {"loss_from": self._loss_from, "loss": loss.now}
        elif self._has_died(window, done):
            what = f"the loss jumped from {self._loss_from:.3g} to {self._loss_highest:.3g} and is {loss.now:.3g} now"
            seen |= {"loss_from": self._loss_from, "loss_highest": self._loss_highest, "loss": loss.now}
        else:
            return None
        self._said.add("rate_too_high")
        text = f"{what} (step {window.step:,}): the rate looks too high; {_flag(self._peak / 3)} is worth a try"
        return Alarm("rate_too_high", text, seen)

    def _is_above_its_beginning(self, loss: float) -> bool:
        known = bool(self._from_start) and self._loss.values >= 2 * GROUP
        return known and far_above(loss, self._loss_from, noise(self._before))

    def _has_died(self, window: StepWindow, done: float) -> bool:
        """Whether it jumped before there were GROUP windows, and learns nothing since: a flat course all the same."""
        lowest = self._loss.lowest
        if lowest is None or lowest <= STALL_FALL * self._loss_from or not self._is_late(window, done):
            return False
        return self._is_above_its_beginning(self._loss_highest)

    def _is_late(self, window: StepWindow, done: float) -> bool:
        """Whether a loss that learns has fallen by now."""
        return done >= STALL_SHARE and window.step >= 2 * self._warmup

    def _low(self, window: StepWindow, done: float) -> Alarm | None:
        loss, norm = self._loss, self._norm
        if self._said or not self._from_start or window.rate is None:
            return None
        if loss.now is None or loss.first is None or norm.now is None or norm.first is None:
            return None
        late = self._is_late(window, done) and window.rate >= self._peak / 2
        pushes = 1 / STALL_NORM < norm.now / norm.first < STALL_NORM
        jumped = far_above(self._loss_highest, loss.now, noise(self._before))  # so the weights did move
        if jumped or not (late and loss.stays(STALL_FALL) and pushes):
            return None
        self._said.add("rate_too_low")
        text = (
            f"the loss is {loss.now:.3g} after {100 * done:.0f} % of the length, and was {loss.first:.3g} at the "
            f"beginning; the gradient's norm is {norm.now:.3g}, then {norm.first:.3g}: the rate looks too low, "
            f"{_flag(self._peak * 10)} is worth a try, unless the weights had learnt these pictures before"
        )
        data = {"at": window.step, "rate": window.rate, "loss_from": loss.first, "loss": loss.now,
                "norm_from": norm.first, "norm": norm.now, "try": _tidy(self._peak * 10)}  # fmt: skip
        return Alarm("rate_too_low", text, data)


def _tidy(rate: float) -> float:
    return float(f"{rate:.2g}")


def _flag(rate: float) -> str:
    return f"--rate {_tidy(rate):g}"
