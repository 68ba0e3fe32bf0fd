"""A server of objects in memory, on loopback: Google's XML API as obstore speaks it, or plain files with ranges.

There is no emulator of Google's that obstore can use: they serve the JSON API and ignore conditions. Of the XML API
(cloud.google.com/storage/docs/xml-api/reference-methods) this has objects with generations, conditions, ranges, lists
in pages, and uploads in parts. S3 has moto; see `servers.py`.
"""

import hashlib
import re
import threading
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(frozen=True)
class Stored:
    data: bytes
    generation: int
    modified_s: float

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}"'


@dataclass
class Objects:
    """What a server has, and what it refuses. Tests read and change it while the server runs."""

    buckets: dict[str, dict[str, Stored]] = field(default_factory=dict)
    page: int = 1000
    """Objects in one page of a list."""
    denied: set[str] = field(default_factory=set)
    """Methods that are answered with 403."""
    requests: list[str] = field(default_factory=list)
    """Method and path of each request."""
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _generation: int = 1_700_000_000_000_000

    def put(self, bucket: str, key: str, data: bytes) -> Stored:
        with self._lock:
            self._generation += 1
            stored = Stored(data, self._generation, time.time())
            self.buckets.setdefault(bucket, {})[key] = stored
            return stored

    def get(self, bucket: str, key: str) -> Stored | None:
        return self.buckets.get(bucket, {}).get(key)

    def begin_upload(self) -> str:
        with self._lock:
            self._generation += 1
            self.uploads[str(self._generation)] = {}
            return str(self._generation)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    objects: Objects


