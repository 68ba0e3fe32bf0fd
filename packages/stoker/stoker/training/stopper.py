"""What ends a training from outside: signals, notices, the time limit of a job, a store that is lost.

A signal or another thread only sets a flag (`StopRequest`). `Stopper` looks at it after each step, between the batches
of an evaluation and while the training waits for metrics, and raises `Stopping` there: the loop then saves the state
and ends with exit code 75. Several ranks stop after the same step.

Threads ask every POLL_S whether the cloud is about to take the machine (`NoticeWatcher`). Google Cloud: the values
`instance/preempted` (a spot VM, 30 s before) and `instance/maintenance-event` of the metadata server. AWS:
`spot/instance-action` (two minutes before). Where the firmware names neither cloud and no variable names a metadata
server, nothing is asked.
"""

import contextlib
import functools
import http.client
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import NamedTuple
from urllib.parse import urlsplit

from stoker.training.out_of_memory import HostMemoryGuard
from stoker.training.parallel import LoopContext
from stoker.training.supervisor import handling_signals
from stoker_watch.errors import ConfigError, Preempted, StokerError
from stoker_watch.recording.telemetry.environment import detect_cloud

GCE_HOST, AWS_ENDPOINT = "169.254.169.254", "http://169.254.169.254"
"""Link-local addresses of the metadata servers: no name has to be resolved."""
AWS_GRACE_S = 120.0
"""docs.aws.amazon.com/AWSEC2 "Spot Instance interruption notices"."""
POLL_S = 0.5
"""Also a spot VM of Google, which goes 30 s after its notice, has nearly all of them."""
TIMEOUT_S = 10.0
RETRY_S = 10.0
MAX_FAILURES = 6
"""Failures in a row after which the watch ends with a warning."""


class Notice(NamedTuple):
    reason: str
    grace_s: float


GCE_NOTICES = {
    "preempted": ("TRUE", Notice("the notice that this spot VM is preempted", 30.0)),
    "maintenance-event": ("TERMINATE", Notice("the notice of maintenance of this VM's host", 60.0)),
}
"""Key below `instance/` → (beginning of the value that is a notice, the notice): cloud.google.com/compute/docs,
instances/spot and gpus/gpu-host-maintenance. It is the shortest time; VMs with GPUs get 60 minutes."""


class NoticeWatcher:
    """Watches for notices in daemon threads until one comes or `stop`. on_notice: called from a thread, once;
    report(kind, text): an event."""

    def __init__(
        self,
        on_notice: Callable[[Notice], None],
        report: Callable[[str, str], None],
        *,
        env: Mapping[str, str] = os.environ,
        cloud: str | None = None,
    ) -> None:
        self._on_notice, self._report = on_notice, report
        self._stopped = threading.Event()
        cloud = detect_cloud() if cloud is None else cloud
        self._sources: list[tuple[str, Callable[[], Notice | None]]] = []
        """Name of what is asked, and the function that asks."""
        if "GCE_METADATA_HOST" in env or cloud == "gcp":
            ask = functools.partial(_ask_google, env.get("GCE_METADATA_HOST") or GCE_HOST)
            self._sources = [
                ("the metadata server of Google Cloud", functools.partial(ask, key)) for key in GCE_NOTICES
            ]
        elif env.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true" and (
            "AWS_EC2_METADATA_SERVICE_ENDPOINT" in env or cloud == "aws"
        ):
            endpoint = env.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or AWS_ENDPOINT
            ask = functools.partial(_ask_aws, urlsplit(endpoint).netloc or endpoint)
            self._sources = [("the metadata service of AWS", ask)]

    def start(self) -> None:
        for source in self._sources:
            threading.Thread(target=self._watch, args=source, name="stoker-notices", daemon=True).start()

    def stop(self) -> None:
        """No notice is reported afterwards. A thread in a request is left to it."""
        self._stopped.set()

    def _watch(self, name: str, ask: Callable[[], Notice | None]) -> None:
        failures = 0
        while not self._stopped.is_set():
            try:
                notice = ask()
            except _NotOffered as error:
                if not self._stopped.is_set():
                    self._report("info", f"no notices of a preemption: {name} has none ({error})")
                return
            except (OSError, http.client.HTTPException) as error:
                failures += 1
                if failures == MAX_FAILURES and not self._stopped.is_set():
                    self._report("warning", f"no more notices of a preemption: {name} does not answer: {error}")
                if failures >= MAX_FAILURES:
                    return
                self._stopped.wait(RETRY_S)
                continue
            failures = 0
            if notice is not None and not self._stopped.is_set():
                self._on_notice(notice)
                return
            self._stopped.wait(POLL_S)


class _NotOffered(Exception):
    """The server answers and has no such key, or refuses it."""


def _ask_google(address: str, key: str) -> Notice | None:
    """The notice that a value of Google's metadata server is. Raises OSError."""
    value = _request(address, "GET", f"/computeMetadata/v1/instance/{key}", {"Metadata-Flavor": "Google"})
    if value is None:
        raise _NotOffered(key)
    beginning, notice = GCE_NOTICES[key]
    return notice if value.startswith(beginning) else None


