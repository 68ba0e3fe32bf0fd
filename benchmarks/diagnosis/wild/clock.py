"""The clock of a job: what it lost, in seconds, in `known.json` of the working directory."""

import atexit
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WRITE_EVERY_S = 0.25
"""A file that is written after each of many short stretches would cost as much as what is measured."""


class Lost:
    """Sums the lost seconds, and keeps the file up to date, also for a job that is killed."""

    def __init__(self) -> None:
        self.lost_s = 0.0
        self._path = Path("known.json").resolve()
        self._written_s = self._written_at = 0.0
        atexit.register(self._write)

    def add(self, seconds: float) -> None:
        self.lost_s += seconds
        if time.monotonic() - self._written_at >= WRITE_EVERY_S:
            self._write()

    def _write(self) -> None:
        if self.lost_s != self._written_s:
            self._path.write_text(json.dumps({"lost_s": round(self.lost_s, 3)}))
            self._written_s, self._written_at = self.lost_s, time.monotonic()

    @contextmanager
    def stretch(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(time.perf_counter() - began)
