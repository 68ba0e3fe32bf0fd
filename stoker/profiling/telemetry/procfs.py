"""Small files of /proc and /sys, read at a third of pathlib's price: a sample of the witness reads hundreds of them."""

import os

_PIECE = 2048
"""A first piece that is shorter is all: the kernel fills a page as far as whole records of a list go, and none is half
a page long (fs/seq_file.c)."""


def read(path: str) -> bytes:
    """The whole file. Raises OSError.

    The kernel gives a page of most at a time, however much is asked for: a list that is longer comes in pieces.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        whole = os.read(handle, 65536)
        more = len(whole) >= _PIECE
        while more:
            piece = os.read(handle, 65536)
            whole += piece
            more = bool(piece)
        return whole
    finally:
        os.close(handle)


def read_or_none(path: str) -> bytes | None:
    """None where the file is absent, hidden from us, or not answered."""
    try:
        return read(path)
    except OSError:
        return None


def text_or_none(path: str) -> str | None:
    """Without the blanks around it; None where there is nothing."""
    told = read_or_none(path)
    return None if told is None else told.decode(errors="replace").strip() or None


def number_of(text: bytes, key: bytes) -> int:
    """The number behind `key`; 0 where it is absent."""
    _, _, rest = text.partition(key)
    word = rest.split(maxsplit=1)
    return int(word[0]) if word else 0
