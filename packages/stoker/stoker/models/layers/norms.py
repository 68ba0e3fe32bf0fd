"""BatchNorm of a backbone: frozen, trained, or synchronized. `convolutions.py` folds frozen ones into convolutions."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.hardware.xla import XLA_KINDS
from stoker.models.layers.rank_mean import num_exchanging_ranks, sum_over_ranks

Norm = Callable[[int], nn.Module]
NormKind = Literal["frozen_bn", "bn", "sync_bn"]


class DerivedBuffers(nn.Module):
    """A module with buffers that `update_buffers` computes: again after `double` and similar, which only cast them."""

    def update_buffers(self) -> None:
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.update_buffers()
        return self


class FrozenBatchNorm2d(DerivedBuffers):
    """BatchNorm2d with constant statistics, weight and bias, under the names of BatchNorm2d."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    scale: Tensor
    shift: Tensor

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.folded = False
        """Whether the convolution before it computes the norm as well."""
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))
        for name in ("scale", "shift"):
            self.register_buffer(name, torch.empty(channels), persistent=False)
        self.update_buffers()

    def update_buffers(self) -> None:
        """Computes `scale` and `shift`, once per loaded set of weights instead of once a step."""
        if self.weight.is_meta:  # no values (`weights/load.py`)
            return
        with torch.no_grad():
            self.scale.copy_(self.weight * (self.running_var + self.eps).rsqrt())
            self.shift.copy_(self.bias - self.running_mean * self.scale)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.update_buffers()

    def forward(self, x: Tensor) -> Tensor:
        if self.folded:
            return x
        scale, shift = self.scale.to(x.dtype), self.shift.to(x.dtype)
        return torch.addcmul(shift[:, None, None], x, scale[:, None, None])


class SafeBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d that accepts one value per channel, where torch raises ValueError as there is no variance.

    The coarsest map of a single image can be that small. It is normalized by the running statistics, which stay.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or x.numel() > x.shape[1]:
            return super().forward(x) if x.device.type not in XLA_KINDS else self._forward_xla(x)
        stats = self.running_mean, self.running_var
        return functional.batch_norm(x, *stats, self.weight, self.bias, False, 0.0, self.eps)

    def _forward_xla(self, x: Tensor) -> Tensor:
        """torch_xla puts the variance over n values into `running_var`, torch n / (n - 1) times that."""
        if not self.training or self.running_mean is None or self.running_var is None or self.momentum is None:
            return super().forward(x)
        with torch.no_grad():
            variance, mean = torch.var_mean(x.to(self.running_var.dtype), (0, 2, 3))
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance, self.momentum)
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
        return functional.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)


class SafeSyncBatchNorm(SafeBatchNorm2d):
    """Normalizes by the batches of all ranks in a step of several (`counting_over_ranks`), also on CPUs.

    Not a torch.nn.SyncBatchNorm: that is for GPUs only, and would wait for others where a rank tries batch sizes alone.
    All ranks have maps of one size, so all take the same branch.
    """

    def forward(self, x: Tensor) -> Tensor:
        if num_exchanging_ranks() == 1 or not self.training:
            return super().forward(x)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        ranks = num_exchanging_ranks()
        if x.device.type != "cpu":
            from torch.nn.modules._functions import SyncBatchNorm

            group, running = torch.distributed.group.WORLD, (self.running_mean, self.running_var)
            return SyncBatchNorm.apply(x, self.weight, self.bias, *running, self.eps, self.momentum, group, ranks)
        count = ranks * x.numel() // x.shape[1]
        exact = x.to(self.weight.dtype)
        mean = sum_over_ranks(exact.sum((0, 2, 3))) / count
        centered = exact - mean[:, None, None]
        variance = sum_over_ranks(centered.square().sum((0, 2, 3))) / count
        assert self.momentum is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        scale = self.weight * (variance + self.eps).rsqrt()
        return torch.addcmul(self.bias[:, None, None], centered, scale[:, None, None]).to(x.dtype)


@contextlib.contextmanager
def installed(places: Sequence[tuple[dict[str, Any], str]], values: Sequence[Any]) -> Iterator[None]:
    """In the block, the entries `places` of dictionaries have these values."""
    before = [owner[name] for owner, name in places]
    try:
        for (owner, name), value in zip(places, values, strict=True):
            owner[name] = value
        yield
    finally:
        for (owner, name), value in zip(places, before, strict=True):
            owner[name] = value


class BatchCounts:
    """Counts the batches of all trained norms of `model` by one operator instead of one for each norm.

    torch's norms add 1 to `num_batches_tracked` in their forward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self._norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    @contextlib.contextmanager
    def defer(self) -> Iterator[None]:
        """Inside, the norms' counts are not changed; at the end they are what they would be without it."""
        norms = [norm for norm in self._norms if norm.training and norm.num_batches_tracked is not None]
        counts = [norm.num_batches_tracked for norm in norms]
        deferred = [_DeferredCount() for _ in norms]
        with installed([(norm._buffers, "num_batches_tracked") for norm in norms], deferred):
            yield
        by_value: dict[int, list[Tensor]] = {}
        for count, stand_in in zip(counts, deferred, strict=True):
            if stand_in.value and count is not None:
                by_value.setdefault(stand_in.value, []).append(count)
        for value, same in by_value.items():
            torch._foreach_add_(same, value)


class _DeferredCount:
    """Takes the place of `num_batches_tracked` in a norm's forward pass."""

    value = 0

    def add_(self, number: int) -> None:
        self.value += number


NORMS: dict[NormKind, Norm] = {"frozen_bn": FrozenBatchNorm2d, "bn": SafeBatchNorm2d, "sync_bn": SafeSyncBatchNorm}
"""Value of `--backbone-norm` → norm. SyncBatchNorm with one process equals BatchNorm2d."""

LITE_EPS, LITE_MOMENTUM = 1e-3, 0.03
"""As torchvision trained SSDlite. TF's lite models have a momentum of 0.003: too small for a few hundred steps."""


def trainable_norm(kind: NormKind) -> NormKind:
    """The kind for layers outside the backbone, which are trained even if the backbone's norms are frozen."""
    return "sync_bn" if kind == "sync_bn" else "bn"


def lite_norm(kind: NormKind) -> Norm:
    if kind == "frozen_bn":
        return partial(FrozenBatchNorm2d, eps=LITE_EPS)
    return partial(SafeSyncBatchNorm if kind == "sync_bn" else SafeBatchNorm2d, eps=LITE_EPS, momentum=LITE_MOMENTUM)
