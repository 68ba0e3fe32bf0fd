"""The wire format of tf.train.Example: finds the features of a record, reads their values, encodes new records.

The reader works on a mapped file and returns byte ranges, so that the encoded image in a record is not copied; this is
why it does not use protobuf. Messages, from tensorflow/core/example/{example,feature}.proto:

    Example   { Features features = 1; }
    Features  { map<string, Feature> feature = 1; }        an entry is { key = 1; value = 2; }
    Feature   { oneof { BytesList = 1; FloatList = 2; Int64List = 3; } }
    BytesList { repeated bytes value = 1; }   FloatList, Int64List { repeated … value = 1; }, packed or not

Encoding: https://protobuf.dev/programming-guides/encoding/. Not here: the meaning of the features (`tfrecord.py`).
"""

import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

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


def encode(values: Mapping[str, Values]) -> bytes:
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
