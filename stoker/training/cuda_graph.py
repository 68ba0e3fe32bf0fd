"""The whole training step as one CUDA graph: the host issues one call a step instead of about a thousand.

A graph replays kernels on fixed addresses. So the step reads its batch from static tensors, and learning rate, decay of
the EMA and number of the step from scalars on the device (`OptimizerStep.set_scalars`); all that outlives a step is
updated in place. A checkpoint or a rollback writes into the same tensors, so the graph goes on with what was loaded.
`tests/training/test_cuda_graph.py` proves this on a CPU with an emulated graph; no GPU has replayed one yet.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from stoker.data.batch import Batch

WARM_UP_STEPS = 3
"""Steps before the capture, as in torch's notes on CUDA graphs: they choose kernels and allocate what is kept."""


class Capture(Protocol):
    """What records a step."""

    def warm_up(self) -> contextlib.AbstractContextManager[None]:
        """A context for steps before the capture."""

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Records `step` without an effect; the result replays it."""


class CudaCapture:
    """Warm-up and capture on one side stream, as CUDA requires it."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[None]:
        main = torch.cuda.current_stream()
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            yield
        main.wait_stream(self._stream)

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Waits for the device. Other threads, which copy batches and snapshots, go on meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            step()
        return graph.replay


class CudaGraphStep:
    """Calls `step` for the first WARM_UP_STEPS batches, then captures it and replays it with each batch.

    All batches have the same shapes. on_failure: told why the capture failed; then `step` is called for every batch.
    """

    def __init__(
        self, step: Callable[[Batch], None], capture: Capture, on_failure: Callable[[Exception], None]
    ) -> None:
        self._step, self._capture, self._on_failure = step, capture, on_failure
        self._warm_up_steps = WARM_UP_STEPS
        self._static_batch: Batch | None = None
        self._replay: Callable[[], None] | None = None

    def __call__(self, batch: Batch) -> None:
        """One step with this batch."""
        if self._warm_up_steps > 0:
            self._warm_up_steps -= 1
            with self._capture.warm_up():
                self._step(batch)
            return
        if self._static_batch is None or self._replay is None:
            self._static_batch = Batch(*(tensor.clone() for tensor in batch))
            self._replay = self._record(self._static_batch)
        for static, tensor in zip(self._static_batch, batch, strict=True):
            static.copy_(tensor, non_blocking=True)
        self._replay()

    def _record(self, batch: Batch) -> Callable[[], None]:
        try:
            return self._capture.record(lambda: self._step(batch))
        except Exception as error:  # noqa: BLE001 (of torch, CUDA or a kernel; nothing that was captured has run)
            self._on_failure(error)
            return lambda: self._step(batch)
