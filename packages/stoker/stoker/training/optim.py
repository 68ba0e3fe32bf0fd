"""One optimizer step without a host wait: clipping, skipping of non-finite gradients, loss scaling, EMA weights.

Everything that a step decides (is the gradient finite? what is its norm?) stays on the device as a tensor and acts
there: torch's fused optimizers leave parameters, moments and step counts unchanged if `found_inf` is 1. So the host
issues the same calls for any numbers. On an accelerator that holds for the learning rate, the decay of the EMA and the
number of the step too: they are tensors that `set_scalars` fills before the step, and whatever outlives a step keeps
its address. So a CUDA graph can replay the step (`make_step.py`).

Why not torch's own: `AveragedModel.update_parameters` reads its step count from the device (a host wait), and its decay
has no warm-up; `GradScaler.unscale_` and `clip_grad_norm_` pass over all gradients once more each, which the fused
optimizers do in their own pass by `grad_scale`.
"""

import copy
import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stoker.config.settings import OptimSettings
from stoker.hardware.device import Device
from stoker.hardware.xla import set_scalar
from stoker.models import Detector
from stoker.training.make_optimizer import Clipped, make_optimizer, step_by_operators
from stoker.training.muon import Muon
from stoker.training.norm_stats import copy_stats, flatten_norm_stats


class ModelDivision(Protocol):
    """How a model is divided among ranks (`fsdp.Sharding`, whose module imports torch.distributed)."""

    def shard(self, model: nn.Module) -> None: ...
    def reshard(self, model: nn.Module) -> None: ...
    def rows(self, whole: Tensor) -> Tensor: ...
    def distributed(self, rows: Tensor, like: Any) -> Tensor: ...
    def load(self, model: nn.Module, weights: dict[str, Tensor]) -> None: ...
    def gather(self, tree: Any) -> Any: ...


