"""The experiment that a run does by itself, once: how fast are its steps when their images are ready?

If the ledger shows that the run waits for images, training pauses a few times until the loader's prefetch buffers are
full, and times the steps that follow. They are ordinary steps on the images that are next: nothing extra is computed
and no result changes. The cost is the pause (`idle` in the ledger), below 1 % of the run's time. Other changes are
tried after the run, by a separate program: `probe.py`.
"""

import statistics
import time
from collections.abc import Callable, Generator, Iterator

from stoker.profiling.ledger import Ledger
from stoker.runs.records import PROBES
from stoker.runs.schemas import Probe, StepWindow
from stoker.training.state import EventLogger, TrainSetup

MAX_PAIRS = 8
"""Pairs of before and after of an experiment; here pauses, each with as many steps before and after it as there are
prefetch buffers. With eight pairs, the second smallest and second largest ratio bound the median with 93 % confidence
(order statistics of a binomial)."""
MIN_PAIRS = 3
"""With fewer pairs there is no result."""
MAX_PAUSE_FRACTION = 0.01
"""Fraction of the run's expected time that the pauses may take."""
MIN_WAIT_FRACTION = 0.05
"""Fraction of time spent waiting for images from which the experiment is worth it; the diagnosis uses the same."""
WARMUP_S = 20.0
"""Seconds of steps after which the loader has tuned itself and the fractions are meaningful."""
MAX_PAUSE_S = 10.0
_POLL_INTERVAL_S = 0.002


class PrefetchedInputProbe:
    """Call `observe` with each window of the run and `before_step` before each step; the probe does the rest."""

    def __init__(
        self, setup: TrainSetup, ledger: Ledger, log_event: EventLogger, interruptions: Callable[[], object]
    ) -> None:
        """interruptions: changes when something else than steps took time: a checkpoint, an evaluation, a rollback."""
        self._setup, self._state = setup, setup.state
        self._interruptions = interruptions
        self._ledger, self._log_event = ledger, log_event
        self._batch_size = setup.config.run.batch_size
        self._done = not setup.ranks.alone  # a pause of one rank would be a pause of all
        self._has_new_window = False
        """Whether there was a window since the last check whether the experiment is worth it."""
        self._wall_s = self._wait_s = 0.0
        self._rounds: Iterator[None] | None = None
        """The experiment, once it has begun."""
        self._paused_s = self._allowed_s = 0.0

    def observe(self, window: StepWindow) -> None:
        """A window of the run; those without steps (startup, an evaluation) do not count."""
        if window.window_steps and "startup" not in window.phases:
            self._wall_s += window.wall_s
            self._wait_s += window.phases.get("input_wait", 0.0) / window.devices
            self._has_new_window = True

    def before_step(self, progress: float) -> None:
        """progress: fraction of the length that is done, 0 … 1."""
        if self._done or self._wall_s < WARMUP_S:
            return
        if self._rounds is None:
            has_new_window, self._has_new_window = self._has_new_window, False
            if not has_new_window or not self._is_worth_it(progress):
                return
            self._rounds = self._measure()
        self._done = next(self._rounds, self) is self

    def _measure(self) -> Iterator[None]:
        """Yields before each step, until there are MAX_PAIRS, or interrupted rounds have used up the budget."""
        pairs: list[tuple[float, float]] = []
        while len(pairs) < MAX_PAIRS:
            depth = self._setup.loader.stats().prefetch_depth
            before_s = yield from self._time_steps(depth)
            if before_s is None:
                continue
            if self._paused_s >= self._allowed_s:
                break
            self._pause(depth)
            after_s = yield from self._time_steps(depth)
            if after_s is not None:
                pairs.append((before_s, after_s))
        self._finish(pairs, depth)

    def _time_steps(self, count: int) -> Generator[None, None, float | None]:
        """Seconds per image of the next steps; None if something else took time meanwhile."""
        interruption, start_s = self._interruptions(), self._synchronize()
        for _ in range(count):
            yield
            if self._interruptions() != interruption:
                return None
        return (self._synchronize() - start_s) / count / self._batch_size

    def _is_worth_it(self, progress: float) -> bool:
        """Whether the run waits for images and the pauses fit the budget of its expected length."""
        if self._wait_s < MIN_WAIT_FRACTION * self._wall_s or not 0 < progress < 1:
            return False
        step_s = self._state.trained_s / max(1, self._state.step)
        self._allowed_s = MAX_PAUSE_FRACTION * self._state.trained_s / progress
        return MAX_PAIRS * self._setup.loader.stats().prefetch_depth * step_s <= self._allowed_s

    def _synchronize(self) -> float:
        """The time at which the device has done all steps so far."""
        with self._ledger.phase("idle"):
            self._setup.device.synchronize()
        return time.perf_counter()

    def _pause(self, depth: int) -> None:
        """Waits until every prefetch buffer is ready, or until the time allowed is over."""
        start_s, loader = time.perf_counter(), self._setup.loader
        end_s = start_s + min(MAX_PAUSE_S, self._allowed_s - self._paused_s)
        with self._ledger.phase("idle"):
            while loader.stats().ready < depth * self._batch_size and time.perf_counter() < end_s:
                time.sleep(_POLL_INTERVAL_S)
        self._paused_s += time.perf_counter() - start_s

    def _finish(self, pairs: list[tuple[float, float]], depth: int) -> None:
        if len(pairs) < MIN_PAIRS:
            text = "could not measure steps with their images ready: each round was interrupted"
            self._log_event("info", f"{text}; it took {self._paused_s:.1f} s")
            return
        steps, attempt = len(pairs) * depth, self._setup.folder.attempt
        probe = summarize_pairs("cached_batch", pairs, steps=steps, attempt=attempt, automatic=True)
        self._setup.folder.append(PROBES, probe)
        self._log_event(
            "info",
            f"measured: with its images ready a step is {probe.ratio:.2f} × as fast ({probe.ratio_low:.2f} to "
            f"{probe.ratio_high:.2f}); it took {self._paused_s:.1f} s",
        )


def summarize_pairs(
    kind: str, pairs: list[tuple[float, float]], *, steps: int, attempt: int, automatic: bool = False
) -> Probe:
    """An experiment as a line of the records. pairs: seconds per image before and after."""
    ratios = sorted(a / b for a, b in pairs)
    trim = 1 if len(ratios) >= MAX_PAIRS else 0
    return Probe(
        t=time.time(),
        attempt=attempt,
        probe=kind,
        steps=steps,
        automatic=automatic,
        before_img_per_s=1 / statistics.median(a for a, _ in pairs),
        after_img_per_s=1 / statistics.median(b for _, b in pairs),
        ratio=statistics.median(ratios),
        ratio_low=ratios[trim],
        ratio_high=ratios[-1 - trim],
    )
