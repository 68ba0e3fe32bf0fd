"""Losses and gradients of a batch: operator by operator, or by a program that torch.compile makes of the model once.

Compiling pays where launching kernels and moving activations cost more than the arithmetic; it takes minutes, which are
the ledger's `compile`, and what was compiled is kept for later runs. `--no-compile` and `--compile` decide.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stoker.data.batch import Batch
from stoker.models import Detector
from stoker.storage.local_files import cache_folder
from stoker.training.optim import OptimizerStep

COMPILE_BACKEND = "inductor"

LossFn = Callable[[Batch], dict[str, Tensor]]
"""The parts of the loss of a batch, scalars. Called under autocast."""


def make_loss_fn(model: Detector, *, eager: bool) -> LossFn:
    """What a model makes of a batch; not eager: compiled at the first call, for the shapes of that call."""

    def compute_losses(batch: Batch) -> dict[str, Tensor]:
        # What the model predicts has no name here: the losses alone keep what the backward pass needs of it.
        return model.loss(model(batch.images), batch)

    if eager:
        return compute_losses
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
    compiled: LossFn = torch.compile(compute_losses, backend=COMPILE_BACKEND, dynamic=False)
    return compiled


def compile_forward_backward(
    model: Detector, loss_fn: LossFn, optimizer: OptimizerStep[Detector], batch: Batch, autocast: "Autocast"
) -> None:
    """Compiles forward and backward on `case`, a batch of the shapes of training; the model stays as it was.

    Running statistics are put back, and no gradient is left.
    """
    saved_buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad(), autocast:
        model(batch.images)  # anchors of this canvas, which the program takes as given
    forward_backward(loss_fn, optimizer, batch, 1, autocast)
    optimizer.zero_grad()
    for name, buffer in model.named_buffers():
        if name in saved_buffers:
            buffer.copy_(saved_buffers[name])


Autocast = contextlib.AbstractContextManager[Any]


def forward_backward(
    loss_fn: LossFn, optimizer: OptimizerStep[Detector], batch: Batch, micro_batches: int, autocast: Autocast
) -> dict[str, Tensor]:
    """Adds the gradients of a batch, taken in `parts` micro-batches. Returns the parts of the loss, scalars, summed."""
    micro_batch_size = batch.images.shape[0] // micro_batches
    totals: dict[str, Tensor] = {}
    for k in range(micro_batches):
        micro_batch = (
            batch
            if micro_batches == 1
            else Batch(*(tensor[k * micro_batch_size : (k + 1) * micro_batch_size] for tensor in batch))
        )
        with autocast:
            losses = {name: loss / micro_batches for name, loss in loss_fn(micro_batch).items()}
        optimizer.backward(torch.stack(list(losses.values())).sum())
        for name, loss in losses.items():
            totals[name] = totals[name] + loss.detach() if name in totals else loss.detach()
    return totals
