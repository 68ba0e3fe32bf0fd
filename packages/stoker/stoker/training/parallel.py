"""How the processes of a training compute a step together, and what they agree on.

`SingleProcess` is a training of one process: it exchanges nothing, and what it knows, all know. It is the interface of
`ddp.Ddp` and `ddp.Periodic` (each process has the whole model and a part of the batch) and `fsdp.Fsdp` (and the rows of
each parameter). The loop and its services call the same methods of each and never ask which it is. All processes call
each method at the same step.
"""

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import nn

from stoker.data.augment import MIXUP_END_FRACTION, MOSAIC_END_FRACTION
from stoker.data.batch import Batch
from stoker.data.loading.loader import Loader
from stoker.hardware.device import ReadyEvent
from stoker.hardware.host_arenas import HostArenas
from stoker.hardware.host_sync import allow_host_sync
from stoker.hardware.memory_errors import is_out_of_memory
from stoker.report.terminal import Screen
from stoker.training import checkpoint
from stoker.training.resume import Resumed
from stoker.training.state import EventLogger, Signals, TrainSetup, TrainState
from stoker.training.step import PlainStep, describe_compilation, describe_error, make_augment_fn, make_loss_fn
from stoker.training.trace import Tracer
from stoker.training.watchdog import HangDetector
from stoker_watch.recording.ledger import Ledger

MAX_STEPS_AHEAD = 2
"""Issued steps that an accelerator has not ended when the host begins to issue the next one, at most: it has their time
for it. More would hold their batches in the device's memory, and a signal would take effect later."""


