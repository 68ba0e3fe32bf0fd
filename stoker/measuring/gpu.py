"""What the NVIDIA driver says about our GPUs, through NVML. With `device.py` the only file that knows CUDA's names.

A machine without a driver has no GPUs and a `reason`; a counter that a GPU does not have is None, never 0; a GPU that
is lost during the run is a sample without numbers and a `reason`. Nothing here raises because of the driver. NVML
numbers GPUs by their place on the bus; CUDA_VISIBLE_DEVICES numbers them so too where all are alike, and on a mixed
machine with CUDA_DEVICE_ORDER=PCI_BUS_ID. Who samples, and how often: `witness`.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pynvml

from stoker.schemas import GpuSample

Value = TypeVar("Value")

_LOST = {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_UNINITIALIZED}
"""The GPU, or the driver under it, answers nothing any more: it is not asked again."""


class _GpuLost(Exception):
    """The driver says that a GPU, or the driver itself, is gone."""


class Gpus:
    """The GPUs that this process may use, opened once; `environment` is where CUDA_VISIBLE_DEVICES is looked up.

    reason: why there is no GPU, or which was lost; None when all is well.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self.reason: str | None = None
        self._gpus: list[tuple[int, Any]] = []
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        try:
            pynvml.nvmlInit()
            self._gpus = _visible_gpus(visible)
        except pynvml.NVMLError as error:
            self.reason = f"NVML does not open: {error}"
        except _GpuLost as lost:
            self.reason = str(lost)
        if not self._gpus and self.reason is None:
            none_shown = f"CUDA_VISIBLE_DEVICES={visible!r} shows none of the driver's GPUs"
            self.reason = "the driver has no GPU" if visible is None else none_shown
        self._lost = {place for place, (_, handle) in enumerate(self._gpus) if handle is None}
        if self._lost:
            self.reason = f"GPU {', '.join(str(self._gpus[place][0]) for place in sorted(self._lost))} does not answer"

    def sample(self) -> list[GpuSample]:
        """One sample of each GPU, in the order of CUDA_VISIBLE_DEVICES."""
        return [self._sample(place, index, handle) for place, (index, handle) in enumerate(self._gpus)]

    def describe(self) -> dict[str, Any]:
        """Driver, the CUDA version it supports, and what the GPUs are, for environment.json."""
        if not self._gpus:
            return {"gpus": [], "reason": self.reason}
        try:
            cuda = _ask(pynvml.nvmlSystemGetCudaDriverVersion)
            return {
                "driver": _ask(pynvml.nvmlSystemGetDriverVersion),
                "cuda_driver": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
                "gpus": [_describe(index, handle) for index, handle in self._gpus],
                **({} if self.reason is None else {"reason": self.reason}),
            }
        except _GpuLost as lost:
            return {"gpus": [{"index": index} for index, _ in self._gpus], "reason": f"a GPU does not answer: {lost}"}

    def _sample(self, place: int, index: int, handle: Any) -> GpuSample:
        if place in self._lost:  # not asked again: a driver may take long to say so
            return GpuSample(index=index)
        try:
            utilisation = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
            memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
            power_mw = _ask(pynvml.nvmlDeviceGetPowerUsage, handle)
            limit_mw = _ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
            return GpuSample(
                index=index,
                utilisation=None if utilisation is None else utilisation.gpu / 100,
                memory_used_bytes=None if memory is None else memory.used,
                memory_total_bytes=None if memory is None else memory.total,
                power_w=None if power_mw is None else power_mw / 1e3,
                power_limit_w=None if limit_mw is None else limit_mw / 1e3,
                sm_clock_mhz=_ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
                temperature_c=_ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
                throttle_reasons=_ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
            )
        except _GpuLost as lost:
            self._lost.add(place)
            self.reason = f"GPU {index} does not answer any more: {lost}"
            return GpuSample(index=index)


def _describe(index: int, handle: Any) -> dict[str, Any]:
    if handle is None:
        return {"index": index}
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    return {
        "index": index,
        "name": _ask(pynvml.nvmlDeviceGetName, handle),
        "uuid": _ask(pynvml.nvmlDeviceGetUUID, handle),
        "memory_bytes": None if memory is None else memory.total,
    }


def _ask(question: Callable[..., Value], *arguments: Any) -> Value | None:
    """The answer, or None when this GPU or driver has none. Raises _GpuLost."""
    try:
        return question(*arguments)
    except pynvml.NVMLError as error:
        if error.value in _LOST:
            raise _GpuLost(str(error)) from error
        return None


def _visible_gpus(visible: str | None) -> list[tuple[int, Any]]:
    """(index, NVML handle) in CUDA's order; the handle of a GPU that was lost before we came is None.

    As in CUDA, the first name that fits no GPU hides itself and all after it.
    """
    every = [(index, _handle(index)) for index in range(pynvml.nvmlDeviceGetCount())]
    if visible is None:
        return every
    chosen: list[tuple[int, Any]] = []
    for name in (part.strip() for part in visible.split(",")):
        fitting: list[tuple[int, Any]] = []
        if name.isdecimal():
            fitting = [(index, handle) for index, handle in every if index == int(name)]
        elif name.startswith("GPU-"):
            fitting = [(index, handle) for index, handle in every if _uuid(handle).startswith(name)]
        elif name.startswith("MIG-") and (part_of_gpu := _ask(pynvml.nvmlDeviceGetHandleByUUID, name)) is not None:
            fitting = [(_ask(pynvml.nvmlDeviceGetIndex, part_of_gpu) or 0, part_of_gpu)]
        if len(fitting) != 1:
            break
        chosen += fitting
    return chosen


def _handle(index: int) -> Any:
    try:
        return _ask(pynvml.nvmlDeviceGetHandleByIndex, index)
    except _GpuLost:
        return None


def _uuid(handle: Any) -> str:
    return "" if handle is None else _ask(pynvml.nvmlDeviceGetUUID, handle) or ""
