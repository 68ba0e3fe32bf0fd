"""Shards that are compressed as a whole, unpacked once into the cache folder: an image inside gzip cannot be read
without everything before it. `<cache folder>/shards/` may be deleted at any time; what is needed is unpacked again. Not
here: the frames of what comes out (`tfrecord_frames.py`).
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
    """Where the content of a shard belongs: another place when its path, size or time of change is another."""
    stat = shard.stat()
    key = f"{shard}\0{stat.st_size}\0{stat.st_mtime_ns}".encode("utf-8", "surrogateescape")
    return cache_folder() / "shards" / f"{shard.name[:80]}-{blake2b(key, digest_size=8).hexdigest()}"


def unpack(shard: Path) -> Path:
    """The unpacked file, made now unless it is there. Safe to be killed, and in several processes.

    Raises DataError where the gzip data are damaged, StorageError where there is no room.
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
            cause=f"{error.strerror}; {shard} is {shard.stat().st_size:,} bytes, unpacked it is more",
            fix="make room, or set STOKER_CACHE_DIR to a folder that can be written",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return target
