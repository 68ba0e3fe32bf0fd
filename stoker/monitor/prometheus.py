"""Serves the metrics of a running job to Prometheus; docs/grafana-dashboard.json is a dashboard for them.

Counters start at the beginning of this attempt. A quantity that is not measured has no line. Names follow the
conventions of Prometheus: base units, `_total` for counters, `_ratio` for fractions.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import start_http_server
from prometheus_client.registry import Collector, CollectorRegistry

from stoker.errors import ConfigError, make_error
from stoker.monitor.alerts import MEASURED, RecordLine
from stoker.runs.schemas import DeviceSample, StepWindow


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
                    if isinstance(value, float):  # whole numbers count images and boxes
                        self._scores[name] = value

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            text = "device-seconds of rank 0 by phase of the ledger"
            yield self._counter("phase_seconds", text, self._phases, "phase")
            yield self._counter("steps", "optimizer steps", {"": self._steps})
            if self._images:  # else they are not counted
                yield self._counter("images", "images trained on, by all ranks", {"": self._images})
            yield self._counter("skipped_steps", "skipped optimizer steps", {"": self._skipped_steps})
            yield self._counter("events", "events of the run by kind", self._events, "kind")
            if self._window is not None:
                yield self._gauge("step", "optimizer steps since the start of the run", {"": self._window.step})
            if self._last_step_window is not None:
                yield self._gauge("loss", "loss components", self._last_step_window.losses, "part")
                yield from self._gauges("", "step", {"": self._last_step_window})
            if self._scores:
                yield self._gauge("score", "COCO metrics of the newest evaluation", self._scores, "metric")
            if self._sample is not None:
                yield from self._gauges("host_", "host", {"": self._sample})
                yield from self._gauges("gpu_", "gpu", {str(gpu.index): gpu for gpu in self._sample.gpus}, "gpu")
        if firing := self._firing():
            yield self._gauge("alert_firing", "1 while the condition of an --alert rule is true", firing, "rule")

    def _gauges(self, prefix: str, table: str, records: dict[str, Any], label: str = "") -> Iterator[Metric]:
        """The metrics of a table of `knowledge/quantities.toml` that are measured."""
        for name, row in MEASURED.prometheus[table].items():
            values = {key: value for key, record in records.items() if (value := row.read(record)) is not None}
            if values:
                yield self._gauge(prefix + name, row.meaning, values, label)

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
    """Serves an exporter until `close`. host: the address to listen on. port: 0 for a free one, then the actual one."""

    def __init__(self, exporter: Exporter, host: str, port: int) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(exporter)
        try:
            self._server, self._thread = start_http_server(port, host, registry=registry)
        except OSError as error:
            raise make_error(ConfigError, "metrics-port-not-usable", cause=str(error), port=port, host=host) from error
        self.port = int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)
