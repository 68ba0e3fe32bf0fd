"""Trial processes and the windows that they measure: two configurations in turn, so that both meet the same noise.

A process (`training/trial.py`) waits, stopped by SIGSTOP, while the other one is measured: its loader would go on
filling its buffers, which takes cores and would make its own next window too fast. `policy.py` judges.
"""

import contextlib
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from stoker.training.trial import Reply, Request, Start, Work
from stoker.tuning.levers import Facts
from stoker.tuning.policy import LOOKS, judge, newest_lines
from stoker_watch import regular_files
from stoker_watch.errors import PreflightError
from stoker_watch.runs.records import PROBES, RunFolder, read_lines
from stoker_watch.runs.schemas import Probe

COMMAND = (sys.executable, "-m", "stoker.training.trial")
NUM_IMAGES = 256
"""Images of the training split that a trial repeats: a cache has all of them after seconds."""
WINDOW_S = (0.6, 4.0)
"""Seconds of a window at least, on the faster side; at most, on the slower one. It has two steps at the least.
Where images come from a bucket, also the faster side takes the longer time: in a shorter one few images arrive."""
ANSWER_S = 180.0
"""A process that does not answer for so long (or half of the budget, if longer) hangs; compiling takes minutes."""
COMPILE_S = 900.0


class TrialError(Exception):
    """A configuration could not be measured, for a reason that its process gave."""

    def __init__(self, reason: str, *, unavailable: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.unavailable = reason, unavailable


class TrialProcess:
    """A configuration that can be measured. Close it. log: gets what the process prints. budget_s: of the tuning.
    devices: that train together; num_images: of the training split, which it repeats."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        log: Path,
        command: Sequence[str] = COMMAND,
        budget_s: float = 0.0,
        devices: int = 1,
        num_images: int = NUM_IMAGES,
    ) -> None:
        self.settings = dict(settings)
        self.batch_size: int = settings["batch_size"]
        self.micro_batch_size = self.batch_size // (devices * int(settings["grad_accum_steps"]))
        self.compared: dict[tuple[int, int, float], dict[str, list[float]]] = {}
        self.is_fresh = True
        """Whether its stream of samples is at the first one, and its weights are as in any other process."""
        self.requested = 0
        """Images that a bucket was asked for ahead, in its last reply."""
        self.has_failed = False
        """Whether its last request had no answer, or an error: it ends then."""
        self._limit_s = max(COMPILE_S if settings.get("compile") else ANSWER_S, budget_s / 2)
        self._log, self._rest = log, b""
        try:
            # A group of its own in this session: if this process is killed, the kernel ends a stopped group (SIGHUP).
            with open(log, "ab", opener=regular_files.no_links) as errors:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, process_group=0
                )
        except OSError as error:
            raise PreflightError("A trial cannot be started.", location=command[0], cause=error.strerror) from error
        try:
            self.ready = self._exchange(Start(settings=self.settings, num_images=num_images, devices=devices))
            self._stop()
        except BaseException:
            self.close()
            raise

    def ask(self, do: Work, images: int = 0, **more: Any) -> Reply:
        """The process goes on, answers, and stops. Raises TrialError; close the process then."""
        self.is_fresh = False
        self._signal(signal.SIGCONT)
        reply = self._exchange(Request(do=do, images=images, **more))
        self.requested = reply.requested
        self._stop()
        return reply

    def first_images(self, images: int, group: int, lr: float) -> dict[str, list[float]]:
        """Losses and inputs of the first images of the stream, before any update, and of the same number after them,
        with updates. Raises TrialError; ValueError where the process is past them."""
        key = images, group, lr
        if key not in self.compared:
            if not self.is_fresh:
                raise ValueError("the process is past its first images")
            replies = [self.ask("losses", images, group=group, lr=rate) for rate in (0.0, lr)]
            count = images // group
            self.compared[key] = {
                "losses": [loss for reply in replies for loss in reply.losses[:count]],
                "inputs": [value for reply in replies for value in reply.inputs[: 3 * count]],
            }
        return self.compared[key]

    def warm_up(self) -> None:
        """Does as many steps as batches are loaded ahead: then a window waits for the loader as a run does."""
        self.ask("train", self.batch_size * (self.ready.prefetch_depth + 1))

    def train(self, images: int, steady: bool) -> Reply:
        """Whole steps, as a `Window`."""
        return self.ask("train", images, steady=steady)

    def train_after_steps(self, images: int, steady: bool) -> Reply:
        """The same after steps that loaded nothing, in which the loader has filled its buffers: these are used up
        first. With a bucket, `Request.steady` does that."""
        if not self.requested:
            self.warm_up()
        return self.train(images, steady)

    def step(self, images: int, _steady: bool) -> Reply:
        """Steps on one batch, as a `Window`."""
        return self.ask("step", images)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process.wait()

    def _stop(self) -> None:
        """Stops it and waits for that: the kernel ends only a group that has stopped before this process is killed."""
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _signal(self, number: signal.Signals) -> None:
        """Sends a signal to its group of processes and those of its loader workers, which load while it waits."""
        groups = {self._process.pid}
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self._process.pid).children(recursive=True)
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    groups.add(os.getpgid(child.pid))
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)

    def _exchange(self, message: Start | Request) -> Reply:
        assert self._process.stdin is not None
        self.has_failed = True  # until it has answered
        try:
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise TrialError(self._describe_end()) from None
        reply = msgspec.json.decode(self._read_line(), type=Reply)
        if reply.error:
            raise TrialError(reply.error, unavailable=reply.unavailable)
        self.has_failed = False
        return reply

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            if not select.select([file], [], [], self._limit_s)[0]:
                raise TrialError(f"no answer for {self._limit_s:.0f} s")
            chunk = os.read(file, 1 << 16)
            if not chunk:
                raise TrialError(self._describe_end())
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _describe_end(self) -> str:
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        lines = regular_files.read_text(self._log, errors="replace").strip().splitlines()
        return f"the process ended with {how}" + (f": {lines[-1].strip()}" if lines else "")


class MeasuredPairs(msgspec.Struct):
    """Windows of two sides. phases: seconds per image by phase of the second; steps: of each side."""

    pairs: list[tuple[float, float]]
    phases: dict[str, float]
    steps: int


Window = Callable[[int, bool], Reply]
"""Works on so many images; True: `Request.steady`."""


def new_probe(kind: str, **values: Any) -> Probe:
    """A line of an experiment or a trial; numbers that are not given are 0."""
    zeros = dict.fromkeys(("before_img_per_s", "after_img_per_s", "ratio", "ratio_low", "ratio_high"), 0.0)
    return Probe(**{"t": time.time(), "attempt": 1, "probe": kind, "steps": 0, **zeros, **values})


class TrialRecords:
    """The trials of a folder: lines of probes.jsonl, of which the newest of a trial counts."""

    def __init__(self, path: Path, facts: Facts) -> None:
        self.path, self._facts, self._folder = path, facts, RunFolder(path, 1)
        self.lines = list(read_lines(path, PROBES, Probe))

    def newest(self) -> list[Probe]:
        return newest_lines(self.lines, self._facts)

    def write(self, probe: Probe, **values: Any) -> Probe:
        own = {"t": time.time(), "machine": self._facts.machine, "data": self._facts.data}
        probe = msgspec.structs.replace(probe, **own, **values)
        self._folder.append(PROBES, probe)
        self.lines.append(probe)
        return probe

    def run(self, probe: Probe, measure: Callable[[], dict[str, Any]]) -> Probe:
        """Writes that a trial runs, then its last line, of which `measure` returns the fields."""
        probe = self.write(probe, state="run")
        start_s = time.monotonic()
        try:
            values = measure()
        except TrialError as error:
            values = {"state": "unavailable" if error.unavailable else "failed", "reason": error.reason}
        return self.write(probe, **{"seconds": time.monotonic() - start_s, **values})

    def close(self) -> None:
        self._folder.close()


def measure_in_turn(before: Window, after: Window, *, unit: int, until_s: float) -> MeasuredPairs:
    """Pairs of windows with as many images, in the order A B B A, until it is decided which side is faster, or a look
    after `until_s` of `time.monotonic`. unit: images that are whole steps for both sides. Raises TrialError."""
    first = [window(2 * unit, False) for window in (before, after)]
    trial_s = sorted(map(_per_image, first))
    images = unit * max(2, min(math.ceil(WINDOW_S[0] / trial_s[0] / unit), int(WINDOW_S[1] / trial_s[1] / unit)))
    if any(reply.requested for reply in first):
        images = max(images, math.ceil(WINDOW_S[1] / trial_s[0] / unit) * unit)
    pairs: list[tuple[float, float]] = []
    replies: list[Reply] = []
    while judge(pairs) == "more" and not (len(pairs) in LOOKS and time.monotonic() > until_s):
        if len(pairs) % 2 == 0:
            a, b = before(images, True), after(images, True)
        else:
            b, a = after(images, True), before(images, True)
        pairs.append((_per_image(a), _per_image(b)))
        replies.append(b)
    total = sum(reply.images for reply in replies)
    names = dict.fromkeys(name for reply in replies for name in reply.phases)
    phases = {name: sum(reply.phases.get(name, 0.0) for reply in replies) / total for name in names}
    return MeasuredPairs(pairs, phases, len(pairs) * replies[0].steps)


def compare(base: TrialProcess, candidate: TrialProcess, *, until_s: float) -> MeasuredPairs:
    """Whole steps of two configurations, as by `measure_in_turn`."""
    for process in (base, candidate):
        process.warm_up()
    unit = math.lcm(base.batch_size, candidate.batch_size)
    return measure_in_turn(base.train, candidate.train, unit=unit, until_s=until_s)


def _per_image(reply: Reply) -> float:
    return reply.seconds / reply.images
