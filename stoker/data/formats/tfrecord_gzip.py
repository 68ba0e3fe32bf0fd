"""Unpacks compressed shards once into the cache folder, because gzip has no random access to an image.

`<cache folder>/shards/` may be deleted at any time; shards are unpacked again when needed. Not here: the frames of the
unpacked files (`tfrecord_frames.py`).
"""

import errno
import gzip
import os
import shutil
import zlib
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from stoker import regular_files
from stoker.data.formats.tfrecord_frames import FOOTER_BYTES, HEADER_BYTES, frame_length, is_record_header
from stoker.errors import DataError, StorageError
from stoker.storage.local_files import cache_folder

_CHUNK_BYTES = 1 << 20
MAX_RECORD_BYTES = 1 << 31
"""Protobuf's limit of a message, and so of a record."""
MIN_FREE_BYTES = 1 << 28
"""What unpacking leaves free on the disk of the cache: 256 MiB."""


def unpacked_path(shard: Path) -> Path:
    """The unpacked file of a shard. Its name depends on the shard's path, size and modification time."""
    stat = shard.stat()
    key = f"{shard}\0{stat.st_size}\0{stat.st_mtime_ns}".encode("utf-8", "surrogateescape")
    return cache_folder() / "shards" / f"{shard.name[:80]}-{blake2b(key, digest_size=8).hexdigest()}"


def unpack(shard: Path) -> Path:
    """The unpacked file; unpacks it if it does not exist. Safe against kills and in several processes.

    Nothing is unpacked beyond the first frame that cannot be one: the reader of the unpacked file reports it, and a
    small file cannot fill the disk. Raises DataError if the gzip data are damaged, StorageError if the disk is full or
    would be.
    """
    target = unpacked_path(shard)
    if target.exists():
        return target
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with regular_files.open_file(shard) as raw, gzip.open(raw) as packed, temporary.open("wb") as file:
            _copy_frames(packed, file, target.parent)
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
            cause=f"{error.strerror or error}; {shard} has {shard.stat().st_size:,} bytes, and more when unpacked",
            fix="free disk space, or set STOKER_CACHE_DIR to a writable folder",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _copy_frames(packed: gzip.GzipFile, file: BinaryIO, folder: Path) -> None:
    """Copies the frames up to the end, or up to and with the header of the first that cannot be one. Raises OSError
    before the disk of `folder` is full."""
    while len(head := packed.read(HEADER_BYTES)) == HEADER_BYTES:
        file.write(head)
        remaining = frame_length(head) + FOOTER_BYTES
        if not is_record_header(head) or remaining > MAX_RECORD_BYTES:
            return
        while remaining and (chunk := packed.read(min(remaining, _CHUNK_BYTES))):
            if shutil.disk_usage(folder).free < MIN_FREE_BYTES + len(chunk):
                raise OSError(errno.ENOSPC, f"less than {MIN_FREE_BYTES:,} bytes would remain on the disk")
            file.write(chunk)
            remaining -= len(chunk)
    file.write(head)
