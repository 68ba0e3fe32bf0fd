"""What `diagnose_job.py` does to itself: faults that live in a job's own code, each as large as it is told.

A fault takes a share of the loop's time. How much that is in seconds depends on the machine, so it is paid as a debt:
after a healthy part that took t, a fault of share s owes t s / (1 - s), and is done when its debt is as large as one of
it costs. What was paid is summed up and written to a file, and is what the diagnosis has to name. Faults that the job
cannot do to itself (quotas, full disks, slow links, a driver's counters) are in `diagnose_outside.py`.
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
    """share: of the time, that the fault takes. total_s: paid so far; file: where that is kept."""

    def __init__(self, share: float, file: Path) -> None:
        self._factor = share / (1 - share) if share else 0.0
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
        """Inside, the fault is."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.paid(time.perf_counter() - began)

    def paid(self, took_s: float) -> None:
        self._owed_s -= took_s
        self.total_s += took_s

    def pay(self, fault: Callable[[], object]) -> None:
        """Does the fault as often as is owed. One that is larger than its debt waits until half of it is owed."""
        while self._owed_s > self._unit_s / 2 and self._owed_s > 0:
            before = self.total_s
            with self.paying():
                fault()
            self._unit_s = self.total_s - before

    def write(self, *, least_s: float = 0.3, **facts: float) -> None:
        """Not more often than each least_s."""
        self.facts |= facts
        now = time.monotonic()
        if now - self._written_s >= least_s:
            self._written_s = now
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps({"injected_s": self.total_s, **self.facts}), encoding="utf-8")
            new.replace(self._file)


class SlowFiles:
    """Reads (or writes) of files whose path has $STALL_PATH in it take longer; `diagnose_outside.py` has the library
    that was loaded before."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._library.stalled_ns.restype = ctypes.c_longlong
        self._library.stall_each.argtypes = [ctypes.c_longlong]

    def each(self, stall_s: float) -> None:
        self._library.stall_each(int(stall_s * 1e9))

    def stalled_s(self) -> float:
        return float(self._library.stalled_ns()) / 1e9


def large_jpeg() -> bytes:
    """A picture with some texture, of which decoding takes a millisecond or two."""
    noise = Image.effect_noise((480, 360), 60).convert("RGB")
    target = io.BytesIO()
    noise.save(target, "JPEG", quality=90)
    return target.getvalue()


def decode_picture(encoded: bytes) -> Image.Image:
    return Image.open(io.BytesIO(encoded)).convert("RGB").resize((96, 96))


def encode_targets(boxes: list[tuple[float, float, float, float]]) -> int:
    """Intersections of all pairs of boxes, one at a time, as slow target encoders do it."""
    found = 0
    for left, top, right, bottom in boxes:
        for other in boxes:
            width = min(right, other[2]) - max(left, other[0])
            height = min(bottom, other[3]) - max(top, other[1])
            if width > 0 and height > 0:
                found += 1
    return found


class MetricsServer:
    """A service that takes the number of each step and answers late. Its process ends with this one."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            while heard := theirs.recv(64):
                time.sleep(float(heard))
                theirs.sendall(b"ok")
            os._exit(0)
        theirs.close()
        self._socket = ours

    def log_to_server(self, answer_after_s: float) -> None:
        self._socket.sendall(f"{answer_after_s:.6f}".encode())
        self._socket.recv(2)
