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
from stoker.training.optim import OptimizerStep
from stoker.training.stability import StabilityMonitor
from stoker.training.start import EventLogger, TrainState

MAX_NAMED_IMAGES = 8
"""Pictures that an error names at most."""

MAX_ROLLBACKS = 2
"""A third and a ninth of the rate: what diverges there too is not cured by its rate. Our judgment."""

ROLLBACK_LR_DIVISOR = 3.0
"""Divides the rate at each setback. About half a decade, the usual grid of rates; our judgment."""


class StopRequest:
    """`requested` names the signal once one has come; `error` is why the training must end without saving; SIGUSR2
    only sets `trace_asked`: the next steps are to be kept as a Chrome trace."""

    requested_by: str | None = None
    error: StokerError | None = None
    trace_requested: bool = False

    def request(self, source: str) -> None:
        """As a signal does. From any thread."""
        self.requested_by = self.requested_by or source

    def fail(self, error: StokerError) -> None:
        """Ends the training with this error at its next step. From any thread."""
        self.error = error
        self.requested_by = self.requested_by or "an error"

    def check(self) -> None:
        """Raises Preempted before the first step, when there is nothing to save; or the error."""
        if self.error is not None:
            raise self.error
        if self.requested_by is not None:
            raise Preempted(
                f"Stopped by {self.requested_by} before the first step.", fix="the same command starts again"
            )


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """SIGTERM and SIGINT ask the loop to save and stop; a second SIGINT ends the process at once, as Ctrl-C does.
    SIGUSR2 asks for a trace.

    Repeated SIGTERMs change nothing: Slurm and torchrun each send one. Outside the main thread, where Python lets
    nobody handle signals, the flags are never set.
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
            raise KeyboardInterrupt("a second time; what was saved before is in the run")
        stop_request.requested_by = signal.Signals(signum).name

    previous_handlers = {
        signum: signal.signal(signum, handle) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
    }
    try:
        yield stop_request
    finally:
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)


def make_stop_error(state: TrainState, stop_request: StopRequest) -> StokerError:
    """The error of a run that a signal has stopped: Preempted, or StorageError where its state is not on the disk."""
    if state.writer.saved_step != state.step:
        return StorageError(
            f"Stopped by {stop_request.requested_by} at step {state.step:,}, and the state could not be saved.",
            location=state.folder.path,
            cause=state.writer.failure,
            fix="make room; the same command continues from the checkpoint before",
        )
    return Preempted(
        f"Stopped by {stop_request.requested_by} at step {state.step:,}; everything is saved.",
        location=state.folder.path,
        fix=f"the same command, or `stoker train --resume {state.folder.path}`, continues",
    )


def current_peak_lr(state: TrainState) -> float:
    """The peak of the rate after the setbacks so far."""
    return state.config.optim.lr / ROLLBACK_LR_DIVISOR**state.rollback_count


def make_stability_monitor(state: TrainState) -> StabilityMonitor:
    """What looks at the losses and gradients of the run at its present rate."""
    return StabilityMonitor(
        state.config.optim, peak_lr=current_peak_lr(state), fp16=state.config.run.precision == "fp16"
    )


def roll_back(state: TrainState, failed_at: int, lr: float, log_event: EventLogger) -> None:
    """Puts the job back into its last sound state, from which on the rate is a third.

    failed_at: the step, counted from 0, whose skip made too many in a row; rate: of the last step. Without a checkpoint
    it is the state of step 0. Where the run has diverged twice from the same checkpoint, it is the one before: the
    weights may have been spoilt before a gradient showed it. Raises DivergedError after SETBACKS times.
    """
    if state.rollback_count >= MAX_ROLLBACKS:
        raise make_divergence_error(state, failed_at, lr)
    state.writer.wait()
    run, config = state.folder.path, state.config
    rollback_step, count = _choose_rollback_step(state), state.rollback_count + 1
    lower_lr = current_peak_lr(state) / ROLLBACK_LR_DIVISOR
    log_event(
        "rolled_back",
        f"{config.optim.max_skipped_steps} steps in a row had gradients that are not finite (step {failed_at + 1:,}): "
        f"back to step {rollback_step:,}, and on from there at a third of the rate ({lower_lr:.3g})",
        failed_at=failed_at, rollback_step=rollback_step, count=count, lr=lower_lr, best_ap=state.best_ap,
    )  # fmt: skip
    state.rollback_count = count
    checkpoint.discard_checkpoints(run, after=rollback_step, rollback_count=count)
    loaded = checkpoint.load_newest(run, log_event)
    if loaded is None:
        model = start.build_initial_model(config, state.index, state.device, log_event)
        fresh_optimizer = OptimizerStep(model, config.optim, state.device, precision=config.run.precision)
        state.optimizer.load_state_dict(fresh_optimizer.state_dict(), fresh_optimizer.ema_model.state_dict())
    start.restore_state(state, loaded, log_event)
    state.writer.saved_step = -1 if loaded is None else loaded.step


def _choose_rollback_step(state: TrainState) -> int:
    """The step to go back to."""
    steps = checkpoint.healthy_steps(state.folder.path)
    used_steps = [event.data["rollback_step"] for event in start.read_rollbacks(state.folder.path)]
    if len(steps) > 1 and used_steps[-1:] == steps[:1]:
        return steps[1]
    return steps[0] if steps else 0


def make_divergence_error(state: TrainState, step: int, lr: float) -> DivergedError:
    """The error of a run whose last allowed step in a row, `step`, had gradients that are not finite, at `rate`."""
    batch_size = state.config.run.batch_size
    image_names = [
        state.index.display_source(image_index)
        for image_index in state.loader.image_indices_at(step * batch_size, batch_size)
    ]
    more = f" and {len(image_names) - MAX_NAMED_IMAGES} more" if len(image_names) > MAX_NAMED_IMAGES else ""
    healthy_weights = checkpoint.newest_healthy_weights(state.folder.path)
    restart = "" if healthy_weights is None else f"; it can start from --weights {healthy_weights}, which are sound"
    tried = (
        f", also at a {'third' if state.rollback_count == 1 else 'ninth'} of the rate" if state.rollback_count else ""
    )
    return DivergedError(
        f"{state.config.optim.max_skipped_steps} steps in a row had gradients that are not finite (step {step + 1:,}){tried}.",
        location=f"the pictures of that step: {', '.join(image_names[:MAX_NAMED_IMAGES])}{more}",
        cause=f"broken boxes in these pictures, or a learning rate that is too high (it was {lr:.3g})",
        fix=f"`stoker data check` for the boxes; a new run with --lr {current_peak_lr(state) / ROLLBACK_LR_DIVISOR:.2g}, --clip-grad-norm 1 or "
        f"--precision fp32{restart}",
    )
