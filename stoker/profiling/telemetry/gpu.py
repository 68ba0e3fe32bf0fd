"""Samples the GPUs through NVIDIA's driver library (NVML), and reads what `stoker check` asks it once.

Only this module, its helpers (`nvml`, `sampler`) and `stoker/hardware/device.py` contain CUDA's names.

A machine without a driver has no GPUs and a `reason`; a counter that a GPU does not have is None, never 0; a GPU that
is lost during the run is a sample without values, and a `reason`. Errors of the driver never raise. NVML numbers GPUs
by their position on the PCI bus; CUDA_VISIBLE_DEVICES uses the same numbers if all GPUs are alike, and on a mixed
machine with CUDA_DEVICE_ORDER=PCI_BUS_ID. A MIG slice has its own memory, processes and GPM counters; power, clocks,
temperature, PCIe and memory errors are those of the whole GPU, and utilization is not available. Who samples, and how
often: `sampler`."""

import contextlib
import math
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pynvml

from stoker.profiling.telemetry.machine import read_or_none
from stoker.profiling.telemetry.nvml import Gpu, GpuLost, query, visible_gpus
from stoker.profiling.telemetry.processes import list_process_tree
from stoker.runs.schemas import GpuSample

SLOW_SAMPLE_EVERY = 10
"""Slow or costly values are read in every n-th sample; the samples between repeat them."""

VERSION_MISMATCH = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
"""`DriverState.error` where the library and the kernel module of the driver are of different versions."""
PROHIBITED, EXCLUSIVE = pynvml.NVML_COMPUTEMODE_PROHIBITED, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS

INITIAL_PID_NAMESPACE_INODE = 0xEFFFFFFC
"""Inode of the initial PID namespace (PROC_PID_INIT_INO in linux/proc_ns.h)."""

_PERCENT, _MIB_PER_S = 1 / 100, 2.0**20

METRICS = {
    "sm_active": (pynvml.NVML_GPM_METRIC_SM_UTIL, _PERCENT),
    "sm_occupancy": (pynvml.NVML_GPM_METRIC_SM_OCCUPANCY, _PERCENT),
    "tensor_active": (pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL, _PERCENT),
    "dram_active": (pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL, _PERCENT),
    "pcie_sent_bytes_s": (pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, _MIB_PER_S),
    "pcie_received_bytes_s": (pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC, _MIB_PER_S),
    "nvlink_sent_bytes_s": (pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC, _MIB_PER_S),
    "nvlink_received_bytes_s": (pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC, _MIB_PER_S),
}
"""Field of `schemas.GpuSample` → NVML's number of the metric, and the factor to the field's unit."""


class GpuSampler:
    """The GPUs that this process may use, opened once. env: with CUDA_VISIBLE_DEVICES; pid: the root of the run's
    processes, default this one.

    reason: why there is no GPU, or which one was lost; None if all work. gpus: the visible ones.
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
            none_visible = f"CUDA_VISIBLE_DEVICES={visible!r} selects none of the driver's GPUs"
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
            own_pids = set(list_process_tree(self._root_pid)) if in_host_pid_namespace() else None
        return [self._sample_gpu(i, gpu, own_pids) for i, gpu in enumerate(self.gpus)]

    def describe(self) -> dict[str, Any]:
        """The driver, the CUDA version that it supports, and the GPUs, for environment.json."""
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
        if i in self._lost:  # not queried again: the driver may take long to fail
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
    """Values that change every second."""
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
    """Values that rarely change, or that the GPU returns slowly."""
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
    """PCIe traffic of GPUs without GPM. The driver measures each direction for 20 ms, in which only this thread waits:
    so it is a sample of the traffic, and not in every line."""
    sent_kb = gpu.query(pynvml.nvmlDeviceGetPcieThroughput, pynvml.NVML_PCIE_UTIL_TX_BYTES)
    received_kb = gpu.query(pynvml.nvmlDeviceGetPcieThroughput, pynvml.NVML_PCIE_UTIL_RX_BYTES)
    throughput: dict[str, float] = {}
    if sent_kb is not None and received_kb is not None:
        throughput = {"pcie_sent_bytes_s": sent_kb * 1000.0, "pcie_received_bytes_s": received_kb * 1000.0}
    return throughput


def _count_other_processes(gpu: Gpu, own_pids: set[int] | None) -> int | None:
    """Compute processes that do not belong to the run; the MPS server does not count."""
    if own_pids is None:
        return None
    processes = gpu.query(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, target=gpu.handle)
    if processes is None:
        return None
    other_pids = {process.pid for process in processes} - own_pids
    return sum(1 for pid in other_pids if not (read_or_none(f"/proc/{pid}/comm") or b"").startswith(b"nvidia-cuda-mps"))


def in_host_pid_namespace() -> bool:
    """Whether this process uses the PIDs of the host, as the driver does. In a container with its own PID namespace,
    the driver's PIDs cannot be matched to processes."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == INITIAL_PID_NAMESPACE_INODE
    except OSError:  # not a Linux
        return False


