"""Activation checkpointing (arXiv 1604.06174): segments of a model keep their input only, and compute the rest again in
the backward pass. What it saves and what it costs: docs/models.md.

The model stays as it is built: the same modules, the same names in `state_dict`, the same numbers. Segments are found
by structure, so a detector needs nothing for it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def checkpoint_activations(model: nn.Module) -> None:
    """Makes every segment of `model` keep less. In place; without gradients a segment runs as before."""
    for segment in segments(model):
        segment.forward = functools.partial(_checkpointed_forward, segment)  # type: ignore[method-assign]


def segments(model: nn.Module) -> list[nn.Sequential]:
    """The outermost nn.Sequentials of two convolutions or more, in the order of their names.

    Those are the stages of a ResNet, the blocks of a MobileNet (whose insides are six times as wide as their ends), and
    the towers, level by level. One convolution would keep its input either way.
    """
    if isinstance(model, nn.Sequential) and sum(isinstance(module, nn.Conv2d) for module in model.modules()) > 1:
        return [model]
    return [segment for child in model.children() for segment in segments(child)]


def _checkpointed_forward(segment: nn.Sequential, x: Tensor) -> Tensor:
    forward: Callable[[nn.Sequential, Tensor], Tensor] = segment.__class__.forward
    if not torch.is_grad_enabled():
        return forward(segment, x)
    checkpoint_kwargs: dict[str, Any] = {}
    if not torch.compiler.is_compiling():  # a compiled program updates the statistics once by itself
        checkpoint_kwargs["context_fn"] = functools.partial(_checkpoint_contexts, segment)
    # No model draws random numbers, and to read the generator's state would make the host sync.
    result: Tensor = checkpoint(forward, segment, x, use_reentrant=False, preserve_rng_state=False, **checkpoint_kwargs)
    return result


def _checkpoint_contexts(segment: nn.Module) -> tuple[contextlib.AbstractContextManager[None], ...]:
    """Of the forward pass, and of the second one."""
    return contextlib.nullcontext(), _preserve_running_stats(segment)


@contextlib.contextmanager
def _preserve_running_stats(segment: nn.Module) -> Iterator[None]:
    """Norms inside it update copies of their running statistics, which have seen this batch already."""
    norms = [module for module in segment.modules() if isinstance(module, _BatchNorm)]
    saved_buffers = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        norm._buffers.update(
            {name: None if buffer is None else buffer.clone() for name, buffer in norm._buffers.items()}
        )
    try:
        yield
    finally:
        for norm, buffers in zip(norms, saved_buffers, strict=True):
            norm._buffers.update(buffers)
