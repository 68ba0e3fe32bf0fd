"""Reads ranges of a shard: a file on the disk, or an object of a bucket, of which the mirror has only a stub.

Annotations lie between the images of a shard. A shard in a bucket is read in blocks around what is needed, and images
between are skipped. Not here: what is in a shard (`tar_members.py`, `mds.py`); images for training (`index.py`).
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from stoker import regular_files
from stoker.data.formats.image_sizes import Item, Result, map_in_threads
from stoker.data.images import source
from stoker.data.images.headers import ReadAt

BLOCK_BYTES = 1 << 18
"""Bytes of a request to a bucket. It has the annotations of one to ten images of usual size; at 30 ms a request, larger
blocks do not shorten the scan of a shard by more than a few percent, and smaller ones lengthen it."""
REMOTE_SHARDS = 32
"""Shards of a bucket that are read at the same time."""


@contextlib.contextmanager
def open_shard(path: Path) -> Iterator[tuple[ReadAt, int]]:
    """(read, number of bytes) of a shard; `read(offset, count)` returns fewer bytes at its end. Raises OSError,
    StorageError."""
    remote = source.find_remote(path)
    if remote is not None:
        yield _RemoteReader(remote, path.stat().st_size).read, path.stat().st_size
        return
    fd = regular_files.open_fd(path)
    try:
        yield lambda offset, count: os.pread(fd, count, offset), os.fstat(fd).st_size
    finally:
        os.close(fd)


def map_shards(function: Callable[[Item], Result], shards: Sequence[Item], *, path: Path) -> list[Result]:
    """The results of reading each shard, in order; those of a bucket (`path` tells) are read at the same time."""
    if source.path_to_uri(path) is None:
        return [function(shard) for shard in shards]
    if len(shards) > 1:
        source.print_status(f"Reading the annotations in {len(shards):,} shards of {source.display_path(path)}")
    return map_in_threads(function, shards, workers=REMOTE_SHARDS, chunk_size=1)


class _RemoteReader:
    def __init__(self, remote: source.RemoteObject, total_bytes: int) -> None:
        self._remote, self._total_bytes = remote, total_bytes
        self._start, self._block = 0, b""

    def read(self, offset: int, count: int) -> bytes:
        count = min(count, self._total_bytes - offset)
        if count <= 0:
            return b""
        position = offset - self._start
        if not (position >= 0 and position + count <= len(self._block)):
            length = min(max(count, BLOCK_BYTES), self._total_bytes - offset)
            self._start, self._block, position = offset, source.read_object(self._remote, offset, length), 0
        return self._block[position : position + count]
