"""The fraction of a TensorFlow step that waits for its input, from TensorFlow's profiler.

A step of `fit`, or one that is given an iterator, fetches its batches inside its graph, where Python cannot time it. So
a few steps run under the profiler, in the first minute several times, then once a minute, and the trace is written next
to the state file for the watcher (`stoker/watch/tensorflow_trace.py`). At other times the profiler is off, and a
profiler session of the user has priority.
"""

import os
import sys
from time import monotonic

from .clock import BATCHES, GRAPH, clock
from .failures import STATE_DIR, report_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FIRST_INTERVAL_S, LONGEST_INTERVAL_S, WARMUP_STEPS = 4.0, 60.0, 3
"""Seconds from the first trace to the second, twice as long to each one after it, up to the longest; steps before the
first one, in which the graph is built."""
MAX_STEPS, MIN_TRACE_S, MIN_STEPS, MAX_TRACE_S = 50, 1.5, 3, 20.0
"""A trace ends after MAX_STEPS, after MIN_TRACE_S if it has MIN_STEPS, or after MAX_TRACE_S."""
OPTIONS = {"host_tracer_level": 2, "python_tracer_level": 0, "device_tracer_level": 0}


class ProfilerSampler:
    """Takes traces between steps, in the training thread."""

    def __init__(self) -> None:
        self._session: Any = None
        self._session_class: Any = None
        self._next_s, self._interval_s = 0.0, FIRST_INTERVAL_S
        self._start_s = 0.0
        self._steps = 0
        self._graph_s = 0.0
        self._traces = 0

    def before_step(self, steps: float) -> None:
        now = monotonic()
        if self._session is not None or steps < WARMUP_STEPS or now < self._next_s:
            return
        self._next_s = now + self._interval_s
        self._interval_s = min(2 * self._interval_s, LONGEST_INTERVAL_S)
        try:
            if self._session_class is None:
                self._session_class = self._patch_session_class()
            session = self._session_class()
            session.start("", OPTIONS)
        except Exception as error:  # noqa: BLE001
            if type(error).__name__ == "AlreadyExistsError":  # the user's profiler runs: try again in a minute
                return
            self._next_s = float("inf")
            report_failure("profiler", error)
            return
        self._session, self._start_s, self._steps, self._graph_s = session, now, 0, 0.0

    def after_step(self, duration_s: float) -> None:
        if self._session is None:
            return
        self._steps += 1
        self._graph_s += duration_s
        elapsed_s = monotonic() - self._start_s
        if (
            self._steps >= MAX_STEPS
            or elapsed_s >= MAX_TRACE_S
            or (elapsed_s >= MIN_TRACE_S and self._steps >= MIN_STEPS)
        ):
            self._stop()

    def _stop(self) -> None:
        session, self._session = self._session, None
        try:
            data = session.stop()
            self._traces += 1
            name = os.path.join(STATE_DIR, f"{os.getpid()}-{self._traces}")
            with open(name + ".part", "wb") as file:
                file.write(f"{self._graph_s:.9f}\n".encode() + data)
            os.rename(name + ".part", name + ".trace")
        except Exception as error:  # noqa: BLE001 (no space or no watcher: the fraction stays unknown)
            report_failure("profiler", error)

    def _patch_session_class(self) -> "Any":
        """Patches TensorFlow's session class to end our session before it creates another: only one can exist."""
        internal = sys.modules["tensorflow.python.profiler.profiler_v2"]._pywrap_profiler
        original = internal.ProfilerSession

        def session(*args: "Any") -> "Any":
            if self._session is not None:
                self._session.stop()
                self._session = None
            return original(*args)

        internal.ProfilerSession = session
        return original


sampler = ProfilerSampler()


def run_graph_step(owner: "Any", call: "Any", steps: int = 1) -> "Any":
    """Calls a step that fetches its batches inside its graph. owner: its model or function; steps: in one call."""
    clock.begin_step()
    sampler.before_step(clock.values[BATCHES])
    if not clock.enter(GRAPH):
        return call()
    start_s = monotonic()
    try:
        result = call()
    finally:
        clock.leave()
        sampler.after_step(monotonic() - start_s)
    clock.values[BATCHES] += steps
    clock.count_optimizer_step(owner, None, steps)
    return result
