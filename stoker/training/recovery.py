"""Signals and divergence: save and exit, or roll back.

A signal only sets a flag: the loop saves at the next step and exits with code 75. If gradients stay non-finite, the run
rolls back to its last healthy checkpoint and continues at a third of the learning rate. After two rollbacks it ends
with exit code 6 and names the images of the step. `stability.py` judges losses and rates; it only reports.

A rollback is the event `rolled_back`, written before anything is undone. So a run that is killed at any moment either
diverges again at the same step, or continues from the checkpoint that the event names.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

from stoker.errors import DivergedError, Preempted, StokerError, StorageError
from stoker.hardware.device import Device
from stoker.training import checkpoint
from stoker.training.optim import OptimizerStep
from stoker.training.stability import StabilityMonitor
from stoker.training.start import build_initial_model
from stoker.training.state import EventLogger, TrainSetup, read_rollbacks, restore_state

MAX_NAMED_IMAGES = 8
"""Images that an error names at most."""

MAX_ROLLBACKS = 2
"""If training diverges at a third and at a ninth of the learning rate too, a lower one does not help. A heuristic."""

ROLLBACK_LR_DIVISOR = 3.0
"""Divides the learning rate at each rollback: about half a decade, the usual grid of learning rates. A heuristic."""


class StopRequest:
    """Flags that signals and other threads set and that the loop reads after each step."""

    requested_by: str | None = None
    """The signal that asked the training to stop."""
    error: StokerError | None = None
    """Why the training must end without saving."""
    grace_s: float | None = None
    """Seconds after the request in which the machine is still there, if a notice states them."""
    trace_requested: bool = False
    """After SIGUSR2: keep the next steps as a Chrome trace."""

    def request(self, source: str, *, grace_s: float | None = None) -> None:
        """Asks for a stop, as a signal does. Callable from any thread."""
        if self.requested_by is None:
            self.grace_s, self.requested_by = grace_s, source

    def fail(self, error: StokerError) -> None:
        """Ends the training with this error at its next step. Callable from any thread."""
        self.error = error
        self.requested_by = self.requested_by or "an error"

    def check(self) -> None:
        """Raises Preempted or the error if a stop was requested. For the time before the first step."""
        if self.error is not None:
            raise self.error
        if self.requested_by is not None:
            raise Preempted(
                f"Stopped by {self.requested_by} before the first step.", fix="the same command starts again"
            )


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """SIGTERM, SIGUSR1 and SIGINT ask the loop to save and stop; a second SIGINT ends the process at once, as Ctrl-C
    does. SIGUSR2 asks for a trace.

    Repeated SIGTERMs change nothing: Slurm and torchrun each send one. SIGUSR1 is what a batch script lets Slurm send
    before the time limit (`#SBATCH --signal=B:USR1@60`). Outside the main thread Python does not allow
    signal handlers, so the flags are never set there.
    """
    stop_request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop_request
        return

    def handle(signum: int, _: FrameType | None) -> None:
        if signum == signal.SIGUSR2:
            stop_request.trace_requested = True
            return
        if signum == signal.SIGINT and stop_request.requested_by == "SIGINT":
            raise KeyboardInterrupt("a second time; earlier checkpoints are in the run")
        stop_request.requested_by = signal.Signals(signum).name

    previous_handlers = {
        signum: signal.signal(signum, handle)
        for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2)
    }
    try:
        yield stop_request
    finally:
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)


def make_stop_error(setup: TrainSetup, stop_request: StopRequest) -> StokerError:
    """The error of a run that a signal stopped: Preempted, or StorageError if its state could not be saved."""
    step, run = setup.state.step, setup.folder.path
    if setup.writer.saved_step != step:
        return StorageError(
            f"Stopped by {stop_request.requested_by} at step {step:,}, and the state could not be saved.",
            location=run,
            cause=setup.writer.failure,
            fix="make room; the same command continues from the checkpoint before",
        )
    return Preempted(
        f"Stopped by {stop_request.requested_by} at step {step:,}; everything is saved.",
        location=run,
        fix=f"the same command, or `stoker train --resume {run}`, continues",
    )


def current_peak_lr(setup: TrainSetup) -> float:
    """Peak learning rate after the rollbacks so far."""
    return setup.config.optim.lr / ROLLBACK_LR_DIVISOR**setup.state.rollback_count


def make_stability_monitor(setup: TrainSetup) -> StabilityMonitor:
    """Judges the losses and gradients of the run at its current learning rate."""
    is_fp16 = setup.config.run.precision == "fp16"
    return StabilityMonitor(setup.config.optim, peak_lr=current_peak_lr(setup), fp16=is_fp16)


def roll_back(setup: TrainSetup, failed_at: int, lr: float, log_event: EventLogger) -> None:
    """Restores the last healthy state; from there the learning rate is a third.

    failed_at: the step, counted from 0, at which the limit of skipped steps was reached; lr: of the last step. Without
    a checkpoint it restores the state of step 0. If the run diverged twice from the same checkpoint, it takes the one
    before: the weights may have been damaged before a gradient showed it. Raises DivergedError after MAX_ROLLBACKS.
    """
    state, config, run = setup.state, setup.config, setup.folder.path
    if state.rollback_count >= MAX_ROLLBACKS:
        raise make_divergence_error(setup, failed_at, lr)
    setup.writer.wait()
    rollback_step, count = _choose_rollback_step(run), state.rollback_count + 1
    lower_lr = current_peak_lr(setup) / ROLLBACK_LR_DIVISOR
    log_event(
        "rolled_back",
        f"{config.optim.max_skipped_steps} steps in a row had gradients that are not finite (step {failed_at + 1:,}): "
        f"rolled back to step {rollback_step:,}, continuing at a third of the learning rate ({lower_lr:.3g})",
        failed_at=failed_at,
        rollback_step=rollback_step,
        count=count,
        lr=lower_lr,
        best_ap=state.best_ap,
    )
    state.rollback_count = count
    checkpoint.discard_checkpoints(run, after=rollback_step, rollback_count=count)
    loaded = checkpoint.load_newest(run, log_event)
    if loaded is None:
        device = setup.device if setup.optimizer.sharding is None else Device(torch.device("cpu"))
        model = build_initial_model(config, setup.index, device, log_event)
        initial = OptimizerStep(model, config.optim, device, precision=config.run.precision)
        setup.optimizer.load_state_dict(initial.state_dict(), initial.ema_model.state_dict())
    restore_state(setup, loaded, log_event)
    setup.writer.saved_step = -1 if loaded is None else loaded.step


def _choose_rollback_step(run: Path) -> int:
    steps = checkpoint.healthy_steps(run)
    used_steps = [event.data["rollback_step"] for event in read_rollbacks(run)]
    if len(steps) > 1 and used_steps[-1:] == steps[:1]:
        return steps[1]
    return steps[0] if steps else 0


def make_divergence_error(setup: TrainSetup, step: int, lr: float) -> DivergedError:
    """The error of a run whose gradients stayed non-finite up to `step`, at the learning rate `lr`."""
    rollbacks, batch_size = setup.state.rollback_count, setup.config.run.batch_size
    image_names = [
        setup.index.display_source(image_index)
        for image_index in setup.loader.image_indices_at(step * batch_size, batch_size)
    ]
    more = f" and {len(image_names) - MAX_NAMED_IMAGES} more" if len(image_names) > MAX_NAMED_IMAGES else ""
    healthy_weights = checkpoint.newest_healthy_weights(setup.folder.path)
    restart = "" if healthy_weights is None else f"; it can start from --weights {healthy_weights}, which are healthy"
    tried = f", also at a {'third' if rollbacks == 1 else 'ninth'} of the learning rate" if rollbacks else ""
    lower_lr = current_peak_lr(setup) / ROLLBACK_LR_DIVISOR
    return DivergedError(
        f"{setup.config.optim.max_skipped_steps} steps in a row had gradients that are not finite "
        f"(step {step + 1:,}){tried}.",
        location=f"the images of that step: {', '.join(image_names[:MAX_NAMED_IMAGES])}{more}",
        cause=f"broken boxes in these images, or a learning rate that is too high (it was {lr:.3g})",
        fix=f"`stoker data check` for the boxes; a new run with --lr {lower_lr:.2g}, --clip-grad-norm 1 or "
        f"--precision fp32{restart}",
    )
