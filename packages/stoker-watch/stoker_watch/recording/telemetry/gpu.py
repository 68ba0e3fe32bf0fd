"""Samples the GPUs through NVIDIA's driver library (NVML), and reads what `stoker check` asks it once.

A machine without a driver has no GPUs and a `reason`; a counter that a GPU does not have is None, never 0; a GPU that
is lost during the run is a sample without values, and a `reason`. Errors of the driver never raise. NVML numbers GPUs
by their position on the PCI bus; CUDA_VISIBLE_DEVICES uses the same numbers if all GPUs are alike, and on a mixed
machine with CUDA_DEVICE_ORDER=PCI_BUS_ID. A MIG slice has its own memory, processes and GPM counters; power, clocks,
temperature and memory errors are those of the whole GPU, and utilization is not available. Only this module, `sampler`
and `stoker/hardware/device.py` contain CUDA's names."""

import contextlib
import ctypes
import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pynvml

from stoker_watch.recording.telemetry.machine import list_process_tree, read_or_none
from stoker_watch.runs.schemas import GpuSample

Value = TypeVar("Value")

SLOW_SAMPLE_EVERY = 10
"""Slow or costly values are read in every n-th sample; the samples between repeat them."""

VERSION_MISMATCH = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
"""`DriverState.error` where the library and the kernel module of the driver are of different versions."""
PROHIBITED, EXCLUSIVE = pynvml.NVML_COMPUTEMODE_PROHIBITED, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS

INITIAL_PID_NAMESPACE_INODE = 0xEFFFFFFC
"""Inode of the initial PID namespace (PROC_PID_INIT_INO in linux/proc_ns.h)."""

MAX_MIG_DEVICES = 8
"""Slices of one GPU that are looked for; current GPUs have at most seven."""

METRICS = {
    "sm_active": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "tensor_active": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "dram_active": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
}
"""Field of `schemas.GpuSample` → NVML's number of the metric, which is in percent."""

_LOST_ERRORS = {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_UNINITIALIZED}
"""The GPU or the driver is gone: it is not queried again."""

_PERMANENT_ERRORS = {
    pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
}  # fmt: skip
"""The next query would have the same result, and a driver may take milliseconds to refuse it."""


class GpuLost(Exception):
    """The driver reports that a GPU, or the driver itself, is gone."""


def query(function: Callable[..., Value], *arguments: Any, refused: set[str] | None = None) -> Value | None:
    """The result; None: this GPU or driver has none. refused: remembers queries that always fail. Raises GpuLost."""
    name = function.__name__ + "".join(f" {argument}" for argument in arguments if isinstance(argument, int))
    if refused is not None and name in refused:
        return None
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        if error.value in _LOST_ERRORS:
            raise GpuLost(str(error)) from error
        if refused is not None and error.value in _PERMANENT_ERRORS:
            refused.add(name)
        return None


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
    refused: set[str] = dataclasses.field(default_factory=set)

    @property
    def handle(self) -> Any:
        """The handle for memory and processes: the slice if there is one."""
        return self.mig_device or self.device

    def query(self, function: Callable[..., Value], *arguments: Any) -> Value | None:
        """The result for the whole GPU; None if it has none. Raises GpuLost."""
        return query(function, self.device, *arguments, refused=self.refused)


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
        matches = _gpus_named(name, all_gpus)
        if len(matches) != 1:
            break
        selected += matches
    return selected


def _gpus_named(name: str, gpus: list[Gpu]) -> list[Gpu]:
    if name.isdecimal():
        return [_first_mig_device(gpu) for gpu in gpus if gpu.index == int(name)]
    opened = [gpu for gpu in gpus if gpu.device is not None]
    if name.startswith("GPU-"):
        uuids = [query(pynvml.nvmlDeviceGetUUID, gpu.device) or "" for gpu in opened]
        return [_first_mig_device(gpu) for gpu, uuid in zip(opened, uuids, strict=True) if uuid.startswith(name)]
    mig_device = query(pynvml.nvmlDeviceGetHandleByUUID, name) if name.startswith("MIG-") else None
    parent = mig_device and query(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, mig_device)
    found = [gpu for gpu in opened if parent and handle_pointer(gpu.device) == handle_pointer(parent)]
    return [_make_mig_gpu(gpu, mig_device) for gpu in found]


