"""Bounds what a Parquet file expands to, from the headers of its pages, before pyarrow unpacks any.

A page of a few hundred bytes can unpack to 2 GiB, and stand for as many values. The sums at the end of the file may say
something else, and pyarrow checks neither, so the headers themselves are read: Thrift's compact protocol, as in
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift. So are the chunks in the footer:
`RowGroupMetaData.column` of pyarrow, up to 26.0.1 at least, ends the process where their statistics are damaged: after
9 of 3,208 changes of a byte in the footer of a small file. Not here: the rows (`parquet.py`).
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from stoker.data.images.headers import ReadAt

MAX_PAGE_BYTES, MAX_PAGE_RATIO = 1 << 27, 4
"""A page may unpack to the first, or to so many times its packed size: encoded images hardly become smaller."""
MIN_VALUES, BYTES_PER_VALUE = 1 << 20, 4
"""A file may have the first number of values, and one more per so many bytes: a box with its class, area and number is
seven, and next to the boxes there are images."""
MIN_UNPACKED_BYTES, MAX_RATIO = 1 << 26, 16
"""All images of a file, or all texts, may have the sum of the first and of so many times the file's size."""
MAX_FIXED_BYTES = 64
"""Of a value of fixed size: decimals have up to 32 bytes."""
_HEADER_BYTES, _MAX_HEADER_BYTES = 1 << 12, 1 << 20
"""A header with the least and largest value of its page can have some KB."""

_MAX_DEPTH = 8
"""Of structures in one another; the deepest is the unit of a logical type."""
_DELTA_BYTE_ARRAY = 7


class Chunk(NamedTuple):
    """The values of a column in a row group, as the footer has them."""

    starts: tuple[int, ...]
    """Bytes at which the data and the dictionary begin."""
    num_values: int
    encodings: tuple[int, ...]


Footer = list[list[Chunk]]
"""Row group → column → chunk."""


def read_footer(read: ReadAt, size_bytes: int, metadata: pq.FileMetaData) -> Footer:
    """Returns the chunks of a file. Raises ArrowInvalid for a footer that cannot be read, or has other columns than
    `metadata`."""
    tail = read(max(0, size_bytes - 8), 8)
    length = int.from_bytes(tail[:4], "little")
    footer: Footer = []
    try:
        if tail[4:] != b"PAR1" or not 0 < length <= size_bytes - 8:
            raise ValueError("no footer")
        for group in _read_struct(read(size_bytes - 8 - length, length), 0)[0].get(4, []):
            columns = [column[3] for column in group[1]]
            footer.append([Chunk((c[9], c[11]) if 11 in c else (c[9],), c[5], tuple(c[2])) for c in columns])
            if len(columns) != metadata.num_columns or not all(
                isinstance(n, int) for chunk in footer[-1] for n in (*chunk.starts, chunk.num_values, *chunk.encodings)
            ):
                raise ValueError("a row group with other columns")
    except (IndexError, KeyError, TypeError, AttributeError, ValueError, OverflowError):
        raise pa.ArrowInvalid("the description of its row groups at the end of the file cannot be read") from None
    return footer


def max_unpacked_bytes(size_bytes: int) -> int:
    """Returns the most bytes that all images, or all texts, of a file of this size may have."""
    return MIN_UNPACKED_BYTES + MAX_RATIO * size_bytes


def check_pages(
    read: ReadAt, size_bytes: int, metadata: pq.FileMetaData, footer: Footer, columns: Collection[str]
) -> int:
    """Returns the bytes of the largest unpacked page of these top-level columns: no single value is larger. Raises
    ArrowInvalid for pages that expand, have too many values, or cannot be read."""
    largest = values = 0
    for number in range(metadata.num_columns):
        leaf = metadata.schema.column(number)
        if leaf.path.partition(".")[0] not in columns:
            continue
        if leaf.physical_type == "FIXED_LEN_BYTE_ARRAY" and leaf.length > MAX_FIXED_BYTES:
            size = f"{leaf.length:,} bytes; at most {MAX_FIXED_BYTES} are read"
            raise pa.ArrowInvalid(f"{leaf.path} has values of {size}")
        for group in footer:
            chunk = group[number]
            offset, remaining = min(filter(None, chunk.starts), default=0), chunk.num_values
            while remaining > 0:
                unpacked, packed, num_values, length = _read_header(read, offset, leaf.path)
                if unpacked > max(MAX_PAGE_BYTES, MAX_PAGE_RATIO * packed):
                    raise pa.ArrowInvalid(
                        f"{leaf.path}: the page at byte {offset:,} has {packed:,} bytes and would have {unpacked:,} "
                        f"unpacked; at most {MAX_PAGE_BYTES:,} are read. Write it with a smaller row_group_size"
                    )
                largest, values = max(largest, unpacked), values + num_values
                if values > MIN_VALUES + size_bytes // BYTES_PER_VALUE:
                    raise pa.ArrowInvalid(f"{leaf.path}: {values:,} values up to here are too many for its size")
                offset, remaining = offset + length + packed, remaining - num_values
    return largest


