"""The content of a mirror: which files it has to have, by a listing, and making the folder so.

A file's size and time of change say which version of the object it is: the time is that of the object, with a hash of
its etag in the microseconds. So there is no list that could disagree with the disk: what a kill left undone, and what
changed since, is found by looking. Not here: whose listing it is, and where the mirror lies (`bucket.py`).
"""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stoker.data.images.source import is_copied, say
from stoker.errors import DataError, StorageError
from stoker.storage.uri import Address

if TYPE_CHECKING:
    from stoker.storage.store import ObjectInfo, Store

THREADS = 64
"""Annotation files that are copied at a time: what is waited for is the store's answer, 10 … 100 ms of each."""
LARGE_BYTES, THREADS_OF_LARGE = 8 << 20, 4
"""Files above this size come in parts, a few at a time: a shard of a gigabyte is never in memory."""
SAY_AFTER_S = 2.0
"""From when on a line says what is being done, and how often."""
MANY = 20_000
"""Pictures from which on making their placeholders takes so long, 2 … 10 s for 100,000, that it is said."""
LONGEST_NAME = 255
"""Bytes of a file name that file systems take."""
ROOM_LEFT = 64 << 20
"""Bytes of the disk that a mirror leaves free, for the index."""
FIX_ROOM = "make room, or set STOKER_CACHE_DIR to a folder on a disk that has it"


class File(NamedTuple):
    info: "ObjectInfo"
    size_bytes: int
    time_ns: int
    """The time of change that says which version of the object this is."""


def wanted(listing: Iterable["ObjectInfo"], address: Address) -> tuple[dict[str, File], list[str]]:
    """Name, relative to the prefix → what the file has to be; notes on objects that cannot be files."""
    files: dict[str, File] = {}
    odd: dict[str, list[str]] = {}
    prefix = f"{address.key}/" if address.key else ""
    for info in listing:
        name = info.key.removeprefix(prefix)
        if (why := complaint(name)) is not None:
            odd.setdefault(why, []).append(info.key)
        else:
            files[name] = expected(info)
    folders = {name[:at] for name in files for at, letter in enumerate(name) if letter == "/"}
    for name in sorted(folders & files.keys()):
        both = files.pop(name)
        if both.size_bytes:  # else what consoles make for a folder; it is listed without its slash
            odd.setdefault("it is an object and a folder", []).append(both.info.key)
    notes = [
        f"{len(keys):,} {'object' if len(keys) == 1 else 'objects'} left out: {why}, e.g. {keys[0]!r}"
        for why, keys in odd.items()
    ]
    return files, notes


def expected(info: "ObjectInfo") -> File:
    return File(info, info.size_bytes, _time_ns(info))


def complaint(name: str) -> str | None:
    """Why a key cannot be the name of a file."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "a part of its name is empty, . or .."
    if "\0" in name or "\\" in name:
        return "its name has a character that no file has"
    if any(len(part.encode("utf-8", "surrogateescape")) > LONGEST_NAME for part in parts):
        return f"its name is longer than {LONGEST_NAME} bytes"
    return None


def _time_ns(info: "ObjectInfo") -> int:
    """Whole seconds of the object's time, microseconds of its version: S3 lists no fractions of a second."""
    version = f"{info.etag}\0{info.modified_s!r}".encode()
    return int(info.modified_s) * 10**9 + int.from_bytes(blake2b(version, digest_size=8).digest()) % 10**6 * 1000


def refuse_clashes(files: dict[str, File], folder: Path) -> None:
    """Raises DataError for names that are one on a disk that does not tell upper from lower case."""
    folder.mkdir(exist_ok=True)
    if folder.with_name(folder.name.swapcase()).exists() and folder.name.swapcase() != folder.name:
        for first, second in clashes(files):
            raise DataError(
                "Two objects have names that are one on this disk.",
                place=folder,
                cause=f"{first!r} and {second!r} differ in case only",
                fix="rename one of them, or set STOKER_CACHE_DIR to a disk that tells upper from lower case",
            )


