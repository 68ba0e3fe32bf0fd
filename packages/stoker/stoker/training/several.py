"""What a training of several processes has in common: signals that travel with a step, and what follows from them.

A `signals` vector is averaged over the ranks with each step. It has the losses; what only some ranks know: a stop
signal, and of rank 0 the time trained and whether an evaluation or a checkpoint is due; and the running statistics of
trained BatchNorms, which are means over the ranks then. It is the gradient of a parameter that belongs to no model, so
accumulation and loss scaling treat it like any other. `ddp.Ddp` exchanges it with the gradients, in one of their
buckets; `ddp.Periodic` and `fsdp.Fsdp` with the norm of the gradients, in an exchange of its own.

What a step decides on the device (skip it, the streak of skipped steps) follows from the means and is the same
everywhere. On an accelerator the host acts on the numbers of a step MAX_STEPS_AHEAD steps later, when their copy has
long arrived, in all ranks at the same step; so a signal takes effect after three steps.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from stoker.data.batch import Batch
from stoker.hardware.device import ReadyEvent
from stoker.models.layers.rank_mean import counting_over_ranks
from stoker.training.parallel import MAX_STEPS_AHEAD, SingleProcess
from stoker.training.resume import Resumed
from stoker.training.state import EventLogger, Signals, TrainSetup
from stoker.training.step import split_batch
from stoker_watch.recording.hook.stoker_hook.instruments import patch_collectives
from stoker_watch.recording.ledger import Ledger

MAX_LOSSES = 16
"""Places for losses in the vector; a model has up to six."""
STOP, EVALUATE, SAVE, TRAINED_S = range(MAX_LOSSES, MAX_LOSSES + 4)
"""Places of what the ranks agree on."""
NUM_SIGNALS = MAX_LOSSES + 4


class MultiProcess(SingleProcess):
    """The steps of a rank among others. `average` and `forward_backward` are completed by the kinds of parallelism."""

    can_be_captured = False
    saves_together = False
    """Whether each rank keeps a part of what a checkpoint has. Else rank 0 saves alone, and does not tell when."""

    def __init__(self, setup: TrainSetup, log_event: EventLogger) -> None:
        super().__init__(setup, log_event)
        self.ranks = setup.ranks
        self.takes_part_in_saves = self.saves_together or setup.ranks.is_main
        device = setup.device.torch_device
        self.norm_stats = self.optimizer.norm_stats
        self.signals = nn.Parameter(torch.zeros(NUM_SIGNALS + self.norm_stats.numel(), device=device))
        self._own = torch.zeros(NUM_SIGNALS)
        self._means: Tensor | None = None
        self._stream = setup.device.make_stream()
        self._lag = 0 if setup.device.is_cpu else MAX_STEPS_AHEAD
        self._issued: deque[tuple[list[Tensor], ReadyEvent]] = deque()

    def send_with_step(self, signals: Signals) -> None:
        self._own = torch.zeros(NUM_SIGNALS)
        self._own[STOP] = float(signals.stop)
        if self.ranks.is_main:  # a mean over the ranks, of which only this one counts
            self._own[EVALUATE], self._own[SAVE] = float(signals.evaluate), float(signals.save)
            self._own[TRAINED_S] = signals.trained_s * self.ranks.world_size

    def forward_backward(self, batch: Batch) -> dict[str, Tensor]:
        """Gradients of this rank's part of a batch, and of the signals; the losses are its own."""
        for number, part in enumerate(split_batch(batch, self.micro_batches)):
            is_last = number == self.micro_batches - 1
            with self.exchanging(is_last):
                with self.autocast, counting_over_ranks(self.ranks.world_size):
                    losses = self.loss_fn(part)
                    if self.micro_batches > 1:
                        losses = {name: loss / self.micro_batches for name, loss in losses.items()}
                stacked = torch.stack(list(losses.values()))
                own = self._own if is_last else torch.zeros(NUM_SIGNALS)
                values = own.to(self.signals.device, non_blocking=True, copy=True)
                values[: len(losses)] = stacked.detach()
                stats = self.norm_stats if is_last else torch.zeros_like(self.norm_stats)
                # The gradient of `signals` is what it is multiplied by.
                carried = (self.signals * torch.cat([values, stats])).sum()
                with counting_over_ranks(self.ranks.world_size):
                    self.optimizer.backward(stacked.sum() + carried)
        return losses

    def exchanging(self, is_last: bool) -> contextlib.AbstractContextManager[object]:
        """A context around a micro-batch; is_last: of the step."""
        del is_last
        return contextlib.nullcontext()

    def average(self, losses: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        """As `PlainStep.average`. Running statistics become means."""
        assert self.signals.grad is not None
        means = self.signals.grad.clone()  # the gradient may be a part of a bucket, which the next step fills
        self.signals.grad = None
        if self.optimizer.loss_scale is not None:
            means = means / self.optimizer.loss_scale
        means, grad_norm = self.exchange(means)
        if len(means) > NUM_SIGNALS:
            self.norm_stats.copy_(means[NUM_SIGNALS:])
        self._means = means[:NUM_SIGNALS]
        return dict(zip(losses, means.unbind(), strict=False)), grad_norm

    def exchange(self, own: Tensor) -> tuple[Tensor, Tensor | None]:
        """(means of the ranks' signals, norm of all gradients), where each rank has a part of the gradients."""
        return self.exchange_with_norm(own, self.optimizer.own_grad_norm())

    def exchange_with_norm(self, own: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """(means of the ranks' vectors, root of the sum of the squares of their norms)."""
        sums = torch.cat([own, norm.reshape(1)]).double()  # squares of large gradients overflow float32
        sums[-1].square_()
        torch.distributed.all_reduce(sums)
        return (sums[:-1] / self.ranks.world_size).to(own.dtype), sums[-1].sqrt()

    def agree(self, own: Signals) -> Signals:
        if self._means is not None:
            # a clone, as the next step writes to it while it is copied
            tensors = [self._means, self.setup.loss_accumulator.skipped_streak()[1].clone()]
            self._issued.append(self._stream.to_host(tensors))
            self._means = None
        self._read(self._lag)
        if not self.saves_together:
            self.agreed = self.agreed._replace(save=own.save)
        return self.agreed

    def agree_on_all(self) -> Signals:
        self._read(0)
        return self.agreed

    def stops(self, is_asked: bool) -> bool:
        del is_asked  # the others were told with the step
        return self.agreed.stop

    def poll(self, is_asked: bool, *, is_last: bool = False) -> bool:
        stops = self.ranks.end_vote()
        if not is_last and not stops:
            self.ranks.begin_vote(is_asked)
        return stops

    def has_saved(self, is_saved: bool) -> bool:
        return bool(self.ranks.share_value(is_saved)) if self.saves_together else is_saved

    def after_evaluation(self) -> None:
        self.agree_on_all()
        self.agreed = self.agreed._replace(evaluate=False, save=False)

    def after_save(self) -> None:
        if self.saves_together:
            self.after_evaluation()

    def resume(self, resumed: Resumed) -> None:
        super().resume(resumed)
        self._issued.clear()
        self._means = None

    @contextlib.contextmanager
    def timing_waits(self, ledger: Ledger) -> Iterator[None]:
        thread = threading.get_ident()

        def is_training_thread() -> bool:
            return threading.get_ident() == thread

        patches = patch_collectives(
            lambda: ledger.begin("comm") if is_training_thread() else None, is_training_thread,
            lambda: ledger.begin("comm"),
        )  # fmt: skip
        try:
            yield
        finally:
            for patch in reversed(patches):
                patch.restore()

    def _read(self, lag: int) -> None:
        """Waits for the numbers of all but the last `lag` steps."""
        while len(self._issued) > lag:
            tensors, ready = self._issued.popleft()
            ready.synchronize()
            means, diverged_step = tensors[0].tolist(), int(tensors[1])
            self.agreed = Signals(
                stop=self.agreed.stop or means[STOP] > 0,
                evaluate=means[EVALUATE] > 0,
                save=means[SAVE] > 0,
                trained_s=means[TRAINED_S],
                diverged_step=diverged_step if diverged_step >= 0 else None,
            )
