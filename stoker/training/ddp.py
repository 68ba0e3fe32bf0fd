"""Each rank has the whole model and a part of the batch.

`Ddp` averages the gradients of each step: torch's DistributedDataParallel exchanges them in buckets while the backward
pass still runs, once per step, also with accumulation, and the signals of the step (`several.py`) in one of them. A
compiled step does so too: compiled at its first call inside of DistributedDataParallel, it is cut at the borders of the
buckets (torch's DDPOptimizer). With `--sync bf16` and `powersgd`, the buckets are compressed (`gradient_hooks.py`), and
the signals have an exchange of their own, in full precision.

`Periodic` averages weights instead, after every N steps (`--sync every:N`, `local_steps.py`). If the gradient is not
finite in one rank, all skip the step; each clips its gradient by its own norm, and reports that.
"""

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stoker.config.sync_method import DEFAULT_BUCKET_MIB, SyncMethod
from stoker.data.batch import Batch
from stoker.training.checkpoint import HostSnapshot
from stoker.training.gradient_hooks import GradientHook, make_hook
from stoker.training.local_steps import LocalSteps
from stoker.training.resume import Resumed
from stoker.training.several import Several
from stoker.training.state import EventLogger, TrainSetup
from stoker.training.step import LossFn


class _Replicas(Several):
    """What both have in common: every rank has the whole model, and rank 0 writes it."""

    keeper: GradientHook | LocalSteps | None = None
    """Keeps something from step to step that is not the same in all ranks."""

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

    def reserve_snapshots(self, state: dict[str, Any]) -> None:
        if self.ranks.is_main:
            super().reserve_snapshots(state)

    def take_snapshot(self, state: dict[str, Any], *, ap: float | None) -> HostSnapshot | None:
        return super().take_snapshot(state, ap=ap) if self.ranks.is_main else None

    def warm_up(self, make_batch: Callable[[], Batch]) -> None:
        """A forward and a backward pass that change nothing.

        DistributedDataParallel rearranges its buckets after the first one. The arrangement decides the order in which
        three and more ranks are summed: without this, the first step of a resumed run would be rounded differently than
        the same step of an undisturbed one. It also compiles the step, where that was asked for; all ranks must train
        the same, so a failure of that ends the run.
        """
        try:
            self.rehearse(make_batch())
        finally:
            self.signals.grad = None


class Ddp(_Replicas):
    """Ranks whose gradients are averaged in each step."""

    def __init__(self, setup: TrainSetup, log_event: EventLogger, sync: SyncMethod) -> None:
        self._hook = make_hook(sync, setup.ranks)
        if self._hook is not None and self._hook.keeps_state:
            self.keeper, self.saves_together = self._hook, True
        super().__init__(setup, log_event)
        # With an explicit size the first bucket is not smaller than the others, so the default is left out.
        size = sync.number if self._hook is None else self._hook.bucket_mib(is_cpu=setup.device.is_cpu)
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
            self._hook.register(self._ddp)

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
        self._hook.pause(True)
        try:
            super().warm_up(make_batch)
        finally:
            self._hook.pause(False)


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
    """What DistributedDataParallel wraps: the model with its losses, and the parameter of the signals, if that is to
    be exchanged with the gradients."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, signals: nn.Parameter | None) -> None:
        super().__init__()
        self.model, self.signals, self._loss_fn = model, signals, loss_fn

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self._loss_fn(batch)
