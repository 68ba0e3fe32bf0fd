"""Losses and gradients of a batch: operator by operator, or by a program that torch.compile makes of the model once.

Compiling pays where launching kernels and moving activations cost more than the arithmetic; it takes minutes, which are
the ledger's `compile`, and what was compiled is kept for later runs. `--eager` and `--no-eager` decide.
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
from stoker.training.optim import Stepper

BACKEND = "inductor"

LossesOf = Callable[[Batch], dict[str, Tensor]]
"""The parts of the loss of a batch, scalars. Called under autocast."""


def losses_of(model: Detector, *, eager: bool) -> LossesOf:
    """What a model makes of a batch; not eager: compiled at the first call, for the shapes of that call."""

    def compute(batch: Batch) -> dict[str, Tensor]:
        # What the model predicts has no name here: the losses alone keep what the backward pass needs of it.
        return model.loss(model(batch.images), batch)

    if eager:
        return compute
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
    compiled: LossesOf = torch.compile(compute, backend=BACKEND, dynamic=False)
    return compiled


def compile_now(
    model: Detector, compute: LossesOf, stepper: Stepper[Detector], case: Batch, autocast: "Autocast"
) -> None:
    """Compiles forward and backward on `case`, a batch of the shapes of training; the model stays as it was.

    Running statistics are put back, and no gradient is left.
    """
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad(), autocast:
        model(case.images)  # anchors of this canvas, which the program takes as given
    forward_backward(compute, stepper, case, 1, autocast)
    stepper.forget()
    for name, buffer in model.named_buffers():
        if name in before:
            buffer.copy_(before[name])


Autocast = contextlib.AbstractContextManager[Any]


def forward_backward(
    compute: LossesOf, stepper: Stepper[Detector], batch: Batch, parts: int, autocast: Autocast
) -> dict[str, Tensor]:
    """Adds the gradients of a batch, taken in `parts` micro-batches. Returns the parts of the loss, scalars, summed."""
    size = batch.images.shape[0] // parts
    totals: dict[str, Tensor] = {}
    for n in range(parts):
        part = batch if parts == 1 else Batch(*(tensor[n * size : (n + 1) * size] for tensor in batch))
        with autocast:
            losses = {name: loss / parts for name, loss in compute(part).items()}
        stepper.backward(torch.stack(list(losses.values())).sum())
        for name, loss in losses.items():
            totals[name] = totals[name] + loss.detach() if name in totals else loss.detach()
    return totals
