"""The weights of a model in the lower precision of autocast, cast by one operator for all of them.

Autocast casts each weight where it is used, and each of its gradients back: for `ember_n` 160 operators, if compiled
as many kernels. Here one `foreach` operator casts all weights before the forward pass, and one all gradients at the
end of the backward pass; the numbers are the same. Only for accelerators; a compiled program takes the cast weights.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stoker.models.layers.convolutions import FoldedConv2d
from stoker.models.layers.norms import installed

IN_FP32 = "runs_without_autocast"
"""Attribute of modules that compute in fp32 within a model in mixed precision."""


class _CastAll(torch.autograd.Function):
    """(dtype, tensors …) → copies with this dtype, in the same memory format. All gradients are cast back at once."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.layouts = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
        torch._foreach_copy_(copies, tensors)
        needs_grad = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(copy for copy, needed in zip(copies, needs_grad, strict=True) if not needed))
        return tuple(copies)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [grad for grad in grads if grad is not None]
        cast = [
            torch.empty_strided(shape, stride, dtype=dtype, device=grad.device)
            for (shape, stride, dtype), grad in zip(ctx.layouts, grads, strict=True)
            if grad is not None
        ]
        if given:
            torch._foreach_copy_(cast, given)
        result = iter(cast)
        return None, *(None if grad is None else next(result) for grad in grads)


class WeightCasts:
    """The casts of the convolutions and linear layers of `model` that run under autocast: all but those in modules
    with an attribute IN_FP32."""

    def __init__(self, model: nn.Module, *, folds: bool = True) -> None:
        """folds: also what `FoldedConv2d` multiplies. A compiler multiplies and casts in one pass, but for the bias."""
        without = {part for module in model.modules() if hasattr(module, IN_FP32) for part in module.modules()}
        parts = (module for module in model.modules() if module not in without)
        layers = [module for module in parts if isinstance(module, nn.Conv2d | nn.Linear)]
        folded = [layer for layer in layers if isinstance(layer, FoldedConv2d)]
        plain = [layer for layer in layers if not isinstance(layer, FoldedConv2d)]
        self._folded = folded if folds else []
        self._places: list[tuple[dict[str, Any], str]]
        self._places = [(layer._parameters, name) for layer in plain for name in ("weight", "bias")]
        self._places += [] if folds else [(layer._norm[0]._buffers, "shift") for layer in folded]

    @contextlib.contextmanager
    def apply(self, device_type: str) -> Iterator[None]:
        """Inside, the layers compute with cast weights, if autocast is enabled for this type of device. There,
        `parameters` and `state_dict` of the model would return the cast ones."""
        if not torch.is_autocast_enabled(device_type):
            yield
            return
        places = [
            (owner, name)
            for owner, name in self._places
            if (tensor := owner[name]) is not None and tensor.dtype == torch.float32
        ]
        folded = [tensor for layer in self._folded for tensor in layer.fold()]
        originals = [parameters[name] for parameters, name in places]
        casts = _CastAll.apply(torch.get_autocast_dtype(device_type), *originals, *folded)
        of_folded = iter(casts[len(places) :])
        values = [*casts[: len(places)], *zip(of_folded, of_folded, strict=True)]
        del casts, folded, of_folded
        with installed([*places, *((vars(layer), "cast") for layer in self._folded)], values):
            yield


def same_weights(segment: nn.Module) -> contextlib.AbstractContextManager[None]:
    """A context in which the layers of `segment` compute with the tensors that they have now, when this is called:
    inside `WeightCasts.apply` the cast ones. For a segment that is computed again in the backward pass, after
    `apply` has ended: it has to save the tensors that the forward pass saved."""
    layers = [module for module in segment.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    places = [(layer._parameters, name) for layer in layers for name in layer._parameters]
    places += [(vars(layer), "cast") for layer in layers if isinstance(layer, FoldedConv2d)]
    return installed(places, [owner[name] for owner, name in places])
