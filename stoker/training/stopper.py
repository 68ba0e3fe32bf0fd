"""What ends a training from outside: signals, notices, the time limit of a job, a store that is lost.

A signal or another thread only sets a flag (`StopRequest`). `Stopper` looks at it after each step, between the batches
of an evaluation and while the training waits for metrics, and raises `Stopping` there: the loop then saves the state
and ends with exit code 75. Several ranks stop after the same step.
"""

import contextlib
import math
import signal
import time
from collections.abc import Iterator
from types import FrameType

from stoker.errors import Preempted, StokerError
from stoker.training.notices import time_limit_s
from stoker.training.out_of_memory import HostMemoryGuard
from stoker.training.parallel import Attempt
from stoker.training.supervisor import handling_signals

MIN_TIME_LIMIT_MARGIN_S = 60.0
"""How long before a time limit the last save begins, or three of the longest saves: as in the signal that batch scripts
usually ask Slurm for."""


class Stopping(Exception):
    """The training is to save its state and end. Raised by `Stopper`, handled by the loop."""


class StopRequest:
    """Flags that signals and other threads set."""

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

    def handle(signum: int, _: FrameType | None) -> None:
        if signum == signal.SIGUSR2:
            stop_request.trace_requested = True
            return
        if signum == signal.SIGINT and stop_request.requested_by == "SIGINT":
            raise KeyboardInterrupt("a second time; earlier checkpoints are in the run")
        stop_request.requested_by = signal.Signals(signum).name

    with handling_signals(("SIGTERM", "SIGUSR1", "SIGINT", "SIGUSR2"), handle):
        yield stop_request


class Stopper:
    """Raises `Stopping` where a training that was asked to stop can do so."""

    def __init__(self, attempt: Attempt, request: StopRequest, memory_guard: HostMemoryGuard) -> None:
        self.request, self._parallel = request, attempt.parallel
        self._hang_detector, self._tracer = attempt.hang_detector, attempt.tracer
        self._memory_guard, self._writer = memory_guard, attempt.setup.writer
        limit_s = time_limit_s()
        self._time_limit_at_s = math.inf if limit_s is None else time.perf_counter() + limit_s

    @property
    def is_asked(self) -> bool:
        """Whether this process was asked to stop."""
        return self.request.requested_by is not None

    def after_step(self) -> None:
        """Raises `Stopping` if the training was asked to stop; after SIGUSR2 the next steps are traced."""
        self._look_at_requests()
        if self._parallel.stops(self.is_asked):
            raise Stopping

    def check(self) -> None:
        """The same while this process waits for the metrics of an evaluation."""
        self._look_at_requests()
        if self._parallel.stops_alone(self.is_asked):
            raise Stopping

    def check_in_evaluation(self, *, is_last: bool = False) -> None:
        """The same between two batches of an evaluation, which all ranks leave after the same batch."""
        self._look_at_requests()
        if self._parallel.poll(self.is_asked, is_last=is_last):
            raise Stopping

    def _look_at_requests(self) -> None:
        self._hang_detector.report()
        self._memory_guard.poll()
        margin_s = max(MIN_TIME_LIMIT_MARGIN_S, 3 * self._writer.longest_write_s)
        if time.perf_counter() > self._time_limit_at_s - margin_s:
            self.request.request("the time limit of the Slurm job", grace_s=margin_s)
        if self.request.trace_requested:
            self.request.trace_requested = False
            self._tracer.request()
