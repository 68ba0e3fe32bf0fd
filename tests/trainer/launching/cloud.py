"""Launch specs of the cloud places, and a small HTTP server that answers as their APIs do."""

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from stoker.launching.spec import LaunchSpec

IMAGE = "europe-docker.pkg.dev/project/images/stoker:1"


def make_spec(**changes: Any) -> LaunchSpec:
    """A training on one GPU, with data and run in buckets."""
    spec = LaunchSpec(
        arguments=("train", "gs://bucket/coco", "--lr", "1e-3", "--run-dir", "gs://bucket/runs/one"),
        name="stoker-one",
        run_dir="gs://bucket/runs/one",
        data="gs://bucket/coco",
        gpus=1,
        cpus=8,
        memory_gib=28.8,
        shm_gib=1,
        image=IMAGE,
    )
    return dataclasses.replace(spec, **changes)


@dataclasses.dataclass
class Request:
    method: str
    path: str
    body: Any


@dataclasses.dataclass
class FakeApi:
    """answer(method, path, body) → (status, JSON or text)."""

    answer: Callable[[str, str, Any], tuple[int, Any]]
    requests: list[Request] = dataclasses.field(default_factory=list)
    address: str = ""


@contextlib.contextmanager
def serving(answer: Callable[[str, str, Any], tuple[int, Any]]) -> Iterator[FakeApi]:
    """A server on loopback until the block ends."""
    api = FakeApi(answer)

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            data = self.rfile.read(size)
            body = json.loads(data) if data else None
            api.requests.append(Request(self.command, self.path, body))
            status, reply = api.answer(self.command, self.path.partition("?")[0], body)
            encoded = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(reply, str) else "application/json")
            self.send_header("Content-Length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        do_GET = do_POST = do_DELETE = handle_any

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    api.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
