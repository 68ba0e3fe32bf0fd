"""One optimizer step without a host wait: clipping, skipping of non-finite gradients, loss scaling, averaged weights.

Everything that a step decides (is the gradient finite? how long is it?) stays on the device as a tensor and acts there:
the fused optimizers of torch leave parameters, moments and step counts untouched where `found_inf` is 1. So the host
issues the same calls whatever the numbers are. The rate's schedule is a pure function at the end of the file.
"""

import copy
import itertools
import math
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from stoker.config.settings import OptimSettings
from stoker.hardware.device import Device
from stoker.models import Detector

Model = TypeVar("Model", bound=nn.Module)

NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)


class Stepper(Generic[Model]):
    """The optimizer of a model, its averaged copy, and what the steps since the last `Meter.take` were like.

    model: already on the device and initialised. averaged: the weights to evaluate and save; `model` itself when
    `settings.ema` is 0.
    """

    def __init__(self, model: Model, settings: OptimSettings, device: Device, *, precision: str) -> None:
        self.model = model
        self.settings = settings
        self.averaged = copy.deepcopy(model).requires_grad_(False) if settings.ema else model
        self._statistics = _flatten_norm_statistics(model)
        self._good_statistics = self._statistics.clone()
        self._averaged_statistics = _flatten_norm_statistics(self.averaged) if settings.ema else self._statistics
        self._trained: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        names = [n for n, p in model.named_parameters() if p.requires_grad]
        by_name: dict[str, Tensor] = dict(self.averaged.named_parameters())
        self._averages = [by_name[name] for name in names]
        self.fused = device.kind in FUSED_KINDS
        self._optimizer, self._rate_factors = _make_optimizer(model, settings, fused=self.fused)
        self.scale: Tensor | None = None
        self._growth: Tensor | None = None
        if precision == "fp16":
            self.scale = torch.full((), 2.0**14, device=device.torch_device)
            self._growth = torch.zeros((), dtype=torch.int32, device=device.torch_device)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of `loss` (scalar) to those of the step so far."""
        torch.autograd.backward(loss if self.scale is None else loss * self.scale)

    def step(self, rate: float, done_steps: int) -> tuple[Tensor, Tensor]:
        """Moves the weights at the rate, unless a gradient is not finite; clears the gradients.

        done_steps: optimizer steps before this one. Returns (norm, bad): float32 scalars on the device, the gradient's
        norm before clipping, and 1 where the step was skipped.
        """
        gradients = [p.grad for p in self._trained if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)).float())
        if self.scale is not None:
            norm = norm / self.scale
        bad = (~torch.isfinite(norm)).float()
        divisor = self.scale
        if self.settings.clip:
            clipping = ((norm + 1e-6) / self.settings.clip).clamp(min=1.0)
            divisor = clipping if divisor is None else clipping * divisor
        self._move(rate, bad, gradients, divisor)
        if self.scale is not None and self._growth is not None:
            torch._amp_update_scale_(self.scale, self._growth, bad, 2.0, 0.5, 2000)
        # A forward pass that overflowed has poisoned the running statistics too: back to those of the last good step.
        torch.where(bad > 0, self._good_statistics, self._statistics, out=self._good_statistics)
        self._statistics.copy_(self._good_statistics)
        if self.averaged is not self.model:
            # The average's own warm-up (TF's ExponentialMovingAverage): early weights do not weigh for long.
            decay = min(self.settings.ema, (1 + done_steps) / (10 + done_steps))
            with torch.no_grad():  # else the averages' history would be kept: all steps so far
                torch._foreach_lerp_(self._averages, self._trained, 1 - decay)
            self._averaged_statistics.copy_(self._statistics)
        self.forget()
        return norm, bad

    def forget(self) -> None:
        """Drops the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def _move(self, rate: float, bad: Tensor, gradients: list[Tensor], divisor: Tensor | None) -> None:
        """divisor: what the gradients are divided by, to clip them and to undo the scale of the loss."""
        for group, factor in zip(self._optimizer.param_groups, self._rate_factors, strict=True):
            group["lr"] = rate * factor
        if self.fused:
            # Read by the fused kernels, which so divide and skip while they move: no pass of its own for either.
            self._optimizer.grad_scale = divisor  # type: ignore[attr-defined]
            self._optimizer.found_inf = bad  # type: ignore[attr-defined]
            self._optimizer.step()
            return
        if divisor is not None:
            torch._foreach_div_(gradients, divisor)
        # No fused kernel here: the weights of a skipped step are put back; only the moments fade by one step.
        for gradient in gradients:
            gradient.copy_(torch.where(bad > 0, 0.0, gradient))
        before = [weight.detach().clone() for weight in self._trained]
        self._optimizer.step()
        with torch.no_grad():
            for weight, old in zip(self._trained, before, strict=True):
                weight.copy_(torch.where(bad > 0, old, weight))

    def state_dict(self) -> dict[str, Any]:
        """Tensors on the device and plain numbers; of the model too, since `averaged` is what weights files hold."""
        state: dict[str, Any] = {"optimizer": self._optimizer.state_dict(), "model": self.model.state_dict()}
        if self.scale is not None:
            state["scale"] = [self.scale, self._growth]
        return state

    def load_state_dict(self, state: dict[str, Any], averaged: dict[str, Tensor]) -> None:
        self.model.load_state_dict(state["model"])
        self._good_statistics.copy_(self._statistics)
        if self.averaged is not self.model:
            self.averaged.load_state_dict(averaged)
        self._optimizer.load_state_dict(state["optimizer"])
        if self.scale is not None and self._growth is not None:
            self.scale.copy_(state["scale"][0])
            self._growth.copy_(state["scale"][1])


