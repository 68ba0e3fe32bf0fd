"""Monitoring of a running job: real files, a real web server, real commands, a real scrape."""

import http.server
import io
import json
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stoker_watch.errors import ConfigError
from stoker_watch.monitor import delivery, monitor
from stoker_watch.monitor.alerts import MEASURED
from stoker_watch.monitor.monitor import Follower, monitoring, tracker_metrics
from stoker_watch.monitor.options import MonitoringOptions
from stoker_watch.runs.evaluation import COCO_SUMMARY, Metrics
from stoker_watch.runs.records import DEVICES, EVENTS, STEPS, RunFolder, read_lines
from stoker_watch.runs.schemas import DeviceSample, Event, GpuSample, StepWindow


@pytest.fixture(autouse=True)
def poll_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads the records without waiting."""
    monkeypatch.setattr("stoker_watch.monitor.monitor.POLL_INTERVAL_S", 0.01)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    run_folder = RunFolder(tmp_path, attempt=2)
    yield run_folder
    run_folder.close()


def window(t: float, **more: Any) -> StepWindow:
    fields = {"attempt": 2, "step": int(t), "window_steps": 2, "num_images": 16, "wall_s": 1.0, "devices": 1,
            "phases": {"compute": 0.25, "input_wait": 0.75}, "losses": {"total": 2.5}}  # fmt: skip
    return StepWindow(t=t, **(fields | more))


def must_not_stop() -> None:
    raise AssertionError("the run must not be stopped")


def events(folder: RunFolder, kind: str) -> list[Event]:
    return [event for event in read_lines(folder.path, EVENTS, Event) if event.kind == kind]


def test_a_follower_reads_each_line_of_its_attempt_once_and_in_order(tmp_path: Path) -> None:
    before = RunFolder(tmp_path, attempt=1)
    for t in range(1000):
        before.append(STEPS, window(float(t), attempt=1))
    before.close()
    follower, now = Follower(tmp_path, attempt=2), RunFolder(tmp_path, attempt=2)
    assert follower.read() == []
    now.append(STEPS, window(10.0))
    now.append(DEVICES, DeviceSample(t=9.0, attempt=2))
    assert [line.t for line in follower.read()] == [9.0, 10.0]
    whole = b'{"t":12.0,"attempt":2,"kind":"info"}\n'
    with (tmp_path / EVENTS).open("ab") as file:
        file.write(whole[:11])
        file.flush()
        assert follower.read() == []
        file.write(whole[11:])
    assert [line.t for line in follower.read()] == [12.0]
    now.close()


class Hook(http.server.BaseHTTPRequestHandler):
    """A webhook that fails at the first request."""

    received: list[dict[str, Any]]

    def do_POST(self) -> None:
        self.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(503 if len(self.received) == 1 else 200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


def test_an_alert_reaches_the_events_the_command_the_webhook_and_the_run(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker_watch.monitor.delivery.RETRY_BASE_S", 0.0)
    Hook.received = []
    server = http.server.HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stopped = threading.Event()
    output = folder.path / "output.json"
    options = MonitoringOptions(
        alert=("input_wait > 50%",), alert_command=f"cat > '{output}'; echo \"$STOKER_ALERT\" >> '{output}'",
        alert_webhook=f"http://127.0.0.1:{server.server_port}/services/secret", alert_exit=True,
    )  # fmt: skip
    with monitoring(folder, options, stop=stopped.set):
        folder.append(STEPS, window(1.0))
        folder.append(STEPS, window(2.0))
    server.shutdown()
    server.server_close()
    assert stopped.is_set()
    (event,) = events(folder, "alert")
    assert event.data == {"rule": "input_wait > 50%", "value": 0.75}
    payload, text = output.read_text().split("}")
    assert json.loads(payload + "}")["value"] == 0.75
    assert text.strip() == "input_wait > 50%: 75.0 %"
    assert len(Hook.received) == 2
    assert list(Hook.received[1]) == ["text"]
    assert "75.0 %" in Hook.received[1]["text"]
    assert not events(folder, "warning")


@pytest.mark.parametrize("address", ["http://127.0.0.1:1/services/secret", "http://127.0.0.1:1/a secret"])
def test_a_failed_delivery_is_a_warning_without_the_secret(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr("stoker_watch.monitor.delivery.MAX_ATTEMPTS", 1)
    command = "echo broken >&2; exit 3"
    options = MonitoringOptions(alert=("input_wait > 50%",), alert_command=command, alert_webhook=address)
    with monitoring(folder, options, stop=must_not_stop):
        folder.append(STEPS, window(1.0))
    warnings = [event.text for event in events(folder, "warning")]
    assert warnings[0] == "the command of an alert ended with 3: broken"
    assert "could not be posted" in warnings[1]
    assert "secret" not in "".join(warnings)


def test_a_command_that_exceeds_its_timeout_is_stopped_and_not_quoted(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker_watch.monitor.delivery.COMMAND_TIMEOUT_S", 0.1)
    with monitoring(
        folder, MonitoringOptions(alert=("on failed",), alert_command="sleep 9 # secret"), stop=must_not_stop
    ):
        folder.event("failed")
    (warning,) = events(folder, "warning")
    assert "was stopped after" in warning.text
    assert "secret" not in warning.text


@pytest.fixture
def silent_server() -> Iterator[int]:
    """The port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("kind", ["webhook", "command"])
