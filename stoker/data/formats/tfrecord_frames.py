"""The frames of a TFRecord file: where its records lie, every checksum compared; and writing them.

A file is a sequence of records, each a little-endian uint64 length, the masked CRC-32C of those 8 bytes, the data, and
the masked CRC-32C of the data. There is no mark between records, so behind a damaged length nothing can be found.
Format: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details. Not here: what is in the data
(`tf_example.py`), which files there are (`tfrecord_files.py`).
"""

import mmap
import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import google_crc32c
import numpy as np

from stoker.data.validation.problems import ProblemCollector

HEADER_BYTES, FOOTER_BYTES = 12, 4
_LENGTH, _CRC = struct.Struct("<Q"), struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8
"""tensorflow/core/lib/hash/crc32c.h: a CRC that is stored is rotated and shifted by this, so that the CRC of data that
holds CRCs stays a good one."""


class Frame(NamedTuple):
    """A record whose checksums are right."""

    number: int
    """1 for the first record of the file; damaged ones count."""
    offset: int
    """The first byte of the record, that of its length."""
    start: int
    """The first byte of its data."""
    stop: int
    """The byte behind its data."""


def masked_crc(data: bytes) -> int:
    """The CRC-32C of some bytes as TFRecords store it."""
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def is_record_header(head: bytes) -> bool:
    """Whether the first 12 bytes of a file are a length with the right checksum."""
    return len(head) >= HEADER_BYTES and masked_crc(head[:8]) == _CRC.unpack_from(head, 8)[0]


def iter_frames(data: mmap.mmap, shard: str, problems: ProblemCollector) -> Iterator[Frame]:
    """The sound records of a mapped file, in order. What is damaged is put into `problems` with byte and record number;
    no byte is copied."""
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
                reason = (
                    "it does not begin as a TFRecord does" if number == 1 else "the checksum of its length is wrong"
                )
                problems.add(
                    "damaged-shard", f"{location}: {reason}; the {total - offset:,} bytes from there on are left out"
                )
                return
            start = offset + HEADER_BYTES
            stop = start + _LENGTH.unpack_from(head)[0]
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
        del view  # a mapping that is looked at cannot be closed


def write_record(file: BinaryIO, data: bytes) -> None:
    """Appends a record. Raises OSError."""
    length = _LENGTH.pack(len(data))
    file.write(b"".join((length, _CRC.pack(masked_crc(length)), data, _CRC.pack(masked_crc(data)))))
