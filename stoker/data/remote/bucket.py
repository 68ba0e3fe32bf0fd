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

from stoker.data.formats.tables import ANNOTATION_FOLDERS
from stoker.data.formats.tfrecord_files import without_number
from stoker.data.images.source import ADDRESS, FOLDER, in_words, is_shard, say
from stoker.data.remote.mirror import (
    FIX_ROOM,
    SAY_AFTER_S,
    File,
    complaint,
    expected,
    in_bytes,
    refuse_clashes,
    update,
    wanted,
)
from stoker.errors import DataError, StokerError, StorageError, nearest, writing
from stoker.storage.local_files import cache_folder, write_whole
from stoker.storage.uri import Address

if TYPE_CHECKING:
    from stoker.storage.store import ObjectInfo, Store

NOTES = "notes.json"
"""Beside a mirror that is complete: the notes about it."""
SHOWN = 8
"""Folders of a bucket that an error lists."""


class Mirror(NamedTuple):
    """What was made of an address."""

    folder: Path
    """Absolute, without links."""
    notes: tuple[str, ...]
    """What is not as in the bucket, in words."""


def mirror(address: Address) -> Mirror:
    """The folder that a prefix of a bucket looks like, up to date. One process at a time makes it, others wait.

    Raises DataError where nothing has that prefix, StorageError where the store cannot be read or the disk is full.
    """
    from stoker.storage.store import open_store

    store = open_store(address)
    home = home_of(address)
    noted, what = home / NOTES, "The data set's copy in the cache cannot be written."
    before = _version(noted)
    with writing(what, home, fix=FIX_ROOM), held(home, address):
        folder = root_in(home, address)
        if _version(noted) not in (before, None):  # made while we waited for the lock: the ranks of a run list once
            return Mirror(folder, tuple(json.loads(noted.read_bytes())))
        noted.unlink(missing_ok=True)
        files, notes = wanted(_listing(store, address), address)
        if not files:
            raise _nothing_there(store, address)
        refuse_clashes(files, folder)
        update(store, folder, files, address)
        notes += _of_shards(files, address)
        write_whole(noted, json.dumps(notes).encode())
    return Mirror(folder, tuple(notes))


def _version(file: Path) -> tuple[int, int] | None:
    try:
        stat = file.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _of_shards(files: dict[str, File], address: Address) -> list[str]:
    """What there is to note about records that were copied."""
    shards = [file.size_bytes for name, file in files.items() if is_shard(name)]
    if not shards:
        return []
    count = f"{len(shards):,} TFRecord {'file' if len(shards) == 1 else 'files'}"
    return [f"copied from {address}: {count}, {in_bytes(sum(shards))}"]


class Placed(NamedTuple):
    """The local path that stands for an address."""

    place: Path
    """A folder, a file of annotations, or a pattern of such, in the mirror."""
    root: Path
    """The mirror."""
    notes: tuple[str, ...]


def place_of(address: Address, endings: tuple[str, ...]) -> Placed:
    """The local path of a data set; of a file with one of the endings, one in the mirror of its folder, as pictures lie
    beside it, or of the folder above that, where it is called after annotations. Raises as `mirror`."""
    if address.scheme in ("https", "http"):
        from stoker.data.remote import web  # the exception

        return web.place_of(address)
    names_files = has_magic(address.name) or without_number(address.name).lower().endswith(endings)
    if not names_files or not address.key:
        made = mirror(address)
        return Placed(made.folder, made.folder, made.notes)
    above = folder_of(address)
    made = mirror(above)
    return Placed(made.folder / address.key.removeprefix(above.key).lstrip("/"), made.folder, made.notes)


def pictures_at(address: Address) -> Path:
    """The local path of pictures without annotations: a folder, a picture, or a pattern of such. Raises as `mirror`.

    A picture that is named gets a mirror for itself, so that the folder it is in need not be listed.
    """
    if address.scheme in ("https", "http") or (address.key and not has_magic(address.key)):
        from stoker.storage.store import open_store

        store = open_store(address)
        info = store.stat(address.key) if address.key else None
        if info is not None:
            home = home_of(address)
            what = "The picture's place in the cache cannot be written."
            with writing(what, home, fix=FIX_ROOM), held(home, address.parent):
                root = root_in(home, address.parent)
                update(store, root, {address.name: expected(info)}, address)
            return root / address.name
        if address.scheme in ("https", "http"):
            raise DataError("There is no such picture.", place=address, fix="name one; a web server lists no folders")
    plain = address
    while has_magic(plain.key):
        plain = plain.parent
    made = mirror(plain)
    return made.folder / address.key.removeprefix(plain.key).lstrip("/")