def test_what_hangs_at_the_end_of_a_run_is_given_up(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, silent_server: int, kind: str
) -> None:
    assert delivery.CLOSE_TIMEOUT_S + delivery.KILL_TIMEOUT_S <= 5
    monkeypatch.setattr(delivery, "CLOSE_TIMEOUT_S", 0.5)
    pid_file = folder.path / "pid"
    # the command's child ignores signals and holds its output open
    command = f"(trap '' TERM HUP INT; sleep 600 & echo $! > '{pid_file}'; wait) | cat"
    hanging: dict[str, Any] = (
        {"alert_command": command}
        if kind == "command"
        else {"alert_webhook": f"http://127.0.0.1:{silent_server}/secret"}
    )
    with monitoring(folder, MonitoringOptions(alert=("on failed",), **hanging), stop=must_not_stop):
        folder.event("failed")
        folder.event("failed")
        while kind == "command" and not (pid_file.exists() and pid_file.read_text()):
            pass
    (warning,) = events(folder, "warning")
    assert warning.text == "2 alerts were not delivered within 0.5 s after the end of the run"
    if kind == "command":
        child = Path("/proc", pid_file.read_text().strip(), "stat")
        while child.exists() and child.read_text().rpartition(")")[2].split()[0] not in "ZX":
            pass  # it is being killed


def test_metrics_are_for_this_machine_unless_told_otherwise(folder: RunFolder) -> None:
    for host, shown in (("127.0.0.1", "127.0.0.1"), ("0.0.0.0", platform.node())):
        options = MonitoringOptions(metrics_port=0) if host == "127.0.0.1" else MonitoringOptions(
            metrics_port=0, metrics_host=host
        )  # fmt: skip
        with monitoring(folder, options, stop=must_not_stop):
            event = events(folder, "info")[-1]
            assert f"http://{shown}:" in event.text
            # the kernel's table of listening sockets: address in hexadecimal, little-endian
            listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
                         if line.split()[3] == "0A"]  # fmt: skip
            assert f"{'0100007F' if host == '127.0.0.1' else '00000000'}:{event.data['port']:04X}" in listening


def test_a_failed_delivery_triggers_no_rule(folder: RunFolder) -> None:
    with monitoring(folder, MonitoringOptions(alert=("on warning",), alert_command="exit 3"), stop=must_not_stop):
        folder.event("warning", "the first")
        while len(events(folder, "warning")) < 2:
            pass
        folder.event("warning", "the last")
    assert [event.text for event in events(folder, "alert")] == ["warning: the first", "warning: the last"]


