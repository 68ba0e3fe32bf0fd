"""A data set in a bucket looks like a folder: its mirror in the cache, made by one listing and kept up to date.

Files of annotations and TFRecord shards are copied; pictures are placeholders, sparse files of the object's size, and
are read where they are (`source.py`). Here: which folder stands for an address, one process at a time. How it is filled
is `mirror.py`; annotations at an https address, where nothing can be listed, `web.py`.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from glob import has_magic
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stoker.data.formats.tables import ANNOTATION_DIRS
from stoker.data.formats.tfrecord_files import strip_shard_number
from stoker.data.images.source import MIRRORS_DIR, URI_FILE, is_shard, paths_to_uris, print_status
from stoker.data.remote.mirror import (
    FREE_SPACE_FIX,
    PROGRESS_INTERVAL_S,
    MirrorFile,
    expected_file,
    format_bytes,
    invalid_name_reason,
    plan_mirror,
    require_distinct_names,
    update_mirror,
)
from stoker.errors import DataError, StokerError, StorageError, nearest, writing
from stoker.storage.local_files import cache_folder, write_atomic
from stoker.storage.uri import StorageUri

if TYPE_CHECKING:
    from stoker.storage.store import ObjectInfo, Store

NOTES_FILE = "notes.json"
"""Beside a mirror that is complete: the notes about it."""
MAX_FOLDERS_SHOWN = 8
"""Folders of a bucket that an error lists."""


class Mirror(NamedTuple):
    """What was made of an address."""

    folder: Path
    """Absolute, without links."""
    notes: tuple[str, ...]
    """What is not as in the bucket, in words."""


def sync_mirror(uri: StorageUri) -> Mirror:
    """The folder that a prefix of a bucket looks like, up to date. One process at a time makes it, others wait.

    Raises DataError where nothing has that prefix, StorageError where the store cannot be read or the disk is full.
    """
    from stoker.storage.store import open_store

    store = open_store(uri)
    mirror_dir = mirror_dir_for(uri)
    notes_file, error_message = mirror_dir / NOTES_FILE, "The data set's copy in the cache cannot be written."
    version_before = _file_version(notes_file)
    with writing(error_message, mirror_dir, fix=FREE_SPACE_FIX), lock_mirror(mirror_dir, uri):
        folder = mirror_root(mirror_dir, uri)
        if _file_version(notes_file) not in (
            version_before,
            None,
        ):  # made while we waited for the lock: the ranks of a run list once
            return Mirror(folder, tuple(json.loads(notes_file.read_bytes())))
        notes_file.unlink(missing_ok=True)
        files, notes = plan_mirror(_list_objects(store, uri), uri)
        if not files:
            raise _no_dataset_error(store, uri)
        require_distinct_names(files, folder)
        update_mirror(store, folder, files, uri)
        notes += _shard_notes(files, uri)
        write_atomic(notes_file, json.dumps(notes).encode())
    return Mirror(folder, tuple(notes))


def _file_version(file: Path) -> tuple[int, int] | None:
    try:
        stat = file.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _shard_notes(files: dict[str, MirrorFile], uri: StorageUri) -> list[str]:
    """What there is to note about records that were copied."""
    shards = [file.size_bytes for name, file in files.items() if is_shard(name)]
    if not shards:
        return []
    count_text = f"{len(shards):,} TFRecord {'file' if len(shards) == 1 else 'files'}"
    return [f"copied from {uri}: {count_text}, {format_bytes(sum(shards))}"]


class ResolvedDataset(NamedTuple):
    """The local path that stands for an address."""

    path: Path
    """A folder, a file of annotations, or a pattern of such, in the mirror."""
    root: Path
    """The mirror."""
    notes: tuple[str, ...]


def resolve_dataset(uri: StorageUri, suffixes: tuple[str, ...]) -> ResolvedDataset:
    """The local path of a data set; of a file with one of the endings, one in the mirror of its folder, as pictures lie
    beside it, or of the folder above that, where it is called after annotations. Raises as `mirror`."""
    if uri.scheme in ("https", "http"):
        from stoker.data.remote import web  # the exception

        return web.resolve_dataset(uri)
    is_file = has_magic(uri.name) or strip_shard_number(uri.name).lower().endswith(suffixes)
    if not is_file or not uri.key:
        mirrored = sync_mirror(uri)
        return ResolvedDataset(mirrored.folder, mirrored.folder, mirrored.notes)
    parent = image_folder_uri(uri)
    mirrored = sync_mirror(parent)
    return ResolvedDataset(
        mirrored.folder / uri.key.removeprefix(parent.key).lstrip("/"), mirrored.folder, mirrored.notes
    )


def resolve_images(uri: StorageUri) -> Path:
    """The local path of pictures without annotations: a folder, a picture, or a pattern of such. Raises as `mirror`.

    A picture that is named gets a mirror for itself, so that the folder it is in need not be listed.
    """
    if uri.scheme in ("https", "http") or (uri.key and not has_magic(uri.key)):
        from stoker.storage.store import open_store

        store = open_store(uri)
        info = store.stat(uri.key) if uri.key else None
        if info is not None:
            mirror_dir = mirror_dir_for(uri)
            error_message = "The picture's place in the cache cannot be written."
            with writing(error_message, mirror_dir, fix=FREE_SPACE_FIX), lock_mirror(mirror_dir, uri.parent):
                root = mirror_root(mirror_dir, uri.parent)
                update_mirror(store, root, {uri.name: expected_file(info)}, uri)
            return root / uri.name
        if uri.scheme in ("https", "http"):
            raise DataError("There is no such picture.", location=uri, fix="name one; a web server lists no folders")
    prefix_uri = uri
    while has_magic(prefix_uri.key):
        prefix_uri = prefix_uri.parent
    mirrored = sync_mirror(prefix_uri)
    return mirrored.folder / uri.key.removeprefix(prefix_uri.key).lstrip("/")


def image_folder_uri(file: StorageUri) -> StorageUri:
    """The folder in which a file of annotations has its pictures."""
    return file.parent.parent if file.parent.name.lower() in ANNOTATION_DIRS and file.parent.key else file.parent


@contextlib.contextmanager
def uris_in_errors(root: Path) -> Iterator[None]:
    """Errors about files in a mirror name the objects instead."""
    try:
        yield
    except StokerError as error:
        location, cause, fix = (text and paths_to_uris(text, root) for text in (error.location, error.cause, error.fix))
        choices = [paths_to_uris(choice, root) for choice in error.choices]
        raise type(error)(
            paths_to_uris(error.what, root), location=location, cause=cause, choices=choices, fix=fix
        ) from error


def mirror_dir_for(uri: StorageUri) -> Path:
    """Where the mirror of an address lies, with its lock and its `address` file."""
    safe_name = "".join(c if c.isalnum() or c in "._-" else "-" for c in f"{uri.bucket}-{uri.name}")[-60:]
    digest = blake2b(str(uri).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return Path(os.path.realpath(cache_folder())) / MIRRORS_DIR / f"{safe_name}-{digest}"


def mirror_root(mirror_dir: Path, uri: StorageUri) -> Path:
    """The folder in it that looks like the data set; of the same name, which messages and formats look at."""
    name = uri.name
    return mirror_dir / (name if invalid_name_reason(name) is None and ":" not in name else "data")


@contextlib.contextmanager
def lock_mirror(mirror_dir: Path, uri: StorageUri) -> Iterator[None]:
    """Holds the mirror for this process; the kernel frees a dead one's."""
    mirror_dir.mkdir(parents=True, exist_ok=True)
    with (mirror_dir / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print_status(f"Another process is copying the annotations of {uri}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # some mounts; what two processes write at once is still each file as a whole
            print_status(f"{mirror_dir}: no lock ({error.strerror}): let one process at a time open {uri}")
        if not (mirror_dir / URI_FILE).exists():
            write_atomic(mirror_dir / URI_FILE, str(uri).encode())
        _require_microsecond_mtimes(mirror_dir / URI_FILE)
        yield


def _require_microsecond_mtimes(file: Path) -> None:
    exact_ns = 1_700_000_000_123_457_000
    os.utime(file, ns=(exact_ns, exact_ns))
    if file.stat().st_mtime_ns != exact_ns:
        raise StorageError(
            "The cache folder's file system does not keep times to the microsecond.",
            location=file.parent,
            cause="they say which version of an object a file is",
            fix="set STOKER_CACHE_DIR to a folder on a local disk",
        )


def _list_objects(store: "Store", uri: StorageUri) -> Iterator["ObjectInfo"]:
    """Everything below a prefix, saying how far it is where that takes long."""
    last_message_s = time.monotonic()
    for count, info in enumerate(store.list(uri.key), start=1):
        yield info
        if time.monotonic() - last_message_s > PROGRESS_INTERVAL_S:
            print_status(f"Listing {uri}: {count:,} objects so far")
            last_message_s = time.monotonic()


def _no_dataset_error(store: "Store", uri: StorageUri) -> DataError:
    """The error for a prefix that nothing has; names what there is instead."""
    if not uri.key:
        return DataError("The bucket is empty.", location=uri, fix="name another, or copy the data set into it")
    if store.stat(uri.key) is not None:
        return DataError(
            f"{uri.name!r} is an object, and no file of annotations that stoker knows.",
            location=uri,
            fix=f"name the folder that has annotations and pictures, e.g. {uri.parent}",
        )
    parent = uri.parent
    while not (folder_names := store.list_folders(parent.key)) and parent.key:
        parent = parent.parent
    closest = nearest(uri.name, folder_names) if parent == uri.parent else None
    sibling = None if parent == uri.parent else next(store.list(uri.parent.key), None)
    if sibling is not None:
        cause = f"{uri.parent} has other objects, e.g. {sibling.key.rpartition('/')[2]}"
    elif folder_names:
        cause = f"the folders in {parent} are {', '.join(folder_names[:MAX_FOLDERS_SHOWN])}{', …' if len(folder_names) > MAX_FOLDERS_SHOWN else ''}"
    else:
        cause = f"there is no folder in {parent}"
    return DataError(
        "There is nothing under that address.",
        location=uri,
        cause=cause,
        fix=f"did you mean {parent.child(closest)}?" if closest else "correct the address",
    )