class SingleProcess(PlainStep):
    """A process that trains alone. `make_step.make_parallel` chooses."""

    can_be_captured = True
    """Whether a CUDA graph can replay its step: nothing in it depends on what the host does in each step."""
    exchanges_in_backward = False
    """Whether gradients are exchanged during the backward pass, as they become ready. Weights that are cast all at once
    have theirs only at its end."""
    takes_part_in_saves = True
    """Whether this process has something to do when a checkpoint is saved."""

    def __init__(self, setup: TrainSetup, log_event: EventLogger) -> None:
        run = setup.config.run
        self.setup, self.log_event = setup, log_event
        self.compiles = run.compile
        """Whether `warm_up` compiles the step."""
        is_whole = setup.optimizer.sharding is None
        self._cast_together = is_whole and not self.exchanges_in_backward
        loss_fn = make_loss_fn(setup.model, compile=self.compiles, cast_together=self._cast_together)
        super().__init__(loss_fn, setup.optimizer, setup.loss_accumulator, setup.device.autocast(run.precision))
        # On a CPU, which takes a few images at a time, the compiled program would be as long as the batch is large.
        self.augment_fn = make_augment_fn(setup.config.data, compile=self.compiles and not setup.device.is_cpu)
        self.agreed = Signals()
        """What all know, of the newest step."""
        self._issued_steps: deque[ReadyEvent] = deque()
        self._copy_stream = setup.device.make_stream()
        self._arenas: HostArenas | None = None
        self._newest_copy: ReadyEvent | None = None

    def next_batch(self, loader: Loader) -> Batch:
        """This process's part of the next batch."""
        return next(loader)

    def augment(self, batch: Batch) -> Batch:
        return self.augment_fn(batch, self.setup.progress)

    def send_with_step(self, signals: Signals) -> None:
        """Tells the others what this process knows, with the next step."""

    def limit_steps_ahead(self) -> None:
        """After a step is issued: makes the host wait until the device has ended all but MAX_STEPS_AHEAD. A fast loader
        and a CUDA graph, which is one call a step, would let it issue dozens of them."""
        self._issued_steps.append(self.setup.device.record_issued())
        if len(self._issued_steps) > MAX_STEPS_AHEAD:
            with allow_host_sync("steps ahead"):
                self._issued_steps.popleft().synchronize()

    def agree(self, own: Signals) -> Signals:
        """What all know after a step. own: what this process knows after it."""
        self.agreed = own
        return own

    def agree_on_all(self) -> Signals:
        """As `agree`, with all steps so far. Waits for the device."""
        return self.agreed

    def stops(self, is_asked: bool) -> bool:
        """Whether all stop after this step. is_asked: this process was asked to."""
        return is_asked

    def poll(self, is_asked: bool, *, is_last: bool = False) -> bool:
        """Whether all stop between two batches of an evaluation; is_last: after the last batch."""
        return is_asked and not is_last

    def has_saved(self, is_saved: bool) -> bool:
        """Whether there is a checkpoint of this step, for all that take part. is_saved: this process has written it."""
        return is_saved

    def after_evaluation(self) -> None:
        """Drops signals on their way that say that an evaluation or a checkpoint is due."""

    def after_save(self) -> None:
        """As `after_evaluation`, after a checkpoint."""

    def equalize(self) -> None:
        """Makes what processes keep from step to step the same in all, for a checkpoint or an evaluation."""

    def whole_weights(self, model: nn.Module) -> contextlib.AbstractContextManager[object]:
        """In the block, `model` can compute outputs."""
        del model
        return contextlib.nullcontext()

    def reserve_snapshots(self, state: dict[str, Any]) -> None:
        """Allocates host memory for snapshots of the weights and a state like this one, so that no save does."""
        if self.setup.ranks.is_main:
            weights = self.optimizer.ema_model.state_dict()
            self._arenas = checkpoint.reserve_arenas(self.setup.device, weights, state)

    def take_snapshot(self, state: dict[str, Any], *, ap: float | None) -> checkpoint.HostSnapshot | None:
        """The EMA weights with their metadata, and a state (empty for a file of weights alone), with whole tensors on
        the host. Called by all processes that take part in it; None where there is nothing to write. The copies are
        made while the training goes on: only the next update of the weights has to wait (`wait_for_snapshot`)."""
        if not self.setup.ranks.is_main:
            return None
        taken = checkpoint.snapshot(
            self._copy_stream, step=self.setup.state.step, metadata=self.metadata(ap),
            weights=self.optimizer.ema_model.state_dict(), state=state, arenas=self._arenas,
        )  # fmt: skip
        self._newest_copy = taken.ready
        return taken

    def metadata(self, ap: float | None) -> dict[str, str]:
        """The metadata of a file with the present weights."""
        return msgspec.structs.replace(self.setup.metadata, step=self.setup.state.step, ap=ap).header()

    def wait_for_snapshot(self) -> None:
        """Makes the device wait until all copies are made: the weights may change only then."""
        if self._newest_copy is not None:
            self._newest_copy.block_main_stream()
            self._newest_copy = None

    def rehearse(self, batch: Batch) -> None:
        """The same; compiles what augments whole batches too, with and without mixup and mosaics; and logs what of the
        model's step is compiled."""
        if not self.compiles:
            super().rehearse(batch)
        else:
            whole = Batch(*(torch.cat([tensor] * self.micro_batches) for tensor in batch))
            for progress in (0.0, MIXUP_END_FRACTION, MOSAIC_END_FRACTION):
                self.augment_fn(whole, progress)
            torch._dynamo.utils.counters.clear()
            super().rehearse(batch)
            self.log_event(*describe_compilation(torch._dynamo.utils.counters))

    def warm_up(self, make_batch: Callable[[], Batch]) -> None:
        """Compiles the step, without a change of the training. make_batch: a micro-batch of the shapes of training."""
        if not self.compiles:
            return
        try:
            self.rehearse(make_batch())
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self.log_event("warning", f"compiling failed, training without: {describe_error(error)}")
            self.loss_fn = make_loss_fn(self.setup.model, compile=False, cast_together=self._cast_together)
            self.augment_fn = make_augment_fn(self.setup.config.data, compile=False)

    def timing_waits(self, ledger: Ledger) -> contextlib.AbstractContextManager[object]:
        """In the block, the time that this process waits for others is `comm` in the ledger."""
        del ledger
        return contextlib.nullcontext()

    def state(self) -> dict[str, Any]:
        """Its part of a checkpoint, after `equalize`."""
        return {"sync": None}

    def resume(self, resumed: Resumed) -> None:
        """Continues from a checkpoint or from the first step."""
        del resumed
        self.micro_batches = self.setup.micro_batches
        self.agreed = Signals(trained_s=self.setup.state.trained_s)


@dataclasses.dataclass(frozen=True)
class LoopContext:
    """What the loop of one attempt of a run and its services share, in the training thread."""

    setup: TrainSetup
    parallel: SingleProcess
    ledger: Ledger
    tracer: Tracer
    hang_detector: HangDetector
    screen: Screen
    log_event: EventLogger

    @property
    def state(self) -> TrainState:
        return self.setup.state
