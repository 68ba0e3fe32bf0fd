"""A proxy before a test's server that is as bad as a network and a busy service can be, by seed and by request count.

It reads HTTP as far as it must: where a request ends and what it asks for. A request's fate depends on its number and
the seed alone, whatever the timing; which request gets which number is up to the client.
"""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

Fault = Literal["503", "429", "500", "400", "reset", "truncate", "hang", "slow", "lose"]
"""truncate: half of the body, then the end. hang: no answer, ever. slow: an answer `slow_s` late. lose: the server has
done it, and the answer never comes."""
CHUNK = 64 * 1024


@dataclass(frozen=True)
class Conditions:
    """latency_s: before each answer. bytes_per_s: of all answers together. faults: the fraction of requests that each
    meets, drawn by `seed`. plan: which fault the n-th request meets (from 0), in served of the draw."""

    latency_s: float = 0.0
    bytes_per_s: float | None = None
    faults: dict[Fault, float] = field(default_factory=dict)
    slow_s: float = 0.5
    seed: int = 0
    plan: Callable[[int, str, str], Fault | None] | None = None

    def fault(self, number: int, method: str, path: str) -> Fault | None:
        if self.plan is not None:
            return self.plan(number, method, path)
        value = random.Random(f"{self.seed}/{number}").random()
        for fault, fraction in self.faults.items():
            if value < fraction:
                return fault
            value -= fraction
        return None


@dataclass(frozen=True)
class RecordedRequest:
    method: str
    path: str
    fault: Fault | None


class Proxy:
    """`with Proxy(server.url, Conditions(…)) as proxy:`, then `proxy.url`. `conditions` may be set while it runs."""

    def __init__(self, upstream: str, conditions: Conditions | None = None) -> None:
        self.conditions = conditions or Conditions()
        self.requests: list[RecordedRequest] = []
        """Every request, in the order in which they came."""
        self.in_flight = 0
        self.peak_in_flight = 0
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "", parts.port or 80)
        self._free_at = 0.0
        self._loop = asyncio.new_event_loop()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "Proxy":
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, sock=self._socket, limit=1 << 20)

    async def _end(self) -> None:
        self._server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        # asyncio does that by itself only for sockets of its own making; else the client's kernel adds 40 ms to a body.
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while head := await _head(reader):
                method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
                body = await reader.readexactly(_length(head))
                fault = self.conditions.fault(len(self.requests), method, path)
                self.requests.append(RecordedRequest(method, path, fault))
                self.in_flight += 1
                self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
                try:
                    up = up or await asyncio.open_connection(*self._upstream, limit=1 << 20)
                    if not await self._answer(writer, up, head + body, method, fault):
                        return
                finally:
                    self.in_flight -= 1
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client went away, as clients do that cancel; or the proxy ends
        finally:
            for end in (writer, *(up[1:] if up else ())):
                end.close()

    async def _answer(
        self,
        writer: asyncio.StreamWriter,
        up: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        request: bytes,
        method: str,
        fault: Fault | None,
    ) -> bool:
        """Whether the connection can serve another request."""
        conditions = self.conditions
        await asyncio.sleep(conditions.latency_s + (conditions.slow_s if fault == "slow" else 0.0))
        if fault == "reset":
            linger = struct.pack("ii", 1, 0)  # closing now sends RST
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
            return False
        if fault == "hang":
            await asyncio.Event().wait()
        if fault in ("503", "429", "500", "400"):
            code = {"503": "SlowDown", "429": "TooManyRequests", "500": "InternalError", "400": "BadRequest"}[fault]
            xml = f"<Error><Code>{code}</Code></Error>".encode() if method != "HEAD" else b""
            writer.write(f"HTTP/1.1 {fault} X\r\nContent-Length: {len(xml)}\r\n\r\n".encode() + xml)
            await writer.drain()
            return True
        up[1].write(request)
        head = await _head(up[0])
        left = 0 if method == "HEAD" or b" 204 " in head[:16] or b" 304 " in head[:16] else _length(head)
        if fault == "lose":
            await up[0].readexactly(left)
            return False
        writer.write(head)
        if fault == "truncate":
            writer.write((await up[0].readexactly(left))[: left // 2])
            await writer.drain()
            return False
        while left:
            chunk = await up[0].read(min(left, CHUNK))
            if not chunk:
                return False
            left -= len(chunk)
            await self._link(len(chunk))
            writer.write(chunk)
            await writer.drain()
        return True

    async def _link(self, size_bytes: int) -> None:
        """Waits until the shared link has carried so much more."""
        rate = self.conditions.bytes_per_s
        if rate is not None:
            now = self._loop.time()
            self._free_at = max(now, self._free_at) + size_bytes / rate
            await asyncio.sleep(self._free_at - now)


async def _head(reader: asyncio.StreamReader) -> bytes:
    """A request's or an answer's lines up to the empty one; empty where the connection ended."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        return await reader.readuntil(b"\r\n\r\n")
    return b""


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
        if name.lower() == b"transfer-encoding":
            raise NotImplementedError("the proxy reads bodies with a Content-Length")
    return 0
