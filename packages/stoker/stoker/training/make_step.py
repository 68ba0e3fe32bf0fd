"""What trains on a batch, put together once: `step.train_step`, as a CUDA graph if the run asks for one, repeated in
smaller micro-batches where memory is exhausted, compiled before the first batch, with the kernels that are fastest.

As a CUDA graph, the host issues one call a step instead of about a thousand. A graph replays kernels on fixed
addresses. So the step, from augmentation to the sums of the losses, reads its batch from static tensors, and learning
rate, decay of the EMA and number of the step from scalars on the device (`OptimizerStep.set_scalars`); all that
outlives a step is updated in place, also by a checkpoint or a rollback.

After a failed capture the process ends, and `stoker train` starts it again: torch 2.11 may leave its allocator in
capture mode, which then never reuses the memory of batches (pytorch issues 180395, 190308). The run says so in its
event `cuda_graph_failed`, and its later attempts train without a graph.

On a GPU, two kernels are chosen by measurement before the first step (`choose_kernels`): convolutions with fused bias,
residual and ReLU (`models/layers/convolutions.py`), and RetinaNet's matching and classification loss as Triton kernels
(`models/layers/triton_kernels.py`). Each is timed against the separate operators on the shapes of the run, and must
give the same result. An event has the choice for every later attempt of the run.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.config.sync_method import parse_sync
from stoker.data.augment import strong_augmentations
from stoker.data.batch import Batch
from stoker.evaluation.evaluate import in_eval_mode
from stoker.hardware.device import Device
from stoker.hardware.memory_errors import is_out_of_memory
from stoker.models.layers.convolutions import separate_conv_relu, use_fused_convs
from stoker.models.retinanet import RetinaNet
from stoker.training.defaults.dry_run import make_worst_case
from stoker.training.out_of_memory import read_message, retry_in_smaller_batches, shrink_batches
from stoker.training.parallel import LoopContext, SingleProcess
from stoker.training.state import EventLogger, Signals, TrainSetup
from stoker.training.step import describe_error, train_step
from stoker_watch.errors import CaptureFailed
from stoker_watch.runs.records import EVENTS, read_lines
from stoker_watch.runs.schemas import Event

WARM_UP_STEPS = 3
"""Steps before the capture, as in torch's notes on CUDA graphs: they choose kernels and allocate what is kept."""
ROUNDS, CALLS = 5, 10
"""Measurements of each side, in turn, of which the shortest counts, since disturbances only add time; calls in each."""
MIN_GAIN = 1.02
"""A kernel is taken if the separate operators take at least this many times as long: less may be noise (assumed)."""
TOLERANCE = 0.02
"""Largest difference of results, relative to their norm. Both sides round to bf16; a wrong kernel is apart by all."""


