"""The bytes of TFRecord files: frames with checksums, gzip, and the wire format of tf.train.Example.

A file is a sequence of records, each a little-endian uint64 length, the masked CRC-32C of those 8 bytes, the data, and
the masked CRC-32C of the data. There is no marker between records, so after a damaged length no record can be found.
Format: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details. Compressed shards are unpacked
once into `<cache folder>/shards/`, because gzip has no random access to an image; they may be deleted at any time.

The parser of examples works on a mapped file and returns byte ranges, so that the encoded image in a record is not
copied; this is why it does not use protobuf. Messages, from tensorflow/core/example/{example,feature}.proto:

    Example   { Features features = 1; }
    Features  { map<string, Feature> feature = 1; }        an entry is { key = 1; value = 2; }
    Feature   { oneof { BytesList = 1; FloatList = 2; Int64List = 3; } }
    BytesList { repeated bytes value = 1; }   FloatList, Int64List { repeated … value = 1; }, packed or not

Encoding: https://protobuf.dev/programming-guides/encoding/. Not here: the meaning of the features (`tfrecord.py`).
"""

import errno
import functools
import gzip
import mmap
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stoker import regular_files
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError, StorageError, needs_package
from stoker.storage.local_files import cache_folder

HEADER_BYTES, FOOTER_BYTES = 12, 4
_LENGTH, _CRC = struct.Struct("<Q"), struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8
"""tensorflow/core/lib/hash/crc32c.h: a stored CRC is rotated and shifted by this, so that the CRC of data that contains
CRCs stays a good checksum."""


class Frame(NamedTuple):
    """A record with correct checksums."""

    number: int
    """1 for the first record of the file; damaged ones count."""
    offset: int
    """The first byte of the record, which is the first of its length."""
    start: int
    """The first byte of its data."""
    stop: int
    """The byte after its data."""


@functools.cache
def _crc32c() -> Callable[[bytes], int]:
    with needs_package("google-crc32c", "Reading or writing TFRecords"):
        import google_crc32c
    value: Callable[[bytes], int] = google_crc32c.value
    return value


