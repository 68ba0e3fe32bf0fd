"""The bytes of TFRecord files: frames with checksums, gzip, the messages tf.train.Example; and label maps.

A file is a sequence of records, each a little-endian uint64 length, the masked CRC-32C of those 8 bytes, the data, and
the masked CRC-32C of the data. There is no marker between records, so after a damaged length no record can be found.
Format: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details. Compressed shards are unpacked
once into `<cache folder>/shards/`, because gzip has no random access to an image; they may be deleted at any time. A
label map (`label_map.pbtxt`: ids to class names) is protobuf's text format: item { id: 1  name: 'cat' }

Not here: the meaning of the features, which label map belongs to which records (`tfrecord.py`).
"""

import contextlib
import errno
import functools
import gzip
import mmap
import os
import re
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stoker.data.formats.folders import read_head
from stoker.data.formats.messages import message_class
from stoker.data.validation.problems import ProblemCollector
from stoker_watch import regular_files
from stoker_watch.errors import DataError, StorageError, make_error, needs_package
from stoker_watch.storage.local_files import atomic_path, cache_folder

HEADER_BYTES, FOOTER_BYTES = 12, 4
_CRC = struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8
"""tensorflow/core/lib/hash/crc32c.h: a stored CRC is rotated and shifted by this, so that the CRC of data that contains
CRCs stays a good checksum."""


class RecordFrame(NamedTuple):
    """A record with correct checksums. Its data are the bytes from `start` to `stop` of the file."""

    number: int
    """1 for the first record of the file; damaged ones count."""
    offset: int
    """The first byte of the record, which is the first of its length."""
    start: int
    stop: int


@functools.cache
def _crc32c() -> Callable[[bytes], int]:
    with needs_package("google-crc32c", "Reading or writing TFRecords"):
        import google_crc32c
    value: Callable[[bytes], int] = google_crc32c.value
    return value