class Files(BaseHTTPRequestHandler):
    """A plain web server: GET and HEAD, with ranges. The path is bucket/key; the bucket is named ""."""

    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        bucket, key = self._place()
        stored = self._objects.get(bucket, key)
        if stored is None:
            self._answer(404, b"not here")
        else:
            self._send(stored)

    do_HEAD = do_GET

    def __getattr__(self, name: str) -> object:
        if name.startswith("do_"):  # PUT, PROPFIND …
            return lambda: self._answer(405, b"not allowed")
        raise AttributeError(name)

    @property
    def _objects(self) -> Objects:
        return self.server.objects

    def _place(self) -> tuple[str, str]:
        self._objects.requests.append(f"{self.command} {self.path}")
        return "", unquote(urlsplit(self.path).path).lstrip("/")

    def _send(self, stored: Stored) -> None:
        headers = {
            "ETag": stored.etag,
            "Last-Modified": formatdate(stored.modified_s, usegmt=True),
            "x-goog-generation": str(stored.generation),
            "Accept-Ranges": "bytes",
        }
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        if asked is None:
            self._answer(200, stored.data, headers)
            return
        size = len(stored.data)
        start, end = int(asked[1]), min(size, int(asked[2]) + 1) if asked[2] else size
        if start >= size:
            self._answer(416, b"<Error><Code>InvalidRange</Code></Error>")
            return
        self._answer(206, stored.data[start:end], {**headers, "Content-Range": f"bytes {start}-{end - 1}/{size}"})

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class GoogleXml(Files):
    """Google Cloud Storage. The key comes as one escaped part of the path: /bucket/a%2Fb."""

    def do_GET(self) -> None:
        if not self._allowed():
            return
        bucket, key = self._place()
        if not key:
            self._list(bucket)
        elif (stored := self._objects.get(bucket, key)) is None:
            self._error(404, "NoSuchKey", "The specified key does not exist.")
        else:
            self._send(stored)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        body = self._body()
        if not self._allowed():
            return
        bucket, key = self._place()
        if upload := self._query("uploadId"):
            self._objects.uploads[upload][int(self._query("partNumber"))] = body
            self._answer(200, headers={"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
        elif self._as_expected(bucket, key):
            stored = self._objects.put(bucket, key, body)
            self._answer(200, headers={"ETag": stored.etag, "x-goog-generation": str(stored.generation)})

    def do_POST(self) -> None:
        self._body()
        if not self._allowed():
            return
        bucket, key = self._place()
        if upload := self._query("uploadId"):
            parts = self._objects.uploads.pop(upload)
            stored = self._objects.put(bucket, key, b"".join(parts[number] for number in sorted(parts)))
            etag = f"<CompleteMultipartUploadResult><ETag>{stored.etag}</ETag></CompleteMultipartUploadResult>"
            self._answer(200, etag.encode(), {"x-goog-generation": str(stored.generation)})
        else:
            name = f"<UploadId>{self._objects.begin_upload()}</UploadId>"
            self._answer(200, f"<InitiateMultipartUploadResult>{name}</InitiateMultipartUploadResult>".encode())

    def do_DELETE(self) -> None:
        if not self._allowed():
            return
        bucket, key = self._place()
        if self._objects.buckets[bucket].pop(key, None) is None:
            self._error(404, "NoSuchKey", "The specified key does not exist.")
        else:
            self._answer(204)

    def _place(self) -> tuple[str, str]:
        self._objects.requests.append(f"{self.command} {self.path}")
        bucket, _, key = urlsplit(self.path).path.lstrip("/").partition("/")
        return unquote(bucket), unquote(key)

    def _query(self, name: str) -> str:
        return parse_qs(urlsplit(self.path).query).get(name, [""])[0]

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _allowed(self) -> bool:
        bucket = unquote(urlsplit(self.path).path.split("/")[1])
        if self.command in self._objects.denied:
            details = "somebody@example.org does not have access to the Google Cloud Storage object."
            self._error(403, "AccessDenied", "Access denied.", details)
        elif bucket not in self._objects.buckets:
            self._error(404, "NoSuchBucket", "The specified bucket does not exist.")
        else:
            return True
        return False

    def _as_expected(self, bucket: str, key: str) -> bool:
        expected = self.headers.get("x-goog-if-generation-match")
        stored = self._objects.get(bucket, key)
        if expected is None or int(expected) == (0 if stored is None else stored.generation):
            return True
        self._error(412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold.")
        return False

    def _error(self, status: int, code: str, message: str, details: str = "") -> None:
        body = f"<Error><Code>{code}</Code><Message>{message}</Message><Details>{details}</Details></Error>"
        self._answer(status, body.replace("<Details></Details>", "").encode())

    def _list(self, bucket: str) -> None:
        prefix, delimiter = self._query("prefix"), self._query("delimiter")
        after = self._query("continuation-token") or self._query("start-after")
        found = [
            (key, stored)
            for key, stored in sorted(self._objects.buckets[bucket].items())
            if key.startswith(prefix) and key > after
        ]
        inner: set[str] = set()
        if delimiter:
            inner = {key[len(prefix) :].partition(delimiter)[0] for key, _ in found if delimiter in key[len(prefix) :]}
            found = [(key, stored) for key, stored in found if delimiter not in key[len(prefix) :]]
        page = found[: self._objects.page]
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(stored.data)}</Size><Generation>{stored.generation}</Generation>"
            f"<LastModified>{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(stored.modified_s))}</LastModified>"
            f"<ETag>{escape(stored.etag)}</ETag></Contents>"
            for key, stored in page
        )
        entries += "".join(
            f"<CommonPrefixes><Prefix>{escape(prefix + name + delimiter)}</Prefix></CommonPrefixes>"
            for name in sorted(inner)
        )
        if len(page) < len(found):
            entries += f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>"
        self._answer(200, f"<ListBucketResult>{entries}</ListBucketResult>".encode())


class ObjectServer:
    """A running server. `with ObjectServer(GoogleXml) as server:`; it ends with the block."""

    def __init__(self, handler: type[Files]) -> None:
        self.objects = Objects()
        self._server = _Server(("127.0.0.1", 0), handler)
        self._server.objects = self.objects
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> "ObjectServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
