"""Faults in the code of `diagnose_job.py` itself, each of a given size.

A fault takes a fraction of the loop's time. Its seconds depend on the machine, so it is paid as a debt: after a healthy
part of t seconds, a fault of fraction s owes t s / (1 - s), and is executed when the debt is as large as one execution.
The sum is written to a file; the diagnosis has to find it. Faults outside the job (quotas, full disks, slow links, a
driver's counters) are in `diagnose_outside.py`.
"""

import contextlib
import ctypes
import io
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from PIL import Image


class Debt:
    """fraction: of the time that the fault takes. total_s: paid so far, also written to `file`."""

    def __init__(self, fraction: float, file: Path) -> None:
        self._factor = fraction / (1 - fraction) if fraction else 0.0
        self._file = file
        self._owed_s = self._unit_s = 0.0
        self.total_s = 0.0
        self.facts: dict[str, float] = {}
        self._written_s = 0.0

    def owe(self, healthy_s: float) -> None:
        self._owed_s += healthy_s * self._factor

    @property
    def owed_s(self) -> float:
        return self._owed_s

    @contextlib.contextmanager
    def paying(self) -> Iterator[None]:
        """The time inside is the fault's."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.paid(time.perf_counter() - began)

    def paid(self, took_s: float) -> None:
        self._owed_s -= took_s
        self.total_s += took_s

    def pay(self, fault: Callable[[], object]) -> None:
        """Executes the fault as often as is owed. A fault larger than its debt waits until half of it is owed."""
        while self._owed_s > self._unit_s / 2 and self._owed_s > 0:
            before = self.total_s
            with self.paying():
                fault()
            self._unit_s = self.total_s - before

    def write(self, *, min_interval_s: float = 0.3, **facts: float) -> None:
        """Writes at most every min_interval_s."""
        self.facts |= facts
        now = time.monotonic()
        if now - self._written_s >= min_interval_s:
            self._written_s = now
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps({"injected_s": self.total_s, **self.facts}), encoding="utf-8")
            new.replace(self._file)


class SlowFiles:
    """Slows down reads and writes of files whose path contains $STALL_PATH; `diagnose_outside.py` preloads the
    library."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._library.stalled_ns.restype = ctypes.c_longlong
        self._library.stall_each.argtypes = [ctypes.c_longlong]

    def each(self, stall_s: float) -> None:
        self._library.stall_each(int(stall_s * 1e9))

    def stalled_s(self) -> float:
        return float(self._library.stalled_ns()) / 1e9


def large_jpeg() -> bytes:
    """An image with texture, which takes one or two milliseconds to decode."""
    noise = Image.effect_noise((480, 360), 60).convert("RGB")
    target = io.BytesIO()
    noise.save(target, "JPEG", quality=90)
    return target.getvalue()


def decode_image(encoded: bytes) -> Image.Image:
    return Image.open(io.BytesIO(encoded)).convert("RGB").resize((96, 96))


def encode_targets(boxes: list[tuple[float, float, float, float]]) -> int:
    """Intersections of all pairs of boxes, one at a time, as in a slow target encoder."""
    found = 0
    for left, top, right, bottom in boxes:
        for other in boxes:
            width = min(right, other[2]) - max(left, other[0])
            height = min(bottom, other[3]) - max(top, other[1])
            if width > 0 and height > 0:
                found += 1
    return found


class MetricsServer:
    """A service that is called in each step and answers late. Its process ends with this one."""

    def __init__(self) -> None:
        local, remote = socket.socketpair()
        if os.fork() == 0:
            local.close()
            while request := remote.recv(64):
                time.sleep(float(request))
                remote.sendall(b"ok")
            os._exit(0)
        remote.close()
        self._socket = local

    def log_to_server(self, answer_after_s: float) -> None:
        self._socket.sendall(f"{answer_after_s:.6f}".encode())
        self._socket.recv(2)
