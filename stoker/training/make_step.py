"""What trains on a batch, put together once: `step.train_step`, as a CUDA graph if the run asks for one, repeated in
smaller micro-batches where memory is exhausted, compiled before the first batch. The loop calls it and knows none of
these.

As a CUDA graph, the host issues one call a step instead of about a thousand. A graph replays kernels on fixed
addresses. So the step, from augmentation to the sums of the losses, reads its batch from static tensors, and learning
rate, decay of the EMA and number of the step from scalars on the device (`OptimizerStep.set_scalars`); all that
outlives a step is updated in place. A checkpoint or a rollback writes into the same tensors, so the graph goes on with
what was loaded. `tests/training/test_cuda_graph.py` proves this on a CPU with an emulated graph.

After a failed capture the process ends: torch 2.11 may leave its allocator in capture mode, which then never reuses the
memory of batches (pytorch issues 180395, 190308). The run says so in its event `cuda_graph_failed`, and its later
attempts train without a graph.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch

from stoker.config.sync_method import parse_sync
from stoker.data.augment import makes_mosaics
from stoker.data.batch import Batch
from stoker.errors import CaptureFailed
from stoker.runs.records import EVENTS, read_lines
from stoker.runs.schemas import Event
from stoker.training.defaults.dry_run import make_worst_case
from stoker.training.defaults.kernel_choice import choose_kernels
from stoker.training.out_of_memory import read_message, retry_in_smaller_batches, shrink_batches
from stoker.training.parallel import Attempt, One
from stoker.training.state import EventLogger, Signals, TrainSetup
from stoker.training.step import describe_error, train_step

WARM_UP_STEPS = 3
"""Steps before the capture, as in torch's notes on CUDA graphs: they choose kernels and allocate what is kept."""


class Capture(Protocol):
    """What records a step."""

    def warm_up(self) -> contextlib.AbstractContextManager[None]:
        """A context for steps before the capture."""

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Records `step` without an effect; the result replays it. What was recorded before is not replayed again."""


class CudaCapture:
    """Warm-up and capture on one side stream, as CUDA requires it."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[None]:
        main = torch.cuda.current_stream()
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            yield
        main.wait_stream(self._stream)

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Waits for the device. Other threads, which copy batches and snapshots, go on meanwhile."""
        torch.cuda.synchronize()  # the graph before may still run
        self._graph = None  # its memory is for the new one
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            step()
        self._graph = graph
        return self._replay

    def _replay(self) -> None:
        assert self._graph is not None
        self._graph.replay()


class CudaGraphStep:
    """Calls `step` for the first WARM_UP_STEPS batches, then captures it and replays it with each batch.

    All batches have the same shapes. variant: what the operators of a step depend on besides its batch; when it
    changes, the step is captured again.
    """

    def __init__(
        self, step: Callable[[Batch], None], capture: Capture, variant: Callable[[], object] = lambda: None
    ) -> None:
        self._step, self._capture, self._variant = step, capture, variant
        self._warm_up_steps = WARM_UP_STEPS
        self._static_batch: Batch | None = None
        self._replay: Callable[[], None] | None = None
        self._captured: object = None

    def __call__(self, batch: Batch) -> None:
        """One step with this batch. Raises CaptureFailed; nothing of this step has run then."""
        if self._warm_up_steps > 0:
            self._warm_up_steps -= 1
            with self._capture.warm_up():
                self._step(batch)
            return
        if self._static_batch is None:
            self._static_batch = Batch(*(tensor.clone() for tensor in batch))
        static, variant = self._static_batch, self._variant()
        if self._replay is None or self._captured != variant:
            try:
                self._replay = self._capture.record(lambda: self._step(static))
            except Exception as error:
                raise CaptureFailed(
                    "The CUDA graph of a step could not be captured.",
                    cause=describe_error(error),
                    fix="the same command continues without a graph",
                ) from error
            self._captured = variant
        torch._foreach_copy_(list(static), list(batch), non_blocking=True)
        self._replay()


def has_failed(run: Path) -> bool:
    """Whether a capture failed in an earlier attempt of the run."""
    return any(event.kind == "cuda_graph_failed" for event in read_lines(run, EVENTS, Event))


def make_parallel(setup: TrainSetup, log_event: EventLogger) -> One:
    """What this training needs. torch.distributed is not imported for one process."""
    if setup.ranks.alone:
        return One(setup, log_event)
    if setup.is_staged:
        from stoker.training.stages import Pipeline

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
