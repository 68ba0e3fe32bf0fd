"""The order of images that are byte ranges of shards: parts of shards in random order, mixed within a bounded buffer.

A block is up to 4 MiB of consecutive images of one shard, which one ranged request reads. Each epoch puts all blocks in
a random order, and cuts that sequence into as many sections as a batch has places: each place of the batch reads its
own section, block by block, and mixes the images within a window. So a rank, which has certain places of every batch,
reads its blocks alone, and the order is that of any number of ranks. It is a pure function of (seed, epoch, index) and
of the four numbers of `ShardOrder`, as the random order of `geometry.epoch_order` is of (seed, epoch, index)
(docs/decisions/0015-order-of-shards.md). Not here: the requests (`worker_pool.py`).
"""

import numpy as np
from numpy.typing import NDArray

from stoker.data import geometry
from stoker.data.index import ImageRanges

MAX_BLOCK_BYTES = 4 * 2**20
"""A request of this size takes 20 ms of a link of 200 MB/s: with a few in flight, their latency costs nothing."""
MEMORY_FRACTION, MAX_BUFFER_BYTES = 1 / 8, 2 * 2**30
"""Fraction of the free memory, and bytes per rank, for images that are mixed."""
LARGE_IMAGE_BYTES = 2 * 2**20
"""Images of this size are requested one by one: at 200 MB/s one takes 10 ms, and a request 0.2 ms of CPU time."""
MIN_IMAGES_PER_PLACE = 8
"""A smaller buffer for each place of the batch would read parts of less than 4 images."""
MAX_GAP_BYTES = 2**18
"""Bytes between two images that are read along (annotations, an image of another split), not left out."""


class EpochOrder:
    """The order of one epoch of N images, and which of them are read together."""

    def __init__(
        self, order: NDArray[np.int64], read_number: NDArray[np.int64], part_starts: NDArray[np.int64]
    ) -> None:
        """order: [N], the image at each index of the epoch. read_number: [N], the place of that image in the sequence
        in which images are read. part_starts: where each part that is read at once begins in that sequence."""
        self.order, self._read_number = order, read_number
        self._part_bounds = np.append(part_starts, len(order))
        self._index_read = np.empty_like(order)
        self._index_read[read_number] = np.arange(len(order))

    def read_together(self, index_in_epoch: int) -> NDArray[np.int64]:
        """Returns the indices in the epoch, ascending, of the images that are read with that of `index_in_epoch`."""
        end = np.searchsorted(self._part_bounds, self._read_number[index_in_epoch], side="right")
        return np.sort(self._index_read[self._part_bounds[end - 1] : self._part_bounds[end]])


class ShardOrder:
    """The orders of all epochs. At most `buffer` images, rounded down to whole places of the batch, are read and not
    used yet, if each block is read when the first of its images is used."""

    def __init__(self, ranges: ImageRanges, *, seed: int, batch_size: int, buffer: int) -> None:
        """batch_size: images per batch of all ranks together."""
        count = len(ranges.start)
        per_place = max(2, min(buffer, count) // batch_size)
        block = assign_blocks(ranges, max(1, per_place // 4))
        self._members = np.lexsort((ranges.start, block))
        """[N], the images in the order in which their blocks have them."""
        sizes = np.bincount(block)
        self._block_starts = np.append(0, sizes.cumsum())
        self._window = max(1, per_place - int(sizes.max(initial=1)))
        self._seed, self._batch_size = seed, batch_size

    def epoch(self, epoch: int) -> EpochOrder:
        """Returns the order of an epoch, after 20 ms for 118,287 images."""
        count, places = len(self._members), self._batch_size
        blocks = geometry.epoch_order(self._seed, epoch, len(self._block_starts) - 1)
        first, sizes = self._block_starts[blocks], np.diff(self._block_starts)[blocks]
        ends = sizes.cumsum()
        number = np.arange(count)
        sequence = self._members[number + np.repeat(first - (ends - sizes), sizes)]
        section_sizes = -(-(count - np.arange(min(places, count))) // places)
        section_starts = section_sizes.cumsum() - section_sizes
        section = np.repeat(np.arange(len(section_sizes)), section_sizes)
        number_in_section = number - section_starts[section]
        # An image that is read as the q-th of its section has the key q + U(0, window): it moves by less than a window.
        shift = geometry.random_uniform(self._seed, epoch, [0], geometry.RandomStream.SHIFT, count)[0] * self._window
        section_span = int(section_sizes.max(initial=0)) + self._window
        by_use = np.argsort(section * section_span + number_in_section + shift, kind="stable")
        order, read_number = np.empty(count, np.int64), np.empty(count, np.int64)
        index_in_epoch = section + places * number_in_section
        order[index_in_epoch], read_number[index_in_epoch] = sequence[by_use], by_use
        return EpochOrder(order, read_number, np.union1d(section_starts, ends - sizes))


def assign_blocks(ranges: ImageRanges, max_images: int) -> NDArray[np.int64]:
    """Returns [N], the number of each image's block. Blocks of a shard have about the same number of images."""
    count = len(ranges.start)
    if not count:
        return np.zeros(0, np.int64)
    by_place = np.lexsort((ranges.start, ranges.file))
    file, start, length = (values[by_place] for values in ranges)
    first = np.ones(count, np.bool_)
    first[1:] = (file[1:] != file[:-1]) | (start[1:] - (start + length)[:-1] > MAX_GAP_BYTES)
    run = first.cumsum() - 1
    run_starts = np.flatnonzero(first)
    run_sizes = np.diff(np.append(run_starts, count))
    images = max(1, min(max_images, int(MAX_BLOCK_BYTES // max(1.0, float(length.mean())))))
    parts = -(-run_sizes // images)
    part = (np.arange(count) - run_starts[run]) * parts[run] // run_sizes[run]
    # where images are much larger than the mean
    piece = (start - start[run_starts][run]) // (2 * MAX_BLOCK_BYTES)
    first[1:] |= (part[1:] != part[:-1]) | (piece[1:] != piece[:-1])
    block = np.empty(count, np.int64)
    block[by_place] = first.cumsum() - 1
    return block


def choose_buffer(
    ranges: ImageRanges, *, is_in_bucket: bool, batch_size: int, num_ranks: int, memory_bytes: int
) -> tuple[int, str]:
    """Returns `--shuffle-buffer` and the reason. batch_size: of all ranks. memory_bytes: free memory for each rank."""
    count = len(ranges.length)
    if not count or not ranges.length.all():
        return 0, "each image is a file of its own: the order is random"
    if not is_in_bucket:
        return 0, "the shards are on a disk, where any image is read at once: the order is random"
    mean_bytes = int(ranges.length.mean())
    if mean_bytes >= LARGE_IMAGE_BYTES:
        return 0, f"images of {mean_bytes / 2**20:,.1f} MiB are requested one by one: the order is random"
    rank_bytes = min(MAX_BUFFER_BYTES, int(MEMORY_FRACTION * memory_bytes))
    images = min(count, num_ranks * rank_bytes // mean_bytes)
    if images < min(count, MIN_IMAGES_PER_PLACE * batch_size):
        return 0, f"the free memory has room for {images:,} images, too few to mix: the order is random"
    part = f"{images:,} of {count:,} images are mixed, {images * mean_bytes // num_ranks / 2**20:,.0f} MiB per device"
    limit = f"at most {MAX_BUFFER_BYTES / 2**30:.3g} GiB and 1/{1 / MEMORY_FRACTION:.0f} of the free memory"
    return images, f"shards of a bucket are read in parts of some MiB; {part} ({limit})"
