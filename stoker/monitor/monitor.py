"""The thread that follows the records of a running job and passes each new line to the enabled sinks.

Used as a block around a run: `with monitoring(folder, options, stop=…)`. A sink that fails is disabled with a warning
event; the run continues.
"""

import contextlib
import datetime
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal, TextIO

import msgspec

from stoker.errors import ConfigError
from stoker.monitor.alerts import Alerts
from stoker.monitor.delivery import Delivery
from stoker.monitor.follow import Follower, RecordLine, describe_event
from stoker.monitor.options import MonitoringOptions
from stoker.runs.records import EVENTS, WARNING_KINDS, RunFolder, read_lines, read_settings
from stoker.runs.schemas import Event, StepWindow

POLL_INTERVAL_S = 1.0
PROGRESS_EVERY_S = 60.0
"""Between the lines of progress of `--log-format json`."""


@contextlib.contextmanager
def monitoring(
    folder: RunFolder,
    options: MonitoringOptions,
    *,
    stop: Callable[[], None],
    log: Literal["text", "json"] = "text",
    log_file: TextIO | None = None,
) -> Iterator[None]:
    """Monitors the run inside the block, and reads its records once more at the end. stop: ends the run as a signal
    does.

    Raises ConfigError before anything starts, if an option is not valid.
    """
    options.validate()
    with contextlib.ExitStack() as stack:
        alerts = Alerts(options.rules(), time.time())
        sinks: dict[str, Callable[[RecordLine], None]] = {}
        if options.alert:
            delivery = Delivery(folder, options, stop)
            stack.callback(delivery.close)
            sinks["alerts"] = lambda line: _notify(delivery, alerts, line)
        if log == "json":
            sinks["the log"] = JsonLog(log_file or sys.stdout, run=str(folder.path)).observe
        if options.metrics_port is not None:
            sinks["metrics"] = _serve_metrics(folder, options.metrics_host, options.metrics_port, alerts, stack)
        for name in options.track:
            sinks[name] = _start_tracker(folder, name, stack)
        if not sinks:
            yield
            return
        thread, owner_pid = _MonitorThread(folder, sinks), os.getpid()
        thread.start()
        try:
            yield
        finally:
            if os.getpid() == owner_pid:
                thread.stop()
            else:  # a forked child: threads, server and connections belong to the parent
                stack.pop_all()


def _notify(delivery: Delivery, alerts: Alerts, line: RecordLine) -> None:
    for alert in alerts.observe(line):
        delivery.notify(alert, line.t)


def _serve_metrics(
    folder: RunFolder, host: str, port: int, alerts: Alerts, stack: contextlib.ExitStack
) -> Callable[[RecordLine], None]:
    from stoker.monitor.prometheus import Exporter, Server  # imports prometheus_client, which few runs need

    exporter = Exporter(run=folder.path.name, host=platform.node(), firing=alerts.firing)
    server = Server(exporter, host, port)
    stack.callback(server.close)
    name = platform.node() if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
    folder.event("info", f"metrics for Prometheus: http://{name}:{server.port}/metrics", port=server.port)
    return exporter.observe


def _start_tracker(folder: RunFolder, name: str, stack: contextlib.ExitStack) -> Callable[[RecordLine], None]:
    from stoker.monitor.trackers import TRACKERS, tracker_metrics, tracker_run_id

    first_event = next(read_lines(folder.path, EVENTS, Event), None)
    tables = read_settings(folder.path) or {}
    settings = {
        key: value for section, entries in tables.items() if section != "reasons" for key, value in entries.items()
    }
    run_id = tracker_run_id(folder.path, first_event.t if first_event is not None else 0.0)
    try:
        tracker = TRACKERS[name](name=folder.path.name, run_id=run_id, settings=settings)
    except ImportError as error:
        raise ConfigError(
            f"--track {name} needs its package.", cause=str(error), fix=f"pip install 'stoker[{name}]'"
        ) from error
    except Exception as error:  # no credentials, no server, …: reported before the run costs anything
        raise ConfigError(f"--track {name} does not start.", cause=f"{type(error).__name__}: {error}") from error
    step, failed = 0, False

    def observe(line: RecordLine) -> None:
        nonlocal step, failed
        step = max(step, line.step) if isinstance(line, StepWindow) else step
        failed |= isinstance(line, Event) and line.kind == "failed"
        if values := tracker_metrics(line):
            tracker.log(values, step)

    def close() -> None:
        try:
            tracker.close(failed=failed)
        except Exception as error:  # noqa: BLE001 (its last values may be lost; the run is complete)
            folder.event("warning", f"{name} could not be closed: {type(error).__name__}: {error}")

    stack.callback(close)
    return observe


class _MonitorThread:
    def __init__(self, folder: RunFolder, sinks: dict[str, Callable[[RecordLine], None]]) -> None:
        self._folder = folder
        self._sinks = sinks
        self._follower = Follower(folder.path, folder.attempt)
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Passes on the remaining lines. A sink that hangs is abandoned: the thread is a daemon."""
        self._stop_event.set()
        self._thread.join(30.0)

    def _run(self) -> None:
        is_last = failed = False
        while not is_last:
            is_last = self._stop_event.wait(POLL_INTERVAL_S)
            try:
                lines = self._follower.read()
            except OSError as error:  # the file system may become available again
                if not failed:
                    failed = True
                    self._folder.event("warning", f"the records of the run cannot be read: {error}")
                continue
            failed = False
            for line in lines:
                self._dispatch(line)

    def _dispatch(self, line: RecordLine) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                sink(line)
            except Exception as error:  # noqa: BLE001 (whatever a sink raises: the run continues without it)
                del self._sinks[name]
                self._folder.event(
                    "warning", f"monitoring ({name}) is disabled after an error: {type(error).__name__}: {error}"
                )


class JsonLog:
    """`--log-format json`: writes all events, and a line of progress every PROGRESS_EVERY_S, as one JSON object each.

    `severity`, `message` and `time` are the names that the collectors of Google, Amazon and most others recognize;
    `data` is the record as in the run folder.
    """

    def __init__(self, file: TextIO, *, run: str) -> None:
        self._file = file
        self._run = run
        self._next_progress_t = 0.0

    def observe(self, line: RecordLine) -> None:
        """Raises OSError if the stream cannot be written."""
        if isinstance(line, Event):
            severity = "ERROR" if line.kind == "failed" else "WARNING" if line.kind in WARNING_KINDS else "INFO"
            self._write(line, "event", severity, line.text or describe_event(line))
        elif isinstance(line, StepWindow) and line.window_steps and line.t >= self._next_progress_t:
            self._next_progress_t = line.t + PROGRESS_EVERY_S
            loss = line.losses.get("total")
            speed = f", {line.num_images / line.wall_s:.1f} img/s" if line.num_images else ""
            text = f"step {line.step:,}{speed}" + ("" if loss is None else f", loss {loss:.4g}")
            self._write(line, "steps", "INFO", text)

    def _write(self, line: RecordLine, kind: str, severity: str, message: str) -> None:
        time = datetime.datetime.fromtimestamp(line.t, datetime.UTC).isoformat(timespec="milliseconds")
        entry = {"severity": severity, "message": message, "time": time, "run": self._run, "record": kind}
        self._file.write(json.dumps(entry | {"data": msgspec.to_builtins(line)}) + "\n")
        self._file.flush()
