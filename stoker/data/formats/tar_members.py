"""The files in a tar archive, without reading their content: names and byte ranges.

POSIX.1-1988 (ustar), pax and GNU archives without compression, as WebDataset's writer, Python's `tarfile` and `tar`
make them. Format: https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html#tag_20_92_13. Here also: the
header of a file, for writing. Not here: samples (`webdataset.py`).
"""

import tarfile
from collections.abc import Iterator
from typing import NamedTuple

from stoker.data.images.headers import ReadAt

BLOCK = 512
END = bytes(2 * BLOCK)
"""What ends an archive."""
MAX_NAME_BYTES = 1 << 16
"""Longest name or pax header that is read."""


class Member(NamedTuple):
    name: str
    start: int
    length: int


class DamagedArchive(Exception):
    """The archive cannot be read from (byte) on; the message says why."""


class TruncatedArchive(DamagedArchive):
    """The archive ends within a file."""


def iter_members(read: ReadAt, total_bytes: int) -> Iterator[Member]:
    """The regular files, in order. Raises DamagedArchive after those before the damage."""
    offset, pax, long_name = 0, dict[str, str](), ""
    while offset < total_bytes:
        block = read(offset, BLOCK)
        if len(block) < BLOCK:
            raise TruncatedArchive(f"it ends at byte {total_bytes:,}, within a header")
        if not any(block):
            return
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise DamagedArchive(f"byte {offset:,}: {error}") from error
        start, length = offset + BLOCK, header.size
        if header.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            if not 0 <= length <= MAX_NAME_BYTES:
                raise DamagedArchive(f"byte {offset:,}: a header of {length:,} bytes")
            content = read(start, length)
            if header.type == tarfile.XHDTYPE:
                pax = _parse_pax(content, offset)
            elif header.type == tarfile.GNUTYPE_LONGNAME:
                long_name = content.rstrip(b"\0").decode("utf-8", "surrogateescape")
        else:
            if "size" in pax and pax["size"].isdigit():
                length = int(pax["size"])
            if length < 0 or start + length > total_bytes:
                raise TruncatedArchive(f"it ends at byte {total_bytes:,}, within {header.name}")
            if header.isreg():
                yield Member(pax.get("path") or long_name or header.name, start, length)
            elif header.type not in tarfile.SUPPORTED_TYPES:
                raise DamagedArchive(f"byte {offset:,}: a file of the unknown type {header.type!r}")
            else:
                length = 0  # a folder or a link has no content
            pax, long_name = {}, ""
        offset = start + padded(length)


def _parse_pax(content: bytes, offset: int) -> dict[str, str]:
    """Records "LENGTH KEY=VALUE\\n"."""
    values: dict[str, str] = {}
    while content:
        digits, _, _ = content.partition(b" ")
        if not digits.isdigit() or not len(digits) < int(digits) <= len(content):
            raise DamagedArchive(f"byte {offset:,}: a pax header that cannot be read")
        key, _, value = content[len(digits) + 1 : int(digits) - 1].partition(b"=")
        values[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        content = content[int(digits) :]
    return values


def padded(length: int) -> int:
    """The bytes that a file of `length` bytes takes after its header."""
    return -(-length // BLOCK) * BLOCK


def header(name: str, length: int) -> bytes:
    """The header of a file: the same bytes wherever and whenever it is written. The name must be short ASCII."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = length, 0o644, 0
    return info.tobuf(tarfile.USTAR_FORMAT)
