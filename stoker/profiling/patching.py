"""Functions of others, timed while somebody measures: wrapped on the spot, put back afterwards.

What a wrapped function takes, returns and raises stays as it is. Who is told, `stoker.profiling.measure.torch_hooks`,
decides what an interval means.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

Told = Callable[[float, float], None]
"""Takes begin and end of a call, seconds of `time.perf_counter`."""


class Replaced:
    """`owner.name` is `make(what it was)` until `put_back`."""

    def __init__(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._owner, self._name = owner, name
        self._before = getattr(owner, name)
        self._now = make(self._before)
        setattr(owner, name, self._now)

    def put_back(self) -> None:
        """Unless somebody else has wrapped it since: then ours stays underneath, and tells nobody who listens."""
        if getattr(self._owner, self._name) is self._now:
            setattr(self._owner, self._name, self._before)


def timed(owner: Any, name: str, told: Told) -> Replaced:
    """Tells `told` of each call of `owner.name`, also of one that raises."""

    def make(before: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        def call(*args: Any, **named: Any) -> Any:
            begin_s = time.perf_counter()
            try:
                return before(*args, **named)
            finally:
                told(begin_s, time.perf_counter())

        return call

    return Replaced(owner, name, make)
