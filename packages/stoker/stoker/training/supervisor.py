"""`stoker train … --restarts N`: runs the training as a child process, and again after a failure, with back-off.

The same command again continues an unfinished run, so every attempt resumes from what the run folder holds. Other ends
are passed on: done, a wrong command, setting or data set, divergence, and exit code 75, after which the machine is
about to go. Signals go to the child; it saves and ends with code 75. If this process dies, the kernel sends the child a
SIGTERM (Linux). Several machines are restarted by their scheduler. No torch here.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType

import msgspec

from stoker_watch.errors import ConfigError
from stoker_watch.hardware.cgroup import Cgroup
from stoker_watch.recording.telemetry.host import REPLACED_AT

VARIABLE = "STOKER_RESTART"
"""Tells a child why it was started: a `RestartInfo` as JSON."""
FIRST_DELAY_S, MAX_DELAY_S = 1.0, 60.0
"""The n-th restart waits FIRST_DELAY_S · 2ⁿ⁻¹, at most MAX_DELAY_S."""
SLEEP_S = 0.1
"""Longest delay until a signal ends the wait for a restart."""
PASSED_ON = frozenset({0, 2, 3, 4, 6, 75, 130, 141})
"""Exit codes after which nothing is restarted: also Ctrl-C twice, and a closed pipe of the output."""
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
STOPPING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
"""Signals after which nothing is restarted."""
MEANINGS = {1: "an error of stoker or of a library", 5: "out of memory", 7: "the training hung"}
_PR_SET_PDEATHSIG = 1


class RestartInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Why an attempt was started by the supervisor. number: from 1; limit: N of --restarts; exit_code: of the attempt
    before, negative: the signal that killed it; since: Unix time of the first attempt, seconds; oom_kills: processes of
    the cgroup that the kernel killed for memory during the attempt before, if it ended by SIGKILL."""

    number: int
    limit: int
    reason: str
    exit_code: int
    since: float
    oom_kills: int = 0


def read_restart(env: Mapping[str, str] = os.environ) -> RestartInfo | None:
    """Why this process was started; None if by hand. Raises ConfigError."""
    if VARIABLE not in env:
        return None
    try:
        return msgspec.json.decode(env[VARIABLE], type=RestartInfo)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{VARIABLE} is not what stoker writes.", cause=str(error), fix=f"unset {VARIABLE}"
        ) from error


def replace_process(reason: str) -> None:
    """Starts `stoker` again with the same arguments, in place of this process. Returns if this was done before."""
    if REPLACED_AT in os.environ:
        return
    _say(f"{reason}: starting again")
    os.environ[REPLACED_AT] = str(time.time())
    sys.stdout.flush()
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        if int(name) > 2:
            with contextlib.suppress(OSError):  # that of the listing is closed
                os.set_inheritable(int(name), False)  # a driver's file that stays open would keep its GPU memory
    os.execv(sys.executable, [sys.executable, "-m", "stoker", *sys.argv[1:]])


def without_restarts(arguments: Sequence[str]) -> list[str]:
    """The arguments of the command line without --restarts and its number."""
    follows_flag = [before == "--restarts" for before in ["", *arguments]]
    return [
        argument
        for argument, is_number in zip(arguments, follows_flag, strict=False)
        if not is_number and argument.partition("=")[0] != "--restarts"
    ]


def delay_s(restart: int) -> float:
    """Seconds before restart number `restart`, from 1."""
    return min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** (restart - 1))


