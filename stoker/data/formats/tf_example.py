"""tf.train.Example on the wire: where each feature of a record lies, its values, and the bytes of a new one.

The reader is given a mapped file and hands out positions in it, so the encoded picture inside a record is found and not
copied. Messages, as tensorflow/core/example/{example,feature}.proto have them:

    Example   { Features features = 1; }
    Features  { map<string, Feature> feature = 1; }        an entry is { key = 1; value = 2; }
    Feature   { oneof { BytesList = 1; FloatList = 2; Int64List = 3; } }
    BytesList { repeated bytes value = 1; }   FloatList, Int64List { repeated … value = 1; }, packed or not

Encoding: https://protobuf.dev/programming-guides/encoding/. Not here: what the features mean (`tfrecord.py`).
"""

import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Content: TypeAlias = mmap.mmap | bytes
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types."""
KINDS = {1: "bytes", 2: "floats", 3: "integers"}
"""Feature's oneof."""
Values: TypeAlias = Sequence[bytes] | Sequence[int] | NDArray[np.float32]


class Malformed(ValueError):
    """The bytes are no tf.train.Example, or a feature has another type than it should."""


class Span(NamedTuple):
    """Bytes [start, stop) of the content."""

    start: int
    stop: int


def features(content: Content, start: int, stop: int) -> dict[bytes, Span]:
    """Where the Feature of each key lies, in the Example that bytes [start, stop) are. Raises Malformed."""
    found: dict[bytes, Span] = {}
    for number, wire, begin, end in _fields(content, start, stop):
        if number == 1 and wire == BYTES:
            usual = _usual_entries(content, begin, end)
            found.update(_entries(content, begin, end) if usual is None else usual)
    return found


def _entries(content: Content, start: int, stop: int) -> dict[bytes, Span]:
    """The map of a Features message: its entries in any order, key or value absent or there twice, unknown fields."""
    found: dict[bytes, Span] = {}
    for entry_number, entry_wire, entry, entry_end in _fields(content, start, stop):
        if entry_number != 1 or entry_wire != BYTES:
            continue
        key, value = b"", Span(entry_end, entry_end)
        for number, wire, begin, end in _fields(content, entry, entry_end):
            if wire == BYTES and number == 1:
                key = content[begin:end]
            elif wire == BYTES and number == 2:
                value = Span(begin, end)
        found[key] = value
    return found


def _usual_entries(content: Content, at: int, stop: int) -> dict[bytes, Span] | None:
    """The same in a third of the time, where the entries are as every writer lays them out: a key below 128 bytes and
    then the value. None where one is not."""
    found: dict[bytes, Span] = {}
    last = stop - 1
    while at < stop:
        if at + 4 > last or content[at] != 0x0A:
            return None
        length = content[at + 1]
        at += 2
        if length >= 0x80:
            length, at = _varint(content, at - 1, stop)
        end = at + length
        if length < 4 or end > stop or content[at] != 0x0A or content[at + 1] >= 0x80:
            return None
        key = at + 2
        at = key + content[at + 1]
        if at + 1 >= end or content[at] != 0x12:
            return None
        name = content[key:at]
        length = content[at + 1]
        at += 2
        if length >= 0x80:
            length, at = _varint(content, at - 1, end)
        if at + length != end:
            return None
        found[name] = Span(at, end)
        at = end
    return found


def byte_strings(content: Content, feature: Span | None) -> list[Span]:
    """Where the values of a bytes feature lie; none where it is None (absent) or empty. Raises Malformed."""
    if feature is None:
        return []
    if (only := _only_value(content, feature, 0x0A)) is not None:
        return [only]
    return [
        Span(begin, end)
        for start, stop in _lists(content, feature, 1)
        for number, wire, begin, end in _fields(content, start, stop)
        if number == 1 and wire == BYTES
    ]


def floats(content: Content, feature: Span | None) -> bytes:
    """The values of a float feature as little-endian float32, 4 bytes each. Raises Malformed."""
    if feature is None:
        return b""
    if (only := _only_value(content, feature, 0x12)) is not None:
        values = content[only[0] : only[1]]
    else:
        values = b"".join(
            content[begin:end]
            for start, stop in _lists(content, feature, 2)
            for number, wire, begin, end in _fields(content, start, stop)
            if number == 1 and wire in (BYTES, FIXED32)
        )
    if len(values) % 4:
        raise Malformed("a packed list of floats is not a multiple of 4 bytes long")
    return values