def _open_gpu(index: int) -> Gpu:
    with contextlib.suppress(GpuLost):
        return Gpu(index, query(pynvml.nvmlDeviceGetHandleByIndex, index))
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
        self._lost = [i for i, gpu in enumerate(self.gpus) if gpu.device is None]
        if self._lost:
            self.reason = f"GPU {', '.join(str(self.gpus[i].index) for i in self._lost)} does not answer"
        self._gpm_counters = [GpmCounters(gpu) for gpu in self.gpus]
        self._slow_values: list[dict[str, Any]] = [{} for _ in self.gpus]
        self._num_samples = 0

    def sample(self) -> list[GpuSample]:
        """One sample of each GPU, in the order of CUDA_VISIBLE_DEVICES."""
        is_slow = self._num_samples % SLOW_SAMPLE_EVERY == 0
        self._num_samples += 1
        own_pids = set(list_process_tree(self._root_pid)) if is_slow and self.gpus and in_host_pid_namespace() else None
        return [self._sample_gpu(i, gpu, own_pids, is_slow=is_slow) for i, gpu in enumerate(self.gpus)]

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

    def _sample_gpu(self, i: int, gpu: Gpu, own_pids: set[int] | None, *, is_slow: bool) -> GpuSample:
        if i in self._lost:  # not queried again: the driver may take long to fail
            return GpuSample(index=gpu.index)
        try:
            counters: dict[str, Any] = dict(self._gpm_counters[i].sample())
            if is_slow:
                self._slow_values[i] = {**_slow_readings(gpu), "other_processes": _count_other_processes(gpu, own_pids)}
            return GpuSample(index=gpu.index, **_fast_readings(gpu), **self._slow_values[i], **counters)
        except GpuLost as lost:
            self._lost.append(i)
            self.reason = f"GPU {gpu.index} does not answer any more: {lost}"
            return GpuSample(index=gpu.index)


