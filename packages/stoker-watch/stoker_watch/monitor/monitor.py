"""The thread that follows the records of a running job and passes each new line to the enabled sinks: alerts, metrics,
the log in JSON, experiment trackers.

A sink that fails is disabled with a warning event; the run continues. Trackers (Weights & Biases, MLflow) are optional
extras of the package: each reads its own variables (WANDB_PROJECT, WANDB_MODE; MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME) and credentials. A later attempt of a run continues the same tracked run. Each has a thread of
its own, because its server may hang: nothing else waits for it, but for START_TIMEOUT_S and CLOSE_TIMEOUT_S.
"""

import contextlib
import datetime
import hashlib
import json
import os
import platform
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

import msgspec

from stoker_watch import regular_files
from stoker_watch.errors import ConfigError, make_error
from stoker_watch.monitor.alerts import Alerts, RecordLine, describe_event
from stoker_watch.monitor.delivery import Delivery
from stoker_watch.monitor.options import MonitoringOptions
from stoker_watch.runs.records import DEVICES, EVENTS, STEPS, WARNING_KINDS, RunFolder, read_lines, read_settings
from stoker_watch.runs.schemas import DeviceSample, Event, StepWindow

POLL_INTERVAL_S = 1.0
START_TIMEOUT_S, CLOSE_TIMEOUT_S = 60.0, 30.0
"""Limits of a tracker: of its start, which goes on afterwards; for the remaining lines at the end of the run, and then
for each tracker. What hangs is abandoned: all threads are daemons."""
MAX_PENDING = 3600
"""Lines that wait for a tracker, of an hour; those that come then are lost."""
PROGRESS_EVERY_S = 60.0
"""Between the lines of progress of `--log-format json`."""
_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    name: msgspec.json.Decoder(kind) for name, kind in ((STEPS, StepWindow), (DEVICES, DeviceSample), (EVENTS, Event))
}
_TAIL_BYTES = 65536
"""Read of the end of an existing file, to find the first lines of this attempt behind those of earlier ones."""


@contextlib.contextmanager
def monitoring(
    folder: RunFolder,
    options: MonitoringOptions,
    *,
    stop: Callable[[], None],
    log: Literal["text", "json"] = "text",
    log_file: TextIO | None = None,
    say: Callable[[str], object] = lambda _: None,
    callbacks: Sequence[Callable[[RecordLine], object]] = (),
) -> Iterator[None]:
    """Monitors the run inside the block, and reads its records once more at the end. stop: ends the run as a signal
    does; say: prints a line about each alert; callbacks: called with each record. Raises ConfigError before anything
    starts, if an option is not valid."""
    options.validate()
    with contextlib.ExitStack() as stack:
        alerts = Alerts(options.rules(), time.time())
        sinks: dict[str, Callable[[RecordLine], object]] = {
            f"callback {number}": callback for number, callback in enumerate(callbacks, 1)
        }
        if options.alert:
            delivery = Delivery(folder, options, alerts, stop, say)
            stack.callback(delivery.close)
            sinks["alerts"] = delivery.observe
        if log == "json":
            sinks["the log"] = json_log(log_file or sys.stdout, run=str(folder.path))
        if options.metrics_port is not None:
            sinks["metrics"] = _serve_metrics(folder, options.metrics_host, options.metrics_port, alerts, stack)
        for name in options.track:
            tracker = TrackerThread(folder, name)
            stack.callback(tracker.close)
            sinks[name] = tracker.observe
        if not sinks:
            yield
            return
        stopped, owner_pid, follower = threading.Event(), os.getpid(), Follower(folder.path, folder.attempt)
        arguments = (folder, follower, sinks, stopped)
        thread = threading.Thread(target=_pass_on_lines, args=arguments, name="monitor", daemon=True)
        thread.start()
        try:
            yield
        finally:
            if os.getpid() == owner_pid:
                stopped.set()
                thread.join(CLOSE_TIMEOUT_S)
            else:  # a forked child: threads, server and connections belong to the parent
                stack.pop_all()


def _serve_metrics(
    folder: RunFolder, host: str, port: int, alerts: Alerts, stack: contextlib.ExitStack
) -> Callable[[RecordLine], None]:
    from stoker_watch.monitor.prometheus import Exporter, Server  # imports prometheus_client, which few runs need

    exporter = Exporter(run=folder.path.name, host=platform.node(), firing=alerts.firing)
    server = Server(exporter, host, port)
    stack.callback(server.close)
    name = platform.node() if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
    folder.event("info", f"metrics for Prometheus: http://{name}:{server.port}/metrics", port=server.port)
    return exporter.observe


