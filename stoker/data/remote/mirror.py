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

from stoker.data.images.source import is_copied, print_status
from stoker.errors import DataError, StorageError
from stoker.storage.uri import StorageUri

if TYPE_CHECKING:
    from stoker.storage.store import ObjectInfo, Store

COPY_THREADS = 64
"""Annotation files that are copied at a time: what is waited for is the store's answer, 10 … 100 ms of each."""
LARGE_FILE_BYTES, LARGE_FILE_THREADS = 8 << 20, 4
"""Files above this size come in parts, a few at a time: a shard of a gigabyte is never in memory."""
PROGRESS_INTERVAL_S = 2.0
"""From when on a line says what is being done, and how often."""
MIN_STUBS_TO_REPORT = 20_000
"""Pictures from which on making their placeholders takes so long, 2 … 10 s for 100,000, that it is said."""
MAX_NAME_BYTES = 255
"""Bytes of a file name that file systems take."""
MIN_FREE_BYTES = 64 << 20
"""Bytes of the disk that a mirror leaves free, for the index."""
FREE_SPACE_FIX = "make room, or set STOKER_CACHE_DIR to a folder on a disk that has it"


class MirrorFile(NamedTuple):
    info: "ObjectInfo"
    size_bytes: int
    mtime_ns: int
    """The time of change that says which version of the object this is."""


def plan_mirror(listing: Iterable["ObjectInfo"], uri: StorageUri) -> tuple[dict[str, MirrorFile], list[str]]:
    """Name, relative to the prefix → what the file has to be; notes on objects that cannot be files."""
    files: dict[str, MirrorFile] = {}
    keys_by_reason: dict[str, list[str]] = {}
    prefix = f"{uri.key}/" if uri.key else ""
    for info in listing:
        name = info.key.removeprefix(prefix)
        if (reason := invalid_name_reason(name)) is not None:
            keys_by_reason.setdefault(reason, []).append(info.key)
        else:
            files[name] = expected_file(info)
    folders = {name[:i] for name in files for i, char in enumerate(name) if char == "/"}
    for name in sorted(folders & files.keys()):
        shadowed = files.pop(name)
        if shadowed.size_bytes:  # else what consoles make for a folder; it is listed without its slash
            keys_by_reason.setdefault("it is an object and a folder", []).append(shadowed.info.key)
    notes = [
        f"{len(keys):,} {'object' if len(keys) == 1 else 'objects'} left out: {reason}, e.g. {keys[0]!r}"
        for reason, keys in keys_by_reason.items()
    ]
    return files, notes


def expected_file(info: "ObjectInfo") -> MirrorFile:
    return MirrorFile(info, info.size_bytes, _version_mtime_ns(info))


def invalid_name_reason(name: str) -> str | None:
    """Why a key cannot be the name of a file."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "a part of its name is empty, . or .."
    if "\0" in name or "\\" in name:
        return "its name has a character that no file has"
    if any(len(part.encode("utf-8", "surrogateescape")) > MAX_NAME_BYTES for part in parts):
        return f"its name is longer than {MAX_NAME_BYTES} bytes"
    return None


def _version_mtime_ns(info: "ObjectInfo") -> int:
    """Whole seconds of the object's time, microseconds of its version: S3 lists no fractions of a second."""
    version = f"{info.etag}\0{info.modified_s!r}".encode()
    return int(info.modified_s) * 10**9 + int.from_bytes(blake2b(version, digest_size=8).digest()) % 10**6 * 1000


def require_distinct_names(files: dict[str, MirrorFile], folder: Path) -> None:
    """Raises DataError for names that are one on a disk that does not tell upper from lower case."""
    folder.mkdir(exist_ok=True)
    if folder.with_name(folder.name.swapcase()).exists() and folder.name.swapcase() != folder.name:
        for first, second in case_clashes(files):
            raise DataError(
                "Two objects have names that are one on this disk.",
                location=folder,
                cause=f"{first!r} and {second!r} differ in case only",
                fix="rename one of them, or set STOKER_CACHE_DIR to a disk that tells upper from lower case",
            )


