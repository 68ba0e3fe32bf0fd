"""Requests images of a bucket before there is a batch buffer for them: their bytes are few, their latency is long.

Images of shards that the order keeps near each other are requested together, as one range of the object
(`SampleStream.read_together`). Which image belongs to a position is predicted from the present quarantine
(`SampleStream.image_index_at`). Where the prediction turns out wrong, the right image is requested instead. So
prefetching changes when bytes arrive, never what a run sees. Number of requests in flight, retries and slow responses:
`storage/fetcher.py`.
"""

import itertools
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, NamedTuple

from stoker.data.loading.samples import PendingRead, SampleStream
from stoker.data.loading.shard_order import MAX_BLOCK_BYTES, MAX_GAP_BYTES
from stoker.hardware.cgroup import host_memory

if TYPE_CHECKING:
    from stoker.storage.fetcher import Fetcher
    from stoker.storage.store import Store

MEMORY_FRACTION = 1 / 16
"""Fraction of the free host memory for bytes that arrive before a batch buffer is free."""
DEFAULT_IMAGE_BYTES = 2**18
"""Assumed size of an image until one has arrived."""


def iter_rank_positions(first: int, batch_size: int, stride: int) -> Iterator[int]:
    """The positions of a rank's batches, which start at first, first + stride, …; endless."""
    return (base + k for base in itertools.count(first, stride) for k in range(batch_size))


class _Read(NamedTuple):
    """An image that is to be read."""

    store: "Store"
    key: str
    start: int
    length: int | None
    """None: the whole object."""
    future: "Future[bytes] | Future[memoryview]"

    @property
    def end(self) -> int:
        return self.start + (self.length or 0)


class Prefetcher:
    """The requests of a loader from one position on. It holds no loader, because its callbacks may outlive one."""

    def __init__(self, samples: SampleStream, fetcher: "Fetcher", positions: Iterator[int]) -> None:
        """positions: those that this rank loads, in order, endless."""
        self._samples, self._fetcher, self._positions = samples, fetcher, positions
        self._num_fetched = self._fetched_bytes = 0
        self._next_position = next(positions)
        self._requests: dict[int, PendingRead | None] = {}
        """Position → its request; None where there is nothing to request."""
        self._in_flight: set[Future[bytes]] = set()
        """Requests for images of shards."""
        limit, used = host_memory()
        self._memory_budget_bytes = MEMORY_FRACTION * max(0, limit - used)

    def take(self, position: int) -> PendingRead | None:
        """The request for a position's image; None where its bytes are local."""
        while self._next_position <= position:
            self._request_next()
        request = self._requests.pop(position, None)
        if request is not None and request.image_index != self._samples.image_index_at(position):
            self._request([position])
            request = self._requests.pop(position)
        return request

    @property
    def max_in_flight(self) -> int:
        """For how many samples beyond the batch buffers bytes should be requested."""
        mean_bytes = self._fetched_bytes / self._num_fetched if self._fetched_bytes else DEFAULT_IMAGE_BYTES
        affordable = int(self._memory_budget_bytes / mean_bytes)
        if not self._samples.reads_ranges:
            return min(self._fetcher.target_in_flight, affordable)
        if self._samples.train:
            return self._samples.buffer_images  # what the order needs, derived from the memory at the start of the run
        return affordable

    def top_up(self) -> None:
        """Requests images until `max_in_flight` are under way."""
        limit, target = self.max_in_flight, self._fetcher.target_in_flight
        while (
            len(self._requests) < limit
            and len(self._in_flight) < target
            and (self._samples.train or self._next_position < len(self._samples))
        ):
            self._request_next()

    def _request_next(self) -> None:
        position = self._next_position
        if position not in self._requests:  # else it was requested with an earlier one
            self._request(self._samples.read_together(position))
        self._next_position = next(self._positions)

    def _request(self, positions: list[int]) -> None:
        """Requests the images of positions: in as few ranges as are near each other, if they are ranges of objects."""
        reads: list[_Read] = []
        for position in positions:
            self._requests[position] = None
            image_index = self._samples.image_index_at(position)
            if image_index < 0 or self._samples.is_cached(image_index):
                continue
            location = self._samples.index.remote_object(image_index)
            if location is not None:
                read = _Read(*location, Future())
                self._requests[position] = PendingRead(image_index, read.future)
                reads.append(read)
        for nearby in _merge_ranges(reads):
            self._request_range(nearby)

    def _request_range(self, reads: list[_Read]) -> None:
        """One request for all of `reads`, which are sorted and of one object."""
        first, is_range = reads[0].start, reads[0].length is not None

        def on_done(future: "Future[bytes]") -> None:
            self._num_fetched += len(reads)
            self._in_flight.discard(future)
            error = CancelledError() if future.cancelled() else future.exception()
            data = b"" if error is not None else future.result()
            for read in reads:
                if error is not None:
                    read.future.set_exception(error)
                    continue
                # Parts are copied when they are used: long-lived copies of many sizes would fragment the memory.
                part: Any = memoryview(data)[read.start - first : read.end - first] if is_range else data
                self._fetched_bytes += len(part)
                read.future.set_result(part)

        length = max(read.end for read in reads) - first if is_range else None
        future = self._fetcher.submit(reads[0].store, reads[0].key, start=first, length=length)
        if is_range:
            self._in_flight.add(future)
        future.add_done_callback(on_done)


def _merge_ranges(reads: list[_Read]) -> Iterator[list[_Read]]:
    """Groups of ranges of the same object that are best read at once."""
    group: list[_Read] = []
    for read in sorted(reads, key=lambda read: (read.key, read.start)):
        if group and (
            read.length is None
            or read.key != group[0].key
            or read.start - group[-1].end > MAX_GAP_BYTES
            or read.end - group[0].start > 2 * MAX_BLOCK_BYTES
        ):
            yield group
            group = []
        group.append(read)
    if group:
        yield group
