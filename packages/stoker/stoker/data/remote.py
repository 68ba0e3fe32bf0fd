"""Data sets in buckets and on web servers: from a URI to the local path of a mirror, a folder that looks like it.

The mirror of a bucket is made by one listing and kept current. Annotation files and TFRecord shards are copied. Images
are placeholders, sparse files of the object's size, and are read from the bucket (`images/source.py`). Size and
modification time of a file identify the version of its object (`_version_mtime_ns`), so work that a kill interrupted,
and objects that changed, are found by comparing files with the listing.

On a web server, which lists nothing, a data set is an annotation file (COCO JSON or a CSV table), which lists the
images; their folder is found by requesting the first images where a local data set would have them.
"""

import contextlib
import fcntl
import json
import os
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from glob import has_magic
from hashlib import blake2b
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import quote

from stoker.data.formats.coco import SPLIT_ALIASES, read_entries
from stoker.data.formats.csv import TABLE_DIRS, detect_csv_layout, iter_rows
from stoker.data.formats.folders import ANNOTATION_DIRS, IMAGE_DIRS, split_from_name
from stoker.data.formats.images import MAX_NAME_BYTES
from stoker.data.formats.tfrecord import strip_shard_number
from stoker.data.images.source import FETCHED, MIRRORS_DIR, URI_FILE, is_copied, is_shard, paths_to_uris, print_status
from stoker.data.validation.problems import ProblemCollector
from stoker_watch.errors import DataError, StokerError, StorageError, make_error, nearest, writing
from stoker_watch.storage.local_files import atomic_path, cache_folder, format_bytes, safe_name, write_atomic
from stoker_watch.storage.store import ObjectInfo, Store, download, open_store
from stoker_watch.storage.uri import StorageUri, parse_uri
from stoker_watch.storage.web import open_url

COPY_THREADS = 64
"""Annotation files that are copied concurrently: the time of each is the latency of the store, 10 … 100 ms."""
LARGE_FILE_BYTES, LARGE_FILE_THREADS = 8 << 20, 4
"""Files above this size are copied in parts, a few files at a time: a shard of a gigabyte is never in memory."""
PROGRESS_INTERVAL_S = 2.0
"""Time until the first line about the progress, and between two lines."""
MIN_FREE_BYTES = 64 << 20
"""Bytes of the disk that a mirror leaves free, for the index."""
FREE_SPACE_FIX = "free disk space, or set STOKER_CACHE_DIR to a folder on a disk that has more"
NOTES_FILE = "notes.json"
"""In the folder of a mirror that is complete: the notes about it."""
MAX_FOLDERS_SHOWN = 8
"""Folders of a bucket that an error lists."""
WEB_SCHEMES = ("https", "http")
WEB_SUFFIXES = (".json", ".csv")
MAX_DOWNLOAD_BYTES, DOWNLOAD_TIMEOUT_S = 1 << 28, 60
"""Limits of an image or video that is downloaded from a web server: a 4K video of a minute has about 2^28 bytes."""
MAX_PROBES = 3
"""Images that are requested in each folder of a web server: the first ones may be missing."""

_T = TypeVar("_T")


class ResolvedDataset(NamedTuple):
    path: Path
    """A folder, an annotation file, or a pattern of such files, in the mirror."""
    root: Path
    notes: tuple[str, ...] = ()
    """Differences between the mirror and the bucket, in words."""


def resolve_dataset(uri: StorageUri, suffixes: tuple[str, ...]) -> ResolvedDataset:
    """The local path of a data set. For a file with one of `suffixes`, the folder that has its images is mirrored.

    Raises DataError where there is no data set, StorageError where the store cannot be read or the disk is full.
    """
    if uri.scheme in WEB_SCHEMES:
        path, root = _sync_web_mirror(uri)
        return ResolvedDataset(path, root)
    is_file = has_magic(uri.name) or strip_shard_number(uri.name).lower().endswith(suffixes)
    folder_uri = uri
    if is_file and uri.key:  # its images are there
        in_annotations = uri.parent.name.lower() in ANNOTATION_DIRS and uri.parent.key
        folder_uri = uri.parent.parent if in_annotations else uri.parent
    root, notes = sync_mirror(folder_uri)
    return ResolvedDataset(root / uri.key.removeprefix(folder_uri.key).lstrip("/"), root, notes)


