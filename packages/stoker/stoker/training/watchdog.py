"""Ends a training that hangs: exit code 7, the stacks of all threads in `hang.txt`, and an event that names what hangs.

The training thread reports each step and each batch of an evaluation. A thread of this module counts the seconds since
the last report; a hang is at least MIN_LIMIT_S (or STOKER_HANG_TIMEOUT_S; 0 turns the watchdog off) and STEP_FACTOR
median steps of silence. Seconds are counted while this process runs, not read from a clock: a process that was stopped
(SIGSTOP, a paused container, a suspended machine) has not hung. Silence is allowed in the first step, while compiling,
saving, rolling back or profiling, and in a debugger. With several ranks, each watches itself, and it is a hang if none
of the others makes progress: then a rank that does not reach a collective and those that wait in it all write their
stacks (`ranks/0001/hang.txt`), and with NCCL what its flight recorder has (`nccl_trace/`). A rank whose heartbeat
stopped (`heartbeats.py`) is named, whatever the others do: rank 0 notices those of the others, and they that of rank 0.
A rank that has not noticed that another one failed (NCCL waits on, where gloo loses a connection) is ended, too.
"""

import contextlib
import faulthandler
import os
import re
import statistics
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Literal, Self

from stoker.training.heartbeats import FRESH_S, call_within
from stoker.training.ranks import RankFailure, Ranks
from stoker_watch import regular_files
from stoker_watch.errors import ConfigError, HungError
from stoker_watch.runs.records import HANG, RANKS, RunFolder
from stoker_watch.storage.failures import Timeouts

MIN_LIMIT_S = 60.0
STEP_FACTOR = 20.0
STORE_MARGIN_S = 30.0
"""A request to a bucket fails by itself after its own timeout; the watchdog waits this much longer."""
UNLIMITED_PHASES = frozenset({"startup", "compile", "checkpoint", "recovery", "idle"})
"""Phases of the training thread that may take any time."""
TICK_S = 1.0
MEDIAN_STEPS = 64
FAILURE_GRACE_S = 6.0
"""How long a rank may take to end by itself after another one has failed; the whole job has ten seconds."""
NCCL_TRACE = "nccl_trace"
"""Folder of the collectives of each rank, for `torchfrtrace --prefix rank_ RUN/nccl_trace`."""
REPORT_TIMEOUT_S = 20.0
"""Seconds for writing stacks and event: the disk may be what hangs."""

Hung = Literal["loader", "device", "collective", "evaluation", "rank"]


def min_limit_s(*, is_remote: bool) -> float | None:
    """Seconds of silence that are never a hang; None: no watchdog. is_remote: from a bucket. Raises ConfigError."""
    text = os.environ.get("STOKER_HANG_TIMEOUT_S", "")
    try:
        limit_s = float(text or MIN_LIMIT_S)
    except ValueError:
        limit_s = -1.0
    if not 0 <= limit_s < 1e6:
        raise ConfigError(
            f"STOKER_HANG_TIMEOUT_S is {text!r}.",
            choices=["seconds; 0 turns the watchdog off"],
            fix=f"unset it for the default, {MIN_LIMIT_S:g}",
        )
    if limit_s == 0:
        return None
    return max(limit_s, Timeouts.from_environment().total_s + STORE_MARGIN_S) if is_remote and not text else limit_s


class HangDetector:
    """Decides from reports and ticks whether the training hangs. Reports come from the training thread."""

    def __init__(self, min_limit_s: float) -> None:
        self.min_limit_s = min_limit_s
        self._reports, self._seen_reports = 0, -1
        self._unlimited_until = 0
        """Number of the report before which any silence is allowed."""
        self._durations_s: deque[float] = deque(maxlen=MEDIAN_STEPS)
        self.silence_s = 0.0

    def report(self, step_s: float | None = None) -> None:
        """The training is alive. step_s: seconds of the step that has just ended."""
        if step_s is not None:
            self._durations_s.append(step_s)
        self._reports += 1

    def allow_silence(self, reports: int = 1) -> None:
        """Any silence is allowed before so many further reports."""
        self._unlimited_until = self._reports + reports

    @property
    def limit_s(self) -> float:
        """Seconds of silence that are a hang."""
        durations_s = list(self._durations_s)
        return max(self.min_limit_s, STEP_FACTOR * statistics.median(durations_s) if durations_s else 0.0)

    def tick(self, elapsed_s: float, *, is_limited: bool) -> bool:
        """Whether the training hangs. elapsed_s: since the last tick; at most two ticks of it count."""
        is_limited = is_limited and bool(self._durations_s) and self._reports >= self._unlimited_until
        if self._reports != self._seen_reports or not is_limited:
            self._seen_reports, self.silence_s = self._reports, 0.0
            return False
        self.silence_s += min(elapsed_s, 2 * TICK_S)
        return self.silence_s >= self.limit_s