def test_prometheus_scrapes_the_metrics(folder: RunFolder) -> None:
    with monitoring(folder, MonitoringOptions(metrics_port=0, alert=("img_per_s < 5",)), stop=must_not_stop):
        (event,) = events(folder, "info")
        folder.append(STEPS, window(1.0))
        folder.append(STEPS, window(2.0))
        gpu = GpuSample(index=3, utilization=0.5, temperature_c=60)
        folder.append(DEVICES, DeviceSample(t=2.5, attempt=2, gpus=[gpu], cpu_core_utilization=[0.2, 0.4]))
        scores = {name: 0.25 for name in COCO_SUMMARY}
        metrics = Metrics(**scores, per_class=[], num_images=5000, boxes=36335, detections=500_000)
        folder.event("evaluated", metrics=msgspec.to_builtins(metrics))
        address = f"http://127.0.0.1:{event.data['port']}/metrics"
        while "stoker_score" not in (page := urllib.request.urlopen(address, timeout=10).read().decode()):
            pass
    values = {
        (one.name, *sorted(value for key, value in one.labels.items() if key not in ("run", "host"))): one.value
        for family in text_string_to_metric_families(page) for one in family.samples
    }  # fmt: skip
    assert values["stoker_phase_seconds_total", "input_wait"] == 1.5
    assert values["stoker_steps_total",] == 4
    assert values["stoker_images_per_second",] == 16
    assert values["stoker_gpu_utilization_ratio", "3"] == 0.5
    assert values["stoker_host_cpu_utilization_ratio",] == pytest.approx(0.3)
    assert {name for family, *name in values if family == "stoker_score" for name in name} == set(COCO_SUMMARY)
    assert values["stoker_score", "ap"] == 0.25
    assert values["stoker_alert_firing", "img_per_s < 5"] == 0
    assert not [name for name, *_ in values if name == "stoker_gpu_power_watts"]


def test_what_is_not_counted_is_not_served(folder: RunFolder) -> None:
    with monitoring(folder, MonitoringOptions(metrics_port=0), stop=must_not_stop):
        (event,) = events(folder, "info")
        folder.append(STEPS, window(1.0, num_images=0))
        address = f"http://127.0.0.1:{event.data['port']}/metrics"
        while "stoker_loss" not in (page := urllib.request.urlopen(address, timeout=10).read().decode()):
            pass
    assert "stoker_steps_total" in page
    assert "stoker_images" not in page


def test_the_dashboard_uses_only_served_metrics() -> None:
    known = {
        "phase_seconds_total", "steps_total", "images_total", "skipped_steps_total", "events_total", "step", "loss",
        "score", "alert_firing", *MEASURED.prometheus["step"],
        *(f"{table}_{name}" for table in ("host", "gpu") for name in MEASURED.prometheus[table]),
    }  # fmt: skip
    dashboard = json.loads((Path(__file__).parents[3] / "docs/grafana-dashboard.json").read_text())
    used = {name for panel in dashboard["panels"] for target in panel.get("targets", ())
             for name in re.findall(r"stoker_([a-z_]+)", target["expr"])}  # fmt: skip
    assert used
    assert used <= known


def test_json_lines_for_cloud_logging(folder: RunFolder) -> None:
    out = io.StringIO()
    with monitoring(folder, MonitoringOptions(), stop=must_not_stop, log="json", log_file=out):
        for t in range(1, 90):
            folder.append(STEPS, window(float(t), ranks=2))
        folder.event("warning", "something\nodd")
        folder.event("evaluated", step=89, metrics={"ap": 0.25, "ap50": 0.5, "classes": ["a"]})
        folder.event("failed", "the end")
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    steps = [line for line in lines if line["record"] == "steps"]
    assert [line["data"]["t"] for line in steps] == [1.0, 61.0]
    assert steps[0]["message"] == "step 1, 32.0 img/s, loss 2.5", "of both ranks"
    assert steps[0]["data"]["num_images"] == 32
    assert [line["severity"] for line in lines if line["record"] == "event"] == ["WARNING", "INFO", "ERROR"]
    assert lines[-2]["message"] == "evaluated at step 89: AP 0.250, AP50 0.500"
    assert all({"severity", "message", "time", "run"} <= line.keys() for line in lines)


