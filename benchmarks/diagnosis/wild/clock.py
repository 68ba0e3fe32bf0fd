"""The clock of a job: what it lost, in seconds, in `known.json` of the working directory."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Lost:
    """Sums the lost seconds, and keeps the file up to date, also for a job that is killed."""

    def __init__(self) -> None:
        self.lost_s = 0.0
        self._path = Path("known.json").resolve()

    def add(self, seconds: float) -> None:
        self.lost_s += seconds
        self._path.write_text(json.dumps({"lost_s": round(self.lost_s, 3)}))

    @contextmanager
    def stretch(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(time.perf_counter() - began)