class CudaCapture:
    """Records a step: warm-up and capture on one side stream, as CUDA requires it."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[None]:
        """In the block, steps prepare the capture."""
        main = torch.cuda.current_stream()
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            yield
        main.wait_stream(self._stream)

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Records `step` without an effect; the result replays it. What was recorded before is not replayed again.
        Waits for the device. Other threads, which copy batches and snapshots, go on meanwhile."""
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
    """Calls `step` for the first WARM_UP_STEPS batches, then captures it and replays it with each batch. All batches
    have the same shapes. variant: what the operators of a step depend on besides its batch; when it changes, the step
    is captured again."""

    def __init__(
        self, step: Callable[[Batch], None], capture: CudaCapture, variant: Callable[[], object] = lambda: None
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


def make_parallel(setup: TrainSetup, log_event: EventLogger) -> SingleProcess:
    """Makes what this training needs. torch.distributed is not imported for one process."""
    if setup.ranks.alone:
        return SingleProcess(setup, log_event)
    if setup.config.run.shard:
        from stoker.training.fsdp import Fsdp

        return Fsdp(setup, log_event)
    from stoker.training.ddp import Ddp, Periodic

    sync = parse_sync(setup.config.run.sync)
    return Periodic(setup, log_event, sync) if sync.is_local else Ddp(setup, log_event, sync)


class Step:
    """The step of a training, made again when micro-batches become smaller."""

    def __init__(self, context: LoopContext) -> None:
        self._context = context
        self._make()

    def _make(self) -> None:
        """Makes the step for the present size of a micro-batch."""
        parallel, setup = self._context.parallel, self._context.setup
        self._train: Callable[[Batch], None] = functools.partial(train_step, parallel)
        if setup.config.run.cuda_graph and parallel.can_be_captured and not has_failed(setup.folder.path):
            data = setup.config.data
            self._train = CudaGraphStep(self._train, CudaCapture(), lambda: strong_augmentations(data, setup.progress))

    def prepare(self) -> None:
        """Chooses kernels and compiles, if that was asked for, before the first image is loaded."""
        context = self._context
        if context.setup.progress >= 1 and context.state.diverged_step is None:
            return
        compiles = context.parallel.compiles
        if compiles:
            context.screen.note("compiling the model; --no-compile trains without")
        with context.ledger.phase("compile") if compiles else contextlib.nullcontext():
            choose_kernels(context.setup, context.log_event)
            retry_in_smaller_batches(
                context, "training", lambda: context.parallel.warm_up(lambda: make_worst_case(context.setup))
            )

    def __call__(self, batch: Batch, signals: Signals) -> None:
        """One step with this batch. signals: what this process tells the others."""
        context, state = self._context, self._context.state
        context.parallel.send_with_step(signals)
        while True:
            try:
                context.setup.optimizer.set_scalars(state.lr, state.step)
                self._train(batch)
                return
            except (MemoryError, RuntimeError) as error:
                message = read_message(error)  # the error ends here: its traceback keeps activations alive
            shrink_batches(context, "training", message)
            self._make()


def choose_kernels(setup: TrainSetup, log_event: EventLogger) -> None:
    """Sets the switches of the model. Called by all ranks; rank 0 measures."""
    if setup.device.kind != "cuda" or setup.optimizer.sharding is not None:
        return
    chosen: dict[str, bool] = setup.ranks.share(lambda: _read_choice(setup) or _measure_kernels(setup, log_event))
    use_fused_convs(setup.model, chosen["convs"])
    if isinstance(setup.model, RetinaNet):
        setup.model.fused_loss = chosen["loss"]


def _read_choice(setup: TrainSetup) -> dict[str, bool] | None:
    found = [event.data["kernels"] for event in read_lines(setup.folder.path, EVENTS, Event) if "kernels" in event.data]
    return found[-1] if found else None


def _measure_kernels(setup: TrainSetup, log_event: EventLogger) -> dict[str, bool]:
    trials = {
        "convs": lambda: compare_convs(setup, make_worst_case(setup)),
        "loss": lambda: compare_losses(setup, make_worst_case(setup)),
    }
    chosen, sentences = {}, []
    for name, trial in trials.items():
        chosen[name], reason = try_kernel(trial)
        sentences.append(f"{name}: {'fused' if chosen[name] else 'separate'}, {reason}")
    setup.device.empty_cache()
    log_event("info", "kernels: " + "; ".join(sentences), kernels=chosen)
    return chosen


def try_kernel(compare: Callable[[], tuple[float, float, float] | None]) -> tuple[bool, str]:
    """Whether to use a kernel, and the reason. compare: (seconds of separate operators, of the kernel, difference of
    their results), or None where the model has no use for it."""
    try:
        found = compare()
    except Exception as error:  # noqa: BLE001 (compilers and cuDNN raise anything; the separate operators remain)
        if is_out_of_memory(error):
            return False, "the trial did not fit the memory"
        return False, f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    if found is None:
        return False, "not for this model"
    separate_s, fused_s, difference = found
    times = f"{1e3 * separate_s:.3g} ms separate, {1e3 * fused_s:.3g} ms fused"
    if not difference <= TOLERANCE:  # also NaN
        return False, f"results differ by {difference:.2g} ({times})"
    return separate_s >= MIN_GAIN * fused_s, times


def compare_convs(setup: TrainSetup, batch: Batch) -> tuple[float, float, float] | None:
    """Compares all fused convolutions of a forward pass, each shape alone; the backward pass is the same. Where the
    step is compiled, what the compiler makes of bias, residual and ReLU is one pass over the map."""
    recorder = _ConvRecorder()
    use_fused_convs(setup.model, True)
    try:
        with recorder:
            _evaluate(setup, batch)
    finally:
        use_fused_convs(setup.model, False)
    if not recorder.counts:
        return None
    separate_s = fused_s = difference = 0.0
    for (shapes, geometry), count in recorder.counts.items():
        x, weight, bias = (_random(layout) for layout in shapes[:3])
        residual = None if shapes[3] is None else _random(shapes[3])
        plain = functools.partial(separate_conv_relu, x, weight, bias, residual, *geometry)
        fused = functools.partial(torch.ops.stoker.conv_relu, x, weight, bias, residual, *geometry)
        expected = plain()
        expected.clone().fill_(torch.nan)  # freed at once: what the kernel's output is made of must not matter
        difference = max(difference, _distance([fused()], [expected]))
        if setup.config.run.compile:
            plain = functools.partial(_as_compiled, x, weight, residual, geometry)
        times = measure_in_turn(plain, fused, setup.device)
        separate_s, fused_s = separate_s + count * times[0], fused_s + count * times[1]
    return separate_s, fused_s, difference


def _evaluate(setup: TrainSetup, batch: Batch) -> Any:
    """The outputs of the model; the statistics of its norms stay what they are."""
    with in_eval_mode(setup.model), torch.no_grad(), setup.device.autocast(setup.config.run.precision):
        return setup.model(batch.images)


def _as_compiled(x: Tensor, weight: Tensor, residual: Tensor | None, geometry: tuple[Any, ...]) -> Tensor:
    """Takes the time of a compiled step, not its values: the one pass reads and writes what the compiler's does."""
    output = torch.conv2d(x, weight, None, *geometry)
    return output.relu_() if residual is None else output.add_(residual)


class _ConvRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own bases are untyped
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: dict[tuple[Any, Any], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.stoker.conv_relu.default:
            shapes = tuple(
                None if tensor is None else (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
                for tensor in args[:4]
            )
            key = shapes, tuple(value if isinstance(value, int) else tuple(value) for value in args[4:])
            self.counts[key] = self.counts.get(key, 0) + 1
        return func(*args, **(kwargs or {}))


def _random(layout: tuple[Any, ...]) -> Tensor:
    shape, stride, dtype, device = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).normal_(std=0.1)


def compare_losses(setup: TrainSetup, batch: Batch) -> tuple[float, float, float] | None:
    """Compares the losses and their gradients, compiled where the step is."""
    model = setup.model
    if not isinstance(model, RetinaNet):
        return None
    outputs = _evaluate(setup, batch)
    assert isinstance(outputs.logits, Tensor)
    split = torch.split(outputs.logits, list(outputs.num_anchors_per_level), dim=1)
    levels = [level.contiguous().requires_grad_() for level in split]

    def compute_losses(fused: bool) -> Tensor:
        logits = tuple(levels) if fused else torch.cat(levels, dim=1)
        return torch.stack(list(model.loss(outputs._replace(logits=logits), batch).values())).sum()

    separate = torch.compile(compute_losses, dynamic=False) if setup.config.run.compile else compute_losses

    def separate_gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(separate(False), levels)

    def fused_gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(compute_losses(True), levels)

    difference = _distance(fused_gradients(), separate_gradients())
    return *measure_in_turn(separate_gradients, fused_gradients, setup.device), difference


def measure_in_turn(separate: Callable[[], object], fused: Callable[[], object], device: Device) -> tuple[float, float]:
    """Seconds of a call of each side."""
    best_s = [math.inf, math.inf]
    for round in range(ROUNDS + 1):
        for side, compute in enumerate((separate, fused)):
            device.synchronize()
            start_s = time.perf_counter()
            for _ in range(CALLS):
                compute()
            device.synchronize()
            if round:  # the first warms up
                best_s[side] = min(best_s[side], (time.perf_counter() - start_s) / CALLS)
    return best_s[0], best_s[1]


def _distance(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The largest norm of a difference, relative to that of what is expected."""
    return max(
        float((one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-30))
        for one, other in zip(found, expected, strict=True)
    )
