"""Makes windows of steps.jsonl from the progress in a job's output: steps since its start, mean losses, speed.

Jobs count differently: since the start of the run, or from 0 in each epoch; a line may also come twice. Here a counter
that falls, or a new epoch, continues where the previous one ended. Wall time is measured by the watcher. Its phases
come from the hook if it was loaded (`hook_reader.py`), else only from values of the job itself (torchvision's `data:`
is `input_wait`); the rest is `unattributed`."""

import dataclasses
import math

from stoker.runs.schemas import StepWindow
from stoker.watch.output import Progress

MAX_LOSSES = 100
"""Losses of a window; a job with more names prints something else."""
MAX_FIRST_STEP = 100
"""A first counter above this is of a job that was resumed: the steps before it were not watched. The TF Object
Detection API prints its first line at step 100."""


@dataclasses.dataclass(kw_only=True)
class ProgressWindows:
    """Adds up progress into windows. start_s: Unix time of the job's start; devices: GPUs that it may use, at least
    1."""

    attempt: int
    devices: int
    start_s: float
    step: int = 0
    """Steps since the start of the job's own count."""
    non_finite_loss: str | None = None
    """The first loss that was NaN or infinite."""
    _step_offset: int = 0
    _shown_step: int = 0
    _total_steps: int | None = None
    _epoch: int | None = None
    _bar: Progress | None = None
    _bar_total_steps: int | None = None
    _loss_columns: tuple[str, ...] = ()
    _window_step: int | None = None
    _losses: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    _lr: float | None = None
    _grad_norm: float | None = None
    _img_per_s: float | None = None
    _input_wait_fraction: float = 0.0
    _hook_step_offset: int | None = None

    def add(self, progress: Progress) -> None:
        if progress.is_bare_bar and progress.total_steps != self._bar_total_steps:
            self._bar = progress  # the losses that follow decide what it belongs to
            return
        if progress.loss_columns:
            self._loss_columns = progress.loss_columns
            return
        self._update_step(progress)
        self._add_losses(progress.losses)
        self._lr = self._lr if progress.lr is None else progress.lr
        self._grad_norm = self._grad_norm if progress.grad_norm is None else progress.grad_norm
        self._img_per_s = self._img_per_s if progress.img_per_s is None else progress.img_per_s
        if progress.input_wait_s is not None and progress.step_s:
            self._input_wait_fraction = min(1.0, progress.input_wait_s / progress.step_s)

    def has_new_progress(self) -> bool:
        """Whether there was progress since the last window."""
        return bool(self._losses) or (self._window_step is not None and self.step > self._window_step)

    def window(self, now_s: float, measured: StepWindow | None = None) -> StepWindow:
        """The window since the last one. measured: rank 0 from the hook, in the same time."""
        wall_s = max(0.0, now_s - self.start_s)
        previous_step = self.step if self._window_step is None else self._window_step
        steps = max(0, self.step - previous_step)
        window = measured or StepWindow(
            t=now_s, attempt=self.attempt, step=0, window_steps=0, num_images=0, wall_s=wall_s, devices=self.devices,
            phases={"unattributed": wall_s * self.devices},
        )  # fmt: skip
        window.t, window.attempt, window.wall_s, phases = now_s, self.attempt, wall_s, window.phases
        if self._input_wait_fraction and steps and "input_wait" not in phases and "unattributed" in phases:
            phases["input_wait"] = phases["unattributed"] * self._input_wait_fraction
            phases["unattributed"] -= phases["input_wait"]
        window.phases = {name: seconds for name, seconds in phases.items() if seconds > 0}
        num_images = round(self._img_per_s * wall_s) if steps and self._img_per_s else 0
        if window.step:  # the hook counts each step; the output may show every hundredth
            if self._hook_step_offset is None and self._window_step is not None:
                skipped = self.step - window.step
                self._hook_step_offset = skipped if skipped > MAX_FIRST_STEP else 0
            window.step += self._hook_step_offset or 0
            window.num_images = window.num_images or num_images
        else:
            window.step, window.window_steps, window.num_images = self.step, steps, num_images
            window.lr = None
        window.losses = {name: sum(values) / len(values) for name, values in self._losses.items()}
        window.lr = window.lr if self._lr is None else self._lr
        window.grad_norm = self._grad_norm
        self.start_s, self._window_step = now_s, self.step
        self._losses, self._grad_norm, self._img_per_s = {}, None, None
        return window

    def _update_step(self, progress: Progress) -> None:
        # a bar during a training is one of evaluation
        bar_done = self._bar_total_steps is None or self._shown_step == self._total_steps
        if progress.losses and self._bar is not None and progress.step is None and bar_done:
            # a dict with a loss after a bare bar: it is training
            progress = dataclasses.replace(progress, step=self._bar.step, total_steps=self._bar.total_steps)
            self._bar_total_steps, self._bar = progress.total_steps, None
        epoch, shown_step = progress.epoch, progress.step
        if epoch is not None and self._epoch is not None and epoch == self._epoch - 1:
            return  # a slower process of the job is still in the previous epoch
        restarts = epoch is not None and self._epoch is not None and epoch != self._epoch
        self._epoch = self._epoch if epoch is None else epoch
        if shown_step is not None and not restarts:
            # without an epoch, a counter that was full or falls far has restarted; a slower process falls by little
            restarts = (
                epoch is None
                and shown_step < self._shown_step
                and (self._shown_step == self._total_steps or shown_step * 2 < self._shown_step)
            )
        # a larger counter in a new epoch: the count continues through the epochs
        if restarts and (shown_step is None or shown_step <= self._shown_step):
            self._step_offset += max(self._shown_step, self._total_steps or 0) if self._shown_step else 0
            self._shown_step = 0
        if shown_step is None:
            return
        if self._window_step is None:
            self._window_step = 0 if shown_step <= MAX_FIRST_STEP else shown_step - 1
        self._total_steps = progress.total_steps
        self._shown_step = max(self._shown_step, shown_step)
        self.step = self._step_offset + self._shown_step

    def _add_losses(self, losses: dict[str, float]) -> None:
        if losses and len(self._loss_columns) == len(losses) and all(name.startswith("loss_") for name in losses):
            losses = dict(zip(self._loss_columns, losses.values(), strict=True))
            losses["total"] = sum(losses.values())
        for name, value in losses.items():
            if math.isfinite(value):
                if name in self._losses or len(self._losses) < MAX_LOSSES:
                    self._losses.setdefault(name, []).append(value)
            elif self.non_finite_loss is None:
                self.non_finite_loss = f"{name} is {value}"
