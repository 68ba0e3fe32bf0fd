"""The model of this rank among those of all ranks: a step whose gradients are averaged, and what the ranks agree on.

torch's DistributedDataParallel exchanges the gradients in buckets while the backward pass still runs, once per step,
also with accumulation. A compiled step does so too: compiled at its first call inside of DistributedDataParallel, it is
cut at the borders of the buckets (torch's DDPOptimizer).

A `signals` vector rides on the same exchange: it is the gradient of a parameter that belongs to no model, so its mean
over the ranks comes with the gradients, and no further exchange is sent. It has

- the losses, so that every rank sees those of the whole batch;
- what only some ranks know: a stop signal, and of rank 0 the time trained and whether an evaluation or a checkpoint is
  due;
- the running statistics of trained BatchNorms, which are means over the ranks then.

Of a model whose parameters are divided (`shard.py`), each rank gets the averaged gradients of its rows, after each
micro-batch. Then the norm of all of them needs an exchange of its own, and the signals ride on that one.

With `--sync`, gradients are exchanged in another form (`gradient_hooks.py`) or not at all, and weights are averaged
(`local_steps.py`). Then, too, the signals have an exchange of their own after the gradients, in full precision. Where
each rank has gradients of its own, the square of their norm is a part of it: if it is not finite in one rank, all skip
the step. Each clips its gradients by their own norm, and reports that.

What a step decides on the device (skip it, the streak of skipped steps) follows from these means and is the same
everywhere. The host acts on the numbers of a step LAG steps later, when their copy has long arrived: all ranks at the
same step, and none waits for its device.
"""

import contextlib
import dataclasses
import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stoker.config.sync_method import DEFAULT_BUCKET_MIB, PLAIN, SyncMethod
from stoker.data.batch import Batch
from stoker.hardware.device import ReadyEvent
from stoker.models.layers.rank_mean import counting_over_ranks
from stoker.profiling.collectives import patch_collectives
from stoker.profiling.ledger import Ledger
from stoker.training.forward import Autocast, LossFn, split_batch
from stoker.training.gradient_hooks import PowerSgd, make_hook
from stoker.training.local_steps import make_local_steps
from stoker.training.state import TrainSetup
from stoker.training.triggers import Due

MAX_LOSSES = 16
"""Places for losses in the vector; a model has up to six."""
STOP, EVALUATE, SAVE, TRAINED_S = range(MAX_LOSSES, MAX_LOSSES + 4)
"""Places of what the ranks agree on."""
NUM_SIGNALS = MAX_LOSSES + 4
ACCELERATOR_LAG = 2
"""Steps on an accelerator after which the host acts on the numbers of a step; 0 on a CPU, where they are there at
once. Two are enough that the device never runs out of work, and a signal is heeded after three steps."""


MIN_WAIT_S = 20e-6
"""Shorter waits are ignored: the data was there, and `Ledger.attribute` takes as long."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What all ranks know after the same step."""

    stop: bool
    """A rank was asked to stop."""
    evaluate: bool
    """By the clock of rank 0, an evaluation is due."""
    save: bool
    """By the clock of rank 0, a checkpoint is due, which divided parameters need all ranks for."""
    trained_s: float
    """By the clock of rank 0: wall seconds of the steps before."""
    diverged_step: int | None


NOTHING_AGREED = Agreement(stop=False, evaluate=False, save=False, trained_s=0.0, diverged_step=None)