def masked_crc(data: bytes) -> int:
    """Returns the CRC-32C of some bytes as TFRecords store it."""
    crc = _crc32c()(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def is_record_header(head: bytes) -> bool:
    """Returns whether the first 12 bytes of a file are a length with the correct checksum."""
    return len(head) >= HEADER_BYTES and masked_crc(head[:8]) == _CRC.unpack_from(head, 8)[0]


def frame_length(head: bytes) -> int:
    """Returns the number of bytes of data that a record's first 12 bytes give."""
    return int.from_bytes(head[:8], "little")


def iter_frames(data: mmap.mmap, shard: str, problems: ProblemCollector) -> Iterator[RecordFrame]:
    """The undamaged records of a mapped file, without a copy. Damage is reported with byte offset and record number."""
    offset, number, total = 0, 0, len(data)
    view = np.frombuffer(data, np.uint8)  # the CRC function takes no memoryview
    try:
        while offset < total:
            number += 1
            location = f"{shard} @ byte {offset:,}, record {number}"
            head = data[offset : offset + HEADER_BYTES]
            if len(head) < HEADER_BYTES:
                problems.add("truncated-shard", f"{location}: the file ends within the record's length")
                return
            if not is_record_header(head):
                reason = "it does not begin like a TFRecord" if number == 1 else "the checksum of its length is wrong"
                lost = f"the {total - offset:,} bytes from here on are left out"
                problems.add("damaged-shard", f"{location}: {reason}; {lost}")
                return
            start = offset + HEADER_BYTES
            stop = start + frame_length(head)
            if stop + FOOTER_BYTES > total:
                missing = stop + FOOTER_BYTES - total
                problems.add("truncated-shard", f"{location}: the file ends {missing:,} bytes before the record does")
                return
            if masked_crc(view[start:stop]) == _CRC.unpack_from(data, stop)[0]:  # type: ignore[arg-type]
                yield RecordFrame(number, offset, start, stop)
            else:
                problems.add("damaged-record", location)
            offset = stop + FOOTER_BYTES
    finally:
        del view  # a mapping with a view cannot be closed


def write_record(file: BinaryIO, data: bytes) -> None:
    length = len(data).to_bytes(8, "little")
    file.write(b"".join((length, _CRC.pack(masked_crc(length)), data, _CRC.pack(masked_crc(data)))))


_CHUNK_BYTES = 1 << 20
MAX_RECORD_BYTES = 1 << 31
"""Protobuf's limit of a message, and so of a record."""
MIN_FREE_BYTES = 1 << 28
"""What unpacking leaves free on the disk of the cache: 256 MiB."""


def unpacked_path(shard: Path) -> Path:
    """Returns the unpacked file of a shard. Its name depends on the shard's path, size and modification time."""
    stat = shard.stat()
    key = f"{shard}\0{stat.st_size}\0{stat.st_mtime_ns}".encode("utf-8", "surrogateescape")
    return cache_folder() / "shards" / f"{shard.name[:80]}-{blake2b(key, digest_size=8).hexdigest()}"


@contextlib.contextmanager
def write_cached(target: Path, shard: Path) -> Iterator[Callable[[bytes | memoryview], None]]:
    """Gives a function that appends bytes to a file of the cache, which is there as a whole or not at all. Safe against
    kills and in several processes. Raises StorageError if the disk is full or would be."""

    def append(data: bytes | memoryview) -> None:
        if shutil.disk_usage(target.parent).free < MIN_FREE_BYTES + len(data):
            raise OSError(errno.ENOSPC, f"less than {MIN_FREE_BYTES:,} bytes would remain on the disk")
        file.write(data)

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(target) as temporary, temporary.open("xb") as file:
            yield append
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        reason, size = error.strerror or error, shard.stat().st_size
        raise make_error(StorageError, "shard-not-unpacked", target, reason=reason, shard=shard, size=size) from error


def unpack(shard: Path) -> Path:
    """Returns the unpacked file of a gzipped shard, made if it does not exist, up to the first frame that cannot be
    one: the reader reports it, and a small file cannot fill the disk. Raises DataError if the gzip data are damaged,
    StorageError if the disk is full or would be."""
    target = unpacked_path(shard)
    if not target.exists():
        with write_cached(target, shard) as append, regular_files.open_file(shard) as raw, gzip.open(raw) as packed:
            try:
                _copy_frames(packed, append)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise make_error(DataError, "damaged-gzip", shard, cause=str(error)) from error
    return target


def _copy_frames(packed: gzip.GzipFile, append: Callable[[bytes], None]) -> None:
    """Copies the frames up to the end, or up to and with the header of the first that cannot be one."""
    while len(head := packed.read(HEADER_BYTES)) == HEADER_BYTES:
        append(head)
        remaining = frame_length(head) + FOOTER_BYTES
        if not is_record_header(head) or remaining > MAX_RECORD_BYTES:
            return
        while remaining and (chunk := packed.read(min(remaining, _CHUNK_BYTES))):
            append(chunk)
            remaining -= len(chunk)
    append(head)


KINDS = {"bytes_list": "bytes", "float_list": "floats", "int64_list": "integers"}
"""Feature's oneof."""
Values: TypeAlias = Sequence[bytes] | Sequence[int] | NDArray[np.float32]


class MalformedExample(ValueError):
    """The bytes are not a tf.train.Example, or a feature has the wrong type."""


class Example:
    def __init__(self, record: bytes) -> None:
        """Raises MalformedExample."""
        from google.protobuf.message import DecodeError

        try:
            message = message_class("Example").FromString(record)
        except DecodeError as error:
            raise MalformedExample("the bytes are not those of a tf.train.Example") from error
        self._features = {entry.key: entry.value for entry in message.features.feature}

    def values(self, key: bytes, kind: str) -> Sequence[Any]:
        """Returns the values of a feature of one of KINDS; none if it is absent or empty. Raises MalformedExample."""
        feature = self._features.get(key)
        actual = None if feature is None else feature.WhichOneof("kind")
        if feature is None or actual is None:
            return ()
        values: Sequence[Any] = getattr(feature, actual).value
        if actual != kind and len(values):
            raise MalformedExample(f"{key.decode()} contains {KINDS[actual]}, not {KINDS[kind]}")
        return values


def encode_example(values: Mapping[str, Values]) -> bytes:
    """Returns the bytes of an Example with these features: lists of byte strings or int64, or an array of float32. An
    empty list is left out: this means the same, and cannot have a type that a reader does not expect."""
    example = message_class("Example")()
    for key, value in sorted(values.items()):
        if len(value):
            feature = example.features.feature.add(key=key.encode()).value
            if isinstance(value, np.ndarray):
                feature.float_list.value.extend(value.tolist())
            else:
                (feature.bytes_list if isinstance(value[0], bytes) else feature.int64_list).value.extend(value)
    encoded: bytes = example.SerializeToString()
    return encoded


BACKGROUND = 0
"""TensorFlow's own id for "no object"; an item with this id must be called "background"."""
MAX_LABEL_MAP_BYTES = 1 << 26
"""Of a label map: 100,000 classes have 8 MB."""
EXAMPLE = "item { id: 1 name: 'cat' } for each class, ids from 1"
_ITEM = re.compile(r"""(?:\#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|(?P<item>(?<![\w.])item\s*:?\s*[{<])""")
"""An item's beginning; also matches comments and strings, so that none is found inside them."""


class LabelMap(NamedTuple):
    """The classes of a file, in the order of their ids."""

    path: Path
    ids: list[int]
    """1 or more, all different."""
    names: list[str]
    """[C], the display_name of each class, else its name."""
    index_by_name: dict[str, int]
    """Name or display_name of a class → index into `ids`. Records may use either."""


def looks_like_label_map(path: Path) -> bool:
    """Returns whether the first 64 KiB have an item: graphs and pipelines are .pbtxt files too."""
    return bool(_item_lines(read_head(path).decode(errors="replace")))


def _item_lines(text: str) -> list[int]:
    return [text.count("\n", 0, match.start()) + 1 for match in _ITEM.finditer(text) if match["item"]]


def read_label_map(path: Path) -> LabelMap:
    """Reads a label map. Of its message (object_detection/protos/string_int_label_map.proto) id, name and display_name
    are read, all other fields are skipped. Raises DataError with file and line."""
    from google.protobuf import text_format

    def wrong(what: str, line: object = None, cause: str | None = None, fix: str = EXAMPLE) -> DataError:
        return DataError(what, location=path if line is None else f"{path}:{line}", cause=cause, fix=fix)

    message = message_class("LabelMap")()
    try:
        text = regular_files.read_text(path, encoding="utf-8-sig", max_bytes=MAX_LABEL_MAP_BYTES)
        text_format.Parse(text, message, allow_unknown_field=True, allow_unknown_extension=True)
    except UnicodeDecodeError as error:
        raise wrong("A label map is not UTF-8.", cause=str(error), fix="save it as UTF-8") from error
    except text_format.ParseError as error:
        raise wrong("A label map cannot be read.", error.GetLine(), str(error)) from error
    except RecursionError as error:
        raise wrong("A label map cannot be read.", cause="its messages are nested too deeply") from error
    items: list[tuple[int, list[str], int]] = []
    lines = chain(_item_lines(text), repeat(text.count("\n") + 1))  # lists of items have no lines
    for item, line in zip(message.item, lines, strict=False):
        names = [name for name in (item.display_name, item.name) if name]
        if not item.HasField("id") or not names:
            raise wrong(f"An item of a label map has no {'name' if item.HasField('id') else 'id'}.", line)
        if item.id == BACKGROUND and "background" in names:
            continue
        if item.id < 1:
            fix = "number the classes from 1, in the label map and in the records"
            raise wrong(f"A label map gives a class the id {item.id}.", line, "0 is TensorFlow's background", fix)
        items.append((item.id, names, line))
    if not items:
        raise wrong("A label map has no classes.")
    items.sort(key=lambda item: item[0])
    for (first_id, _, first_line), (second_id, _, line) in pairwise(items):
        if first_id == second_id:
            what = f"Two items of a label map have the id {first_id}."
            raise wrong(what, f"{first_line} and line {line}", fix="give each its own")
    index_by_name: dict[str, int] = {}
    for class_index, (_, names, line) in enumerate(items):
        for name in names:
            if (earlier := index_by_name.setdefault(name, class_index)) != class_index:
                what = f"Two items of a label map are called {name!r}."
                raise wrong(what, f"{items[earlier][2]} and line {line}", fix="give each class a name of its own")
    return LabelMap(path, [item[0] for item in items], [item[1][0] for item in items], index_by_name)


def label_map_text(class_names: Sequence[str]) -> str:
    """Returns the text of a label map that numbers the classes from 1."""
    from google.protobuf import text_format

    items = [{"id": class_id, "name": name} for class_id, name in enumerate(class_names, 1)]
    text: str = text_format.MessageToString(message_class("LabelMap")(item=items), as_utf8=True)
    return text
