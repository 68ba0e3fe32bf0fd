"""What trains on a batch, put together once: `step.train_step`, as a CUDA graph if the run asks for one, repeated in
smaller micro-batches where memory is exhausted, compiled before the first batch. The loop calls it and knows none of
these.
"""

import contextlib
import functools
from collections.abc import Callable

from stoker.config.sync_method import parse_sync
from stoker.data.augment.device import makes_mosaics
from stoker.data.batch import Batch
from stoker.training.attempt import Attempt
from stoker.training.cuda_graph import CudaCapture, CudaGraphStep, has_failed
from stoker.training.defaults.dry_run import make_worst_case
from stoker.training.defaults.kernel_choice import choose_kernels
from stoker.training.out_of_memory import read_message, retry_in_smaller_batches, shrink_batches
from stoker.training.parallel import One
from stoker.training.state import EventLogger, Signals, TrainSetup
from stoker.training.step import train_step


def make_parallel(setup: TrainSetup, log_event: EventLogger) -> One:
    """What this training needs. torch.distributed is not imported for one process."""
    if setup.ranks.alone:
        return One(setup, log_event)
    if setup.is_staged:
        from stoker.training.pipeline import Pipeline

        return Pipeline(setup, log_event)
    if setup.config.run.shard:
        from stoker.training.fsdp import Fsdp

        return Fsdp(setup, log_event)
    from stoker.training.ddp import Ddp, Periodic

    sync = parse_sync(setup.config.run.sync)
    return Periodic(setup, log_event, sync) if sync.is_local else Ddp(setup, log_event, sync)


class Step:
    """Trains on a batch."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._make()

    def _make(self) -> None:
        """The step for the present size of a micro-batch."""
        parallel, setup = self._attempt.parallel, self._attempt.setup
        self._train: Callable[[Batch], None] = functools.partial(train_step, parallel)
        if setup.config.run.cuda_graph and parallel.can_be_captured and not has_failed(setup.folder.path):
            data = setup.config.data
            self._train = CudaGraphStep(self._train, CudaCapture(), lambda: makes_mosaics(data, setup.progress))

    def prepare(self) -> None:
        """Chooses kernels and compiles, if that was asked for, before the first image is loaded."""
        attempt = self._attempt
        if attempt.setup.progress >= 1 and attempt.state.diverged_step is None:
            return
        compiles = attempt.parallel.compiles
        if compiles:
            attempt.screen.note("compiling the model; --no-compile trains without")
        with attempt.ledger.phase("compile") if compiles else contextlib.nullcontext():
            choose_kernels(attempt.setup, attempt.log_event)
            retry_in_smaller_batches(
                attempt, "training", lambda: attempt.parallel.warm_up(lambda: make_worst_case(attempt.setup))
            )

    def __call__(self, batch: Batch, signals: Signals) -> None:
        """signals: of this process, for the others."""
        attempt, state = self._attempt, self._attempt.state
        attempt.parallel.send_with_step(signals)
        while True:
            try:
                attempt.setup.optimizer.set_scalars(state.lr, state.step)
                self._train(batch)
                return
            except (MemoryError, RuntimeError) as error:
                message = read_message(error)  # the error ends here: its traceback keeps activations alive
            shrink_batches(attempt, "training", message)
            self._make()
