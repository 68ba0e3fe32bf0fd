"""What `stoker check` asks the driver once, in addition to a sample of `gpu`: versions, modes, defects, processes.

Nothing here opens a CUDA context. A value that the driver or the GPU does not have is None. A query may hang with the
driver: callers put a time limit on `read_driver`.
"""

import os
from collections.abc import Mapping

import msgspec
import pynvml

from stoker.profiling.telemetry.gpu import GpuSampler
from stoker.profiling.telemetry.nvml import Gpu, GpuLost, query
from stoker.runs.schemas import GpuSample

VERSION_MISMATCH = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
"""`DriverState.error` where the library and the kernel module of the driver are of different versions."""
PROHIBITED, EXCLUSIVE = pynvml.NVML_COMPUTEMODE_PROHIBITED, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS


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
