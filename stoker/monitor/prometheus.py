"""Serves the metrics of a running job to Prometheus; docs/grafana-dashboard.json is a dashboard for them.

Counters start at the beginning of this attempt. A quantity that is not measured has no line. Names follow the
conventions of Prometheus: base units, `_total` for counters, `_ratio` for fractions.
"""

import statistics
import threading
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import start_http_server
from prometheus_client.registry import Collector, CollectorRegistry

from stoker.errors import ConfigError
from stoker.monitor.follow import RecordLine
from stoker.runs.schemas import DeviceSample, GpuSample, StepWindow


def _mean_cpu_utilization(sample: DeviceSample) -> float | None:
    return statistics.fmean(sample.cpu_core_utilization) if sample.cpu_core_utilization else None


_GPU_METRICS: dict[str, tuple[str, Callable[[GpuSample], float | None]]] = {
    "utilization_ratio": ("fraction of the driver's sample period in which a kernel ran", lambda g: g.utilization),
    "memory_used_bytes": ("memory in use by all processes", lambda g: g.memory_used_bytes),
    "memory_total_bytes": ("total memory", lambda g: g.memory_total_bytes),
    "power_watts": ("power draw", lambda g: g.power_w),
    "temperature_celsius": ("GPU temperature", lambda g: g.temperature_c),
    "sm_clock_megahertz": ("SM clock", lambda g: g.sm_clock_mhz),
    "sm_active_ratio": ("fraction of SMs with work (GPM)", lambda g: g.sm_active),
    "tensor_active_ratio": ("fraction of time in which the tensor cores were active (GPM)", lambda g: g.tensor_active),
    "dram_active_ratio": ("used fraction of the memory bandwidth (GPM)", lambda g: g.dram_active),
}  # fmt: skip
_HOST_METRICS: dict[str, tuple[str, Callable[[DeviceSample], float | None]]] = {
    "cpu_utilization_ratio": ("CPU utilization, mean over the cores", _mean_cpu_utilization),
    "memory_used_bytes": ("memory in use", lambda s: s.memory_used_bytes),
    "memory_limit_bytes": ("memory limit", lambda s: s.memory_limit_bytes),
    "resident_memory_bytes": ("resident memory of the processes of the run", lambda s: s.rss_bytes),
    "shm_used_bytes": ("used bytes of /dev/shm", lambda s: s.shm_used_bytes),
    "disk_free_bytes": ("free bytes on the file system of the run folder", lambda s: s.disk_free_bytes),
    "open_fds": ("open file descriptors of the process with the most", lambda s: s.open_fds),
}  # fmt: skip
_STEP_METRICS: dict[str, tuple[str, Callable[[StepWindow], float | None]]] = {
    "learning_rate": ("learning rate of the last step", lambda w: w.lr),
    "gradient_norm": ("mean gradient norm before clipping", lambda w: w.grad_norm),
    "device_memory_peak_bytes": ("peak of allocated device memory", lambda w: w.memory_peak_bytes),
}  # fmt: skip


class Exporter(Collector):
    """Holds the current values. `observe` takes lines of records; the threads of the server call `collect`."""

    def __init__(self, *, run: str, host: str, firing: Callable[[], dict[str, bool]]) -> None:
        self._labels = {"run": run, "host": host}
        self._firing = firing
        self._lock = threading.Lock()
        self._phases: dict[str, float] = {}
        self._steps = self._images = self._skipped_steps = 0
        self._events: dict[str, int] = {}
        self._scores: dict[str, float] = {}
        self._window: StepWindow | None = None
        self._last_step_window: StepWindow | None = None
        self._sample: DeviceSample | None = None

    def observe(self, line: RecordLine) -> None:
        with self._lock:
            if isinstance(line, StepWindow):
                for phase, duration_s in line.phases.items():
                    self._phases[phase] = self._phases.get(phase, 0.0) + duration_s
                self._steps, self._images = self._steps + line.window_steps, self._images + line.num_images
                self._skipped_steps += line.skipped_steps
                self._window, self._last_step_window = line, line if line.window_steps else self._last_step_window
            elif isinstance(line, DeviceSample):
                self._sample = line
            else:
                self._events[line.kind] = self._events.get(line.kind, 0) + 1
                scores = line.data.get("metrics") if line.kind == "evaluated" else None
                for name, value in (scores or {}).items():
                    if isinstance(value, int | float):
                        self._scores[name] = float(value)

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            yield self._counter("phase_seconds", "device-seconds by phase of the ledger", self._phases, "phase")
            yield self._counter("steps", "optimizer steps", {"": self._steps})
            yield self._counter("images", "images trained on", {"": self._images})
            yield self._counter("skipped_steps", "skipped optimizer steps", {"": self._skipped_steps})
            yield self._counter("events", "events of the run by kind", self._events, "kind")
            if self._window is not None:
                yield self._gauge("step", "optimizer steps since the start of the run", {"": self._window.step})
            if self._last_step_window is not None:
                last = self._last_step_window
                yield self._gauge(
                    "last_step_timestamp_seconds", "Unix time at which the last step was recorded", {"": last.t}
                )
                yield self._gauge(
                    "images_per_second", "throughput of the newest window", {"": last.num_images / last.wall_s}
                )
                yield self._gauge("loss", "loss components", last.losses, "part")
                yield from self._gauges("", _STEP_METRICS, last)
            if self._scores:
                yield self._gauge("score", "COCO metrics of the newest evaluation", self._scores, "metric")
            if self._sample is not None:
                yield from self._gauges("host_", _HOST_METRICS, self._sample)
                for name, (help_text, value) in _GPU_METRICS.items():
                    values = {
                        str(gpu.index): reading for gpu in self._sample.gpus if (reading := value(gpu)) is not None
                    }
                    if values:
                        yield self._gauge(f"gpu_{name}", help_text, values, "gpu")
        firing = self._firing()
        if firing:
            yield self._gauge("alert_firing", "1 while the condition of an --alert rule is true", firing, "rule")

    def _gauges(
        self, prefix: str, metrics: dict[str, tuple[str, Callable[[Any], float | None]]], line: RecordLine
    ) -> Iterator[Metric]:
        for name, (help_text, value) in metrics.items():
            if (reading := value(line)) is not None:
                yield self._gauge(prefix + name, help_text, {"": reading})

    def _counter(self, name: str, help_text: str, values: dict[str, Any], label: str = "") -> Metric:
        return self._make_metric(CounterMetricFamily, name, help_text, values, label)

    def _gauge(self, name: str, help_text: str, values: dict[str, Any], label: str = "") -> Metric:
        return self._make_metric(GaugeMetricFamily, name, help_text, values, label)

    def _make_metric(self, family_type: Any, name: str, help_text: str, values: dict[str, Any], label: str) -> Metric:
        """label: name of the label whose values are the keys of `values`; empty: a single value without a label."""
        metric: Metric = family_type(f"stoker_{name}", help_text, labels=[*self._labels, *([label] if label else [])])
        for key, value in values.items():
            metric.add_metric([*self._labels.values(), *([key] if label else [])], float(value))  # type: ignore[attr-defined]
        return metric


class Server:
    """Serves an exporter until `close`. host: the address to listen on. port: 0 for a free one; the attribute `port` is
    the actual one."""

    def __init__(self, exporter: Exporter, host: str, port: int) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(exporter)
        try:
            self._server, self._thread = start_http_server(port, host, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"--metrics-port {port} cannot be used on {host}.",
                cause=str(error),
                fix="--metrics-port 0 uses a free port, --metrics-host 0.0.0.0 all addresses of this machine",
            ) from error
        self.port = int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)
