"""Makes windows of steps.jsonl out of what a job's lines say: steps since its beginning, mean losses, speed.

Jobs count differently: since the run's beginning, or anew in each epoch; each line may come twice. Here a counter that
falls, or a new epoch, begins where the one before ended. Time is the watcher's own: what the job did in it is charged
to a phase where its processes were seen from the inside (`inside.py`), else only where the job says so (torchvision's
`data:` is `input_wait`); the rest is `unattributed`.
"""

import dataclasses
import math

from stoker.runs.schemas import StepWindow
from stoker.watch.hook_reader import Seen
from stoker.watch.output import Progress

FIRST_MOST = 100
"""A first counter beyond this is of a job that continues: the steps before were not done under our eyes. The TF Object
Detection API first speaks at step 100."""


@dataclasses.dataclass(kw_only=True)
class Meter:
    """Takes progress, gives windows. start_s: Unix time of the job's beginning; devices: GPUs that it may use, at
    least 1."""

    attempt: int
    devices: int
    start_s: float
    step: int = 0
    """Steps since the beginning of the job's own count."""
    not_finite: str | None = None
    """The first loss that was NaN or infinite."""
    _base: int = 0
    _shown: int = 0
    _of: int | None = None
    _epoch: int | None = None
    _bar: Progress | None = None
    _bar_of: int | None = None
    _columns: tuple[str, ...] = ()
    _window_step: int | None = None
    _losses: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    _rate: float | None = None
    _grad_norm: float | None = None
    _img_per_s: float | None = None
    _wait_share: float = 0.0
    _ahead: int | None = None

    def add(self, progress: Progress) -> None:
        if progress.bar and progress.of != self._bar_of:
            self._bar = progress  # of what, the losses that follow say
            return
        if progress.columns:
            self._columns = progress.columns
            return
        self._count(progress)
        self._add_losses(progress.losses)
        self._rate = self._rate if progress.rate is None else progress.rate
        self._grad_norm = self._grad_norm if progress.grad_norm is None else progress.grad_norm
        self._img_per_s = self._img_per_s if progress.img_per_s is None else progress.img_per_s
        if progress.input_wait_s is not None and progress.step_s:
            self._wait_share = min(1.0, progress.input_wait_s / progress.step_s)

    def has_news(self) -> bool:
        """Whether something was said since the last window."""
        return bool(self._losses) or (self._window_step is not None and self.step > self._window_step)

    def window(self, now_s: float, seen: Seen | None = None) -> StepWindow:
        """Of the time since the one before; it begins the next. seen: rank 0 from the inside, in that time."""
        wall_s = max(0.0, now_s - self.start_s)
        before = self.step if self._window_step is None else self._window_step
        steps = max(0, self.step - before)
        devices = self.devices if seen is None else seen.devices
        phases = {"unattributed": wall_s * devices} if seen is None else dict(seen.phases)
        pictures = round(self._img_per_s * wall_s) if steps and self._img_per_s else 0
        if self._wait_share and steps and "input_wait" not in phases and (unknown_s := phases.get("unattributed")):
            phases["input_wait"] = unknown_s * self._wait_share
            phases["unattributed"] = unknown_s - phases["input_wait"]
        step, rate = self.step, self._rate
        if seen is not None and seen.step:  # it counts each step, the output perhaps every hundredth
            if self._ahead is None and self._window_step is not None:
                self._ahead = self.step - seen.step if self.step - seen.step > FIRST_MOST else 0
            step, steps = seen.step + (self._ahead or 0), seen.steps
            pictures = seen.pictures or pictures
            rate = seen.rate if rate is None else rate
        line = StepWindow(
            t=now_s, attempt=self.attempt, step=step, steps=steps, pictures=pictures, wall_s=wall_s, devices=devices,
            phases={name: seconds for name, seconds in phases.items() if seconds > 0},
            losses={name: sum(values) / len(values) for name, values in self._losses.items()},
            rate=rate, grad_norm=self._grad_norm, cpu={} if seen is None else seen.cpu,
        )  # fmt: skip
        self.start_s, self._window_step = now_s, self.step
        self._losses, self._grad_norm, self._img_per_s = {}, None, None
        return line

    def _count(self, progress: Progress) -> None:
        done = self._bar_of is None or self._shown == self._of  # a bar within a training is of an evaluation
        if progress.losses and self._bar is not None and progress.step is None and done:
            # a dict behind a bare bar: it trains
            progress = dataclasses.replace(progress, step=self._bar.step, of=self._bar.of)
            self._bar_of, self._bar = progress.of, None
        epoch, shown = progress.epoch, progress.step
        if epoch is not None and self._epoch is not None and epoch == self._epoch - 1:
            return  # a slower process of the job still speaks of the epoch before
        begins = epoch is not None and self._epoch is not None and epoch != self._epoch
        self._epoch = self._epoch if epoch is None else epoch
        if shown is not None and not begins:
            # without an epoch, a counter that was full or falls far begins anew; a slower process falls by a little
            begins = epoch is None and shown < self._shown and (self._shown == self._of or shown * 2 < self._shown)
        if begins and (shown is None or shown <= self._shown):  # else the count runs on through the epochs
            self._base += max(self._shown, self._of or 0) if self._shown else 0
            self._shown = 0
        if shown is None:
            return
        if self._window_step is None:
            self._window_step = 0 if shown <= FIRST_MOST else shown - 1
        self._of = progress.of
        self._shown = max(self._shown, shown)
        self.step = self._base + self._shown

    def _add_losses(self, losses: dict[str, float]) -> None:
        if losses and len(self._columns) == len(losses) and all(name.startswith("loss_") for name in losses):
            losses = dict(zip(self._columns, losses.values(), strict=True))
            losses["total"] = sum(losses.values())
        for name, value in losses.items():
            if math.isfinite(value):
                self._losses.setdefault(name, []).append(value)
            elif self.not_finite is None:
                self.not_finite = f"{name} is {value}"
