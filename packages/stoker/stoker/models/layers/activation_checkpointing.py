"""Activation checkpointing (arXiv 1604.06174): segments of a model keep only their input and are computed again in the
backward pass. docs/models.md has the memory that it saves and the time that it costs.

Modules, names in `state_dict` and results do not change. Segments are found by structure, without code of a detector.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from stoker.models.layers.norms import installed
from stoker.models.layers.weight_casts import same_weights


def checkpoint_activations(model: nn.Module) -> None:
    """Checkpoints every segment of `model`, in place. Without gradients, a segment runs as before."""
    for segment in segments(model):
        segment.forward = functools.partial(_checkpointed_forward, segment)  # type: ignore[method-assign]


def segments(model: nn.Module) -> list[nn.Sequential]:
    """The outermost nn.Sequentials with at least two convolutions, in the order of their names.

    These are the stages of a ResNet, the blocks of a MobileNet (six times as wide inside as at their ends), and the
    heads, per level. A single convolution keeps its input in any case.
    """
    if isinstance(model, nn.Sequential) and sum(isinstance(module, nn.Conv2d) for module in model.modules()) > 1:
        return [model]
    return [segment for child in model.children() for segment in segments(child)]


def _checkpointed_forward(segment: nn.Sequential, x: Tensor) -> Tensor:
    forward = segment.__class__.forward
    if not torch.is_grad_enabled():
        return forward(segment, x)
    # No model uses random numbers, and reading the generator's state would synchronize.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if not torch.compiler.is_compiling():  # a compiled program updates the statistics only once
        # Contexts of the forward pass and of the recomputation.
        options["context_fn"] = lambda: (contextlib.nullcontext(), _recomputation(segment, same_weights(segment)))
    return checkpoint(forward, segment, x, **options)


@contextlib.contextmanager
def _recomputation(segment: nn.Module, weights: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """Inside `weights`, norms update copies of their running statistics: this batch is in the statistics already."""
    norms = [module for module in segment.modules() if isinstance(module, _BatchNorm)]
    places = [(norm._buffers, name) for norm in norms for name in norm._buffers]
    copies = [None if (buffer := buffers[name]) is None else buffer.clone() for buffers, name in places]
    with installed(places, copies), weights:
        yield
