"""How fast a device computes the largest convolutions of a training step: forward, gradients of data and of weights.

They are most of a step's arithmetic, so their time bounds what the step can reach. gpu_case.py runs it.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import stoker.models.layers.convolutions  # noqa: F401 (registers conv_relu)
from stoker.hardware.device import Device

LARGEST = 20
MOST_S = 20.0
"""Of all convolutions of one mode; the largest come first."""
REPEATS, REPEAT_S = 5, 5e-3
DIRECTIONS = ("forward", "data gradient", "weight gradient")
aten = torch.ops.aten


@dataclass(frozen=True)
class Convolution:
    """x and weight: their shapes, NCHW; calls: how often a step computes it in each of DIRECTIONS."""

    x: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dtype: str
    calls: tuple[int, ...] = (0, 0, 0)

    @classmethod
    def read(cls, fields: dict[str, Any]) -> "Convolution":
        """From JSON."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})

    @property
    def name(self) -> str:
        size, (out, _, height, width) = "×".join(map(str, self.x)), self.weight
        stride = "" if self.stride == (1, 1) else f" stride {self.stride[0]}"
        return f"{size} → {out}, {height}×{width}{stride}" + (f", {self.groups} groups" if self.groups > 1 else "")

    @property
    def flop(self) -> int:
        """Of one call in one direction: 2 for a multiply-add."""
        sides = [
            (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for size, padding, dilation, kernel, stride in zip(
                self.x[2:], self.padding, self.dilation, self.weight[2:], self.stride, strict=True
            )
        ]
        return 2 * self.x[0] * math.prod(sides) * math.prod(self.weight)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the convolutions of a step by shape and direction."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[tuple[Convolution, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        one = read_call(func, args)
        if one is not None:
            key = replace(one, calls=(0, 0, 0))
            for direction, calls in enumerate(one.calls):
                self.calls[key, direction] += calls
        return func(*args, **(kwargs or {}))


def read_call(func: Any, args: Any) -> Convolution | None:
    """The convolution that a call of an operator computes, with what it computes of it; None for other operators."""
    if func is aten.convolution.default:
        x, weight, _, *shape, _transposed, _output_padding, groups = args
        return _make(x, weight, shape, groups, (1, 0, 0))
    if func is torch.ops.stoker.conv_relu.default:
        x, weight, _, _, *shape, groups = args
        return _make(x, weight, shape, groups, (1, 0, 0))
    if func is aten.convolution_backward.default:
        _, x, weight, _, *shape, _transposed, _output_padding, groups, wanted = args
        return _make(x, weight, shape, groups, (0, int(wanted[0]), int(wanted[1])))
    return None


def _make(x: Tensor, weight: Tensor, shape: list[list[int]], groups: int, calls: tuple[int, int, int]) -> Convolution:
    dtype = str(x.dtype).removeprefix("torch.")
    return Convolution(tuple(x.shape), tuple(weight.shape), *map(tuple, shape), groups, dtype, calls)


def largest(step: Callable[[], None]) -> list[Convolution]:
    """The convolutions of a step, by their FLOPs in all directions and calls, the largest first."""
    with _Recorder() as recorder:
        step()
    found = [
        replace(key, calls=tuple(recorder.calls[key, direction] for direction in range(3)))
        for key in dict.fromkeys(key for key, _ in recorder.calls)
    ]
    return sorted(found, key=lambda one: one.flop * sum(one.calls), reverse=True)


def total_tflop(convolutions: list[Convolution]) -> float:
    return sum(one.flop * sum(one.calls) for one in convolutions) / 1e12


def measure(convolutions: list[Convolution], device: Device, say: Callable[..., None], *, benchmark: bool) -> None:
    """A line for each convolution: TFLOP/s in each direction, and the milliseconds that all its calls take a step."""
    ends = time.monotonic() + MOST_S
    for place, one in enumerate(convolutions):
        if time.monotonic() > ends:
            return
        times = {
            direction: milliseconds(device, call)
            for direction, call, calls in zip(DIRECTIONS, _calls(one, device), one.calls, strict=True)
            if calls
        }
        rates = {f"{direction} TFLOP/s": one.flop / ms / 1e9 for direction, ms in times.items()}
        step_ms = sum(times[direction] * calls for direction, calls in zip(DIRECTIONS, one.calls, strict=True) if calls)
        tflop = one.flop * sum(one.calls) / 1e12
        say(
            place=place,
            convolution=one.name,
            calls=one.calls,
            benchmark=benchmark,
            tflop=tflop,
            step_ms=step_ms,
            **rates,
        )


def _calls(one: Convolution, device: Device) -> list[Callable[[], object]]:
    """The three directions, on random operands, stored channels last as in the models."""
    where = {"device": device.torch_device, "dtype": getattr(torch, one.dtype)}
    x = torch.randn(one.x, **where).to(memory_format=torch.channels_last)
    weight = (torch.randn(one.weight, **where) / 16).to(memory_format=torch.channels_last)
    shape = [*map(list, (one.stride, one.padding, one.dilation)), False, [0, 0], one.groups]
    gradient = torch.randn_like(aten.convolution(x, weight, None, *shape))

    def backward(wanted: list[bool]) -> Callable[[], object]:
        return lambda: aten.convolution_backward(gradient, x, weight, None, *shape, wanted)

    return [
        lambda: aten.convolution(x, weight, None, *shape),
        backward([True, False, False]),
        backward([False, True, False]),
    ]


def milliseconds(device: Device, call: Callable[[], object]) -> float:
    """Median of repeats, each long enough that the wait for its end does not count."""
    calls = 1
    for _ in range(2):  # the first one also chooses the algorithm
        took_s = _seconds(device, call, calls)
    calls = max(1, math.ceil(REPEAT_S / max(took_s, 1e-5)))
    return 1e3 * statistics.median(_seconds(device, call, calls) / calls for _ in range(REPEATS))


def _seconds(device: Device, call: Callable[[], object], calls: int) -> float:
    device.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    device.synchronize()
    return time.perf_counter() - began


def ceilings(device: Device, *, tiny: bool) -> dict[str, float]:
    """What this device reaches at most: a large matrix product, a large copy (bytes read and written)."""
    side, count = (256, 2**20) if tiny else (8192, 2**32)
    left, right = (torch.randn(side, side, device=device.torch_device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.ones(count, device=device.torch_device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return {
        "matmul TFLOP/s": 2 * side**3 / milliseconds(device, lambda: left @ right) / 1e9,
        "copy TB/s": 2 * count / milliseconds(device, lambda: target.copy_(source)) / 1e9,
    }