class TrackerThread:
    """Passes values to a tracker, which may raise, hang in any call, or call `sys.exit`.

    Raises ConfigError if it is not installed or, in the first attempt of a run, does not start: before the run costs
    anything. A later attempt goes on without it."""

    _error: BaseException | None = None

    def __init__(self, folder: RunFolder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._pending: queue.SimpleQueue[tuple[dict[str, float], int] | None] = queue.SimpleQueue()
        self._started = threading.Event()
        self._step = self._num_lost = 0
        self._failed = self._is_logging = self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            text = f"has not started after {START_TIMEOUT_S:g} s; the run goes on, and its values wait"
            folder.event("warning", f"{name} {text}")
        error = self._error
        if isinstance(error, ImportError):
            raise make_error(ConfigError, "tracker-not-installed", cause=str(error), name=name) from error
        if error is not None and folder.attempt == 1:  # no credentials, no server, …
            cause = f"{type(error).__name__}: {error}"
            raise ConfigError(f"--track {name} does not start.", cause=cause) from error

    def observe(self, line: RecordLine) -> None:
        """Queues the values of a line. Never blocks."""
        self._step = max(self._step, line.step) if isinstance(line, StepWindow) else self._step
        self._failed |= isinstance(line, Event) and line.kind == "failed"
        if values := tracker_metrics(line):
            if self._error is None and self._pending.qsize() < MAX_PENDING:
                self._pending.put((values, self._step))
            else:
                self._num_lost += 1

    def close(self) -> None:
        """Waits until everything is logged, at most CLOSE_TIMEOUT_S, and says what is lost."""
        self._pending.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._closed = True
        num_lost = self._num_lost + self._is_logging + max(0, self._pending.qsize() - 1)
        if self._thread.is_alive():
            text = f"{self._name} did not end within {CLOSE_TIMEOUT_S:g} s: {num_lost} lines of values may be lost"
            self._folder.event("warning", text)
        elif num_lost:
            self._folder.event("warning", f"{num_lost} lines of values are not in {self._name}")

    def _run(self) -> None:
        try:
            tracker = _make_tracker(self._folder, self._name)
        except BaseException as error:  # noqa: BLE001 (also `sys.exit`)
            self._disable(f"{self._name} does not start", error)
            return
        finally:
            self._started.set()
        try:
            while (item := self._pending.get()) is not None:
                self._is_logging = True
                tracker.log(*item)
                self._is_logging = False
        except BaseException as error:  # noqa: BLE001 (whatever a tracker raises: the run continues without it)
            self._disable(f"monitoring ({self._name}) is disabled after an error", error)
        try:
            tracker.close(failed=self._failed)
        except BaseException as error:  # noqa: BLE001 (its last values may be lost; the run is complete)
            self._disable(f"{self._name} could not be closed", error)

    def _disable(self, text: str, error: BaseException) -> None:
        self._error = error
        if not self._closed:  # else the run's records are closed, and `close` has said it
            self._folder.event("warning", f"{text}: {type(error).__name__}: {error}")


def _make_tracker(folder: RunFolder, name: str) -> "WandbTracker | MlflowTracker":
    first_event = next(read_lines(folder.path, EVENTS, Event), None)
    tables = read_settings(folder.path) or {}
    settings = {
        key: value for section, entries in tables.items() if section != "reasons" for key, value in entries.items()
    }
    # the same for all attempts
    identity = f"{folder.path.absolute()} {0.0 if first_event is None else first_event.t}"
    run_id = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return TRACKERS[name](name=folder.path.name, run_id=run_id, settings=settings)


class WandbTracker:
    """A run of Weights & Biases. Raises ImportError, and the exceptions of wandb."""

    def __init__(self, *, name: str, run_id: str, settings: dict[str, Any]) -> None:
        import wandb

        self._run: Any = wandb.init(name=name, id=run_id, resume="allow", config=settings)

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MlflowTracker:
    """A run of MLflow, in the experiment MLFLOW_EXPERIMENT_NAME. Raises ImportError, and the exceptions of MLflow."""

    def __init__(self, *, name: str, run_id: str, settings: dict[str, Any]) -> None:
        from mlflow.tracking import MlflowClient

        client: Any = MlflowClient()
        experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        experiment = client.get_experiment_by_name(experiment_name)
        experiment_id = client.create_experiment(experiment_name) if experiment is None else experiment.experiment_id
        found = client.search_runs([experiment_id], filter_string=f"tags.`stoker.id` = '{run_id}'", max_results=1)
        run = found[0] if found else client.create_run(experiment_id, run_name=name, tags={"stoker.id": run_id})
        self._client, self._run_id = client, run.info.run_id
        if found:
            client.update_run(self._run_id, status="RUNNING")
        else:
            for key, value in settings.items():
                client.log_param(self._run_id, key, value)

    def log(self, values: dict[str, float], step: int) -> None:
        """Sends all values in one request: each second has dozens of values."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [Metric(name, value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


TRACKERS: dict[str, type[WandbTracker] | type[MlflowTracker]] = {"wandb": WandbTracker, "mlflow": MlflowTracker}


def tracker_metrics(line: RecordLine) -> dict[str, float]:
    if isinstance(line, StepWindow):
        if not line.window_steps or line.wall_s <= 0:
            return {}
        device_s = line.wall_s * line.devices
        values = {f"loss/{name}": value for name, value in line.losses.items()}
        values |= {f"time/{phase}": duration_s / device_s for phase, duration_s in line.phases.items()}
        values |= {"img_per_s": line.num_images / line.wall_s} if line.num_images else {}
        values |= {} if line.lr is None else {"lr": line.lr}
        return values | ({} if line.grad_norm is None else {"grad_norm": line.grad_norm})
    if isinstance(line, DeviceSample):
        return {
            f"gpu/{gpu.index}/{name}": float(value) for gpu in line.gpus
            for name, value in (("utilization", gpu.utilization), ("memory_bytes", gpu.memory_used_bytes))
            if value is not None
        }  # fmt: skip
    scores = line.data.get("metrics", {}) if isinstance(line, Event) and line.kind == "evaluated" else {}
    return {f"score/{name}": value for name, value in scores.items() if isinstance(value, float)}  # others count boxes


class Follower:
    """Reads the lines that one attempt of a run appends, with the images of all ranks. Skips those of other attempts,
    and incomplete ones."""

    def __init__(self, run: Path, attempt: int) -> None:
        self._run = run
        self._attempt = attempt
        sizes = {name: (run / name).stat().st_size if (run / name).exists() else 0 for name in _DECODERS}
        self._offsets = {name: max(0, size - _TAIL_BYTES) for name, size in sizes.items()}
        self._partial_lines = dict.fromkeys(_DECODERS, b"")

    def read(self) -> list[RecordLine]:
        """Lines since the previous call. Raises OSError if an existing file cannot be read."""
        return sorted((line for name in _DECODERS for line in self._read(name)), key=lambda line: line.t)

    def _read(self, name: str) -> Iterator[RecordLine]:
        if not (self._run / name).exists():
            return
        with regular_files.open_file(self._run / name) as file:
            file.seek(self._offsets[name])
            data = file.read()
        self._offsets[name] += len(data)
        *lines, self._partial_lines[name] = (self._partial_lines[name] + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError):  # incomplete after a kill, or where reading began
                decoded = _DECODERS[name].decode(line)
                if isinstance(decoded, StepWindow):
                    decoded.num_images, decoded.ranks = decoded.num_images * decoded.ranks, 1
                if decoded.attempt == self._attempt:
                    yield decoded


def _pass_on_lines(
    folder: RunFolder, follower: Follower, sinks: dict[str, Callable[[RecordLine], object]], stopped: threading.Event
) -> None:
    """Passes new lines to the sinks, once more after `stopped` is set."""
    is_last = failed = False
    while not is_last:
        is_last = stopped.wait(POLL_INTERVAL_S)
        try:
            lines = follower.read()
        except OSError as error:  # the file system may become available again
            if not failed:
                failed = True
                folder.event("warning", f"the records of the run cannot be read: {error}")
            continue
        failed = False
        for line in lines:
            for name, sink in list(sinks.items()):
                try:
                    sink(line)
                except Exception as error:  # noqa: BLE001 (whatever a sink raises: the run continues without it)
                    del sinks[name]
                    text = f"monitoring ({name}) is disabled after an error: {type(error).__name__}: {error}"
                    folder.event("warning", text)


def json_log(file: TextIO, *, run: str) -> Callable[[RecordLine], None]:
    """`--log-format json`: writes all events, and a line of progress every PROGRESS_EVERY_S, as one JSON object each.
    `severity`, `message` and `time` are names that the collectors of Google, Amazon and most others recognize. Raises
    OSError if the stream cannot be written."""
    next_progress_t = 0.0

    def observe(line: RecordLine) -> None:
        nonlocal next_progress_t
        kind, severity = "steps", "INFO"
        if isinstance(line, Event):
            kind, text = "event", line.text or describe_event(line)
            severity = "ERROR" if line.kind == "failed" else "WARNING" if line.kind in WARNING_KINDS else "INFO"
        elif isinstance(line, StepWindow) and line.window_steps and line.t >= next_progress_t:
            next_progress_t = line.t + PROGRESS_EVERY_S
            loss = line.losses.get("total")
            speed = f", {line.num_images / line.wall_s:.1f} img/s" if line.num_images else ""
            text = f"step {line.step:,}{speed}" + ("" if loss is None else f", loss {loss:.4g}")
        else:
            return
        time = datetime.datetime.fromtimestamp(line.t, datetime.timezone.utc).isoformat(timespec="milliseconds")
        entry = {"severity": severity, "message": text, "time": time, "run": run, "record": kind}
        file.write(json.dumps(entry | {"data": msgspec.to_builtins(line)}) + "\n")
        file.flush()

    return observe