def masked_crc(data: bytes) -> int:
    """The CRC-32C of some bytes as TFRecords store it."""
    crc = _crc32c()(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def is_record_header(head: bytes) -> bool:
    """Whether the first 12 bytes of a file are a length with the correct checksum."""
    return len(head) >= HEADER_BYTES and masked_crc(head[:8]) == _CRC.unpack_from(head, 8)[0]


def frame_length(head: bytes) -> int:
    """The number of bytes of data that a record's first 12 bytes give."""
    length: int = _LENGTH.unpack_from(head)[0]
    return length


def iter_frames(data: mmap.mmap, shard: str, problems: ProblemCollector) -> Iterator[Frame]:
    """The undamaged records of a mapped file, in order. Copies no data.

    Damage is reported with byte offset and record number.
    """
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
                problems.add(
                    "damaged-shard", f"{location}: {reason}; the {total - offset:,} bytes from here on are left out"
                )
                return
            start = offset + HEADER_BYTES
            stop = start + frame_length(head)
            if stop + FOOTER_BYTES > total:
                missing = stop + FOOTER_BYTES - total
                problems.add("truncated-shard", f"{location}: the file ends {missing:,} bytes before the record does")
                return
            if masked_crc(view[start:stop]) == _CRC.unpack_from(data, stop)[0]:  # type: ignore[arg-type]
                yield Frame(number, offset, start, stop)
            else:
                problems.add("damaged-record", location)
            offset = stop + FOOTER_BYTES
    finally:
        del view  # a mapping with a view cannot be closed


def write_record(file: BinaryIO, data: bytes) -> None:
    """Appends a record. Raises OSError."""
    length = _LENGTH.pack(len(data))
    file.write(b"".join((length, _CRC.pack(masked_crc(length)), data, _CRC.pack(masked_crc(data)))))


_CHUNK_BYTES = 1 << 20
MAX_RECORD_BYTES = 1 << 31
"""Protobuf's limit of a message, and so of a record."""
MIN_FREE_BYTES = 1 << 28
"""What unpacking leaves free on the disk of the cache: 256 MiB."""


def unpacked_path(shard: Path) -> Path:
    """The unpacked file of a shard. Its name depends on the shard's path, size and modification time."""
    stat = shard.stat()
    key = f"{shard}\0{stat.st_size}\0{stat.st_mtime_ns}".encode("utf-8", "surrogateescape")
    return cache_folder() / "shards" / f"{shard.name[:80]}-{blake2b(key, digest_size=8).hexdigest()}"


def unpack(shard: Path) -> Path:
    """The unpacked file; unpacks it if it does not exist. Safe against kills and in several processes.

    Nothing is unpacked beyond the first frame that cannot be one: the reader of the unpacked file reports it, and a
    small file cannot fill the disk. Raises DataError if the gzip data are damaged, StorageError if the disk is full or
    would be.
    """
    target = unpacked_path(shard)
    if target.exists():
        return target
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with regular_files.open_file(shard) as raw, gzip.open(raw) as packed, temporary.open("wb") as file:
            _copy_frames(packed, file, target.parent)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            "A compressed shard is damaged.", location=shard, cause=str(error), fix="copy it again"
        ) from error
    except OSError as error:
        raise StorageError(
            "A compressed shard cannot be unpacked into the cache folder.",
            location=temporary,
            cause=f"{error.strerror or error}; {shard} has {shard.stat().st_size:,} bytes, and more when unpacked",
            fix="free disk space, or set STOKER_CACHE_DIR to a writable folder",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _copy_frames(packed: gzip.GzipFile, file: BinaryIO, folder: Path) -> None:
    """Copies the frames up to the end, or up to and with the header of the first that cannot be one. Raises OSError
    before the disk of `folder` is full."""
    while len(head := packed.read(HEADER_BYTES)) == HEADER_BYTES:
        file.write(head)
        remaining = frame_length(head) + FOOTER_BYTES
        if not is_record_header(head) or remaining > MAX_RECORD_BYTES:
            return
        while remaining and (chunk := packed.read(min(remaining, _CHUNK_BYTES))):
            if shutil.disk_usage(folder).free < MIN_FREE_BYTES + len(chunk):
                raise OSError(errno.ENOSPC, f"less than {MIN_FREE_BYTES:,} bytes would remain on the disk")
            file.write(chunk)
            remaining -= len(chunk)
    file.write(head)


Buffer: TypeAlias = mmap.mmap | bytes
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types."""
KINDS = {1: "bytes", 2: "floats", 3: "integers"}
"""Feature's oneof."""
Values: TypeAlias = Sequence[bytes] | Sequence[int] | NDArray[np.float32]


class MalformedExample(ValueError):
    """The bytes are not a tf.train.Example, or a feature has the wrong type."""


class ByteRange(NamedTuple):
    """Bytes [start, stop) of the file."""

    start: int
    stop: int


def parse_features(data: Buffer, start: int, stop: int) -> dict[bytes, ByteRange]:
    """The byte range of each key's Feature in the Example at bytes [start, stop). Raises MalformedExample."""
    ranges: dict[bytes, ByteRange] = {}
    for field_number, wire_type, begin, end in _iter_fields(data, start, stop):
        if field_number == 1 and wire_type == BYTES:
            entries = _parse_entries_fast(data, begin, end)
            ranges.update(_parse_entries(data, begin, end) if entries is None else entries)
    return ranges


def _parse_entries(data: Buffer, start: int, stop: int) -> dict[bytes, ByteRange]:
    """The map of a Features message. Key and value may be in any order, absent or repeated; skips unknown fields."""
    ranges: dict[bytes, ByteRange] = {}
    for entry_number, entry_wire, entry, entry_end in _iter_fields(data, start, stop):
        if entry_number != 1 or entry_wire != BYTES:
            continue
        key, value = b"", ByteRange(entry_end, entry_end)
        for field_number, wire_type, begin, end in _iter_fields(data, entry, entry_end):
            if wire_type == BYTES and field_number == 1:
                key = data[begin:end]
            elif wire_type == BYTES and field_number == 2:
                value = ByteRange(begin, end)
        ranges[key] = value
    return ranges


def _parse_entries_fast(data: Buffer, offset: int, stop: int) -> dict[bytes, ByteRange] | None:
    """The same in a third of the time, for the usual layout of entries: a key below 128 bytes, then the value.

    None if an entry has another layout.
    """
    ranges: dict[bytes, ByteRange] = {}
    last = stop - 1
    while offset < stop:
        if offset + 4 > last or data[offset] != 0x0A:
            return None
        length = data[offset + 1]
        offset += 2
        if length >= 0x80:
            length, offset = _read_varint(data, offset - 1, stop)
        end = offset + length
        if length < 4 or end > stop or data[offset] != 0x0A or data[offset + 1] >= 0x80:
            return None
        key = offset + 2
        offset = key + data[offset + 1]
        if offset + 1 >= end or data[offset] != 0x12:
            return None
        name = data[key:offset]
        length = data[offset + 1]
        offset += 2
        if length >= 0x80:
            length, offset = _read_varint(data, offset - 1, end)
        if offset + length != end:
            return None
        ranges[name] = ByteRange(offset, end)
        offset = end
    return ranges


def find_byte_values(data: Buffer, feature: ByteRange | None) -> list[ByteRange]:
    """The byte ranges of a bytes feature's values; none if it is absent or empty. Raises MalformedExample."""
    return _find_values(data, feature, 1, (BYTES,))


def read_floats(data: Buffer, feature: ByteRange | None) -> bytes:
    """The values of a float feature as little-endian float32, 4 bytes each. Raises MalformedExample."""
    values = b"".join(data[start:stop] for start, stop in _find_values(data, feature, 2, (BYTES, FIXED32)))
    if len(values) % 4:
        raise MalformedExample("a packed list of floats is not a multiple of 4 bytes long")
    return values


def read_integers(data: Buffer, feature: ByteRange | None) -> list[int]:
    """The values of an int64 feature. Raises MalformedExample."""
    values: list[int] = []
    for offset, end in _find_values(data, feature, 3, (BYTES, VARINT)):
        packed = data[offset:end]
        if packed.isascii():  # every value is below 128, one byte each
            values += packed
            continue
        while offset < end:
            value, offset = _read_varint(data, offset, end)
            values.append(value - (1 << 64) if value >> 63 else value)
    return values


def _find_values(data: Buffer, feature: ByteRange | None, kind: int, wire_types: tuple[int, ...]) -> list[ByteRange]:
    """The values of a Feature, or packed ones; none if it is absent or empty. Raises MalformedExample."""
    if feature is None:
        return []
    if (single := _find_single_list(data, feature, kind << 3 | BYTES)) is not None:
        return [single]
    return [
        ByteRange(begin, end)
        for start, stop in _find_lists(data, feature, kind)
        for field_number, wire_type, begin, end in _iter_fields(data, start, stop)
        if field_number == 1 and wire_type in wire_types
    ]


def _find_single_list(data: Buffer, feature: ByteRange, tag: int) -> ByteRange | None:
    """The value of a Feature that is one list (of the kind of `tag`) with one value or packed ones; None for any other.

    Almost every Feature is. Takes a quarter of the time of `_find_lists` and `_iter_fields`.
    """
    offset, stop = feature
    if stop - offset < 4 or data[offset] != tag:
        return None
    length = data[offset + 1]
    offset += 2
    if length >= 0x80:
        length, offset = _read_varint(data, offset - 1, stop)
    if offset + length != stop or length < 2 or data[offset] != 0x0A:
        return None
    length = data[offset + 1]
    offset += 2
    if length >= 0x80:
        length, offset = _read_varint(data, offset - 1, stop)
    return ByteRange(offset, stop) if offset + length == stop else None


def _find_lists(data: Buffer, feature: ByteRange, kind: int) -> list[ByteRange]:
    """The lists of a Feature. It is almost always one; several of a kind are concatenated."""
    ranges: list[ByteRange] = []
    actual_kind = kind
    for field_number, wire_type, begin, end in _iter_fields(data, feature.start, feature.stop):
        if wire_type == BYTES and field_number in KINDS:
            if field_number != actual_kind:  # the last one of a oneof counts
                ranges, actual_kind = [], field_number
            ranges.append(ByteRange(begin, end))
    if actual_kind != kind and any(stop > start for start, stop in ranges):
        raise MalformedExample(f"it contains {KINDS[actual_kind]}, not {KINDS[kind]}")
    return ranges if actual_kind == kind else []


def _iter_fields(data: Buffer, offset: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """(field number, wire type, first byte, byte after it) of each field of the message at bytes [offset, stop)."""
    while offset < stop:
        tag = data[offset]
        offset += 1
        if tag >= 0x80:
            tag, offset = _read_varint(data, offset - 1, stop)
        wire_type = tag & 7
        if wire_type == BYTES:
            if offset >= stop:
                raise MalformedExample(f"a field is cut off at byte {offset:,}")
            length = data[offset]
            offset += 1
            if length >= 0x80:
                length, offset = _read_varint(data, offset - 1, stop)
            end = offset + length
        elif wire_type == VARINT:
            _, end = _read_varint(data, offset, stop)
        elif wire_type in (FIXED32, FIXED64):
            end = offset + (4 if wire_type == FIXED32 else 8)
        else:
            raise MalformedExample(f"unknown wire type {wire_type}, at byte {offset - 1:,}")
        if end > stop or tag < 8:
            raise MalformedExample(f"a field is cut off or has no number, at byte {offset - 1:,}")
        yield tag >> 3, wire_type, offset, end
        offset = end


def _read_varint(data: Buffer, offset: int, stop: int) -> tuple[int, int]:
    """(value in 0 … 2^64 - 1, the byte after it)."""
    value = shift = 0
    while offset < stop and shift < 70:
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, offset
        shift += 7
    raise MalformedExample(f"a number is cut off or too long, at byte {offset - 1:,}")


def encode_example(values: Mapping[str, Values]) -> bytes:
    """The bytes of an Example with the given features: lists of byte strings or int64, or an array of float32.

    An empty list is left out: this means the same, and cannot have a type that a reader does not expect.
    """
    entries = []
    for key, value in sorted(values.items()):
        if not len(value):
            continue
        if isinstance(value, np.ndarray):
            kind, data = 2, _encode_field(1, value.astype("<f4").tobytes())
        elif isinstance(value[0], bytes):
            kind, data = 1, b"".join(_encode_field(1, item) for item in value if isinstance(item, bytes))
        else:
            numbers = b"".join(_encode_varint(item & 0xFFFFFFFFFFFFFFFF) for item in value if isinstance(item, int))
            kind, data = 3, _encode_field(1, numbers)
        entries.append(_encode_field(1, _encode_field(1, key.encode()) + _encode_field(2, _encode_field(kind, data))))
    return _encode_field(1, b"".join(entries))


def _encode_field(field_number: int, payload: bytes) -> bytes:
    return b"".join((_encode_varint(field_number << 3 | BYTES), _encode_varint(len(payload)), payload))


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