def folder_of(file: Address) -> Address:
    """The folder in which a file of annotations has its pictures."""
    return file.parent.parent if file.parent.name.lower() in ANNOTATION_FOLDERS and file.parent.key else file.parent


@contextlib.contextmanager
def addresses_in_errors(root: Path) -> Iterator[None]:
    """Errors about files in a mirror name the objects instead."""
    try:
        yield
    except StokerError as error:
        place, cause, fix = (text and in_words(text, root) for text in (error.place, error.cause, error.fix))
        choices = [in_words(choice, root) for choice in error.choices]
        raise type(error)(in_words(error.what, root), place=place, cause=cause, choices=choices, fix=fix) from error


def home_of(address: Address) -> Path:
    """Where the mirror of an address lies, with its lock and its `address` file."""
    readable = "".join(c if c.isalnum() or c in "._-" else "-" for c in f"{address.bucket}-{address.name}")[-60:]
    digest = blake2b(str(address).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return Path(os.path.realpath(cache_folder())) / FOLDER / f"{readable}-{digest}"


def root_in(home: Path, address: Address) -> Path:
    """The folder in it that looks like the data set; of the same name, which messages and formats look at."""
    name = address.name
    return home / (name if complaint(name) is None and ":" not in name else "data")


@contextlib.contextmanager
def held(home: Path, address: Address) -> Iterator[None]:
    """Holds the mirror for this process; the kernel frees a dead one's."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Another process is copying the annotations of {address}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # some mounts; what two processes write at once is still each file as a whole
            say(f"{home}: no lock ({error.strerror}): let one process at a time open {address}")
        if not (home / ADDRESS).exists():
            write_whole(home / ADDRESS, str(address).encode())
        _require_exact_times(home / ADDRESS)
        yield


def _require_exact_times(file: Path) -> None:
    exact_ns = 1_700_000_000_123_457_000
    os.utime(file, ns=(exact_ns, exact_ns))
    if file.stat().st_mtime_ns != exact_ns:
        raise StorageError(
            "The cache folder's file system does not keep times to the microsecond.",
            place=file.parent,
            cause="they say which version of an object a file is",
            fix="set STOKER_CACHE_DIR to a folder on a local disk",
        )


def _listing(store: "Store", address: Address) -> Iterator["ObjectInfo"]:
    """Everything below a prefix, saying how far it is where that takes long."""
    said_s = time.monotonic()
    for count, info in enumerate(store.list(address.key), start=1):
        yield info
        if time.monotonic() - said_s > SAY_AFTER_S:
            say(f"Listing {address}: {count:,} objects so far")
            said_s = time.monotonic()


def _nothing_there(store: "Store", address: Address) -> DataError:
    """The error for a prefix that nothing has; names what there is instead."""
    if not address.key:
        return DataError("The bucket is empty.", place=address, fix="name another, or copy the data set into it")
    if store.stat(address.key) is not None:
        return DataError(
            f"{address.name!r} is an object, and no file of annotations that stoker knows.",
            place=address,
            fix=f"name the folder that has annotations and pictures, e.g. {address.parent}",
        )
    above = address.parent
    while not (names := store.folders(above.key)) and above.key:
        above = above.parent
    near = nearest(address.name, names) if above == address.parent else None
    beside = None if above == address.parent else next(store.list(address.parent.key), None)
    if beside is not None:
        cause = f"{address.parent} has other objects, e.g. {beside.key.rpartition('/')[2]}"
    elif names:
        cause = f"the folders in {above} are {', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''}"
    else:
        cause = f"there is no folder in {above}"
    return DataError(
        "There is nothing under that address.",
        place=address,
        cause=cause,
        fix=f"did you mean {above.child(near)}?" if near else "correct the address",
    )
