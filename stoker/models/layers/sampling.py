"""Which anchors or regions a loss looks at: a few of each image by lot, in fixed slots and without a host sync.

The lots are no generator's: they are a hash of the image's own number in `batch.draw` and of each candidate's
place, so they depend on (seed, epoch, index) alone, on every device and after every resume.
"""

from typing import NamedTuple

import torch
from torch import Tensor

KEY_RANGE = 2**32
"""A lot is a number in [0, LOTS); the least ones win."""


class SampledIndices(NamedTuple):
    """S slots of each image: the positive ones first, then the negative ones, then the empty ones."""

    indices: Tensor
    """int64 [B, S], 0 … N-1; any candidate where not `taken`."""
    positive: Tensor
    """bool [B, S]."""
    valid: Tensor
    """bool [B, S]."""

    def gather(self, values: Tensor) -> Tensor:
        """What the slots' candidates have of `values` [B, N] or [B, N, D]: [B, S] or [B, S, D]."""
        return batched_gather(values, self.indices)


def batched_gather(values: Tensor, index: Tensor) -> Tensor:
    """The rows `index` [B, S] of `values` [B, N] or [B, N, D]: [B, S] or [B, S, D]."""
    if values.dim() == 2:
        return values.gather(1, index)
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[2]))


def random_keys(rand: Tensor, count: int, *, stream: int) -> Tensor:
    """int64 [B, count] in [0, LOTS), no two of a image alike; draw: float32 [B] in [0, 1), 24 bits of it count;
    purpose: 0 … 255, so that two draws of one image do not follow each other."""
    seed = _hash((rand * 2**24).to(torch.int64) + (stream << 24))
    return _hash(seed[:, None] ^ torch.arange(count, device=rand.device))


def _hash(x: Tensor) -> Tensor:
    """A one-to-one mixing of int64 in [0, 2^32): xor-shifts and odd products (T. Mueller's integer hash). Its factor is
    small enough that no product leaves the 63 bits."""
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & (KEY_RANGE - 1)
    return x ^ (x >> 16)


def sample_balanced(
    keys: Tensor, positive: Tensor, negative: Tensor, *, num_samples: int, max_positives: int
) -> SampledIndices:
    """The first `positives` positive candidates by lot, and negative ones in the slots that are left.

    lots: int64 [B, N], different within a image; positive, negative: bool [B, N], never both. The rule of
    torchvision's BalancedPositiveNegativeSampler: where there are too few negatives, slots stay empty.
    """
    max_positive_key = (
        torch.where(positive, keys, KEY_RANGE).topk(min(max_positives, keys.shape[1]), largest=False).values[:, -1:]
    )
    sort_keys = torch.where(
        positive & (keys <= max_positive_key), keys, torch.where(negative, keys + KEY_RANGE, 2 * KEY_RANGE)
    )
    value, indices = sort_keys.topk(min(num_samples, keys.shape[1]), largest=False)
    return SampledIndices(indices, value < KEY_RANGE, value < 2 * KEY_RANGE)
