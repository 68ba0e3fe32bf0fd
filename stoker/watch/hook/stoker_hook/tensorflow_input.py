"""The share of a TensorFlow step that waits for its input, by TensorFlow's own profiler.

A step of `fit` fetches its batches inside its graph, where Python sees nothing. So once a minute a few steps run under
the profiler, from the begin of one to the end of another, and what it recorded goes into a file beside the cell, for
the watcher to read (`stoker/watch/tensorflow_trace.py`). It is off for the rest of the time, and gives way to the
user's own.
"""

import os
import sys
from time import monotonic

from . import FOLDER, say
from .clock import BATCHES, GRAPH, clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

EVERY_S, FIRST_AFTER = 60.0, 3
"""Seconds from one trace to the next; steps before the first, in which the graph is made."""
STEPS_MOST, TRACE_S, STEPS_LEAST, PATIENCE_S = 50, 1.5, 3, 20.0
"""A trace ends after so many steps, or after so long when it has a few; of very slow steps, after PATIENCE_S."""
OPTIONS = {"host_tracer_level": 2, "python_tracer_level": 0, "device_tracer_level": 0}


class Sampler:
    """Takes traces between steps, in the training thread."""

    def __init__(self) -> None:
        self._session: Any = None
        self._make: Any = None
        self._next_s = 0.0
        self._begun_s = 0.0
        self._steps = 0
        self._graph_s = 0.0
        self._traces = 0

    def before_step(self, steps: float) -> None:
        now = monotonic()
        if self._session is not None or steps < FIRST_AFTER or now < self._next_s:
            return
        self._next_s = now + EVERY_S
        try:
            if self._make is None:
                self._make = self._make_way()
            session = self._make()
            session.start("", OPTIONS)
        except Exception as error:  # noqa: BLE001
            if type(error).__name__ == "AlreadyExistsError":  # the user's own profiler runs: again in a minute
                return
            self._next_s = float("inf")
            say("profiler", error)
            return
        self._session, self._begun_s, self._steps, self._graph_s = session, now, 0, 0.0

    def after_step(self, took_s: float) -> None:
        if self._session is None:
            return
        self._steps += 1
        self._graph_s += took_s
        open_s = monotonic() - self._begun_s
        if self._steps >= STEPS_MOST or open_s >= PATIENCE_S or (open_s >= TRACE_S and self._steps >= STEPS_LEAST):
            self._stop()

    def _stop(self) -> None:
        session, self._session = self._session, None
        try:
            data = session.stop()
            self._traces += 1
            name = os.path.join(FOLDER, f"{os.getpid()}-{self._traces}")
            with open(name + ".part", "wb") as file:
                file.write(f"{self._graph_s:.9f}\n".encode() + data)
            os.rename(name + ".part", name + ".trace")
        except Exception as error:  # noqa: BLE001 (no room, no watcher: the share of the input stays unknown)
            say("profiler", error)

    def _make_way(self) -> "Any":
        """TensorFlow's class of sessions, which from now on ends ours before it makes another's: there can be one."""
        internal = sys.modules["tensorflow.python.profiler.profiler_v2"]._pywrap_profiler
        make = internal.ProfilerSession

        def session(*words: "Any") -> "Any":
            if self._session is not None:
                self._session.stop()
                self._session = None
            return make(*words)

        internal.ProfilerSession = session
        return make


sampler = Sampler()


def stepping(model: "Any", step: "Any") -> "Any":
    """The train_function of a model, timed."""

    def train_function(*words: "Any", **named: "Any") -> "Any":
        if not clock.is_free():
            return step(*words, **named)
        clock.next_step()
        sampler.before_step(clock.values[BATCHES])
        if not clock.enter(GRAPH):
            return step(*words, **named)
        begun = monotonic()
        try:
            result = step(*words, **named)
        finally:
            clock.leave()
            sampler.after_step(monotonic() - begun)
        steps = int(getattr(model, "steps_per_execution", 1) or 1)
        clock.values[BATCHES] += steps
        clock.stepped(model, None, steps)
        return result

    return train_function