def _describe_gpu(gpu: Gpu) -> dict[str, Any]:
    if gpu.device is None:
        return {"index": gpu.index}
    memory, slow = query(pynvml.nvmlDeviceGetMemoryInfo, gpu.handle), _slow_readings(gpu)
    gpm = query(pynvml.nvmlGpmQueryDeviceSupport, gpu.device)
    return {
        "index": gpu.index,
        "name": query(pynvml.nvmlDeviceGetName, gpu.handle),
        "uuid": query(pynvml.nvmlDeviceGetUUID, gpu.handle),
        "memory_bytes": None if memory is None else memory.total,
        "gpm": None if gpm is None else bool(gpm.isSupportedDevice),
        **{name: slow[name] for name in ("mig", "vgpu", "pcie_generation_max", "pcie_width_max", "power_limit_w")},
    }


class GpmCounters:
    """NVIDIA's GPM counters of one GPU, or of one MIG slice: how much of it was used between two samples.

    They measure more than utilization, which is 1 while a single kernel of one thread runs. GPUs before Hopper do not
    have them. The first sample is empty. Source: nvml.h, "GPM".
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._unsupported = False
        self._samples: list[Any] = []
        """The driver's buffers of the older and the newer sample; they are swapped."""
        self._num_filled = 0
        self._request = pynvml.c_nvmlGpmMetricsGet_t()

    def sample(self) -> dict[str, float]:
        """Means since the previous sample, by field; counters that the GPU does not have are absent. Raises GpuLost."""
        if self._unsupported or not (self._samples or self._allocate_samples()):
            return {}
        self._samples.reverse()
        if not self._read_sample(self._samples[1]):
            self._num_filled = 0
            return {}
        self._num_filled = min(2, self._num_filled + 1)
        return self._compute_metrics() if self._num_filled == 2 else {}

    def _allocate_samples(self) -> bool:
        support = self._gpu.query(pynvml.nvmlGpmQueryDeviceSupport)
        self._unsupported = support is not None and not support.isSupportedDevice
        if support is None or self._unsupported:
            return False
        older, newer = query(pynvml.nvmlGpmSampleAlloc), query(pynvml.nvmlGpmSampleAlloc)
        if older is None or newer is None:
            return False
        self._samples = [older, newer]
        finalizer = weakref.finalize(self, _free_samples, older, newer)
        finalizer.atexit = False  # a driver that hangs must not delay process exit
        return True

    def _read_sample(self, buffer: Any) -> bool:
        if self._gpu.gpu_instance_id is None:
            return self._gpu.query(pynvml.nvmlGpmSampleGet, buffer) is not None
        return self._gpu.query(pynvml.nvmlGpmMigSampleGet, self._gpu.gpu_instance_id, buffer) is not None

    def _compute_metrics(self) -> dict[str, float]:
        request = self._request
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(METRICS)  # the length of the array depends on the version of the header
        request.sample1, request.sample2 = self._samples
        for i, (metric_id, _) in enumerate(METRICS.values()):
            request.metrics[i].metricId = metric_id
        if query(pynvml.nvmlGpmMetricsGet, request) is None:
            return {}
        values: dict[str, float] = {}
        for i, (field, (_, unit)) in enumerate(METRICS.items()):
            metric = request.metrics[i]
            if metric.nvmlReturn == pynvml.NVML_SUCCESS and math.isfinite(metric.value):
                value = max(0.0, metric.value * unit)
                values[field] = min(1.0, value) if unit == _PERCENT else value
        return values


