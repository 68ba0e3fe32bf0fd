"""Real servers on loopback for tests of object stores: S3 (moto), Google's (our own), plain web, and a bad network.

    with s3_server() as server:                 # or google_server(), web_server(); a fixture of each in conftest.py
        served = server.bucket()                 # a new one each time
        with served.through(Conditions(latency_s=0.02, faults={"503": 0.01})) as (proxied, proxy):
            served.uri, served.environment    # "s3://bucket-1", the variables that make it answer here
            proxied.environment                   # the same bucket, through the proxy
            proxy.requests                          # the requests that came

`apply(monkeypatch, served.environment)` sets the variables in this process; a sub-process gets {**os.environ, **them}.
Nothing asks a network: the variables also switch off the metadata services and the user's own credentials.
"""

import atexit
import contextlib
import functools
import itertools
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pytest

from tests.watch.storage.object_server import Files, GoogleXml, Objects, ObjectServer
from tests.watch.storage.proxy import Conditions, Proxy

__all__ = [
    "NO_CREDENTIALS",
    "Conditions",
    "Objects",
    "Proxy",
    "ServedBucket",
    "Server",
    "apply",
    "google_server",
    "s3_server",
    "web_server",
]

NO_CREDENTIALS = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_CONFIG_FILE": os.devnull,
    "NO_GCE_CHECK": "true",
    "CLOUDSDK_CONFIG": os.devnull,
    "NO_PROXY": "127.0.0.1",
}
"""Variables of a process without credentials, which requests none."""
KEYS = {"AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
_STARTS = ("AWS_", "GOOGLE_", "STORAGE_EMULATOR_HOST", "STOKER_STORAGE_", "GCE_METADATA_HOST")
MOTO_START_S = 30.0


@dataclass(frozen=True)
class ServedBucket:
    """A bucket on a server. uri: without a slash at its end; of a web server, the server itself."""

    uri: str
    url: str
    environment: Mapping[str, str]

    @contextlib.contextmanager
    def through(self, conditions: Conditions | None = None) -> Iterator[tuple["ServedBucket", Proxy]]:
        """The same bucket with a bad network before it."""
        with Proxy(self.url, conditions) as proxy:
            environment = {name: value.replace(self.url, proxy.url) for name, value in self.environment.items()}
            uri = self.uri.replace(self.url, proxy.url)
            yield replace(self, uri=uri, url=proxy.url, environment=environment), proxy


class Server:
    """objects: what is in it, for google and web; of S3 ask through the store."""

    def __init__(self, scheme: str, url: str, objects: Objects | None = None) -> None:
        self.scheme, self.url = scheme, url
        self._objects = objects
        self._numbers = itertools.count(1)

    @property
    def objects(self) -> Objects:
        assert self._objects is not None, "moto's objects are in another process"
        return self._objects

    def bucket(self) -> ServedBucket:
        """A new, empty one."""
        name = f"bucket-{next(self._numbers)}"
        if self.scheme == "http":
            self.objects.buckets[""] = {}
            return ServedBucket(self.url, self.url, NO_CREDENTIALS)
        if self.scheme == "gs":
            self.objects.buckets[name] = {}
            return ServedBucket(f"gs://{name}", self.url, {**NO_CREDENTIALS, "STORAGE_EMULATOR_HOST": self.url})
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{name}", method="PUT")).close()
        return ServedBucket(f"s3://{name}", self.url, {**NO_CREDENTIALS, **KEYS, "AWS_ENDPOINT_URL": self.url})


@contextlib.contextmanager
def s3_server() -> Iterator[Server]:
    """moto, in its own process: one for all tests of this process, since its start costs 2 CPU-seconds."""
    yield _start_moto()


@functools.cache
def _start_moto() -> Server:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_STARTS)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    atexit.register(process.terminate)
    _await(port, process)
    return Server("s3", f"http://127.0.0.1:{port}")


def _await(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + MOTO_START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        time.sleep(0.02)
    raise RuntimeError(f"moto did not start; exit code {process.poll()}")


@contextlib.contextmanager
def google_server() -> Iterator[Server]:
    with ObjectServer(GoogleXml) as server:
        yield Server("gs", server.url, server.objects)


@contextlib.contextmanager
def web_server() -> Iterator[Server]:
    """Its files are `server.objects.put("", "path/name", data)`."""
    with ObjectServer(Files) as server:
        yield Server("http", server.url, server.objects)


def apply(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str]) -> None:
    """Sets the variables of a served, and takes away every other that leads to a cloud."""
    for name in os.environ:
        if name.startswith(_STARTS):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
