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

SPIKE_WINDOWS, MIN_SPIKE_WINDOWS = 64, 16
"""Windows against which a spike is judged: about a minute; and the fewest that make a judgment."""
SPIKE_SIGMAS, SPIKE_RATIO = 8.0, 2.0
"""A spike is this many standard deviations of the log-loss above the median, and this many times the median. Eight,
since single batches of detection are far from normal; twice, since long windows hardly vary and 5 % are no spike then.
Our judgment."""
SPIKE_COOLDOWN_WINDOWS = 16
"""Windows without a spike after which the next one is news."""

MEDIAN_WINDOWS = 16
"""Windows whose median is one point of a course."""
LOSS_RISE_FACTOR = 1.5
"""Growth of the loss above its lowest point that is too much: a healthy loss falls just after the warm-up."""
GRAD_NORM_RISE_FACTOR = 10.0
"""The same of the gradient's norm, where it is clipped too; it may grow by itself while the heads are learnt."""
EARLY_FRACTION = 0.3
"""Share of the length in which a rate that is too high shows: later it has fallen by itself (all schedules but one)."""
MAX_SKIPPED_FRACTION, MIN_SKIPPED_STEPS = 0.10, 10
"""Share of skipped steps that is too much, and the fewest such steps; as `steps_skipped` of the diagnosis."""
STALL_FRACTION, STALL_LOSS_RATIO, STALL_GRAD_NORM_RATIO = 0.2, 0.9, 3.0
"""After a fifth of the length a loss that learns has long been below nine tenths of its beginning; while the gradient
is still what it was, within a factor of three, the weights have hardly moved."""
NOISE_SIGMAS = 8.0
"""Two medians of a course must also differ by this many standard deviations of a median: the lowest of hundreds is
itself three or four below what is usual."""


class StabilityAlert(NamedTuple):
    """kind: of the event; text: the line for a person; data: the numbers behind it."""

    kind: str
    text: str
    data: dict[str, Any]


def is_spike(loss: float, previous: Sequence[float]) -> bool:
    """Whether `loss` is far above the losses of the windows before; all positive. False where those are too few."""
    if len(previous) < MIN_SPIKE_WINDOWS:
        return False
    baseline = median(previous)
    log_std = 1.4826 * median(abs(math.log(value / baseline)) for value in previous)  # a normal one's, from the MAD
    return is_far_above(loss, baseline, log_std)


def is_far_above(loss: float, baseline: float, log_std: float) -> bool:
    """Whether it is a spike above what is `usual`; deviation: of the logarithm, from window to window."""
    return loss > SPIKE_RATIO * baseline and math.log(loss / baseline) > SPIKE_SIGMAS * log_std


def estimate_log_std(values: Iterable[float]) -> float:
    """Standard deviation of the logarithm of a value from window to window, whatever the trend between them."""
    logs = [math.log(value) for value in values]
    diffs = [abs(b - a) for a, b in itertools.pairwise(logs)]
    return 1.4826 * median(diffs) / math.sqrt(2) if diffs else 0.0


