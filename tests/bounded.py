"""Bounds for code that reads hostile files: a defect is a failure instead of a full memory or a test that hangs."""

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType


@contextlib.contextmanager
def bounded(*, seconds: int = 60, megabytes: int = 1024) -> Iterator[None]:
    """The block may take so much more memory (heap, anonymous mappings) and CPU time of the process; else MemoryError
    or TimeoutError. One that waits is stopped after 10 times as long by the clock, in case the machine is busy.

    In the main thread only.
    """

    def stop(number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {seconds} CPU-seconds" if number == signal.SIGPROF else "it waits")

    pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    previous = {number: signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGPROF)}
    resource.setrlimit(resource.RLIMIT_DATA, (pages * resource.getpagesize() + (megabytes << 20), hard))
    signal.alarm(10 * seconds)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
