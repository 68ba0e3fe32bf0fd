"""Whether training is stable and its learning rate suitable, from its windows: arithmetic only, windows in, alerts out.

An alert is a line on the screen and in events.jsonl, with its numbers; nothing here acts on it. `resume.py` acts when
gradients stay non-finite. `diagnosis/causes/` judges the records after the run.

All tests compare logarithms of positive numbers, so the unit of the loss does not matter, and medians, so that single
windows decide nothing. A window is the mean over the steps of about a second: one step or hundreds. So the noise of
windows differs by a factor of ten between models; it is measured, never assumed.
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
"""Windows that a spike is compared with (about a minute), and their minimum number."""
SPIKE_SIGMAS, SPIKE_RATIO = 8.0, 2.0
"""A spike is this many standard deviations of the log-loss above the median, and this many times the median. Eight,
since losses of single detection batches are far from normally distributed; twice, since long windows vary so little
that 5 % would be a spike otherwise. Heuristics."""
SPIKE_COOLDOWN_WINDOWS = 16
"""Windows without a spike after which the next one is reported."""

MEDIAN_WINDOWS = 16
"""Windows in a running median."""
LOSS_RISE_FACTOR = 1.5
"""Largest acceptable rise of the loss above its minimum: a healthy loss falls just after the warm-up."""
EARLY_FRACTION = 0.3
"""Fraction of the length in which too high a learning rate shows; later most schedules have lowered it."""
MAX_SKIPPED_FRACTION, MIN_SKIPPED_STEPS = 0.10, 10
"""Largest acceptable fraction of skipped steps, and their minimum number; as the cause `steps_skipped`."""
STALL_FRACTION, STALL_LOSS_RATIO, STALL_GRAD_NORM_RATIO = 0.2, 0.9, 3.0
"""After a fifth of the length, a loss that falls has long been below nine tenths of its initial value. If the gradient
norm is also within a factor of three of its initial value, the weights have hardly changed."""
NOISE_SIGMAS = 8.0
"""Two running medians must also differ by this many standard deviations of a median: the lowest of hundreds is itself
three or four below the mean."""


class StabilityAlert(NamedTuple):
    """kind: of the event; text: the line for a person; data: the numbers behind it."""

    kind: str
    text: str
    data: dict[str, Any]


def is_spike(loss: float, previous: Sequence[float]) -> bool:
    """Whether `loss` is far above the losses of the previous windows; all positive. False if there are too few."""
    if len(previous) < MIN_SPIKE_WINDOWS:
        return False
    baseline = median(previous)
    log_std = 1.4826 * median(
        abs(math.log(value / baseline)) for value in previous
    )  # of a normal distribution, from the median absolute deviation
    return is_far_above(loss, baseline, log_std)


def is_far_above(loss: float, baseline: float, log_std: float) -> bool:
    """Whether the loss is a spike above `baseline`; log_std: standard deviation of its logarithm between windows."""
    return loss > SPIKE_RATIO * baseline and math.log(loss / baseline) > SPIKE_SIGMAS * log_std


def estimate_log_std(values: Iterable[float]) -> float:
    """Standard deviation of the logarithm of a value from window to window, without the trend."""
    logs = [math.log(value) for value in values]
    diffs = [abs(b - a) for a, b in itertools.pairwise(logs)]
    return 1.4826 * median(diffs) / math.sqrt(2) if diffs else 0.0


class MetricHistory:
    """The running median of a positive number over MEDIAN_WINDOWS: its first value, its extremes and its newest; all
    NaN until there are so many values."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=MEDIAN_WINDOWS)
        self.first = self.lowest = self.highest = self.current = math.nan
        self.num_values = 0

    def add(self, value: float | None) -> None:
        """Ignores values that are absent or not positive."""
        if value is None or not 0 < value < math.inf:
            return
        self._recent.append(value)
        self.num_values += 1
        if self.num_values < MEDIAN_WINDOWS:
            return
        self.current = median(self._recent)
        if self.num_values == MEDIAN_WINDOWS:
            self.first = self.lowest = self.highest = self.current
        self.lowest, self.highest = min(self.current, self.lowest), max(self.current, self.highest)

    def stays_within(self, ratio: float) -> bool:
        """Whether it was always within `ratio` of its first value, which is no longer in the running median."""
        is_past_first = self.num_values >= 2 * MEDIAN_WINDOWS
        return is_past_first and ratio * self.first < self.lowest and self.highest < self.first / ratio

    def has_risen(self, factor: float) -> bool:
        """Whether it is `factor` times its minimum, and further above than noise."""
        if not self.current > factor * self.lowest:
            return False
        # The standard deviation of the median of n normal values is 1.25 times that of their mean.
        median_log_std = 1.25 * estimate_log_std(self._recent) / math.sqrt(MEDIAN_WINDOWS)
        return math.log(self.current / self.lowest) > NOISE_SIGMAS * median_log_std


