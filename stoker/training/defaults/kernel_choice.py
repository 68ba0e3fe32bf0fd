"""Chooses the kernels of a training on a GPU by measurement, once, before its first step.

Two switches: convolutions with fused bias, residual and ReLU (`models/layers/convolutions.py`), and RetinaNet's
matching and classification loss as Triton kernels (`models/layers/triton_kernels.py`). Each is timed against the
separate operators on the shapes of the run, and must give the same result. An event has the choice, and every later
attempt of the run takes it from there. A CPU, and a model divided among devices, keep the separate operators.
"""

import functools
import importlib.util
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.data.batch import Batch
from stoker.hardware.device import Device, is_out_of_memory
from stoker.models.layers.convolutions import use_fused_convs
from stoker.models.retinanet import RetinaNet
from stoker.runs.records import EVENTS, read_lines
from stoker.runs.schemas import Event
from stoker.training.defaults.dry_run import make_worst_case
from stoker.training.state import EventLogger, TrainSetup

ROUNDS, CALLS = 5, 10
"""Measurements of each side, in turn, of which the shortest counts, since disturbances only add time; calls in each."""
MIN_GAIN = 1.02
"""A kernel is taken if the separate operators take at least this many times as long: less may be noise (an assumption,
not measured)."""
TOLERANCE = 0.02
"""Largest difference of results, relative to their norm. Both sides round to bf16, at other places; a wrong kernel is
apart by all of it."""


Compare = Callable[[TrainSetup, Batch], tuple[float, float, float] | None]


def choose_kernels(setup: TrainSetup, log_event: EventLogger) -> None:
    """Sets the switches of the model. Called by all ranks; rank 0 measures."""
    if setup.device.kind != "cuda" or setup.optimizer.sharding is not None:
        return
    chosen: dict[str, bool] = setup.ranks.share(lambda: _read(setup) or _measure(setup, log_event))
    use_fused_convs(setup.model, chosen["convs"])
    if isinstance(setup.model, RetinaNet):
        setup.model.fused_loss = chosen["loss"]


def _read(setup: TrainSetup) -> dict[str, bool] | None:
    """What an earlier attempt of the run chose."""
    found = [event.data["kernels"] for event in read_lines(setup.folder.path, EVENTS, Event) if "kernels" in event.data]
    return found[-1] if found else None


def _measure(setup: TrainSetup, log_event: EventLogger) -> dict[str, bool]:
    def attempt(compare: Compare) -> tuple[float, float, float] | None:
        return compare(setup, make_worst_case(setup))

    chosen, sentences = {}, []
    for name, compare in (("convs", compare_convs), ("loss", compare_losses)):
        chosen[name], reason = try_kernel(functools.partial(attempt, compare))
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
    """Of all fused convolutions of a forward pass, each shape timed alone; the backward pass is the same. Where the
    step is compiled, what the compiler makes of bias, residual and ReLU is one pass over the map."""
    recorder = _ConvRecorder()
    use_fused_convs(setup.model, True)
    setup.model.eval()  # the statistics of its norms stay what they are
    try:
        with torch.no_grad(), setup.device.autocast(setup.config.run.precision), recorder:
            setup.model(batch.images)
    finally:
        setup.model.train()
        use_fused_convs(setup.model, False)
    if not recorder.counts:
        return None
    separate_s = fused_s = difference = 0.0
    for (shapes, geometry), count in recorder.counts.items():
        x, weight, bias = (_random(layout) for layout in shapes[:3])
        residual = None if shapes[3] is None else _random(shapes[3])
        plain, fused = _plain(x, weight, bias, residual, geometry), torch.ops.stoker.conv_relu
        expected = plain()
        expected.clone().fill_(torch.nan)  # freed at once: what the kernel's output is made of must not matter
        difference = max(difference, _distance([fused(x, weight, bias, residual, *geometry)], [expected]))
        if setup.config.run.compile:
            plain = _as_compiled(x, weight, residual, geometry)
        times = measure_in_turn(plain, functools.partial(fused, x, weight, bias, residual, *geometry), setup.device)
        separate_s, fused_s = separate_s + count * times[0], fused_s + count * times[1]
    return separate_s, fused_s, difference


def _plain(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, geometry: tuple[Any, ...]
) -> Callable[[], Tensor]:
    def compute() -> Tensor:
        output = torch.conv2d(x, weight, bias, *geometry)
        return (output if residual is None else output.add_(residual)).relu_()

    return compute


def _as_compiled(x: Tensor, weight: Tensor, residual: Tensor | None, geometry: tuple[Any, ...]) -> Callable[[], Tensor]:
    """The time, not the values: the one pass reads and writes what the compiler's does."""

    def compute() -> Tensor:
        output = torch.conv2d(x, weight, None, *geometry)
        return output.relu_() if residual is None else output.add_(residual)

    return compute


class _ConvRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own bases are untyped
    """Counts the fused convolutions by their shapes and geometry."""

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
    """Of the losses and their gradients, compiled where the step is."""
    model = setup.model
    if not isinstance(model, RetinaNet) or importlib.util.find_spec("triton") is None:
        return None
    model.eval()  # the statistics of its norms stay what they are
    try:
        with torch.no_grad(), setup.device.autocast(setup.config.run.precision):
            outputs = model(batch.images)
    finally:
        model.train()
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
    """Seconds of a call of each."""
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