def test_a_closed_stream_disables_the_log_and_not_the_run(folder: RunFolder) -> None:
    class Closed(io.StringIO):
        def write(self, _: str, /) -> int:
            raise BrokenPipeError("gone")

    with monitoring(folder, MonitoringOptions(), stop=must_not_stop, log="json", log_file=Closed()):
        folder.append(STEPS, window(1.0))
    (warning,) = events(folder, "warning")
    assert warning.text == "monitoring (the log) is disabled after an error: BrokenPipeError: gone"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (MonitoringOptions(alert_command="true"), "needs an alert rule"),
        (MonitoringOptions(alert=("on failed",), alert_webhook="slack"), "not an HTTP URL"),
        (MonitoringOptions(metrics_port=70000), "not a valid port"),
        (MonitoringOptions(alert=("what",)), "not a valid rule"),
    ],
)
def test_invalid_options_are_errors_before_anything_starts(
    folder: RunFolder, options: MonitoringOptions, message: str
) -> None:
    with pytest.raises(ConfigError, match=message), monitoring(folder, options, stop=must_not_stop):
        raise AssertionError("started")


def test_a_port_in_use_is_an_error(folder: RunFolder) -> None:
    with monitoring(folder, MonitoringOptions(metrics_port=0), stop=must_not_stop):
        (event,) = events(folder, "info")
        taken = MonitoringOptions(metrics_port=event.data["port"])
        with pytest.raises(ConfigError, match="cannot be used"), monitoring(folder, taken, stop=must_not_stop):
            raise AssertionError("started")


def test_mlflow_continues_one_run_over_attempts(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (folder.path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for attempt in (2, 3):
        again = RunFolder(folder.path, attempt)
        again.event("started")
        with monitoring(again, MonitoringOptions(track=("mlflow",)), stop=must_not_stop):
            again.append(STEPS, window(float(attempt), attempt=attempt, step=attempt))
        again.close()
    client = mlflow.tracking.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("Default").experiment_id])
    assert run.info.status == "FINISHED"
    assert [metric.value for metric in client.get_metric_history(run.info.run_id, "img_per_s")] == [16.0, 16.0]
    assert run.data.metrics["time/input_wait"] == 0.75


def test_wandb_gets_the_metrics(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(folder.path))
    folder.event("started")
    with monitoring(folder, MonitoringOptions(track=("wandb",)), stop=must_not_stop):
        folder.append(STEPS, window(1.0))
    assert not events(folder, "warning")
    assert re.search(r"time/input_wait 0.75\b", capfd.readouterr().err)  # the summary that wandb prints


