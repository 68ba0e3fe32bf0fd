"""The content of a mirror: which files it must have, given a listing of the bucket, and how the folder is updated.

Size and modification time of a file identify the version of its object: the time is that of the object, with a hash of
the etag in the microseconds. So no list can disagree with the disk: work that a kill interrupted, and objects that
changed, are found by comparing files with the listing. Not here: the listing, and where the mirror is (`bucket.py`).
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
from stoker.storage.download import download
from stoker.storage.local_files import atomic_path
from stoker.storage.uri import StorageUri

if TYPE_CHECKING:
    from stoker.storage.store import ObjectInfo, Store

COPY_THREADS = 64
"""Annotation files that are copied concurrently: the time of each is the latency of the store, 10 … 100 ms."""
LARGE_FILE_BYTES, LARGE_FILE_THREADS = 8 << 20, 4
"""Files above this size are copied in parts, a few files at a time: a shard of a gigabyte is never in memory."""
PROGRESS_INTERVAL_S = 2.0
"""Time until the first line about the progress, and between two lines."""
MIN_STUBS_TO_REPORT = 20_000
"""Number of placeholders from which on a message announces them: 100,000 take 2 … 10 s."""
MAX_NAME_BYTES = 255
"""Longest file name of common file systems."""
MIN_FREE_BYTES = 64 << 20
"""Bytes of the disk that a mirror leaves free, for the index."""
FREE_SPACE_FIX = "free disk space, or set STOKER_CACHE_DIR to a folder on a disk that has more"


class MirrorFile(NamedTuple):
    info: "ObjectInfo"
    size_bytes: int
    mtime_ns: int
    """The modification time, which identifies the version of the object."""


def plan_mirror(listing: Iterable["ObjectInfo"], uri: StorageUri) -> tuple[dict[str, MirrorFile], list[str]]:
    """The files of the mirror, by name relative to the prefix; notes on objects that cannot be files."""
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
        if shadowed.size_bytes:  # an empty one is a folder marker of a web console, listed without its slash
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
        return "its name has a character that file names cannot have"
    if any(len(part.encode("utf-8", "surrogateescape")) > MAX_NAME_BYTES for part in parts):
        return f"its name is longer than {MAX_NAME_BYTES} bytes"
    return None


def _version_mtime_ns(info: "ObjectInfo") -> int:
    """The object's time in whole seconds (S3 lists no fractions), plus a hash of its version in the microseconds."""
    version = f"{info.etag}\0{info.modified_s!r}".encode()
    return int(info.modified_s) * 10**9 + int.from_bytes(blake2b(version, digest_size=8).digest()) % 10**6 * 1000


def require_distinct_names(files: Iterable[str], folder: Path) -> None:
    """Raises DataError for names that differ in case only, on a disk that does not distinguish case: the later file
    would silently replace the other."""
    folder.mkdir(exist_ok=True)
    other_case = folder.with_name(folder.name.swapcase())
    if other_case == folder or not other_case.exists():
        return
    by_folded: dict[str, str] = {}
    for name in files:
        if (first := by_folded.setdefault(name.casefold(), name)) != name:
            raise DataError(
                "Two objects have the same file name on this disk.",
                location=folder,
                cause=f"{first!r} and {name!r} differ in case only",
                fix="rename one of them, or set STOKER_CACHE_DIR to a disk that distinguishes upper and lower case",
            )


def update_mirror(store: "Store", folder: Path, files: dict[str, MirrorFile], uri: StorageUri) -> None:
    """Makes a folder have exactly these files. The mtime of a folder changes when one of its files does."""
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
        print_status(f"Mirroring {uri} in {folder}: {len(changed) - len(copied):,} placeholders for its images")
    for name in changed:
        if not is_copied(name):
            create_stub(os.path.join(folder, name), files[name], replaces=name in present)
    _copy_files(store, folder, {name: files[name] for name in copied}, uri)


def _walk_files(folder: Path, prefix: str = "") -> Iterator[tuple[str, tuple[int, int]]]:
    """(name, (size in bytes, mtime in ns)) of every file."""
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
            f"There is not enough disk space for the annotations of {uri}.",
            location=folder,
            cause=f"they have {format_bytes(required_bytes)}, and {format_bytes(free_bytes)} are free",
            fix=FREE_SPACE_FIX,
        )


def create_stub(path: str, file: MirrorFile, *, replaces: bool) -> None:
    """Uses system calls directly, since there may be a million placeholders."""
    if replaces:
        os.unlink(path)  # the mtime of its folder must change
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.ftruncate(fd, file.size_bytes)
        os.utime(fd, ns=(file.mtime_ns, file.mtime_ns))
    finally:
        os.close(fd)


def _copy_files(store: "Store", folder: Path, files: dict[str, MirrorFile], uri: StorageUri) -> None:
    """Copies objects, many small ones at a time. A file appears under its name when it is complete."""
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
                stop.set()  # the threads skip the remaining files
                raise


def _copy_file(store: "Store", path: Path, file: MirrorFile) -> None:
    if file.size_bytes > LARGE_FILE_BYTES:
        download(store, file.info.key, path)  # in parts, all of one version
        os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
        return
    data = store.read(file.info.key)
    if len(data) != file.size_bytes:
        raise StorageError(
            "An object changed while it was being copied.",
            location=store.uri.child(file.info.key),
            fix="try again when it is not being written",
        )
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)
        os.utime(temporary, ns=(file.mtime_ns, file.mtime_ns))


def format_bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