class OptimizerStep:
    """The optimizer of a model, and its EMA weights. model: on the device and initialized; ema_model: the weights to
    evaluate and save, `model` itself if `settings.ema_decay` is 0; sharding: divides the parameters of both among the
    ranks and moves them to the device: all numbers but the norm of the gradient are then of this rank's rows."""

    def __init__(
        self,
        model: Detector,
        settings: OptimSettings,
        device: Device,
        *,
        precision: str,
        sharding: ModelDivision | None = None,
    ) -> None:
        self.model, self.settings, self.sharding = model, settings, sharding
        self.restored: tuple[dict[str, Any], dict[str, Tensor]] | None = None
        """The whole tensors that `load_state_dict` got last, of a divided model, until they are sent to other ranks."""
        self.ema_model = copy.deepcopy(model).requires_grad_(False) if settings.ema_decay else model
        if sharding is not None:
            sharding.shard(model)
            if self.ema_model is not model:
                sharding.shard(self.ema_model)
        self.norm_stats = flatten_norm_stats(model)
        """Running statistics of all trained BatchNorms [N]."""
        self._good_norm_stats = self.norm_stats.clone()
        self._ema_norm_stats = flatten_norm_stats(self.ema_model) if settings.ema_decay else self.norm_stats
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        parts = {parameter: _own_part(parameter) for parameter in self._parameters}
        self._trainable_params: list[Tensor] = list(parts.values())
        self.names = [n for n, p in model.named_parameters() if p in parts]
        """Names of the trained parameters."""
        by_name = dict(self.ema_model.named_parameters())
        self._ema_params: list[Tensor] = [_own_part(by_name[name]) for name in self.names]
        self.is_updated = False
        """Whether weights may have changed since `set_scalars`: a step that fails then is half-applied."""
        self._optimizer, self._lr_mults = make_optimizer(model, settings, parts)
        self._muon = Muon(self._optimizer) if settings.optimizer == "muon" else None
        self.completed_steps: int | Tensor = 0
        """Optimizer steps before the next one. On an accelerator a tensor [] of int64."""
        self._ema_weight: float | Tensor = 0.0
        if not device.is_cpu:
            self.completed_steps = torch.zeros((), dtype=torch.int64, device=device.torch_device)
            self._ema_weight = torch.zeros((), device=device.torch_device)
            for group in self._optimizer.param_groups:
                group["lr"] = torch.zeros((), device=device.torch_device)
        self.loss_scale: Tensor | None = None
        self._growth_tracker: Tensor | None = None
        if precision == "fp16":
            self.loss_scale = torch.full((), 2.0**14, device=device.torch_device)
            self._growth_tracker = torch.zeros((), dtype=torch.int32, device=device.torch_device)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of `loss` (a scalar) to those of the step so far."""
        torch.autograd.backward(loss if self.loss_scale is None else loss * self.loss_scale)

    def step(self, lr: float, completed_steps: int) -> tuple[Tensor, Tensor]:
        """Does all that follows the backward pass. Returns (grad_norm, found_inf)."""
        self.set_scalars(lr, completed_steps)
        clipped = self.clip()
        self.update(clipped)
        self.update_ema()
        return clipped.grad_norm, clipped.found_inf

    def set_scalars(self, lr: float, completed_steps: int) -> None:
        """Sets what the next `update` uses. completed_steps: optimizer steps before it."""
        self.is_updated = False
        for group, factor in zip(self._optimizer.param_groups, self._lr_mults, strict=True):
            group["lr"] = _set_scalar(group["lr"], lr * factor)
        # Warm-up of the decay (TF's ExponentialMovingAverage): early weights do not count for long.
        decay = min(self.settings.ema_decay, (1 + completed_steps) / (10 + completed_steps))
        self._ema_weight = _set_scalar(self._ema_weight, 1 - decay)
        self.completed_steps = _set_scalar(self.completed_steps, completed_steps)

    def own_grad_norm(self) -> Tensor:
        """Norm of the gradients of this rank's rows, for `update`: a scalar, times the loss scale."""
        for parameter, part in zip(self._parameters, self._trainable_params, strict=True):
            if part is not parameter:
                part.grad = None if parameter.grad is None else _rows_of(parameter.grad)
        return torch.nn.utils.get_total_norm(self._gradients())

    def clip(self, grad_norm: Tensor | None = None) -> Clipped:
        """How the gradients are to be scaled. grad_norm: of all rows, times the loss scale, if ranks have a part."""
        gradients, tensor_norms = self._gradients(), None
        if grad_norm is None and gradients:  # as `get_total_norm` computes it, whose norms of the tensors are lost
            tensor_norms = torch.stack(torch._foreach_norm(gradients))
            grad_norm, tensor_norms = torch.linalg.vector_norm(tensor_norms), tensor_norms.float()
        grad_norm = (torch.nn.utils.get_total_norm(gradients) if grad_norm is None else grad_norm).float()
        if self.loss_scale is not None:
            grad_norm = grad_norm / self.loss_scale
            tensor_norms = None if tensor_norms is None else tensor_norms / self.loss_scale
        found_inf = (grad_norm < math.inf).logical_not().float()  # a norm that is NaN is not less, either
        divisor = self.loss_scale
        if self.settings.clip_grad_norm:
            clip_divisor = ((grad_norm + 1e-6) / self.settings.clip_grad_norm).clamp(min=1.0)
            divisor = clip_divisor if divisor is None else clip_divisor * divisor
        return Clipped(grad_norm, found_inf, divisor, tensor_norms)

    def update(self, clipped: Clipped) -> None:
        """Updates the weights, unless a gradient is not finite; clears the gradients."""
        self.is_updated = True
        copy_stats(self.model, self.norm_stats, into_model=False)
        if self._gradients():
            if self._muon is not None:
                self._muon.step(clipped.divisor, clipped.found_inf)
            # The fused kernels read these, so dividing and skipping need no pass of their own.
            self._optimizer.grad_scale = clipped.divisor  # type: ignore[attr-defined]
            self._optimizer.found_inf = clipped.found_inf  # type: ignore[attr-defined]
            if self._optimizer.defaults["fused"]:
                self._optimizer.step()
            else:
                step_by_operators(self._optimizer, clipped)
        if self.loss_scale is not None and self._growth_tracker is not None:
            torch._amp_update_scale_(self.loss_scale, self._growth_tracker, clipped.found_inf, 2.0, 0.5, 2000)
        # A forward pass that overflowed has spoiled the running statistics too: restore those of the last good step.
        torch.where(clipped.found_inf > 0, self._good_norm_stats, self.norm_stats, out=self._good_norm_stats)
        self.norm_stats.copy_(self._good_norm_stats)
        copy_stats(self.model, self.norm_stats, into_model=True)
        self.zero_grad()

    def update_ema(self) -> None:
        if self.ema_model is self.model:
            return
        with torch.no_grad():  # else autograd would keep the history of all steps
            if not isinstance(self._ema_weight, Tensor) and self._ema_params:
                torch._foreach_lerp_(self._ema_params, self._trainable_params, self._ema_weight)
            elif self._optimizer.defaults["fused"] and self._ema_params:
                # A step of SGD against the weights as gradients, decayed by 1, is the same in one pass.
                torch._fused_sgd_(
                    self._ema_params, self._trainable_params, [], weight_decay=1.0, momentum=0.0, lr=self._ema_weight,
                    dampening=0.0, nesterov=False, maximize=True, is_first_step=False,
                )  # fmt: skip
            else:
                for average, weight in zip(self._ema_params, self._trainable_params, strict=True):
                    average += (weight - average) * self._ema_weight
        self._ema_norm_stats.copy_(self.norm_stats)
        copy_stats(self.ema_model, self._ema_norm_stats, into_model=True)

    def discard_gradients(self) -> None:
        """Undoes what `backward` and its forward passes left since the last update, after an error in them."""
        self.zero_grad()
        self.norm_stats.copy_(self._good_norm_stats)
        copy_stats(self.model, self.norm_stats, into_model=True)

    def zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        if self.sharding is not None:
            self.model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def update_ratios(self) -> dict[str, float]:
        """Norm of what the moments now change in a step over the norm of the weights, by the name of each trained
        weight matrix or kernel (biases begin at zero); of this rank's rows. {} for SGD without momentum. Waits for the
        device."""
        changes = {} if self._muon is None else self._muon.changes()
        norms = {weight: change.norm() for weight, change in changes.items()}
        for group in self._optimizer.param_groups:
            for weight in group["params"]:
                if weight.dim() < 2 or weight in changes:
                    continue
                state = self._optimizer.state[weight]
                change = state.get("momentum_buffer")
                if "exp_avg" in state:
                    corrections = [1 - beta ** state["step"].clamp(min=1) for beta in group["betas"]]
                    change = state["exp_avg"] / corrections[0]
                    change /= (state["exp_avg_sq"] / corrections[1]).sqrt_().add_(group["eps"])
                if change is not None:
                    norms[weight] = group["lr"] * change.norm()
        names = dict(zip(self._trainable_params, self.names, strict=True))
        ratios = torch.stack([norm / weight.norm() for weight, norm in norms.items()]).tolist() if norms else []
        return {names[weight]: ratio for weight, ratio in zip(norms, ratios, strict=True) if math.isfinite(ratio)}

    def weights(self) -> list[Tensor]:
        """The trained parameters, not divided among ranks."""
        return self._trainable_params

    def replicated(self) -> list[list[Tensor]]:
        """All that steps change and that is not a count, in lists of one type: weights, EMA, moments, statistics."""
        groups = [self._trainable_params, [self.norm_stats] if self.norm_stats.numel() else []]
        if self.ema_model is not self.model:
            groups.append(self._ema_params)
        states = [self._optimizer.state[parameter] for parameter in self._trainable_params]
        moments = dict.fromkeys(name for state in states for name in state)
        groups += [[state[name] for state in states if name in state and state[name].dim()] for name in moments]
        return [group for group in groups if group]

    def keep_running_stats(self) -> None:
        """Takes running statistics that the caller has changed as those of a good step."""
        copy_stats(self.model, self.norm_stats, into_model=False)
        self._good_norm_stats.copy_(self.norm_stats)
        self._ema_norm_stats.copy_(self.norm_stats)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._trainable_params if p.grad is not None]

    def state_dict(self) -> dict[str, Any]:
        """Tensors on the device and plain numbers; of the model too, since files of weights hold `ema_model`. Those of
        a divided model are DTensors, which `Sharding.gather` makes whole."""
        state: dict[str, Any] = {"optimizer": self._optimizer.state_dict(), "model": self.model.state_dict()}
        if self.sharding is not None:
            state["optimizer"]["state"] = self._distributed_state(self.sharding)
        if self.loss_scale is not None:
            state["scale"] = [self.loss_scale, self._growth_tracker]
        return state

    def load_state_dict(self, state: dict[str, Any], ema_weights: dict[str, Tensor]) -> None:
        """Restores what `state_dict` returned, with whole tensors, in place."""
        if self.sharding is not None:
            self.restored = state, ema_weights
        self._load_model(self.model, state["model"])
        copy_stats(self.model, self.norm_stats, into_model=False)
        self._good_norm_stats.copy_(self.norm_stats)
        if self.ema_model is not self.model:
            self._load_model(self.ema_model, ema_weights)
        self._load_optimizer_state(state["optimizer"])
        if self.loss_scale is not None and self._growth_tracker is not None:
            self.loss_scale.copy_(state["scale"][0])
            self._growth_tracker.copy_(state["scale"][1])

    def _load_optimizer_state(self, saved: dict[str, Any]) -> None:
        """Copies moments and step counts, in place; what was not saved (before a first step) is zero. The optimizer's
        `load_state_dict` would replace the tensors, the learning rates, and the flags of another device."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        ids = [saved_id for group in saved["param_groups"] for saved_id in group["params"]]
        for parameter, saved_id in zip(parameters, ids, strict=True):
            saved_state = saved["state"].get(saved_id, {})
            for name, tensor in self._optimizer.state[parameter].items():
                whole = saved_state.get(name, torch.zeros(()))
                tensor.copy_(whole if self.sharding is None or not whole.dim() else self.sharding.rows(whole))

    def take_restored(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """(state, EMA weights), whole, to send to other ranks; None for the first step of a divided model."""
        if self.sharding is None:
            return self.state_dict(), self.ema_model.state_dict()
        restored, self.restored = self.restored, None
        return restored

    def _load_model(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        if self.sharding is None:
            model.load_state_dict(weights)
        else:
            self.sharding.load(model, weights)

    def _distributed_state(self, sharding: ModelDivision) -> dict[int, dict[str, Tensor]]:
        """Number of the parameter → the optimizer's state, as `ModelDivision.gather` takes it."""
        divided: dict[Tensor, Any] = dict(zip(self._trainable_params, self._parameters, strict=True))
        parts = [part for group in self._optimizer.param_groups for part in group["params"]]
        return {
            number: {
                name: sharding.distributed(tensor, divided[part]) if tensor.dim() else tensor
                for name, tensor in self._optimizer.state[part].items()
            }
            for number, part in enumerate(parts)
        }


def _own_part(parameter: nn.Parameter) -> nn.Parameter:
    """This rank's rows of a divided parameter, in the same memory; any other parameter as it is."""
    if not hasattr(parameter, "to_local"):  # a DTensor, without importing torch.distributed
        return parameter
    return nn.Parameter(_rows_of(parameter), requires_grad=parameter.requires_grad)


def _rows_of(tensor: Any) -> Tensor:
    with torch.no_grad():
        rows: Tensor = tensor.to_local()
    return rows


def _set_scalar(current: Any, value: float) -> Any:
    """The value, or `current` set to it if that is a tensor."""
    if isinstance(current, Tensor):
        set_scalar(current, value)
        return current
    return value
