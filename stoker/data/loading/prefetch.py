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

from stoker.data.loading.samples import Fetch, Samples
from stoker.data.loading.wait_breakdown import FLIGHT, QUEUED, Marks
from stoker.hardware.cgroup import host_memory

if TYPE_CHECKING:
    from stoker.storage.fetcher import Fetcher

MEMORY_SHARE = 1 / 16
"""Of the free host memory, for bytes that have come or will come before the ring has room for them."""
USUAL_BYTES = 2**18
"""Size of a picture while none has come."""


@dataclasses.dataclass
class Flights:
    """Fetches since the loader was made. But for `asked`, written by the fetcher's thread alone."""

    asked: int = 0
    arrived: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """Summed over the fetches, which fly side by side."""


def positions(first: int, batch: int, stride: int) -> Iterator[int]:
    """Those of a rank's batches, whose first ones are first, first + stride, …, without an end."""
    return (base + k for base in itertools.count(first, stride) for k in range(batch))


class Ahead:
    """The fetches of a loader from one place of the stream on. Holds no loader, as its callbacks outlive one."""

    def __init__(self, samples: Samples, fetcher: "Fetcher", flights: Flights, positions: Iterator[int]) -> None:
        """positions: those that this rank loads, in order, without an end."""
        self._samples, self._fetcher, self._flights, self._positions = samples, fetcher, flights, positions
        self._next = next(positions)
        self._asked: dict[int, tuple[Fetch, Marks] | None] = {}
        """Position → its fetch; None where there is nothing to fetch."""
        limit, used = host_memory()
        self._memory_bytes = MEMORY_SHARE * max(0, limit - used)

    def take(self, position: int) -> tuple[Fetch, Marks] | None:
        """The fetch of a position's picture and the marks of the sample; None where its bytes lie on a local disk."""
        while self._next <= position:
            self._ask_next()
        found = self._asked.pop(position, None)
        row = self._samples.row_at(position)
        if found is not None and found[0].row != row:
            return self._ask(row)
        return found

    @property
    def most(self) -> int:
        """For how many samples beyond the ring bytes should be under way."""
        flights = self._flights
        usual = flights.bytes / flights.arrived if flights.bytes else USUAL_BYTES
        return min(self._fetcher.ahead, int(self._memory_bytes / usual))

    def top_up(self) -> None:
        """Asks for more, up to that."""
        most = self.most
        while len(self._asked) < most and (self._samples.train or self._next < len(self._samples)):
            self._ask_next()

    def _ask_next(self) -> None:
        self._asked[self._next] = self._ask(self._samples.row_at(self._next))
        self._next = next(self._positions)

    def _ask(self, row: int) -> tuple[Fetch, Marks] | None:
        where = self._samples.index.remote(row) if row >= 0 and not self._samples.cached(row) else None
        if where is None:
            return None
        store, key, start, length = where
        flights, began_s = self._flights, time.perf_counter()
        marks: Marks = [(began_s, FLIGHT)]

        def note(future: "Future[bytes]") -> None:
            now_s = time.perf_counter()
            marks.append((now_s, QUEUED))
            flights.seconds += now_s - began_s
            flights.arrived += 1
            if not future.cancelled() and future.exception() is None:
                flights.bytes += len(future.result())

        flights.asked += 1
        future = self._fetcher.submit(store, key, start=start, length=length)
        future.add_done_callback(note)
        return Fetch(row, future), marks
