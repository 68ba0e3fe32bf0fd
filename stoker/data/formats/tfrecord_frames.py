"""The frames of a TFRecord file: finds its records, verifies every checksum, writes records.

A file is a sequence of records, each a little-endian uint64 length, the masked CRC-32C of those 8 bytes, the data, and
the masked CRC-32C of the data. There is no marker between records, so after a damaged length no record can be found.
Format: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details. Not here: parsing the data
(`tf_example.py`), finding the files (`tfrecord_files.py`).
"""

import functools
import mmap
import struct
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

import numpy as np

from stoker.data.validation.problems import ProblemCollector
from stoker.errors import needs_package

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
