"""Where a picture's bytes really are: the one way in which pictures are opened, local ones and those of a bucket.

A data set in a bucket has a mirror on the local disk (`bucket.py`), in which a picture is a placeholder: a file with
the object's size and no content. Whoever opens a picture asks here, so that nobody takes a placeholder for one. A path
tells by itself that it lies in a mirror. Not here: making the mirror, reading many pictures ahead (`loader.py`).
"""

import errno
import functools
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stoker.errors import ObjectMissing
from stoker.storage.local_files import cache_folder
from stoker.storage.uri import Address, is_address, parse

if TYPE_CHECKING:
    from stoker.storage.store import Store

FOLDER, ADDRESS = "buckets", "address"
"""Mirrors lie in this folder of the cache; each has a file that says which address it is of."""
COPIED = (
    ".json", ".jsonl", ".xml", ".txt", ".csv", ".tsv", ".yaml", ".yml", ".data", ".names", ".pbtxt", ".md",
)  # fmt: skip
"""Endings of the files whose content a mirror has: annotations, and what says something about them."""
_RECORDS = re.compile(r"\.(tf_?records?|tfrec|records?)(?=$|[-.])|-\d{3,7}-of-\d{3,7}", re.IGNORECASE)
"""TFRecord shards, by name as `formats/tfrecord_files.py` knows them: annotations and pictures in one."""
_PICTURE = re.compile(r"\.(jpe?g|png|bmp|webp|tiff?|gif|jp2)$", re.IGNORECASE)
FIRST_BYTES = 1 << 12
"""What is read of a remote picture to learn its size: a JPEG without EXIF tells it in its first kilobyte."""
MOST_RANGES = 3
"""Pieces of a remote picture that are read one by one, until the whole is."""


class Remote(NamedTuple):
    """A picture that is an object."""

    store: "Store"
    key: str


def is_shard(name: str) -> bool:
    return _RECORDS.search(name) is not None and _PICTURE.search(name) is None


def is_copied(name: str) -> bool:
    """Whether a mirror has the content of a file; of every other one it has a placeholder."""
    return name.lower().endswith(COPIED) or is_shard(name)


def address_of(path: Path) -> Address | None:
    """The address of a file or folder in a mirror; None for any other path."""
    base = _base(cache_folder())
    text = os.fspath(path)
    if not text.startswith(base):
        return None
    mirror, _, inner = text[len(base) :].partition(os.sep)
    try:
        root = _root(base + mirror)
    except FileNotFoundError:  # it is being made, or it was deleted
        return None
    below = inner.partition(os.sep)[2]
    return root.child(below.replace(os.sep, "/")) if below else root


@functools.cache
def _base(cache: Path) -> str:
    return os.path.join(os.path.realpath(cache), FOLDER, "")


@functools.cache
def _root(mirror: str) -> Address:
    return parse(Path(mirror, ADDRESS).read_text(encoding="utf-8"))


def object_of(path: Path) -> Address | None:
    """The object that a placeholder stands for; None for a file that is what it says."""
    address = address_of(path)
    return None if address is None or is_copied(path.name) else address


def remote(path: Path) -> Remote | None:
    """The same with its store. Looking that up takes 40 µs: who asks for many keeps it."""
    address = object_of(path)
    if address is None:
        return None
    from stoker.storage.store import open_store  # only needed, and only imported, where there are buckets

    return Remote(open_store(address), address.key)


def shown(path: Path) -> str:
    """A path as people know it: the address, where it stands for one."""
    address = address_of(path)
    return str(path) if address is None else str(address)


def in_words(text: str, root: Path) -> str:
    """A message in which `root`, a mirror or a folder in it, and what is below it, are their addresses."""
    address = address_of(root)
    return text if address is None else text.replace(str(root), str(address))


def say(text: str) -> None:
    """A line for the person, about what takes long before there is a run that could record it."""
    print(text, file=sys.stderr, flush=True)


def read(place: Path | str, span: tuple[int, int] | None = None) -> bytes:
    """A picture, encoded: of a path, or of what `shown` made of it; span: first byte and number of bytes within the
    file that the folder of `place` is. Raises OSError, StorageError."""
    found = _of_address(place) if isinstance(place, str) and is_address(place) else None
    if found is not None:
        if span is None:
            return read_object(found)
        return read_object(found._replace(key=found.key.rpartition("/")[0]), *span)
    path = Path(place)
    if span is None and (found := remote(path)) is not None:
        return read_object(found)
    with (path if span is None else path.parent).open("rb", buffering=0) as file:
        if span is None:
            return file.read()
        file.seek(span[0])
        return file.read(span[1])


def _of_address(text: str) -> Remote:
    from stoker.storage.store import open_store

    address = parse(text)
    return Remote(open_store(address), address.key)


def read_object(found: Remote, start: int = 0, length: int | None = None) -> bytes:
    """Bytes of an object. One that is not there is a FileNotFoundError, as of a file: the picture is missing."""
    try:
        return found.store.read(found.key, start=start, length=length)
    except ObjectMissing as error:
        raise FileNotFoundError(errno.ENOENT, "No such object", error.place or found.key) from error


class Pieces:
    """A remote picture of which only a part is wanted: `read(first byte, count)`, as `headers.Read` has it."""

    def __init__(self, found: Remote, placeholder: Path) -> None:
        self._found, self.total = found, placeholder.stat().st_size
        if found.store.address.scheme in ("https", "http"):  # whose placeholders know no size
            info = found.store.stat(found.key)
            self.total = 0 if info is None else info.size_bytes
        self.head = self._get(0, min(self.total, FIRST_BYTES))
        self._pieces: list[tuple[int, bytes]] = [(0, self.head)]

    def _get(self, start: int, count: int) -> bytes:
        return read_object(self._found, start, count) if count > 0 else b""

    def read(self, at: int, count: int) -> bytes:
        """As of a file: fewer bytes at its end. After a few pieces the whole is read, once."""
        count = min(count, self.total - at)
        if count <= 0:
            return b""
        for start, data in self._pieces:
            if start <= at and at + count <= start + len(data):
                return data[at - start : at - start + count]
        if len(self._pieces) > MOST_RANGES:
            start, wanted = 0, self.total
        else:
            start, wanted = at, min(max(count, FIRST_BYTES), self.total - at)
        data = self._get(start, wanted)
        self._pieces.append((start, data))
        return data[at - start : at - start + count]