def case_clashes(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The names that differ from an earlier one in case only, with that one."""
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(name.casefold(), name)
        if other != name:
            yield other, name


def update_mirror(store: "Store", folder: Path, files: dict[str, MirrorFile], uri: StorageUri) -> None:
    """Makes a folder hold exactly these files. A folder's own time changes when one of its files does."""
    present = dict(_walk_files(folder))
    for name in present.keys() - files.keys():
        (folder / name).unlink()
    for name in sorted({name.rpartition("/")[0] for name in present.keys() - files.keys()} - {""}, reverse=True):
        with contextlib.suppress(OSError):  # other files are in it
            os.removedirs(folder / name)
    folder.mkdir(exist_ok=True)
    changed = [name for name, file in files.items() if present.get(name) != (file.size_bytes, file.mtime_ns)]
    for subfolder in sorted({name.rpartition("/")[0] for name in changed}):
        (folder / subfolder).mkdir(parents=True, exist_ok=True)
    copied = [name for name in changed if is_copied(name)]
    _require_free_space(folder, sum(files[name].size_bytes for name in copied), uri)
    if len(changed) - len(copied) >= MIN_STUBS_TO_REPORT:
        print_status(f"Laying out {uri} in {folder}: a placeholder for each of {len(changed) - len(copied):,} pictures")
    for name in changed:
        if not is_copied(name):
            create_stub(os.path.join(folder, name), files[name], replaces=name in present)
    _copy_files(store, folder, {name: files[name] for name in copied}, uri)


def _walk_files(folder: Path, prefix: str = "") -> Iterator[tuple[str, tuple[int, int]]]:
    """(name, (bytes, time of change)) of every file."""
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk_files(folder / entry.name, f"{prefix}{entry.name}/")
            else:
                stat = entry.stat(follow_symlinks=False)
                yield prefix + entry.name, (stat.st_size, stat.st_mtime_ns)


def _require_free_space(folder: Path, required_bytes: int, uri: StorageUri) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if required_bytes + MIN_FREE_BYTES > free_bytes:
        raise StorageError(
            f"There is no room for the annotations of {uri}.",
            location=folder,
            cause=f"they are {format_bytes(required_bytes)}, and {format_bytes(free_bytes)} are free",
            fix=FREE_SPACE_FIX,
        )


def create_stub(path: str, file: MirrorFile, *, replaces: bool) -> None:
    """There may be a million of them: system calls, and nothing around them."""
    if replaces:
        os.unlink(path)  # rather than changing it: its folder's time must change
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.ftruncate(fd, file.size_bytes)
        os.utime(fd, ns=(file.mtime_ns, file.mtime_ns))
    finally:
        os.close(fd)


def _copy_files(store: "Store", folder: Path, files: dict[str, MirrorFile], uri: StorageUri) -> None:
    """Copies objects, many small ones at a time; each appears under its name when it is whole."""
    last_message_s, num_done = time.monotonic(), 0
    total_size = format_bytes(sum(file.size_bytes for file in files.values()))
    stop = threading.Event()

    def copy_unless_stopped(name: str) -> None:
        if not stop.is_set():
            _copy_file(store, folder / name, files[name])

    large = [name for name, file in files.items() if file.size_bytes > LARGE_FILE_BYTES]
    small = [name for name, file in files.items() if file.size_bytes <= LARGE_FILE_BYTES]
    for names, threads in ((small, COPY_THREADS), (large, LARGE_FILE_THREADS)):
        with ThreadPoolExecutor(threads, "stoker-copy") as pool:
            try:
                for _ in pool.map(copy_unless_stopped, names):
                    num_done += 1
                    if time.monotonic() - last_message_s > PROGRESS_INTERVAL_S:
                        print_status(
                            f"Copying annotations of {uri}: {num_done:,} of {len(files):,} files, {total_size} in all"
                        )
                        last_message_s = time.monotonic()
            except BaseException:
                stop.set()  # the other files need not be waited for
                raise


def _copy_file(store: "Store", path: Path, file: MirrorFile) -> None:
    if file.size_bytes > LARGE_FILE_BYTES:
        from stoker.storage.download import download  # in parts; and all of one version

        download(store, file.info.key, path)
        os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
        return
    data = store.read(file.info.key)
    if len(data) != file.size_bytes:
        raise StorageError(
            "An object changed while it was being copied.",
            location=store.uri.child(file.info.key),
            fix="try again, when nobody writes to it",
        )
    temporary = path.with_name(f".{blake2b(path.name.encode(), digest_size=8).hexdigest()}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        os.utime(temporary, ns=(file.mtime_ns, file.mtime_ns))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def format_bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
