"""NVIDIA's GPM counters (Hopper and later): how much of a GPU was used between two samples, through NVML.

They measure more than utilization, which is 1 while a single kernel of one thread runs. Older GPUs do not have them;
their PCIe traffic is read in another way (`gpu`). The counters do not reserve anything on the GPU, and profilers work
at the same time. Source: nvml.h, "GPM".
"""

import contextlib
import math
import weakref
from typing import Any

import pynvml

from stoker.profiling.telemetry.nvml import Gpu, query

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


class GpmCounters:
    """The counters of one GPU, or of one MIG slice. They are differences, so the first sample is empty."""

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
