"""Sums of losses and norms over steps, kept on the device and read without a wait."""

from typing import NamedTuple

import torch
from torch import Tensor

from stoker.hardware.device import Device
from stoker.hardware.xla import device_of_constants


class LossAccumulator:
    """Sums of losses over steps, kept on the device in one small tensor and read without a wait some steps later. Also
    counts consecutive skipped steps, and keeps the step at which they first reached `max_skipped_steps`; and of the
    step with the largest loss its number and the norms of its gradients."""

    def __init__(self, device: Device, *, max_skipped_steps: int) -> None:
        self._device, self._max_skipped_steps = device.torch_device, max_skipped_steps
        self._names: list[str] = []
        self._sums = torch.zeros(0)
        self._skipped_streak = torch.zeros((), device=self._device)
        self._diverged_step = torch.full((), -1, dtype=torch.int64, device=self._device)
        self._worst = torch.zeros(0)
        """What was summed at the step with the largest loss, `_worst_total`."""
        self._worst_total = torch.zeros((), device=device_of_constants(self._device)).to(self._device)
        self._worst_step = torch.full((), -1, dtype=torch.int64, device=self._device)

    def reset(self) -> None:
        """Forgets all steps."""
        self._clear()
        self._skipped_streak.zero_()
        self._diverged_step.fill_(-1)

    def add(
        self,
        losses: dict[str, Tensor],
        grad_norm: Tensor,
        found_inf: Tensor,
        step: int | Tensor,
        tensor_norms: Tensor | None = None,
    ) -> None:
        """losses: scalars of this step; they count only if the step was not skipped. All is updated in place."""
        sums = torch.stack([found_inf, *(loss.detach().float() for loss in losses.values()), grad_norm])
        if tensor_norms is not None:
            sums = torch.cat([sums, tensor_norms])
        if self._sums.shape != sums.shape:
            self._names = [*losses, "norm"]
            made_on = device_of_constants(self._device)
            self._sums, self._worst = (torch.zeros(sums.shape, device=made_on).to(self._device) for _ in range(2))
        values = sums[1:]
        values.nan_to_num_(0.0, 0.0, 0.0).mul_(1 - found_inf)
        self._sums += sums
        total = values[: len(losses)].sum()
        is_worst = total > self._worst_total
        torch.where(is_worst, sums, self._worst, out=self._worst)
        torch.maximum(self._worst_total, total, out=self._worst_total)
        self._worst_step.copy_(torch.where(is_worst, step, self._worst_step))
        self._skipped_streak.add_(1).mul_(found_inf)
        has_diverged = (self._skipped_streak >= self._max_skipped_steps) & (self._diverged_step < 0)
        self._diverged_step.copy_(torch.where(has_diverged, step, self._diverged_step))

    def skipped_streak(self) -> list[Tensor]:
        """Scalars on the device: consecutive skipped steps until now, and the step that reached the limit, or -1."""
        return [self._skipped_streak, self._diverged_step]

    def load_skipped_streak(self, streak: list[Tensor]) -> int | None:
        """Continues from host copies of `skipped_streak`. Returns the step that reached the limit, if one did."""
        self._skipped_streak.copy_(streak[0])
        self._diverged_step.copy_(streak[1])
        diverged_step = int(streak[1])
        return diverged_step if diverged_step >= 0 else None

    def take(self) -> list[Tensor]:
        """The sums since the last call, as tensors to copy to the host and pass to `read`."""
        tensors = [t.clone() for t in (self._sums, self._diverged_step, self._worst, self._worst_step)]
        self._clear()
        return tensors

    def _clear(self) -> None:
        for sums in (self._sums, self._worst, self._worst_total):
            sums.zero_()

    def read(self, tensors: list[Tensor], steps: int) -> "StepStats":
        """tensors: host copies of what `take` returned; steps: how many they cover."""
        sums, worst = tensors[0].tolist(), tensors[2].tolist()
        skipped_steps = round(sums[0]) if sums else 0
        counted_steps = steps - skipped_steps
        all_means = [value / counted_steps for value in sums[1:]] if counted_steps else []
        means = dict(zip(self._names, all_means, strict=False))
        grad_norm = means.pop("norm", None)
        has_worst = any(worst[1 : len(self._names)])
        if means:
            means["total"] = sum(means.values())
        diverged_step = int(tensors[1])
        return StepStats(
            means, grad_norm, skipped_steps, diverged_step if diverged_step >= 0 else None,
            int(tensors[3]) if has_worst else None, worst[1 + len(self._names) :], all_means[len(self._names) :],
        )  # fmt: skip


class StepStats(NamedTuple):
    """Means over the finite steps of a window; diverged_step: the step that reached the limit of skipped steps;
    worst_step: that of the largest loss; worst_norms, mean_norms: of each gradient in that step, and over the steps."""

    losses: dict[str, float]
    grad_norm: float | None
    skipped_steps: int
    diverged_step: int | None
    worst_step: int | None = None
    worst_norms: list[float] = []  # noqa: RUF012  # of a NamedTuple: never changed
    mean_norms: list[float] = []  # noqa: RUF012


NO_STATS = StepStats({}, None, 0, None)
"""The statistics of a window without a step."""
