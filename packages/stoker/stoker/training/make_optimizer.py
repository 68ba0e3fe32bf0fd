"""Torch's optimizers for the groups of parameters of a model, and what they compute in operators that XLA has."""

import inspect
import math
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from stoker.config.settings import OptimSettings
from stoker.hardware.xla import XLA_KINDS
from stoker.models import Detector
from stoker.training.muon import is_matrix
from stoker.training.norm_stats import NORM_TYPES

Opt = TypeVar("Opt", bound=torch.optim.Optimizer)


class Clipped(NamedTuple):
    """How the gradients of a step are scaled, as float32 scalars on the device."""

    grad_norm: Tensor
    """Norm of the gradients before clipping."""
    found_inf: Tensor
    """1 if a gradient is not finite: the step is skipped."""
    divisor: Tensor | None
    """Divides the gradients, to clip them and to undo the loss scale."""
    tensor_norms: Tensor | None = None
    """float32 [number of gradients]: the norm of each, in the order of `names`; None where ranks have parts of them."""


def make_optimizer(
    model: nn.Module, settings: OptimSettings, parts: dict[nn.Parameter, nn.Parameter]
) -> tuple[torch.optim.Optimizer, list[float]]:
    """(optimizer, factor of the learning rate of each of its groups). parts: parameter of the model → what is
    optimized: itself, or this rank's rows."""
    groups = _group_parameters(model, settings)
    param_groups: list[dict[str, Any]] = [
        {"params": [parts[parameter] for parameter in group], "weight_decay": decay}
        | ({"is_matrix": True} if is_muons else {})
        for (_, decay, is_muons), group in groups.items()
    ]
    fused = all(parameter.device.type not in XLA_KINDS for parameter in parts.values())
    optimizer: torch.optim.Optimizer
    if settings.optimizer == "sgd":
        optimizer = _without_dynamo(torch.optim.SGD)(param_groups, lr=0.0, momentum=settings.momentum, fused=fused)
        _create_state(optimizer, moments=("momentum_buffer",) if settings.momentum else (), counts_steps=False)
    else:
        # The step count stays on the device. Fused kernels are the same without, but then refuse a CUDA graph.
        optimizer = _without_dynamo(torch.optim.AdamW)(
            param_groups, lr=0.0, betas=(settings.momentum, 0.999), capturable=True, fused=fused
        )
        optimizer._warned_capturable_if_run_uncaptured = True  # most runs have no graph
        _create_state(optimizer, moments=("exp_avg", "exp_avg_sq"), counts_steps=True)
    return optimizer, [lr_mult for lr_mult, *_ in groups]


def _group_parameters(model: nn.Module, settings: OptimSettings) -> dict[tuple[float, float, bool], list[nn.Parameter]]:
    """(factor of the learning rate, weight decay, whether Muon updates them) → trained parameters. Biases and norms are
    not decayed, as in torchvision's and Detectron2's recipes."""
    prefixes = model.backbone_prefixes if isinstance(model, Detector) else ()
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for module_name, module in model.named_modules():
        lr_mult = settings.backbone_lr_mult if f"{module_name}.".startswith(prefixes) else 1.0
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                decay = 0.0 if name == "bias" or isinstance(module, NORM_TYPES) else settings.weight_decay
                is_muons = settings.optimizer == "muon" and is_matrix(module, name)
                groups.setdefault((lr_mult, decay, is_muons), []).append(parameter)
    return groups


def _create_state(optimizer: torch.optim.Optimizer, *, moments: tuple[str, ...], counts_steps: bool) -> None:
    """The state exists before the first step: a fused SGD whose first step is skipped would leave its buffers
    uninitialized, and a CUDA graph must not create what outlives a step. Kernels of Muon have theirs there."""
    for group in optimizer.param_groups:
        for parameter in () if group.get("is_matrix") else group["params"]:
            state = optimizer.state[parameter]
            if counts_steps:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state.update((name, torch.zeros_like(parameter)) for name in moments)


@torch.no_grad()
def step_by_operators(optimizer: torch.optim.Optimizer, clipped: Clipped) -> None:
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
