"""Ranks that update their own weights and average them: `--sync every:N` and `--sync gossip`.

`every:N` is DiLoCo (Douillard et al. 2023): after N steps, the mean of what the ranks have changed is the gradient of
an outer optimizer, SGD with Nesterov's momentum, whose weights all ranks continue from. The optimizer of the steps
stays that of the rank. `gossip` is D-PSGD (Lian et al. 2017) on a ring: in each step a rank takes the mean of its
weights and those of a neighbor, the left and the right one in turn; they travel while the step is computed.

Weights, moments and EMA of the ranks differ between two averages. Before an evaluation and before a checkpoint, all of
them are replaced by their means (`equalize`), without a step of the outer optimizer. So a checkpoint is that of one
model, for any number of ranks, and rank 0 can write it alone. A step with a gradient that is not finite in any rank is
skipped by all (`replica.py`).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.config.sync_method import SyncMethod
from stoker.training.optim import OptimizerStep
from stoker.training.ranks import Ranks

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.5
"""DiLoCo's 0.7, and less than its momentum of 0.9, which it found for rounds of 500 steps: with 8 steps, the changes of
rounds are so much alike that it would add up to seven times a step (AP 0.010 instead of 0.151 on BCCD after 150 steps,
docs/scaling.md). 0.5 is the momentum of MuLoCo for rounds of 30 (Therien et al. 2025, arXiv 2505.23725)."""


class LocalSteps:
    """What is common to both. Every method is called by all ranks at the same step."""

    def __init__(self, optimizer: OptimizerStep[Any], ranks: Ranks) -> None:
        self.optimizer, self.ranks = optimizer, ranks

    def begin_step(self, step: int) -> None:
        """Before the forward pass. step: steps before it."""

    def finish_step(self, step: int) -> None:
        """After the update of the weights. step: steps with it."""

    def equalize(self) -> None:
        """Makes weights, moments, EMA and running statistics their means over the ranks."""
        for tensors in self.optimizer.replicated():
            write_flat(tensors, self.mean(flatten(tensors)))
        self.optimizer.keep_running_stats()

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint keeps besides; None: nothing."""
        return None

    def load(self, state: dict[str, Any] | None) -> None:
        """Restores what `state` returned; None: starts from the weights."""

    def mean(self, own: Tensor) -> Tensor:
        """Over the ranks, in place."""
        dist.all_reduce(own)
        return own.div_(self.ranks.world_size)


class PeriodicAveraging(LocalSteps):
    """`every:N`."""

    def __init__(self, optimizer: OptimizerStep[Any], ranks: Ranks, every: int) -> None:
        super().__init__(optimizer, ranks)
        self._every = every
        self.load(None)

    def finish_step(self, step: int) -> None:
        if step % self._every:
            return
        weights, stats = self.optimizer.weights(), self.optimizer.norm_stats
        means = self.mean(torch.cat([self._anchor - flatten(weights), stats]))
        outer_step(self._anchor, self._momentum, means[: self._anchor.numel()])
        write_flat(weights, self._anchor)
        stats.copy_(means[self._anchor.numel() :])
        self.optimizer.keep_running_stats()

    def state(self) -> dict[str, Any]:
        return {"anchor": self._anchor, "momentum": self._momentum}

    def load(self, state: dict[str, Any] | None) -> None:
        weights = flatten(self.optimizer.weights())
        if state is None or "anchor" not in state or state["anchor"].shape != weights.shape:
            self._anchor, self._momentum = weights, torch.zeros_like(weights)
        else:
            self._anchor = state["anchor"].to(weights, copy=True)
            self._momentum = state["momentum"].to(weights, copy=True)


class Gossip(LocalSteps):
    """`gossip`."""

    def __init__(self, optimizer: OptimizerStep[Any], ranks: Ranks) -> None:
        super().__init__(optimizer, ranks)
        self._exchange: tuple[Tensor, Tensor, list[dist.Work]] | None = None

    def begin_step(self, step: int) -> None:
        own = flatten([*self.optimizer.weights(), self.optimizer.norm_stats])
        neighbors = torch.empty_like(own)
        to, source = neighbors_at(step, self.ranks.rank, self.ranks.world_size)
        # gloo sends nothing before the receiver is ready, and says so on the connection that carries its own data: a
        # receive that is asked for after the send waits until that is through.
        operations = [dist.P2POp(dist.irecv, neighbors, source), dist.P2POp(dist.isend, own, to)]
        self._exchange = own, neighbors, dist.batch_isend_irecv(operations)

    def finish_step(self, step: int) -> None:
        del step
        assert self._exchange is not None
        (own, neighbors, works), self._exchange = self._exchange, None
        for work in works:
            work.wait()
        targets = [*self.optimizer.weights(), self.optimizer.norm_stats]
        # The step was computed from `own`; its change is kept, and half of the way to the neighbor is added.
        write_flat(targets, flatten(targets).add_(neighbors.sub_(own), alpha=0.5))
        self.optimizer.keep_running_stats()


def make_local_steps(method: SyncMethod, optimizer: OptimizerStep[Any], ranks: Ranks) -> LocalSteps | None:
    """None for the methods that exchange gradients."""
    makers: dict[str, Callable[[], LocalSteps]] = {
        "every": lambda: PeriodicAveraging(optimizer, ranks, method.number),
        "gossip": lambda: Gossip(optimizer, ranks),
    }
    return makers[method.kind]() if method.kind in makers else None


def outer_step(anchor: Tensor, momentum: Tensor, gradient: Tensor) -> None:
    """A step of SGD with Nesterov's momentum, as torch.optim.SGD defines it, in place."""
    momentum.mul_(OUTER_MOMENTUM).add_(gradient)
    anchor.sub_(gradient.add(momentum, alpha=OUTER_MOMENTUM), alpha=OUTER_LR)


def neighbors_at(step: int, rank: int, world_size: int) -> tuple[int, int]:
    """(rank to send to, rank to receive from): around the ring, in the other direction in every other step."""
    shift = 1 if step % 2 == 0 else -1
    return (rank + shift) % world_size, (rank - shift) % world_size


def flatten(tensors: list[Tensor]) -> Tensor:
    """Copies of all, one after the other [N]."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@torch.no_grad()
def write_flat(tensors: list[Tensor], flat: Tensor) -> None:
    """The reverse of `flatten`, in place."""
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
