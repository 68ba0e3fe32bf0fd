"""How a training ends before its end: told to stop by a signal, which only sets a flag, so that the loop saves at the
next step and leaves with exit code 75; or diverged, with the pictures and the way on named.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from stoker.errors import DivergedError, Preempted, StokerError, StorageError
from stoker.training.checkpoint import newest_weights
from stoker.training.start import Job

NAMED = 8
"""Pictures that an error names at most."""


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
            raise KeyboardInterrupt("a second time; what was saved before is in the run")
        stop.requested = signal.Signals(number).name

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stopped(job: Job, stop: Stop) -> StokerError:
    """The error of a run that a signal has stopped: Preempted, or StorageError where its state is not on the disk."""
    if job.writer.saved_step != job.step:
        return StorageError(
            f"Stopped by {stop.requested} at step {job.step:,}, and the state could not be saved.",
            place=job.folder.path,
            cause=job.writer.failed,
            fix="make room; the same command continues from the checkpoint before",
        )
    return Preempted(
        f"Stopped by {stop.requested} at step {job.step:,}; everything is saved.",
        place=job.folder.path,
        fix=f"the same command, or `stoker train --resume {job.folder.path}`, continues",
    )


def diverged(job: Job, step: int, rate: float) -> DivergedError:
    """The error of a run whose last allowed step in a row, `step`, had gradients that are not finite, at `rate`."""
    batch = job.config.run.batch
    names = [str(job.index.path(row)) for row in job.loader.rows_of(step * batch, batch)]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    sound = newest_weights(job.folder.path)
    restart = "" if sound is None else f"; it can start from --weights {sound}, which are sound"
    return DivergedError(
        f"{job.config.optim.max_skipped} steps in a row had gradients that are not finite (step {step + 1:,}).",
        place=f"the pictures of that step: {', '.join(names[:NAMED])}{more}",
        cause=f"a learning rate that is too high (it was {rate:.3g}), or broken boxes in these pictures",
        fix=f"a new run with --rate {job.config.optim.rate / 3:.2g}, --clip 1 or --precision fp32{restart}",
    )
