"""Unpacks compressed shards once into the cache folder, because gzip has no random access to an image.

`<cache folder>/shards/` may be deleted at any time; shards are unpacked again when needed. Not here: the frames of the
unpacked files (`tfrecord_frames.py`).
"""

import gzip
import os
import shutil
import zlib
from hashlib import blake2b
from pathlib import Path

from stoker.errors import DataError, StorageError
from stoker.storage.local_files import cache_folder

_CHUNK_BYTES = 1 << 20


def unpacked_path(shard: Path) -> Path:
    """The unpacked file of a shard. Its name depends on the shard's path, size and modification time."""
    stat = shard.stat()
    key = f"{shard}\0{stat.st_size}\0{stat.st_mtime_ns}".encode("utf-8", "surrogateescape")
    return cache_folder() / "shards" / f"{shard.name[:80]}-{blake2b(key, digest_size=8).hexdigest()}"


def unpack(shard: Path) -> Path:
    """The unpacked file; unpacks it if it does not exist. Safe against kills and in several processes.

    Raises DataError if the gzip data are damaged, StorageError if the disk is full.
    """
    target = unpacked_path(shard)
    if target.exists():
        return target
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(shard, "rb") as packed, temporary.open("wb") as file:
            shutil.copyfileobj(packed, file, _CHUNK_BYTES)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            "A compressed shard is damaged.", location=shard, cause=str(error), fix="copy it again"
        ) from error
    except OSError as error:
        raise StorageError(
            "A compressed shard cannot be unpacked into the cache folder.",
            location=temporary,
            cause=f"{error.strerror}; {shard} has {shard.stat().st_size:,} bytes, and more when unpacked",
            fix="free disk space, or set STOKER_CACHE_DIR to a writable folder",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return target
