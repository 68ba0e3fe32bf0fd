"""Pictures of a bucket are asked for ahead of the ring: their bytes are small, their latency is long.

Which picture stands at a position is guessed from the quarantine as it is now (`Samples.row_at`); where it turns out to
be another one, that one is fetched instead. So what is fetched ahead changes when bytes are there, never what a run
sees. How many should be under way, retries and slow answers: `storage/fetcher.py`.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from stoker.data.loading.samples import PendingRead, SampleStream
from stoker.data.loading.wait_breakdown import IN_FLIGHT, QUEUED, Transitions
from stoker.hardware.cgroup import host_memory

if TYPE_CHECKING:
    from stoker.storage.fetcher import Fetcher

MEMORY_FRACTION = 1 / 16
"""Of the free host memory, for bytes that have come or will come before the ring has room for them."""
DEFAULT_IMAGE_BYTES = 2**18
"""Size of a picture while none has come."""


@dataclasses.dataclass
class PrefetchCounters:
    """Fetches since the loader was made. But for `asked`, written by the fetcher's thread alone."""

    requested: int = 0
    completed: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """Summed over the fetches, which fly side by side."""


def iter_rank_positions(first: int, batch_size: int, stride: int) -> Iterator[int]:
    """Those of a rank's batches, whose first ones are first, first + stride, …, without an end."""
    return (base + k for base in itertools.count(first, stride) for k in range(batch_size))


class Prefetcher:
    """The fetches of a loader from one place of the stream on. Holds no loader, as its callbacks outlive one."""

    def __init__(
        self, samples: SampleStream, fetcher: "Fetcher", counters: PrefetchCounters, positions: Iterator[int]
    ) -> None:
        """positions: those that this rank loads, in order, without an end."""
        self._samples, self._fetcher, self._counters, self._positions = samples, fetcher, counters, positions
        self._next_position = next(positions)
        self._requests: dict[int, tuple[PendingRead, Transitions] | None] = {}
        """Position → its fetch; None where there is nothing to fetch."""
        limit, used = host_memory()
        self._memory_budget_bytes = MEMORY_FRACTION * max(0, limit - used)

    def take(self, position: int) -> tuple[PendingRead, Transitions] | None:
        """The fetch of a position's picture and the marks of the sample; None where its bytes lie on a local disk."""
        while self._next_position <= position:
            self._request_next()
        request = self._requests.pop(position, None)
        image_index = self._samples.image_index_at(position)
        if request is not None and request[0].image_index != image_index:
            return self._request(image_index)
        return request

    @property
    def max_in_flight(self) -> int:
        """For how many samples beyond the ring bytes should be under way."""
        counters = self._counters
        mean_bytes = counters.bytes / counters.completed if counters.bytes else DEFAULT_IMAGE_BYTES
        return min(self._fetcher.target_in_flight, int(self._memory_budget_bytes / mean_bytes))

    def top_up(self) -> None:
        """Asks for more, up to that."""
        limit = self.max_in_flight
        while len(self._requests) < limit and (self._samples.train or self._next_position < len(self._samples)):
            self._request_next()

    def _request_next(self) -> None:
        self._requests[self._next_position] = self._request(self._samples.image_index_at(self._next_position))
        self._next_position = next(self._positions)

    def _request(self, image_index: int) -> tuple[PendingRead, Transitions] | None:
        location = (
            self._samples.index.remote_object(image_index)
            if image_index >= 0 and not self._samples.is_cached(image_index)
            else None
        )
        if location is None:
            return None
        store, key, start, length = location
        counters, start_s = self._counters, time.perf_counter()
        transitions: Transitions = [(start_s, IN_FLIGHT)]

        def on_done(future: "Future[bytes]") -> None:
            now_s = time.perf_counter()
            transitions.append((now_s, QUEUED))
            counters.seconds += now_s - start_s
            counters.completed += 1
            if not future.cancelled() and future.exception() is None:
                counters.bytes += len(future.result())

        counters.requested += 1
        future = self._fetcher.submit(store, key, start=start, length=length)
        future.add_done_callback(on_done)
        return PendingRead(image_index, future), transitions
