"""The mirror of a data set in a bucket: a folder in the cache that looks like it, made by one listing and kept current.

Annotation files and TFRecord shards are copied. Images are placeholders, sparse files of the object's size, and are
read from the bucket (`images/source.py`). Here: where the mirror of a URI is, and its lock. Its content is updated by
`mirror.py`; `resolve.py` mirrors files on a web server, and chooses.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stoker.data.images.source import MIRRORS_DIR, URI_FILE, is_shard, print_status
from stoker.data.remote.mirror import (
    FREE_SPACE_FIX,
    PROGRESS_INTERVAL_S,
    MirrorFile,
    format_bytes,
    invalid_name_reason,
    plan_mirror,
    require_distinct_names,
    update_mirror,
)
from stoker.errors import DataError, StorageError, nearest, writing
from stoker.storage.local_files import cache_folder, safe_name, write_atomic
from stoker.storage.store import open_store
from stoker.storage.uri import StorageUri

if TYPE_CHECKING:
    from stoker.storage.store import ObjectInfo, Store

NOTES_FILE = "notes.json"
"""In the folder of a mirror that is complete: the notes about it."""
MAX_FOLDERS_SHOWN = 8
"""Folders of a bucket that an error lists."""


class Mirror(NamedTuple):
    root: Path
    """Absolute, without links."""
    notes: tuple[str, ...]
    """Differences from the bucket, in words."""


def sync_mirror(uri: StorageUri) -> Mirror:
    """The folder that mirrors a prefix of a bucket, up to date. One process at a time updates it, others wait.

    Raises DataError where nothing has that prefix, StorageError where the store cannot be read or the disk is full.
    """
    store = open_store(uri)
    notes_file = mirror_dir_for(uri) / NOTES_FILE
    version_before = _file_version(notes_file)
    with locked_mirror(uri, uri) as root:
        # Another process updated it while this one waited for the lock: the ranks of a run list the bucket once.
        if _file_version(notes_file) not in (version_before, None):
            return Mirror(root, tuple(json.loads(notes_file.read_bytes())))
        notes_file.unlink(missing_ok=True)
        files, notes = plan_mirror(_list_objects(store, uri), uri)
        if not files:
            raise _no_dataset_error(store, uri)
        require_distinct_names(files, root)
        update_mirror(store, root, files, uri)
        notes += _shard_notes(files, uri)
        write_atomic(notes_file, json.dumps(notes).encode())
    return Mirror(root, tuple(notes))


@contextlib.contextmanager
def locked_mirror(uri: StorageUri, root_uri: StorageUri) -> Iterator[Path]:
    """Locks the mirror of `uri` for this process; yields the folder in it that mirrors `root_uri`. The kernel releases
    the lock of a process that died. A failure to write is a StorageError."""
    mirror_dir = mirror_dir_for(uri)
    what = "The local copy of the data set cannot be written."
    with writing(what, mirror_dir, fix=FREE_SPACE_FIX), _lock(mirror_dir, root_uri):
        # Messages and formats use the name of the folder, so it is the name of the data set.
        name = root_uri.name
        yield mirror_dir / (name if invalid_name_reason(name) is None and ":" not in name else "data")


def mirror_dir_for(uri: StorageUri) -> Path:
    """The folder of a mirror, its lock and its `address` file."""
    digest = blake2b(str(uri).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    folder = f"{safe_name(f'{uri.bucket}-{uri.name}')[-60:]}-{digest}"
    return Path(os.path.realpath(cache_folder())) / MIRRORS_DIR / folder


@contextlib.contextmanager
def _lock(mirror_dir: Path, uri: StorageUri) -> Iterator[None]:
    mirror_dir.mkdir(parents=True, exist_ok=True)
    with (mirror_dir / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print_status(f"Another process is copying the annotations of {uri}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # a mount without locks: each file is still written as a whole
            print_status(f"{mirror_dir}: no lock ({error.strerror}): open {uri} in one process at a time")
        if not (mirror_dir / URI_FILE).exists():
            write_atomic(mirror_dir / URI_FILE, str(uri).encode())
        _require_microsecond_mtimes(mirror_dir / URI_FILE)
        yield


def _require_microsecond_mtimes(file: Path) -> None:
    exact_ns = 1_700_000_000_123_457_000
    os.utime(file, ns=(exact_ns, exact_ns))
    if file.stat().st_mtime_ns != exact_ns:
        raise StorageError(
            "The file system of the cache folder does not keep times to the microsecond.",
            location=file.parent,
            cause="these times identify the version of an object",
            fix="set STOKER_CACHE_DIR to a folder on a local disk",
        )


def _file_version(file: Path) -> tuple[int, int] | None:
    try:
        stat = file.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _shard_notes(files: dict[str, MirrorFile], uri: StorageUri) -> list[str]:
    shards = [file.size_bytes for name, file in files.items() if is_shard(name)]
    if not shards:
        return []
    count_text = f"{len(shards):,} TFRecord {'file' if len(shards) == 1 else 'files'}"
    return [f"copied from {uri}: {count_text}, {format_bytes(sum(shards))}"]


def _list_objects(store: "Store", uri: StorageUri) -> Iterator["ObjectInfo"]:
    """All objects below a prefix. Prints the progress of a long listing."""
    last_message_s = time.monotonic()
    for count, info in enumerate(store.list(uri.key), start=1):
        yield info
        if time.monotonic() - last_message_s > PROGRESS_INTERVAL_S:
            print_status(f"Listing {uri}: {count:,} objects so far")
            last_message_s = time.monotonic()


def _no_dataset_error(store: "Store", uri: StorageUri) -> DataError:
    """The error for a prefix without objects; names what exists near it."""
    if not uri.key:
        return DataError("The bucket is empty.", location=uri, fix="name another, or copy the data set into it")
    if store.stat(uri.key) is not None:
        return DataError(
            f"{uri.name!r} is an object, but not an annotation file that stoker knows.",
            location=uri,
            fix=f"name the folder that has annotations and images, e.g. {uri.parent}",
        )
    parent = uri.parent
    while not (names := store.list_folders(parent.key)) and parent.key:
        parent = parent.parent
    closest = nearest(uri.name, names) if parent == uri.parent else None
    more = ", …" if len(names) > MAX_FOLDERS_SHOWN else ""
    listed = ", ".join(names[:MAX_FOLDERS_SHOWN]) + more
    cause = f"the folders in {parent} are {listed}" if names else f"there is no folder in {parent}"
    if (parent != uri.parent or not names) and (sibling := next(store.list(uri.parent.key), None)):
        cause = f"{uri.parent} has other objects, e.g. {sibling.key.rpartition('/')[2]}"
    fix = f"did you mean {parent.child(closest)}?" if closest else "correct the address"
    return DataError("There is no object below that address.", location=uri, cause=cause, fix=fix)
