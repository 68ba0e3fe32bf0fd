"""The running statistics of trained norms as one tensor."""

import torch
from torch import Tensor, nn

from stoker.hardware.xla import XLA_KINDS
from stoker.models.layers.transformer import FiniteRMSNorm

NORM_TYPES = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm, FiniteRMSNorm)


def stats_of(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """(module, name) of the running statistics of all trained BatchNorms."""
    norms = [m for m in model.modules() if isinstance(m, NORM_TYPES[0]) and m.running_mean is not None]
    return [(norm, name) for norm in norms for name in ("running_mean", "running_var")]


def copy_stats(model: nn.Module, flat: Tensor, *, into_model: bool) -> None:
    """Copies between the statistics of `model` and `flat`, where they are not views of it."""
    if flat.device.type not in XLA_KINDS or not flat.numel():
        return
    buffers = [getattr(module, name) for module, name in stats_of(model)]
    if not into_model:
        flat.copy_(torch.cat(buffers))
        return
    for buffer, part in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(part)


def flatten_norm_stats(model: nn.Module) -> Tensor:
    """Moves the running statistics of all trained BatchNorms into one tensor [N]; they become views of it. With XLA it
    is a copy (`copy_stats`): what its batch norm writes into a view does not reach the tensor."""
    device = next(model.parameters()).device
    buffers = [(module, name, getattr(module, name)) for module, name in stats_of(model)]
    if not buffers:
        return torch.zeros(0, device=device)
    flat = torch.cat([buffer.detach().reshape(-1) for _, _, buffer in buffers])
    if device.type in XLA_KINDS:
        return flat
    views = torch.split(flat, [buffer.numel() for _, _, buffer in buffers])
    for (module, name, _), view in zip(buffers, views, strict=True):
        module._buffers[name] = view
    return flat