def _free_samples(*samples: Any) -> None:
    with contextlib.suppress(pynvml.NVMLError):  # the GPU is lost, and its buffers with it
        for sample in samples:
            pynvml.nvmlGpmSampleFree(sample)


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process with a CUDA context. pid: in the PID namespace of the host."""

    pid: int
    memory_bytes: int | None = None


class GpuState(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that CUDA_VISIBLE_DEVICES leaves visible."""

    sample: GpuSample
    """Without values if the GPU is lost."""
    lost: str = ""
    """The driver's message, if it is."""
    name: str | None = None
    bus_id: str | None = None
    """0000:3b:00.0, as in /sys/bus/pci/devices."""
    persistence: bool | None = None
    compute_mode: int | None = None
    rows_pending: bool | None = None
    """Defective memory was remapped, which takes effect at the next reset."""
    rows_failed: bool | None = None
    """Defective memory could not be remapped."""
    processes: list[GpuProcess] | None = None

    @property
    def title(self) -> str:
        return f"GPU {self.sample.index}" + (f" ({self.name})" if self.name else "")


class DriverState(msgspec.Struct, frozen=True, kw_only=True):
    """The driver and its GPUs."""

    reason: str | None = None
    """Why there is no visible GPU, or which one does not answer."""
    error: int | None = None
    """NVML's code, where it does not open."""
    version: str | None = None
    """580.95.05."""
    num_gpus: int | None = None
    """Of the driver, also those that CUDA_VISIBLE_DEVICES hides."""
    gpus: list[GpuState] = []


def read_driver(env: Mapping[str, str] = os.environ) -> DriverState:
    """The state of the driver. Errors of the driver never raise."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return DriverState(reason=str(error), error=error.value)
    sampler = GpuSampler(env)
    samples = sampler.sample()
    try:
        version, num_gpus = query(pynvml.nvmlSystemGetDriverVersion), query(pynvml.nvmlDeviceGetCount)
    except GpuLost as lost:
        return DriverState(reason=str(lost))
    gpus = [_read_gpu(gpu, sample) for gpu, sample in zip(sampler.gpus, samples, strict=True)]
    return DriverState(reason=sampler.reason, version=version, num_gpus=num_gpus, gpus=gpus)


def _read_gpu(gpu: Gpu, sample: GpuSample) -> GpuState:
    if gpu.device is None:
        return GpuState(sample=sample, lost="it does not open")
    try:
        rows = gpu.query(pynvml.nvmlDeviceGetRemappedRows)
        persistence = gpu.query(pynvml.nvmlDeviceGetPersistenceMode)
        pci = gpu.query(pynvml.nvmlDeviceGetPciInfo)
        processes = gpu.query(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, target=gpu.handle)
        return GpuState(
            sample=sample,
            name=gpu.query(pynvml.nvmlDeviceGetName, target=gpu.handle),
            bus_id=None if pci is None else _sysfs_name(pci.busId),
            persistence=None if persistence is None else bool(persistence),
            compute_mode=gpu.query(pynvml.nvmlDeviceGetComputeMode),
            rows_pending=None if rows is None else bool(rows[2]),
            rows_failed=None if rows is None else bool(rows[3]),
            processes=None
            if processes is None
            else [GpuProcess(pid=process.pid, memory_bytes=process.usedGpuMemory) for process in processes],
        )
    except GpuLost as lost:
        return GpuState(sample=sample, lost=str(lost))


def _sysfs_name(bus_id: bytes | str) -> str:
    """NVML writes 00000000:3B:00.0, sysfs 0000:3b:00.0."""
    text = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
    return text.lower()[-12:]
