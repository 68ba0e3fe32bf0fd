"""Ranks that update their own weights and average them after every N steps: `--sync every:N`.

DiLoCo (Douillard et al. 2023): after N steps, the mean of what the ranks have changed is the gradient of an outer
optimizer, SGD with Nesterov's momentum, whose weights all ranks continue from. The optimizer of the steps stays that of
the rank.

Weights, moments and EMA of the ranks differ between two averages. Before an evaluation and before a checkpoint, all of
them are replaced by their means (`equalize`), without a step of the outer optimizer. So a checkpoint is that of one
model, for any number of ranks, and rank 0 can write it alone. A step with a gradient that is not finite in any rank is
skipped by all (`ddp.py`). Why not torch's `model_averaging`: docs/decisions/0016-sync-methods.md.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.training.optim import OptimizerStep
from stoker.training.ranks import Ranks

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.5
"""DiLoCo's 0.7, and less than its momentum of 0.9, which it found for rounds of 500 steps: with 8 steps, the changes of
rounds are so much alike that it would add up to seven times a step (AP 0.010 instead of 0.151 on BCCD after 150 steps,
docs/scaling.md). 0.5 is the momentum of MuLoCo for rounds of 30 (Therien et al. 2025, arXiv 2505.23725)."""


class LocalSteps:
    """Every method is called by all ranks at the same step."""

    def __init__(self, optimizer: OptimizerStep[Any], ranks: Ranks, every: int) -> None:
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
        """What a checkpoint keeps besides."""
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
        """Over the ranks, in place."""
        dist.all_reduce(own)
        return own.div_(self._ranks.world_size)


def outer_step(anchor: Tensor, momentum: Tensor, gradient: Tensor) -> None:
    """A step of SGD with Nesterov's momentum, as torch.optim.SGD defines it, in place."""
    momentum.mul_(OUTER_MOMENTUM).add_(gradient)
    anchor.sub_(gradient.add(momentum, alpha=OUTER_MOMENTUM), alpha=OUTER_LR)


def flatten(tensors: list[Tensor]) -> Tensor:
    """Copies of all, one after the other [N]."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@torch.no_grad()
def write_flat(tensors: list[Tensor], flat: Tensor) -> None:
    """The reverse of `flatten`, in place."""
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
