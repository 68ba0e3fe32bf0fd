"""Counts that a loss is divided by, over the ranks of a training.

A loss that is divided by a count of the batch (positive points, sampled anchors) needs the count of the whole batch:
the mean over ranks of sums divided by their own counts is another loss. So while a step of several ranks runs
(`counting_over_ranks`), counts are exchanged; elsewhere a rank computes alone. For gradients see `training/ddp.py`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_num_ranks = 1


@contextlib.contextmanager
def counting_over_ranks(num_ranks: int) -> Iterator[None]:
    """In the block, all ranks compute the same losses at the same time."""
    global _num_ranks
    previous, _num_ranks = _num_ranks, num_ranks
    try:
        yield
    finally:
        _num_ranks = previous


def num_exchanging_ranks() -> int:
    """The ranks that compute together now; 1 outside of `counting_over_ranks`."""
    return _num_ranks


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        total = x.clone()
        torch.distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()  # of the losses of all ranks
        torch.distributed.all_reduce(total)
        return total


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum over the ranks that compute together, with its gradient."""
    return _SumOverRanks.apply(x)


def loss_divisor(count: Tensor) -> Tensor:
    """What a sum of losses over this rank's images is divided by, so that its mean over ranks is the sum over all
    images, divided by the count over all images (at least 1). count: scalar of this rank, without a gradient."""
    if _num_ranks == 1:
        return count.clamp(min=1)
    total = count.detach().to(count.dtype if count.is_floating_point() else torch.float32, copy=True)
    torch.distributed.all_reduce(total)
    return total.clamp(min=1) / _num_ranks
