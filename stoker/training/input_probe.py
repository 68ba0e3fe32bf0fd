"""The experiment that a run does by itself, once: how fast are its steps when their pictures are there?

Where the ledger says that pictures were waited for, the training pauses a few times until the loader's ring is full and
times the steps that follow. They are ordinary steps on the pictures whose turn it is: nothing is computed that training
would not have, no result changes, and the price is the pause (the ledger's `idle`), kept below 1 % of the run's time.
Other changes are tried after the run, by a program of its own: `probe.py`.
"""

import statistics
import time
from typing import TYPE_CHECKING

from stoker.profiling.ledger import Ledger
from stoker.runs.records import PROBES
from stoker.runs.schemas import Probe, StepWindow

if TYPE_CHECKING:
    from stoker.training.start import Job, Say

PAIRS = 8
"""Pairs of before and after of an experiment; here pauses, each with as many steps before and behind it as the ring
holds batches. With eight the second smallest and second largest ratio bound the median with 93 % confidence (order
statistics of a binomial)."""
LEAST_PAIRS = 3
"""The least that say something."""
BUDGET = 0.01
"""Share of the run's time that the pauses may take, as long as the run will be."""
FROM_SHARE = 0.05
"""Share of time in waiting for pictures from which there is a question; the diagnosis speaks from there on, too."""
AFTER_S = 20.0
"""Seconds of steps after which the loader has tuned itself, and the shares mean something."""
LONGEST_PAUSE_S = 10.0
_LOOK_S = 0.002


class FullRing:
    """`seen` takes the run's windows, `before_step` is called before each step; between them they do the experiment."""

    def __init__(self, job: "Job", ledger: Ledger, say: "Say") -> None:
        self._job, self._ledger, self._say = job, ledger, say
        self._done = False
        self._news = False
        """Whether there was a window since it was asked whether the experiment is worth it."""
        self._wall_s = self._wait_s = 0.0
        self._pairs: list[tuple[float, float]] = []
        self._before_s: float | None = None
        self._began: tuple[float, int] | None = None
        """When the steps that are being timed began, and at which step."""
        self._others = self._what_else()
        self._paused_s = self._allowed_s = 0.0

    def seen(self, window: StepWindow) -> None:
        """A window of the run; those without steps (the start, an evaluation) do not count."""
        if window.steps and "startup" not in window.phases:
            self._wall_s += window.wall_s
            self._wait_s += window.phases.get("input_wait", 0.0) / window.devices
            self._news = True

    def _what_else(self) -> tuple[int | None, int, int]:
        """Changes where something else than steps took time: a checkpoint, an evaluation, a way back."""
        return self._job.writer.saved_step, self._job.evaluated_step, self._job.slowed

    def before_step(self, progress: float) -> None:
        """progress: share of the length that is done, 0 … 1."""
        begun = bool(self._pairs) or self._began is not None
        if self._done or self._wall_s < AFTER_S or not (begun or self._news):
            return
        self._news = False
        if not begun and not self._is_worth_it(progress):
            return
        if self._others != (others := self._what_else()):  # what is being timed does not count
            self._others, self._began, self._before_s = others, None, None
        depth = self._job.loader.stats().depth
        if self._began is None:
            self._began = self._now()
            return
        since_s, since = self._began
        if self._job.step - since < depth:
            return
        now_s, step = self._now()
        took_s = (now_s - since_s) / (step - since) / self._job.config.run.batch
        if self._before_s is None:
            if self._paused_s >= self._allowed_s:
                self._conclude(depth)
                return
            self._before_s = took_s
            self._pause(depth)
            self._began = self._now()
            return
        self._pairs.append((self._before_s, took_s))
        self._before_s, self._began = None, (now_s, step)
        if len(self._pairs) == PAIRS:
            self._conclude(depth)

    def _is_worth_it(self, progress: float) -> bool:
        """Whether there is a question, and its price is within the budget of the run as long as it will be."""
        if self._wait_s < FROM_SHARE * self._wall_s or not 0 < progress < 1:
            return False
        step_s = self._job.trained_s / max(1, self._job.step)
        self._allowed_s = BUDGET * self._job.trained_s / progress
        return PAIRS * self._job.loader.stats().depth * step_s <= self._allowed_s

    def _now(self) -> tuple[float, int]:
        with self._ledger.phase("idle"):
            self._job.device.wait()
        return time.perf_counter(), self._job.step

    def _pause(self, depth: int) -> None:
        """Waits until every place of the ring is ready; one that does not fill in time is timed as it is."""
        began_s, batch = time.perf_counter(), self._job.config.run.batch
        until_s = began_s + min(LONGEST_PAUSE_S, self._allowed_s - self._paused_s)
        with self._ledger.phase("idle"):
            while self._job.loader.stats().ready < depth * batch and time.perf_counter() < until_s:
                time.sleep(_LOOK_S)
        self._paused_s += time.perf_counter() - began_s

    def _conclude(self, depth: int) -> None:
        """After PAIRS, or when the budget is used up by rounds that something else came between."""
        self._done = True
        if len(self._pairs) < LEAST_PAIRS:
            text = "how fast steps are with their pictures ready could not be found out, something always came between"
            self._say("note", f"{text}; {self._paused_s:.1f} s were spent on it")
            return
        steps, attempt = len(self._pairs) * depth, self._job.folder.attempt
        found = summed_up("cached_batch", self._pairs, steps=steps, attempt=attempt, automatic=True)
        self._job.folder.append(PROBES, found)
        self._say(
            "note",
            f"tried: with its pictures ready a step is {found.ratio:.2f} × as fast ({found.ratio_low:.2f} to "
            f"{found.ratio_high:.2f}); {self._paused_s:.1f} s were spent on it",
        )


def summed_up(
    what: str, pairs: list[tuple[float, float]], *, steps: int, attempt: int, automatic: bool = False
) -> Probe:
    """An experiment as a line of the records. pairs: seconds per picture before and after."""
    ratios = sorted(a / b for a, b in pairs)
    inner = 1 if len(ratios) >= PAIRS else 0
    return Probe(
        t=time.time(), attempt=attempt, what=what, steps=steps, automatic=automatic,
        before_img_per_s=1 / statistics.median(a for a, _ in pairs),
        after_img_per_s=1 / statistics.median(b for _, b in pairs),
        ratio=statistics.median(ratios), ratio_low=ratios[inner], ratio_high=ratios[-1 - inner],
    )  # fmt: skip
