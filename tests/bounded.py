"""Bounds for code that reads hostile files: a defect is a failure instead of a full memory or a test that hangs."""

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType


@contextlib.contextmanager
def bounded(*, seconds: int = 60, megabytes: int = 1024) -> Iterator[None]:
    """The block may take so much more memory (heap, anonymous mappings) and time; else MemoryError or TimeoutError.

    In the main thread only.
    """

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"still running after {seconds} s")

    pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    previous = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_DATA, (pages * resource.getpagesize() + (megabytes << 20), hard))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
