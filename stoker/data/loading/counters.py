"""What the threads of a loader count while they work: one of these each, so that none waits for another."""

import dataclasses
import time
from collections.abc import Iterable

from stoker.data.loading.wait_breakdown import DECODING, READ


@dataclasses.dataclass
class Counters:
    """What one thread has done, and what it is at. Written by that thread alone; `stages.py` sums them up."""

    pictures: int = 0
    read: int = 0
    """Files that it read, those of a bucket that came ahead not counted."""
    read_bytes: int = 0
    read_s: float = 0.0
    """Reading files."""
    hits: int = 0
    """Of what it read, pictures that the cache had decoded."""
    hit_bytes: int = 0
    misses: int = 0
    """Pictures that it decoded for the cache."""
    decode_s: float = 0.0
    """Decoding, resizing and placing boxes."""
    device_s: float = 0.0
    """Of these, the thread that has the device decode whole batches."""
    idle_s: float = 0.0
    """Waiting for a free place in the ring, or for bytes."""
    doing: tuple[str, float] | None = None
    """READ or DECODING, and since when."""

    def add(self, other: "Counters") -> None:
        self.pictures += other.pictures
        self.read += other.read
        self.read_bytes += other.read_bytes
        self.read_s += other.read_s
        self.hits += other.hits
        self.hit_bytes += other.hit_bytes
        self.misses += other.misses
        self.decode_s += other.decode_s
        self.device_s += other.device_s
        self.idle_s += other.idle_s


def sum_up(each: Iterable[Counters]) -> tuple[Counters, dict[str, int]]:
    """(the sum, with what is being done up to now; how many threads are READING, how many DECODING)."""
    total, doing, now_s = Counters(), {READ: 0, DECODING: 0}, time.perf_counter()
    for counters in each:
        total.add(counters)
        if (busy := counters.doing) is not None:
            stage, since_s = busy
            doing[stage] += 1
            if stage == READ:
                total.read_s += now_s - since_s
            else:
                total.decode_s += now_s - since_s
    return total, doing
