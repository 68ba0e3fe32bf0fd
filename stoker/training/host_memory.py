"""Gives host memory back before the kernel kills the run: prefetched batches first, then the cache of decoded images.

Looked at once a second by the training thread. Near the limit means that less than LOW_FRACTION of it, or LOW_BYTES, is
free of what the kernel cannot reclaim. What was given back is not taken again in this attempt.
"""

import time
from collections.abc import Callable

from stoker.data.loading.loader import Loader
from stoker.hardware.cgroup import HostLimit, nearest_memory_limit
from stoker.training.state import EventLogger

LOW_FRACTION, LOW_BYTES = 0.05, 2**30
POLL_S = 1.0
SETTLE_POLLS = 3
"""Polls after giving something back, in which buffers in use become free."""


class HostMemoryGuard:
    """Watches the memory of one loader's process. read: the nearest limit; clock: seconds."""

    def __init__(
        self,
        loader: Loader,
        log_event: EventLogger,
        *,
        read: Callable[[], HostLimit] = nearest_memory_limit,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._releases = [loader.release_batches, loader.release_cache]
        self._log_event, self._read, self._clock = log_event, read, clock
        self._next_poll_s = clock()

    def poll(self) -> None:
        """Frees memory if little is left, at most once a second."""
        if not self._releases or self._clock() < self._next_poll_s:
            return
        self._next_poll_s = self._clock() + POLL_S
        memory = self._read()
        free_bytes = memory.limit_bytes - memory.used_bytes
        if free_bytes >= min(LOW_FRACTION * memory.limit_bytes, LOW_BYTES):
            return
        released = None
        while self._releases and released is None:
            released = self._releases.pop(0)()
        self._next_poll_s += SETTLE_POLLS * POLL_S
        self._log_event(
            "low_host_memory",
            f"host memory is nearly used up: {memory.used_bytes / 2**20:,.0f} of {memory.limit_bytes / 2**20:,.0f} MiB "
            f"of {memory.name}; " + (released or "nothing is left to give back"),
            used_bytes=memory.used_bytes,
            limit_bytes=memory.limit_bytes,
            limit=memory.name,
            released=released is not None,
        )