def test_a_missing_tracker_names_the_extra_to_install(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with (
        pytest.raises(ConfigError, match=r"pip install 'stoker-watch\[wandb\]'"),
        monitoring(folder, MonitoringOptions(track=("wandb",)), stop=must_not_stop),
    ):
        raise AssertionError("started")


def test_a_failing_tracker_does_not_stop_the_run(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __init__(self, **_: Any) -> None:
            """Starts, and then its server goes away."""

        def log(self, values: dict[str, float], step: int) -> None:
            raise ConnectionError(f"no {len(values)} values at {step}")

        def close(self, *, failed: bool) -> None:
            raise ConnectionError(f"failed={failed}")

    monkeypatch.setitem(monitor.TRACKERS, "wandb", Broken)
    with monitoring(folder, MonitoringOptions(track=("wandb",)), stop=must_not_stop):
        folder.append(STEPS, window(1.0))
        folder.event("failed")
    warnings = [event.text for event in events(folder, "warning")]
    assert warnings == [
        "monitoring (wandb) is disabled after an error: ConnectionError: no 4 values at 1",
        "wandb could not be closed: ConnectionError: failed=True",
        "1 lines of values are not in wandb",
    ]


@pytest.mark.parametrize("call", ["start", "log", "close"])
@pytest.mark.parametrize("way", ["hangs", "exits"])
def test_a_tracker_that_hangs_or_exits_loses_its_values_only(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, call: str, way: str
) -> None:
    """Two lines; the log, another sink, gets all of them, and the block ends."""
    released, reached = threading.Event(), threading.Event()

    def misbehave(now: str) -> None:
        if now == call:
            reached.set()
            if way == "exits":
                sys.exit(7)
            released.wait(600)

    class Hostile:
        def __init__(self, **_: Any) -> None:
            misbehave("start")

        def log(self, _values: dict[str, float], _step: int) -> None:
            misbehave("log")

        def close(self, *, failed: bool) -> None:  # noqa: ARG002
            misbehave("close")

    monkeypatch.setitem(monitor.TRACKERS, "wandb", Hostile)
    for name in ("START_TIMEOUT_S", "CLOSE_TIMEOUT_S"):
        monkeypatch.setattr(monitor, name, 0.5 if way == "hangs" else 60)
    log = io.StringIO()
    options = MonitoringOptions(track=("wandb",))
    try:
        with monitoring(folder, options, stop=must_not_stop, log="json", log_file=log):
            folder.append(STEPS, window(1.0))
            folder.append(STEPS, window(2.0))
            folder.event("info", "the last line")
    finally:
        released.set()
    assert reached.is_set()
    assert "the last line" in log.getvalue()
    num_lost = 0 if call == "close" else 2
    expected = {
        ("start", "hangs"): ["wandb has not started after 0.5 s; the run goes on, and its values wait"],
        ("start", "exits"): ["wandb does not start: SystemExit: 7"],
        ("log", "exits"): ["monitoring (wandb) is disabled after an error: SystemExit: 7"],
        ("close", "exits"): ["wandb could not be closed: SystemExit: 7"],
    }.get((call, way), [])
    if way == "hangs":
        expected.append(f"wandb did not end within 0.5 s: {num_lost} lines of values may be lost")
    elif num_lost:
        expected.append("2 lines of values are not in wandb")
    assert [event.text for event in events(folder, "warning")] == expected


@pytest.mark.parametrize("error", [ConnectionError("no server"), SystemExit(7)])
def test_a_tracker_that_does_not_start_ends_a_first_attempt_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def refuse(**_: Any) -> None:
        raise error

    monkeypatch.setitem(monitor.TRACKERS, "wandb", refuse)  # type: ignore[arg-type]
    first = RunFolder(tmp_path, attempt=1)
    options = MonitoringOptions(track=("wandb",))
    with pytest.raises(ConfigError, match="does not start"), monitoring(first, options, stop=must_not_stop):
        raise AssertionError("started")
    first.close()
    second, entered = RunFolder(tmp_path, attempt=2), False
    with monitoring(second, options, stop=must_not_stop):
        entered = True
    second.close()
    assert entered
    assert f"wandb does not start: {type(error).__name__}: {error}" in [
        event.text for event in events(second, "warning")
    ]


@pytest.mark.slow
def test_an_alert_ends_an_external_job(tmp_path: Path) -> None:
    """By the command line: a job that would run for a minute."""
    job = tmp_path / "job.py"
    loop = "for n in range(1200):\n    time.sleep(0.05)\n    print(f'step {n} loss={1 / (n + 1)}', flush=True)\n"
    job.write_text(f"import time\n{loop}")
    flags = ["--alert", "loss < 2", "--alert-exit", "--alert-command", "exit 3"]
    watch = [sys.executable, "-m", "stoker_watch", "watch", "--run-dir", str(tmp_path / "run"), "--no-hook"]
    command = [*watch, *flags, "--", sys.executable, str(job)]
    assert subprocess.run(command, stdout=subprocess.DEVNULL, timeout=50).returncode == -signal.SIGTERM
    recorded = [(event.kind, event.text) for event in read_lines(tmp_path / "run", EVENTS, Event)]
    assert ("failed", "job ended by signal 15") in recorded
    assert ("warning", "the command of an alert ended with 3: ") in recorded


def test_trackers_get_scores_and_no_counts() -> None:
    metrics = {"ap": 0.25, "ap50": 0.0, "boxes": 36335, "missing": 0, "per_class": []}
    line = Event(t=1.0, attempt=1, kind="evaluated", data={"metrics": metrics})
    assert tracker_metrics(line) == {"score/ap": 0.25, "score/ap50": 0.0}


def test_an_address_without_a_port_is_refused() -> None:
    with pytest.raises(ConfigError, match="--metrics-port"):
        MonitoringOptions(metrics_host="0.0.0.0").validate()
