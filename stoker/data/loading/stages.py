"""What a loader has done and is doing, by stage: fetch, decode, copy. Read by people, benchmarks, and `autotune.py`."""

import dataclasses
from collections.abc import Iterable

from stoker.data.loading.counters import Counters, sum_counters
from stoker.data.loading.prefetch import PrefetchCounters
from stoker.data.loading.samples import HostBatchBuffer
from stoker.data.loading.wait_breakdown import COPY, DECODING, READ, WaitBreakdown


@dataclasses.dataclass
class StageStats:
    """A stage since the loader was made."""

    seconds: float = 0.0
    """Summed over its samples, which run side by side."""
    num_images: int = 0
    bytes: int = 0
    """Of encoded pictures that were fetched, of pixels that were decoded or copied."""
    in_progress: int = 0
    """Samples that are in it."""


@dataclasses.dataclass
class LoaderStats:
    """What a loader has done since it was made, and what it is at."""

    fetch: StageStats
    decode: StageStats
    """Decoding, resizing and placing boxes."""
    copy: StageStats
    """To the device; `seconds` are those of issuing the copies and of waiting for them."""
    queued: int
    """Samples that wait for a thread."""
    ready: int
    """Samples that wait for the caller, those of a batch that is not complete included."""
    workers: int
    prefetch_depth: int
    """Batches that may be decoded ahead."""
    max_in_flight: int
    """Objects of a bucket that may be under way beyond the ring."""
    read_s: float
    """Threads reading, a part of `fetch.seconds`: the rest are requests in flight, which hold up no thread."""
    device_decode_s: float
    """The thread that has the device decode whole batches, a part of `decode.seconds`."""
    cache_hits: int
    """Pictures that the cache of decoded ones had."""
    cache_hit_bytes: int
    """Pixels that were read from there, a part of `fetch.bytes`."""
    cache_misses: int
    """Pictures that were decoded for it."""
    idle_s: float
    """Threads waiting for a free place in the ring, or for bytes: the loader is faster than training."""
    wait_s: float
    """The caller waiting in `__next__`: training is faster than the loader."""
    wait_s_by_stage: dict[str, float]
    """Of these, by stage as in `Loader.last_wait`."""


def collect_loader_stats(
    worker_counters: Iterable[Counters],
    prefetch_counters: PrefetchCounters,
    wait_breakdown: WaitBreakdown,
    buffer: HostBatchBuffer,
    *,
    batches_copied: int,
    batches_copying: int,
    wait_s: float,
    **gauges: int,
) -> LoaderStats:
    """work: what each thread has done; slot: any of the ring; copies: batches copied so far; copying: batches whose
    copy is not done; now: the fields of `Stats` of the same names."""
    total, num_active = sum_counters(worker_counters)
    batch_size, in_flight = len(buffer.pixels), prefetch_counters.requested - prefetch_counters.completed
    return LoaderStats(
        fetch=StageStats(
            prefetch_counters.seconds + total.read_s,
            prefetch_counters.completed + total.num_reads,
            prefetch_counters.bytes + total.read_bytes,
            in_flight + num_active[READ],
        ),
        decode=StageStats(
            total.decode_s, total.num_images, total.num_images * buffer.pixels[0].nbytes, num_active[DECODING]
        ),
        copy=StageStats(
            wait_breakdown.total_s[COPY],
            batches_copied * batch_size,
            batches_copied * buffer.nbytes,
            batches_copying * batch_size,
        ),
        read_s=total.read_s,
        device_decode_s=total.device_decode_s,
        idle_s=total.idle_s,
        wait_s=wait_s,
        wait_s_by_stage=dict(wait_breakdown.total_s),
        cache_hits=total.cache_hits,
        cache_hit_bytes=total.cache_hit_bytes,
        cache_misses=total.cache_misses,
        **gauges,
    )
