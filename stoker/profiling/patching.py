"""Functions of others, timed while somebody measures: wrapped on the spot, put back afterwards.

What a wrapped function takes, returns and raises stays as it is. Who is told, `stoker.profiling.measure.torch_hooks`,
decides what an interval means.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

OnCall = Callable[[float, float], None]
"""Takes begin and end of a call, seconds of `time.perf_counter`."""


class Patch:
    """`owner.name` is `make(what it was)` until `put_back`."""

    def __init__(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._owner, self._name = owner, name
        self._original = getattr(owner, name)
        self._wrapped = wrap(self._original)
        setattr(owner, name, self._wrapped)

    def restore(self) -> None:
        """Unless somebody else has wrapped it since: then ours stays underneath, and tells nobody who listens."""
        if getattr(self._owner, self._name) is self._wrapped:
            setattr(self._owner, self._name, self._original)


def time_calls(owner: Any, name: str, on_call: OnCall) -> Patch:
    """Tells `told` of each call of `owner.name`, also of one that raises."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                on_call(start_s, time.perf_counter())

        return wrapper

    return Patch(owner, name, wrap)