def clashes(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The names that differ from an earlier one in case only, with that one."""
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(name.casefold(), name)
        if other != name:
            yield other, name


def update(store: "Store", folder: Path, files: dict[str, File], address: Address) -> None:
    """Makes a folder hold exactly these files. A folder's own time changes when one of its files does."""
    there = dict(_files_in(folder))
    for name in there.keys() - files.keys():
        (folder / name).unlink()
    for name in sorted({name.rpartition("/")[0] for name in there.keys() - files.keys()} - {""}, reverse=True):
        with contextlib.suppress(OSError):  # other files are in it
            os.removedirs(folder / name)
    folder.mkdir(exist_ok=True)
    changed = [name for name, file in files.items() if there.get(name) != (file.size_bytes, file.time_ns)]
    for inner in sorted({name.rpartition("/")[0] for name in changed}):
        (folder / inner).mkdir(parents=True, exist_ok=True)
    copied = [name for name in changed if is_copied(name)]
    _require_room(folder, sum(files[name].size_bytes for name in copied), address)
    if len(changed) - len(copied) >= MANY:
        say(f"Laying out {address} in {folder}: a placeholder for each of {len(changed) - len(copied):,} pictures")
    for name in changed:
        if not is_copied(name):
            put_placeholder(os.path.join(folder, name), files[name], replaces=name in there)
    _copy(store, folder, {name: files[name] for name in copied}, address)


def _files_in(folder: Path, below: str = "") -> Iterator[tuple[str, tuple[int, int]]]:
    """(name, (bytes, time of change)) of every file."""
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files_in(folder / entry.name, f"{below}{entry.name}/")
            else:
                stat = entry.stat(follow_symlinks=False)
                yield below + entry.name, (stat.st_size, stat.st_mtime_ns)


def _require_room(folder: Path, needed: int, address: Address) -> None:
    free = shutil.disk_usage(folder).free
    if needed + ROOM_LEFT > free:
        raise StorageError(
            f"There is no room for the annotations of {address}.",
            place=folder,
            cause=f"they are {in_bytes(needed)}, and {in_bytes(free)} are free",
            fix=FIX_ROOM,
        )


def put_placeholder(path: str, file: File, *, replaces: bool) -> None:
    """There may be a million of them: system calls, and nothing around them."""
    if replaces:
        os.unlink(path)  # rather than changing it: its folder's time must change
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.ftruncate(handle, file.size_bytes)
        os.utime(handle, ns=(file.time_ns, file.time_ns))
    finally:
        os.close(handle)


def _copy(store: "Store", folder: Path, files: dict[str, File], address: Address) -> None:
    """Copies objects, many small ones at a time; each appears under its name when it is whole."""
    said_s, done = time.monotonic(), 0
    all_bytes = in_bytes(sum(file.size_bytes for file in files.values()))
    stop = threading.Event()

    def one(name: str) -> None:
        if not stop.is_set():
            _copy_one(store, folder / name, files[name])

    large = [name for name, file in files.items() if file.size_bytes > LARGE_BYTES]
    small = [name for name, file in files.items() if file.size_bytes <= LARGE_BYTES]
    for names, threads in ((small, THREADS), (large, THREADS_OF_LARGE)):
        with ThreadPoolExecutor(threads, "stoker-copy") as pool:
            try:
                for _ in pool.map(one, names):
                    done += 1
                    if time.monotonic() - said_s > SAY_AFTER_S:
                        say(f"Copying annotations of {address}: {done:,} of {len(files):,} files, {all_bytes} in all")
                        said_s = time.monotonic()
            except BaseException:
                stop.set()  # the other files need not be waited for
                raise


def _copy_one(store: "Store", path: Path, file: File) -> None:
    if file.size_bytes > LARGE_BYTES:
        from stoker.storage.download import download  # in parts; and all of one version

        download(store, file.info.key, path)
        os.utime(path, ns=(file.time_ns, file.time_ns))
        return
    data = store.read(file.info.key)
    if len(data) != file.size_bytes:
        raise StorageError(
            "An object changed while it was being copied.",
            place=store.address.child(file.info.key),
            fix="try again, when nobody writes to it",
        )
    temporary = path.with_name(f".{blake2b(path.name.encode(), digest_size=8).hexdigest()}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        os.utime(temporary, ns=(file.time_ns, file.time_ns))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def in_bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