class _Losses(nn.Module):
    """What DistributedDataParallel wraps: the model with its losses, and the parameter of the signals, if that is to
    be exchanged with the gradients."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, signals: nn.Parameter | None) -> None:
        super().__init__()
        self.model, self.signals, self._loss_fn = model, signals, loss_fn

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self._loss_fn(batch)


class Replica:
    """The steps of a rank. Every method is called by all ranks at the same step."""

    def __init__(self, setup: TrainSetup, loss_fn: LossFn, sync: SyncMethod = PLAIN) -> None:
        self._setup, self._ranks = setup, setup.ranks
        self._optimizer, self._accumulator = setup.optimizer, setup.loss_accumulator
        self._stats = setup.optimizer.norm_stats
        size = NUM_SIGNALS + self._stats.numel()
        self._signals = nn.Parameter(torch.zeros(size, device=setup.device.torch_device))
        self._losses, self._ddp = loss_fn, None
        is_whole = setup.optimizer.sharding is None
        self._hook = make_hook(sync, self._ranks) if is_whole else None
        self._local = make_local_steps(sync, setup.optimizer, self._ranks) if is_whole else None
        if is_whole and self._local is None:
            self._losses = self._ddp = self._wrap(loss_fn, sync)
        self._stream = setup.device.make_stream()
        self._lag = 0 if setup.device.is_cpu else ACCELERATOR_LAG
        self._issued: deque[tuple[list[Tensor], ReadyEvent]] = deque()
        self._equal_at = -1
        self.reset()

    def _wrap(self, loss_fn: LossFn, sync: SyncMethod) -> DistributedDataParallel:
        hook, is_cpu = self._hook, self._setup.device.is_cpu
        # With an explicit size the first bucket is not smaller than the others, so the default is left out.
        size = sync.number if hook is None else hook.bucket_mib(is_cpu=is_cpu)
        losses = _Losses(self._setup.model, loss_fn, self._signals if hook is None else None)
        with warnings.catch_warnings():  # torch 2.15 has another name for broadcast_buffers, 2.11 does not
            warnings.simplefilter("ignore", FutureWarning)
            ddp = DistributedDataParallel(
                losses,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                bucket_cap_mb=None if size == DEFAULT_BUCKET_MIB else size,
            )
        if hook is not None:
            hook.register(ddp)
        return ddp

    @property
    def keeps_own_state(self) -> bool:
        """Whether ranks keep something from step to step that is not the same in all, so that all of them take part in
        a checkpoint."""
        return self._local is not None or isinstance(self._hook, PowerSgd)

    def equalize(self) -> None:
        """Makes what the ranks keep from step to step the same in all, for a checkpoint or an evaluation, and leaves
        what the checkpoint has of it in `state.sync_state`. Once for a step: means of equal numbers may be rounded."""
        state = self._setup.state
        keeper = self._local if self._local is not None else self._hook
        if keeper is None or self._equal_at == state.step:
            return
        keeper.equalize()
        state.sync_state, self._equal_at = keeper.state(), state.step

    def reset(self) -> None:
        """Forgets the steps before: the state was restored."""
        keeper = self._local if self._local is not None else self._hook
        if keeper is not None:
            keeper.load(self._setup.state.sync_state)
        self._equal_at = self._setup.state.step
        self._issued.clear()
        self._trained_s = self._setup.state.trained_s
        self.agreed = dataclasses.replace(NOTHING_AGREED, trained_s=self._trained_s)

    @contextlib.contextmanager
    def timing_waits(self, ledger: Ledger) -> Iterator[None]:
        """In the block, the time that this rank waits for exchanges is `comm` in the ledger."""
        thread, is_cpu = threading.get_ident(), self._setup.device.is_cpu

        def begin() -> Callable[[], None]:
            if not is_cpu:  # events on the device say how long its stream waited
                stack = contextlib.ExitStack()
                stack.enter_context(ledger.phase("comm"))
                return stack.close
            start_s = time.perf_counter()
            return lambda: attribute(start_s, time.perf_counter())

        def attribute(start_s: float, end_s: float) -> None:
            if end_s - start_s >= MIN_WAIT_S:
                ledger.attribute("comm", start_s, end_s)

        patches = patch_collectives(begin, lambda: threading.get_ident() == thread)
        try:
            yield
        finally:
            for patch in reversed(patches):
                patch.restore()

    def warm_up(self, batch: Batch, autocast: Autocast) -> None:
        """A forward and a backward pass that change nothing.

        DistributedDataParallel rearranges its buckets after the first one. The arrangement decides the order in
        which three and more ranks are summed: without this, the first step of a resumed run would be rounded
        differently than the same step of an undisturbed one. Divided parameters have no such buckets. It also compiles
        the step, where that was asked for.
        """
        if self._optimizer.sharding is not None:
            return
        saved = {name: buffer.clone() for name, buffer in self._setup.model.named_buffers()}
        if self._hook is not None:
            self._hook.pause(True)
        try:
            with torch.no_grad(), autocast:
                self._setup.model(batch.images)  # caches the anchors, which are constants of a compiled step
            self._forward_backward(batch, 1, autocast, torch.zeros(NUM_SIGNALS))
        finally:
            if self._hook is not None:
                self._hook.pause(False)
            self._optimizer.zero_grad()
            self._signals.grad = None
            for name, buffer in self._setup.model.named_buffers():
                if name in saved:
                    buffer.copy_(saved[name])

    def train_step(self, batch: Batch, micro_batches: int, autocast: Autocast, *, stop: bool, due: Due) -> None:
        """Forward, losses, backward, update of the weights, sums of the losses; after `optimizer.set_scalars`.

        stop: this rank was asked to stop; due: by its clock, of which that of rank 0 counts.
        """
        own = torch.zeros(NUM_SIGNALS)
        own[STOP] = float(stop)
        if self._ranks.is_main:  # a mean over the ranks, of which only this one counts
            own[EVALUATE], own[SAVE] = map(float, due)
            own[TRAINED_S] = self._trained_s * self._ranks.world_size
        completed = self._setup.state.step
        if self._local is not None:
            self._local.begin_step(completed)
        names = self._forward_backward(batch, micro_batches, autocast, own)
        assert self._signals.grad is not None
        means = self._signals.grad.clone()  # the gradient is a part of a bucket, which the next step fills
        self._signals.grad = None
        if self._optimizer.loss_scale is not None:
            means = means / self._optimizer.loss_scale
        grad_norm: Tensor | None = None
        if self._local is not None:
            grad_norm = self._optimizer.own_grad_norm()
            means, norm = self._exchange(means[:NUM_SIGNALS], grad_norm)
            grad_norm = torch.where(norm < math.inf, grad_norm, math.inf)
        elif self._ddp is None:
            means, grad_norm = self._exchange(means, self._optimizer.own_grad_norm())
        elif self._hook is not None:
            torch.distributed.all_reduce(means)
            means = means / self._ranks.world_size
        if self._stats.numel() and self._local is None:
            self._stats.copy_(means[NUM_SIGNALS:])
        grad_norm, found_inf = self._optimizer.update(grad_norm)
        if self._hook is not None:
            self._hook.finish_step(found_inf)
        if self._local is not None:
            self._local.finish_step(completed + 1)
        losses = dict(zip(names, means.unbind(), strict=False))
        self._accumulator.add(losses, grad_norm, found_inf, self._optimizer.completed_steps)
        self._issued.append(self._stream.to_host([means[:NUM_SIGNALS], self._accumulator.skipped_streak()[1]]))

    def agree(self, elapsed_s: float) -> Agreement:
        """What is known after a step; call it after each. elapsed_s: wall seconds of the step in this rank."""
        self._trained_s += elapsed_s
        while len(self._issued) > self._lag:
            self._read(*self._issued.popleft())
        return self.agreed

    def agree_on_all(self) -> Agreement:
        """The same, with all steps so far. Waits for the device."""
        while self._issued:
            self._read(*self._issued.popleft())
        return self.agreed

    def forget_due(self) -> None:
        """After an evaluation or a checkpoint: the answers to it that are still on their way are too old."""
        self.agree_on_all()
        self.agreed = dataclasses.replace(self.agreed, evaluate=False, save=False)

    def _exchange(self, own: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """(means of the ranks' vectors, norm of all gradients), where each rank has a part of the gradients, of this
        norm, or gradients of its own."""
        sums = torch.cat([own, norm.reshape(1)]).double()  # squares of large gradients overflow float32
        sums[-1].square_()
        torch.distributed.all_reduce(sums)
        return (sums[:-1] / self._ranks.world_size).to(own.dtype), sums[-1].sqrt()

    def _read(self, tensors: list[Tensor], ready: ReadyEvent) -> None:
        ready.synchronize()
        means, diverged_step = tensors[0].tolist(), int(tensors[1])
        self.agreed = Agreement(
            stop=self.agreed.stop or means[STOP] > 0,
            evaluate=means[EVALUATE] > 0,
            save=means[SAVE] > 0,
            trained_s=means[TRAINED_S],
            diverged_step=diverged_step if diverged_step >= 0 else None,
        )

    def _forward_backward(self, batch: Batch, micro_batches: int, autocast: Autocast, own: Tensor) -> list[str]:
        """Averages the gradients of a batch and the signals: those of this rank are `own` [NUM_SIGNALS], whose losses
        are filled in. Returns the names of the losses."""
        names: list[str] = []
        device = self._signals.device
        for k, part in enumerate(split_batch(batch, micro_batches)):
            is_last = k == micro_batches - 1
            with contextlib.nullcontext() if is_last or self._ddp is None else self._ddp.no_sync():
                with autocast, counting_over_ranks(self._ranks.world_size):
                    losses: dict[str, Tensor] = self._losses(part)
                    if micro_batches > 1:
                        losses = {name: loss / micro_batches for name, loss in losses.items()}
                names = list(losses)
                stacked = torch.stack(list(losses.values()))
                values = torch.zeros(NUM_SIGNALS) if not is_last else own
                values = values.to(device, non_blocking=True)
                values[: len(names)] = stacked.detach()
                stats = self._stats if is_last else torch.zeros_like(self._stats)
                # The gradient of `signals` is what it is multiplied by.
                carried = (self._signals * torch.cat([values, stats])).sum()
                with counting_over_ranks(self._ranks.world_size):
                    self._optimizer.backward(stacked.sum() + carried)
        return names
