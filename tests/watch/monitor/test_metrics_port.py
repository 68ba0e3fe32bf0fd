"""The port for Prometheus against strangers: idle, slow and malformed clients, and pages of other domains."""

import contextlib
import http.client
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stoker_watch.monitor import prometheus
from stoker_watch.runs.records import EVENTS, read_lines
from stoker_watch.runs.schemas import Event

FEW_DESCRIPTORS = 80
START_S, END_S = 240, 300
"""How long a job may take to open its port, and to end: an error of the test, not a measurement."""
MEASURED = f"""
import resource, sys, time
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, ({FEW_DESCRIPTORS}, {FEW_DESCRIPTORS}))
import stoker_watch
from stoker_watch.monitor.options import MonitoringOptions
run, all_connected = map(Path, sys.argv[1:])
with stoker_watch.measure(run, monitor=MonitoringOptions(metrics_port=0)) as m:
    while not all_connected.exists():
        with m.step(num_images=1):
            time.sleep(0.01)
            (run / "state").write_text("saved")
"""


@pytest.fixture
def server() -> Iterator[prometheus.Server]:
    exporter = prometheus.Exporter(run="run", host="here", firing=dict)
    one = prometheus.Server(exporter, "127.0.0.1", 0)
    yield one
    one.close()


def scrape(port: int, host: str | None = None, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, "/metrics", headers={} if host is None else {"Host": host})
        response = connection.getresponse()
        return response.status, response.read().decode()


def connect(port: int) -> socket.socket | None:
    """A connection, which waits up to 30 s for each answer; None if the backlog, of one connection, is full: the kernel
    would try again after a second."""
    try:
        connection = socket.create_connection(("127.0.0.1", port), timeout=0.05)
    except OSError:
        return None
    connection.settimeout(30)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Waits until the server has closed it, without having answered."""
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def test_idle_connections_take_few_descriptors_and_no_threads(server: prometheus.Server) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        idle: list[socket.socket] = []
        while len(idle) < 60:
            if (connection := connect(server.port)) is not None:
                idle.append(stack.enter_context(connection))
        assert all(is_closed(connection) for connection in idle[20:])
        assert threading.active_count() == threads
        assert len(os.listdir("/proc/self/fd")) - descriptors - len(idle) <= 8
    assert scrape_when_free(server.port)[0] == 200


def scrape_when_free(port: int) -> tuple[int, str]:
    """The server notices a moment later that clients are gone."""
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return scrape(port)


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\n", b"x" * 100_000], ids=["idle", "cut", "endless"])
def test_a_request_that_does_not_end_is_closed(
    sent: bytes, server: prometheus.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "REQUEST_TIMEOUT_S", 0.05)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        assert is_closed(connection)
    assert scrape(server.port)[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9400", 200), ("localhost:9400", 200), ("LOCALHOST", 200), ("[::1]:9400", 200), ("10.0.0.7", 200),
        (os.uname().nodename, 200), ("rebound.example.com:9400", 403), ("127.0.0.1.example.com", 403), ("", 403),
    ],
)  # fmt: skip
def test_a_page_of_another_domain_reads_nothing(host: str, status: int, server: prometheus.Server) -> None:
    """DNS rebinding: a browser sends the name of the page, which the page's owner has pointed at this address."""
    found, text = scrape(server.port, host)
    assert found == status
    assert ("stoker_steps_total" in text) == (status == 200)


def test_on_a_network_any_name_is_answered() -> None:
    """As of a service of Docker Compose or Kubernetes, which this machine does not know."""
    server = prometheus.Server(prometheus.Exporter(run="run", host="here", firing=dict), "0.0.0.0", 0)
    try:
        assert scrape(server.port, "trainer:9400")[0] == 200
    finally:
        server.close()


def test_nothing_but_get_is_served(server: prometheus.Server) -> None:
    assert scrape(server.port, method="POST")[0] == 405


def flood(command: list[str], run: Path, is_enough: Callable[[int], bool], ready: Callable[[], object]) -> str:
    """Starts a job that opens a port for Prometheus in `run`; strangers hold connections to it until `is_enough` of
    their number or the job has ended, then `ready` is called. The job ends with exit code 0; returns its output."""
    process = subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    output: list[str] = []
    held: list[socket.socket] = []
    reader = threading.Thread(target=lambda: output.extend(process.stdout or ()))
    reader.start()
    try:
        deadline_s, port = time.monotonic() + START_S, None
        while port is None and process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.1)
            text = (run / EVENTS).read_text() if (run / EVENTS).exists() else ""
            port = re.search(r'/metrics".*"port":(\d+)', text)
        assert port is not None, "".join(output)
        while process.poll() is None and not is_enough(len(held)):
            if (connection := connect(int(port[1]))) is not None:
                held.append(connection)
        ready()
        assert process.wait(END_S) == 0, "".join(output)
    finally:
        process.kill()
        process.wait()
        reader.join()
        for connection in held:
            connection.close()
    return "".join(output)


def test_strangers_do_not_end_a_measured_loop(tmp_path: Path) -> None:
    """A job with few descriptors, whose port strangers hold as many connections to as they get."""
    run, all_connected = tmp_path / "run", tmp_path / "all connected"
    command = [sys.executable, "-c", MEASURED, str(run), str(all_connected)]
    flood(command, run, lambda held: held >= 2 * FEW_DESCRIPTORS, all_connected.touch)
    assert (run / "state").read_text() == "saved"
    assert [event.kind for event in read_lines(run, EVENTS, Event)][-1] == "finished"
