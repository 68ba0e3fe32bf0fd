"""Being told to stop: a signal only sets a flag, and the loop saves at the next step and leaves with exit code 75."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from stoker.errors import Preempted


class Stop:
    """`requested` names the signal once one has come."""

    requested: str | None = None

    def check(self) -> None:
        """Raises Preempted before the first step, when there is nothing to save."""
        if self.requested is not None:
            raise Preempted(f"Stopped by {self.requested} before the first step.", fix="the same command starts again")


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """SIGTERM and SIGINT ask the loop to save and stop; a second SIGINT ends the process at once, as Ctrl-C does.

    Repeated SIGTERMs change nothing: Slurm and torchrun each send one. Outside the main thread, where Python lets
    nobody handle signals, the flag is never set.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and stop.requested == "SIGINT":
            raise KeyboardInterrupt
        stop.requested = signal.Signals(number).name

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
