"""Compares packed shards with what `stoker data pack` wrote: existence, size and SHA-256 of each, from its index.

Local shards and those in a bucket, each read once, in threads. Training does not do this: it reads images, and a byte
that changed shows only where an image cannot be decoded. Not here: the images in them (`check_images.py`), making
shards again (`convert/packing.py`).
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stoker.data.formats.shard_index import INDEX_FILE, Shard, lost_shards, read_info
from stoker.data.images import source as image_source
from stoker.data.validation.check_images import Progress
from stoker.data.validation.problems import ProblemCollector
from stoker.storage.uri import expand_variables, is_uri, parse_uri

CHUNK_BYTES = 1 << 24
"""Bytes of a shard that a thread has in memory."""


def packed_folder(data: str | Path) -> Path | None:
    """The folder of a packed data set, of one in a bucket its mirror; None for any other data set. Raises DataError,
    StorageError."""
    location = expand_variables(os.fspath(data))
    path = Path(location)
    if is_uri(location):
        from stoker.data.remote import resolve  # imports what is only needed for buckets

        path = resolve.resolve_dataset(parse_uri(location), ()).path
    return path if (path / INDEX_FILE).is_file() else None


def check_shards(folder: Path, problems: ProblemCollector, *, read: bool, workers: int, progress: Progress) -> None:
    """Adds the shards that are not as they were packed to `problems`. read: also compares the checksums.

    progress: called with the images in the shards that were read, and in all. Raises DataError for an index that cannot
    be read, StorageError for a bucket that cannot be read."""
    shards = read_info(folder / INDEX_FILE).shards
    lost = lost_shards(folder, shards)
    for shard, text in lost:
        is_there = (folder / shard.name).exists()
        problems.add("cut-packed-shard" if is_there else "missing-packed-shard", f"{shard.name} {text}")
    if not read:
        return
    lost_names = {shard.name for shard, _ in lost}
    rest = [shard for shard in shards if shard.name not in lost_names]
    done, total = 0, sum(shard.num_images for shard in rest)
    with ThreadPoolExecutor(workers) as pool:
        for shard, text in zip(rest, pool.map(lambda shard: _compare(folder, shard), rest), strict=True):
            if text:
                problems.add("changed-packed-shard", f"{shard.name} with {shard.num_images:,} images: {text}")
            done += shard.num_images
            progress(done, total)


def _compare(folder: Path, shard: Shard) -> str:
    """What is wrong with the content of a shard of the right size; empty if nothing is."""
    path, digest = folder / shard.name, hashlib.sha256()
    remote_object = image_source.find_remote(path)
    try:
        for start in range(0, shard.size_bytes, CHUNK_BYTES):
            length = min(CHUNK_BYTES, shard.size_bytes - start)
            if remote_object is None:
                digest.update(image_source.read_local(path, (start, length)))
            else:
                digest.update(image_source.read_object(remote_object, start, length))
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"
    if digest.hexdigest() != shard.sha256:
        return f"SHA-256 {digest.hexdigest()[:12]}…, not {shard.sha256[:12]}…"
    return ""