class MetricHistory:
    """The running median of a positive number over GROUP windows: its first value, its extremes and its newest."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=MEDIAN_WINDOWS)
        self.first: float | None = None
        self.lowest: float | None = None
        self.highest: float | None = None
        self.current: float | None = None
        """All None until there are GROUP windows."""
        self.num_values = 0

    def add(self, value: float | None) -> None:
        """Values that are absent or not positive say nothing."""
        if value is None or not 0 < value < math.inf:
            return
        self._recent.append(value)
        self.num_values += 1
        if len(self._recent) == MEDIAN_WINDOWS:
            self.current = median(self._recent)
            self.first = self.current if self.first is None else self.first
            self.lowest = self.current if self.lowest is None else min(self.current, self.lowest)
            self.highest = self.current if self.highest is None else max(self.current, self.highest)

    def stays_within(self, ratio: float) -> bool:
        """Whether it was always within `share` of its first value, which is no longer among the newest values."""
        if self.first is None or self.lowest is None or self.highest is None or self.num_values < 2 * MEDIAN_WINDOWS:
            return False
        return ratio * self.first < self.lowest and self.highest < self.first / ratio

    def has_risen(self, factor: float) -> bool:
        """Whether it is `factor` above its lowest point, and by more than noise."""
        if self.current is None or self.lowest is None or self.current <= factor * self.lowest:
            return False
        # The median of n normal values deviates by 1.25 times as much as their mean.
        return math.log(self.current / self.lowest) > NOISE_SIGMAS * 1.25 * estimate_log_std(self._recent) / math.sqrt(
            MEDIAN_WINDOWS
        )


class StabilityMonitor:
    """Looks at the windows of a training in their order. peak: the highest rate of this stretch of it.

    fp16: loss scaling finds its limit by overflowing, so a step skipped alone is no news. What needs the beginning
    abstains in a run that is continued behind its warm-up: its first windows are not the beginning.
    """

    def __init__(self, settings: OptimSettings, *, peak_lr: float, fp16: bool = False) -> None:
        self._warmup_steps, self._clip_grad_norm, self._peak_lr = (
            settings.warmup_steps,
            settings.clip_grad_norm,
            peak_lr,
        )
        self._tolerated_skips = 1 if fp16 else 0
        self._recent_losses: deque[float] = deque(maxlen=SPIKE_WINDOWS)
        self._windows_since_spike = SPIKE_COOLDOWN_WINDOWS
        self._loss_history, self._norm_history = MetricHistory(), MetricHistory()
        self._initial_loss, self._max_initial_loss = (
            0.0,
            0.0,
        )  # of the first window, and of the first GROUP; 0 before them
        self._step_counts: deque[tuple[int, int]] = deque(maxlen=MEDIAN_WINDOWS)
        self._skipped_steps, self._next_skip_report = 0, 1
        self._saw_start: bool | None = None
        self._reported: set[str] = set()

    def update(self, window: StepWindow, progress: float) -> list[StabilityAlert]:
        """What the next window of the training is news of. done: the share of the length at its end, 0 … 1."""
        if not window.window_steps:
            return []
        if self._saw_start is None:
            self._saw_start = window.step - window.window_steps <= self._warmup_steps
        loss = window.losses.get("total")
        self._loss_history.add(loss)
        if loss is not None and 0 < loss < math.inf:
            self._initial_loss = self._initial_loss or loss
            if self._loss_history.num_values <= MEDIAN_WINDOWS:
                self._max_initial_loss = max(self._max_initial_loss, loss)
        self._norm_history.add(window.grad_norm)
        self._step_counts.append((window.window_steps, window.skipped_steps))
        alerts = [
            self._check_skipped_steps(window),
            self._check_spike(window, loss),
            self._check_lr_too_high(window, progress),
            self._check_lr_too_low(window, progress),
        ]
        return [alert for alert in alerts if alert is not None]

    def _check_skipped_steps(self, window: StepWindow) -> StabilityAlert | None:
        """Said when their number has doubled, so that a run that skips on and on fills no screen."""
        self._skipped_steps += window.skipped_steps
        if window.skipped_steps <= self._tolerated_skips or self._skipped_steps < self._next_skip_report:
            return None
        self._next_skip_report = 2 * self._skipped_steps
        text = f"{self._skipped_steps:,} steps skipped so far: their gradients were not finite"
        return StabilityAlert("warning", text, {"skipped": self._skipped_steps})

    def _check_spike(self, window: StepWindow, loss: float | None) -> StabilityAlert | None:
        if loss is None or not 0 < loss < math.inf:
            return None
        previous = list(self._recent_losses)
        self._recent_losses.append(loss)
        if not is_spike(loss, previous):
            self._windows_since_spike += 1
            return None
        is_new, self._windows_since_spike = self._windows_since_spike >= SPIKE_COOLDOWN_WINDOWS, 0
        if not is_new:
            return None
        baseline = median(previous)
        return StabilityAlert(
            "loss_spike",
            f"the loss jumped to {loss:.3g} at step {window.step:,}, {loss / baseline:.1f} times the {baseline:.3g} that is "
            f"usual; where it does not come back by itself: {_format_lr_flag(self._peak_lr / 3)}",
            {
                "at": window.step,
                "loss": loss,
                "baseline": baseline,
                "windows": len(previous),
                "suggested_lr": _round_lr(self._peak_lr / 3),
            },
        )

    def _check_lr_too_high(self, window: StepWindow, progress: float) -> StabilityAlert | None:
        if "lr_too_high" in self._reported:
            return None
        data: dict[str, Any] = {"at": window.step, "lr": window.lr, "suggested_lr": _round_lr(self._peak_lr / 3)}
        steps, skipped = (sum(counts) for counts in zip(*self._step_counts, strict=True))
        loss, norm = self._loss_history, self._norm_history
        is_early = window.step > self._warmup_steps and progress <= EARLY_FRACTION
        if skipped >= max(MIN_SKIPPED_STEPS, MAX_SKIPPED_FRACTION * steps):
            description = f"{skipped:,} of the last {steps:,} steps were skipped"
            data |= {"skipped": skipped, "steps": steps}
        elif is_early and loss.has_risen(LOSS_RISE_FACTOR):
            description = f"the loss has risen from {loss.lowest:.3g} to {loss.current:.3g}"
            data |= {"loss_from": loss.lowest, "loss": loss.current}
        elif (
            is_early
            and self._clip_grad_norm
            and norm.current is not None
            and norm.current > self._clip_grad_norm
            and norm.has_risen(GRAD_NORM_RISE_FACTOR)
        ):
            description = f"the gradient has grown from {norm.lowest:.3g} to {norm.current:.3g} and is cut at {self._clip_grad_norm:g}"
            data |= {"norm_from": norm.lowest, "norm": norm.current, "clip": self._clip_grad_norm}
        elif is_early and loss.current is not None and self._is_above_initial_loss(loss.current):
            description = f"the loss is {loss.current:.3g} and was {self._initial_loss:.3g} at the beginning"
            data |= {"loss_from": self._initial_loss, "loss": loss.current}
        elif self._is_stuck_after_jump(window, progress):
            description = f"the loss jumped from {self._initial_loss:.3g} to {self._max_initial_loss:.3g} and is {loss.current:.3g} now"
            data |= {"loss_from": self._initial_loss, "loss_highest": self._max_initial_loss, "loss": loss.current}
        else:
            return None
        self._reported.add("lr_too_high")
        text = f"{description} (step {window.step:,}): the rate looks too high; {_format_lr_flag(self._peak_lr / 3)} is worth a try"
        return StabilityAlert("lr_too_high", text, data)

    def _is_above_initial_loss(self, loss: float) -> bool:
        has_baseline = bool(self._saw_start) and self._loss_history.num_values >= 2 * MEDIAN_WINDOWS
        return has_baseline and is_far_above(loss, self._initial_loss, estimate_log_std(self._recent_losses))

    def _is_stuck_after_jump(self, window: StepWindow, progress: float) -> bool:
        """Whether it jumped before there were GROUP windows, and learns nothing since: a flat course all the same."""
        lowest = self._loss_history.lowest
        if (
            lowest is None
            or lowest <= STALL_LOSS_RATIO * self._initial_loss
            or not self._is_past_stall_point(window, progress)
        ):
            return False
        return self._is_above_initial_loss(self._max_initial_loss)

    def _is_past_stall_point(self, window: StepWindow, progress: float) -> bool:
        """Whether a loss that learns has fallen by now."""
        return progress >= STALL_FRACTION and window.step >= 2 * self._warmup_steps

    def _check_lr_too_low(self, window: StepWindow, progress: float) -> StabilityAlert | None:
        loss, norm = self._loss_history, self._norm_history
        if self._reported or not self._saw_start or window.lr is None:
            return None
        if loss.current is None or loss.first is None or norm.current is None or norm.first is None:
            return None
        is_late = self._is_past_stall_point(window, progress) and window.lr >= self._peak_lr / 2
        is_gradient_unchanged = 1 / STALL_GRAD_NORM_RATIO < norm.current / norm.first < STALL_GRAD_NORM_RATIO
        has_jumped = is_far_above(
            self._max_initial_loss, loss.current, estimate_log_std(self._recent_losses)
        )  # so the weights did move
        if has_jumped or not (is_late and loss.stays_within(STALL_LOSS_RATIO) and is_gradient_unchanged):
            return None
        self._reported.add("lr_too_low")
        text = (
            f"the loss is {loss.current:.3g} after {100 * progress:.0f} % of the length, and was {loss.first:.3g} at the "
            f"beginning; the gradient's norm is {norm.current:.3g}, then {norm.first:.3g}: the rate looks too low, "
            f"{_format_lr_flag(self._peak_lr * 10)} is worth a try, unless the weights had learnt these pictures before"
        )
        data = {"at": window.step, "lr": window.lr, "loss_from": loss.first, "loss": loss.current,
                "norm_from": norm.first, "norm": norm.current, "suggested_lr": _round_lr(self._peak_lr * 10)}  # fmt: skip
        return StabilityAlert("lr_too_low", text, data)


def _round_lr(lr: float) -> float:
    return float(f"{lr:.2g}")


def _format_lr_flag(lr: float) -> str:
    return f"--lr {_round_lr(lr):g}"