def integers(content: Content, feature: Span | None) -> list[int]:
    """The values of an int64 feature. Raises Malformed."""
    if feature is None:
        return []
    if (only := _only_value(content, feature, 0x1A)) is not None:
        pieces = [only]
    else:
        pieces = [
            Span(begin, end)
            for start, stop in _lists(content, feature, 3)
            for number, wire, begin, end in _fields(content, start, stop)
            if number == 1 and wire in (BYTES, VARINT)
        ]
    values: list[int] = []
    for at, end in pieces:
        packed = content[at:end]
        if packed.isascii():  # every value below 128: a byte each
            values += packed
            continue
        while at < end:
            value, at = _varint(content, at, end)
            values.append(value - (1 << 64) if value >> 63 else value)
    return values


def _only_value(content: Content, feature: Span, tag: int) -> Span | None:
    """The value of a Feature that is one list (of the kind of `tag`) with one value or all of them packed, as nearly
    every Feature is; None where it is anything else. It takes a quarter of the time of `_lists` and `_fields`."""
    at, stop = feature
    if stop - at < 4 or content[at] != tag:
        return None
    length = content[at + 1]
    at += 2
    if length >= 0x80:
        length, at = _varint(content, at - 1, stop)
    if at + length != stop or length < 2 or content[at] != 0x0A:
        return None
    length = content[at + 1]
    at += 2
    if length >= 0x80:
        length, at = _varint(content, at - 1, stop)
    return Span(at, stop) if at + length == stop else None


def _lists(content: Content, feature: Span, kind: int) -> list[Span]:
    """The lists of a Feature, nearly always one: several of a kind are one that was cut in pieces."""
    found: list[Span] = []
    is_kind = kind
    for number, wire, begin, end in _fields(content, feature.start, feature.stop):
        if wire == BYTES and number in KINDS:
            if number != is_kind:  # of a oneof the last one counts
                found, is_kind = [], number
            found.append(Span(begin, end))
    if is_kind != kind and any(stop > start for start, stop in found):
        raise Malformed(f"it holds {KINDS[is_kind]}, not {KINDS[kind]}")
    return found if is_kind == kind else []


def _fields(content: Content, at: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """(field number, wire type, first byte, byte behind) of each field of the message that [at, stop) is."""
    while at < stop:
        tag = content[at]
        at += 1
        if tag >= 0x80:
            tag, at = _varint(content, at - 1, stop)
        wire = tag & 7
        if wire == BYTES:
            if at >= stop:
                raise Malformed(f"a field is cut off at byte {at:,}")
            length = content[at]
            at += 1
            if length >= 0x80:
                length, at = _varint(content, at - 1, stop)
            end = at + length
        elif wire == VARINT:
            _, end = _varint(content, at, stop)
        elif wire in (FIXED32, FIXED64):
            end = at + (4 if wire == FIXED32 else 8)
        else:
            raise Malformed(f"there is no wire type {wire}, at byte {at - 1:,}")
        if end > stop or tag < 8:
            raise Malformed(f"a field is cut off or has no number, at byte {at - 1:,}")
        yield tag >> 3, wire, at, end
        at = end


def _varint(content: Content, at: int, stop: int) -> tuple[int, int]:
    """(value in 0 … 2^64 - 1, the byte behind it)."""
    value = shift = 0
    while at < stop and shift < 70:
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
    raise Malformed(f"a number is cut off or too long, at byte {at - 1:,}")


def encode(values: Mapping[str, Values]) -> bytes:
    """The bytes of an Example with the given features: byte strings, int64 or an array of float32, each a list. A list
    without values is left out, which means the same and cannot be of another type than a reader expects."""
    entries = []
    for key, value in sorted(values.items()):
        if not len(value):
            continue
        if isinstance(value, np.ndarray):
            kind, content = 2, _field(1, value.astype("<f4").tobytes())
        elif isinstance(value[0], bytes):
            kind, content = 1, b"".join(_field(1, item) for item in value if isinstance(item, bytes))
        else:
            numbers = b"".join(_as_varint(item & 0xFFFFFFFFFFFFFFFF) for item in value if isinstance(item, int))
            kind, content = 3, _field(1, numbers)
        entries.append(_field(1, _field(1, key.encode()) + _field(2, _field(kind, content))))
    return _field(1, b"".join(entries))


def _field(number: int, data: bytes) -> bytes:
    return b"".join((_as_varint(number << 3 | BYTES), _as_varint(len(data)), data))


def _as_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
