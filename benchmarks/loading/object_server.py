"""The server of `storage.py` and `shard_loading.py`, a separate process: objects over a simulated link.

    python object_server.py {FOLDER | --size-bytes 110000} [--latency-ms 20] [--mb-per-s 200]
                            [--slow-fraction 0.02 --slow-ms 500]

It prints its port, answers GET and HEAD of /bucket/KEY (with ranges) and lists of objects as S3 does, and ends with its
standard input. The objects are the files of the folder, or any key is one of that size; all are in memory. A response
comes in pieces, for which all connections take turns; a client that reads slowly gets no more of them.
"""

import argparse
import asyncio
import contextlib
import random
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PIECE = 1 << 18
PIECE_S = 0.01
"""Time of the link that a piece takes at most, so that many connections of a slow one all get bytes, as they would."""
SLACK_S = 0.01
"""Time of the link that is not lost while the server itself is late."""
DATE = "Wed, 01 Jan 2025 00:00:00 GMT"
_RANGE = re.compile(rb"\r\n[Rr]ange: bytes=(\d+)-(\d*)")


class Link:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._latency_s, self._bytes_per_s = arguments.latency_ms / 1000, arguments.mb_per_s * 1e6
        self._slow_fraction, self._slow_s = arguments.slow_fraction, arguments.slow_ms / 1000
        self._random, self._free_at = random.Random(0), 0.0
        self.piece = max(1024, min(PIECE, int(self._bytes_per_s * PIECE_S))) if self._bytes_per_s else PIECE

    def latency_s(self) -> float:
        """Seconds to the first byte of a response."""
        is_slow = self._slow_fraction and self._random.random() < self._slow_fraction
        return self._latency_s + (self._slow_s if is_slow else 0.0)

    def reserve(self, now: float, size_bytes: int) -> float:
        """Seconds until a piece that is sent next has arrived."""
        if not self._bytes_per_s:
            return 0.0
        self._free_at = max(now - SLACK_S, self._free_at) + size_bytes / self._bytes_per_s
        return max(0.0, self._free_at - now)


class Connection(asyncio.Protocol):
    def __init__(self, objects: Mapping[str, bytes], link: Link) -> None:
        self._objects, self._link, self._loop = objects, link, asyncio.get_running_loop()
        self._received = b""
        self._can_write = asyncio.Event()
        self._can_write.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=PIECE)
        self._requests: asyncio.Queue[bytes] = asyncio.Queue()
        self._task = self._loop.create_task(self._serve())

    def connection_lost(self, _error: Exception | None) -> None:
        self._task.cancel()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            self._requests.put_nowait(self._received[:end])
            self._received = self._received[end + 4 :]

    async def _serve(self) -> None:
        while True:
            request = await self._requests.get()
            head, body = self._answer(request)
            await asyncio.sleep(self._link.latency_s())
            self._transport.write(head)
            for at in range(0, len(body), self._link.piece):
                piece = body[at : at + self._link.piece]
                await self._can_write.wait()
                wait_s = self._link.reserve(self._loop.time(), len(piece))
                if wait_s:
                    await asyncio.sleep(wait_s)
                if self._transport.is_closing():  # a hedge that lost is cancelled
                    return
                self._transport.write(piece)

    def _answer(self, request: bytes) -> tuple[bytes, memoryview]:
        method, target, _ = request.split(b"\r\n", 1)[0].decode().split(" ", 2)
        address = urlsplit(target)
        key = unquote(address.path).lstrip("/").partition("/")[2]
        status, extra, body = "200 OK", "", memoryview(b"")
        if not key:
            body = memoryview(self._list(parse_qs(address.query).get("prefix", [""])[0]))
        elif (content := self._find(key)) is None:
            status, body = "404 Not Found", memoryview(b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            body, size = memoryview(content), len(content)
            if (asked := _RANGE.search(request)) is not None:
                first, last = int(asked[1]), min(int(asked[2] or size), size - 1)
                status, extra = "206 Partial Content", f"Content-Range: bytes {first}-{last}/{size}\r\n"
                body = body[first : last + 1]
        head = (
            f'HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nETag: "x"\r\nLast-Modified: {DATE}\r\n'
            f"Accept-Ranges: bytes\r\n{extra}\r\n"
        )
        return head.encode(), memoryview(b"") if method == "HEAD" else body

    def _find(self, key: str) -> bytes | None:
        try:
            return self._objects[key]
        except KeyError:
            return None

    def _list(self, prefix: str) -> bytes:
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(content)}</Size><ETag>x</ETag>"
            "<LastModified>2025-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, content in sorted(self._objects.items())
            if key.startswith(prefix)
        )
        return f"<ListBucketResult>{entries}</ListBucketResult>".encode()


async def serve(arguments: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    link = Link(arguments)
    objects: Mapping[str, bytes]
    if arguments.folder is None:
        body = random.Random(0).randbytes(arguments.size_bytes)
        objects = defaultdict(lambda: body)
    else:
        files = (path for path in sorted(arguments.folder.rglob("*")) if path.is_file())
        objects = {path.relative_to(arguments.folder).as_posix(): path.read_bytes() for path in files}
    server = await loop.create_server(lambda: Connection(objects, link), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


@contextlib.contextmanager
def running_server(*arguments: str) -> Iterator[tuple[int, int]]:
    """Port and process id of a server with these arguments, which ends with the block."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline()), process.pid
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--size-bytes", type=int, default=0)
    for name in ("latency-ms", "mb-per-s", "slow-fraction", "slow-ms"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