FUSED_KINDS = frozenset({"cpu", "cuda", "mps", "xpu"})
"""Kinds of device for which torch has fused optimizers (torch.optim, `_get_fused_kernels_supported_devices`)."""


def _make_optimizer(
    model: nn.Module, settings: OptimSettings, *, fused: bool
) -> tuple[torch.optim.Optimizer, list[float]]:
    """(optimizer, factor of the rate of each of its groups).

    Biases and norms are not decayed (as in torchvision's and Detectron2's recipes for detection). The backbone's body
    has groups of its own where its rate is another one, so that one rate costs no kernel more.
    """
    body = model.body if isinstance(model, Detector) and settings.backbone_rate != 1 else None
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for place, module in model.named_modules():
        factor = settings.backbone_rate if body is not None and f"{place}.".startswith(body) else 1.0
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                decay = 0.0 if name == "bias" or isinstance(module, NORMS) else settings.weight_decay
                groups.setdefault((factor, decay), []).append(parameter)
    made = [{"params": parameters, "weight_decay": decay} for (_, decay), parameters in groups.items()]
    factors = [factor for factor, _ in groups]
    how: dict[str, Any] = {"fused": True} if fused else {"foreach": True}
    if settings.optimizer == "adamw":
        if not fused:
            how["capturable"] = True  # the count of steps stays on the device
        return torch.optim.AdamW(made, lr=0.0, betas=(settings.momentum, 0.999), **how), factors
    optimizer = torch.optim.SGD(made, lr=0.0, momentum=settings.momentum, **how)
    if settings.momentum:
        # A fused SGD whose first step is skipped would leave its buffers uninitialised.
        for parameter in itertools.chain(*groups.values()):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer, factors


def _flatten_norm_statistics(model: nn.Module) -> Tensor:
    """Moves the running statistics of all trained BatchNorms into one tensor [N], of which they become views."""
    owners = [(m, n) for m in model.modules() if isinstance(m, NORMS[0]) for n in ("running_mean", "running_var")]
    kept = [(module, name, getattr(module, name)) for module, name in owners if getattr(module, name) is not None]
    device = next(model.parameters()).device
    if not kept:
        return torch.zeros(0, device=device)
    flat = torch.cat([buffer.detach().reshape(-1) for _, _, buffer in kept])
    views = torch.split(flat, [buffer.numel() for _, _, buffer in kept])
    for (module, name, _), view in zip(kept, views, strict=True):
        module._buffers[name] = view
    return flat


