"""How DistributedDataParallel exchanges gradients with `--sync bf16` and `powersgd`.

The compression is torch's own (`torch.distributed.algorithms.ddp_comm_hooks`). Added is what these hooks leave to the
user: PowerSGD's state survives a checkpoint and a step with gradients that are not finite, which would otherwise stay
in its error feedback for ever, and its first steps, also the one before a continued run, are not compressed.

The signals of a step (`several.py`) are not compressed: they are exchanged on their own after the gradients.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from stoker.config.sync_method import SyncMethod
from stoker.training.ranks import Ranks

POWERSGD_START = 10
"""Steps before the first compressed one. torch's guide takes a tenth of the training, which on a slow link would cost
more than all others; 2 is the smallest number that DistributedDataParallel allows."""
ONE_BUCKET_MIB = 1 << 20


class GradientHook:
    """The exchange of a method. Every method of it is called by all ranks at the same step.

    powersgd: Vogels et al. 2019, each matrix of gradients as a product of two with few columns; the error is added to
    the next step's gradients. bf16 keeps nothing from step to step.
    """

    def __init__(self, method: SyncMethod, ranks: Ranks) -> None:
        self._method, self._ranks = method, ranks
        self.keeps_state = method.kind == "powersgd"
        self._is_paused = False
        self._good_factors: dict[int, Tensor] = {}
        self.load(None)

    def bucket_mib(self, *, is_cpu: bool) -> int | None:
        """MiB of a bucket of gradients; None: DistributedDataParallel's default. With gloo, what PowerSGD does after
        its first exchange runs in threads, whose order ranks would not share with several buckets."""
        if not self.keeps_state:
            return self._method.number
        return ONE_BUCKET_MIB if is_cpu else None

    def register(self, ddp: DistributedDataParallel) -> None:
        """Makes it the exchange of a model."""
        ddp.register_comm_hook(None, self._exchange)

    def pause(self, is_paused: bool) -> None:
        """Whether the next exchanges leave no trace in the state."""
        self._is_paused = is_paused

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
        """What a checkpoint keeps, after `equalize`; None: nothing. torch's `PowerSGDState.__getstate__` has NumPy's
        random generator, which a file of tensors cannot have, and which nothing draws from once the factors are
        there."""
        kept = self._powersgd
        if not self.keeps_state:
            return None
        return {
            "steps": kept.iter,
            "errors": dict(kept.error_dict),
            "p": dict(kept.p_memory_dict),
            "q": dict(kept.q_memory_dict),
        }

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

    def _exchange(self, _: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        if self._is_paused:
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


def make_hook(method: SyncMethod, ranks: Ranks) -> GradientHook | None:
    """The hook of a method that exchanges gradients in its own way; None for the others."""
    return GradientHook(method, ranks) if method.kind in ("bf16", "powersgd") else None
