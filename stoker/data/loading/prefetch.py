"""Requests images of a bucket before there is a batch buffer for them: their bytes are few, their latency is long.

Which image belongs to a position is predicted from the present quarantine (`SampleStream.image_index_at`). Where the
prediction turns out wrong, the right image is requested instead. So prefetching changes when bytes arrive, never what
a run sees. Number of requests in flight, retries and slow responses: `storage/fetcher.py`.
"""

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from stoker.data.loading.samples import PendingRead, SampleStream
from stoker.data.loading.stats import PrefetchCounters
from stoker.data.loading.wait_breakdown import IN_FLIGHT, QUEUED, Transitions
from stoker.hardware.cgroup import host_memory

if TYPE_CHECKING:
    from stoker.storage.fetcher import Fetcher

MEMORY_FRACTION = 1 / 16
"""Fraction of the free host memory for bytes that arrive before a batch buffer is free."""
RELEASED_FRACTION = 1 / 8
"""Of the budget that stays when memory is short."""
DEFAULT_IMAGE_BYTES = 2**18
"""Assumed size of an image until one has arrived."""


def iter_rank_positions(first: int, batch_size: int, stride: int) -> Iterator[int]:
    """The positions of a rank's batches, which start at first, first + stride, …; endless."""
    return (base + k for base in itertools.count(first, stride) for k in range(batch_size))


class Prefetcher:
    """The requests of a loader from one position on. It holds no loader, because its callbacks may outlive one."""

    def __init__(
        self, samples: SampleStream, fetcher: "Fetcher", counters: PrefetchCounters, positions: Iterator[int]
    ) -> None:
        """positions: those that this rank loads, in order, endless."""
        self._samples, self._fetcher, self._counters, self._positions = samples, fetcher, counters, positions
        self._next_position = next(positions)
        self._requests: dict[int, tuple[PendingRead, Transitions] | None] = {}
        """Position → its request; None where there is nothing to request."""
        limit, used = host_memory()
        self._memory_budget_bytes = MEMORY_FRACTION * max(0, limit - used)

    def release(self) -> None:
        """Requests fewer images ahead from now on."""
        self._memory_budget_bytes *= RELEASED_FRACTION

    def take(self, position: int) -> tuple[PendingRead, Transitions] | None:
        """The request for a position's image, and the transitions of the sample; None where its bytes are local."""
        while self._next_position <= position:
            self._request_next()
        request = self._requests.pop(position, None)
        image_index = self._samples.image_index_at(position)
        if request is not None and request[0].image_index != image_index:
            return self._request(image_index)
        return request

    @property
    def max_in_flight(self) -> int:
        """For how many samples beyond the batch buffers bytes should be requested."""
        counters = self._counters
        mean_bytes = counters.bytes / counters.completed if counters.bytes else DEFAULT_IMAGE_BYTES
        return min(self._fetcher.target_in_flight, int(self._memory_budget_bytes / mean_bytes))

    def top_up(self) -> None:
        """Requests images until `max_in_flight` are under way."""
        limit = self.max_in_flight
        while len(self._requests) < limit and (self._samples.train or self._next_position < len(self._samples)):
            self._request_next()

    def _request_next(self) -> None:
        self._requests[self._next_position] = self._request(self._samples.image_index_at(self._next_position))
        self._next_position = next(self._positions)

    def _request(self, image_index: int) -> tuple[PendingRead, Transitions] | None:
        if image_index < 0 or self._samples.is_cached(image_index):
            return None
        location = self._samples.index.remote_object(image_index)
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