class StabilityMonitor:
    """Takes the windows of a training in order. peak_lr: the peak learning rate since the last rollback.

    fp16: loss scaling finds its limit by overflowing, so a single skipped step is normal. Tests that need the initial
    loss abstain in a run that continues after its warm-up.
    """

    def __init__(self, settings: OptimSettings, *, peak_lr: float, fp16: bool = False) -> None:
        self._warmup_steps = settings.warmup_steps
        self._peak_lr = peak_lr
        self._tolerated_skips = 1 if fp16 else 0
        self._recent_losses: deque[float] = deque(maxlen=SPIKE_WINDOWS)
        self._windows_since_spike = SPIKE_COOLDOWN_WINDOWS
        self._loss_history, self._norm_history = MetricHistory(), MetricHistory()
        self._initial_loss = self._max_initial_loss = 0.0
        """Of the first window, and of the first MEDIAN_WINDOWS; 0 before them."""
        self._step_counts: deque[tuple[int, int]] = deque(maxlen=MEDIAN_WINDOWS)
        self._skipped_steps, self._next_skip_report = 0, 1
        self._saw_start: bool | None = None
        self._reported: set[str] = set()

    def update(self, window: StepWindow, progress: float) -> list[StabilityAlert]:
        """The alerts of the next window. progress: fraction of the length at its end, 0 … 1."""
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
        """Reported when their number has doubled, so that a run that keeps skipping does not fill the screen."""
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
            f"the loss jumped to {loss:.3g} at step {window.step:,}, {loss / baseline:.1f} times its median of "
            f"{baseline:.3g}; if it does not fall again: {_format_lr_flag(self._peak_lr / 3)}",
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
        loss = self._loss_history
        is_early = window.step > self._warmup_steps and progress <= EARLY_FRACTION
        if skipped >= max(MIN_SKIPPED_STEPS, MAX_SKIPPED_FRACTION * steps):
            description = f"{skipped:,} of the last {steps:,} steps were skipped"
            data |= {"skipped": skipped, "steps": steps}
        elif is_early and loss.has_risen(LOSS_RISE_FACTOR):
            description = f"the loss has risen from {loss.lowest:.3g} to {loss.current:.3g}"
            data |= {"loss_from": loss.lowest, "loss": loss.current}
        elif is_early and self._is_above_initial_loss(loss.current):
            description = f"the loss is {loss.current:.3g} and was {self._initial_loss:.3g} at the start"
            data |= {"loss_from": self._initial_loss, "loss": loss.current}
        elif self._is_stuck_after_jump(window, progress):
            description = (
                f"the loss jumped from {self._initial_loss:.3g} to {self._max_initial_loss:.3g} and is now "
                f"{loss.current:.3g}"
            )
            data |= {"loss_from": self._initial_loss, "loss_highest": self._max_initial_loss, "loss": loss.current}
        else:
            return None
        self._reported.add("lr_too_high")
        text = (
            f"{description} (step {window.step:,}): the learning rate looks too high; try "
            f"{_format_lr_flag(self._peak_lr / 3)}"
        )
        return StabilityAlert("lr_too_high", text, data)

    def _is_above_initial_loss(self, loss: float) -> bool:
        has_baseline = bool(self._saw_start) and self._loss_history.num_values >= 2 * MEDIAN_WINDOWS
        return has_baseline and is_far_above(loss, self._initial_loss, estimate_log_std(self._recent_losses))

    def _is_stuck_after_jump(self, window: StepWindow, progress: float) -> bool:
        """Whether it jumped in the first MEDIAN_WINDOWS and has not fallen since."""
        has_stalled = self._loss_history.lowest > STALL_LOSS_RATIO * self._initial_loss
        is_late = self._is_past_stall_point(window, progress)
        return has_stalled and is_late and self._is_above_initial_loss(self._max_initial_loss)

    def _is_past_stall_point(self, window: StepWindow, progress: float) -> bool:
        """Whether a loss that falls at all has fallen by now."""
        return progress >= STALL_FRACTION and window.step >= 2 * self._warmup_steps

    def _check_lr_too_low(self, window: StepWindow, progress: float) -> StabilityAlert | None:
        loss, norm = self._loss_history, self._norm_history
        if self._reported or not self._saw_start or window.lr is None:
            return None
        is_late = self._is_past_stall_point(window, progress) and window.lr >= self._peak_lr / 2
        is_gradient_unchanged = 1 / STALL_GRAD_NORM_RATIO < norm.current / norm.first < STALL_GRAD_NORM_RATIO
        # A loss that jumped means that the weights did change.
        has_jumped = is_far_above(self._max_initial_loss, loss.current, estimate_log_std(self._recent_losses))
        if has_jumped or not (is_late and loss.stays_within(STALL_LOSS_RATIO) and is_gradient_unchanged):
            return None
        self._reported.add("lr_too_low")
        text = (
            f"the loss is {loss.current:.3g} after {100 * progress:.0f} % of the length and was {loss.first:.3g} at "
            f"the start; the gradient norm is {norm.current:.3g} and was {norm.first:.3g}: the learning rate looks too "
            f"low; try {_format_lr_flag(self._peak_lr * 10)}, unless the initial weights were trained on these images"
        )
        data = {
            "at": window.step,
            "lr": window.lr,
            "loss_from": loss.first,
            "loss": loss.current,
            "norm_from": norm.first,
            "norm": norm.current,
            "suggested_lr": _round_lr(self._peak_lr * 10),
        }
        return StabilityAlert("lr_too_low", text, data)


def _round_lr(lr: float) -> float:
    return float(f"{lr:.2g}")


def _format_lr_flag(lr: float) -> str:
    return f"--lr {_round_lr(lr):g}"