def _fast_readings(gpu: Gpu) -> dict[str, Any]:
    """Values that change every second."""
    utilization = None if gpu.mig_device is not None else gpu.query(pynvml.nvmlDeviceGetUtilizationRates)
    memory = query(pynvml.nvmlDeviceGetMemoryInfo, gpu.handle, refused=gpu.refused)
    power_mw = gpu.query(pynvml.nvmlDeviceGetPowerUsage)
    return {
        "utilization": None if utilization is None else utilization.gpu / 100,
        "memory_used_bytes": None if memory is None else memory.used,
        "memory_total_bytes": None if memory is None else memory.total,
        "power_w": None if power_mw is None else power_mw / 1e3,
        "sm_clock_mhz": gpu.query(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
        "temperature_c": gpu.query(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": gpu.query(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons),
        "pcie_generation": gpu.query(pynvml.nvmlDeviceGetCurrPcieLinkGeneration),
        "pcie_width": gpu.query(pynvml.nvmlDeviceGetCurrPcieLinkWidth),
    }


def _slow_readings(gpu: Gpu) -> dict[str, Any]:
    """Values that rarely change, or that the GPU returns slowly."""
    limit_mw = gpu.query(pynvml.nvmlDeviceGetEnforcedPowerLimit)
    mig_mode = gpu.query(pynvml.nvmlDeviceGetMigMode)
    virtualization = gpu.query(pynvml.nvmlDeviceGetVirtualizationMode)
    ecc_corrected, ecc_uncorrected = (
        gpu.query(pynvml.nvmlDeviceGetTotalEccErrors, kind, pynvml.NVML_VOLATILE_ECC)
        for kind in (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
    )
    return {
        "power_limit_w": None if limit_mw is None else limit_mw / 1e3,
        "sm_clock_max_mhz": gpu.query(pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM),
        "pcie_generation_max": gpu.query(pynvml.nvmlDeviceGetMaxPcieLinkGeneration),
        "pcie_width_max": gpu.query(pynvml.nvmlDeviceGetMaxPcieLinkWidth),
        "ecc_corrected": ecc_corrected,
        "ecc_uncorrected": ecc_uncorrected,
        "mig": True if gpu.mig_device is not None else None if mig_mode is None else bool(mig_mode[0]),
        "vgpu": None if virtualization is None else virtualization == pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU,
    }


def _count_other_processes(gpu: Gpu, own_pids: set[int] | None) -> int | None:
    """Compute processes that do not belong to the run; the MPS server does not count."""
    if own_pids is None:
        return None
    processes = query(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, gpu.handle, refused=gpu.refused)
    if processes is None:
        return None
    other_pids = {process.pid for process in processes} - own_pids
    return sum(1 for pid in other_pids if not (read_or_none(f"/proc/{pid}/comm") or b"").startswith(b"nvidia-cuda-mps"))


def in_host_pid_namespace() -> bool:
    """Whether this process uses the PIDs of the host, as the driver does; not in a container with its own namespace."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == INITIAL_PID_NAMESPACE_INODE
    except OSError:  # not a Linux
        return False


def _describe_gpu(gpu: Gpu) -> dict[str, Any]:
    if gpu.device is None:
        return {"index": gpu.index}
    memory, slow = query(pynvml.nvmlDeviceGetMemoryInfo, gpu.handle), _slow_readings(gpu)
    return {
        "index": gpu.index,
        "name": query(pynvml.nvmlDeviceGetName, gpu.handle),
        "uuid": query(pynvml.nvmlDeviceGetUUID, gpu.handle),
        "memory_bytes": None if memory is None else memory.total,
        **{name: slow[name] for name in ("mig", "vgpu", "pcie_generation_max", "pcie_width_max", "power_limit_w")},
    }


class GpmCounters:
    """NVIDIA's GPM counters of one GPU, or of one MIG slice: how much of it was used between two samples.

    They measure more than utilization, which is 1 while a single kernel of one thread runs. GPUs before Hopper do not
    have them. The first sample is empty. Source: nvml.h, "GPM".
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._samples: list[Any] = []
        """The driver's buffers of the older and the newer sample; they are swapped, and kept until the process ends."""
        self._num_filled = 0
        self._request = pynvml.c_nvmlGpmMetricsGet_t()

    def sample(self) -> dict[str, float]:
        """Means since the previous sample, by field; counters that the GPU does not have are absent. Raises GpuLost."""
        if not self._samples and not self._allocate_samples():
            return {}
        self._samples.reverse()
        function, arguments = pynvml.nvmlGpmSampleGet, [self._samples[1]]
        if self._gpu.gpu_instance_id is not None:
            function, arguments = pynvml.nvmlGpmMigSampleGet, [self._gpu.gpu_instance_id, self._samples[1]]
        if self._gpu.query(function, *arguments) is None:
            self._num_filled = 0
            return {}
        self._num_filled = min(2, self._num_filled + 1)
        return self._compute_metrics() if self._num_filled == 2 else {}

    def _allocate_samples(self) -> bool:
        support = self._gpu.query(pynvml.nvmlGpmQueryDeviceSupport)
        if support is None or not support.isSupportedDevice:
            self._gpu.refused.add(pynvml.nvmlGpmQueryDeviceSupport.__name__)
            return False
        older, newer = query(pynvml.nvmlGpmSampleAlloc), query(pynvml.nvmlGpmSampleAlloc)
        if older is None or newer is None:
            return False
        self._samples = [older, newer]
        return True

    def _compute_metrics(self) -> dict[str, float]:
        request = self._request
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(METRICS)  # the length of the array depends on the version of the header
        request.sample1, request.sample2 = self._samples
        for i, metric_id in enumerate(METRICS.values()):
            request.metrics[i].metricId = metric_id
        if query(pynvml.nvmlGpmMetricsGet, request) is None:
            return {}
        return {
            field: min(1.0, max(0.0, metric.value / 100))
            for field, metric in zip(METRICS, request.metrics, strict=False)
            if metric.nvmlReturn == pynvml.NVML_SUCCESS and math.isfinite(metric.value)
        }


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
    reason: str | None = None
    """Why there is no visible GPU, or which one does not answer."""
    error: int | None = None
    """NVML's code, where it does not open."""
    version: str | None = None
    """580.95.05."""
    num_gpus: int | None = None
    """All GPUs of the driver, also those that CUDA_VISIBLE_DEVICES hides."""
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
        processes = query(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, gpu.handle)
        found = [GpuProcess(pid=one.pid, memory_bytes=one.usedGpuMemory) for one in processes or ()]
        return GpuState(
            sample=sample,
            name=query(pynvml.nvmlDeviceGetName, gpu.handle),
            persistence=None if persistence is None else bool(persistence),
            compute_mode=gpu.query(pynvml.nvmlDeviceGetComputeMode),
            rows_pending=None if rows is None else bool(rows[2]),
            rows_failed=None if rows is None else bool(rows[3]),
            processes=None if processes is None else found,
        )
    except GpuLost as lost:
        return GpuState(sample=sample, lost=str(lost))
