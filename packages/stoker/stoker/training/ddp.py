"""Each rank has the whole model and a part of the batch.

`Ddp` averages the gradients of each step: torch's DistributedDataParallel exchanges them in buckets while the backward
pass still runs, once per step, also with accumulation, and the signals of the step (`several.py`) in one of them. A
compiled step is cut at the borders of the buckets (torch's DDPOptimizer).

With `--sync bf16` and `powersgd`, a `GradientHook` compresses the buckets, by torch's own `ddp_comm_hooks`. Added is
what these leave to the user: PowerSGD's state survives a checkpoint and a step with gradients that are not finite,
which would otherwise stay in its error feedback for ever. The signals have an exchange of their own, in full precision.

`Periodic` averages weights instead, after every N steps (`--sync every:N`). If the gradient is not finite in one rank,
all skip the step; each clips its gradient by its own norm, and reports that. `LocalSteps` is DiLoCo (Douillard et al.
2023): the mean of what the ranks have changed is the gradient of an outer optimizer, SGD with Nesterov's momentum.
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
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from stoker.config.sync_method import DEFAULT_BUCKET_MIB, SyncMethod
from stoker.data.batch import Batch
from stoker.training.optim import OptimizerStep
from stoker.training.ranks import Ranks
from stoker.training.resume import Resumed
from stoker.training.several import MultiProcess
from stoker.training.state import EventLogger, TrainSetup
from stoker.training.step import LossFn

POWERSGD_START = 10
"""Steps before the first compressed one. torch's guide takes a tenth of the training, which on a slow link would cost
more than all others; 2 is the smallest number that DistributedDataParallel allows."""
ONE_BUCKET_MIB = 1 << 20


class GradientHook:
    """The exchange of a method. Called by all ranks at the same step. powersgd: Vogels et al. 2019, each matrix of
    gradients as a product of two with few columns; the error is added to the next step's gradients."""

    def __init__(self, method: SyncMethod, ranks: Ranks) -> None:
        self._method, self._ranks = method, ranks
        self.keeps_state = method.kind == "powersgd"
        self.is_paused = False
        """Whether the exchanges leave no trace in the state."""
        self._good_factors: dict[int, Tensor] = {}
        self.load(None)

    def finish_step(self, found_inf: Tensor) -> None:
        """After the update of the weights, which was skipped if `found_inf` is 1."""
        for bucket, factor in self._powersgd.q_memory_dict.items():
            good = self._good_factors.get(bucket)
            if good is None or good.shape != factor.shape:
                good = self._good_factors[bucket] = torch.ones_like(factor)  # is made orthogonal before it is used
            torch.where(found_inf > 0, good, factor, out=good)
            factor.copy_(good)
            error = self._powersgd.error_dict[bucket]
            error.copy_(torch.where(found_inf > 0, 0.0, error))

    def equalize(self) -> None:
        """The errors become their mean: together, the ranks still add what was left out so far."""
        for bucket in sorted(self._powersgd.error_dict):
            error = self._powersgd.error_dict[bucket]
            dist.all_reduce(error)
            error.div_(self._ranks.world_size)

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint keeps, after `equalize`; None: nothing. Not torch's `PowerSGDState.__getstate__`: it has
        NumPy's random generator, from which nothing draws once the factors are there."""
        kept = self._powersgd
        if not self.keeps_state:
            return None
        tables = {"errors": kept.error_dict, "p": kept.p_memory_dict, "q": kept.q_memory_dict}
        return {"steps": kept.iter} | {name: dict(table) for name, table in tables.items()}

    def load(self, state: dict[str, Any] | None) -> None:
        """Restores what `state` returned; None: the state before the first step."""
        self._good_factors.clear()
        self._powersgd = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=self._method.number,
            start_powerSGD_iter=POWERSGD_START,
            compression_stats_logging_frequency=1 << 60,
        )
        if state is not None and "errors" in state:
            self._powersgd.iter = state["steps"]
            self._powersgd.error_dict = dict(state["errors"])
            self._powersgd.p_memory_dict = dict(state["p"])
            self._powersgd.q_memory_dict = dict(state["q"])

    def exchange(self, _: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        if self.is_paused:
            return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]
        if not self.keeps_state:
            return default_hooks.bf16_compress_hook(None, bucket)  # type: ignore[arg-type]
        self._fit(bucket)
        return powerSGD_hook.powerSGD_hook(self._powersgd, bucket)

    def _fit(self, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
        """Moves restored tensors to the device; forgets those of another arrangement of buckets."""
        kept, number, buffer = self._powersgd, bucket.index(), bucket.buffer()
        error = kept.error_dict.get(number)
        if error is None or (error.shape == buffer.shape and error.device == buffer.device):
            return
        for table in (kept.error_dict, kept.p_memory_dict, kept.q_memory_dict):
            if error.shape != buffer.shape:
                table.pop(number, None)
            else:
                table[number] = table[number].to(buffer.device)


OUTER_LR, OUTER_MOMENTUM = 0.7, 0.5
"""DiLoCo's 0.7, and less than its momentum of 0.9, which it found for rounds of 500 steps: with 8 steps, the changes of
rounds are so much alike that it would add up to seven times a step (AP 0.010 instead of 0.151 on BCCD after 150 steps,
docs/devices.md). 0.5 is the momentum of MuLoCo for rounds of 30 (Therien et al. 2025, arXiv 2505.23725)."""


class LocalSteps:
    """The outer optimizer of DiLoCo. All ranks call each method at the same step."""

    def __init__(self, optimizer: OptimizerStep, ranks: Ranks, every: int) -> None:
        self._optimizer, self._ranks, self._every = optimizer, ranks, every
        self.load(None)

    def finish_step(self, step: int) -> None:
        """After the update of the weights. step: steps with it."""
        if step % self._every:
            return
        weights, stats = self._optimizer.weights(), self._optimizer.norm_stats
        means = self._mean(torch.cat([self._anchor - flatten(weights), stats]))
        outer_step(self._anchor, self._momentum, means[: self._anchor.numel()])
        write_flat(weights, self._anchor)
        stats.copy_(means[self._anchor.numel() :])
        self._optimizer.keep_running_stats()

    def equalize(self) -> None:
        """Makes weights, moments, EMA and running statistics their means over the ranks."""
        for tensors in self._optimizer.replicated():
            write_flat(tensors, self._mean(flatten(tensors)))
        self._optimizer.keep_running_stats()

    def state(self) -> dict[str, Any]:
        """Its part of a checkpoint."""
        return {"anchor": self._anchor, "momentum": self._momentum}

    def load(self, state: dict[str, Any] | None) -> None:
        """Restores what `state` returned; None: starts from the weights."""
        weights = flatten(self._optimizer.weights())
        if state is None or "anchor" not in state or state["anchor"].shape != weights.shape:
            self._anchor, self._momentum = weights, torch.zeros_like(weights)
        else:
            self._anchor = state["anchor"].to(weights, copy=True)
            self._momentum = state["momentum"].to(weights, copy=True)

    def _mean(self, own: Tensor) -> Tensor:
        """Replaces a tensor by its mean over the ranks."""
        dist.all_reduce(own)
        return own.div_(self._ranks.world_size)


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

    keeper: GradientHook | LocalSteps | None = None
    """What is kept from step to step and differs between ranks."""

    def __init__(self, setup: TrainSetup, log_event: EventLogger) -> None:
        super().__init__(setup, log_event)
        self._sync_state: dict[str, Any] | None = None
        self._equal_at = -1
        """Step for which `equalize` was called: means of equal numbers may be rounded."""

    def equalize(self) -> None:
        step = self.setup.state.step
        if self.keeper is not None and self._equal_at != step:
            self.keeper.equalize()
            self._sync_state, self._equal_at = self.keeper.state(), step

    def state(self) -> dict[str, Any]:
        return {"sync": self._sync_state}

    def resume(self, resumed: Resumed) -> None:
        super().resume(resumed)
        self._sync_state = None if resumed.saved is None else resumed.saved.get("sync")
        self._equal_at = self.setup.state.step
        if self.keeper is not None:
            self.keeper.load(self._sync_state)

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
        self._hook = GradientHook(sync, setup.ranks) if sync.kind in ("bf16", "powersgd") else None
        if self._hook is not None and self._hook.keeps_state:
            self.keeper, self.saves_together = self._hook, True
        super().__init__(setup, log_event)
        size = sync.number
        if sync.kind == "powersgd":
            # With gloo, what it does after the first exchange runs in threads: ranks share the order within one bucket.
            size = ONE_BUCKET_MIB if setup.device.is_cpu else DEFAULT_BUCKET_MIB
        # With an explicit size the first bucket is not smaller than the others, so the default is left out.
        losses = _Losses(setup.model, self.loss_fn, self.signals if self._hook is None else None)
        with warnings.catch_warnings():  # torch 2.15 has another name for broadcast_buffers, 2.11 does not
            warnings.simplefilter("ignore", FutureWarning)
            self._ddp = DistributedDataParallel(
                losses,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                bucket_cap_mb=None if size == DEFAULT_BUCKET_MIB else size,
            )
        self.loss_fn = self._ddp
        if self._hook is not None:
            self._ddp.register_comm_hook(None, self._hook.exchange)

    def exchanging(self, is_last: bool) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if is_last else self._ddp.no_sync()

    def exchange(self, own: Tensor) -> tuple[Tensor, Tensor | None]:
        if self._hook is not None:
            torch.distributed.all_reduce(own)
            own = own / self.ranks.world_size
        return own, None

    def after_update(self, found_inf: Tensor) -> None:
        if self._hook is not None:
            self._hook.finish_step(found_inf)

    def warm_up(self, make_batch: Callable[[], Batch]) -> None:
        if self._hook is None:
            super().warm_up(make_batch)
            return
        self._hook.is_paused = True
        try:
            super().warm_up(make_batch)
        finally:
            self._hook.is_paused = False


class Periodic(_Replicas):
    """Ranks that update their own weights and average them after every N steps."""

    saves_together = True

    def __init__(self, setup: TrainSetup, log_event: EventLogger, sync: SyncMethod) -> None:
        super().__init__(setup, log_event)
        self.keeper: LocalSteps = LocalSteps(setup.optimizer, setup.ranks, sync.number)

    def exchange(self, own: Tensor) -> tuple[Tensor, Tensor | None]:
        grad_norm = self.optimizer.own_grad_norm()
        means, norm = self.exchange_with_norm(own[: len(own) - self.norm_stats.numel()], grad_norm)
        return means, torch.where(norm < math.inf, grad_norm, math.inf)

    def after_update(self, found_inf: Tensor) -> None:
        del found_inf
        self.keeper.finish_step(self.setup.state.step + 1)


class _Losses(nn.Module):
    """What DistributedDataParallel wraps. signals: their parameter, if it is to be exchanged with the gradients."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, signals: nn.Parameter | None) -> None:
        super().__init__()
        self.model, self.signals, self._loss_fn = model, signals, loss_fn

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self._loss_fn(batch)
