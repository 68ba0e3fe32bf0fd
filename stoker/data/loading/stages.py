"""What a loader has done and is doing, by stage: fetch, decode, copy. Read by people, benchmarks, and `autotune.py`."""

import dataclasses
from collections.abc import Iterable

from stoker.data.loading.counters import Counters, sum_up
from stoker.data.loading.prefetch import Flights
from stoker.data.loading.samples import Slot
from stoker.data.loading.wait_breakdown import COPY, DECODING, READ, Waits


@dataclasses.dataclass
class Stage:
    """A stage since the loader was made."""

    seconds: float = 0.0
    """Summed over its samples, which run side by side."""
    pictures: int = 0
    bytes: int = 0
    """Of encoded pictures that were fetched, of pixels that were decoded or copied."""
    now: int = 0
    """Samples that are in it."""


@dataclasses.dataclass
class Stats:
    """What a loader has done since it was made, and what it is at."""

    fetch: Stage
    decode: Stage
    """Decoding, resizing and placing boxes."""
    copy: Stage
    """To the device; `seconds` are those of issuing the copies and of waiting for them."""
    queued: int
    """Samples that wait for a thread."""
    ready: int
    """Samples that wait for the caller, those of a batch that is not complete included."""
    threads: int
    depth: int
    """Batches that may be decoded ahead."""
    ahead: int
    """Objects of a bucket that may be under way beyond the ring."""
    read_s: float
    """Threads reading, a part of `fetch.seconds`: the rest are requests in flight, which hold up no thread."""
    device_s: float
    """The thread that has the device decode whole batches, a part of `decode.seconds`."""
    hits: int
    """Pictures that the cache of decoded ones had."""
    hit_bytes: int
    """Pixels that were read from there, a part of `fetch.bytes`."""
    misses: int
    """Pictures that were decoded for it."""
    idle_s: float
    """Threads waiting for a free place in the ring, or for bytes: the loader is faster than training."""
    wait_s: float
    """The caller waiting in `__next__`: training is faster than the loader."""
    waits: dict[str, float]
    """Of these, by stage as in `Loader.last_wait`."""


def stats_of(
    work: Iterable[Counters],
    flights: Flights,
    waits: Waits,
    slot: Slot,
    *,
    copies: int,
    copying: int,
    wait_s: float,
    **now: int,
) -> Stats:
    """work: what each thread has done; slot: any of the ring; copies: batches copied so far; copying: batches whose
    copy is not done; now: the fields of `Stats` of the same names."""
    total, doing = sum_up(work)
    batch, flying = len(slot.pixels), flights.asked - flights.arrived
    return Stats(
        fetch=Stage(
            flights.seconds + total.read_s,
            flights.arrived + total.read,
            flights.bytes + total.read_bytes,
            flying + doing[READ],
        ),
        decode=Stage(total.decode_s, total.pictures, total.pictures * slot.pixels[0].nbytes, doing[DECODING]),
        copy=Stage(waits.total_s[COPY], copies * batch, copies * slot.nbytes, copying * batch),
        read_s=total.read_s,
        device_s=total.device_s,
        idle_s=total.idle_s,
        wait_s=wait_s,
        waits=dict(waits.total_s),
        hits=total.hits,
        hit_bytes=total.hit_bytes,
        misses=total.misses,
        **now,
    )