class Watchdog:
    """Watches the thread that creates it, as a context manager. phase: that thread's phase of the ledger;
    on_hang(code): ends the process; None (a training inside another program): the hang is recorded only."""

    def __init__(
        self,
        folder: RunFolder,
        detector: HangDetector,
        *,
        phase: Callable[[], str],
        step: Callable[[], int],
        on_hang: Callable[[int], object] | None,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or Ranks()
        self._stacks = folder.path / (HANG if self._ranks.is_main else f"{RANKS}/{self._ranks.rank:04d}/{HANG}")
        self._folder, self._detector, self._phase, self._step, self._on_hang = folder, detector, phase, step, on_hang
        self._watched_id = threading.get_ident()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stoker-watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        ticks_after_failure, heartbeats = 0, self._ranks.heartbeats
        if heartbeats is not None:
            heartbeats.limit_s = max(FRESH_S, self._detector.min_limit_s)
        while not self._stopped.wait(TICK_S):
            failure = self._ranks.failure_elsewhere()
            if failure is not None:
                ticks_after_failure += 1
                if ticks_after_failure * TICK_S >= FAILURE_GRACE_S and self._on_hang is not None:
                    self._end_after(failure, self._on_hang)
                    return
            is_silent, frozen = self._detector.tick(TICK_S, is_limited=self._phase() not in UNLIMITED_PHASES), None
            if heartbeats is not None:
                heartbeats.tick(TICK_S)
                heartbeats.progresses = self._detector.silence_s < self._detector.limit_s / 2
                is_silent = is_silent and not heartbeats.others_progress()  # one may wait for another that saves
                frozen = heartbeats.frozen(FRESH_S if is_silent else heartbeats.limit_s)
            if is_silent or frozen is not None:
                innermost = sys._current_frames().get(self._watched_id)
                frames = [] if innermost is None else list(traceback.extract_stack(innermost))
                if any(os.path.basename(frame.filename) in ("bdb.py", "pdb.py") for frame in frames):
                    self._detector.allow_silence()
                    continue
                self._end(describe_hang(self._phase(), frames) if frozen is None else "rank", frames, frozen)
                return

    def _end(self, hung: Hung, frames: list[traceback.FrameSummary], error: HungError | None) -> None:
        error = error or self._make_error(hung, frames)
        call_within(REPORT_TIMEOUT_S, self._report, hung, error, frames)
        if self._on_hang is not None:
            self._on_hang(error.exit_code)

    def _make_error(self, hung: Hung, frames: list[traceback.FrameSummary]) -> HungError:
        (where, fix), silence_s = WHERE_AND_FIX[hung], self._detector.silence_s
        own = [frame for frame in frames if re.search(r"/stoker(_watch)?/", frame.filename)]
        innermost = f"; the training thread is in {own[-1].name} ({own[-1].filename}:{own[-1].lineno})" if own else ""
        return HungError(
            f"The training hangs: no progress for {silence_s:.0f} s after step {self._step():,}, in {where}.",
            location=self._stacks,
            cause=f"the stacks of all threads are there{innermost}",
            fix=f"{fix}; the same command continues from the last checkpoint (--restarts 3 does so by itself)",
        )

    def _end_after(self, failure: RankFailure, end: Callable[[int], object]) -> None:
        """Ends this rank as a consequence of the failure of another."""
        error = failure.as_error()
        print(f"stoker: {error}", file=sys.stderr, flush=True)
        self._ranks.publish(error, is_consequence=True)
        call_within(TICK_S, self._folder.event, "failed", str(error), step=self._step(), exit_code=failure.exit_code)
        end(failure.exit_code)

    def _report(self, hung: Hung, error: HungError, frames: list[traceback.FrameSummary]) -> None:
        print(f"stoker: {error}", file=sys.stderr, flush=True)
        self._ranks.publish(error, is_consequence=hung == "collective")
        with contextlib.suppress(OSError):
            self._write_stacks(error, frames)
            if (trace := self._ranks.collective_trace()) is not None:
                folder = self._folder.path / NCCL_TRACE
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"rank_{self._ranks.rank}").write_bytes(trace)
        self._folder.event(
            "failed" if self._on_hang is not None else "warning",
            str(error),
            step=self._step(),
            exit_code=error.exit_code,
            hung=hung,
            silence_s=round(self._detector.silence_s, 1),
            limit_s=round(self._detector.limit_s, 1),
        )

    def _write_stacks(self, error: HungError, frames: list[traceback.FrameSummary]) -> None:
        """Writes the stacks, that of the training thread first: faulthandler ends after a hundred threads."""
        self._stacks.parent.mkdir(parents=True, exist_ok=True)
        with open(self._stacks, "a", opener=regular_files.no_links) as file:
            file.write(f"attempt {self._folder.attempt}, process {os.getpid()}: {error.what}\n")
            file.write("".join(["Training thread:\n", *traceback.format_list(frames), "\n"]))
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write("\n")


WHERE_AND_FIX: dict[Hung, tuple[str, str]] = {
    "loader": ("the loader, which has no batch", "look at the storage of the images"),
    "device": ("the step on the device", "look for errors of the driver (`dmesg`, `nvidia-smi`)"),
    "collective": ("a collective, which waits for another rank",
                   f"look at {HANG} of the other ranks: they wait for the one that is not in a collective"),
    "evaluation": ("the evaluation", "look at the storage of the validation images, and for errors of the driver"),
}  # fmt: skip


def describe_hang(phase: str, frames: list[traceback.FrameSummary]) -> Hung:
    """What hangs, from the phase of the training thread and its stack, outermost frame first."""
    files = [frame.filename.replace(os.sep, "/") for frame in frames]
    is_backward_of_ranks = any(file.endswith("training/several.py") for file in files) and "/autograd/" in files[-1]
    exchanges = any("/torch/distributed/" in file for file in files)
    if phase == "comm" or is_backward_of_ranks or exchanges:
        return "collective"
    if phase == "input_wait" and not any(file.endswith("stoker/hardware/device.py") for file in files):
        return "loader"
    return "evaluation" if phase == "eval" else "device"
