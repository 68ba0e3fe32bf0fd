"""Helpers around NVML for `gpu` and `sampler`: which GPUs are visible, and what a missing value means.

A query that a GPU does not support or permit is not repeated for a while: a driver may take milliseconds to refuse. An
error which means that the GPU or the driver is gone raises `GpuLost`.
"""

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

Value = TypeVar("Value")

RETRY_AFTER_SAMPLES = 600
"""Ten minutes of samples: a setting (ECC, MIG) may change."""

MAX_MIG_DEVICES = 8
"""Of one GPU; current GPUs have at most seven."""

_LOST_ERRORS = {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_UNINITIALIZED}
"""The GPU or the driver is gone: it is not queried again."""

_PERMANENT_ERRORS = {
    pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
}  # fmt: skip
"""The next query would have the same result."""


class GpuLost(Exception):
    """The driver reports that a GPU, or the driver itself, is gone."""


@dataclasses.dataclass
class Gpu:
    """A GPU, or a MIG slice of one, that CUDA may use."""

    index: int
    """The driver's index of the whole GPU."""
    device: Any
    """NVML's handle; None: the GPU was lost before it was opened."""
    mig_device: Any = None
    """NVML's handle of the MIG slice."""
    gpu_instance_id: int | None = None
    """GPU instance of the slice."""
    unsupported_until: dict[str, int] = dataclasses.field(default_factory=dict)
    """Unsupported queries, and the sample in which they are repeated."""
    sample_index: int = 0

    @property
    def handle(self) -> Any:
        """The handle for memory and processes: the slice if there is one."""
        return self.device if self.mig_device is None else self.mig_device

    def query(self, function: Callable[..., Value], *arguments: Any, target: Any = None) -> Value | None:
        """The result for the whole GPU, or for `target`; None if it has none. Raises GpuLost."""
        name = function.__name__ + "".join(f" {argument}" for argument in arguments if isinstance(argument, int))
        if self.unsupported_until.get(name, 0) > self.sample_index:
            return None
        try:
            return function(self.device if target is None else target, *arguments)
        except pynvml.NVMLError as error:
            if error.value in _LOST_ERRORS:
                raise GpuLost(str(error)) from error
            if error.value in _PERMANENT_ERRORS:
                self.unsupported_until[name] = self.sample_index + RETRY_AFTER_SAMPLES
            return None


def query(function: Callable[..., Value], *arguments: Any) -> Value | None:
    """The result, or None if this GPU or driver has none. Raises GpuLost."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        if error.value in _LOST_ERRORS:
            raise GpuLost(str(error)) from error
        return None


def handle_pointer(handle: Any) -> int:
    """The driver's pointer, which identifies a handle."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def visible_gpus(visible: str | None) -> list[Gpu]:
    """GPUs in CUDA's order, as in CUDA_VISIBLE_DEVICES. As in CUDA, the first name that matches no GPU hides itself and
    all names after it, and of a GPU in MIG mode the first slice is used."""
    all_gpus = [_open_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    if visible is None:
        return [_first_mig_device(gpu) for gpu in all_gpus]
    selected: list[Gpu] = []
    for name in map(str.strip, visible.split(",")):
        matches: list[Gpu] = []
        if name.isdecimal():
            matches = [_first_mig_device(gpu) for gpu in all_gpus if gpu.index == int(name)]
        elif name.startswith("GPU-"):
            matches = [_first_mig_device(gpu) for gpu in all_gpus if _uuid(gpu.device).startswith(name)]
        elif name.startswith("MIG-") and (mig_device := query(pynvml.nvmlDeviceGetHandleByUUID, name)) is not None:
            parent = query(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, mig_device)
            matches = [
                _make_mig_gpu(gpu, mig_device)
                for gpu in all_gpus
                if parent is not None and _is_same_device(gpu.device, parent)
            ]
        if len(matches) != 1:
            break
        selected += matches
    return selected


def _open_gpu(index: int) -> Gpu:
    try:
        return Gpu(index, query(pynvml.nvmlDeviceGetHandleByIndex, index))
    except GpuLost:
        return Gpu(index, None)


def _first_mig_device(gpu: Gpu) -> Gpu:
    try:
        mode = None if gpu.device is None else query(pynvml.nvmlDeviceGetMigMode, gpu.device)
        for i in range(MAX_MIG_DEVICES if mode and mode[0] else 0):
            if (mig_device := query(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu.device, i)) is not None:
                return _make_mig_gpu(gpu, mig_device)
    except GpuLost:
        return Gpu(gpu.index, None)
    return gpu


def _make_mig_gpu(gpu: Gpu, mig_device: Any) -> Gpu:
    return Gpu(gpu.index, gpu.device, mig_device, query(pynvml.nvmlDeviceGetGpuInstanceId, mig_device))


def _is_same_device(a: Any, b: Any) -> bool:
    return a is not None and handle_pointer(a) == handle_pointer(b)


def _uuid(handle: Any) -> str:
    return "" if handle is None else query(pynvml.nvmlDeviceGetUUID, handle) or ""
