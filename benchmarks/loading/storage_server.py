"""The server of `storage.py`, a separate process: objects of one size from memory, over a simulated slow link.

`python storage_server.py --size-bytes 110000 [--latency-ms 20] [--mb-per-s 50] [--slow-fraction 0.02 --slow-ms 500]`
prints its port, answers any GET (with ranges) as S3 does, and ends with its standard input. It parses as little as
possible, so that the client is the bottleneck on the same two cores.
"""

import argparse
import asyncio
import random
import re
import sys

_RANGE = re.compile(rb"\r\n[Rr]ange: bytes=(\d+)-(\d*)")
HEAD = (
    'HTTP/1.1 {status}\r\nContent-Length: {length}\r\nETag: "{tag}"\r\n'
    "Last-Modified: Wed, 01 Jan 2025 00:00:00 GMT\r\n{extra}\r\n"
)


class Link:
    """The time at which the next response ends, over a link that all connections share."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.body = random.Random(0).randbytes(arguments.size_bytes)
        self._latency_s = arguments.latency_ms / 1000
        self._bytes_per_s = arguments.mb_per_s * 1e6
        self._slow_fraction, self._slow_s = arguments.slow_fraction, arguments.slow_ms / 1000
        self._rng = random.Random(arguments.seed)
        self._free_at = 0.0

    def wait_s(self, now: float, size_bytes: int) -> float:
        """Time from the request to the last byte of its response."""
        ready = now + self._latency_s
        if self._slow_fraction and self._rng.random() < self._slow_fraction:
            return self._latency_s + self._slow_s
        if not self._bytes_per_s:
            return self._latency_s
        self._free_at = max(ready, self._free_at) + size_bytes / self._bytes_per_s
        return self._free_at - now


class Connection(asyncio.Protocol):
    def __init__(self, link: Link) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            request, self._received = self._received[:end], self._received[end + 4 :]
            body = self._link.body
            asked = _RANGE.search(request)
            if asked is None:
                head = HEAD.format(status="200 OK", length=len(body), tag="x", extra="")
            else:
                first, last = int(asked[1]), min(int(asked[2] or len(body)), len(body) - 1)
                extra = f"Content-Range: bytes {first}-{last}/{len(body)}\r\n"
                body = body[first : last + 1]
                head = HEAD.format(status="206 Partial Content", length=len(body), tag="x", extra=extra)
            if request.startswith(b"HEAD "):
                body = b""
            wait_s = self._link.wait_s(self._loop.time(), len(body))
            if wait_s:
                self._loop.call_later(wait_s, self._send, head.encode(), body)
            else:
                self._send(head.encode(), body)

    def _send(self, head: bytes, body: bytes) -> None:
        if not self._transport.is_closing():  # a hedge that lost is cancelled
            self._transport.writelines((head, body))


async def serve(arguments: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    link = Link(arguments)
    server = await loop.create_server(lambda: Connection(link), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-bytes", type=int, required=True)
    for name in ("latency-ms", "mb-per-s", "slow-fraction", "slow-ms"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