def resolve_images(uri: StorageUri) -> Path:
    """The local path of images without annotations: a folder, an image, or a pattern. Raises as `resolve_dataset`.

    A single image gets a mirror of its own, so that its folder need not be listed.
    """
    if uri.key and not has_magic(uri.key):
        store = open_store(uri)
        if (info := store.stat(uri.key)) is not None:
            with locked_mirror(uri, uri.parent) as root:
                update_mirror(store, root, {uri.name: info}, uri)
            return root / uri.name
    folder_uri = uri
    while has_magic(folder_uri.key):
        folder_uri = folder_uri.parent
    return sync_mirror(folder_uri)[0] / uri.key.removeprefix(folder_uri.key).lstrip("/")


def download_image(url: str) -> Path:
    """The local copy of an image or video at an http(s) URL, which may have a query; downloaded again by each call.

    Raises DataError if it is missing, larger than MAX_DOWNLOAD_BYTES, or not complete after DOWNLOAD_TIMEOUT_S.
    """
    url = quote(url.partition("#")[0], safe="%/:?=&~+!$,;'@()*[]")  # what is quoted already stays
    uri, data, end_s = parse_uri(url.partition("?")[0]), bytearray(), time.monotonic() + DOWNLOAD_TIMEOUT_S
    try:
        if invalid_name_reason(uri.key) is not None:
            raise ValueError("a web server lists no folders")
        request = urllib.request.Request(url, headers={"User-Agent": "stoker"})
        with open_url(request, timeout_s=DOWNLOAD_TIMEOUT_S / 4) as response:
            while part := response.read1(1 << 20):
                data += part
                if len(data) > MAX_DOWNLOAD_BYTES or time.monotonic() > end_s:
                    raise ValueError(f"more than {MAX_DOWNLOAD_BYTES:,} bytes, or {DOWNLOAD_TIMEOUT_S} s")
    except (OSError, ValueError, HTTPException) as error:
        raise make_error(DataError, "image-not-downloaded", uri, cause=str(error)) from error
    full_uri = replace(uri, key=f"{uri.key}?{url}")  # each query is an image of its own, and may be a signature
    with locked_mirror(full_uri, uri.parent):
        path = mirror_dir_for(full_uri) / FETCHED / uri.name
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, memoryview(data), durable=False)
    return path


@contextlib.contextmanager
def uris_in_errors(root: Path) -> Iterator[None]:
    """Replaces paths in a mirror by URIs in the errors of the block."""
    try:
        yield
    except StokerError as error:
        location, cause, fix = (text and paths_to_uris(text, root) for text in (error.location, error.cause, error.fix))
        choices = [paths_to_uris(choice, root) for choice in error.choices]
        what = paths_to_uris(error.what, root)
        raise type(error)(what, location=location, cause=cause, choices=choices, fix=fix) from error


def sync_mirror(uri: StorageUri) -> tuple[Path, tuple[str, ...]]:
    """Returns the folder that mirrors a prefix of a bucket, up to date, absolute and without links; and differences
    from the bucket, in words. One process at a time updates it, others wait.

    Raises DataError where nothing has that prefix, StorageError where the store cannot be read or the disk is full.
    """
    store = open_store(uri)
    notes_file = mirror_dir_for(uri) / NOTES_FILE
    version_before = _file_version(notes_file)
    with locked_mirror(uri, uri) as root:
        # Another process updated it while this one waited for the lock: the ranks of a run list the bucket once.
        if _file_version(notes_file) not in (version_before, None):
            return root, tuple(json.loads(notes_file.read_bytes()))
        notes_file.unlink(missing_ok=True)
        listing = _with_progress(store.list(uri.key), lambda count: f"Listing {uri}: {count:,} objects so far")
        files, notes = _plan_mirror(listing, uri)
        if not files:
            raise _no_dataset_error(store, uri)
        require_distinct_names(files, root)
        update_mirror(store, root, files, uri)
        if shards := [info.size_bytes for name, info in files.items() if is_shard(name)]:
            notes.append(f"copied from {uri}: {len(shards):,} TFRecord file(s), {format_bytes(sum(shards))}")
        write_atomic(notes_file, json.dumps(notes).encode())
    return root, tuple(notes)