def describe_end(code: int, oom_kills: int | None = None) -> str:
    """How an attempt ended. code: the exit code, or minus the number of the signal; oom_kills: that the kernel counted
    in the cgroup meanwhile, None where it counts none."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        if name != "SIGKILL" or oom_kills == 0:
            return f"killed by {name}"
        return f"killed by {name} (the kernel" + (", out of memory)" if oom_kills else ", if memory was short)")
    return f"exit code {code}" + (f" ({MEANINGS[code]})" if code in MEANINGS else "")


class Supervisor:
    """Runs a command until it ends in a way that a restart cannot correct, or N restarts are used up. sleep: waits for
    some seconds; replaced in tests."""

    def __init__(self, command: Sequence[str], restarts: int, *, sleep: Callable[[float], object] = time.sleep) -> None:
        if restarts < 0:
            raise ConfigError(f"--restarts {restarts} is not a number of restarts.", choices=["0 and above"])
        self._command, self._restarts, self._sleep = list(command), restarts, sleep
        self._is_stopping = False
        self._since = time.time()
        self._child: subprocess.Popen[bytes] | None = None
        self._oom_kills: int | None = None
        """Kills by the kernel for memory in the cgroup during the newest attempt; None where they are not counted."""
        self._missed: list[int] = []
        """Signals that came before the child was there."""

    def run(self) -> int:
        """Returns the exit code. In the main thread only, because it handles signals."""
        with handling_signals(FORWARDED, self._forward):
            return self._run()

    def _run(self) -> int:
        restart: RestartInfo | None = None
        while True:
            code = self._run_once(restart)
            if self._is_stopping and code < 0:
                return 75  # ended by the signal before it handled signals: there was nothing new to save
            if code in PASSED_ON or self._is_stopping:
                return code
            number = 1 if restart is None else restart.number + 1
            if number > self._restarts:
                _say(f"{describe_end(code, self._oom_kills)}; no restart is left of --restarts {self._restarts}")
                return code if code > 0 else 128 - code
            reason = describe_end(code, self._oom_kills)
            _say(f"{reason}: restart {number} of {self._restarts} in {delay_s(number):g} s")
            if self._is_stopped_within(delay_s(number)):
                return 75
            oom_kills = (self._oom_kills or 0) if code == -signal.SIGKILL else 0
            restart = RestartInfo(
                number=number, limit=self._restarts, reason=reason, exit_code=code, since=self._since,
                oom_kills=oom_kills,
            )  # fmt: skip

    def _is_stopped_within(self, seconds: float) -> bool:
        """Waits; whether a signal has ended the wait."""
        for _ in range(round(seconds / SLEEP_S)):
            if self._is_stopping:
                return True
            self._sleep(SLEEP_S)
        return self._is_stopping

    def _run_once(self, restart: RestartInfo | None) -> int:
        env = dict(os.environ)
        env.pop(VARIABLE, None)
        if restart is not None:
            env[VARIABLE] = msgspec.json.encode(restart).decode()
        kills_before = Cgroup().oom_kills()
        # A session of its own: Ctrl-C in a terminal reaches the child once, through this process.
        child = subprocess.Popen(self._command, env=env, start_new_session=True, preexec_fn=die_with_parent())
        self._child = child
        for number in self._missed:
            child.send_signal(number)
        self._missed.clear()
        end = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # not reaped, so the group's number is its own
        if end is not None and end.si_status not in (0, 75):
            os.killpg(child.pid, signal.SIGKILL)  # processes that it left behind hold its lock, memory or GPU
        self._child = None
        code, kills = child.wait(), Cgroup().oom_kills()
        self._oom_kills = None if kills is None or kills_before is None else kills - kills_before
        return code

    def _forward(self, number: int, _: FrameType | None) -> None:
        if signal.Signals(number).name in STOPPING:
            self._is_stopping = True
        if number == signal.SIGHUP:
            number = signal.SIGTERM  # the terminal is gone
        if self._child is None:
            if number != signal.SIGUSR2:
                self._missed.append(number)
        else:
            self._child.send_signal(number)


@contextlib.contextmanager
def handling_signals(names: Iterable[str], handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handles these signals in the block, where Python allows it: in the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    previous = {signal.Signals[name]: signal.signal(signal.Signals[name], handle) for name in names if is_main}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def die_with_parent() -> Callable[[], None] | None:
    """Called in the child before it runs the command: SIGTERM when its parent dies; None where the kernel cannot."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _say(text: str) -> None:
    print(f"stoker: {text}", file=sys.stderr, flush=True)
