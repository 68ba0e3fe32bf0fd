"""NVML's manners, for those that ask it (`gpu`, `gpm`, `xid`): which GPUs are ours, what "no answer" means.

A question that a GPU does not support, or that we may not ask, is not asked again for a while: a driver may take
milliseconds to say no. One that says that the GPU or the driver itself is gone raises `GpuLost`.
"""

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

Value = TypeVar("Value")

ASK_AGAIN_AFTER = 600
"""Samples, so ten minutes: a setting (ECC, MIG) may change meanwhile."""

MOST_SLICES = 8
"""Of one GPU; seven are the most so far."""

_LOST = {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_UNINITIALIZED}
"""The GPU, or the driver under it, answers nothing any more: it is not asked again."""

_NEVER = {
    pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
}  # fmt: skip
"""The answer will be the same in a second."""


class GpuLost(Exception):
    """The driver says that a GPU, or the driver itself, is gone."""


@dataclasses.dataclass
class Gpu:
    """A GPU, or a slice of one (MIG), that CUDA may use."""

    index: int
    """The driver's number of the whole GPU."""
    whole: Any
    """NVML's handle of it; None: it was lost before we came."""
    part: Any = None
    """NVML's handle of the slice."""
    slice_id: int | None = None
    """Number of the slice's GPU instance."""
    silent: dict[str, int] = dataclasses.field(default_factory=dict)
    """Questions without an answer, and the sample in which they are asked again."""
    sample: int = 0

    @property
    def handle(self) -> Any:
        """What our own share is asked of: memory, processes."""
        return self.whole if self.part is None else self.part

    def ask(self, question: Callable[..., Value], *arguments: Any, of: Any = None) -> Value | None:
        """What the whole GPU, or `of`, says; None when it has no answer. Raises GpuLost."""
        name = question.__name__ + "".join(f" {word}" for word in arguments if isinstance(word, int))
        if self.silent.get(name, 0) > self.sample:
            return None
        try:
            return question(self.whole if of is None else of, *arguments)
        except pynvml.NVMLError as error:
            if error.value in _LOST:
                raise GpuLost(str(error)) from error
            if error.value in _NEVER:
                self.silent[name] = self.sample + ASK_AGAIN_AFTER
            return None


def ask(question: Callable[..., Value], *arguments: Any) -> Value | None:
    """The answer, or None when this GPU or driver has none. Raises GpuLost."""
    try:
        return question(*arguments)
    except pynvml.NVMLError as error:
        if error.value in _LOST:
            raise GpuLost(str(error)) from error
        return None


def address(handle: Any) -> int:
    """What tells two handles apart: the driver's own pointer."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def visible_gpus(visible: str | None) -> list[Gpu]:
    """GPUs in CUDA's order, of CUDA_VISIBLE_DEVICES. As in CUDA, the first name that fits no GPU hides itself and all
    after it, and of a GPU that is cut into slices the first slice is used."""
    every = [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    if visible is None:
        return [_first_slice(gpu) for gpu in every]
    chosen: list[Gpu] = []
    for name in (part.strip() for part in visible.split(",")):
        fitting: list[Gpu] = []
        if name.isdecimal():
            fitting = [_first_slice(gpu) for gpu in every if gpu.index == int(name)]
        elif name.startswith("GPU-"):
            fitting = [_first_slice(gpu) for gpu in every if _uuid(gpu.whole).startswith(name)]
        elif name.startswith("MIG-") and (part := ask(pynvml.nvmlDeviceGetHandleByUUID, name)) is not None:
            whole = ask(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, part)
            fitting = [_slice(gpu, part) for gpu in every if whole is not None and _is(gpu.whole, whole)]
        if len(fitting) != 1:
            break
        chosen += fitting
    return chosen


def _gpu(index: int) -> Gpu:
    try:
        return Gpu(index, ask(pynvml.nvmlDeviceGetHandleByIndex, index))
    except GpuLost:
        return Gpu(index, None)


def _first_slice(gpu: Gpu) -> Gpu:
    try:
        mode = None if gpu.whole is None else ask(pynvml.nvmlDeviceGetMigMode, gpu.whole)
        for place in range(MOST_SLICES if mode and mode[0] else 0):
            if (part := ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu.whole, place)) is not None:
                return _slice(gpu, part)
    except GpuLost:
        return Gpu(gpu.index, None)
    return gpu


def _slice(gpu: Gpu, part: Any) -> Gpu:
    return Gpu(gpu.index, gpu.whole, part, ask(pynvml.nvmlDeviceGetGpuInstanceId, part))


def _is(one: Any, other: Any) -> bool:
    return one is not None and address(one) == address(other)


def _uuid(handle: Any) -> str:
    return "" if handle is None else ask(pynvml.nvmlDeviceGetUUID, handle) or ""
