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

from stoker.profiling.telemetry.gpm import GpmCounters
from stoker.profiling.telemetry.nvml import Gpu, GpuLost, query, visible_gpus
from stoker.profiling.telemetry.processes import list_process_tree
from stoker.profiling.telemetry.procfs import read_or_none
from stoker.runs.schemas import GpuSample

SLOW_SAMPLE_EVERY = 10
"""Samples between two readings of what changes slowly or costs more: a second's line repeats it."""

INITIAL_PID_NAMESPACE_INODE = 0xEFFFFFFC
"""Inode of the first namespace of process numbers (PROC_PID_INIT_INO of linux/proc_ns.h)."""


class GpuSampler:
    """The GPUs that this process may use, opened once; `environment` is where CUDA_VISIBLE_DEVICES is looked up; `pid`:
    the root of the run's processes, default this one.

    reason: why there is no GPU, or which was lost; None when all is well. gpus: those that there are.
    """

    def __init__(self, env: Mapping[str, str] = os.environ, *, pid: int | None = None) -> None:
        self.reason: str | None = None
        self.gpus: list[Gpu] = []
        self._root_pid = pid or os.getpid()
        visible = env.get("CUDA_VISIBLE_DEVICES")
        try:
            pynvml.nvmlInit()
            self.gpus = visible_gpus(visible)
        except pynvml.NVMLError as error:
            self.reason = f"NVML does not open: {error}"
        except GpuLost as lost:
            self.reason = str(lost)
        if not self.gpus and self.reason is None:
            none_visible = f"CUDA_VISIBLE_DEVICES={visible!r} shows none of the driver's GPUs"
            self.reason = "the driver has no GPU" if visible is None else none_visible
        self._lost = {i for i, gpu in enumerate(self.gpus) if gpu.device is None}
        if self._lost:
            self.reason = f"GPU {', '.join(str(self.gpus[i].index) for i in sorted(self._lost))} does not answer"
        self._gpm_counters = [GpmCounters(gpu) for gpu in self.gpus]
        self._slow_values: list[dict[str, Any]] = [{} for _ in self.gpus]

    def sample(self) -> list[GpuSample]:
        """One sample of each GPU, in the order of CUDA_VISIBLE_DEVICES."""
        own_pids: set[int] | None = None
        if any(gpu.sample_index % SLOW_SAMPLE_EVERY == 0 for i, gpu in enumerate(self.gpus) if i not in self._lost):
            own_pids = set(list_process_tree(self._root_pid)) if _in_host_pid_namespace() else None
        return [self._sample_gpu(i, gpu, own_pids) for i, gpu in enumerate(self.gpus)]

    def describe(self) -> dict[str, Any]:
        """Driver, the CUDA version it supports, and what the GPUs are, for environment.json."""
        if not self.gpus:
            return {"gpus": [], "reason": self.reason}
        try:
            cuda = query(pynvml.nvmlSystemGetCudaDriverVersion)
            return {
                "driver": query(pynvml.nvmlSystemGetDriverVersion),
                "cuda_driver": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
                "gpus": [_describe_gpu(gpu) for gpu in self.gpus],
                **({} if self.reason is None else {"reason": self.reason}),
            }
        except GpuLost as lost:
            return {"gpus": [{"index": gpu.index} for gpu in self.gpus], "reason": f"a GPU does not answer: {lost}"}

    def _sample_gpu(self, i: int, gpu: Gpu, own_pids: set[int] | None) -> GpuSample:
        if i in self._lost:  # not asked again: a driver may take long to say so
            return GpuSample(index=gpu.index)
        try:
            counters: dict[str, Any] = dict(self._gpm_counters[i].sample())
            if gpu.sample_index % SLOW_SAMPLE_EVERY == 0:
                self._slow_values[i] = {**_slow_readings(gpu), "other_processes": _count_other_processes(gpu, own_pids)}
                if "pcie_sent_bytes_s" not in counters and gpu.mig_device is None:
                    counters |= _pcie_throughput(gpu)
            gpu.sample_index += 1
            return GpuSample(index=gpu.index, **_fast_readings(gpu), **self._slow_values[i], **counters)
        except GpuLost as lost:
            self._lost.add(i)
            self.reason = f"GPU {gpu.index} does not answer any more: {lost}"
            return GpuSample(index=gpu.index)


