"""A metadata server on loopback that speaks Google's and AWS's protocols, for tests of notices."""

import http.server
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

GCE = "/computeMetadata/v1/instance/"


class MetadataServer(http.server.ThreadingHTTPServer):
    """values: of Google's keys below `instance/`; spot_action: AWS's answer, None for 404."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self.spot_action: str | None = None
        self.requests: list[str] = []
        self.failures = 0
        """Requests that are answered with status 503 from now on."""
        self.expired_tokens = 0
        """AWS requests that are answered with status 401 from now on."""
        self.changed = threading.Condition()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that ends while it waits is no error; its traceback would be in the output of another test."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value

    def wait_for_requests(self, count: int, timeout_s: float = 30) -> None:
        """Returns when so many requests have come; AssertionError if they do not come."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.requests) >= count, timeout_s), self.requests


@contextmanager
def metadata_server() -> Iterator[MetadataServer]:
    server = MetadataServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: MetadataServer

    def do_PUT(self) -> None:
        self._note()
        if self.path == "/latest/api/token" and self.headers.get("X-aws-ec2-metadata-token-ttl-seconds"):
            self._answer(200, "token")
        else:
            self._answer(400, "")

    def do_GET(self) -> None:
        self._note()
        url = urllib.parse.urlsplit(self.path)
        if self.server.failures > 0:
            self.server.failures -= 1
            self._answer(503, "")
        elif url.path.startswith("/latest/"):
            self._answer_aws(url.path)
        elif self.headers.get("Metadata-Flavor") != "Google":
            self._answer(403, "")
        elif (key := url.path.removeprefix(GCE)) not in self.server.values:
            self._answer(404, "")
        else:
            self._answer(200, self.server.values[key])

    def _answer_aws(self, path: str) -> None:
        if self.headers.get("X-aws-ec2-metadata-token") != "token":
            self._answer(401, "")
        elif self.server.expired_tokens > 0:
            self.server.expired_tokens -= 1
            self._answer(401, "")
        elif path == "/latest/meta-data/spot/instance-action" and self.server.spot_action is not None:
            self._answer(200, self.server.spot_action)
        else:
            self._answer(404, "")

    def _note(self) -> None:
        with self.server.changed:
            self.server.requests.append(f"{self.command} {self.path}")
            self.server.changed.notify_all()

    def _answer(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
