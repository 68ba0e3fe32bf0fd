"""What a training does that cannot simply go on. A signal only sets a flag: the loop saves at the next step and leaves
with exit code 75. Gradients that stay non-finite send it back to a sound state, and on from there at a third of the
rate, twice; then it ends with exit code 6, with the pictures and the way on named.

A setback is the line of kind `slowed` in events.jsonl, which is written before anything is undone. So a run that is
killed at any moment either diverges once more at the same step, or continues from the state that the line names.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from stoker.errors import DivergedError, Preempted, StokerError, StorageError
from stoker.training import checkpoint, start
from stoker.training.optim import Stepper
from stoker.training.stability import Watch
from stoker.training.start import Job, Say

NAMED = 8
"""Pictures that an error names at most."""

SETBACKS = 2
"""A third and a ninth of the rate: what diverges there too is not cured by its rate. Our judgment."""

SLOWDOWN = 3.0
"""Divides the rate at each setback. About half a decade, the usual grid of rates; our judgment."""


class Stop:
    """`requested` names the signal once one has come; `error` is why the training must end without saving; SIGUSR2
    only sets `trace_asked`: the next steps are to be kept as a Chrome trace."""

    requested: str | None = None
    error: StokerError | None = None
    trace_asked: bool = False

    def ask(self, who: str) -> None:
        """As a signal does. From any thread."""
        self.requested = self.requested or who

    def fail(self, error: StokerError) -> None:
        """Ends the training with this error at its next step. From any thread."""
        self.error = error
        self.requested = self.requested or "an error"

    def check(self) -> None:
        """Raises Preempted before the first step, when there is nothing to save; or the error."""
        if self.error is not None:
            raise self.error
        if self.requested is not None:
            raise Preempted(f"Stopped by {self.requested} before the first step.", fix="the same command starts again")


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """SIGTERM and SIGINT ask the loop to save and stop; a second SIGINT ends the process at once, as Ctrl-C does.
    SIGUSR2 asks for a trace.

    Repeated SIGTERMs change nothing: Slurm and torchrun each send one. Outside the main thread, where Python lets
    nobody handle signals, the flags are never set.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, _: FrameType | None) -> None:
        if number == signal.SIGUSR2:
            stop.trace_asked = True
            return
        if number == signal.SIGINT and stop.requested == "SIGINT":
            raise KeyboardInterrupt("a second time; what was saved before is in the run")
        stop.requested = signal.Signals(number).name

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)}
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


def peak_rate(job: Job) -> float:
    """The peak of the rate after the setbacks so far."""
    return job.config.optim.rate / SLOWDOWN**job.slowed


def watch_of(job: Job) -> Watch:
    """What looks at the losses and gradients of the run at its present rate."""
    return Watch(job.config.optim, peak=peak_rate(job), fp16=job.config.run.precision == "fp16")


def go_back(job: Job, failed_at: int, rate: float, say: Say) -> None:
    """Puts the job back into its last sound state, from which on the rate is a third.

    failed_at: the step, counted from 0, whose skip made too many in a row; rate: of the last step. Without a checkpoint
    it is the state of step 0. Where the run has diverged twice from the same checkpoint, it is the one before: the
    weights may have been spoilt before a gradient showed it. Raises DivergedError after SETBACKS times.
    """
    if job.slowed >= SETBACKS:
        raise diverged(job, failed_at, rate)
    job.writer.wait()
    run, config = job.folder.path, job.config
    back_to, count = _way_back(job), job.slowed + 1
    lower = peak_rate(job) / SLOWDOWN
    say(
        "slowed",
        f"{config.optim.max_skipped} steps in a row had gradients that are not finite (step {failed_at + 1:,}): "
        f"back to step {back_to:,}, and on from there at a third of the rate ({lower:.3g})",
        failed_at=failed_at, back_to=back_to, count=count, rate=lower, best_ap=job.best_ap,
    )  # fmt: skip
    job.slowed = count
    checkpoint.discard(run, after=back_to, slowed=count)
    loaded = checkpoint.load_newest(run, say)
    if loaded is None:
        model = start.start_model(config, job.index, job.device, say)
        fresh = Stepper(model, config.optim, job.device, precision=config.run.precision)
        job.stepper.load_state_dict(fresh.state_dict(), fresh.averaged.state_dict())
    start.restore(job, loaded, say)
    job.writer.saved_step = -1 if loaded is None else loaded.step


def _way_back(job: Job) -> int:
    """The step to go back to."""
    steps = checkpoint.sound_steps(job.folder.path)
    used = [event.data["back_to"] for event in start.read_setbacks(job.folder.path)]
    if len(steps) > 1 and used[-1:] == steps[:1]:
        return steps[1]
    return steps[0] if steps else 0


def diverged(job: Job, step: int, rate: float) -> DivergedError:
    """The error of a run whose last allowed step in a row, `step`, had gradients that are not finite, at `rate`."""
    batch = job.config.run.batch
    names = [job.index.place(row) for row in job.loader.rows_of(step * batch, batch)]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    sound = checkpoint.newest_weights(job.folder.path)
    restart = "" if sound is None else f"; it can start from --weights {sound}, which are sound"
    tried = f", also at a {'third' if job.slowed == 1 else 'ninth'} of the rate" if job.slowed else ""
    return DivergedError(
        f"{job.config.optim.max_skipped} steps in a row had gradients that are not finite (step {step + 1:,}){tried}.",
        place=f"the pictures of that step: {', '.join(names[:NAMED])}{more}",
        cause=f"broken boxes in these pictures, or a learning rate that is too high (it was {rate:.3g})",
        fix=f"`stoker data check` for the boxes; a new run with --rate {peak_rate(job) / SLOWDOWN:.2g}, --clip 1 or "
        f"--precision fp32{restart}",
    )
