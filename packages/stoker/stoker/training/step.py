"""The step of a batch: forward, losses, backward, clip, update and EMA; operator by operator, or compiled by
torch.compile. What several processes exchange in it is in `parallel.py`.

Compiling fuses the passes over activations between convolutions. It takes minutes (`compile` in the ledger), and the
result is cached for later runs. `--compile` and `--no-compile` decide; the default is in `defaults/derive.py`.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from stoker.config.settings import DataSettings
from stoker.data.augment import apply_augmentations, augment_batch, strong_augmentations
from stoker.data.batch import Batch
from stoker.hardware.xla import end_step
from stoker.models import Detector
from stoker.models.layers.convolutions import is_on_accelerator
from stoker.models.layers.norms import BatchCounts
from stoker.models.layers.weight_casts import WeightCasts
from stoker.training.loss_sums import LossAccumulator
from stoker.training.optim import OptimizerStep
from stoker_watch.storage.local_files import cache_folder

COMPILE_BACKEND = "inductor"

LossFn = Callable[[Batch], dict[str, Tensor]]
"""The losses of a batch, scalars by name. Called under autocast."""
Autocast = contextlib.AbstractContextManager[Any]


def compile_for_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compiled at its first call for the shapes of that call."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
    compiled: Callable[..., Any] = torch.compile(function, backend=COMPILE_BACKEND, dynamic=False)
    return compiled


def make_loss_fn(model: Detector, *, compile: bool, cast_together: bool = True) -> LossFn:
    """The losses of a model for a batch. compile: compiled at the first call, for the shapes of that call.
    cast_together: cast all weights before the forward pass (`weight_casts.py`); they must be whole then. The model is
    on its device."""

    def compute_losses(batch: Batch) -> dict[str, Tensor]:
        # The outputs get no name here, so that only what the backward pass needs of them stays alive.
        return model.loss(model(batch.images), batch)

    compute = compile_for_shapes(compute_losses) if compile else compute_losses
    weight = next(model.parameters())
    if not is_on_accelerator(weight):
        return compute
    weight_casts, batch_counts = WeightCasts(model, folds=not compile), BatchCounts(model)

    def compute_with_casts(batch: Batch) -> dict[str, Tensor]:
        casts = weight_casts.apply(weight.device.type) if cast_together else contextlib.nullcontext()
        with casts, contextlib.nullcontext() if compile else batch_counts.defer():  # a compiler counts by itself
            return compute(batch)

    return compute_with_casts


def make_augment_fn(settings: DataSettings, *, compile: bool) -> Callable[[Batch, float], Batch]:
    """`augment_batch` with these settings, of a batch and the progress. compile: compiled at the first call of each
    stage of `strong_augmentations`, for the shapes of that call: one pass over the images instead of many."""
    if not compile:
        return lambda batch, progress: augment_batch(batch, settings, progress)
    # As a tuple: torch 2.11 loses fields of a named tuple that leaves a compiled function.
    apply = compile_for_shapes(lambda *args: tuple(apply_augmentations(*args)))
    return lambda batch, progress: Batch(*apply(batch, settings, *strong_augmentations(settings, progress)))


def split_batch(batch: Batch, micro_batches: int) -> Iterator[Batch]:
    """Equal parts of a batch, as views."""
    if micro_batches == 1:
        yield batch
        return
    size = batch.images.shape[0] // micro_batches
    for k in range(micro_batches):
        yield Batch(*(tensor[k * size : (k + 1) * size] for tensor in batch))


class PlainStep:
    """What `train_step` needs, where nothing is exchanged with other processes; a training has a
    `parallel.SingleProcess`. accumulator: records the losses, if there is one; micro_batches: equal parts of a batch,
    which the model gets in turn."""

    def __init__(
        self,
        loss_fn: LossFn,
        optimizer: OptimizerStep,
        accumulator: LossAccumulator | None,
        autocast: Autocast,
        micro_batches: int = 1,
    ) -> None:
        self.loss_fn, self.optimizer, self.accumulator = loss_fn, optimizer, accumulator
        self.autocast, self.micro_batches = autocast, micro_batches

    def forward_backward(self, batch: Batch) -> dict[str, Tensor]:
        """Adds the gradients of a batch. Returns the losses, summed over its micro-batches, as scalars."""
        totals: dict[str, Tensor] = {}
        for micro_batch in split_batch(batch, self.micro_batches):
            with self.autocast:
                losses = self.loss_fn(micro_batch)
                if self.micro_batches > 1:
                    losses = {name: loss / self.micro_batches for name, loss in losses.items()}
            self.optimizer.backward(torch.stack(list(losses.values())).sum())
            for name, loss in losses.items():
                totals[name] = totals[name] + loss.detach() if name in totals else loss.detach()
        return totals

    def rehearse(self, batch: Batch) -> None:
        """A forward and a backward pass on a micro-batch of the shapes of training, which compiles what is to be
        compiled. Afterwards, running statistics are as before, and no gradient is left; also after an error."""
        model, micro_batches = self.optimizer.model, self.micro_batches
        saved_buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self.micro_batches = 1
        try:
            with torch.no_grad(), self.autocast:
                model(batch.images)  # caches the anchors of this image size, which are constants of the compiled step
            self.forward_backward(batch)
        finally:
            self.micro_batches = micro_batches
            self.optimizer.zero_grad()
            for name, buffer in model.named_buffers():
                if name in saved_buffers:
                    buffer.copy_(saved_buffers[name])

    def augment(self, batch: Batch) -> Batch:
        """The batch as it is trained on."""
        return batch

    def average(self, losses: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        """The losses of the batch of all processes; and the norm of its gradient, times the loss scale, where the
        gradients of this process do not say it."""
        return losses, None

    def after_update(self) -> None:
        """After the update of the weights."""


def train_step(parallel: PlainStep, batch: Batch) -> None:
    """From a batch to the next weights; after `optimizer.set_scalars`. On an accelerator it issues the same operators
    at every step, on tensors that keep their addresses."""
    optimizer = parallel.optimizer
    batch = parallel.augment(batch)
    losses, grad_norm = parallel.average(parallel.forward_backward(batch))
    clipped = optimizer.clip(grad_norm)
    optimizer.update(clipped)  # on the device: not if a gradient is not finite
    optimizer.update_ema()
    parallel.after_update()
    if parallel.accumulator is not None:
        parallel.accumulator.add(
            losses, clipped.grad_norm, clipped.found_inf, optimizer.completed_steps, clipped.tensor_norms
        )
    end_step(batch.images.device)


def describe_compilation(counters: Mapping[str, Mapping[str, int]]) -> tuple[str, str]:
    """(kind of event, text): what torch.compile has made of the functions since its `counters` were cleared. A compiler
    may skip a function, as Inductor does with bf16 on a GPU that emulates it; for torch that is no error."""
    graphs, functions, breaks = counters["stats"]["unique_graphs"], counters["frames"]["total"], counters["graph_break"]
    if 0 < graphs == functions and not breaks:
        return "info", "compiled: forward pass, losses and backward pass, as a whole"
    reason = "".join(f"; {text.partition(chr(10))[0]}" for text in list(breaks)[:1])
    text = f"{graphs} graphs of {functions} functions, {sum(breaks.values())} graph breaks{reason}"
    return "warning", f"compiled in part: {text}; the rest of the step runs operator by operator"


def describe_error(error: Exception) -> str:
    """Type and first lines of an error, in one line; those of compilers have pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join([f"{type(error).__name__}:", *lines[:2]])