def texts_of(metadata: pq.FileMetaData, footer: Footer, columns: Collection[str], *, but: Collection[str]) -> list[str]:
    """Returns the texts and byte strings in these top-level columns, to be read as dictionaries: a text that is
    repeated in all rows is then in memory once, until `text_bytes` has counted it. pyarrow cannot do that with encoding
    DELTA_BYTE_ARRAY, which is read as it is where a row has one value."""
    found = []
    for number in range(metadata.num_columns):
        leaf = metadata.schema.column(number)
        if leaf.physical_type != "BYTE_ARRAY" or leaf.path in but or leaf.path.partition(".")[0] not in columns:
            continue
        if leaf.max_repetition_level or not any(_DELTA_BYTE_ARRAY in group[number].encodings for group in footer):
            found.append(leaf.path)
    return found


def text_bytes(values: pa.Array) -> int:
    """Returns the bytes that the texts in an array of any depth have, each as often as it is there."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        return int(pc.sum(pc.take(pc.binary_length(values.dictionary), values.indices)).as_py() or 0)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return int(pc.sum(pc.binary_length(values)).as_py() or 0)
    if pa.types.is_struct(kind):
        return sum(map(text_bytes, values.flatten()))
    return text_bytes(values.flatten()) if pa.types.is_nested(kind) else 0


def _read_header(read: ReadAt, offset: int, name: str) -> tuple[int, int, int, int]:
    """(unpacked bytes, packed bytes, values, bytes of the header) of a page. A dictionary has no values of rows."""
    for limit in (_HEADER_BYTES, _MAX_HEADER_BYTES):
        try:
            header, length = _read_struct(read(offset, limit), 0)
            data = header.get(5) or header.get(8) or {}
            numbers = header[2], header[3], data.get(1, 0), length
            if header[1] in (0, 3) and 1 not in data:
                break
        except (IndexError, KeyError, TypeError, AttributeError, ValueError, OverflowError):
            continue
        if all(isinstance(number, int) and number >= 0 for number in numbers):
            return numbers
    raise pa.ArrowInvalid(f"{name}: the page at byte {offset:,} has a header that cannot be read")


def _read_struct(data: bytes, at: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """(field → value, the position after it). Raises IndexError at the end of the data, ValueError for other types."""
    fields, field = dict[int, Any](), 0
    while byte := data[at]:
        kind, step = byte & 15, byte >> 4
        field, at = (field + step, at + 1) if step else _read_number(data, at + 1)
        if kind in (1, 2):  # a truth value, which has no bytes
            value: Any = kind == 1
        else:
            value, at = _read_value(data, at, kind, depth)
        if field in fields:  # readers do not agree on which one counts
            raise ValueError(f"field {field} twice")
        fields[field] = value
    return fields, at + 1


def _read_value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    """Returns a value of this type of Thrift, None for a text; and the position after it."""
    if kind == 3:  # a byte
        return data[at], at + 1
    if kind in (4, 5, 6):
        return _read_number(data, at)
    if kind == 8:
        length, at = _read_number(data, at, is_signed=False)
        return None, at + length
    if kind == 12 and depth < _MAX_DEPTH:
        return _read_struct(data, at, depth + 1)
    if kind == 9 and depth < _MAX_DEPTH:
        count, kind, at = data[at] >> 4, data[at] & 15, at + 1
        if count == 15:
            count, at = _read_number(data, at, is_signed=False)
        if kind in (1, 2, 3):  # a byte each
            return None, at + count
        values = []
        for _ in range(count):  # each takes a byte or more, so the end of the data ends this
            value, at = _read_value(data, at, kind, depth + 1)
            values.append(value)
        return values, at
    raise ValueError(f"a value of type {kind}")


def _read_number(data: bytes, at: int, *, is_signed: bool = True) -> tuple[int, int]:
    """Returns a varint of up to 64 bits, and the position after it."""
    number = 0
    for shift in range(0, 70, 7):
        byte, at = data[at], at + 1
        number |= (byte & 127) << shift
        if byte < 128:
            return ((number >> 1) ^ -(number & 1) if is_signed else number), at
    raise ValueError("a number of more than 64 bits")
