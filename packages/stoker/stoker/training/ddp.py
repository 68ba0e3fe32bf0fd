"""Each rank has the whole model and a part of the batch.

`Ddp` averages the gradients of each step: torch's DistributedDataParallel exchanges them in buckets while the backward
pass still runs, once per step, also with accumulation, and the signals of the step (`several.py`) in one of them. A
compiled step is cut at the borders of the buckets (torch's DDPOptimizer).

With `--sync bf16` torch's hook (`ddp_comm_hooks`) sends the buckets in half as many bytes. The signals have an exchange
of their own then, in full precision.

`Periodic` averages weights instead, after every N steps (`--sync every:N`). If the gradient is not finite in one rank,
all skip the step; each clips its gradient by its own norm, and reports that. This is DiLoCo (Douillard et al. 2023):
the mean of what the ranks have changed is the gradient of an outer optimizer, SGD with Nesterov's momentum.
Weights, moments and EMA differ between two averages; before an evaluation and a checkpoint they are replaced by their
means (`equalize`), so a checkpoint is that of one model, for any number of ranks, and rank 0 can write it alone. Why
not torch's `model_averaging`: docs/decisions/0016-sync-methods.md.
"""

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from stoker.config.sync_method import DEFAULT_BUCKET_MIB, SyncMethod
from stoker.data.batch import Batch
from stoker.training.resume import Resumed
from stoker.training.several import MultiProcess
from stoker.training.state import EventLogger, TrainSetup
from stoker.training.step import LossFn

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.5
"""DiLoCo's 0.7, and less than its momentum of 0.9, which it found for rounds of 500 steps: with 8 steps, the changes of
rounds are so much alike that it would add up to seven times a step (AP 0.010 instead of 0.151 on BCCD after 150 steps,
docs/devices.md). 0.5 is the momentum of MuLoCo for rounds of 30 (Therien et al. 2025, arXiv 2505.23725)."""


def outer_step(anchor: Tensor, momentum: Tensor, gradient: Tensor) -> None:
    """A step of SGD with Nesterov's momentum, as torch.optim.SGD defines it, in place."""
    momentum.mul_(OUTER_MOMENTUM).add_(gradient)
    anchor.sub_(gradient.add(momentum, alpha=OUTER_MOMENTUM), alpha=OUTER_LR)


def flatten(tensors: list[Tensor]) -> Tensor:
    """Copies of all tensors, one after the other [N]."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@torch.no_grad()
def write_flat(tensors: list[Tensor], flat: Tensor) -> None:
    """The reverse of `flatten`, in place."""
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


class _Replicas(MultiProcess):
    """Ranks that each have the whole model."""

    def warm_up(self, make_batch: Callable[[], Batch]) -> None:
        """A forward and a backward pass that change nothing, also of what is compiled: a failure ends the run.

        DistributedDataParallel rearranges its buckets after the first one. The arrangement decides the order in which
        three and more ranks are summed: without this, the first step of a resumed run would be rounded differently than
        the same step of an undisturbed one.
        """
        try:
            self.rehearse(make_batch())
        finally:
            self.signals.grad = None


class Ddp(_Replicas):
    """Ranks whose gradients are averaged in each step."""

    exchanges_in_backward = True

    def __init__(self, setup: TrainSetup, log_event: EventLogger, sync: SyncMethod) -> None:
        super().__init__(setup, log_event)
        self._is_exact = sync.kind == "plain"
        # With an explicit size the first bucket is not smaller than the others, so the default is left out.
        losses = _Losses(setup.model, self.loss_fn, self.signals if self._is_exact else None)
        with warnings.catch_warnings():  # torch 2.15 has another name for broadcast_buffers, 2.11 does not
            warnings.simplefilter("ignore", FutureWarning)
            self._ddp = DistributedDataParallel(
                losses,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                bucket_cap_mb=None if sync.number == DEFAULT_BUCKET_MIB else sync.number,
            )
        self.loss_fn = self._ddp
        if not self._is_exact:
            self._ddp.register_comm_hook(None, _exchange_in_bf16)

    def exchanging(self, is_last: bool) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if is_last else self._ddp.no_sync()

    def exchange(self, own: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self._is_exact:
            torch.distributed.all_reduce(own)
            own = own / self.ranks.world_size
        return own, None


class Periodic(_Replicas):
    """Ranks that update their own weights and average them after every N steps."""

    saves_together = True

    def __init__(self, setup: TrainSetup, log_event: EventLogger, sync: SyncMethod) -> None:
        super().__init__(setup, log_event)
        self._every = sync.number
        self._sync_state: dict[str, Any] | None = None
        self._equal_at = -1
        """Step for which `equalize` was called: means of equal numbers may be rounded."""
        self._load(None)

    def exchange(self, own: Tensor) -> tuple[Tensor, Tensor | None]:
        grad_norm = self.optimizer.own_grad_norm()
        means, norm = self.exchange_with_norm(own[: len(own) - self.norm_stats.numel()], grad_norm)
        return means, torch.where(norm < math.inf, grad_norm, math.inf)

    def after_update(self) -> None:
        if (self.setup.state.step + 1) % self._every:
            return
        weights, size = self.optimizer.weights(), self._anchor.numel()
        means = self._mean(torch.cat([self._anchor - flatten(weights), self.norm_stats]))
        outer_step(self._anchor, self._momentum, means[:size])
        write_flat(weights, self._anchor)
        self.norm_stats.copy_(means[size:])
        self.optimizer.keep_running_stats()

    def equalize(self) -> None:
        """Makes weights, moments, EMA and running statistics their means over the ranks."""
        step = self.setup.state.step
        if self._equal_at == step:
            return
        for tensors in self.optimizer.replicated():
            write_flat(tensors, self._mean(flatten(tensors)))
        self.optimizer.keep_running_stats()
        self._sync_state, self._equal_at = {"anchor": self._anchor, "momentum": self._momentum}, step

    def state(self) -> dict[str, Any]:
        return {"sync": self._sync_state}

    def resume(self, resumed: Resumed) -> None:
        super().resume(resumed)
        self._sync_state = None if resumed.saved is None else resumed.saved.get("sync")
        self._equal_at = self.setup.state.step
        self._load(self._sync_state)

    def _load(self, state: dict[str, Any] | None) -> None:
        """Restores the outer optimizer; None: starts from the weights."""
        weights = flatten(self.optimizer.weights())
        if state is None or "anchor" not in state or state["anchor"].shape != weights.shape:
            self._anchor, self._momentum = weights, torch.zeros_like(weights)
        else:
            self._anchor = state["anchor"].to(weights, copy=True)
            self._momentum = state["momentum"].to(weights, copy=True)

    def _mean(self, own: Tensor) -> Tensor:
        """Replaces a tensor by its mean over the ranks."""
        dist.all_reduce(own)
        return own.div_(self.ranks.world_size)


def _exchange_in_bf16(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """torch's hook under another name: by its own, DistributedDataParallel refuses it without NCCL, though gloo can."""
    return default_hooks.bf16_compress_hook(None, bucket)  # type: ignore[arg-type]


class _Losses(nn.Module):
    """What DistributedDataParallel wraps. signals: their parameter, if it is to be exchanged with the gradients."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, signals: nn.Parameter | None) -> None:
        super().__init__()
        self.model, self.signals, self._loss_fn = model, signals, loss_fn

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self._loss_fn(batch)
