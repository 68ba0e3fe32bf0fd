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
import inspect
import itertools
import math
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from stoker.config.settings import OptimSettings
from stoker.hardware.device import XLA_KINDS, Device, device_of_constants, set_scalar
from stoker.models import Detector
from stoker.models.layers.transformer import FiniteRMSNorm
from stoker.training.muon import Muon, is_matrix

Opt = TypeVar("Opt", bound=torch.optim.Optimizer)


class Clipped(NamedTuple):
    """How the gradients of a step are scaled, as float32 scalars on the device."""

    grad_norm: Tensor
    """Norm of the gradients before clipping."""
    found_inf: Tensor
    """1 if a gradient is not finite: the step is skipped."""
    divisor: Tensor | None
    """Of the gradients: clips them and undoes the loss scale."""
    tensor_norms: Tensor | None = None
    """float32 [number of gradients]: the norm of each, in the order of `names`; None where ranks have parts of them."""


NORM_TYPES = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm, FiniteRMSNorm)


class ModelDivision(Protocol):
    """How a model is divided among ranks: `fsdp.Sharding` by rows of each tensor, `stages.Stages` by parts."""

    def shard(self, model: nn.Module) -> None:
        """Divides the tensors of a model, in place, and moves what is this rank's to the device."""

    def collect(self, model: nn.Module) -> None:
        """Before an evaluation: the model can compute outputs until `reshard`."""

    def reshard(self, model: nn.Module) -> None:
        """Frees what is not this rank's."""

    def rows(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor."""

    def distributed(self, rows: Tensor, like: Any) -> Tensor:
        """The reverse, as `gather` takes it; like: the parameter of the model."""

    def load(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        """`model.load_state_dict` of whole tensors."""

    def gather(self, tree: Any) -> Any:
        """A tree with whole host tensors, in rank 0. Called by all ranks. Waits for the device."""


class OptimizerStep:
    """The optimizer of a model, and its EMA weights. model: on the device and initialized; ema_model: the weights to
    evaluate and save, `model` itself if `settings.ema_decay` is 0; sharding: divides the parameters of both among the
    ranks and moves them to the device: all numbers but the norm of the gradient are then of this rank's rows or stage.
    """

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
        self.norm_stats = _flatten_norm_stats(model)
        """Running statistics of all trained BatchNorms [N]."""
        self._good_norm_stats = self.norm_stats.clone()
        self._ema_norm_stats = _flatten_norm_stats(self.ema_model) if settings.ema_decay else self.norm_stats
        # Parameters of other stages are there without values.
        self._parameters = [p for p in model.parameters() if p.requires_grad and (sharding is None or not p.is_meta)]
        parts = {parameter: _own_part(parameter) for parameter in self._parameters}
        self._trainable_params: list[Tensor] = list(parts.values())
        self.names = [n for n, p in model.named_parameters() if p in parts]
        """Of the trained parameters."""
        by_name = dict(self.ema_model.named_parameters())
        self._ema_params: list[Tensor] = [_own_part(by_name[name]) for name in self.names]
        self.is_updated = False
        """Whether weights may have changed since `set_scalars`: a step that fails then is half-applied."""
        self._optimizer, self._lr_mults, self._numbers = _make_optimizer(model, settings, parts)
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
        """All that follows the backward pass. Returns (grad_norm, found_inf)."""
        self.set_scalars(lr, completed_steps)
        clipped = self.clip()
        self.update(clipped)
        self.update_ema()
        return clipped.grad_norm, clipped.found_inf

    def set_scalars(self, lr: float, completed_steps: int) -> None:
        """What the next `update` uses. completed_steps: optimizer steps before it."""
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
        gradients = self._gradients()
        if not gradients:  # a stage whose parameters are all frozen
            return torch.zeros((), device=self.norm_stats.device)
        return torch.nn.utils.get_total_norm(gradients)

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
        _copy_stats(self.model, self.norm_stats, into_model=False)
        if self._gradients():
            if self._muon is not None:
                self._muon.step(clipped.divisor, clipped.found_inf)
            # The fused kernels read these, so dividing and skipping need no pass of their own.
            self._optimizer.grad_scale = clipped.divisor  # type: ignore[attr-defined]
            self._optimizer.found_inf = clipped.found_inf  # type: ignore[attr-defined]
            if self._optimizer.defaults["fused"]:
                self._optimizer.step()
            else:
                _step_by_operators(self._optimizer, clipped)
        if self.loss_scale is not None and self._growth_tracker is not None:
            torch._amp_update_scale_(self.loss_scale, self._growth_tracker, clipped.found_inf, 2.0, 0.5, 2000)
        # A forward pass that overflowed has spoiled the running statistics too: restore those of the last good step.
        torch.where(clipped.found_inf > 0, self._good_norm_stats, self.norm_stats, out=self._good_norm_stats)
        self.norm_stats.copy_(self._good_norm_stats)
        _copy_stats(self.model, self.norm_stats, into_model=True)
        self.zero_grad()

    def update_ema(self) -> None:
        """Moves the EMA weights towards the weights."""
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
        _copy_stats(self.ema_model, self._ema_norm_stats, into_model=True)

    def discard_gradients(self) -> None:
        """Undoes what `backward` and its forward passes left since the last update, after an error in them."""
        self.zero_grad()
        self.norm_stats.copy_(self._good_norm_stats)
        _copy_stats(self.model, self.norm_stats, into_model=True)

    def zero_grad(self) -> None:
        """Frees the gradients."""
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
        _copy_stats(self.model, self.norm_stats, into_model=False)
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
            for group, numbers in zip(state["optimizer"]["param_groups"], self._numbers, strict=True):
                group["params"] = list(numbers)
        if self.loss_scale is not None:
            state["scale"] = [self.loss_scale, self._growth_tracker]
        return state

    def load_state_dict(self, state: dict[str, Any], ema_weights: dict[str, Tensor]) -> None:
        """Restores what `state_dict` returned, with whole tensors, in place."""
        if self.sharding is not None:
            self.restored = state, ema_weights
        self._load_model(self.model, state["model"])
        _copy_stats(self.model, self.norm_stats, into_model=False)
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
        for parameter, number in zip(parameters, self._own_numbers(), strict=True):
            saved_state = saved["state"].get(ids[number], {})
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

    def _own_numbers(self) -> list[int]:
        """Numbers among the parameters of the whole model, in the optimizer's order."""
        return [number for numbers in self._numbers for number, is_own in numbers.items() if is_own]

    def _distributed_state(self, sharding: ModelDivision) -> dict[int, dict[str, Tensor]]:
        """Number of the parameter in the whole model → the optimizer's state, as `ModelDivision.gather` takes it."""
        divided: dict[Tensor, Any] = dict(zip(self._trainable_params, self._parameters, strict=True))
        parts = [part for group in self._optimizer.param_groups for part in group["params"]]
        return {
            number: {
                name: sharding.distributed(tensor, divided[part]) if tensor.dim() else tensor
                for name, tensor in self._optimizer.state[part].items()
            }
            for number, part in zip(self._own_numbers(), parts, strict=True)
        }


def _own_part(parameter: nn.Parameter) -> nn.Parameter:
    """This rank's rows of a divided parameter, in the same memory; any other parameter as it is."""
    if not hasattr(parameter, "to_local"):  # a DTensor, without importing torch.distributed
        return parameter
    return nn.Parameter(_rows_of(parameter), requires_grad=parameter.requires_grad)


def _rows_of(tensor: Any) -> Tensor:
    """This rank's rows of a DTensor."""
    with torch.no_grad():
        rows: Tensor = tensor.to_local()
    return rows


def _set_scalar(current: Any, value: float) -> Any:
    """The value, or `current` set to it if that is a tensor."""
    if isinstance(current, Tensor):
        set_scalar(current, value)
        return current
    return value


def _make_optimizer(
    model: nn.Module, settings: OptimSettings, parts: dict[nn.Parameter, nn.Parameter]
) -> tuple[torch.optim.Optimizer, list[float], list[dict[int, bool]]]:
    """(optimizer, factor of the learning rate of each of its groups, number of each parameter of the group in the whole
    model → whether this rank has it). parts: parameter of the model → what is optimized: itself, or this rank's rows;
    without those of other stages. Biases and norms are not decayed, as in torchvision's and Detectron2's recipes."""
    prefixes = model.backbone_prefixes if isinstance(model, Detector) else ()
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for module_name, module in model.named_modules():
        lr_mult = settings.backbone_lr_mult if f"{module_name}.".startswith(prefixes) else 1.0
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                decay = 0.0 if name == "bias" or isinstance(module, NORM_TYPES) else settings.weight_decay
                is_muons = settings.optimizer == "muon" and is_matrix(module, name)
                groups.setdefault((lr_mult, decay, is_muons), []).append(parameter)
    lr_mults, counter = [lr_mult for lr_mult, *_ in groups], itertools.count()
    numbers = [{next(counter): parameter in parts for parameter in group} for group in groups.values()]
    param_groups: list[dict[str, Any]] = [
        {"params": [parts[parameter] for parameter in group if parameter in parts], "weight_decay": decay}
        | ({"is_matrix": True} if is_muons else {})
        for (_, decay, is_muons), group in groups.items()
    ]
    fused = all(parameter.device.type not in XLA_KINDS for parameter in parts.values())
    if settings.optimizer in ("adamw", "muon"):
        # The step count stays on the device. Fused kernels are the same without, but then refuse a CUDA graph.
        optimizer: torch.optim.Optimizer = _without_dynamo(torch.optim.AdamW)(
            param_groups, lr=0.0, betas=(settings.momentum, 0.999), capturable=True, fused=fused
        )
        optimizer._warned_capturable_if_run_uncaptured = True  # most runs have no graph
        moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    else:
        optimizer = _without_dynamo(torch.optim.SGD)(param_groups, lr=0.0, momentum=settings.momentum, fused=fused)
        moments = ("momentum_buffer",) if settings.momentum else ()
    # The state exists before the first step: a fused SGD whose first step is skipped would leave its buffers
    # uninitialized, and a CUDA graph must not create what outlives a step.
    for parameter in itertools.chain(*(group["params"] for group in param_groups if not group.get("is_matrix"))):
        if settings.optimizer != "sgd":
            optimizer.state[parameter]["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name in moments:
            optimizer.state[parameter][name] = torch.zeros_like(parameter)
    return optimizer, lr_mults, numbers


@torch.no_grad()
def _step_by_operators(optimizer: torch.optim.Optimizer, clipped: Clipped) -> None:
    """What torch's fused kernels of SGD and AdamW compute, in operators that XLA has, and fuses."""
    is_skipped = clipped.found_inf > 0
    for group in optimizer.param_groups:
        lr, decay = group["lr"], group["weight_decay"]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            grad = parameter.grad if clipped.divisor is None else parameter.grad / clipped.divisor
            state = optimizer.state[parameter]
            if "betas" in group:
                beta1, beta2 = group["betas"]
                step = state["step"] + 1
                mean = state["exp_avg"] + (grad - state["exp_avg"]) * (1 - beta1)
                square = state["exp_avg_sq"] * beta2 + grad * grad * (1 - beta2)
                # 1 - beta ** step in float32 would lose four digits at the first steps.
                corrections = [-torch.expm1(step.to(grad.dtype) * math.log(beta)) for beta in (beta1, beta2)]
                change = mean / corrections[0] / ((square / corrections[1]).sqrt() + group["eps"])
                updated = {"step": step, "exp_avg": mean, "exp_avg_sq": square}
                weight = parameter - lr * (change + parameter * decay)
            else:
                grad = grad + parameter * decay
                updated = {name: buffer * group["momentum"] + grad for name, buffer in state.items()}
                weight = parameter - lr * updated.get("momentum_buffer", grad)
            parameter.copy_(torch.where(is_skipped, parameter, weight))
            for name, value in updated.items():
                state[name].copy_(torch.where(is_skipped, state[name], value))


def _without_dynamo(optimizer: type[Opt]) -> type[Opt]:
    """A subclass that does the same without importing torch._dynamo, which takes two seconds of every start. torch
    wraps these methods to keep dynamo from compiling them, and a wrapper imports it at its first call."""
    names = ("add_param_group", "state_dict", "zero_grad")
    methods: dict[str, Any] = {name: inspect.unwrap(getattr(optimizer, name)) for name in names}
    methods["step"] = torch.no_grad()(inspect.unwrap(optimizer.step))
    return type(optimizer.__name__, (optimizer,), methods)


def _stats_of(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """(module, name) of the running statistics of all trained BatchNorms."""
    norms = [m for m in model.modules() if isinstance(m, NORM_TYPES[0]) and m.running_mean is not None]
    return [(norm, name) for norm in norms for name in ("running_mean", "running_var")]


def _copy_stats(model: nn.Module, flat: Tensor, *, into_model: bool) -> None:
    """Between the statistics of `model` and `flat`, where they are not views of it."""
    if flat.device.type not in XLA_KINDS or not flat.numel():
        return
    buffers = [getattr(module, name) for module, name in _stats_of(model)]
    if not into_model:
        flat.copy_(torch.cat(buffers))
        return
    for buffer, part in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(part)


def _flatten_norm_stats(model: nn.Module) -> Tensor:
    """Moves the running statistics of all trained BatchNorms into one tensor [N]; they become views of it. With XLA it
    is a copy (`_copy_stats`): what its batch norm writes into a view does not reach the tensor."""
    devices = [parameter.device for parameter in model.parameters()]
    device = next((device for device in devices if device.type != "meta"), devices[0])  # not that of other stages
    buffers = [(module, name, getattr(module, name)) for module, name in _stats_of(model)]
    buffers = [buffer for buffer in buffers if buffer[2].is_meta == (device.type == "meta")]
    if not buffers:
        return torch.zeros(0, device=device)
    flat = torch.cat([buffer.detach().reshape(-1) for _, _, buffer in buffers])
    if device.type in XLA_KINDS:
        return flat
    views = torch.split(flat, [buffer.numel() for _, _, buffer in buffers])
    for (module, name, _), view in zip(buffers, views, strict=True):
        module._buffers[name] = view
    return flat


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


def lr_at(settings: OptimSettings, step: int, progress: float) -> float:
    """The learning rate of the step after `step` steps; progress: fraction of the length that is done, 0 … 1."""
    peak_lr = settings.lr
    if step < settings.warmup_steps:
        return peak_lr * (0.001 + 0.999 * (step + 1) / settings.warmup_steps)
    match settings.lr_scheduler:
        case "cosine":
            # Down to 1 % of the peak, not 0, so that the last steps still count.
            return peak_lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
        case "multistep":
            # 16 and 22 of 26 epochs in torchvision's RetinaNet; 8 and 11 of 12 in Detectron2: 2/3 and 8/9.
            return peak_lr * float(0.1 ** ((progress >= 2 / 3) + (progress >= 8 / 9)))
        case "exponential":
            return peak_lr * float(0.01 ** min(1.0, progress))
        case "constant":
            return peak_lr