def _fast_readings(gpu: Gpu) -> dict[str, Any]:
    """What changes from second to second."""
    utilization = None if gpu.mig_device is not None else gpu.query(pynvml.nvmlDeviceGetUtilizationRates)
    memory = gpu.query(pynvml.nvmlDeviceGetMemoryInfo, target=gpu.handle)
    energy_mj = gpu.query(pynvml.nvmlDeviceGetTotalEnergyConsumption)
    power_mw = gpu.query(pynvml.nvmlDeviceGetPowerUsage)
    return {
        "utilization": None if utilization is None else utilization.gpu / 100,
        "memory_utilization": None if utilization is None else utilization.memory / 100,
        "memory_used_bytes": None if memory is None else memory.used,
        "memory_total_bytes": None if memory is None else memory.total,
        "power_w": None if power_mw is None else power_mw / 1e3,
        "energy_j": None if energy_mj is None else energy_mj / 1e3,
        "sm_clock_mhz": gpu.query(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
        "memory_clock_mhz": gpu.query(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_MEM),
        "temperature_c": gpu.query(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": gpu.query(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons),
        "pcie_generation": gpu.query(pynvml.nvmlDeviceGetCurrPcieLinkGeneration),
        "pcie_width": gpu.query(pynvml.nvmlDeviceGetCurrPcieLinkWidth),
    }


def _slow_readings(gpu: Gpu) -> dict[str, Any]:
    """What hardly changes, or is asked of a part of the GPU that answers slowly."""
    limit_mw = gpu.query(pynvml.nvmlDeviceGetEnforcedPowerLimit)
    since_loaded = pynvml.NVML_VOLATILE_ECC
    return {
        "power_limit_w": None if limit_mw is None else limit_mw / 1e3,
        "sm_clock_max_mhz": gpu.query(pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM),
        "pcie_generation_max": gpu.query(pynvml.nvmlDeviceGetMaxPcieLinkGeneration),
        "pcie_width_max": gpu.query(pynvml.nvmlDeviceGetMaxPcieLinkWidth),
        "ecc_corrected": gpu.query(
            pynvml.nvmlDeviceGetTotalEccErrors, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, since_loaded
        ),
        "ecc_uncorrected": gpu.query(
            pynvml.nvmlDeviceGetTotalEccErrors, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, since_loaded
        ),
        "mig": _mig_enabled(gpu),
        "vgpu": _is_vgpu(gpu),
    }


def _mig_enabled(gpu: Gpu) -> bool | None:
    if gpu.mig_device is not None:
        return True
    mode = gpu.query(pynvml.nvmlDeviceGetMigMode)
    return None if mode is None else bool(mode[0])


def _is_vgpu(gpu: Gpu) -> bool | None:
    mode = gpu.query(pynvml.nvmlDeviceGetVirtualizationMode)
    return None if mode is None else mode == pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU


def _pcie_throughput(gpu: Gpu) -> dict[str, float]:
    """PCIe traffic of GPUs without GPM. The driver counts for 20 ms for each of the two, in which only our thread
    waits: so a sample of the traffic, and not in every line."""
    sent_kb = gpu.query(pynvml.nvmlDeviceGetPcieThroughput, pynvml.NVML_PCIE_UTIL_TX_BYTES)
    received_kb = gpu.query(pynvml.nvmlDeviceGetPcieThroughput, pynvml.NVML_PCIE_UTIL_RX_BYTES)
    throughput: dict[str, float] = {}
    if sent_kb is not None and received_kb is not None:
        throughput = {"pcie_sent_bytes_s": sent_kb * 1000.0, "pcie_received_bytes_s": received_kb * 1000.0}
    return throughput


def _count_other_processes(gpu: Gpu, own_pids: set[int] | None) -> int | None:
    """Computing processes that are not ours; the server through which several share a GPU (MPS) is nobody's."""
    if own_pids is None:
        return None
    processes = gpu.query(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, target=gpu.handle)
    if processes is None:
        return None
    other_pids = {process.pid for process in processes} - own_pids
    return sum(1 for pid in other_pids if not (read_or_none(f"/proc/{pid}/comm") or b"").startswith(b"nvidia-cuda-mps"))


def _in_host_pid_namespace() -> bool:
    """Whether the driver's process numbers are ours. They are the machine's: inside a container, whose numbers are its
    own, no process can be told from another."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == INITIAL_PID_NAMESPACE_INODE
    except OSError:  # not a Linux
        return False


def _describe_gpu(gpu: Gpu) -> dict[str, Any]:
    if gpu.device is None:
        return {"index": gpu.index}
    memory = query(pynvml.nvmlDeviceGetMemoryInfo, gpu.handle)
    limit_mw = query(pynvml.nvmlDeviceGetEnforcedPowerLimit, gpu.device)
    gpm = query(pynvml.nvmlGpmQueryDeviceSupport, gpu.device)
    return {
        "index": gpu.index,
        "name": query(pynvml.nvmlDeviceGetName, gpu.handle),
        "uuid": query(pynvml.nvmlDeviceGetUUID, gpu.handle),
        "memory_bytes": None if memory is None else memory.total,
        "mig": _mig_enabled(gpu),
        "vgpu": _is_vgpu(gpu),
        "gpm": None if gpm is None else bool(gpm.isSupportedDevice),
        "pcie_generation_max": query(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, gpu.device),
        "pcie_width_max": query(pynvml.nvmlDeviceGetMaxPcieLinkWidth, gpu.device),
        "power_limit_w": None if limit_mw is None else limit_mw / 1e3,
    }
