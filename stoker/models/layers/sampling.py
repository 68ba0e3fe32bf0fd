"""Samples a fixed number of anchors or RoIs per image at random, with fixed shapes and without host syncs.

There is no random generator: the sort keys are a hash of the image's random number in `Batch.rand` and of each
candidate's index. So they depend only on (seed, epoch, index), on every device and after every resume.
"""

from typing import NamedTuple

import torch
from torch import Tensor

KEY_RANGE = 2**32
"""Random keys are in [0, KEY_RANGE); the smallest are sampled."""


class SampledIndices(NamedTuple):
    """S samples of each image: positive ones first, then negative ones, then padding."""

    indices: Tensor
    """int64 [B, S], 0 … N-1; any candidate where not valid."""
    positive: Tensor
    """bool [B, S]."""
    valid: Tensor
    """bool [B, S]."""

    def gather(self, values: Tensor) -> Tensor:
        """The samples of `values` [B, N] or [B, N, D]: [B, S] or [B, S, D]."""
        return batched_gather(values, self.indices)


def batched_gather(values: Tensor, index: Tensor) -> Tensor:
    """The rows `index` [B, S] of `values` [B, N] or [B, N, D]: [B, S] or [B, S, D]."""
    if values.dim() == 2:
        return values.gather(1, index)
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[2]))


def random_keys(rand: Tensor, count: int, *, stream: int) -> Tensor:
    """int64 [B, count] in [0, KEY_RANGE), different within an image; rand: float32 [B] in [0, 1), of which 24 bits are
    used; stream: 0 … 255, for independent keys of one image."""
    seed = _hash((rand * 2**24).to(torch.int64) + (stream << 24))
    return _hash(seed[:, None] ^ torch.arange(count, device=rand.device))


def _hash(x: Tensor) -> Tensor:
    """A bijective hash of int64 in [0, 2^32): xor-shifts and odd factors (T. Mueller's integer hash). The factor is
    small enough that no product exceeds 63 bits."""
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & (KEY_RANGE - 1)
    return x ^ (x >> 16)


def sample_balanced(
    keys: Tensor, positive: Tensor, negative: Tensor, *, num_samples: int, max_positives: int
) -> SampledIndices:
    """At most `max_positives` positive candidates, and negative ones up to `num_samples`, by ascending key.

    keys: int64 [B, N], different within an image; positive, negative: bool [B, N], never both. The rule of
    torchvision's BalancedPositiveNegativeSampler: with too few negatives there are fewer samples.
    """
    max_positive_key = (
        torch.where(positive, keys, KEY_RANGE).topk(min(max_positives, keys.shape[1]), largest=False).values[:, -1:]
    )
    sort_keys = torch.where(
        positive & (keys <= max_positive_key), keys, torch.where(negative, keys + KEY_RANGE, 2 * KEY_RANGE)
    )
    value, indices = sort_keys.topk(min(num_samples, keys.shape[1]), largest=False)
    return SampledIndices(indices, value < KEY_RANGE, value < 2 * KEY_RANGE)
