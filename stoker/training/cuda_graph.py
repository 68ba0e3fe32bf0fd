"""The whole training step as one CUDA graph: the host issues one call a step instead of about a thousand.

A graph replays kernels on fixed addresses. So the step, from augmentation to the sums of the losses, reads its batch
from static tensors, and learning rate, decay of the EMA and number of the step from scalars on the device
(`OptimizerStep.set_scalars`); all that outlives a step is updated in place. A checkpoint or a rollback writes into the
same tensors, so the graph goes on with what was loaded. `tests/training/test_cuda_graph.py` proves this on a CPU with
an emulated graph; no GPU has replayed one yet.

After a failed capture the process ends: torch 2.11 may leave its allocator in capture mode, which then never reuses the
memory of batches (pytorch issues 180395, 190308). The run says so in its event `cuda_graph_failed`, and its later
attempts train without a graph.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch

from stoker.data.batch import Batch
from stoker.errors import CaptureFailed
from stoker.runs.records import EVENTS, read_lines
from stoker.runs.schemas import Event

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


def describe_error(error: Exception) -> str:
    """Type and first lines of an error, in one line; those of compilers have pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join([f"{type(error).__name__}:", *lines[:2]])


def has_failed(run: Path) -> bool:
    """Whether a capture failed in an earlier attempt of the run."""
    return any(event.kind == "cuda_graph_failed" for event in read_lines(run, EVENTS, Event))