def _ask_aws(address: str) -> Notice | None:
    """The spot interruption notice of AWS, by IMDSv2. Raises OSError."""
    token = _request(address, "PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    if token is None:
        raise _NotOffered("token")
    body = _request(address, "GET", "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    return (
        None
        if body is None
        else Notice(f"the notice that this spot instance is interrupted ({body[:200]})", AWS_GRACE_S)
    )


def _request(address: str, method: str, path: str, headers: Mapping[str, str]) -> str | None:
    """The answer of a metadata server; None: it has no such path, or refuses it. Raises OSError."""
    with contextlib.closing(http.client.HTTPConnection(address, timeout=TIMEOUT_S)) as connection:
        connection.request(method, path, headers=dict(headers))
        response = connection.getresponse()
        if response.status in (403, 404):
            return None
        if response.status != 200:
            raise OSError(f"status {response.status}")
        return response.read().decode(errors="replace").strip()


def time_limit_s(env: Mapping[str, str] = os.environ, *, now: Callable[[], float] = time.time) -> float | None:
    """Seconds until the time limit of the Slurm job; None if there is none (SLURM_JOB_END_TIME, Slurm 23.02)."""
    text = env.get("SLURM_JOB_END_TIME", "")
    return float(text) - now() if text.isdecimal() and int(text) > 0 else None


MIN_TIME_LIMIT_MARGIN_S = 60.0
"""How long before a time limit the last save begins, or three of the longest saves: as usual in batch scripts."""


GRACE_VARIABLE = "STOKER_GRACE_S"
USED_OF_GRACE = 0.9
"""The rest of a grace period is for the end of the process."""


def grace_period_s(env: Mapping[str, str] = os.environ) -> float | None:
    """Seconds between the SIGTERM and the SIGKILL of what runs this job, which says so by GRACE_VARIABLE; None: it does
    not. Raises ConfigError."""
    text = env.get(GRACE_VARIABLE, "")
    try:
        grace_s = float(text or 1)
    except ValueError:
        grace_s = -1.0
    if not 0 < grace_s < 1e6:
        raise ConfigError(f"{GRACE_VARIABLE} is {text!r}.", choices=["seconds"], fix=f"unset {GRACE_VARIABLE}")
    return grace_s if text else None


class Stopping(Exception):
    """The training is to save its state and end. Raised by `Stopper`, handled by the loop."""


class StopRequest:
    requested_by: str | None = None
    """The signal that asked the training to stop."""
    error: StokerError | None = None
    """Why the training must end without saving."""
    grace_s: float | None = None
    """Seconds after the request in which the machine is still there, if a notice or the job states them."""
    _granted_s: float = 0.0
    """Moment of `time.monotonic` at which they began."""
    trace_requested: bool = False
    """After SIGUSR2: keep the next steps as a Chrome trace."""
    after_evaluation: Callable[[], str | None] | None = None
    """Called by a thread when the metrics of an evaluation are in the run's events; what it returns asks for a stop."""

    def request(self, source: str, *, grace_s: float | None = None) -> None:
        """Asks for a stop, as a signal does. Callable from any thread."""
        if self.grace_s is None and grace_s is not None:
            self._granted_s, self.grace_s = time.monotonic(), grace_s
        if self.requested_by is None:
            self.requested_by = source

    def rest_s(self) -> float:
        """Seconds in which to finish; infinite if no grace period is stated."""
        if self.grace_s is None:
            return math.inf
        return max(0.0, USED_OF_GRACE * self.grace_s - (time.monotonic() - self._granted_s))

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
    does. SIGUSR2 asks for a trace. Repeated SIGTERMs change nothing: Slurm and torchrun each send one. SIGUSR1 is what
    a batch script lets Slurm send before the time limit (`#SBATCH --signal=B:USR1@60`). Outside the main thread Python
    allows no signal handlers, so the flags are never set there."""
    stop_request, grace_s = StopRequest(), grace_period_s()

    def handle(signum: int, _: FrameType | None) -> None:
        if signum == signal.SIGUSR2:
            stop_request.trace_requested = True
            return
        if signum == signal.SIGINT and stop_request.requested_by == "SIGINT":
            raise KeyboardInterrupt("a second time; earlier checkpoints are in the run")
        name = signal.Signals(signum).name
        stop_request.request(name, grace_s=grace_s if signum == signal.SIGTERM else None)
        stop_request.requested_by = name

    with handling_signals(("SIGTERM", "SIGUSR1", "SIGINT", "SIGUSR2"), handle):
        yield stop_request


class Stopper:
    """Raises `Stopping` where a training that was asked to stop can do so."""

    def __init__(self, context: LoopContext, request: StopRequest, memory_guard: HostMemoryGuard) -> None:
        setup = context.setup
        self.request, self._parallel = request, context.parallel
        self._hang_detector, self._tracer = context.hang_detector, context.tracer
        self._memory_guard, self._writer, self._is_alone = memory_guard, setup.writer, setup.ranks.alone
        limit_s = time_limit_s()
        self._time_limit_at_s = math.inf if limit_s is None else time.perf_counter() + limit_s

    @property
    def is_asked(self) -> bool:
        return self.request.requested_by is not None

    def after_step(self) -> None:
        """Raises `Stopping` if the training was asked to stop; after SIGUSR2 the next steps are traced."""
        self._look_at_requests()
        if self._parallel.stops(self.is_asked):
            raise Stopping

    def check(self) -> None:
        """As `after_step`, while this process waits for metrics, for which other ranks do not wait."""
        self._look_at_requests()
        if self.is_asked and self._is_alone:
            raise Stopping

    def check_in_evaluation(self, *, is_last: bool = False) -> None:
        """As `after_step`, between two batches of an evaluation, which all ranks leave after the same batch."""
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
