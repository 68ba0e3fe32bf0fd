"""Reads the bytes of images, local ones and objects of a bucket. All code that opens images uses this module.

A data set in a bucket has a mirror on the local disk (`remote.py`), in which an image is a stub: a file with the
object's size and no content. The path alone shows that a file is in a mirror. Prefetching: `loading/worker_pool.py`.
"""

import errno
import functools
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stoker_watch import regular_files
from stoker_watch.errors import ObjectMissing
from stoker_watch.printable import print_text
from stoker_watch.storage.local_files import cache_folder
from stoker_watch.storage.uri import StorageUri, is_uri, parse_uri

if TYPE_CHECKING:
    from stoker_watch.storage.store import Store

MIRRORS_DIR, URI_FILE = "buckets", "address"
"""The folder of mirrors in the cache; the file in each mirror that contains its URI."""
FETCHED = ".fetched"
"""The folder of a mirror with an image from a web server, in full (`remote.download_image`)."""
COPIED_SUFFIXES = (
    ".json", ".jsonl", ".ndjson", ".manifest", ".xml", ".txt", ".csv", ".tsv", ".yaml",
    ".yml", ".data", ".names", ".labels", ".pbtxt", ".md",
)  # fmt: skip
"""Suffixes of the files that a mirror contains in full: annotations and their descriptions."""
SHARD_INDEX = "stoker-index.arrow"
"""The index of packed shards (`formats/webdataset.py`), also copied."""
_TFRECORD_NAME = re.compile(r"\.(tf_?records?|tfrec|records?)(?=$|[-.])|-\d{3,7}-of-\d{3,7}", re.IGNORECASE)
"""Names of TFRecord shards, as in `formats/tfrecord.py`: annotations and images in one file."""
_OTHER_NAME = re.compile(r"\.(jpe?g|png|bmp|webp|tiff?|gif|jp2|tar|mds|parquet)$", re.IGNORECASE)
"""Names of images and of other shards, which may be numbered in the same way."""


class RemoteObject(NamedTuple):
    """An image in a bucket."""

    store: "Store"
    key: str


def is_shard(name: str) -> bool:
    return _TFRECORD_NAME.search(name) is not None and _OTHER_NAME.search(name) is None


def is_copied(name: str) -> bool:
    """Returns whether a mirror contains a file in full; every other file is a stub."""
    is_index = name.rpartition("/")[2] == SHARD_INDEX
    return is_index or name.lower().endswith(COPIED_SUFFIXES) or is_shard(name)


def path_to_uri(path: Path | str) -> StorageUri | None:
    """Returns the URI of a file or folder in a mirror; None for any other path."""
    prefix = _mirrors_prefix(cache_folder())
    path_text = os.fspath(path)
    if not path_text.startswith(prefix):
        return None
    mirror, _, inner_path = path_text[len(prefix) :].partition(os.sep)
    try:
        root_uri = _mirror_uri(prefix + mirror)
    except FileNotFoundError:  # it is being made, or it was deleted
        return None
    relative_path = inner_path.partition(os.sep)[2]
    return root_uri.child(relative_path.replace(os.sep, "/")) if relative_path else root_uri


@functools.cache
def _mirrors_prefix(cache_dir: Path) -> str:
    return os.path.join(os.path.realpath(cache_dir), MIRRORS_DIR, "")


@functools.cache
def _mirror_uri(mirror: str) -> StorageUri:
    return parse_uri(Path(mirror, URI_FILE).read_text(encoding="utf-8"))


def resolve_stub(path: Path) -> StorageUri | None:
    """Returns the URI of the object of a stub; None for an ordinary file."""
    uri = path_to_uri(path)
    return None if uri is None or is_copied(path.name) or path.parent.name == FETCHED else uri


def find_remote(path: Path) -> RemoteObject | None:
    """Returns the object of a stub with its store. The look-up takes 40 µs, so callers with many images keep the
    store."""
    uri = resolve_stub(path)
    return None if uri is None else _remote_object(uri)


def _remote_object(uri: StorageUri) -> RemoteObject:
    from stoker_watch.storage.store import open_store  # needed, and imported, for buckets only

    return RemoteObject(open_store(uri), uri.key)


def display_path(path: Path | str) -> str:
    """Returns a path as users know it: the URI, if the path is in a mirror."""
    uri = path_to_uri(path)
    return str(path) if uri is None else str(uri)


def paths_to_uris(text: str, root: Path) -> str:
    """Returns a message in which `root` (a mirror or a folder in it) and paths below it are replaced by their URIs."""
    uri = path_to_uri(root)
    return text if uri is None else text.replace(str(root), str(uri))


def print_status(text: str) -> None:
    """Prints a line about a slow operation before there is a run that could record it."""
    print_text(text, file=sys.stderr, flush=True)


def read_image_bytes(location: Path | str, byte_range: tuple[int, int] | None = None) -> bytes:
    """Returns the encoded image at a path or URI. byte_range: (first byte, number of bytes) within the file that is the
    parent of `location`, for images inside another file. Raises OSError, StorageError."""
    if isinstance(location, str) and is_uri(location):
        uri = parse_uri(location)
        return read_object(_remote_object(uri if byte_range is None else uri.parent), *(byte_range or (0, None)))
    path = Path(location) if byte_range is None else Path(location).parent
    if (remote_object := find_remote(path)) is not None:
        return read_object(remote_object, *(byte_range or (0, None)))
    return read_local(path, byte_range)


def read_local(path: Path | str, byte_range: tuple[int, int] | None = None) -> bytes:
    """Returns the bytes of a local image file, or a range of a file that contains images. Raises OSError, also for a
    device, a FIFO and more than `regular_files.MAX_BYTES` bytes."""
    fd = regular_files.open_fd(path, max_bytes=regular_files.MAX_BYTES if byte_range is None else None)
    try:
        start, length = (0, os.fstat(fd).st_size) if byte_range is None else byte_range
        if length > regular_files.MAX_BYTES:
            raise OSError(errno.EFBIG, f"it has {length:,} bytes; at most {regular_files.MAX_BYTES:,} are read", path)
        data = os.pread(fd, length, start)
        while len(data) < length and (more := os.pread(fd, length - len(data), start + len(data))):
            data += more
        return data
    finally:
        os.close(fd)


def read_object(remote_object: RemoteObject, start: int = 0, length: int | None = None) -> bytes:
    """Returns bytes of an object. Raises FileNotFoundError where it is missing, as for a file; StorageError."""
    try:
        return remote_object.store.read(remote_object.key, start=start, length=length)
    except ObjectMissing as error:
        raise FileNotFoundError(errno.ENOENT, "No such object", error.location or remote_object.key) from error
