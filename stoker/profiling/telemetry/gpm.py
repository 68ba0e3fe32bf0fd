"""NVIDIA's GPM counters (Hopper and later): what the parts of a GPU did between two samples, through NVML.

They say how much of the GPU a busy one uses, which the utilisation does not: that is 1 while a single kernel of one
thread runs. Older GPUs have none; their PCIe traffic is asked otherwise (`gpu`). Nothing is started or reserved on the
GPU for it, and profilers keep working beside it. Source: nvml.h, "GPM".
"""

import contextlib
import math
import weakref
from typing import Any

import pynvml

from stoker.profiling.telemetry.nvml import Gpu, ask

_PERCENT, _MIB_A_SECOND = 1 / 100, 2.0**20

METRICS = {
    "sm_active": (pynvml.NVML_GPM_METRIC_SM_UTIL, _PERCENT),
    "sm_occupancy": (pynvml.NVML_GPM_METRIC_SM_OCCUPANCY, _PERCENT),
    "tensor_active": (pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL, _PERCENT),
    "dram_active": (pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL, _PERCENT),
    "pcie_sent_bytes_s": (pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, _MIB_A_SECOND),
    "pcie_received_bytes_s": (pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC, _MIB_A_SECOND),
    "nvlink_sent_bytes_s": (pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC, _MIB_A_SECOND),
    "nvlink_received_bytes_s": (pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC, _MIB_A_SECOND),
}
"""Fields of a `schemas.GpuSample`, NVML's numbers of them, and what their unit is in ours."""


class Counters:
    """The counters of one GPU, or of one slice. The first sample has nothing to compare with."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._absent = False
        self._samples: list[Any] = []
        """The driver's room for the older and for the newer, which change places."""
        self._filled = 0
        self._question = pynvml.c_nvmlGpmMetricsGet_t()

    def sample(self) -> dict[str, float]:
        """Means since the sample before, by field, without those that the GPU does not have. Raises GpuLost."""
        if self._absent or not (self._samples or self._open()):
            return {}
        self._samples.reverse()
        if not self._take(self._samples[1]):
            self._filled = 0
            return {}
        self._filled = min(2, self._filled + 1)
        return self._compared() if self._filled == 2 else {}

    def _open(self) -> bool:
        support = self._gpu.ask(pynvml.nvmlGpmQueryDeviceSupport)
        self._absent = support is not None and not support.isSupportedDevice
        if support is None or self._absent:
            return False
        older, newer = ask(pynvml.nvmlGpmSampleAlloc), ask(pynvml.nvmlGpmSampleAlloc)
        if older is None or newer is None:
            return False
        self._samples = [older, newer]
        weakref.finalize(self, _free, older, newer).atexit = False  # a driver that hangs must not hold up the end
        return True

    def _take(self, into: Any) -> bool:
        if self._gpu.slice_id is None:
            return self._gpu.ask(pynvml.nvmlGpmSampleGet, into) is not None
        return self._gpu.ask(pynvml.nvmlGpmMigSampleGet, self._gpu.slice_id, into) is not None

    def _compared(self) -> dict[str, float]:
        question = self._question
        question.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        question.numMetrics = len(METRICS)  # the array is longer in some versions of the header than in others
        question.sample1, question.sample2 = self._samples
        for place, (number, _) in enumerate(METRICS.values()):
            question.metrics[place].metricId = number
        if ask(pynvml.nvmlGpmMetricsGet, question) is None:
            return {}
        found: dict[str, float] = {}
        for place, (field, (_, unit)) in enumerate(METRICS.items()):
            metric = question.metrics[place]
            if metric.nvmlReturn == pynvml.NVML_SUCCESS and math.isfinite(metric.value):
                value = max(0.0, metric.value * unit)
                found[field] = min(1.0, value) if unit == _PERCENT else value
        return found


def _free(*samples: Any) -> None:
    with contextlib.suppress(pynvml.NVMLError):  # the GPU is lost, and with it what was kept for it
        for sample in samples:
            pynvml.nvmlGpmSampleFree(sample)
