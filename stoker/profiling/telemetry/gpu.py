"""What the NVIDIA driver says about our GPUs, through NVML. With its helpers (`nvml`, `gpm`, `xid`) and `device.py` the
only place that knows CUDA's names.

A machine without a driver has no GPUs and a `reason`; a counter that a GPU does not have is None, never 0; a GPU that
is lost during the run is a sample without numbers and a `reason`. Nothing here raises because of the driver. NVML
numbers GPUs by their place on the bus; CUDA_VISIBLE_DEVICES numbers them so too where all are alike, and on a mixed
machine with CUDA_DEVICE_ORDER=PCI_BUS_ID. Of a slice (MIG), memory, processes and GPM counters are its own; power,
clocks, temperature, PCIe and memory errors are those of the whole GPU, and a utilisation it has none. Who samples, and
how often: `witness`.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pynvml

from stoker.profiling.telemetry.gpm import Counters
from stoker.profiling.telemetry.nvml import Gpu, GpuLost, ask, visible_gpus
from stoker.profiling.telemetry.processes import tree
from stoker.profiling.telemetry.procfs import read_or_none
from stoker.runs.schemas import GpuSample

SELDOM = 10
"""Samples between two readings of what changes slowly or costs more: a second's line repeats it."""

FIRST_NAMESPACE = 0xEFFFFFFC
"""Inode of the first namespace of process numbers (PROC_PID_INIT_INO of linux/proc_ns.h)."""


