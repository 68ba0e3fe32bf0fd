"""Serves the metrics of a running job to Prometheus; docs/grafana-dashboard.json is a dashboard for them.

Counters start at the beginning of this attempt. A quantity that is not measured has no line. Names follow the
conventions of Prometheus: base units, `_total` for counters, `_ratio` for fractions.
"""

import asyncio
import contextlib
import ipaddress
import platform
import re
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from stoker_watch.errors import ConfigError, make_error
from stoker_watch.monitor.alerts import MEASURED, RecordLine
from stoker_watch.runs.schemas import DeviceSample, StepWindow
from stoker_watch.runs.totals import goodput

MAX_CONNECTIONS = 8
"""At once; others are closed unanswered. Prometheus opens one, and few people watch a run by hand."""
REQUEST_TIMEOUT_S = 5.0
"""From the accepted connection to the last byte of the answer."""
MAX_REQUEST_BYTES = 16384


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
            yield self._metric(Counter, "phase_seconds", text, self._phases, "phase")
            text = "device-seconds of rank 0, goodput (productive) and badput as ml-goodput-measurement names it"
            yield self._metric(Counter, "goodput_seconds", text, goodput(self._phases), "kind")
            yield self._metric(Counter, "steps", "optimizer steps", {"": self._steps})
            if self._images:  # else they are not counted
                yield self._metric(Counter, "images", "images trained on, by all ranks", {"": self._images})
            yield self._metric(Counter, "skipped_steps", "skipped optimizer steps", {"": self._skipped_steps})
            yield self._metric(Counter, "events", "events of the run by kind", self._events, "kind")
            if self._window is not None:
                yield self._metric(Gauge, "step", "optimizer steps since the start of the run", {"": self._window.step})
            if self._last_step_window is not None:
                yield self._metric(Gauge, "loss", "loss components", self._last_step_window.losses, "part")
                yield from self._gauges("", "step", {"": self._last_step_window})
            if self._scores:
                yield self._metric(Gauge, "score", "COCO metrics of the newest evaluation", self._scores, "metric")
            if self._sample is not None:
                yield from self._gauges("host_", "host", {"": self._sample})
                yield from self._gauges("gpu_", "gpu", {str(gpu.index): gpu for gpu in self._sample.gpus}, "gpu")
        if firing := self._firing():
            text = "1 while the condition of an --alert rule is true"
            yield self._metric(Gauge, "alert_firing", text, firing, "rule")

    def _gauges(self, prefix: str, table: str, records: dict[str, Any], label: str = "") -> Iterator[Metric]:
        """The metrics of a table of `knowledge/quantities.toml` that are measured."""
        for name, row in MEASURED.prometheus[table].items():
            values = {key: value for key, record in records.items() if (value := row.read(record)) is not None}
            if values:
                yield self._metric(Gauge, prefix + name, row.meaning, values, label)

    def _metric(self, family: Any, name: str, help_text: str, values: dict[str, Any], label: str = "") -> Metric:
        """label: name of the label whose values are the keys of `values`; empty: a single value without a label."""
        metric: Metric = family(f"stoker_{name}", help_text, labels=[*self._labels, *([label] if label else [])])
        for key, value in values.items():
            metric.add_metric([*self._labels.values(), *([key] if label else [])], float(value))  # type: ignore[attr-defined]
        return metric


class Server:
    """Serves an exporter until `close`, from one thread. host: the address to listen on. port: 0 for a free one, then
    the actual one. Anyone may connect and send anything, so connections, bytes and seconds of a request are bounded:
    a training on the same descriptors must not notice."""

    def __init__(self, exporter: Exporter, host: str, port: int) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(exporter)
        self._names = {host.lower(), "localhost", platform.node().lower()}
        self._answers_all_names = not _is_loopback(host)
        self._num_connections = 0
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            self._listener = socket.create_server((host, port), family=family)
            self._loop = asyncio.new_event_loop()
        except OSError as error:
            raise make_error(ConfigError, "metrics-port-not-usable", cause=str(error), port=port, host=host) from error
        self._loop.set_exception_handler(_report_unless_of_a_socket)
        self.port = int(self._listener.getsockname()[1])
        self._closed = asyncio.Event()
        self._thread = threading.Thread(target=self._thread_main, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join(5.0)

    def _thread_main(self) -> None:
        try:
            self._loop.run_until_complete(self._serve_until_closed())
        finally:
            self._loop.close()

    async def _serve_until_closed(self) -> None:
        # the backlog is also how many connections are accepted before one of them is looked at
        server = await asyncio.start_server(self._serve, sock=self._listener, limit=MAX_REQUEST_BYTES, backlog=1)
        await self._closed.wait()
        server.close()
        requests = asyncio.all_tasks() - {asyncio.current_task()}
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the one request of a connection."""
        self._num_connections += 1
        try:
            # a client that is gone, too slow, or no client of HTTP
            with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError, asyncio.TimeoutError):
                if self._num_connections <= MAX_CONNECTIONS:
                    await asyncio.wait_for(self._respond(reader, writer), REQUEST_TIMEOUT_S)
        finally:
            self._num_connections -= 1
            writer.transport.abort()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._answer(await reader.readuntil(b"\r\n\r\n")))
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    def _answer(self, request: bytes) -> bytes:
        """The response to the head of a request, whatever its path."""
        line, *fields = request.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
        # A web page's domain may have been pointed here (DNS rebinding).
        if not (self._answers_all_names or self._is_own_name(headers.get("host", ""))):
            status, content_type, body = "403 Forbidden", "text/plain", b"not a name of this machine; use its address\n"
        elif line.split(" ")[0] != "GET":
            status, content_type, body = "405 Method Not Allowed", "text/plain", b"use GET\n"
        else:
            encode, content_type = choose_encoder(headers.get("accept", ""))
            status, body = "200 OK", encode(self._registry)
        head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        return f"{head}Connection: close\r\n\r\n".encode() + body

    def _is_own_name(self, host: str) -> bool:
        """Whether a Host header is an IP address, or a name that only this machine's user gives it."""
        name = re.sub(r":\d*$", "", host).lower()
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name in self._names
        return True


def _is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address to listen on; others have names that only their network knows."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _report_unless_of_a_socket(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Prints a bug, as asyncio does. Without a free descriptor, asyncio waits a second and accepts again."""
    if not isinstance(context.get("exception"), OSError):
        loop.default_exception_handler(context)
