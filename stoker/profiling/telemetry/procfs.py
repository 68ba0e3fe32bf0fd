"""Small files of /proc and /sys, read at a third of pathlib's price: a sample of the witness reads hundreds of them."""

import os

_CHUNK_BYTES = 2048
"""A first piece that is shorter is all: the kernel fills a page as far as whole records of a list go, and none is half
a page long (fs/seq_file.c)."""


def read(path: str) -> bytes:
    """The whole file. Raises OSError.

    The kernel gives a page of most at a time, however much is asked for: a list that is longer comes in pieces.
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
    """None where the file is absent, hidden from us, or not answered."""
    try:
        return read(path)
    except OSError:
        return None


def read_text_or_none(path: str) -> str | None:
    """Without the blanks around it; None where there is nothing."""
    data = read_or_none(path)
    return None if data is None else data.decode(errors="replace").strip() or None


def parse_number(text: bytes, key: bytes) -> int:
    """The number behind `key`; 0 where it is absent."""
    _, _, rest = text.partition(key)
    fields = rest.split(maxsplit=1)
    return int(fields[0]) if fields else 0