class Gpus:
    """The GPUs that this process may use, opened once; `environment` is where CUDA_VISIBLE_DEVICES is looked up; `pid`:
    the root of the run's processes, default this one.

    reason: why there is no GPU, or which was lost; None when all is well. gpus: those that there are.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ, *, pid: int | None = None) -> None:
        self.reason: str | None = None
        self.gpus: list[Gpu] = []
        self._root = pid or os.getpid()
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        try:
            pynvml.nvmlInit()
            self.gpus = visible_gpus(visible)
        except pynvml.NVMLError as error:
            self.reason = f"NVML does not open: {error}"
        except GpuLost as lost:
            self.reason = str(lost)
        if not self.gpus and self.reason is None:
            none_shown = f"CUDA_VISIBLE_DEVICES={visible!r} shows none of the driver's GPUs"
            self.reason = "the driver has no GPU" if visible is None else none_shown
        self._lost = {place for place, gpu in enumerate(self.gpus) if gpu.whole is None}
        if self._lost:
            self.reason = (
                f"GPU {', '.join(str(self.gpus[place].index) for place in sorted(self._lost))} does not answer"
            )
        self._counters = [Counters(gpu) for gpu in self.gpus]
        self._seldom: list[dict[str, Any]] = [{} for _ in self.gpus]

    def sample(self) -> list[GpuSample]:
        """One sample of each GPU, in the order of CUDA_VISIBLE_DEVICES."""
        ours: set[int] | None = None
        if any(gpu.sample % SELDOM == 0 for place, gpu in enumerate(self.gpus) if place not in self._lost):
            ours = set(tree(self._root)) if _sees_every_process() else None
        return [self._sample(place, gpu, ours) for place, gpu in enumerate(self.gpus)]

    def describe(self) -> dict[str, Any]:
        """Driver, the CUDA version it supports, and what the GPUs are, for environment.json."""
        if not self.gpus:
            return {"gpus": [], "reason": self.reason}
        try:
            cuda = ask(pynvml.nvmlSystemGetCudaDriverVersion)
            return {
                "driver": ask(pynvml.nvmlSystemGetDriverVersion),
                "cuda_driver": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
                "gpus": [_describe(gpu) for gpu in self.gpus],
                **({} if self.reason is None else {"reason": self.reason}),
            }
        except GpuLost as lost:
            return {"gpus": [{"index": gpu.index} for gpu in self.gpus], "reason": f"a GPU does not answer: {lost}"}

    def _sample(self, place: int, gpu: Gpu, ours: set[int] | None) -> GpuSample:
        if place in self._lost:  # not asked again: a driver may take long to say so
            return GpuSample(index=gpu.index)
        try:
            counted: dict[str, Any] = dict(self._counters[place].sample())
            if gpu.sample % SELDOM == 0:
                self._seldom[place] = {**_slow(gpu), "other_processes": _others(gpu, ours)}
                if "pcie_sent_bytes_s" not in counted and gpu.part is None:
                    counted |= _traffic(gpu)
            gpu.sample += 1
            return GpuSample(index=gpu.index, **_quick(gpu), **self._seldom[place], **counted)
        except GpuLost as lost:
            self._lost.add(place)
            self.reason = f"GPU {gpu.index} does not answer any more: {lost}"
            return GpuSample(index=gpu.index)


def _quick(gpu: Gpu) -> dict[str, Any]:
    """What changes from second to second."""
    used = None if gpu.part is not None else gpu.ask(pynvml.nvmlDeviceGetUtilizationRates)
    memory = gpu.ask(pynvml.nvmlDeviceGetMemoryInfo, of=gpu.handle)
    energy_mj = gpu.ask(pynvml.nvmlDeviceGetTotalEnergyConsumption)
    power_mw = gpu.ask(pynvml.nvmlDeviceGetPowerUsage)
    return {
        "utilisation": None if used is None else used.gpu / 100,
        "memory_utilisation": None if used is None else used.memory / 100,
        "memory_used_bytes": None if memory is None else memory.used,
        "memory_total_bytes": None if memory is None else memory.total,
        "power_w": None if power_mw is None else power_mw / 1e3,
        "energy_j": None if energy_mj is None else energy_mj / 1e3,
        "sm_clock_mhz": gpu.ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
        "memory_clock_mhz": gpu.ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_MEM),
        "temperature_c": gpu.ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": gpu.ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons),
        "pcie_generation": gpu.ask(pynvml.nvmlDeviceGetCurrPcieLinkGeneration),
        "pcie_width": gpu.ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth),
    }


def _slow(gpu: Gpu) -> dict[str, Any]:
    """What hardly changes, or is asked of a part of the GPU that answers slowly."""
    limit_mw = gpu.ask(pynvml.nvmlDeviceGetEnforcedPowerLimit)
    since_loaded = pynvml.NVML_VOLATILE_ECC
    return {
        "power_limit_w": None if limit_mw is None else limit_mw / 1e3,
        "sm_clock_max_mhz": gpu.ask(pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM),
        "pcie_generation_max": gpu.ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration),
        "pcie_width_max": gpu.ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth),
        "ecc_corrected": gpu.ask(
            pynvml.nvmlDeviceGetTotalEccErrors, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, since_loaded
        ),
        "ecc_uncorrected": gpu.ask(
            pynvml.nvmlDeviceGetTotalEccErrors, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, since_loaded
        ),
        "mig": _mig(gpu),
        "vgpu": _vgpu(gpu),
    }


def _mig(gpu: Gpu) -> bool | None:
    if gpu.part is not None:
        return True
    mode = gpu.ask(pynvml.nvmlDeviceGetMigMode)
    return None if mode is None else bool(mode[0])


def _vgpu(gpu: Gpu) -> bool | None:
    mode = gpu.ask(pynvml.nvmlDeviceGetVirtualizationMode)
    return None if mode is None else mode == pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU


def _traffic(gpu: Gpu) -> dict[str, float]:
    """PCIe traffic of GPUs without GPM. The driver counts for 20 ms for each of the two, in which only our thread
    waits: so a sample of the traffic, and not in every line."""
    sent_kb = gpu.ask(pynvml.nvmlDeviceGetPcieThroughput, pynvml.NVML_PCIE_UTIL_TX_BYTES)
    received_kb = gpu.ask(pynvml.nvmlDeviceGetPcieThroughput, pynvml.NVML_PCIE_UTIL_RX_BYTES)
    found: dict[str, float] = {}
    if sent_kb is not None and received_kb is not None:
        found = {"pcie_sent_bytes_s": sent_kb * 1000.0, "pcie_received_bytes_s": received_kb * 1000.0}
    return found


def _others(gpu: Gpu, ours: set[int] | None) -> int | None:
    """Computing processes that are not ours; the server through which several share a GPU (MPS) is nobody's."""
    if ours is None:
        return None
    every = gpu.ask(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, of=gpu.handle)
    if every is None:
        return None
    strangers = {process.pid for process in every} - ours
    return sum(1 for pid in strangers if not (read_or_none(f"/proc/{pid}/comm") or b"").startswith(b"nvidia-cuda-mps"))


def _sees_every_process() -> bool:
    """Whether the driver's process numbers are ours. They are the machine's: inside a container, whose numbers are its
    own, no process can be told from another."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == FIRST_NAMESPACE
    except OSError:  # not a Linux
        return False


def _describe(gpu: Gpu) -> dict[str, Any]:
    if gpu.whole is None:
        return {"index": gpu.index}
    memory = ask(pynvml.nvmlDeviceGetMemoryInfo, gpu.handle)
    limit_mw = ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, gpu.whole)
    gpm = ask(pynvml.nvmlGpmQueryDeviceSupport, gpu.whole)
    return {
        "index": gpu.index,
        "name": ask(pynvml.nvmlDeviceGetName, gpu.handle),
        "uuid": ask(pynvml.nvmlDeviceGetUUID, gpu.handle),
        "memory_bytes": None if memory is None else memory.total,
        "mig": _mig(gpu),
        "vgpu": _vgpu(gpu),
        "gpm": None if gpm is None else bool(gpm.isSupportedDevice),
        "pcie_generation_max": ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, gpu.whole),
        "pcie_width_max": ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth, gpu.whole),
        "power_limit_w": None if limit_mw is None else limit_mw / 1e3,
    }