def _with_progress(items: Iterable[_T], describe: Callable[[int], str]) -> Iterator[_T]:
    """Yields the items; prints what `describe` says of their number so far every PROGRESS_INTERVAL_S."""
    last_message_s = time.monotonic()
    for count, item in enumerate(items, start=1):
        yield item
        if time.monotonic() - last_message_s > PROGRESS_INTERVAL_S:
            print_status(describe(count))
            last_message_s = time.monotonic()


@contextlib.contextmanager
def locked_mirror(uri: StorageUri, root_uri: StorageUri) -> Iterator[Path]:
    """Locks the mirror of `uri` for this process; yields the folder in it that mirrors `root_uri`. The kernel releases
    the lock of a process that died. A failure to write is a StorageError."""
    mirror_dir, name = mirror_dir_for(uri), root_uri.name
    with writing("The local copy of the data set cannot be written.", mirror_dir, fix=FREE_SPACE_FIX):
        mirror_dir.mkdir(parents=True, exist_ok=True)
        with (mirror_dir / "lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print_status(f"Another process is copying the annotations of {root_uri}: waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:  # a mount without locks: each file is still written as a whole
                print_status(f"{mirror_dir}: no lock ({error.strerror}): open {root_uri} in one process at a time")
            if not (mirror_dir / URI_FILE).exists():
                write_atomic(mirror_dir / URI_FILE, str(root_uri).encode())
            # Messages and formats use the name of the folder, so it is the name of the data set.
            yield mirror_dir / (name if invalid_name_reason(name) is None and ":" not in name else "data")


def mirror_dir_for(uri: StorageUri) -> Path:
    """Returns the folder of a mirror, its lock and its `address` file."""
    digest = blake2b(str(uri).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    folder = f"{safe_name(f'{uri.bucket}-{uri.name}')[-60:]}-{digest}"
    return Path(os.path.realpath(cache_folder())) / MIRRORS_DIR / folder


def _file_version(file: Path) -> tuple[int, int] | None:
    try:
        stat = file.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _no_dataset_error(store: Store, uri: StorageUri) -> DataError:
    """Returns the error for a prefix without objects; names what exists next to it."""
    if not uri.key:
        return DataError("The bucket is empty.", location=uri, fix="name another, or copy the data set into it")
    if store.stat(uri.key) is not None:
        return make_error(DataError, "object-is-no-data-set", uri, name=uri.name, parent=uri.parent)
    parent, names = uri.parent, store.list_folders(uri.parent.key)
    if names:
        cause = f"the folders in {parent} are {', '.join(names[:MAX_FOLDERS_SHOWN])}"
    else:
        other = next(store.list(parent.key), None)
        cause = f"{parent} has other objects, e.g. {Path(other.key).name}" if other else f"{parent} is empty, too"
    closest = nearest(uri.name, names)
    fix = f"did you mean {parent.child(closest)}?" if closest else "correct the address"
    return DataError("There is no object below that address.", location=uri, cause=cause, fix=fix)


def _plan_mirror(listing: Iterable[ObjectInfo], uri: StorageUri) -> tuple[dict[str, ObjectInfo], list[str]]:
    """Returns the files of the mirror, by name relative to the prefix; notes on objects that cannot be files."""
    files: dict[str, ObjectInfo] = {}
    keys_by_reason: dict[str, list[str]] = {}
    prefix = f"{uri.key}/" if uri.key else ""
    for info in listing:
        name = info.key.removeprefix(prefix)
        if (reason := invalid_name_reason(name)) is not None:
            keys_by_reason.setdefault(reason, []).append(info.key)
        else:
            files[name] = info
    folders = {name[:i] for name in files for i, char in enumerate(name) if char == "/"}
    for name in sorted(folders & files.keys()):
        shadowed = files.pop(name)
        if shadowed.size_bytes:  # an empty one is a folder marker of a web console, listed without its slash
            keys_by_reason.setdefault("it is an object and a folder", []).append(shadowed.key)
    notes = [f"{len(keys):,} object(s) left out: {reason}, e.g. {keys[0]!r}" for reason, keys in keys_by_reason.items()]
    return files, notes


def invalid_name_reason(name: str) -> str | None:
    """Returns why a key cannot be the name of a file."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "a part of its name is empty, . or .."
    if "\0" in name or "\\" in name:
        return "its name has a character that file names cannot have"
    if any(len(part.encode("utf-8", "surrogateescape")) > MAX_NAME_BYTES for part in parts):
        return f"its name is longer than {MAX_NAME_BYTES} bytes"
    return None


def _version_mtime_ns(info: ObjectInfo) -> int:
    """The object's time in whole seconds (S3 lists no fractions), plus a hash of its version in the microseconds."""
    version = f"{info.etag}\0{info.modified_s!r}".encode()
    return int(info.modified_s) * 10**9 + int.from_bytes(blake2b(version, digest_size=8).digest()) % 10**6 * 1000


def require_distinct_names(files: Iterable[str], folder: Path) -> None:
    """Raises DataError for names that differ in case only, on a disk where one file would replace the other."""
    folder.mkdir(exist_ok=True)
    other_case = folder.with_name(folder.name.swapcase())
    if other_case == folder or not other_case.exists():
        return
    by_folded: dict[str, str] = {}
    for name in files:
        if (first := by_folded.setdefault(name.casefold(), name)) != name:
            raise make_error(DataError, "names-differ-in-case", folder, first=first, name=name)


def update_mirror(store: Store, folder: Path, files: dict[str, ObjectInfo], uri: StorageUri) -> None:
    """Makes a folder have exactly these files. The mtime of a folder changes when one of its files does."""
    present = dict(_walk_files(folder))
    for name in present.keys() - files.keys():
        (folder / name).unlink()
    for name in sorted({name.rpartition("/")[0] for name in present.keys() - files.keys()} - {""}, reverse=True):
        with contextlib.suppress(OSError):  # other files are in it
            os.removedirs(folder / name)
    folder.mkdir(exist_ok=True)
    changed = [name for name, info in files.items() if present.get(name) != (info.size_bytes, _version_mtime_ns(info))]
    for subfolder in sorted({name.rpartition("/")[0] for name in changed}):
        (folder / subfolder).mkdir(parents=True, exist_ok=True)
    copied = [name for name in changed if is_copied(name)]
    required_bytes, free_bytes = sum(files[name].size_bytes for name in copied), shutil.disk_usage(folder).free
    if required_bytes + MIN_FREE_BYTES > free_bytes:
        cause = f"they have {format_bytes(required_bytes)}, and {format_bytes(free_bytes)} are free"
        raise make_error(StorageError, "no-space-for-mirror", folder, cause=cause, fix=FREE_SPACE_FIX, uri=uri)
    for name in changed:
        if not is_copied(name):
            _create_stub(os.path.join(folder, name), files[name], replaces=name in present)
    _copy_files(store, folder, {name: files[name] for name in copied}, uri)


def _walk_files(folder: Path, prefix: str = "") -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields (name, (size in bytes, mtime in ns)) of every file."""
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk_files(folder / entry.name, f"{prefix}{entry.name}/")
            else:
                stat = entry.stat(follow_symlinks=False)
                yield prefix + entry.name, (stat.st_size, stat.st_mtime_ns)


def _create_stub(path: str, info: ObjectInfo, *, replaces: bool) -> None:
    """Uses system calls directly, since there may be a million placeholders."""
    if replaces:
        os.unlink(path)  # the mtime of its folder must change
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.ftruncate(fd, info.size_bytes)
        os.utime(fd, ns=(_version_mtime_ns(info),) * 2)
    finally:
        os.close(fd)


def _copy_files(store: Store, folder: Path, files: dict[str, ObjectInfo], uri: StorageUri) -> None:
    """Copies objects, many small ones at a time. A file appears under its name when it is complete."""
    of_all = f"of {len(files):,} files, {format_bytes(sum(info.size_bytes for info in files.values()))} in all"
    large = [name for name, info in files.items() if info.size_bytes > LARGE_FILE_BYTES]
    small = [name for name, info in files.items() if info.size_bytes <= LARGE_FILE_BYTES]
    for names, threads in ((small, COPY_THREADS), (large, LARGE_FILE_THREADS)):
        with ThreadPoolExecutor(threads, "stoker-copy") as pool:
            try:
                done = pool.map(lambda name: _copy_file(store, folder / name, files[name]), names)
                for _ in _with_progress(done, lambda count: f"Copying annotations of {uri}: {count:,} {of_all}"):
                    pass
            finally:
                pool.shutdown(cancel_futures=True)  # after an error, the remaining files


def _copy_file(store: Store, path: Path, info: ObjectInfo) -> None:
    times_ns = (_version_mtime_ns(info),) * 2
    if info.size_bytes > LARGE_FILE_BYTES:
        download(store, info.key, path)  # in parts, all of one version
        os.utime(path, ns=times_ns)
        return
    data = store.read(info.key)
    if len(data) != info.size_bytes:
        raise make_error(StorageError, "object-changed", store.uri.child(info.key))
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)
        os.utime(temporary, ns=times_ns)


def _sync_web_mirror(uri: StorageUri) -> tuple[Path, Path]:
    """Returns (annotation file, mirror) on the local disk, up to date, for an annotation file on a web server. Raises
    DataError for a URI that is not such a file, or whose images are not found; StorageError."""
    if not uri.name.lower().endswith(WEB_SUFFIXES) or not uri.key:
        choices, example = [f"…/*{suffix}" for suffix in WEB_SUFFIXES], uri.child("annotations.json")
        raise make_error(DataError, "web-folder", uri, choices=choices, example=example)
    store = open_store(uri)
    info = store.stat(uri.key)
    if info is None:
        raise DataError("There is no such file.", location=uri, fix="correct the address")
    in_annotation_dir = uri.parent.key and uri.parent.name.lower() in (*ANNOTATION_DIRS, *TABLE_DIRS)
    base = uri.parent.parent if in_annotation_dir else uri.parent
    name = uri.key.removeprefix(base.key).lstrip("/")
    with locked_mirror(uri, base) as root:
        stat = (root / name).stat() if (root / name).is_file() else None
        if stat is None or (stat.st_size, stat.st_mtime_ns) != (info.size_bytes, _version_mtime_ns(info)):
            update_mirror(store, root, {name: info}, uri)  # also removes the placeholders of the old version
        image_names = [image for image in _listed_images(root / name) if invalid_name_reason(image) is None]
        folder = _find_image_folder(store, base, uri, image_names)
        paths = sorted({f"{folder}/{image}" if folder else image for image in image_names})
        stubs = {path: ObjectInfo(base.child(path).key, 1, None, 0.0) for path in paths}
        update_mirror(store, root, {name: info} | stubs, uri)
    return root / name, root


def _listed_images(file: Path) -> list[str]:
    names: Iterable[str] = ()
    if file.suffix.lower() == ".json":
        names = (image.file_name for image in read_entries(file, file.name, ProblemCollector())[0].images)
    elif (layout := detect_csv_layout(file)) is not None:
        column = layout.file_column
        names = (values[column] for _, values in iter_rows(file, layout) if len(values) > column)
    return list(dict.fromkeys(name.replace("\\", "/") for name in names if name))


def _find_image_folder(store: Store, base: StorageUri, uri: StorageUri, names: list[str]) -> str:
    """Returns the folder of the images below `base`. Raises DataError where none of the first few images is found."""
    if not names:
        raise DataError("The file names no images.", location=uri, fix="name a file that lists images")
    stem = uri.name.rpartition(".")[0]
    split = split_from_name(stem)
    split_folders = [stem.partition("_")[2] or stem, stem, *(SPLIT_ALIASES[split] if split else ())]
    own_folder = uri.parent.key.removeprefix(base.key).strip("/")
    folders = ["", own_folder, *IMAGE_DIRS[:2], *split_folders, *(f"images/{folder}" for folder in split_folders)]
    folders = list(dict.fromkeys(folders))
    for name in names[:MAX_PROBES]:
        for folder in folders:
            if store.stat(base.child(f"{folder}/{name}" if folder else name).key) is not None:
                return folder
    listed = ", ".join(folder or "." for folder in folders)
    raise make_error(DataError, "web-images-not-found", uri, name=names[0], base=base, folders=listed)