class Meter:
    """Sums over steps, kept on the device in one small tensor, read without a wait some steps later.

    Also the longest streak of skipped steps, and the step at which it first reached `limit`.
    """

    def __init__(self, device: Device, *, limit: int) -> None:
        self._device = device.torch_device
        self._limit = limit
        self._names: list[str] = []
        self._sums = torch.zeros(0)
        self._streak = torch.zeros((), device=self._device)
        self._hopeless_at = torch.full((), -1, dtype=torch.int64, device=self._device)

    def add(self, losses: dict[str, Tensor], norm: Tensor, bad: Tensor, step: int) -> None:
        """losses: scalars of this step; they count only where the step was not skipped."""
        values = torch.stack([*(loss.detach().float() for loss in losses.values()), norm])
        if not self._names:
            self._names = [*losses, "norm"]
            self._sums = torch.zeros(len(self._names) + 1, device=self._device)
        good = torch.where((bad > 0) | ~torch.isfinite(values), torch.zeros_like(values), values)
        self._sums += torch.cat([good, bad[None]])
        self._streak = (self._streak + 1) * bad
        reached = (self._streak >= self._limit) & (self._hopeless_at < 0)
        self._hopeless_at = torch.where(reached, step, self._hopeless_at)

    def streak(self) -> list[Tensor]:
        """Scalars on the device: skipped steps in a row up to now, and the step that made them too many, or -1."""
        return [self._streak, self._hopeless_at]

    def go_on(self, streak: list[Tensor]) -> int | None:
        """Counts on from what `streak` gave, as host copies. Returns the step that made it too long, if one did."""
        self._streak.copy_(streak[0])
        self._hopeless_at.copy_(streak[1])
        hopeless = int(streak[1])
        return hopeless if hopeless >= 0 else None

    def take(self) -> list[Tensor]:
        """What was summed since the last take, as tensors to copy to the host and give to `read`."""
        taken = [self._sums, self._hopeless_at]
        self._sums = torch.zeros_like(self._sums)
        return taken

    def read(self, taken: list[Tensor], steps: int) -> "Reading":
        """taken: host copies of what `take` returned; steps: how many it covers."""
        sums = [float(x) for x in taken[0]]
        skipped = round(sums[-1]) if sums else 0
        counted = steps - skipped
        means = {n: s / counted for n, s in zip(self._names, sums, strict=False)} if counted else {}
        norm = means.pop("norm", None)
        if means:
            means["total"] = sum(means.values())
        hopeless = int(taken[1])
        return Reading(means, norm, skipped, hopeless if hopeless >= 0 else None)


class Reading(NamedTuple):
    """Means over the finite steps of a window; `hopeless_at`: the step whose skip made the streak too long."""

    losses: dict[str, float]
    norm: float | None
    skipped: int
    hopeless_at: int | None


NO_STEPS = Reading({}, None, 0, None)
"""The reading of a window without a step."""


def rate_at(settings: OptimSettings, step: int, progress: float) -> float:
    """The learning rate of the step after `step` steps; progress: 0 … 1, the share of the length that is done."""
    peak = settings.rate
    if step < settings.warmup:
        return peak * (0.001 + 0.999 * (step + 1) / settings.warmup)
    match settings.schedule:
        case "cosine":
            # Down to 1 % of the peak rather than 0, so that the last steps still count.
            return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
        case "step":
            # 16 and 22 of 26 epochs in torchvision's RetinaNet; 8 and 11 of 12 in Detectron2: 2/3 and 8/9.
            return peak * float(0.1 ** ((progress >= 2 / 3) + (progress >= 8 / 9)))
        case "exponential":
            return peak * float(0.01 ** min(1.0, progress))
        case "constant":
            return peak
