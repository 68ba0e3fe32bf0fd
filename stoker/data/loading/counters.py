"""What the threads of a loader count while they work: one of these each, so that none waits for another."""

import dataclasses
import time
from collections.abc import Iterable

from stoker.data.loading.wait_breakdown import DECODING, READ


@dataclasses.dataclass
class Counters:
    """What one thread has done, and what it is at. Written by that thread alone; `stages.py` sums them up."""

    num_images: int = 0
    num_reads: int = 0
    """Files that it read, those of a bucket that came ahead not counted."""
    read_bytes: int = 0
    read_s: float = 0.0
    """Reading files."""
    cache_hits: int = 0
    """Of what it read, pictures that the cache had decoded."""
    cache_hit_bytes: int = 0
    cache_misses: int = 0
    """Pictures that it decoded for the cache."""
    decode_s: float = 0.0
    """Decoding, resizing and placing boxes."""
    device_decode_s: float = 0.0
    """Of these, the thread that has the device decode whole batches."""
    idle_s: float = 0.0
    """Waiting for a free place in the ring, or for bytes."""
    current_stage: tuple[str, float] | None = None
    """READ or DECODING, and since when."""

    def add(self, other: "Counters") -> None:
        self.num_images += other.num_images
        self.num_reads += other.num_reads
        self.read_bytes += other.read_bytes
        self.read_s += other.read_s
        self.cache_hits += other.cache_hits
        self.cache_hit_bytes += other.cache_hit_bytes
        self.cache_misses += other.cache_misses
        self.decode_s += other.decode_s
        self.device_decode_s += other.device_decode_s
        self.idle_s += other.idle_s


def sum_counters(per_worker: Iterable[Counters]) -> tuple[Counters, dict[str, int]]:
    """(the sum, with what is being done up to now; how many threads are READING, how many DECODING)."""
    total, num_active, now_s = Counters(), {READ: 0, DECODING: 0}, time.perf_counter()
    for counters in per_worker:
        total.add(counters)
        if (current := counters.current_stage) is not None:
            stage, start_s = current
            num_active[stage] += 1
            if stage == READ:
                total.read_s += now_s - start_s
            else:
                total.decode_s += now_s - start_s
    return total, num_active
